"""What the planner tries: schedules by name with their options, orders made while running, and orders searched for."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mappnb.errors import MappnbError
from mappnb.sched._policy_run import cost_tables
from mappnb.sched.costs import Costs, CostTables, Floats
from mappnb.sched.graph import build
from mappnb.sched.greedy import GreedyRule, greedy_order
from mappnb.sched.improve import improve
from mappnb.sched.memory import peak_activation
from mappnb.sched.placement import Placement
from mappnb.sched.policies import simulate_policy
from mappnb.sched.registry import family, schedule, schedules
from mappnb.sched.schedule import Schedule
from mappnb.sched.times import span_s, times

__all__ = ["Candidate", "Setting", "dynamic", "named", "placements", "searched", "timed"]

_RULES = ("dfc", "bfc", "critical_path", "adaptive")
_IMPROVED = 3
"""Orders of each placement that the local search is tried on."""
_LIMIT_OF_SEARCH = 40_000
"""Actions beyond which no order is searched for: a search walks through all of them dozens of times."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What is planned for.

    Attributes
    ----------
    ranks, microbatches : int
        Pipeline ranks; microbatches of a step.
    chunks : sequence of int
        Chunks per rank to try where that can be chosen.
    limit : array, dims (rank,)
        Memory of each rank, in the unit of the costs.
    objective : str
        "step" or "span".
    trials : int
        Moves of the local search.
    seed : int
        Of its random moves.
    """

    ranks: int
    microbatches: int
    chunks: tuple[int, ...]
    limit: Floats
    objective: str
    trials: int
    seed: int


@dataclass(frozen=True, slots=True, eq=False)
class Candidate:
    """An order with what it costs.

    Attributes
    ----------
    name, options
        As :func:`mappnb.schedule` takes them, or a policy or "searched".
    schedule : Schedule
        The order.
    costs : Costs
        For its placement and layers.
    tables : CostTables
        The same as arrays.
    start_s, end_s : array, dims (action,)
        Times, s.
    step_s, span_s : float
        Makespan, reductions and optimizer included, and longest span of a rank, s.
    peak, memory : array, dims (rank,)
        Peak of activations, and with static memory.
    layers : tuple of int, optional
        Units of depth of each stage.
    """

    name: str
    options: dict[str, Any]
    schedule: Schedule
    costs: Costs
    tables: CostTables
    start_s: Floats
    end_s: Floats
    step_s: float
    span_s: float
    peak: Floats
    memory: Floats
    layers: tuple[int, ...] | None = None

    def value(self, objective: str) -> tuple[float, float]:
        """Return what is made small, and the peak to break ties."""
        return (self.span_s if objective == "span" else self.step_s), float(self.memory.max())

    def fits(self, limit: Floats) -> bool:
        """Return whether every rank has the memory."""
        return bool((self.memory <= limit * (1 + 1e-9)).all())


def timed(
    sched: Schedule, costs: Costs, *, name: str, options: dict[str, Any], layers: tuple[int, ...] | None = None
) -> Candidate:
    """Return a schedule with its times and memory."""
    tables = costs.tables(sched)
    if tables.by_events or tables.optimizer_s > 0 or tables.reduce_s.any():
        built = build(sched, tables)
        done = built.run()
        start, end = built.action_times(done)
        step = float(done.end_s.max())
    else:
        start, end = times(sched, tables)
        step = float(end.max())
    peak = peak_activation(sched, tables)
    memory = peak + tables.static_memory
    return Candidate(
        name, options, sched, costs, tables, start, end, step, span_s(sched, start, end), peak, memory, layers
    )


CostsOf = Callable[[Placement], Iterator[tuple[Costs, tuple[int, ...] | None]]]
"""Gives the costs of a placement for each split of the layers to try."""
Failed = Callable[[str, MappnbError], None]


def named(setting: Setting, costs_of: CostsOf, names: Sequence[str] | None, failed: Failed) -> Iterator[Candidate]:
    """Yield the registered schedules with the options worth trying."""
    for name in names if names is not None else schedules():
        if name == "fbd" and names is None:
            continue  # on twice the ranks: another question
        found = family(name)
        for v in setting.chunks if found.chunks is None else (found.chunks,):
            if found.chunks is None and v == 1 and names is None:
                continue  # plain 1F1B, GPipe and ZB-H1 under another name
            for options in _options(name, setting):
                chunks = {"num_chunks": v} if v > 1 else {}
                try:
                    sched = schedule(
                        name, num_stages=setting.ranks * v, num_microbatches=setting.microbatches, **chunks, **options
                    )
                except MappnbError as err:
                    failed(_label(name, {**chunks, **options}), err)
                    continue
                for costs, layers in costs_of(sched.placement):
                    yield timed(sched, costs, name=name, options={**chunks, **options}, layers=layers)


def _options(name: str, setting: Setting) -> Iterator[dict[str, Any]]:
    p, m = setting.ranks, setting.microbatches
    if name in ("1f1b", "interleaved"):
        groups = [{}] if name == "1f1b" else [{}, *({"group_size": g} for g in sorted({2 * p, 4 * p}) if g < m)]
        for group, extra in itertools.product(groups, (0, 1, 2)):
            yield {**group, **({"extra_warm_up": extra} if extra else {})}
    else:
        yield {}


def _label(name: str, options: dict[str, Any]) -> str:
    return name + "".join(f", {k}={v}" for k, v in options.items())


def placements(setting: Setting) -> list[Placement]:
    """Return the placements for which orders are made: loops, and the V."""
    p = setting.ranks
    out = [Placement.loop(p, v) for v in setting.chunks]
    return [*out, Placement.wave(p)] if 2 in setting.chunks and p > 1 else out


def dynamic(setting: Setting, costs_of: CostsOf, failed: Failed) -> Iterator[Candidate]:
    """Yield what the policies make of the costs, under the memory limit."""
    for place, rule, split in itertools.product(placements(setting), _RULES, (False, True)):
        for costs, layers in costs_of(place):
            tables = cost_tables(costs, place, setting.microbatches)
            if tables.by_events:
                return
            room = setting.limit - tables.static_memory
            try:
                run = simulate_policy(
                    rule, placement=place, num_microbatches=setting.microbatches, costs=tables, split=split,
                    memory_limit=room if np.isfinite(room).all() else None,
                )  # fmt: skip
            except MappnbError as err:
                failed(f"{rule} on {_place(place)}", err)
                continue
            options = {"placement": _place(place), "split": split}
            yield timed(run.schedule, costs, name=rule, options=options, layers=layers)


def searched(setting: Setting, costs_of: CostsOf, failed: Failed) -> Iterator[Candidate]:
    """Yield orders searched for: greedy walks by many rules on each placement, the best of them improved move by move."""
    for place in placements(setting):
        if 3 * place.num_stages * setting.microbatches > _LIMIT_OF_SEARCH or place.num_stages > 3 * setting.ranks:
            continue
        for costs, layers in costs_of(place):
            found: dict[Schedule, Candidate] = {}  # many rules make one order
            for rule in _rules():
                try:
                    made = _walk(setting, place, costs, rule, layers)
                except MappnbError as err:
                    failed(f"searched on {_place(place)}", err)
                    break
                found.setdefault(made.schedule, made)
            for one in sorted(found.values(), key=lambda f: f.value(setting.objective))[:_IMPROVED]:
                yield improved(setting, one)


def _rules() -> Iterator[GreedyRule]:
    for gap, patience, later in itertools.product((0.0, 0.5, 1.0), (0.15, 0.3, 0.6, 0.9), (0.0, 0.3)):
        yield GreedyRule(gap=gap, patience=patience, later_patience=later)
    for gap, patience in itertools.product((0.5, 1.0), (0.15, 0.6)):
        yield GreedyRule(gap=gap, patience=patience, window=0.0)


def _walk(
    setting: Setting, place: Placement, costs: Costs, rule: GreedyRule, layers: tuple[int, ...] | None
) -> Candidate:
    tables = cost_tables(costs, place, setting.microbatches)
    room = setting.limit - tables.static_memory
    order = greedy_order(place, setting.microbatches, tables, limit=room, rule=rule)
    return timed(order, costs, name="searched", options={"placement": _place(place)}, layers=layers)


def improved(setting: Setting, one: Candidate) -> Candidate:
    """Return a candidate after the local search."""
    if setting.trials < 1 or one.tables.by_events or len(one.schedule) > _LIMIT_OF_SEARCH:
        return one
    better = improve(
        one.schedule,
        one.tables,
        limit=setting.limit - one.tables.static_memory,
        objective=setting.objective,
        trials=setting.trials,
        seed=setting.seed,
    )
    options = one.options if one.name == "searched" else {"from": _label(one.name, one.options)}
    made = timed(better, one.costs, name="searched", options=options, layers=one.layers)
    return made if made.value(setting.objective) < one.value(setting.objective) else one


def _place(place: Placement) -> str:
    chunks = place.num_stages // place.num_ranks
    if chunks == 1:
        return "loop"
    wave = place == Placement.wave(place.num_ranks, chunks)
    return f"{'V' if wave else 'loop'} of {chunks} chunks"
