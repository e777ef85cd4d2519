"""The simulator that the tests of the families use; one place to put another one in."""

from mappnb.sched.costs import Costs
from mappnb.sched.reference import times_reference


def costs(f=1.0, i=1.0, w=1.0, **more):
    """Costs of a rank's whole share."""
    return Costs(forward_s=f, backward_input_s=i, backward_weight_s=w, **more)


def times(schedule, cost):
    """Start and end of every action, in the order of ``schedule.codes``."""
    return times_reference(schedule, cost.tables(schedule))


def bubbles(schedule, cost):
    """(makespan, longest span from the first start to the last end of one rank)."""
    start, end = times(schedule, cost)
    at = schedule.offsets[:-1]
    import numpy as np

    first, last = np.minimum.reduceat(start, at), np.maximum.reduceat(end, at)
    return float(last.max() - first.min()), float((last - first).max())
