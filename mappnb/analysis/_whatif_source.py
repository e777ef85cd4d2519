"""The model of a run, recorded or imported: which rules it is made by, which steps it has, who is on which host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import xarray as xr

from mappnb.analysis._input import events_of
from mappnb.analysis._whatif_artifact import model_of_trace
from mappnb.analysis._whatif_model import Model
from mappnb.analysis._whatif_recorded import model_of_events
from mappnb.analysis._whatif_trace import is_trace
from mappnb.errors import MappnbError
from mappnb.run import Run
from mappnb.terms import Flag

__all__ = ["Steps", "hosts_of", "model_of", "steps_of"]

Array = np.ndarray[Any, Any]
MOST_EVENTS: Final = 300_000
"""Events that are made a graph unless steps are chosen: about 4 s of one core (12 us an event)."""
Steps = int | slice | Sequence[int]


def model_of(run: Run | xr.Dataset, step: Steps | None) -> Model:
    """Return the operations of a run.

    Raises
    ------
    MappnbError
        If there are no events, or none of the steps.
    """
    told = _told(run)
    if told is not None or (isinstance(run, xr.Dataset) and is_trace(events_of(run))):
        events = events_of(run)
        folded, order = told or ({}, {})
        return model_of_trace(events, folded=folded, order=order, steps=_wanted(events, step))
    events, attrs = _recorded(run, step)
    events, more = _whole_steps(events)
    return model_of_events(events, hosts=hosts_of(run), attrs=attrs | more)


def steps_of(run: Run | xr.Dataset, step: Steps | None) -> xr.Dataset:
    """Return the events of the steps asked for, whole steps only; by default as many as are quickly gone through.

    Raises
    ------
    MappnbError
        As :func:`model_of`.
    """
    return _whole_steps(_recorded(run, step)[0])[0]


def _recorded(run: Run | xr.Dataset, step: Steps | None) -> tuple[xr.Dataset, dict[str, Any]]:
    """Return the events of the steps asked for; unless told, of as many as are quickly replayed, and what to say about that."""
    if isinstance(step, int | slice):
        events = events_of(run, step)
        _wanted(events, step)
        return events, {}
    rows = run.events.sizes["event"] if isinstance(run, Run) else run.sizes.get("event", 0)
    if step is None and rows <= MOST_EVENTS:
        events = events_of(run)
        keep = events["step"].values >= 0
        _wanted(events, None)
        return (events if keep.all() else events.isel(event=np.flatnonzero(keep))), {}
    there = _numbers_of(run)
    if not len(there):
        raise MappnbError("what_if: the run has no events of a step; see run.steps for the steps that there are")
    if step is not None:
        chosen = _there(np.atleast_1d(np.asarray(step)), there)
        return _read(run, chosen), {}
    count = max(1, min(len(there), int(MOST_EVENTS * len(there) / rows)))
    chosen = there[np.unique(np.linspace(0, len(there) - 1, count + 2).round().astype(int)[1:-1])]
    said = f"{len(chosen)} of {len(there)}, evenly spaced, of about {MOST_EVENTS} events in all; choose others by step="
    return _read(run, chosen), {"steps_chosen": said}


def _numbers_of(run: Run | xr.Dataset) -> Array:
    """Return the numbers of the steps of a run, from its step table where there is one."""
    found = np.empty(0, np.int64)
    if isinstance(run, Run) and "step" in (table := run.steps).coords:
        found = np.unique(table["step"].values)
    if not len(found):
        found = np.unique((run.events if isinstance(run, Run) else run)["step"].values)
    return found[found >= 0]


def _read(run: Run | xr.Dataset, steps: Array) -> xr.Dataset:
    if isinstance(run, Run):
        parts = [run.sel(step=int(s)) for s in steps.tolist()]
        return xr.concat(parts, "event", data_vars="all", combine_attrs="override") if len(parts) > 1 else parts[0]
    events = events_of(run)
    return events.isel(event=np.flatnonzero(np.isin(events["step"].values, steps)))


def _whole_steps(events: xr.Dataset) -> tuple[xr.Dataset, dict[str, Any]]:
    """Leave out earlier tries of steps that were run again, and steps that did not end or that some ranks are missing in."""
    step, inc = events["step"].values, events.incarnation.values
    steps, number = np.unique(step, return_inverse=True)
    newest = np.full(len(steps), -1)
    np.maximum.at(newest, number, inc)
    again = inc < newest[number]
    left_out = [f"step {s}: its earlier tries" for s in np.unique(step[again]).tolist()]
    is_open = np.zeros(len(steps), bool)
    is_open[number[((events.flags.values & int(Flag.OPEN)) != 0) & ~again]] = True
    pairs = np.unique(np.stack([number, events["rank"].values], 1)[~again], axis=0)
    ranks = np.bincount(pairs[:, 0], minlength=len(steps))
    few = ranks < ranks.max()
    if (is_open | few).all():
        is_open[:] = few[:] = False
    left_out += [f"step {s}: did not end" for s in steps[is_open].tolist()]
    left_out += [f"step {s}: ranks are missing in it" for s in steps[few & ~is_open].tolist()]
    keep = ~again & ~(is_open | few)[number]
    attrs = {"steps_left_out": "; ".join(left_out)}
    return (events if keep.all() else events.isel(event=np.flatnonzero(keep))), attrs


def _told(run: Run | xr.Dataset) -> tuple[dict[str, int], dict[int, int]] | None:
    """Return the folded sizes and the ranks' own numbers of an imported StragglerAnalysis trace; None of other runs."""
    if not isinstance(run, Run):
        return None
    found = [
        (rank, info["straggler_analysis"])
        for incarnation in run.incarnations
        for rank, info in incarnation.ranks.items()
        if isinstance(info.get("straggler_analysis"), dict)
    ]
    if not found:
        return None
    return dict(found[0][1].get("folded") or {}), {r: int(x.get("source_rank", r)) for r, x in found}


def _wanted(events: xr.Dataset, step: Steps | None) -> Array | None:
    """Return the numbers of the steps asked for; None for all."""
    there = np.unique(events["step"].values)
    there = there[there >= 0]
    if not len(there):
        asked = "" if step is None else f" for step={step!r}"
        raise MappnbError(
            f"what_if: the run has no events of a step{asked}; see run.steps for the steps that there are"
        )
    if step is None:
        return None
    if isinstance(step, slice):
        low, high = step.start if step.start is not None else -np.inf, step.stop if step.stop is not None else np.inf
        wanted = there[(there >= low) & (there <= high)]
    else:
        wanted = _there(np.atleast_1d(np.asarray(step)), there)
    if not len(wanted):
        raise MappnbError(f"what_if: no step in {step!r}; the run has steps {there[0]} to {there[-1]}")
    return np.unique(wanted)


def _there(wanted: Array, there: Array) -> Array:
    """Raise MappnbError unless all steps asked for are there."""
    if len(missing := np.setdiff1d(wanted, there)):
        raise MappnbError(
            f"what_if: no step {missing[0]}; the run has steps {there[0]} to {there[-1]} ({len(there)} of them)"
        )
    return np.unique(wanted)


def hosts_of(run: Run | xr.Dataset) -> dict[int, str]:
    """Return the host of each rank; empty for a dataset, which does not know them."""
    if not isinstance(run, Run):
        return {}
    table = run.ranks
    if table.empty:
        return {}
    return dict(zip(table.index.get_level_values("rank").tolist(), table["host"].astype(str).tolist(), strict=True))
