"""The clocks: anchors are honest brackets, and device times come back from a simulated asynchronous device."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

import numpy as np
import pytest

from mappnb.capture.clock import CpuClock, CudaClock


def test_cpu_anchor_is_a_bracket_of_both_clocks() -> None:
    clock = CpuClock()
    before_ns = clock.now_ns()
    anchor = clock.anchor()
    after_ns = clock.now_ns()
    assert before_ns <= anchor.monotonic_ns <= after_ns
    assert 0 <= anchor.uncertainty_ns < 50_000_000
    assert abs(anchor.wall_ns - time.time_ns()) < 5e9
    assert clock.host
    assert clock.boot_id == CpuClock().boot_id


def test_cpu_anchor_takes_the_narrowest_of_its_readings(monkeypatch) -> None:
    clock = CpuClock()
    readings = iter([0, 500, 1000, 1010, 2000, 2300])
    monkeypatch.setattr(clock, "now_ns", lambda: next(readings))
    anchor = clock.anchor(num_readings=3)
    assert (anchor.monotonic_ns, anchor.uncertainty_ns) == (1005, 5)


# ---- a simulated device: its clock has an offset and a drift, its work runs behind the host


@dataclass
class Stream:
    number: int
    free_ns: float = 0.0


class Event:
    """As ``torch.cuda.Event``: passed some time after it was recorded; asking takes host time."""

    def __init__(self, device: FakeDevice) -> None:
        self.device = device
        self.passed_ns: float | None = None

    def record(self, stream: Stream) -> None:
        self.device.host_ns += 1_000
        stream.free_ns = max(stream.free_ns, self.device.host_ns + self.device.latency_ns)
        self.passed_ns = stream.free_ns
        self.device.num_recorded += 1

    def query(self) -> bool:
        self.device.host_ns += 500
        return self.passed_ns is not None and self.passed_ns <= self.device.host_ns

    def elapsed_time(self, other: Event) -> float:
        assert self.query()
        assert other.query()
        return float(np.float32((self.device.time_ns(other) - self.device.time_ns(self)) / 1e6))


@dataclass
class FakeDevice:
    offset_ns: float = 7e15
    drift: float = 30e-6
    latency_ns: float = 4_000.0
    host_ns: float = 1e12
    capturing: bool = False
    num_recorded: int = 0
    num_made: int = 0
    streams: list[Stream] = field(default_factory=lambda: [Stream(0), Stream(1), Stream(2)])
    current: int = 0

    def time_ns(self, event: Event) -> float:
        return event.passed_ns * (1 + self.drift) + self.offset_ns

    def now_ns(self) -> int:
        return int(self.host_ns)

    def make_event(self) -> Event:
        self.num_made += 1
        return Event(self)

    def current_stream(self) -> Stream:
        return self.streams[self.current]

    def stream_id(self, stream: Stream) -> int:
        return stream.number

    def side_stream(self) -> Stream:
        return self.streams[2]

    def is_capturing(self) -> bool:
        return self.capturing

    def prepare_thread(self) -> None:
        pass

    def launch(self, work_ns: float) -> tuple[float, float]:
        """Put a kernel on the current stream; returns when it runs, in host time."""
        stream = self.current_stream()
        start_ns = max(stream.free_ns, self.host_ns + self.latency_ns)
        stream.free_ns = start_ns + work_ns
        self.host_ns += 2_000
        return start_ns, stream.free_ns


@pytest.fixture
def device() -> FakeDevice:
    return FakeDevice()


@pytest.fixture
def clock(device) -> CudaClock:
    return CudaClock(device, max_events=64, anchor_every_s=2.0, now_ns=device.now_ns)


def timed(clock: CudaClock, device: FakeDevice, payload: object, work_ns: float) -> tuple[float, float]:
    """Begin, launch, end; returns when the work runs, in host time."""
    span = clock.begin(payload)
    when = device.launch(work_ns)
    clock.end(span)
    return when


@pytest.mark.parametrize("drift", [-150e-6, 0.0, 30e-6])
def test_device_times_come_back_within_their_uncertainty(device, clock, drift) -> None:
    device.drift = drift
    truth, found = {}, []
    for i in range(400):
        device.current = i % 2
        truth[i] = timed(clock, device, i, work_ns=3e6 + 1e4 * i)
        device.host_ns += 1e8
        found += clock.resolve()
    assert [time.payload for time in found] == list(range(400))
    for time_ in found:
        start_ns, end_ns = truth[time_.payload]
        assert abs(time_.start_ns - start_ns) <= time_.uncertainty_ns
        assert time_.duration_ns == pytest.approx(end_ns - start_ns, abs=1_500)
        assert time_.issue_ns <= time_.start_ns + time_.uncertainty_ns
        assert time_.stream == time_.payload % 2
        assert 0 < time_.uncertainty_ns < (10_000 if time_.payload > 50 else 400_000)  # one anchor: unknown drift
        assert not time_.captured


def test_resolve_never_waits_and_a_hung_device_shows_as_open(device, clock) -> None:
    timed(clock, device, "first", work_ns=1e6)
    device.host_ns += 1e8
    assert [time.payload for time in clock.resolve()] == ["first"]
    timed(clock, device, "hung", work_ns=1e18)
    begun = clock.begin("not ended")
    device.current = 1
    timed(clock, device, "other stream", work_ns=1e6)
    device.host_ns += 1e9
    before_ns = device.host_ns
    assert [time.payload for time in clock.resolve()] == ["other stream"]
    assert device.host_ns - before_ns < 1e6
    spans = {time.payload: time for time in clock.open_spans()}
    assert set(spans) == {"hung", "not ended"}
    assert all(time.is_open and time.uncertainty_ns == -1 for time in spans.values())
    assert spans["hung"].duration_ns >= 1e9
    clock.end(begun)
    assert clock.resolve() == []


def test_pool_is_bounded_and_reused(device, clock) -> None:
    for _ in range(50):
        timed(clock, device, None, work_ns=1e3)
        device.host_ns += 1e7
        assert len(clock.resolve()) == 1
    assert device.num_made < 10
    spans = [clock.begin(i) for i in range(40)]
    assert [span is None for span in spans] == [False] * 32 + [True] * 8
    assert clock.num_dropped == 8
    for span in spans:
        clock.end(span)
    device.host_ns += 1e9
    assert [time.payload for time in clock.resolve()] == list(range(32))
    assert device.num_made <= 64 + 8


def test_anchors_are_renewed_and_old_ones_bridge_a_pause(device, clock) -> None:
    clock.resolve()
    num_recorded = device.num_recorded
    device.host_ns += 1e9
    clock.resolve()
    assert device.num_recorded == num_recorded
    device.host_ns += 2e9
    clock.resolve()
    assert device.num_recorded > num_recorded
    start_ns, _ = timed(clock, device, "in the pause", work_ns=1e6)
    device.host_ns += 6e10
    (found,) = clock.resolve()
    assert abs(found.start_ns - start_ns) <= found.uncertainty_ns


def test_busy_side_stream_widens_no_bracket_and_blocks_nothing(device, clock) -> None:
    device.streams[2].free_ns = device.host_ns + 1e9  # one hardware queue, full of work
    start_ns, _ = timed(clock, device, "early", work_ns=1e6)
    before_ns = device.host_ns
    assert clock.resolve() == []
    assert device.host_ns - before_ns < 5e6
    device.host_ns += 2e9
    (found,) = clock.resolve()
    assert found.payload == "early"
    assert abs(found.start_ns - start_ns) <= found.uncertainty_ns < 500_000


def test_capture_records_no_event_and_marks_the_span(device, clock) -> None:
    clock.resolve()
    num_recorded = device.num_recorded
    device.capturing = True
    timed(clock, device, "captured", work_ns=1e6)
    assert device.num_recorded == num_recorded
    device.capturing = False
    half = clock.begin("half")
    device.capturing = True
    clock.end(half)
    device.capturing = False
    device.host_ns += 1e7
    captured, half_captured = clock.resolve()
    assert (captured.payload, half_captured.payload) == ("captured", "half")
    for time_ in (captured, half_captured):
        assert time_.captured
        assert (time_.duration_ns, time_.uncertainty_ns) == (0, -1)
        assert time_.start_ns == time_.issue_ns


def test_end_of_nothing_or_twice_is_ignored(device, clock) -> None:
    clock.end(None)
    span = clock.begin("once")
    clock.end(span)
    clock.end(span)
    device.host_ns += 1e8
    assert len(clock.resolve()) == 1


def test_begin_and_resolve_in_different_threads(device, clock) -> None:
    found: list[object] = []
    stop = threading.Event()

    def resolve() -> None:
        while not stop.is_set():
            found.extend(time.payload for time in clock.resolve())

    thread = threading.Thread(target=resolve)
    thread.start()
    begun = 0
    for i in range(2000):
        span = clock.begin(i)
        begun += span is not None
        clock.end(span)
    stop.set()
    thread.join()
    device.host_ns += 1e9
    found.extend(time.payload for time in clock.resolve())
    assert len(found) == len(set(found)) == begun
    assert begun + clock.num_dropped == 2000


def test_anchor_interval_is_bounded(device) -> None:
    with pytest.raises(ValueError, match="give 0 to 10 seconds"):
        CudaClock(device, anchor_every_s=11)
