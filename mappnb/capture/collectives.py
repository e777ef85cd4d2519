"""Collectives and point-to-point operations: every call on a ``ProcessGroup`` of this process, and every wait."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

from mappnb.capture._collective_calls import (
    METHODS,
    P2P_METHODS,
    Call,
    is_sync,
    payload,
    root_of,
)
from mappnb.capture._ddp import DdpHooks
from mappnb.capture._flags import FAILED
from mappnb.capture._functional import watch_functional
from mappnb.capture._operations import Operation, Operations, caller_is
from mappnb.capture._patches import ImportWatch, Patches
from mappnb.capture.points import SessionLike, state_of
from mappnb.terms import Op

__all__ = ["CollectiveProbe"]

Function = Callable[..., Any]


class CollectiveProbe:
    """Records what goes through ``torch.distributed``.

    Notes
    -----
    The choke point is the pybind class ``ProcessGroup``: whatever names a program bound at import, the call ends in one
    of its methods. What C++ issues by itself is seen where Python can: functional collectives at their Python
    functions, DistributedDataParallel's reducer through a communication hook. Not seen: collectives inside compiled
    graphs, and those that autograd formulas of functional collectives issue.

    A collective spans from its issue to its observed end: for a synchronous call the end of the wait inside it, for an
    asynchronous one (``Flag.ASYNC``) the return of ``Work.wait``, beside which the stall is an event of its own
    (category wait, with the same group and seq). On CUDA ``Work.wait`` does not block the host, so both are host times
    there (untested on GPU).
    """

    name = "collectives"

    def __init__(self) -> None:
        self._patches = Patches()
        self._watch: ImportWatch | None = None
        self._operations: Operations | None = None
        self._ddp: DdpHooks | None = None
        self._session: SessionLike | None = None

    def install(self, session: SessionLike) -> None:
        """Patch ``torch.distributed``, now or when the program imports it."""
        self._session = session
        self._operations = Operations(session)
        self._watch = ImportWatch(session.fail)
        self._watch.when("torch.distributed", self._patch_distributed)
        self._watch.when("torch.distributed._functional_collectives", self._patch_functional)
        self._watch.when("torch.nn.parallel.distributed", self._patch_ddp)
        state_of(session).at_step_end.append(self._operations.step_ended)

    def uninstall(self) -> None:
        """Put everything back; operations under way are recorded as clipped."""
        if self._session is None or self._operations is None or self._watch is None:
            return
        self._watch.stop()
        if self._ddp is not None:
            self._ddp.stop()
        self._patches.undo()
        hooks = state_of(self._session).at_step_end
        if self._operations.step_ended in hooks:
            hooks.remove(self._operations.step_ended)
        self._operations.flush(everything=True)
        self._session = self._operations = self._watch = self._ddp = None

    def under_way(self) -> list[Operation]:
        """Return the operations that have been issued and not been seen to complete: what a hang hangs on."""
        return [] if self._operations is None else self._operations.under_way()

    def _patch_distributed(self, dist: ModuleType) -> None:
        if self._operations is None or not getattr(dist, "is_available", bool)():
            return
        self._operations.groups.watch(self._patches)
        self._operations.groups.number()
        patch_process_group(self._operations, self._patches, dist)

    def _patch_functional(self, module: ModuleType) -> None:
        if self._operations is not None:
            watch_functional(self._operations, self._patches, module)

    def _patch_ddp(self, module: ModuleType) -> None:
        if self._operations is not None:
            self._ddp = DdpHooks(self._operations)
            self._ddp.watch(self._patches, module)


def patch_process_group(operations: Operations, patches: Patches, dist: ModuleType) -> None:
    """Wrap the methods of ``ProcessGroup`` and ``Work`` that this torch has."""
    from torch._C._distributed_c10d import ProcessGroup, Work

    for name, call in METHODS.items():
        patches.wrap(ProcessGroup, name, partial(_collective, operations, call))
    sync_codes = frozenset(
        inspect.unwrap(fn).__code__ for fn in (getattr(dist, "send", None), getattr(dist, "recv", None)) if fn
    )
    for name in P2P_METHODS:
        patches.wrap(ProcessGroup, name, partial(_p2p, operations, name, sync_codes))
    patches.wrap(ProcessGroup, "_start_coalescing", partial(_start_coalescing, operations))
    patches.wrap(ProcessGroup, "_end_coalescing", partial(_end_coalescing, operations))
    patches.wrap(Work, "wait", partial(_wait, operations))
    patches.wrap(Work, "synchronize", partial(_wait, operations))
    patches.wrap(Work, "get_future", partial(_get_future, operations))


def _run(
    operations: Operations, original: Function, operation: Operation, pg: Any, args: Any, kwargs: Any, *, sync: bool
) -> Any:
    """Make the call that ``operation`` stands for, exactly once; its exceptions pass through."""
    busy = operations.busy
    busy.now = True
    try:
        work = original(pg, *args, **kwargs)
    except BaseException:
        operations.complete(operation, operations.recorder.now_ns(), FAILED)
        raise
    finally:
        busy.now = False
    try:
        operations.issued(operation, work, sync=sync, pg=pg)
    except Exception as err:  # noqa: BLE001
        operations.session.fail("collectives", err)
    return work


def _collective(operations: Operations, call: Call, original: Function) -> Function:
    core, busy, group_of = operations.core, operations.busy, operations.groups.of
    op, value_of, position, per_member, root = call.op, call.value, call.payload, call.per_member, call.root

    def method(pg: Any, *args: Any, **kwargs: Any) -> Any:
        if busy.now or not core.enabled:
            return original(pg, *args, **kwargs)
        try:
            group = group_of(pg)
            tensor, size = payload(args[position] if 0 <= position < len(args) else value_of(args, kwargs))
            peer = group.global_rank(root_of(args, kwargs, root)) if root >= 0 else -1
            if per_member:
                size *= group.size
            operation = operations.make(op, group, size, getattr(tensor, "dtype", None), peer)
            operation.on_host = getattr(tensor, "is_cpu", True)
            sync = is_sync(args, kwargs) if kwargs or not args else not getattr(args[-1], "asyncOp", True)
        except Exception as err:  # noqa: BLE001
            operations.session.fail("collectives", err)
            return original(pg, *args, **kwargs)
        return _run(operations, original, operation, pg, args, kwargs, sync=sync)

    return method


def _p2p(operations: Operations, name: str, sync_codes: frozenset[Any], original: Function) -> Function:
    core, busy, groups = operations.core, operations.busy, operations.groups
    op = str(Op.SEND.value if name == "send" else Op.RECV.value)
    any_source = name == "recv_anysource"

    def method(pg: Any, *args: Any, **kwargs: Any) -> Any:
        if busy.now or not core.enabled:
            return original(pg, *args, **kwargs)
        try:
            group = groups.of(pg)
            tensors = args[0] if args else kwargs["tensors"]
            rank = -1 if any_source else args[1] if len(args) > 1 else kwargs.get("dstRank", kwargs.get("srcRank", -1))
            operation = operations.p2p(group, op, tensors, group.global_rank(int(rank)))
            sync = caller_is(sync_codes)
        except Exception as err:  # noqa: BLE001
            operations.session.fail("p2p", err)
            return original(pg, *args, **kwargs)
        return _run(operations, original, operation, pg, args, kwargs, sync=sync)

    return method


def _start_coalescing(operations: Operations, original: Function) -> Function:
    def start(pg: Any, *args: Any, **kwargs: Any) -> Any:
        if operations.recorder.enabled:
            operations.coalescing[id(pg)] = []
        return original(pg, *args, **kwargs)

    return start


def _end_coalescing(operations: Operations, original: Function) -> Function:
    def end(pg: Any, *args: Any, **kwargs: Any) -> Any:
        work = original(pg, *args, **kwargs)
        try:
            batch = operations.coalescing.pop(id(pg), [])
            if work is not None:
                operations.keep(id(work), work, batch)
            else:
                for operation in batch:
                    operations.complete(operation, operations.recorder.now_ns())
        except Exception as err:  # noqa: BLE001
            operations.session.fail("collectives", err)
        return work

    return end


def _wait(operations: Operations, original: Function) -> Function:
    core, busy, now = operations.core, operations.busy, operations.recorder.now_ns
    take, waited = operations.take, operations.waited

    def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
        if busy.now or not core.enabled:
            return original(work, *args, **kwargs)
        flags = FAILED
        try:
            pending = take(id(work), work)
        except Exception as err:  # noqa: BLE001
            operations.session.fail("wait", err)
            return original(work, *args, **kwargs)
        start_ns = now()
        busy.now = True
        try:
            result = original(work, *args, **kwargs)
            flags = 0
            return result
        finally:
            busy.now = False
            try:
                waited(pending, start_ns, work, flags)
            except Exception as err:  # noqa: BLE001
                operations.session.fail("wait", err)

    return wait


def _get_future(operations: Operations, original: Function) -> Function:
    """Complete the operation when its future is done: a caller that takes the future will not call ``wait``.

    Only for work on a CPU: a CUDA future's callback runs at issue.
    """

    def get_future(work: Any) -> Any:
        future = original(work)
        if not operations.recorder.enabled:
            return future
        try:
            pending = operations.pending.get(id(work))
            if pending is not None and all(operation.on_host for operation in pending):
                future.add_done_callback(_completes(operations, id(work), pending))
        except Exception as err:  # noqa: BLE001
            operations.session.fail("collectives", err)
        return future

    return get_future


def _completes(operations: Operations, key: int, pending: list[Operation]) -> Callable[[Any], None]:
    def done(_: Any) -> None:
        try:
            if operations.pending.get(key) is pending and operations.pending.pop(key, None) is pending:
                end_ns = operations.recorder.now_ns()
                for operation in pending:
                    operations.complete(operation, end_ns)
        except Exception as err:  # noqa: BLE001
            operations.session.fail("collectives", err)

    return done
