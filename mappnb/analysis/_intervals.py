"""Interval arithmetic on int64 nanoseconds, vectorised over groups: unions, nesting, self time."""

from __future__ import annotations

from typing import Any

import numpy as np

from mappnb import _core

__all__ = ["innermost_segments", "segments_reference", "union_length"]

Array = np.ndarray[Any, Any]


def union_length(group: Array, start: Array, end: Array, num_groups: int) -> Array:
    """Return the length of the union of the intervals of each group.

    Parameters
    ----------
    group : int array, shape (interval,)
        Group of each interval, 0 to ``num_groups - 1``.
    start, end : int64 array, shape (interval,)
        Bounds in ns; empty intervals (``end <= start``) count nothing.

    Returns
    -------
    int64 array, shape (num_groups,)
        ns.
    """
    keep = end > start
    group, start, end = group[keep], start[keep], end[keep]
    if not len(group):
        return np.zeros(num_groups, np.int64)
    order = np.lexsort((start, group))
    group, start, end = group[order], start[order], end[order]
    low = start.min()
    width = np.int64(end.max() - low + 1)
    reach = np.maximum.accumulate(
        (end - low) + group * width
    )  # groups lie behind one another: one running maximum serves all
    before = np.concatenate([[np.int64(-1)], reach[:-1]])
    at = (start - low) + group * width
    added = np.maximum(reach - np.maximum(before, at), 0)
    return _sum(group, added, num_groups)


def _sum(group: Array, value: Array, num_groups: int) -> Array:
    out = np.zeros(num_groups, np.int64)
    np.add.at(out, group, value)
    return out


def innermost_segments(lane: Array, start: Array, end: Array) -> tuple[Array, Array, Array]:
    """Cut the nested spans of each lane into segments in which one span is the innermost.

    Parameters
    ----------
    lane : int array, shape (span,)
        Spans of one lane (a thread of a rank) nest; where they do not, the one that began later is the inner one until it ends.
    start, end : int64 array, shape (span,)
        Bounds in ns.

    Returns
    -------
    span, start, end : arrays, shape (segment,)
        Index of the innermost span, and the bounds of the segment. Segments of a lane do not overlap.
    """
    return _core.innermost_segments(*(np.ascontiguousarray(x, np.int64) for x in (lane, start, end)))


def segments_reference(lane: Array, start: Array, end: Array) -> tuple[Array, Array, Array]:
    """Return what :func:`innermost_segments` does, in NumPy and Python: short enough to trust."""
    lasting = np.flatnonzero(end > start)  # an instant takes no time
    order = lasting[np.lexsort((-end[lasting], start[lasting], lane[lasting]))]  # parents before children
    if not len(order):
        none = np.empty(0, np.int64)
        return none, none, none
    lane, start, end = lane[order], start[order], end[order]
    parent, end = _nest(lane, start, end)
    n = len(lane)
    # boundaries: at a start that span becomes the innermost, at an end its parent does
    time = np.concatenate([start, end])
    inner = np.concatenate([np.arange(n), parent])
    is_end = np.repeat([0, 1], n)
    rank_in = np.concatenate(
        [np.arange(n), -np.arange(n)]
    )  # equal times: ends first and inner before outer; then starts, outer first
    lanes = np.concatenate([lane, lane])
    order2 = np.lexsort((rank_in, 1 - is_end, time, lanes))
    time, inner, lanes = time[order2], inner[order2], lanes[order2]
    left, right, who = time[:-1], time[1:], inner[:-1]
    keep = (who >= 0) & (right > left) & (lanes[1:] == lanes[:-1])
    return order[who[keep]], left[keep], right[keep]


def _nest(lane: Array, start: Array, end: Array) -> tuple[Array, Array]:
    """Return the index of the enclosing span of each span (-1 for none), and the ends.

    Input sorted by lane, start, longest first. A span that ends inside one which began later is cut where that one begins.
    """
    parent = np.full(len(lane), -1, np.int64)
    stack: list[int] = []
    lanes, starts, ends = lane.tolist(), start.tolist(), end.tolist()
    for i in range(len(lanes)):
        while stack and (lanes[stack[-1]] != lanes[i] or ends[stack[-1]] <= starts[i]):
            stack.pop()
        while stack and ends[stack[-1]] < ends[i]:
            ends[stack.pop()] = starts[i]
        if stack:
            parent[i] = stack[-1]
        stack.append(i)
    return parent, np.array(ends, np.int64)
