"""How late messages may be: what each link between two ranks can take before the step grows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd

from mappnb.sched.costs import Costs, CostTables
from mappnb.sched.graph import build
from mappnb.sched.schedule import Schedule
from mappnb.sched.times import times

__all__ = ["edge_tolerance"]

_ROUNDS = 40


def edge_tolerance(schedule: Schedule, costs: Costs, *, allowed: float = 0.0) -> pd.DataFrame:
    """Return for each link how much later all its messages may come, every one of them, before the step grows.

    Parameters
    ----------
    schedule : Schedule
        What each rank runs; it is validated first.
    costs : Costs
        How long each action and message takes.
    allowed : float
        By what part the step may grow: 0.01 is 1 %.

    Returns
    -------
    DataFrame
        One row per link: ``source``, ``destination`` (pipeline ranks), ``messages`` (a step), ``slack_s`` (by how much the tightest
        message alone may be late, s), ``tolerance_s`` (by how much all of them may be late, s), ``bandwidth`` (that all messages need
        so as to be no later than that, bytes/s; NaN without ``message_bytes``).

    Notes
    -----
    What PipeMorph (arXiv:2504.19232) asks of a pipeline: the delay of a link that a schedule absorbs. Reductions and the optimizer are
    not counted. Found by bisection: the makespan is a convex, growing function of a link's latency.
    """
    schedule.validate()
    tables = costs.tables(schedule)
    built = build(schedule, replace(tables, reduce_s=np.zeros_like(tables.reduce_s), optimizer_s=0.0))
    done = built.run(slack=True)
    slack = np.maximum(done.latest_end_s - done.end_s, 0.0)[built.first_message : built.first_reduction]
    limit = float(done.end_s.max(initial=0.0)) * (1 + allowed)
    rows = []
    for link in range(int(built.messages.link.max(initial=-1)) + 1):
        mine = np.flatnonzero(built.messages.link == link)
        ends = int(built.messages.source[mine[0]]), int(built.messages.destination[mine[0]])
        tolerance = _tolerance(schedule, tables, ends, limit)
        size = tables.ship_bytes if bool(built.messages.ships[mine[0]]) else tables.message_bytes
        wire = float(built.messages.wire_s[mine].max())
        rows.append(
            (*ends, len(mine), float(slack[mine].min()), tolerance, size / (wire + tolerance) if size else np.nan)
        )
    return pd.DataFrame(rows, columns=["source", "destination", "messages", "slack_s", "tolerance_s", "bandwidth"])


def _tolerance(schedule: Schedule, tables: CostTables, ends: tuple[int, int], limit: float) -> float:
    """Return the largest latency that may be added to a link, by bisection."""

    def makespan(more: float) -> float:
        latency = np.array(tables.latency_s)
        latency[ends] += more
        return float(times(schedule, replace(tables, latency_s=latency))[1].max())

    least, most = 0.0, limit
    for _ in range(_ROUNDS):
        middle = (least + most) / 2
        if makespan(middle) <= limit * (1 + 1e-12):
            least = middle
        else:
            most = middle
    return least
