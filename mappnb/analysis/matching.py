"""Which events of different ranks are one collective, or the two sides of one transfer. By identity, never by time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr

from mappnb.analysis._identity import transfer_keys
from mappnb.analysis._input import events_of
from mappnb.analysis._match_identity import Identity, Transfers, agreement, sorted_calls, transfers_of
from mappnb.datasets import groups_of
from mappnb.run import Run
from mappnb.terms import Category

__all__ = ["last_arrival_ns", "match"]

Array = np.ndarray[Any, Any]


@dataclass(slots=True)
class Calls:
    """Transfers grouped into calls, in the order of call and rank.

    Attributes
    ----------
    transfers : Transfers
        All transfers, those without an identity included.
    entry : int array, shape (row,)
        Entry of ``transfers`` of each member of each call.
    index : int array, shape (row,)
        Its position in the dataset.
    call : int array, shape (row,)
        Number of the call, from 0.
    first : int array, shape (call,)
        First row of each call.
    agreed : bool array, shape (row,)
        The call has other members, each once, with the same op and bytes.
    """

    transfers: Transfers
    entry: Array
    index: Array
    call: Array
    first: Array
    agreed: Array

    @property
    def num_calls(self) -> int:
        """Number of calls."""
        return len(self.first)

    @property
    def count(self) -> Array:
        """Number of members of each call."""
        return np.diff(np.append(self.first, len(self.index)))

    @property
    def p2p(self) -> Array:
        """Which calls are point-to-point, shape (call,)."""
        return np.asarray(self.transfers.p2p[self.transfers.channel[self.entry[self.first]]], bool)


def calls_of(events: xr.Dataset, identity: Identity = "auto") -> Calls:
    """Return the transfers of a dataset grouped into calls."""
    t = transfers_of(events, identity)
    entry, new = t.in_calls or sorted_calls(t, t.number, np.flatnonzero(t.number >= 0))
    return Calls(t, entry, t.index[entry], np.cumsum(new) - 1, np.flatnonzero(new), agreement(t, entry, new))


def _keys(events: xr.Dataset, index: Array, *, own_rank: bool) -> Array:
    """Identity of transfers and waits by their numbers: (incarnation, group, seq) and, for p2p, (source, destination); and the rank."""
    source, target, _ = transfer_keys(events, index)
    keys = [events.incarnation.values[index], events.group.values[index], events.seq.values[index], source, target]
    keys += [events["rank"].values[index]] if own_rank else []
    return np.stack([k.astype(np.int64) for k in keys], 1)


def last_arrival_ns(events: xr.Dataset, *, identity: Identity | None = None) -> Array:
    """Return, for every event, when the last member of its call arrived, on the run clock.

    Parameters
    ----------
    events : Dataset, dims (event,)
    identity : str, optional
        As of :func:`match`. By default ``"auto"`` for the events of an imported run (``attrs["imported"]``), which may have no numbers or
        wrong ones, and ``"seq"`` for all others.

    Returns
    -------
    int64 array, shape (event,)
        ns; the event's own start where it is no transfer, no wait for one, or where no other member is known. An event of
        category ``wait`` takes the arrival of the call that it waits for.
    """
    out: Array = events.start_ns.values.astype(np.int64).copy()
    identity = identity or ("auto" if events.attrs.get("imported") else "seq")
    calls = calls_of(events, identity)
    if not calls.num_calls:
        return out
    last = np.full(calls.num_calls, np.iinfo(np.int64).min)
    np.maximum.at(last, calls.call, events.start_ns.values[calls.index])
    out[calls.index] = last[calls.call]
    waits = np.flatnonzero((events.category.values == Category.WAIT) & (events.seq.values >= 0))
    if len(waits):
        own = identity != "seq"  # numbers that members do not share tell a wait its own rank's call
        keys = _keys(events, calls.index, own_rank=own).tolist()
        known = {tuple(k): c for k, c in zip(keys, calls.call.tolist(), strict=True)}
        found = np.array([known.get(tuple(k), -1) for k in _keys(events, waits, own_rank=own).tolist()])
        hit = found >= 0
        out[waits[hit]] = last[found[hit]]
    return out


def match(run: Run | xr.Dataset, *, step: int | slice | None = None, identity: Identity = "auto") -> xr.Dataset:
    """Return every collective and transfer with its members side by side.

    Parameters
    ----------
    run : Run or Dataset, dims (event,)
        Events of all ranks.
    step : int or slice, optional
        Steps to look at.
    identity : str
        ``"seq"``: by sequence number. ``"order"``: by the order of each group's calls on each rank. ``"auto"``: by number, and by order in
        those groups that have no numbers, or whose members agree on op and bytes more often by order.

    Returns
    -------
    Dataset, dims (call, member)
        ``group, op, seq, incarnation, step`` (call,); ``rank, start_ns, end_ns, bytes`` (call, member), -1 where a call has fewer
        members than others; ``complete`` (call,): every member of the group is there once and agrees on op and bytes (an
        all-to-all may send uneven shares), or both sides of a transfer are. Members are in the order of their ranks. In the attributes:
        ``unmatched_fraction``, the share of transfers that found no member to agree with; ``groups_by_order``, how many groups (or pairs,
        for p2p) were matched by order: there ``seq`` is the place in the common order.

    Notes
    -----
    Identity is (incarnation, group, seq), for p2p (incarnation, group, source, destination, seq): numbers counted at issue time. By order:
    the members' sequences of (step, op, bytes) are aligned with the fewest insertions and deletions, p2p first in, first out. Never by
    time. :func:`match_report` tells what is missing, extra, cut off or at odds.
    """
    events = events_of(run, step)
    calls = calls_of(events, identity)
    index, call, count = calls.index, calls.call, calls.count
    member = np.arange(len(index)) - calls.first[call]
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
    head = index[calls.first]
    data["op"] = ("call", np.where(calls.p2p, "send_recv", events.op.values[head]).astype(object))
    data["seq"] = ("call", calls.transfers.number[calls.entry[calls.first]])
    for name in ("group", "incarnation", "step"):
        data[name] = ("call", events[name].values[head])
    data["complete"] = ("call", complete_calls(events, calls))
    attrs = {
        "unmatched_fraction": unmatched_fraction(calls),
        "groups_by_order": int(calls.transfers.by_order.sum()),
    }
    return xr.Dataset(data, attrs={**events.attrs, **attrs})


def unmatched_fraction(calls: Calls) -> float:
    """Return the share of transfers that found no member to agree with on op and bytes; 0 where there are none."""
    total = len(calls.transfers.index)
    return 1.0 - float(calls.agreed.sum()) / total if total else 0.0


def complete_calls(events: xr.Dataset, calls: Calls) -> Array:
    """Return which calls have every member of their group once, with equal op and bytes, or both sides of a transfer."""
    sizes = {gid: len(g.get("ranks", [])) for gid, g in groups_of(events).items()}
    index, call, count, p2p = calls.index, calls.call, calls.count, calls.p2p
    group, code = np.unique(events.group.values[index[calls.first]], return_inverse=True)
    wanted = np.array([sizes.get(int(g), -1) for g in group], np.int64)[code]
    wanted = np.where(p2p, 2, wanted if sizes else count)  # a trace without a table of groups: who came is all there is
    ok = count == wanted
    t, head = calls.transfers, calls.entry[calls.first]
    same = (t.size[calls.entry] == t.size[head][call]) & ((t.op[calls.entry] == t.op[head][call]) | p2p[call])
    ok &= np.bincount(call, weights=same, minlength=calls.num_calls) == count
    ranks = t.rank[calls.entry]
    twice = np.flatnonzero((ranks[1:] == ranks[:-1]) & (call[1:] == call[:-1]) & ~p2p[call[1:]])
    ok[call[twice]] = False
    both = np.bincount(call, weights=t.sending[calls.entry], minlength=calls.num_calls)
    return np.asarray(ok & (~p2p | (both == 1)))
