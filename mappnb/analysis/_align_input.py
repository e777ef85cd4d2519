"""What an alignment looks at: who sends and who receives in each call, on clocks that ranks of one host share."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from mappnb.analysis.matching import Calls, calls_of, unmatched_fraction
from mappnb.errors import MappnbError
from mappnb.terms import Flag, Op

__all__ = ["Observations", "observe"]

Array = np.ndarray[Any, Any]
SYNCHRONISING: tuple[str, ...] = (Op.ALL_REDUCE, Op.ALL_GATHER, Op.REDUCE_SCATTER, Op.ALL_TO_ALL, Op.BARRIER)
"""Nobody leaves these before the last member has arrived: each member needs what every other one gives."""
FROM_ROOT: tuple[str, ...] = (Op.BROADCAST, Op.SCATTER)
TO_ROOT: tuple[str, ...] = (Op.REDUCE, Op.GATHER)
_NO_END = Flag.OPEN | Flag.CLIPPED | Flag.REPAIRED | Flag.FAILED
_NO_START = Flag.CLIPPED | Flag.FAILED
_FAR_NS = 1_000_000_000


@dataclass(slots=True)
class Observations:
    """Members of calls, one row each, in the order of calls.

    Attributes
    ----------
    ranks, clock : int arrays, shape (rank,)
        Ranks that have events, and the number of the clock that each uses.
    prior_ns : int64 array, shape (clock,)
        What was added to a clock's own times to get ``start`` and ``end``, plus ``origin_ns``.
    read_ns : int64 array, shape (clock,)
        What the events' own ``start_ns`` adds to them; ``prior_ns`` unless that leaves calls minutes apart.
    origin_ns : int
        Time that counts as 0 in ``start`` and ``end``.
    call, kind : int arrays, shape (row,)
        Number of the call, and of its (group or pair, operation).
    rank : int array, shape (row,)
        Index into ``ranks``.
    start, end : float arrays, shape (row,)
        ns.
    sends, receives : bool arrays, shape (row,)
        No receiver of a call ends before a sender of it has started.
    measured : bool array, shape (row,)
        The end is when the member was released by a synchronising collective.
    unmatched_fraction : float
        Share of transfers that found no member to agree with.
    """

    ranks: Array
    clock: Array
    prior_ns: Array
    read_ns: Array
    origin_ns: int
    call: Array
    kind: Array
    rank: Array
    start: Array
    end: Array
    sends: Array
    receives: Array
    measured: Array
    unmatched_fraction: float

    @property
    def num_clocks(self) -> int:
        """Number of clocks."""
        return len(self.prior_ns)

    @property
    def row_clock(self) -> Array:
        """Clock of each row."""
        return np.asarray(self.clock[self.rank])


def observe(events: xr.Dataset, ranks: Iterable[int] | None = None) -> Observations:
    """Return the rows of one incarnation's events.

    Parameters
    ----------
    events : Dataset, dims (event,)
        Of one incarnation.
    ranks : iterable of int, optional
        Ranks to align; by default those of the events.

    Raises
    ------
    MappnbError
        If there are no events.
    """
    if not events.sizes["event"]:
        raise MappnbError("align: no events; record or import a run with collectives of several ranks first")
    ranks = np.unique([*(ranks or ()), *pd.unique(events["rank"].values)]).astype(np.int64)
    clock = _clocks(events, ranks)
    calls = calls_of(events)
    index, row_rank, roles = _rows(events, calls, ranks)
    raw = events.raw_start_ns.values[index]
    start = events.start_ns.values[index].astype(np.int64)
    own = raw if bool((raw >= 0).all()) else start
    read = _prior(own, start, clock[row_rank], int(clock.max()) + 1)
    call = calls.call[roles.pop("at")]
    length = events.duration_ns.values[index]
    prior = _near(read, own + length, clock[row_rank], call)
    begin = own + prior[clock[row_rank]]
    origin = int(begin.min(initial=np.iinfo(np.int64).max)) if len(begin) else 0
    begin_ns = (begin - origin).astype(np.float64)
    kind = np.asarray(pd.factorize(roles.pop("kind"))[0], np.int64)
    return Observations(
        ranks, clock, prior, read, origin, call, kind, row_rank, begin_ns, begin_ns + length,
        unmatched_fraction=unmatched_fraction(calls), **roles,
    )  # fmt: skip


def _clocks(events: xr.Dataset, ranks: Array) -> Array:
    """Return the number of the clock of each rank: shared where the dataset's attributes say so."""
    shared = json.loads(events.attrs.get("clocks", "{}"))
    number = int(events.incarnation.values[0])
    name = {int(r): -1 - i for i, members in enumerate(shared.get(str(number), [])) for r in members}
    return np.asarray(pd.factorize(np.array([name.get(r, r) for r in ranks.tolist()]))[0], np.int64)


def _rows(events: xr.Dataset, calls: Calls, ranks: Array) -> tuple[Array, Array, dict[str, Array]]:
    """Return the event, the rank and the roles of each member of the calls whose members agree."""
    t = calls.transfers
    at = np.flatnonzero(calls.agreed)
    entry, index = calls.entry[at], calls.index[at]
    rank = t.rank[entry]
    codes, names = pd.factorize(events.op.values[index])
    of_op = {k: np.isin(names.astype(str), v)[codes] if len(names) else np.empty(0, bool) for k, v in _OPS.items()}
    flags = events.flags.values[index]
    root = events.peer.values[index]
    is_root, p2p = rank == root, t.p2p[t.channel[entry]]
    sync = of_op["sync"] & ((events.bytes.values[index] != 0) | of_op["barrier"])
    rooted = root >= 0
    sends = sync | (p2p & t.sending[entry]) | (rooted & ((of_op["from"] & is_root) | (of_op["to"] & ~is_root)))
    gets = sync | (p2p & ~t.sending[entry]) | (rooted & ((of_op["from"] & ~is_root) | (of_op["to"] & is_root)))
    ends = (flags & _NO_END) == 0
    roles = {
        "at": at,
        "kind": t.channel[entry] * (int(codes.max(initial=0)) + 1) + codes,
        "sends": sends & ((flags & _NO_START) == 0),
        "receives": gets & ends,
        "measured": sync & ends & ((flags & Flag.ASYNC) == 0),
    }
    return index, np.searchsorted(ranks, rank), roles


_OPS = {"sync": SYNCHRONISING, "barrier": (Op.BARRIER,), "from": FROM_ROOT, "to": TO_ROOT}


def _prior(own: Array, start: Array, clock: Array, num_clocks: int) -> Array:
    """Return what the dataset adds to each clock's own times now: the first of its values, which is exact for a constant."""
    prior = np.zeros(num_clocks, np.int64)
    prior[clock[::-1]] = (start - own)[::-1]
    return prior


def _near(prior: Array, own_end: Array, clock: Array, call: Array) -> Array:
    """Return priors by which the ends of a call lie near one another; the given ones where they do so already."""
    end = own_end + prior[clock]
    new = np.flatnonzero(np.append(True, call[1:] != call[:-1])) if len(call) else np.empty(0, np.int64)
    if not len(new) or int((np.maximum.reduceat(end, new) - np.minimum.reduceat(end, new)).max()) < 60 * _FAR_NS:
        return prior
    out, seen = prior.copy(), np.zeros(len(prior), bool)
    seen[clock[0]] = True
    bounds = np.append(new, len(call))
    for _ in range(len(prior)):
        before = int(seen.sum())
        for a, b in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
            known = seen[clock[a:b]]
            if known.all() or not known.any():
                continue
            fixed = a + int(np.argmax(known))
            there = own_end[fixed] + out[clock[fixed]]
            rows = np.arange(a, b)[~known]
            out[clock[rows]] = there - own_end[rows]
            seen[clock[rows]] = True
            if seen.all():
                return out
        if seen.all() or int(seen.sum()) == before:
            break
    return out
