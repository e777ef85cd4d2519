"""What others do to name a straggler, for bench_stragglers.py: the latest in collectives, and durations against data-parallel peers."""

from __future__ import annotations

import numpy as np

from mappnb import Layout
from mappnb.analysis import last_arrivals
from mappnb.terms import Op

LEAST_LAG = 0.05
"""A rank is named if it made the others of its collectives wait this share of the steps' time; without a threshold, which is what HTA
does, each clean run would have an alarm."""
LEAST_RATIO = 1.05
"""A rank is named if its spans took this much longer than those of its peers."""


def latest(events, how_many: int) -> list[int]:
    """The ranks that come last to collectives, as HTA looks for stragglers: the first few by the time that they came later by.

    The lag of the last member is over the last but one: of a whole late group none is blamed for the others.
    """
    calls = last_arrivals(events)
    kept = calls.complete.values
    lag = np.bincount(calls.last_rank.values[kept], weights=calls.margin_ns.values[kept])
    span = float((events.start_ns.values + events.duration_ns.values).max() - events.start_ns.values.min())
    best = np.argsort(-lag)[:how_many]
    return [int(r) for r in best if lag[r] > LEAST_LAG * span]


def longer_than_peers(events, layout: Layout) -> list[int]:
    """Ranks whose forwards and backwards, as recorded, take longer than those of their data-parallel peers (MegaScan)."""
    mine = np.isin(events.op.values, [str(Op.FORWARD_STEP), str(Op.BACKWARD_STEP)])
    total = np.bincount(
        events["rank"].values[mine], weights=events.duration_ns.values[mine], minlength=layout.world_size
    )
    out: list[int] = []
    for group in layout.groups("dp"):
        peers = total[list(group)]
        if len(peers) > 1 and np.median(peers) > 0:
            out += [group[i] for i in np.flatnonzero(peers / np.median(peers) > LEAST_RATIO)]
    return sorted(out)
