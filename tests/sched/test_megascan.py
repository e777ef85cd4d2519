"""Real pipelines through our engine: MegatronApp's published profile of 4 GPUs, 4 chunks each (arXiv:2507.19845)."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

from mappnb.errors import CostError
from mappnb.layout import Layout
from mappnb.sched import fit_costs, fit_link, predictable, recorded_schedule, replay_steps, schedule
from mappnb.sched.compare import changed_costs
from mappnb.schema import EVENTS, empty
from mappnb.terms import Category, Op, Phase

DATA = Path(__file__).parents[3] / "shared" / "data" / "megascan"
pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason=f"needs the MegaScan traces in {DATA}")
ITERATIONS = slice(1, 19)  # 0 is warm-up


@functools.cache
def trace(kind: str) -> xr.Dataset:
    """The B/E spans of a trace as events; only the E of a pair tells microbatch and chunk."""
    rows, opened = [], {}
    for e in json.loads((DATA / f"pp4_vpp4_{kind}_20iters.json").read_text()):
        lane = e["pid"], e["tid"], e["name"]
        if e["ph"] == "B":
            opened[lane] = e["ts"]
        elif e["ph"] == "E":
            a, begin = e["args"], opened.pop(lane)
            stage = a["model_chunk"] * 4 + a["pp_rank"]
            where = (a["iteration"], a["pp_rank"], stage, a["model_chunk"], a["microbatch"])
            rows.append((*where, e["name"] == "forward", begin * 1000, (e["ts"] - begin) * 1000))
    data = empty(EVENTS, {"event": len(rows)})
    for name, values in zip(("step", "rank", "stage", "chunk", "microbatch"), zip(*rows, strict=True)):  # noqa: B905
        data[name][:] = values
    forward = np.array([r[5] for r in rows])
    data["start_ns"][:], data["duration_ns"][:] = [r[6] for r in rows], [r[7] for r in rows]
    data["incarnation"][:] = data["depth"][:] = data["thread"][:] = 0
    data["category"][:] = str(Category.COMPUTE)
    data["op"][:] = np.where(forward, str(Op.FORWARD_STEP), str(Op.BACKWARD_STEP))
    data["phase"][:] = np.where(forward, str(Phase.FORWARD), str(Phase.BACKWARD))
    layout = json.dumps(Layout(pp=4, num_chunks=4).to_dict())
    return xr.Dataset({n: (("event",), v) for n, v in data.items()}, attrs={"layout": layout})


def interleaved():
    return schedule("interleaved", num_stages=16, num_chunks=4, num_microbatches=8)


def test_the_recorded_order_is_ours():
    for step in (1, 7, 19):
        assert recorded_schedule(trace("interleaved"), step=step) == interleaved()
    assert recorded_schedule(trace("dpp"), step=1) != interleaved()


def test_one_link_replays_every_iteration():
    """Measured: one latency of 3.62 ms; error of the span of 677 ms: median 0.02 %, mean 0.05 %, largest 0.30 %."""
    link = fit_link(trace("interleaved"), schedule=interleaved(), steps=ITERATIONS)
    error = link.steps.error_fraction.abs()
    assert len(error) == 19 and link.steps.measured_s.median() == pytest.approx(0.677, abs=0.001)
    assert 0.003 < link.p2p_s + link.wire_s < 0.0045
    assert link.median_error < 0.02 and error.mean() < 0.02 and error.max() < 0.02, error.describe()
    assert link.steps.start_error_s.mean() < 0.01 * link.steps.measured_s.mean()
    print(f"latency {link.p2p_s * 1e3:.2f} ms, wire {link.wire_s * 1e3:.2f} ms, send {link.send}")
    print(f"median {error.median():.4%} mean {error.mean():.4%} largest {error.max():.4%}")
    print(f"starts off by {link.steps.start_error_s.mean() * 1e3:.2f} ms on average")


def test_the_link_holds_for_iterations_it_was_not_fitted_on():
    """Fitted on every other iteration, tried on the rest; without any link the replay is 15 % short."""
    fitted = fit_link(trace("interleaved"), schedule=interleaved(), steps=list(range(1, 20, 2)))
    rest = {"schedule": interleaved(), "steps": list(range(2, 20, 2))}
    found = replay_steps(trace("interleaved"), p2p_s=fitted.p2p_s, wire_s=fitted.wire_s, **rest)
    print("held out:", found.error_fraction.abs().describe().to_dict())
    assert found.error_fraction.abs().median() < 0.02
    without = replay_steps(trace("interleaved"), **rest).error_fraction
    print("no link:", without.median())
    assert without.median() < -0.05


def test_costs_of_the_interleaved_run():
    costs = fit_costs(trace("interleaved"), steps=ITERATIONS)
    per_chunk = costs.forward_s / 4
    assert per_chunk[15] / np.median(per_chunk[:15]) > 4, "the last chunk of rank 3 holds the loss"
    assert costs.steps == tuple(range(1, 20)) and set(costs.table.samples) == {19 * 8}
    assert any("p2p_s is 0" in n for n in costs.notes)


def test_the_dpp_run_is_not_predictable_from_the_interleaved_one():
    """The operations themselves changed: rank 0's forwards take twice as long beside the copies of DPP."""
    found = predictable(trace("interleaved"), trace("dpp"), steps=ITERATIONS)
    print(found.why, "busy", found.busy_ratio)
    assert not found and not found.ok
    changed = found.changed.set_index(["rank", "kind"])
    assert changed.loc[(0, "F"), "before_s"] == pytest.approx(3.55e-3, abs=2e-5)
    assert changed.loc[(0, "F"), "after_s"] == pytest.approx(7.26e-3, abs=2e-5)
    assert changed.loc[(3, "B"), "ratio"] == pytest.approx(10.16 / 7.18, abs=0.01)
    assert (0, "B") not in changed.index and (1, "B") not in changed.index
    assert "rank 0 F: 3.55 ms -> 7.26 ms" in found.why


def test_the_interleaved_run_is_predictable_from_itself():
    even, odd = list(range(2, 20, 2)), list(range(1, 20, 2))
    events = trace("interleaved")
    one, two = (events.isel(event=np.flatnonzero(np.isin(events["step"], s))) for s in ([0, *even], [0, *odd]))
    found = predictable(one, two)
    assert found.ok and bool(found), found.why
    assert found.busy_ratio == pytest.approx(1.0, abs=0.02)
    assert changed_costs(one, two).empty


def test_a_wrong_schedule_is_named():
    wrong = schedule("interleaved", num_stages=16, num_chunks=4, num_microbatches=16)
    with pytest.raises(CostError, match=r"step 1: its 256 actions are not the 512 of Schedule\('interleaved'"):
        fit_link(trace("interleaved"), schedule=wrong)
