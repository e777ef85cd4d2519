"""The events that a drill-down reads: some steps, some ranks, never more than a budget."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import xarray as xr

from mappnb.analysis._input import events_of
from mappnb.run import Run

__all__ = ["Source", "longest_stretch"]

Array = np.ndarray[Any, Any]


class Source:
    """Reads events of a run or dataset.

    Parameters
    ----------
    run : Run or Dataset, dims (event,)
        Events of all ranks.
    work : Dataset
        Self-time table of them, that tells how many events a step has.
    """

    def __init__(self, run: Run | xr.Dataset, work: xr.Dataset) -> None:
        self.run = run
        self._count = work["count"].values.sum(2) + work["calls"].values  # (step, rank)
        self._step, self._rank = work["step"].values, work["rank"].values

    def events_of_step(self, position: int) -> int:
        """Return how many events a step has on all ranks; the position is a row of the table."""
        return int(self._count[position].sum())

    def within(self, positions: Array, budget: int, ranks: Iterable[int] | None = None) -> Array:
        """Return the first of these steps, as many as the budget of events allows; positions are rows of the table."""
        columns = slice(None) if ranks is None else np.flatnonzero(np.isin(self._rank, list(ranks)))
        total = np.cumsum(self._count[positions][:, columns].sum(1))
        return positions[: max(1, int(np.searchsorted(total, budget, "right")))]

    def events(self, positions: Array, ranks: Iterable[int] | None = None) -> xr.Dataset:
        """Return the events from the first to the last of these steps, in memory."""
        window = slice(int(self._step[positions[0]]), int(self._step[positions[-1]]))
        if isinstance(self.run, Run):
            return self.run.sel(step=window, rank=None if ranks is None else list(ranks))
        events = events_of(self.run, window)
        if ranks is None:
            return events
        return events.isel(event=np.flatnonzero(np.isin(events["rank"].values, list(ranks))))


def longest_stretch(positions: Array) -> Array:
    """Return the longest run of consecutive numbers among sorted ones."""
    if not len(positions):
        return positions
    cuts = np.flatnonzero(np.diff(positions) > 1) + 1
    return max(np.split(positions, cuts), key=len)
