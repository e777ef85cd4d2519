"""Lanes: every event has a row, no two events of a row overlap, ranks stand in the order asked for, labels say what they are."""

from __future__ import annotations

import numpy as np
import pytest
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st

from mappnb.errors import MappnbError, SchemaError
from mappnb.layout import Layout
from mappnb.schema import EVENTS, empty
from mappnb.terms import Flag
from mappnb.widgets._partition import layers
from mappnb.widgets.lanes import GROUP_BY, Lanes, lanes


def events(rows=(), **columns) -> xr.Dataset:
    """An events dataset out of rows (rank, start, duration) and whole columns."""
    n = len(rows) if rows else max((np.size(v) for v in columns.values()), default=0)
    data = empty(EVENTS, {"event": n})
    data["flags"][:] = 0
    data["category"][:] = "compute"
    if rows:
        data["rank"][:], data["start_ns"][:], data["duration_ns"][:] = zip(*rows, strict=True)
    for name, value in {"thread": 0, "depth": 0, **columns}.items():
        data[name][:] = value
    return xr.Dataset({k: (v.dims, data[k]) for k, v in EVENTS.items()})


def check(ds: xr.Dataset, got: Lanes) -> None:
    """By brute force: rows hold what they say, and what they hold does not overlap."""
    rank, start, length = (ds[v].values for v in ("rank", "start_ns", "duration_ns"))
    assert got.row.dtype == np.int32 and got.row.shape == rank.shape
    assert len(got.label) == len(got.rank) == len(got.depth) == len(got.track) == got.num_rows
    np.testing.assert_array_equal(got.rank[got.row], rank)
    for r in np.unique(got.row):
        mine = [i for i in np.flatnonzero(got.row == r) if length[i] > 0]
        for i in mine:
            for j in mine:
                assert i == j or start[i] + length[i] <= start[j] or start[j] + length[j] <= start[i]
    for parts in (got.tracks, got.blocks, got.groups):
        assert [p.first for p in parts] == np.cumsum([0, *(p.num_rows for p in parts)])[:-1].tolist()
        assert sum(p.num_rows for p in parts) == got.num_rows
    for t in got.tracks:
        part = slice(t.first, t.first + t.num_rows)
        assert sorted(set(got.depth[part])) == list(range(len(set(got.depth[part]))))
        assert set(got.label[part]) == {t.label} and set(got.rank[part]) == {t.rank}


spans = st.tuples(st.integers(0, 2), st.integers(0, 60), st.integers(0, 20))


@settings(max_examples=60, deadline=None)
@given(st.lists(spans, max_size=40), st.data())
def test_no_two_events_of_a_row_overlap(rows, data):
    def column(*choices):
        return data.draw(st.lists(st.sampled_from(choices), min_size=len(rows), max_size=len(rows)))

    ds = events(
        rows,
        depth=column(-1, 0, 1, 7),
        thread=column(-1, 0, 1),
        stream=column(-1, -1, 7),
        flags=column(0, 0, int(Flag.ASYNC)),
        category=column("compute", "collective"),
    )
    check(ds, lanes(ds, layout=None))
    check(ds, lanes(ds, layout=Layout(pp=3), group_by="pp", threads="merge"))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 40), st.integers(0, 20)), max_size=40))
def test_layers_are_as_few_as_spans_are_open_at_once(rows):
    group, start, length = np.array(rows or np.empty((0, 3)), np.int64).T
    layer = layers(group, start, start + length)
    for g in np.unique(group):
        mine = (group == g) & (length > 0)
        open_at_once = [(mine & (start <= t) & (start + length > t)).sum() for t in range(61)]
        assert len(np.unique(layer[mine])) == max(open_at_once)


def test_a_recorded_run(make):
    run = make(layout=Layout(pp=2, dp=2), num_steps=4)
    ds = run.sel()
    got = lanes(ds, layout=run.layout, group_by="pp")
    check(ds.isel(event=slice(0, 400)), _first(got, 400))
    assert [g.label for g in got.groups] == ["pp 0", "pp 1"]
    assert [b.rank for b in got.blocks] == [0, 1, 2, 3]
    assert got.blocks[3].label == "rank 3 · pp 1 dp 1" and got.blocks[3].group == "pp 1"
    assert {t.label for t in got.tracks} == {"main"}
    assert [b.num_rows for b in got.blocks] == [3] * 4  # iteration, step, layer


def _first(got: Lanes, n: int) -> Lanes:
    return Lanes(*(got.row[:n] if f == "row" else getattr(got, f) for f in Lanes.__slots__))


@pytest.mark.parametrize("group_by", GROUP_BY)
def test_order_and_groups(group_by):
    layout = Layout(pp=2, dp=2, tp=2, cp=2, ep=2)
    rows = [(r, 0, 5) for r in reversed(range(layout.world_size))]
    hosts = {r: f"host{r % 3}" for r in range(layout.world_size)}
    got = lanes(events(rows), layout=layout, group_by=group_by, hosts=hosts)
    ranks = [b.rank for b in got.blocks]
    if group_by == "rank":
        assert ranks == sorted(ranks) and [g.label for g in got.groups] == [""]
        return
    where = [hosts[r] if group_by == "host" else layout.coords(r)[group_by] for r in ranks]
    assert list(zip(where, ranks, strict=True)) == sorted(zip(where, ranks, strict=True))
    labels = [h if group_by == "host" else f"{group_by} {h}" for h in dict.fromkeys(where)]
    assert [g.label for g in got.groups] == labels
    assert [g.num_rows for g in got.groups] == [where.count(w) for w in dict.fromkeys(where)]


def test_ranks_that_no_layout_and_no_host_knows_come_last():
    got = lanes(events([(5, 0, 1), (0, 0, 1)]), layout=Layout(dp=2), group_by="dp")
    assert [g.label for g in got.groups] == ["dp 0", "outside the layout"]
    got = lanes(events([(0, 0, 1), (1, 0, 1)]), layout=None, group_by="host", hosts={1: "a"})
    assert [(g.label, b.rank) for g, b in zip(got.groups, got.blocks, strict=True)] == [("a", 1), ("host not known", 0)]
    assert lanes(events([(-1, 0, 1)]), layout=None).blocks[0].label == "rank not known"


def test_one_rank_and_no_event():
    assert lanes(events(), layout=None).num_rows == 0
    one = lanes(events([(0, 0, 5)]), layout=Layout())
    assert (one.num_rows, one.blocks[0].label, one.groups[0].label) == (1, "rank 0", "")


def test_missing_depth_nests_the_inner_spans_below():
    ds = events([(0, 5, 10), (0, 0, 100), (0, 5, 3), (0, 50, 10)], depth=-1)
    np.testing.assert_array_equal(lanes(ds, layout=None).row, [1, 0, 2, 1])


def test_spans_in_flight_do_not_push_the_others_apart():
    ds = events(
        [(0, 0, 100), (0, 10, 20), (0, 15, 70), (0, 20, 70), (0, 40, 20), (0, 45, 5)],
        depth=[0, 1, 1, 1, 1, 2],
        flags=[0, 0, Flag.ASYNC, Flag.OVERLAPPED, 0, Flag.ASYNC],
        category=["compute", "compute", "collective", "p2p", "compute", "compute"],
    )
    got = lanes(ds, layout=None)
    np.testing.assert_array_equal(got.row, [0, 1, 3, 4, 1, 2])
    assert got.label == ("main", "main", "main", "in flight", "in flight")


def test_many_threads_and_streams_in_order_with_their_names():
    thread, stream = [9, 0, 2, 0, 0, -1], [-1, -1, -1, 20, 7, -1]
    ds = events([(0, 0, 5)] * 6, thread=thread, stream=stream)
    got = lanes(ds, layout=None, names={(0, 2): "<b>\u202eloader\N{FIRE}", (1, 9): "another"})
    assert [t.label for t in got.tracks] == [
        "main",
        "<b>\u202eloader\N{FIRE}",
        "thread 9",
        "host",
        "stream 7",
        "stream 20",
    ]
    many = events([(r, t, 2) for r in range(4) for t in range(300)], thread=np.tile(np.arange(300), 4))
    assert lanes(many, layout=None).num_rows == 1200
    merged = lanes(many, layout=None, threads="merge")
    assert [b.num_rows for b in merged.blocks] == [2] * 4
    check(many, merged)


def test_known_rows_stay():
    both = events([(0, 0, 5), (1, 0, 5), (1, 0, 5)], depth=[0, 0, 3], thread=[0, 0, 4])
    before = lanes(both, layout=None)
    after = lanes(events([(1, 9, 5), (0, 9, 5)], depth=[3, 1], thread=[4, 0]), layout=None, known=before)
    assert after.num_rows == 4
    np.testing.assert_array_equal(after.row, [3, 1])
    assert [t.label for t in after.tracks] == ["main", "main", "thread 4"]


def test_messages():
    ds = events([(0, 0, 1)])
    with pytest.raises(MappnbError, match=r"group_by is 'rnk'.*did you mean 'rank'"):
        lanes(ds, layout=None, group_by="rnk")
    with pytest.raises(MappnbError, match="threads is 'all'; expected one of split, merge"):
        lanes(ds, layout=None, threads="all")
    with pytest.raises(SchemaError, match="no variable 'depth'"):
        lanes(ds.drop_vars("depth"), layout=None)
