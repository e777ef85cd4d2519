"""Data skew: microbatches of unequal work, seen in forwards and backwards that are long together, now here and now there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from mappnb.analysis._straggler_find import Excess, Finding, Settings, relative
from mappnb.analysis._straggler_pieces import pieces
from mappnb.analysis._straggler_source import Source
from mappnb.analysis._straggler_tests import noise_of
from mappnb.layout import Layout

__all__ = ["find_skew", "signature"]

Array = np.ndarray[Any, Any]
CORRELATION, VARIATION = 0.95, 0.05
"""Within a rank, forward and backward of a microbatch must correlate so well, and the forwards vary so much, to be called data skew.
SE, a job with unequal lengths, has 0.99 and 0.22; AR, a slow GPU, 0.85 to 0.92 and 0.02 (pooled over its ranks AR would have 0.999)."""
LEAST_PAIRS = 8
"""Microbatches of a rank, below which its correlation says nothing."""
SHARE = 0.5
"""Share of the ranks that must show it: the data are everybody's."""
BEGINS = 5.0
"""Standard errors by which steps must differ from those before, in log cost, for the data to be called unequal from there on only."""
LEAST_SIDE = 3
"""Steps on either side of where that may begin."""
PART = 0.25
"""A step is one with unequal data if its longest rank is so much of the median ahead of the mean: heavy tails make some steps mild."""
EVENTS = 300_000
"""Events that are read at most."""
RANKS = 128
"""Ranks that are read at most: one of each data-parallel replica and stage, as far as it goes."""
HINT = 0.5
"""Steps of a rank must vary by this share of what microbatches that vary by ``VARIATION`` would make of them, or events are not read."""


def signature(events: xr.Dataset) -> pd.DataFrame:
    """Return how forwards and backwards of the microbatches of each rank and stage go together.

    Parameters
    ----------
    events : Dataset, dims (event,)
        Some steps.

    Returns
    -------
    DataFrame
        Index (rank, stage): ``correlation`` of forward and backward over microbatches, what a step has in common taken out;
        ``variation``, standard deviation of forwards over their mean; ``pairs``.
    """
    cut = pieces(events)
    cut = cut[(cut["microbatch"] >= 0) & (cut["direction"] != "")]
    keys = ["rank", "stage", "step", "microbatch"]
    both = cut.groupby([*keys, "direction"])["seconds"].sum().unstack("direction")
    if not {"forward", "backward"} <= set(both.columns):
        return pd.DataFrame(columns=["correlation", "variation", "pairs"])
    both = both.dropna()
    step = ["rank", "stage", "step"]
    several = both.groupby(level=step)["forward"].transform("size") > 1
    inner = both - both.groupby(level=step).transform("mean").where(
        several, both.groupby(level=["rank", "stage"]).transform("mean")
    )
    f, b, where = inner["forward"], inner["backward"], ["rank", "stage"]
    square = {"ff": f * f, "bb": b * b, "fb": f * b}
    sums = pd.DataFrame(square).groupby(level=where).sum()
    mean, pairs = both["forward"].groupby(level=where).mean(), both["forward"].groupby(level=where).size()
    with np.errstate(divide="ignore", invalid="ignore"):
        correlation = pd.Series(sums["fb"] / np.sqrt(sums["ff"] * sums["bb"]), dtype=float)
    return pd.DataFrame({"correlation": correlation, "variation": np.sqrt(sums["ff"] / pairs) / mean, "pairs": pairs})


def find_skew(source: Source, excess: Excess, work: xr.Dataset, layout: Layout, settings: Settings) -> list[Finding]:
    """Return the job as a finding if the lengths of its data make ranks wait for one another.

    Parameters
    ----------
    source : Source
        Events.
    excess : Excess
        Excess of all ranks.
    work : Dataset
        Self-time table of the judged steps.
    layout : Layout
        Tells the replicas.
    settings : Settings
        Thresholds.
    """
    if "compute" not in excess.seconds or not _hint(excess, work):
        return []
    ranks = _sample(excess, layout)
    several = _varying(excess)
    steps = source.within(several, EVENTS, ranks)
    found = signature(source.events(steps, ranks))
    found = found[found["pairs"] >= LEAST_PAIRS]
    if not len(found):
        return []
    skewed = (found["correlation"] >= CORRELATION) & (found["variation"] >= VARIATION)
    if skewed.mean() < SHARE:
        return []
    return _job(excess, found[skewed], len(found), settings)


def _hint(excess: Excess, work: xr.Dataset) -> bool:
    """Return whether ranks vary from step to step by as much as unequal microbatches would make them."""
    series = relative(excess, "compute")
    if not np.isfinite(series).any():
        return False
    forward = work["part_kind"].values == "forward"
    spans = work["count"].values[:, :, forward].max(initial=1)
    wide = np.median(_std(series, 0)[np.isfinite(series).any(0)])
    return bool(max(noise_of(series, excess.table.role).step, wide) >= HINT * VARIATION / np.sqrt(spans))


def _varying(excess: Excess) -> Array:
    """Return the steps, from the first in which ranks differ as much as they do later."""
    spread = _spread(excess)
    return (
        np.arange(int(np.argmax(spread >= np.median(spread) / 2)), len(spread))
        if len(spread)
        else np.empty(0, np.int64)
    )


def _spread(excess: Excess) -> Array:
    """Return the standard deviation over ranks of the relative excess of each step."""
    return _std(relative(excess, "compute"), 1)


def _std(values: Array, axis: int) -> Array:
    """Return the standard deviation along an axis, NaN left out; 0 where nothing is left."""
    there = np.isfinite(values)
    n = np.maximum(there.sum(axis, keepdims=True), 1)
    values = np.where(there, values, 0.0)
    apart = np.where(there, values - values.sum(axis, keepdims=True) / n, 0.0)
    return np.asarray(np.sqrt((apart**2).sum(axis) / n.squeeze(axis)))


def _sample(excess: Excess, layout: Layout) -> list[int]:
    ranks = excess.table.rank
    if int(ranks.max()) < layout.world_size:
        first = [int(r) for r in ranks if (c := layout.coords(int(r)))["tp"] == 0 and c["cp"] == 0]
        ranks = np.array(first or ranks.tolist())
    return [int(r) for r in ranks[:: -(-len(ranks) // RANKS)]]


def _unequal(cost: Array) -> Array:
    """Return the steps with unequal data: from where they begin to be so, if they do within the run, but for the mildest."""
    value = np.log(np.maximum(cost, 1e-9))
    best, begin = BEGINS, 0
    for k in range(LEAST_SIDE, len(value) - LEAST_SIDE + 1):
        before, after = value[:k], value[k:]
        error = np.hypot(before.std(), after.std()) / np.sqrt(min(k, len(value) - k))
        t = float(after.mean() - before.mean()) / max(error, 1e-9)
        if t > best:
            best, begin = t, k
    late = np.arange(len(cost)) >= begin
    return np.flatnonzero(late & (cost >= PART * np.median(cost[late])))


def _job(excess: Excess, found: pd.DataFrame, number: int, settings: Settings) -> list[Finding]:
    """Return the finding: what the longest rank of a stage takes more than the mean of its stage."""
    table, compute = excess.table, excess.table.seconds["compute"]
    cost = np.zeros(len(table.step))
    for role in np.unique(table.role).tolist():
        mine = np.flatnonzero((table.role == role) & np.isfinite(compute).any(0))
        if len(mine) > 1:
            there = np.isfinite(compute[:, mine])
            seconds = np.where(there, compute[:, mine], 0.0)
            cost = np.maximum(cost, seconds.max(1) - seconds.sum(1) / np.maximum(there.sum(1), 1))
    active = _unequal(cost)
    effect = float(np.median(cost[active])) if len(active) else 0.0
    if effect < settings.least_fraction * float(np.median(table.step_s)):
        return []
    longest = np.nan_to_num(compute).argmax(1)
    places = len(np.unique(longest[active]))
    if places < 2 and len(active) >= LEAST_PAIRS:
        return []
    f = Finding("job", "job", list(range(len(table.rank))), "culprit", "data_skew", effect, active=active)
    f.evidence = [
        f"forward and backward of a microbatch are long together within a rank (correlation {found['correlation'].median():.3f}, "
        f"coefficient of variation {found['variation'].median():.2f}, {len(found)} of {number} ranks and stages looked at)",
        f"the longest rank is now one, now another ({places} in {len(active)} steps) and takes {effect:.3g} s/step more than the mean",
    ]
    return [f]
