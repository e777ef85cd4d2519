"""Logit lens and direct attribution against plain numpy and torch, a live model's own logits, and sums that must come out."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from interp.lens_data import stream

from mappnb.errors import InterpError, SchemaError
from mappnb.interp import direct_logit_attribution, logit_lens


def expected(tree, at, layer, *, point="resid_post"):
    """Log-probabilities, dims (token, vocab), the long way."""
    full, weights = tree["full"].to_dataset(), tree["weights"].to_dataset()
    x = full[point].values[at, layer].astype(np.float64)
    rows = [i for i, s in enumerate(weights["step"].values) if s <= full["step"].values[at]]
    w = weights.isel(step=rows[-1] if rows else 0)
    facts = __import__("json").loads(full.attrs["model"])
    if facts["normalization"] == "LayerNorm":
        x = x - x.mean(-1, keepdims=True)
    x = x / np.sqrt((x * x).mean(-1, keepdims=True) + facts["eps"])
    x = x * (w["final_ln_weight"].values + facts["zero_centered_gamma"])
    x = x + (w["final_ln_bias"].values if "final_ln_bias" in w else 0)
    logits = x @ w["unembed"].values.T.astype(np.float64)
    return (
        logits
        - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True))
        - logits.max(-1, keepdims=True)
    )


@pytest.mark.parametrize("norm", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("point", ["resid_post", "resid_mid"])
def test_lens_against_the_long_way(norm, zero_centered, point):
    tree = stream(norm=norm, zero_centered=zero_centered, steps=(3, 8))
    found = logit_lens(tree, top=5, point=point)
    assert found["probability"].dims == ("sample", "layer", "token", "rank_k")
    assert found.attrs["reference"] == "resid_post 3"
    for at in range(4):
        final = expected(tree, at, 3)
        for layer in range(4):
            logp = expected(tree, at, layer, point=point)
            order = np.argsort(-logp, axis=1)[:, :5]
            np.testing.assert_array_equal(found["top_id"][at, layer], order)
            np.testing.assert_allclose(
                found["log_probability"][at, layer], np.take_along_axis(logp, order, 1), atol=1e-10
            )
            np.testing.assert_allclose(found["entropy"][at, layer], -(np.exp(logp) * logp).sum(1), atol=1e-10)
            np.testing.assert_allclose(found["kl"][at, layer], (np.exp(final) * (final - logp)).sum(1), atol=1e-10)
            for t in range(6):
                target = int(tree["full"]["token_id"].values[at, t + 1])
                assert int(found["target_id"][at, t]) == target
                assert int(found["target_rank"][at, layer, t]) == int((logp[t] > logp[t, target]).sum())
                assert float(found["target_probability"][at, layer, t]) == pytest.approx(np.exp(logp[t, target]))
    assert (found["target_id"][:, -1] == -1).all() and (found["target_rank"][:, :, -1] == -1).all()
    if point == "resid_post":
        np.testing.assert_allclose(found["kl"][:, 3], 0, atol=1e-12)


def test_lens_in_float32_with_a_large_vocabulary_is_close_and_bounded():
    tree = stream(vocab=30_011, hidden=32, tokens=40, samples=1, layers=2, dtype=np.float32)
    tracemalloc.start()
    found = logit_lens(tree, top=3)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 250 * 2**20, peak
    logp = expected(tree, 0, 0)
    np.testing.assert_array_equal(found["top_id"][0, 0], np.argsort(-logp, axis=1)[:, :3])
    np.testing.assert_allclose(found["entropy"][0, 0], -(np.exp(logp) * logp).sum(1), atol=1e-4)


def test_lens_tiles_do_not_change_anything(monkeypatch):
    from mappnb.interp import lens

    tree = stream(steps=(1, 2), pad=2)
    whole = logit_lens(tree)
    monkeypatch.setattr(lens, "_TILE_VALUES", 50)
    import xarray as xr

    xr.testing.assert_allclose(logit_lens(tree), whole)


def test_lens_leaves_out_what_is_not_there():
    tree = stream(pad=2)
    full = tree["full"].to_dataset()
    values = full["resid_post"].values.copy()
    values[0, 1, 3, 2], values[0, 2, 4, 0] = np.nan, np.inf
    there = np.ones((2, 4, 7), bool)
    there[0, 3, 5] = False
    full = full.assign(resid_post=(full["resid_post"].dims, values))
    full = full.assign_coords(resid_post_present=(("sample", "layer", "token"), there))
    found = logit_lens(full, tree["weights"].to_dataset())
    lost = np.isnan(found["entropy"].values)
    assert (
        lost[1, :, :2].all() and lost[0, 1, 3] and lost[0, 2, 4] and lost[0, :, 5].all()
    )  # no final one to compare with
    assert lost.sum() == 8 + 2 + 4
    assert (found["top_id"].values[lost] == -1).all() and (found["top_text"].values[lost] == "").all()


def test_lens_texts_targets_and_choices():
    tree = stream()
    found = logit_lens(tree, layers=[2, 0], sample=1, target=4, top=2)
    assert found["layer"].values.tolist() == [2, 0] and found.sizes["sample"] == 1 and found.sizes["rank_k"] == 2
    assert (found["target_id"] == 4).all()
    known = set(tree["full"]["token_id"].values[1].tolist())
    for i, text in zip(found["top_id"].values.ravel(), found["top_text"].values.ravel(), strict=True):
        assert text == (f"w{i}" if int(i) in known else str(i))
    words = logit_lens(tree, sample=0, vocabulary=[f"<{i}>" for i in range(23)])
    assert (words["top_text"].values == np.vectorize(lambda i: f"<{i}>", otypes=[object])(words["top_id"].values)).all()


def test_lens_says_what_is_wrong():
    tree = stream()
    with pytest.raises(InterpError, match="did you mean 'resid_post'"):
        logit_lens(tree, point="resid_posts")
    with pytest.raises(InterpError, match="no layer 9"):
        logit_lens(tree, layers=9)
    with pytest.raises(InterpError, match="no sample 2"):
        logit_lens(tree, sample=2)
    with pytest.raises(InterpError, match="ids 0 to 22"):
        logit_lens(tree, target=23)
    full = tree["full"].to_dataset()
    with pytest.raises(SchemaError, match=r"no weights were recorded.*mappnb.Capture"):
        logit_lens(full)
    with pytest.raises(SchemaError, match="no 'unembed'"):
        logit_lens(full, {"final_ln_weight": np.ones(8)})
    with pytest.raises(InterpError, match="vectors do not come back; capture it in mode 'full'"):
        logit_lens(full[["resid_post"]].rename(hidden="bucket"), tree["weights"].to_dataset())


@pytest.mark.parametrize("norm", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("neurons", [False, True])
def test_attribution_sums_to_the_logit(norm, neurons):
    tree = stream(norm=norm, steps=(2, 6))
    for sample, position, token, other in ((0, -1, 3, None), (3, 2, 5, 7)):
        found = direct_logit_attribution(
            tree, token=token, instead_of=other, position=position, sample=sample, neurons=neurons
        )
        full = tree["full"].to_dataset()
        weights = tree["weights"].isel(step=int(sample >= 2)).to_dataset()
        x = full["resid_post"].values[sample, 3, position]
        x = x - x.mean() if norm == "LayerNorm" else x
        x = x / np.sqrt((x * x).mean() + 1e-5) * weights["final_ln_weight"].values
        x = x + (weights["final_ln_bias"].values if norm == "LayerNorm" else 0)
        logits = weights["unembed"].values @ x
        expected_ = logits[token] - (0 if other is None else logits[other])
        assert float(found.sum()) == pytest.approx(expected_, abs=1e-9)
        assert found.attrs["logit"] == pytest.approx(expected_, abs=1e-9) and abs(found.attrs["unexplained"]) < 1e-9
        counts = {k: int((found["kind"] == k).sum()) for k in set(found["kind"].values)}
        mlp = {"neuron": 20, "mlp_rest": 4} if neurons else {"mlp": 4}
        bias = {"final_norm_bias": 1} if norm == "LayerNorm" else {}
        assert counts == {"embed": 1, "head": 8, "attention_bias": 4, **mlp, **bias}


def test_attribution_of_a_head_is_what_taking_it_out_takes():
    tree = stream(norm="RMSNorm")
    found = direct_logit_attribution(tree, token=3)
    full, weights = tree["full"].to_dataset(), tree["weights"].isel(step=0).to_dataset()
    x = full["resid_post"].values[0, 3, -1]
    scale = np.sqrt((x * x).mean() + 1e-5)
    gone = full["z"].values[0, 2, -1, 1] @ weights["w_o"].values[2, 1]
    row = (weights["unembed"].values[3] * weights["final_ln_weight"].values) @ gone / scale
    here = (found["kind"] == "head") & (found["layer"] == 2) & (found["unit"] == 1)
    assert float(found[here].item()) == pytest.approx(row, abs=1e-12)


def test_attribution_says_what_is_missing():
    tree = stream()
    weights, full = tree["weights"].to_dataset(), tree["full"].to_dataset()
    with pytest.raises(SchemaError, match="no 'w_o'"):
        direct_logit_attribution(full, weights.drop_vars("w_o"), token=1)
    with pytest.raises(SchemaError, match="neither embed nor resid_pre"):
        direct_logit_attribution(full.drop_vars("embed"), weights, token=1)
    with pytest.raises(InterpError, match="every layer is needed"):
        direct_logit_attribution(full.isel(layer=[0, 1, 3]), weights, token=1)
    with pytest.raises(InterpError, match="position 7"):
        direct_logit_attribution(full, weights, token=1, position=7)
    with pytest.raises(InterpError, match="ids 0 to 22"):
        direct_logit_attribution(full, weights, token=23)
    sketch = full.assign(mlp_out=full["mlp_out"].rename(hidden="component"))
    with pytest.raises(InterpError, match=r"mlp_out has dims .*'component'"):
        direct_logit_attribution(sketch, weights, token=1)


# ------------------------------------------------------------------------------------------------------- live models
@pytest.fixture(scope="module", params=["megatron", "llama"])
def live(request):
    pytest.importorskip("torch", reason="needs torch")
    from interp.live_models import gpt, llama

    from mappnb.interp import Model

    if request.param == "llama":
        yield Model(llama(), "bytes")
        return
    pytest.importorskip("megatron.core", reason="needs megatron-core")
    with gpt() as made:
        yield Model(made, "bytes")


def test_lens_of_the_last_layer_is_the_models_logits(live):
    run = live.forward(["hello world", "left"], capture=["resid_post", "final_ln"])
    found = logit_lens(run.activations, live, top=4)
    logits = run.logits.values.astype(np.float64)
    logp = (
        logits
        - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True))
        - logits.max(-1, keepdims=True)
    )
    real = run.activations["mask"].values
    ids = found["top_id"].values[:, -1]
    np.testing.assert_allclose(
        found["log_probability"].values[:, -1][real], np.take_along_axis(logp, np.maximum(ids, 0), 2)[real], atol=1e-5
    )
    np.testing.assert_array_equal(ids[real][:, 0], logp.argmax(-1)[real])
    assert found["top_text"].values[0, -1, 0, 0] == live.texts(ids[0, 0, :1])[0]
    assert float(found["kl"].values[:, 0][real].max()) > 0.01


def test_attribution_of_a_live_model_sums_to_its_logit(live):
    run = live.forward("hello world", capture=["embed", "z", "mlp_out", "resid_post", "mlp_act"])
    logits = run.logits.values[0, -1].astype(np.float64)
    for neurons in (False, True):
        found = direct_logit_attribution(run.activations, live, token=97, instead_of=98, neurons=neurons)
        assert float(found.sum()) == pytest.approx(logits[97] - logits[98], abs=1e-4)
