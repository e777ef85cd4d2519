"""Where the ranks idle while they run an order."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from mappnb.sched import codes as c
from mappnb.sched.costs import Floats
from mappnb.sched.schedule import Schedule

__all__ = ["PHASES", "idle_phases", "own_time"]

PHASES: tuple[str, ...] = ("warm_up", "steady", "cool_down")


def own_time(schedule: Schedule) -> npt.NDArray[np.bool_]:
    """Return which actions run in a time of their own, dims (action,): of an overlapped pair the first."""
    own = np.ones(len(schedule), bool)
    own[1:] = ~c.paired(schedule.codes)[:-1]
    return own


def idle_phases(schedule: Schedule, start_s: Floats, end_s: Floats) -> Floats:
    """Return the idle time in :data:`PHASES`, mean over the ranks, dims (phase,), s.

    Parameters
    ----------
    schedule : Schedule
    start_s, end_s : array, dims (action,)
        Its times, s.

    Notes
    -----
    As :func:`mappnb.analysis.bubbles.bubble_seconds`: before the rank's first backward, after its last forward, and between.
    """
    ranks, own = schedule.num_ranks, own_time(schedule)
    rank = np.repeat(np.arange(ranks), np.diff(schedule.offsets))
    backward = c.kind(schedule.codes) != 0
    finish = float(end_s.max(initial=0.0))
    first, last = np.full(ranks, finish), np.zeros(ranks)
    np.minimum.at(first, rank[backward], start_s[backward])
    np.maximum.at(last, rank[~backward], end_s[~backward])
    last = np.maximum(last, first)
    edge = np.stack([np.zeros(ranks), first, last, np.full(ranks, finish)])
    out = np.zeros(3)
    for i in range(3):
        low, high = edge[i], edge[i + 1]
        inside = np.minimum(end_s, high[rank]) - np.maximum(start_s, low[rank])
        out[i] = (high - low).sum() - np.maximum(inside, 0.0)[own].sum()
    return np.maximum(out, 0.0) / ranks
