"""Hand-compiled circuits: exact in numpy, and exact as megatron-core models in every layout (ladder a)."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
import xarray as xr
from capture.ranks import run_ranks
from interp.circuit_jobs import POINTS, circuit, record_circuit, record_sinks, rules

import mappnb
from mappnb.errors import SchemaError
from mappnb.interp import attention_pattern, check_context, context, find_heads, head_statistics
from mappnb.testing.induction import (
    KINDS,
    Circuit,
    CircuitError,
    induction_circuit,
    repeated_tokens,
    single_head_circuit,
)

HAS_MEGATRON = bool(importlib.util.find_spec("torch") and importlib.util.find_spec("megatron"))
needs_megatron = pytest.mark.skipif(not HAS_MEGATRON, reason="needs torch and megatron-core")
PRELOAD = ("mappnb.testing.gpt_train", "mappnb.testing.circuit_megatron")
EVERY_KIND = Circuit(
    (
        ("previous_token", "duplicate_token"),
        ("induction", "bos_sink"),
        ("duplicate_token", "idle"),
        ("idle", "previous_token"),
    )
)


def padded(tokens, left):
    """Three samples of unequal length, padded on the left, and their mask."""
    rows = [np.concatenate([np.zeros(pads, np.int64), tokens[0, : tokens.shape[1] - pads]]) for pads in left]
    return np.stack(rows), np.arange(tokens.shape[1])[None] >= np.array(left)[:, None]


@pytest.mark.parametrize("made", [induction_circuit(), EVERY_KIND], ids=["induction", "every kind"])
def test_patterns_of_the_weights_are_those_of_the_definition(made):
    for tokens, mask in [
        (repeated_tokens(8), None),
        (repeated_tokens(5, copies=3), None),
        padded(repeated_tokens(8), (0, 1, 6)),
    ]:
        ds, wanted = made.run(tokens, mask), made.pattern(tokens, mask)
        for sample in range(len(tokens)):
            got = attention_pattern(ds, layer=None, head=None, sample=sample)
            assert got.dtype == np.float64
            np.testing.assert_array_equal(got.values, wanted.values[sample])
            assert float(check_context(ds, sample=sample).max()) == 0.0


def test_rows_are_zeros_and_ones():
    wanted = (
        induction_circuit().pattern(repeated_tokens(8)).sel(head=0)
        if False
        else induction_circuit().pattern(repeated_tokens(8))
    )
    active = wanted.values[0][[0, 1], [0, 0]]
    assert set(np.unique(active)) == {0.0, 1.0}
    assert (active.sum(axis=2) == 1.0).all()
    copy = active[1][9:]
    assert copy.argmax(axis=1).tolist() == list(range(2, 10)), "each token of the second copy looks one after its first"


@pytest.mark.parametrize("seed", range(5))
def test_it_predicts_the_second_copy(seed):
    tokens = repeated_tokens(10, seed=seed)
    logits = induction_circuit().run(tokens)["logits"].values[0]
    assert logits[11:-1].argmax(axis=1).tolist() == tokens[0, 12:].tolist()


def test_without_bos_one_weight_becomes_a_half():
    """The first position has no token before it, so that it says its own: the trap of this circuit."""
    tokens = repeated_tokens(8, bos=None)
    pattern = attention_pattern(induction_circuit().run(tokens), layer=1, head=0)
    assert pattern.values[8, :2].tolist() == [0.5, 0.5]
    assert set(np.unique(pattern.values[9:])) == {0.0, 1.0}
    np.testing.assert_array_equal(pattern, induction_circuit().pattern(tokens).values[0, 1, 0])
    with_bos = attention_pattern(induction_circuit().run(repeated_tokens(8)), layer=1, head=0)
    assert set(np.unique(with_bos.values)) == {0.0, 1.0}


def test_what_cannot_be_compiled():
    with pytest.raises(CircuitError, match="an induction head needs a previous_token head in an earlier layer"):
        single_head_circuit("induction", layer=1, head=0)
    with pytest.raises(CircuitError, match=r"unknown kind 'previous'; known: .*; did you mean 'previous_token'"):
        single_head_circuit("previous", layer=0, head=0)
    with pytest.raises(CircuitError, match=r"no head 2\.0 in 2 layers of 2 heads"):
        single_head_circuit("bos_sink", layer=2, head=0)
    with pytest.raises(CircuitError, match="tokens go from 0 to 16; expected 0 to 15"):
        induction_circuit().run([[0, 16]])
    with pytest.raises(CircuitError, match="33 tokens in a sample; expected 32 at most"):
        induction_circuit().run(np.zeros((1, 33), int))
    with pytest.raises(CircuitError, match="at most 15 different tokens"):
        repeated_tokens(16)
    assert set(KINDS) >= {kind for row in EVERY_KIND.kinds for kind in row}


def whole(shards, made, tokens, mask):
    """The dataset that shards of all ranks make: each put in its place, replicas compared."""
    reference = made.run(tokens, mask)
    data = {}
    for name in POINTS:
        variable = reference[name]
        data[name] = (variable.dims, np.full(variable.shape, np.nan))
    for point, layer, spans, (start, stop), values in shards:
        dims, target = data[point]
        place = {dim: slice(*span) for dim, span in spans.items()} | {"token": slice(start, stop)}
        index = tuple(layer if dim == "layer" else place.get(dim, slice(None)) for dim in dims)
        before = target[index]
        assert np.isnan(before).all() or (before == values).all(), f"replicas of {point} differ"
        target[index] = values
    assert not any(np.isnan(values).any() for _, values in data.values())
    return xr.Dataset(data, reference.coords, reference.attrs), reference


LAYOUTS = {
    "single": (1, {}),
    "tp2": (2, {"tp": 2}),
    "pp2": (2, {"pp": 2}),
    "tp2 sp": (2, {"tp": 2, "sequence_parallel": True}),
    "tp2 pp2": (4, {"tp": 2, "pp": 2}),
    "tp2 pp2 sp": (4, {"tp": 2, "pp": 2, "sequence_parallel": True}),
    "pp2 interleaved": (2, {"pp": 2, "vpp": 2}),
}
PLAIN = ("single", "tp2 pp2 sp")


@needs_megatron
@pytest.mark.dist
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in PLAIN else [pytest.mark.slow]) for name in LAYOUTS]
)
def test_patterns_are_exact_in_megatron(name):
    """Ladder (a): recomputed from tapped shards, and in the softmax itself, bit for bit in float64."""
    ranks, layout = LAYOUTS[name]
    base = repeated_tokens(8)
    tokens, mask = padded(np.concatenate([base, base[:, 1:2]], axis=1), (0, 1, 6))
    results = run_ranks(circuit, ranks, EVERY_KIND, layout, tokens, mask, timeout_s=240, preload=PRELOAD)
    microbatches = 2 if "vpp" in layout else 1  # all alike: the later ones write the same again
    ds, reference = whole([shard for shards, _, _ in results for shard in shards], EVERY_KIND, tokens, mask)
    wanted = EVERY_KIND.pattern(tokens, mask).values
    for sample, row in enumerate(mask):
        got = attention_pattern(ds, layer=None, head=None, sample=sample)
        np.testing.assert_array_equal(got.values, wanted[sample])
        brought = context(ds, layer=None, sample=sample).values
        np.testing.assert_array_equal(brought[:, row], ds["z"].values[sample][:, row])
        for point in POINTS:
            real = (
                ds[point].values[sample][..., row, :, :]
                if ds[point].ndim == 5
                else ds[point].values[sample][..., row, :]
            )
            truth = reference[point].values[sample]
            truth = truth[..., row, :, :] if ds[point].ndim == 5 else truth[..., row, :]
            np.testing.assert_array_equal(real, truth, err_msg=point)
    softmax = [part for _, parts, _ in results for part in parts]
    assert len(softmax) == 4 * layout.get("tp", 1) * microbatches
    for layer, start, values in softmax:
        heads = wanted[:, layer, start : start + values.shape[1]]
        for sample, row in enumerate(mask):
            np.testing.assert_array_equal(values[sample][:, row], heads[sample][:, row])
    logits = [result for *_, result in results if result is not None]
    assert len(logits) == layout.get("tp", 1)
    stats = head_statistics(ds)
    assert find_heads(stats, kind="induction", limit=0.9)[["layer", "head"]].values.tolist() == [[1, 0]]
    assert find_heads(stats, kind="previous_token", limit=0.9)[["layer", "head"]].values.tolist() == [[0, 0], [3, 1]]


@needs_megatron
@pytest.mark.dist
def test_recorded_read_and_computed_again(tmp_path):
    """From ``mappnb.record`` on four ranks to the pattern: exact, and the heads' statistics from the job are the reader's."""
    base = repeated_tokens(8)
    tokens, mask = padded(np.concatenate([base, base[:, 1:2]], axis=1), (0, 1, 6))
    points = {"points": ["q_rot", "k_rot", "v", "z"], "mode": "full", "name": "attention"}
    plan = {"rules": [points, {"points": ["q_rot", "k_rot"], "mode": "heads", "name": "heads"}]}
    layout = {"tp": 2, "pp": 2, "sequence_parallel": True}
    run_ranks(
        record_circuit, 4, EVERY_KIND, layout, tokens, mask, str(tmp_path / "run"), plan, timeout_s=240, preload=PRELOAD
    )
    run = mappnb.attach(tmp_path / "run")
    assert not run.meta["problems"]
    activations = run.activations
    wanted = EVERY_KIND.pattern(tokens, mask).values
    for sample in range(3):
        pattern = attention_pattern(activations, layer=None, head=None, sample=sample)
        assert pattern.dtype == np.float64
        np.testing.assert_array_equal(pattern.values, wanted[sample])
        assert "note" not in pattern.attrs
        assert float(check_context(activations, sample=sample).max()) == 0.0
    stats, job = head_statistics(activations), activations["heads"].to_dataset()
    assert find_heads(job, kind="induction", limit=0.9)[["layer", "head"]].values.tolist() == [[1, 0]]
    for name in ("entropy", "bos_mass", "previous_token", "duplicate_token", "induction", "diagonal_3"):
        np.testing.assert_allclose(job[name].transpose("sample", "layer", "head"), stats[name], atol=1e-6, err_msg=name)


@needs_megatron
@pytest.mark.dist
def test_learned_sinks_of_two_ranks(tmp_path):
    """Each rank knows half of them; recorded as a weight they are put together."""
    tokens = repeated_tokens(8)
    points = ["q_rot", "k_rot", "v", "z"]
    plan = {"rules": [{"points": points, "name": "attention"}, {"points": ["sinks"], "name": "sinks"}]}
    plan["rules"].append({"points": points[:2], "mode": "heads", "name": "heads"})
    run_ranks(record_sinks, 2, induction_circuit(), tokens, str(tmp_path / "run"), plan, timeout_s=240, preload=PRELOAD)
    activations = mappnb.attach(tmp_path / "run").activations
    assert activations["weights"]["sinks"].values.tolist() == [[[1500.0, 500.0], [1500.0, 1000.0]]]
    assert float(check_context(activations).max()) <= 1e-12
    pattern = attention_pattern(activations, layer=1, head=0)
    assert pattern["sink"].values.round(9).tolist() == [1.0] * 9 + [0.0] * 8, "2000 beats 1500, BOS at 1000 does not"
    stats, job = head_statistics(activations), activations["heads"].to_dataset()
    for name in ("entropy", "bos_mass", "induction"):
        np.testing.assert_allclose(job[name].transpose("sample", "layer", "head"), stats[name], atol=1e-6, err_msg=name)
    assert float(job["bos_mass"].sel(layer=1)[0, 0]) == 0.0
    with pytest.raises(SchemaError, match=r"were not recorded.*mappnb\.Capture\(\['sinks'\]\)"):
        attention_pattern(activations["attention"].to_dataset(), layer=1, head=0)


OPTIONS = {
    "gqa": {"num_query_groups": 2},
    "gqa window": {"num_query_groups": 2, "window_size": (5, 0)},
    "window of some layers": {"window_size": (4, 0), "window_attn_skip_freq": 2},
    "off by one": {"softmax_type": "off-by-one"},
    "learned sinks": {"softmax_type": "learnable", "num_query_groups": 1, "softmax_scale": 0.6},
    "layer scaling": {"apply_query_key_layer_scaling": True, "attention_softmax_in_fp32": True},
}


@pytest.fixture(scope="module")
def every_rule():
    """q, k, v, z and facts of a model for each of the options."""
    tokens = np.random.default_rng(3).integers(0, 256, (2, 24))
    found = run_ranks(rules, 1, list(OPTIONS.values()), tokens, timeout_s=240, preload=PRELOAD)[0]
    return dict(zip(OPTIONS, found, strict=True))


@needs_megatron
@pytest.mark.dist
@pytest.mark.parametrize("name", OPTIONS)
def test_recomputed_context_is_megatrons(every_rule, name):
    """Pattern times values against the captured z, in float32, with the facts that the capture writes."""
    points, facts = every_rule[name]
    dims = ("sample", "layer", "token")
    data = {
        p: ((*dims, "head" if p in ("q_rot", "z") else "kv_head", "head_dim"), values) for p, values in points.items()
    }
    ds = xr.Dataset(data, attrs={"model": facts})
    for sample in range(2):
        assert float(check_context(ds, sample=sample).max()) <= 1e-5
    pattern = attention_pattern(ds, layer=None, head=None)
    assert float(pattern.isel(query=slice(1, None)).max("key").std()) > 1e-3, "rows that say something"
    if facts["softmax_type"] != "vanilla":
        assert float(pattern["sink"].min()) > 0
    wrong = {**facts, "softmax_scale": 0.1, "window": [1, 0], "softmax_type": "vanilla", "sinks": None}
    assert float(check_context(ds.assign_attrs(model=wrong)).max()) > 1e-2
