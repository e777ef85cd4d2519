"""Whatever fails, training goes on and the reader is told; a killed rank loses at most the last flush interval."""

from __future__ import annotations

import errno
import io
import itertools
import logging
import os
import random
import re
import signal
import subprocess
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from capture.programs import Programs, wait_until

import mappnb
from mappnb.capture import marks
from mappnb.inspection import check_run
from mappnb.store import Store
from mappnb.table_specs import TABLES
from mappnb.terms import Flag
from mappnb.testing.gpt_settings import TrainSettings
from mappnb.testing.launcher import LaunchError, launch

NUM_STEPS = 6


@contextmanager
def tmpfs(path: Path, options: str):
    """A small file system of its own, or a skip."""
    path.mkdir(exist_ok=True)
    if (
        os.geteuid() != 0
        or subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", path], check=False).returncode
    ):
        pytest.skip("needs root and the right to mount a tmpfs")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", path], check=True)


@pytest.fixture(autouse=True)
def no_recording_is_left():
    yield
    left = marks.current()
    if left is not None:
        left.stop(timeout_s=1.0)
    assert left is None


def train(path, *, before_step=lambda i, session: None, **options):
    """A training loop under a recording, flushed each step; returns its losses, the session, and the seconds it took."""
    options = {"probes": [], "rank": 0, "world_size": 1, "flush_s": 3600.0, **options}
    weight, losses, begun = 1.0, [], time.monotonic()
    with mappnb.record(path, **options) as session:
        for i in range(NUM_STEPS):
            before_step(i, session)
            with mappnb.step(), mappnb.span("work"):
                weight *= 0.5
                losses.append(weight)
                session.step_values(loss=weight)
                session.metric("weight", weight)
            session.flush()
    return losses, session, time.monotonic() - begun


LOSSES = [0.5 ** (i + 1) for i in range(NUM_STEPS)]


def expect_degraded(caplog, found, pattern: str) -> None:
    """All steps were trained, in time; one line was logged; the reason is kept."""
    losses, session, took_s = found
    assert losses == LOSSES
    assert took_s < 10.0
    lines = [r.getMessage() for r in caplog.records if r.name == "mappnb" and r.levelno >= logging.WARNING]
    assert len(lines) == 1, lines
    assert "recording stopped" in lines[0] and lines[0].endswith("training continues")
    assert re.search(pattern, session.meta["degraded"]), session.meta["degraded"]
    assert not session.recorder.enabled
    session.unpause()
    assert not session.recorder.enabled, "off for good"
    assert not any(t.name == "mappnb-writer" for t in threading.enumerate())


# ------------------------------------------------------------------------------------------------------ disk
def fill(folder: Path) -> None:
    """Write until nothing fits any more."""
    with open(folder / "other-job", "ab", buffering=0) as other:
        for size in (1 << 20, 4096, 64, 1):
            with pytest.raises(OSError, match="No space left"):
                other.writelines(itertools.repeat(b"x" * size))


def test_disk_full_while_recording(tmp_path, caplog):
    with tmpfs(tmp_path / "disk", "size=1m") as disk:
        found = train(disk / "run", before_step=lambda i, s: fill(disk) if i == 3 else None)
        expect_degraded(caplog, found, "writer: OSError: .*No space left")
        run = mappnb.attach(disk / "run")
        assert "No space left" in run.meta["degraded"][0], "the note fits into the space held back"
        assert run.ranks.ended.tolist() == ["finished"] and run.meta["state"] == "ended"
        assert set(range(3)) <= set(run.sel(op="span").step.values.tolist()), "what was flushed before is whole"
        assert run.meta["problems"] == {}
        assert any("recording stopped early" in line for line in check_run(disk / "run"))


def test_disk_full_at_the_end(tmp_path, caplog):
    """Closing a segment needs space for its second form; the first one stays."""
    with tmpfs(tmp_path / "disk", "size=1m") as disk:
        found = train(disk / "run", before_step=lambda i, s: (s.flush(), fill(disk)) if i == NUM_STEPS - 1 else None)
        expect_degraded(caplog, found, "No space left")
        run = mappnb.attach(disk / "run")
        assert set(range(NUM_STEPS - 1)) <= set(run.sel(op="span").step.values.tolist())
        assert run.meta["degraded"] and run.meta["problems"] == {}


def test_disk_full_at_start(tmp_path, caplog):
    with tmpfs(tmp_path / "disk", "size=64k") as disk:
        fill(disk)
        found = train(disk / "run")
        expect_degraded(caplog, found, "run directory: OSError: .*No space left")


def test_space_for_some_of_the_start(tmp_path, caplog):
    """Disks of every small size: the run directory is made in part, and never in a way that a later run trips over."""
    for pages in range(3, 13):
        with tmpfs(tmp_path / "disk", f"size={4 * pages}k") as disk:
            caplog.clear()
            losses, session, _ = train(disk / "run")
            assert losses == LOSSES
            lines = [r for r in caplog.records if r.levelno >= logging.WARNING]
            assert len(lines) == bool(session.meta["degraded"])
            if (disk / "run" / "run.json").exists():
                Store(disk / "run")  # readable


def test_read_only_directory(tmp_path, caplog):
    with tmpfs(tmp_path / "disk", "size=1m") as disk:
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        found = train(disk / "run")
        expect_degraded(caplog, found, "run directory: OSError: .*Read-only")


def test_a_file_system_that_turns_read_only(tmp_path, caplog, monkeypatch):
    """Files that are open stay writable then; the next segment cannot be closed."""
    real, read_only = os.replace, threading.Event()

    def replace(*args):
        if read_only.is_set():
            raise OSError(errno.EROFS, "Read-only file system")
        return real(*args)

    def turn(i, session):
        if i == 2:
            read_only.set()
            session._output._sink.table.max_rows = 1

    monkeypatch.setattr(os, "replace", replace)
    expect_degraded(caplog, train(tmp_path, before_step=turn), "Read-only")
    assert {0, 1} <= set(mappnb.attach(tmp_path).sel(op="span").step.values.tolist())


def test_short_writes_leave_no_hole(tmp_path, monkeypatch):
    """A nearly full disk takes only a part of a write, without an error; when there is space again, nothing is missing."""
    from mappnb import segment_writer

    class Part(io.FileIO):
        def write(self, data, /):
            return super().write(memoryview(data)[: max(1, len(data) // 2)])

    monkeypatch.setattr(segment_writer, "_WholeFile", type("Short", (segment_writer._WholeFile, Part), {}))
    seen = []

    def look(i, session):
        if i:
            seen.append(mappnb.attach(tmp_path).sel(op="span").step.values.tolist())

    losses, session, _ = train(tmp_path, before_step=look)
    assert losses == LOSSES and session.meta["degraded"] is None
    assert seen == [list(range(i)) for i in range(1, NUM_STEPS)]
    assert mappnb.attach(tmp_path).meta["problems"] == {}


BROKEN = {
    "the events folder is a file": lambda folder: (folder / "events").write_text("x"),
    "the segment exists": lambda folder: (
        (folder / "events" / "rank=00000").mkdir(parents=True),
        (folder / "events" / "rank=00000" / "open-000000.arrows").write_text("x"),
    ),
    "the steps folder is a file": lambda folder: (folder / "steps").write_text("x"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_segment_that_cannot_be_written(tmp_path, caplog, what, monkeypatch):
    from mappnb.joining import RunWriter

    real = RunWriter.write_rank

    def write_rank(run, content):
        real(run, content)
        if not (run.path / "broken").exists():
            (run.path / "broken").touch()
            BROKEN[what](run.path)

    monkeypatch.setattr(RunWriter, "write_rank", write_rank)
    found = train(tmp_path / "run")
    expect_degraded(caplog, found, "(run directory|writer): (FileExists|NotADirectory)Error")
    assert mappnb.attach(tmp_path / "run").meta["degraded"][0]


def test_a_folder_that_is_removed_while_recording(tmp_path, caplog):
    import shutil

    def remove(i, session):
        if i == 3:
            shutil.rmtree(tmp_path / "run")
            session._output._sink.table.max_rows = 1

    expect_degraded(caplog, train(tmp_path / "run", before_step=remove), "FileNotFoundError")


# --------------------------------------------------------------------------------------------------- probes, writer
class Probe:
    """Does nothing."""

    name = "faulty"

    def install(self, session):
        self.session = session

    def uninstall(self):
        pass


def test_a_probe_that_raises_at_install(tmp_path, caplog):
    taken_off = []

    class First(Probe):
        def uninstall(self):
            taken_off.append("first")

    class Faulty(Probe):
        def install(self, session):
            raise AttributeError("torch has changed")

        def uninstall(self):
            raise RuntimeError("was never on")

    found = train(tmp_path, probes=[First(), Faulty()])
    expect_degraded(caplog, found, "probe faulty: AttributeError: torch has changed")
    assert taken_off == ["first"]
    run = mappnb.attach(tmp_path)
    assert "torch has changed" in run.meta["degraded"][0] and run.steps.sizes["step"] == 0
    assert run.meta["state"] == "ended"


def test_a_failure_before_the_rank_is_known_is_told_to_the_reader(tmp_path, caplog):
    def early(i, session):
        if i == 0:
            assert not (tmp_path / "run").exists()
            session.fail("torch", AttributeError("no version"))

    found = train(tmp_path / "run", before_step=early, rank=None, world_size=None)
    expect_degraded(caplog, found, "torch: AttributeError: no version")
    run = mappnb.attach(tmp_path / "run")
    assert "no version" in run.meta["degraded"][0] and run.meta["state"] == "ended"


def test_a_probe_that_fails_later_keeps_what_was_recorded(tmp_path, caplog):
    def later(i, session):
        if i == 4:
            session.fail("wrapper", ZeroDivisionError("ours"))
            session.fail("wrapper", ZeroDivisionError("again"))

    found = train(tmp_path, before_step=later)
    expect_degraded(caplog, found, "wrapper: ZeroDivisionError: ours")
    run = mappnb.attach(tmp_path)
    assert "ours" in run.meta["degraded"][0] and run.meta["state"] == "ended"
    assert run.steps.step.values.tolist() == [0, 1, 2, 3] and run.sel(op="span").step.values.tolist() == [0, 1, 2, 3]
    assert not list(tmp_path.rglob("open-*")), "its segments are closed"


def test_a_wrapper_of_torch_that_fails(tmp_path, caplog, monkeypatch):
    """The real probes, with a fault inside one: the program's own calls go through."""
    torch = pytest.importorskip("torch")
    from mappnb.capture._torch_step import TorchSteps

    calls = []

    def enter_forward(self, *, training):
        calls.append(training)
        if len(calls) == 3:
            raise LookupError("a bug of ours")
        return real(self, training=training)

    real = TorchSteps.enter_forward
    monkeypatch.setattr(TorchSteps, "enter_forward", enter_forward)
    losses = {}
    for recorded in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session = mappnb.record(tmp_path, rank=0, world_size=1)
        if recorded:
            session.start()
        losses[recorded] = []
        for _ in range(NUM_STEPS):
            loss = model(torch.ones(2, 3)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[recorded].append(loss.item())
        session.stop()
    assert losses[True] == losses[False] and len(losses[True]) == NUM_STEPS
    assert "LookupError: a bug of ours" in mappnb.attach(tmp_path).meta["degraded"][0]
    assert len([r for r in caplog.records if r.name == "mappnb"]) == 1


@pytest.mark.parametrize(
    "error", [ValueError("odd"), MemoryError(), SystemExit(3), KeyboardInterrupt(), OSError(errno.EIO, "I/O")]
)
def test_any_exception_of_the_writer(tmp_path, caplog, error, monkeypatch):
    def broken(i, session):
        def flush(*_):
            raise error

        if i == 2:
            monkeypatch.setattr(session._output._sink, "flush", flush)

    found = train(tmp_path, before_step=broken)
    expect_degraded(caplog, found, f"writer: {type(error).__name__}")
    run = mappnb.attach(tmp_path)
    assert run.meta["degraded"] and {0, 1} <= set(run.sel(op="span").step.values.tolist())


def test_a_deferred_read_that_fails(tmp_path, caplog):
    def fault() -> bool:
        raise RuntimeError("device lost")

    found = train(tmp_path, before_step=lambda i, s: s.defer(fault) if i == 2 else None)
    expect_degraded(caplog, found, "device lost")


def test_wrong_calls_of_the_program_raise_nothing(tmp_path, caplog):
    def wrong(i, session):
        if i == 3:
            mappnb.step("three")

    expect_degraded(caplog, train(tmp_path, before_step=wrong), "mark_step: ValueError")


@pytest.mark.parametrize("what", ["append", "write_rank"])
def test_a_dead_file_system(tmp_path, caplog, what, monkeypatch):
    """Writes that never return: training goes on at full speed, and the end waits for its timeout only."""
    from mappnb.joining import RunWriter
    from mappnb.segment_writer import TableWriter

    dead, over = threading.Event(), threading.Event()
    owner = TableWriter if what == "append" else RunWriter
    real = getattr(owner, what)

    def hang(*args, **options):
        if dead.is_set():
            over.wait(60.0)
        return real(*args, **options)

    monkeypatch.setattr(owner, what, hang)
    monkeypatch.setattr("mappnb.capture.session.FLUSH_PATIENCE_S", 0.2)
    session = mappnb.record(tmp_path, probes=[], rank=0, world_size=1, flush_s=0.05).start()
    assert session.flush()
    dead.set()
    begun = time.monotonic()
    for _ in range(2000):
        with mappnb.step(), mappnb.span("work"):
            session.metric("m", 1.0)
            session.set_model(a=1)
    assert time.monotonic() - begun < 3.0, "no step waits for the disk"
    assert session.flush() is False
    begun = time.monotonic()
    session.stop(timeout_s=0.5)
    assert 0.4 < time.monotonic() - begun < 2.0
    lines = [r.getMessage() for r in caplog.records if r.name == "mappnb"]
    assert len(lines) == 1 and "the writer did not end within 0.5 s; does" in lines[0]
    assert marks.current() is None
    over.set()
    wait_until(lambda: not any(t.name == "mappnb-writer" for t in threading.enumerate()))


# ------------------------------------------------------------------------------------------------------ kill -9
LOST_NS = 500_000_000  # a flush is due every 100 ms, on a busy machine
RANK = """
import os, sys, time
import mappnb

rank = int(os.environ["RANK"])
with mappnb.record({path!r}, probes=[], rank=rank, world_size={size}, flush_s=0.1, segment_rows={rows}):
    i = 0
    while not os.path.exists({stop!r}):
        with mappnb.step(i), mappnb.span("work"):
            time.sleep(0.0005)
        i += 1
        os.write(1, b"%d %d\\n" % (i, time.monotonic_ns()))
"""


def said(text: str) -> np.ndarray:
    """Steps that a program says it has finished, and when (ns); a line that was cut does not count."""
    lines = [line.split() for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return np.array(lines, np.int64).reshape(-1, 2)


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    found = Programs(tmp_path_factory.mktemp("programs"))
    yield found
    found.close()


def check_killed_run(path, outputs: dict[int, str], killed: int, killed_ns: int, monkeypatch) -> None:
    run = mappnb.attach(path)
    for rank, text in outputs.items():
        finished = said(text)
        work = run.sel(op="span", rank=rank)
        whole = work.isel(event=(work.flags.values & Flag.OPEN) == 0)
        steps = np.sort(whole.step.values)
        np.testing.assert_array_equal(steps, np.arange(len(steps)))  # none is missing in between, none is there twice
        sure = finished[finished[:, 1] < killed_ns - LOST_NS] if rank == killed else finished
        assert len(steps) >= len(sure), f"rank {rank}: {len(steps)} of {len(sure)} steps that were flushed before"
        rows = run.steps.sel(rank=rank).end_ns.values
        assert (rows >= 0).sum() >= len(sure)
        assert run.ranks.ended.loc[0, rank] == ("" if rank == killed else "finished")
    assert run.meta["problems"] == {} and run.meta["missing_ranks"] == [] and run.meta["degraded"] == {}
    monkeypatch.setattr("mappnb.run.LIVE_S", 0.0)
    assert mappnb.attach(path).meta["state"] == "stopped"
    findings = check_run(path)
    assert any(f"ranks [{killed}] did not end in good order (killed?)" in line for line in findings), findings
    assert not any("negative" in line or "unreadable" in line or "missing" in line for line in findings)


@pytest.mark.parametrize("seed", range(8))
def test_kill_9_of_a_rank_loses_at_most_the_last_flush(tmp_path, programs, seed, monkeypatch):
    rng, size = random.Random(seed), 3
    path, stop = tmp_path / "run", tmp_path / "stop"
    code = RANK.format(path=str(path), size=size, rows=rng.choice([50, 400, 65536]), stop=str(stop))
    ranks = [programs.start(code, RANK=str(r)) for r in range(size)]
    for program in ranks:
        program.wait_for("\n")
    killed = rng.randrange(size)
    time.sleep(rng.uniform(0.7, 1.4))
    ranks[killed].kill(signal.SIGKILL)
    killed_ns = time.monotonic_ns()
    assert ranks[killed].wait() == -signal.SIGKILL
    time.sleep(0.2)
    stop.touch()
    assert [p.wait() for r, p in enumerate(ranks) if r != killed] == [0] * (size - 1)
    assert (said(ranks[killed].out)[:, 1] < killed_ns - LOST_NS).any()
    check_killed_run(path, {r: p.out for r, p in enumerate(ranks)}, killed, killed_ns, monkeypatch)


def _real_kill(path: Path, seed: int) -> tuple[int, int]:
    """Train PP2 x DP2, kill -9 a random rank after a random step; returns it and the last step that rank 0 reported."""
    rng = random.Random(seed)
    killed, after = rng.randrange(4), rng.randrange(2, 9)
    settings = TrainSettings(
        pp=2, layers=2, hidden=32, heads=2, sequence_length=16, global_batch=4, steps=400, run_dir=str(path),
        record_options={"flush_s": 0.2, "segment_rows": 500},
    )  # fmt: skip
    reported = []

    def on_line(report) -> None:
        reported.append(report.step)
        if report.step == after:
            time.sleep(0.5 + rng.uniform(0.0, 0.3))
            info = Store(path).incarnations()[0].ranks[killed]
            os.kill(info["pid"], signal.SIGKILL)

    with pytest.raises(LaunchError, match=rf"rank {killed} of 4 was killed by SIGKILL"):
        launch(settings, world_size=4, on_line=on_line)
    return killed, after


@pytest.mark.dist
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", [0, *(pytest.param(s, marks=pytest.mark.slow) for s in range(1, 8))])
def test_kill_9_of_a_rank_of_real_training(tmp_path, seed, monkeypatch):
    pytest.importorskip("megatron.core")
    killed, after = _real_kill(tmp_path / "run", seed)
    monkeypatch.setattr("mappnb.run.LIVE_S", 0.0)
    run = mappnb.attach(tmp_path / "run")
    assert run.meta["missing_ranks"] == [] and run.meta["degraded"] == {} and run.meta["problems"] == {}
    assert run.meta["state"] == "stopped" and run.ranks.ended.loc[0, killed] == ""
    for table in TABLES:
        for name in run._reader(table).spec.columns:
            run._reader(table).column(name)
    assert run.meta["problems"] == {}, "every page of every file was read"
    rows = run.steps.end_ns.values
    assert rows.shape[1] == 4
    assert ((rows[: after + 1] >= 0).all(axis=0)).all(), (
        "steps that were over half a second before are there on every rank"
    )
    np.testing.assert_array_equal(run.steps.step.values, np.arange(len(rows)))
    for rank in range(4):
        for op in ("forward_step", "backward_step"):
            done = run.sel(rank=rank, op=op, step=slice(0, after))
            assert done.sizes["event"] == 2 * (after + 1), "microbatches of every flushed step"
    assert any("did not end in good order (killed?)" in line for line in check_run(tmp_path / "run"))
