"""All that the picture of an array says, computed once: what is drawn, in which colour, what was counted, in which words."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import xarray as xr

from mappnb.widgets._array_colours import Scale, choose_scale, codes
from mappnb.widgets._array_draw import draw
from mappnb.widgets._array_grid import Grid, assign_roles, make_grid
from mappnb.widgets._array_labels import Labels, clean, labels_of, packs_as_text, shorten
from mappnb.widgets._array_values import Mark, Survey, kind_of, marks_of, numbers, read_shown, survey

__all__ = ["MARK_NAMES", "Content", "build"]

Array = np.ndarray[Any, Any]

MARK_NAMES = {
    Mark.NAN: "NaN",
    Mark.POS_INF: "+Inf",
    Mark.NEG_INF: "−Inf",
    Mark.BELOW: "below the limits",
    Mark.ABOVE: "above the limits",
    Mark.MISSING: "missing (no rank captured it)",
}

ROOM_BYTES = 31_000
"""Of the page for values, in bytes and as colours; the rest is style, script, labels and words."""
MOST_CELLS, MOST_TEXT_CELLS = 6_000, 400
LABEL_BYTES, WORD_BYTES = 4_000, 16_000
_COLOUR_BYTES = 2.4  # of a cell inside the PNG, measured on noise


@dataclass(frozen=True)
class Content:
    """The picture of one array; made by :func:`build`.

    Attributes
    ----------
    grid : Grid
        Where things go.
    values, marks, cells : array, shape of ``grid.axes``
        What is shown, as stored; its :class:`Mark`; its colour.
    scale : Scale
        Its colours.
    survey : Survey
        What was counted of the whole array.
    labels : tuple of Labels
        Of each axis.
    """

    da: xr.DataArray
    grid: Grid
    values: Array
    marks: Array
    cells: Array
    scale: Scale
    survey: Survey
    labels: tuple[Labels, ...]

    @property
    def name(self) -> str:
        """Name of the array, safe to write."""
        return clean(self.da.name) if self.da.name is not None else "array"

    def frames(self) -> list[Array]:
        """Return the pixels of every frame."""
        shape = (-1, *(a.shown for a in self.grid.axes[-4:]))
        pairs = zip(self.cells.reshape(shape), self.marks.reshape(shape), strict=True)
        return [draw(cells, marks, self.grid, self.scale) for cells, marks in pairs]

    @cached_property
    def occurring(self) -> list[int]:
        """Marks that occur in what was counted or in what is shown."""
        shown = np.bincount(self.marks.ravel(), minlength=7)
        return [m for m in MARK_NAMES if self.survey.counts.get(m) or shown[m]]

    def number(self, value: float) -> str:
        """Return a limit in words: a date for times, else four digits."""
        time = np.array(int(value), "i8").astype(self.da.dtype) if self.da.dtype.kind in "Mm" else None
        if time is not None:
            return str(np.datetime_as_string(time, unit="auto")) if time.dtype.kind == "M" else str(time[()])
        return f"{value:.4g}".replace("-", "−")

    def counted(self) -> str:
        """Return how often each mark occurs, and of how many values."""
        found = self.survey
        if kind_of(self.da.dtype) == "text":
            return ""
        whole = f"All {found.size:,} values counted" if found.size > 1 else "One value"
        of = f"Of a sample of {found.looked_at:,} of {found.size:,} values" if found.sampled else whole
        parts = []
        for mark in self.occurring:
            count = found.counts.get(mark, 0)
            limit = {Mark.BELOW: self.scale.low, Mark.ABOVE: self.scale.high}.get(mark)
            words = MARK_NAMES[mark] if limit is None else MARK_NAMES[mark].split(" ")[0] + f" {self.number(limit)}"
            words = "NaT" if mark == Mark.NAN and self.da.dtype.kind in "Mm" else words
            parts.append(f"{count:,} {words}" if count else f"{words} only among those shown")
        ordinary = "all finite" if self.da.dtype.kind in "fc" else "none missing"
        return f"{of}: {', '.join(parts) if parts else ordinary}."

    def coloured(self) -> str:
        """Return what the colours mean, in words."""
        scale = self.scale
        subject = "Colour is the magnitude of complex values" if self.da.dtype.kind == "c" else "Colours"
        if scale.kind == "none":
            return "Text: cells are not coloured; point at one, or open the table, to read it."
        if scale.kind == "categories":
            what = "Text" if kind_of(self.da.dtype) == "text" else "Few distinct values"
            return f"{what}: a colour for each of {len(scale.values)} among those looked at."
        if scale.low == scale.high:
            return f"One colour: every finite value looked at is {self.number(scale.low)}." if self.da.size > 1 else ""
        around = f", around {self.number(scale.center)}" if scale.kind == "diverging" else ""
        return f"{subject} from {self.number(scale.low)} to {self.number(scale.high)}{around} ({scale.how})."

    def left_out(self) -> str:
        """Return which positions are not shown, in words; empty if all are."""
        cut = [
            f"{a.shown} of {a.size:,} {clean(a.dim)} (first {a.head}, last {a.tail})"
            for a in self.grid.axes
            if a.truncated
        ]
        first = [f"{clean(d)} 0 of {n:,}" for d, n in self.grid.fixed if n > 1]
        parts = [f"Shown: {', '.join(cut)}."] if cut else []
        if first:
            parts.append(f"Only {', '.join(first)}: view.sel({clean(self.grid.fixed[-1][0])}=…) shows another.")
        return " ".join(parts)

    def summary(self) -> str:
        """Return the picture in one sentence, for those who do not see it."""
        sizes = " by ".join(f"{clean(d)} {n:,}" for d, n in self.da.sizes.items()) or "a single value"
        end = " ".join(filter(None, [self.coloured(), self.counted(), self.left_out()])).rstrip(".").replace(". ", "; ")
        return f"Picture of {self.name}, {self.da.dtype}, {sizes}: {end}."


def _budget(dtype: np.dtype[Any]) -> int:
    """Return how many values go on a page."""
    if packs_as_text(dtype):
        return MOST_TEXT_CELLS
    return min(MOST_CELLS, int(ROOM_BYTES / ((dtype.itemsize + _COLOUR_BYTES) * 4 / 3)))


def build(
    da: xr.DataArray,
    *,
    roles: Mapping[str, Hashable | None],
    limits: Mapping[str, float | None],
    width: int,
    shrink: float = 1.0,
    found: Survey | None = None,
) -> Content:
    """Return the content of a view.

    Parameters
    ----------
    da : DataArray
        Of at least one value.
    roles : mapping
        ``x``, ``y``, ``row``, ``col`` as asked for.
    limits : mapping
        ``vmin``, ``vmax``, ``center`` as asked for.
    width : int
        In CSS pixels.
    shrink : float
        Divides the number of values shown: for pages that came out too large.
    found : Survey, optional
        What was counted, where that was done already.
    """
    sizes = {d: int(n) for d, n in da.sizes.items()}
    grid = make_grid(sizes, assign_roles(sizes, **roles), most_cells=int(_budget(da.dtype) / shrink), width=width)
    with np.errstate(invalid="ignore", over="ignore"):  # signalling NaN, and limits beyond float16
        values, missing = read_shown(da, grid)
        found = survey(da) if found is None else found
        text = kind_of(da.dtype) == "text"
        real = values if text else numbers(values)
        marks = marks_of(real, missing)
        scale = choose_scale(real[marks == Mark.NONE], found, da.dtype, **limits)
        cells = codes(real, marks, scale)
    if scale.kind in ("sequential", "diverging"):
        found.counts[Mark.BELOW] = int(np.count_nonzero(found.finite < scale.low))
        found.counts[Mark.ABOVE] = int(np.count_nonzero(found.finite > scale.high))
    return Content(da, grid, values, marks, cells, scale, found, _labels(da, grid))


def _labels(da: xr.DataArray, grid: Grid) -> tuple[Labels, ...]:
    """Return the texts of every axis, cut so that they take a bounded part of the page."""
    found = [labels_of(da, a) for a in grid.axes]
    columns = sum((x.coord is not None) + (x.tokens is not None) for x in found)
    most = LABEL_BYTES // max(1, columns)

    def bounded(texts: tuple[str, ...] | None) -> tuple[str, ...] | None:
        return None if texts is None else tuple(shorten(texts, most))

    return tuple(Labels(bounded(x.coord), bounded(x.tokens)) for x in found)


def is_empty(da: xr.DataArray) -> bool:
    """Return True if there is nothing to draw."""
    return math.prod(da.shape) == 0
