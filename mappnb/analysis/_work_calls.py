"""Who came last to each transfer, when, and how long that kept the others: from plain columns, one entry per member or wait."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["CallTable", "call_table"]

Array = np.ndarray[Any, Any]
_NEVER = np.iinfo(np.int64).min


@dataclass(frozen=True, slots=True)
class CallTable:
    """What is known of each call, arrays over calls.

    Attributes
    ----------
    members : int32 array
        How many took part; waits do not count.
    arrival : int64 array
        When the last member came, ns on the run clock.
    last : int64 array
        Entry of the member that came last; -1 where two came last at once, or one came alone.
    imposed : int64 array
        How long the last one kept others blocked after the last but one had come, ns.
    """

    members: Array
    arrival: Array
    last: Array
    imposed: Array


def call_table(
    call: Array, rank: Array, start: Array, end: Array, joins: Array, blocks: Array, num_calls: int
) -> CallTable:
    """Return who came last to each call.

    Parameters
    ----------
    call : int array, shape (entry,)
        Call of each entry, 0 to ``num_calls - 1``.
    rank : int array, shape (entry,)
        Global rank.
    start, end : int64 array, shape (entry,)
        Bounds in ns.
    joins : bool array, shape (entry,)
        The entry is the transfer itself; False for an event that waits for a transfer that was issued without blocking.
    blocks : bool array, shape (entry,)
        The rank is blocked while the entry lasts; False for transfers in flight beside the program.
    num_calls : int
        Number of calls.

    Notes
    -----
    The last member keeps the others from the arrival of the last but one, or from when the first of them is blocked if that is
    later, until its own arrival, or until the last of them goes on if that is earlier: a message that was sent ahead makes nobody wait.
    """
    entry = np.flatnonzero(joins)
    entry = entry[np.lexsort((start[entry], call[entry]))]
    members = np.bincount(call[entry], minlength=num_calls).astype(np.int32)
    bound = np.cumsum(members)
    known, several = members > 0, members > 1
    last = np.full(num_calls, -1, np.int64)
    arrival, second = np.full(num_calls, _NEVER), np.full(num_calls, _NEVER)
    last[known] = entry[bound[known] - 1]
    arrival[known] = start[last[known]]
    second[several] = start[entry[bound[several] - 2]]
    last[arrival == second] = -1
    last[~several] = -1
    who = np.where(last >= 0, rank[np.maximum(last, 0)], -1) if len(rank) else last
    held = np.flatnonzero(blocks & (call >= 0))
    held = held[rank[held] != who[call[held]]]
    since, until = np.full(num_calls, np.iinfo(np.int64).max), np.full(num_calls, _NEVER)
    np.minimum.at(since, call[held], start[held])
    np.maximum.at(until, call[held], end[held])
    imposed = np.zeros(num_calls, np.int64)
    some = np.flatnonzero((last >= 0) & (until > _NEVER))
    imposed[some] = np.maximum(np.minimum(arrival[some], until[some]) - np.maximum(second[some], since[some]), 0)
    return CallTable(members, arrival, last, imposed)
