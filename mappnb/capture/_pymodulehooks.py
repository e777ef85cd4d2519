"""Hooks on modules and on the gradients between them, in pure Python: the twin of csrc/module_hooks_py.cpp."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Final, Protocol

from mappnb.capture._record import RecorderCore

__all__ = ["Hook", "Hooks", "NoHook", "PyModuleHooks", "new_key"]

Sites = tuple[int, int, int, int]
Before = Callable[[Any, tuple[Any, ...], dict[str, Any]], None]
After = Callable[[], None]
Begin = Callable[[int], int]
End = Callable[[int], None]
Fail = Callable[[str, BaseException], None]

_MAX_OLD: Final = 64  # unfinished passes of earlier generations that a tensor keeps
_KEYS = itertools.count(-1, -1)


def new_key() -> int:
    """Key of one recording's hooks in the dictionaries that tensors have; torch's own count up from 0."""
    return next(_KEYS)


class Hook(Protocol):
    """The two forward hooks of one module."""

    @property
    def pre(self) -> Callable[..., None]:
        """Called before the forward with module, arguments and keyword arguments."""
        ...

    @property
    def post(self) -> Callable[..., None]:
        """Called after the forward with module, arguments and output."""
        ...

    @property
    def num_open(self) -> int:
        """Calls that are open."""
        ...

    def drop(self) -> None:
        """Forget calls that exceptions left open."""
        ...


class Hooks(Protocol):
    """What ``mappnb._core.ModuleHooks`` and its twin :class:`PyModuleHooks` both offer."""

    muted: bool
    backward_index: int

    def hook(self, sites: Sites, backward: bool, before: Before | None, after: After | None, keyword: str) -> Hook:
        """Make the hooks of one module."""
        ...

    def has_gradient(self, value: Any) -> bool:
        """Whether autograd will give a gradient for ``value``."""
        ...

    def boundary(self, tensor: Any) -> Callable[[Any], None]:
        """Return the boundary at ``tensor``, hooked to its gradient the first time."""
        ...

    def forget(self) -> None:
        """Make the passes until now those of an earlier generation."""
        ...

    def end_tails(self) -> None:
        """End the backward of modules whose input has no gradient."""
        ...

    def close(self) -> None:
        """Let go of the session: tensors may live longer than it."""
        ...


class _Pass:
    """The backward pass through one call of one module: begun when its output's gradient is there."""

    __slots__ = ("begun", "sites", "start_ns", "tail", "token")

    def __init__(self, sites: Sites) -> None:
        self.sites = sites
        self.token = 0
        self.start_ns = -1
        self.tail = False
        self.begun = False


class _Passes:
    """Passes tied to a tensor: what earlier generations left, then those of the present one, the innermost first."""

    __slots__ = ("num_old", "steps")

    def __init__(self) -> None:
        self.steps: list[_Pass] = []
        self.num_old = 0

    def add(self, step: _Pass) -> None:
        self.steps.insert(self.num_old, step)

    def renew(self, done: Callable[[_Pass], bool]) -> None:
        self.steps = [step for step in self.steps if not done(step)][-_MAX_OLD:]
        self.num_old = len(self.steps)


class PyBoundary:
    """A tensor between modules: when its gradient is there, passes end (inner first) and begin (outer first).

    Called by autograd with the gradient, which it leaves as it is.
    """

    __slots__ = ("ends", "generation", "owner", "starts")
    __torch_unserializable__ = True

    def __init__(self, owner: PyModuleHooks) -> None:
        self.owner = owner
        self.generation = owner.generation
        self.ends = _Passes()
        self.starts = _Passes()

    def __call__(self, gradient: Any, /) -> None:
        """End and begin the passes that meet here."""
        owner = self.owner
        if owner.muted:
            return
        try:
            for step in self.ends.steps:
                if step.token:
                    token, step.token = step.token, 0
                    owner.end(token)
            for step in self.starts.steps:
                step.begun = True
                if step.tail:
                    step.start_ns = owner.core.now_ns()
                    owner.tails.append(step)
                else:
                    step.token = owner.begin(step.sites[owner.backward_index])
        except Exception as err:  # noqa: BLE001
            owner.report("backward span", err)

    @property
    def num_passes(self) -> int:
        """Passes that are tied to it."""
        return len(self.ends.steps) + len(self.starts.steps)

    def renew(self, generation: int) -> None:
        """Drop what is over, if passes were forgotten since: a tensor may live longer than they do."""
        if generation != self.generation:
            self.generation = generation
            self.ends.renew(lambda step: step.begun and not step.token)
            self.starts.renew(lambda step: step.begun)


class NoHook:
    """What a pickled hook becomes."""

    def pre(self, *_: Any) -> None:
        """Do nothing."""

    post = pre


class PyModuleHook:
    """The two forward hooks of one module; survives copying and pickling of the module as one that does nothing."""

    __slots__ = ("after", "backward", "before", "calls", "keyword", "owner", "sites")

    def __init__(
        self,
        owner: PyModuleHooks,
        sites: Sites,
        *,
        backward: bool,
        before: Before | None,
        after: After | None,
        keyword: str,
    ) -> None:
        self.owner = owner
        self.sites = sites
        self.backward = backward
        self.before = before
        self.after = after
        self.keyword = keyword
        self.calls: list[tuple[int, _Pass | None]] = []

    def pre(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], /) -> None:
        """Before the forward: begin its span, and tie the end of its backward to its input."""
        owner = self.owner
        if not owner.core.enabled:
            return
        try:
            in_backward = owner.graph_task() != -1
            if self.before is not None and not in_backward:
                self.before(module, args, kwargs)
            step = None
            if self.backward and owner.grad_enabled():
                step = _Pass(self.sites)
                x = args[0] if args else kwargs.get(self.keyword)
                if owner.has_gradient(x):
                    owner.boundary(x).ends.add(step)
                else:
                    step.tail = True
            self.calls.append((owner.begin(self.sites[2 if in_backward else 0]), step))
        except Exception as err:  # noqa: BLE001
            owner.report("module span", err)

    def post(self, module: Any, args: Any, output: Any, /) -> None:
        """After the forward: end its span, and tie the begin of its backward to its output."""
        if not self.calls:
            return
        owner = self.owner
        try:
            token, step = self.calls.pop()
            owner.end(token)
            if self.after is not None:
                self.after()
            if step is not None:
                y = (output[0] if output else None) if isinstance(output, tuple) else output
                if owner.has_gradient(y):
                    owner.boundary(y).starts.add(step)
        except Exception as err:  # noqa: BLE001
            owner.report("module span", err)

    @property
    def num_open(self) -> int:
        """Calls that are open."""
        return len(self.calls)

    def drop(self) -> None:
        """Forget calls that exceptions left open."""
        self.calls.clear()

    def __deepcopy__(self, memo: Any) -> PyModuleHook:
        return self

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return (self.owner.no_hook, ())


class PyModuleHooks:
    """What all hooks of one recording share.

    Parameters
    ----------
    core
        Of the recorder.
    begin, end
        What is called instead of the core's own: device times come about that way. None: nothing.
    fail
        Called with errors of ours, and where they came up.
    key
        Of :func:`new_key`: under which tensors have the boundaries of this recording.
    graph_task, grad_enabled, tensor_type
        ``torch._C._current_graph_task_id``, ``torch.is_grad_enabled`` and ``torch.Tensor``.
    no_hook
        What a pickled hook becomes.
    """

    def __init__(
        self,
        core: RecorderCore,
        begin: Begin | None,
        end: End | None,
        fail: Fail,
        key: int,
        graph_task: Callable[[], int],
        grad_enabled: Callable[[], bool],
        tensor_type: type,
        no_hook: type,
    ) -> None:
        self.core = core
        self.begin: Begin = begin or core.begin
        self.end: End = end or core.end
        self.fail: Fail | None = fail
        self.key = key
        self.graph_task = graph_task
        self.grad_enabled = grad_enabled
        self.tensor_type = tensor_type
        self.no_hook = no_hook
        self.muted = False
        self.backward_index = 1
        self.generation = 0
        self.tails: list[_Pass] = []

    def hook(
        self, sites: Sites, backward: bool, before: Before | None, after: After | None, keyword: str
    ) -> PyModuleHook:
        """Make the hooks of one module."""
        return PyModuleHook(self, sites, backward=backward, before=before, after=after, keyword=keyword)

    def has_gradient(self, value: Any) -> bool:
        """Whether autograd will give a gradient for ``value``."""
        return isinstance(value, self.tensor_type) and bool(value.requires_grad)  # type: ignore[attr-defined]

    def boundary(self, tensor: Any) -> PyBoundary:
        """Return the boundary at ``tensor``, hooked to its gradient the first time."""
        hooks = tensor._backward_hooks
        if hooks is None:
            return self._first_hook(tensor)
        if not isinstance(hooks, dict):
            raise TypeError("the hooks of a tensor are no dict")
        found: PyBoundary | None = hooks.get(self.key)
        if found is None:
            found = hooks[self.key] = PyBoundary(self)
        else:
            found.renew(self.generation)
        return found

    def forget(self) -> None:
        """Make the passes until now those of an earlier generation."""
        self.generation += 1

    def end_tails(self) -> None:
        """End the backward of modules whose input has no gradient."""
        if not self.tails:
            return
        steps, self.tails = self.tails, []
        now_ns = self.core.now_ns()
        for step in steps:
            self.core.record(step.sites[self.backward_index], step.start_ns, now_ns - step.start_ns)

    def close(self) -> None:
        """Let go of the session: tensors may live longer than it."""
        self.fail = None
        self.begin, self.end = self.core.begin, self.core.end

    def report(self, where: str, err: Exception) -> None:
        """Tell an error of ours."""
        if self.fail is not None:
            self.fail(where, err)

    def _first_hook(self, tensor: Any) -> PyBoundary:
        """Do what ``Tensor.register_hook`` does where nobody has hooked the tensor yet, but for the handle."""
        boundary = PyBoundary(self)
        node = tensor.grad_fn
        tensor._backward_hooks = OrderedDict([(self.key, boundary)])
        if node is not None:
            try:
                node._register_hook_dict(tensor)
            except AttributeError:  # a node of another kind
                tensor._backward_hooks = None
                node.register_prehook(boundary)
        return boundary
