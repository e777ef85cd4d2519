"""Drift, outliers, NaN: closed forms for known changes; a clean training tells nothing; every injected fault is found."""

from __future__ import annotations

import numpy as np
import pytest
import xarray as xr
from interp.stats_data import LAYERS, STEPS, statistics

from mappnb.errors import InterpError, SchemaError
from mappnb.interp import drift, find_nan, outliers


@pytest.fixture(scope="module")
def clean():
    return statistics()


@pytest.mark.parametrize("seed", range(3))
def test_a_clean_training_tells_nothing(seed):
    stats = statistics(seed=seed)
    assert len(outliers(stats)) == 0 and len(find_nan(stats)) == 0


def spoiled(x):
    x = x.copy()
    x[:3], x[3] = np.nan, np.inf
    return x


def test_the_first_nan_is_found_in_model_order():
    faults = {
        (lambda s: s >= 120, "mlp_out", 3): spoiled,
        (lambda s: s >= 120, "resid_post", 3): spoiled,
        (lambda s: s >= 120, "mlp_act", 4): spoiled,
        (lambda s: s >= 120, "logits", -1): spoiled,
        (lambda s: s >= 130, "embed", -1): spoiled,
    }
    stats = statistics(faults)
    found = find_nan(stats)
    first = found.iloc[0]
    assert (first["step"], first["layer"], first["point"], first["num_nan"], first["num_inf"]) == (
        120,
        3,
        "mlp_out",
        3,
        1,
    )
    here = found[found["step"] == 120]
    assert here["point"].tolist() == ["mlp_out", "resid_post", "mlp_act", "logits"]
    assert found[found["step"] == 130]["point"].tolist()[0] == "embed"
    assert first["fraction"] == pytest.approx(4 / 3000)
    told = outliers(stats)
    assert set(told["reason"][:10]) <= {"nan", "inf"} and "step 120" in told["text"].str.cat(sep="\n")


def test_gradients_go_backward():
    stats = statistics(
        {(lambda s: s == 50, p, d): spoiled for p, d in (("mlp_out", 2), ("mlp_out", 5), ("mlp_act", 5))}
    )
    grads = stats.assign_coords(point=np.array([f"{p}_grad" for p in stats["point"].values], object))
    found = find_nan(grads)
    assert list(zip(found["layer"], found["point"], strict=True)) == [
        (5, "mlp_out_grad"),
        (5, "mlp_act_grad"),
        (2, "mlp_out_grad"),
    ]


def test_a_spike_over_steps_is_found():
    found = outliers(statistics({(lambda s: s == 90, "resid_post", 5): lambda x: x * 6}))
    top = found.iloc[0]
    assert (top["step"], top["layer"], top["point"], top["reason"]) == (90, 5, "resid_post", "over_steps")
    assert top["value"] / top["expected"] == pytest.approx(6, rel=0.35)
    assert set(zip(found["step"], found["layer"], found["point"], strict=True)) == {(90, 5, "resid_post")}


def test_a_layer_that_stands_out_is_found():
    found = outliers(statistics({(lambda s: True, "mlp_out", 6): lambda x: x * 40}))
    assert set(zip(found["layer"], found["point"], found["reason"], strict=True)) == {(6, "mlp_out", "over_layers")}
    assert set(found["step"]) == set(STEPS)


def test_massive_entries_are_found_by_kurtosis():
    def massive(x):
        x = x.copy()
        x[7] = 300.0
        return x

    found = outliers(statistics({(lambda s: s >= 150, "resid_mid", 2): massive}))
    assert "kurtosis" in set(found["statistic"]) and "absmax" in set(found["statistic"])
    assert set(zip(found["layer"], found["point"], strict=True)) == {(2, "resid_mid")}
    assert found["step"].min() == 150


def test_dying_and_constant_points_are_found():
    faults = {
        (lambda s: s >= 160, "mlp_act", 1): lambda x: np.where(np.arange(len(x)) < 5, x + 1, 0.0),
        (lambda s: s >= 160, "mlp_out", 4): lambda x: np.full_like(x, 2.5),
    }
    found = outliers(statistics(faults))
    dead, constant = found[found["reason"] == "dead"], found[found["reason"] == "constant"]
    assert set(zip(dead["step"], dead["layer"], dead["point"], strict=True)) == {
        (s, 1, "mlp_act") for s in (160, 170, 180, 190)
    }
    assert set(constant["layer"]) == {4} and dead["value"].min() > 0.99
    assert found.attrs["dead"] == 4


def test_drift_of_a_known_change(clean):
    """Shifted by one deviation and twice as wide: mean shift 1/sqrt((1 + 4) / 2), log ratio ln 4."""
    moved = clean.copy(deep=True)
    last = moved["step"].values == STEPS[-1]
    first = clean.isel(step=0)
    for name, values in (("mean", first["mean"] + first["std"]), ("var", first["var"] * 4)):
        moved[name][np.flatnonzero(last)[0]] = values
    moved["histogram"][np.flatnonzero(last)[0]] = np.roll(first["histogram"].values, 1, -1)
    found = drift(moved).sel(step=STEPS[-1], point="resid_post").sel(layer=range(LAYERS))
    np.testing.assert_allclose(found["mean_shift"], 1 / np.sqrt(2.5), rtol=1e-9)
    np.testing.assert_allclose(found["log_variance_ratio"], np.log(4), rtol=1e-9)
    p = first["histogram"].sel(point="resid_post", layer=3).values.astype(float)
    q = np.roll(p, 1)
    entropy = lambda x: -float((x[x > 0] * np.log2(x[x > 0])).sum())  # noqa: E731
    p, q = p / p.sum(), q / q.sum()
    js = entropy((p + q) / 2) - (entropy(p) + entropy(q)) / 2
    assert 0.05 < js < 1 and float(found["js"].sel(layer=3)) == pytest.approx(js, abs=1e-9)


def test_drift_begins_at_nothing_and_goes_step_by_step(clean):
    found = drift(clean)
    there = clean["count"].values > 0
    assert (np.abs(found["mean_shift"].values[0][there[0]]) == 0).all() and np.isnan(found["js"].values[~there]).all()
    np.testing.assert_allclose(found["js"].values[0][there[0]], 0, atol=1e-12)
    steps = drift(clean, against="previous")
    assert np.isnan(steps["js"].values[0]).all()
    a = clean.sel(point="mlp_out", layer=2)
    shift = float(a["mean"][4] - a["mean"][3]) / np.sqrt(float(a["var"][4] + a["var"][3]) / 2)
    assert float(steps["mean_shift"].sel(point="mlp_out", layer=2)[4]) == pytest.approx(shift)
    total = found["log_variance_ratio"].sel(point="resid_post", layer=4)
    assert float(total[-1]) == pytest.approx(2 * np.log(1 + 190 / 400), abs=0.15)


def test_js_is_one_for_what_has_nothing_in_common(clean):
    moved = clean.copy(deep=True)
    moved["histogram"][1:] = np.roll(clean["histogram"].values[1:], 40, -1)
    assert float(drift(moved)["js"].sel(point="mlp_out", layer=2)[-1]) == pytest.approx(1)


def test_trees_and_errors(clean):
    tree = xr.DataTree.from_dict({"/": xr.Dataset(), "default": clean})
    assert drift(tree)["js"].equals(drift(clean)["js"])
    with pytest.raises(InterpError, match="did you mean 'first'"):
        drift(clean, against="firs")
    with pytest.raises(SchemaError, match=r"no statistics.*activations='default'"):
        outliers(xr.Dataset({"x": ("sample", [1.0])}))
