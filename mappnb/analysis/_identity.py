"""Which events belong to one call: members of a collective, both sides of a transfer, and the waits for them. By identity."""

from __future__ import annotations

from typing import Any

import numpy as np
import xarray as xr

from mappnb.terms import Category, Op

__all__ = ["call_ids", "is_point_to_point", "is_sending", "transfer_keys"]

Array = np.ndarray[Any, Any]


def sides(events: xr.Dataset, index: Array | slice = slice(None)) -> tuple[Array, Array]:
    """Return which of some events are a send, a receive, or a wait for one, and which of all are the sender's side; bool arrays."""
    category, op = events.category.values[index], events.op.values[index]
    pair, sending = category == Category.P2P, op == Op.SEND
    waits = category == Category.WAIT
    if waits.any():
        name = events.name.values[index]
        pair = pair | (waits & ((name == Op.SEND) | (name == Op.RECV)))
        sending = np.where(waits, name == Op.SEND, sending)
    return np.asarray(pair, bool), np.asarray(sending, bool)


def transfer_keys(events: xr.Dataset, index: Array) -> tuple[Array, Array, Array]:
    """Return source, target (-1 for collectives) and whether each transfer, or wait for one, is the sending side."""
    rank, peer = events["rank"].values[index].astype(np.int64), events.peer.values[index].astype(np.int64)
    pair, sending = sides(events, index)
    source = np.where(pair, np.where(sending, rank, peer), -1)
    target = np.where(pair, np.where(sending, peer, rank), -1)
    return source, target, sending


def is_point_to_point(events: xr.Dataset) -> Array:
    """Return which events are a send, a receive, or a wait for one; bool array, shape (event,)."""
    return sides(events)[0]


def is_sending(events: xr.Dataset) -> Array:
    """Return which events are the sender's side of a transfer; bool array, shape (event,)."""
    pair, sending = sides(events)
    return np.asarray(pair & sending)


def call_ids(events: xr.Dataset) -> Array:
    """Return a number for each event that is the same for all events of one call.

    Parameters
    ----------
    events : Dataset, dims (event,)

    Returns
    -------
    int64 array, shape (event,)
        -1 for events that are no transfer and no wait for one, or have no sequence number.

    Notes
    -----
    Identity is (incarnation, group, seq), for transfers between two ranks with (source, destination).
    """
    category = events.category.values
    index = np.flatnonzero(
        np.isin(category, (Category.COLLECTIVE, Category.P2P, Category.WAIT)) & (events.seq.values >= 0)
    )
    out = np.full(events.sizes["event"], -1, np.int64)
    if not len(index):
        return out
    source, target, _ = transfer_keys(events, index)
    fields = (events.incarnation.values[index], events.group.values[index], events.seq.values[index], source, target)
    order = np.lexsort(fields)
    keys = np.stack([f[order].astype(np.int64) for f in fields], 1)
    new = np.ones(len(order), bool)
    new[1:] = (keys[1:] != keys[:-1]).any(axis=1)
    out[index[order]] = np.cumsum(new) - 1
    return out
