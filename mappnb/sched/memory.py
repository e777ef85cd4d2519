"""Memory of activations: what each rank holds while it runs its order."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from mappnb.sched import codes as c
from mappnb.sched.costs import Costs, CostTables, Floats
from mappnb.sched.schedule import Schedule

__all__ = ["changes", "peak_activation"]


def changes(sched: Schedule, costs: CostTables) -> tuple[Floats, Floats]:
    """Return what each action takes when it begins and frees when it ends, dims (action,), in the unit of the costs.

    Notes
    -----
    F takes the activation of its chunk; B frees it; I frees all but the part held for W, which W frees. In a disaggregated pipeline
    the backward rank takes it when its backward begins, and the forward rank has freed it when it is sent.
    """
    kind, stage = c.kind(sched.codes), c.stage(sched.codes)
    whole, held = costs.activation[stage], costs.activation_weight[stage]
    takes = np.where(kind == 0, whole, 0.0)
    frees = np.select([kind == 1, kind == 2, kind == 3], [whole, whole - held, held], 0.0)
    if sched.placement.backward is not None:
        takes, frees = np.where((kind == 1) | (kind == 2), whole, takes), np.where(kind == 0, whole, frees)
    return takes, frees


def peak_activation(sched: Schedule, costs: CostTables | None = None) -> npt.NDArray[np.float64]:
    """Return the peak activation memory of each rank, dims (rank,), static memory not counted.

    Parameters
    ----------
    sched : Schedule
        The order alone decides: a rank runs one action at a time.
    costs : CostTables, optional
        Gives the unit; activations of one microbatch of a rank's whole share by default.
    """
    costs = costs or Costs(forward_s=1, backward_input_s=1, backward_weight_s=1).tables(sched)
    takes, frees = changes(sched, costs)
    paired = c.paired(sched.codes)
    if paired.any():  # both of a pair begin before either ends
        second = np.concatenate(([False], paired[:-1]))
        takes[paired] += takes[np.flatnonzero(paired) + 1]
        takes[second] = 0.0
        frees[np.flatnonzero(paired) + 1] += frees[paired]
        frees[paired] = 0.0
    level = np.cumsum(takes - frees)
    held = level + frees  # while the action runs
    before = np.concatenate(([0.0], level))[sched.offsets[:-1]]
    peak = np.zeros(sched.num_ranks)
    rank = np.repeat(np.arange(sched.num_ranks), np.diff(sched.offsets))
    np.maximum.at(peak, rank, held - before[rank])
    return peak
