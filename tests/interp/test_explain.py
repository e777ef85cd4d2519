"""Explanations: direct effects sum to the logit difference, attribution foretells real ablation, upstream traces are derivatives."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mappnb.errors import InterpError
from mappnb.interp import Edit, Model, explain
from mappnb.interp._model_cells import run_cells

torch = pytest.importorskip("torch", reason="needs torch and megatron-core")
pytest.importorskip("megatron.core", reason="needs torch and megatron-core")

from interp.live_models import OTHER, PROMPT, llama  # noqa: E402


@pytest.fixture(scope="module")
def told(model):
    return explain(model, PROMPT, "a", instead_of="b")


def test_direct_effects_sum_to_the_logit_difference(model, told):
    logits = model.forward(PROMPT).logits.values[0, -1]
    assert told.metric == pytest.approx(float(logits[97] - logits[98]), abs=1e-6)
    assert told.table.loc[told.table["in_sum"], "direct_effect"].sum() == pytest.approx(told.metric, abs=1e-4)
    assert abs(told.unexplained) < 1e-5
    single = explain(model, PROMPT, "a")
    assert single.metric == pytest.approx(float(logits[97]), abs=1e-5)
    assert abs(single.unexplained) < 1e-5
    counts = told.table["component"].value_counts().to_dict()
    assert counts == {"embed": 11, "head": 176, "attention_bias": 4, "mlp": 44, "neuron": 50, "final_norm_bias": 1}
    biases = told.table[told.table["component"].isin(["attention_bias", "final_norm_bias"])]
    assert biases["direct_effect"].abs().max() > 1e-4, "biases are there, and count"


@pytest.mark.parametrize("baseline", ["zero", "mean", OTHER])
def test_attribution_is_what_a_little_ablation_takes_away(baseline):
    """RMSNorm, gated, float64: one ten-thousandth of each ablation, times ten thousand."""
    told = explain(Model(llama().double(), "bytes"), PROMPT, "a", instead_of="b", baseline=baseline)
    assert abs(told.unexplained) < 1e-9
    rows = told.check(40)
    cells = [[replace(told._edit(row), strength=1e-4)] for _, row in rows.iterrows()]
    values = run_cells(told.model, told.tokens, [[], *cells], told.measure)[:, 0]
    found = (values[0] - values[1:]) / 1e-4
    np.testing.assert_allclose(found, rows["attribution"], atol=2e-3)
    assert np.abs(found).max() > 0.2


def test_direct_effect_is_ablation_with_everything_else_held(model, told):
    """A head's direct effect, by taking its output out of the last stream alone and holding the norm's scale."""
    found = model.forward(PROMPT, capture=["z", "resid_post", "final_ln"])
    weights = model.weights(["w_o", "unembed", "final_ln_weight"])
    last = found.activations["resid_post"].values[0, -1, -1].astype(float)
    part = found.activations["z"].values[0, 2, -1, 3].astype(float) @ weights["w_o"].values[2, 3]
    rest = last - part
    scale = np.sqrt(last.var() + 1e-5)
    toward = weights["unembed"].values[97].astype(float) - weights["unembed"].values[98]
    gamma = weights["final_ln_weight"].values
    wanted = ((last - last.mean()) / scale * gamma) @ toward - ((rest - rest.mean()) / scale * gamma) @ toward
    row = told.table.query("component == 'head' and layer == 2 and unit == 3 and position == 10")
    assert row["direct_effect"].item() == pytest.approx(wanted, abs=1e-6)


def test_a_layers_neurons_are_its_mlp(model):
    told = explain(model, PROMPT, "a", instead_of="b", neurons=10**6)
    neurons = told.table[(told.table["component"] == "neuron") & (told.table["position"] == 10)]
    mlp = told.table[(told.table["component"] == "mlp") & (told.table["position"] == 10)].set_index("layer")
    bias = [layer.mlp.linear_fc2.bias.detach().abs().max().item() for layer in model.chunks[0].module.decoder.layers]
    assert max(bias) == 0.0
    np.testing.assert_allclose(neurons.groupby("layer")["direct_effect"].sum(), mlp["direct_effect"], atol=1e-5)
    np.testing.assert_allclose(neurons.groupby("layer")["attribution"].sum(), mlp["attribution"], atol=1e-5)


@pytest.mark.parametrize("baseline", ["zero", "mean", OTHER])
def test_real_ablation_agrees(model, baseline):
    told = explain(model, PROMPT, "a", instead_of="b", baseline=baseline)
    checked = told.check(24)
    assert len(checked) == 24
    assert checked.attrs["correlation"] > 0.8
    assert 0.6 < checked.attrs["ratio"] < 1.5
    row = checked.index[0]
    assert told.ablate(row) == pytest.approx(checked.loc[row, "ablation"], abs=1e-5)


def test_ablation_is_an_edit(model, told):
    row = told.table.query("component == 'head' and layer == 0 and unit == 1 and position == 10").index[0]
    run = model.forward(PROMPT, edits=[Edit(point="layers.0.z", heads=1, tokens=10)], gradients=("a", "b"))
    assert told.ablate(row) == pytest.approx(told.metric - run.metric.item(), abs=1e-6)
    other = explain(model, PROMPT, "a", instead_of="b", baseline=OTHER)
    clean = model.forward(OTHER, capture="mlp_out").activations
    row = other.table.query("component == 'mlp' and layer == 1 and position == 10").index[0]
    run = model.forward(
        PROMPT, edits=[Edit(point="layers.1.mlp_out", tokens=10, kind="patch", value=clean)], gradients=("a", "b")
    )
    assert other.ablate(row) == pytest.approx(other.metric - run.metric.item(), abs=1e-6)


def test_attribution_is_a_derivative(model, told):
    """Central difference of the metric as one head's output is scaled."""
    row = told.table.query("component == 'head' and layer == 1 and unit == 2 and position == 10")
    near = []
    for scale in (1.02, 0.98):
        edit = Edit(point="layers.1.z", heads=2, tokens=10, kind="scale", value=scale)
        near.append(model.forward(PROMPT, edits=[edit], gradients=("a", "b")).metric.item())
    assert row["attribution"].item() == pytest.approx((near[0] - near[1]) / 0.04, rel=0.02, abs=1e-4)


def test_upstream_is_the_derivative_of_the_components_own_effect(model, told):
    row = told.table.query("component == 'head' and layer == 2 and unit == 1 and position == 9")
    found = told.upstream(row.index[0])
    assert set(found["layer"]) <= {-1, 0, 1}
    assert (found["position"] <= 9).all()
    gradient = told.activations["z_grad"].values[0, 2, 9, 1].astype(float)

    def own(edit):
        z = model.forward(PROMPT, capture="layers.2.z", edits=[edit]).activations["z"].values[0, 0, 9, 1]
        return float(z.astype(float) @ gradient)

    for query, options in [
        ("component == 'embed' and position == 5", {"point": "embed", "tokens": 5}),
        ("component == 'mlp' and layer == 0 and position == 1", {"point": "layers.0.mlp_out", "tokens": 1}),
        (
            "component == 'head' and layer == 1 and unit == 3 and position == 9",
            {"point": "layers.1.z", "heads": 3, "tokens": 9},
        ),
    ]:
        up, down = (own(Edit(**options, kind="scale", value=scale)) for scale in (1.02, 0.98))
        assert found.query(query)["attribution"].item() == pytest.approx((up - down) / 0.04, rel=0.03, abs=2e-7)
    below = told.upstream(told.table.query("component == 'mlp' and layer == 2 and position == 10").index[0])
    assert {2} < set(below.query("component == 'head'")["layer"])
    assert set(below.query("component == 'mlp'")["layer"]) == {0, 1}


def test_mistakes_are_told(model, told):
    bias = told.table.index[told.table["component"] == "final_norm_bias"][0]
    embed = told.table.index[told.table["component"] == "embed"][0]
    for call, words in [
        (lambda: told.ablate(bias), "it is a bias of the model"),
        (lambda: told.upstream(embed), "nothing of the model is before it"),
        (lambda: told.ablate(10**6), "the table has rows 0 to"),
        (lambda: told.top(by="size"), "expected 'attribution' or 'direct_effect'"),
        (lambda: explain(model, PROMPT, "a", baseline="short"), "baseline 'short': 5 tokens, the prompt has 11"),
        (lambda: explain(model, ["a", "b"], "a"), "one prompt was expected, 2 given"),
        (lambda: explain(model, PROMPT, 256), "expected a text, or an id of 0 to 255"),
    ]:
        with pytest.raises(InterpError, match=words):
            call()
    assert repr(told).startswith("<Explanation of 'a' instead of 'b'")
