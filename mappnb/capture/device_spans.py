"""Device times of compute and optimizer spans: what the host issues and goes on from, timed where it runs."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any, Final

from mappnb.capture._patches import ImportWatch, Patches
from mappnb.capture.clock import CudaClock, DeviceSpan, DeviceTime
from mappnb.capture.points import SessionLike
from mappnb.terms import Category, Flag

__all__ = ["PATIENCE_S", "DeviceProbe"]

log = logging.getLogger("mappnb")

PATIENCE_S: Final = 2.0
"""How long the end of a recording waits for spans that the device has not passed yet, in seconds."""

_POLL_S: Final = 0.005
_TIMED: Final = (Category.COMPUTE, Category.OPTIMIZER)
_POSITION: Final = 0xFF  # of a span among the open ones of its thread: the low byte of its token
_REPAIRED: Final = int(Flag.REPAIRED)


class _Begun:
    """What a device row needs of its host span, as it was at the begin."""

    __slots__ = ("context", "depth", "ended", "flags", "kept", "site")

    def __init__(self, site: int, context: tuple[int, int, int, int], depth: int) -> None:
        self.site = site
        self.context = context
        self.depth = depth
        self.flags = 0
        self.ended = False
        self.kept = True


class _Open(threading.local):
    """Spans that are open in this thread, outermost first: token, and the device span or None."""

    def __init__(self) -> None:
        self.stack: list[tuple[int, DeviceSpan | None]] = []


class _Timer:
    """Stands between the probes and the recorder's core: every begin and end passes, some are marked on the device too.

    Parameters
    ----------
    session
        Gets the rows.
    make_clock, initialized
        As of :class:`DeviceProbe`.
    """

    def __init__(
        self, session: SessionLike, make_clock: Callable[[], CudaClock], initialized: Callable[[], bool]
    ) -> None:
        self._session = session
        self._recorder = recorder = session.recorder
        self._switch: Any = getattr(recorder, "_core", recorder)  # its ``enabled`` without a property
        self._core_begin, self._core_end = recorder.begin, recorder.end
        self._make_clock, self._initialized = make_clock, initialized
        self._clock: CudaClock | None = None
        self._lock = threading.Lock()
        self._open = _Open()
        self._is_timed: dict[int, bool] = {}
        self._num_forgotten = self._uncertainty_ns = 0
        self._graphs_said = self._off = self._closing = False

    def begin(self, site: int, /) -> int:
        """Open a span of ``site`` in this thread, and mark its begin on the device if it is compute."""
        token = self._core_begin(site)
        if self._off:
            return token
        try:
            stack, position = self._open.stack, token & _POSITION
            while token > 0 and stack and stack[-1][0] & _POSITION >= position:
                self._forget(stack.pop()[1])  # closed by a ``with`` around it: its place is taken
            span = self._mark(site, position) if token > 0 and self._switch.enabled else None
            stack.append((token, span))
        except Exception as err:  # noqa: BLE001 (capture never kills training)
            self._fail(err)
        return token

    def end(
        self, token: int = 0, bytes: int = -1, group: int = -1, seq: int = -1, peer: int = -1, flags: int = 0
    ) -> None:
        """Close the span of ``token`` (0: the innermost) as the core does, on the device too."""
        self._core_end(token, bytes, group, seq, peer, flags)
        if self._off:
            return
        try:
            stack = self._open.stack
            if not stack:
                return
            if token not in (0, stack[-1][0]):
                at = next((i for i in range(len(stack) - 1, -1, -1) if stack[i][0] == token), -1)
                if at < 0:
                    return
                while len(stack) > at + 1:
                    self._close(stack.pop()[1], _REPAIRED)
            self._close(stack.pop()[1], flags)
        except Exception as err:  # noqa: BLE001 (capture never kills training)
            self._fail(err)

    def _mark(self, site: int, depth: int) -> DeviceSpan | None:
        """Mark a begin on the current stream; None if this is no device work, or cannot be timed."""
        timed = self._is_timed.get(site)
        if timed is None:
            found = self._recorder.sites_since(site)[:1] if site >= 0 else []
            timed = self._is_timed[site] = bool(found) and found[0].category in _TIMED
        if not timed:
            return None
        clock = self._clock
        if clock is None:
            if not self._initialized():
                return None
            with self._lock:
                clock = self._clock = self._clock or self._make_clock()
        return clock.begin(_Begun(site, self._recorder.context(), depth))

    def _close(self, span: DeviceSpan | None, flags: int) -> None:
        """Mark the end of a span; one that ends while the recorder is off is not kept, as on the host."""
        if span is None or self._clock is None:
            return
        span.payload.flags |= flags
        span.payload.kept &= bool(self._switch.enabled)
        span.payload.ended = True
        self._clock.end(span)

    def _forget(self, span: DeviceSpan | None) -> None:
        """Give the events of a span back whose end nobody told."""
        if span is not None:
            self._num_forgotten += 1
            span.payload.kept = False
            self._close(span, 0)

    def _fail(self, err: Exception) -> None:
        self._off = True
        self._session.fail("device spans", err)

    def close(self) -> None:
        """Mark nothing any more; the next :meth:`resolve` is the last."""
        self._off = self._closing = True

    def resolve(self) -> bool:
        """Record what the device has passed; True once there will be no more. Runs on the writer thread."""
        try:
            if self._closing:
                self._finish()
            elif self._clock is not None and self._recorder.enabled:  # what is pending outlasts a pause
                self._take(self._clock.resolve())
        except Exception as err:  # noqa: BLE001 (capture never kills training)
            self._fail(err)
            return True
        return self._closing

    def _finish(self) -> None:
        """Wait a little for the rest, without blocking the device, and say what was lost."""
        clock = self._clock
        if clock is None or self._session.meta.get("degraded"):
            return
        deadline_s = time.monotonic() + PATIENCE_S
        while True:
            self._take_last(clock.resolve())
            left = clock.open_spans()
            if time.monotonic() > deadline_s or not any(span.payload.ended for span in left):
                break
            time.sleep(_POLL_S)
        lost = len(left) + clock.num_dropped + self._num_forgotten
        self._session.meta.update(device_spans_lost=lost, device_uncertainty_ns=self._uncertainty_ns)

    def _take_last(self, times: list[DeviceTime]) -> None:
        """Record device times though the recording may be paused: they are from before the pause."""
        if self._recorder.enabled:
            self._take(times)
            return
        self._recorder.enabled = True
        try:
            self._take(times)
        finally:
            self._recorder.enabled = False

    def _take(self, times: list[DeviceTime]) -> None:
        """Record device times as rows of their sites, with the context of the begin."""
        for found in times:
            begun: _Begun = found.payload
            if found.captured:
                self._say_graphs()
            elif begun.kept:
                step, stage, chunk, microbatch = begun.context
                self._uncertainty_ns = max(self._uncertainty_ns, found.uncertainty_ns)
                self._recorder.record(
                    begun.site,
                    found.start_ns,
                    found.duration_ns,
                    issue_ns=found.issue_ns,
                    stream=found.stream,
                    flags=begun.flags,
                    depth=begun.depth,
                    step=step,
                    stage=stage,
                    chunk=chunk,
                    microbatch=microbatch,
                )

    def _say_graphs(self) -> None:
        if not self._graphs_said:
            self._graphs_said = True
            self._session.meta["cuda_graphs"] = True
            log.info("mappnb: spans inside a CUDA graph have no device times; the span that replays the graph has")


class DeviceProbe:
    """Gives compute and optimizer spans a second row with the times at which the device ran them. Untested on GPU.

    It comes first among the probes: it replaces ``begin`` and ``end`` of the session's recorder before others bind
    them. With a torch that is built without CUDA nothing is replaced and nothing costs.

    Parameters
    ----------
    clock_factory
        Makes the clock when the first span of device work begins; by default :class:`mappnb.capture.clock.CudaClock`
        on the device that is the current one then. A factory that is given is used whatever torch was built for.
    initialized
        Whether the program has initialised the device; by default ``torch.cuda.is_initialized``. Until it has, spans
        have host times only: initialising it here would break programs that fork later.

    Notes
    -----
    The host row stays: it says when the work was issued. The device row has the same site and context; its ``stream``
    is 0 or more, its ``issue_ns`` the host time of the begin, its ``thread`` that of the writer, which records it once
    the device has passed its end. It spans all that its stream did between two events: waits of that stream for other
    streams, as for a collective inside a layer, are part of it. Spans of ``with mappnb.span(...)``, and backward passes
    of modules whose input has no gradient, have host rows only.

    ``meta`` of the rank: ``cuda_graphs`` where a graph was captured; ``device_spans_lost``, spans whose device times
    never came (all events in use, or not passed 2 s after the end of the recording); ``device_uncertainty_ns``, the
    widest bracket between the two clocks.
    """

    name = "device"

    def __init__(
        self,
        clock_factory: Callable[[], CudaClock] | None = None,
        initialized: Callable[[], bool] | None = None,
    ) -> None:
        self._clock_factory, self._initialized = clock_factory, initialized
        self._patches = Patches()
        self._watch: ImportWatch | None = None
        self._timer: _Timer | None = None

    def install(self, session: SessionLike) -> None:
        """Replace the recorder's calls, now or when the program imports a torch that is built for CUDA."""
        if self._clock_factory is not None:
            self._attach(session, self._clock_factory, self._initialized or _always)
            return

        def loaded(torch: Any) -> None:
            if torch.version.cuda is not None:
                self._attach(session, CudaClock, self._initialized or torch.cuda.is_initialized)

        self._watch = ImportWatch(session.fail)
        self._watch.when("torch", loaded)

    def uninstall(self) -> None:
        """Give the recorder its own calls back; the writer thread takes what is pending in its next round."""
        if self._watch is not None:
            self._watch.stop()
        self._patches.undo()
        if self._timer is not None:
            self._timer.close()
        self._watch = self._timer = None

    def _attach(
        self, session: SessionLike, make_clock: Callable[[], CudaClock], initialized: Callable[[], bool]
    ) -> None:
        self._timer = timer = _Timer(session, make_clock, initialized)
        self._patches.set(session.recorder, "begin", timer.begin)
        self._patches.set(session.recorder, "end", timer.end)
        session.defer(timer.resolve)


def _always() -> bool:
    return True
