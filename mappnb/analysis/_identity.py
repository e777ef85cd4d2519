"""Which events belong to one call: members of a collective, both sides of a transfer, and the waits for them. By identity."""

from __future__ import annotations

from typing import Any

import numpy as np
import xarray as xr

from mappnb.terms import Category, Op

__all__ = ["call_ids", "is_point_to_point", "is_sending"]

Array = np.ndarray[Any, Any]


def is_point_to_point(events: xr.Dataset) -> Array:
    """Return which events are a send, a receive, or a wait for one; bool array, shape (event,)."""
    category = events.category.values
    waits = (category == Category.WAIT) & np.isin(events.name.values, (Op.SEND, Op.RECV))
    return np.asarray((category == Category.P2P) | waits)


def is_sending(events: xr.Dataset) -> Array:
    """Return which events are the sender's side of a transfer; bool array, shape (event,)."""
    waits = events.category.values == Category.WAIT
    return np.asarray(is_point_to_point(events) & (np.where(waits, events.name.values, events.op.values) == Op.SEND))


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
    rank, peer = events["rank"].values[index].astype(np.int64), events.peer.values[index].astype(np.int64)
    pair, sending = is_point_to_point(events)[index], is_sending(events)[index]
    source = np.where(pair, np.where(sending, rank, peer), -1)
    target = np.where(pair, np.where(sending, peer, rank), -1)
    fields = (events.incarnation.values[index], events.group.values[index], events.seq.values[index], source, target)
    order = np.lexsort(fields)
    keys = np.stack([f[order].astype(np.int64) for f in fields], 1)
    new = np.ones(len(order), bool)
    new[1:] = (keys[1:] != keys[:-1]).any(axis=1)
    out[index[order]] = np.cumsum(new) - 1
    return out
