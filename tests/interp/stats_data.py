"""Statistics of activations as a run gives them: a training that goes well, and faults to put into it."""

from __future__ import annotations

import numpy as np
import xarray as xr

from mappnb.activation_stats import BIN_EXPONENTS, NUM_BINS, STATS, describe, tensor_stats

POINTS = ("embed", "resid_mid", "mlp_act", "mlp_out", "resid_post", "logits")
STEPS, LAYERS, SIZE = tuple(range(0, 200, 10)), 8, 3000


def values_of(point, layer, step, rng):
    """What a healthy model has there: sizes that grow with depth and slowly with training; a ReLU with half zeros."""
    scale = {"embed": 0.5, "logits": 3.0}.get(point, 1.0 + 0.4 * max(layer, 0)) * (1 + step / 400)
    x = rng.standard_normal(SIZE) * scale
    if point == "mlp_out":
        x = rng.standard_t(10, SIZE) * scale
    return np.maximum(x, 0) if point == "mlp_act" else x


def statistics(faults=None, *, seed=0, steps=STEPS, layers=LAYERS) -> xr.Dataset:
    """A stream of statistics, dims (step, point, layer). ``faults``: (step, point, layer) -> function of the values."""
    rng, faults = np.random.default_rng(seed), faults or {}
    numbers = [-1, *range(layers)]
    shape = (len(steps), len(POINTS), len(numbers))
    found = {n: np.full(shape, np.nan) for n in STATS}
    for n in ("count", "num_nan", "num_inf"):
        found[n][:] = 0
    histogram = np.zeros((*shape, NUM_BINS), np.int64)
    for s, step in enumerate(steps):
        for p, point in enumerate(POINTS):
            for k, layer in enumerate(numbers):
                if (layer < 0) != (point in ("embed", "logits")):
                    continue
                x = values_of(point, layer, step, rng)
                for (at, where, depth), change in faults.items():
                    if (where, depth) == (point, layer) and at(step):
                        x = change(x)
                fields, bins = tensor_stats(x)
                for name, value in describe(fields).items():
                    found[name][s, p, k] = value
                histogram[s, p, k] = bins
    dims = ("step", "point", "layer")
    data = {n: (dims, v) for n, v in found.items()} | {"histogram": ((*dims, "bin"), histogram)}
    coords = {"step": list(steps), "point": np.array(POINTS, object), "layer": numbers, "bin": BIN_EXPONENTS}
    return xr.Dataset(data, coords, {"stream": "stats", "run_id": "made"})
