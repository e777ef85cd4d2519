"""Policies: orders that each rank makes while it runs, from what is ready. Their simulation is exact and repeatable."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mappnb.errors import ScheduleError, did_you_mean
from mappnb.sched import codes as c
from mappnb.sched._policy_run import PolicyRun, cost_tables, list_schedule
from mappnb.sched.costs import Costs, CostTables, Floats
from mappnb.sched.placement import Placement
from mappnb.sched.registry import positive, require_multiple
from mappnb.sched.schedule import Schedule

__all__ = ["POLICIES", "Policy", "PolicyRun", "hint", "list_schedule", "policy", "simulate_policy"]

_F, _B, _I, _W = range(4)


class _Setting(NamedTuple):
    """What a policy may look at beforehand."""

    placement: Placement
    microbatches: int
    costs: CostTables
    split: bool
    window: int


@dataclass(frozen=True, slots=True)
class Policy:
    """A rule by which an idle rank picks its next action among those that are ready.

    Attributes
    ----------
    name : str
        One of :data:`POLICIES`.
    threshold : float
        Of ``adaptive``: breadth-first while messages take longer than this many times the rank's actions.
    schedule : Schedule, optional
        Of ``hint``: the schedule whose order ranks what is ready.
    window : int, optional
        Of ``bfc`` and ``adaptive``: microbatches that go breadth-first together, one group after the other. All of them by default;
        ``bfc`` under a memory limit takes as many as that has room for.
    """

    name: str
    threshold: float = 0.5
    schedule: Schedule | None = None
    window: int | None = None

    def __post_init__(self) -> None:
        if self.name not in POLICIES:
            raise ScheduleError(
                f"unknown policy {self.name!r}; known: {', '.join(POLICIES)}{did_you_mean(self.name, POLICIES)}"
            )
        if (self.schedule is None) == (self.name == "hint"):
            raise ScheduleError("policy 'hint' takes a schedule, and no other does: hint(schedule)")
        if self.window is not None:
            positive("window", self.window)
        if not self.threshold >= 0:
            raise ScheduleError(f"threshold is {self.threshold!r}; expected a number of at least 0")

    @property
    def alternates(self) -> bool:
        """Whether forwards and backwards take turns where both are ready."""
        return self.name in ("dfc", "bfc", "adaptive")

    def priorities(
        self, *, placement: Placement, num_microbatches: int, costs: Costs | CostTables, split: bool = False
    ) -> Floats:
        """Return the priorities for :func:`list_schedule`, dims (table, kind, stage, microbatch); the smaller first."""
        tables = cost_tables(costs, placement, num_microbatches)
        setting = _Setting(placement, num_microbatches, tables, split, self.window or num_microbatches)
        if self.schedule is not None:
            return _hint(setting, self.schedule)[None]
        return np.stack([rule(setting) for rule in _RULES[self.name]])

    def __str__(self) -> str:
        return f"hint({self.schedule.name or 'schedule'})" if self.schedule is not None else self.name


def policy(name: str, *, schedule: Schedule | None = None, threshold: float = 0.5, window: int | None = None) -> Policy:
    """Return the policy ``name``.

    Parameters
    ----------
    name : str
        ``dfc``: depth-first, the oldest microbatch, its deepest chunk first. ``bfc``: breadth-first, the lowest chunk first, the
        oldest microbatch in it; for backwards the highest chunk. ``adaptive``: breadth-first while the rank's messages take longer
        than ``threshold`` × its actions and its free memory would hold all forwards of one microbatch, else depth-first.
        In these three a forward and a backward take turns where both are ready, and W fills what is left.
        ``critical_path``: the action with the longest way to the end of the step. ``hint``: the first in ``schedule``.
    schedule : Schedule, optional
        Of ``hint``.
    threshold : float
        Of ``adaptive``.
    window : int, optional
        Of ``bfc`` and ``adaptive``: microbatches that go breadth-first together (see :class:`Policy`).

    Raises
    ------
    ScheduleError
        If there is no such policy, or an option does not fit it.

    Notes
    -----
    ``dfc`` and ``bfc`` are the two orders of MegaDPP (arXiv:2507.19845, 5.2); the groups of ``bfc`` under a memory limit are ours:
    without them new microbatches take the room that those begun would need to go on. The turns are those of its published loop, which tries
    one backward, then one forward, again and again; ``adaptive`` is our reading of the choice that the paper describes and the code
    has not. ``critical_path`` is the upward rank of HEFT (Topcuoglu et al., 2002). ``hint`` is the rule of RRFP (arXiv:2605.18750).
    """
    return Policy(name, threshold, schedule, window)


def hint(schedule: Schedule) -> Policy:
    """Return the policy that takes, of what is ready, the first in ``schedule``, and so waits for nothing that is late.

    Actions that the schedule overlaps in pairs run one after the other.

    Raises
    ------
    ScheduleError
        If the schedule is not valid.
    """
    return Policy("hint", schedule=schedule.validate())


def simulate_policy(
    rule: Policy | str,
    *,
    costs: Costs | CostTables,
    num_stages: int | None = None,
    num_microbatches: int | None = None,
    num_chunks: int | None = None,
    placement: Placement | None = None,
    split: bool | None = None,
    memory_limit: float | npt.ArrayLike | None = None,
    admission: str = "credits",
    engine: str = "native",
) -> PolicyRun:
    """Return what comes of it when each rank picks its next action by a policy.

    Parameters
    ----------
    rule : Policy or str
        The policy, or its name.
    costs : Costs or CostTables
        Durations, links and activation memory; durations that differ by microbatch are disturbances to which the order adapts.
    num_stages, num_microbatches, num_chunks : int
        Sizes, as of :func:`mappnb.sched.schedule`; those of the schedule by default for ``hint``, else ``num_chunks=1``.
    placement : Placement, optional
        Where each stage lives; that of the schedule for ``hint``, else the loop of interleaved pipelines.
    split : bool, optional
        Run I and W instead of B; by default where the schedule of ``hint`` does.
    memory_limit, admission, engine
        As of :func:`list_schedule`.

    Raises
    ------
    ScheduleError
        If sizes do not fit, the limit is too small, or (without credits) the ranks wait for one another.
    """
    found = policy(rule) if isinstance(rule, str) else rule
    where, microbatches = _sizes(found.schedule, num_stages, num_microbatches, num_chunks, placement)
    if split is None:
        split = found.schedule is not None and bool((c.kind(found.schedule.codes) == _I).any())
    recompute = found.schedule is not None and found.schedule.recompute
    tables = cost_tables(costs, where, microbatches, recompute=recompute)
    if found.name == "bfc" and found.window is None and memory_limit is not None and admission == "credits":
        found = replace(found, window=_room(where, tables, memory_limit))
    return list_schedule(
        found.priorities(placement=where, num_microbatches=microbatches, costs=tables, split=split),
        placement=where,
        num_microbatches=microbatches,
        costs=tables,
        split=split,
        alternate=found.alternates,
        threshold=found.threshold,
        memory_limit=memory_limit,
        admission=admission,
        recompute=recompute,
        name=str(found),
        options={} if memory_limit is None else {"memory_limit": memory_limit, "admission": admission},
        engine=engine,
    )


def _room(where: Placement, tables: CostTables, memory_limit: float | npt.ArrayLike) -> int | None:
    """Return the microbatches whose activations every rank can hold: of more than one round of the ranks, whole rounds."""
    table = where.table()[:, 0]
    share = np.max([np.bincount(half, tables.activation, minlength=where.num_ranks) for half in table], axis=0)
    given = np.asarray(memory_limit, np.float64)
    if given.shape not in ((), share.shape) or not np.isfinite(given).all() or not (share > 0).any():
        return None  # no limit, or one that list_schedule refuses
    limit = np.broadcast_to(given, share.shape)
    room = int((limit[share > 0] / share[share > 0] + 1e-9).min())
    return max(1, room // where.num_ranks * where.num_ranks or room)


def _sizes(
    schedule: Schedule | None,
    num_stages: int | None,
    num_microbatches: int | None,
    num_chunks: int | None,
    placement: Placement | None,
) -> tuple[Placement, int]:
    if schedule is not None:
        where = placement or schedule.placement
        microbatches = num_microbatches or schedule.num_microbatches
        if (where.num_stages, microbatches) != (schedule.num_stages, schedule.num_microbatches):
            raise ScheduleError(
                f"hint: {where.num_stages} stages and {microbatches} microbatches; its schedule has "
                f"{schedule.num_stages} and {schedule.num_microbatches}"
            )
        return where, microbatches
    stages = placement.num_stages if num_stages is None and placement is not None else num_stages
    if stages is None or num_microbatches is None:
        raise ScheduleError("num_stages and num_microbatches are missing: only hint reads them off its schedule")
    chunks = 1 if num_chunks is None else positive("num_chunks", num_chunks)
    require_multiple("policy", "num_stages", positive("num_stages", stages), chunks, "num_chunks")
    where = placement or Placement.loop(stages // chunks, chunks)
    if where.num_stages != stages:
        raise ScheduleError(f"placement: it has {where.num_stages} stages; num_stages is {stages}")
    return where, positive("num_microbatches", num_microbatches)


# ------------------------------------------------------------------------------------------------------ priorities
def _chunks(setting: _Setting) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], int]:
    """Return the chunk by (stage, microbatch), the microbatch by the same, and the number of chunks."""
    where, m = setting.placement, setting.microbatches
    ordinary = [where.chunk(s) for s in range(where.num_stages)]
    chunk = np.repeat(np.array(ordinary, np.int64)[:, None], m, axis=1)
    if where.mirrored_from is not None and where.mirrored_from < m:
        first = where.mirrored_from
        chunk[:, first:] = np.array([[where.chunk(s, microbatch=first)] for s in range(where.num_stages)])
    return chunk, np.broadcast_to(np.arange(m), chunk.shape), int(chunk.max()) + 1


def _depth_first(setting: _Setting) -> Floats:
    chunk, microbatch, v = _chunks(setting)
    return np.repeat((microbatch * v + (v - 1 - chunk)).astype(np.float64)[None], 4, axis=0)


def _breadth_first(setting: _Setting) -> Floats:
    chunk, microbatch, v = _chunks(setting)
    m = setting.microbatches
    group = microbatch // setting.window * v
    forward, backward = (group + chunk) * m + microbatch, (group + v - 1 - chunk) * m + microbatch
    return np.stack([forward, backward, backward, backward]).astype(np.float64)


def _critical_path(setting: _Setting) -> Floats:
    """Return minus the longest time from the begin of each action to the end of the step, messages without queues."""
    stages, m, costs = setting.placement.num_stages, setting.microbatches, setting.costs
    duration = np.broadcast_to(costs.duration_s, (4, stages, m))
    table = setting.placement.table()[
        (np.arange(m) >= _mirrored_from(setting)).astype(int)
    ]  # (microbatch, backward, stage)
    wire_s, ship_s = (x + costs.latency_s for x in (costs.transfer_s, costs.ship_s))
    way = np.zeros((4, stages, m))
    way[_W] = duration[_W]
    for s in range(stages):
        before = way[[_B, _I], s - 1] + _hop(table[:, 1, s], table[:, 1, s - 1], wire_s) if s else np.zeros((2, m))
        after = np.stack([before[0], np.maximum(before[1], way[_W, s])])
        way[[_B, _I], s] = duration[[_B, _I], s] + after
    backward = way[_I if setting.split else _B]
    for s in range(stages - 1, -1, -1):
        after = backward[s] + _hop(table[:, 0, s], table[:, 1, s], ship_s)
        if s + 1 < stages:
            after = np.maximum(after, way[_F, s + 1] + _hop(table[:, 0, s], table[:, 0, s + 1], wire_s))
        way[_F, s] = duration[_F, s] + after
    return -way


def _hop(source: npt.NDArray[np.int32], destination: npt.NDArray[np.int32], time_s: Floats) -> Floats:
    return np.where(source == destination, 0.0, time_s[source, destination])


def _mirrored_from(setting: _Setting) -> int:
    first = setting.placement.mirrored_from
    return setting.microbatches if first is None else first


def _hint(setting: _Setting, schedule: Schedule) -> Floats:
    """Return the index of each action in the order of its rank; a backward that is split there or here stays in its place."""
    index = np.concatenate([np.arange(n) for n in np.diff(schedule.offsets)]).astype(np.float64)
    table = np.full((4, setting.placement.num_stages, setting.microbatches), np.nan)
    table[c.kind(schedule.codes), c.stage(schedule.codes), c.microbatch(schedule.codes)] = index
    whole = np.where(np.isnan(table[_B]), table[_I], table[_B])
    after = np.where(np.isnan(table[_W]), whole + 0.5, table[_W])
    return np.stack([table[_F], whole, whole, after])


_RULES: dict[str, tuple[Callable[[_Setting], Floats], ...]] = {
    "dfc": (_depth_first,),
    "bfc": (_breadth_first,),
    "adaptive": (_depth_first, _breadth_first),
    "critical_path": (_critical_path,),
}
POLICIES: tuple[str, ...] = (*_RULES, "hint")
"""Names of the policies."""
