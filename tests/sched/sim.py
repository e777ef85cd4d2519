"""The simulator that the tests of the families use; one place to put another one in."""

import numpy as np

from mappnb.sched import codes
from mappnb.sched.costs import Costs
from mappnb.sched.times import times as engine


def costs(f=1.0, i=1.0, w=1.0, **more):
    """Costs of a rank's whole share."""
    return Costs(forward_s=f, backward_input_s=i, backward_weight_s=w, **more)


def times(schedule, cost):
    """Start and end of every action, in the order of ``schedule.codes``."""
    return engine(schedule, cost.tables(schedule))


def bubbles(schedule, cost):
    """(makespan, longest span from the first start to the last end of one rank)."""
    start, end = times(schedule, cost)
    first = np.minimum.reduceat(start, schedule.offsets[:-1])
    last = np.maximum.reduceat(end, schedule.offsets[:-1])
    return float(last.max() - first.min()), float((last - first).max())


def idle(schedule, cost):
    """Time in which each rank runs nothing; a pair counts once."""
    start, end = times(schedule, cost)
    second = np.concatenate(([False], codes.paired(schedule.codes)[:-1]))
    busy = np.add.reduceat(np.where(second, 0.0, end - start), schedule.offsets[:-1])
    return end.max() - start.min() - busy
