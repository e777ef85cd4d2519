"""The best order there is, proven: a constraint solver for small pipelines (OR-tools CP-SAT)."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mappnb.errors import DependencyError, ScheduleError
from mappnb.sched import codes as c
from mappnb.sched._policy_run import cost_tables
from mappnb.sched.costs import Costs, CostTables
from mappnb.sched.improve import OBJECTIVES
from mappnb.sched.placement import Placement
from mappnb.sched.schedule import Schedule
from mappnb.sched.times import span_s, times

__all__ = ["Optimum", "optimal_schedule"]

F, I, W = 0, 2, 3  # noqa: E741  (numbers of the kinds, as in mappnb.sched.codes)
_MAX_ACTIONS = 400
_UNITS = 1000  # activation memory is counted in parts of so many of the largest activation


@dataclass(frozen=True, slots=True, eq=False)
class Optimum:
    """What the solver found.

    Attributes
    ----------
    schedule : Schedule
        The best order it has.
    value_s : float
        Its objective, simulated, s.
    bound_s : float
        No order can be below this (for durations rounded to the resolution), s.
    proven : bool
        Whether ``schedule`` is optimal, at the resolution.
    resolution_s : float
        Durations were counted in whole multiples of this, s.
    """

    schedule: Schedule
    value_s: float
    bound_s: float
    proven: bool
    resolution_s: float


def optimal_schedule(
    costs: Costs,
    *,
    num_stages: int,
    num_microbatches: int,
    num_chunks: int = 1,
    placement: Placement | None = None,
    memory_limit: float | npt.ArrayLike | None = None,
    objective: str = "span",
    time_limit_s: float = 60.0,
    resolution_s: float | None = None,
    hint: Schedule | None = None,
    workers: int = 2,
) -> Optimum:
    """Return the order of forwards, input and weight gradients whose step is shortest, for a small pipeline.

    Parameters
    ----------
    costs : Costs
        Durations, latencies and activation memory. Messages are taken not to wait for one another on a link.
    num_stages, num_microbatches, num_chunks : int
        Sizes, as of :func:`mappnb.schedule`.
    placement : Placement, optional
        Where each stage lives; loops by default.
    memory_limit : number or array, dims (rank,), optional
        Activation memory of each rank, in the unit of the costs.
    objective : str
        ``"span"``: the longest first start to last end of a rank; ``"step"``: the makespan.
    time_limit_s : float
        When to stop, s.
    resolution_s : float, optional
        Durations are rounded to multiples of this, s. The shortest one by default if all are multiples of it, else a twentieth of it.
    hint : Schedule, optional
        A good order to begin with, split in I and W.
    workers : int
        Threads of the solver.

    Raises
    ------
    DependencyError
        If OR-tools is not installed.
    ScheduleError
        If there are more than 400 actions, if no order fits in the memory, or none was found in time.

    Notes
    -----
    Intervals without overlap on each rank, messages as precedences with a lag, activations as a cumulative resource from the start of F
    to the end of I (whole) and from there to the end of W (the part held). Microbatches of one stage run in order in each pass: with
    equal costs of the microbatches another order of them is never better.
    """
    if objective not in OBJECTIVES:
        raise ScheduleError(f"objective is {objective!r}; expected {' or '.join(OBJECTIVES)}")
    place = placement or Placement.loop(num_stages // num_chunks, num_chunks)
    actions = 3 * place.num_stages * num_microbatches
    if actions > _MAX_ACTIONS:
        raise ScheduleError(
            f"{actions} actions are too many to prove anything: at most {_MAX_ACTIONS}; mappnb.plan() searches larger ones"
        )
    tables = cost_tables(costs, place, num_microbatches)
    tick = resolution_s or _resolution(tables)
    limit = np.broadcast_to(np.asarray(np.inf if memory_limit is None else memory_limit, float), (place.num_ranks,))
    model = _Model(place, num_microbatches, tables, tick, limit, objective)
    model.start_from(hint)
    return model.solve(time_limit_s, workers)


def _resolution(tables: CostTables) -> float:
    durations = np.concatenate([tables.duration_s[[F, I, W]].ravel(), (tables.latency_s + tables.transfer_s).ravel()])
    positive = durations[durations > 0]
    if not len(positive):
        raise ScheduleError("all durations are 0; there is nothing to make short")
    least = float(positive.min())
    ratio = durations / least
    return least if np.allclose(ratio, np.rint(ratio)) else least / 20


class _Model:
    def __init__(
        self, place: Placement, m: int, tables: CostTables, tick: float, limit: npt.NDArray[np.float64], objective: str
    ) -> None:
        try:
            self.cp: Any = importlib.import_module("ortools.sat.python.cp_model")
        except ImportError:
            raise DependencyError("the exact solver needs OR-tools: pip install 'mappnb[exact]'") from None
        self.place, self.m, self.tables, self.tick, self.objective = place, m, tables, tick, objective
        self.model = self.cp.CpModel()
        self.length = np.rint(tables.duration_s[:, :, 0] / tick).astype(int)
        hop = tables.latency_s + tables.transfer_s
        self.hop = np.rint(hop / tick).astype(int)
        lags = int(self.hop.max()) * 2 * place.num_stages
        self.horizon = int(self.length[[F, I, W]].sum()) * m + lags * m
        self.start = {key: self.model.new_int_var(0, self.horizon, "") for key in self._keys()}
        self._ranks(limit)
        self._order()
        self._aim()

    def _keys(self) -> Iterator[tuple[int, int, int]]:
        return ((k, s, i) for k in (F, I, W) for s in range(self.place.num_stages) for i in range(self.m))

    def end(self, key: tuple[int, int, int]) -> Any:
        return self.start[key] + int(self.length[key[0], key[1]])

    def _ranks(self, limit: npt.NDArray[np.float64]) -> None:
        """One action at a time on each rank, and no more memory than there is."""
        act, kept = self.tables.activation, self.tables.activation_weight
        unit = _UNITS / max(float(act.max()), 1e-300)
        for rank in range(self.place.num_ranks):
            mine = [s for s in range(self.place.num_stages) if self.place.forward[s] == rank]
            keys = [(k, s, i) for k in (F, I, W) for s in mine for i in range(self.m)]
            self.model.add_no_overlap(
                [
                    self.model.new_fixed_size_interval_var(self.start[key], int(self.length[key[0], key[1]]), "")
                    for key in keys
                ]
            )
            if not np.isfinite(limit[rank]):
                continue
            held, need = [], []
            for s in mine:
                for i in range(self.m):
                    held.append(self._between(self.start[F, s, i], self.end((I, s, i))))
                    need.append(round(float(act[s]) * unit))
                    held.append(self._between(self.end((I, s, i)), self.end((W, s, i))))
                    need.append(round(float(kept[s]) * unit))
            self.model.add_cumulative(held, need, int(limit[rank] * unit * (1 + 1e-9)))

    def _between(self, first: Any, last: Any) -> Any:
        size = self.model.new_int_var(0, self.horizon, "")
        stop = self.model.new_int_var(0, self.horizon, "")
        self.model.add(stop == last)
        return self.model.new_interval_var(first, size, stop, "")

    def _order(self) -> None:
        """Say what waits for what; microbatches run in order in each pass of a stage."""
        last = self.place.num_stages - 1
        for s in range(last + 1):
            for i in range(self.m):
                if s:
                    self._after((F, s - 1, i), (F, s, i))
                self._after((F, s, i) if s == last else (I, s + 1, i), (I, s, i))
                self._after((I, s, i), (W, s, i))
                if i:
                    for k in (F, I, W):
                        self._after((k, s, i - 1), (k, s, i))

    def _after(self, first: tuple[int, int, int], then: tuple[int, int, int]) -> None:
        source, target = self.place.forward[first[1]], self.place.forward[then[1]]
        lag = int(self.hop[source, target]) if source != target else 0
        self.model.add(self.start[then] >= self.end(first) + lag)

    def _aim(self) -> None:
        self.goal = self.model.new_int_var(0, self.horizon, "goal")
        for rank in range(self.place.num_ranks):
            mine = [s for s in range(self.place.num_stages) if self.place.forward[s] == rank]
            first = self.model.new_int_var(0, self.horizon, "")
            self.model.add_min_equality(first, [self.start[F, s, 0] for s in mine])
            work = int(self.length[[F, I, W]][:, mine].sum()) * self.m
            for s in mine:
                done = self.end((W, s, self.m - 1))
                self.model.add(self.goal >= (done - first if self.objective == "span" else done))
            self.model.add(self.goal >= work if self.objective == "span" else self.goal >= first + work)
        self.model.minimize(self.goal)

    def start_from(self, hint: Schedule | None) -> None:
        """Give the solver the times of a known order."""
        if hint is None:
            return
        begin, _ = times(hint, self.tables)
        for code, t in zip(c.decode(hint.codes), begin.tolist(), strict=True):
            key = (c.KINDS.index(code.kind), code.stage, code.microbatch)
            if key in self.start:
                self.model.add_hint(self.start[key], round(t / self.tick))

    def solve(self, time_limit_s: float, workers: int) -> Optimum:
        solver = self.cp.CpSolver()
        solver.parameters.max_time_in_seconds = time_limit_s
        solver.parameters.num_workers = workers
        status = solver.solve(self.model)
        if status == self.cp.INFEASIBLE:
            raise ScheduleError("no order fits: the memory limit is below what one microbatch needs on some rank")
        if status not in (self.cp.OPTIMAL, self.cp.FEASIBLE):
            raise ScheduleError(f"no order found in {time_limit_s:g} s; give more time, or a hint")
        begin = {key: solver.value(var) for key, var in self.start.items()}
        sched = self._schedule(begin)
        start, end = times(sched, self.tables)
        value = span_s(sched, start, end) if self.objective == "span" else float(end.max())
        bound = float(solver.best_objective_bound) * self.tick
        return Optimum(sched, value, bound, status == self.cp.OPTIMAL, self.tick)

    def _schedule(self, begin: dict[tuple[int, int, int], int]) -> Schedule:
        rows = []
        for rank in range(self.place.num_ranks):
            mine = [key for key in begin if self.place.forward[key[1]] == rank]
            mine.sort(key=lambda key: (begin[key], begin[key] + self.length[key[0], key[1]], key[0]))
            rows.append(c.pack([k[1] for k in mine], [k[0] for k in mine], [k[2] for k in mine]))
        offsets = np.concatenate(([0], np.cumsum([len(r) for r in rows]))).astype(np.int64)
        return Schedule.from_codes(np.concatenate(rows), offsets, placement=self.place, name="optimal")
