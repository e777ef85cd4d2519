"""One recording of one rank: how it begins, how it is read while it runs, and every way in which a program can end."""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import textwrap
import threading
import time

import numpy as np
import pytest
from capture.programs import Programs, wait_until
from capture.ranks import run_ranks

import mappnb
from mappnb.capture import launchinfo, marks
from mappnb.errors import CaptureError, FormatVersionError, MappnbError, RunExistsError
from mappnb.terms import Flag


def record(path, **options):
    return mappnb.record(path, **{"probes": [], "rank": 0, "world_size": 1, **options})


@pytest.fixture(autouse=True)
def no_recording_is_left():
    yield
    left = marks.current()
    if left is not None:
        left.stop()
    assert left is None


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    found = Programs(tmp_path_factory.mktemp("programs"))
    yield found
    found.close()


def program(path, body: str, *, options: str = "rank=0, world_size=1") -> str:
    """A program that records into ``path``; STEPS runs three steps."""
    head = f"""
        import atexit, multiprocessing, os, signal, sys, threading, time
        import mappnb

        def steps(num=3):
            for i in range(num):
                with mappnb.step(), mappnb.span("work"):
                    pass

        session = mappnb.record({os.fspath(path)!r}, probes=[], flush_s=3600.0, {options})
    """
    return textwrap.dedent(head) + textwrap.dedent(body)


def ended(path, rank=0, incarnation=0) -> str:
    info = mappnb.attach(path).incarnations[incarnation].ranks[rank]
    return (info.get("ended") or {}).get("reason", "")


def works(path) -> list[int]:
    """Steps of the work spans that are whole."""
    spans = mappnb.attach(path).sel(op="span")
    return spans.step.values[spans.flags.values == 0].tolist()


# ------------------------------------------------------------------------------------------------ bad configuration
BAD = {
    "plan": ({"plan": "defualt"}, "unknown plan 'defualt'.*did you mean 'default'"),
    "flush_s": ({"flush_s": 0}, "flush_s is 0; expected seconds above 0"),
    "flush_s nan": ({"flush_s": math.nan}, "flush_s is nan"),
    "flush_s text": ({"flush_s": "fast"}, "flush_s is 'fast'"),
    "rank alone": ({"world_size": None}, "give rank and world_size together"),
    "rank too large": ({"rank": 4, "world_size": 4}, "rank is 4 of world_size 4"),
    "segment_rows": ({"segment_rows": 0}, "segment_rows is 0"),
    "start_step": ({"start_step": "a"}, "start_step is 'a'"),
    "notes": ({"notes": {"model": object()}}, "notes must be plain values"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_raise_before_anything_is_written(tmp_path, name):
    options, message = BAD[name]
    with pytest.raises(CaptureError, match=message):
        record(tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


def test_a_second_recording_is_refused(tmp_path):
    with record(tmp_path / "a"):
        with pytest.raises(CaptureError, match=r"records into .*a already; end that recording first"):
            record(tmp_path / "b").start()
        assert not (tmp_path / "b").exists()
        mappnb.step()
    assert mappnb.attach(tmp_path / "a").meta["degraded"] == {}


def test_a_session_is_started_once(tmp_path):
    session = record(tmp_path).start()
    with session:  # the one that runs
        pass
    with pytest.raises(CaptureError, match=r"started once; call mappnb.record again"):
        session.start()
    session.stop()


def test_run_directories_that_cannot_be_used(tmp_path):
    record(tmp_path / "taken").start().stop()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("x")
    record(tmp_path / "newer").start().stop()
    info = json.loads((tmp_path / "newer" / "run.json").read_text())
    (tmp_path / "newer" / "run.json").write_text(json.dumps({**info, "format_version": 99}))
    (tmp_path / "file").write_text("x")
    cases = {
        "taken": (RunExistsError, "resume=True"),
        "other": (RunExistsError, "holds thesis.tex"),
        "newer": (FormatVersionError, "format 99"),
        "file": (RunExistsError, "a file, not a folder"),
    }
    for name, (error, message) in cases.items():
        with pytest.raises(error, match=message):
            record(tmp_path / name).start()
        assert marks.current() is None
    assert (tmp_path / "file").read_text() == "x"


def test_a_probe_that_refuses_the_configuration_raises_and_leaves_nothing_on(tmp_path):
    events = []

    class Good:
        name = "good"

        def install(self, session):
            events.append("on")

        def uninstall(self):
            events.append("off")

    class Strict(Good):
        name = "strict"

        def install(self, session):
            raise MappnbError("this plan needs a GPU")

    with pytest.raises(MappnbError, match="needs a GPU"):
        record(tmp_path, probes=[Good(), Strict()]).start()
    assert events == ["on", "off", "off"]
    assert ended(tmp_path) == "wrong configuration"


# ------------------------------------------------------------------------------------------------- while it runs
def test_an_open_step_is_on_disk_within_a_second_and_grows(tmp_path, monkeypatch):
    """What a second process sees of a rank that hangs."""
    monkeypatch.setattr("mappnb.capture.writer.HEARTBEAT_S", 0.2)
    with record(tmp_path, flush_s=0.2) as session:
        mappnb.step(0)
        forward = session.recorder.span(category="compute", op="forward_step")
        with forward:
            begun = time.monotonic()
            wait_until(lambda: list(tmp_path.rglob("open-*.arrows")))
            run = mappnb.attach(tmp_path)
            wait_until(lambda: run.refresh().sel(op="forward_step").sizes["event"])
            assert time.monotonic() - begun < 5.0
            lengths = []
            for _ in range(3):
                seen = run.refresh().sel(step=0)
                assert sorted(seen.op.values.tolist()) == ["forward_step", "iteration"]
                assert (seen.flags.values & Flag.OPEN).all()
                assert (seen.duration_ns.values >= 0).all() and int(seen.duration_ns.max()) <= (
                    time.monotonic() - begun + 1
                ) * 1e9
                lengths.append(int(seen.duration_ns.min()))
                time.sleep(0.5)
            assert lengths[0] < lengths[1] < lengths[2]
            assert run.steps.sizes["step"] == 0 and run.meta["state"] == "recording"
    done = run.refresh().sel(op="forward_step")
    assert done.flags.values.tolist() == [0] and done.sizes["event"] == 1
    assert run.meta["state"] == "ended"


def test_spans_open_over_segment_borders_are_there_once(tmp_path):
    with record(tmp_path, flush_s=3600.0, segment_rows=20) as session:
        with mappnb.step():
            with mappnb.span("outer"):
                for _ in range(10):
                    for _ in range(10):
                        with mappnb.span("inner"):
                            pass
                    assert session.flush()
    run = mappnb.attach(tmp_path)
    spans = run.sel(op="span")
    names = spans.name.values.tolist()
    assert names.count("outer") == 1 and names.count("inner") == 100 and not spans.flags.values.any()
    assert run.meta["problems"] == {} and len(list(tmp_path.rglob("seg-*.parquet"))) > 3


def test_more_open_spans_than_a_segment_holds(tmp_path):
    with record(tmp_path, flush_s=3600.0, segment_rows=1) as session:
        with mappnb.step(), mappnb.span("a"), mappnb.span("b"):
            assert session.flush() and session.flush()
    run = mappnb.attach(tmp_path)
    assert sorted(run.sel(op="span").name.values.tolist()) == ["a", "b"] and run.meta["degraded"] == {}


def test_idle_hours_leave_no_gap_in_the_numbers(tmp_path, monkeypatch):
    """A segment that closes by age while only an open span is in it has no rows, and so no file."""
    monkeypatch.setattr("mappnb.capture.writer.HEARTBEAT_S", -1.0)
    with record(tmp_path, flush_s=3600.0) as session:
        mappnb.step()
        table = session._output._sink.table
        for _ in range(4):
            assert session.flush()
            table.max_age_s = 0.0
        table.max_age_s = 600.0
        assert mappnb.attach(tmp_path).sel(op="iteration").sizes["event"] == 1
    run = mappnb.attach(tmp_path)
    run.sel()
    assert run.meta["problems"] == {}


def test_record_in_another_thread(tmp_path):
    def train() -> None:
        with record(tmp_path):
            for _ in range(3):
                with mappnb.step(), mappnb.span("work"):
                    pass

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=train, name="trainer")
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGTERM) is before
    assert works(tmp_path) == [0, 1, 2] and ended(tmp_path) == "finished"


def test_signal_handlers_and_the_wakeup_descriptor_are_put_back(tmp_path):
    handlers = [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)]
    num_files = len(os.listdir("/proc/self/fd"))
    for i in range(3):
        with record(tmp_path / str(i)):
            assert signal.getsignal(signal.SIGTERM) is not handlers[0]
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)] == handlers
    assert signal.set_wakeup_fd(-1) == -1
    assert len(os.listdir("/proc/self/fd")) == num_files


def test_facts_with_numpy_numbers_do_not_stop_the_recording(tmp_path):
    with record(tmp_path, notes={"name": "a"}) as session:
        session.set_model(num_layers=np.int64(4), kind=type)
        assert session.flush()
    info = mappnb.attach(tmp_path).incarnations[0].ranks[0]
    assert info["model"]["num_layers"] == 4 and info["degraded"] is None and info["notes"] == {"name": "a"}


# ----------------------------------------------------------------------------------------------------- its end
ENDS = {
    "with block": ("with session:\n    steps()", 0, "finished"),
    "stop": ("session.start(); steps(); session.stop()", 0, "finished"),
    "end of program": ("session.start(); steps()", 0, "exit"),
    "sys.exit": ("session.start(); steps(); sys.exit(3)", 3, "exit"),
    "sys.exit in the block": ("with session:\n    steps(); sys.exit(3)", 3, "SystemExit"),
    "exception": ("session.start(); steps(); raise ValueError('x')", 1, "ValueError"),
    "exception in the block": ("with session:\n    steps(); raise ValueError('x')", 1, "ValueError"),
    "Ctrl-C": (
        "session.start(); steps(); session.flush(); os.kill(os.getpid(), signal.SIGINT); time.sleep(60)",
        -2,
        "KeyboardInterrupt",
    ),
    "Ctrl-C in the block": (
        "with session:\n    steps(); session.flush(); os.kill(os.getpid(), signal.SIGINT); time.sleep(60)",
        -2,
        "KeyboardInterrupt",
    ),
    "SIGTERM": (
        "session.start(); steps(); os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)",
        -15,
        "signal SIGTERM",
    ),
    "SIGHUP": ("session.start(); steps(); os.kill(os.getpid(), signal.SIGHUP); time.sleep(60)", -1, "signal SIGHUP"),
    "other thread": ("threading.Thread(target=lambda: (session.start(), steps())).start()", 0, "exit"),
}


@pytest.mark.parametrize("name", ENDS)
def test_everything_is_written_however_the_program_ends(tmp_path, programs, name):
    body, status, reason = ENDS[name]
    found = programs.start(program(tmp_path / "run", body))
    assert found.wait() == status, found.err
    assert ended(tmp_path / "run") == reason
    assert works(tmp_path / "run") == [0, 1, 2]
    assert mappnb.attach(tmp_path / "run").steps.step.values.tolist() == [0, 1, 2]
    assert "mappnb" not in found.err.replace("mappnb.", "")


def test_a_handler_of_the_program_is_still_called_after_the_flush(tmp_path, programs):
    body = """
        def handler(number, frame):
            print("handled", signal.Signals(number).name, flush=True)
            if number == signal.SIGHUP:
                os._exit(7)  # nothing of ours runs after this

        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, handler)
        session.start()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            steps(2)
            os.kill(os.getpid(), number)
            time.sleep(0.01)
    """
    found = programs.start(program(tmp_path / "run", body))
    assert found.wait() == 7
    assert found.out.split() == ["handled", "SIGTERM", "handled", "SIGINT", "handled", "SIGHUP"]
    assert works(tmp_path / "run") == list(range(6)) and ended(tmp_path / "run") == ""


def test_an_ignored_signal_stays_ignored(tmp_path, programs):
    body = """
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        session.start()
        os.kill(os.getpid(), signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # also one that is ignored later
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.2)
        steps()
        session.stop()
    """
    programs.run(program(tmp_path / "run", body))
    assert works(tmp_path / "run") == [0, 1, 2] and ended(tmp_path / "run") == "finished"


def test_sigterm_ends_a_rank_that_hangs_outside_python(tmp_path, programs):
    """As a rank in a collective whose peer has died: Python's own handlers never run there."""
    body = """
        import ctypes
        session.start()
        steps()
        with mappnb.step():
            print("hangs", flush=True)
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # another thread gets it, so sleep goes on
            ctypes.CDLL(None).sleep(1000)
    """
    found = programs.start(program(tmp_path / "run", body))
    found.wait_for("hangs")
    time.sleep(0.3)
    begun = time.monotonic()
    found.kill(signal.SIGTERM)
    assert found.wait() == -signal.SIGTERM
    assert time.monotonic() - begun < 3.0
    assert ended(tmp_path / "run") == "signal SIGTERM"
    assert works(tmp_path / "run") == [0, 1, 2]
    last = mappnb.attach(tmp_path / "run").sel(step=3, op="iteration")
    assert last.flags.values.tolist() == [Flag.OPEN | Flag.CLIPPED], "the step it hung in is there"


def test_a_signal_while_a_flush_is_in_progress(tmp_path, programs):
    """The handler comes in the midst of everything that takes a lock, many times."""
    body = """
        count = 0
        def handler(number, frame):
            global count
            count += 1

        signal.signal(signal.SIGTERM, handler)
        session.start()
        end = time.monotonic() + 1.5
        def send():
            for _ in range(300):
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(0.002)

        threading.Thread(target=send, daemon=True).start()
        while time.monotonic() < end:
            session.state.set(a=1)
            session.flush()
            steps(1)
        session.stop()
        print(count, session.degraded)
    """
    found = programs.run(program(tmp_path / "run", body))
    count, degraded = found.out.split()
    assert int(count) > 20 and degraded == "False"
    assert works(tmp_path / "run") == list(range(len(works(tmp_path / "run"))))


# ---------------------------------------------------------------------------------------------------------- forks
FORKS = {
    "exits": "pid = os.fork()\nif pid == 0:\n    steps(); sys.exit(0)\nassert os.waitpid(pid, 0)[1] == 0",
    "raises": "pid = os.fork()\nif pid == 0:\n    raise ValueError('child')\nos.waitpid(pid, 0)",
    "stops": (
        "pid = os.fork()\nif pid == 0:\n    mappnb.step(); session.flush(); session.stop(); os._exit(0)\n"
        "assert os.waitpid(pid, 0)[1] == 0"
    ),
    "records itself": (
        "pid = os.fork()\nif pid == 0:\n    with mappnb.record(session.run_dir + '-child', probes=[], rank=0, world_size=1):\n"
        "        steps()\n    os._exit(0)\nassert os.waitpid(pid, 0)[1] == 0"
    ),
    "multiprocessing": (
        "child = multiprocessing.get_context('fork').Process(target=steps)\nchild.start(); child.join(); assert child.exitcode == 0"
    ),
    "is killed by SIGTERM": (
        "pid = os.fork()\nif pid == 0:\n    time.sleep(60)\ntime.sleep(0.1)\nos.kill(pid, signal.SIGTERM)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -15"
    ),
}


@pytest.mark.parametrize("name", FORKS)
def test_a_forked_child_leaves_its_parents_recording_alone(tmp_path, programs, name):
    body = "session.start(); steps(2); session.flush()\nwith mappnb.step():\n" + textwrap.indent(FORKS[name], "    ")
    body += "\nsteps(2)\nassert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL\nsession.stop()"
    found = programs.run(program(tmp_path / "run", body))
    run = mappnb.attach(tmp_path / "run")
    assert ended(tmp_path / "run") == "finished" and run.meta["degraded"] == {} and run.meta["problems"] == {}
    assert works(tmp_path / "run") == [0, 1, 3, 4], found.err
    assert run.steps.step.values.tolist() == [0, 1, 2, 3, 4]
    if name == "records itself":
        assert works(tmp_path / "run-child") == [0, 1, 2] and ended(tmp_path / "run-child") == "finished"


def test_forks_while_the_writer_works_do_not_deadlock(tmp_path, programs):
    body = """
        session._writer.interval_s = 0.001
        session.start()
        for i in range(60):
            with mappnb.step():
                pid = os.fork()
                if pid == 0:
                    session.flush()
                    steps()
                    os._exit(0)
                assert os.waitpid(pid, 0)[1] == 0
        session.stop()
    """
    programs.run(program(tmp_path / "run", body))
    assert mappnb.attach(tmp_path / "run").steps.step.values.tolist() == list(range(60))


def test_a_multiprocessing_child_that_records_ends_in_good_order(tmp_path, programs):
    """Such processes end without atexit."""
    body = """
        def child():
            mappnb.record(session.run_dir, probes=[], rank=1, world_size=2).start()
            steps()

        process = multiprocessing.get_context("fork").Process(target=child)
        process.start(); process.join(); assert process.exitcode == 0
    """
    programs.run(program(tmp_path / "run", body))
    assert ended(tmp_path / "run", rank=1) == "exit" and works(tmp_path / "run") == [0, 1, 2]


# ---------------------------------------------------------------------------------------------- rank unknown at first
def test_a_program_without_launcher_is_rank_0_of_1_at_its_first_step(tmp_path, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with mappnb.record(tmp_path, probes=[]) as session:
        assert session.flush() and not (tmp_path / "run.json").exists()
        with mappnb.step():
            assert session.flush()
            run = mappnb.attach(tmp_path)
            assert run.meta["world_size"] == 1 and run.sel(op="iteration").flags.values.tolist() == [Flag.OPEN]
    assert mappnb.attach(tmp_path).steps.step.values.tolist() == [0]


def test_without_any_step_patience_decides(tmp_path, monkeypatch):
    for name in ("PATIENCE_S", "TORCH_PATIENCE_S"):
        monkeypatch.setattr(f"mappnb.capture.place.{name}", 0.3)
    with mappnb.record(tmp_path, probes=[], flush_s=0.1):
        assert not (tmp_path / "run.json").exists()
        wait_until(lambda: list(tmp_path.rglob("open-*.arrows")))
    assert ended(tmp_path) == "finished"


def test_a_short_program_without_any_step_is_written_at_its_end(tmp_path):
    with mappnb.record(tmp_path, probes=[]), mappnb.span("work"):
        pass
    assert mappnb.attach(tmp_path).sel(op="span").sizes["event"] == 1


def test_the_rank_may_be_told_later(tmp_path):
    with mappnb.record(tmp_path, probes=[]) as session:
        with mappnb.span("early"):
            pass
        session.set_rank(3, 4)
        assert session.flush()
        mappnb.step()
    run = mappnb.attach(tmp_path)
    assert list(run.incarnations[0].ranks) == [3] and run.meta["missing_ranks"] == [0, 1, 2]
    assert run.sel(op="span").name.values.tolist() == ["early"]


def test_a_wrong_guess_is_said_and_training_goes_on(tmp_path, monkeypatch, caplog):
    with mappnb.record(tmp_path, probes=[]) as session:
        with mappnb.step():
            assert session.flush()
        monkeypatch.setattr(
            launchinfo, "rank_in_group", lambda: (3, 4)
        )  # the program initialises torch.distributed now
        session._writer.flush(5.0)
        for _ in range(3):
            with mappnb.step():
                pass
    message = (
        "recording began as rank 0 of 1, but the program is rank 3 of 4; call mappnb.record after init_process_group"
    )
    assert message in session.meta["degraded"] and message in mappnb.attach(tmp_path).meta["degraded"][0]
    assert [r.levelno for r in caplog.records if r.name == "mappnb"] == [logging.WARNING]
    assert mappnb.attach(tmp_path).steps.step.values.tolist() == [0], "what came before is kept"


def _late_rank(path: str) -> None:
    import torch.distributed as dist

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address = f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):  # as in a child of torch.multiprocessing.spawn
        del os.environ[name]
    with mappnb.record(path, flush_s=0.1) as session:
        time.sleep(0.5)
        assert session._output.run is None
        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=size)
        for _ in range(3):
            with mappnb.step():
                dist.barrier()
        dist.destroy_process_group()
        assert session.meta["degraded"] is None


@pytest.mark.dist
def test_ranks_that_are_known_after_init_process_group(tmp_path):
    run_ranks(_late_rank, 2, str(tmp_path / "run"))
    run = mappnb.attach(tmp_path / "run")
    assert run.meta["state"] == "ended" and run.meta["world_size"] == 2 and run.meta["degraded"] == {}
    assert run.steps.sizes == {"step": 3, "rank": 2}
    assert sorted(run.sel(op="barrier")["rank"].values.tolist()) == [0, 0, 0, 1, 1, 1]
