"""Can a schedule run? Completeness, placement, deadlock, transfers, memory, in this order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice

import numpy as np
import numpy.typing as npt

from mappnb import _core
from mappnb.errors import ScheduleError
from mappnb.sched import codes as c
from mappnb.sched.action import Action
from mappnb.sched.costs import Costs, CostTables, Floats
from mappnb.sched.deadlock import compute_lanes, deadlock
from mappnb.sched.faults import Problem, fault
from mappnb.sched.memory import changes, peak_activation
from mappnb.sched.schedule import Schedule
from mappnb.sched.transfers import SENDS, transfer_problems

__all__ = ["Problem", "problems", "validate"]

Ints = npt.NDArray[np.int64]
_LISTED = 100


def validate(
    sched: Schedule,
    *,
    sends: str = "buffered",
    costs: Costs | CostTables | None = None,
    memory_limit: npt.ArrayLike | None = None,
) -> None:
    """Check that a schedule can run.

    Parameters
    ----------
    sched : Schedule
        Its transfers are checked where it has :attr:`~Schedule.communications`.
    sends : str
        ``"buffered"``: a send is done at once. ``"rendezvous"``: it is done when the receive has begun, and holds its rank until then.
    costs : Costs or CostTables, optional
        Says what activations and static memory take; without it an activation of a rank's whole share counts 1.
    memory_limit : number or array, dims (rank,), optional
        Memory that each rank has, in the unit of the costs; not checked without it.

    Raises
    ------
    ScheduleError
        At the first fault: the message says where it is, what was found and what to do, and shows the orders around it.

    Notes
    -----
    Program order and data needs without a cycle is the same as free of deadlock (each rank runs one unit at a time).
    """
    first = next(_problems(sched, sends, costs, memory_limit), None)
    if first is not None:
        raise ScheduleError(str(first))


def problems(
    sched: Schedule,
    *,
    sends: str = "buffered",
    costs: Costs | CostTables | None = None,
    memory_limit: npt.ArrayLike | None = None,
) -> list[Problem]:
    """Return what is wrong, up to 100 faults of the first check that finds any: the later ones rest on it.

    Parameters
    ----------
    sched, sends, costs, memory_limit
        As of :func:`validate`.
    """
    return list(islice(_problems(sched, sends, costs, memory_limit), _LISTED))


def _problems(
    sched: Schedule, sends: str, costs: Costs | CostTables | None, memory_limit: npt.ArrayLike | None
) -> Iterator[Problem]:
    if sends not in SENDS:
        raise ScheduleError(f"sends is {sends!r}; expected one of {', '.join(SENDS)}")
    checks: list[Callable[[Schedule], Iterator[Problem]]] = [_known, _once, _without_gap, _complete, _in_place, _runs]
    if sched.communications is not None:
        checks.append(lambda sched: transfer_problems(sched, sends))
    if memory_limit is not None:
        limit = np.asarray(memory_limit, np.float64)
        checks.append(lambda sched: _memory(sched, costs, limit))
    for check in checks:
        found = False
        for problem in check(sched):
            found = True
            yield problem
        if found:
            return


# ---------------------------------------------------------------------------------------------- complete and unique
def _known(sched: Schedule) -> Iterator[Problem]:
    if not len(sched):
        yield Problem("no action at all; expected each stage's forwards and backwards")
        return
    stages = sched.num_stages
    for i in np.flatnonzero(c.stage(sched.codes) >= stages).tolist():
        yield _at(
            sched,
            i,
            f"{_name(sched, i)} is of a stage that the placement does not have (0 to {stages - 1}); "
            "remove it, or give the placement that has it",
        )
    paired = c.paired(sched.codes)
    last = np.zeros(len(sched), np.bool_)
    last[sched.offsets[1:][np.diff(sched.offsets) > 0] - 1] = True
    second = np.concatenate(([False], paired[:-1]))
    for i in np.flatnonzero(paired & (last | second)).tolist():
        yield _at(sched, i, f"{_name(sched, i)} is in a pair that is not of two; pair each action with one other")


def _once(sched: Schedule) -> Iterator[Problem]:
    kind = c.kind(sched.codes)
    key = _key(sched)
    for which in (kind == 0, (kind == 1) | (kind == 2), kind == 3):
        index = np.flatnonzero(which)
        order = index[np.argsort(key[index], kind="stable")]
        for j in np.flatnonzero(key[order][1:] == key[order][:-1]).tolist():
            yield _doubled(sched, int(order[j + 1]), int(order[j]))
    whole, weight = np.flatnonzero(kind == 1), np.flatnonzero(kind == 3)
    _, a, b = np.intersect1d(key[weight], key[whole], return_indices=True)
    for i, j in zip(weight[a].tolist(), whole[b].tolist(), strict=True):
        yield _doubled(sched, i, j)


def _doubled(sched: Schedule, i: int, other: int) -> Problem:
    name, first = _name(sched, i), _name(sched, other)
    rank, position = _where(sched, other)
    if name == first:
        return _at(sched, i, f"{name} runs a second time, first on rank {rank} at position {position}; remove one")
    return _at(
        sched,
        i,
        f"{name} beside {first} of rank {rank}, position {position}; a backward is either whole (B) or in two parts "
        "(I and W): remove one",
    )


def _without_gap(sched: Schedule) -> Iterator[Problem]:
    mb, stage = c.microbatch(sched.codes), c.stage(sched.codes)
    for numbers, what in ((mb, "microbatch"), (stage, "stage")):
        present = np.flatnonzero(np.bincount(numbers))
        for gap in np.flatnonzero(np.diff(present, prepend=-1) > 1).tolist():
            i = int(np.flatnonzero(numbers == present[gap])[0])
            missing = int(present[gap - 1]) + 1 if gap else 0
            yield _at(
                sched,
                i,
                f"{_name(sched, i)} is of {what} {present[gap]}, but no action is of {what} {missing}; "
                f"number them from 0 without a gap",
            )
    if present[-1] + 1 < sched.num_stages:
        yield Problem(f"no action of stage {present[-1] + 1}; the placement has stages 0 to {sched.num_stages - 1}")


def _complete(sched: Schedule) -> Iterator[Problem]:
    kind, key = c.kind(sched.codes), _key(sched)
    size = sched.num_stages * sched.num_microbatches
    last = np.flatnonzero(c.microbatch(sched.codes) == sched.num_microbatches - 1)
    stages = len(np.unique(c.stage(sched.codes[last])))
    if 2 * stages < sched.num_stages:  # rather one too many than missing on most stages
        yield _at(
            sched,
            int(last[0]),
            f"{_name(sched, int(last[0]))} is of microbatch {sched.num_microbatches - 1}, which only {stages} of "
            f"{sched.num_stages} stages have; number the microbatches alike on all stages",
        )
        return
    forward, backward = key[kind == 0], key[(kind == 1) | (kind == 2)]
    for gap in _gaps(forward, size):
        yield _missing(sched, gap, 0)
    for gap in _gaps(backward, size):
        yield _missing(sched, gap, 1)
    split, weight = np.flatnonzero(kind == 2), np.flatnonzero(kind == 3)
    for i in split[~np.isin(key[split], key[weight])].tolist():
        name = str(_action(sched, i, 3))
        yield _at(sched, i, f"{_name(sched, i)} has no {name}; put {name} behind it, or run a whole backward (B)")


def _gaps(keys: Ints, size: int) -> Iterator[int]:
    """Yield the numbers below ``size`` that are not in ``keys``."""
    if len(keys) == size and np.bincount(keys, minlength=size).max() == 1:
        return
    edges = np.concatenate(([-1], np.unique(keys), [size]))
    for i in np.flatnonzero(np.diff(edges) > 1).tolist():
        yield from range(int(edges[i]) + 1, int(edges[i + 1]))


def _missing(sched: Schedule, key: int, kind: int) -> Problem:
    """Return that an action is missing, shown behind the same one of the microbatch before."""
    stage, mb = divmod(key, sched.num_microbatches)
    rank = sched.placement.rank(stage, c.KINDS[kind], mb)
    name = str(Action(stage, c.KINDS[kind], mb)) + (f" (or {stage}I{mb} and {stage}W{mb})" if kind else "")
    kinds, like = c.kind(sched.codes), (c.stage(sched.codes) == stage) & (c.microbatch(sched.codes) < mb)
    like &= (kinds == 0) if kind == 0 else (kinds == 1) | (kinds == 2)
    found = [i for i in np.flatnonzero(like).tolist() if _where(sched, i)[0] == rank]
    if not found:
        return Problem(f"rank {rank}: {name} is missing; each stage runs it once for each microbatch", rank)
    i = max(found, key=lambda j: int(c.microbatch(sched.codes[j : j + 1])[0]))
    return fault(sched, f"{name} is missing; it belongs behind {_name(sched, i)}", *_where(sched, i))


# --------------------------------------------------------------------------------------------- placement, deadlock
def _in_place(sched: Schedule) -> Iterator[Problem]:
    p, mb = sched.placement, c.microbatch(sched.codes)
    mirrored = np.zeros(len(mb), np.int64) if p.mirrored_from is None else (mb >= p.mirrored_from).astype(np.int64)
    expected = p.table()[mirrored, (c.kind(sched.codes) != 0).astype(np.int64), c.stage(sched.codes)]
    rank = np.repeat(np.arange(sched.num_ranks), np.diff(sched.offsets))
    for i in np.flatnonzero(expected != rank).tolist():
        yield _at(
            sched,
            i,
            f"{_name(sched, i)} belongs on rank {expected[i]}, where the placement has its stage; "
            "move it there, or give the placement that has it here",
        )


def _order(sched: Schedule) -> int | None:
    """Return how many actions run before all that are left wait for ever, or None if all run."""
    ships = sched.placement.backward is not None
    shape = (3 if ships else 2, 2, sched.num_stages)
    none, nothing = np.zeros(shape), np.empty((2, len(sched)))
    mirrored = sched.placement.mirrored_from
    done = _core.schedule_times(
        sched.codes, sched.offsets, sched.num_stages, sched.num_microbatches, -1 if mirrored is None else mirrored,
        np.zeros((4, sched.num_stages, 1)), 1.0, none, none, np.full(shape, -1, np.int32), ships, 0, 0,
        *sched._known, *nothing,
    )  # fmt: skip
    if done is None:
        return None if not _weights_early(sched) else len(sched) - 1
    return int(sum(done)) - int(sched.offsets[:-1].sum())


def _weights_early(sched: Schedule) -> bool:
    """Return whether a W comes before its I, or in a pair with it: the one need that the native pass takes for granted."""
    kind = c.kind(sched.codes)
    if not (kind == 3).any():
        return False
    at = np.full((sched.num_stages, sched.num_microbatches), len(kind), np.int64)
    inputs, weights = np.flatnonzero(kind == 2), np.flatnonzero(kind == 3)
    stage, mb = c.stage(sched.codes), c.microbatch(sched.codes)
    at[stage[inputs], mb[inputs]] = inputs
    before = at[stage[weights], mb[weights]]
    together = (before == weights - 1) & c.paired(sched.codes)[np.maximum(weights - 1, 0)]
    return bool(((before > weights) | together).any())


def _runs(sched: Schedule) -> Iterator[Problem]:
    if _order(sched) is not None:
        found = deadlock(sched, compute_lanes(sched))
        if found is not None:
            yield found


# -------------------------------------------------------------------------------------------------------- memory
def _memory(sched: Schedule, costs: Costs | CostTables | None, limit: Floats) -> Iterator[Problem]:
    costs = costs or Costs(forward_s=1, backward_input_s=1, backward_weight_s=1)
    tables = costs.tables(sched) if isinstance(costs, Costs) else costs
    if limit.shape not in ((), (sched.num_ranks,)) or np.isnan(limit).any():
        raise ScheduleError(f"memory_limit has shape {limit.shape}; expected a number, or one for each rank")
    limit = np.broadcast_to(limit, (sched.num_ranks,))
    peak = peak_activation(sched, tables) + tables.static_memory
    for rank in np.flatnonzero(peak > limit * (1 + 1e-12)).tolist():
        position = _exceeds(sched, tables, rank, float(limit[rank]))
        yield fault(
            sched,
            f"memory exceeds {limit[rank]:g} when {sched.ranks[rank][position]} runs; the rank's peak is {peak[rank]:g}, "
            f"{tables.static_memory[rank]:g} of it static. Run a backward before it, recompute activations, or raise the limit",
            rank,
            position,
        )


def _exceeds(sched: Schedule, tables: CostTables, rank: int, limit: float) -> int:
    """Return the position of the first action during which a rank holds more than the limit."""
    takes, frees = changes(sched, tables)
    start, end = int(sched.offsets[rank]), int(sched.offsets[rank + 1])
    paired = c.paired(sched.codes)
    held, later = float(tables.static_memory[rank]), 0.0
    for i in range(start, end):
        held += float(takes[i])
        if held > limit * (1 + 1e-12):
            return i - start
        later += float(frees[i])
        if not paired[i]:
            held, later = held - later, 0.0
    return max(0, end - start - 1)


# --------------------------------------------------------------------------------------------------------- words
def _key(sched: Schedule) -> Ints:
    key: Ints = c.stage(sched.codes).astype(np.int64) * sched.num_microbatches + c.microbatch(sched.codes)
    return key


def _where(sched: Schedule, i: int) -> tuple[int, int]:
    rank = int(np.searchsorted(sched.offsets, i, side="right")) - 1
    return rank, i - int(sched.offsets[rank])


def _action(sched: Schedule, i: int, kind: int | None = None) -> Action:
    action = c.decode(sched.codes[i : i + 1])[0]
    return action if kind is None else Action(action.stage, c.KINDS[kind], action.microbatch)


def _name(sched: Schedule, i: int) -> str:
    return str(_action(sched, i))


def _at(sched: Schedule, i: int, text: str) -> Problem:
    return fault(sched, text, *_where(sched, i))
