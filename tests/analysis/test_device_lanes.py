"""Ranks that compute on a device: their host spans are only the issue of work, by exact hand-made numbers."""

from __future__ import annotations

import numpy as np
import pytest
import xarray as xr

from mappnb import analysis
from mappnb.analysis._input import issue_only
from mappnb.schema import EVENTS, empty
from mappnb.terms import BREAKDOWN, Flag

F = dict(category="compute", op="forward_step", phase="forward")
B = dict(category="compute", op="backward_step", phase="backward")
OPT = dict(category="optimizer", op="optimizer_step", phase="none")
GPU = dict(stream=7, thread=3)  # the writer's thread, as recorded


def events(rows: list[dict]) -> xr.Dataset:
    """A dataset of events given by what differs from "not applicable"; times in ns."""
    data = empty(EVENTS, {"event": len(rows)})
    defaults = {"incarnation": 0, "rank": 0, "step": 0, "thread": 0, "depth": 0, "phase": "none"}
    for i, row in enumerate(rows):
        for key, value in {**defaults, **row}.items():
            data[key][i] = value
        data["raw_start_ns"][i] = 1_000_000 + data["start_ns"][i]
    return xr.Dataset({k: ("event", v) for k, v in data.items()})


def at(start: int, end: int, *kinds: dict, **values: object) -> dict:
    out: dict = {"start_ns": start, "duration_ns": end - start}
    for kind in kinds:
        out |= kind
    return out | values


def gpu_step() -> list[dict]:
    """The host is done with issuing at 50 of 200; the device computes 20-60 and 70-150, and steps 160-190."""
    return [
        at(0, 200, category="mark", op="iteration"),
        at(5, 15, F, depth=1, microbatch=0),
        at(20, 40, B, depth=1, microbatch=0),
        at(25, 35, category="collective", op="all_reduce", group=9, seq=0, bytes=8, depth=2),
        at(45, 50, OPT, depth=1),
        at(50, 195, category="data", op="next_batch", depth=1),
        at(20, 60, F, GPU, microbatch=0, issue_ns=1_000_005),
        at(70, 150, B, GPU, microbatch=0, issue_ns=1_000_020),
        at(160, 190, OPT, GPU, issue_ns=1_000_045),
    ]


def seconds(parts: xr.Dataset, rank: int = 0) -> dict[str, float]:
    """Nanoseconds of each category of step 0."""
    values = parts.seconds.sel(step=0, rank=rank).values * 1e9
    return {k: round(float(v), 6) for k, v in zip(BREAKDOWN, values, strict=True) if v}


def test_breakdown_takes_compute_from_the_device():
    parts = analysis.breakdown(events(gpu_step()))
    # the device leaves 0-20 and 195-200 to host; of 50-195 it leaves 60-70 and 150-195 to data, which goes before optimizer
    assert seconds(parts) == {"compute": 120, "data": 55, "host": 25}
    np.testing.assert_allclose(parts.seconds.sum("category"), parts.window_s.values[:, None])


def test_optimizer_time_is_the_device_s():
    parts = analysis.breakdown(events([row for row in gpu_step() if row["category"] != "data"]))
    assert seconds(parts) == {"compute": 120, "optimizer": 30, "host": 50}


def test_a_blocking_wait_of_the_host_does_not_win_over_device_compute():
    wait = dict(category="collective", op="all_reduce", group=9, seq=0, bytes=8, depth=2)
    rows = [at(0, 100, F), at(10, 90, wait), at(30, 70, F, GPU), at(40, 90, wait, rank=1)]
    parts = analysis.breakdown(events(rows))
    # rank 1 comes at 40: rank 0 waits 10-40 and transfers 40-90, but computes 30-70 meanwhile
    assert seconds(parts) == {"compute": 40, "wait_peer": 20, "transfer": 20, "host": 20}
    assert seconds(parts, rank=1) == {"transfer": 50, "idle": 50}


def test_ranks_without_a_device_are_as_before():
    rows = gpu_step()
    alone = analysis.breakdown(events([{**r, "rank": 1} for r in rows if r.get("stream", -1) < 0]))
    both = events([*rows, *({**r, "rank": 1} for r in rows if r.get("stream", -1) < 0)])
    assert issue_only(both).tolist() == [False, True, True, False, True, False, False, False, False] + [False] * 6
    assert seconds(analysis.breakdown(both), rank=1) == seconds(alone, rank=1)
    assert seconds(alone, rank=1)["compute"] == 10 + 10


def test_optimizer_on_a_device_alone_hides_nothing():
    """Without device compute there is nothing to take its place."""
    ds = events([at(0, 50, F), at(60, 90, OPT, GPU)])
    assert not issue_only(ds).any()
    assert seconds(analysis.breakdown(ds)) == {"compute": 50, "optimizer": 30, "idle": 10}


def test_transfer_in_flight_beside_device_compute_is_overlap():
    flying = dict(category="collective", op="reduce_scatter", group=9, seq=0, bytes=8, flags=int(Flag.ASYNC))
    parts = analysis.breakdown(events([at(0, 20, B), at(10, 110, B, GPU), at(15, 130, flying, depth=1)]))
    assert parts.overlapped_s.item() * 1e9 == pytest.approx(95)


def test_bubbles_of_device_ranks_are_those_of_the_device():
    rows = gpu_step()
    # a second rank whose device does F 60-100 and B 100-180, issued at once
    rows += [at(0, 5, F, rank=1), at(5, 10, B, rank=1), at(60, 100, F, GPU, rank=1), at(100, 180, B, GPU, rank=1)]
    bubble = analysis.bubble_seconds(events(rows)).sel(step=0) * 1e9
    assert float(bubble.makespan_s * 1e9) == pytest.approx(160)  # 20 to 180
    np.testing.assert_allclose(bubble.sel(rank=0, phase=["warm_up", "steady", "cool_down"]), [10, 0, 30])
    np.testing.assert_allclose(bubble.sel(rank=1, phase=["warm_up", "steady", "cool_down"]), [40, 0, 0])
    np.testing.assert_allclose(analysis.bubble_fraction(events(rows)).values, [[0.25, 0.25]])


def test_a_device_rank_beside_a_host_rank():
    rows = [*gpu_step(), at(0, 100, F, rank=1)]
    np.testing.assert_allclose(analysis.bubble_fraction(events(rows)).values, [[1 - 120 / 150, 1 - 100 / 150]])


def test_a_device_trace_of_kernels_alone_still_counts():
    kernel = dict(category="compute", op="gemm", phase="none")
    rows = [at(0, 5, F), at(20, 60, kernel, GPU), at(0, 100, F, rank=1)]
    np.testing.assert_allclose(analysis.bubble_fraction(events(rows)).values, [[0.6, 0.0]])


def test_evaluation_is_left_out_by_its_time_of_issue():
    """The device runs it after the host has left the span."""
    rows = gpu_step()
    evaluation = [
        at(195, 205, category="evaluation", op="evaluate"),
        at(196, 200, F),
        at(210, 400, F, GPU, issue_ns=1_000_196),
    ]
    plain, with_it = (analysis.bubble_seconds(events(r)) for r in (rows, [*rows, *evaluation]))
    np.testing.assert_allclose(with_it, plain)


def test_op_statistics_count_device_work_once():
    rows = gpu_step()
    rows += [at(30, 38, category="compute", op="embedding", phase="backward")]  # no device row of this phase
    rows += [{**r, "rank": 1, "start_ns": r["start_ns"]} for r in rows if r.get("stream", -1) < 0]
    table = analysis.op_statistics(events(rows))
    ns = {key: (int(row["count"]), round(row.total_s * 1e9, 6)) for key, row in table.iterrows()}
    assert ns["compute", "forward_step", "forward"] == (2, 40 + 10)  # the device's of rank 0, the host's of rank 1
    assert ns["compute", "backward_step", "backward"] == (2, 80 + 20)
    assert ns["optimizer", "optimizer_step", "none"] == (2, 30 + 5)
    assert ns["compute", "embedding", "backward"] == (2, 16)
    assert ns["data", "next_batch", "none"] == (2, 290)
