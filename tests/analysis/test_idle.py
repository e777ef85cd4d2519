"""Idle blocks: their lengths by counting, their reasons by planted causes."""

from __future__ import annotations

import numpy as np
import pytest
import xarray as xr

import mappnb
from mappnb import Layout, analysis
from mappnb.errors import MappnbError
from mappnb.schema import EVENTS, empty
from mappnb.testing import CheckpointStall, Hang, HostGaps, SlowRank, generate_run


def events(rows: list[dict]) -> xr.Dataset:
    data = empty(EVENTS, {"event": len(rows)})
    defaults = {"incarnation": 0, "rank": 0, "step": 0, "thread": 0, "depth": 0, "phase": "none", "category": "compute"}
    for i, row in enumerate(rows):
        start, end = row["at"]
        row = {k: v for k, v in row.items() if k != "at"}
        for key, value in {**defaults, **row, "start_ns": start, "duration_ns": end - start}.items():
            data[key][i] = value
    return xr.Dataset({k: ("event", v) for k, v in data.items()})


def summary(table) -> list[tuple]:
    columns = (table["rank"], table.start_s, table.duration_s, table.reason, table.peer, table.reason_s)
    return [
        (r, round(a * 1e9), round(d * 1e9), why, p, round(n * 1e9)) for r, a, d, why, p, n in zip(*columns, strict=True)
    ]


def test_reasons_by_hand():
    call = dict(category="collective", op="all_reduce", group=1, seq=0, bytes=8)
    pair = dict(category="p2p", group=2, seq=0, bytes=8)
    rows = [
        dict(op="forward_step", phase="forward", at=(0, 100)),
        dict(at=(100, 180), **call),  # rank 1 comes at 150
        dict(op="backward_step", phase="backward", at=(180, 300)),
        dict(category="data", op="next_batch", at=(300, 340)),
        dict(category="optimizer", op="optimizer_step", at=(340, 400)),
        dict(op="recv", at=(10, 65), rank=1, peer=2, **pair),  # rank 2 sends at 60
        dict(op="forward_step", phase="forward", at=(65, 150), rank=1),
        dict(at=(150, 180), rank=1, **call),
        dict(op="backward_step", phase="backward", at=(180, 390), rank=1),
        dict(category="host", op="gc", at=(0, 50), rank=2),
        dict(op="send", at=(60, 62), rank=2, peer=1, **pair),
        dict(op="forward_step", phase="forward", at=(62, 200), rank=2),
    ]
    table = analysis.idle_blocks(events(rows))
    assert summary(table) == [
        (2, 200, 200, "finished", -1, 200),
        (0, 100, 80, "wait_collective", 1, 50),
        (1, 0, 65, "wait_p2p", 2, 50),
        (2, 0, 62, "gc", -1, 50),
        (0, 300, 40, "data", -1, 40),
        (1, 150, 30, "transfer", -1, 30),
        (1, 390, 10, "finished", -1, 10),
    ]
    assert table.phase.tolist() == ["", "warm_up", "warm_up", "", "cool_down", "warm_up", "cool_down"]
    assert table.root.tolist()[:3] == [2, 1, 2] and table.root_reason.tolist()[1:3] == ["busy", "gc"]
    assert (
        table.explanation[2] == "waits for rank 2 to send; at the end of the chain rank 2 garbage collection of Python"
    )
    own = analysis.idle_blocks(events(rows), rank=1, top=1)
    assert summary(own) == [(1, 0, 65, "wait_p2p", 2, 50)]


def test_blocks_are_what_compute_leaves(make):
    run = make(layout=Layout(pp=4), num_microbatches=4)
    table = analysis.idle_blocks(run, step=1, top=10_000)
    seconds = analysis.breakdown(run, step=1).seconds.isel(step=0)
    idle = seconds.sum("category") - seconds.sel(category=["compute", "optimizer"]).sum("category")
    np.testing.assert_allclose(table.groupby("rank").duration_s.sum(), idle, atol=1e-12)
    assert (table.duration_s.diff().dropna() <= 0).all() and (table.reason_s <= table.duration_s + 1e-12).all()


def test_simulated_1f1b():
    sched = mappnb.schedule("1f1b", num_stages=4, num_microbatches=8)
    ds = mappnb.simulate(sched, mappnb.Costs(forward_s=0.01, backward_input_s=0.01, backward_weight_s=0.01))
    table = analysis.idle_blocks(ds, top=1000)
    assert table.duration_s.sum() == pytest.approx(4 * 0.09)  # (p - 1) (f + b) on each rank
    first = table[(table["rank"] == 0)].iloc[0]
    assert (first.reason, first.peer, first.phase) == ("wait_p2p", 1, "warm_up")
    assert set(table[table.reason == "finished"]["rank"]) == {1, 2, 3}


@pytest.fixture(scope="module")
def generated(tmp_path_factory):
    def build(fault, **options):
        path = tmp_path_factory.mktemp("idle") / "run"
        generate_run(path, layout=Layout(tp=2, dp=2, pp=4), num_steps=2, faults=[fault], seed=1, **options)
        return mappnb.attach(path)

    return build


@pytest.mark.parametrize(
    ("fault", "options", "root", "why"),
    [
        (HostGaps(rank=5, length_s=0.5), {}, 5, "gc"),
        (HostGaps(rank=5, length_s=0.5, gap="run_queue"), {}, 5, "host"),
        (HostGaps(rank=0, length_s=0.5, gap="dataloader"), {}, 0, "data"),
        (SlowRank(rank=5, factor=3.0), {}, 5, "busy"),
    ],
)
def test_the_chain_of_waits_ends_at_the_fault(generated, fault, options, root, why):
    table = analysis.idle_blocks(generated(fault, **options), step=0, top=20)
    waits = table[table.reason.isin(["wait_p2p", "wait_collective"])]
    assert len(waits) > 5
    ends = list(zip(waits.root, waits.root_reason, strict=True))
    assert max(set(ends), key=ends.count) == (root, why)


def test_a_checkpoint_that_stalls(generated):
    run = generated(CheckpointStall(rank=3, extra_s=1.0), checkpoint_every=2)
    own = analysis.idle_blocks(run, step=1, rank=3, top=1)
    assert own.reason.tolist() == ["checkpoint"] and float(own.reason_s[0]) > 1
    assert (analysis.idle_blocks(run, step=1, top=5).reason.isin(["finished", "checkpoint"])).all()


def test_a_call_that_never_ends_names_who_has_not_come(generated):
    table = analysis.idle_blocks(generated(Hang(rank=3, first_step=1)), step=1, top=16)
    stuck = table[table.reason == "wait_absent"]
    assert len(stuck) >= 8 and 3 in stuck.peer.tolist() and "which has not come" in stuck.explanation.iloc[0]
    assert stuck.root.mode().tolist() == [3]


def test_device_ranks_are_idle_when_the_device_is():
    gpu = dict(stream=7)
    rows = [
        dict(op="forward_step", phase="forward", at=(0, 100)),  # issue only
        dict(op="forward_step", phase="forward", at=(20, 60), **gpu),
        dict(category="collective", op="all_gather", group=1, seq=0, bytes=8, at=(60, 90), **gpu),
        dict(op="backward_step", phase="backward", at=(90, 100), **gpu),
    ]
    table = analysis.idle_blocks(events(rows))
    assert [(s[1], s[2], s[3]) for s in summary(table)] == [(60, 30, "transfer"), (0, 20, "host")]


def test_no_events(make):
    with pytest.raises(MappnbError, match="idle_blocks: no events"):
        analysis.idle_blocks(make(), step=99)
