"""Start and end of every action of a schedule, as arrays: the fast path that planning and Monte Carlo run on."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mappnb import _core
from mappnb.errors import ScheduleError
from mappnb.sched import codes as c
from mappnb.sched.costs import SEND_MODES, CostTables, Floats
from mappnb.sched.schedule import Schedule

__all__ = ["Hops", "hops", "span_s", "times"]


class Hops(NamedTuple):
    """Where the message of each action goes and what it costs; tables by (mirrored, backward, stage of the producer).

    Attributes
    ----------
    latency, wire : array, dims (table, backward, stage)
        Latency and time on the wire, s. A third table, where a stage's forward and backward are on two ranks, holds in its first
        row what is shipped from one to the other.
    link : array, dims (table, backward, stage), int32
        The link that the message takes; -1 where the consumer is on the same rank, or there is none.
    source, destination : array, dims (link,)
        Ranks of each link.
    """

    latency: Floats
    wire: Floats
    link: npt.NDArray[np.int32]
    source: npt.NDArray[np.int32]
    destination: npt.NDArray[np.int32]


def hops(sched: Schedule, costs: CostTables) -> Hops:
    """Return where each message goes, and what it costs."""
    source = sched.placement.table()
    to = np.full_like(source, -1)
    to[:, 0, :-1], to[:, 1, 1:] = source[:, 0, 1:], source[:, 1, :-1]
    if sched.placement.backward is not None:
        nowhere = np.full_like(source[0, 0], -1)
        ship_to = np.stack([source[0, 1], nowhere])
        source, to = np.concatenate([source, source[:1]]), np.concatenate([to, ship_to[None]])
    across = (to >= 0) & (to != source)
    pair = np.where(across, source * sched.num_ranks + to, -1)
    used = np.unique(pair[across])
    link = np.where(across, np.searchsorted(used, pair), -1).astype(np.int32)
    at = (source, np.where(across, to, 0))
    wire = costs.transfer_s[at]
    wire[2:] = costs.ship_s[at][2:]
    return Hops(
        latency=np.where(across, costs.latency_s[at], 0.0),
        wire=np.where(across, wire, 0.0),
        link=link,
        source=(used // sched.num_ranks).astype(np.int32),
        destination=(used % sched.num_ranks).astype(np.int32),
    )


def times(
    sched: Schedule, costs: CostTables, *, out: tuple[Floats, Floats] | None = None, where: Hops | None = None
) -> tuple[Floats, Floats]:
    """Return start and end in s of every action, in the order of ``sched.codes``.

    Parameters
    ----------
    sched : Schedule
        A schedule that :meth:`Schedule.validate` accepts.
    costs : CostTables
        Its costs, from :meth:`Costs.tables`.
    out : pair of arrays, dims (action,), optional
        Arrays to fill.
    where : Hops, optional
        Result of :func:`hops` for the same placement and link costs, to save its making.

    Raises
    ------
    ScheduleError
        If the ranks wait for one another; names where each is stuck.

    Notes
    -----
    One pass, linear in the number of actions. Equal to :func:`mappnb.sched.reference.times_reference` to the last bit. Costs with
    shared network cards or interference go through the replay engine instead (:mod:`mappnb.sched.graph`).
    """
    if costs.by_events:
        return _by_events(sched, costs, out)
    n = len(sched)
    start, end = out if out is not None else (np.empty(n), np.empty(n))
    where = where or hops(sched, costs)
    mirrored = sched.placement.mirrored_from
    done = _core.schedule_times(
        sched.codes,
        sched.offsets,
        sched.num_stages,
        sched.num_microbatches,
        -1 if mirrored is None else mirrored,
        costs.duration_s,
        costs.overlap_ratio,
        where.latency,
        where.wire,
        where.link,
        sched.placement.backward is not None,
        len(where.source),
        SEND_MODES.index(costs.send),
        *sched._known,
        start,
        end,
    )
    if done is None:
        return start, end
    stuck = [r for r, (i, stop) in enumerate(zip(done, sched.offsets[1:].tolist(), strict=True)) if i < stop]
    at = ", ".join(f"rank {r} at {c.decode(sched.codes[done[r] : done[r] + 1])[0]}" for r in stuck)
    raise ScheduleError(f"deadlock: {at}; Schedule.validate() shows the cycle")


def _by_events(sched: Schedule, costs: CostTables, out: tuple[Floats, Floats] | None) -> tuple[Floats, Floats]:
    from mappnb.sched.graph import build

    built = build(sched, costs)
    start, end = built.action_times(built.run())
    if out is not None:
        out[0][:], out[1][:] = start, end
        return out
    return start, end


def span_s(sched: Schedule, start: Floats, end: Floats) -> float:
    """Return the longest first start to last end of one rank, s: the cost of the Zero Bubble paper (arXiv:2401.10241)."""
    first, last = sched.offsets[:-1], sched.offsets[1:]
    busy = last > first
    begin = np.minimum.reduceat(start, first[busy])
    return float((np.maximum.reduceat(end, first[busy]) - begin).max())
