"""The critical path of a recorded step: what decided when it ended, over all ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from mappnb.analysis._input import events_of
from mappnb.analysis._stepgraph import RecordedGraph, recorded_graph
from mappnb.errors import MappnbError
from mappnb.replay import Replayed, replay
from mappnb.replay import critical_path as path_of
from mappnb.run import Run
from mappnb.terms import Category, Flag

__all__ = ["critical_path", "event_slack"]

Array = np.ndarray[Any, Any]
_COLUMNS = ("rank", "category", "op", "name", "phase", "stage", "microbatch", "layer")


def critical_path(run: Run | xr.Dataset, *, step: int) -> pd.DataFrame:
    """Return the events that decided when a step ended, in the order of time.

    Parameters
    ----------
    run : Run or Dataset, dims (event,)
        Events of all ranks, recorded, imported or simulated.
    step : int
        The step.

    Returns
    -------
    DataFrame
        One row per stretch of an event on the path: ``rank, category, op, name, phase, stage, microbatch, layer``; ``start_s`` from the
        step's first start; ``duration_s`` that it is on the path; ``delay_s`` before it that no event explains (launch gaps, a late
        begin), s; ``share`` of the two in the makespan; ``event``, its index in ``run.sel(step=step)``, or among the dataset's events
        of the step. A message is the row of its send.

        The answer in short is in its ``attrs``, which pandas does not show by itself: ``makespan_s``; ``share_by_rank``,
        ``share_by_category``, ``share_by_op``, largest first, each of which sums to 1 with ``share_of_delay``; ``replay_error``,
        makespan of the replay over the recorded one, minus 1; ``step``.

    Raises
    ------
    MappnbError
        If the step has no events.

    Notes
    -----
    The step is replayed (:func:`mappnb.replay.replay`) as a graph: the innermost spans of each thread and stream in their order;
    a collective goes on when its last member is there; a message is there after it was sent, and after the one before on its link;
    device work comes after its launch where ``issue_ns`` is known. Waiting is therefore never on the path: the path goes on
    through the rank that was waited for. Times are the recorded ones, so clocks that do not agree show as ``replay_error``. Work that
    began within 1 µs after an asynchronous transfer of its rank ended counts as having waited for it. A host that waits for its
    device in no recorded span is not seen as waiting: its span stays on the path. A path is one of several where ranks tie.

    Examples
    --------
    >>> path = mappnb.analysis.critical_path(run, step=7)  # doctest: +SKIP
    >>> path.attrs["share_by_rank"]  # who decided when the step ended  # doctest: +SKIP
    {3: 0.834, 1: 0.143, 0: 0.023}
    """
    events = _step_events(run, step)
    built, done = _replayed(events)
    path = path_of(built.graph, done)
    delay = built.graph.delays_s[path]
    length = done.end_s[path] - done.start_s[path]
    keep = (length > 0) | (delay > 0)
    rows = pd.DataFrame(
        {
            "event": built.event[path],
            "start_s": done.start_s[path] / 1e9,
            "duration_s": length / 1e9,
            "delay_s": delay / 1e9,
        }
    )[keep]
    rows = _merged(rows)
    for name in _COLUMNS:
        rows[name] = events[name].values[rows["event"].to_numpy()]
    makespan = float(done.end_s.max()) / 1e9
    rows["share"] = (rows["duration_s"] + rows["delay_s"]) / makespan if makespan else 0.0
    recorded = float((events.start_ns.values + events.duration_ns.values).max() - events.start_ns.values.min()) / 1e9
    totals = _totals(rows, makespan)
    rows.attrs.update(totals | {"replay_error": makespan / recorded - 1 if recorded else 0.0, "step": step})
    return rows[[*_COLUMNS, "start_s", "duration_s", "delay_s", "share", "event"]]


def event_slack(run: Run | xr.Dataset, *, step: int) -> xr.Dataset:
    """Return how much later each event of a step may end before the step ends later.

    Parameters
    ----------
    run : Run or Dataset, dims (event,)
        Events of all ranks.
    step : int
        The step.

    Returns
    -------
    Dataset, dims (event,)
        The events of the step with ``slack_s``, s: of the last piece of the event in its thread; NaN for what is no work of its
        own, such as a span that others fill wholly. See :func:`critical_path`.
    """
    events = _step_events(run, step)
    built, done = _replayed(events)
    slack = np.full(events.sizes["event"], np.nan)
    order = np.argsort(built.end_ns, kind="stable")
    slack[built.event[order]] = np.maximum(done.latest_end_s - done.end_s, 0)[order] / 1e9
    meaning = "how much later it may end before the step ends later"
    return events.assign(slack_s=("event", slack, {"units": "s", "long_name": meaning}))


def _step_events(run: Run | xr.Dataset, step: int) -> xr.Dataset:
    events = events_of(run, step)
    unreal = (events.category == Category.MARK) & ((events.flags & int(Flag.CLIPPED)) != 0)  # begun, never worked in
    if not events.sizes["event"]:
        raise MappnbError(f"critical_path: step {step} has no events; see run.steps for the steps that there are")
    return events.assign(duration_ns=events.duration_ns.where(~unreal, 0)) if unreal.any() else events


def _replayed(events: xr.Dataset) -> tuple[RecordedGraph, Replayed]:
    built = recorded_graph(events)
    return built, replay(built.graph, slack=True)


def _merged(rows: pd.DataFrame) -> pd.DataFrame:
    """Join pieces of one event that follow one another without a delay between."""
    new = (rows["event"] != rows["event"].shift()) | (rows["delay_s"] > 0)
    grouped = rows.groupby(new.cumsum().to_numpy(), sort=True)
    how = {"event": "first", "start_s": "first", "duration_s": "sum", "delay_s": "first"}
    return grouped.agg(how).reset_index(drop=True)


def _totals(rows: pd.DataFrame, makespan: float) -> dict[str, Any]:
    out: dict[str, Any] = {"makespan_s": makespan}
    part = rows["duration_s"] / makespan if makespan else rows["duration_s"]
    for name in ("category", "rank", "op"):
        out[f"share_by_{name}"] = part.groupby(rows[name].to_numpy()).sum().sort_values(ascending=False).to_dict()
    out["share_of_delay"] = float(rows["delay_s"].sum()) / makespan if makespan else 0.0
    return out
