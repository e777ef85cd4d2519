"""What is selected in a timeline: events, and the window that was drawn around them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from mappnb.analysis._intervals import union_length
from mappnb.widgets._text import duration_text, time_text

__all__ = ["Selection", "event_keys", "find_keys"]

Array = np.ndarray[Any, Any]
EventKey = tuple[int, int, int]


@dataclass(frozen=True, slots=True, eq=False)
class Selection:
    """Selected events of a view.

    Attributes
    ----------
    events : Dataset, dims (event,)
        The selected events, with every column of the events table, in order of start.
    time : slice or None
        Of a box that was drawn: seconds on the run clock. None for events that were clicked.
    ranks : tuple of int
        Ranks that the box touched, or those of the events.
    """

    events: xr.Dataset
    time: slice | None = None
    ranks: tuple[int, ...] = ()

    def __len__(self) -> int:
        return int(self.events.sizes.get("event", 0))

    def __bool__(self) -> bool:
        return len(self) > 0

    @property
    def wall_s(self) -> float:
        """Seconds from the first start to the last end."""
        if not len(self):
            return 0.0
        start, end = _bounds(self.events)
        return float(end.max() - start.min()) / 1e9

    @property
    def busy_s(self) -> float:
        """Seconds covered by the events, summed over ranks; what overlaps within a rank counts once."""
        ranks, of = np.unique(self.events["rank"].values, return_inverse=True)
        return float(union_length(of, *_bounds(self.events), len(ranks)).sum()) / 1e9

    def to_dataframe(self) -> pd.DataFrame:
        """Return one row per event: every column of the events table, and ``start_s`` and ``duration_s``."""
        frame = pd.DataFrame({str(k): v.values for k, v in self.events.variables.items() if v.dims == ("event",)})
        frame.insert(0, "start_s", frame["start_ns"] / 1e9 if len(frame) else [])
        frame.insert(1, "duration_s", frame["duration_ns"] / 1e9 if len(frame) else [])
        return frame

    def summary(self) -> str:
        """Return the selection in one line, as the view shows it."""
        if not len(self):
            return "nothing selected"
        ranks = f", {len(self.ranks)} ranks" if len(self.ranks) > 1 else ""
        busy, wall = duration_text(self.busy_s * 1e9), duration_text(self.wall_s * 1e9)
        return f"{len(self):,} event{'s' if len(self) > 1 else ''}{ranks}, {busy} busy, {wall} from first to last"

    def __repr__(self) -> str:
        where = f", {time_text(self.time.start)} to {time_text(self.time.stop)}" if self.time is not None else ""
        return f"Selection({len(self)} events, {len(self.ranks)} ranks{where})"

    def _repr_html_(self) -> str:
        shown = ["start_s", "duration_s", "rank", "category", "op", "name", "step", "microbatch", "bytes"]
        table: str = self.to_dataframe()[shown].head(12).to_html(index=False, escape=True)
        left = len(self) - 12
        return f"<div>{self.summary()}{table}{f'<div>and {left:,} more</div>' if left > 0 else ''}</div>"


def _bounds(events: xr.Dataset) -> tuple[Array, Array]:
    start = events["start_ns"].values.astype(np.int64)
    return start, start + np.maximum(events["duration_ns"].values.astype(np.int64), 0)


def event_keys(events: xr.Dataset, index: Array) -> list[EventKey]:
    """Return what names events in code: (rank, start_ns, depth) each."""
    rank, start, depth = (events[n].values[index].tolist() for n in ("rank", "start_ns", "depth"))
    return [(int(r), int(s), int(d)) for r, s, d in zip(rank, start, depth, strict=True)]


def find_keys(events: xr.Dataset, keys: list[EventKey]) -> Array:
    """Return the positions of the events that :func:`event_keys` named; those that are not there are left out."""
    at = np.flatnonzero(np.isin(events["start_ns"].values, [k[1] for k in keys]))
    place = dict(zip(reversed(event_keys(events, at)), reversed(at.tolist()), strict=True))  # of equal ones the first
    return np.array([place[key] for key in keys if key in place], np.int64)
