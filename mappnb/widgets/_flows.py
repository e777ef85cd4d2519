"""Lines between the members of one collective, and between the two sides of one transfer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import xarray as xr

from mappnb.terms import Category, Op
from mappnb.widgets._columns import take

__all__ = ["SAME_CALL", "SENT", "call_of", "flows_of"]

Array = np.ndarray[Any, Any]
SAME_CALL, SENT = 0, 1
NEAR_NS = 60_000_000_000
"""Members of one call begin within a minute of each other, or the job hangs."""

_IDENTITY = ("incarnation", "rank", "category", "op", "name", "group", "seq", "peer")


def call_of(events: xr.Dataset, event: int) -> Array:
    """Return the positions of all members of the call that ``event`` belongs to, itself too; by identity, never by time.

    Parameters
    ----------
    events : Dataset, dims (event,)
    event : int
        Position of a collective, a transfer, or the wait for one.

    Returns
    -------
    int64 array, shape (member,)
        In the order of ranks; empty where the event is no transfer.
    """
    start = events["start_ns"].values
    near = np.flatnonzero(np.abs(start - start[event]) <= NEAR_NS + int(events["duration_ns"].values[event]))
    columns = {n: _column(events, n, near) for n in _IDENTITY}
    here = int(np.searchsorted(near, event))
    seq, group = columns["seq"], columns["group"]
    if seq[here] < 0:
        return np.empty(0, np.int64)
    same = (seq == seq[here]) & (group == group[here]) & (columns["incarnation"] == columns["incarnation"][here])
    same &= np.isin(columns["category"], (Category.COLLECTIVE, Category.P2P))
    at = np.flatnonzero(same)
    if (ends := _ends(columns, here)) is not None:
        at = np.array([i for i in at.tolist() if _ends(columns, i) == ends], np.int64)
    at = at[np.argsort(columns["rank"][at], kind="stable")]
    return near[at]


def _column(events: xr.Dataset, name: str, index: Array) -> Array:
    found = take(events, name, index)
    return events[name].values[index] if found is None else found  # too far apart to be read alone


def _ends(columns: Mapping[str, Any], event: int) -> tuple[int, int] | None:
    """(source, destination) of a transfer or of the wait for one; None for a collective."""
    op = columns["name"][event] if columns["category"][event] == Category.WAIT else columns["op"][event]
    if op not in (Op.SEND, Op.RECV):
        return None
    rank, peer = int(columns["rank"][event]), int(columns["peer"][event])
    return (rank, peer) if op == Op.SEND else (peer, rank)


def flows_of(events: xr.Dataset, row: Array, event: int, *, origin_ns: int) -> dict[str, Array]:
    """Return the lines of the call of one event.

    Parameters
    ----------
    row : int array, dims (event,)
        Display row of each event.
    origin_ns : int
        Subtracted from times.

    Returns
    -------
    dict
        ``x0, x1`` float64 (line,) ns since the origin; ``row0, row1`` uint32; ``kind`` uint8: 0 between the starts of neighbouring
        members of a collective, 1 from the start of a send to the end of its receive.
    """
    at = call_of(events, event)
    start = events["start_ns"].values[at] - origin_ns
    end = start + events["duration_ns"].values[at]
    op = take(events, "op", at)
    if len(at) == 2 and op is not None:
        sends = op == Op.SEND
        if sends.sum() == 1:
            s, r = int(np.flatnonzero(sends)[0]), int(np.flatnonzero(~sends)[0])
            return _lines(start[[s]], row[at[[s]]], end[[r]], row[at[[r]]], SENT)
    if len(at) < 2:
        none = np.empty(0)
        return _lines(none, none, none, none, SAME_CALL)
    return _lines(start[:-1], row[at[:-1]], start[1:], row[at[1:]], SAME_CALL)


def _lines(x0: Array, row0: Array, x1: Array, row1: Array, kind: int) -> dict[str, Array]:
    return {
        "x0": np.asarray(x0, np.float64),
        "row0": np.asarray(row0, np.uint32),
        "x1": np.asarray(x1, np.float64),
        "row1": np.asarray(row1, np.uint32),
        "kind": np.full(len(x0), kind, np.uint8),
    }
