"""Which layer or op of a slow rank is slow, or all alike: reads events of the rank and of a few peers in a few of its slow steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from mappnb.analysis._straggler_find import Excess, Finding
from mappnb.analysis._straggler_pieces import pieces
from mappnb.analysis._straggler_source import Source, longest_stretch

__all__ = ["Slow", "slow_layer"]

Array = np.ndarray[Any, Any]
EVENTS = 100_000
"""Events that are read at most for one finding."""
PEERS = 4
"""Peers that are read for comparison."""
ONE = 0.7
"""Share of the excess that one layer or op must hold to be named."""
MORE = 0.2
"""And by how much that share must be above its share of the time of the peers: of two layers that are slow alike each holds half."""


@dataclass(frozen=True, slots=True)
class Slow:
    """The layer or op with the largest excess.

    Attributes
    ----------
    name : str
        In words.
    ratio : float
        Its time over that of the peers.
    share : float
        Share of the excess of all that it holds.
    alone : bool
        It stands out from the others.
    others : float
        What all the others take over the peers.
    """

    name: str
    ratio: float
    share: float
    alone: bool
    others: float


def slow_layer(finding: Finding, source: Source, excess: Excess, guilty: set[int]) -> Slow | None:
    """Return the layer or op that holds most of the excess of compute; None where there are no layers or no peers to compare with.

    Parameters
    ----------
    finding : Finding
        A rank or host.
    source : Source
        Events.
    excess : Excess
        Excess of all ranks.
    guilty : set of int
        Columns of ranks that are no use as peers.
    """
    table, rank = excess.table, finding.ranks[0]
    same = np.flatnonzero(table.role == table.role[rank])
    peers = [int(c) for c in same if c not in guilty and c != rank][:PEERS]
    if not peers:
        return None
    ids = table.rank[[rank, *peers]].tolist()
    steps = source.within(longest_stretch(finding.active), EVENTS, ids)
    cut = pieces(source.events(steps, ids))
    if not len(cut):
        return None
    key = np.where(cut["layer"] >= 0, "layer " + cut["layer"].astype(str), _op_names(cut))
    each = (
        cut.assign(key=key)
        .groupby(["key", "rank", "step"])["seconds"]
        .sum()
        .groupby(level=["key", "rank"])
        .median()
        .unstack("rank")
    )
    if len(each) < 2 or ids[0] not in each:
        return None
    each = each.fillna(0.0)
    own, usual = each[ids[0]], each[[c for c in ids[1:] if c in each]].median(axis=1)
    return _largest(own, usual)


def _op_names(cut: pd.DataFrame) -> Any:
    """Return the op of what is in no layer, with its stage: an action of another chunk is another piece of work."""
    stage = cut["stage"].astype(str)
    return cut["op"].astype(str) + np.where(cut["stage"] >= 0, " of stage " + stage, "")


def _largest(own: pd.Series, usual: pd.Series) -> Slow | None:
    more = own - usual
    total = float(more.sum())
    if total <= 0 or usual.sum() <= 0:
        return None
    name = str(more.idxmax())
    share, due = float(more[name]) / total, float(usual[name] / usual.sum())
    ratio = float(own[name] / usual[name]) if usual[name] > 0 else float("inf")
    rest = float((own.sum() - own[name]) / max(float(usual.sum() - usual[name]), 1e-12))
    is_layer = name.startswith("layer ") or not any(n.startswith("layer ") for n in own.index)
    return Slow(name, ratio, share, is_layer and share >= ONE and share >= due + MORE, rest)
