"""What each rank should have taken: seconds of its peers in the same step, or its own usual ones where it has no peer."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
import xarray as xr

from mappnb.analysis._work_parts import COMPUTE_KINDS

__all__ = ["KINDS", "Table", "baseline", "own_baseline", "roles", "table_of"]

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
    present: Array
    step_s: Array


def table_of(work: xr.Dataset, role: Array | None = None) -> Table:
    """Return the self-time table (:func:`mappnb.analysis.work`) by kind.

    Parameters
    ----------
    work : Dataset, dims (step, rank, part)
        As :func:`mappnb.analysis.work` gives it.
    role : int array, shape (rank,), optional
        Role of each rank; by default :func:`roles`.
    """
    present = work["present"].values
    seconds, kinds = work["seconds"].values, work["part_kind"].values.astype(str)
    count, out = work["count"].values, {}
    for kind in KINDS:
        parts = np.isin(kinds, COMPUTE_KINDS) if kind == "compute" else kinds == kind
        if not parts.any():
            continue
        there = present
        if kind in STEADY:
            there = there & (count[:, :, parts].sum(2) > 0)
        out[kind] = np.where(there, seconds[:, :, parts].sum(2), np.nan)
    role = roles(work) if role is None else role
    host = work["host"].values if "host" in work.coords else np.full(work.sizes["rank"], "", object)
    return Table(work["step"].values, work["rank"].values, role, host, out, present, work["step_s"].values)


def roles(work: xr.Dataset, coordinate: Array | None = None) -> Array:
    """Return a number per rank, equal for ranks that work on the same stages.

    Parameters
    ----------
    work : Dataset, dims (step, rank, part)
        Self-time table.
    coordinate : int array, shape (rank,), optional
        Pipeline coordinate, that tells ranks apart where no compute has a stage.
    """
    staged = work["part_stage"].values >= 0
    does = (work["count"].values[:, :, staged] > 0).any(0)
    if coordinate is not None and not staged.any():
        does = coordinate[:, None]
    return np.unique(does, axis=0, return_inverse=True)[1].ravel() if does.shape[1] else np.zeros(len(does), np.int64)


def _expected(n: Array, at: Array) -> Array:
    """Return the mean, in sigma, of the order statistic ``at`` (from 0, may be between two) of n normal numbers (Blom's scores)."""
    size = int(n.max(initial=1)) + 1
    normal = NormalDist()
    table = np.zeros((size, size))
    for k in np.unique(n[n > 1]).tolist():
        table[k, :k] = [normal.inv_cdf((i + 0.625) / (k + 0.25)) for i in range(k)]
    low = np.floor(at).astype(np.int64)
    part = at - low
    return np.asarray(table[n, low] * (1 - part) + table[n, np.minimum(low + 1, np.maximum(n - 1, 0))] * part)


def baseline(
    seconds: Array, role: Array, hidden: Array | None = None, *, relative: bool = True, quantile: float = QUARTILE
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

    Returns
    -------
    base : float array, shape (step, rank)
        Level of the peers, s; NaN where there are none.
    peers : int array, shape (step, rank)
        How many.
    """
    shown = seconds if hidden is None else np.where(hidden, np.nan, seconds)
    base, peers = np.full(seconds.shape, np.nan), np.zeros(seconds.shape, np.int64)
    shift = np.zeros(seconds.shape)
    near: list[Array] = []
    for group in np.unique(role).tolist():
        mine = np.flatnonzero(role == group)
        level, number, at, spread = _left_out(shown[:, mine], quantile)
        base[:, mine], peers[:, mine], shift[:, mine] = level, number, at
        near.append(spread)
    if relative:
        scatter = np.concatenate([x.ravel() for x in near])
        scatter = scatter[np.isfinite(scatter)]
        if len(scatter):
            base = base * (1 - shift * float(np.median(scatter)) / HALF_TO_SIGMA)
    return base, peers


def _left_out(shown: Array, quantile: float) -> tuple[Array, Array, Array, Array]:
    """Return (quantile of the others, how many others, its expected place in sigma, spread of the faster half in parts of it)."""
    n = shown.shape[1]
    order = np.argsort(shown, axis=1)  # NaN last
    ordered = np.take_along_axis(shown, order, 1)
    place = np.empty_like(order)
    np.put_along_axis(place, order, np.broadcast_to(np.arange(n), shown.shape), 1)
    valid = np.isfinite(shown)
    others = valid.sum(1, keepdims=True) - valid
    at = quantile * np.maximum(others - 1, 0)
    low = np.floor(at).astype(np.int64)
    high = np.minimum(low + 1, np.maximum(others - 1, 0))
    pick = [np.take_along_axis(ordered, np.minimum(k + (valid & (place <= k)), n - 1), 1) for k in (low, high)]
    level = np.where(others > 0, pick[0] + (pick[1] - pick[0]) * (at - low), np.nan)
    with np.errstate(divide="ignore", invalid="ignore"):
        apart = np.abs(shown / level - 1)
    half = place <= (valid.sum(1, keepdims=True) - 1) // 2
    spread = np.where(valid & half & (others >= 3), apart, np.nan)
    return level, others, _expected(others, at), spread


def own_baseline(seconds: Array, alone: Array) -> Array:
    """Return the usual level of each rank that has no peer, moved with what all such ranks did together.

    Parameters
    ----------
    seconds : float array, shape (step, rank)
        s; NaN where absent.
    alone : bool array, shape (rank,)
        Ranks to look at; NaN for the others.
    """
    base = np.full(seconds.shape, np.nan)
    mine = np.flatnonzero(alone & np.isfinite(seconds).any(0))
    if not len(mine) or len(seconds) < 2:
        return base
    usual = _usual(seconds[:, mine])
    together = np.ones(len(seconds))
    if len(mine) > 1:
        with np.errstate(divide="ignore", invalid="ignore"):
            apart = seconds[:, mine] / usual
        together = np.fmin(np.nanquantile(apart, QUARTILE, axis=1), np.nanmedian(apart, axis=1))
    base[:, mine] = usual * together[:, None]
    return base


def _usual(seconds: Array) -> Array:
    """Return the level of each column that most of its faster steps are around."""
    low = np.nanquantile(seconds, USUAL, axis=0)
    jump = np.abs(np.diff(seconds, axis=0))
    sigma = np.nanmedian(jump, axis=0) * 1.4826 / np.sqrt(2.0)
    return np.asarray(np.minimum(low - NormalDist().inv_cdf(USUAL) * sigma, np.nanmedian(seconds, axis=0)))
