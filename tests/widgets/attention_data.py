"""Made-up activations whose attention is known: previous token, first token, induction, even, diagonal, and noise."""

from __future__ import annotations

import json

import numpy as np
import xarray as xr

WORDS = [
    "<s>",
    " The",
    " cat",
    " sat",
    "\n",
    " on",
    "the",
    " mat",
    "<b>x</b>",
    "\u202eabc",
    "ß",
    " 猫",
    "\x07",
    " dog",
    "!",
    "ing",
]
KINDS = ("previous", "first", "induction", "even", "diagonal", "noise")


def kind_of(layer: int, head: int) -> str:
    """What a head does."""
    return KINDS[(layer + head) % len(KINDS)]


def activations(
    *,
    layers=range(12),
    heads: int = 12,
    kv_heads: int = 4,
    tokens: int = 128,
    samples: int = 2,
    steps=(10,),
    dim: int = 64,
    seed: int = 0,
    pad: int = 0,
    prompts=(),
) -> xr.Dataset:
    """A dataset in the shape of ``run.activations``; the first ``pad`` slots of odd samples are padding; texts come twice."""
    rng = np.random.default_rng(seed)
    layers, total = list(layers), samples * len(steps)
    ids = np.concatenate([(half := rng.integers(1, 1000, (total, tokens // 2))), half, half[:, : tokens % 2]], axis=1)
    place = rng.standard_normal((tokens + 1, dim))
    word = rng.standard_normal((1001, dim))
    q = np.zeros((total, len(layers), tokens, heads, dim), np.float32)
    k = np.zeros((total, len(layers), tokens, kv_heads, dim), np.float32)
    group = heads // kv_heads
    for s in range(total):
        for li, layer in enumerate(layers):
            before = np.concatenate([[0], ids[s, :-1]])
            keys = np.concatenate([place[:tokens, : dim // 2], word[before][:, dim // 2 :]], axis=1)
            for head in range(heads):
                kind = kind_of(layer, head)
                at = np.arange(tokens)
                wanted = {"previous": np.maximum(at - 1, 0), "first": np.zeros(tokens, int), "diagonal": at}.get(kind)
                half = dim // 2
                if wanted is not None:
                    q[s, li, :, head, :half] = place[wanted][:, :half] * 2
                elif kind == "induction":
                    q[s, li, :, head, half:] = word[ids[s]][:, half:] * 2
                elif kind == "noise":
                    q[s, li, :, head] = rng.standard_normal((tokens, dim)) * (1 + 0.2 * s)
            k[s, li] = keys[:, None, :].repeat(kv_heads, 1)
    assert group * kv_heads == heads
    mask = np.ones((total, tokens), bool)
    mask[1::2, :pad] = False
    texts = np.array([[WORDS[i % len(WORDS)] for i in row] for row in ids], object)
    texts[:, 0] = "<s>"
    prompt = np.array([prompts[s % samples] if prompts else "" for s in range(total)], object)
    facts = {
        "num_layers": max(layers) + 1, "num_heads": heads, "num_kv_heads": kv_heads, "head_dim": dim, "causal": True,
        "softmax_scale": dim**-0.5, "window": None, "softcap": None, "alibi": False, "sinks": None,
    }  # fmt: skip
    step = np.repeat(np.array(steps, np.int64), samples)
    sample = {"step": step, "index": np.tile(np.arange(samples), len(steps))}
    return xr.Dataset(
        {
            "q_rot": (("sample", "layer", "token", "head", "head_dim"), q),
            "k_rot": (("sample", "layer", "token", "kv_head", "head_dim"), k),
        },
        coords={
            "layer": layers, "token": np.arange(tokens), **{n: ("sample", v) for n, v in sample.items()}, "prompt": ("sample", prompt),
            "dp_rank": ("sample", np.zeros(total, np.int64)), "microbatch": ("sample", np.zeros(total, np.int64)),
            "token_id": (("sample", "token"), ids), "token_text": (("sample", "token"), texts), "mask": (("sample", "token"), mask),
        },
        attrs={"model": json.dumps(facts)},
    )  # fmt: skip
