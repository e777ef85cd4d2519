"""Which events of different ranks are one collective, or the two sides of one transfer. By identity, never by time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr

from mappnb.analysis._input import events_of
from mappnb.datasets import groups_of
from mappnb.run import Run
from mappnb.terms import Category, Op

__all__ = ["last_arrival_ns", "match"]

Array = np.ndarray[Any, Any]


@dataclass(slots=True)
class _Calls:
    """Transfers grouped into calls: ``index`` of the event, ``call`` it belongs to, calls numbered from 0."""

    index: Array
    call: Array
    num_calls: int
    p2p: Array


def _keys(events: xr.Dataset, index: Array) -> Array:
    """Identity of each transfer: (incarnation, group, seq) and, for p2p, (source, destination)."""
    op = events.op.values[index]
    rank, peer = events["rank"].values[index].astype(np.int64), events.peer.values[index].astype(np.int64)
    p2p = events.category.values[index] == Category.P2P
    waits = events.category.values[index] == Category.WAIT
    name = events.name.values[index]
    p2p |= waits & np.isin(name, [Op.SEND, Op.RECV])
    sending = np.where(waits, name == Op.SEND, op == Op.SEND)
    source = np.where(p2p, np.where(sending, rank, peer), -1)
    target = np.where(p2p, np.where(sending, peer, rank), -1)
    keys = [events.incarnation.values[index], events.group.values[index], events.seq.values[index], source, target]
    return np.stack([k.astype(np.int64) for k in keys], 1)


def _calls(events: xr.Dataset) -> _Calls:
    category = events.category.values
    index = np.flatnonzero(((category == Category.COLLECTIVE) | (category == Category.P2P)) & (events.seq.values >= 0))
    keys = _keys(events, index)
    order = np.lexsort(keys.T[::-1])
    ordered = keys[order]
    new = np.ones(len(order), bool)
    new[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
    call = np.empty(len(order), np.int64)
    call[order] = np.cumsum(new) - 1
    return _Calls(index, call, int(new.sum()), ordered[new, 3] >= 0)


def last_arrival_ns(events: xr.Dataset) -> Array:
    """Return, for every event, when the last member of its call arrived, on the run clock.

    Parameters
    ----------
    events : Dataset, dims (event,)

    Returns
    -------
    int64 array, shape (event,)
        ns; the event's own start where it is no transfer, no wait for one, or where no other member is known. An event of
        category ``wait`` takes the arrival of the call that it waits for.
    """
    out: Array = events.start_ns.values.astype(np.int64).copy()
    calls = _calls(events)
    if not calls.num_calls:
        return out
    last = np.full(calls.num_calls, np.iinfo(np.int64).min)
    np.maximum.at(last, calls.call, events.start_ns.values[calls.index])
    out[calls.index] = last[calls.call]
    waits = np.flatnonzero((events.category.values == Category.WAIT) & (events.seq.values >= 0))
    if len(waits):
        known = {tuple(k): c for k, c in zip(_keys(events, calls.index).tolist(), calls.call.tolist(), strict=True)}
        found = np.array([known.get(tuple(k), -1) for k in _keys(events, waits).tolist()])
        hit = found >= 0
        out[waits[hit]] = last[found[hit]]
    return out


def match(run: Run | xr.Dataset, *, step: int | slice | None = None) -> xr.Dataset:
    """Return every collective and transfer with its members side by side.

    Parameters
    ----------
    run : Run or Dataset, dims (event,)
        Events of all ranks.
    step : int or slice, optional
        Steps to look at.

    Returns
    -------
    Dataset, dims (call, member)
        ``group, op, seq, incarnation, step`` (call,); ``rank, start_ns, end_ns, bytes`` (call, member), -1 where a call has fewer
        members than others; ``complete`` (call,): every member of the group is there once and agrees on op and bytes (an
        all-to-all may send uneven shares), or both sides of a transfer are. Members are in the order of their ranks.

    Notes
    -----
    Identity is (incarnation, group, seq), for p2p (incarnation, group, source, destination, seq): numbers counted at issue time.
    """
    events = events_of(run, step)
    calls = _calls(events)
    rank = events["rank"].values[calls.index]
    order = np.lexsort((rank, calls.call))
    index, call = calls.index[order], calls.call[order]
    count = np.bincount(call, minlength=calls.num_calls)
    first = np.concatenate([[0], np.cumsum(count)[:-1]]).astype(np.int64) if calls.num_calls else np.empty(0, np.int64)
    member = np.arange(len(index)) - first[call] if len(index) else np.empty(0, np.int64)
    shape = (calls.num_calls, int(count.max(initial=0)))
    start, duration = events.start_ns.values[index], events.duration_ns.values[index]
    grids = {
        "rank": events["rank"].values[index],
        "start_ns": start,
        "end_ns": start + duration,
        "bytes": events.bytes.values[index],
    }
    data: dict[str, Any] = {}
    for name, value in grids.items():
        grid = np.full(shape, -1, np.int64)
        grid[call, member] = value
        data[name] = (("call", "member"), grid)
    head = index[first] if calls.num_calls else np.empty(0, np.int64)
    op = events.op.values[head]
    data["op"] = ("call", np.where(calls.p2p, "send_recv", op).astype(object))
    for name in ("group", "seq", "incarnation", "step"):
        data[name] = ("call", events[name].values[head])
    data["complete"] = ("call", _complete(events, calls, index, call, count))
    return xr.Dataset(data, attrs=dict(events.attrs))


def _complete(events: xr.Dataset, calls: _Calls, index: Array, call: Array, count: Array) -> Array:
    sizes = {gid: len(g.get("ranks", [])) for gid, g in groups_of(events).items()}
    head = np.concatenate([[0], np.cumsum(count)[:-1]]).astype(np.int64) if calls.num_calls else np.empty(0, np.int64)
    wanted = np.array([sizes.get(int(g), -1) for g in events.group.values[index][head]], np.int64)
    wanted = np.where(
        calls.p2p, 2, wanted if sizes else count
    )  # a trace without a table of groups: who came is all there is
    ok = count == wanted
    for name in ("op", "bytes"):
        value = events[name].values[index]
        same = value == value[head[call]]
        same = same | (calls.p2p[call] if name == "op" else events.op.values[index] == Op.ALL_TO_ALL)
        ok &= np.bincount(call, weights=same, minlength=calls.num_calls) == count
    ranks = events["rank"].values[index]
    twice = (
        np.concatenate([[False], (ranks[1:] == ranks[:-1]) & (call[1:] == call[:-1])])
        if len(ranks)
        else np.empty(0, bool)
    )
    ok[call[twice & ~calls.p2p[call]]] = False
    both = np.bincount(call, weights=events.op.values[index] == Op.SEND, minlength=calls.num_calls)
    return np.asarray(ok & (~calls.p2p | (both == 1)))
