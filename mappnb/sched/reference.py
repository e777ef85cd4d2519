"""The reference simulator: plain Python, short enough to trust. The compiled one must equal it."""

from __future__ import annotations

from collections import deque

import numpy as np

from mappnb.errors import ScheduleError
from mappnb.sched import codes as c
from mappnb.sched.action import Action
from mappnb.sched.costs import CostTables, Floats
from mappnb.sched.schedule import Schedule
from mappnb.terms import Kind

__all__ = ["times_reference"]


def times_reference(sched: Schedule, costs: CostTables) -> tuple[Floats, Floats]:
    """Return start and end in s of every action, in the order of ``sched.codes``; each rank runs its list in order.

    Messages take the link's latency after they have been on the wire one after the other.

    Raises
    ------
    ScheduleError
        If the ranks wait for one another.
    """
    state = _State(sched, costs)
    queues = [deque(_units(sched, r)) for r in range(sched.num_ranks)]
    while any(queues):
        ready = [(r, q) for r, q in enumerate(queues) if q and all(state.arrived(a) is not None for a in q[0])]
        if not ready:
            stuck = ", ".join(f"rank {r} at {q[0][0]}" for r, q in enumerate(queues) if q)
            raise ScheduleError(f"deadlock after {len(state.end)} actions: {stuck}")
        for r, q in ready:
            state.run(r, q.popleft())
    order = [a for r in sched.ranks for a in r]
    return np.array([state.start[a] for a in order]), np.array([state.end[a] for a in order])


def _units(sched: Schedule, rank: int) -> list[tuple[Action, ...]]:
    """Return what a rank runs, an overlapped pair as one."""
    out: list[tuple[Action, ...]] = []
    for i, a in enumerate(sched.ranks[rank]):
        if (rank, i - 1) in sched.pairs:
            out[-1] = (*out[-1], a)
        else:
            out.append((a,))
    return out


class _State:
    """Clocks of the ranks and links, and what has ended."""

    def __init__(self, sched: Schedule, costs: CostTables) -> None:
        self.sched, self.costs = sched, costs
        self.start: dict[Action, float] = {}
        self.end: dict[Action, float] = {}
        self.come: dict[tuple[Action, Action], float] = {}  # (producer, consumer) on different ranks -> arrival
        self.rank_s = [0.0] * sched.num_ranks
        self.link_s: dict[tuple[int, int], float] = {}

    def place(self, a: Action) -> int:
        return self.sched.placement.rank(a.stage, a.kind, a.microbatch)

    def arrived(self, a: Action) -> float | None:
        """Return when the last need of ``a`` is there, or None if that is not known yet."""
        latest = 0.0
        for need in self.sched.needs(a):
            if need not in self.end:
                return None
            latest = max(latest, self.come.get((need, a), self.end[need]))
        return latest

    def run(self, rank: int, unit: tuple[Action, ...]) -> None:
        begin = max([self.rank_s[rank], *(t for a in unit if (t := self.arrived(a)) is not None)])
        length = sum(self._duration(a) for a in unit) * (self.costs.overlap_ratio if len(unit) > 1 else 1.0)
        self.rank_s[rank] = begin + length
        for a in unit:
            self.start[a], self.end[a] = begin, begin + length
        for a in unit:
            self._send(rank, a, begin + length)

    def _duration(self, a: Action) -> float:
        table = self.costs.duration_s[c.KINDS.index(a.kind), a.stage]
        return float(table[a.microbatch if len(table) > 1 else 0])

    def _send(self, rank: int, a: Action, end: float) -> None:
        for need_of, wire in self._consumers(a):
            other = self.place(need_of)
            if other == rank:
                continue
            done = max(end, self.link_s.get((rank, other), 0.0)) + float(wire[rank, other])
            self.link_s[rank, other] = done
            arrival = done + float(self.costs.latency_s[rank, other])
            self.come[a, need_of] = arrival
            if self.costs.send != "async":
                held = arrival if self.costs.send == "sync" else done
                self.rank_s[rank] = max(self.rank_s[rank], held)

    def _consumers(self, a: Action) -> list[tuple[Action, Floats]]:
        """Return who waits for ``a``, the next stage first, each with the time its message is on the wire."""
        s, mb = a.stage, a.microbatch
        out: list[tuple[Action, Floats]] = []
        if a.kind is Kind.FORWARD:
            if s + 1 < self.sched.num_stages:
                out.append((Action(s + 1, Kind.FORWARD, mb), self.costs.transfer_s))
            out.append((Action(s, self._backward(s, mb), mb), self.costs.ship_s))
        elif a.kind is not Kind.BACKWARD_WEIGHT and s > 0:
            out.append((Action(s - 1, self._backward(s - 1, mb), mb), self.costs.transfer_s))
        return out

    def _backward(self, stage: int, mb: int) -> Kind:
        return Kind.BACKWARD_INPUT if (stage, mb) in self.sched._split else Kind.BACKWARD
