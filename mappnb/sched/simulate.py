"""simulate(): what a schedule would do, as the same dataset that a recorded run gives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
import xarray as xr

from mappnb.errors import CostError
from mappnb.replay import critical_path
from mappnb.sched import simevents
from mappnb.sched.costs import Costs, CostTables, Floats
from mappnb.sched.graph import StepGraph, build
from mappnb.sched.memory import MemorySteps, memory_steps
from mappnb.sched.schedule import Schedule
from mappnb.sched.stragglers import Straggler, inject
from mappnb.sched.times import span_s, times

__all__ = ["memory_over_time", "monte_carlo", "simulate"]


class _Step(NamedTuple):
    """What one simulated step gave."""

    events: simevents.Columns
    end_s: float
    action_end_s: float
    span_s: float
    busy_s: float
    critical_s: float
    memory: MemorySteps
    edge_slack_s: Floats


def simulate(
    schedule: Schedule,
    costs: Costs,
    *,
    stragglers: Sequence[Straggler] = (),
    num_steps: int = 1,
    seed: int | None = None,
) -> xr.Dataset:
    """Return the events of a simulated step, and what the step costs.

    Parameters
    ----------
    schedule : Schedule
        What each rank runs; it is validated first.
    costs : Costs
        How long each action and message takes.
    stragglers : sequence of Straggler
        What is slow beside that.
    num_steps : int
        Steps to simulate, one after the other; they differ by stragglers and by draws.
    seed : int, optional
        Draw each duration that is a distribution, with this seed; without it a distribution counts by its mean.

    Returns
    -------
    Dataset, dims (event,)
        The variables of a recorded run's events (:data:`mappnb.schema.EVENTS`) for the actions, the messages, gradient reductions and
        the optimizer, and ``start_s``, ``end_s``, ``slack_s`` (how much later the event may end before the step ends later; NaN for
        receives) and ``critical`` (on the critical path), dims (event,). Beside them:

        ``makespan_s`` (): first start to last end, s, reductions and optimizer included; the mean over the steps.
        ``step_s`` (step,): the same of each step.
        ``span_s`` (): longest first start to last end of the actions of one rank, s.
        ``bubble_fraction``, ``span_bubble_fraction`` (): ``1 - busy / time``, busy averaged over the ranks, time the makespan of the
        actions and the span.
        ``critical_path_s`` (): time of the operations on the critical path, s: what remains of the makespan is latency and launch.
        ``peak_activation`` (rank): peak of activations, in the unit of the costs: microbatches of a rank's whole share by default.
        ``peak_memory`` (rank): with static memory.
        ``edge_slack_s`` (edge): how much later a message of the edge may arrive before the step grows, s, at its tightest message.
        ``edge_bandwidth`` (edge): bandwidth that the edge needs so as not to make the step longer, bytes/s; NaN without message_bytes.
        Coordinates ``source`` and ``destination`` (edge): pipeline ranks.

    Raises
    ------
    ScheduleError
        If the schedule cannot run.
    CostError
        If the costs, or a straggler, do not fit the schedule.

    Notes
    -----
    Each action begins as soon as its rank is free and its input is there. Messages of a link follow one another; see :class:`Costs`
    for the sends. GPipe and 1F1B at equal costs have the bubble fraction (p − 1)/(m + p − 1) (Narayanan et al., arXiv:2104.04473,
    relate it to the ideal time instead); ``span_bubble_fraction`` is the rate of the Zero Bubble paper (arXiv:2401.10241, Table 5).
    :func:`mappnb.analysis.bubble_fraction` gives it by rank.
    """
    if num_steps < 1:
        raise CostError(f"num_steps is {num_steps}; expected at least 1")
    schedule.validate()
    rng = np.random.default_rng(seed)
    steps: list[_Step] = []
    for step in range(num_steps):
        tables = costs.tables(schedule, rng=None if seed is None else rng)
        tables = inject(schedule, tables, stragglers, step=step, rng=rng)
        one, built = _one_step(schedule, tables)
        steps.append(one)
    return _dataset(schedule, tables, steps, built)


def _one_step(schedule: Schedule, tables: CostTables) -> tuple[_Step, StepGraph]:
    built = build(schedule, tables)
    done = built.run(slack=True)
    on_path = np.zeros(len(built.graph), bool)
    on_path[critical_path(built.graph, done)] = True
    start, end = built.action_times(done)
    slack = np.maximum(done.latest_end_s - done.end_s, 0.0)
    of_edge = np.full(int(built.messages.link.max(initial=-1)) + 1, np.inf)
    np.minimum.at(of_edge, built.messages.link, slack[built.first_message : built.first_reduction])
    step = _Step(
        events=simevents.columns(built, tables, done, slack, on_path),
        end_s=float(done.end_s.max(initial=0.0)),
        action_end_s=float(end.max(initial=0.0)),
        span_s=span_s(schedule, start, end),
        busy_s=float((end - start)[built.unit == np.arange(len(built.unit))].sum()) / schedule.num_ranks,
        critical_s=float((done.end_s - done.start_s)[on_path].sum()),
        memory=memory_steps(schedule, tables, start, end, built.shipped(done)),
        edge_slack_s=of_edge,
    )
    return step, built


def _dataset(schedule: Schedule, tables: CostTables, steps: Sequence[_Step], built: StepGraph) -> xr.Dataset:
    busy, whole, span = (np.array([getattr(s, n) for s in steps]) for n in ("busy_s", "action_end_s", "span_s"))
    peak = np.max([s.memory.peak for s in steps], axis=0)
    end_s = [s.end_s for s in steps]
    scalars = (
        ("makespan_s", np.mean(end_s), "s", "first start to last end, mean over the steps"),
        ("span_s", span.mean(), "s", "longest first start to last end of the actions of one rank"),
        ("bubble_fraction", 1 - busy.sum() / whole.sum() if whole.any() else 0.0, "1", "idle share of the makespan"),
        ("span_bubble_fraction", 1 - busy.sum() / span.sum() if span.any() else 0.0, "1", "idle share of the span"),
        ("critical_path_s", np.mean([s.critical_s for s in steps]), "s", "work on the critical path"),
    )
    others = {name: xr.Variable((), float(v), {"units": u, "long_name": text}) for name, v, u, text in scalars}
    others["step_s"] = xr.Variable("step", end_s, {"units": "s", "long_name": "length of each step"})
    others["peak_activation"] = xr.Variable(
        "rank", peak, {"long_name": "peak of activations, in the unit of the costs"}
    )
    others["peak_memory"] = xr.Variable(
        "rank", peak + tables.static_memory, {"long_name": "the same with static memory"}
    )
    others |= _edges(tables, steps, built)
    ds = simevents.dataset(schedule, [s.events for s in steps], end_s, others)
    return ds.set_coords(["source", "destination"])


def _edges(tables: CostTables, steps: Sequence[_Step], built: StepGraph) -> dict[str, xr.Variable]:
    """Return what each link between two ranks may take."""
    messages = built.messages
    first = np.unique(messages.link, return_index=True)[1]
    slack = np.min([s.edge_slack_s for s in steps], axis=0)
    longest, size = np.zeros(len(slack)), np.zeros(len(slack))
    np.maximum.at(longest, messages.link, messages.wire_s)
    np.maximum.at(size, messages.link, np.where(messages.ships, tables.ship_bytes, tables.message_bytes))
    with np.errstate(divide="ignore", invalid="ignore"):
        needed = np.where(size > 0, size / (longest + slack), np.nan)
    units = {"units": "s", "long_name": "how much later its tightest message may arrive"}
    enough = {"units": "bytes/s", "long_name": "bandwidth that leaves the step as long as it is"}
    return {
        "source": xr.Variable("edge", messages.source[first], {"long_name": "pipeline rank that sends"}),
        "destination": xr.Variable("edge", messages.destination[first], {"long_name": "pipeline rank that receives"}),
        "edge_slack_s": xr.Variable("edge", slack, units),
        "edge_bandwidth": xr.Variable("edge", needed, enough),
    }


def memory_over_time(
    schedule: Schedule, costs: Costs, *, stragglers: Sequence[Straggler] = (), seed: int | None = None
) -> pd.DataFrame:
    """Return what each rank holds over the time of a step.

    Parameters
    ----------
    schedule, costs, stragglers, seed
        As of :func:`simulate`.

    Returns
    -------
    DataFrame
        One row per change, by rank and time: ``rank``, ``time_s``, ``activation`` (held from then on, in the unit of the costs) and
        ``memory`` (with static memory).
    """
    schedule.validate()
    rng = np.random.default_rng(seed)
    tables = inject(schedule, costs.tables(schedule, rng=None if seed is None else rng), stragglers, step=0, rng=rng)
    built = build(schedule, tables)
    done = built.run()
    steps = memory_steps(schedule, tables, *built.action_times(done), built.shipped(done))
    static = tables.static_memory[steps.rank]
    return pd.DataFrame(
        {"rank": steps.rank, "time_s": steps.time_s, "activation": steps.held, "memory": steps.held + static}
    )


def monte_carlo(
    schedule: Schedule,
    costs: Costs,
    *,
    draws: int,
    seed: int = 0,
    stragglers: Sequence[Straggler] = (),
) -> xr.Dataset:
    """Return how long the step takes when durations are drawn from their distributions.

    Parameters
    ----------
    schedule : Schedule
        What each rank runs; it is validated first.
    costs : Costs
        With a distribution in at least one place (see :class:`Empirical`).
    draws : int
        Number of simulated steps.
    seed : int
        Draw i of two schedules of equal sizes has the same durations, so that they can be compared draw by draw.
    stragglers : sequence of Straggler
        What is slow beside that.

    Returns
    -------
    Dataset, dims (draw,)
        ``makespan_s`` and ``span_s`` of the actions, s.
    """
    if draws < 1:
        raise CostError(f"draws is {draws}; expected at least 1")
    schedule.validate()
    out = (np.empty(len(schedule)), np.empty(len(schedule)))
    makespan, span = np.empty(draws), np.empty(draws)
    for i, child in enumerate(np.random.SeedSequence(seed).spawn(draws)):
        rng = np.random.default_rng(child)
        tables = inject(schedule, costs.tables(schedule, rng=rng), stragglers, step=i, rng=rng)
        start, end = times(schedule, tables, out=out)
        makespan[i], span[i] = end.max(), span_s(schedule, start, end)
    units = {"units": "s"}
    return xr.Dataset({"makespan_s": ("draw", makespan, units), "span_s": ("draw", span, units)})
