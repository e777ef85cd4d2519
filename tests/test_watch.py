"""Watching a run: verdicts in time, all clear, nothing on clean noise; restarts, deaths, ends; nothing is written."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from live_run import LiveRun

import mappnb
from mappnb import Layout
from mappnb._watch_judge import CLEAR_AFTER, Judge
from mappnb._watch_show import sentence
from mappnb.analysis import find_stragglers, work
from mappnb.cli import main
from mappnb.testing import (
    HostGaps,
    IntermittentRank,
    KilledRank,
    SlowHost,
    SlowLink,
    SlowRank,
    SlowStage,
    generate_run,
)
from mappnb.watch import CPU_SHARE, LEAST_PAUSE_S, Watcher, watch

LAYOUT = Layout(tp=2, dp=4, pp=2)
WHEN = {"first_step": 20, "last_step": 33}


@pytest.fixture(autouse=True)
def _no_files_left_open():
    yield
    LiveRun.abandon_all()


def generated(path, *faults, steps=44, seed=1, layout=LAYOUT, **options):
    truth = generate_run(
        path, layout=layout, num_steps=steps, seed=seed, num_microbatches=4, faults=list(faults), **options
    )
    return mappnb.attach(path), truth


def told(run, stride=1, **options):
    """All changes of a run whose steps come so many at a time."""
    table = work(run)
    judge = Judge(run.layout, details=lambda a, b: find_stragglers(run, step=slice(a, b)), **options)
    steps = table["step"].values.tolist()
    return [c for last in [*steps[stride - 1 :: stride], steps[-1]] for c in judge.advance(table, last)], judge


@pytest.mark.parametrize(
    "stride", [pytest.param(1, marks=pytest.mark.slow), pytest.param(7, marks=pytest.mark.slow), 12]
)
@pytest.mark.parametrize(
    ("fault", "who", "within"),
    [
        (SlowRank(rank=9, factor=1.1, **WHEN), ("rank", "9", "hardware"), 5),
        (SlowRank(rank=9, factor=1.5, **WHEN), ("rank", "9", "hardware"), 5),
        (SlowRank(rank=9, factor=2.0, **WHEN), ("rank", "9", "hardware"), 2),
        (HostGaps(rank=5, length_s=0.1, **WHEN), ("rank", "5", "host"), 5),
        (SlowLink(source=1, destination=9, extra_s=0.05, **WHEN), ("link", "1->9", "link"), 5),
    ],
    ids=lambda x: x.kind if hasattr(x, "kind") else None,
)
def test_a_verdict_comes_in_time_and_goes(tmp_path, fault, who, within, stride):
    run, _ = generated(tmp_path / "run", fault)
    changes, judge = told(run, stride)
    assert [c.event for c in changes] == ["raised", "cleared"]
    raised, cleared = changes
    s = raised.standing
    assert (s.subject_kind, s.subject, s.cause) == who
    assert 20 < raised.step + 1 <= 20 + within  # so many slow steps had ended
    assert 33 + CLEAR_AFTER <= cleared.step <= 33 + CLEAR_AFTER + 3
    assert not judge.standing


@pytest.mark.parametrize(
    ("fault", "kinds"),
    [(SlowHost(host=1, factor=1.2, **WHEN), {"host"}), (SlowStage(stage=1, factor=1.3, **WHEN), {"stage", "host"})],
    ids=["host", "stage"],
)
def test_hosts_and_stages(tmp_path, fault, kinds):
    run, _ = generated(tmp_path / "run", fault)
    changes, _ = told(run)
    assert changes[0].event == "raised" and changes[-1].event == "cleared" and changes[0].step <= 24
    assert {c.standing.subject_kind for c in changes} <= kinds


@pytest.mark.parametrize("seed", [0, *(pytest.param(s, marks=pytest.mark.slow) for s in range(1, 6))])
@pytest.mark.parametrize("layout", [LAYOUT, Layout(tp=4, dp=1, pp=4)], ids=str)
def test_no_alarm_in_200_clean_steps(tmp_path, layout, seed):
    run, _ = generated(tmp_path / "run", steps=200, seed=seed, layout=layout)
    changes, _ = told(run, stride=1 if seed else 10)
    assert changes == []


def test_one_that_comes_and_goes_does_not_flap(tmp_path):
    fault = IntermittentRank(rank=5, factor=1.5, probability=0.2, first_step=20, last_step=100)
    run, truth = generated(tmp_path / "run", fault, steps=150)
    slow = truth.faults[0].steps
    changes, judge = told(run, stride=2)
    assert len(slow) > 10 and len(changes) <= 4, [(c.event, c.step) for c in changes]
    assert {c.standing.subject for c in changes} == {"5"} and not judge.standing


def test_a_second_spell_of_the_same_rank_is_found(tmp_path):
    faults = [SlowRank(rank=9, factor=1.5, first_step=a, last_step=a + 9) for a in (10, 40)]
    run, _ = generated(tmp_path / "run", *faults, steps=64)
    changes, _ = told(run)
    assert [c.event for c in changes] == ["raised", "cleared"] * 2
    assert changes[2].step <= 44 and changes[2].why == "again"


def test_a_verdict_is_told_again_when_it_grows(tmp_path):
    faults = [
        SlowRank(rank=9, factor=1.2, first_step=10, last_step=24),
        SlowRank(rank=9, factor=1.8, first_step=25),
    ]
    run, _ = generated(tmp_path / "run", *faults, steps=60)
    changes, judge = told(run)
    assert [c.event for c in changes][:2] == ["raised", "changed"]
    assert judge.standing["rank", "9"].effect_fraction > 1.5 * changes[0].standing.effect_fraction


# --------------------------------------------------------------------------------------------------------- live runs
@pytest.fixture(scope="module")
def slow(tmp_path_factory):
    path = tmp_path_factory.mktemp("slow") / "run"
    generated(path, SlowRank(rank=9, factor=1.5, first_step=15, last_step=24), steps=40)
    return path


def snapshot(path):
    return {str(p): (p.stat().st_mtime_ns, p.stat().st_size) for p in path.rglob("*") if p.is_file()}


def test_a_live_run_step_by_step(slow, tmp_path):
    live = LiveRun(slow, tmp_path / "live")
    watcher = Watcher(live.path, gone_s=0.2)
    events = watcher.look()
    assert [e["event"] for e in events] == ["start"] and events[0]["world_size"] == 16
    for step in range(40):
        live.write(step)
        before = snapshot(live.path)
        events += watcher.look()
        assert snapshot(live.path) == before  # it only reads
    live.end()
    time.sleep(0.3)
    events += watcher.look()
    assert [e["step"] for e in events if e["event"] == "step"] == list(range(40))
    assert watcher.over and watcher.state == "ended" and watcher.exit_code == 0
    raised, cleared = (e for e in events if e["event"] in ("raised", "cleared"))
    assert raised["subject"] == "9" and 16 <= raised["step"] <= 19 and raised["first_step"] == 15
    assert 27 <= cleared["step"] <= 28
    # a step counts once all ranks are beyond it
    assert max(i for i, e in enumerate(events) if e["event"] == "step" and e["step"] == raised["step"]) < events.index(
        raised
    )
    whole = Watcher(slow)
    again = [e for e in whole.look() if e["event"] in ("raised", "cleared")]
    assert [(e["event"], e["step"]) for e in again] == [(e["event"], e["step"]) for e in (raised, cleared)]


def test_a_step_that_one_rank_has_not_ended_does_not_count(slow, tmp_path):
    live = LiveRun(slow, tmp_path / "live")
    live.write(0, 5)
    live.write(6, 9, ranks=[r for r in live.ranks if r != 3])
    watcher = Watcher(live.path, gone_s=60)
    assert [e["step"] for e in watcher.look() if e["event"] == "step"] == [0, 1, 2, 3, 4, 5]
    live.degrade(3, "disk full")
    watcher._feed.work.gone_s = 0.1
    time.sleep(0.2)
    live.write(10, ranks=[r for r in live.ranks if r != 3])
    events = watcher.look()
    assert {"event": "degraded", "rank": 3, "why": "disk full"} in events and watcher.last_step == 10
    assert watcher.exit_code == 1 and not watcher.look()


def test_a_restart_begins_again(slow, tmp_path):
    path = tmp_path / "live"
    first = LiveRun(slow, path)
    first.write(0, 20)
    watcher = Watcher(path, gone_s=5)
    events = watcher.look()
    assert events[-1]["step"] == 19 and len(watcher.standing) == 1
    second = LiveRun(slow, path, launch="b")
    assert watcher.look() == []  # nothing yet
    second.write(16, 23)
    events = watcher.look()
    assert [e["event"] for e in events[:2]] == ["cleared", "restart"] and events[1]["incarnation"] == 1
    steps = [e["step"] for e in events if e["event"] == "step"]
    assert steps == list(range(16, 24)), "steps that are repeated are told again"
    assert any(e["event"] == "raised" for e in events)  # still slow in this incarnation
    second.write(24, 39)
    second.end()
    time.sleep(1.1)
    events = watcher.look()
    assert [e["event"] for e in events if e["event"] != "step"] == ["cleared"] and watcher.exit_code == 0


def test_a_rank_that_dies_stops_the_run(tmp_path):
    generated(tmp_path / "run", KilledRank(rank=3, first_step=12), steps=20)
    watcher = Watcher(tmp_path / "run", stopped_after_s=1e-3)
    events = watcher.look()
    assert watcher.over and watcher.state == "stopped" and watcher.exit_code == 1
    assert [e["step"] for e in events if e["event"] == "step"][-1] == 11


def test_ranks_that_end_badly_are_told(slow, tmp_path):
    live = LiveRun(slow, tmp_path / "live")
    live.write(0, 12)
    live.end("signal SIGTERM")
    out = io.StringIO()
    assert watch(live.path, out=out) == 1
    assert "rank 3: ended by signal SIGTERM" in out.getvalue()


def test_a_stall_is_told_once(slow, tmp_path):
    live = LiveRun(slow, tmp_path / "live")
    live.write(0, 9)
    watcher = Watcher(live.path, gone_s=60)
    watcher.look()
    watcher._usual_s, watcher.stopped_after_s = 0.001, 1e9
    watcher._newest_s -= 2e9
    assert [e["event"] for e in watcher.look()] == ["stalled"] and watcher.look() == [] and watcher.exit_code == 1
    live.write(10)
    assert [e["event"] for e in watcher.look()] == ["resumed", "step"] and watcher.exit_code == 0


# ------------------------------------------------------------------------------------------------------- the command
def lines(capsys):
    return [json.loads(x, parse_constant=pytest.fail) for x in capsys.readouterr().out.splitlines()]


def test_json_lines(slow, capsys):
    assert main(["watch", str(slow), "--json"]) == 0
    events = lines(capsys)
    assert [e["event"] for e in events if e["event"] != "step"] == ["start", "raised", "cleared", "end"]
    raised = next(e for e in events if e["event"] == "raised")
    assert raised["cause"] == "hardware" and raised["effect_s"] > 0 and "peers" in raised["evidence"]
    assert events[-1]["why"] == "ended" and events[-1]["num_steps"] == 40 and events[-1]["standing"] == []


def test_a_culprit_at_the_end_is_exit_status_1(tmp_path, capsys):
    generated(tmp_path / "run", SlowRank(rank=9, factor=1.5, first_step=15), steps=30)
    assert main(["watch", str(tmp_path / "run"), "--once"]) == 1
    out = capsys.readouterr().out
    assert "SLOW  rank 9: hardware" in out and "still slow: rank 9 (hardware, +" in out and "\x1b" not in out


def test_on_a_terminal_the_status_line_is_written_over(slow):
    class Tty(io.StringIO):
        def isatty(self):
            return True

    out = Tty()
    assert watch(slow, out=out) == 0
    assert "\r\x1b[K" in out.getvalue() and "nobody slow in" in out.getvalue()


def test_until_step_and_timeout(slow, tmp_path, capsys):
    live = LiveRun(slow, tmp_path / "live")
    live.write(0, 9)
    assert main(["watch", str(live.path), "--json", "--until-step", "5"]) == 0
    assert lines(capsys)[-1]["why"] == "step"
    began = time.monotonic()
    assert main(["watch", str(live.path), "--json", "--timeout", "0.3", "--interval", "0.1"]) == 0
    assert lines(capsys)[-1]["why"] == "timeout" and time.monotonic() - began < 5


def test_waits_for_the_run_directory(slow, tmp_path, capsys):
    path = tmp_path / "later"
    assert main(["watch", str(path)]) == 2
    assert "no such folder" in capsys.readouterr().err
    assert main(["watch", str(path), "--wait", "--timeout", "0.2", "--json"]) == 1
    assert lines(capsys)[-1]["why"] == "timeout"

    def job():
        time.sleep(0.3)
        live = LiveRun(slow, path)
        live.write(0, 39)
        live.end()

    thread = threading.Thread(target=job)
    thread.start()
    assert main(["watch", str(path), "--wait", "--timeout", "60", "--interval", "0.2", "--json"]) == 0
    thread.join()
    assert lines(capsys)[-1]["num_steps"] == 40


@pytest.mark.parametrize("words", [["--interval", "0"], ["--timeout", "-1"], ["--stopped-after", "0"]])
def test_wrong_numbers_are_usage(slow, capsys, words):
    assert main(["watch", str(slow), *words]) == 2
    assert "expected a number of seconds above 0" in capsys.readouterr().err


def test_ctrl_c_ends_with_a_summary(slow, tmp_path):
    live = LiveRun(slow, tmp_path / "live")
    live.write(0, 9)
    code = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler);"
        "from mappnb.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    job = subprocess.Popen(
        [sys.executable, "-c", code, "watch", str(live.path), "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    events = [json.loads(job.stdout.readline()) for _ in range(11)]
    os.kill(job.pid, signal.SIGINT)
    out, err = job.communicate(timeout=60)
    last = json.loads(out.splitlines()[-1])
    assert (
        events[0]["event"] == "start"
        and last["event"] == "end"
        and last["why"] == "interrupted"
        and last["num_steps"] == 10
    )
    assert job.returncode == 0 and "Traceback" not in err


def test_the_pause_follows_from_the_cost(slow):
    watcher = Watcher(slow)
    watcher.cpu_s = [5.0]
    assert watcher.pause_s == LEAST_PAUSE_S  # the first look is what there was before
    watcher.cpu_s += [0.05] * 5
    watcher._began_s = time.monotonic() - 0.25 / CPU_SHARE + 5
    assert watcher.pause_s == pytest.approx(5, abs=0.1)  # until the looks are the share that they may be
    watcher.cpu_s.append(9.0)
    assert watcher.pause_s == pytest.approx(3 * 0.05 / CPU_SHARE, abs=0.1)  # paid back little by little
    watcher._began_s -= 10_000
    assert watcher.pause_s == LEAST_PAUSE_S


def test_a_layout_that_no_rank_has_told_yet_is_not_made_up(tmp_path):
    path, _ = tmp_path / "run", generated(tmp_path / "run", steps=4)
    for file in path.glob("inc=*/ranks/*.json"):
        file.write_text(
            json.dumps({k: v for k, v in json.loads(file.read_text()).items() if k not in ("layout", "coords")})
        )
    start = Watcher(mappnb.attach(path)).look()[0]
    assert start["event"] == "start" and start["layout"] is None
    assert sentence(start) == f"watching {path}: {LAYOUT.world_size} ranks"
