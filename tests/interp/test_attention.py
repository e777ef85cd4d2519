"""Attention from recorded queries and keys: every rule against loops and torch, what is missing, what is asked wrongly."""

from __future__ import annotations

import importlib.util
import json
import tracemalloc

import numpy as np
import pytest
import xarray as xr
from interp.attention_cases import KINDS, brute_force, recorded

from mappnb.capture.activations.attention_rules import alibi_slopes, attention_rules
from mappnb.errors import InterpError, SchemaError
from mappnb.interp import _attention_math, attention_pattern, attention_scores, check_context, context, head_statistics

HAS_TORCH = importlib.util.find_spec("torch") is not None
needs_torch = pytest.mark.skipif(not HAS_TORCH, reason="needs torch")


@pytest.mark.parametrize("kind", KINDS)
def test_every_rule_equals_the_loops(rng, kind):
    ds = recorded(rng, KINDS[kind], dtype=np.float64)
    for sample in range(2):
        for layer in range(2):
            pattern = attention_pattern(ds, layer=layer, head=None, sample=sample)
            scores = attention_scores(ds, layer=layer, head=None, sample=sample)
            brought = context(ds, layer=layer, sample=sample)
            for head in range(4):
                wanted = brute_force(ds, layer, head, sample)
                np.testing.assert_allclose(pattern.sel(head=head), wanted[0], atol=1e-13)
                np.testing.assert_allclose(scores.sel(head=head), wanted[1], atol=1e-13)
                np.testing.assert_allclose(brought.sel(head=head), wanted[2], atol=1e-13)
                share = pattern["sink"].sel(head=head) if "sink" in pattern.coords else np.zeros(9)
                np.testing.assert_allclose(share, wanted[3], atol=1e-13)
                if "sink" in pattern.coords:
                    np.testing.assert_allclose(
                        pattern.sel(head=head).sum("key") + share, ds["mask"].values[sample], atol=1e-13
                    )


@pytest.mark.parametrize("kind", ["causal", "window", "sinks", "alibi", "softcap", "scale"])
def test_the_rules_matter(rng, kind):
    """A test of rules that are left out would pass on data for which they do nothing."""
    ds = recorded(rng, KINDS[kind])
    plain = ds.assign_attrs(model={"num_heads": 4, "num_kv_heads": 2, "head_dim": 6})
    off = abs(attention_pattern(ds, layer=1, head=0) - attention_pattern(plain, layer=1, head=0)).max()
    assert float(off) == 0.0 if kind == "causal" else float(off) > 1e-3


@needs_torch
@pytest.mark.parametrize("grouped", [1, 2, 4])
def test_context_equals_torch(rng, grouped):
    import torch

    ds = recorded(rng, kv_heads=grouped, tokens=33, size=16, padding=(0, 5))
    for sample in range(2):
        q, k, v = (torch.tensor(ds[name].values[sample, 1]).transpose(0, 1)[None] for name in ("q_rot", "k_rot", "v"))
        real = torch.tensor(ds["mask"].values[sample])
        seen = torch.ones(33, 33, dtype=torch.bool).tril() & real[None, :]
        expected = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=seen[None, None], enable_gqa=True
        )
        got = context(ds, layer=1, sample=sample)
        assert got.dtype == np.float32
        np.testing.assert_allclose(got.values[real], expected[0].transpose(0, 1)[real], atol=1e-5)


@needs_torch
def test_window_is_megatrons():
    from mappnb.testing.megatron_cpu import megatron_version

    if megatron_version() is None:
        pytest.skip("needs megatron-core")
    from mappnb.testing import megatron_on_cpu

    with megatron_on_cpu(force=True):
        from megatron.core.transformer.utils import get_sliding_window_causal_mask

        for window in ([3, 0], [0, 0], [2, 1]):
            hidden = get_sliding_window_causal_mask(7, 7, window).numpy()
            rules = attention_rules({"head_dim": 4, "window": window, "causal": window[1] == 0}, 0)
            head = _attention_math.Head.of(rules, 0)
            slots = np.arange(7)
            keys = _attention_math.Keys(slots, np.ones(7, bool))
            scores = _attention_math.score_tile(np.zeros((7, 4)), np.zeros((7, 4)), head, slots, keys)
            np.testing.assert_array_equal(np.isneginf(scores), hidden)


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 8, 12, 16, 20])
def test_alibi_slopes(heads):
    """The recursive definition of the paper's code."""

    def slopes(n):
        if n & (n - 1) == 0:
            start = 2 ** (-(2 ** -(np.log2(n) - 3)))
            return [start * start**i for i in range(n)]
        lower = 2 ** int(np.log2(n))
        return slopes(lower) + slopes(2 * lower)[0::2][: n - lower]

    np.testing.assert_allclose(alibi_slopes(heads), slopes(heads), rtol=1e-12)


def test_tiles_change_nothing(rng, monkeypatch):
    ds = recorded(rng, {"window": [5, 0], "alibi": True}, tokens=40)
    whole = attention_pattern(ds, layer=0, head=None, sample=1)
    monkeypatch.setattr(_attention_math, "_TILE_ELEMENTS", 3 * 40)
    np.testing.assert_array_equal(attention_pattern(ds, layer=0, head=None, sample=1), whole)
    part = attention_pattern(ds, layer=0, head=2, sample=1, query=slice(10, 30, 7))
    np.testing.assert_array_equal(part, whole.sel(head=2).isel(query=slice(10, 30, 7)))


def test_rows_asked_for_are_all_that_is_computed(rng):
    ds = recorded(rng, samples=1, layers=1, heads=1, kv_heads=1, tokens=4096, padding=(0,))
    attention_pattern(ds, layer=0, head=0, query=[0])
    tracemalloc.start()
    row = attention_pattern(ds, layer=0, head=0, query=[4000, 7])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * 2**20, "4096 x 4096 would be 64 MiB"
    assert row.sizes == {"query": 2, "key": 4096}
    assert row["query"].values.tolist() == [7, 4000]
    np.testing.assert_allclose(row.sum("key"), 1.0, rtol=1e-6)


def test_memory_is_the_result_and_tiles(rng):
    ds = recorded(rng, samples=1, layers=1, heads=1, kv_heads=1, tokens=2048, padding=(0,))
    tracemalloc.start()
    attention_pattern(ds, layer=0, head=0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**20 * (16 + 32), "16 MiB of result; float64 all at once would be 32 MiB for each temporary"


def test_shapes_and_coordinates(rng):
    ds = recorded(rng).assign_coords(layer=[5, 9])
    pattern = attention_pattern(ds, layer=9, head=3, sample=1)
    assert pattern.dims == ("query", "key")
    assert int(pattern["layer"]) == 9
    assert int(pattern["head"]) == 3
    assert pattern["key_token_text"].values.tolist() == ds["token_text"].values[1].tolist()
    assert pattern["query_token_id"].values.tolist() == ds["token_id"].values[1].tolist()
    assert pattern["query_mask"].values.tolist() == [False] * 3 + [True] * 6
    assert (pattern.values[:3] == 0).all()
    assert "note" not in pattern.attrs
    assert attention_pattern(ds, layer=[9, 5], head=[1], query=4).dims == ("layer", "head", "key")
    assert attention_pattern(ds, layer=None, head=None).dims == ("layer", "head", "query", "key")
    assert context(ds, layer=5, head=2).dims == ("token", "head_dim")
    assert context(ds, layer=5).dims == ("token", "head", "head_dim")


def test_tree_and_json_facts(rng):
    ds = recorded(rng)
    tree = xr.DataTree.from_dict({"/stats": xr.Dataset({"count": ("step", [1])}), "/attention": ds.drop_attrs()})
    tree.attrs["model"] = json.dumps(ds.attrs["model"])
    np.testing.assert_array_equal(attention_pattern(tree, layer=0, head=1), attention_pattern(ds, layer=0, head=1))


def test_learned_sinks_of_the_step(rng):
    """Stored as a weight they change while the model trains: those of the sample's step count, or the last before it."""
    ds = recorded(rng, {"softmax_type": "learnable"}).assign_coords(step=("sample", [10, 25]))
    values = rng.normal(size=(3, 2, 4))
    weights = xr.Dataset({"sinks": (("step", "layer", "head"), values)}, {"step": [0, 10, 20], "layer": [0, 1]})
    tree = xr.DataTree.from_dict({"/attention": ds, "/weights": weights})
    for sample, row in ((0, 1), (1, 2)):
        for layer in range(2):
            fixed = ds.assign_attrs(
                model={**ds.attrs["model"], "sinks": [values[row, 0].tolist(), values[row, 1].tolist()]}
            )
            got = attention_pattern(tree, layer=layer, head=None, sample=sample)
            np.testing.assert_array_equal(got, attention_pattern(fixed, layer=layer, head=None, sample=sample))
            np.testing.assert_allclose(got.sel(head=2), brute_force(fixed, layer, 2, sample)[0], atol=1e-6)
    assert (
        float(
            (
                head_statistics(tree)["entropy"]
                - head_statistics(ds.assign_attrs(model=fixed.attrs["model"]))["entropy"]
            )[1].max()
        )
        == 0
    )
    with pytest.raises(SchemaError, match="sinks of layer 0 were not recorded"):
        attention_pattern(ds, layer=0, head=0)


def test_a_subset_of_heads(rng):
    ds = recorded(rng)
    few = ds.isel(head=[1, 3], kv_head=[0, 1]).assign_coords(head=[1, 3], kv_head=[0, 1])
    for head in (1, 3):
        np.testing.assert_array_equal(
            attention_pattern(few, layer=0, head=head), attention_pattern(ds, layer=0, head=head)
        )
    with pytest.raises(InterpError, match="no head 0; found heads 1, 3"):
        attention_pattern(few, layer=0, head=0)
    one = few.isel(kv_head=[0])
    with pytest.raises(InterpError, match="no key head 1, which heads"):
        attention_pattern(one, layer=0, head=3)


def test_one_sample_picked_before(rng):
    ds = recorded(rng)
    np.testing.assert_array_equal(
        attention_pattern(ds.isel(sample=1), layer=0, head=1), attention_pattern(ds, layer=0, head=1, sample=1)
    )
    np.testing.assert_array_equal(
        attention_pattern(ds, layer=0, head=1, sample=-1), attention_pattern(ds, layer=0, head=1, sample=1)
    )


def test_missing_shards_are_masked_and_said(rng):
    ds = recorded(rng, {"window": [2, 0]})
    there = np.ones((2, 2, 9, 2), bool)
    there[0, 0, 4, 1] = False  # the key in slot 4 of heads 2 and 3
    lacking = ds.assign_coords(k_rot_present=(("sample", "layer", "token", "kv_head"), there))
    pattern = attention_pattern(lacking, layer=0, head=None)
    assert (pattern.sel(head=[2, 3], key=4) == 0).all()
    assert (
        pattern["complete"].sel(head=2).values.tolist() == [True] * 4 + [False] * 3 + [True] * 2
    )  # a window of 3 sees it
    assert pattern["complete"].sel(head=[0, 1]).all()
    assert "6 of 36 rows are not what the model did" in pattern.attrs["note"]
    exact = pattern["complete"]
    np.testing.assert_array_equal(pattern.where(exact, 0), attention_pattern(ds, layer=0, head=None).where(exact, 0))
    queries = ds.assign_coords(
        q_rot_present=(("sample", "layer", "token"), np.arange(9)[None, None] + np.zeros((2, 2, 1)) != 6)
    )
    assert attention_pattern(queries, layer=0, head=0)["complete"].values.tolist() == [True] * 6 + [False] + [True] * 2


def test_tokens_that_were_not_recorded(rng):
    ds = recorded(rng, {"window": [2, 0]})
    few = ds.isel(token=[0, 1, 2, 5, 6, 7, 8])
    pattern = attention_pattern(few, layer=0, head=0)
    assert pattern["query"].values.tolist() == [0, 1, 2, 5, 6, 7, 8]
    assert pattern["complete"].values.tolist() == [True, True, True, False, False, True, True]
    whole = attention_pattern(ds, layer=0, head=0)
    for slot in (0, 1, 2, 7, 8):
        np.testing.assert_array_equal(pattern.sel(query=slot), whole.sel(query=slot, key=pattern["key"]))
    late = attention_pattern(recorded(rng).isel(token=slice(4, None)), layer=0, head=0)
    assert not late["complete"].any(), "a causal row needs the first key"


def test_what_a_lost_rank_had_is_not_padding(rng):
    """The reader has -1 and False where no rank knew a token: such a row must not count as exact."""
    ds = recorded(rng, padding=(0, 0))
    lost = [2, 3]
    there = np.ones((2, 2, 9), bool)
    there[:, :, lost] = False
    ds["token_id"].values[:, lost], ds["mask"].values[:, lost] = -1, False
    ds = ds.assign_coords({f"{p}_present": (("sample", "layer", "token"), there) for p in ("q_rot", "k_rot")})
    pattern = attention_pattern(ds, layer=0, head=0)
    assert pattern["complete"].values.tolist() == [True] * 2 + [False] * 7
    assert "7 of 9 rows" in pattern.attrs["note"]


def test_a_shorter_sample_ends(rng):
    ds = recorded(rng, padding=(0, 0))
    there = np.arange(9)[None, None] + np.zeros((2, 2, 1)) < np.array([9, 6])[:, None, None]
    ds["token_id"].values[1, 6:], ds["mask"].values[1, 6:] = -1, False
    ds = ds.assign_coords({f"{p}_present": (("sample", "layer", "token"), there) for p in ("q_rot", "k_rot")})
    pattern = attention_pattern(ds, layer=0, head=0, sample=1)
    assert "note" not in pattern.attrs
    assert (pattern.values[6:] == 0).all()
    np.testing.assert_array_equal(
        pattern[:6, :6], attention_pattern(ds.isel(token=slice(6)), layer=0, head=0, sample=1)
    )


def test_real_nan_stays_where_it_is_seen(rng):
    ds = recorded(rng, padding=(0, 0))
    ds["k_rot"].values[0, 0, 5, 0, 2] = np.nan
    pattern = attention_pattern(ds, layer=0, head=0)
    assert np.isnan(pattern.values[5:]).any(axis=1).all()
    assert not np.isnan(pattern.values[:5]).any()
    assert not np.isnan(attention_pattern(ds, layer=0, head=2).values).any()


def test_check_context_tells_wrong_facts(rng):
    ds = recorded(rng, {"window": [3, 0]})
    z = xr.concat([context(ds, layer=None, sample=sample) for sample in range(2)], "sample").transpose(
        "sample", "layer", "token", "head", ...
    )
    ds["z"] = z.drop_vars(["complete", "mask"])
    for sample in range(2):
        off = check_context(ds, sample=sample)
        assert off.dims == ("layer", "head")
        assert float(off.max()) == 0.0
    wrong = ds.assign_attrs(model={**ds.attrs["model"], "window": [4, 0]})
    assert float(check_context(wrong).min()) > 1e-2


def test_what_is_asked_wrongly(rng):
    ds = recorded(rng)
    with pytest.raises(InterpError, match="no layer 7; found layers 0 to 1"):
        attention_pattern(ds, layer=7, head=0)
    with pytest.raises(InterpError, match="no head 4; found heads 0 to 3"):
        attention_pattern(ds, layer=0, head=4)
    with pytest.raises(InterpError, match="no sample 2; expected 0 to 1"):
        attention_pattern(ds, layer=0, head=0, sample=2)
    with pytest.raises(InterpError, match="no query 9; expected 0 to 8"):
        attention_pattern(ds, layer=0, head=0, query=9)
    with pytest.raises(
        SchemaError,
        match=r"no stream holds q_rot and k_rot; did you mean 'k_ro'\?; streams: 'dataset': q_rot, k_ro, v",
    ):
        attention_pattern(ds.rename(k_rot="k_ro"), layer=0, head=0)
    with pytest.raises(SchemaError, match=r"no facts of the model in attrs\['model'\]"):
        attention_pattern(ds.drop_attrs(), layer=0, head=0)
    with pytest.raises(SchemaError, match="is not JSON"):
        attention_pattern(ds.assign_attrs(model="{"), layer=0, head=0)
    with pytest.raises(SchemaError, match=r"expected run\.activations, or a Dataset"):
        attention_pattern({"q_rot": 1}, layer=0, head=0)


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"window": 4}, r"window.*expected|says nothing of layer 0"),
        ({"window": [[1, 2, 3]]}, r"expected \(left, right\)"),
        ({"sinks": [1.0, 2.0]}, "one number for each of the 4 heads"),
        ({"alibi": [1.0]}, "one number for each of the 4 heads"),
        ({"softmax_type": "learnable"}, "sinks of layer 0 were not recorded"),
        ({"softmax_type": "learnable", "sinks": [None, [0.0] * 4]}, "sinks of layer 0 were not recorded"),
        ({"num_kv_heads": 3}, "do not divide into 3"),
    ],
)
def test_facts_that_cannot_be(rng, facts, message):
    with pytest.raises(SchemaError, match=message):
        attention_pattern(recorded(rng, facts), layer=0, head=0)
