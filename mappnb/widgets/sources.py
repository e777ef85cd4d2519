"""Where a timeline takes its events from: a dataset in memory, or a run that may be larger than memory and still be growing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

import numpy as np
import xarray as xr

from mappnb.datasets import layout_of
from mappnb.errors import MappnbError
from mappnb.run import Run
from mappnb.schema import EVENTS, SITE_FIELDS, check
from mappnb.terms import EVENT
from mappnb.widgets._loaded import Classify, Loaded, Rows, indexed, step_spans
from mappnb.widgets._snapshot import Snapshot
from mappnb.widgets.classes import class_of
from mappnb.widgets.lanes import place

__all__ = [
    "BACKGROUND_EVENTS",
    "FULL_EVENTS",
    "Classify",
    "DatasetSource",
    "Loaded",
    "RunSource",
    "Source",
]

Array = np.ndarray[Any, Any]
FULL_EVENTS = 3_000_000
"""A run of at most so many events is loaded whole when it is first looked at."""

BACKGROUND_EVENTS = 20_000_000
"""A run of at most so many is loaded whole behind the scenes; of a larger one only windows are."""

WINDOW_EVENTS = 600_000
"""A window of a larger run that is read by itself holds at most so many."""

# how much more of a window's width is read on each side, where the events near are at most WINDOW_EVENTS over the number beside it
_MARGINS = ((1.0, 4), (0.25, 2), (0.0, 1))
# columns of a large run that stay in memory, beside the numbers of its sites
_KEPT = ("rank", "start_ns", "duration_ns", "depth", "flags", "step", "microbatch")
_NOTE = "too many events in this window: one span for each step is shown; zoom in to see the events"
_YIELD_S = 0.02
_SHARE = 0.1  # of the time is spent on reading a growing run again
_CHEAP_S = 0.2  # but what takes less is done at once


class Source(Protocol):
    """What a timeline asks for its events."""

    @property
    def extent_ns(self) -> tuple[int, int]:
        """First start and last end on the run clock, ns."""

    @property
    def num_events(self) -> int:
        """Number of events, loaded or not."""

    @property
    def attrs(self) -> Mapping[str, Any]:
        """Attributes of the events: layout, groups, clock model."""

    @property
    def ranks(self) -> list[int]:
        """Global ranks that have events, in order."""

    @property
    def hosts(self) -> Mapping[int, str]:
        """Host of each rank, where it is known."""

    def steps(self) -> tuple[Array, Array, Array]:
        """Return number, first start and last end (ns, run clock) of the steps in order of start, int64 arrays, dims (step,)."""

    def window(self, t0_ns: int, t1_ns: int) -> Loaded:
        """Return events of which ``[t0, t1)`` is a part."""

    def arrange(self, *, group_by: str | None = None, threads: str | None = None) -> None:
        """Order the display rows in another way, from the next window on."""

    def refresh(self) -> bool:
        """Look for new events; returns whether there are any."""

    def close(self) -> None:
        """Let go of everything."""


class DatasetSource:
    """Events in memory: simulated, imported, selected.

    Parameters
    ----------
    events : Dataset, dims (event,)
        Of the schema ``EVENTS``.
    group_by, threads : str
        As of :func:`mappnb.widgets.lanes.lanes`.
    classify : callable
        Class of each event, its category in the span index; by default its colour.

    Raises
    ------
    SchemaError
        If a variable is missing.
    """

    def __init__(
        self, events: xr.Dataset, *, group_by: str = "rank", threads: str = "split", classify: Classify = class_of
    ) -> None:
        check(events, EVENTS, name="events")
        self.events = events
        self._rows = Rows(layout_of(events) if "layout" in events.attrs else None, group_by, threads, classify)
        self._all: Loaded | None = self._rows.load(events, *self._extent())

    def _extent(self) -> tuple[int, int]:
        start = self.events.start_ns.values
        end = start + self.events.duration_ns.values
        return (int(start.min()), int(end.max())) if len(start) else (0, 0)

    @property
    def extent_ns(self) -> tuple[int, int]:
        """First start and last end, ns; (0, 0) without events."""
        return self._extent()

    @property
    def num_events(self) -> int:
        """Number of events."""
        return int(self.events.sizes[EVENT])

    @property
    def attrs(self) -> Mapping[str, Any]:
        """Attributes of the dataset."""
        return dict(self.events.attrs)

    @property
    def ranks(self) -> list[int]:
        """Global ranks that have events, in order."""
        return [int(r) for r in np.unique(self.events["rank"].values)]

    @property
    def hosts(self) -> Mapping[int, str]:
        """Nothing: a dataset does not tell of hosts."""
        return {}

    def steps(self) -> tuple[Array, Array, Array]:
        """Return number, first start and last end (ns) of the steps in order of start, int64 arrays, dims (step,)."""
        step, inc = self.events["step"].values.astype(np.int64), self.events.incarnation.values.astype(np.int64)
        start = self.events.start_ns.values
        inside = step >= 0
        numbers, of = np.unique((np.maximum(inc, 0) << 32 | step)[inside], return_inverse=True)
        first, last = np.full(len(numbers), 2**62), np.full(len(numbers), -(2**62))
        np.minimum.at(first, of, start[inside])
        np.maximum.at(last, of, (start + self.events.duration_ns.values)[inside])
        by = np.argsort(first, kind="stable")
        return (numbers & 0xFFFFFFFF)[by], first[by], last[by]

    def window(self, t0_ns: int, t1_ns: int) -> Loaded:
        """Return all events."""
        if self._all is None:
            self._all = self._rows.load(self.events, *self._extent())
        return self._all

    def arrange(self, *, group_by: str | None = None, threads: str | None = None) -> None:
        """Order the display rows in another way."""
        if self._rows.arrange(group_by, threads):
            self._all = None

    def refresh(self) -> bool:
        """Return False: a dataset does not grow."""
        return False

    def close(self) -> None:
        """Let go of the index."""
        self._all = None


class RunSource:
    """Events of a run: all of them, or those around the window asked for where there are more than memory should hold.

    Parameters
    ----------
    run : Run
        Recorded, or being recorded.
    group_by, threads, classify
        As of :class:`DatasetSource`.
    on_ready : callable, optional
        Called without arguments, in another thread, when all events of a large run have been loaded.

    Notes
    -----
    ``failed`` holds the error that ended loading in the background, if one did. Up to FULL_EVENTS events all are loaded at once; up to
    BACKGROUND_EVENTS a thread loads them rank by rank, and until then, as in still larger runs, a window is read with a margin. Where it
    alone holds more than WINDOW_EVENTS, the steps are shown instead.
    """

    def __init__(
        self,
        run: Run,
        *,
        group_by: str = "rank",
        threads: str = "split",
        classify: Classify = class_of,
        on_ready: Callable[[], None] | None = None,
    ) -> None:
        self.run, self._on_ready = run, on_ready
        self._rows = Rows(run.layout, group_by, threads, classify)
        self._lock = threading.RLock()
        self._all: Loaded | None = None
        self._near: list[Loaded] = []  # windows read lately
        self._overview: Loaded | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._next_s = 0.0
        self.failed: MappnbError | None = None
        self._look(Snapshot(run))

    def _look(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self._rows.hosts, self._rows.names, self._rows.layout = snapshot.hosts(), snapshot.threads(), self.run.layout
        self._near, self._overview = [], None

    @property
    def extent_ns(self) -> tuple[int, int]:
        """First start and last end on the run clock, ns; (0, 0) without events."""
        return self._snapshot.extent_ns

    @property
    def num_events(self) -> int:
        """Number of events of the run."""
        return self._snapshot.num_events

    @property
    def attrs(self) -> Mapping[str, Any]:
        """Attributes of the run's events."""
        return self._snapshot.attrs

    @property
    def ranks(self) -> list[int]:
        """Global ranks that have events, in order."""
        return sorted({rank for rank, _ in self._snapshot.ranks()})

    @property
    def hosts(self) -> Mapping[int, str]:
        """Host of each rank, where it is known."""
        return self._rows.hosts

    def steps(self) -> tuple[Array, Array, Array]:
        """Return number, first start and last end (ns, run clock) of the steps in order of start, int64 arrays, dims (step,)."""
        steps = self.run.steps
        start, end = steps.start_ns.values, steps.end_ns.values
        first = np.where(start >= 0, start, 2**62).min(axis=1, initial=2**62)
        last = np.maximum(end.max(axis=1, initial=-1), first)  # one that has not ended is empty
        by = np.argsort(first, kind="stable")
        return steps["step"].values.astype(np.int64)[by], first[by], last[by]

    @property
    def ready(self) -> bool:
        """True when all events are loaded."""
        return self._all is not None

    def window(self, t0_ns: int, t1_ns: int) -> Loaded:
        """Return events of which ``[t0, t1)`` is a part.

        Raises
        ------
        MappnbError
            If a segment cannot be read; the message names it and the cure.
        """
        with self._lock:
            if self._all is None and self.num_events <= FULL_EVENTS:
                began = time.monotonic()
                self._all = self._whole(self._snapshot)
                self._cost(time.monotonic() - began)
            if self._all is not None and (self._all.t1_ns >= min(t1_ns, self.extent_ns[1])):
                return self._all
            self._load_behind()
            near = next((v for v in self._near if v.t0_ns <= t0_ns and v.t1_ns >= t1_ns), None)
            found = near or self._part(t0_ns, t1_ns)
            if found is None:
                self._overview = self._rows.current(self._overview or self._steps())
                return self._overview
            found = self._rows.current(found)
            self._near = [found, *(v for v in self._near if v is not near)][:2]
            return found

    def arrange(self, *, group_by: str | None = None, threads: str | None = None) -> None:
        """Order the display rows in another way, from the next window on."""
        with self._lock:
            if self._rows.arrange(group_by, threads):
                self._near, self._overview = [], None
                if self._all is not None:
                    whole = self._all
                    self._all = self._rows.load(whole.events, whole.t0_ns, whole.t1_ns, classes=whole.classes)

    def refresh(self) -> bool:
        """Look for new events; returns whether there are any. A run that takes long to read is read at most a tenth of the time."""
        if time.monotonic() < self._next_s:
            return False
        with self._lock:
            snapshot = Snapshot(self.run.refresh())
            if snapshot.signature == self._snapshot.signature:
                return False
            self._look(snapshot)
            if self._all is not None and (
                self.num_events <= FULL_EVENTS or self.num_events > 1.1 * self._all.index.num_events
            ):
                self._all = None
            return True

    def close(self) -> None:
        """Stop loading, let go of everything."""
        self._stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self._all, self._near, self._overview = None, [], None

    def _cost(self, seconds: float) -> None:
        if seconds > _CHEAP_S:
            self._next_s = time.monotonic() + seconds * (1 - _SHARE) / _SHARE

    # ------------------------------------------------------------------------------------------------- whole runs
    def _whole(self, snapshot: Snapshot) -> Loaded:
        extent = snapshot.extent_ns
        return snapshot.reading(
            lambda: self._rows.load(snapshot.events, *extent, classes=snapshot.classes(self._rows.classify))
        )

    def _load_behind(self) -> None:
        idle = self._thread is None or not self._thread.is_alive()
        if self._all is None and idle and self.failed is None and self.num_events <= BACKGROUND_EVENTS:
            self._thread = threading.Thread(
                target=self._behind, args=(self._snapshot,), daemon=True, name="mappnb-timeline"
            )
            self._thread.start()

    def _behind(self, snapshot: Snapshot) -> None:
        try:
            loaded = snapshot.reading(lambda: self._by_rank(snapshot))
        except MappnbError as err:
            self.failed = err  # windows go on being read; those that hold the segment say so
            return
        if loaded is not None and self._on_ready is not None:
            self._on_ready()

    def _by_rank(self, snapshot: Snapshot) -> Loaded | None:
        """Load all events, one rank after the other; all columns but a few are in memory for one rank at a time."""
        threads, placed, classes = self._rows.threads, [], []
        sites = np.empty(snapshot.num_events, np.int32)
        kept = {v: np.empty(snapshot.num_events, EVENTS[v].numpy_dtype) for v in _KEPT}
        for _, part in snapshot.ranks():
            if self._stop.is_set():
                return None
            sites[part] = snapshot.sites(part)
            events = snapshot.events.isel(event=part)
            events = events.assign(category=snapshot.coded("category", sites[part]))
            placed.append(place(events, threads=threads))
            classes.append(snapshot.classes(self._rows.classify, part))
            for name, column in kept.items():
                column[part] = events[name].values
            time.sleep(_YIELD_S)  # whoever looks at a window meanwhile comes first
        of_event = np.concatenate([np.empty(0, np.uint8), *classes])
        events = snapshot.events.assign({v: (EVENT, column) for v, column in kept.items()})
        events = events.assign({f: snapshot.coded(f, sites) for f in SITE_FIELDS})
        while not self._stop.is_set():
            with self._lock:
                if threads != self._rows.threads:
                    return None  # other rows were asked for meanwhile: the next window begins anew
                lanes = self._rows.lanes(placed)
            loaded = indexed(events, lanes, of_event, snapshot.extent_ns)
            with self._lock:
                known = self._rows.known
                if known is not None and known.keys.equals(lanes.keys):  # else a row was added meanwhile
                    self._all, self._near, self._overview = loaded, [], None
                    return loaded
        return None

    # ---------------------------------------------------------------------------------------------------- windows
    def _part(self, t0_ns: int, t1_ns: int) -> Loaded | None:
        """Read a window and some of what is around it; None if it holds too much."""
        for margin, room in _MARGINS:
            more = int(margin * (t1_ns - t0_ns))
            a, b = t0_ns - more, t1_ns + more
            if self._snapshot.num_near(a, b) <= WINDOW_EVENTS // room:
                seconds = slice(a / 1e9 - 1e-6, b / 1e9 + 1e-6)
                events = self._snapshot.reading(partial(self.run.sel, time=seconds))
                return self._rows.load(events, a, b)
        return None

    def _steps(self) -> Loaded:
        """Return one span for each rank and step."""
        events = step_spans(self.run.steps, self.extent_ns[1]).assign_attrs(self.attrs)
        return self._rows.load(events, *self.extent_ns, note=_NOTE)
