"""Who came last to each collective, and how long before that the last but one came."""

from __future__ import annotations

from typing import Any

import numpy as np
import xarray as xr

from mappnb.analysis._input import events_of
from mappnb.analysis._match_identity import Identity
from mappnb.analysis.matching import Calls, calls_of, complete_calls
from mappnb.run import Run

__all__ = ["last_arrivals"]

Array = np.ndarray[Any, Any]
_WORDS = {
    "last_rank": ("1", "rank that came last; of those that came at once, the lowest"),
    "second_rank": ("1", "rank that came last but one"),
    "last_ns": ("ns", "when the last one came, on the run clock"),
    "margin_ns": ("ns", "from the last but one to the last"),
    "spread_ns": ("ns", "from the first to the last"),
    "num_members": ("1", "ranks that came"),
    "bytes": ("bytes", "of the last one's call"),
    "complete": ("1", "every member of the group is there once, with the same operation and bytes"),
}


def last_arrivals(run: Run | xr.Dataset, *, step: int | slice | None = None, identity: Identity = "auto") -> xr.Dataset:
    """Return, for every collective, which rank came last and how long before that the last but one came.

    Parameters
    ----------
    run : Run or Dataset, dims (event,)
        Events of all ranks, recorded, imported or simulated.
    step : int or slice, optional
        Steps to look at; all by default.
    identity : str
        As of :func:`mappnb.analysis.match`: calls without numbers, as in imported traces, are matched by order.

    Returns
    -------
    Dataset, dims (call,)
        ``incarnation, group, op, seq, step`` of the call; ``last_rank`` and ``second_rank``; ``last_ns``, when the last one came, on the
        run clock; ``margin_ns``, how long before that the last but one came: what the last one alone cost the others; ``spread_ns``, how
        long before that the first one came; ``num_members`` that came; ``bytes``; ``complete``, as of :func:`mappnb.analysis.match`. In
        order of incarnation, group and number. Calls of fewer than two ranks, and messages, are left out.

    Notes
    -----
    To come is to begin the collective: its kernel on a device lane, else the call on the host. A rank that calls twice in one call counts
    with the first. Between hosts a margin is as good as the clocks: compare it with ``bound_ns`` of :func:`mappnb.analysis.align` before
    you blame anybody. Who comes last may itself have waited for another: ``idle_blocks`` follows such chains.
    """
    events = events_of(run, step)
    calls = calls_of(events, identity)
    rows, call, which = _members(calls)
    first = np.flatnonzero(np.append(True, call[1:] != call[:-1])) if len(rows) else np.empty(0, np.int64)
    start = events.start_ns.values[calls.index[rows]].astype(np.int64)
    rank = calls.transfers.rank[calls.entry[rows]]
    last_ns, last = _latest(start, call, first)
    others = start.copy()
    others[last] = np.iinfo(np.int64).min
    second_ns, second = _latest(others, call, first)
    head = calls.index[calls.first[which]]
    values: dict[str, Any] = {name: events[name].values[head] for name in ("incarnation", "group", "op")}
    values |= {"seq": calls.transfers.number[calls.entry[calls.first[which]]], "step": events["step"].values[head]}
    values |= {
        "last_rank": rank[last],
        "second_rank": rank[second],
        "last_ns": last_ns,
        "margin_ns": last_ns - second_ns,
        "spread_ns": last_ns - (np.minimum.reduceat(start, first) if len(first) else last_ns),
        "num_members": np.diff(np.append(first, len(rows))),
        "bytes": events.bytes.values[calls.index[rows[last]]],
        "complete": complete_calls(events, calls)[which],
    }
    data = {
        k: ("call", v, dict(zip(("units", "long_name"), _WORDS.get(k, ()), strict=False))) for k, v in values.items()
    }
    return xr.Dataset(data, attrs=dict(events.attrs))


def _members(calls: Calls) -> tuple[Array, Array, Array]:
    """Return the rows of collectives that at least two ranks came to, once per rank, their new numbers of call, and the old of each."""
    rank = calls.transfers.rank[calls.entry]
    again = np.append(False, (rank[1:] == rank[:-1]) & (calls.call[1:] == calls.call[:-1])) if len(rank) else rank > 0
    rows = np.flatnonzero(~again & ~calls.p2p[calls.call])
    some = np.bincount(calls.call[rows], minlength=calls.num_calls) > 1
    rows = rows[some[calls.call[rows]]]
    return rows, (np.cumsum(some) - 1)[calls.call[rows]], np.flatnonzero(some)


def _latest(start: Array, call: Array, first: Array) -> tuple[Array, Array]:
    """Return the latest start of each call, and the first row that has it; rows are in the order of calls."""
    if not len(first):
        return np.empty(0, np.int64), np.empty(0, np.int64)
    latest = np.maximum.reduceat(start, first)
    hits = np.flatnonzero(start == latest[call])
    return latest, hits[np.flatnonzero(np.append(True, np.diff(call[hits]) != 0))]
