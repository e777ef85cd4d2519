"""run.watch(): a thread that follows, a cell that is brought up to date, and neither without a front end."""

from __future__ import annotations

import time

import pytest
from live_run import LiveRun

import mappnb
from mappnb import Layout
from mappnb.errors import MappnbError
from mappnb.testing import SlowRank, generate_run
from mappnb.watch import Watcher


@pytest.fixture(autouse=True)
def _no_files_left_open():
    yield
    LiveRun.abandon_all()


@pytest.fixture(scope="module")
def slow(tmp_path_factory):
    path = tmp_path_factory.mktemp("slow") / "run"
    fault = SlowRank(rank=9, factor=1.5, first_step=8, last_step=16)
    generate_run(path, layout=Layout(tp=2, dp=4, pp=2), num_steps=24, num_microbatches=4, seed=1, faults=[fault])
    return path


def until(condition, timeout_s=60.0):
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.05)


def test_follows_in_the_background(slow, tmp_path):
    live = LiveRun(slow, tmp_path / "live")
    live.write(0, 5)
    run = mappnb.attach(live.path)
    watch = run.watch(interval_s=0.05)
    try:
        until(lambda: len(watch.steps) == 6)
        assert not len(watch.verdicts) and watch.running and "following" in repr(watch)
        live.write(6, 10)
        until(lambda: len(watch.verdicts) == 1)
        assert watch.verdicts.subject[0] == "9" and watch.verdicts.verdict[0] == "culprit"
        live.write(11, 23)
        live.end()
        assert watch.wait(60)
    finally:
        watch.stop()
    assert watch.history.event.tolist() == ["raised", "cleared"] and not len(watch.verdicts)
    assert repr(watch) == "LiveWatch(24 steps, 0 slow, ended)" and watch.error == ""
    assert watch.steps.step.tolist() == list(range(24))


def test_stop_ends_the_thread(slow, tmp_path):
    live = LiveRun(slow, tmp_path / "live")
    live.write(0, 2)
    watch = mappnb.attach(live.path).watch()
    watch.stop()
    assert not watch.running and "stopped following" in repr(watch)
    watch.stop()  # twice does no harm


def test_the_cell_is_brought_up_to_date(slow, monkeypatch):
    shown = []

    class Handle:
        def update(self, data, raw):
            shown.append(data)

    def display(data, *, raw, display_id):
        shown.append(data)
        return Handle()

    import IPython.display

    monkeypatch.setattr(IPython.display, "display", display)
    watch = mappnb.attach(slow).watch()
    watch._ipython_display_()
    assert watch.wait(60)
    assert shown[-1]["text/plain"] == "LiveWatch(24 steps, 0 slow, ended)"
    assert "CLEAR rank 9" in shown[-1]["text/html"] and "<script" not in shown[-1]["text/html"]


def test_without_a_front_end_it_is_silent(slow, monkeypatch):
    import IPython.display

    monkeypatch.setattr(IPython.display, "display", lambda *a, **k: None)
    watch = mappnb.attach(slow).watch()
    watch._ipython_display_()
    assert watch.wait(60) and watch.error == ""


def test_an_error_in_the_thread_is_kept(slow, monkeypatch):
    monkeypatch.setattr(Watcher, "look", lambda self: 1 / 0)
    watch = mappnb.attach(slow).watch()
    assert watch.wait(60) and "ZeroDivisionError" in watch.error and "failed" in repr(watch)


def test_wrong_interval(slow):
    with pytest.raises(MappnbError, match="expected a number of seconds above 0"):
        mappnb.attach(slow).watch(interval_s=0)
