"""DistributedDataParallel: the all-reduces of its C++ reducer, seen through a communication hook."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

from mappnb.capture._collective_calls import first_tensor, num_bytes
from mappnb.capture._flags import FAILED
from mappnb.capture._operations import Operation, Operations
from mappnb.capture._patches import Patches
from mappnb.terms import Op

__all__ = ["DdpHooks"]

Function = Callable[..., Any]


class _Hook:
    """The communication hook of one model: what the reducer does without a hook, bit for bit, in Python.

    Notes
    -----
    Without a hook the reducer multiplies each gradient by ``1 / world_size`` while it copies it into the bucket, and
    all-reduces the bucket (torch/csrc/distributed/c10d/reducer.cpp, ``mark_variable_ready_dense``). With a hook it only
    copies; the same product, rounded once, is taken here. A hook cannot be taken out of a reducer, so this one stays
    after the recording, and does the same without recording.
    """

    def __init__(self, model: Any) -> None:
        self.model: Any = weakref.ref(model)
        self.user: tuple[Any, Function] | None = None
        self.join_work: Any = None

    def __call__(self, state: Any, bucket: Any) -> Any:
        if self.user is not None:
            user_state, user_hook = self.user
            return user_hook(user_state, bucket)
        buffer = bucket.buffer()
        group = self.model().process_group
        if buffer.is_sparse:
            buffer.div_(self._divisor(group))
        else:
            buffer.mul_(1.0 / self._divisor(group))
        return group.allreduce([buffer]).get_future().then(_first)

    def _divisor(self, group: Any) -> float:
        """Ranks to average over: fewer than the group's under ``Join(divide_by_initial_world_size=False)``."""
        if self.join_work is None:
            return int(group.size())
        self.join_work.wait()
        return int(self.join_work.result()[0].item())


def _first(future: Any) -> Any:
    return future.value()[0]


class DdpHooks:
    """Registers a hook on each DistributedDataParallel model that has none, at its first forward.

    Parameters
    ----------
    operations
        Where its collectives are counted.
    """

    def __init__(self, operations: Operations) -> None:
        self._operations = operations
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet()
        self._hooks: weakref.WeakKeyDictionary[Any, _Hook] = weakref.WeakKeyDictionary()
        self._active = True

    def watch(self, patches: Patches, module: ModuleType) -> None:
        """Wrap the class in ``torch.nn.parallel.distributed``."""
        import torch.distributed as dist

        ddp = module.DistributedDataParallel
        patches.wrap(ddp, "forward", self._forward)
        patches.wrap(ddp, "register_comm_hook", self._register_comm_hook)
        patches.wrap(dist, "_broadcast_coalesced", self._broadcast_coalesced)
        reducer = getattr(dist, "Reducer", None)
        if reducer is not None:
            patches.wrap(reducer, "_set_forward_pass_work_handle", self._join_handle)

    def stop(self) -> None:
        """Register no more hooks."""
        self._active = False

    def _forward(self, original: Function) -> Function:
        def forward(model: Any, *args: Any, **kwargs: Any) -> Any:
            if self._active and self._operations.recorder.enabled and model not in self._seen:
                try:
                    self._seen.add(model)
                    self._register(model)
                except Exception as err:  # noqa: BLE001
                    self._operations.session.fail("DistributedDataParallel", err)
            return original(model, *args, **kwargs)

        return forward

    def _register(self, model: Any) -> None:
        import torch.distributed as dist

        reason = self._obstacle(model)
        if not reason:
            hook = _Hook(model)
            try:
                dist._register_comm_hook(model.reducer, None, hook)
            except RuntimeError as err:
                reason = str(err).partition("\n")[0]
            else:
                self._hooks[model] = hook
        if reason:
            notes = self._operations.session.meta.setdefault("ddp_not_recorded", [])
            notes.append(f"{type(model.module).__name__}: {reason}")

    def _obstacle(self, model: Any) -> str:
        """Why the hook cannot be registered without a risk for the numbers; empty if it can."""
        size = model.process_group.size()
        if not self._operations.session.plan.ddp_hook:
            return "the plan has ddp_hook=False"
        if getattr(model, "_comm_hooks", None):
            return "it has a hook of its own; what this calls is recorded"
        if getattr(model, "gradient_as_bucket_view", False) and size & (size - 1):
            return "gradient_as_bucket_view divides where it does not multiply; not bit-equal unless the size is 2**n"
        if getattr(model, "mixed_precision", None) is not None or getattr(model, "_delay_all_reduce_params", None):
            return "it reduces gradients by itself"
        if getattr(model, "_use_python_reducer", False):
            return "its reducer is compiled"
        if any(p.is_complex() for p in model.parameters()):
            return "it has complex parameters"
        return ""

    def _register_comm_hook(self, original: Function) -> Function:
        def register_comm_hook(model: Any, state: object, hook: Function) -> None:
            ours = self._hooks.get(model)
            if ours is None or ours.user is not None:
                original(model, state, hook)
                return
            model._check_comm_hook(hook)
            model._comm_hooks.append((hook, state))
            ours.user = (state, hook)

        return register_comm_hook

    def _join_handle(self, original: Function) -> Function:
        def set_handle(reducer: Any, work: Any, use_static_world_size: bool) -> Any:
            for model, hook in list(self._hooks.items()):
                if model.reducer is reducer:
                    hook.join_work = None if use_static_world_size else work
            return original(reducer, work, use_static_world_size)

        return set_handle

    def _broadcast_coalesced(self, original: Function) -> Function:
        """Buffers, and parameters at the start: one operation for all the pieces that C++ makes of it."""
        operations = self._operations

        def broadcast_coalesced(group: Any, tensors: Any, *args: Any, **kwargs: Any) -> Any:
            operation = None
            if operations.recorder.enabled and not operations.busy.now:
                try:
                    operation = self._broadcast(group, tensors, args, kwargs)
                except Exception as err:  # noqa: BLE001
                    operations.session.fail("DistributedDataParallel", err)
            flags = FAILED
            try:
                result = original(group, tensors, *args, **kwargs)
                flags = 0
                return result
            finally:
                if operation is not None:
                    operations.complete(operation, operations.recorder.now_ns(), flags)

        return broadcast_coalesced

    def _broadcast(self, pg: Any, tensors: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Operation:
        group = self._operations.groups.of(pg)
        root = kwargs.get("src", args[1] if len(args) > 1 else 0)
        dtype = getattr(first_tensor(tensors), "dtype", None)
        return self._operations.make(Op.BROADCAST.value, group, num_bytes(tensors), dtype, group.global_rank(int(root)))
