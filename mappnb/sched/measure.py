"""Measured pipeline actions: which stage ran what for how long, waits removed, out of the events of a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd
import xarray as xr

from mappnb.analysis._input import events_of, issue_only
from mappnb.analysis._intervals import union_length
from mappnb.analysis.matching import last_arrival_ns
from mappnb.datasets import layout_of
from mappnb.errors import CostError
from mappnb.run import Run
from mappnb.terms import COLLECTIVE_OPS, P2P_OPS, Category, Flag, Kind, Op, Phase

__all__ = ["Measured", "Steps", "cost_table", "measure", "measured_events", "pipeline_ranks", "waits_ns"]

Steps = int | slice | Sequence[int] | None
Array = npt.NDArray[Any]
_KIND = {
    Phase.FORWARD: Kind.FORWARD,
    Phase.BACKWARD: Kind.BACKWARD,
    Phase.BACKWARD_INPUT: Kind.BACKWARD_INPUT,
    Phase.BACKWARD_WEIGHT: Kind.BACKWARD_WEIGHT,
}
_ACTIONS = (Op.FORWARD_STEP, Op.BACKWARD_STEP)
_READ = (*_ACTIONS, Op.WAIT, Op.OPTIMIZER_STEP, Op.EVALUATE, *sorted(COLLECTIVE_OPS), *sorted(P2P_OPS))
_BROKEN = int(Flag.OPEN | Flag.CLIPPED | Flag.FAILED)
_TOUCH = 0.01
"""Two actions overlap if they share more than this fraction of the shorter one: clocks of traces are rounded."""


class Measured(NamedTuple):
    """The actions of a run.

    Attributes
    ----------
    actions : DataFrame
        One row per action, by start: ``incarnation, step, rank, stage, kind, microbatch, start_ns, end_ns``, ``wait_ns`` (waiting for
        others inside it), ``seconds`` (its length without that) and ``alone`` (no other action of its rank ran beside it).
    events : Dataset, dims (event,)
        The events of the same steps.
    steps : tuple of int
        Steps that were used.
    num_chunks : int
        Stages that one microbatch passes on one rank.
    notes : tuple of str
        What a reader of the numbers should know.
    """

    actions: pd.DataFrame
    events: xr.Dataset
    steps: tuple[int, ...]
    num_chunks: int
    notes: tuple[str, ...]


def measured_events(run: Run | xr.Dataset, steps: Steps = None) -> tuple[xr.Dataset, tuple[int, ...]]:
    """Return the events that costs are measured on, and their steps.

    Parameters
    ----------
    run : Run or Dataset, dims (event,)
        Recorded, imported or simulated.
    steps : int, slice or sequence of int, optional
        Steps to use (both ends of a slice included); by default all but the first, which holds the warm-up, if there are more.

    Raises
    ------
    CostError
        If there is no such step.
    """
    bounds = slice(steps, steps) if isinstance(steps, int) else steps if isinstance(steps, slice) else None
    if isinstance(run, Run):
        events = run.sel(step=bounds, op=[str(op) for op in _READ])
    else:
        events = events_of(run, bounds)
        events = events.isel(event=np.flatnonzero(np.isin(events.op.values, [str(op) for op in _READ])))
    step = events["step"].values
    there = np.unique(step[(step >= 0) & np.isin(events.op.values, _ACTIONS)])
    if not len(there):
        raise CostError(
            "no pipeline actions: expected events forward_step and backward_step"
            + (f" in steps {steps}" if steps is not None else "")
            + "; record with plan 'base' or above, or import a trace that has them"
        )
    if steps is None:
        used = there[1:] if len(there) > 1 else there
    else:
        used = there if bounds is not None else there[np.isin(there, np.asarray(steps))]
    if not len(used):
        raise CostError(f"steps {steps}: the run has steps {there[0]} to {there[-1]}")
    return events.isel(event=np.flatnonzero(np.isin(step, used))), tuple(int(s) for s in used)


def measure(run: Run | xr.Dataset, *, steps: Steps = None) -> Measured:
    """Return the pipeline actions of a run with their lengths, waits removed.

    Parameters
    ----------
    run : Run or Dataset, dims (event,)
        Recorded, imported or simulated.
    steps : int, slice or sequence of int, optional
        As of :func:`measured_events`.

    Raises
    ------
    CostError
        If there are no actions, their stages are not known, or the events are of more than one layout.

    Notes
    -----
    Inside an action a blocking collective, or a wait for one, is waiting until its last member has arrived (the rule of
    :func:`mappnb.analysis.breakdown`), and work after that; point-to-point operations do not count at all: they are messages.
    """
    events, used = measured_events(run, steps)
    index = _actions(events)
    if not len(index):
        raise CostError(f"no complete forward_step or backward_step in steps {used}; give other steps=")
    waits, unknown = waits_ns(events, index)
    start = events.start_ns.values[index].astype(np.int64)
    data = {name: events[name].values[index] for name in ("incarnation", "step", "rank", "microbatch")}
    data |= {"stage": _stages(events, index), "kind": _kinds(events, index)}
    data |= {"start_ns": start, "end_ns": start + events.duration_ns.values[index], "wait_ns": waits}
    frame = pd.DataFrame(data).sort_values(["start_ns", "end_ns"], kind="stable", ignore_index=True)
    frame["seconds"] = (frame.end_ns - frame.start_ns - frame.wait_ns) / 1e9
    frame["alone"] = _alone(frame)
    _one_layout(events, frame)
    return Measured(frame, events, used, _num_chunks(frame), _notes(events, index, used, unknown))


def _actions(events: xr.Dataset) -> Array:
    """Return the indices of the actions that were timed where they ran, whole, and not in an evaluation."""
    real = np.isin(events.op.values, _ACTIONS) & ~issue_only(events) & ((events["flags"].values & _BROKEN) == 0)
    index = np.flatnonzero(real & (events.category.values == Category.COMPUTE))
    evaluation = np.flatnonzero(events.category.values == Category.EVALUATION)
    if not len(evaluation):
        return index
    rank, start = events["rank"].values.astype(np.int64), events.start_ns.values.astype(np.int64)
    end = start + events.duration_ns.values
    _, inside = enclosing(rank[evaluation], start[evaluation], end[evaluation], rank[index], start[index])
    return index[~inside]


def _kinds(events: xr.Dataset, index: Array) -> Array:
    forward = events.op.values[index] == Op.FORWARD_STEP
    phase = events.phase.values[index]
    kinds = [_KIND.get(p, Kind.BACKWARD) for p in phase]
    return np.array([str(Kind.FORWARD if f else k) for f, k in zip(forward, kinds, strict=True)], object)


def _stages(events: xr.Dataset, index: Array) -> Array:
    """Return the stage of each action; where the trace does not say, from the layout."""
    stage: Array = events.stage.values[index].astype(np.int64)
    if (stage >= 0).all():
        return stage
    if "layout" not in events.attrs:
        raise CostError("actions without a stage, and no layout: fill events.stage, or set events.attrs['layout']")
    layout = layout_of(events)
    chunk = np.maximum(events["chunk"].values[index], 0)
    at = pipeline_ranks(events)[events["rank"].values[index]]
    return np.array([s if s >= 0 else layout.stage(int(p), int(c)) for s, p, c in zip(stage, at, chunk, strict=True)])


def pipeline_ranks(events: xr.Dataset) -> Array:
    """Return the pipeline rank of each global rank; the rank itself where the layout is not known.

    Raises
    ------
    LayoutError
        If there is a rank outside the layout.
    """
    count = int(events["rank"].values.max(initial=-1)) + 1
    if "layout" not in events.attrs:
        return np.arange(count)
    layout = layout_of(events)
    return np.array([layout.coords(r)["pp"] for r in range(count)], np.int64)


def waits_ns(events: xr.Dataset, index: Array) -> tuple[Array, int]:
    """Return how long spans waited inside for others, ns, and how many collectives in them cannot be told apart from waiting.

    Parameters
    ----------
    events : Dataset, dims (event,)
        All events of the steps.
    index : array, dims (span,)
        The spans; those of one thread do not overlap.
    """
    p2p = np.isin(events.op.values, sorted(P2P_OPS)) | (
        (events.category.values == Category.WAIT) & np.isin(events.name.values, sorted(P2P_OPS))
    )
    keys = [events[n].values.astype(np.int64) for n in ("incarnation", "rank", "thread", "stream")]
    lane = np.unique(np.stack(keys, 1), axis=0, return_inverse=True)[1].ravel()
    start, inner = events.start_ns.values.astype(np.int64), blocking(events)
    end = start + events.duration_ns.values
    owner, inside = enclosing(lane[index], start[index], end[index], lane[inner], start[inner])
    inner, owner = inner[inside], owner[inside]
    first, limit = start[inner], end[index[owner]]
    last = np.minimum(first + events.duration_ns.values[inner], limit)
    waited = np.where(p2p[inner], last, np.clip(last_arrival_ns(events)[inner], first, last))
    unknown = int((~p2p[inner] & (events.seq.values[inner] < 0)).sum())
    return union_length(owner, first, waited, len(index)), unknown


def blocking(events: xr.Dataset) -> Array:
    """Return the indices of the transfers, and waits for transfers, that kept their thread."""
    category = events.category.values
    flying = ((events["flags"].values & Flag.ASYNC) != 0) & (category != Category.WAIT)
    return np.flatnonzero(np.isin(category, [Category.COLLECTIVE, Category.P2P, Category.WAIT]) & ~flying)


def enclosing(lane: Array, start: Array, end: Array, inner_lane: Array, inner_start: Array) -> tuple[Array, Array]:
    """Return for each inner interval the last one of its lane that began before or with it, and whether it begins inside that.

    Parameters
    ----------
    lane, start, end : int64 array, shape (interval,)
        Lanes and bounds in ns; those of one lane do not overlap.
    inner_lane, inner_start : int64 array, shape (inner,)
        Lanes and starts in ns.
    """
    if not len(start) or not len(inner_start):
        return np.zeros(len(inner_start), np.int64), np.zeros(len(inner_start), bool)
    low = min(start.min(), inner_start.min())
    width = np.int64(max(start.max(), inner_start.max()) - low + 1)
    key = lane * width + start - low
    order = np.argsort(key, kind="stable")
    at = np.searchsorted(key[order], inner_lane * width + inner_start - low, side="right") - 1
    owner = order[np.maximum(at, 0)]
    return owner, (at >= 0) & (lane[owner] == inner_lane) & (inner_start < end[owner])


def _alone(frame: pd.DataFrame) -> Array:
    """Return which actions share no time with another one of their rank."""
    order = np.lexsort((frame.end_ns, frame.start_ns, frame["rank"], frame.incarnation))
    rows = frame[["incarnation", "rank", "start_ns", "end_ns"]].to_numpy()[order]
    before, after = rows[:-1], rows[1:]
    shared = np.minimum(before[:, 3], after[:, 3]) - after[:, 2]
    shorter = np.minimum(before[:, 3] - before[:, 2], after[:, 3] - after[:, 2])
    beside = (before[:, :2] == after[:, :2]).all(1) & (shared > _TOUCH * shorter) & (shorter > 0)
    alone = np.ones(len(rows), bool)
    alone[order[:-1][beside]] = alone[order[1:][beside]] = False
    return alone


def _num_chunks(frame: pd.DataFrame) -> int:
    forward = frame[frame.kind == Kind.FORWARD]
    if not len(forward):
        raise CostError("no forward_step in these steps: costs need both passes; give steps= of training")
    return int(forward.groupby(["incarnation", "rank", "step", "microbatch"]).stage.nunique().max())


def _one_layout(events: xr.Dataset, frame: pd.DataFrame) -> None:
    """Raise CostError unless all incarnations have the same stages at the same places, and no stage is missing."""
    stages = np.unique(frame.stage)
    if "layout" in events.attrs and stages[-1] >= layout_of(events).num_stages and not _mirrored(events):
        raise CostError(
            f"stage {stages[-1]}: the layout {layout_of(events)} has {layout_of(events).num_stages} stages; "
            "the events are of another layout"
        )
    if len(stages) != stages[-1] + 1:
        gap = int(np.setdiff1d(np.arange(stages[-1]), stages)[0])
        raise CostError(f"stage {gap} has no action; give the events of all ranks, and steps= in which all of them ran")
    places = {
        int(i): frozenset(zip(rows["rank"], rows.stage, strict=True))
        for i in frame.incarnation.unique()
        if len(rows := frame.loc[frame.incarnation == i, ["rank", "stage"]].drop_duplicates())
    }
    if len(set(places.values())) > 1:
        raise CostError(
            f"incarnations {sorted(places)} place stages differently; fit one at a time: "
            "fit_costs(run.sel(incarnation=...))"
        )


def _mirrored(events: xr.Dataset) -> bool:
    """Return whether the events are simulated ones, whose layout does not know every placement."""
    return "schedule" in events.attrs


def _notes(events: xr.Dataset, index: Array, used: tuple[int, ...], unknown: int) -> tuple[str, ...]:
    span = f"{used[0]} to {used[-1]}" if len(used) > 1 else str(used[0])
    notes = [f"{len(used)} step{'s' if len(used) > 1 else ''} used ({span})"]
    if unknown:
        notes.append(f"{unknown} collectives inside actions have no sequence number: waits in them count as work")
    if (events.stream.values[index] >= 0).any():
        notes.append("actions were timed on a device stream: waits for other streams inside them count as work")
    if (events["flags"].values[index] & Flag.REPAIRED).any():
        notes.append("the trace lacks the ends of some actions: they were taken from the spans around them")
    return tuple(notes)


def cost_table(run: Run | xr.Dataset, *, steps: Steps = None) -> pd.DataFrame:
    """Return what was measured of each stage and kind of action: how often, how long, how much it varies.

    Parameters
    ----------
    run : Run or Dataset, dims (event,)
        Recorded, imported or simulated.
    steps : int, slice or sequence of int, optional
        Steps to use; by default all but the first.

    Returns
    -------
    DataFrame
        One row per ``stage`` and ``kind`` (F, B, I, W): ``samples``, ``mean_s``, ``median_s``, ``p95_s``, ``cv`` (standard deviation
        over mean), ``wait_s`` (mean time inside that was waiting and is not counted). Of one chunk, s; actions that ran beside another
        are left out.

    Raises
    ------
    CostError
        As :func:`measure`.
    """
    return table_of(measure(run, steps=steps).actions)


def table_of(actions: pd.DataFrame, by: str = "stage") -> pd.DataFrame:
    """Return :func:`cost_table` of measured actions, by ``"stage"`` or ``"rank"``."""
    groups = actions[actions.alone].groupby([by, "kind"])
    seconds = groups.seconds
    mean = seconds.mean()
    table = pd.DataFrame(
        {
            "samples": seconds.size(),
            "mean_s": mean,
            "median_s": seconds.median(),
            "p95_s": seconds.quantile(0.95),
            "cv": (seconds.std(ddof=0) / mean.where(mean > 0)).fillna(0.0),
            "wait_s": groups.wait_ns.mean() / 1e9,
        }
    ).reset_index()
    order = table.kind.map({k.value: i for i, k in enumerate(Kind)})
    return table.iloc[np.lexsort((order, table[by]))].reset_index(drop=True)
