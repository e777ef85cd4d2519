"""The pixels of :mod:`mappnb.pyramid`: what blocks and spans come to, cell by cell."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

__all__ = ["NOTHING", "Grid", "Items", "Scale", "paint"]

Array = np.ndarray[Any, Any]
NOTHING = 255
"""Category of a grid cell in which nothing is."""

_CHUNK = 16384  # cells worked on at once: what the cache holds
_FAINT = 1e-12  # weight in pixels of what has no length


@dataclass(frozen=True, slots=True)
class Grid:
    """What is too small to be drawn one by one; uint8 arrays, dims (row, pixel).

    Attributes
    ----------
    busy : uint8 array
        Share of the pixel that is covered, 255 = all of it; at least 1 where anything is. Spans of one row that overlap add up.
    category : uint8 array
        Category that covers most of it; :data:`NOTHING` where nothing is.
    """

    busy: Array
    category: Array


@dataclass(frozen=True, slots=True)
class Items:
    """Blocks or spans to be painted; arrays, dims (item,). ``row``: position in the query; x and weights in pixels."""

    row: Array
    x0: Array
    x1: Array
    busy: Array
    surplus: Array
    category: Array

    def of(self, which: Any) -> Items:
        """Return some of them."""
        return Items(*(getattr(self, f)[which] for f in self.__slots__))

    @classmethod
    def joined(cls, parts: list[Items]) -> Items:
        """Return all of several."""
        return cls(*(np.concatenate([getattr(p, f) for p in parts]) for f in cls.__slots__))


@dataclass(frozen=True, slots=True)
class Scale:
    """From ns to pixels of a window."""

    t0: int
    t1: int
    pixels: int

    def items(
        self,
        row: Array,
        start: Array,
        end: Array,
        category: Array,
        busy: Array | None = None,
        surplus: Array | None = None,
    ) -> Items:
        """Return spans, or blocks with what they sum up (ns), in pixels, cut at the window."""
        scale = self.pixels / (self.t1 - self.t0)
        x0, x1 = (start - self.t0) * scale, (end - self.t0) * scale
        np.maximum(x0, 0.0, out=x0)
        cut = np.minimum(x1, float(self.pixels))
        if busy is None or surplus is None:
            weight = np.maximum(cut - x0, _FAINT)
            return Items(row, x0, cut, weight, weight, category)
        inside: Any = np.float64(scale)
        if x1.max(initial=0) > self.pixels:
            inside = scale * (cut - x0) / np.maximum(x1 - x0, _FAINT)
        return Items(row, x0, cut, busy * inside, surplus * inside, category)


class _Canvas:
    """Weights of the cells of some rows; ``row`` of items counts from the first of them."""

    def __init__(self, num_rows: int, pixels: int, codes: Array) -> None:
        self.pixels, self.codes, cells = pixels, codes, num_rows * pixels
        self.busy = np.zeros(cells)
        self.weight = np.zeros(cells * len(codes)) if len(codes) > 1 else None
        self._offset = np.zeros(256, np.int64)  # of a category in ``weight``
        self._offset[codes] = np.arange(len(codes)) * cells

    def _add(self, cell: Array, category: Array, busy: Array, surplus: Array) -> None:
        np.add.at(self.busy, cell, busy)
        if self.weight is not None:
            np.add.at(self.weight, cell + self._offset[category], surplus)

    def _pixel(self, x: Array) -> Array:
        pixel = x.astype(np.int64)
        return np.minimum(pixel, self.pixels - 1, out=pixel)

    def narrow(self, items: Items) -> None:
        """Add items narrower than a pixel, spread evenly over their width."""
        pixel = self._pixel(items.x0)
        excess = items.x1 - pixel
        across = np.flatnonzero(excess > 1)
        share = (excess[across] - 1) / (items.x1[across] - items.x0[across])
        pixel += items.row * self.pixels
        right = pixel[across] + 1
        for target, weight in ((self.busy, items.busy), (self.weight, items.surplus)):
            if target is None:
                break
            if target is self.weight:
                pixel += self._offset[items.category]
                right += self._offset[items.category[across]]
            moved = weight[across] * share
            np.add.at(target, pixel, weight)
            np.add.at(target, right, moved)
            np.subtract.at(target, right - 1, moved)

    def broad(self, spans: Items) -> None:
        """Add spans of a pixel or wider."""
        left, right, base = self._pixel(spans.x0), self._pixel(spans.x1), spans.row * self.pixels
        head = np.minimum(spans.x1, left + 1.0) - spans.x0
        tail = np.where(right > left, spans.x1 - right, 0.0)
        self._add(base + left, spans.category, head, head)
        self._add(base + right, spans.category, tail, tail)
        first, last, cells = base + left + 1, base + right, len(self.busy)
        for code in self.codes.tolist():
            of = (last > first) & (spans.category == code)
            if of.any():
                change = np.bincount(first[of], minlength=cells + 1) - np.bincount(last[of], minlength=cells + 1)
                full = np.cumsum(change)[:cells]
                self.busy += full
                if self.weight is not None:
                    self.weight[self._offset[code] : self._offset[code] + cells] += full

    def dominant(self) -> Array:
        """Return the category of most weight of each cell."""
        out = np.full(len(self.busy), self.codes[0], np.uint8)
        if self.weight is not None:
            weight = self.weight.reshape(len(self.codes), -1)
            most = weight.max(axis=0)
            for place in range(1, len(self.codes)):
                np.putmask(out, weight[place] == most, self.codes[place])
        return out


def paint(
    own: Callable[[Array, bool], Items], small: Items, broad: Items, *, pixels: int, level: Array, present: Array
) -> Grid | None:
    """Return the grid of a window, or None if there is nothing in it.

    Parameters
    ----------
    own : callable
        Gives for some rows of one level the blocks to paint that lie in the window's middle, ``row`` counted from the first of them;
        with their categories if asked for.
    small, broad : Items
        Other blocks and spans: narrower than a pixel, and of a pixel or wider.
    pixels : int
        Width.
    level : int array, dims (row,)
        Level of the pyramid that each row is taken from.
    present : bool array, dims (row, category)
        Which categories a row has.
    """
    busy, category = (np.full((len(level), pixels), v, np.uint8) for v in (0, NOTHING))
    mixed = present.sum(axis=1) > 1
    order = np.lexsort((level, mixed))  # rows that are worked alike stand together
    small, broad = _in_order(small, order), _in_order(broad, order)
    new = np.flatnonzero(np.diff(level[order]) | np.diff(mixed[order])) + 1
    for a, b in pairwise([0, *new.tolist(), len(order)]):
        for first in range(a, b, step := max(1, _CHUNK // pixels)):
            rows = order[first : min(first + step, b)]
            codes = np.flatnonzero(present[rows].any(axis=0))
            if not len(codes):
                continue
            canvas, mine = _Canvas(len(rows), pixels, codes), own(rows, len(codes) > 1)
            more = [
                items.of(slice(*np.searchsorted(items.row, (first, first + len(rows))))) for items in (small, broad)
            ]
            if not (mine.busy.any() or len(more[0].row) or len(more[1].row)):
                continue
            canvas.narrow(mine)
            for add, items in zip((canvas.narrow, canvas.broad), more, strict=True):
                add(replace(items, row=items.row - first))
            covered = canvas.busy > 0
            busy[rows] = np.minimum(np.ceil(canvas.busy * 255), 255).astype(np.uint8).reshape(-1, pixels)
            category[rows] = np.where(covered, canvas.dominant(), np.uint8(NOTHING)).reshape(-1, pixels)
    return Grid(busy, category) if busy.any() else None


def _in_order(items: Items, order: Array) -> Items:
    """Return items in a given order of rows, with the place there instead of the row."""
    place = np.argsort(order)[items.row]
    return replace(items, row=place).of(np.argsort(place, kind="stable"))
