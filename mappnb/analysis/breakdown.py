"""Where the time of a step went: exclusive categories that sum to the step, per rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr

from mappnb.analysis._input import events_of, issue_only
from mappnb.analysis._intervals import innermost_segments, union_length
from mappnb.analysis.bubbles import bubble_seconds
from mappnb.analysis.matching import last_arrival_ns
from mappnb.run import Run
from mappnb.terms import BREAKDOWN, Category, Flag

__all__ = ["breakdown"]

Array = np.ndarray[Any, Any]
_LABEL = {
    Category.COMPUTE: "compute",
    Category.DATA: "data",
    Category.CHECKPOINT: "checkpoint",
    Category.OPTIMIZER: "optimizer",
    Category.EVALUATION: "host",
    Category.HOST: "host",
    Category.MARK: "host",
}
_TRANSFERS = (Category.COLLECTIVE, Category.P2P, Category.WAIT)


@dataclass(slots=True)
class _Windows:
    """Steps and ranks as dense cells: ``cell`` of every event, and the window of each step."""

    steps: Array
    ranks: Array
    cell: Array
    start: Array
    end: Array

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.steps), len(self.ranks)


def step_windows(events: xr.Dataset) -> _Windows:
    """Return the window of each step: first start to last end of its events over all ranks. Events before step 0 are left out."""
    steps, row = np.unique(events["step"].values, return_inverse=True)
    ranks, col = np.unique(events["rank"].values, return_inverse=True)
    start = np.full(len(steps), np.iinfo(np.int64).max)
    end = np.full(len(steps), np.iinfo(np.int64).min)
    np.minimum.at(start, row, events.start_ns.values)
    np.maximum.at(end, row, events.start_ns.values + events.duration_ns.values)
    return _Windows(steps, ranks, row * len(ranks) + col, start, end)


def breakdown(run: Run | xr.Dataset, *, step: int | slice | None = None) -> xr.Dataset:
    """Return where the time of each step went, per rank; the categories exclude one another and sum to the step window.

    Parameters
    ----------
    run : Run or Dataset, dims (event,)
        Events, recorded, imported or simulated.
    step : int or slice, optional
        Steps to look at; all by default.

    Returns
    -------
    Dataset
        ``seconds`` (step, rank, category), s; ``window_s`` (step,), first start to last end of the step over all ranks, s;
        ``overlapped_s`` (step, rank), s in which a transfer was in flight beside compute; ``bubble_s`` (step, rank, phase), s
        without a forward or backward, split into warm_up, steady and cool_down.

    Notes
    -----
    At each instant the innermost span of a thread says what the thread does. A blocking collective, p2p, or wait for one is
    ``wait_peer`` until its last member has arrived and ``transfer`` after that; inside a forward or backward it does not count as
    compute. Time in a step that no inner span explains is ``host``; time outside is ``idle``. Where threads or streams of a rank
    differ, the first of compute, transfer, wait_peer, data, checkpoint, optimizer, host wins. Arrivals of other hosts are as
    good as the clock model in ``events.attrs["clock_model"]``.

    For a rank that has compute on a device (``stream`` 0 or more), only the device lanes are compute and optimizer; the spans in
    which its host issued that work are ``host``. A device span holds all that its stream did from begin to end, waits for other
    streams included.
    """
    events = events_of(run, step)
    unreal = (events.category.values == Category.MARK) & (
        (events.flags.values & Flag.CLIPPED) != 0
    )  # begun, never worked in
    events = events.isel(event=np.flatnonzero((events["step"].values >= 0) & ~unreal))
    windows = step_windows(events)
    cell, start, end, label = _segments(events, windows)
    num_cells = windows.shape[0] * windows.shape[1]
    covered = np.zeros((len(BREAKDOWN), num_cells), np.int64)
    for i in range(len(BREAKDOWN) - 1):
        keep = label <= i
        covered[i] = union_length(cell[keep], start[keep], end[keep], num_cells)
    window = np.repeat(windows.end - windows.start, windows.shape[1]) if num_cells else np.zeros(0, np.int64)
    covered[-1] = window
    exclusive = np.diff(covered, axis=0, prepend=0).T.reshape(*windows.shape, len(BREAKDOWN))
    data = {
        "seconds": (("step", "rank", "category"), exclusive / 1e9, {"units": "s"}),
        "window_s": ("step", (windows.end - windows.start) / 1e9, {"units": "s"}),
        "overlapped_s": (("step", "rank"), _overlapped(events, windows, cell, start, end, label) / 1e9, {"units": "s"}),
    }
    coords = {"step": windows.steps, "rank": windows.ranks, "category": np.array(BREAKDOWN, object)}
    out = xr.Dataset(data, coords=coords, attrs=dict(events.attrs))
    return out.assign(bubble_s=bubble_seconds(events).reindex(step=windows.steps, rank=windows.ranks))


def _in_flight(events: xr.Dataset) -> Array:
    """Mask of transfers that ran beside the program: no part of the nesting of its thread."""
    category = events.category.values
    moving = (category == Category.COLLECTIVE) | (category == Category.P2P)
    return np.asarray(moving & ((events.flags.values & Flag.ASYNC) != 0))


def _segments(events: xr.Dataset, windows: _Windows) -> tuple[Array, Array, Array, Array]:
    """Return (cell, start, end, label) of the labelled pieces of all threads; label indexes BREAKDOWN."""
    blocking = np.flatnonzero(~_in_flight(events))
    start, duration = events.start_ns.values[blocking], events.duration_ns.values[blocking]
    lane_key = np.stack([windows.cell[blocking], events.thread.values[blocking], events.stream.values[blocking]], 1)
    lane = np.unique(lane_key, axis=0, return_inverse=True)[1].ravel() if len(blocking) else np.empty(0, np.int64)
    span, left, right = innermost_segments(lane, start, start + duration)
    span = blocking[span]
    category = events.category.values[span]
    label = np.array([BREAKDOWN.index(_LABEL.get(c, "host")) for c in category], np.int64)
    label[issue_only(events)[span]] = BREAKDOWN.index("host")
    moving = np.isin(category, _TRANSFERS)
    arrival = np.clip(last_arrival_ns(events)[span[moving]], left[moving], right[moving])
    cells = windows.cell[span]
    pieces = [
        (cells[~moving], left[~moving], right[~moving], label[~moving]),
        (cells[moving], left[moving], arrival, np.full(len(arrival), BREAKDOWN.index("wait_peer"))),
        (cells[moving], arrival, right[moving], np.full(len(arrival), BREAKDOWN.index("transfer"))),
    ]
    cell, first, last, labels = (np.concatenate(p) for p in zip(*pieces, strict=True))
    return cell, first, last, labels


def _overlapped(events: xr.Dataset, windows: _Windows, cell: Array, start: Array, end: Array, label: Array) -> Array:
    """Return ns (step, rank) in which a transfer was in flight while the rank computed."""
    num_cells = windows.shape[0] * windows.shape[1]
    flying = np.flatnonzero(
        _in_flight(events) | (events.stream.values >= 0) & (events.category.values == Category.COLLECTIVE)
    )
    first = events.start_ns.values[flying]
    last = first + events.duration_ns.values[flying]
    busy = label == BREAKDOWN.index("compute")
    a = (windows.cell[flying], first, last)
    b = (cell[busy], start[busy], end[busy])
    both = (np.concatenate([a[0], b[0]]), np.concatenate([a[1], b[1]]), np.concatenate([a[2], b[2]]))
    lengths = [union_length(cells, left, right, num_cells) for cells, left, right in (a, b, both)]
    total = lengths[0] + lengths[1] - lengths[2]
    return np.asarray(total.reshape(windows.shape))
