"""Spans of modules: forward, backward and recomputed, from forward hooks and hooks on gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mappnb.capture._pymodulehooks import After, Before, Hook, Hooks, NoHook, PyModuleHooks, Sites, new_key
from mappnb.capture.points import SessionLike
from mappnb.terms import Category, Phase

__all__ = ["ModuleSpans"]


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
        self.graph_task: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", lambda: -1)
        self._shared = self._make_hooks(torch)
        self._handles: list[Any] = []
        self._hooks: list[Hook] = []

    def _make_hooks(self, torch: Any) -> Hooks:
        """Native hooks for a native recorder, else their twin in pure Python."""
        kind: Callable[..., Hooks] = PyModuleHooks
        if self.recorder.native:
            from mappnb import _core

            kind = _core.ModuleHooks
        core, begin, end = self.recorder._core, self.recorder.begin, self.recorder.end
        return kind(
            core,
            None if begin == core.begin else begin,
            None if end == core.end else end,
            self.session.fail,
            new_key(),
            self.graph_task,
            torch.is_grad_enabled,
            torch.Tensor,
            NoHook,
        )

    def sites(self, op: str, name: str, layer: int) -> Sites:
        """Sites of a module's forward, backward, recomputation and input-only backward."""

        def make(phase: str) -> int:
            return self.recorder.site(category=Category.COMPUTE, op=op, name=name, phase=phase, layer=layer)

        return make(Phase.FORWARD), make(Phase.BACKWARD), make(Phase.RECOMPUTE), make(Phase.BACKWARD_INPUT)

    def enter_backward(self, phase: str) -> None:
        """Say which backward pass begins: a pass for the weights alone goes through no module as a whole."""
        self._shared.muted = phase == Phase.BACKWARD_WEIGHT
        self._shared.backward_index = 3 if phase == Phase.BACKWARD_INPUT else 1

    def attach(
        self,
        module: Any,
        *,
        op: str,
        name: str = "",
        layer: int = -1,
        backward: bool = True,
        before: Before | None = None,
        after: After | None = None,
    ) -> Hook:
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
        hook = self._shared.hook(self.sites(op, name, layer), backward, before, after, "hidden_states")
        self._hooks.append(hook)
        self._handles.append(module.register_forward_pre_hook(hook.pre, with_kwargs=True))
        self._handles.append(module.register_forward_hook(hook.post, always_call=True))
        return hook

    def wrap(self, function: Callable[..., Any], *, op: str, position: int, keyword: str) -> Callable[..., Any]:
        """Return ``function`` recorded like a module whose input is the argument at ``position`` or ``keyword``."""
        hook = self._shared.hook(self.sites(op, "", -1), self.session.plan.backward_modules, None, None, keyword)
        self._hooks.append(hook)

        def call(*args: Any, **kwargs: Any) -> Any:
            num_open = hook.num_open
            hook.pre(None, args[position:], kwargs)
            result = function(*args, **kwargs)
            if hook.num_open > num_open:
                hook.post(None, (), result)
            return result

        return call

    def detach(self) -> None:
        """Take all hooks off, for good."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._hooks.clear()
        self._shared.close()

    def forget(self) -> None:
        """Forget the tensors of the pass that begins or has ended, and calls that an exception left open."""
        self._shared.forget()

    def drop_open(self) -> None:
        """Forget calls that exceptions left open; their spans end with those around them."""
        for hook in self._hooks:
            hook.drop()

    def end_tails(self) -> None:
        """End the backward of modules whose input has no gradient: the pass through the model is over."""
        self._shared.end_tails()

    def has_gradient(self, value: Any) -> bool:
        """Whether autograd will give a gradient for ``value``."""
        return self._shared.has_gradient(value)

    def boundary(self, tensor: Any) -> Callable[[Any], None]:
        """Return the boundary at ``tensor``, hooked to its gradient the first time."""
        return self._shared.boundary(tensor)
