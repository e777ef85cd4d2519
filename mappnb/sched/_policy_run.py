"""Running priorities: from sizes and costs to the arrays that the engines read, and from what they did to a schedule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mappnb import _core
from mappnb.errors import CostError, ScheduleError, did_you_mean
from mappnb.sched import codes as c
from mappnb.sched._pypolicy import Admission, Outcome, Problem, run_policy
from mappnb.sched.costs import SEND_MODES, Costs, CostTables, Floats
from mappnb.sched.memory import rates
from mappnb.sched.placement import Placement
from mappnb.sched.registry import positive, too_large
from mappnb.sched.schedule import Schedule

__all__ = ["ADMISSIONS", "ENGINES", "PolicyRun", "cost_tables", "list_schedule"]

ADMISSIONS: dict[str, int] = {"none": Admission.NONE, "credits": Admission.CREDITS}
ENGINES: tuple[str, ...] = ("native", "python")
_SHOWN = 4
_ENOUGH = 1 - 1e-9


@dataclass(frozen=True, slots=True, eq=False)
class PolicyRun:
    """What a policy made of its costs.

    Attributes
    ----------
    schedule : Schedule
        The order in which each rank ran its actions; a schedule like any other, free of deadlock.
    start_s, end_s : array, dims (action,)
        Times in the order of ``schedule.codes``, s.
    peak_activation : array, dims (rank,)
        Most activation memory that each rank held, in the unit of the costs.
    """

    schedule: Schedule
    start_s: Floats
    end_s: Floats
    peak_activation: Floats

    @property
    def makespan_s(self) -> float:
        """First start to last end over all ranks, s."""
        return float(self.end_s.max() - self.start_s.min())

    @property
    def bubble_fraction(self) -> float:
        """Share of the makespan in which the ranks ran no action, on average."""
        busy = float((self.end_s - self.start_s).sum())
        whole = self.makespan_s * self.schedule.num_ranks
        return 1.0 - busy / whole if whole else 0.0


def cost_tables(
    costs: Costs | CostTables, placement: Placement, num_microbatches: int, *, recompute: bool = False
) -> CostTables:
    """Return the costs as arrays for a placement, before there is a schedule."""
    if isinstance(costs, CostTables):
        return costs
    last = c.pack([placement.num_stages - 1], [0], [num_microbatches - 1])  # enough to tell the sizes
    offsets = np.full(placement.num_ranks + 1, 1, np.int64)
    offsets[0] = 0
    return costs.tables(Schedule.from_codes(last, offsets, placement=placement, recompute=recompute))


def list_schedule(
    priority: npt.ArrayLike,
    *,
    placement: Placement,
    num_microbatches: int,
    costs: Costs | CostTables,
    split: bool = False,
    alternate: bool = False,
    threshold: float = np.inf,
    memory_limit: float | npt.ArrayLike | None = None,
    admission: str = "credits",
    recompute: bool = False,
    name: str = "list",
    options: Mapping[str, Any] | None = None,
    engine: str = "native",
) -> PolicyRun:
    """Return what comes of it when each idle rank takes the ready and admitted action of the smallest priority.

    Parameters
    ----------
    priority : array, dims (kind, stage, microbatch) or (table, kind, stage, microbatch)
        Priorities by the kind's number (F, B, I, W), the smaller first; of equal ones the lower microbatch, then backward before
        forward before W, then the deeper stage. A second table holds while the rank waits for its links (see ``threshold``).
    placement : Placement
        Where each stage lives.
    num_microbatches : int
        Microbatches of a step.
    costs : Costs or CostTables
        Durations, links and activation memory.
    split : bool
        Run I and W instead of B.
    alternate : bool
        A rank prefers a forward after a backward and a backward otherwise, whatever their priorities; W comes after both.
    threshold : float
        A rank takes the second table while its messages take longer than ``threshold`` × its actions (moving averages with weight
        1/4 for the newest) and its free memory would hold all forwards of one microbatch.
    memory_limit : number or array, dims (rank,), optional
        Activation memory that a rank may hold, in the unit of the costs; no limit by default.
    admission : str
        ``"credits"``: a forward begins only if every microbatch can still be finished (see ``docs/policies.md``). ``"none"``: it
        begins if it fits, which may end in a deadlock.
    recompute, name, options
        Of the schedule that is returned.
    engine : str
        ``"native"``, or ``"python"`` for its plain twin.

    Raises
    ------
    ScheduleError
        If the limit is too small for one microbatch, or the ranks wait for one another; the message says for what.
    CostError
        If the costs are for other sizes, or have shared network cards or interference, which policies do not simulate; or if, with a
        limit, W would hold more than the forward made.
    """
    positive("num_microbatches", num_microbatches)
    for what, value, known in (("admission", admission, tuple(ADMISSIONS)), ("engine", engine, ENGINES)):
        if value not in known:
            raise ScheduleError(f"unknown {what} {value!r}; known: {', '.join(known)}{did_you_mean(value, known)}")
    too_large(name, placement.num_stages, num_microbatches)
    tables = cost_tables(costs, placement, num_microbatches, recompute=recompute)
    _check_tables(tables, placement, num_microbatches)
    takes, frees = rates(tables, placement)
    limit = _limits(memory_limit, placement, num_microbatches, takes, frees, admission)
    mirrored = placement.mirrored_from
    problem = Problem(
        where=placement.table(),
        mirrored_from=num_microbatches if mirrored is None else min(mirrored, num_microbatches),
        ranks=placement.num_ranks,
        microbatches=num_microbatches,
        split=split,
        duration=np.ascontiguousarray(tables.duration_s, np.float64),
        latency=tables.latency_s,
        transfer=tables.transfer_s,
        ship=tables.ship_s,
        send=SEND_MODES.index(tables.send),
        priority=_priorities(priority, placement.num_stages, num_microbatches),
        threshold=float(threshold),
        alternate=alternate,
        takes=takes,
        frees=frees,
        limit=limit,
        admission=ADMISSIONS[admission],
    )
    out = run_policy(problem) if engine == "python" else _run_native(problem)
    if (out.done < np.diff(out.offsets)).any():
        raise ScheduleError(_stuck(problem, out, name, admission))
    sched = Schedule.from_codes(
        out.codes, out.offsets, placement=placement, name=name, options=options, recompute=recompute
    )
    return PolicyRun(sched, out.start, out.end, out.peak)


def _run_native(p: Problem) -> Outcome:
    offsets = p.offsets()
    n = int(offsets[-1])
    codes, times, peak = np.zeros(n, np.uint32), np.zeros((2, n)), np.zeros(p.ranks)
    done = _core.policy_run(
        p.where,
        p.mirrored_from,
        p.microbatches,
        p.split,
        p.duration,
        np.stack([p.latency, p.transfer, p.ship]),
        p.send,
        p.priority,
        p.threshold,
        p.alternate,
        np.stack([p.takes, p.frees]),
        p.limit,
        p.admission,
        offsets,
        codes,
        times,
        peak,
    )
    return Outcome(codes, offsets, np.array(done, np.int64), times[0], times[1], peak)


def _check_tables(tables: CostTables, placement: Placement, microbatches: int) -> None:
    if tables.by_events:
        raise CostError(
            "policies are simulated without shared network cards and interference: leave ranks_per_host and interference "
            "out here, and time the schedule that comes of it with them"
        )
    kinds, stages, mbs = tables.duration_s.shape
    found = (kinds, stages, len(tables.latency_s), len(tables.activation))
    expected = (4, placement.num_stages, placement.num_ranks, placement.num_stages)
    if found != expected or mbs not in (1, microbatches):
        raise CostError(
            f"cost tables are for {stages} stages, {len(tables.latency_s)} ranks and {mbs} microbatches; "
            f"expected {expected[1]}, {expected[2]} and {microbatches} or 1"
        )


def _priorities(priority: npt.ArrayLike, stages: int, microbatches: int) -> Floats:
    table = np.asarray(priority, np.float64)
    table = table[None] if table.ndim == 3 else table
    if table.ndim != 4 or table.shape[0] not in (1, 2) or table.shape[1:] != (4, stages, microbatches):
        raise ScheduleError(
            f"priority: shape {np.shape(priority)}; expected (4, {stages}, {microbatches}) by kind, stage and microbatch, "
            f"or one or two of them"
        )
    if not np.isfinite(table).all():
        raise ScheduleError("priority: not all are finite numbers; give a large number to what is to come last")
    return np.ascontiguousarray(table)


def _limits(
    limit: float | npt.ArrayLike | None,
    placement: Placement,
    microbatches: int,
    takes: Floats,
    frees: Floats,
    admission: str,
) -> Floats:
    ranks = placement.num_ranks
    if limit is None:
        return np.full(ranks, np.inf)
    given = np.asarray(limit, np.float64)
    if given.shape not in ((), (ranks,)) or np.isnan(given).any() or (given < 0).any():
        raise ScheduleError(
            f"memory_limit is {limit!r}; expected a number of at least 0, or one for each of {ranks} ranks"
        )
    if placement.backward is not None:
        raise ScheduleError("memory_limit: not for a pipeline whose backward runs on other ranks than its forward")
    if (frees < 0).any():
        raise CostError("activation_weight is above activation; with a memory limit W cannot hold more than F has made")
    each = np.broadcast_to(given, (ranks,)).astype(np.float64)
    table = placement.table()[:, 0]
    halves = table if placement.mirrored_from is not None and placement.mirrored_from < microbatches else table[:1]
    share = np.max([np.bincount(half, takes[0], minlength=ranks) for half in halves], axis=0)
    short = np.flatnonzero(each < share * _ENOUGH)
    if admission == "credits" and len(short):
        r = int(short[0])
        raise ScheduleError(
            f"memory_limit on rank {r} is {each[r]:g}, less than the activations of one microbatch there; give at least {share[r]:g}"
        )
    return each


# ------------------------------------------------------------------------------------------------------- in words
def _stuck(p: Problem, out: Outcome, name: str, admission: str) -> str:
    """Return what each rank waits for, in words."""
    ran: set[tuple[int, int, int]] = set()
    for first, n in zip(out.offsets.tolist(), out.done.tolist(), strict=False):
        mine = out.codes[first : first + n]
        ran.update(zip(c.kind(mine).tolist(), c.stage(mine).tolist(), c.microbatch(mine).tolist(), strict=True))
    lines = [
        f"deadlock of policy {name!r} after {int(out.done.sum())} of {len(out.codes)} actions, admission {admission!r}:"
    ]
    lines += [_waits(p, out, r, ran) for r in range(p.ranks) if out.done[r] < out.offsets[r + 1] - out.offsets[r]]
    return "\n".join([*lines, "admission='credits' has no deadlock under the same limit"])


def _waits(p: Problem, out: Outcome, rank: int, ran: set[tuple[int, int, int]]) -> str:
    held = sum(float(p.takes[k, s] - p.frees[k, s]) for k, s, i in ran if p.rank(k, s, i) == rank)
    ready: list[str] = []
    waiting: list[str] = []
    for i in range(p.microbatches):
        for k in p.kinds:
            for s in range(p.where.shape[2] - 1, -1, -1):
                if p.rank(k, s, i) != rank or (k, s, i) in ran:
                    continue
                missing = [n for n in _needs(p, k, s, i) if n not in ran]
                if not missing:
                    ready.append(_word(k, s, i))
                elif k and (0, s, i) in ran:
                    waiting.append(f"{_word(k, s, i)} for {_word(*missing[0])} of rank {p.rank(*missing[0])}")
    parts = [f"rank {rank} holds {held:g} of {p.limit[rank]:g}"]
    for words, before in ((ready, "not admitted"), (waiting, "waits to run")):
        if words:
            more = f" and {len(words) - _SHOWN} more" if len(words) > _SHOWN else ""
            parts.append(f"{before}: {', '.join(words[:_SHOWN])}{more}")
    return "; ".join(parts)


def _needs(p: Problem, kind: int, stage: int, microbatch: int) -> list[tuple[int, int, int]]:
    if kind == 0:
        return [(0, stage - 1, microbatch)] if stage else []
    if kind == 3:
        return [(2, stage, microbatch)]
    after = [(p.kinds[0], stage + 1, microbatch)] if stage + 1 < p.where.shape[2] else []
    return [(0, stage, microbatch), *after]


def _word(kind: int, stage: int, microbatch: int) -> str:
    return f"{stage}{c.KINDS[kind]}{microbatch}"
