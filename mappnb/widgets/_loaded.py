"""Events made ready to be drawn: display rows, index, categories."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from mappnb.layout import Layout
from mappnb.pyramid import SpanIndex
from mappnb.schema import EVENTS, empty
from mappnb.terms import EVENT, Category, Flag, Op, Phase
from mappnb.widgets.lanes import Lanes, Placed, arranged, place

__all__ = ["Classify", "Loaded", "Rows", "classes_of", "indexed", "step_spans"]

Array = np.ndarray[Any, Any]
Classify = Callable[[xr.Dataset], Array]
"""Gives each event of a dataset, dims (event,), its class in the span index: uint8, below 255; looks at category, op and phase only."""

_OF_CLASS = ("category", "op", "phase")


def classes_of(events: xr.Dataset, classify: Classify) -> Array:
    """Return the class of each event; only one event of each category, op and phase is looked at."""
    kind = np.zeros(events.sizes[EVENT], np.int64)
    for name in _OF_CLASS:
        code, found = pd.factorize(events[name].values)
        kind = kind * max(1, len(found)) + code
    code, found = pd.factorize(kind)
    first = np.zeros(len(found), np.int64)
    first[code[::-1]] = np.arange(len(code))[::-1]
    return np.asarray(classify(events[list(_OF_CLASS)].isel(event=first)), np.uint8)[code]


@dataclass(frozen=True, slots=True)
class Loaded:
    """Events at hand.

    Attributes
    ----------
    events : Dataset, dims (event,)
        Event i of ``index`` and ``lanes``. Columns that drawing does not need may be read when they are looked at.
    index : SpanIndex
        Over the rows of ``lanes``.
    lanes : Lanes
        Display rows.
    classes : uint8 array, dims (event,)
        Category of each event in ``index``.
    t0_ns, t1_ns : int
        The interval whose events these are, run clock.
    complete : bool
        False where events stand for more than themselves: one span for each step, since the window holds too many.
    note : str
        What to tell the reader; empty where all is shown.
    """

    events: xr.Dataset
    index: SpanIndex
    lanes: Lanes
    classes: Array
    t0_ns: int
    t1_ns: int
    complete: bool = True
    note: str = ""


class Rows:
    """Turns events into what is drawn; keeps the display rows that were there."""

    def __init__(self, layout: Layout | None, group_by: str, threads: str, classify: Classify) -> None:
        self.layout, self.group_by, self.threads, self.classify = layout, group_by, threads, classify
        self.hosts: Mapping[int, str] = {}
        self.names: Mapping[tuple[int, int], str] = {}
        self.known: Lanes | None = None

    def arrange(self, group_by: str | None, threads: str | None) -> bool:
        """Take over options; returns whether one is new."""
        before = self.group_by, self.threads
        arranged([], layout=self.layout, group_by=group_by or self.group_by)  # refuses what is none
        self.group_by, self.threads = group_by or self.group_by, threads or self.threads
        if self.threads != before[1]:
            self.known = None
        return before != (self.group_by, self.threads)

    def lanes(self, placed: list[Placed]) -> Lanes:
        """Return the rows of placed events, and those that were there before."""
        self.known = arranged(
            placed, layout=self.layout, group_by=self.group_by, hosts=self.hosts, names=self.names, known=self.known
        )
        return self.known

    def load(
        self, events: xr.Dataset, t0_ns: int, t1_ns: int, *, classes: Array | None = None, note: str = ""
    ) -> Loaded:
        """Return events ready to be drawn; with a note, they stand for more than themselves."""
        lanes = self.lanes([place(events, threads=self.threads)])
        return indexed(
            events, lanes, classes_of(events, self.classify) if classes is None else classes, (t0_ns, t1_ns), note
        )

    def current(self, loaded: Loaded) -> Loaded:
        """Return the same events with the rows that came to be known since."""
        if self.known is None or loaded.lanes.num_rows == self.known.num_rows:
            return loaded
        return self.load(loaded.events, loaded.t0_ns, loaded.t1_ns, classes=loaded.classes, note=loaded.note)


def indexed(events: xr.Dataset, lanes: Lanes, classes: Array, covers: tuple[int, int], note: str = "") -> Loaded:
    """Return events whose rows and classes are known, with their index."""
    start, duration = events.start_ns.values, events.duration_ns.values
    index = SpanIndex.build(lanes.row, start, duration, classes, num_rows=lanes.num_rows)
    return Loaded(events, index, lanes, classes, *covers, not note, note)


def step_spans(steps: xr.Dataset, now_ns: int) -> xr.Dataset:
    """Return one span for each rank and step of a step table, as events, dims (event,); one that has not ended lasts until ``now_ns``."""
    step, rank = np.nonzero(steps.start_ns.values >= 0)
    data = empty(EVENTS, {EVENT: len(step)})
    start, end = (steps[v].values[step, rank] for v in ("start_ns", "end_ns"))
    names = np.array([f"step {s}" for s in steps["step"].values.tolist()] or [""], object)
    data |= {
        "incarnation": steps.incarnation.values[step].astype(np.int32),
        "rank": steps["rank"].values[rank].astype(np.int32),
        "step": steps["step"].values[step].astype(np.int32),
        "start_ns": start,
        "duration_ns": np.maximum(np.where(end >= 0, end, now_ns) - start, 0),
        "name": names[step],
        "flags": np.where(end >= 0, 0, Flag.OPEN).astype(np.uint16),
    }
    for name in ("thread", "depth"):
        data[name][:] = 0
    for name, word in (("category", Category.MARK), ("op", Op.ITERATION), ("phase", Phase.NONE)):
        data[name][:] = str(word)
    return xr.Dataset({k: (v.dims, data[k]) for k, v in EVENTS.items()})
