"""Lengths of documents: fits against the generator's own coefficients, cures against sums by hand, signatures of real traces."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import pytest

import mappnb
from mappnb import Layout, analysis
from mappnb.analysis._skew_cures import deal, orders
from mappnb.analysis._skew_fit import Fit, fit_lengths
from mappnb.analysis._skew_times import Documents, documents_of
from mappnb.errors import MappnbError
from mappnb.testing import DataSkew, Noise, SlowRank, generate_run

DATA = Path(__file__).parents[3] / "shared" / "data" / "straggler_analysis"
FORWARD_S, TOKENS = 0.02, 4096


def made(path, *faults, layout, noise=None, **options):
    given = {"num_microbatches": 8, "num_steps": 4, "seed": 2} | options
    truth = generate_run(path, layout=layout, faults=faults, noise=noise or Noise.none(), **given)
    return mappnb.attach(path), truth


def squares_expected(packed: bool, sigma: float = 1.0, documents: int = 8) -> float:
    """Mean of the sum of squared shares: by its formula, or of a large draw."""
    if not packed:
        return float(np.exp(2 * sigma**2)) / documents
    draw = np.exp(sigma * np.random.default_rng(5).standard_normal((200_000, documents)))
    return float(((draw / draw.sum(axis=1, keepdims=True)) ** 2).sum(axis=1).mean())


@pytest.mark.parametrize("packed", [True, False])
def test_coefficients_are_the_generators(tmp_path, packed):
    run, _ = made(
        tmp_path / "run",
        DataSkew(packed=packed),
        SlowRank(rank=5, factor=1.3),
        layout=Layout(dp=4, pp=4),
        noise=Noise(),
        num_steps=6,
    )
    found = analysis.length_model(run).sel(phase="forward")
    mean = 1.0 if packed else float(np.exp(0.5))
    square = FORWARD_S * 0.3 / squares_expected(packed) / TOKENS**2
    np.testing.assert_allclose(found.per_square_s, square, rtol=0.06)  # the slow rank is an outlier, not a slope
    if packed:
        np.testing.assert_array_equal(found.per_token_s, 0)
        np.testing.assert_allclose(found.fixed_s, FORWARD_S * 0.7, rtol=0.03)
    else:
        np.testing.assert_allclose(found.per_token_s, FORWARD_S * 0.6 / mean / TOKENS, rtol=0.03)
    others = found.isel(stage=[0, 2, 3])
    assert (others.explained > 0.97).all() and (others.excess_explained > 0.95).all()
    assert (found.explained.sel(stage=1) < others.explained.min()).all()  # the slow rank's share is not the data's
    assert (found["count"] == 6 * 8 * 4).all()


def test_a_fit_forgets_outliers_and_says_what_cannot_be_told():
    rng = np.random.default_rng(0)
    tokens, squares = rng.uniform(1, 2, 200), rng.uniform(5, 9, 200)
    seconds = 0.3 + 0.2 * tokens + 0.01 * squares
    seconds[:20] *= 3
    fit = fit_lengths(seconds, tokens, squares)
    assert (fit.fixed_s, fit.per_token_s, fit.per_square_s) == pytest.approx((0.3, 0.2, 0.01), rel=1e-3)
    assert fit.explained < 0.5  # the outliers are there still
    exact = fit_lengths(0.3 + 0.2 * tokens + 0.01 * squares, tokens, squares)
    assert exact.explained == pytest.approx(1) and exact.excess_explained == pytest.approx(1) and exact.count == 200
    even = fit_lengths(0.3 + 0.01 * squares, np.full(200, 4096.0), squares)
    assert even.per_token_s == 0 and even.fixed_s == pytest.approx(0.3)
    moved = even.movable(4096)
    assert moved.fixed_s == 0 and moved.predict(4096, 7.0) == pytest.approx(float(even.predict(4096, 7.0)))
    flat = fit_lengths(np.full(10, 0.5), np.full(10, 3.0), np.full(10, 9.0))
    assert flat.fixed_s == pytest.approx(0.5) and np.isnan(flat.explained) and np.isnan(flat.excess_explained)


def test_cures_of_data_parallel_replicas_by_hand(tmp_path):
    """Without a pipeline a step is the longest sum of a replica, and what is the same for all."""
    run, truth = made(tmp_path / "run", DataSkew(packed=False), layout=Layout(dp=4))
    table = documents_of(run).sums()
    fit = FORWARD_S * np.array([0.1, 0.6 / np.exp(0.5) / TOKENS, 0.3 / squares_expected(False) / TOKENS**2])
    cost = 3 * (fit[0] + fit[1] * table["tokens"] + fit[2] * table["squares"])  # a backward is two forwards
    totals = cost.groupby(["step", "dp_rank"]).sum().unstack()
    gain = totals.max(axis=1) - totals.mean(axis=1)
    found = analysis.skew_cures(run)
    by = found.gain_s.to_series()
    assert by["context-parallel split by document"] == pytest.approx(gain.mean(), rel=1e-3)
    assert by["reordered microbatches"] == pytest.approx(0, abs=1e-9)  # no pipeline, nothing to reorder
    # a document is never cut, so that packing comes close, and no further
    assert 0.95 * gain.mean() < by["balanced packing"] <= gain.mean() * (1 + 1e-6)
    np.testing.assert_allclose(found.step_s, truth.step_s, rtol=1e-6)
    np.testing.assert_allclose(found.gain_fraction, by / truth.step_s.mean(), rtol=1e-6)
    assert found.reliable_gain.values.tolist() == [True, False, True] or abs(by["reordered microbatches"]) > 0
    assert all(found.assumes.values) and float(found.replay_error) < 1e-6


@pytest.mark.parametrize("packed", [True, False])
def test_cures_of_pipelines(tmp_path, packed):
    run, truth = made(tmp_path / "run", DataSkew(packed=packed), layout=Layout(dp=4, pp=4), noise=Noise())
    found = analysis.skew_cures(run)
    by, effect = found.gain_s.to_series(), truth.faults[0].effect_s.mean()
    assert (by > 0).all() and found.reliable_gain.all()
    assert by["balanced packing"] > 0.3 * effect and by["context-parallel split by document"] < 1.1 * effect


def test_a_run_without_skew_has_little_to_gain(tmp_path):
    run, truth = made(tmp_path / "run", DataSkew(first_step=3), layout=Layout(dp=4, pp=2))
    even = analysis.skew_cures(run, step=slice(0, 2))
    assert np.abs(even.gain_s).max() < 1e-6 * truth.step_s.mean()


def test_dealing_is_near_the_best():
    rng = np.random.default_rng(1)
    for _ in range(5):
        n = 8
        tokens = rng.lognormal(0, 1, n)
        docs = Documents(np.zeros(n, int), np.arange(n) % 2, np.zeros(n, int), tokens)
        new = deal(docs, lambda x: x)
        load = max(tokens[new.dp_rank == d].sum() for d in (0, 1))
        best = min(max(tokens[np.array(w) == d].sum() for d in (0, 1)) for w in product((0, 1), repeat=n))
        assert best <= load * (1 + 1e-12) and load <= best * 7 / 6 + 1e-12  # Graham: 4/3 - 1/3m
        assert sorted(new.tokens) == sorted(tokens)


def test_orders_keep_what_a_replica_has():
    docs = Documents(np.zeros(12, int), np.repeat([0, 1], 6), np.tile([0, 0, 1, 1, 2, 2], 2), np.arange(1.0, 13))
    sums = docs.sums()
    for name, new in orders(sums, Fit(0, 1, 1, 0, 0, 0, 0)).items():
        for d in (0, 1):
            assert sorted(new.xs(d, level="dp_rank")["tokens"]) == sorted(sums.xs(d, level="dp_rank")["tokens"]), name
        first = new.loc[(0, 1)]["tokens"].tolist()
        expected = {"as they were": [15, 19, 23], "costliest first": [23, 19, 15], "costliest last": [15, 19, 23]}
        assert first == expected.get(name, [19, 23, 15]), name


@pytest.mark.parametrize(("fault", "skewed"), [(DataSkew(packed=False), True), (SlowRank(rank=5, factor=1.3), False)])
def test_signature(tmp_path, fault, skewed):
    run, _ = made(tmp_path / "run", fault, layout=Layout(dp=4, pp=2), noise=Noise(), num_steps=6)
    found = analysis.length_signature(run)
    assert float(found.skewed_share) == (1.0 if skewed else 0.0)
    assert (found["cv"] >= 0.05).all() == skewed
    if skewed:
        assert float(found.moving) > 0.2
    else:
        assert float(found.moving) == 0 and float(found.slowest_share.sel(rank=5)) == 1


@pytest.mark.skipif(not DATA.is_dir(), reason="the StragglerAnalysis traces are not beside the repository")
@pytest.mark.parametrize(("name", "skewed"), [("AR", False), ("SE", True)])
def test_signature_of_real_traces(tmp_path, name, skewed):
    mappnb.import_trace(DATA / f"trace-{name}.parquet", tmp_path / "run")
    found = analysis.length_signature(mappnb.attach(tmp_path / "run"))
    assert float(found.skewed_share) == (1.0 if skewed else 0.0)
    assert (float(found.moving) > 0.5) == skewed  # AR: always the same worker
    cv = {"AR": 0.017, "SE": 0.22}[name]
    assert float(found["cv"].median()) == pytest.approx(cv, rel=0.05)


def test_without_lengths_the_cure_is_named(tmp_path):
    run, _ = made(tmp_path / "run", layout=Layout(dp=2), num_steps=1)
    for function in (analysis.length_model, analysis.skew_cures):
        with pytest.raises(MappnbError, match=r"no metric 'document_tokens'.*length_signature"):
            function(run)
    with pytest.raises(MappnbError, match="give the Run"):
        analysis.length_model(run.sel())
