"""The answer to one look at a timeline: spans and grid of a window, in arrays small enough for one message."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mappnb.analysis._intervals import union_length
from mappnb.pyramid import Window
from mappnb.terms import Flag
from mappnb.widgets._messages import Answer
from mappnb.widgets._text import duration_text
from mappnb.widgets._timeline_text import labels_of
from mappnb.widgets.classes import CLASSES

if TYPE_CHECKING:
    from mappnb.widgets._timeline_state import Loaded, Scene

__all__ = ["LABEL_PX", "Marks", "look", "range_fields", "window_answer"]

Array = np.ndarray[Any, Any]

MAX_CELLS = 180_000
"""Cells of a grid: two bytes each. With the spans the message stays below 500 kB."""

MAX_SPANS = 6_000
MARGIN = 1.0
LABEL_PX = 30
NO_LABEL = 65535
MATCH, SELECTED, OPEN, FAILED, CLIPPED = 1, 2, 4, 8, 16


@dataclass(frozen=True, slots=True)
class Marks:
    """What is marked: text searched for, and ids of selected events."""

    search: str = ""
    selected: Sequence[int] = ()


def look(
    scene: Scene,
    t0: float,
    t1: float,
    *,
    pixels: int,
    rows: tuple[int, int],
    margin: float = 0.0,
    max_spans: int = MAX_SPANS,
) -> tuple[Loaded, Window]:
    """Return what to draw of display rows ``rows`` in ``t0 .. t1`` (ns since the origin), and ``margin`` times as much on each side."""
    reach = (t1 - t0) * margin
    a, b = scene.ns(t0 - reach), scene.ns(t1 + reach)
    columns = round(pixels * (b - a) / max(t1 - t0, 1e-9)) if margin else pixels
    loaded = scene.loaded(t0, t1)
    index = loaded.without(scene.hidden)
    wanted = scene.rows.lane[slice(*rows)]
    return loaded, index.query(a, max(b, a + 1), pixels=max(columns, 1), rows=wanted, max_spans=max_spans)


def window_answer(scene: Scene, t0: float, t1: float, *, pixels: int, rows: tuple[int, int], marks: Marks) -> Answer:
    """Return the message for a window.

    Parameters
    ----------
    t0, t1 : float
        Visible window, ns since the origin; more is sent on both sides, as far as the message has room.
    pixels : int
        Its width in CSS pixels.
    rows : tuple of int
        First and last display row, end exclusive.
    """
    num_rows = max(rows[1] - rows[0], 1)
    pixels = min(pixels, MAX_CELLS // num_rows or 1)
    room = MAX_CELLS / (num_rows * pixels)
    margin = min(MARGIN, max(0.0, (room - 1) / 2))
    loaded, window = look(scene, t0, t1, pixels=pixels, rows=rows, margin=margin)
    spans = window.spans
    scale = window.pixels / (window.t1_ns - window.t0_ns)  # pixels per ns
    labels, texts = _labels(loaded, window, least_ns=LABEL_PX / scale)
    arrays: dict[str, Array] = {
        "row": spans.row.astype(np.uint16),
        "x": (spans.start_ns - window.t0_ns).astype(np.float32),
        "w": spans.duration_ns.astype(np.float32),
        "cat": spans.category,
        "flag": _flags(loaded, spans.event, marks),
        "label": labels,
        "event": (spans.event + loaded.base).astype(np.uint32),
    }
    if window.grid is not None:
        arrays |= {"busy": window.grid.busy, "cats": window.grid.category}
    content = {
        "kind": "window",
        "t0": scene.t(window.t0_ns),
        "t1": scene.t(window.t1_ns),
        "row0": rows[0],
        "row1": rows[1],
        "pixels": window.pixels,
        "threshold_px": window.threshold_px,
        "num_events": window.num_events,
        "labels": texts,
    }
    return Answer(content, arrays)


def _labels(loaded: Loaded, window: Window, *, least_ns: float) -> tuple[Array, list[str]]:
    """Label what is wide enough to hold a word."""
    spans = window.spans
    out = np.full(len(spans.event), NO_LABEL, np.uint16)
    wide = np.flatnonzero(spans.duration_ns >= least_ns)
    if not len(wide):
        return out, []
    out[wide], texts = labels_of(loaded.events, spans.event[wide])
    return out, texts


def _flags(loaded: Loaded, event: Array, marks: Marks) -> Array:
    flags = loaded.events["flags"].values[event]
    out = np.zeros(len(event), np.uint8)
    for bit, sign in ((Flag.OPEN, OPEN), (Flag.FAILED, FAILED), (Flag.CLIPPED, CLIPPED)):
        out |= np.where(flags & int(bit), sign, 0).astype(np.uint8)
    if marks.search:
        out |= np.where(loaded.found(marks.search)[event], MATCH, 0).astype(np.uint8)
    if marks.selected:
        out |= np.where(np.isin(event + loaded.base, marks.selected), SELECTED, 0).astype(np.uint8)
    return out


def range_fields(scene: Scene, t0: float, t1: float, row0: int, row1: int) -> list[list[str]]:
    """Return what happens in a measured range: busy time by colour class, per rank, overlaps within a rank counted once."""
    loaded, at = scene.events_in(t0, t1, row0, row1)
    events = loaded.events
    a, b = scene.ns(t0), scene.ns(t1)
    start = np.maximum(events["start_ns"].values[at], a)
    end = np.minimum(events["start_ns"].values[at] + events["duration_ns"].values[at], b)
    ranks, of = np.unique(events["rank"].values[at], return_inverse=True)
    kind = loaded.classes[at].astype(np.int64)
    busy = union_length(kind * len(ranks) + of, start, end, len(CLASSES) * len(ranks)).reshape(len(CLASSES), -1)
    fields = [["events", f"{len(at):,}"], ["ranks", str(len(ranks))]]
    for c in np.unique(kind).tolist():
        mean = float(busy[c].mean())
        fields.append([CLASSES[c].name, f"{duration_text(mean)} a rank, {mean / max(t1 - t0, 1.0):.1%}"])
    return fields
