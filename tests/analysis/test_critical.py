"""The critical path against the simulator's, against a longest path by hand, and on generated runs."""

from __future__ import annotations

import numpy as np
import pytest
import xarray as xr

import mappnb
from mappnb import Layout, analysis
from mappnb.errors import MappnbError
from mappnb.schema import EVENTS, empty
from mappnb.terms import Flag
from mappnb.testing import Clocks, SlowLink, SlowRank, generate_run


def events(rows: list[dict]) -> xr.Dataset:
    data = empty(EVENTS, {"event": len(rows)})
    defaults = {"incarnation": 0, "rank": 0, "step": 0, "thread": 0, "depth": 0, "phase": "none", "category": "compute"}
    for i, row in enumerate(rows):
        start, end = row.pop("at")
        for key, value in {**defaults, **row, "start_ns": start, "duration_ns": end - start}.items():
            data[key][i] = value
        data["raw_start_ns"][i] = data["start_ns"][i]
    return xr.Dataset({k: ("event", v) for k, v in data.items()})


def steps_of(path) -> list[tuple]:
    return [(r.rank, r.name, round(r.duration_s * 1e9), round(r.delay_s * 1e9)) for r in path.itertuples()]


FAMILIES = [("gpipe", 4, 1), ("1f1b", 4, 1), ("interleaved", 8, 2), ("zb_h1", 4, 1), ("zb_v", 8, 2)]


@pytest.mark.parametrize("send", ["async", "sync", "blocking"])
@pytest.mark.parametrize(("name", "stages", "chunks"), FAMILIES)
def test_equals_the_simulator(name, stages, chunks, send):
    sched = mappnb.schedule(name, num_stages=stages, num_microbatches=8, num_chunks=chunks)
    uneven = np.linspace(0.010, 0.013, stages)
    for forward, reduce_s in ((0.01, 0.0), (uneven, 0.02)):
        costs = mappnb.Costs(
            forward_s=forward,
            backward_input_s=0.012,
            backward_weight_s=0.011,
            p2p_s=0.0013,
            send=send,
            reduce_s=reduce_s,
        )
        ds = mappnb.simulate(sched, costs)
        path = analysis.critical_path(ds, step=0)
        assert path.attrs["makespan_s"] == pytest.approx(float(ds.makespan_s), abs=2e-9)
        assert path.attrs["replay_error"] == 0 and path.delay_s.sum() == 0
        assert path.share.sum() == pytest.approx(1)
        np.testing.assert_allclose(ds.slack_s.values[path.event], 0, atol=1e-8)  # each may be no later
        slack = analysis.event_slack(ds, step=0).slack_s.values
        actions = ds.category.values == "compute"
        np.testing.assert_allclose(slack[actions], ds.slack_s.values[actions], atol=1e-8)


def test_optimizers_wait_for_the_last_reduction():
    sched = mappnb.schedule("1f1b", num_stages=4, num_microbatches=8)
    ds = mappnb.simulate(
        sched,
        mappnb.Costs(forward_s=0.01, backward_input_s=0.01, backward_weight_s=0.01, reduce_s=0.03, optimizer_s=0.004),
    )
    path = analysis.critical_path(ds, step=0)
    assert path.attrs["makespan_s"] == pytest.approx(float(ds.makespan_s), abs=2e-9) and path.delay_s.sum() == 0
    assert path.op.tolist()[-2:] == ["reduce_scatter", "optimizer_step"]


def test_collectives_go_on_with_the_last_member():
    call = dict(category="collective", op="all_reduce", name="all_reduce", group=1, seq=0, bytes=8)
    ds = events(
        [
            dict(name="a", at=(0, 30)),
            dict(at=(30, 110), **call),
            dict(name="b", at=(110, 130)),
            dict(name="c", at=(10, 90), rank=1),
            dict(at=(95, 112), rank=1, **call),
            dict(name="d", at=(112, 125), rank=1),
        ]
    )
    path = analysis.critical_path(ds, step=0)
    # rank 1 begins 10 late and comes 5 after its work: the call takes 15 from then on, for rank 0
    assert steps_of(path) == [(1, "c", 80, 10), (1, "all_reduce", 0, 5), (0, "all_reduce", 15, 0), (0, "b", 20, 0)]
    assert path.attrs["share_by_rank"] == pytest.approx({1: 80 / 130, 0: 35 / 130})
    assert path.attrs["share_of_delay"] == pytest.approx(15 / 130)
    slack = analysis.event_slack(ds, step=0).slack_s.values * 1e9
    np.testing.assert_allclose(slack, [65, 0, 0, 0, 5, 5])


def test_asynchronous_calls_and_their_waits():
    call = dict(category="collective", op="reduce_scatter", name="sync", group=1, seq=0, bytes=8, flags=int(Flag.ASYNC))
    wait = dict(category="wait", op="wait", name="reduce_scatter", group=1, seq=0)
    rows = []
    for rank, late in ((0, 0), (1, 40_000)):
        rows += [
            dict(name="B", at=(0, 100_000 + late), rank=rank),
            dict(at=(50_000 + late, 160_000), rank=rank, **call),
            dict(at=(100_000 + late, 160_000), rank=rank, **wait),
            dict(name="opt", category="optimizer", at=(160_000, 180_000), rank=rank),
        ]
    path = analysis.critical_path(events(rows), step=0)
    # issued by rank 1 at 90 µs, done 70 later; the rest of its backward hides behind that
    assert steps_of(path)[:2] == [(1, "B", 90_000, 0), (1, "sync", 70_000, 0)] and path.name.tolist()[2:] == ["opt"]


@pytest.mark.parametrize(
    ("came", "path"),
    [
        (0, [(0, "F", 50, 0), (0, "send", 20, 0), (1, "G", 30, 0)]),  # the receiver waited
        (90, [(1, "H", 90, 0), (1, "recv", 1, 0), (1, "G", 30, 0)]),  # the message was there
    ],
)
def test_messages(came, path):
    pair = dict(category="p2p", group=2, bytes=8)
    end = max(70, came + 1)
    rows = [
        dict(name="F", at=(0, 50)),
        dict(name="send", op="send", at=(50, 51), peer=1, seq=1, **pair),
        dict(name="recv", op="recv", at=(came, end), peer=0, seq=1, rank=1, **pair),
        dict(name="G", at=(end, end + 30), rank=1),
        dict(name="warm", at=(-200, -100)),  # an earlier message of the link tells what the wire takes
        dict(name="send", op="send", at=(-100, -99), peer=1, seq=0, **pair),
        dict(name="recv", op="recv", at=(-200, -80), peer=0, seq=0, rank=1, **pair),
        dict(name="idle", at=(-99, 0)),
        dict(name="H", at=(-80, came), rank=1) if came else dict(name="idle", at=(-80, 0), rank=1),
    ]
    found = analysis.critical_path(events(rows), step=0)
    tail = [s for s in steps_of(found) if found.start_s.max()][-len(path) :]
    assert [t[:2] for t in tail] == [p[:2] for p in path] and tail[-2:] == path[-2:]


def test_device_work_comes_after_its_launch():
    gpu = dict(stream=7, thread=0)
    rows = [
        dict(name="host", category="host", at=(0, 100)),
        dict(name="k0", at=(15, 40), issue_ns=10, **gpu),
        dict(name="k1", at=(95, 130), issue_ns=90, **gpu),  # launched late: the host decides
        dict(name="k2", at=(130, 200), issue_ns=91, **gpu),  # behind k1 on the stream
    ]
    path = analysis.critical_path(events(rows), step=0)
    assert steps_of(path) == [(0, "host", 90, 0), (0, "k1", 35, 5), (0, "k2", 70, 0)]


def test_spans_inside_others_count_once():
    rows = [
        dict(name="iteration", category="mark", at=(0, 100)),
        dict(name="F", at=(10, 90)),
        dict(name="L", at=(20, 80), layer=3),
    ]
    path = analysis.critical_path(events(rows), step=0)
    assert [s[1:3] for s in steps_of(path)] == [("iteration", 10), ("F", 10), ("L", 60), ("F", 10), ("iteration", 10)]


def test_the_slow_rank_leads(tmp_path):
    """Three in four of the path's time are the slow rank's, whose work is a quarter longer, and none of it is waiting."""
    layout = Layout(tp=2, dp=2, pp=4)
    generate_run(
        tmp_path / "run", layout=layout, num_steps=2, num_microbatches=12, faults=[SlowRank(rank=9, factor=1.5)]
    )
    run = mappnb.attach(tmp_path / "run")
    path = analysis.critical_path(run, step=1)
    shares = path.attrs["share_by_rank"]
    assert next(iter(shares)) == 9 and shares[9] > 0.6
    assert path.attrs["share_by_category"]["compute"] > 0.9 and path.attrs["replay_error"] == pytest.approx(0, abs=1e-6)
    np.testing.assert_allclose(
        path.attrs["makespan_s"], mappnb.testing.Truth.load(tmp_path / "run").step_s[1], rtol=1e-6
    )
    again = run.events.mapp.critical_path(step=1)  # its rows are in another order
    assert again.drop(columns="event").equals(path.drop(columns="event"))


def test_a_slow_link_is_on_the_path(tmp_path):
    generate_run(
        tmp_path / "run", layout=Layout(pp=4), num_steps=2, faults=[SlowLink(source=1, destination=2, extra_s=0.05)],
        clocks=Clocks(drift_ppm=20, uptime_s=1e4),
    )  # fmt: skip
    path = analysis.critical_path(mappnb.attach(tmp_path / "run"), step=1)
    sends = path[path.op == "send"].groupby("rank").duration_s.sum()
    assert sends.idxmax() == 1 and sends[1] > 0.05


def test_a_step_without_events(make):
    with pytest.raises(MappnbError, match="step 77 has no events"):
        analysis.critical_path(make(), step=77)


def test_a_wait_for_a_send_is_held_by_a_late_receiver():
    pair = dict(category="p2p", group=2, bytes=8, seq=0)
    rows = [
        dict(name="F", at=(0, 50)),
        dict(name="send", op="send", peer=1, at=(50, 100), flags=int(Flag.ASYNC), **pair),
        dict(name="send", op="wait", category="wait", group=2, seq=0, peer=1, at=(51, 100)),
        dict(name="G", at=(100, 200)),
        dict(name="H", at=(0, 95), rank=1),
        dict(name="recv", op="recv", peer=0, at=(95, 100), rank=1, **pair),
    ]
    path = analysis.critical_path(events(rows), step=0)
    assert steps_of(path) == [(1, "H", 95, 0), (0, "send", 5, 0), (0, "G", 100, 0)]
    assert path.category.tolist() == ["compute", "wait", "compute"]


def test_a_late_receiver_holds_the_send_though_other_links_are_slower():
    """A message of another link took 0.4 ms; this one let its sender go 0.1 ms after the receiver came."""
    late, slower = dict(category="p2p", group=2, bytes=8, seq=0), dict(category="p2p", group=3, bytes=8, seq=0)
    us = [
        dict(name="F", at=(0, 5_000)),
        dict(name="send", op="send", peer=1, at=(5_000, 90_100), flags=int(Flag.ASYNC), **late),
        dict(name="send", op="wait", category="wait", group=2, seq=0, peer=1, at=(5_010, 90_100)),
        dict(name="G", at=(90_100, 200_000)),
        dict(name="H", at=(0, 90_000), rank=1),
        dict(name="recv", op="recv", peer=0, at=(90_000, 90_080), rank=1, **late),
        dict(name="F", at=(0, 5_000), rank=2),
        dict(name="send", op="send", peer=3, at=(5_000, 5_400), rank=2, **slower),
        dict(name="recv", op="recv", peer=2, at=(10, 5_400), rank=3, **slower),
    ]
    rows = [{**row, "at": tuple(1000 * t for t in row["at"])} for row in us]
    path = analysis.critical_path(events(rows), step=0)
    assert steps_of(path) == [(1, "H", 90_000_000, 0), (0, "send", 100_000, 0), (0, "G", 109_900_000, 0)]
