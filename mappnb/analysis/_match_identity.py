"""Who a transfer is: (incarnation, group, sequence number), or its place in the group's order where numbers are absent or wrong."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pandas as pd
import xarray as xr

from mappnb.analysis._identity import transfer_keys
from mappnb.analysis._match_edit import align_sequences
from mappnb.errors import MappnbError
from mappnb.terms import Category, Op

__all__ = ["IDENTITIES", "Identity", "Transfers", "transfers_of"]

Array = np.ndarray[Any, Any]
Identity = Literal["auto", "seq", "order"]
IDENTITIES: tuple[str, ...] = ("auto", "seq", "order")
TRUSTED_FRACTION = 0.5
"""A channel is tried by order too if less than this share of the events of some member find partners that agree by their numbers."""


@dataclass(slots=True)
class Transfers:
    """The collectives and p2p events of a dataset with their identity, one entry per event.

    Attributes
    ----------
    index : int array
        Positions in the dataset.
    channel : int array
        Number of the (incarnation, group, source, target), source and target -1 for collectives.
    number : int64 array
        Number within the channel; -1: no identity.
    keys : int64 array, shape (channel, 4)
        Incarnation, group, source and target of each channel, sorted.
    by_order, at_odds : bool arrays, shape (channel,)
        Whether the numbers were found by order, and whether that was because the channel's own numbers disagree.
    op, size : int arrays
        Code of the operation, and bytes that must agree (-1 where uneven shares are usual).
    rank : int array
        Global rank.
    sending : bool array
        The sending side of a p2p.
    in_calls : tuple of arrays, optional
        :func:`sorted_calls` of the numbers, where it is known.
    """

    index: Array
    channel: Array
    number: Array
    keys: Array
    by_order: Array
    at_odds: Array
    op: Array
    size: Array
    rank: Array
    sending: Array
    in_calls: tuple[Array, Array] | None = None

    @property
    def p2p(self) -> Array:
        """Which channels are point-to-point."""
        return np.asarray(self.keys[:, 2] >= 0)

    @property
    def side(self) -> Array:
        """Who takes part: the rank, or for p2p 0 for the sender and 1 for the receiver."""
        return np.where(self.p2p[self.channel], np.where(self.sending, 0, 1), self.rank)


def transfers_of(events: xr.Dataset, identity: Identity = "auto") -> Transfers:
    """Return the transfers of a dataset with their identity.

    Parameters
    ----------
    events : Dataset, dims (event,)
    identity : str
        ``"seq"``: numbers as they are. ``"order"``: each group's order, whatever the numbers. ``"auto"``: numbers where members agree by
        them on op and bytes, order where there are none or where order makes more members agree.

    Raises
    ------
    MappnbError
        For another ``identity``.
    """
    if identity not in IDENTITIES:
        raise MappnbError(f"match: identity is {identity!r}; expected one of {', '.join(IDENTITIES)}")
    category = events.category.values
    index = np.flatnonzero((category == Category.COLLECTIVE) | (category == Category.P2P))
    source, target, sending = transfer_keys(events, index)
    columns = [events.incarnation.values[index], events.group.values[index], source, target]
    channel, keys = _channels([c.astype(np.int64) for c in columns])
    names = events.op.values[index]
    op = np.asarray(pd.factorize(names)[0], np.int64)
    size = np.where(names == Op.ALL_TO_ALL, -1, events.bytes.values[index])
    number = events.seq.values[index].astype(np.int64)
    number = np.where((source >= 0) | (target < 0), number, -1)  # a receive from nobody knows no channel
    rank = events["rank"].values[index].astype(np.int64)
    none = np.zeros(len(keys), bool)
    out = Transfers(index, channel, number, keys, none, none.copy(), op, size, rank, sending)
    if identity != "seq" and len(index):
        _resolve(out, events, always=identity == "order")
    return out


def _channels(columns: list[Array]) -> tuple[Array, Array]:
    """Return a number for each row, equal for equal rows and in the order of their values, and the rows."""
    if not len(columns[0]):
        return np.empty(0, np.int64), np.empty((0, len(columns)), np.int64)
    code = np.zeros(len(columns[0]), np.int64)
    for column in columns:
        each, unique = pd.factorize(column, sort=True)
        code, _ = pd.factorize(code * len(unique) + each, sort=True)
    first = np.full(int(code.max()) + 1, -1, np.int64)
    first[code[::-1]] = np.arange(len(code))[::-1]
    return np.asarray(code, np.int64), np.stack([c[first] for c in columns], axis=1)


def sorted_calls(t: Transfers, number: Array, which: Array) -> tuple[Array, Array]:
    """Return the entries ``which`` in the order of (incarnation, group, number, source, target, rank), and where a call begins."""
    channel = t.channel[which]
    group, _ = _channels([t.keys[:, 0], t.keys[:, 1]])
    spans = [group[channel], number[which], channel, t.rank[which]]
    sizes = [int(s.max(initial=0)) + 1 for s in spans]
    if np.prod([float(s) for s in sizes]) < 2.0**62:
        packed = spans[0]
        for span, size in zip(spans[1:], sizes[1:], strict=True):
            packed = packed * size + span
        order = np.argsort(packed, kind="stable")
        call = packed[order] // sizes[3]
        new = np.concatenate([[True], call[1:] != call[:-1]]) if len(call) else np.empty(0, bool)
        return which[order], new
    order = np.lexsort(spans[::-1])
    which, number, channel = which[order], number[which][order], channel[order]
    return which, np.concatenate([[True], (number[1:] != number[:-1]) | (channel[1:] != channel[:-1])])


def agreement(t: Transfers, which: Array, new: Array) -> Array:
    """Return, for entries sorted by :func:`sorted_calls`, whether their call has other members, each once, with the same op and bytes."""
    if not len(which):
        return np.zeros(0, bool)
    call = np.cumsum(new) - 1
    first = np.flatnonzero(new)
    count = np.diff(np.append(first, len(which)))
    head = which[first][call]
    p2p = t.p2p[t.channel[which]]
    rank = t.rank[which]
    odd = (t.size[which] != t.size[head]) | ((t.op[which] != t.op[head]) & ~p2p)
    odd |= np.append(False, (rank[1:] == rank[:-1]) & ~new[1:] & ~p2p[1:])
    num_odd = np.bincount(call, weights=odd)
    sends = np.bincount(call, weights=t.sending[which])
    good = (num_odd == 0) & (count >= 2) & (~p2p[first] | ((count == 2) & (sends == 1)))
    return np.asarray(good[call])


def _resolve(t: Transfers, events: xr.Dataset, *, always: bool) -> None:
    """Give the channels whose own numbers are absent or do worse their numbers by order; changes ``t``."""
    t.in_calls = which, new = sorted_calls(t, t.number, np.flatnonzero(t.number >= 0))
    agreed = agreement(t, which, new)
    total = np.bincount(t.channel, minlength=len(t.keys))
    good = np.bincount(t.channel[which], weights=agreed, minlength=len(t.keys))
    unnumbered = np.bincount(t.channel, weights=t.number < 0, minlength=len(t.keys))
    known = (t.keys[:, 2] >= 0) == (t.keys[:, 3] >= 0)
    known &= always | (t.keys[:, 1] >= 0) | (t.keys[:, 2] >= 0)  # calls of no group have no members to be matched with
    side = t.side
    suspect = known & (always | (unnumbered > 0) | _stands_alone(t, side, which, agreed))
    if not suspect.any():
        return
    sorted_by_channel = np.split(np.argsort(t.channel, kind="stable"), np.cumsum(total)[:-1])
    trial = np.full(len(t.index), -1, np.int64)
    for channel in np.flatnonzero(suspect).tolist():
        mine = sorted_by_channel[channel]
        if len(np.unique(side[mine])) < 2 and not unnumbered[channel] and not always:
            continue
        trial[mine] = _by_order(t, events, mine, side)
        better = int(agreement(t, *sorted_calls(t, trial, mine)).sum()) > good[channel]
        if always or better or unnumbered[channel] == total[channel]:
            t.number[mine] = trial[mine]
            t.by_order[channel] = True
            t.at_odds[channel] = unnumbered[channel] < total[channel]
            t.in_calls = None


def _stands_alone(t: Transfers, side: Array, which: Array, agreed: Array) -> Array:
    """Return the channels in which the numbers leave most events of some member without partners that agree."""
    sides = int(side.max(initial=0)) + 1
    member, unique = t.channel * sides + side, np.arange(len(t.keys) * sides)
    if len(unique) > max(4 * len(member), 1000):  # many groups of few ranks
        member, unique = pd.factorize(member)
    total = np.bincount(member, minlength=len(unique))
    good = np.bincount(member[which], weights=agreed, minlength=len(unique))
    out = np.zeros(len(t.keys), bool)
    out[(unique // sides)[good < TRUSTED_FRACTION * total]] = True
    return out


def _by_order(t: Transfers, events: xr.Dataset, mine: Array, side: Array) -> Array:
    """Return the numbers of the events of one channel by the order of each member; by step too, where steps are told."""
    raw = events.raw_start_ns.values[t.index[mine]]
    start = np.where(raw >= 0, raw, events.start_ns.values[t.index[mine]])
    step = events["step"].values[t.index[mine]].astype(np.int64)
    order = np.lexsort((start, side[mine]))
    op = np.zeros(len(mine), np.int64) if t.keys[t.channel[mine[0]], 2] >= 0 else t.op[mine]
    plain, _ = _channels([op, t.size[mine]])
    dated, _ = _channels([step, op, t.size[mine]])
    best = np.empty(0, np.int64)
    most = -1
    for tokens in (dated, plain) if (step >= 0).all() else (plain,):
        bounds = np.flatnonzero(np.diff(side[mine][order])) + 1
        columns = align_sequences(np.split(tokens[order], bounds))
        number = np.empty(len(mine), np.int64)
        number[order] = np.concatenate(columns)
        shared = int((np.bincount(number)[number] > 1).sum())
        if shared > most:
            best, most = number, shared
    return best
