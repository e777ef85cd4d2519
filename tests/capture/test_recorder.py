"""The recorder, with either core: it loses nothing uncounted and never harms the code that it records."""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref

import numpy as np
import pytest

from mappnb.capture import recorder as recorder_module
from mappnb.capture._record import MAX_DEPTH, RECORD_DTYPE, Flag
from mappnb.capture.recorder import TOO_MANY_NAMES, Recorder
from mappnb.terms import Category, Op


@pytest.fixture(params=[False, True], ids=["native", "twin"])
def recorder(request) -> Recorder:
    return Recorder(pure_python=request.param)


@pytest.fixture
def site(recorder) -> int:
    return recorder.site(category="compute", op="layer", name="test")


def wait_for(condition, timeout_s: float = 10.0) -> bool:
    """Whether ``condition()`` came true: a native thread ends a little after ``join`` returns."""
    end_s = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < end_s:
        time.sleep(0.002)
    return condition()


@pytest.mark.parametrize("call", ["begin", "end", "record", "set_context"])
def test_wrong_arguments_are_type_errors_in_both(recorder, call) -> None:
    function = getattr(recorder, call)
    for arguments, keywords in [(("x",), {}), ((1,) * 20, {}), ((), {"no_such": 1}), ((1.5,), {})]:
        with pytest.raises(TypeError):
            function(*arguments, **keywords)
    assert len(recorder.drain()) == 0


# ---- what one thread sees


def test_nested_spans_carry_depth_context_and_values(recorder, site) -> None:
    recorder.set_context(step=7, stage=1, chunk=0, microbatch=3)
    outer = recorder.begin(site)
    recorder.set_context(microbatch=4)
    inner = recorder.begin(site)
    recorder.end(inner, bytes=1 << 40, group=11, seq=5, peer=2, flags=Flag.ASYNC)
    recorder.end(outer)
    first, second = recorder.drain()
    assert (first["depth"], second["depth"]) == (1, 0)
    assert (first["microbatch"], second["microbatch"]) == (4, 3)
    assert [int(first[k]) for k in ("bytes", "group", "seq", "peer", "flags")] == [1 << 40, 11, 5, 2, Flag.ASYNC]
    assert [int(first[k]) for k in ("step", "stage", "chunk", "issue_ns", "cpu_ns", "stream")] == [7, 1, 0, -1, -1, -1]
    assert second["start_ns"] <= first["start_ns"]
    assert first["start_ns"] + first["duration_ns"] <= second["start_ns"] + second["duration_ns"]
    assert recorder.drain().dtype == RECORD_DTYPE


def test_closing_a_parent_by_token_repairs_its_children(recorder, site) -> None:
    parent = recorder.begin(site)
    child = recorder.begin(site)
    recorder.begin(site)
    recorder.end(parent, bytes=9)
    records = recorder.drain()
    assert records["flags"].tolist() == [Flag.REPAIRED, Flag.REPAIRED, 0]
    assert records["bytes"].tolist() == [-1, -1, 9]
    recorder.end(child)
    recorder.end()
    recorder.end(12345 << 20)
    assert len(recorder.drain()) == 0
    assert recorder.stats()["mismatched"] == 3


def test_exception_passes_through_and_marks_the_span(recorder) -> None:
    span = recorder.span(category="compute", op="layer")
    error = ValueError("mine")
    with pytest.raises(ValueError, match="mine") as caught, span, span:
        raise error
    assert caught.value is error
    assert recorder.drain()["flags"].tolist() == [Flag.FAILED, Flag.FAILED]


def test_span_is_reentrant_and_unclosed_begins_inside_are_repaired(recorder, site) -> None:
    span = recorder.span_of(site)

    def recurse(levels: int) -> None:
        with span:
            if levels:
                recurse(levels - 1)
            else:
                recorder.begin(site)

    recurse(4)
    records = recorder.drain()
    assert records["depth"].tolist() == [5, 4, 3, 2, 1, 0]
    assert records["flags"].tolist() == [Flag.REPAIRED, 0, 0, 0, 0, 0]


def test_depth_limit_is_counted_and_everything_unwinds(recorder, site) -> None:
    span = recorder.span_of(site)

    def recurse(levels: int) -> None:
        if levels:
            with span:
                recurse(levels - 1)

    recurse(MAX_DEPTH + 20)
    assert len(recorder.drain()) == MAX_DEPTH
    stats = recorder.stats()
    assert (stats["too_deep"], stats["mismatched"]) == (20, 0)
    assert len(recorder.open_spans()) == 0


def test_switching_off_and_on_in_the_middle_corrupts_nothing(recorder, site) -> None:
    whole = recorder.begin(site)
    begun_on = recorder.begin(site)
    recorder.enabled = False
    begun_off = recorder.begin(site)
    recorder.end(begun_on)  # ended while off; closes begun_off too
    begun_off_again = recorder.begin(site)
    recorder.record(site, 1, 1)
    recorder.enabled = True
    recorder.end()  # begun_off_again, by position
    recorder.end(whole)
    recorder.end(begun_off)
    recorder.end(begun_off_again)
    records = recorder.drain()
    assert records["depth"].tolist() == [0]
    assert recorder.stats()["mismatched"] == 2


def test_record_adds_what_was_measured_elsewhere(recorder, site) -> None:
    recorder.set_context(1, 2, 3, 4)
    recorder.begin(site)
    recorder.record(site, 1000, 50, issue_ns=900, stream=7, microbatch=9, flags=Flag.OVERLAPPED)
    recorder.record(site, 1000, 50, depth=0, step=5, cpu_ns=2)
    first, second = recorder.drain()
    names = ["start_ns", "duration_ns", "issue_ns", "cpu_ns", "step", "stage", "chunk", "microbatch", "depth", "stream"]
    assert [int(first[k]) for k in names] == [1000, 50, 900, -1, 1, 2, 3, 9, 1, 7]
    assert [int(second[k]) for k in names] == [1000, 50, -1, 2, 5, 2, 3, 4, 0, -1]
    assert first["flags"] == Flag.OVERLAPPED


@pytest.mark.parametrize("pure_python", [False, True])
def test_cpu_time_leaves_out_sleep(pure_python) -> None:
    recorder = Recorder(cpu_time=True, pure_python=pure_python)
    with recorder.span(category="host", op="span"):
        time.sleep(0.05)
    (record,) = recorder.drain()
    assert record["duration_ns"] >= 50_000_000
    assert 0 <= record["cpu_ns"] < 25_000_000


def test_now_is_the_monotonic_clock(recorder) -> None:
    before = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
    assert before <= recorder.now_ns() <= time.clock_gettime_ns(time.CLOCK_MONOTONIC)


# ---- threads


@pytest.mark.parametrize("pure_python", [False, True])
def test_full_ring_drops_the_oldest_exactly(pure_python) -> None:
    recorder = Recorder(capacity=10, pure_python=pure_python)
    for i in range(25):
        recorder.record(0, i, 0)
    assert recorder.stats()["dropped"] == 15
    assert recorder.drain()["start_ns"].tolist() == list(range(15, 25))
    assert recorder.stats()["recorded"] == 25
    for i in range(10):
        recorder.record(0, i, 0)
    assert recorder.drain()["start_ns"].tolist() == list(range(10))
    assert recorder.stats()["dropped"] == 15


@pytest.mark.parametrize(("capacity", "num_spans"), [(50, 4000), (1 << 16, 4000)])
def test_stress_counts_every_record(recorder, capacity, num_spans) -> None:
    recorder = Recorder(capacity=capacity, pure_python=not recorder.native)
    span = recorder.span(category="compute", op="layer")
    stop = threading.Event()

    def work(number: int) -> None:
        for i in range(num_spans):
            with span:
                recorder.end(recorder.begin(number), bytes=i, seq=i)

    parts: list[np.ndarray] = []

    def drain() -> None:
        while not stop.is_set():
            parts.append(recorder.drain())
            assert set(recorder.open_spans()["flags"].tolist()) <= {Flag.OPEN}

    drainer = threading.Thread(target=drain)
    drainer.start()
    workers = [threading.Thread(target=work, args=(1000 + i,), name=f"worker-{i}") for i in range(4)]
    for thread in workers:
        thread.start()
    for thread in workers:
        thread.join()
    stop.set()
    drainer.join()
    records = np.concatenate([*parts, recorder.drain()])
    stats = recorder.stats()
    assert stats["recorded"] == 4 * 2 * num_spans
    assert stats["recorded"] == len(records) + stats["dropped"]
    assert stats["mismatched"] == stats["too_deep"] == 0
    assert (records["bytes"] == records["seq"]).all()
    for index, _, name in recorder.threads():
        mine = records[records["thread"] == index]
        inner = mine[mine["depth"] == 1]
        assert name.startswith("worker-")
        assert (np.diff(inner["seq"]) > 0).all()
        assert len(np.unique(inner["site"])) <= 1
    if capacity > 2 * num_spans:
        assert stats["dropped"] == 0


def test_another_thread_reads_what_is_stuck(recorder, site) -> None:
    release, entered = threading.Event(), threading.Event()

    def stuck() -> None:
        recorder.set_context(step=12)
        with recorder.span_of(site):
            recorder.begin(site)
            entered.set()
            release.wait(20)

    thread = threading.Thread(target=stuck, name="stuck")
    thread.start()
    try:
        assert entered.wait(20)
        time.sleep(0.02)
        spans = recorder.open_spans()
        assert spans["depth"].tolist() == [0, 1]
        assert spans["flags"].tolist() == [Flag.OPEN, Flag.OPEN]
        assert (spans["duration_ns"] >= 20_000_000).all()
        assert spans["step"].tolist() == [12, 12]
        assert recorder.threads()[int(spans["thread"][0])][1:] == (thread.native_id, "stuck")
        assert len(recorder.drain()) == 0
    finally:
        release.set()
        thread.join()
    assert recorder.drain()["flags"].tolist() == [Flag.REPAIRED, 0]
    assert len(recorder.open_spans()) == 0


def test_token_of_another_thread_is_ignored(recorder, site) -> None:
    recorder.end(recorder.begin(site))
    tokens: list[int] = []
    thread = threading.Thread(target=lambda: tokens.append(recorder.begin(site)))
    mine = recorder.begin(site)
    thread.start()
    thread.join()
    recorder.end(tokens[0])
    assert recorder.stats()["mismatched"] == 1
    recorder.end(mine)
    assert len(recorder.drain()) == 2


def test_records_of_ended_threads_are_kept_then_forgotten(recorder, site) -> None:
    def work() -> None:
        recorder.end(recorder.begin(site))
        recorder.begin(site)  # never closed

    for _ in range(5):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    num_records = 0

    def forgotten() -> bool:
        nonlocal num_records
        num_records += len(recorder.drain())
        return recorder.stats()["mismatched"] == 5

    assert wait_for(forgotten)
    assert num_records == 5
    assert len(recorder.open_spans()) == 0
    assert recorder.stats()["recorded"] == 5
    assert [index for index, _, _ in recorder.threads()] == [0, 1, 2, 3, 4]


# ---- fork


def child_of(work) -> int:
    """Fork, run ``work`` in the child, and return its exit status; -1 if it hung."""
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(work())
        finally:
            os._exit(99)
    for _ in range(1000):
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    return -1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_fork_leaves_the_child_off_and_alive(recorder, site) -> None:
    stop = threading.Event()

    def busy() -> None:
        while not stop.is_set():
            recorder.end(recorder.begin(site))
            recorder.drain()

    def child() -> int:
        off = not recorder.enabled
        recorder.end(token)
        recorder.end(recorder.begin(site))
        empty = len(recorder.drain()) == 0 and recorder.stats()["recorded"] == 0 and len(recorder.open_spans()) == 0
        recorder.enabled = True
        recorder.end(recorder.begin(site))
        return 0 if off and empty and len(recorder.drain()) == 1 else 1

    thread = threading.Thread(target=busy)
    thread.start()
    try:
        token = recorder.begin(site)
        assert [child_of(child) for _ in range(5)] == [0] * 5
        assert recorder.enabled
    finally:
        stop.set()
        thread.join()
    recorder.end(token)
    assert recorder.stats()["mismatched"] == 0


# ---- sites


def test_sites_are_interned(recorder) -> None:
    first = recorder.site(category=Category.COLLECTIVE, op=Op.ALL_REDUCE, name="grads", layer=3)
    again = recorder.site(category="collective", op="all_reduce", name="grads", layer=3)
    other = recorder.site(category="collective", op="all_reduce", name="grads", layer=4)
    assert first == again != other
    assert recorder.sites[first] == ("collective", "all_reduce", "grads", "none", 3, "")
    assert all(type(text) is str for text in recorder.sites[first][:4])
    assert recorder.sites_since(other) == recorder.sites[other:]


def test_sites_are_bounded(recorder, monkeypatch) -> None:
    monkeypatch.setattr(recorder_module, "MAX_SITES", 5)
    monkeypatch.setattr(recorder_module, "_MAX_SHARED_SITES", 2)
    ids = [recorder.site(category="host", op=f"op{i % 4}", name=f"name {i}") for i in range(30)]
    assert ids[:5] == list(range(5))
    names = [recorder.sites[i] for i in ids[5:]]
    assert {site.name for site in names} == {TOO_MANY_NAMES}
    assert {site.op for site in names[4:]} == {names[0].op, names[1].op, TOO_MANY_NAMES}
    assert len(recorder.sites) == 8
    assert recorder.stats()["nameless"] == 25
    assert recorder.site(category="host", op="op0", name="name 0") == 0


def test_sites_from_many_threads_agree(recorder) -> None:
    found: list[list[int]] = []

    def work() -> None:
        found.append([recorder.site(category="host", op="span", name=str(i)) for i in range(200)])

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(ids == found[0] for ids in found)
    assert len(recorder.sites) == 200


# ---- lifetime


def test_recorder_is_freed_and_spans_keep_what_they_need(recorder, site) -> None:
    span = recorder.span_of(site)
    again = Recorder(pure_python=not recorder.native)
    alive = weakref.ref(again)
    late = again.span_of(0)
    again.end(again.begin(0))
    del again
    gc.collect()
    assert alive() is None
    with late, span:
        pass
    assert len(recorder.drain()) == 1
