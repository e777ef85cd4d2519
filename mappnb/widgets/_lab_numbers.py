"""The numbers of the schedule lab: one schedule, timed by the library, as arrays, equal to what simulate() gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mappnb.errors import ScheduleError
from mappnb.replay import Replayed, critical_path
from mappnb.sched.costs import Costs, CostTables, Floats
from mappnb.sched.graph import StepGraph, build
from mappnb.sched.idle import idle_phases, own_time
from mappnb.sched.memory import MemorySteps, memory_steps
from mappnb.sched.schedule import Schedule
from mappnb.sched.stragglers import Straggler, inject
from mappnb.sched.times import span_s

__all__ = ["Limit", "Numbers", "lab_columns", "tables_of", "too_much"]

Array = np.ndarray[Any, Any]
Limit = float | npt.ArrayLike | None
"""As in :func:`mappnb.analysis.bubbles.bubble_seconds`."""


@dataclass(frozen=True, slots=True, eq=False)
class Numbers:
    """One simulated step of one schedule.

    Attributes
    ----------
    schedule : Schedule
    start_s, end_s : array, dims (action,)
        Times of the actions, in the order of ``schedule.codes``, s.
    step_s, span_s, critical_path_s, bubble_fraction, span_bubble_fraction : float
        As ``makespan_s`` and the others of :func:`mappnb.simulate`.
    actions_s : float
        End of the last action, s: the step without gradient reductions and optimizer.
    busy_s : float
        Time in actions, mean over the ranks, s.
    idle_s : array, dims (phase,)
        Idle time until ``actions_s`` in :data:`mappnb.sched.idle.PHASES`, mean over the ranks, s.
    transfer_s : float
        Time that messages take on the critical path, on the wire and as latency, s.
    memory : MemorySteps
        Activations over time.
    peak_memory : array, dims (rank,)
        With static memory, in the unit of the costs.
    static_memory : array, dims (rank,)
        The part of it that does not change.
    edges : list of (int, int, float)
        Source, destination and slack (s) of each link.
    tables : CostTables
        The costs with their stragglers and draws.
    """

    schedule: Schedule
    start_s: Floats
    end_s: Floats
    step_s: float
    actions_s: float
    span_s: float
    critical_path_s: float
    bubble_fraction: float
    span_bubble_fraction: float
    busy_s: float
    idle_s: Floats
    transfer_s: float
    memory: MemorySteps
    peak_memory: Floats
    static_memory: Floats
    edges: list[tuple[int, int, float]]
    tables: CostTables

    @property
    def tightest(self) -> tuple[int, int, float] | None:
        """The link whose messages may be late by least."""
        return min(self.edges, key=lambda e: e[2], default=None)


def tables_of(
    schedule: Schedule, costs: Costs, *, stragglers: Sequence[Straggler] = (), seed: int | None = None
) -> CostTables:
    """Return the costs of the first step that ``simulate(schedule, costs, stragglers=, seed=)`` runs."""
    rng = np.random.default_rng(seed)
    tables = costs.tables(schedule, rng=None if seed is None else rng)
    return inject(schedule, tables, stragglers, step=0, rng=rng)


def lab_columns(
    schedule: Schedule, costs: Costs, *, stragglers: Sequence[Straggler] = (), seed: int | None = None
) -> Numbers:
    """Return what a valid schedule gives at these costs: the numbers of :func:`mappnb.simulate`, as arrays.

    Parameters
    ----------
    schedule : Schedule
        One that :meth:`Schedule.validate` accepts.
    costs : Costs
        Durations in s.
    stragglers : sequence of Straggler
        What is slow beside that.
    seed : int, optional
        Draw durations that are distributions.

    Raises
    ------
    CostError
        If the costs or stragglers do not fit the schedule.
    """
    tables = tables_of(schedule, costs, stragglers=stragglers, seed=seed)
    built = build(schedule, tables)
    done = built.run(slack=True)
    start, end = built.action_times(done)
    own = own_time(schedule)
    busy = float((end - start)[own].sum()) / schedule.num_ranks
    actions, span = float(end.max(initial=0.0)), span_s(schedule, start, end)
    work, transfer = _critical(built, done)
    memory = memory_steps(schedule, tables, start, end, built.shipped(done))
    return Numbers(
        schedule=schedule,
        start_s=start,
        end_s=end,
        step_s=float(done.end_s.max(initial=0.0)),
        actions_s=actions,
        span_s=span,
        critical_path_s=work,
        bubble_fraction=1 - busy / actions if actions else 0.0,
        span_bubble_fraction=1 - busy / span if span else 0.0,
        busy_s=busy,
        idle_s=idle_phases(schedule, start, end),
        transfer_s=transfer,
        memory=memory,
        peak_memory=memory.peak + tables.static_memory,
        static_memory=tables.static_memory,
        edges=_edges(built, done),
        tables=tables,
    )


def _critical(built: StepGraph, done: Replayed) -> tuple[float, float]:
    """Return the time of the operations on the critical path, and of its messages with their latencies, s."""
    path = np.sort(critical_path(built.graph, done))  # the order in which simulate() adds them up
    length = (done.end_s - done.start_s)[path]
    message = (path >= built.first_message) & (path < built.first_reduction)
    latency = float(done.end_s.max(initial=0.0)) - float(length.sum())
    return float(length.sum()), float(length[message].sum()) + max(latency, 0.0)


def _edges(built: StepGraph, done: Replayed) -> list[tuple[int, int, float]]:
    messages = built.messages
    slack = np.maximum(done.latest_end_s - done.end_s, 0.0)[built.first_message : built.first_reduction]
    links, first = np.unique(messages.link, return_index=True)
    least = np.full(int(links.max(initial=-1)) + 1, np.inf)
    np.minimum.at(least, messages.link, slack)
    source, destination = messages.source[first].tolist(), messages.destination[first].tolist()
    return list(zip(source, destination, least[links].tolist(), strict=True))


def too_much(numbers: Numbers, limit: Limit) -> str:
    """Return why the schedule does not fit in the memory, in the library's words; empty if it does."""
    if limit is None:
        return ""
    most = np.broadcast_to(np.asarray(limit, np.float64), numbers.peak_memory.shape)
    if (numbers.peak_memory <= most * (1 + 1e-12)).all():
        return ""
    try:
        numbers.schedule.validate(costs=numbers.tables, memory_limit=limit)
    except ScheduleError as err:
        return str(err)
    rank = int(np.argmax(numbers.peak_memory - most))
    return f"rank {rank} holds {numbers.peak_memory[rank]:.4g} at its peak; memory_limit is {most[rank]:.4g}"
