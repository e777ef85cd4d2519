"""Ends of synchronising collectives in dense blocks, and what each member's end is off by in each block, robustly."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from mappnb.analysis._align_input import Observations

__all__ = ["Block", "Knot", "Model", "Rows", "block_rows", "blocks_of", "median"]

Array = np.ndarray[Any, Any]
BLOCKS = 48
"""At most so many blocks of calls per kind; half as many at least, where there are so many calls."""
POLISH = 2


@dataclass(frozen=True, slots=True)
class Knot:
    """A change of a clock: from ``at`` (ns) on, ``value`` ns are added, or for a ``kink``, ``value`` ns per half span."""

    clock: int
    at: float
    kink: bool
    value: float


@dataclass(slots=True)
class Model:
    """Corrections: ``coef[k, 0] + coef[k, 1] x`` plus knots, ns, with ``x = (u - mid) / half`` from -1 to 1.

    Attributes
    ----------
    coef : array, shape (clock, 2)
        Offset in the middle and slope over half the span, ns.
    mid, half : float
        Middle and half length of the span, ns.
    knots : list of Knot
        Changes.
    """

    coef: Array
    mid: float
    half: float
    knots: list[Knot] = field(default_factory=list)

    def x(self, time: Array) -> Array:
        """Return times (ns) on the scale of the span."""
        return np.asarray((time - self.mid) / self.half)

    def correction(self, clock: Array, time: Array) -> Array:
        """Return what is added to times (ns) of clocks; shapes are broadcast."""
        out = self.coef[clock, 1] * self.x(time)
        out += self.coef[clock, 0]
        for knot in self.knots:
            mine = np.broadcast_to(clock == knot.clock, out.shape) & (time >= knot.at)
            out[mine] += knot.value * ((time[mine] - knot.at) / self.half if knot.kink else 1.0)
        return np.asarray(out)


@dataclass(slots=True)
class Block:
    """Blocks of one shape: ``end[cell, call, member]``, NaN where there is none.

    Attributes
    ----------
    end : array, shape (cell, call, member)
        ns.
    rank : int array, shape (cell, member)
        Index of the rank.
    kind : int array, shape (cell,)
        Kind of the calls.
    given : float
        Standard deviation that is known beforehand, ns; NaN where the residuals tell it.
    """

    end: Array
    rank: Array
    kind: Array
    given: float = np.nan


@dataclass(slots=True)
class Rows:
    """One row per cell and member.

    Attributes
    ----------
    cell, rank, kind : int arrays
        Cell (rows are in its order), rank index, kind.
    time : array
        Middle time on the member's own clock, ns.
    common : array
        Middle time of the cell by the model, the same for all its members, ns. Slopes are fitted against it: against the members' own
        times, clocks that stop would fit best.
    value : array
        By how much the member's ends are late in the cell, beyond the model, ns.
    calls : array
        Calls behind it.
    spread : array
        Robust standard deviation of single ends about ``value``, ns.
    given : array
        Standard deviation of ``value`` where it is known beforehand, ns; else NaN.
    """

    cell: Array
    rank: Array
    kind: Array
    time: Array
    common: Array
    value: Array
    calls: Array
    spread: Array
    given: Array


def median(values: Array, axis: int) -> Array:
    """Return the median without NaN; NaN where there is nothing."""
    ordered = np.sort(values, axis=axis)
    count = np.isfinite(values).sum(axis=axis, keepdims=True)
    low = np.take_along_axis(ordered, np.maximum(count - 1, 0) // 2, axis)
    high = np.take_along_axis(ordered, np.minimum(count // 2, values.shape[axis] - 1), axis)
    return np.asarray(np.where(count > 0, 0.5 * (low + high), np.nan))


def midmean(values: Array, axis: int) -> Array:
    """Return the mean of the middle half of the values that are no NaN, the median of up to three; NaN where there is nothing.

    As deaf to outliers as is needed here, and, unlike the median, at no loss where times are rounded to µs.
    """
    size = values.shape[axis]
    ordered = np.sort(values, axis=axis)
    count = np.isfinite(values).sum(axis=axis, keepdims=True)
    if int(count.min(initial=size)) == size:
        cut = (size - 1) // 2 if size < 4 else size // 4
        return np.asarray(ordered.take(range(cut, size - cut), axis=axis).mean(axis=axis, keepdims=True))
    cut = np.where(count < 4, np.maximum(count - 1, 0) // 2, count // 4)
    place = np.arange(size).reshape([-1 if a == axis else 1 for a in range(values.ndim)])
    middle = (place >= cut) & (place < count - cut)
    total = np.where(middle, ordered, 0.0).sum(axis=axis, keepdims=True)
    return np.asarray(np.where(count > 0, total / np.maximum(middle.sum(axis=axis, keepdims=True), 1), np.nan))


def blocks_of(obs: Observations) -> list[Block]:
    """Return the measured ends in dense blocks of consecutive calls of one kind."""
    keep = np.flatnonzero(obs.measured)
    call = obs.call[keep]
    count = np.bincount(call, minlength=int(call.max(initial=-1)) + 1)
    keep = keep[count[call] > 1]
    kind, rank, call, end = obs.kind[keep], obs.rank[keep], obs.call[keep], obs.end[keep]
    if not len(keep):
        return []
    num_ranks = len(obs.ranks)
    series, unique = pd.factorize(kind * num_ranks + rank, sort=True)
    first = np.searchsorted(unique // num_ranks, np.arange(int(kind.max()) + 2))
    slot = series - first[kind]
    ordinal, num_calls = _ordinals(kind, call)
    members = np.diff(first)
    size = 2 ** np.ceil(np.log2(np.maximum(num_calls / BLOCKS, 1))).astype(np.int64)
    out = []
    for n, m in sorted({(int(a), int(b)) for a, b in zip(members, size, strict=True) if a > 0}):
        kinds = np.flatnonzero((members == n) & (size == m))
        cells = -(-num_calls[kinds] // m)
        begin = np.full(len(members), -1, np.int64)
        begin[kinds] = np.cumsum(cells) - cells
        mine = np.flatnonzero(begin[kind] >= 0) if len(kinds) < len(members) else slice(None)
        grid = np.full((int(cells.sum()), m, n), np.nan)
        at = ordinal[mine]
        grid[begin[kind[mine]] + at // m, at % m, slot[mine]] = end[mine]
        of_cell = np.repeat(kinds, cells)
        who = unique[first[of_cell][:, None] + np.arange(n)] % num_ranks
        out.append(Block(grid, np.asarray(who), of_cell))
    return out


def _ordinals(kind: Array, call: Array) -> tuple[Array, Array]:
    """Return the place of each row's call among the calls of its kind, and how many calls each kind has. Calls are sorted."""
    new = np.append(True, call[1:] != call[:-1])
    head = np.flatnonzero(new)
    kind_of = kind[head]
    order = np.argsort(kind_of, kind="stable")
    num = np.bincount(kind_of)
    place = np.empty(len(head), np.int64)
    place[order] = np.arange(len(head)) - np.repeat(np.cumsum(num) - num, num)
    return place[np.cumsum(new) - 1], num


def block_rows(blocks: list[Block], clock: Array, model: Model) -> Rows:
    """Return how late each member is in each cell beyond a model: a polish by midmeans over calls and members.

    Parameters
    ----------
    blocks : list of Block
    clock : int array, shape (rank,)
        Clock of each rank.
    model : Model
        Corrections so far.

    Notes
    -----
    Polish: Tukey, *Exploratory Data Analysis* (1977), ch. 11 and (midmean) ch. 19.
    """
    parts, num_cells = [], 0
    for b in blocks:
        rest = b.end + model.correction(clock[b.rank][:, None, :], b.end)
        common = np.broadcast_to(median(median(rest, 1), 2)[:, 0], b.rank.shape)
        value = np.zeros((len(b.end), 1, b.end.shape[2]))
        for _ in range(POLISH):
            rest -= midmean(rest, 2)
            step = midmean(rest, 1)
            rest -= step
            value += np.where(np.isfinite(step), step, 0.0)
        calls = np.isfinite(rest).sum(axis=1)
        spread = 1.4826 * median(np.abs(rest), 1)[:, 0]
        cell = np.repeat(np.arange(len(b.end)) + num_cells, b.end.shape[2])
        num_cells += len(b.end)
        keep = np.flatnonzero(calls.ravel() > 0)
        given = np.full(b.rank.shape, b.given)
        kind = np.broadcast_to(b.kind[:, None], b.rank.shape)
        flat = (b.rank, kind, median(b.end, 1)[:, 0], common, value[:, 0], calls, spread, given)
        parts.append([cell[keep], *(np.ravel(f)[keep] for f in flat)])
    return Rows(*(np.concatenate(p) for p in zip(*parts, strict=True)))
