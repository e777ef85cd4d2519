"""The pyramid under :mod:`mappnb.pyramid`: spans in order of row and start, and blocks that sum them up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["LIMIT", "Level", "build_levels", "ordered"]

Array = np.ndarray[Any, Any]
LIMIT = 2**62 - 1
"""Times beyond it, ns, are cut there, so that no difference overflows."""

_LEAF, _FAN_OUT = 4, 2  # measured: wider levels open more blocks than they save
_FAINT_NS = np.float32(1e-3)  # busy time of a block of marks
_TIE = np.float32(1e-6)  # share of its time that a block gives to its category where two are alike


@dataclass(frozen=True, slots=True)
class Level:
    """Blocks of ``size`` spans, dims (block,); those of row r are ``first[r]`` to ``first[r + 1]``. Level 0: the spans themselves."""

    size: int
    first: Array
    start: Array
    end: Array
    category: Array  # that of more than half of the busy time, if there is such a one
    busy: Array  # float32, ns, more than 0; at level 0 not stored: end - start
    surplus: (
        Array  # float32, ns: what of ``category`` no other category can be set against, and a millionth of ``busy``
    )


def ordered(group: Array, start: Array) -> Array:
    """Return the order by group, then start, stable; cheap where the groups are few and nearly in order already.

    Parameters
    ----------
    group : int array, dims (item,)
        From 0.
    start : int64 array, dims (item,)

    Returns
    -------
    int64 array, dims (item,)
    """
    small = group.astype(np.uint16) if len(group) and int(group.max()) < 2**16 else group
    order = np.argsort(small, kind="stable")
    at = start[order]
    new = np.diff(group[order]) != 0
    wrong = np.flatnonzero((at[1:] < at[:-1]) & ~new)
    if len(wrong):
        bounds = np.concatenate([[0], np.flatnonzero(new) + 1, [len(order)]])
        for g in np.unique(np.searchsorted(bounds, wrong, side="right") - 1):
            part = slice(bounds[g], bounds[g + 1])
            order[part] = order[part][np.argsort(at[part], kind="stable")]
    return order


def _vote(category: Array, surplus: Array, other: Array, more: Array) -> tuple[Array, Array]:
    """Set two blocks' surpluses against each other; a category of more than half of the time always survives."""
    same = category == other
    kept = same | (surplus >= more)
    return np.where(kept, category, other), np.where(same, surplus + more, np.abs(surplus - more))


def _summed(below: Level, fan_out: int) -> Level:
    """Return the next level: blocks of ``fan_out`` blocks of the level below, none across rows."""
    counts = -(-np.diff(below.first) // fan_out)
    first = np.concatenate([[0], np.cumsum(counts)])
    row = np.repeat(np.arange(len(counts)), counts)
    lo = below.first[row] + (np.arange(first[-1]) - first[row]) * fan_out
    hi = np.minimum(lo + fan_out, below.first[row + 1])
    busy = below.busy if below.size > 1 else (below.end - below.start).astype(np.float32)
    category, surplus = below.category[lo], (below.surplus if below.size > 1 else busy)[lo]
    for j in range(1, fan_out):
        at = np.minimum(lo + j, hi - 1)
        more = np.where(lo + j < hi, (below.surplus if below.size > 1 else busy)[at], np.float32(0))
        category, surplus = _vote(category, surplus, below.category[at], more)
    if not len(lo):
        return Level(below.size * fan_out, first, *(np.empty(0, np.int64),) * 2, category, surplus, surplus)
    return Level(
        below.size * fan_out,
        first,
        below.start[lo],
        np.maximum.reduceat(below.end, lo),
        category,
        total := np.maximum(np.add.reduceat(busy, lo), _FAINT_NS),
        surplus + _TIE * total,
    )


def build_levels(start: Array, end: Array, category: Array, first: Array) -> list[Level]:
    """Return the pyramid over spans in order of row and start, the spans first.

    Parameters
    ----------
    start, end : int64 array, dims (span,)
        ns, within ±LIMIT.
    category : uint8 array, dims (span,)
    first : int64 array, dims (row + 1,)
        First span of each row.
    """
    none = np.empty(0, np.float32)
    levels = [Level(1, first, start, end, category, none, none)]
    while np.diff(levels[-1].first).max(initial=0) > _LEAF:
        levels.append(_summed(levels[-1], _LEAF if len(levels) == 1 else _FAN_OUT))
    return levels
