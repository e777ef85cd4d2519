"""What changes in activation statistics over training, and what stands out: spikes, dead units, NaN and infinities."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from mappnb.activation_points import POINTS
from mappnb.activations import streams_of
from mappnb.errors import InterpError, SchemaError, did_you_mean

__all__ = ["drift", "find_nan", "outliers", "statistics_of"]

Array = np.ndarray[Any, Any]
AGAINST = ("first", "previous")
SCORE = 6.0
"""Robust deviations from which something is told: what is normal stays below with room, by a factor of 8 over layers, 2.8 over steps."""
_FLOORS = {"layer": 0.5, "step": 0.25}
"""Least deviation that counts as one, in powers of two: layers that are all alike would make any difference great."""
_HEAVY = 2.0
"""Times that for the kurtosis, which heavy tails alone move by a factor of several."""
_BACK = 5
"""Steps before, whose median a step is compared with."""
_WATCHED = {"absmax": "largest size", "std": "standard deviation", "kurtosis": "kurtosis"}
DEAD = 0.99
"""Fraction of exact zeros from which a point counts as dead, if it was below 0.9 at first."""
COLUMNS = ("step", "layer", "point", "reason", "statistic", "value", "expected", "score", "text")


def statistics_of(activations: xr.Dataset | xr.DataTree) -> xr.Dataset:
    """Return the statistics in a tree, or check a dataset of them: dims (step, point, layer).

    Raises
    ------
    SchemaError
        If there are none; the message says what to record.
    """
    streams = streams_of(activations)
    fit = [ds for ds in streams.values() if {"step", "point", "layer"} <= set(ds.dims) and "count" in ds]
    if not fit:
        raise SchemaError(
            f"activations: no statistics (streams: {', '.join(streams) or 'none'}); record with activations='default', or "
            "mappnb.Capture('all', mode='stats', every=10)"
        )
    return max(fit, key=lambda ds: int(np.prod([ds.sizes[d] for d in ("step", "point", "layer")])))


def drift(stats: xr.Dataset | xr.DataTree, *, against: str = "first") -> xr.Dataset:
    """Return how far the distribution of each point has moved.

    Parameters
    ----------
    stats : Dataset, dims (step, point, layer), or DataTree
        ``run.activations`` or its stream of statistics.
    against : {"first", "previous"}
        Compare each step with the first that has the point, or with the one recorded before it.

    Returns
    -------
    Dataset, dims (step, point, layer)
        ``mean_shift``: difference of means over the root of the mean of both variances; ``log_variance_ratio``: ln(var / var then);
        ``js``: Jensen-Shannon divergence in bit, 0 to 1, of the histograms of powers of two. NaN where there is nothing.

    Raises
    ------
    SchemaError
        If there are no statistics.
    InterpError
        For another ``against``.

    Notes
    -----
    Lin 1991, "Divergence measures based on the Shannon entropy". Histograms tell sizes, not signs, and leave zeros out.
    """
    if against not in AGAINST:
        raise InterpError(f"against is {against!r}; expected first or previous{did_you_mean(against, AGAINST)}")
    data = statistics_of(stats).transpose("step", "point", "layer", ...)
    there = np.asarray(data["count"].values) > 0
    then = _then(there, against)
    mean, var = (np.asarray(data[n].values, np.float64) for n in ("mean", "var"))
    with np.errstate(invalid="ignore", divide="ignore"):
        shift = (mean - _at(mean, then)) / np.sqrt((var + _at(var, then)) / 2)
        ratio = np.log(var / _at(var, then))
    dims, bad = ("step", "point", "layer"), ~there | (then < 0)
    found = {"mean_shift": np.where(mean == _at(mean, then), 0.0, shift), "log_variance_ratio": ratio}
    if "histogram" in data:
        found["js"] = _jensen_shannon(np.asarray(data["histogram"].values, np.float64), then)
    out = {name: (dims, np.where(bad, np.nan, values)) for name, values in found.items()}
    coords = {name: data[name] for name in ("step", "point", "layer") if name in data.coords}
    return xr.Dataset(out, coords, {"against": against})


def outliers(stats: xr.Dataset | xr.DataTree, *, score: float = SCORE) -> pd.DataFrame:
    """Return what stands out in statistics: NaN and infinities first, then the largest score.

    Parameters
    ----------
    stats : Dataset, dims (step, point, layer), or DataTree
        ``run.activations`` or its stream of statistics.
    score : float
        Robust deviations from which something is told.

    Returns
    -------
    DataFrame
        ``step, layer, point, reason`` (nan, inf, dead, constant, over_steps, over_layers), ``statistic, value, expected, score, text``.
        ``attrs``: a dict of how many there are by reason.

    Raises
    ------
    SchemaError
        If there are no statistics.

    Notes
    -----
    absmax, std and kurtosis as powers of two. ``over_steps``: distance from the median of the five steps recorded before, in
    deviations of such distances (1.4826 times their median size, at least 1/4; of kurtosis 1/2). ``over_layers``: distance from the
    median of the layers of the same step and point, in deviations over the layers (at least 1/2; of kurtosis 1; from 4 layers on).
    ``dead``: nine in ten or fewer were zero at first, 99 of 100 or more are now. Single values of very heavy tails may be told too.
    """
    data = statistics_of(stats).transpose("step", "point", "layer", ...)
    rows = [*_not_finite(data), *_dead(data)]
    for name in _WATCHED:
        if name in data:
            rows += _over(data, name, score)
    frame = pd.DataFrame(rows, columns=[*COLUMNS]).astype({"step": int, "layer": int})
    first = frame["reason"].isin(["nan", "inf"])
    frame = frame.assign(rank=np.where(first, 0, 1)).sort_values(
        ["rank", "score", "step"], ascending=[True, False, True], kind="stable"
    )
    frame = frame.drop(columns="rank").reset_index(drop=True)
    frame.attrs = {str(k): int(v) for k, v in frame["reason"].value_counts().items()}
    return frame


def find_nan(stats: xr.Dataset | xr.DataTree) -> pd.DataFrame:
    """Return where NaN or infinities are, in the order in which they came up: the first row is where they came from.

    Parameters
    ----------
    stats : Dataset, dims (step, point, layer), or DataTree
        ``run.activations`` or its stream of statistics.

    Returns
    -------
    DataFrame
        ``step, layer, point, num_nan, num_inf, fraction``; by step, and in it by the order of the forward pass, then of the backward
        pass for gradients. Empty: none.

    Raises
    ------
    SchemaError
        If there are no statistics.
    """
    data = statistics_of(stats).transpose("step", "point", "layer", ...)
    nan, inf, count = (np.asarray(data[n].values, np.float64) for n in ("num_nan", "num_inf", "count"))
    steps, points, layers = (data[d].values for d in ("step", "point", "layer"))
    rows = []
    for s, p, k in zip(*np.nonzero(np.nan_to_num(nan + inf) > 0), strict=True):
        bad = nan[s, p, k] + inf[s, p, k]
        rows.append(
            (
                int(steps[s]),
                int(layers[k]),
                str(points[p]),
                int(nan[s, p, k]),
                int(inf[s, p, k]),
                bad / (bad + count[s, p, k]),
            )
        )
    rows.sort(key=lambda r: (r[0], _model_order(r[2], r[1])))
    return pd.DataFrame(rows, columns=["step", "layer", "point", "num_nan", "num_inf", "fraction"])


def _model_order(point: str, layer: int) -> tuple[int, int, int]:
    """When a pass through the model reaches a point: forward, then gradients backward."""
    grad = point.endswith("_grad")
    name = point.removesuffix("_grad")
    place = [*POINTS].index(name) if name in POINTS else len(POINTS)
    depth = layer if layer >= 0 else (-1 if name == "embed" else 2**31)
    return (1, -depth, -place) if grad else (0, depth, place)


def _then(there: Array, against: str) -> Array:
    """Step to compare each with, dims (step, point, layer): a place, -1 where there is none."""
    number = np.arange(len(there))[:, None, None]
    if against == "first":
        first = np.where(there.any(0), there.argmax(0), -1)
        return np.broadcast_to(first, there.shape)
    seen = np.maximum.accumulate(np.where(there, number, -1), axis=0)
    return np.concatenate([np.full((1, *there.shape[1:]), -1), seen[:-1]])


def _at(values: Array, then: Array) -> Array:
    return np.take_along_axis(values, np.maximum(then, 0), 0)


def _jensen_shannon(counts: Array, then: Array) -> Array:
    """Divergence in bit of each histogram from an earlier one, dims (step, point, layer)."""
    with np.errstate(invalid="ignore", divide="ignore"):
        share = counts / counts.sum(-1, keepdims=True)
        other = np.take_along_axis(share, np.maximum(then, 0)[..., None], 0)
        middle = (share + other) / 2
        parts = [np.where(x > 0, x * np.log2(x / middle), 0.0).sum(-1) for x in (share, other)]
    return np.where(np.isnan(share).any(-1) | np.isnan(other).any(-1), np.nan, np.clip((parts[0] + parts[1]) / 2, 0, 1))


def _row(data: xr.Dataset, at: tuple[int, int, int], reason: str, statistic: str, **rest: Any) -> dict[str, Any]:
    step, point, layer = (data[d].values[i] for d, i in zip(("step", "point", "layer"), at, strict=True))
    where = f"{point}" if layer < 0 else f"layer {layer} {point}"
    row = {
        "step": int(step),
        "layer": int(layer),
        "point": str(point),
        "reason": reason,
        "statistic": statistic,
        **rest,
    }
    row["text"] = f"step {step}, {where}: {row['text']}"
    return row


def _not_finite(data: xr.Dataset) -> Iterator[dict[str, Any]]:
    for name, reason, word in (("num_nan", "nan", "NaN"), ("num_inf", "inf", "infinite values")):
        values = np.nan_to_num(np.asarray(data[name].values, np.float64))
        for at in zip(*np.nonzero(values > 0), strict=True):
            count = float(values[at])
            rest = {"value": count, "expected": 0.0, "score": np.inf, "text": f"{int(count):,} {word}"}
            yield _row(data, at, reason, name, **rest)


def _dead(data: xr.Dataset) -> Iterator[dict[str, Any]]:
    there = np.asarray(data["count"].values) > 0
    zero = np.asarray(data["sparsity"].values, np.float64)
    then = _then(there, "first")
    begun = _at(zero, then)
    for at in zip(*np.nonzero(there & (zero >= DEAD) & (begun < 0.9)), strict=True):
        text = f"{zero[at]:.2%} of the values are zero, {begun[at]:.1%} were at first"
        score = -np.log2(max(1 - zero[at], 2.0**-40))
        yield _row(
            data,
            at,
            "dead",
            "sparsity",
            value=float(zero[at]),
            expected=float(begun[at]),
            score=float(score),
            text=text,
        )
    std = np.asarray(data["std"].values, np.float64)
    for at in zip(*np.nonzero(there & (std == 0) & (zero < 1) & (data["count"].values > 1)), strict=True):
        yield _row(data, at, "constant", "std", value=0.0, expected=np.nan, score=40.0, text="all values are the same")


def _over(data: xr.Dataset, name: str, least: float) -> Iterator[dict[str, Any]]:
    """Yield what is far from the steps before, and from the other layers."""
    values = np.asarray(data[name].values, np.float64)
    with np.errstate(invalid="ignore", divide="ignore"):
        logs = np.where((values > 0) & (np.asarray(data["count"].values) > 0), np.log2(values), np.nan)
    wide = _HEAVY if name == "kurtosis" else 1.0
    for reason, middle, score in (("over_steps", *_by_step(logs, wide)), ("over_layers", *_by_layer(logs, wide))):
        for at in zip(*np.nonzero(np.nan_to_num(score) >= least), strict=True):
            expected = float(2.0 ** middle[at])
            where = "the steps before" if reason == "over_steps" else "the other layers"
            text = f"{_WATCHED[name]} {values[at]:.3g}, {expected:.3g} in {where}"
            rest = {"value": float(values[at]), "expected": expected, "score": float(score[at]), "text": text}
            yield _row(data, at, reason, name, **rest)


def _by_step(logs: Array, wide: float) -> tuple[Array, Array]:
    """Median of the steps before, and the distance from it in deviations, dims (step, point, layer)."""
    middle = np.full(logs.shape, np.nan)
    for s in range(1, len(logs)):
        middle[s] = _nanmedian(logs[max(0, s - _BACK) : s], 0)
    away = logs - middle
    deviation = np.maximum(1.4826 * _nanmedian(np.abs(away), 0), wide * _FLOORS["step"])
    return middle, np.abs(away) / deviation


def _by_layer(logs: Array, wide: float) -> tuple[Array, Array]:
    middle = np.broadcast_to(_nanmedian(logs, 2)[:, :, None], logs.shape)
    away = np.abs(logs - middle)
    deviation = np.maximum(1.4826 * _nanmedian(away, 2)[:, :, None], wide * _FLOORS["layer"])
    enough = (~np.isnan(logs)).sum(2, keepdims=True) >= 4
    return middle, np.where(enough, away / deviation, np.nan)


def _nanmedian(values: Array, axis: int) -> Array:
    """Median without NaN; NaN where there is nothing else, without a warning."""
    median: Any = np.ma.median
    return np.asarray(np.ma.filled(median(np.ma.masked_invalid(values), axis=axis), np.nan), np.float64)
