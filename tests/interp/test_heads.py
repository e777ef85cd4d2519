"""What heads do: against loops, the twin inside the job, and circuits with known heads."""

from __future__ import annotations

import importlib.util
import math

import numpy as np
import pytest
import xarray as xr
from interp.attention_cases import KINDS, brute_force, recorded

from mappnb.capture.activations.head_stats import STATISTICS
from mappnb.errors import CaptureError, InterpError
from mappnb.interp import _attention_math, find_heads, head_statistics
from mappnb.testing.induction import induction_circuit, repeated_tokens, single_head_circuit

needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")


def by_loops(ds, layer, head, sample):
    """Each statistic from its definition, one query at a time."""
    pattern, _, _, rest = brute_force(ds, layer, head, sample)
    ids, real = ds["token_id"].values[sample], ds["mask"].values[sample]
    first = int(np.argmax(real))
    found = {name: [] for name in STATISTICS}
    for i in range(len(ids)):
        if not real[i]:
            continue
        shares = [*pattern[i], rest[i]]
        found["entropy"].append(-sum(p * math.log(p) for p in shares if p > 0))
        if i > first:
            found["bos_mass"].append(pattern[i, first])
            found["previous_token"].append(pattern[i, i - 1])
        for offset in range(5):
            if i - offset >= first:
                found[f"diagonal_{offset}"].append(pattern[i, i - offset])
        earlier = [j for j in range(i) if real[j] and ids[j] == ids[i]]
        if earlier:
            found["duplicate_token"].append(sum(pattern[i, j] for j in earlier))
            found["induction"].append(sum(pattern[i, j + 1] for j in earlier))
    return {name: (np.mean(values) if values else np.nan) for name, values in found.items()}, {
        k: len(v) for k, v in found.items()
    }


@pytest.mark.parametrize("kind", ["causal", "window", "sinks", "not causal", "all at once"])
def test_statistics_equal_the_loops(rng, kind, monkeypatch):
    monkeypatch.setattr(_attention_math, "_TILE_ELEMENTS", 4 * 9)
    ds = recorded(rng, KINDS[kind], dtype=np.float64)
    stats = head_statistics(ds)
    assert stats["entropy"].dims == ("sample", "layer", "head")
    for sample in range(2):
        for layer in range(2):
            for head in range(4):
                wanted, counts = by_loops(ds, layer, head, sample)
                for name, value in wanted.items():
                    one = stats[name].values[sample, layer, head]
                    np.testing.assert_allclose(one, value, atol=1e-12, err_msg=name)
                    assert int(stats["queries"].sel(statistic=name)[sample, layer, head]) == counts[name], name


@needs_torch
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tile", [None, 1, 4])
def test_twin_in_the_job(rng, kind, tile):
    """Local heads of two ranks, in float64: equal to the reader's."""
    import torch

    from mappnb.capture.activations.head_stats import head_statistics as in_job

    ds = recorded(rng, KINDS[kind], dtype=np.float64)
    stats = head_statistics(ds)
    ids, mask = (torch.tensor(ds[name].values) for name in ("token_id", "mask"))
    for layer in range(2):
        for rank in range(2):
            heads, kv = slice(2 * rank, 2 * rank + 2), slice(rank, rank + 1)
            q, k = (
                torch.tensor(ds["q_rot"].values[:, layer, :, heads]),
                torch.tensor(ds["k_rot"].values[:, layer, :, kv]),
            )
            got = in_job(q, k, ids, ds.attrs["model"], layer=layer, head_start=2 * rank, mask=mask, tile=tile)
            assert list(got) == list(STATISTICS)
            for name, value in got.items():
                assert value.shape == (2, 2)
                np.testing.assert_allclose(value, stats[name].values[:, layer, heads], atol=1e-12, err_msg=name)


@needs_torch
def test_twin_in_lower_precision_and_without_tokens(rng):
    import torch

    from mappnb.capture.activations.head_stats import head_statistics as in_job

    ds = recorded(rng)
    stats = head_statistics(ds.drop_vars("token_id"))
    q, k = (torch.tensor(ds[name].values[:, 0], requires_grad=True) for name in ("q_rot", "k_rot"))
    got = in_job(q, k, None, ds.attrs["model"], mask=torch.tensor(ds["mask"].values))
    for name, value in got.items():
        assert not value.requires_grad
        np.testing.assert_allclose(value, stats[name].values[:, 0], atol=1e-6, err_msg=name)
        assert bool(value.isnan().all()) == (name in ("duplicate_token", "induction")), name
    rough = in_job(
        q.to(torch.bfloat16), k.to(torch.bfloat16), None, ds.attrs["model"], mask=torch.tensor(ds["mask"].values)
    )
    assert rough["entropy"].dtype == torch.float32
    np.testing.assert_allclose(rough["entropy"], stats["entropy"].values[:, 0], atol=3e-2)


@needs_torch
def test_context_parallel_share_is_refused():
    import torch

    from mappnb.capture.activations.head_stats import head_statistics as in_job

    with pytest.raises(CaptureError, match=r"expected the same whole sequence in all\. Under context parallelism"):
        in_job(torch.zeros(1, 4, 2, 8), torch.zeros(1, 4, 2, 8), torch.zeros(1, 8), {"head_dim": 8})
    with pytest.raises(CaptureError, match="3 heads do not divide into 2 key heads"):
        in_job(torch.zeros(1, 4, 3, 8), torch.zeros(1, 4, 2, 8), None, {"head_dim": 8})


def test_rows_that_are_not_complete_do_not_count(rng):
    ds = recorded(rng, {"window": [1, 0]}, padding=(0, 0))
    there = np.ones((2, 2, 9, 2), bool)
    there[:, :, 4, :] = False
    ds["k_rot"].values[:, :, 4] = 1e6  # what stands there must not matter
    lacking = ds.assign_coords(k_rot_present=(("sample", "layer", "token", "kv_head"), there))
    stats = head_statistics(lacking)
    assert (stats["queries"].sel(statistic="entropy") == 7).all()  # queries 4 and 5 see it
    assert (stats["entropy"] < np.log(2) + 1e-9).all()


def test_a_repeat_over_a_gap_of_tokens_is_no_induction(rng):
    """With tokens left out, the next stored token is not the next token."""
    ds = recorded(rng, samples=1, tokens=6, padding=(0,)).assign_coords(
        token_id=(("sample", "token"), [[7, 1, 2, 7, 3, 4]])
    )
    assert int(head_statistics(ds)["queries"].sel(statistic="induction")[0, 0, 0]) == 1
    few = ds.isel(token=[0, 2, 3])
    assert int(head_statistics(few)["queries"].sel(statistic="induction").max()) == 0


@pytest.mark.parametrize("kind", ["previous_token", "duplicate_token", "bos_sink"])
@pytest.mark.parametrize(("layer", "head"), [(0, 0), (1, 2), (2, 1)])
def test_detectors_find_the_compiled_head_and_no_other(kind, layer, head):
    circuit = single_head_circuit(kind, layer=layer, head=head, num_layers=3, num_heads=3)
    stats = head_statistics(circuit.run(repeated_tokens(7, copies=3)))
    statistic = {"bos_sink": "bos_mass"}.get(kind, kind)
    found = find_heads(stats, kind=statistic, limit=0.5)
    assert found[["layer", "head"]].values.tolist() == [[layer, head]]
    assert found["score"][0] == 1.0
    least = find_heads(stats, kind="entropy", top=1)
    if kind != "duplicate_token":  # whose third copy has two targets
        assert least[["layer", "head", "score"]].values.tolist() == [[layer, head, 0.0]]


def test_induction_circuit_is_found():
    stats = head_statistics(induction_circuit(num_heads=4).run(repeated_tokens(8)))
    for kind, where in (("induction", [1, 0]), ("previous_token", [0, 0])):
        found = find_heads(stats, kind=kind, limit=0.5)
        assert found[["layer", "head"]].values.tolist() == [where]
        assert found["score"][0] == 1.0
    assert find_heads(stats, kind="bos_mass", top=1)[["layer", "head"]].values.tolist() == [[1, 0]], (
        "BOS is where it rests"
    )


def test_find_heads_orders_and_averages():
    values = np.array([[[0.1, 0.9]], [[0.5, np.nan]]])
    stats = xr.Dataset({"induction": (("sample", "layer", "head"), values)}, {"layer": [3], "head": [0, 1]})
    found = find_heads(stats)
    assert found.values.tolist() == [[3, 1, 0.9, 0.9, 0.9, 1], [3, 0, 0.3, 0.1, 0.5, 2]]
    assert list(found.columns) == ["layer", "head", "score", "least", "most", "samples"]
    with pytest.raises(InterpError, match="no statistic 'inductoin'; known: induction; did you mean 'induction'"):
        find_heads(stats, kind="inductoin")
    assert find_heads(stats.isel(sample=0), top=None)["score"].tolist() == [0.9, 0.1]


def test_selection_and_coordinates(rng):
    ds = recorded(rng).assign_coords(step=("sample", [10, 20]), layer=[4, 6])
    whole = head_statistics(ds)
    part = head_statistics(ds, layer=6, head=[2, 0], sample=1)
    assert part.sizes == {"sample": 1, "layer": 1, "head": 2, "statistic": 10}
    assert part["step"].values.tolist() == [20]
    np.testing.assert_array_equal(part["entropy"], whole["entropy"].sel(layer=[6], head=[2, 0]).isel(sample=[1]))
    assert part["entropy"].attrs["units"] == "nats"
    with pytest.raises(InterpError, match="no sample 5"):
        head_statistics(ds, sample=[0, 5])
