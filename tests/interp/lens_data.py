"""Activations whose lens, attribution and trajectories are worked out by hand: a tiny residual stream in float64 or float32."""

from __future__ import annotations

import json

import numpy as np
import xarray as xr

LAYERS, TOKENS, HIDDEN, HEADS, HEAD_DIM, NEURONS, VOCAB = 4, 7, 8, 2, 3, 5, 23


def stream(
    *,
    samples: int = 2,
    layers: int = LAYERS,
    tokens: int = TOKENS,
    hidden: int = HIDDEN,
    vocab: int = VOCAB,
    heads: int = HEADS,
    head_dim: int = HEAD_DIM,
    neurons: int = NEURONS,
    norm: str = "LayerNorm",
    zero_centered: bool = False,
    steps=(3,),
    pad: int = 0,
    dtype=np.float64,
    seed: int = 0,
) -> xr.DataTree:
    """A tree as ``run.activations`` gives it: streams ``full`` and ``weights``. The parts of the residual stream sum as a model's do."""
    rng = np.random.default_rng(seed)
    total = samples * len(steps)
    draw = lambda *shape: rng.standard_normal(shape)  # noqa: E731
    w = {
        "unembed": draw(vocab, hidden),
        "final_ln_weight": 1 + 0.2 * draw(hidden) - zero_centered,
        "final_ln_bias": 0.3 * draw(hidden),
        "w_o": draw(layers, heads, head_dim, hidden),
        "b_o": 0.2 * draw(layers, hidden),
        "w_out": draw(layers, neurons, hidden),
    }
    embed = draw(total, tokens, hidden)
    z, act = draw(total, layers, tokens, heads, head_dim), draw(total, layers, tokens, neurons)
    mlp_bias = 0.1 * draw(layers, hidden)
    attn = np.einsum("slthd,lhde->slte", z, w["w_o"]) + w["b_o"][:, None]
    mlp = np.einsum("sltn,lne->slte", act, w["w_out"]) + mlp_bias[:, None]
    post = embed[:, None] + np.cumsum(attn + mlp, axis=1)
    ids = rng.integers(0, vocab, (total, tokens))
    mask = np.ones((total, tokens), bool)
    mask[1::2, :pad] = False
    hid = ("sample", "layer", "token", "hidden")
    data = {
        "embed": (("sample", "token", "hidden"), embed),
        "z": (("sample", "layer", "token", "head", "head_dim"), z),
        "resid_mid": (hid, post - mlp),
        "mlp_act": (("sample", "layer", "token", "neuron"), act),
        "mlp_out": (hid, mlp),
        "resid_post": (hid, post),
    }
    facts = {
        "num_layers": layers, "hidden": hidden, "num_heads": heads, "head_dim": head_dim, "vocab": vocab, "normalization": norm,
        "eps": 1e-5, "zero_centered_gamma": zero_centered,
    }  # fmt: skip
    attrs = {"model": json.dumps(facts), "run_id": "made"}
    coords = {
        "layer": np.arange(layers), "token": np.arange(tokens), "step": ("sample", np.repeat(np.array(steps), samples)),
        "index": ("sample", np.tile(np.arange(samples), len(steps))), "dp_rank": ("sample", np.zeros(total, int)),
        "microbatch": ("sample", np.zeros(total, int)), "token_id": (("sample", "token"), ids), "mask": (("sample", "token"), mask),
        "token_text": (("sample", "token"), np.array([[f"w{i}" for i in row] for row in ids], object)),
        "prompt": ("sample", np.array([f"prompt {i}" for i in range(total)], object)),
    }  # fmt: skip
    if norm == "RMSNorm":
        del w["final_ln_bias"]
    dims = {
        "unembed": ("vocab", "hidden"), "w_o": ("layer", "head", "head_dim", "hidden"), "b_o": ("layer", "hidden"),
        "w_out": ("layer", "neuron", "hidden"),
    }  # fmt: skip
    growth = 1 + 0.1 * np.arange(len(steps))
    weights = xr.Dataset(
        {
            n: (
                ("step", *dims.get(n, ("hidden",))),
                np.stack([v * (g if n == "unembed" else 1) for g in growth]).astype(dtype),
            )
            for n, v in w.items()
        },
        coords={"step": np.array(steps), "layer": np.arange(layers)},
        attrs=attrs,
    )
    full = xr.Dataset({n: (d, v.astype(dtype)) for n, (d, v) in data.items()}, coords, {**attrs, "stream": "full"})
    return xr.DataTree.from_dict({"/": xr.Dataset(attrs=attrs), "full": full, "weights": weights}, name="activations")
