"""fit_costs(): the costs of a run, measured in its events; as those of a simulation they predict other schedules."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pandas as pd
import xarray as xr

from mappnb.errors import CostError, did_you_mean
from mappnb.run import Run
from mappnb.sched.costs import Costs, CostTables, Empirical
from mappnb.sched.measure import Measured, Steps, measure, table_of
from mappnb.sched.messages import launch_s, link_of, optimizer_s, reduce_s
from mappnb.sched.schedule import Schedule
from mappnb.terms import Kind

__all__ = ["FittedCosts", "fit_costs"]

Floats = npt.NDArray[np.float64]
Statistic = Literal["median", "mean", "empirical"]
_STATISTICS = ("median", "mean", "empirical")
_F, _B, _I, _W = (k.value for k in Kind)


@dataclass(frozen=True, kw_only=True, eq=False)
class FittedCosts(Costs):
    """Costs that were measured, and what they are based on.

    Attributes
    ----------
    table : DataFrame
        As of :func:`mappnb.sched.cost_table`: samples, mean, median, 95th percentile and spread of each stage and kind, s.
    launch_s : float
        Time of the program between two actions of a rank, s: each action takes so much longer, whatever the number of chunks.
    steps : tuple of int
        Steps that were used.
    notes : tuple of str
        What could not be told from the trace, and what was done about it.
    """

    table: pd.DataFrame = field(repr=False)
    launch_s: float = 0.0
    steps: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()

    def tables(self, schedule: Schedule, *, rng: np.random.Generator | None = None) -> CostTables:
        """Return the costs as arrays for one schedule, with ``launch_s`` in every action; see :meth:`mappnb.Costs.tables`."""
        tables = super().tables(schedule, rng=rng)
        return replace(tables, duration_s=tables.duration_s + self.launch_s)


def fit_costs(
    run: Run | xr.Dataset,
    *,
    steps: Steps = None,
    statistic: Statistic = "median",
    weight_fraction: float = 0.5,
) -> FittedCosts:
    """Return the costs of a run, as :func:`mappnb.simulate` takes them.

    Parameters
    ----------
    run : Run or Dataset, dims (event,)
        Recorded, imported or simulated.
    steps : int, slice or sequence of int, optional
        Steps to use (both ends of a slice included); by default all but the first, which holds the warm-up.
    statistic : str
        ``"median"`` or ``"mean"`` of the actions of each stage and rank; ``"empirical"`` keeps all of them, to be drawn from.
    weight_fraction : float
        Part of a whole backward B that is its weight gradient, for stages where the trace does not have I and W apart.

    Returns
    -------
    FittedCosts
        Durations by stage, s, of a rank's whole share: the measured length of a stage times the number of chunks. Latency,
        bandwidth and size of messages, reductions, optimizer. ``table``, ``steps`` and ``notes`` say what that is based on.

    Raises
    ------
    CostError
        If there are no pipeline actions, a stage lacks one of its passes, or the events are of more than one layout.

    Notes
    -----
    Waits are not costs: see :func:`mappnb.sched.measure.measure` for what is removed. Ranks that run the same stage (data and
    tensor parallel ones) are measured one by one, and the median over them is taken. What the program does between two actions without
    waiting is ``launch_s``, where the trace has the messages that tell it from waiting. A backward that recomputes its forward
    counts whole. With ``"empirical"`` an undivided B keeps its spread in I, and W is a number. Memory is not measured: peaks count
    microbatches, as without costs.
    """
    if statistic not in _STATISTICS:
        raise CostError(
            f"statistic is {statistic!r}; expected one of {', '.join(_STATISTICS)}{did_you_mean(statistic, _STATISTICS)}"
        )
    if not 0 <= weight_fraction <= 1:
        raise CostError(f"weight_fraction is {weight_fraction!r}; expected a number from 0 to 1")
    measured = measure(run, steps=steps)
    link = link_of(measured)
    launch = launch_s(measured, link.p2p_s, "median" if statistic == "median" else "mean")
    samples = _Samples(measured, statistic, weight_fraction)
    reduction, reduction_notes = reduce_s(measured)
    return FittedCosts(
        **samples.costs(),
        overlapped_s=samples.overlapped_s(),
        p2p_s=link.p2p_s,
        bandwidth=link.bandwidth,
        message_bytes=link.message_bytes,
        ship_bytes=link.ship_bytes,
        send=link.send,
        reduce_s=reduction if reduction.any() else 0.0,
        optimizer_s=optimizer_s(measured),
        table=table_of(measured.actions),
        launch_s=launch,
        steps=measured.steps,
        notes=(*measured.notes, *samples.notes, *link.notes, *reduction_notes),
    )


class _Samples:
    """The lengths of each stage's actions of each kind, of a rank's whole share."""

    def __init__(self, measured: Measured, statistic: Statistic, weight_fraction: float) -> None:
        self.measured, self.statistic, self.weight_fraction = measured, statistic, weight_fraction
        self.stages = int(measured.actions.stage.max()) + 1
        self.notes: list[str] = []
        alone = measured.actions[measured.actions.alone]
        self._seconds: dict[tuple[int, str], list[Floats]] = {}
        for key, rows in alone.groupby(["stage", "kind", "rank"]).seconds:
            stage, kind, _ = key
            values = rows.to_numpy(np.float64) * measured.num_chunks
            self._seconds.setdefault((int(str(stage)), str(kind)), []).append(np.maximum(values, 0.0))

    def has(self, stage: int, kind: str) -> bool:
        """Return whether the stage has such actions."""
        return (stage, kind) in self._seconds

    def number(self, stage: int, kind: str) -> float:
        """Return the cost of a stage: by rank first, then the median over the ranks, s."""
        one = np.median if self.statistic == "median" else np.mean
        return float(np.median([one(values) for values in self._seconds[stage, kind]]))

    def all(self, stage: int, kind: str) -> Floats:
        """Return the samples of all ranks, s."""
        return np.concatenate(self._seconds[stage, kind])

    def costs(self) -> dict[str, Any]:
        """Return forward_s, backward_input_s and backward_weight_s, by stage."""
        rows = [self._stage(s) for s in range(self.stages)]
        if any(not (self.has(s, _I) and self.has(s, _W)) for s in range(self.stages)):
            share = self.weight_fraction
            self.notes.append(
                f"whole backwards B: {share:g} of each is taken for the weight gradient (weight_fraction)"
            )
        columns = dict(
            zip(("forward_s", "backward_input_s", "backward_weight_s"), zip(*rows, strict=True), strict=True)
        )
        if self.statistic == "empirical":
            return {name: list(values) for name, values in columns.items()}
        return {name: np.array(values, np.float64) for name, values in columns.items()}

    def _stage(self, stage: int) -> tuple[Any, Any, Any]:
        if not self.has(stage, _F):
            raise self._missing(stage, "forward")
        forward = self._value(stage, _F)
        if self.has(stage, _I) and self.has(stage, _W):
            return forward, self._value(stage, _I), self._value(stage, _W)
        if self.has(stage, _B):
            whole = self.number(stage, _B)
            weight = whole * self.weight_fraction
            if self.statistic == "empirical":
                return forward, Empirical(np.maximum(self.all(stage, _B) - weight, 0.0)), weight
            return forward, whole - weight, weight
        raise self._missing(stage, "backward" if not self.has(stage, _I) else "backward_weight")

    def _value(self, stage: int, kind: str) -> Any:
        return Empirical(self.all(stage, kind)) if self.statistic == "empirical" else self.number(stage, kind)

    def _missing(self, stage: int, what: str) -> CostError:
        actions = self.measured.actions
        mine = actions[(actions.stage == stage) & actions.alone]
        counts = ", ".join(f"{n} {k}" for k, n in mine.kind.value_counts().items()) or "none"
        beside = int(((actions.stage == stage) & ~actions.alone).sum())
        also = f" ({beside} more ran beside another action)" if beside else ""
        return CostError(
            f"stage {stage}: no {what} that ran alone in steps {list(self.measured.steps)}; its actions: {counts}{also}. "
            "Give the events of all ranks, and steps= in which every stage runs both passes"
        )

    def overlapped_s(self) -> float | None:
        """Return the time of a forward and a whole backward that run as one, of a whole share, s; None if none did."""
        together = self.measured.actions[~self.measured.actions.alone]
        if not len(together):
            return None
        cost = self.costs()
        parts = {n: np.array([_mean(v) for v in values]) for n, values in cost.items()}
        by_kind = {_F: parts["forward_s"], _I: parts["backward_input_s"], _W: parts["backward_weight_s"]}
        by_kind[_B] = by_kind[_I] + by_kind[_W]
        spans = together.groupby(["incarnation", "rank", "start_ns"])
        length = (spans.end_ns.max() - spans.start_ns.min()) / 1e9 * self.measured.num_chunks
        alone = together.assign(s=[by_kind[k][s] for k, s in zip(together.kind, together.stage, strict=True)])
        sums = alone.groupby(["incarnation", "rank", "start_ns"]).s.sum()
        pairs = spans.size() == 2
        if not pairs.any():
            self.notes.append("actions overlap, but not two by two: overlapped_s is their sum")
            return None
        ratio = float((length[pairs] / sums[pairs]).replace([np.inf], np.nan).median())
        return ratio * float(by_kind[_F].mean() + by_kind[_B].mean())


def _mean(value: Any) -> float:
    return float(value.mean()) if isinstance(value, Empirical) else float(value)
