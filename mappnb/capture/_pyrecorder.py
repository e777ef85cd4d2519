"""Pure-Python twin of ``mappnb._core.Recorder``: same calls, same records; slower, and readable as the reference."""

from __future__ import annotations

import itertools
import operator
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from mappnb.capture._record import DEFAULT_CAPACITY, MAX_DEPTH, RECORD_DTYPE, Flag, thread_name

__all__ = ["PyRecorder", "PySpan"]

Row: TypeAlias = tuple[int, ...]

_NO_SPAN: Final = -1  # token of a span that was too deep to be kept
_CONTEXT_BITS: Final = (32, 16, 16, 32)


def _saturate(value: int, bits: int) -> int:
    """``value`` as a signed integer of ``bits`` bits: the nearest one that fits, never an error."""
    limit = 1 << (bits - 1)
    return min(max(operator.index(value), -limit), limit - 1)


class _Slot(NamedTuple):
    """One open span; ``live`` is False for one begun while the recorder was off."""

    token: int
    owner: int
    live: bool
    site: int
    start_ns: int
    cpu_start_ns: int
    context: tuple[int, int, int, int]
    depth: int


class _ThreadState:
    """Ring and open spans of one thread; only that thread pushes, only :meth:`PyRecorder.drain` pops."""

    def __init__(self, index: int, capacity: int) -> None:
        self.index = index
        self.thread = threading.current_thread()
        self.ring: deque[Row] = deque(maxlen=capacity)
        self.recorded = 0
        self.popped = 0
        self.serial = 0
        self.live = 0
        self.overflow = 0
        self.stack: list[_Slot] = []

    @property
    def dropped(self) -> int:
        return self.recorded - self.popped - len(self.ring)

    def pop(self) -> _Slot:
        slot = self.stack.pop()
        self.live -= slot.live
        return slot


class PySpan:
    """Reusable, re-entrant ``with`` target of one site; see :meth:`PyRecorder.span`."""

    __slots__ = ("_owner", "_recorder", "site")

    _owners = itertools.count(1)

    def __init__(self, recorder: PyRecorder, site: int) -> None:
        self._recorder = recorder
        self.site = _saturate(site, 32)
        self._owner = next(self._owners)

    def __enter__(self) -> None:
        """Open a span."""
        self._recorder._push(self.site, self._owner)

    def __exit__(self, exc_type: object, exc: object, tb: object, /) -> None:
        """Close it; an exception passes through and sets ``Flag.FAILED``."""
        self._recorder._exit(self._owner, 0 if exc_type is None else int(Flag.FAILED))


class PyRecorder:
    """Records spans into one ring per thread, in pure Python.

    Parameters
    ----------
    capacity
        Finished records that each thread keeps between two drains; beyond it the oldest are dropped and counted.
    cpu_time
        Measure the thread's CPU time of each span too (``cpu_ns``; costs several hundred ns).
    thread_name
        Called in each new thread for its name.
    """

    def __init__(
        self, capacity: int = DEFAULT_CAPACITY, cpu_time: bool = False, thread_name: Callable[[], str] = thread_name
    ) -> None:
        self.enabled = True
        self._capacity = max(1, operator.index(capacity))
        self._cpu_time = bool(cpu_time)
        self._thread_name = thread_name
        self._test_clock: int | None = None
        self._context: tuple[int, int, int, int] = (-1, -1, -1, -1)
        self._local = threading.local()
        self._states: list[_ThreadState] = []
        self._names: list[tuple[int, int, str]] = []
        self._mismatched = self._too_deep = self._retired_recorded = self._retired_dropped = 0
        self._drain_lock = threading.Lock()
        self._registry_lock = threading.Lock()

    def begin(self, site: int, /) -> int:
        """Open a span of ``site`` in this thread.

        Returns
        -------
        int
            Its token, for :meth:`end`.
        """
        return self._push(_saturate(site, 32), 0)

    def end(
        self, token: int = 0, bytes: int = -1, group: int = -1, seq: int = -1, peer: int = -1, flags: int = 0
    ) -> None:
        """Close the span of ``token`` (0: the innermost) and record it.

        Spans still open inside it are closed with it and flagged ``Flag.REPAIRED``. A token that is not open in this
        thread is counted as mismatched, and nothing else happens.
        """
        values = (_saturate(bytes, 64), _saturate(seq, 64), _saturate(group, 64), _saturate(peer, 32))
        flags = _saturate(flags, 64) & 0xFFFF
        token = operator.index(token)
        state = self._known_state()
        if state is None:
            self._mismatched += 1
        elif token <= 0:
            if token not in (0, _NO_SPAN) or not self._end_innermost(state, token, values, flags):
                self._mismatched += 1
        else:
            self._end_at(state, self._position(state, token), values, flags)

    def record(  # noqa: PLR0917 - the fields of a record
        self,
        site: int,
        start_ns: int,
        duration_ns: int,
        issue_ns: int = -1,
        cpu_ns: int = -1,
        bytes: int = -1,
        seq: int = -1,
        group: int = -1,
        peer: int = -1,
        stream: int = -1,
        flags: int = 0,
        depth: int = -1,
        step: int | None = None,
        stage: int | None = None,
        chunk: int | None = None,
        microbatch: int | None = None,
    ) -> None:
        """Add a finished event that was measured elsewhere; ``depth`` -1 and context ``None`` mean those of now."""
        wide = [_saturate(v, 64) for v in (start_ns, duration_ns, issue_ns, cpu_ns, bytes, seq, group)]
        given = (step, stage, chunk, microbatch)
        context = tuple(
            now if value is None else _saturate(value, bits)
            for now, value, bits in zip(self._context, given, _CONTEXT_BITS, strict=True)
        )
        site, peer, stream, depth = (_saturate(v, b) for v, b in ((site, 32), (peer, 32), (stream, 32), (depth, 16)))
        flags = _saturate(flags, 64) & 0xFFFF
        if not self.enabled:
            return
        state = self._state()
        depth = state.live if depth == -1 else depth
        row = (*wide, site, context[0], peer, *context[1:], depth, flags, state.index, stream)
        self._append(state, row)

    def set_context(
        self, step: int | None = None, stage: int | None = None, chunk: int | None = None, microbatch: int | None = None
    ) -> None:
        """Set what is stamped on events begun from now on, in every thread; ``None`` keeps the value."""
        given = (step, stage, chunk, microbatch)
        step_, stage_, chunk_, microbatch_ = (
            now if value is None else _saturate(value, bits)
            for now, value, bits in zip(self._context, given, _CONTEXT_BITS, strict=True)
        )
        self._context = (step_, stage_, chunk_, microbatch_)

    def context(self) -> tuple[int, int, int, int]:
        """Step, stage, chunk, microbatch as set now."""
        return self._context

    def span(self, site: int, /) -> PySpan:
        """Reusable, re-entrant ``with`` target that records the enclosed code as one event of ``site``."""
        return PySpan(self, site)

    def drain(self) -> NDArray[np.void]:
        """Take the finished records of all threads.

        Returns
        -------
        numpy array of RECORD_DTYPE, dims (event,)
            By thread, then in the order in which they ended.
        """
        rows: list[Row] = []
        states = list(self._states)
        with self._drain_lock:
            ended = [state for state in states if not state.thread.is_alive()]
            for state in states:
                for _ in range(len(state.ring)):
                    rows.append(state.ring.popleft())
                    state.popped += 1
        for state in ended:
            self._retire(state)
        return np.array(rows, dtype=RECORD_DTYPE)

    def open_spans(self) -> NDArray[np.void]:
        """Look at the spans that are open now in all threads, flagged ``Flag.OPEN``; the duration is their age."""
        now_ns = self.now_ns()
        rows = [
            self._row(state, slot, max(0, now_ns - slot.start_ns), -1, (-1, -1, -1, -1), int(Flag.OPEN))
            for state in list(self._states)
            for slot in list(state.stack)
            if slot.live
        ]
        return np.array(rows, dtype=RECORD_DTYPE)

    def now_ns(self) -> int:
        """``CLOCK_MONOTONIC`` in ns."""
        return time.clock_gettime_ns(time.CLOCK_MONOTONIC) if self._test_clock is None else self._test_clock

    def threads(self) -> list[tuple[int, int, str]]:
        """Every thread seen: index (as in the records), native thread id, Python name or ''."""
        return list(self._names)

    def counters(self) -> dict[str, int]:
        """Count ``recorded``, ``dropped``, ``mismatched``, ``too_deep`` and ``threads`` since the start."""
        with self._drain_lock, self._registry_lock:
            return {
                "recorded": self._retired_recorded + sum(state.recorded for state in self._states),
                "dropped": self._retired_dropped + sum(state.dropped for state in self._states),
                "mismatched": self._mismatched,
                "too_deep": self._too_deep,
                "threads": len(self._names),
            }

    def before_fork(self) -> None:
        """Hold the locks, so that a child does not find them taken by a thread that it does not have."""
        self._drain_lock.acquire()
        self._registry_lock.acquire()

    def after_fork_in_parent(self) -> None:
        """Release the locks in the parent."""
        self._registry_lock.release()
        self._drain_lock.release()

    def after_fork_in_child(self) -> None:
        """Release the locks, forget what belongs to the parent, and stop recording."""
        self.enabled = False
        state = self._known_state()
        self._states = [] if state is None else [state]
        if state is not None:
            state.ring.clear()
            state.recorded = state.popped = 0
            self._names[state.index] = (state.index, threading.get_native_id(), self._names[state.index][2])
        self._mismatched = self._too_deep = self._retired_recorded = self._retired_dropped = 0
        self.after_fork_in_parent()

    def _set_test_clock(self, ns: int | None, /) -> None:
        """Make both clocks stand at ``ns``; ``None`` gives the real ones back."""
        self._test_clock = ns

    def _cpu_ns(self) -> int:
        return time.thread_time_ns() if self._test_clock is None else self._test_clock

    def _known_state(self) -> _ThreadState | None:
        return getattr(self._local, "state", None)

    def _state(self) -> _ThreadState:
        state = self._known_state()
        if state is None:
            name = self._thread_name()
            with self._registry_lock:
                state = self._local.state = _ThreadState(len(self._names), self._capacity)
                self._names.append((state.index, threading.get_native_id(), name))
                self._states.append(state)
        return state

    def _retire(self, state: _ThreadState) -> None:
        """Forget a thread that ended; spans that it left open can never be closed."""
        with self._registry_lock:
            if state in self._states:
                self._states.remove(state)
                self._retired_recorded += state.recorded
                self._retired_dropped += state.dropped
                self._mismatched += state.live

    def _push(self, site: int, owner: int) -> int:
        state = self._state()
        position = len(state.stack)
        if position == MAX_DEPTH:
            state.overflow += 1
            self._too_deep += 1
            return _NO_SPAN
        state.serial += 1
        token = (state.index & 0x7FFF) << 48 | (state.serial & 0xFF_FFFF_FFFF) << 8 | position
        live = self.enabled
        cpu_start_ns = self._cpu_ns() if live and self._cpu_time else -1
        start_ns = self.now_ns() if live else -1
        state.stack.append(_Slot(token, owner, live, site, start_ns, cpu_start_ns, self._context, state.live))
        state.live += live
        return token

    def _position(self, state: _ThreadState, token: int) -> int:
        """Where ``token`` is on the stack, or -1."""
        position = token & 0xFF
        known = position < len(state.stack) and state.stack[position].token == token
        return position if known else -1

    def _exit(self, owner: int, flags: int) -> None:
        """End of a ``with``: the innermost span that this object opened, whatever is still open inside it."""
        state = self._known_state()
        if state is None:
            self._mismatched += 1
        elif state.overflow:
            state.overflow -= 1
        else:
            positions = (p for p in reversed(range(len(state.stack))) if state.stack[p].owner == owner)
            self._end_at(state, next(positions, -1), (-1, -1, -1, -1), flags)

    def _end_innermost(self, state: _ThreadState, token: int, values: tuple[int, int, int, int], flags: int) -> bool:
        """Close the innermost; False if none was open. A token of ``_NO_SPAN`` closes only one that was too deep."""
        if state.overflow:
            state.overflow -= 1
        elif token == 0 and state.stack:
            self._end_at(state, len(state.stack) - 1, values, flags)
        else:
            return token == _NO_SPAN
        return True

    def _end_at(self, state: _ThreadState, position: int, values: tuple[int, int, int, int], flags: int) -> None:
        """Close the span at ``position`` (-1: count a mismatch) after those inside it."""
        if position < 0:
            self._mismatched += 1
            return
        now_ns = self.now_ns() if self.enabled else -1
        cpu_ns = self._cpu_ns() if self.enabled and self._cpu_time else -1
        state.overflow = 0
        while len(state.stack) > position + 1:
            self._close(state, now_ns, cpu_ns, (-1, -1, -1, -1), int(Flag.REPAIRED))
        self._close(state, now_ns, cpu_ns, values, flags)

    def _close(
        self, state: _ThreadState, now_ns: int, cpu_ns: int, values: tuple[int, int, int, int], flags: int
    ) -> None:
        """Take the innermost span off the stack; record it if the recorder was on at both its ends."""
        slot = state.pop()
        if slot.live and now_ns >= 0:
            spent_ns = max(0, cpu_ns - slot.cpu_start_ns) if cpu_ns >= 0 and slot.cpu_start_ns >= 0 else -1
            self._append(state, self._row(state, slot, max(0, now_ns - slot.start_ns), spent_ns, values, flags))

    def _row(
        self,
        state: _ThreadState,
        slot: _Slot,
        duration_ns: int,
        cpu_ns: int,
        values: tuple[int, int, int, int],
        flags: int,
    ) -> Row:
        num_bytes, seq, group, peer = values
        step, stage, chunk, microbatch = slot.context
        wide = (slot.start_ns, duration_ns, -1, cpu_ns, num_bytes, seq, group)
        return (*wide, slot.site, step, peer, stage, chunk, microbatch, slot.depth, flags, state.index, -1)

    def _append(self, state: _ThreadState, row: Row) -> None:
        state.ring.append(row)
        state.recorded += 1
