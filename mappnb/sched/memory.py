"""Memory of activations: what each rank holds while it runs its order."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mappnb.sched import codes as c
from mappnb.sched.costs import Costs, CostTables, Floats
from mappnb.sched.placement import Placement
from mappnb.sched.schedule import Schedule

__all__ = ["MemorySteps", "Shipped", "changes", "memory_steps", "peak_activation", "rates"]

Ids = npt.NDArray[np.int64]


class Shipped(NamedTuple):
    """Activations that go from a stage's forward to its backward on another rank, dims (message,).

    Attributes
    ----------
    forward, backward : array
        Index of the two actions.
    start_s, end_s : array
        When it goes and when it has gone, s.
    """

    forward: Ids
    backward: Ids
    start_s: Floats
    end_s: Floats


class MemorySteps(NamedTuple):
    """Activation memory over time, as steps.

    Attributes
    ----------
    rank, time_s, held : array, dims (change,)
        Rank, time, and what the rank holds from then on, in the unit of the costs; ordered by rank, then time.
    peak : array, dims (rank,)
        Most that each rank holds.
    """

    rank: npt.NDArray[np.int32]
    time_s: Floats
    held: Floats
    peak: Floats


def changes(sched: Schedule, costs: CostTables) -> tuple[Floats, Floats]:
    """Return what each action takes when it begins and frees when it ends, dims (action,), in the unit of the costs.

    Notes
    -----
    F takes the activation of its chunk; B frees it; I frees all but the part held for W, which W frees. In a disaggregated pipeline
    both ranks of a stage hold it: the forward rank until its forward has ended, the backward rank while its backward runs; what is
    shipped is longer on both (:func:`memory_steps`).
    """
    kind, stage = c.kind(sched.codes), c.stage(sched.codes)
    takes, frees = rates(costs, sched.placement)
    return takes[kind, stage], frees[kind, stage]


def rates(costs: CostTables, placement: Placement) -> tuple[Floats, Floats]:
    """Return what an action takes and frees (see :func:`changes`) by its kind's number and its stage, dims (kind, stage)."""
    whole, held = costs.activation, costs.activation_weight
    none = np.zeros_like(whole)
    if placement.backward is None:
        takes, frees = [whole, none, none, none], [none, whole, whole - held, held]
    else:
        takes, frees = [whole, whole, whole, none], [whole, whole, whole - held, held]
    return np.ascontiguousarray(takes, np.float64), np.ascontiguousarray(frees, np.float64)


def peak_activation(sched: Schedule, costs: CostTables | None = None) -> Floats:
    """Return the peak activation memory of each rank, dims (rank,), static memory not counted.

    Parameters
    ----------
    sched : Schedule
        Where a stage's forward and backward share a rank, the order alone decides: a rank runs one action at a time.
    costs : CostTables, optional
        Gives the unit; activations of one microbatch of a rank's whole share by default.

    Notes
    -----
    Of a disaggregated pipeline this is the least: what is on its way between the ranks depends on the times
    (``peak_activation`` of :func:`mappnb.simulate`).
    """
    costs = costs or Costs(forward_s=1, backward_input_s=1, backward_weight_s=1).tables(sched)
    takes, frees = changes(sched, costs)
    paired = c.paired(sched.codes)
    if paired.any():  # both of a pair begin before either ends
        second = np.flatnonzero(paired) + 1
        takes[second - 1] += takes[second]
        takes[second] = 0.0
        frees[second] += frees[second - 1]
        frees[second - 1] = 0.0
    level = np.cumsum(takes - frees)
    before = np.concatenate(([0.0], level))[sched.offsets[:-1]]
    rank = np.repeat(np.arange(sched.num_ranks), np.diff(sched.offsets))
    peak = np.zeros(sched.num_ranks)
    np.maximum.at(peak, rank, level + frees - before[rank])
    return peak


def memory_steps(
    sched: Schedule, costs: CostTables, start_s: Floats, end_s: Floats, shipped: Shipped | None = None
) -> MemorySteps:
    """Return the activation memory of each rank over time.

    Parameters
    ----------
    sched, costs
        Schedule and its costs.
    start_s, end_s : array, dims (action,)
        When each action runs, s.
    shipped : Shipped, optional
        What goes from forward to backward ranks: held on both while it goes, and by the backward rank from then on.
    """
    takes, frees = changes(sched, costs)
    begin, finish = start_s.copy(), end_s.copy()
    if shipped is not None and len(shipped.forward) and not sched.recompute:
        finish[shipped.forward] = shipped.end_s
        begin[shipped.backward] = shipped.start_s
    rank = np.tile(np.repeat(np.arange(sched.num_ranks, dtype=np.int32), np.diff(sched.offsets)), 2)
    time, change = np.concatenate([begin, finish]), np.concatenate([takes, -frees])
    keep = change != 0
    rank, time, change = rank[keep], time[keep], change[keep]
    order = np.lexsort((change, time, rank))  # at one moment, first what is freed
    rank, time, change = rank[order], time[order], change[order]
    total = np.cumsum(change)
    first = np.searchsorted(rank, np.arange(sched.num_ranks))
    before = np.concatenate(([0.0], total))[first]
    held = np.maximum(total - before[rank], 0.0)
    peak = np.zeros(sched.num_ranks)
    np.maximum.at(peak, rank, held)
    return MemorySteps(rank, time, held, peak)
