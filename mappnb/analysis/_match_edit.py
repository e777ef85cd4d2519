"""Order against order: which elements of several sequences are the same, by least edits. No times are looked at."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = ["align_sequences", "common_elements"]

Array = np.ndarray[Any, Any]
MAX_EDITS = 3000
"""Beyond this many differences two sequences are not compared further: what is left counts as unmatched."""


def common_elements(first: Array, second: Array) -> Array:
    """Return the pairs of elements that two sequences share in the same order, with the fewest insertions and deletions.

    Parameters
    ----------
    first, second : int arrays
        Tokens.

    Returns
    -------
    int64 array, shape (pair, 2)
        Positions in ``first`` and ``second``, both rising. Where several answers are equally good, differences come as late as possible.

    Notes
    -----
    Myers, *An O(ND) difference algorithm and its variations* (Algorithmica 1986), behind the common beginning and before the common end.
    """
    n = min(len(first), len(second))
    differs = np.flatnonzero(first[:n] != second[:n])
    head = int(differs[0]) if len(differs) else n
    differs = np.flatnonzero(first[len(first) - n + head :][::-1] != second[len(second) - n + head :][::-1])
    tail = int(differs[0]) if len(differs) else n - head
    middle = _myers(first[head : len(first) - tail].tolist(), second[head : len(second) - tail].tolist())
    ends = np.arange(tail, 0, -1)
    pairs = [
        np.repeat(np.arange(head)[:, None], 2, axis=1),
        np.array(middle, np.int64).reshape(-1, 2) + head,
        np.stack([len(first) - ends, len(second) - ends], axis=1),
    ]
    return np.concatenate(pairs).astype(np.int64)


def _myers(a: list[int], b: list[int]) -> list[tuple[int, int]]:
    """Return the pairs of the longest common subsequence of two lists."""
    if not a or not b:
        return []
    reach, history = {1: 0}, []
    for edits in range(min(len(a) + len(b), MAX_EDITS) + 1):
        history.append(reach.copy())
        for k in range(-edits, edits + 1, 2):
            down = k == -edits or (k != edits and reach.get(k - 1, -1) < reach.get(k + 1, -1))
            x = reach[k + 1] if down else reach[k - 1] + 1
            while x < len(a) and x - k < len(b) and x >= 0 and x - k >= 0 and a[x] == b[x - k]:
                x += 1
            reach[k] = x
            if x >= len(a) and x - k >= len(b):
                return _walk_back(history, len(a), len(b))
    return []


def _walk_back(history: list[dict[int, int]], x: int, y: int) -> list[tuple[int, int]]:
    pairs = []
    for edits in range(len(history) - 1, -1, -1):
        reach, k = history[edits], x - y
        down = k == -edits or (k != edits and reach.get(k - 1, -1) < reach.get(k + 1, -1))
        before = k + 1 if down else k - 1
        x0 = reach[before] if edits else 0
        y0 = x0 - before if edits else 0
        while x > x0 and y > y0:
            x, y = x - 1, y - 1
            pairs.append((x, y))
        x, y = x0, y0
    return pairs[::-1]


def align_sequences(sequences: Sequence[Array]) -> list[Array]:
    """Return, for every element of every sequence, the number of the column in which equal elements stand side by side.

    Parameters
    ----------
    sequences : sequence of int arrays
        Tokens of each member, in its own order.

    Returns
    -------
    list of int64 arrays
        Columns, rising along each sequence; the longest sequence is what the others are compared with. Elements that it lacks get columns
        of their own, shared by the members that have the same ones at the same place.
    """
    longest = max(range(len(sequences)), key=lambda i: len(sequences[i]))
    center = sequences[longest]
    if all(np.array_equal(s, center) for s in sequences):
        return [np.arange(len(center), dtype=np.int64) for _ in sequences]
    places: list[
        list[tuple[int, int, int, int]]
    ] = []  # (position in the center, 0 before it or 1 at it, how many before it there, token)
    for tokens in sequences:
        pairs = {int(j): int(i) for i, j in common_elements(center, tokens)}
        mine, at, extra = [], 0, 0
        for j, token in enumerate(tokens.tolist()):
            if j in pairs:
                at, extra = pairs[j] + 1, 0
                mine.append((pairs[j], 1, 0, 0))
            else:
                mine.append((at, 0, extra, token))
                extra += 1
        places.append(mine)
    return [np.array(c, np.int64) for c in _number(places)]


def _number(places: list[list[tuple[int, int, int, int]]]) -> list[list[int]]:
    """Return the columns of all elements: in the order of the center, elements that it lacks in the order in which they first occur."""
    order: dict[tuple[int, int, int, int], int] = {}
    for mine in places:
        for place in mine:
            order.setdefault(place, len(order))
    ranked = sorted(order, key=lambda p: (*p[:3], order[p]))
    column = {place: i for i, place in enumerate(ranked)}
    return [[column[p] for p in mine] for mine in places]
