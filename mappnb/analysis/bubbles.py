"""Pipeline bubbles: the share of the makespan in which a rank ran no forward and no backward."""

from __future__ import annotations

from typing import Any

import numpy as np
import xarray as xr

from mappnb.analysis._input import events_of, issue_only
from mappnb.analysis._intervals import union_length
from mappnb.run import Run
from mappnb.terms import Category, Op, Phase

__all__ = ["bubble_fraction", "bubble_seconds"]

Array = np.ndarray[Any, Any]
PHASES = ("warm_up", "steady", "cool_down")
_BACKWARD = (Phase.BACKWARD, Phase.BACKWARD_INPUT, Phase.BACKWARD_WEIGHT)


def _actions(events: xr.Dataset) -> xr.Dataset:
    """Return the actions of the schedule: forward and backward steps, or all compute where a trace has none. Evaluation is left out.

    Of a rank that computes on a device only its device lanes are taken.
    """
    op, rank = events.op.values, events["rank"].values
    real = (events["step"].values >= 0) & ~issue_only(events)
    compute = (events.category.values == Category.COMPUTE) & real
    action = ((op == Op.FORWARD_STEP) | (op == Op.BACKWARD_STEP)) & real
    if not action.any():
        action = compute
    else:  # a device trace may hold kernels alone
        action |= compute & (events.stream.values >= 0) & ~np.isin(rank, rank[action])
    action &= ~_inside_evaluation(events)
    return events.isel(event=np.flatnonzero(action))


def _inside_evaluation(events: xr.Dataset) -> Array:
    out = np.zeros(events.sizes["event"], bool)
    start, rank = _issued_ns(events), events["rank"].values
    for i in np.flatnonzero(events.category.values == Category.EVALUATION):
        out |= (rank == rank[i]) & (start >= start[i]) & (start < start[i] + events.duration_ns.values[i])
    return out


def _issued_ns(events: xr.Dataset) -> Array:
    """Return when the host began each event, on the run clock: device work may run after the span that issued it."""
    start, issued, raw = events.start_ns.values, events.issue_ns.values, events.raw_start_ns.values
    return np.asarray(np.where(issued >= 0, issued + np.where(raw >= 0, start - raw, 0), start))


def bubble_fraction(run: Run | xr.Dataset, *, step: int | slice | None = None) -> xr.DataArray:
    """Return the share of the makespan in which each rank ran no action of the schedule.

    Parameters
    ----------
    run : Run or Dataset, dims (event,)
        Events, recorded, imported or simulated.
    step : int or slice, optional
        Steps to look at; all by default.

    Returns
    -------
    DataArray, dims (step, rank), unit 1
        ``1 - busy / makespan``; makespan: first start to last end of the step's forwards and backwards over all ranks.

    Notes
    -----
    GPipe and 1F1B at equal costs: ``(p - 1) / (m + p - 1)``. Narayanan et al. (arXiv:2104.04473, 2.2) print ``(p - 1) / m``, which is
    relative to the *ideal* time instead. For a rank that computes on a device, its device lanes alone count.
    """
    bubble = bubble_seconds(events_of(run, step))
    fraction = bubble.sum("phase", min_count=1) / bubble["makespan_s"]
    return fraction.drop_vars("makespan_s").rename("bubble_fraction").assign_attrs(units="1")


def bubble_seconds(events: xr.Dataset) -> xr.DataArray:
    """Return the time without an action, by phase of the pipeline.

    Parameters
    ----------
    events : Dataset, dims (event,)

    Returns
    -------
    DataArray, dims (step, rank, phase), s
        ``warm_up`` before the rank's first backward, ``cool_down`` after its last forward, ``steady`` between; coordinate
        ``makespan_s`` (step,). They sum to makespan - busy.
    """
    actions = _actions(events)
    steps, row = np.unique(actions["step"].values, return_inverse=True)
    ranks, col = np.unique(actions["rank"].values, return_inverse=True)
    start = actions.start_ns.values
    end = start + actions.duration_ns.values
    first = np.full(len(steps), np.iinfo(np.int64).max)
    last = np.full(len(steps), np.iinfo(np.int64).min)
    np.minimum.at(first, row, start)
    np.maximum.at(last, row, end)
    cell = row * len(ranks) + col
    shape = (len(steps), len(ranks))
    begin, finish = np.repeat(first, len(ranks)), np.repeat(last, len(ranks))
    backward = np.isin(actions.phase.values, _BACKWARD) | (actions.op.values == Op.BACKWARD_STEP)
    first_back = np.minimum(_extreme(np.minimum, cell[backward], start[backward], finish), finish)
    last_forward = np.maximum(_extreme(np.maximum, cell[~backward], end[~backward], begin), first_back)
    out = np.zeros((*shape, len(PHASES)))
    for i, (lo, hi) in enumerate(((begin, first_back), (first_back, last_forward), (last_forward, finish))):
        busy = union_length(cell, np.maximum(start, lo[cell]), np.minimum(end, hi[cell]), len(lo))
        out[..., i] = (hi - lo - busy).reshape(shape) / 1e9
    coords = {
        "step": steps,
        "rank": ranks,
        "phase": np.array(PHASES, object),
        "makespan_s": ("step", (last - first) / 1e9 if len(steps) else np.zeros(0)),
    }
    return xr.DataArray(out, dims=("step", "rank", "phase"), coords=coords, name="bubble_s", attrs={"units": "s"})


def _extreme(what: np.ufunc, cell: Array, value: Array, otherwise: Array) -> Array:
    """Return the smallest or largest value of each cell; ``otherwise`` where a cell has none."""
    sentinel = np.iinfo(np.int64).max if what is np.minimum else np.iinfo(np.int64).min
    out = np.full(len(otherwise), sentinel)
    what.at(out, cell, value)
    return np.where(out == sentinel, otherwise, out)
