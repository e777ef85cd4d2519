"""Small recorded activations with random queries and keys, and attention by plain loops: the oracle."""

from __future__ import annotations

import math

import numpy as np
import xarray as xr

__all__ = ["KINDS", "brute_force", "recorded"]

SINKS = [0.3, -1.0, 2.0, 0.0]
KINDS = {
    "causal": {},
    "not causal": {"causal": False},
    "window": {"window": [3, 0]},
    "window of one layer": {"window": [None, [2, 0]]},
    "window, both sides": {"window": [2, 1], "causal": False},
    "window, no limit to the left": {"window": [-1, 0]},
    "sinks": {"sinks": SINKS},
    "sinks by layer": {"sinks": [None, SINKS]},
    "off by one": {"softmax_type": "off-by-one"},
    "alibi": {"alibi": True},
    "alibi slopes": {"alibi": [0.5, 0.25, 0.1, 0.0]},
    "softcap": {"softcap": 1.5},
    "scale": {"softmax_scale": 0.7},
    "all at once": {"window": [4, 0], "sinks": SINKS, "alibi": True, "softcap": 2.0, "softmax_scale": 0.5},
}
"""Facts of a model of 2 layers and 4 heads that differ from the plain ones."""


def recorded(
    rng, facts=None, *, samples=2, layers=2, tokens=9, heads=4, kv_heads=2, size=6, padding=(0, 3), dtype=np.float32
):
    """As a stream of run.activations: the second sample is padded on the left."""

    def draw(name, count):
        return (
            ("sample", "layer", "token", name, "head_dim"),
            rng.normal(size=(samples, layers, tokens, count, size)).astype(dtype),
        )

    mask = np.ones((samples, tokens), bool)
    for sample, pads in enumerate(padding[:samples]):
        mask[sample, :pads] = False
    model = {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": size, **(facts or {})}
    points = {"q_rot": draw("head", heads), "k_rot": draw("kv_head", kv_heads), "v": draw("kv_head", kv_heads)}
    ids = rng.integers(0, 4, (samples, tokens))
    texts = np.array([[f"t{number}" for number in row] for row in ids], object)
    tables = {"token_id": ids, "token_text": texts, "mask": mask}
    coords = {name: (("sample", "token"), values) for name, values in tables.items()}
    return xr.Dataset(points, {**coords, "layer": np.arange(layers), "token": np.arange(tokens)}, {"model": model})


def brute_force(ds, layer, head, sample):
    """Pattern, scores, context and share of the sink by loops over numbers, from the definition of each rule."""
    facts = ds.attrs["model"]
    heads, groups = facts["num_heads"], facts["num_kv_heads"]
    q = ds["q_rot"].values[sample, layer, :, head].astype(float)
    k = ds["k_rot"].values[sample, layer, :, head // (heads // groups)].astype(float)
    v = ds["v"].values[sample, layer, :, head // (heads // groups)].astype(float)
    real = ds["mask"].values[sample]
    window = facts.get("window")
    if window and not isinstance(window[0], int):
        window = window[layer]
    sinks = facts.get("sinks")
    if sinks and not isinstance(sinks[0], float):
        sinks = sinks[layer]
    sink = 0.0 if facts.get("softmax_type") == "off-by-one" else sinks[head] if sinks else None
    slope = {True: 2.0 ** (-2.0 * (head + 1)), None: 0.0}.get(
        facts.get("alibi") if not isinstance(facts.get("alibi"), list) else 7
    )
    slope = facts["alibi"][head] if slope is None else slope
    scale = facts.get("softmax_scale") or 1 / math.sqrt(q.shape[1])
    length = len(q)
    scores = np.full((length, length), -np.inf)
    for i in range(length):
        for j in range(length):
            if not (real[i] and real[j]) or (facts.get("causal", True) and j > i):
                continue
            if window and window[0] >= 0 and j < i - window[0]:
                continue
            if window and window[1] >= 0 and j > i + window[1]:
                continue
            score = sum(float(a) * float(b) for a, b in zip(q[i], k[j], strict=True)) * scale
            if facts.get("softcap"):
                score = facts["softcap"] * math.tanh(score / facts["softcap"])
            scores[i, j] = score - slope * abs(i - j)
    pattern, rest = np.zeros((length, length)), np.zeros(length)
    for i in range(length):
        shares = [math.exp(score) for score in scores[i]]
        extra = 0.0 if sink is None or not real[i] else math.exp(sink)
        if sum(shares) + extra > 0:
            pattern[i] = np.array(shares) / (sum(shares) + extra)
            rest[i] = extra / (sum(shares) + extra)
    return pattern, scores, pattern @ v, rest
