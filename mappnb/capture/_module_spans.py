"""Spans of modules: forward, backward and recomputed, from forward hooks and hooks on gradients."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from mappnb.capture.points import SessionLike
from mappnb.terms import Category, Phase

__all__ = ["ModuleSpans"]

Sites = tuple[int, ...]
Before = Callable[[Any, tuple[Any, ...], dict[str, Any]], None]


class _Pass:
    """The backward pass through one call of one module: begun when its output's gradient is there."""

    __slots__ = ("sites", "start_ns", "tail", "token")

    def __init__(self, sites: Sites) -> None:
        self.sites = sites
        self.token = 0
        self.tail = False
        self.start_ns = -1


class _Boundary:
    """A tensor between modules: when its gradient is there, passes end (inner first) and begin (outer first).

    Called by autograd with the gradient, which it leaves as it is.
    """

    __slots__ = ("ends", "owner", "starts")
    __torch_unserializable__ = True

    def __init__(self, owner: ModuleSpans) -> None:
        self.owner = owner
        self.ends: list[_Pass] = []
        self.starts: list[_Pass] = []

    def __call__(self, _: Any) -> None:
        owner = self.owner
        if owner.muted:
            return
        try:
            for step in self.ends:
                if step.token:
                    owner.end(step.token)
                    step.token = 0
            for step in self.starts:
                if step.tail:
                    step.start_ns = owner.recorder.now_ns()
                    owner.tails.append(step)
                else:
                    step.token = owner.begin(step.sites[owner.backward_index])
        except Exception as err:  # noqa: BLE001
            owner.session.fail("backward span", err)


class _Hook:
    """The two forward hooks of one module; survives copying and pickling of the module as one that does nothing."""

    __slots__ = ("after", "backward", "before", "calls", "keyword", "owner", "sites")

    def __init__(
        self,
        owner: ModuleSpans,
        sites: Sites,
        *,
        backward: bool,
        before: Before | None = None,
        after: Callable[[], None] | None = None,
        keyword: str = "hidden_states",
    ) -> None:
        self.owner = owner
        self.sites = sites
        self.backward = backward
        self.before = before
        self.after = after
        self.keyword = keyword
        self.calls: list[tuple[int, _Pass | None]] = []

    def pre(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before the forward: begin its span, and tie the end of its backward to its input."""
        owner = self.owner
        if not owner.switch.enabled:
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
                    owner.boundary(x).ends.insert(0, step)
                else:
                    step.tail = True
            self.calls.append((owner.begin(self.sites[2 if in_backward else 0]), step))
        except Exception as err:  # noqa: BLE001
            owner.session.fail("module span", err)

    def post(self, module: Any, args: tuple[Any, ...], output: Any) -> None:
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
                y = output[0] if isinstance(output, tuple) else output
                if owner.has_gradient(y):
                    owner.boundary(y).starts.insert(0, step)
        except Exception as err:  # noqa: BLE001
            owner.session.fail("module span", err)

    def __deepcopy__(self, memo: Any) -> _Hook:
        return self

    def __reduce__(self) -> Any:
        return (_NoHook, ())


class _NoHook:
    """What a pickled hook becomes."""

    def pre(self, *_: Any) -> None:
        """Do nothing."""

    post = pre


class ModuleSpans:
    """Hooks on modules that record their forward and backward.

    Parameters
    ----------
    session
        Where to record; its plan says whether backward passes are wanted.

    Notes
    -----
    A module's backward begins when the gradient of its output is complete and ends when that of its input is. Both are
    seen by a hook on the tensor, at the boundary that two neighbours share: the end of layer i + 1 and the begin of
    layer i cost one hook. Where the input has no gradient (an embedding), the backward ends with the whole pass. Full
    backward hooks would wrap inputs and outputs in view-making nodes, which schedules that free outputs refuse.

    A forward inside a backward pass is that of activation checkpointing: phase recompute.
    """

    def __init__(self, session: SessionLike) -> None:
        import torch

        self.session = session
        self.recorder = session.recorder
        self.switch: Any = getattr(session.recorder, "_core", session.recorder)  # its ``enabled`` without a property
        self.begin = session.recorder.begin
        self.end = session.recorder.end
        self.graph_task: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", lambda: -1)
        self.grad_enabled = torch.is_grad_enabled
        self.tails: list[_Pass] = []
        self.muted = False
        self.backward_index = 1
        self._tensor = torch.Tensor
        self._known: dict[int, tuple[Any, _Boundary]] = {}
        self._handles: list[Any] = []
        self._hooks: list[_Hook] = []

    def sites(self, op: str, name: str, layer: int) -> Sites:
        """Sites of a module's forward, backward, recomputation and input-only backward."""
        make = self.recorder.site
        return tuple(
            make(category=Category.COMPUTE, op=op, name=name, phase=phase, layer=layer)
            for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.RECOMPUTE, Phase.BACKWARD_INPUT)
        )

    def enter_backward(self, phase: str) -> None:
        """Say which backward pass begins: a pass for the weights alone goes through no module as a whole."""
        self.muted = phase == Phase.BACKWARD_WEIGHT
        self.backward_index = 3 if phase == Phase.BACKWARD_INPUT else 1

    def attach(
        self,
        module: Any,
        *,
        op: str,
        name: str = "",
        layer: int = -1,
        backward: bool = True,
        before: Before | None = None,
        after: Callable[[], None] | None = None,
    ) -> _Hook:
        """Record the calls of ``module``; returns its hooks.

        Parameters
        ----------
        module
            The ``torch.nn.Module``.
        op, name, layer
            Of the events.
        backward
            Its backward too, if the plan wants it.
        before
            Called before each forward that is no recomputation, with the module, its arguments and keyword arguments.
        after
            Called after each forward.
        """
        backward = backward and self.session.plan.backward_modules
        hook = _Hook(self, self.sites(op, name, layer), backward=backward, before=before, after=after)
        self._hooks.append(hook)
        self._handles.append(module.register_forward_pre_hook(hook.pre, with_kwargs=True))
        self._handles.append(module.register_forward_hook(hook.post, always_call=True))
        return hook

    def wrap(self, function: Callable[..., Any], *, op: str, position: int, keyword: str) -> Callable[..., Any]:
        """Return ``function`` recorded like a module whose input is the argument at ``position`` or ``keyword``."""
        hook = _Hook(self, self.sites(op, "", -1), backward=self.session.plan.backward_modules, keyword=keyword)
        self._hooks.append(hook)

        def call(*args: Any, **kwargs: Any) -> Any:
            num_calls = len(hook.calls)
            hook.pre(None, args[position:], kwargs)
            result = function(*args, **kwargs)
            if len(hook.calls) > num_calls:
                hook.post(None, (), result)
            return result

        return call

    def detach(self) -> None:
        """Take all hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._hooks.clear()
        self.forget()

    def forget(self) -> None:
        """Forget the tensors of the pass that begins or has ended, and calls that an exception left open."""
        self._known.clear()

    def drop_open(self) -> None:
        """Forget calls that exceptions left open; their spans end with those around them."""
        for hook in self._hooks:
            hook.calls.clear()

    def end_tails(self) -> None:
        """End the backward of modules whose input has no gradient: the pass through the model is over."""
        if not self.tails:
            return
        now_ns = self.recorder.now_ns()
        for step in self.tails:
            self.recorder.record(step.sites[self.backward_index], step.start_ns, now_ns - step.start_ns)
        self.tails.clear()

    def has_gradient(self, value: Any) -> bool:
        """Whether autograd will give a gradient for ``value``."""
        return isinstance(value, self._tensor) and value.requires_grad

    def boundary(self, tensor: Any) -> _Boundary:
        """Return the boundary at ``tensor``, hooked to its gradient the first time."""
        key = id(tensor)
        known = self._known.get(key)
        if known is not None and known[0]() is tensor:
            return known[1]
        boundary = _Boundary(self)
        _hook_gradient(tensor, boundary)
        self._known[key] = (weakref.ref(tensor), boundary)
        return boundary


def _hook_gradient(tensor: Any, hook: _Boundary) -> None:
    """Do what ``Tensor.register_hook`` does, at half its price where nobody has hooked the tensor yet."""
    if tensor._backward_hooks is not None:
        tensor.register_hook(hook)
        return
    node = tensor.grad_fn
    hooks: OrderedDict[int, Any] = OrderedDict()
    hooks[-1] = hook
    tensor._backward_hooks = hooks
    if node is not None:
        try:
            node._register_hook_dict(tensor)
        except AttributeError:  # a node of another kind
            tensor._backward_hooks = None
            node.register_prehook(hook)
