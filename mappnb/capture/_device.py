"""A CUDA device as the clock sees it: its events and streams, and the map from its time to the host's."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np

__all__ = ["Anchors", "Device", "DeviceEvent", "DeviceSpan", "DeviceTime", "TorchDevice"]

_NUM_ANCHORS: Final = 8
_MAX_DRIFT: Final = 200e-6  # of two crystals, as long as only one anchor is known
_RESOLUTION_NS: Final = 500.0  # of a CUDA event
_FLOAT32_STEP: Final = 2.0**-23
_RELAXED_CAPTURE: Final = 2  # cudaStreamCaptureModeRelaxed


class DeviceEvent(Protocol):
    """The part of ``torch.cuda.Event`` that is used."""

    def record(self, stream: Any, /) -> None:
        """Put the event at the end of the stream's work."""
        ...

    def query(self) -> bool:
        """Whether the device has passed it."""
        ...

    def elapsed_time(self, other: Any, /) -> float:
        """Milliseconds from this event to ``other``; both are passed."""
        ...


class Device(Protocol):
    """Makes events and names streams; tests inject a simulated one."""

    def make_event(self) -> DeviceEvent:
        """Make an event that takes time stamps."""
        ...

    def current_stream(self) -> Any:
        """Stream that this thread's work goes to."""
        ...

    def stream_id(self, stream: Any, /) -> int:
        """Small number of a stream."""
        ...

    def side_stream(self) -> Any:
        """Stream that nothing else uses."""
        ...

    def is_capturing(self) -> bool:
        """Whether the current stream is being captured into a CUDA graph."""
        ...

    def prepare_thread(self) -> None:
        """Make queries from this thread harmless to a capture that runs in another."""
        ...


class TorchDevice:
    """A CUDA device through torch. Untested on GPU.

    Parameters
    ----------
    index
        Number of the device; by default the current one of the calling thread.
    """

    def __init__(self, index: int | None = None) -> None:
        import torch

        self._cuda: Any = torch.cuda
        self._index = torch.cuda.current_device() if index is None else index
        self._side: Any = torch.cuda.Stream(device=self._index)

    def make_event(self) -> DeviceEvent:
        """Make a ``torch.cuda.Event`` with timing."""
        event: DeviceEvent = self._cuda.Event(enable_timing=True)
        return event

    def current_stream(self) -> Any:
        """Stream that this thread's work goes to."""
        return self._cuda.current_stream(self._index)

    def stream_id(self, stream: Any, /) -> int:
        """``stream_id`` of torch; 0 is the default stream."""
        return int(stream.stream_id) & 0x7FFF_FFFF

    def side_stream(self) -> Any:
        """Stream that only the anchors use."""
        return self._side

    def is_capturing(self) -> bool:
        """Whether the current stream is being captured into a CUDA graph."""
        return bool(self._cuda.is_current_stream_capturing())

    def prepare_thread(self) -> None:
        """Set this thread's capture mode to relaxed, as the watchdog of torch's NCCL group does.

        Notes
        -----
        Otherwise ``cudaEventQuery`` here would break a capture in global mode that runs in another thread.
        """
        import ctypes

        import torch

        version = str(torch.version.cuda or "").split(".")[0]
        for name in (f"libcudart.so.{version}", "libcudart.so"):
            try:
                mode = ctypes.c_int(_RELAXED_CAPTURE)
                ctypes.CDLL(name).cudaThreadExchangeStreamCaptureMode(ctypes.byref(mode))
            except (OSError, AttributeError):
                continue
            return


class DeviceSpan:
    """A span that was begun on a device; its times come from :meth:`CudaClock.resolve`."""

    __slots__ = ("captured", "end_event", "end_stream", "issue_ns", "payload", "start_event", "stream")

    def __init__(self, payload: Any, issue_ns: int, stream: int, captured: bool) -> None:
        self.payload = payload
        self.issue_ns = issue_ns
        self.stream = stream
        self.end_stream = stream
        self.captured = captured
        self.start_event: DeviceEvent | None = None
        self.end_event: DeviceEvent | None = None


@dataclass(frozen=True, slots=True)
class DeviceTime:
    """When a span ran on its device, on the host's clock.

    Attributes
    ----------
    payload
        What was given to :meth:`CudaClock.begin`.
    start_ns, duration_ns : int
        Device time on ``CLOCK_MONOTONIC``; host time of :meth:`CudaClock.begin` and 0 if ``captured``.
    issue_ns : int
        Host time of :meth:`CudaClock.begin`.
    stream : int
        Stream on which it began.
    uncertainty_ns : int
        Half width of the bracket in which the two clocks were compared; -1 if not measured.
    captured : bool
        True: issued while a CUDA graph was being captured, so that it has no time of its own.
    is_open : bool
        True: the device had not passed its end; the duration is its age since ``issue_ns``.
    """

    payload: Any
    start_ns: int
    duration_ns: int
    issue_ns: int
    stream: int
    uncertainty_ns: int
    captured: bool = False
    is_open: bool = False


class Anchors:
    """Piecewise linear map from device time (ns since the first anchor) to host time."""

    def __init__(self) -> None:
        self.event: DeviceEvent | None = None
        self._points: deque[tuple[float, float, float]] = deque(maxlen=_NUM_ANCHORS)

    def add(self, event: DeviceEvent, host_ns: float, uncertainty_ns: float) -> DeviceEvent | None:
        """Add a comparison of the two clocks; returns the event that it replaces."""
        previous = self.event
        device_ns = 0.0 if previous is None else self._points[-1][0] + 1e6 * previous.elapsed_time(event)
        if previous is not None and device_ns <= self._points[-1][0]:
            return event
        self._points.append((device_ns, host_ns, uncertainty_ns))
        self.event = event
        return previous

    def to_host(self, event: DeviceEvent) -> tuple[float, float, float]:
        """Host time of ``event`` in ns, host ns per device ns there, and its uncertainty in ns."""
        assert self.event is not None
        elapsed_ns = 1e6 * self.event.elapsed_time(event)
        device_ns = self._points[-1][0] + elapsed_ns
        rounding_ns = _RESOLUTION_NS + _FLOAT32_STEP * abs(elapsed_ns)
        if len(self._points) == 1:
            _, host_ns, around_ns = self._points[0]
            return host_ns + device_ns, 1.0, around_ns + abs(device_ns) * _MAX_DRIFT + rounding_ns
        device, host, around = np.array(self._points).T
        k = int(np.clip(np.searchsorted(device, device_ns), 1, len(device) - 1)) - 1
        length = device[k + 1] - device[k]
        slope = (host[k + 1] - host[k]) / length
        outside = max(device[k] - device_ns, device_ns - device[k + 1], 0.0)
        spread = max(around[k], around[k + 1]) + outside * (around[k] + around[k + 1]) / length + rounding_ns
        return host[k] + (device_ns - device[k]) * slope, float(slope), float(spread)
