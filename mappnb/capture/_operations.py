"""Communication operations between issue and completion, and the events that they become."""

from __future__ import annotations

import sys
import threading
import weakref
from typing import Any, Final

from mappnb.capture._collective_calls import first_tensor, num_bytes
from mappnb.capture._flags import ASYNC, CLIPPED
from mappnb.capture._groups import Group, Groups
from mappnb.capture.points import SessionLike
from mappnb.terms import Category, Op

__all__ = ["Operation", "Operations", "caller_is"]

Context = tuple[int, int, int, int]
_MANY: Final = 4096
_SEND: Final = str(Op.SEND.value)
_RECV: Final = str(Op.RECV.value)


class Operation:
    """One operation that was issued and has not been seen to complete.

    What most operations never set stands in the class: that makes them cheaper than slots or a dataclass would.
    """

    issued_ns = -1
    flags = 0
    generation = 0
    on_host = True
    context: Context | None = None  # None: that of when it completes
    owner: Any = None

    def __init__(self, site: int, op: str, group: Group, num_bytes: int, seq: int, peer: int, start_ns: int) -> None:
        self.site = site
        self.op = op
        self.group = group
        self.bytes = num_bytes
        self.seq = seq
        self.peer = peer
        self.start_ns = start_ns


class _Busy(threading.local):
    """Whether this thread is inside an operation already: operations inside it are part of it."""

    now = False


class Operations:
    """All communication of this rank: makes operations, keeps those under way, records those that complete.

    Parameters
    ----------
    session
        Where to record.

    Notes
    -----
    Work handles are kept by weak reference: they hold the tensors of the operation.
    """

    def __init__(self, session: SessionLike) -> None:
        self.session = session
        self.recorder = session.recorder
        self.core = session.recorder._core  # whose ``enabled`` needs no Python frame
        self.groups = Groups(session)
        self.busy = _Busy()
        self.generation = 0
        self.pending: dict[int, list[Operation]] = {}
        self.coalescing: dict[int, list[Operation]] = {}
        self._now = session.recorder.now_ns
        self._record = session.recorder.record
        self._sites: dict[tuple[str, Any], int] = {}
        self._wait_sites: dict[str, int] = {}

    # ---------------------------------------------------------------- issue
    def make(self, op: str, group: Group, size: int, dtype: Any, peer: int = -1) -> Operation:
        """Make a collective that is about to be issued; counts it in its group."""
        seq = group.seq
        group.seq = seq + 1
        site = self._sites.get((op, dtype))
        return Operation(self.site(op, dtype) if site is None else site, op, group, size, seq, peer, self._now())

    def p2p(self, group: Group, op: str, tensors: Any, peer: int) -> Operation:
        """Make a send or receive that is about to be issued; ``peer`` -1: any source, known on completion."""
        seq = group.next_pair(peer, send=op == _SEND) if peer >= 0 else -1
        site = self.site(op, getattr(first_tensor(tensors), "dtype", None))
        return Operation(site, op, group, num_bytes(tensors), seq, peer, self._now())

    def site(self, op: str, dtype: Any) -> int:
        """Site of an operation on elements of ``dtype``."""
        site = self._sites.get((op, dtype))
        if site is None:
            category = Category.P2P if op in (_SEND, _RECV) else Category.COLLECTIVE
            text = "" if dtype is None else str(dtype).removeprefix("torch.")
            site = self._sites[op, dtype] = self.recorder.site(category=category, op=op, dtype=text)
        return site

    # ---------------------------------------------------------------- completion
    def issued(self, operation: Operation, work: Any, *, sync: bool, pg: Any = None) -> None:
        """Take note that the call has returned: what it returned decides when the operation is complete."""
        operation.issued_ns = self._now()
        if not sync:
            operation.flags = ASYNC
            operation.context = self.recorder.context()
        batch = self.coalescing.get(id(pg)) if self.coalescing else None
        if batch is not None:
            batch.append(operation)
        elif work is None:
            self.complete(operation, operation.issued_ns)
        else:
            self.keep(id(work), work, [operation])

    def keep(self, key: int, owner: Any, operations: list[Operation]) -> None:
        """Keep operations until ``owner``, their work handle or result, is waited for."""
        if not operations:
            return
        pending = self.pending
        if key in pending:
            self._clip(pending.pop(key))
        owner_ref = weakref.ref(owner)
        for operation in operations:
            operation.owner, operation.generation = owner_ref, self.generation
        pending[key] = operations
        if len(pending) > _MANY:
            self.flush()

    def take(self, key: int, owner: Any) -> list[Operation] | None:
        """Take out what was kept for ``owner`` (None: for whatever owns ``key`` and is still there), if it was."""
        operations = self.pending.pop(key, None)
        if operations is None:
            return None
        known = operations[0].owner()
        if known is None or (owner is not None and known is not owner):
            self._clip(operations)
            return None
        return operations

    def complete(self, operation: Operation, end_ns: int, flags: int = 0) -> None:
        """Record an operation that completed at ``end_ns``."""
        start_ns, context = operation.start_ns, operation.context
        inherited = () if context is None else (-1, *context)
        self._record(
            operation.site,
            start_ns,
            end_ns - start_ns,
            -1,
            -1,
            operation.bytes,
            operation.seq,
            operation.group.id,
            operation.peer,
            -1,
            operation.flags | flags,
            *inherited,
        )

    def waited(self, operations: list[Operation] | None, start_ns: int, work: Any, flags: int = 0) -> None:
        """Record the operations that a wait from ``start_ns`` until now has completed, and the wait itself."""
        end_ns = self._now()
        if not operations:
            self._record(self._wait_site(""), start_ns, end_ns - start_ns, flags=flags)
            return
        for operation in operations:
            if operation.op == _RECV and operation.peer < 0:
                self._find_source(operation, work)
            self.complete(operation, end_ns, flags)
        last = operations[-1]
        if last.flags & ASYNC:
            self._record(
                self._wait_site(last.op),
                start_ns,
                end_ns - start_ns,
                -1,
                -1,
                -1,
                last.seq,
                last.group.id,
                last.peer,
                -1,
                flags,
            )

    def flush(self, *, everything: bool = False) -> None:
        """Record operations that nobody will wait for, or ``everything`` still under way, as clipped."""
        for key, operations in list(self.pending.items()):
            first = operations[0]
            lost = everything or first.owner() is None or first.generation < self.generation - 1
            if lost and self.pending.pop(key, None) is not None:
                self._clip(operations)

    def step_ended(self) -> None:
        """Give up on operations whose handle is gone, and on those that were issued before the last step."""
        self.generation += 1
        self.flush()

    def under_way(self) -> list[Operation]:
        """Return the operations that have been issued and not been seen to complete, oldest first."""
        return sorted((o for batch in list(self.pending.values()) for o in batch), key=lambda o: o.start_ns)

    def _clip(self, operations: list[Operation]) -> None:
        for operation in operations:
            self.complete(operation, operation.issued_ns, CLIPPED | ASYNC)

    def _find_source(self, operation: Operation, work: Any) -> None:
        operation.peer = operation.group.global_rank(int(work._source_rank()))
        if operation.peer >= 0:
            operation.seq = operation.group.next_pair(operation.peer, send=False)

    def _wait_site(self, op: str) -> int:
        site = self._wait_sites.get(op)
        if site is None:
            site = self._wait_sites[op] = self.recorder.site(category=Category.WAIT, op=Op.WAIT, name=op)
        return site


def caller_is(codes: frozenset[Any]) -> bool:
    """Whether the function two frames above the caller's caller is one of ``codes``: dist.send calls dist.isend."""
    frame = sys._getframe(2).f_back
    return frame is not None and frame.f_code in codes
