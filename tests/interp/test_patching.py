"""Activation patching: against plain torch hooks, and on circuits whose heads are known."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

from mappnb.errors import InterpError
from mappnb.interp import Model, activation_patching

torch = pytest.importorskip("torch", reason="needs torch and megatron-core")
pytest.importorskip("megatron.core", reason="needs torch and megatron-core")

from interp.live_models import OTHER, PROMPT, llama  # noqa: E402


@pytest.fixture(scope="module")
def made():
    return llama()


def by_hand(made, clean, corrupted, module, place):
    """Metric of the corrupted run with one module's output at one place taken from the clean run, by torch's own hooks."""
    kept = []
    hook = module.register_forward_hook(lambda m, args, out: kept.append(out.clone()))
    with torch.no_grad():
        made(torch.tensor([list(clean)]))
    hook.remove()

    def put(m, args, out):
        out = out.clone()
        out[place] = kept[0][place]
        return out

    hook = module.register_forward_hook(put)
    with torch.no_grad():
        logits = made(torch.tensor([list(corrupted)]))[0, -1]
    hook.remove()
    return float(logits[97] - logits[98])


@pytest.mark.parametrize(
    ("point", "module"),
    [
        ("resid_post", lambda layer: layer),
        ("attn_out", lambda layer: layer.self_attn.o_proj),
        ("mlp_out", lambda layer: layer.mlp.down_proj),
    ],
)
def test_it_is_what_hooks_give(made, point, module):
    found = activation_patching(Model(made, "bytes"), PROMPT, OTHER, point=point, metric=("a", "b"), batch_size=7)
    assert found.dims == ("layer", "token")
    assert found.shape == (3, 11)
    wanted = [
        [by_hand(made, PROMPT.encode(), OTHER.encode(), module(layer), (slice(None), t)) for t in range(11)]
        for layer in made.model.layers
    ]
    np.testing.assert_allclose(found.values, wanted, atol=2e-5)
    same = [t for t in range(11) if PROMPT[: t + 1] == OTHER[: t + 1]]
    np.testing.assert_allclose(found.values[:, same], found.attrs["corrupted"], atol=2e-5)
    assert found["clean_text"].values.tolist() == list(PROMPT)


def test_single_heads_and_all_tokens(made):
    model = Model(made, "bytes")
    found = activation_patching(
        model, PROMPT, OTHER, point="z", metric=("a", "b"), heads="each", layers=2, tokens="all"
    )
    assert found.dims == ("layer", "token", "head")
    assert found.shape == (1, 1, 4)
    projection = made.model.layers[2].self_attn.o_proj
    kept = []
    for head in range(4):
        hooks = [projection.register_forward_pre_hook(lambda m, args: kept.append(args[0].clone()))]
        with torch.no_grad():
            made(torch.tensor([list(PROMPT.encode())]))
        hooks[0].remove()
        part = slice(head * 8, head * 8 + 8)

        def put(m, args, part=part):
            z = args[0].clone()
            z[..., part] = kept[-1][..., part]
            return (z,)

        hook = projection.register_forward_pre_hook(put)
        with torch.no_grad():
            logits = made(torch.tensor([list(OTHER.encode())]))[0, -1]
        hook.remove()
        assert found.values[0, 0, head] == pytest.approx(float(logits[97] - logits[98]), abs=2e-5)
    whole = activation_patching(model, PROMPT, OTHER, metric=("a", "b"), layers=[2], tokens="all", normalize=True)
    assert whole.values[0, 0] == pytest.approx(1.0, abs=1e-3), "the last layer's whole stream is the answer"


def test_it_finds_the_heads_of_a_circuit():
    """Head 0.0 writes the token before, head 1.0 finds it: only they matter, and where they should."""
    from mappnb.testing.circuit_megatron import megatron_circuit
    from mappnb.testing.induction import induction_circuit, repeated_tokens

    clean = repeated_tokens(6)[0][:-1]
    corrupted = clean.copy()
    answer = int(repeated_tokens(6)[0][-1])
    last = int(np.flatnonzero(clean == answer)[0])
    corrupted[[last - 1, last]] = corrupted[[last, last - 1]]  # another token follows the one that repeats
    circuit = induction_circuit(num_heads=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with megatron_circuit(circuit) as loaded:
            found = activation_patching(
                Model(loaded.chunks), clean, corrupted, point="z", metric=answer, heads="each", normalize=True
            )
    assert found.attrs["clean"] > found.attrs["corrupted"]
    assert found.dtype == np.float64
    best = {
        dim: int(found[dim][i])
        for dim, i in zip(found.dims, np.unravel_index(found.values.argmax(), found.shape), strict=True)
    }
    assert best == {"layer": 1, "token": len(clean) - 1, "head": 0}
    assert float(found.max()) == pytest.approx(1.0, abs=1e-6)
    assert np.abs(found.sel(head=1)).max() < 1e-9, "the idle heads do nothing"


def test_mistakes_are_told(made):
    model = Model(made, "bytes")
    for options, words in [
        ({"corrupted": "short"}, "clean has 11 tokens .*, corrupted 5 .*: patching needs prompts of equal length"),
        ({"heads": 1}, r"heads: point 'resid_post' has dims .*, no heads; try 'z'"),
        ({"point": "unembed"}, "weights cannot be patched"),
        ({"layers": [7]}, r"layers: \[7\]; expected some of 0 to 2"),
        ({"tokens": []}, r"tokens: \[\]; expected some of 0 to 10"),
        ({"metric": ("a", "b", "c")}, "metric: 3 tokens"),
    ]:
        arguments = {"clean": PROMPT, "corrupted": OTHER, "metric": ("a", "b"), **options}
        with pytest.raises(InterpError, match=words):
            activation_patching(model, arguments.pop("clean"), arguments.pop("corrupted"), **arguments)
