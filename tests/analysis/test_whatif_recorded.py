"""What-if on recorded runs, against the truth of generated ones: what they take without the fault."""

from __future__ import annotations

import numpy as np
import pytest
import xarray as xr

import mappnb
from mappnb import Layout, analysis
from mappnb.analysis import _whatif_results, _whatif_source
from mappnb.errors import MappnbError
from mappnb.testing import (
    Clocks,
    HostGaps,
    IntermittentRank,
    KilledRank,
    MissingRank,
    Noise,
    SlowHost,
    SlowLayer,
    SlowLink,
    SlowRank,
    SlowStage,
    generate_run,
)

FAMILIES = {
    "1f1b": Layout(tp=2, dp=4, pp=4),
    "interleaved": Layout(tp=2, dp=4, pp=4, num_chunks=2),
    "zb_h1": Layout(tp=2, dp=4, pp=4),
}
FAULTS = {
    "rank": (SlowRank(rank=9, factor=1.5), {"rank": 9}),
    "stage": (SlowStage(stage=2, factor=1.4), {"stage": 2}),
    "host": (SlowHost(host=1, factor=1.5), {"host": "host1"}),
    "link": (SlowLink(source=1, destination=9, extra_s=0.03), "1->9"),
    "gc": (HostGaps(rank=3, length_s=0.05, per_step=2, gap="gc"), {"op": "gc"}),
    "run queue": (HostGaps(rank=3, length_s=0.05, per_step=2, gap="run_queue"), {"rank": 3}),
    "data": (HostGaps(rank=0, length_s=0.05, per_step=2, gap="dataloader"), {"op": "data", "rank": 0}),
}


def costs(send: str) -> mappnb.Costs:
    return mappnb.Costs(
        forward_s=0.020, backward_input_s=0.020, backward_weight_s=0.020, p2p_s=2e-5, message_bytes=32 * 2**20, bandwidth=25e9,
        optimizer_s=0.004, send=send,
    )  # fmt: skip


def made(path, fault, **options):
    given = {"num_microbatches": 8, "num_steps": 3, "noise": Noise.none(), "seed": 3} | options
    truth = generate_run(path, faults=[fault] if fault else [], **given)
    return mappnb.attach(path), truth


QUICK = {("1f1b", "blocking"), ("interleaved", "sync"), ("zb_h1", "async")}
PAIRS = [
    pytest.param(f, s, marks=() if (f, s) in QUICK else pytest.mark.slow)
    for f in FAMILIES
    for s in ("async", "sync", "blocking")
]


@pytest.mark.parametrize(("family", "send"), PAIRS)
def test_gains_are_what_the_run_without_the_fault_saves(tmp_path, family, send):
    for name, (fault, fix) in FAULTS.items():
        run, truth = made(
            tmp_path / name, fault, layout=FAMILIES[family], schedule=family, costs=costs(send), num_steps=1
        )
        found = analysis.what_if(run, fix=fix, by=())
        np.testing.assert_allclose(found.step_s, truth.step_s, rtol=1e-6)
        expected = truth.faults[0].effect_s.mean()
        assert expected > 0.01 * truth.step_s.mean(), name  # the fault matters
        assert float(found.gain_s) == pytest.approx(expected, rel=0.01), name
        np.testing.assert_allclose(found.fixed_s, truth.clean_step_s, rtol=0.002, err_msg=name)
        assert float(found.replay_error) < 1e-6 and bool(found.reliable_gain)


@pytest.mark.parametrize(
    ("detail", "ideal"),
    [
        ("actions", "median"),
        pytest.param("actions", "mean", marks=pytest.mark.slow),
        pytest.param("actions", "peers", marks=pytest.mark.slow),
        pytest.param("layers", "median", marks=pytest.mark.slow),
        ("layers", "peers"),
    ],
)
def test_with_noise(tmp_path, detail, ideal):
    for fault, fix in (
        (SlowRank(rank=9, factor=1.2), {"rank": 9}),
        (IntermittentRank(rank=20, factor=1.5, probability=0.6), {"rank": 20}),
        (SlowLayer(rank=9, layer=2, factor=2.0), {"rank": 9}),
    ):
        run, truth = made(
            tmp_path / f"{fault.kind}",
            fault,
            layout=FAMILIES["1f1b"],
            noise=Noise(),
            num_steps=2,
            detail=detail,
            seed=11,
        )
        found = analysis.what_if(run, fix=fix, by=(), ideal=ideal)
        spread = np.abs(truth.clean_step_s - truth.clean_step_s.mean()).max()
        assert abs(float(found.gain_s) - truth.faults[0].effect_s.mean()) < max(0.01 * truth.step_s.mean(), spread)


def test_a_clean_run_has_nothing_to_gain(tmp_path):
    run, truth = made(tmp_path / "run", None, layout=FAMILIES["1f1b"])
    found = analysis.what_if(run, fix={"rank": 9})
    assert float(found.slowdown) == pytest.approx(1, abs=1e-6) and float(found.wasted_gpu_hours) == pytest.approx(
        0, abs=1e-6
    )
    assert float(found.gain_s) == pytest.approx(0, abs=1e-6)
    for dim in ("dp_rank", "stage", "rank", "op"):
        np.testing.assert_allclose(found[f"slowdown_by_{dim}"], 1, atol=1e-6)
    assert float(found.step_s[0]) == pytest.approx(truth.step_s[0], rel=1e-6)


def test_attributions_name_the_slow_rank(tmp_path):
    run, truth = made(tmp_path / "run", SlowRank(rank=9, factor=1.5), layout=FAMILIES["1f1b"])
    found = analysis.what_if(run)
    expected = truth.step_s.mean() / truth.clean_step_s.mean()
    assert float(found.slowdown) == pytest.approx(expected, rel=0.002)
    by = {d: found[f"slowdown_by_{d}"].to_series() for d in ("rank", "dp_rank", "stage")}
    assert by["rank"].idxmax() == 9 and by["stage"].idxmax() == 1 and by["dp_rank"].idxmax() == 0
    assert by["rank"][9] == pytest.approx(expected, rel=0.002) and by["rank"].drop(9).max() < 1.001
    assert found.attrs["worst_workers"] == "dp 0 stage 1" and float(found.worst_worker_share) == pytest.approx(
        1, abs=0.01
    )
    assert abs(float(found.last_stage_share)) < 0.01
    assert found.slowdown_by_op.to_series().idxmax() == "backward"
    assert found.sizes == {"step": 3, "dp_rank": 4, "stage": 4, "rank": 32, "op": found.sizes["op"]}
    np.testing.assert_allclose(found.step_slowdown_by_rank.mean("step"), found.slowdown_by_rank, rtol=1e-3)


def test_launch_delays_are_kept_apart(tmp_path):
    fault = HostGaps(rank=3, length_s=0.05, per_step=2, gap="run_queue")
    run, truth = made(tmp_path / "run", fault, layout=FAMILIES["1f1b"], num_steps=2)
    found = analysis.what_if(run, by=())
    assert float(found.slowdown) == pytest.approx(1, abs=1e-3)  # no operation is slow
    np.testing.assert_allclose(found.launch_delay_s, truth.faults[0].effect_s, rtol=0.02)
    assert float(found.launch_slowdown) == pytest.approx(truth.step_s.mean() / truth.clean_step_s.mean(), rel=0.002)


def test_fixes_cross_and_add_up(tmp_path):
    run, _ = made(tmp_path / "run", SlowRank(rank=9, factor=1.5), layout=FAMILIES["1f1b"])
    both = [{"rank": 9, "op": "forward"}, {"rank": 9, "op": "backward"}]
    priced = analysis.price_fixes(
        run, fixes=[both[0], both[1], both, "rank 9", {"step": 1}, {"rank": [9, 10], "step": [1]}]
    )
    gain = priced.gain_s.values
    assert 0 < gain[0] < gain[1] < gain[2] == pytest.approx(gain[3])
    assert gain[4] == pytest.approx(gain[3] / 3, rel=1e-3) and gain[5] == pytest.approx(gain[4], rel=1e-3)
    assert analysis.what_if(run, by=(), fix=both).gain_s == pytest.approx(gain[2])
    assert priced["fix"].values[3] == "rank 9" and priced.reliable_gain.all()
    np.testing.assert_allclose(priced.gain_gpu_hours, gain * 3 * 32 / 3600)


def test_attributed_by_three_methods(tmp_path):
    layout, slow = Layout(dp=2, pp=6), [SlowStage(stage=2, factor=1.4), SlowStage(stage=3, factor=1.4)]
    generate_run(tmp_path / "run", layout=layout, num_steps=2, noise=Noise.none(), faults=slow)
    run = mappnb.attach(tmp_path / "run")
    found = {m: analysis.attribute(run, by="stage", method=m) for m in ("add_one_in", "leave_one_out", "shapley")}
    shapley = found["shapley"]
    assert float(shapley.residual_s) == pytest.approx(0, abs=1e-12)
    assert float(shapley.attributed_s.sum()) == pytest.approx(float(shapley.excess_s))
    a, b = shapley.attributed_share.sel(stage=[2, 3]).values
    assert a == pytest.approx(b, abs=0.15) and a + b == pytest.approx(1, abs=0.1)
    # two that hide behind one another: alone each makes most of it, without either most of it stays
    assert (found["add_one_in"].attributed_share.sel(stage=[2, 3]) > shapley.attributed_share.sel(stage=[2, 3])).all()
    assert (
        found["leave_one_out"].attributed_share.sel(stage=[2, 3]) < shapley.attributed_share.sel(stage=[2, 3])
    ).all()
    subset = found["add_one_in"]
    np.testing.assert_allclose(subset.attributed_step_s.mean("step"), subset.attributed_s)
    with pytest.raises(MappnbError, match=r"12 groups by rank need 2\*\*12 replays.*at most 8.*by='stage'"):
        analysis.attribute(run, by="rank", method="shapley")
    with pytest.raises(MappnbError, match="did you mean 'shapley'"):
        analysis.attribute(run, method="shaply")
    hosts = analysis.attribute(run, by="host", method="leave_one_out")
    assert hosts["host"].values.tolist() == ["host0", "host1"]


def test_shapley_of_two_groups_by_hand(tmp_path):
    run, _ = made(tmp_path / "run", SlowRank(rank=1, factor=1.5), layout=Layout(dp=2), num_steps=2)
    found = analysis.attribute(run, by="rank", method="shapley")
    alone = analysis.attribute(run, by="rank", method="add_one_in").attributed_s.values
    last = analysis.attribute(run, by="rank", method="leave_one_out").attributed_s.values
    np.testing.assert_allclose(found.attributed_s, (alone + last) / 2, atol=1e-12)  # two orders


def test_large_runs_choose_steps_and_say_so(tmp_path, monkeypatch):
    run, _ = made(tmp_path / "run", SlowRank(rank=1, factor=1.5), layout=Layout(dp=4), num_steps=10)
    whole = analysis.what_if(run, by=())
    assert "steps_chosen" not in whole.attrs and whole.sizes["step"] == 10
    monkeypatch.setattr(_whatif_source, "MOST_EVENTS", run.events.sizes["event"] // 3)
    some = analysis.what_if(run, by=())
    assert some.sizes["step"] == 3 and "3 of 10, evenly spaced" in some.attrs["steps_chosen"]
    np.testing.assert_allclose(some.replay_s, whole.replay_s.sel(step=some["step"]), rtol=1e-9)
    chosen = analysis.what_if(run, by=(), step=[2, 7])
    assert chosen["step"].values.tolist() == [2, 7]
    as_dataset = analysis.what_if(run.sel(), by=())
    np.testing.assert_array_equal(as_dataset["step"], some["step"])
    assert analysis.what_if(run, by=(), step=slice(2, 4))["step"].values.tolist() == [2, 3, 4]


def test_many_ranks_get_the_score_of_their_worker_and_it_is_said(tmp_path, monkeypatch):
    run, _ = made(tmp_path / "run", SlowRank(rank=9, factor=1.5), layout=FAMILIES["1f1b"], num_steps=1)
    monkeypatch.setattr(_whatif_results, "RANK_REPLAY_OPS", 1)
    found = analysis.what_if(run)
    assert "32 ranks are too many" in found.attrs["slowdown_by_rank"] and "reliable_by_rank" not in found
    worker = found.slowdown_by_worker.sel(dp_rank=0, stage=1)  # ranks 8 and 9 fold into one
    assert found.slowdown_by_rank.sel(rank=[8, 9]).values.tolist() == [float(worker)] * 2
    assert "slowdown_by_rank" not in analysis.what_if(run, by=("dp_rank", "stage"))


def test_a_step_that_was_run_again_counts_once(tmp_path):
    run, _ = made(tmp_path / "run", SlowRank(rank=1, factor=1.5), layout=Layout(dp=4), num_steps=3)
    events = run.sel()
    again = events.isel(event=np.flatnonzero(events["step"].values == 2))
    shift = 10**10
    later = again.assign(
        incarnation=again.incarnation + 1, start_ns=again.start_ns + shift, raw_start_ns=again.raw_start_ns + shift
    )
    both = xr.concat([events, later], "event", combine_attrs="override")
    found, want = analysis.what_if(both), analysis.what_if(events)
    np.testing.assert_allclose(found.replay_s, want.replay_s, rtol=1e-12)
    assert found.attrs["steps_left_out"] == "step 2: its earlier tries"


def test_clocks_that_disagree_show_as_error(tmp_path):
    fault = SlowRank(rank=9, factor=1.3)
    run, truth = made(
        tmp_path / "run", fault, layout=FAMILIES["1f1b"], clocks=Clocks(offset_s=5e-3), noise=Noise(), seed=5
    )
    before = float(analysis.what_if(run, by=()).replay_error)
    run.align()
    found = analysis.what_if(run, by=(), fix={"rank": 9})
    assert before > 0.003 > 100 * float(found.replay_error)
    assert float(found.gain_s) == pytest.approx(truth.faults[0].effect_s.mean(), rel=0.05)


def test_without_identities_it_says_that_ranks_are_alone(tmp_path):
    run, _ = made(tmp_path / "run", SlowRank(rank=1, factor=1.5), layout=Layout(dp=4), num_steps=2)
    events = run.sel()
    found = analysis.what_if(events.isel(event=np.flatnonzero(~events.category.isin(["collective", "p2p"]).values)))
    assert "no rank waits for another" in found.attrs["unconnected"]
    assert "unconnected" not in analysis.what_if(run, by=()).attrs


def test_steps_that_did_not_end_and_missing_ranks(tmp_path):
    run, _ = made(tmp_path / "killed", KilledRank(rank=1, first_step=2), layout=Layout(dp=4), num_steps=3)
    found = analysis.what_if(run)
    assert found["step"].values.tolist() == [0, 1] and "step 2: did not end" in found.attrs["steps_left_out"]
    run, truth = made(tmp_path / "missing", MissingRank(rank=5), layout=FAMILIES["1f1b"])
    found = analysis.what_if(run)
    assert float(found.step_s.mean()) == pytest.approx(truth.step_s.mean(), rel=1e-3)
    assert float(found.replay_error) < 0.01


def test_simulated_and_accessor(tmp_path):
    sched = mappnb.schedule("1f1b", num_stages=4, num_microbatches=8)
    stages = np.array([0.01, 0.01, 0.01, 0.014])
    ds = mappnb.simulate(
        sched, mappnb.Costs(forward_s=stages, backward_input_s=stages, backward_weight_s=stages, p2p_s=1e-4)
    )
    even = mappnb.simulate(
        sched, mappnb.Costs(forward_s=0.01, backward_input_s=0.01, backward_weight_s=0.01, p2p_s=1e-4)
    )
    found = ds.mapp.what_if(fix={"stage": 3})
    assert isinstance(found, xr.Dataset)
    assert float(found.fixed_s[0]) == pytest.approx(float(even.makespan_s), rel=1e-6)
    assert float(found.last_stage_share) == pytest.approx(1, abs=1e-6)
    assert float(ds.mapp.attribute(by="stage", method="shapley").attributed_share[3]) == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize(
    ("fix", "words"),
    [
        ({"rank": 99}, "no rank 99; it has 0, 1, 2, 3"),
        ({"ranks": 1}, "known are rank, stage.*did you mean 'rank'"),
        ({"op": "bakward"}, "did you mean 'backward'"),
        ("forwards", "did you mean 'forward'"),
        ({"rank": "1"}, "expected a whole number"),
        ({"link": (0, 1)}, "no link 0->1"),
        ({"link": [0, 1]}, "expected \\(sender, receiver\\)"),
        ({"step": 12}, "no step 12; it has 0, 1"),
        ({"rank": 1, "stage": 1}, "no stage 1"),
        ({"host": "host7"}, "no host host7; it has host0"),
        ({}, "write fix="),
        (7, "write fix="),
    ],
)
def test_fixes_that_cannot_be_read(tmp_path_factory, fix, words):
    path = tmp_path_factory.getbasetemp() / "fixes"
    run = mappnb.attach(path) if path.exists() else made(path, None, layout=Layout(dp=4), num_steps=2)[0]
    with pytest.raises(MappnbError, match=words):
        analysis.what_if(run, fix=fix)
    with pytest.raises(MappnbError, match="did you mean 'median'"):
        analysis.what_if(run, ideal="medain")
    with pytest.raises(MappnbError, match="did you mean 'dp_rank'"):
        analysis.what_if(run, by=["dp_rnk"])
    with pytest.raises(MappnbError, match="no step 5; the run has steps 0 to 1"):
        analysis.what_if(run, step=[5])
