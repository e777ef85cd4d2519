"""Stragglers to inject into a simulation: who is slow, when, and by how much."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from mappnb.errors import CostError
from mappnb.sched import codes as c
from mappnb.sched.costs import CostTables, Distribution, Floats
from mappnb.sched.schedule import Schedule
from mappnb.terms import Kind

__all__ = ["Straggler", "inject"]


@dataclass(frozen=True, kw_only=True)
class Straggler:
    """Something that is slow.

    Attributes
    ----------
    rank, stage : int, optional
        The compute of this rank, or of this stage; give one of them, both (that stage on that rank), or ``link``.
    link : (int, int), optional
        The messages from one rank to another.
    factor : float or distribution
        What durations are multiplied by; a distribution is drawn for each action (a link's for each step).
    extra_s : float or distribution
        What is added to them then, s.
    kinds : str
        Kinds of actions that are slow, as letters: ``"F"``, ``"BI"``; all by default.
    microbatches : sequence of int, optional
        Microbatches that are slow; all by default.
    steps : sequence of int, optional
        Steps in which it happens; all by default.

    Raises
    ------
    CostError
        If nothing or too much is named, or the factor is not a number above 0.
    """

    rank: int | None = None
    stage: int | None = None
    link: tuple[int, int] | None = None
    factor: Any = 1.0
    extra_s: Any = 0.0
    kinds: str = "FBIW"
    microbatches: Sequence[int] | None = None
    steps: Sequence[int] | None = None

    def __post_init__(self) -> None:
        if (self.link is None) == (self.rank is None and self.stage is None):
            raise CostError("straggler: name a rank, a stage or both, or a link=(source, destination)")
        _check("factor", self.factor, above=0.0)
        _check("extra_s", self.extra_s, above=-np.inf)
        if not self.kinds or set(self.kinds) - set("FBIW"):
            raise CostError(f"straggler: kinds is {self.kinds!r}; expected letters out of F, B, I and W")

    def hits(self, step: int) -> bool:
        """Return whether it happens in a step."""
        return self.steps is None or step in self.steps


def _check(name: str, value: Any, *, above: float) -> None:
    if isinstance(value, Distribution):
        return
    if not isinstance(value, (int, float, np.number)) or not (np.isfinite(value) and value > above):
        what = "a number above 0" if above == 0 else "a number"
        raise CostError(f"straggler: {name} is {value!r}; expected {what}, or a distribution")


def inject(
    sched: Schedule, costs: CostTables, stragglers: Sequence[Straggler], *, step: int, rng: np.random.Generator
) -> CostTables:
    """Return the costs of a step with its stragglers.

    Raises
    ------
    CostError
        If a straggler names a rank, stage, link or microbatch that the schedule does not have.
    """
    for straggler in stragglers:
        _known(sched, straggler)
        if not straggler.hits(step):
            continue
        costs = (
            _slow_link(sched, costs, straggler, rng)
            if straggler.link is not None
            else _slow(sched, costs, straggler, rng)
        )
    return costs


def _known(sched: Schedule, s: Straggler) -> None:
    for what, value, size in (
        ("rank", s.rank, sched.num_ranks),
        ("stage", s.stage, sched.num_stages),
        *(("rank", r, sched.num_ranks) for r in s.link or ()),
        *(("microbatch", m, sched.num_microbatches) for m in s.microbatches or ()),
    ):
        if value is not None and not 0 <= value < size:
            raise CostError(f"straggler: {what} {value}; the schedule has {what}s 0 to {size - 1}")


def _slow(sched: Schedule, costs: CostTables, s: Straggler, rng: np.random.Generator) -> CostTables:
    stages, m = sched.num_stages, sched.num_microbatches
    hit = np.zeros((4, stages, m), bool)
    hit[[i for i, kind in enumerate(c.KINDS) if kind.value in s.kinds]] = True
    if s.stage is not None:
        hit &= (np.arange(stages) == s.stage)[:, None]
    if s.rank is not None:
        hit &= _on_rank(sched, s.rank)
    if s.microbatches is not None:
        hit &= np.isin(np.arange(m), list(s.microbatches))
    duration = np.array(np.broadcast_to(costs.duration_s, hit.shape), np.float64)
    count = int(hit.sum())
    slow = duration[hit] * _drawn(s.factor, count, rng) + _drawn(s.extra_s, count, rng)
    duration[hit] = np.maximum(slow, 0.0)
    return replace(costs, duration_s=duration)


def _on_rank(sched: Schedule, rank: int) -> npt.NDArray[np.bool_]:
    """Return which (kind, stage, microbatch) run on a rank."""
    table, m = sched.placement.table() == rank, sched.num_microbatches
    from_mb = sched.placement.mirrored_from
    late = np.arange(m) >= (m if from_mb is None else from_mb)
    backward = np.array([kind is not Kind.FORWARD for kind in c.KINDS]).astype(int)
    return np.asarray(np.where(late, table[1][backward][:, :, None], table[0][backward][:, :, None]), np.bool_)


def _slow_link(sched: Schedule, costs: CostTables, s: Straggler, rng: np.random.Generator) -> CostTables:
    assert s.link is not None
    factor, extra = float(_drawn(s.factor, 1, rng)[0]), float(_drawn(s.extra_s, 1, rng)[0])

    def slow(table: Floats, more: float) -> Floats:
        table = np.array(table)
        table[s.link] = max(0.0, float(table[s.link]) * factor + more)
        return table

    return replace(
        costs,
        latency_s=slow(costs.latency_s, extra),
        transfer_s=slow(costs.transfer_s, 0.0),
        ship_s=slow(costs.ship_s, 0.0),
    )


def _drawn(value: Any, count: int, rng: np.random.Generator) -> Floats:
    drawn = value.rvs(count, random_state=rng) if isinstance(value, Distribution) else np.full(count, float(value))
    return np.asarray(drawn, np.float64)
