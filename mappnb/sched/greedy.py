"""Orders made for given costs and a memory limit: a greedy walk through time, as the zero-bubble papers search for theirs."""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mappnb.errors import ScheduleError
from mappnb.sched import codes as c
from mappnb.sched.costs import CostTables
from mappnb.sched.placement import Placement
from mappnb.sched.schedule import Schedule
from mappnb.terms import Kind

__all__ = ["GreedyRule", "greedy_order"]

F, I, W = (c.KINDS.index(k) for k in (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT))  # noqa: E741


@dataclass(frozen=True, slots=True)
class GreedyRule:
    """How a rank chooses among what it could run.

    Attributes
    ----------
    gap : float
        A weight gradient is run while the rank waits for an input whose arrival is known, if that is at least this part of the
        weight gradient's length away. 0 runs it at once, 1 never makes the input wait.
    alternate : bool
        After a backward a forward comes first if there is one (one forward, one backward in turn); else a backward always does.
    window : float
        Microbatches in flight on a rank beyond those that its distance from the last stage asks for; infinite: as memory allows.
    patience : float
        Before its first backward, a rank waits for that instead of beginning a forward if it is known to come within this part of the
        forward's length: a first backward that is held up on each rank costs all of them.
    later_patience : float
        The same after its first backward.
    """

    gap: float = 1.0
    alternate: bool = True
    window: float = float("inf")
    patience: float = 0.0
    later_patience: float = 0.0


def greedy_order(
    placement: Placement, num_microbatches: int, costs: CostTables, *, limit: npt.NDArray[np.float64], rule: GreedyRule
) -> Schedule:
    """Return the order that a rule yields: forwards, input and weight gradients of every stage, each rank as soon as it can.

    Parameters
    ----------
    placement : Placement
        Where each stage lives: loops and waves of stages.
    num_microbatches : int
        Microbatches of a step.
    costs : CostTables
        Durations, latencies and activation memory, for a schedule of this placement.
    limit : array, dims (rank,)
        Activation memory that each rank has, in the unit of the costs.
    rule : GreedyRule
        How to choose.

    Raises
    ------
    ScheduleError
        If a rank's limit is below what one microbatch needs on it.

    Notes
    -----
    In the manner of the heuristic of Qi et al. (arXiv:2401.10241, 3.1). It cannot deadlock: a forward is admitted only if the oldest
    unfinished microbatches can still be finished in the memory that is left (:mod:`mappnb.sched.policies`).
    """
    walk = _Walk(placement, num_microbatches, costs, limit, rule)
    rows = walk.run()
    offsets = np.concatenate(([0], np.cumsum([len(r) for r in rows]))).astype(np.int64)
    flat = np.array([x for r in rows for x in r], np.uint32)
    return Schedule.from_codes(flat, offsets, placement=placement, name="searched")


class _Rank:
    """What one rank has done, and what waits for it."""

    def __init__(self, stages: list[int], limit: float) -> None:
        self.stages = stages
        self.limit, self.held = limit, 0.0
        self.free_s = 0.0
        self.order: list[int] = []
        self.ready: dict[tuple[int, int], float] = {}  # (kind, code) -> arrival of its input
        self.weights: deque[tuple[int, int]] = deque()  # (stage, microbatch)
        self.last_was_backward = False
        self.in_flight = self.backwards = 0
        self.forwards_left = 0
        self.mine: dict[int, list[float]] = {}  # unfinished microbatch -> [held, still to take]


class _Walk:
    """The walk through time; one instance, one order."""

    def __init__(
        self, placement: Placement, m: int, costs: CostTables, limit: npt.NDArray[np.float64], rule: GreedyRule
    ) -> None:
        self.m, self.rule = m, rule
        self.where = placement.forward
        self.stages = placement.num_stages
        self.duration = costs.duration_s[:, :, 0].tolist()
        self.hop = (costs.latency_s + costs.transfer_s).tolist()
        self.whole, self.kept = costs.activation.tolist(), costs.activation_weight.tolist()
        self.ranks = []
        for r in range(placement.num_ranks):
            stages = [s for s in range(self.stages) if self.where[s] == r]
            rank = _Rank(stages, float(limit[r]) * (1 + 1e-9) + 1e-12)
            need = sum(self.whole[s] for s in stages)
            if need > rank.limit:
                raise ScheduleError(f"rank {r}: one microbatch needs {need:.4g}; the memory limit is {limit[r]:.4g}")
            rank.forwards_left = m * len(stages)
            rank.mine = {mb: [0.0, need] for mb in range(m)}
            self.ranks.append(rank)
        self.window = [self._window(r) for r in range(placement.num_ranks)]
        self.events: list[tuple[float, int]] = []

    def _window(self, rank: int) -> float:
        """Return the forwards that a rank may be ahead of its backwards."""
        first = self.ranks[rank].stages[0]
        return self.stages - first + self.rule.window * len(self.ranks[rank].stages)

    def run(self) -> list[list[int]]:
        for mb in range(self.m):
            self._arrive(F, 0, mb, 0.0)
        heapq.heappush(self.events, (0.0, self.where[0]))
        while self.events:
            time, r = heapq.heappop(self.events)
            if self.ranks[r].free_s <= time:
                self._turn(r, time)
        done = sum(len(r.order) for r in self.ranks)
        if done != 3 * self.m * self.stages:
            raise ScheduleError(f"greedy order: stuck after {done} of {3 * self.m * self.stages} actions")
        return [r.order for r in self.ranks]

    def _arrive(self, kind: int, stage: int, mb: int, time: float) -> None:
        rank = self.ranks[self.where[stage]]
        rank.ready[kind, stage * self.m + mb] = time
        heapq.heappush(self.events, (max(time, rank.free_s), self.where[stage]))

    def _turn(self, r: int, time: float) -> None:
        """Start something on a rank that is free, or leave it waiting for what is known to come."""
        rank = self.ranks[r]
        backward, forward = self._first(rank, I, time), self._first(rank, F, time)
        allowed = forward is not None and self._admissible(rank, *divmod(forward, self.m))
        if forward is not None and backward is None and (soon := self._worth_waiting(rank, forward // self.m, time)):
            return heapq.heappush(self.events, (soon, r))
        if backward is not None and not (self.rule.alternate and rank.last_was_backward and allowed):
            return self._run(r, I, backward, time)
        if (
            allowed
            and forward is not None
            and (rank.in_flight < self.window[r] or (backward is None and not rank.weights))
        ):
            return self._run(r, F, forward, time)
        if backward is not None:
            return self._run(r, I, backward, time)
        if rank.weights and self._time_for_weight(rank, time, short=forward is not None and not allowed):
            stage, mb = rank.weights.popleft()
            return self._run(r, W, stage * self.m + mb, time)
        coming = [t for t in rank.ready.values() if t > time]
        if coming:
            heapq.heappush(self.events, (min(coming), r))
        elif allowed and forward is not None:
            self._run(r, F, forward, time)
        elif rank.weights:
            stage, mb = rank.weights.popleft()
            self._run(r, W, stage * self.m + mb, time)

    def _worth_waiting(self, rank: _Rank, stage: int, time: float) -> float:
        """Return when a backward comes that is worth waiting for instead of a forward of ``stage``; 0 if none is."""
        patience = self.rule.later_patience if rank.backwards else self.rule.patience
        if not patience:
            return 0.0
        soon = min((t for (k, _), t in rank.ready.items() if k == I and t > time), default=float("inf"))
        return soon if soon - time < patience * self.duration[F][stage] else 0.0

    def _first(self, rank: _Rank, kind: int, time: float) -> int | None:
        """Return the oldest microbatch's deepest action of a kind whose input is there, as stage × microbatches + microbatch."""
        best, key = None, (self.m, 0)
        for (k, at), t in rank.ready.items():
            if k != kind or t > time:
                continue
            stage, mb = divmod(at, self.m)
            mine = (mb, -stage)
            if mine < key or best is None:
                best, key = at, mine
        return best

    def _admissible(self, rank: _Rank, stage: int, mb: int) -> bool:
        """Return whether a forward leaves room for every older microbatch of the rank to be finished, oldest first."""
        need = self.whole[stage]
        free = rank.limit - rank.held
        if need > free:
            return False
        for older, (held, to_take) in rank.mine.items():  # in order of microbatches
            if older >= mb:
                break
            if to_take > free - need:
                return False
            free += held
        return True

    def _time_for_weight(self, rank: _Rank, time: float, *, short: bool) -> bool:
        if short:
            return True
        stage = rank.weights[0][0]
        soon = min((t for t in rank.ready.values() if t > time), default=float("inf"))
        return bool(soon - time >= self.rule.gap * self.duration[W][stage])

    def _run(self, r: int, kind: int, at: int, time: float) -> None:
        rank = self.ranks[r]
        stage, mb = divmod(at, self.m)
        end = time + self.duration[kind][stage]
        rank.free_s = end
        rank.order.append(mb | (stage << 17) | (kind << 29))
        rank.last_was_backward = kind == I
        heapq.heappush(self.events, (end, r))
        mine = rank.mine.get(mb)
        if kind == W:
            self._free(rank, mb, self.kept[stage])
            return
        del rank.ready[kind, at]
        if kind == F:
            rank.held += self.whole[stage]
            rank.in_flight += 1
            rank.forwards_left -= 1
            if mine is not None:
                mine[0] += self.whole[stage]
                mine[1] -= self.whole[stage]
            last = stage + 1 == self.stages
            self._pass_on(r, *((I, stage) if last else (F, stage + 1)), mb, end)
            return
        rank.in_flight -= 1
        rank.backwards += 1
        rank.weights.append((stage, mb))
        self._free(rank, mb, self.whole[stage] - self.kept[stage])
        if stage > 0:
            self._pass_on(r, I, stage - 1, mb, end)

    def _pass_on(self, r: int, kind: int, stage: int, mb: int, end: float) -> None:
        to = self.where[stage]
        self._arrive(kind, stage, mb, end + (self.hop[r][to] if to != r else 0.0))

    def _free(self, rank: _Rank, mb: int, amount: float) -> None:
        rank.held -= amount
        mine = rank.mine.get(mb)
        if mine is None:
            return
        mine[0] -= amount
        if mine[0] <= 1e-12 and mine[1] <= 1e-12:
            del rank.mine[mb]
