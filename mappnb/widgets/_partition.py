"""Spans that overlap in time, told apart: each gets a layer in which it overlaps none."""

from __future__ import annotations

import heapq
from typing import Any

import numpy as np

from mappnb.pyramid import ordered

__all__ = ["layers"]

Array = np.ndarray[Any, Any]


def layers(group: Array, start: Array, end: Array) -> Array:
    """Return for every span the lowest layer that is free when it starts.

    Parameters
    ----------
    group : int array, dims (span,)
        From 0; spans of different groups may overlap.
    start, end : int64 array, dims (span,)
        ns; of spans that start together the longest comes first. A span without length overlaps nothing.

    Returns
    -------
    int32 array, dims (span,)
        0 for all spans of a group in which none overlap; else as few layers as spans are open at once.

    Notes
    -----
    Greedy interval partition (Kleinberg and Tardos, Algorithm Design, 4.1). Only clusters of spans that overlap are looked at
    one by one.
    """
    out = np.zeros(len(group), np.int32)
    order = ordered(group, start)
    order = order[end[order] > start[order]]
    grp, at, to = group[order], start[order], end[order]
    clash = (grp[1:] == grp[:-1]) & (at[1:] < to[:-1])
    if not clash.any():
        return out
    bounds = np.concatenate([[0], np.flatnonzero(np.diff(grp)) + 1, [len(grp)]])
    for g in np.unique(np.searchsorted(bounds, np.flatnonzero(clash), side="right") - 1).tolist():
        first, last = int(bounds[g]), int(bounds[g + 1])
        reach = np.maximum.accumulate(to[first:last])
        joined = np.concatenate([[False], at[first + 1 : last] < reach[:-1]])  # overlaps a span before it
        heads = np.flatnonzero(~joined)
        sizes = np.diff(np.append(heads, last - first))
        for head, size in zip(heads[sizes > 1].tolist(), sizes[sizes > 1].tolist(), strict=True):
            members = order[first + head : first + head + size]
            members = members[np.lexsort((-end[members], start[members]))]
            out[members] = _first_fit(start[members].tolist(), end[members].tolist())
    return out


def _first_fit(starts: list[int], ends: list[int]) -> list[int]:
    """Return the lowest free layer of each span; they come in order of start."""
    out, busy, free, used = [], list[tuple[int, int]](), list[int](), 0
    for start, end in zip(starts, ends, strict=True):
        while busy and busy[0][0] <= start:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if free:
            layer = heapq.heappop(free)
        else:
            layer, used = used, used + 1
        heapq.heappush(busy, (end, layer))
        out.append(layer)
    return out
