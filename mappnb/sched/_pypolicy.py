"""Dynamic order in plain Python: the twin of csrc/policy.cpp, and the one to read first. Equal to it bit for bit.

Each rank has one compute stream. Whenever it is idle it takes, among the actions whose input has come and that its memory admits,
the one of the smallest priority. Times that differ by less than one part in 10¹² count as one moment, so that rounding decides no
order.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mappnb.sched import codes as c
from mappnb.sched.costs import Floats

__all__ = ["Admission", "Outcome", "Problem", "PyCredits", "run_policy"]

_MOMENT = 1e-12
_SLACK = 1e-9
"""Relative size of what counts as no memory at all: sums of the same activations in another order differ by rounding."""
_WEIGHT = 0.25
"""Weight of the newest sample in the averages that ``adaptive`` reads."""


class Admission:
    """Numbers of the admission rules, as csrc/policy.hpp has them."""

    NONE, CREDITS = 0, 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What a policy is run on, as arrays.

    Attributes
    ----------
    where : array, dims (mirrored, backward, stage), int32
        :meth:`Placement.table`.
    mirrored_from : int
        First microbatch of the second half of ``where``; ``microbatches`` where there is none.
    ranks, microbatches : int
        Sizes.
    split : bool
        The backward is I and W, not B.
    duration : array, dims (kind, stage, microbatch or 1)
        Time of each action, s.
    latency, transfer, ship : array, dims (source rank, destination rank)
        As of :class:`CostTables`, s.
    send : int
        Index in ``SEND_MODES``.
    priority : array, dims (table, kind, stage, microbatch)
        The smaller first; a second table is taken while the rank waits for its links (``adaptive``).
    threshold : float
        It does so while its messages take longer than this many times its actions.
    alternate : bool
        A rank prefers a forward after a backward, and else a backward; W comes after both.
    takes, frees : array, dims (kind, stage)
        Activation memory that an action takes when it begins and frees when it ends.
    limit : array, dims (rank,)
        Activation memory that a rank may hold; inf for no limit.
    admission : int
        One of :class:`Admission`.
    """

    where: npt.NDArray[np.int32]
    mirrored_from: int
    ranks: int
    microbatches: int
    split: bool
    duration: Floats
    latency: Floats
    transfer: Floats
    ship: Floats
    send: int
    priority: Floats
    threshold: float
    alternate: bool
    takes: Floats
    frees: Floats
    limit: Floats
    admission: int

    @property
    def kinds(self) -> tuple[int, ...]:
        """Numbers of the kinds in use, in the order in which ties are broken: backward, forward, weights."""
        return (2, 0, 3) if self.split else (1, 0)

    def rank(self, kind: int, stage: int, microbatch: int) -> int:
        """Return where an action runs."""
        return int(self.where[int(microbatch >= self.mirrored_from), int(kind != 0), stage])

    def offsets(self) -> npt.NDArray[np.int64]:
        """Return where the actions of each rank begin, dims (rank + 1,)."""
        ordinary = min(self.mirrored_from, self.microbatches)
        each = np.array([ordinary, self.microbatches - ordinary])
        count = np.zeros(self.ranks, np.int64)
        for backward, times in ((0, 1), (1, len(self.kinds) - 1)):
            for half in (0, 1):
                np.add.at(count, self.where[half, backward], each[half] * times)
        return np.concatenate(([0], np.cumsum(count))).astype(np.int64)


class Outcome(NamedTuple):
    """What a policy did: the actions of rank 0 in their order, then of rank 1, and so on.

    Attributes
    ----------
    codes : array, dims (action,)
        Codes of the actions.
    offsets : array, dims (rank + 1,)
        Where the actions of each rank begin.
    done : array, dims (rank,)
        How many of them it ran; the entries behind mean nothing.
    start, end : array, dims (action,)
        Times, s.
    peak : array, dims (rank,)
        Most activation memory that was held.
    """

    codes: c.Codes
    offsets: npt.NDArray[np.int64]
    done: npt.NDArray[np.int64]
    start: Floats
    end: Floats
    peak: Floats


class PyCredits:
    """Admission to one rank by the banker's rule: each microbatch may still be finished, the oldest first.

    With ``held(l)`` the activations of microbatch l on this rank and ``remaining(j)`` those of the forwards of j still to come, a state
    is safe if for each unfinished j: ``remaining(j) <= free + sum of held(l) over the unfinished l < j``. A forward begins only if the
    state after it is safe. A forward of i lowers the right side for ``j < i`` only, so that only those are looked at.
    """

    def __init__(self, share: list[float], actions: list[int], limit: float) -> None:
        self.remaining, self.left = list(share), list(actions)
        self.held = [0.0] * len(share)
        self.free, self.limit = limit, limit
        self.most = max(share, default=0.0)
        self.begun = [False] * len(share)
        self.to_come = 0.0  # forwards still to come of the microbatches that have begun
        self.oldest = 0
        self._advance()

    def _advance(self) -> None:
        while self.oldest < len(self.left) and self.left[self.oldest] == 0:
            self.oldest += 1

    def bound(self, activation: float, last: int) -> int:
        """Return the first unfinished microbatch that a forward of ``activation`` of a later one would lock out.

        A forward of microbatch i is admitted if ``i <= bound(activation, i)``: what is admitted for i is for all before it.
        """
        if self.free - activation >= self.most:
            return len(self.left)
        needed = activation - _SLACK * self.limit
        covered = self.free
        for j in range(self.oldest, last):
            if self.left[j] == 0:
                continue
            if covered - self.remaining[j] < needed:
                return j
            covered += self.held[j]
        return len(self.left)

    def roomy(self) -> bool:
        """Return whether the forwards of all that has begun, and of one microbatch more, fit without waiting for a backward."""
        return self.free - self.to_come >= self.most - _SLACK * self.limit

    def run(self, kind: int, microbatch: int, takes: float, frees: float) -> None:
        """Book an action of a microbatch."""
        if kind == 0:
            if not self.begun[microbatch]:
                self.begun[microbatch] = True
                self.to_come += self.remaining[microbatch]
            self.remaining[microbatch] -= takes
            self.to_come -= takes
        change = takes - frees
        self.held[microbatch] += change
        self.free -= change
        self.left[microbatch] -= 1
        self._advance()


def run_policy(problem: Problem) -> Outcome:
    """Run a policy; a rank that is stuck has run fewer actions than it has."""
    return _Run(problem).run()


class _Run:
    """State of all ranks: what is ready, who is idle, what is under way."""

    def __init__(self, p: Problem) -> None:
        self.p = p
        self.stages = p.where.shape[2]
        actions = [(k, s, i) for k in p.kinds for s in range(self.stages - 1, -1, -1) for i in range(p.microbatches)]
        self.missing = {a: len(self._needs(a)) for a in actions}
        self.come = dict.fromkeys(actions, 0.0)
        self.ready: list[dict[tuple[int, int], list[int]]] = [{} for _ in range(p.ranks)]
        share = np.zeros((p.ranks, p.microbatches))
        left = np.zeros((p.ranks, p.microbatches), np.int64)
        for k, s, i in actions:
            r = p.rank(k, s, i)
            self.ready[r].setdefault((k, s), [])
            share[r, i] += p.takes[0, s] if k == 0 else 0.0
            left[r, i] += 1
        self.credits = [PyCredits(share[r].tolist(), left[r].tolist(), float(p.limit[r])) for r in range(p.ranks)]
        self.offsets = p.offsets()
        self.done = np.zeros(p.ranks, np.int64)
        self.out = (np.zeros(len(actions), np.uint32), np.zeros(len(actions)), np.zeros(len(actions)))
        self.rank_s = [0.0] * p.ranks
        self.idle = [True] * p.ranks
        self.level, self.peak = [0.0] * p.ranks, np.zeros(p.ranks)
        self.link_s: dict[tuple[int, int], float] = {}
        self.flight_s: list[float | None] = [None] * p.ranks
        self.work_s: list[float | None] = [None] * p.ranks
        self.after_backward = [False] * p.ranks
        self.events: list[tuple[float, int, tuple[int, int, int]]] = []  # time, rank that is free or -1, action

    def run(self) -> Outcome:
        p = self.p
        for i in range(p.microbatches):
            self._put((0, 0, i))
        for r in range(p.ranks):
            self._decide(r)
        while self.events:
            moment = self.events[0][0] * (1 + _MOMENT)
            woken = set()
            while self.events and self.events[0][0] <= moment:
                time, rank, action = heapq.heappop(self.events)
                if rank >= 0:
                    self._free(rank, action)
                    woken.add(rank)
                else:
                    self._arrive(action, time)
                    woken.add(p.rank(*action))
            for r in sorted(woken):
                self._decide(r)
        return Outcome(self.out[0], self.offsets, self.done, self.out[1], self.out[2], self.peak)

    # ------------------------------------------------------------------------------------------- what waits for what
    def _needs(self, a: tuple[int, int, int]) -> list[tuple[int, int, int]]:
        k, s, i = a
        backward = self.p.kinds[0]
        if k == 0:
            return [(0, s - 1, i)] if s else []
        if k == 3:
            return [(2, s, i)]
        return [(0, s, i), *([(backward, s + 1, i)] if s + 1 < self.stages else [])]

    def _consumers(self, a: tuple[int, int, int]) -> list[tuple[tuple[int, int, int], Floats]]:
        """Return who waits for ``a``, the next stage first, each with the time its message is on the wire."""
        k, s, i = a
        backward = self.p.kinds[0]
        out: list[tuple[tuple[int, int, int], Floats]] = []
        if k == 0:
            if s + 1 < self.stages:
                out.append(((0, s + 1, i), self.p.transfer))
            out.append(((backward, s, i), self.p.ship))
        elif k != 3:
            if s:
                out.append(((backward, s - 1, i), self.p.transfer))
            if self.p.split:
                out.append(((3, s, i), self.p.ship))
        return out

    def _free(self, rank: int, a: tuple[int, int, int]) -> None:
        """End an action: what waits for it on the same rank has its input."""
        self.idle[rank] = True
        end = float(self.out[2][self.offsets[rank] + self.done[rank] - 1])
        for consumer, _ in self._consumers(a):
            if self.p.rank(*consumer) == rank:
                self._arrive(consumer, end)

    def _arrive(self, a: tuple[int, int, int], time: float) -> None:
        self.come[a] = max(self.come[a], time)
        self.missing[a] -= 1
        if self.missing[a] == 0:
            self._put(a)

    def _put(self, a: tuple[int, int, int]) -> None:
        k, s, i = a
        self.ready[self.p.rank(k, s, i)][k, s].append(i)

    # --------------------------------------------------------------------------------------------------- decisions
    def _decide(self, rank: int) -> None:
        if not self.idle[rank]:
            return
        table = self.p.priority[self._table(rank)]
        best: tuple[int, float, int, int] | None = None
        chosen = (0, 0, 0)
        for position, ((k, s), waiting) in enumerate(self.ready[rank].items()):
            for i in waiting:
                key = (self._turn(rank, k), float(table[k, s, i]), i, position)
                if (best is None or key < best) and (k != 0 or self._admits(rank, s, i)):
                    best, chosen = key, (k, s, i)
        if best is not None:
            self.ready[rank][chosen[0], chosen[1]].remove(chosen[2])
            self._start(rank, chosen)

    def _turn(self, rank: int, kind: int) -> int:
        """Return 0 for the kind whose turn it is, 1 for the other one, 2 for W; 0 where only priorities count."""
        if not self.p.alternate:
            return 0
        return 2 if kind == 3 else int((kind == 0) != self.after_backward[rank])

    def _admits(self, rank: int, stage: int, microbatch: int) -> bool:
        activation, limit = float(self.p.takes[0, stage]), float(self.p.limit[rank])
        if np.isinf(limit):
            return True
        if self.p.admission == Admission.NONE:
            return self.level[rank] + activation <= limit * (1 + _SLACK)
        return microbatch <= self.credits[rank].bound(activation, microbatch)

    def _table(self, rank: int) -> int:
        """Return which priorities hold: the second while messages take long and there is room."""
        flight, work = self.flight_s[rank], self.work_s[rank]
        if len(self.p.priority) == 1 or flight is None or work is None:
            return 0
        return int(flight > self.p.threshold * work and self.credits[rank].roomy())

    def _start(self, rank: int, a: tuple[int, int, int]) -> None:
        k, s, i = a
        p = self.p
        length = float(p.duration[k, s, i if p.duration.shape[2] > 1 else 0])
        begin = max(self.rank_s[rank], self.come[a])
        end = begin + length
        takes, frees = float(p.takes[k, s]), float(p.frees[k, s])
        self.level[rank] += takes
        self.peak[rank] = max(self.peak[rank], self.level[rank])
        self.level[rank] -= frees
        self.credits[rank].run(k, i, takes, frees)
        at = self.offsets[rank] + self.done[rank]
        self.out[0][at], self.out[1][at], self.out[2][at] = c.pack(s, k, i), begin, end
        self.done[rank] += 1
        self.work_s[rank] = _average(self.work_s[rank], length)
        self.after_backward[rank] = self.after_backward[rank] if k == 3 else k != 0
        self.idle[rank] = False
        self.rank_s[rank] = end
        for consumer, wire in self._consumers(a):
            self._send(rank, consumer, wire, end)
        heapq.heappush(self.events, (self.rank_s[rank], rank, a))

    def _send(self, rank: int, consumer: tuple[int, int, int], wire: Floats, end: float) -> None:
        p = self.p
        other = p.rank(*consumer)
        if other == rank:
            return
        sent = max(end, self.link_s.get((rank, other), 0.0)) + float(wire[rank, other])
        self.link_s[rank, other] = sent
        arrival = sent + float(p.latency[rank, other])
        if p.send != 0:
            self.rank_s[rank] = max(self.rank_s[rank], arrival if p.send == 1 else sent)
        self.flight_s[rank] = _average(self.flight_s[rank], arrival - end)
        heapq.heappush(self.events, (arrival, -1, consumer))


def _average(old: float | None, new: float) -> float:
    return new if old is None else old + _WEIGHT * (new - old)
