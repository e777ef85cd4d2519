"""Device rows of compute spans, from a simulated asynchronous device: its work runs behind the host, on its own clock."""

from __future__ import annotations

import sys
import threading
import time
from dataclasses import dataclass, field

import numpy as np
import pytest
from capture.fake_session import FakeSession

import mappnb
from mappnb import analysis
from mappnb.capture import device_spans
from mappnb.capture.clock import CudaClock
from mappnb.capture.device_spans import DeviceProbe
from mappnb.terms import Flag

LAG_NS = 5_000_000


@dataclass
class Stream:
    number: int
    free_ns: float = 0.0


class Event:
    def __init__(self, device: Device) -> None:
        self.device = device
        self.passed_ns: float | None = None

    def record(self, stream: Stream) -> None:
        assert not self.device.capturing
        if self.device.broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        lag_ns = 4_000 if stream.number == 9 else self.device.lag_ns
        self.passed_ns = stream.free_ns = max(stream.free_ns, self.device.now_ns() + lag_ns)

    def query(self) -> bool:
        return self.passed_ns is not None and self.passed_ns <= self.device.now_ns()

    def elapsed_time(self, other: Event) -> float:
        assert self.query() and other.query()
        return float(np.float32((other.passed_ns - self.passed_ns) * (1 + self.device.drift) / 1e6))


@dataclass
class Device:
    """Runs what is launched ``lag_ns`` after the host at the earliest; ``host_ns`` None: on the real clock."""

    host_ns: int | None = 10**12
    lag_ns: int = LAG_NS
    drift: float = 20e-6
    capturing: bool = False
    broken: bool = False
    current: int = 0
    num_made: int = 0
    streams: dict[int, Stream] = field(default_factory=lambda: {n: Stream(n) for n in (0, 1, 9)})

    def now_ns(self) -> int:
        if self.host_ns is None:
            return time.clock_gettime_ns(time.CLOCK_MONOTONIC)
        self.host_ns += 1_000  # asking takes time
        return self.host_ns

    def make_event(self) -> Event:
        self.num_made += 1
        return Event(self)

    def current_stream(self) -> Stream:
        return self.streams[self.current]

    def stream_id(self, stream: Stream) -> int:
        return stream.number

    def side_stream(self) -> Stream:
        return self.streams[9]

    def is_capturing(self) -> bool:
        return self.capturing

    def prepare_thread(self) -> None:
        pass

    def launch(self, work_ns: int) -> tuple[float, float]:
        """Put work on the current stream and go on; returns when it will run, in host time."""
        stream = self.current_stream()
        start_ns = max(stream.free_ns, self.now_ns() + self.lag_ns)
        stream.free_ns = start_ns + work_ns
        return start_ns, stream.free_ns


class Rig:
    """A session in memory with a device probe; host time is the device's, and moves only as it is told."""

    def __init__(self, *, max_events: int = 64, on: bool = True) -> None:
        self.device, self.on, self.num_clocks = Device(), on, 0
        self.max_events = max_events
        self.session = FakeSession()
        core = self.session.recorder._core
        core.now_ns = self.session.recorder.now_ns = lambda: self.device.host_ns
        make = self.session.recorder.site
        self.forward = make(category="compute", op="forward_step", phase="forward")
        self.layer = make(category="compute", op="layer", phase="forward", layer=3)
        self.optimizer = make(category="optimizer", op="optimizer_step")
        self.data = make(category="data", op="next_batch")
        self.probe = DeviceProbe(clock_factory=self.clock, initialized=lambda: self.on)
        self.session.start(self.probe)
        self.begin, self.end = self.session.recorder.begin, self.session.recorder.end

    def clock(self) -> CudaClock:
        self.num_clocks += 1
        return CudaClock(self.device, max_events=self.max_events, anchor_every_s=1.0, now_ns=self.device.now_ns)

    def resolve(self, after_ns: int = 10**9) -> bool:
        """Let host time pass, then do what the writer thread does."""
        self.device.host_ns += after_ns
        return [fn() for fn in self.session.deferred] != [False]

    def rows(self) -> tuple[list[dict], list[dict]]:
        """Host rows and device rows since the last call."""
        found = self.session.events()
        return [e for e in found if e["stream"] < 0], [e for e in found if e["stream"] >= 0]


@pytest.fixture
def rig() -> Rig:
    return Rig()


def near(row: dict, start_ns: float, end_ns: float) -> bool:
    return abs(row["start_ns"] - start_ns) < 50_000 and abs(row["start_ns"] + row["duration_ns"] - end_ns) < 60_000


def test_nested_spans_get_device_rows_with_the_context_of_their_begin(rig):
    rig.resolve()  # the clocks are compared
    rig.session.recorder.set_context(step=4, stage=1, chunk=0, microbatch=2)
    outer = rig.begin(rig.forward)
    first = rig.device.launch(20_000_000)
    inner = rig.begin(rig.layer)
    rig.session.recorder.set_context(step=5, microbatch=3)
    second = rig.device.launch(30_000_000)
    rig.end(inner)
    waiting = rig.begin(rig.data)
    rig.end(waiting)
    rig.end(outer)
    rig.device.host_ns += 10_000_000
    assert not rig.resolve(after_ns=0)
    host, device = rig.rows()
    assert [row["op"] for row in host] == ["forward_step", "layer", "next_batch"] and device == []  # still running
    assert all(row["duration_ns"] < 1_000_000 for row in host)
    assert not rig.resolve()
    host, device = rig.rows()
    assert host == [] and [row["op"] for row in device] == ["forward_step", "layer"]
    forward, layer = device
    assert near(forward, first[0], second[1]) and near(layer, second[0], second[1])
    assert [(row["depth"], row["stream"], row["layer"], row["flags"]) for row in device] == [
        (0, 0, -1, 0),
        (1, 0, 3, 0),
    ]
    for row in device:
        assert (row["step"], row["stage"], row["chunk"], row["microbatch"]) == (4, 1, 0, 2)
        assert row["issue_ns"] < row["start_ns"] - 4_000_000  # it ran at least the lag behind
    assert rig.session.failures == []


def test_optimizer_is_device_work_too_and_streams_are_told_apart(rig):
    rig.device.current = 1
    token = rig.begin(rig.optimizer)
    when = rig.device.launch(7_000_000)
    rig.end(token)
    rig.resolve()
    _, (row,) = rig.rows()
    assert (row["category"], row["stream"]) == ("optimizer", 1)
    assert abs(row["duration_ns"] - (when[1] - when[0])) < 60_000


def test_end_without_a_token_ends_the_innermost(rig):
    rig.begin(rig.forward)
    rig.begin(rig.data)
    rig.begin(rig.layer)
    rig.device.launch(3_000_000)
    rig.end()  # the layer
    rig.end()  # the batch, no device work
    rig.device.launch(40_000_000)
    rig.end()
    rig.resolve()
    _, device = rig.rows()
    lengths = {row["op"]: row["duration_ns"] for row in device}
    assert lengths["layer"] == pytest.approx(3_000_000, abs=60_000)
    assert lengths["forward_step"] == pytest.approx(43_000_000, abs=60_000)


def test_children_left_open_by_an_exception_end_with_their_parent(rig):
    outer = rig.begin(rig.forward)
    stale = rig.begin(rig.layer)
    rig.device.launch(5_000_000)
    rig.end(outer, flags=int(Flag.FAILED))
    rig.end(stale)  # counted by the core, and nothing else
    rig.end(12345)
    token = rig.begin(rig.layer)
    rig.device.launch(1_000_000)
    rig.end(token)
    rig.resolve()
    host, device = rig.rows()
    seen = [(row["op"], row["flags"]) for row in device]
    assert seen == [("forward_step", Flag.FAILED), ("layer", Flag.REPAIRED), ("layer", 0)]
    assert seen == [(row["op"], row["flags"]) for row in host]
    assert rig.session.recorder.stats()["mismatched"] == 2


def test_spans_closed_by_a_with_around_them_are_forgotten(rig):
    with rig.session.recorder.span_of(rig.data):
        rig.begin(rig.layer)  # never ended by its owner
    for _ in range(3):
        token = rig.begin(rig.forward)
        rig.device.launch(1_000_000)
        rig.end(token)
    rig.resolve()
    host, device = rig.rows()
    assert [row["op"] for row in host].count("layer") == 1
    assert [row["op"] for row in device] == ["forward_step"] * 3
    rig.session.stop()
    rig.resolve()
    assert rig.session.meta["device_spans_lost"] == 1


def test_threads_have_their_own_spans(rig):
    outer = rig.begin(rig.forward)

    def backward() -> None:
        rig.end()  # nothing is open here
        rig.end(rig.begin(rig.layer))

    thread = threading.Thread(target=backward)
    thread.start()
    thread.join()
    rig.device.launch(9_000_000)
    rig.end(outer)
    rig.resolve()
    _, device = rig.rows()
    lengths = {row["op"]: row["duration_ns"] for row in device}
    assert lengths["layer"] < 100_000 and lengths["forward_step"] > 9_000_000


def test_too_deep_spans_are_not_timed(rig):
    tokens = [rig.begin(rig.data) for _ in range(256)]
    assert rig.begin(rig.layer) == -1
    rig.end(-1)
    rig.end(tokens[0])
    rig.end(rig.begin(rig.layer))
    rig.resolve()
    _, device = rig.rows()
    assert [row["op"] for row in device] == ["layer"] and device[0]["depth"] == 0


def test_spans_inside_a_graph_capture_have_no_row_and_it_is_said(rig, caplog):
    caplog.set_level("INFO", logger="mappnb")
    for _ in range(2):
        rig.device.capturing = True
        rig.end(rig.begin(rig.layer))
        rig.device.capturing = False
        rig.resolve()
    assert rig.device.num_made > 0  # of the anchors alone
    host, device = rig.rows()
    assert len(host) == 2 and device == []
    assert rig.session.meta["cuda_graphs"] is True
    assert sum("CUDA graph" in record.message for record in caplog.records) == 1


def test_exhausted_pool_is_counted(caplog):
    rig = Rig(max_events=8)  # four spans
    for _ in range(6):
        rig.end(rig.begin(rig.layer))
    rig.resolve()
    rig.end(rig.begin(rig.layer))
    rig.session.stop()
    rig.resolve()
    host, device = rig.rows()
    assert (len(host), len(device)) == (7, 5)
    assert rig.session.meta["device_spans_lost"] == 2


def test_nothing_is_made_before_the_program_initialises_its_device():
    rig = Rig(on=False)
    outer = rig.begin(rig.forward)
    assert not rig.resolve() and rig.num_clocks == 0
    rig.on = True
    rig.end(rig.begin(rig.data))
    assert rig.num_clocks == 0
    rig.end(rig.begin(rig.layer))
    rig.end(outer)
    rig.resolve()
    host, device = rig.rows()
    assert sorted(row["op"] for row in host) == ["forward_step", "layer", "next_batch"]
    assert [row["op"] for row in device] == ["layer"] and rig.num_clocks == 1


def test_uninstall_restores_the_recorder_and_takes_what_is_pending(rig):
    recorder = rig.session.recorder
    core = recorder._core
    assert recorder.begin != core.begin
    rig.end(rig.begin(rig.layer))
    left_open = rig.begin(rig.forward)
    rig.session.stop()
    assert (recorder.begin, recorder.end) == (core.begin, core.end)
    rig.end(left_open)  # through the old wrapper: the core alone
    rig.end(rig.begin(rig.layer))
    assert rig.resolve()
    host, device = rig.rows()
    assert len(host) == 3 and [row["op"] for row in device] == ["layer"]
    assert rig.session.meta["device_spans_lost"] == 1
    assert 0 < rig.session.meta["device_uncertainty_ns"] < 1_000_000


def test_a_device_that_hangs_delays_the_end_by_the_patience_only(rig, monkeypatch):
    monkeypatch.setattr(device_spans, "PATIENCE_S", 0.2)
    token = rig.begin(rig.layer)
    rig.device.launch(10**18)
    rig.end(token)
    rig.session.stop()
    before_s = time.monotonic()
    assert rig.resolve()
    assert 0.2 <= time.monotonic() - before_s < 2
    assert rig.session.meta["device_spans_lost"] == 1


def test_rows_from_before_a_pause_are_kept_and_none_from_the_pause(rig):
    recorder = rig.session.recorder
    rig.end(rig.begin(rig.layer))
    recorder.enabled = False
    rig.end(rig.begin(rig.forward))
    rig.resolve()
    assert rig.rows()[1] == []  # would be refused now
    recorder.enabled = True
    half = rig.begin(rig.optimizer)
    recorder.enabled = False
    rig.end(half)
    rig.session.stop()
    rig.resolve()
    host, device = rig.rows()
    assert [row["op"] for row in device] == ["layer"]
    assert rig.session.meta["device_spans_lost"] == 0 and not recorder.enabled


@pytest.mark.parametrize("when", ["make", "begin", "end", "resolve"])
def test_errors_of_ours_never_reach_the_program(rig, monkeypatch, when):
    def broken(*_):
        raise RuntimeError("no")

    if when == "make":
        monkeypatch.setattr(rig, "max_events", "many")
    elif when == "begin":
        rig.device.broken = True
    token = rig.begin(rig.layer)
    rig.device.broken = when in ("begin", "end")
    rig.end(token)
    if when == "resolve":
        monkeypatch.setattr(Event, "query", broken)
        assert rig.resolve()
    rig.end(rig.begin(rig.layer))
    assert len(rig.session.failures) == 1
    assert rig.session.failures[0][0] == "device spans"
    assert not rig.session.recorder.enabled
    rig.session.stop()
    assert rig.resolve()


def test_without_cuda_nothing_is_patched(monkeypatch):
    import torch

    monkeypatch.setattr(torch.version, "cuda", None)
    session = FakeSession().start(DeviceProbe())
    assert session.recorder.begin == session.recorder._core.begin and session.deferred == []
    session.stop()


def test_a_cuda_build_is_never_initialised_by_us(monkeypatch):
    import torch

    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: pytest.fail("would poison a later fork"))
    device, on = Device(), []
    monkeypatch.setattr(device_spans, "CudaClock", lambda: CudaClock(device, now_ns=device.now_ns))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: bool(on))
    session = FakeSession().start(DeviceProbe())
    recorder = session.recorder
    site = recorder.site(category="compute", op="layer")
    recorder.end(recorder.begin(site))
    assert device.num_made == 0
    on.append(True)
    recorder.end(recorder.begin(site))
    device.host_ns += 10**9
    assert session.deferred[0]() is False
    assert sorted(row["stream"] for row in session.events()) == [-1, -1, 0]
    session.stop()
    assert recorder.begin == recorder._core.begin


def test_torch_may_be_imported_later(tmp_path, monkeypatch):
    code = "class version: cuda = '12.8'\nclass cuda: is_initialized = staticmethod(lambda: False)\n"
    (tmp_path / "torch.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    finders = list(sys.meta_path)
    probe, session = DeviceProbe(), FakeSession()
    session.start(probe)
    recorder = session.recorder
    assert recorder.begin == recorder._core.begin and len(sys.meta_path) == len(finders) + 1
    import torch

    assert torch.version.cuda == "12.8"
    assert recorder.begin != recorder._core.begin
    session.stop()
    assert recorder.begin == recorder._core.begin and sys.meta_path == finders and session.failures == []


# ------------------------------------------------------------------------------------ through a session, into a run
def steps_on(device: Device, session, num_steps: int, num_microbatches: int, work_ns: int) -> list[tuple[float, float]]:
    """Issue forwards far faster than they run; returns when each runs."""
    recorder = session.recorder
    forward = recorder.site(category="compute", op="forward_step", phase="forward")
    layer = recorder.site(category="compute", op="layer", phase="forward", layer=0)
    truth = []
    for i in range(num_steps):
        with mappnb.step(i):
            for k in range(num_microbatches):
                recorder.set_context(microbatch=k)
                token = recorder.begin(forward)
                inner = recorder.begin(layer)
                truth.append(device.launch(work_ns))
                recorder.end(inner)
                recorder.end(token)
            while device.streams[0].free_ns > device.now_ns():  # the program reads its loss
                time.sleep(0.001)
    return truth


def record(path, device: Device, **options):
    probe = DeviceProbe(clock_factory=lambda: CudaClock(device), initialized=lambda: True)
    return mappnb.record(path, probes=[probe], rank=0, world_size=1, **options)


def test_a_recorded_run_has_the_device_times(tmp_path):
    device = Device(host_ns=None, drift=0.0)
    with record(tmp_path, device, flush_s=0.05) as session:
        truth = steps_on(device, session, num_steps=3, num_microbatches=4, work_ns=20_000_000)
    assert not session.degraded
    assert session.recorder.begin == session.recorder._core.begin
    run = mappnb.attach(tmp_path)
    events = run.sel(op="forward_step")
    on_device = events.isel(event=np.flatnonzero(events.stream.values >= 0)).sortby("start_ns")
    on_host = events.isel(event=np.flatnonzero(events.stream.values < 0))
    assert on_device.sizes["event"] == on_host.sizes["event"] == 12
    found = np.stack([on_device.raw_start_ns, on_device.raw_start_ns + on_device.duration_ns], 1)
    np.testing.assert_allclose(found, truth, rtol=0, atol=3e6)
    assert on_device["step"].values.tolist() == np.repeat(range(3), 4).tolist()
    assert on_device.microbatch.values.tolist() == [0, 1, 2, 3] * 3
    assert float(on_host.duration_ns.median()) < 5e6
    busy = analysis.breakdown(run).seconds.sel(category="compute", rank=0)
    np.testing.assert_allclose(busy, 0.080, atol=0.006)
    np.testing.assert_allclose(analysis.bubble_fraction(run), 0, atol=0.08)
    assert analysis.op_statistics(run).loc[("compute", "layer", "forward"), "count"].item() == 12
    info = run.incarnations[0].ranks[0]
    assert info["device_spans_lost"] == 0 and info["device_uncertainty_ns"] < 5e6


def test_the_last_spans_are_written_at_the_end(tmp_path):
    """The writer has done no round since they were issued, and the device has not passed them yet."""
    device = Device(host_ns=None)
    with record(tmp_path, device, flush_s=3600.0) as session:
        site = session.recorder.site(category="compute", op="forward_step", phase="forward")
        with mappnb.step(0):
            token = session.recorder.begin(site)
            device.launch(300_000_000)
            session.recorder.end(token)
    events = mappnb.attach(tmp_path).sel(op="forward_step")
    assert sorted(events.stream.values.tolist()) == [-1, 0]
    assert int(events.duration_ns.max()) == pytest.approx(300e6, abs=20e6)


def test_a_broken_device_ends_the_recording_and_not_the_training(tmp_path):
    device = Device(host_ns=None)
    with record(tmp_path, device, flush_s=0.05) as session:
        steps_on(device, session, num_steps=1, num_microbatches=1, work_ns=1_000_000)
        device.broken = True
        steps_on(device, session, num_steps=2, num_microbatches=1, work_ns=1_000_000)
    run = mappnb.attach(tmp_path)
    assert "device spans: RuntimeError: CUDA error" in run.meta["degraded"][0]
    assert (run.sel(op="forward_step")["step"].values == 0).all()


def test_torch_modules_are_timed_through_the_wrappers(tmp_path):
    """All probes of the plan on a program of torch: those that bind begin and end at their start bind ours."""
    import torch

    from mappnb.capture.points import PLANS, build_probes

    device = Device(host_ns=None, lag_ns=100_000)
    probes = build_probes(PLANS["default"])
    assert probes[0].name == "device"
    probes[0] = DeviceProbe(clock_factory=lambda: CudaClock(device), initialized=lambda: True)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with mappnb.record(tmp_path, probes=probes, rank=0, world_size=1, flush_s=0.05) as session:
        for _ in range(3):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert not session.degraded
    events = mappnb.attach(tmp_path).sel()
    work = np.isin(events.category.values, ["compute", "optimizer"])
    pairs = list(zip(events.op.values[work], events.phase.values[work], events.stream.values[work] >= 0, strict=True))
    kinds = {(op, phase) for op, phase, _ in pairs}
    assert "optimizer_step" in {op for op, _ in kinds}
    for kind in kinds:
        assert pairs.count((*kind, True)) == pairs.count((*kind, False)) > 0, kind


@pytest.mark.gpu
def test_on_a_real_gpu(tmp_path):
    import torch

    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    x = torch.randn(4096, 4096, device="cuda")
    torch.cuda.synchronize()
    with mappnb.record(tmp_path, probes=[DeviceProbe()], rank=0, world_size=1, flush_s=0.1) as session:
        site = session.recorder.site(category="compute", op="forward_step", phase="forward")
        walls = []
        for i in range(5):
            with mappnb.step(i):
                torch.cuda.synchronize()
                begin_ns = session.recorder.now_ns()
                token = session.recorder.begin(site)
                for _ in range(50):
                    x = (x @ x) * 1e-2
                session.recorder.end(token)
                torch.cuda.synchronize()
                walls.append((begin_ns, session.recorder.now_ns()))
    events = mappnb.attach(tmp_path).sel(op="forward_step")
    timed = events.isel(event=np.flatnonzero(events.stream.values >= 0)).sortby("start_ns")
    assert timed.sizes["event"] == 5
    for (low, high), start, length in zip(walls, timed.raw_start_ns.values, timed.duration_ns.values, strict=True):
        assert low - 1e6 < start and start + length < high + 1e6 and length > 0.8 * (high - low)
