"""The self-time table on hand-built events with closed forms, on generated runs, and where something is missing."""

from __future__ import annotations

import numpy as np
import pytest
import xarray as xr

import mappnb
from mappnb import analysis
from mappnb.errors import MappnbError
from mappnb.layout import Layout
from mappnb.schema import EVENTS, empty
from mappnb.terms import Flag
from mappnb.testing import Noise, generate_run

MS = 1_000_000


def span(category, start, end, *, op="", phase="none", **others):
    return {
        "category": category,
        "op": op,
        "phase": phase,
        "start_ns": start * MS,
        "duration_ns": (end - start) * MS,
    } | others


def events(rows):
    """A dataset of events given by what differs from "not applicable"."""
    data = empty(EVENTS, {"event": len(rows)})
    defaults = {"incarnation": 0, "rank": 0, "step": 0, "thread": 0, "depth": 0, "phase": "none", "flags": 0}
    for i, row in enumerate(rows):
        for key, value in {**defaults, **row}.items():
            data[key][i] = value
    return xr.Dataset({k: ("event", v) for k, v in data.items()})


def seconds(table, rank=0, step=0):
    """What a rank's parts hold, ms; empty ones left out."""
    row = table.seconds.sel(rank=rank, step=step)
    return {str(p): float(v * 1e3) for p, v in zip(table.part.values, row.values, strict=True) if v}


def one(table, name, rank=0, step=0):
    return float(table[name].sel(rank=rank, step=step))


def all_reduce(rank, start, end, seq=0, **others):
    return span("collective", start, end, op="all_reduce", rank=rank, group=7, seq=seq, bytes=8) | others


def test_a_layer_in_a_forward_with_a_collective_inside():
    """forward 0-100 > layer 10-60 > all_reduce 20-50: the layer is of the same part, the collective of none."""
    rows = [span("mark", 0, 120, op="iteration"), span("compute", 0, 100, op="forward_step", phase="forward", stage=3)]
    rows += [span("compute", 10, 60, op="layer", phase="forward", stage=3), all_reduce(0, 20, 50)]
    rows += [all_reduce(1, 40, 50), span("mark", 0, 120, op="iteration", rank=1)]
    table = analysis.work(events(rows))
    assert seconds(table) == pytest.approx({"forward@3": 70, "host": 20})
    assert int(table["count"].sel(rank=0, step=0, part="forward@3")) == 2
    assert one(table, "wait_s") == pytest.approx(0.020) and one(table, "transfer_s") == pytest.approx(0.010)
    assert one(table, "wait_s", 1) == 0 and one(table, "transfer_s", 1) == pytest.approx(0.010)
    assert one(table, "imposed_s", 1) == pytest.approx(0.020) and one(table, "imposed_s") == 0
    assert one(table, "last_calls", 1) == 1 and one(table, "last_calls") == 0 and one(table, "calls") == 1
    assert table.part_kind.sel(part="forward@3") == "forward" and int(table.part_stage.sel(part="forward@3")) == 3
    assert float(table.step_s[0]) == pytest.approx(0.120)


def test_imposed_is_what_the_last_but_one_would_not_have_waited():
    """Arrivals 0, 30, 80: without rank 2 the call had begun at 30. Two at once: nobody alone is last."""
    rows = [all_reduce(0, 0, 90), all_reduce(1, 30, 90), all_reduce(2, 80, 90)]
    rows += [all_reduce(0, 100, 150, 1), all_reduce(1, 140, 150, 1), all_reduce(2, 140, 150, 1)]
    table = analysis.work(events(rows))
    np.testing.assert_allclose(table.imposed_s[0], [0, 0, 0.050])
    np.testing.assert_array_equal(table.last_calls[0], [0, 0, 1])
    np.testing.assert_array_equal(table.calls[0], [2, 2, 2])
    np.testing.assert_allclose(table.wait_s[0], [0.080 + 0.040, 0.050, 0])


def p2p(op, rank, peer, start, end, seq=0, **others):
    return span("p2p", start, end, op=op, rank=rank, peer=peer, group=9, seq=seq, bytes=4) | others


def test_a_message_sent_ahead_makes_nobody_wait():
    """The receiver comes 50 ms after a send that took 1 ms: it made its sender wait for 1 ms at most."""
    table = analysis.work(events([p2p("send", 0, 1, 0, 1), p2p("recv", 1, 0, 50, 52)]))
    assert one(table, "imposed_s", 1) == pytest.approx(0.001)
    table = analysis.work(events([p2p("send", 0, 1, 40, 41), p2p("recv", 1, 0, 0, 42)]))
    assert one(table, "imposed_s", 0) == pytest.approx(0.040) and one(table, "wait_s", 1) == pytest.approx(0.040)


def test_in_flight_receives_block_only_where_they_are_waited_for():
    """irecv at 0, computes to 30, waits 30-60; the send came at 50: 20 ms of waiting, 10 ms of transfer."""
    flying = int(Flag.ASYNC)
    rows = [p2p("recv", 1, 0, 0, 60, flags=flying), span("compute", 0, 30, phase="forward", stage=1, rank=1)]
    rows += [span("wait", 30, 60, op="wait", name="recv", rank=1, peer=0, group=9, seq=0), p2p("send", 0, 1, 50, 60)]
    table = analysis.work(events(rows))
    assert seconds(table, 1) == pytest.approx({"forward@1": 30})
    assert one(table, "wait_s", 1) == pytest.approx(0.020) and one(table, "transfer_s", 1) == pytest.approx(0.010)
    assert one(table, "imposed_s", 0) == pytest.approx(0.020)
    assert one(table, "calls", 1) == 1


def test_recompute_gc_and_holes():
    """backward 0-100 > recompute 10-40 > gc 20-25; a hole to 130; optimizer to 150; a span of evaluation to 160."""
    rows = [span("compute", 0, 100, phase="backward", stage=0), span("compute", 10, 40, phase="recompute", stage=0)]
    rows += [span("host", 20, 25, op="gc"), span("optimizer", 130, 150), span("evaluation", 150, 160)]
    table = analysis.work(events(rows))
    expected = {"backward@0": 70, "recompute@0": 25, "gc": 5, "optimizer": 20, "evaluation": 10, "host": 30}
    assert seconds(table) == pytest.approx(expected)
    assert list(table.part.values) == ["backward@0", "recompute@0", "optimizer", "evaluation", "gc", "host"]


def test_device_lanes_count_and_the_spans_that_issued_them_do_not():
    """Kernels 10-50 and 60-80 on stream 7, NCCL 40-90 on stream 9: what the kernels hide is no wait."""
    rows = [span("compute", 0, 20, op="forward_step", phase="forward"), span("mark", 0, 100, op="iteration")]
    rows += [span("compute", 10, 50, stream=7), span("compute", 60, 80, stream=7)]
    rows += [all_reduce(0, 40, 90, stream=9), all_reduce(1, 70, 90, stream=9), span("compute", 0, 70, stream=7, rank=1)]
    table = analysis.work(events(rows))
    # wait 40-70 less the kernels: 50-60; transfer 70-90 less 70-80; host: 0-10 and 90-100
    assert seconds(table) == pytest.approx({"compute": 60, "host": 20})
    assert one(table, "wait_s") == pytest.approx(0.010) and one(table, "transfer_s") == pytest.approx(0.010)
    assert int(table["count"].sel(rank=0, step=0, part="compute")) == 2


def extents(ds):
    frame = ds[["step", "rank", "start_ns", "duration_ns"]].to_dataframe()
    frame["end"] = frame.start_ns + frame.duration_ns
    grouped = frame.groupby(["step", "rank"])
    return ((grouped.end.max() - grouped.start_ns.min()) / 1e9).unstack("rank").to_numpy()


@pytest.fixture(scope="module")
def generated(tmp_path_factory):
    path = tmp_path_factory.mktemp("work") / "run"
    generate_run(
        path,
        layout=Layout(pp=2, tp=2, dp=2),
        num_microbatches=4,
        num_steps=6,
        seed=3,
        noise=Noise(jitter_probability=0.1),
    )
    return mappnb.attach(path)


def test_parts_waits_and_transfers_sum_to_the_rank_s_own_extent(generated):
    """Single lanes: sum of parts + wait_s + transfer_s = last end - first start of the rank in the step, to the nanosecond."""
    table = analysis.work(generated)
    assert table.seconds.dims == ("step", "rank", "part") and table.sizes == {
        "step": 6,
        "rank": 8,
        "part": table.sizes["part"],
    }
    whole = table.seconds.sum("part") + table.wait_s + table.transfer_s
    np.testing.assert_allclose(whole, extents(generated.sel()), rtol=0, atol=1e-12)
    assert float(table.seconds.min()) >= 0


def test_waits_are_those_of_the_breakdown(generated):
    table, parts = analysis.work(generated), analysis.breakdown(generated)
    for name, category in (("wait_s", "wait_peer"), ("transfer_s", "transfer")):
        np.testing.assert_allclose(table[name], parts.seconds.sel(category=category), rtol=0, atol=1e-12)
    compute = table.seconds.sel(part=np.isin(table.part_kind, ["forward", "backward"])).sum("part")
    np.testing.assert_allclose(compute, parts.seconds.sel(category="compute"), rtol=0, atol=1e-12)
    np.testing.assert_allclose(table.step_s, parts.window_s, rtol=0, atol=1e-12)


def test_a_dataset_gives_the_same_and_one_step_alone_too(generated):
    whole = analysis.work(generated)
    xr.testing.assert_equal(whole.drop_vars("host"), analysis.work(generated.events).drop_vars("host"))
    alone = analysis.work(generated, step=slice(2, 3))
    xr.testing.assert_equal(alone, whole.sel(step=[2, 3]))
    assert list(np.unique(whole.host.values)) == ["host0"]


def test_missing_ranks_unequal_steps_and_no_collectives(generated):
    ds = generated.sel()
    gone = (ds["rank"].values == 3) & (ds["step"].values >= 4)
    table = analysis.work(ds.isel(event=np.flatnonzero(~gone)))
    assert not table.present.sel(rank=3, step=[4, 5]).any() and table.present.sel(rank=3, step=3)
    assert float(table.seconds.sel(rank=3, step=5).sum()) == 0
    still = np.flatnonzero(np.isin(ds.category.values, ["compute", "optimizer"]))
    table = analysis.work(ds.isel(event=still))
    assert int(table.calls.sum()) == 0 and float(table.wait_s.sum()) == 0 and bool(table.present.all())


def test_without_numbers_the_order_tells(generated):
    """No sequence numbers at all, as many traces are: the calls are those of each group's order, and the numbers the same."""
    ds = generated.sel()
    bare = analysis.work(ds.assign(seq=("event", np.full(ds.sizes["event"], -1))))
    xr.testing.assert_equal(bare, analysis.work(ds))


def test_steps_run_twice_count_once_as_run_last(generated):
    ds = generated.sel(step=slice(2, 4))
    again = ds.assign(incarnation=ds.incarnation + 1, start_ns=ds.start_ns + 10**10).isel(
        event=np.flatnonzero(ds["step"].values >= 3)
    )
    both = xr.concat([ds, again], "event")
    xr.testing.assert_allclose(analysis.work(both), analysis.work(ds), rtol=0, atol=1e-12)


def test_no_events_and_no_steps_name_the_cure(generated):
    with pytest.raises(MappnbError, match=r"no events in step 99; see run\.steps"):
        analysis.work(generated, step=99)
    with pytest.raises(MappnbError, match=r"no event belongs to a step.*mappnb\.step\(\)"):
        analysis.work(events([span("compute", 0, 10, step=-1)]))
