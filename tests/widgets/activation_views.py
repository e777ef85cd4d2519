"""Data for the activation views that look like a model's: a residual stream that turns to its answer, a trace, statistics with faults."""

from __future__ import annotations

import numpy as np
import xarray as xr
from interp.lens_data import stream
from interp.stats_data import statistics

TEXT = "<s> The Eiffel Tower is in the city of Paris ,\n and the<b> big </b> one is in \u202e Tok yo ß 猫 . The end of it all is near"
WORDS = TEXT.split(" ")


def tree(*, layers: int = 12, tokens: int = 28, steps=(10, 20), samples: int = 2, pad: int = 3) -> xr.DataTree:
    """Streams ``full`` and ``weights``: late layers lean toward the token that comes next, so that the lens has something to show."""
    vocab, hidden = 60, 32
    made = stream(
        layers=layers, tokens=tokens, hidden=hidden, vocab=vocab, heads=4, head_dim=8, neurons=48, samples=samples, steps=steps,
        pad=pad, dtype=np.float32, norm="RMSNorm",
    )  # fmt: skip
    full, weights = made["full"].to_dataset(), made["weights"].to_dataset()
    rng = np.random.default_rng(3)
    unembed = weights["unembed"].values[0] / np.sqrt(hidden)
    ids = full["token_id"].values
    lean = np.linspace(0, 1, layers) ** 3
    post = np.empty(full["resid_post"].shape, np.float32)
    for s in range(len(ids)):
        walk = np.cumsum(rng.standard_normal((layers, tokens, hidden)) * 0.4, 0)
        walk += rng.standard_normal((1, 1, hidden)) * 2 + np.linspace(0, 3, tokens)[None, :, None] * unembed[3]
        after = unembed[np.roll(ids[s], -1)]
        post[s] = walk * (1 - 0.7 * lean)[:, None, None] + lean[:, None, None] * after * 4
    texts = np.array([[WORDS[i % len(WORDS)] if i < 40 else f" w{i}" for i in row] for row in ids], object)
    full = full.assign(resid_post=(full["resid_post"].dims, post))
    full = full.assign_coords(token_text=(("sample", "token"), texts))
    attrs = made.attrs
    return xr.DataTree.from_dict({"/": xr.Dataset(attrs=attrs), "full": full, "weights": weights}, name="activations")


def trace(*, layers: int = 12, seed: int = 0) -> xr.Dataset:
    """A trace as ROME's: an early site at the last token of the subject, a late one at the end."""
    words = WORDS[1:10]
    rng = np.random.default_rng(seed)
    at, token = np.arange(layers)[:, None], np.arange(len(words))[None]
    early = np.exp(-((at - 3) ** 2) / 8) * (token == 2)
    late = 1 / (1 + np.exp(-(at - 8))) * (token == len(words) - 1)
    parts = {
        "state": 0.7 * early + 0.8 * late,
        "mlp": 0.5 * early,
        "attn": 0.4 * np.exp(-((at - 8) ** 2) / 6) * (token == len(words) - 1),
    }
    effect = np.stack([v * 0.8 + 0.01 * rng.standard_normal(v.shape) for v in parts.values()])
    low = 0.05
    subject = np.isin(np.arange(len(words)), [1, 2])
    return xr.Dataset(
        {
            "probability": (("kind", "layer", "token"), effect + low),
            "indirect_effect": (("kind", "layer", "token"), effect),
            "clean": ((), 0.85),
            "corrupted": ((), low),
        },
        coords={
            "kind": np.array([*parts], object), "layer": np.arange(layers), "token": np.arange(len(words)),
            "token_text": ("token", np.array(words, object)), "token_id": ("token", np.arange(len(words))), "subject": ("token", subject),
        },
        attrs={"answer": "Paris", "answer_id": 9, "window": 5, "noise": 0.3, "samples": 10, "seed": 1},
    )  # fmt: skip


def faulty() -> xr.Dataset:
    """Statistics with a spike, a dying MLP and NaN from step 150 on."""

    def spoiled(x):
        x = x.copy()
        x[:3] = np.nan
        return x

    faults = {
        (lambda s: s == 90, "resid_post", 5): lambda x: x * 8,
        (lambda s: s >= 160, "mlp_act", 1): lambda x: np.where(np.arange(len(x)) < 5, x + 1, 0.0),
        (lambda s: s >= 150, "mlp_out", 3): spoiled,
        (lambda s: s >= 150, "resid_post", 3): spoiled,
    }
    return statistics(faults)
