"""Sources: what a window holds equals what the run holds, whole or in parts; growth, large runs, damage."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import mappnb
from mappnb.errors import MappnbError, SchemaError
from mappnb.layout import Layout
from mappnb.schema import EVENTS, check
from mappnb.testing import Clocks, generate_run
from mappnb.testing.runs import make_run
from mappnb.widgets import sources
from mappnb.widgets.classes import class_of
from mappnb.widgets.sources import DatasetSource, RunSource


@pytest.fixture
def run(make):
    return make(layout=Layout(pp=2, dp=2), num_steps=6, segment_rows=100, num_hosts=2)


def events_in(loaded, t0, t1):
    """(rank, start, duration, op) of the events of a window, by way of the index."""
    found = loaded.index.query(t0, t1, pixels=1, max_spans=0)
    everything = loaded.events
    start, length = everything.start_ns.values, everything.duration_ns.values
    inside = np.flatnonzero((start < t1) & ((start + length > t0) | (start >= t0)))
    assert found.num_events == len(inside)
    some = everything.isel(event=inside)
    return sorted(zip(some["rank"].values, some.start_ns.values, some.duration_ns.values, some.op.values, strict=True))


def windows(source):
    lo, hi = source.extent_ns
    width = (hi - lo) // 10
    return [(lo, hi), (lo, lo + width), (lo + 3 * width, lo + 4 * width), (hi - width, hi), (hi + 5, hi + 9)]


def consistent(loaded):
    """The index is over the rows and categories of the events."""
    n = loaded.events.sizes["event"]
    assert loaded.index.num_events == len(loaded.classes) == len(loaded.lanes.row) == n
    assert loaded.index.num_rows == loaded.lanes.num_rows
    np.testing.assert_array_equal(loaded.lanes.rank[loaded.lanes.row], loaded.events["rank"].values)
    np.testing.assert_array_equal(loaded.classes, class_of(loaded.events))


def test_a_dataset(run):
    ds = run.sel(step=slice(1, 2))
    source = DatasetSource(ds, group_by="pp")
    assert source.num_events == ds.sizes["event"] and source.attrs["run_id"] == run.meta["run_id"]
    assert source.extent_ns == (ds.start_ns.values.min(), (ds.start_ns + ds.duration_ns).values.max())
    loaded = source.window(*source.extent_ns)
    consistent(loaded)
    assert loaded.complete and not source.refresh()
    assert [g.label for g in loaded.lanes.groups] == ["pp 0", "pp 1"]
    source.arrange(group_by="rank")
    assert [g.label for g in source.window(0, 1).lanes.groups] == [""]
    source.close()
    with pytest.raises(SchemaError, match="no variable 'phase'"):
        DatasetSource(ds.drop_vars("phase"))
    with pytest.raises(MappnbError, match="group_by is 'node'"):
        source.arrange(group_by="node")


def test_no_events_at_all(run):
    empty = run.sel(time=slice(50, 60))
    source = DatasetSource(empty)
    assert source.extent_ns == (0, 0) and source.window(0, 1).lanes.num_rows == 0


def test_classes_of_another_kind(run):
    ds = run.sel(step=slice(0, 2))
    seen = []

    def classify(events):
        seen.append(events.sizes["event"])
        return (events.op == "layer").values.astype(np.uint8) * 7

    for source in (DatasetSource(ds, classify=classify), RunSource(run, classify=classify)):
        loaded = source.window(*source.extent_ns)
        np.testing.assert_array_equal(loaded.classes, (loaded.events.op == "layer").values * 7)
    assert max(seen) < 40  # one of each kind


def test_ranks_hosts_and_steps(run):
    source, steps = RunSource(run), run.steps
    assert source.ranks == [0, 1, 2, 3] and source.hosts == {0: "host0", 1: "host0", 2: "host1", 3: "host1"}
    number, start, end = source.steps()
    np.testing.assert_array_equal(number, range(6))
    np.testing.assert_array_equal(start, steps.start_ns.min("rank"))
    np.testing.assert_array_equal(end, steps.end_ns.max("rank"))
    ds = run.sel(step=slice(2, 4), rank=[1, 3])
    inside = DatasetSource(ds)
    assert inside.ranks == [1, 3] and inside.hosts == {}
    number, start, end = inside.steps()
    assert number.tolist() == [2, 3, 4]
    for i, step in enumerate(number):
        of = ds.isel(event=np.flatnonzero(ds["step"] == step))
        assert (start[i], end[i]) == (of.start_ns.min(), (of.start_ns + of.duration_ns).max())
    assert all(len(v) == 0 for v in DatasetSource(run.sel(time=slice(50, 60))).steps())


def test_a_run_loads_whole(run):
    source = RunSource(run, group_by="host")
    everything = run.sel()
    assert source.num_events == everything.sizes["event"]
    assert source.extent_ns == (
        everything.start_ns.values.min(),
        (everything.start_ns + everything.duration_ns).values.max(),
    )
    loaded = source.window(0, 1)
    consistent(loaded)
    check(loaded.events, EVENTS, name="loaded")
    assert loaded.complete and source.ready and source.window(5, 6) is loaded
    assert [g.label for g in loaded.lanes.groups] == ["host0", "host1"]
    assert {t.label for t in loaded.lanes.tracks} == {"main"}


def test_a_window_of_a_run_too_large_to_load_holds_the_same(run, monkeypatch):
    monkeypatch.setattr(sources, "BACKGROUND_EVENTS", 0)
    whole = RunSource(run)
    expected = {w: events_in(whole.window(*w), *w) for w in windows(whole)}
    monkeypatch.setattr(sources, "FULL_EVENTS", whole.num_events - 1)
    monkeypatch.setattr(sources, "WINDOW_EVENTS", whole.num_events - 1)
    parts = RunSource(run)
    for w in windows(parts)[1:]:
        loaded = parts.window(*w)
        consistent(loaded)
        assert loaded.complete and not parts.ready and loaded.t0_ns <= w[0] and loaded.t1_ns >= w[1]
        assert events_in(loaded, *w) == expected[w]
        assert loaded.lanes.num_rows == whole.window(*w).lanes.num_rows
    assert parts.window(*windows(parts)[-1]) is loaded


def test_the_steps_stand_for_a_window_that_holds_too_much(run, monkeypatch):
    monkeypatch.setattr(sources, "BACKGROUND_EVENTS", 0)
    monkeypatch.setattr(sources, "FULL_EVENTS", 400)
    monkeypatch.setattr(sources, "WINDOW_EVENTS", 400)
    source = RunSource(run)
    loaded = source.window(*source.extent_ns)
    consistent(loaded)
    check(loaded.events, EVENTS, name="overview")
    steps = run.steps
    assert not loaded.complete and "zoom in" in loaded.note and loaded.events.sizes["event"] == steps.start_ns.size
    one = loaded.events.isel(event=np.flatnonzero((loaded.events["rank"] == 3) & (loaded.events["step"] == 2)))
    assert one.name.item() == "step 2" and one.start_ns.item() == steps.start_ns.sel(step=2, rank=3).item()
    assert one.duration_ns.item() == (steps.end_ns - steps.start_ns).sel(step=2, rank=3).item()
    lo, _ = source.extent_ns
    close = source.window(lo, lo + 10**6)
    assert close.complete and close.lanes.num_rows > loaded.lanes.num_rows
    again = source.window(*source.extent_ns).lanes
    assert again.num_rows == close.lanes.num_rows  # rows that were seen stay


def test_a_large_run_is_loaded_in_the_background(run, monkeypatch):
    monkeypatch.setattr(sources, "FULL_EVENTS", 400)
    monkeypatch.setattr(sources, "WINDOW_EVENTS", 400)
    ready = threading.Event()
    source = RunSource(run, on_ready=ready.set)
    assert not source.window(*source.extent_ns).complete
    assert ready.wait(30) and source.ready and source.failed is None
    loaded = source.window(*source.extent_ns)
    consistent(loaded)
    assert loaded.complete and loaded.events.sizes["event"] == run.sel().sizes["event"]
    everything = run.events.load()
    for name in EVENTS:
        np.testing.assert_array_equal(loaded.events[name].values, everything[name].values)
    source.arrange(threads="merge", group_by="dp")
    assert [g.label for g in source.window(0, 1).lanes.groups] == ["dp 0", "dp 1"]
    source.close()
    assert not source.ready


def test_a_run_that_grows(tmp_path, monkeypatch):
    import mappnb

    path = make_run(tmp_path / "run", layout=Layout(pp=2), num_steps=2, ended=False)
    run = mappnb.attach(path)
    source = RunSource(run, group_by="pp")
    before = source.window(*source.extent_ns)
    names = before.events.name.values.tolist()
    assert not source.refresh()
    make_run(path, layout=Layout(pp=2), num_steps=3, resume=True, name="later", num_layers=3)
    assert source.refresh()
    after = source.window(*source.extent_ns)
    consistent(after)
    assert (
        after.events.sizes["event"] > before.events.sizes["event"] and source.num_events == after.events.sizes["event"]
    )
    assert set(after.events.incarnation.values) == {0, 1}
    np.testing.assert_array_equal(
        before.events.op.values, run.sel(incarnation=0).pipe(_in_order_of, before.events).op.values
    )
    assert before.events.name.values.tolist() == names and "later" not in names
    kept = [k for k in after.lanes.keys.to_numpy().tolist() if k in before.lanes.keys.to_numpy().tolist()]
    assert kept == before.lanes.keys.to_numpy().tolist()
    assert not source.refresh()


def _in_order_of(ds, other):
    """The rows of ``ds`` in the order of ``other``, by rank, start and duration."""
    order = np.lexsort([ds[v].values for v in ("op", "depth", "duration_ns", "start_ns", "rank")])
    back = np.argsort(np.lexsort([other[v].values for v in ("op", "depth", "duration_ns", "start_ns", "rank")]))
    return ds.isel(event=order[back])


def test_a_run_that_takes_long_to_read_is_not_read_again_at_once(run, monkeypatch):
    monkeypatch.setattr(sources, "_CHEAP_S", 0.0)
    source = RunSource(run)
    source.window(0, 1)
    monkeypatch.setattr(type(run), "refresh", lambda self: pytest.fail("read again"))
    monkeypatch.setattr(sources.time, "monotonic", lambda: source._next_s - 0.001)
    assert not source.refresh()


@pytest.mark.parametrize("full", [10**6, 400, 10])
def test_a_damaged_segment_is_an_error_that_names_it(run, monkeypatch, full):
    monkeypatch.setattr(sources, "FULL_EVENTS", full)
    monkeypatch.setattr(sources, "WINDOW_EVENTS", full)
    source = RunSource(run)
    broken = next(p for p in sorted(run.store.segments("events", 0, [1]), key=lambda s: s.number) if p.closed)
    with open(broken.path, "r+b") as file:
        file.write(b"\xff" * 2000)
    lo, hi = source.extent_ns
    if full == 10:  # nothing but the steps can be shown, and the background says what is wrong
        assert not source.window(lo, hi).complete
        source._thread.join()
        error = source.failed
    else:
        with pytest.raises(MappnbError) as caught:
            source.window(lo, lo + 10**6)
        error = caught.value
    assert all(w in str(error) for w in (broken.path.rsplit("/", 1)[1], "rank=00001", "mappnb check", "move it"))


def test_edges_follow_a_clock_model_that_drifts(tmp_path):
    """After an alignment the extent is that of the aligned events, and windows at the edges find them."""
    generate_run(
        tmp_path / "run", layout=Layout(dp=4), num_microbatches=2, num_steps=3, ranks_per_host=2, seed=1,
        clocks=Clocks(offset_s=0.01, drift_ppm=400.0), num_layers=4,
    )  # fmt: skip
    run = mappnb.attach(tmp_path / "run")
    run.align()
    source = RunSource(run)
    events = run.sel()
    first, last = int(events.start_ns.min()), int((events.start_ns + events.duration_ns).max())
    assert abs(source.extent_ns[0] - first) <= 2 and abs(source.extent_ns[1] - last) <= 2
    constant = {k: run.clock_model.offset(k) for k in run.clock_model.pieces}
    assert constant and any((run.clock_model.shift(k, np.array([0])) != constant[k]).any() for k in constant)
