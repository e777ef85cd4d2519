"""Noise out of samples: what is generated varies as the samples do, and samples of a run are what it was generated with."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import mappnb
from mappnb import Costs, Layout
from mappnb.capture.importers import import_trace
from mappnb.errors import CostError
from mappnb.terms import Op
from mappnb.testing import DataSkew, Noise, SlowLayer, SlowRank, Traffic, generate_run, noise_of

DATA = Path(__file__).parents[3] / "shared" / "data"
NEEDS_DATA = "the real traces of ../shared/data are not there"
COSTS = Costs(
    forward_s=0.010, backward_input_s=0.010, backward_weight_s=0.010, p2p_s=5e-5, message_bytes=2**20, bandwidth=10e9,
    optimizer_s=0.002,
)  # fmt: skip
NONE = Noise.none()


@pytest.fixture(autouse=True)
def _no_sync(monkeypatch):
    """What is tested here is what is written, not that it outlives the machine."""
    monkeypatch.setattr("mappnb.segment_writer.os.fsync", lambda file: None)


def generate(path, **options):
    """A run and its truth."""
    options = {"layout": Layout(dp=8, pp=2), "num_microbatches": 8, "num_steps": 6, "costs": COSTS, **options}
    truth = generate_run(path, **options)
    return mappnb.attach(path), truth


def table(run):
    """Forwards and backwards with their durations in s."""
    events = run.sel().to_dataframe()
    events["seconds"] = events.duration_ns / 1e9
    return events


QUANTILES = [0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99]


def skewed(size=4000):
    """Samples of a shape that no log-normal has: two humps and a tail."""
    rng = np.random.default_rng(5)
    return np.concatenate(
        [rng.normal(0.95, 0.01, size), rng.normal(1.05, 0.005, size // 2), 1 + rng.pareto(3, size // 20)]
    )


def test_compute_varies_as_the_samples_do(tmp_path):
    samples = skewed()
    run, _ = generate(tmp_path / "run", noise=dataclasses.replace(NONE, compute_ratios=tuple(samples)))
    events = table(run)
    ratio = events.seconds[events.op == Op.FORWARD_STEP] / 0.010
    assert len(ratio) == 16 * 6 * 8
    at = np.quantile(samples, QUANTILES)
    rank = [(ratio <= v).mean() for v in at]
    np.testing.assert_allclose(rank, QUANTILES, atol=4 * 0.5 / np.sqrt(len(ratio)))  # 4 binomial sigma
    assert ((ratio > 0.985) & (ratio < 1.02)).mean() < 0.03  # between the humps there is next to nothing
    near = np.sort(samples)[np.clip(np.searchsorted(np.sort(samples), ratio.to_numpy() - 2e-7), 0, len(samples) - 1)]
    np.testing.assert_allclose(ratio, near, atol=3e-7)  # values of the samples, to the ns


def test_transfers_and_exits_vary_as_the_samples_do(tmp_path):
    noise = dataclasses.replace(
        NONE, collective_ratios=(0.5, 1.0, 4.0), message_ratios=(2.0,), exit_samples_s=(0.0, 1e-4)
    )
    traffic = Traffic(latency_s=0.0, network_bandwidth=1e9, embedding_bytes=0)
    run, _ = generate(tmp_path / "run", noise=noise, traffic=traffic, data_s=0, num_steps=20, ranks_per_host=4)
    calls = mappnb.analysis.match(run)
    reduces = calls.isel(call=np.flatnonzero(calls.op.values == Op.REDUCE_SCATTER))
    there = reduces["rank"].values >= 0
    last = np.where(there, reduces.start_ns.values, 0).max(axis=1)
    took = np.where(there, reduces.end_ns.values, 2**62).min(axis=1) - last
    usual = 7 / 8 * 2**29 / 1e9 * 1e9
    found = np.unique(np.round(took / usual, 2), return_counts=True)
    assert found[0].tolist() == [0.5, 1.0, 4.0]
    assert (found[1] >= 4).all()
    late = (reduces.end_ns.values - np.where(there, reduces.end_ns.values, 2**62).min(axis=1)[:, None])[there]
    assert set(np.round(late / 1e5).astype(int)) == {0, 1}
    wire = table(run)
    assert (wire.seconds[wire.op == Op.RECV] > 0).any()


def test_samples_of_ranks_last(tmp_path):
    noise = dataclasses.replace(NONE, rank_ratios=(0.9, 1.0, 1.1))
    run, truth = generate(tmp_path / "run", noise=noise)
    assert set(truth.rank_factor) == {0.9, 1.0, 1.1}
    events = table(run)
    ratio = events[events.op == Op.FORWARD_STEP].groupby("rank").seconds.agg(["min", "max"]) / 0.010
    np.testing.assert_allclose(ratio["min"], truth.rank_factor, rtol=1e-6)
    np.testing.assert_allclose(ratio["max"], truth.rank_factor, rtol=1e-6)


def test_the_same_seed_writes_the_same_bytes_whatever_the_samples_come_in(tmp_path):
    def digest(name, samples, **options):
        noise = Noise(compute_ratios=samples, collective_ratios=samples, message_ratios=samples)
        generate(tmp_path / name, noise=noise, num_steps=2, **options)
        files = sorted(p for p in (tmp_path / name).rglob("*") if p.is_file())
        return {p.relative_to(tmp_path / name): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}

    samples = skewed(200)
    first = digest("a", tuple(samples))
    assert first == digest("b", samples.tolist())
    assert first != digest("c", tuple(samples), seed=1)


def test_samples_do_not_depend_on_the_faults(tmp_path):
    samples = dict.fromkeys(
        ("compute_ratios", "rank_ratios", "collective_ratios", "message_ratios"), tuple(skewed(100))
    )
    noise = Noise(**samples, exit_samples_s=(0.0, 1e-5, 3e-5))
    clean, _ = generate(tmp_path / "clean", noise=noise)
    run, truth = generate(tmp_path / "slow", noise=noise, faults=[SlowRank(rank=3, factor=1.5, first_step=2)])
    a, b = (table(r) for r in (clean, run))
    a, b = (x[x.op == Op.FORWARD_STEP].set_index(["rank", "step", "microbatch"]).seconds.sort_index() for x in (a, b))
    ratio = b / a
    hit = (ratio.index.get_level_values("rank") == 3) & (ratio.index.get_level_values("step") >= 2)
    np.testing.assert_allclose(ratio[hit], 1.5, rtol=1e-6)
    np.testing.assert_allclose(ratio[~hit], 1.0, rtol=1e-6)
    np.testing.assert_allclose(truth.step_s[:2], truth.clean_step_s[:2])


# ------------------------------------------------------------------------------------------------------ noise_of
def test_noise_of_a_generated_run_is_what_it_was_generated_with(tmp_path):
    given = Noise(
        compute_sigma=0.01,
        rank_sigma=0.02,
        drift_sigma=0.02,
        drift_memory=0.8,
        jitter_probability=0.0,
        network_sigma=0.1,
    )
    run, truth = generate(tmp_path / "run", noise=given, layout=Layout(dp=16, pp=2), num_steps=40)
    found = noise_of(run)
    assert np.log(found.compute_ratios).std() == pytest.approx(0.01, rel=0.1)
    assert np.median(found.compute_ratios) == pytest.approx(1.0, abs=0.002)
    assert len(found.rank_ratios) == 32
    lasting = truth.rank_factor / np.repeat([np.median(truth.rank_factor[:16]), np.median(truth.rank_factor[16:])], 16)
    np.testing.assert_allclose(np.sort(found.rank_ratios), np.sort(lasting), atol=0.02)  # drift remains in 40 steps
    assert found.drift_sigma == pytest.approx(0.02, rel=0.35)
    assert found.drift_memory == pytest.approx(0.8, abs=0.2)
    wire_s = 2**20 / 10e9  # the latency has no noise
    assert np.log(found.message_ratios).std() == pytest.approx(0.1 * wire_s / (wire_s + 5e-5), rel=0.1)
    assert np.mean(found.exit_samples_s) < 2e-5
    assert (found.jitter_probability, found.network_sigma, found.compute_sigma) == (0, 0, 0)


def test_noise_of_leaves_out_a_culprit_and_the_effect_of_lengths(tmp_path):
    noise = dataclasses.replace(NONE, compute_sigma=0.02)
    slow, _ = generate(tmp_path / "slow", noise=noise, faults=[SlowRank(rank=3, factor=1.5, first_step=3)])
    assert max(noise_of(slow).rank_ratios) > 1.1
    assert max(noise_of(slow, exclude_ranks=[3]).rank_ratios) < 1.02
    skew, _ = generate(tmp_path / "skew", noise=noise, faults=[DataSkew(packed=False)])
    assert np.std(noise_of(skew).compute_ratios) > 0.08
    assert np.std(noise_of(skew, by_length=True).compute_ratios) == pytest.approx(
        0.02 * np.sqrt(2), rel=0.25
    )  # noise of both phases


def test_noise_of_a_run_without_anything_says_what_it_needs(tmp_path):
    run, _ = generate(tmp_path / "run", num_steps=1)
    marks = run.sel()
    marks = marks.isel(event=np.flatnonzero(marks.category.values == "mark"))
    with pytest.raises(
        mappnb.MappnbError, match=r"no forwards, backwards or complete collectives of ranks other than \[\]"
    ):
        noise_of(marks)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"compute_ratios": (1.0, 0.0)}, r"compute_ratios has 0.0 at 1; expected a sequence of finite numbers above 0"),
        ({"exit_samples_s": (-1.0,)}, r"exit_samples_s has -1.0 at 0; .* of at least 0"),
        ({"rank_ratios": (1.0, float("nan"))}, r"rank_ratios has nan at 1"),
        ({"message_ratios": ((1.0,), (2.0,))}, r"2-dimensional array"),
    ],
)
def test_samples_that_cannot_be_are_refused(options, says):
    with pytest.raises(CostError, match=says):
        Noise(**options)


@pytest.mark.skipif(not (DATA / "straggler_analysis").is_dir(), reason=NEEDS_DATA)
def test_noise_of_a_real_trace_is_what_pandas_says(tmp_path):
    """AR without its culprit (dp 0, stage 0), whose compute takes twice as long."""
    source = DATA / "straggler_analysis" / "trace-AR.parquet"
    import_trace(source, tmp_path / "run", format="straggler_analysis")
    found = noise_of(mappnb.attach(tmp_path / "run"), exclude_ranks=[0])
    trace = pd.read_parquet(source)
    trace = trace[trace.optype.str.endswith("-compute") & ~((trace.dp_rank == 0) & (trace.stage == 0))]
    own = trace.duration / trace.groupby(["optype", "stage", "dp_rank"]).duration.transform("median")
    own = own / own.groupby([trace.stage, trace.dp_rank, trace.step]).transform("median")
    np.testing.assert_allclose(np.quantile(found.compute_ratios, QUANTILES), np.quantile(own, QUANTILES), rtol=1e-3)
    assert len(found.rank_ratios) == 15 and max(found.rank_ratios) < 1.01
    assert 0.95 < np.quantile(found.collective_ratios, 0.05) < np.quantile(found.collective_ratios, 0.95) < 1.1
    assert len(found.message_ratios) > 10_000


# ------------------------------------------------------------------------------------------------------ one layer
def test_slow_layer_is_that_layer_alone(tmp_path):
    fault = SlowLayer(rank=9, layer=5, factor=3.0, first_step=1)
    run, truth = generate(tmp_path / "run", noise=NONE, num_layers=8, num_steps=2, detail="layers", faults=[fault])
    assert (truth.faults[0].kind, truth.faults[0].subject_kind, truth.faults[0].subjects) == (
        "slow_layer",
        "rank",
        ["9"],
    )
    layers = table(run)
    layers = layers[layers.op == Op.LAYER]
    usual = layers.groupby(["layer", "phase"]).seconds.transform("min")
    ratio = layers.seconds / usual
    hit = (layers["rank"] == 9) & (layers.layer == 5) & (layers.step == 1)
    assert hit.sum() == 2 * 8
    np.testing.assert_allclose(ratio[hit], 3.0, rtol=1e-3)
    np.testing.assert_allclose(ratio[~hit], 1.0, rtol=1e-3)
    assert truth.faults[0].effect_s[0] == 0 and truth.faults[0].effect_s[1] > 0.1


def test_slow_layer_is_a_part_of_its_action_without_layers(tmp_path):
    run, _ = generate(
        tmp_path / "run", noise=NONE, num_layers=8, num_steps=1, faults=[SlowLayer(rank=9, layer=5, factor=3.0)]
    )
    events = table(run)
    forward = events[events.op == Op.FORWARD_STEP].groupby("rank").seconds.median()
    assert forward[9] / forward[8] == pytest.approx(1.5, rel=1e-3)  # one of four layers takes two more
    assert forward.drop(9).max() / forward.min() == pytest.approx(1.0, rel=1e-3)


def test_a_layer_that_the_rank_has_not_is_refused(tmp_path):
    with pytest.raises(CostError, match=r"SlowLayer: rank 9 has no layer 2; it has layers \[4, 5, 6, 7\]: choose one"):
        generate(tmp_path / "run", num_layers=8, faults=[SlowLayer(rank=9, layer=2, factor=2.0)])
