"""Where the time of one rank in one step went, by operation, against its peers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from mappnb.analysis._input import issue_only
from mappnb.analysis._intervals import innermost_segments
from mappnb.terms import Category, Flag

__all__ = ["MOST_PEERS", "Ops", "op_rows"]

Array = np.ndarray[Any, Any]
MOST_PEERS = 15
"""Peers whose events are read: enough for a steady median, and not the whole run."""
MOST_OPS = 24
"""Bars that are drawn: as many as can be read."""
_KEYS = ["category", "op", "name", "phase", "layer", "stage"]
TRANSFERS = (Category.COLLECTIVE, Category.P2P, Category.WAIT)


@dataclass(frozen=True, slots=True)
class Ops:
    """Operations of a rank in a step, the largest excess over the peers first.

    Attributes
    ----------
    frame : DataFrame
        ``label``, ``category``, ``own_s``, ``peers_s`` (median; NaN without peers), ``count``, ``of`` (group number).
    group : int array, dims (event,)
        Group number of each event of the rank; -1 for what is not counted.
    left_out : int
        Operations that are too small to be shown.
    num_peers : int
    """

    frame: pd.DataFrame
    group: Array
    left_out: int
    num_peers: int


def op_rows(events: xr.Dataset, rank: int) -> Ops:
    """Return self time by operation, nested spans taken out; transfers with the waiting that is in them.

    Parameters
    ----------
    events : Dataset, dims (event,)
        Of one step: the rank's and its peers'.
    rank : int
    """
    own_s = _self_time(events)
    frame = pd.DataFrame({k: events[k].values for k in _KEYS})
    group = frame.groupby(_KEYS, sort=False).ngroup().to_numpy()
    of_rank = events["rank"].values
    counted = own_s >= 0
    num = int(group.max(initial=-1)) + 1
    ranks = [int(r) for r in np.unique(of_rank) if r != rank]
    sums = [_sums(group, own_s, counted & (of_rank == r), num) for r in ranks]
    mine = counted & (of_rank == rank)
    own = _sums(group, own_s, mine, num)
    peers = np.median(sums, axis=0) if sums else np.full(num, np.nan)
    count = np.bincount(group[mine], minlength=num)
    size = np.fmax(own, peers)
    there = np.flatnonzero(size > 0)
    above = np.nan_to_num(own - peers, nan=0.0) if ranks else own
    keep = there[np.argsort(-size[there], kind="stable")][:MOST_OPS]
    keep = keep[np.argsort(-above[keep], kind="stable")]
    first = np.array([int(np.flatnonzero(group == g)[0]) for g in keep], np.int64)
    rows = pd.DataFrame(
        {
            "label": [_label(frame.iloc[i]) for i in first],
            "category": [str(frame["category"].iloc[i]) for i in first],
            "own_s": own[keep],
            "peers_s": peers[keep],
            "count": count[keep],
            "of": keep,
        }
    )
    told = np.where(counted[of_rank == rank], group[of_rank == rank], -1)
    return Ops(rows, told, len(there) - len(keep), len(ranks))


def _sums(group: Array, seconds: Array, mask: Array, num: int) -> Array:
    return np.bincount(group[mask], weights=seconds[mask], minlength=num)


def _self_time(events: xr.Dataset) -> Array:
    """Return the time, s, in which each span is the innermost of its lane; -1 for what is no work of its own."""
    category, flags = events["category"].values, events["flags"].values
    out = np.full(len(category), -1.0)
    use = np.flatnonzero((category != Category.MARK) & ((flags & Flag.ASYNC) == 0) & ~issue_only(events))
    if not len(use):
        return out
    start = events["start_ns"].values[use].astype(np.int64)
    lanes = np.stack([events[n].values[use] for n in ("rank", "thread", "stream")], 1)
    lane = np.unique(lanes, axis=0, return_inverse=True)[1].ravel()
    span, begin, end = innermost_segments(lane, start, start + events["duration_ns"].values[use])
    out[use] = np.bincount(span, weights=(end - begin).astype(np.float64), minlength=len(use)) / 1e9
    return out


def _label(row: Any) -> str:
    name, op = str(row["name"]), str(row["op"])
    parts = [name if name else op or str(row["category"])]
    if name and op and op not in name:
        parts.append(op)
    if row["phase"] not in ("none", "", name):
        parts.append(str(row["phase"]).replace("_", " "))
    parts += [f"{word} {int(row[word])}" for word in ("layer", "stage") if int(row[word]) >= 0]
    return ", ".join(parts)
