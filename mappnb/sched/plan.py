"""plan(): which schedule suits these costs and this memory, and why."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from mappnb.errors import MappnbError, ScheduleError, did_you_mean
from mappnb.sched.candidates import Candidate, Setting, dynamic, improved, named, searched, timed
from mappnb.sched.costs import Costs, Floats
from mappnb.sched.idle import idle_phases, own_time
from mappnb.sched.improve import OBJECTIVES
from mappnb.sched.placement import Placement
from mappnb.sched.registry import family, positive
from mappnb.sched.split import balanced, even, moved, scaled, split_costs, unit_costs

__all__ = ["plan"]

_PHASES = ("warm-up", "steady phase", "cool-down")


def plan(
    costs: Costs,
    *,
    num_stages: int,
    num_microbatches: int | Sequence[int],
    memory_limit: float | npt.ArrayLike | None = None,
    num_chunks: Sequence[int] = (1, 2, 4),
    num_layers: int | None = None,
    schedules: Sequence[str] | None = None,
    policies: bool = True,
    trials: int = 1500,
    objective: str = "step",
    seed: int = 0,
) -> pd.DataFrame:
    """Return schedules by the length of their simulated step, the best first, all within the memory limit.

    Parameters
    ----------
    costs : Costs
        What the work costs, for example from :func:`mappnb.fit_costs` or :meth:`Costs.from_model`.
    num_stages : int
        Stages at one chunk per rank, that is the number of pipeline ranks.
    num_microbatches : int or sequence of int
        Microbatches of a step. Of several, the same batch is cut in so many: the costs are those of the first, work and activations
        of a microbatch shrink as their number grows, latencies do not.
    memory_limit : number or array, dims (rank,), optional
        Memory of a rank for activations and static memory, in the unit of the costs.
    num_chunks : sequence of int
        Chunks per rank to try where a schedule leaves that open.
    num_layers : int, optional
        Units of the depth (layers, with embedding and loss as units of their own where the costs have them so: arrays of this
        length). Stages may then hold unequal numbers of them, and the split is searched for together with the order.
    schedules : sequence of str, optional
        Registered schedules to consider; all by default. ``fbd``, which takes twice the ranks, only if named.
    policies : bool
        Also what the dynamic policies make of the costs (:mod:`mappnb.sched.policies`), as fixed orders.
    trials : int
        Moves of the local search on each order that is searched for; 0 leaves the search out.
    objective : str
        ``"step"``: the makespan. ``"span"``: the longest span of one rank, which is what a step takes where the optimizer does not wait
        for all ranks (arXiv:2401.10241, 4).
    seed : int
        Of the search.

    Returns
    -------
    DataFrame
        One row per schedule: ``schedule`` and ``options`` (as :func:`mappnb.schedule` takes them; a policy's name, or ``searched``),
        ``step_s``, ``span_s``, ``bubble_fraction``, ``span_bubble_fraction``, ``peak_activation`` (largest of the ranks),
        ``peak_memory``, ``num_microbatches``, ``layers`` (units of each stage), ``why``, and ``order``, the :class:`Schedule` itself.
        ``attrs["skipped"]``: what could not be built, and why; ``attrs["too_large"]``: what did not fit, with its peak.

    Raises
    ------
    ScheduleError
        If nothing fits; the message says what limit would do, and for which schedule.
    CostError
        If the costs do not fit the sizes.
    """
    ranks = positive("num_stages", num_stages)
    counts = _counts(num_microbatches)
    if objective not in OBJECTIVES:
        raise ScheduleError(
            f"objective is {objective!r}; expected {' or '.join(OBJECTIVES)}{did_you_mean(objective, OBJECTIVES)}"
        )
    for name in schedules or ():
        family(name)
    limit = _limit(memory_limit, ranks)
    chunks = tuple(positive("num_chunks", v) for v in num_chunks)
    if num_layers is not None:
        chunks = _fitting(chunks, ranks, positive("num_layers", num_layers))
    found: list[tuple[int, Candidate]] = []
    skipped: dict[str, str] = {}
    for m in counts:
        setting = Setting(ranks, m, chunks, limit, objective, trials, seed)
        of_count = scaled(costs, work=counts[0] / m, memory=counts[0] / m)
        rows = _Search(setting, of_count, num_layers, schedules, policies, skipped).run()
        found += [(m, row) for row in rows]
    return _table(found, limit, objective, skipped)


def _counts(value: int | Sequence[int]) -> tuple[int, ...]:
    values = value if isinstance(value, (list, tuple, np.ndarray)) else [value]
    if not len(values):
        raise ScheduleError("num_microbatches is empty; expected at least one number")
    return tuple(positive("num_microbatches", v) for v in values)


def _limit(value: float | npt.ArrayLike | None, ranks: int) -> Floats:
    limit = np.asarray(np.inf if value is None else value, np.float64)
    if limit.shape not in ((), (ranks,)) or np.isnan(limit).any() or (limit <= 0).any():
        raise ScheduleError(f"memory_limit is {value!r}; expected a number above 0, or one for each of {ranks} ranks")
    return np.array(np.broadcast_to(limit, (ranks,)), np.float64)


def _fitting(chunks: tuple[int, ...], ranks: int, units: int) -> tuple[int, ...]:
    fit = tuple(v for v in chunks if v * ranks <= units)
    if not fit:
        raise ScheduleError(
            f"num_layers is {units}: fewer than one for each of {ranks} ranks; use at most {units} ranks"
        )
    return fit


class _Search:
    """One number of microbatches: all candidates, the best improved, their layers moved."""

    def __init__(
        self,
        setting: Setting,
        costs: Costs,
        units: int | None,
        names: Sequence[str] | None,
        policies: bool,
        skipped: dict[str, str],
    ) -> None:
        self.setting, self.costs, self.units = setting, costs, units
        self.names, self.policies, self.skipped = names, policies, skipped
        self.unit = unit_costs(costs, units) if units is not None else None

    def run(self) -> list[Candidate]:
        rows = list(self._all())
        fit = sorted((r for r in rows if r.fits(self.setting.limit)), key=self._value)
        if self.setting.trials:
            rows += [improved(self.setting, row) for row in fit[:3]]
        if self.units is not None:
            rows += [self._layers_moved(row) for row in fit[:3]]
        return _distinct(rows)

    def _value(self, row: Candidate) -> tuple[float, float]:
        return row.value(self.setting.objective)

    def _all(self) -> Iterator[Candidate]:
        yield from named(self.setting, self._splits, self.names, self._failed)
        if self.policies:
            yield from dynamic(self.setting, self._splits, self._failed)
        if self.setting.trials:
            yield from searched(self.setting, self._splits, self._failed)

    def _failed(self, what: str, err: MappnbError) -> None:
        self.skipped.setdefault(what, str(err).splitlines()[0])

    def _splits(self, place: Placement) -> Iterator[tuple[Costs, tuple[int, ...] | None]]:
        """Yield the costs of a placement: as they are, or with the layers evenly split and balanced."""
        if self.units is None or self.unit is None:
            yield self.costs, None
            return
        if place.num_stages > self.units:
            return
        splits = [even(self.units, place.num_stages), balanced(self.unit, place.num_stages, place.forward)]
        for layers in dict.fromkeys(splits):
            yield split_costs(self.costs, layers, num_ranks=self.setting.ranks), layers

    def _layers_moved(self, row: Candidate) -> Candidate:
        """Move single layers between neighbouring stages while that helps the order; then let the order follow."""
        best = row
        for _ in range(30):
            trials = []
            for i in range(len(best.layers or ()) - 1):
                for by in (1, -1):
                    layers = moved(best.layers or (), i, by)
                    if layers is not None:
                        costs = split_costs(self.costs, layers, num_ranks=self.setting.ranks)
                        trials.append(timed(row.schedule, costs, name=row.name, options=row.options, layers=layers))
            trials = [t for t in trials if t.fits(self.setting.limit)]
            better = min(trials, key=self._value, default=None)
            if better is None or self._value(better) >= self._value(best):
                break
            best = better
        return improved(self.setting, best) if self.setting.trials else best


def _distinct(rows: list[Candidate]) -> list[Candidate]:
    seen: dict[tuple[Any, ...], Candidate] = {}
    for row in rows:
        seen.setdefault((row.schedule, row.layers), row)
    return list(seen.values())


# ------------------------------------------------------------------------------------------------------- the table
def _table(found: list[tuple[int, Candidate]], limit: Floats, objective: str, skipped: dict[str, str]) -> pd.DataFrame:
    fit = sorted((f for f in found if f[1].fits(limit)), key=lambda f: f[1].value(objective))
    if not fit:
        raise ScheduleError(_nothing(found, limit, skipped))
    best, plain = fit[0][1], next((r for _, r in fit if r.name == "1f1b"), None)
    rows = []
    for m, row in fit:
        busy = float((row.end_s - row.start_s)[own_time(row.schedule)].sum()) / row.schedule.num_ranks
        end = float(row.end_s.max())
        rows.append(
            {
                "schedule": row.name,
                "options": row.options,
                "step_s": row.step_s,
                "bubble_fraction": 1 - busy / end if end else 0.0,
                "peak_activation": float(row.peak.max()),
                "why": _why(row, best, plain, limit, objective),
                "span_s": row.span_s,
                "span_bubble_fraction": 1 - busy / row.span_s if row.span_s else 0.0,
                "peak_memory": float(row.memory.max()),
                "num_microbatches": m,
                "layers": row.layers,
                "order": row.schedule,
            }
        )
    table = pd.DataFrame(rows)
    table.attrs["skipped"] = skipped
    table.attrs["too_large"] = {_name(r): float(r.memory.max()) for _, r in found if not r.fits(limit)}
    return table


def _name(row: Candidate) -> str:
    options = ", ".join(f"{k}={v}" for k, v in row.options.items())
    return f"{row.name} ({options})" if options else row.name


def _nothing(found: list[tuple[int, Candidate]], limit: Floats, skipped: dict[str, str]) -> str:
    if not found:
        first = next(iter(skipped.items()), None)
        return "no schedule can be built for these sizes" + (f"; {first[0]}: {first[1]}" if first else "")
    over = [(float((r.memory - limit).max()), r) for _, r in found]
    least = min(over, key=lambda o: o[0])[1]
    rank = int(np.argmax(least.memory - limit))
    text = f"no schedule fits in {limit[rank]:.4g}; {_name(least)} needs least: {least.memory[rank]:.4g} on rank {rank}"
    if least.tables.static_memory[rank] > limit[rank]:
        return f"{text}, of which {least.tables.static_memory[rank]:.4g} is static: more ranks, or sharded optimizer state, would help"
    return f"{text}. Set memory_limit to that, cut the batch in more microbatches, or recompute activations"


def _idle(row: Candidate) -> Floats:
    """Return the idle time of an average rank before its first backward, until its last forward, and after it, s."""
    idle = idle_phases(row.schedule, row.start_s, row.end_s)
    return np.where(idle > 1e-9 * float(row.end_s.max()), idle, 0.0)  # sums of doubles leave crumbs


def _why(row: Candidate, best: Candidate, plain: Candidate | None, limit: Floats, objective: str) -> str:
    idle = _idle(row)
    parts = [
        f"idle {idle.sum() / max(row.end_s.max(), 1e-300):.1%} of the step: "
        + ", ".join(f"{i:.3g} s in {p}" for i, p in zip(idle, _PHASES, strict=True))
    ]
    mine, top = row.value(objective)[0], best.value(objective)[0]
    if row is not best:
        parts.insert(0, f"{mine / top - 1:.2%} longer than the best, {_difference(idle - _idle(best), 'more')}")
    elif plain is not None and plain is not row:
        parts.insert(
            0,
            f"{1 - mine / plain.value(objective)[0]:.1%} shorter than 1f1b, {_difference(_idle(plain) - idle, 'less')}",
        )
    if np.isfinite(limit).any():
        rank = int(np.argmax(row.memory / limit))
        parts.append(f"memory {row.memory[rank]:.4g} of {limit[rank]:.4g} on rank {rank}")
    return "; ".join(parts)


def _difference(idle: Floats, word: str) -> str:
    """Return in which phase the difference is."""
    at = int(np.argmax(idle))
    if idle[at] <= 1e-12:
        return "not by idle time but by its work"
    return f"mostly by {idle[at]:.3g} s {word} idle in the {_PHASES[at]}"
