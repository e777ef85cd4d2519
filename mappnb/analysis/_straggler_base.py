"""What each rank should have taken: seconds of its peers in the same step, or its own usual ones where it has no peer."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from statistics import NormalDist
from typing import Any

import numpy as np
import xarray as xr

from mappnb.analysis._straggler_tests import median_steps
from mappnb.analysis._work_parts import COMPUTE_KINDS
from mappnb.layout import Layout

__all__ = ["KINDS", "Table", "baseline", "own_baseline", "roles_of", "table_of"]

Array = np.ndarray[Any, Any]
QUARTILE = 0.25
"""Peers are summed up by their faster quarter, moved to the middle: up to three in four of them may be slow (a whole host of a stage
often is half of it), and the error is 1.36 sigma over root n against the median's 1.25."""
USUAL = 0.2
"""Without peers, the usual level of a rank is the faster fifth of its own steps, moved to the middle: it may be slow in three quarters
of them."""
HALF_TO_SIGMA = 0.39
"""For a normal law the faster half lies in the median 0.39 sigma from the faster quarter (as in :mod:`mappnb.analysis._suspects`)."""
KINDS: tuple[str, ...] = ("compute", "optimizer", "data", "checkpoint", "evaluation", "gc", "host")
"""What the excess of a rank is told apart by; compute is all phases together."""
STEADY = ("compute", "optimizer", "data")
"""Kinds that a rank either does in every step or never; of the others, none is as good as 0 s."""


@dataclass(frozen=True, slots=True)
class Table:
    """The self-time table as plain arrays.

    Attributes
    ----------
    step, rank : int array
        Labels.
    role : int array, shape (rank,)
        Ranks of equal role (the same stages) have the same number.
    host : object array, shape (rank,)
        Host, empty where unknown.
    seconds : dict of str to float array, shape (step, rank)
        By kind, s; NaN where the rank was not there or never does this.
    stages : dict of int to (int array, float array)
        Of each stage: columns of the ranks that have it, and their compute for it, dims (step, those ranks), s.
    present : bool array, shape (step, rank)
        The rank has events.
    step_s : float array, shape (step,)
        Length of each step, s.
    """

    step: Array
    rank: Array
    role: Array
    host: Array
    seconds: dict[str, Array]
    stages: dict[int, tuple[Array, Array]]
    present: Array
    step_s: Array


def table_of(work: xr.Dataset, layout: Layout) -> Table:
    """Return the self-time table (:func:`mappnb.analysis.work`) by kind.

    Parameters
    ----------
    work : Dataset, dims (step, rank, part)
        As :func:`mappnb.analysis.work` gives it.
    layout : Layout
        For :func:`roles_of`.
    """
    present = work["present"].values
    kinds, stage = work["part_kind"].values.astype(str), work["part_stage"].values
    compute = np.isin(kinds, COMPUTE_KINDS)
    stages = np.unique(stage[compute & (stage >= 0)])
    names = [k for k in KINDS if (compute.any() if k == "compute" else (kinds == k).any())]
    belongs = [compute if k == "compute" else kinds == k for k in names] + [
        compute & (stage == s) for s in stages.tolist()
    ]
    member = np.stack(belongs, 1).astype(np.float64)
    seconds = work["seconds"].values @ member  # one pass over a table of gigabytes
    count = work["count"].values.astype(np.float32) @ member.astype(np.float32)
    out, by_stage = {}, {}
    for i, kind in enumerate(names):
        there = present & (count[:, :, i] > 0) if kind in STEADY else present
        out[kind] = np.where(there, seconds[:, :, i], np.nan)
    for i, s in enumerate(stages.tolist(), len(names)):
        mine = np.flatnonzero((count[:, :, i] > 0).any(0))
        by_stage[int(s)] = mine, np.where(count[:, mine, i] > 0, seconds[:, mine, i], np.nan)
    host = work["host"].values if "host" in work.coords else np.full(work.sizes["rank"], "", object)
    step, rank, role = work["step"].values, work["rank"].values, roles_of(work, layout)
    return Table(step, rank, role, host, out, by_stage, present, work["step_s"].values)


def roles_of(work: xr.Dataset, layout: Layout) -> Array:
    """Return a number per rank, equal for ranks that work on the same stages: peers.

    Parameters
    ----------
    work : Dataset, dims (step, rank, part)
        As :func:`mappnb.analysis.work` gives it.
    layout : Layout
        Its pipeline coordinate tells ranks apart where no compute has a stage.
    """
    stage, ranks = work["part_stage"].values, work["rank"].values
    if (stage >= 0).any():
        seen: Array = np.any(work["count"].values > 0, axis=0)
        does = np.stack([seen[:, stage == s].any(1) for s in np.unique(stage[stage >= 0])], 1)
    elif len(ranks) and int(ranks.max()) < layout.world_size:
        does = np.array([[layout.coords(int(r))["pp"]] for r in ranks])
    else:
        return np.zeros(len(ranks), np.int64)
    return np.unique(does, axis=0, return_inverse=True)[1].ravel()


@cache
def _scores(n: int) -> tuple[float, ...]:
    """Return the mean, in sigma, of each of n normal numbers in order (Blom's scores)."""
    return tuple(NormalDist().inv_cdf((i + 0.625) / (n + 0.25)) for i in range(n))


def _expected(n: Array, at: Array) -> Array:
    """Return the mean, in sigma, of the order statistic ``at`` (from 0, may be between two) of n normal numbers, for each n."""
    out = np.zeros(len(n))
    for size in np.unique(n[n > 1]).tolist():
        mine = n == size
        out[mine] = np.interp(at[mine], np.arange(size), _scores(size))
    return out


Levels = dict[tuple[str, int], tuple[Array, Array, Array, Array]]
"""What was found of roles of which nothing is hidden, by kind and role."""


def baseline(
    seconds: Array,
    role: Array,
    hidden: Array | None = None,
    *,
    relative: bool = True,
    quantile: float = QUARTILE,
    known: Levels | None = None,
    kind: str = "",
) -> tuple[Array, Array]:
    """Return what each rank's peers took in the same step, itself left out.

    Parameters
    ----------
    seconds : float array, shape (step, rank)
        s; NaN where absent.
    role : int array, shape (rank,)
        Peers have the same number.
    hidden : bool array, shape (step, rank), optional
        Cells that say nothing about others, because they are known to be slow.
    relative : bool
        Move the faster quarter to the middle by the spread of the faster half, in parts of itself; False: it stays.
    quantile : float
        Quantile of the peers.
    known : dict, optional
        Keeps what was found of roles of which nothing is hidden, for the next call with the same ``kind``.
    kind : str
        What the seconds are, for ``known``.

    Returns
    -------
    base : float array, shape (step, rank)
        Level of the peers, s; NaN where there are none.
    peers : int array, shape (step, rank)
        How many.
    """
    base, peers = np.full(seconds.shape, np.nan), np.zeros(seconds.shape, np.int64)
    shift, near = np.zeros(seconds.shape if relative else (0, 0)), []
    for group in np.unique(role).tolist():
        mine = np.flatnonzero(role == group)
        found = _level(seconds, mine, hidden, quantile, relative, known, (kind, group))
        base[:, mine], peers[:, mine] = found[0], found[1]
        if relative:
            shift[:, mine] = found[2]
            near.append(found[3])
    if relative:
        scatter = np.concatenate(near)
        if len(scatter):
            base *= 1 - shift * float(np.median(scatter)) / HALF_TO_SIGMA
    return base, peers


def _level(
    seconds: Array,
    mine: Array,
    hidden: Array | None,
    quantile: float,
    relative: bool,
    known: Levels | None,
    key: tuple[str, int],
) -> tuple[Array, Array, Array, Array]:
    """Return (level, how many others, expected place, spread) of the ranks of one role."""
    cover = np.zeros((len(seconds), len(mine)), bool) if hidden is None else hidden[:, mine]
    bare = not cover.any()
    if known is not None and bare and key in known:
        return known[key]
    columns = seconds[:, mine] if bare else np.where(cover, np.nan, seconds[:, mine])
    level, number, at, middle = _left_out(columns, quantile)
    out = level, number, at, _spread(columns, level, number, middle) if relative else np.empty(0)
    if known is not None and bare:
        known[key] = out
    return out


def _left_out(shown: Array, quantile: float) -> tuple[Array, Array, Array, Array]:
    """Return for each number (quantile of the others in its row, how many others, expected place in sigma), and medians of rows."""
    ordered = np.sort(shown, axis=1)  # NaN last
    valid = np.isfinite(shown)
    number = valid.sum(1)
    own = [_quantile(ordered, number - 1, quantile, shown), _quantile(ordered, number, quantile, None)]
    level = np.where(valid, own[0][0], own[1][0])
    others = number[:, None] - valid
    level[others <= 0] = np.nan
    middle = ordered[np.arange(len(ordered)), np.maximum(number - 1, 0) // 2]
    return level, others, np.where(valid, own[0][1], own[1][1]), middle[:, None]


def _quantile(ordered: Array, number: Array, quantile: float, shown: Array | None) -> tuple[Array, Array]:
    """Return a quantile of the first numbers of each row, and its expected place; with ``shown``, each of these left out in turn."""
    at = quantile * np.maximum(number - 1, 0)
    low = np.floor(at).astype(np.int64)
    high = np.minimum(low + 1, np.maximum(number - 1, 0))
    rows, last = np.arange(len(ordered)), ordered.shape[1] - 1
    pick = []
    for k in (low, high):
        value = ordered[rows, k][:, None]
        if shown is not None:  # what is left out is at or before place k: the next one moves there
            value = np.where(shown <= value, ordered[rows, np.minimum(k + 1, last)][:, None], value)
        pick.append(value)
    part = (at - low)[:, None]
    return pick[0] + (pick[1] - pick[0]) * part, _expected(number, at)[:, None]


def _spread(shown: Array, level: Array, others: Array, middle: Array) -> Array:
    """Return how far the faster half of each row is from the level, in parts of it; nothing for rows of fewer than four."""
    rows = (others >= 3).all(1)
    shown, level, middle = shown[rows], level[rows], middle[rows]
    with np.errstate(divide="ignore", invalid="ignore"):
        apart = np.abs(shown / level - 1)
    return apart[(shown <= middle) & np.isfinite(apart)]


def own_baseline(seconds: Array, alone: Array, *, relative: bool = True) -> Array:
    """Return the usual level of each rank that has no peer.

    Parameters
    ----------
    seconds : float array, shape (step, rank)
        s; NaN where absent.
    alone : bool array, shape (rank,)
        Ranks to look at; NaN for the others.
    relative : bool
        Move it with what all such ranks did together in the step.
    """
    base = np.full(seconds.shape, np.nan)
    mine = np.flatnonzero(alone & np.isfinite(seconds).any(0))
    if not len(mine) or len(seconds) < 2:
        return base
    own = seconds[:, mine]
    usual, together = _usual(own), np.ones((len(seconds), 1))
    for _ in range(2 if relative and len(mine) > 1 else 0):  # the second time what all did is no longer in the usual
        together = _lower_median(own / usual)
        usual = _usual(own / together)
    base[:, mine] = usual * together
    return base


def _lower_median(apart: Array) -> Array:
    """Return the median of each row, of two the smaller, dims (row, 1); 1 where there is nothing."""
    ordered = np.sort(apart, axis=1)  # NaN last
    number = np.isfinite(ordered).sum(1)
    middle = np.take_along_axis(ordered, (np.maximum(number - 1, 0) // 2)[:, None], 1)
    return np.asarray(np.where(number[:, None] > 0, middle, 1.0))


def _usual(seconds: Array) -> Array:
    """Return the level of each column that most of its faster steps are around."""
    jump = np.abs(np.diff(seconds, axis=0))
    sigma = median_steps(jump) * 1.4826 / np.sqrt(2.0)
    return np.asarray(np.minimum(_low(seconds) - NormalDist().inv_cdf(USUAL) * sigma, median_steps(seconds)))


def _low(seconds: Array) -> Array:
    """Return the quantile ``USUAL`` of each column, NaN left out; those without any in one go, numpy takes the others one by one."""
    whole = np.isfinite(seconds).all(0)
    if whole.all():
        return np.asarray(np.quantile(seconds, USUAL, axis=0))
    out = np.empty(seconds.shape[1])
    out[whole] = np.quantile(seconds[:, whole], USUAL, axis=0)
    out[~whole] = np.nanquantile(seconds[:, ~whole], USUAL, axis=0)
    return out
