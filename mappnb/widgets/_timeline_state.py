"""The scene of a timeline: what is loaded, which rows are shown in which order, which steps there are."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xarray as xr

from mappnb.datasets import layout_of
from mappnb.errors import MappnbError
from mappnb.layout import Layout
from mappnb.pyramid import SpanIndex
from mappnb.run import Run
from mappnb.widgets._loaded import classes_of
from mappnb.widgets._rows import Rows
from mappnb.widgets._search import find
from mappnb.widgets._steps import Steps
from mappnb.widgets._text import count_text
from mappnb.widgets.classes import CLASSES, class_of
from mappnb.widgets.lanes import GROUP_BY, Lanes
from mappnb.widgets.sources import DatasetSource, RunSource, Source

__all__ = ["Loaded", "Scene"]

Array = np.ndarray[Any, Any]
KEPT = 3
MOST_STEPS = 2000
MAX_T = float(2**62)


@dataclass(slots=True, eq=False)
class Loaded:
    """Events in memory, and what was made of them.

    Attributes
    ----------
    events : Dataset, dims (event,)
    lanes : Lanes
    classes : uint8 array, dims (event,)
        Colour class of each event.
    index : SpanIndex
        Over all events, by lane row.
    base : int
        Added to a position in ``events``, it is the id that the browser knows an event by.
    note : str
        What to say of it: an overview, for example.
    """

    events: xr.Dataset
    lanes: Lanes
    classes: Array
    index: SpanIndex
    base: int
    note: str = ""
    _found: dict[str, Array] = field(default_factory=dict)
    _without: dict[frozenset[int], SpanIndex] = field(default_factory=dict)

    def found(self, text: str) -> Array:
        """Return which events a search finds, bool (event,); the last one is kept."""
        if text not in self._found:
            self._found = {text: find(self.events, text)}
        return self._found[text]

    def without(self, hidden: frozenset[int]) -> SpanIndex:
        """Return the index of the events that are not of the hidden classes; positions stay those of ``events``."""
        if not hidden:
            return self.index
        if hidden not in self._without:
            keep = np.flatnonzero(~np.isin(self.classes, list(hidden)))
            self._without = {hidden: _part(self, keep)}
        return self._without[hidden]


def _part(loaded: Loaded, keep: Array) -> SpanIndex:
    """Index some of the events."""
    events, lanes = loaded.events, loaded.lanes
    start, duration = events["start_ns"].values[keep], events["duration_ns"].values[keep]
    index = SpanIndex.build(lanes.row[keep], start, duration, loaded.classes[keep], num_rows=lanes.num_rows)
    return index.renamed(keep)


class Scene:
    """What a timeline shows, and how it is arranged. Knows nothing of messages."""

    def __init__(
        self,
        source: Source,
        *,
        layout: Layout,
        caller: str,
        ranks: list[int] | None,
        group_by: str,
        hidden: frozenset[int],
    ) -> None:
        self.source, self.layout, self.caller = source, layout, caller
        self.ranks, self.group_by, self.hidden = ranks, group_by, hidden
        self.extent_ns = source.extent_ns
        self.origin_ns = self.extent_ns[0]
        self._kept: deque[Loaded] = deque(maxlen=KEPT)
        self._raw: Any = None
        self._rows: Rows | None = None
        self._next_id = 0
        self.steps = Steps.of(source)
        self._check_ranks()

    @classmethod
    def of(cls, run: Run | xr.Dataset, *, ranks: list[int] | None, group_by: str, hidden: frozenset[int]) -> Scene:
        """Return the scene of a run or of an events dataset."""
        if isinstance(run, Run):
            source: Source = RunSource(run)
            return cls(source, layout=run.layout, caller="run.", ranks=ranks, group_by=group_by, hidden=hidden)
        if isinstance(run, xr.Dataset):
            source = DatasetSource(run)
            return cls(
                source, layout=layout_of(run), caller="events.mapp.", ranks=ranks, group_by=group_by, hidden=hidden
            )
        raise MappnbError(
            f"a timeline needs a Run or an events Dataset, not {type(run).__name__}: mappnb.attach(run_dir)"
        )

    def _check_ranks(self) -> None:
        known = set(self.source.ranks)
        if self.ranks is not None and (unknown := [r for r in self.ranks if r not in known]):
            raise MappnbError(f"no rank {unknown[0]} in the events; there are {_listed(sorted(known))}")

    # --------------------------------------------------------------------------------------------------------- time
    def ns(self, t: float) -> int:
        """Return a time of the browser on the run clock, ns."""
        return self.origin_ns + round(min(max(t, -MAX_T), MAX_T))

    def t(self, ns: int) -> float:
        """Return a time on the run clock as the browser has it: ns since the origin."""
        return float(ns - self.origin_ns)

    def t_of(self, seconds: float | None, default: float) -> float:
        """Return a time in seconds on the run clock as the browser has it."""
        return default if seconds is None else float(round(seconds * 1e9) - self.origin_ns)

    @property
    def extent(self) -> tuple[float, float]:
        """First start and last end, as the browser has them."""
        a, b = self.extent_ns
        return self.t(a), max(self.t(b), self.t(a) + 1.0)

    def first_view(self, *, time: slice | None, step: int | None) -> tuple[float, float]:
        """Return what to look at first: a window, a step, or by default the last whole step of a run and all of a dataset."""
        if time is not None and step is not None:
            raise MappnbError("give time or step, not both")
        if time is not None:
            t0, t1 = self.t_of(time.start, self.extent[0]), self.t_of(time.stop, self.extent[1])
            if not t1 > t0:
                raise MappnbError(f"time {time.start} to {time.stop}: the window is empty; give slice(start_s, end_s)")
            return t0, t1
        if step is None and not isinstance(self.source, RunSource):
            return self.extent
        span = self.steps.last_whole() if step is None else self.steps.numbered(step)
        return self.extent if span is None else self._around(span)

    def _around(self, span: tuple[int, int]) -> tuple[float, float]:
        """Return a step with a little room on both sides."""
        room = (span[1] - span[0]) * 0.02 + 1
        return self.t(span[0]) - room, self.t(span[1]) + room

    def neighbour_step(self, go: str, at: float) -> tuple[float, float, str]:
        """Return (t0, t1, text) of the step to go to."""
        found = self.steps.go(go, self.ns(at))
        if found is None:
            raise MappnbError("the events tell of no step")
        number, start, end, said = found
        return (*self._around((start, end)), f"step {number}{said}")

    def step_lengths(self) -> dict[int, int]:
        """Return the length of each step, ns."""
        return self.steps.lengths()

    # ------------------------------------------------------------------------------------------------------- loading
    def loaded(self, t0: float, t1: float) -> Loaded:
        """Return the events of a window, and more where they are there already."""
        raw = self.source.window(self.ns(t0), self.ns(t1))
        if raw is not self._raw:
            kept = Loaded(raw.events, raw.lanes, raw.classes, raw.index, self._next_id, raw.note)
            self._next_id += int(raw.events.sizes.get("event", 0))
            self._kept.append(kept)
            self._raw, self._rows = raw, None
        return self._kept[-1]

    def event(self, ident: int) -> tuple[Loaded, int]:
        """Return (where, position) of the event that the browser knows by ``ident``."""
        for loaded in reversed(self._kept):
            if loaded.base <= ident < loaded.base + int(loaded.events.sizes.get("event", 0)):
                return loaded, ident - loaded.base
        raise MappnbError("this event is no longer loaded: the view has moved on; select it again")

    def hits(self, loaded: Loaded, text: str) -> Array:
        """Return the positions of the events found on the rows shown, in order of start."""
        if not text:
            return np.empty(0, np.int64)
        at = np.flatnonzero(
            loaded.found(text) & (self.display_rows(loaded) >= 0) & ~np.isin(loaded.classes, list(self.hidden))
        )
        return at[np.argsort(loaded.events["start_ns"].values[at], kind="stable")]

    def events_in(self, t0: float, t1: float, row0: int, row1: int) -> tuple[Loaded, Array]:
        """Return (where, positions) of the events of a box of time and display rows, in order of start."""
        loaded = self.loaded(t0, t1)
        a, b = self.ns(t0), self.ns(t1)
        start, row = loaded.events["start_ns"].values, self.display_rows(loaded)
        inside = (start < b) & (start + np.maximum(loaded.events["duration_ns"].values, 1) > a)
        inside &= (row >= row0) & (row < row1)
        if self.hidden:
            inside &= ~np.isin(loaded.classes, list(self.hidden))
        at = np.flatnonzero(inside)
        return loaded, at[np.argsort(start[at], kind="stable")]

    def inside(self, t0: float, t1: float, ranks: list[int]) -> xr.Dataset:
        """Return the events of a box of time and ranks, in order of start."""
        loaded, at = self.events_in(t0, t1, 0, self.num_rows)
        at = at[np.isin(loaded.events["rank"].values[at], ranks)]
        if isinstance(self.source, RunSource) and not loaded.events["op"].variable._in_memory:
            return self._read(t0, t1, ranks)
        return loaded.events.isel(event=at)

    def _read(self, t0: float, t1: float, ranks: list[int]) -> xr.Dataset:
        """Read a box of a run whose columns are not all in memory."""
        assert isinstance(self.source, RunSource)
        events = self.source.run.sel(time=slice(self.ns(t0) / 1e9, self.ns(t1) / 1e9), rank=ranks)
        keep = ~np.isin(classes_of(events, class_of), list(self.hidden))
        return events.isel(event=np.flatnonzero(keep))

    # ---------------------------------------------------------------------------------------------------------- rows
    @property
    def rows(self) -> Rows:
        """How the lanes are laid out now."""
        if self._rows is None:
            if not self._kept:
                self.loaded(*self.first_view(time=None, step=None))
            self._rows = Rows.of(
                self._kept[-1].lanes,
                layout=self.layout,
                group_by=self.group_by,
                ranks=self.ranks,
                hosts=self.source.hosts,
            )
        return self._rows

    @property
    def num_rows(self) -> int:
        """Number of display rows."""
        return len(self.rows.lane)

    def display_rows(self, loaded: Loaded) -> Array:
        """Return the display row of each event; -1 where it is not shown."""
        place: Array = self.rows.place
        return place[loaded.lanes.row] if loaded.lanes.num_rows == len(place) else np.full(len(loaded.lanes.row), -1)

    def row_of(self, loaded: Loaded, event: int) -> int:
        """Return the display row of one event."""
        return int(self.display_rows(loaded)[event])

    def shown_ranks(self) -> list[int]:
        """Return the ranks shown, from the top."""
        return [b.rank for b in self.rows.blocks]

    def ranks_of_rows(self, row0: int, row1: int) -> list[int]:
        """Return the ranks that some display rows belong to."""
        return [b.rank for b in self.rows.blocks if b.first < row1 and b.first + b.num_rows > row0]

    def rows_of_ranks(self, ranks: tuple[int, ...]) -> list[int] | None:
        """Return first and last display row of some ranks."""
        mine = [b for b in self.rows.blocks if b.rank in ranks]
        return [min(b.first for b in mine), max(b.first + b.num_rows - 1 for b in mine)] if mine else None

    def place(self, rank: int) -> str:
        """Return a rank with its coordinates, in words."""
        return next((b.label for b in self.rows.blocks if b.rank == rank), f"rank {rank}")

    def arrange(self, *, group_by: str, hidden: frozenset[int]) -> None:
        """Change grouping and hidden classes."""
        self.group_by, self.hidden, self._rows = group_by, hidden, None

    # ---------------------------------------------------------------------------------------------------------- words
    def meta(self) -> dict[str, Any]:
        """Return what the browser needs to know of the scene."""
        rows = self.rows
        lanes = self._kept[-1].lanes
        empty = "" if self.source.num_events else "There is nothing to show: no event has been recorded."
        return {
            "extent": list(self.extent),
            "num_events": self.source.num_events,
            "origin_s": self.origin_ns / 1e9,
            "rows": [{"label": lanes.label[i], "depth": int(lanes.depth[i])} for i in rows.lane.tolist()],
            "blocks": [
                {"label": b.label, "title": b.label, "row0": b.first, "rows": b.num_rows, "group": b.group}
                for b in rows.blocks
            ],
            "groups": [{"label": g.label, "row0": g.first, "rows": g.num_rows} for g in rows.groups if g.label],
            "categories": [{"name": c.name, "light": c.light, "dark": c.dark, "hatch": c.hatch} for c in CLASSES],
            "steps": self.steps.told(self.origin_ns, MOST_STEPS),
            "group_by": self.group_by,
            "group_options": [g for g in GROUP_BY if g in ("rank", "host") or getattr(self.layout, g, 1) > 1],
            "hidden": [CLASSES[i].name for i in sorted(self.hidden)],
            "present": [CLASSES[i].name for i in np.unique(self._kept[-1].classes).tolist()],
            "note": self._kept[-1].note,
            "empty": empty,
        }

    def describe(self) -> str:
        """Return the scene in one stable line."""
        ranks, steps = count_text(len(self.source.ranks), "rank"), count_text(len(self.steps), "step")
        return f"Timeline({ranks}, {steps}, {count_text(self.source.num_events, 'event')})"

    # --------------------------------------------------------------------------------------------------------- changes
    def refresh(self, visible: tuple[float, float]) -> bool:
        """Look again at a run that grows; True if there is more."""
        if not self.source.refresh():
            return False
        self.extent_ns = (min(self.origin_ns, self.source.extent_ns[0]), self.source.extent_ns[1])
        self.steps, self._raw = Steps.of(self.source), None
        self.loaded(*visible)
        return True

    def release(self) -> None:
        """Let go of the data."""
        self._kept.clear()
        self._raw = self._rows = None
        self.source.close()


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
