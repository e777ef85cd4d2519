"""Breakdown, bubbles and matching on runs whose every time is known."""

from __future__ import annotations

import numpy as np
import pytest
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st

from mappnb import analysis
from mappnb.errors import MappnbError, SchemaError
from mappnb.layout import Layout
from mappnb.schema import EVENTS, empty
from mappnb.terms import BREAKDOWN, Flag


def events(rows: list[dict]) -> xr.Dataset:
    """A dataset of events given by what differs from "not applicable"."""
    data = empty(EVENTS, {"event": len(rows)})
    defaults = {"incarnation": 0, "rank": 0, "step": 0, "thread": 0, "depth": 0, "phase": "none"}
    for i, row in enumerate(rows):
        for key, value in {**defaults, **row}.items():
            data[key][i] = value
    return xr.Dataset({k: ("event", v) for k, v in data.items()})


@pytest.mark.parametrize(("p", "m"), [(1, 1), (2, 4), (4, 8), (8, 8), (4, 16)])
def test_bubble_matches_closed_form(make, p, m):
    run = make(layout=Layout(pp=p), num_microbatches=m, p2p_s=0.0)
    fraction = analysis.bubble_fraction(run)
    assert fraction.dims == ("step", "rank")
    np.testing.assert_allclose(fraction, (p - 1) / (m + p - 1))
    np.testing.assert_allclose(run.events.mapp.bubble_fraction(), fraction)


def test_bubble_phases_of_1f1b(make):
    """Rank r of p waits r forwards before its first, then for its first backward; after its last forward only for backwards."""
    p, m, f = 4, 8, 0.010
    run = make(layout=Layout(pp=p), num_microbatches=m, p2p_s=0.0, forward_s=f)
    bubble = analysis.breakdown(run, step=1).bubble_s.isel(step=0)
    makespan = (m + p - 1) * 3 * f
    np.testing.assert_allclose(bubble.sum("phase"), makespan - m * 3 * f)
    last = bubble.sel(rank=p - 1)
    np.testing.assert_allclose(
        last.sel(phase="warm_up"), (p - 1) * f
    )  # its first backward follows its first forward at once
    np.testing.assert_allclose(last.sel(phase="cool_down"), (p - 1) * 2 * f)


@pytest.mark.parametrize("layout", [Layout(), Layout(dp=2), Layout(pp=2, dp=2), Layout(pp=4), Layout(tp=2, pp=2)])
def test_categories_sum_to_the_window(make, layout):
    run = make(layout=layout, slow={0: 1.5})
    parts = analysis.breakdown(run)
    assert tuple(parts.category.values) == BREAKDOWN and parts.seconds.dims == ("step", "rank", "category")
    whole = np.broadcast_to(parts.window_s.values[:, None], parts.seconds.shape[:2])
    np.testing.assert_allclose(parts.seconds.sum("category"), whole, rtol=0, atol=1e-12)
    assert float(parts.seconds.min()) >= 0


def test_breakdown_of_known_times(make):
    f, m, p2p = 0.010, 8, 0.001
    parts = analysis.breakdown(make(layout=Layout(pp=4, dp=2), num_microbatches=m, forward_s=f, p2p_s=p2p), step=1)
    seconds = parts.seconds.isel(step=0)
    np.testing.assert_allclose(seconds.sel(category="compute"), m * 3 * f)
    np.testing.assert_allclose(seconds.sel(category="optimizer"), 0.003)
    np.testing.assert_allclose(seconds.sel(category=["data", "checkpoint", "host"]), 0)
    # the all-reduce takes 2 ms after its last member; rank 0's eight backward inputs arrive 1 ms late at most
    assert (
        (seconds.sel(category="transfer") >= 0.002 - 1e-9) & (seconds.sel(category="transfer") <= 0.002 + 2 * m * p2p)
    ).all()


def test_a_slow_rank_makes_its_peer_wait_not_itself(make):
    seconds = analysis.breakdown(make(layout=Layout(dp=4), slow={2: 2.0}, num_microbatches=4), step=1).seconds.isel(
        step=0
    )
    wait = seconds.sel(category="wait_peer")
    assert float(wait.sel(rank=2)) == 0
    np.testing.assert_allclose(wait.sel(rank=[0, 1, 3]), 4 * 3 * 0.010)  # exactly what rank 2 takes longer


def test_blocking_wait_inside_a_forward_is_not_compute():
    ds = events(
        [
            dict(category="compute", op="forward_step", phase="forward", start_ns=0, duration_ns=100),
            dict(category="collective", op="all_reduce", start_ns=20, duration_ns=50, group=7, seq=0, bytes=8, depth=1),
            dict(category="compute", op="forward_step", phase="forward", start_ns=0, duration_ns=100, rank=1),
            dict(
                category="collective",
                op="all_reduce",
                start_ns=60,
                duration_ns=10,
                group=7,
                seq=0,
                bytes=8,
                depth=1,
                rank=1,
            ),
        ]
    )
    seconds = analysis.breakdown(ds).seconds.isel(step=0) * 1e9
    np.testing.assert_allclose(
        seconds.sel(rank=0, category=["compute", "wait_peer", "transfer", "idle"]), [50, 40, 10, 0]
    )
    np.testing.assert_allclose(
        seconds.sel(rank=1, category=["compute", "wait_peer", "transfer", "idle"]), [90, 0, 10, 0]
    )


def test_transfer_in_flight_beside_compute_is_overlap():
    flags = int(Flag.ASYNC)
    ds = events(
        [
            dict(category="compute", op="backward_step", phase="backward", start_ns=0, duration_ns=100),
            dict(
                category="collective",
                op="reduce_scatter",
                start_ns=60,
                duration_ns=80,
                group=7,
                seq=0,
                bytes=8,
                flags=flags,
                depth=1,
            ),
            dict(category="wait", op="wait", name="reduce_scatter", start_ns=110, duration_ns=30, group=7, seq=0),
        ]
    )
    parts = analysis.breakdown(ds)
    seconds = parts.seconds.isel(step=0, rank=0) * 1e9
    assert parts.overlapped_s.item() * 1e9 == pytest.approx(40)
    np.testing.assert_allclose(seconds.sel(category=["compute", "transfer", "idle"]), [100, 30, 10])


def test_wait_for_a_late_send_is_wait_peer():
    pair = dict(group=3, seq=0, bytes=8)
    ds = events(
        [
            dict(category="p2p", op="recv", start_ns=0, duration_ns=90, peer=0, rank=1, flags=int(Flag.ASYNC), **pair),
            dict(category="wait", op="wait", name="recv", start_ns=5, duration_ns=85, peer=0, rank=1, group=3, seq=0),
            dict(category="compute", op="forward_step", phase="forward", start_ns=0, duration_ns=70),
            dict(category="p2p", op="send", start_ns=70, duration_ns=10, peer=1, **pair),
        ]
    )
    seconds = analysis.breakdown(ds).seconds.isel(step=0).sel(rank=1) * 1e9
    np.testing.assert_allclose(seconds.sel(category=["wait_peer", "transfer", "idle"]), [65, 20, 5])


@settings(max_examples=25, deadline=None)
@given(shift=st.integers(-(2**40), 2**40), seed=st.integers(0, 99))
def test_breakdown_depends_neither_on_the_origin_nor_on_the_order_of_rows(shift, seed):
    rng = np.random.default_rng(seed)
    rows = [
        dict(
            category=str(rng.choice(["compute", "collective", "data", "host", "optimizer"])),
            op="all_reduce",
            start_ns=int(rng.integers(0, 80)),
            duration_ns=int(rng.integers(0, 40)),
            rank=int(rng.integers(0, 2)),
            thread=int(rng.integers(0, 2)),
            group=1,
            seq=int(rng.integers(0, 3)),
        )
        for _ in range(12)
    ]
    one = analysis.breakdown(events(rows)).seconds
    moved = [{**r, "start_ns": r["start_ns"] + shift} for r in rng.permutation(np.array(rows, object)).tolist()]
    np.testing.assert_allclose(analysis.breakdown(events(moved)).seconds, one, atol=1e-15)


def test_match_pairs_every_member_once(make):
    run = make(layout=Layout(pp=2, dp=2), num_microbatches=4, num_steps=3)
    calls = run.events.mapp.match()
    assert bool(calls.complete.all())
    reduces = calls.isel(call=np.flatnonzero(calls.op == "all_reduce"))
    assert reduces.sizes["call"] == 2 * 3  # one per dp group and step
    assert {tuple(r) for r in reduces["rank"].values.tolist()} == {(0, 1), (2, 3)}
    assert calls.sizes["call"] == 2 * 3 + 2 * 2 * 4 * 3  # forward and backward transfer per pipeline, microbatch, step


@pytest.mark.parametrize(("column", "value"), [("bytes", 12345), ("op", "broadcast"), ("seq", 99), ("group", 5)])
def test_match_sees_a_member_that_disagrees(make, column, value):
    ds = make(layout=Layout(dp=2), num_steps=2).sel()
    at = int(np.flatnonzero((ds.op == "all_reduce") & (ds["rank"] == 1))[0])
    ds[column].values[at] = value
    calls = analysis.match(ds)
    assert int((~calls.complete).sum()) == (1 if column in ("bytes", "op") else 2)


def test_step_statistics(make):
    stats = analysis.step_statistics(make(layout=Layout(pp=2), num_steps=5))
    assert stats.num_steps == 5 and stats.loss_first == 5.0 and stats.loss_last == 1.0
    assert stats.step_s_median == pytest.approx(stats.step_s_max)
    with pytest.raises(MappnbError, match="no step has ended yet"):
        analysis.step_statistics(make("other", num_steps=0))


def test_op_statistics_counts(make):
    table = analysis.op_statistics(make(layout=Layout(pp=2), num_microbatches=4, num_steps=3, num_layers=2))
    assert table.loc[("compute", "forward_step", "forward"), "count"].item() == 2 * 4 * 3
    assert table.loc[("compute", "layer", "backward"), "count"].item() == 2 * 2 * 4 * 3
    assert table.loc[("compute", "layer", "backward"), "total_s"].item() == pytest.approx(2 * 4 * 3 * 0.020)


def test_messages(make):
    with pytest.raises(SchemaError, match="no variable 'incarnation'"):
        analysis.breakdown(xr.Dataset({"a": ("event", [1])}))
    with pytest.raises(MappnbError, match=r"open a run with mappnb\.attach"):
        analysis.breakdown("demo-run")
