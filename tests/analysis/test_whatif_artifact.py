"""What-if on StragglerAnalysis traces: the reference figures of the artifact, and its recipe read plainly."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from analysis.whatif_traces import Plain, make_trace, write_trace

import mappnb
from mappnb import analysis
from mappnb.analysis._whatif_rules import dependencies, meetings
from mappnb.analysis._whatif_trace import OPTYPES, read_trace
from mappnb.errors import MappnbError

DATA = Path(__file__).parents[3] / "shared" / "data" / "straggler_analysis"
EXACT = 1e-9
"""The run holds times in whole ns, the artifact's files float32 s: below 8 ms they differ by up to 0.5 ns."""
FLOAT32 = 1.3e-7
"""One step of float32: a recorded length is the difference of two of them."""


@pytest.fixture(scope="module", params=["AR", "SE"])
def reference(request, tmp_path_factory):
    if not DATA.is_dir():
        pytest.skip("the StragglerAnalysis traces are not beside the repository")
    run_dir = tmp_path_factory.mktemp("whatif") / request.param
    mappnb.import_trace(DATA / f"trace-{request.param}.parquet", run_dir)
    files = {kind: json.loads((DATA / f"{kind}-{request.param}.json").read_text()) for kind in ("result", "mw", "ms")}
    run = mappnb.attach(run_dir)
    return analysis.what_if(run, ideal="mean"), files, run


def series(found, values):
    assert {str(s) for s in found["step"].values.tolist()} == set(values)
    return [values[str(s)] for s in found["step"].values.tolist()]


def test_series_and_slowdown_are_the_artifacts(reference):
    found, files, _ = reference
    expected = files["result"]
    for name, key, tolerance in (
        ("step_s", "step_t_base", FLOAT32),
        ("replay_s", "step_t_nodelay", EXACT),
        ("ideal_s", "step_t_noblk", EXACT),
        ("step_slowdown", "blocking_step_slowdown", EXACT),
        ("launch_step_slowdown", "launch_step_slowdown", FLOAT32),
    ):
        np.testing.assert_allclose(found[name], series(found, expected[key]), rtol=tolerance, err_msg=name)
    assert float(found.slowdown) == pytest.approx(expected["blocking_slowdown"], rel=EXACT)
    assert float(found.launch_slowdown) == pytest.approx(expected["launch_slowdown"], rel=FLOAT32)
    assert float(found.wasted_fraction) == pytest.approx(1 - 1 / expected["blocking_slowdown"], rel=1e-8)


@pytest.mark.parametrize(("dim", "key"), [("dp_rank", "dp_rank"), ("stage", "stage"), ("op", "optype")])
def test_attributions_are_the_artifacts(reference, dim, key):
    found, files, _ = reference
    whole = files["result"][f"blocking_decompose_by_{key}"]
    groups = [str(g) for g in found[dim].values.tolist()]
    assert set(groups) == set(whole)
    np.testing.assert_allclose(found[f"slowdown_by_{dim}"], [whole[g] for g in groups], rtol=EXACT)
    steps = series(found, files["result"][f"blocking_decompose_by_{key}_per_step"])
    np.testing.assert_allclose(
        found[f"step_slowdown_by_{dim}"].transpose("step", dim), [[s[g] for g in groups] for s in steps], rtol=EXACT
    )


def test_worker_and_stage_shares_are_the_artifacts(reference):
    found, files, _ = reference
    for name, file, key in (("worst_worker", "mw", "Mw"), ("last_stage", "ms", "Ms")):
        expected = files[file]
        assert float(found[f"{name}_share"]) == pytest.approx(expected[key], rel=1e-8)
        assert float(found[f"{name}_added_share"]) == pytest.approx(expected["add"], rel=1e-8)
        assert float(found[f"without_{name}_s"].mean()) == pytest.approx(expected["trem"], rel=EXACT)
        assert float(found[f"only_{name}_s"].mean()) == pytest.approx(expected["tadd"], rel=EXACT)
    assert found.attrs["num_gpus"] == files["result"]["job_meta"]["world_size"]
    hours = (found.replay_s - found.ideal_s).sum() * found.attrs["num_gpus"] / 3600
    assert float(found.wasted_gpu_hours) == pytest.approx(float(hours))


def test_the_error_is_beside_it_and_rules_out_what_is_smaller(reference):
    found, _, _ = reference
    assert 0.004 < float(found.replay_error) < 0.008  # what leaving out the launch delays makes: 0.67 and 0.51 %
    assert bool(found.reliable)
    small = np.abs(found.slowdown_by_op - 1) * found.ideal_s.mean() < found.replay_error * found.step_s.mean()
    np.testing.assert_array_equal(~small, found.reliable_by_op)
    assert small.any() and not small.all()


@pytest.mark.parametrize("ideal", ["median", "min", "peers"])
def test_fixing_the_slow_worker_of_ar_is_the_whole_gain(reference, request, ideal):
    found, _, run = reference
    if request.node.callspec.params["reference"] != "AR":
        pytest.skip("SE has no slow worker")
    fixed = analysis.what_if(run, ideal=ideal, by=(), fix="rank 0")
    assert float(fixed.gain_s) == pytest.approx(float((found.replay_s - found.ideal_s).mean()), rel=0.03)
    assert float(fixed.gain_fraction) == pytest.approx(float(fixed.gain_s / found.step_s.mean()))
    assert bool(fixed.reliable_gain)
    same = analysis.what_if(run, ideal=ideal, by=(), fix={"dp_rank": 0, "stage": 0}, over_stages=False)
    assert float(same.gain_s) == float(fixed.gain_s)
    other = analysis.what_if(run, ideal=ideal, by=(), fix={"rank": [3, 7]})
    assert abs(float(other.gain_s)) < 0.2 and not bool(other.reliable_gain)


def test_fix_of_the_last_stage_is_the_recipes_removal(reference):
    found, files, run = reference
    last = int(found["stage"].values[-1])
    fixed = analysis.what_if(run, ideal="mean", by=(), fix={"stage": last})
    assert float(fixed.fixed_s.mean()) == pytest.approx(files["ms"]["trem"], rel=EXACT)


def test_steps_are_chosen_after_the_model_was_made(reference):
    found, _, run = reference
    steps = found["step"].values[[3, 7, 8]].tolist()
    some = analysis.what_if(run, ideal="mean", by=(), step=steps)
    np.testing.assert_array_equal(some["step"], steps)
    np.testing.assert_allclose(some.replay_s, found.replay_s.sel(step=steps), rtol=1e-12)
    assert np.ptp(some.ideal_s.values) < 1e-12 and float(some.ideal_s[0]) != float(found.ideal_s[0])


# --------------------------------------------------------------------------------------------- the recipe, read plainly
CASES = {
    "plain": {"pp": 3, "dp": 2},
    "one stage": {"pp": 1, "dp": 2},
    "no data parallelism": {"pp": 3, "dp": 1},
    "interleaved": {"pp": 2, "dp": 2, "vpp": 2},
    "three chunks, ends talk": {"pp": 2, "dp": 2, "vpp": 3, "ends": True},
    "separate": {"pp": 2, "dp": 2, "separate": True},
    "separate, interleaved": {"pp": 2, "dp": 2, "vpp": 2, "separate": True},
    "strays": {"pp": 3, "dp": 2, "strays": True},
    "strays, interleaved, ends talk": {"pp": 2, "dp": 2, "vpp": 2, "strays": True, "ends": True},
    "interleaved, no data parallelism": {"pp": 2, "dp": 1, "vpp": 2},
}


@pytest.fixture(scope="module", params=CASES)
def both(request, tmp_path_factory):
    case = CASES[request.param]
    table, meta = make_trace(seed=len(request.param), **case)
    if (
        request.param == "interleaved"
    ):  # the first receive of an end stage is missing where its chunk comes from outside
        first = (table["optype"] == "backward-recv") & (table["seq_id"] == 0) & (table["stage"] == 0)
        table = table[~first].copy()
        table["seq_id"] = table.groupby(["rank", "step", "optype"]).cumcount()
    run = write_trace(tmp_path_factory.mktemp("trace"), table, meta)
    return run, Plain(table, case["pp"], case["dp"], case.get("vpp", 1))


def test_dependencies_and_meetings(both):
    run, plain = both
    trace = read_trace(run.sel())
    ids = [(OPTYPES[t], int(n), int(s)) for t, n, s in zip(trace.type, trace.seq, trace.stage, strict=True)]
    assert sorted(ids) == plain.ops
    source, target = dependencies(trace, parallel=plain.dp > 1)
    found = {(ids[b], ids[a]) for a, b in zip(source.tolist(), target.tolist(), strict=True)}
    assert found == {(op, need) for op, needs in plain.needs.items() for need in needs}
    group, joined = meetings(trace, parallel=plain.dp > 1)
    sets = {frozenset(ids[i] for i in np.flatnonzero(group == g)) for g in range(int(group.max()) + 1)}
    assert sets == {frozenset(ops) for ops, _ in plain.groups}
    assert {ids[i] for i in np.flatnonzero(joined)} == {op for ops, wide in plain.groups if wide for op in ops}


def test_noops_are_there_where_they_should_be(both, request):
    _, plain = both
    name = request.node.callspec.params["both"]
    if "interleaved" not in name or "ends" in name:  # else the first chunk's missing receives shift the others
        assert bool(plain.noop) == ("strays" in name or "ends" in name)


def test_replays_equal_the_plain_reading(both):
    run, plain = both
    found = analysis.what_if(run, ideal="mean")
    measured, ideal = plain.measured(), plain.ideal()
    flat = {key: ideal[key[0][0]] for key in measured}
    np.testing.assert_allclose(found.replay_s, plain.simulate(measured), rtol=1e-7)
    np.testing.assert_allclose(found.ideal_s, plain.simulate(flat), rtol=1e-7)
    base = found.ideal_s.values.mean()
    for d in range(plain.dp):
        back = {k: measured[k] if k[2] == d else v for k, v in flat.items()}
        assert float(found.slowdown_by_dp_rank[d]) == pytest.approx(plain.simulate(back).mean() / base, rel=1e-7)
    for s in range(plain.pp):
        back = {k: measured[k] if k[0][2] == s else v for k, v in flat.items()}
        assert float(found.slowdown_by_stage[s]) == pytest.approx(plain.simulate(back).mean() / base, rel=1e-7)
    back = {k: measured[k] if k[0][0] in ("forward-send", "forward-recv") else v for k, v in flat.items()}
    if plain.pp > 1:
        there = float(found.slowdown_by_op.sel(op="forward-pp-comm"))
        assert there == pytest.approx(plain.simulate(back).mean() / base, rel=1e-7)


def test_a_step_whose_operations_differ_is_left_out_and_said(tmp_path):
    table, meta = make_trace(pp=2, dp=2, steps=(3, 5, 6))
    gone = (
        (table["step"] == 5) & (table["optype"] == "backward-compute") & (table["rank"] == 1) & (table["seq_id"] == 1)
    )
    run = write_trace(tmp_path, table[~gone], meta)
    found = analysis.what_if(run, ideal="mean")
    assert found["step"].values.tolist() == [3, 6] and "step 5" in found.attrs["steps_left_out"]
    none = write_trace(tmp_path / "none", table[~((table["optype"] == "optimizer") & (table["dp_rank"] == 1))], meta)
    with pytest.raises(MappnbError, match="none of 3 steps has the same operations on all 2"):
        analysis.what_if(none)


def test_a_dataset_says_that_folded_sizes_are_not_known(tmp_path):
    table, meta = make_trace(pp=2, dp=2)
    run = write_trace(tmp_path, table, meta)
    assert analysis.what_if(run).attrs["gpus"] == "8 GPUs"
    found = analysis.what_if(run.sel())
    assert found.attrs["num_gpus"] == 4 and "not known" in found.attrs["gpus"]
    assert float(found.slowdown) == pytest.approx(float(analysis.what_if(run).slowdown), rel=1e-12)
