"""Nesting, steps and pairs of begin and end: what is computed from the times of a lane alone."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

__all__ = ["begin_end_pairs", "first_index", "inside", "nesting_depth", "step_of"]

Array = np.ndarray[Any, Any]
_PIECE = 1 << 16  # rows at a time, where all at once would hold much memory


def nesting_depth(lane: Array, start: Array, duration: Array, among: Array | None = None) -> Array:
    """Return how many events of the same lane are open when each begins, dims (event,), int16.

    Of events that begin together the longer is outside. Events of no length count as 1 ns long. Those not ``among`` (a mask) are on
    no lane: 0.
    """
    depth = np.zeros(len(start), np.int16)
    rows: Array = (np.arange(len(start)) if among is None else np.flatnonzero(among)).astype(_index(len(start)))
    order = rows[np.argsort(lane[rows], kind="stable")]
    del rows
    cuts = np.flatnonzero(np.diff(lane[order])) + 1
    for part in np.split(order, cuts) if len(order) else ():
        _depth_of_one(depth, part, start, duration)
    return depth


def _index(size: int) -> type:
    return np.int32 if size < 1 << 31 else np.int64


def _depth_of_one(depth: Array, part: Array, start: Array, duration: Array) -> None:
    """Put down the depth of the rows of one lane."""
    part, begin = _by_time(part, start, duration)
    end = duration[part]
    np.maximum(end, 1, out=end)
    end += begin
    end.sort()
    for at in range(0, len(part), _PIECE):
        some = slice(at, at + _PIECE)
        is_open = np.arange(at, at + len(begin[some])) - np.searchsorted(end, begin[some], "right")
        depth[part[some]] = np.clip(is_open, 0, np.iinfo(np.int16).max)


def _by_time(part: Array, start: Array, duration: Array) -> tuple[Array, Array]:
    """Return rows by their start, of equal ones the longer first, and their start; in little memory."""
    begin = start[part]
    if (begin[1:] < begin[:-1]).any():
        order = np.argsort(begin, kind="stable")
        part = part[order]
        begin = begin[order]
    same = np.flatnonzero(begin[1:] == begin[:-1])
    if len(same):
        at = np.unique(np.concatenate([same, same + 1]))
        part = part.copy()
        tied = part[at]
        part[at] = tied[np.lexsort((-duration[tied], start[tied]))]
    return part, begin


def step_of(issue: Array, begin: Array, steps: Array, start: Array, end: Array) -> Array:
    """Return the step in whose window each event's launch lies, or its start where that is -1; -1 for none; dims (event,), int32."""
    out = np.full(len(begin), -1, np.int32)
    order = np.argsort(start, kind="stable")
    for first in range(0, len(begin) if len(steps) else 0, _PIECE):
        some = slice(first, first + _PIECE)
        time = np.where(issue[some] >= 0, issue[some], begin[some])
        at = np.searchsorted(start[order], time, "right") - 1
        inside = (at >= 0) & (time < end[order][np.maximum(at, 0)])
        out[some][inside] = steps[order][at[inside]]
    return out


def first_index(keys: Array, wanted: Array) -> Array:
    """Return the index of the first of ``keys`` that equals each of ``wanted``, -1 for none."""
    if not len(keys):
        return np.full(len(wanted), -1, np.int64)
    order: Array = np.argsort(keys, kind="stable").astype(_index(len(keys)))
    keys = keys[order]
    out = np.empty(len(wanted), order.dtype)
    for first in range(0, len(wanted), _PIECE):
        some = slice(first, first + _PIECE)
        at = np.minimum(np.searchsorted(keys, wanted[some]), len(keys) - 1)
        out[some] = np.where(keys[at] == wanted[some], order[at], -1)
    return out


def inside(lane: Array, time: Array, window_lane: Array, window_start: Array, window_end: Array) -> Array:
    """Return whether each (lane, time) lies in one of the windows of its lane, dims (event,), bool."""
    out = np.zeros(len(time), bool)
    for one in np.unique(window_lane).tolist():
        mine = np.flatnonzero(window_lane == one)
        mine = mine[np.argsort(window_start[mine], kind="stable")]
        start, end = window_start[mine], np.maximum.accumulate(window_end[mine])
        here = np.flatnonzero(lane == one)
        at = np.searchsorted(start, time[here], "right") - 1
        out[here] = (at >= 0) & (time[here] < end[np.maximum(at, 0)])
    return out


def begin_end_pairs(lane: Array, name: Array, is_begin: Array, time: Array) -> tuple[Array, Array, list[int]]:
    """Pair the begins and ends of each lane, innermost first.

    Parameters
    ----------
    lane, name : array of int, dims (row,)
        Thread, and number of the name; -1 for an end that has no name.
    is_begin : array of bool, dims (row,)
        Begin, or end.
    time : array of int, dims (row,)
        ns. Rows of one lane are taken by time, rows of one time in the order of the file.

    Returns
    -------
    begins, ends : array of int, dims (span,)
        Rows of each span; an end of -1: the span was never closed.
    lost : list of int
        Ends that had no begin.

    Notes
    -----
    An end closes the innermost open span of its name; spans inside that one which were not closed get no end. An end whose
    name is not open closes nothing.
    """
    order = np.lexsort((np.arange(len(time)), time, lane))
    begins: list[int] = []
    ends: list[int] = []
    lost: list[int] = []
    stack: list[tuple[int, int]] = []
    opened: Counter[int] = Counter()  # names in the stack
    last = None
    columns = (order.tolist(), lane[order].tolist(), name[order].tolist(), is_begin[order].tolist())
    for row, here, what, opens in zip(*columns, strict=True):
        if here != last:
            begins += [row for row, _ in stack]
            stack.clear()
            opened.clear()
            last = here
        ends += [-1] * (len(begins) - len(ends))
        if opens:
            stack.append((row, what))
            opened[what] += 1
        elif not stack or (what != -1 and not opened[what]):
            lost.append(row)
        else:
            while True:  # each span leaves the stack once
                begin, its = stack.pop()
                opened[its] -= 1
                begins.append(begin)
                closes = what in (-1, its)
                ends.append(row if closes else -1)
                if closes:
                    break
    begins += [row for row, _ in stack]
    ends += [-1] * (len(begins) - len(ends))
    return np.array(begins, np.int64), np.array(ends, np.int64), lost
