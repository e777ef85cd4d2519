"""Clocks of a rank: the host's, and a CUDA device's read through pairs of events and put on the host's time."""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

from mappnb.capture._device import Anchors, Device, DeviceEvent, DeviceSpan, DeviceTime, TorchDevice

__all__ = [
    "Anchor",
    "Clock",
    "CpuClock",
    "CudaClock",
    "Device",
    "DeviceEvent",
    "DeviceSpan",
    "DeviceTime",
    "TorchDevice",
]

MAX_ANCHOR_INTERVAL_S: Final = 10.0
"""Host and device clocks are compared at least this often while spans are resolved."""

_SPIN_NS: Final = 2_000_000
_NUM_TRIES: Final = 5


class Anchor(NamedTuple):
    """One moment on two clocks, in ns; the true monotonic time lies within ``uncertainty_ns`` of the one given."""

    wall_ns: int
    monotonic_ns: int
    uncertainty_ns: int


class Clock(Protocol):
    """What a recording session asks of a clock."""

    @property
    def boot_id(self) -> str:
        """Identity of the monotonic clock: ranks with the same one share it."""
        ...

    @property
    def host(self) -> str:
        """Name of the host."""
        ...

    def now_ns(self) -> int:
        """``CLOCK_MONOTONIC`` in ns."""
        ...

    def anchor(self) -> Anchor:
        """Read the wall clock and the monotonic clock together."""
        ...


class CpuClock:
    """The host's monotonic clock, and where it stands against the wall clock.

    Attributes
    ----------
    boot_id : str
        Random id of this boot of the host; ranks that show the same one share a monotonic clock. '' if not known.
    host : str
        Name of the host.
    """

    def __init__(self) -> None:
        self.boot_id = _boot_id()
        self.host = socket.gethostname()

    def now_ns(self) -> int:
        """``CLOCK_MONOTONIC`` in ns, the clock of every recorded time."""
        return time.clock_gettime_ns(time.CLOCK_MONOTONIC)

    def anchor(self, num_readings: int = 9) -> Anchor:
        """Read the wall clock between two readings of the monotonic clock; the closest pair of several.

        Returns
        -------
        Anchor
            ``uncertainty_ns`` is half the bracket; it says nothing of how right the wall clock itself is.
        """
        best: Anchor | None = None
        for _ in range(max(1, num_readings)):
            before_ns = self.now_ns()
            wall_ns = time.time_ns()
            half_ns = (self.now_ns() - before_ns + 1) // 2
            if best is None or half_ns < best.uncertainty_ns:
                best = Anchor(wall_ns, before_ns + half_ns, half_ns)
        assert best is not None
        return best


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


class CudaClock(CpuClock):
    """Times spans on a CUDA device without ever waiting for it. Untested on GPU (tested on a simulated device).

    Parameters
    ----------
    device
        Makes the events; by default the current CUDA device.
    max_events
        Bound of the pool. When all are in use, spans are not timed, and counted in ``num_dropped``.
    anchor_every_s
        How often the two clocks are compared, in seconds; at most 10.
    now_ns
        Host clock; tests give a simulated one.

    Notes
    -----
    ``torch.cuda.Event.elapsed_time`` is a float32 in ms, 0.6 µs at 10 s: times are therefore taken from the latest
    anchor. An anchor is an event on an otherwise idle stream; the device passed it between the host times before it
    was recorded and after it was first seen passed. With ``CUDA_DEVICE_MAX_CONNECTIONS=1`` it may queue behind other
    work: its bracket, and so the uncertainty, is then as wide as that wait.
    """

    def __init__(
        self,
        device: Device | None = None,
        *,
        max_events: int = 8192,
        anchor_every_s: float = 5.0,
        now_ns: Callable[[], int] | None = None,
    ) -> None:
        super().__init__()
        if not 0 <= anchor_every_s <= MAX_ANCHOR_INTERVAL_S:
            raise ValueError(f"anchor_every_s={anchor_every_s}: give 0 to {MAX_ANCHOR_INTERVAL_S:g} seconds")
        self._device: Device = TorchDevice() if device is None else device
        self._host_ns = super().now_ns if now_ns is None else now_ns
        self._anchor_every_ns = anchor_every_s * 1e9
        self._anchored_ns: int | None = None
        self._anchors = Anchors()
        self._free: deque[DeviceEvent] = deque()
        self._max_spans = self._left_to_make = max_events
        self._pool_lock = threading.Lock()
        self._resolve_lock = threading.Lock()
        self._free_anchors: deque[DeviceEvent] = deque()
        self._late_anchor: DeviceEvent | None = None
        self._begun: dict[int, DeviceSpan] = {}
        self._ended: deque[DeviceSpan] = deque()
        self._pending: list[DeviceSpan] = []
        self._prepared = threading.local()
        self.num_dropped = 0

    def now_ns(self) -> int:
        """``CLOCK_MONOTONIC`` in ns, the clock of every recorded time."""
        return self._host_ns()

    def begin(self, payload: Any = None) -> DeviceSpan | None:
        """Mark a start on the current stream.

        Returns
        -------
        DeviceSpan or None
            For :meth:`end`. None: all events are in use, and the span is not timed.
        """
        issue_ns = self.now_ns()
        stream = self._device.current_stream()
        span = DeviceSpan(payload, issue_ns, self._device.stream_id(stream), self._device.is_capturing())
        if not span.captured:
            pair = self._take_pair()
            if pair is None:
                self.num_dropped += 1
                return None
            span.start_event, span.end_event = pair
            span.start_event.record(stream)
        elif len(self._begun) >= self._max_spans:
            self.num_dropped += 1
            return None
        self._begun[id(span)] = span
        return span

    def end(self, span: DeviceSpan | None) -> None:
        """Mark the end on the current stream; ``None`` is ignored."""
        if span is None or self._begun.pop(id(span), None) is None:
            return
        if span.end_event is not None and self._device.is_capturing():
            span.captured = True  # the capture began inside it: its end cannot be marked
        elif span.end_event is not None:
            stream = self._device.current_stream()
            span.end_stream = self._device.stream_id(stream)
            span.end_event.record(stream)
        self._ended.append(span)

    def resolve(self) -> list[DeviceTime]:
        """Return the spans whose end the device has passed since the last call; never waits for the device.

        Called by one thread at a time, usually the writer's. What the device has not passed stays pending.
        """
        if not getattr(self._prepared, "done", False):
            self._device.prepare_thread()
            self._prepared.done = True
        with self._resolve_lock:
            self._anchor_if_due()
            while self._ended:
                self._pending.append(self._ended.popleft())
            blocked: set[int] = set()
            done: list[DeviceSpan] = []
            waiting: list[DeviceSpan] = []
            for span in self._pending:
                (done if self._is_done(span, blocked) else waiting).append(span)
            self._pending = waiting
            return [self._resolve_one(span) for span in done]

    def open_spans(self) -> list[DeviceTime]:
        """Spans that the device has not finished, or was not seen to; their duration is their age on the host."""
        now_ns = self.now_ns()
        spans = [*list(self._begun.values()), *list(self._ended), *self._pending]
        return [
            DeviceTime(s.payload, s.issue_ns, max(0, now_ns - s.issue_ns), s.issue_ns, s.stream, -1, s.captured, True)
            for s in spans
        ]

    def _is_done(self, span: DeviceSpan, blocked: set[int]) -> bool:
        """Whether ``span`` can be resolved. Work of a stream ends in order: one that waits blocks those behind it."""
        if span.captured:
            return span.start_event is None or span.start_event.query()
        if self._anchors.event is None or span.end_stream in blocked:
            return False
        assert span.start_event is not None
        assert span.end_event is not None
        if span.end_event.query() and (span.stream == span.end_stream or span.start_event.query()):
            return True
        blocked.add(span.end_stream)
        return False

    def _resolve_one(self, span: DeviceSpan) -> DeviceTime:
        start, end = span.start_event, span.end_event
        span.start_event = span.end_event = None
        if start is None or end is None or span.captured:
            time_ = DeviceTime(span.payload, span.issue_ns, 0, span.issue_ns, span.stream, -1, captured=True)
        else:
            host_ns, slope, uncertainty_ns = self._anchors.to_host(start)
            duration_ns = max(0, round(1e6 * start.elapsed_time(end) * slope))
            start_ns, around_ns = round(host_ns), round(uncertainty_ns)
            time_ = DeviceTime(span.payload, start_ns, duration_ns, span.issue_ns, span.stream, around_ns)
        self._free.extend(event for event in (start, end) if event is not None)
        return time_

    def _take_pair(self) -> tuple[DeviceEvent, DeviceEvent] | None:
        first = self._take()
        if first is None:
            return None
        second = self._take()
        if second is None:
            self._free.append(first)
            return None
        return first, second

    def _take(self) -> DeviceEvent | None:
        """Take an event from the pool, or make one within its bound."""
        try:
            return self._free.popleft()
        except IndexError:
            with self._pool_lock:
                if self._left_to_make <= 0:
                    return None
                self._left_to_make -= 1
            return self._device.make_event()

    def _anchor_if_due(self) -> None:
        """Compare the two clocks if it is time; of a few tries the narrowest bracket counts."""
        now_ns = self.now_ns()
        if self._anchored_ns is not None and now_ns - self._anchored_ns < self._anchor_every_ns:
            return
        if self._late_anchor is not None and self._late_anchor.query():
            self._free_anchors.append(self._late_anchor)
            self._late_anchor = None
        tries = [found for found in (self._try_anchor() for _ in range(_NUM_TRIES)) if found is not None]
        if not tries:
            return
        best = min(tries, key=lambda found: found[2])
        replaced = self._anchors.add(*best)
        self._free_anchors.extend(found[0] for found in tries if found is not best)
        if replaced is not None:
            self._free_anchors.append(replaced)
        self._anchored_ns = now_ns

    def _try_anchor(self) -> tuple[DeviceEvent, float, float] | None:
        """Event, host time and half bracket in ns; None if the device did not pass it in 2 ms."""
        if self._late_anchor is not None:
            return None
        event = self._free_anchors.popleft() if self._free_anchors else self._device.make_event()
        before_ns = self.now_ns()
        event.record(self._device.side_stream())
        while not event.query():
            if self.now_ns() - before_ns > _SPIN_NS:
                self._late_anchor = event
                return None
        after_ns = self.now_ns()
        return event, (before_ns + after_ns) / 2, (after_ns - before_ns) / 2
