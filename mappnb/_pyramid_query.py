"""Answers of :mod:`mappnb.pyramid`: which blocks of the pyramid to take, and which to open."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from mappnb._pyramid_levels import Level
from mappnb._pyramid_paint import Grid, Items, Scale, paint

__all__ = ["Query", "Spans", "Window"]

Array = np.ndarray[Any, Any]
_NOT_READ = np.empty(0, np.uint8)
_DENSE = 4  # rows with fewer spans a pixel are read span by span
_BLOCKS = 3  # blocks a pixel, at most, to begin with: with fewer of them more are wider than a pixel and must be opened


@dataclass(frozen=True, slots=True)
class Spans:
    """Spans to draw one by one; arrays, dims (span,), in order of row and start.

    Attributes
    ----------
    event : int64 array
        Position in the arrays that the index was built from.
    row : int32 array
        Position in the ``rows`` of the query.
    start_ns, duration_ns : int64 array
        ns.
    category : uint8 array
        As given to the index.
    """

    event: Array
    row: Array
    start_ns: Array
    duration_ns: Array
    category: Array


@dataclass(frozen=True, slots=True)
class Window:
    """Answer to a query.

    Attributes
    ----------
    t0_ns, t1_ns : int
        The window; pixel ``i`` covers ``[t0 + i * (t1 - t0) / pixels, ...)``.
    pixels, num_rows : int
        Size of the picture.
    spans : Spans
        Every span of at least ``threshold_px`` pixels.
    grid : Grid or None
        All others; None where there are none.
    threshold_px : int
        1, 2, 4, ...: the least at which ``spans`` holds no more than was asked for.
    num_events : int
        Spans in the window, exact.
    """

    t0_ns: int
    t1_ns: int
    pixels: int
    num_rows: int
    spans: Spans
    grid: Grid | None
    threshold_px: int
    num_events: int


def _runs(first: Array, counts: Array) -> Array:
    """Return ``first[i], first[i] + 1, ...``, ``counts[i]`` of them, one run after the other."""
    return np.asarray(np.arange(int(counts.sum())) + np.repeat(first - np.cumsum(counts) + counts, counts))


class Query:
    """One window of a pyramid."""

    def __init__(self, levels: list[Level], t0: int, t1: int, pixels: int, rows: Array) -> None:
        self.levels, self.scale, self.rows = levels, Scale(t0, t1, pixels), rows
        self.pixel = -(-(t1 - t0) // pixels)  # what is at least as long is a pixel wide or wider
        spans, bounds = levels[0], np.array([t0, t1])
        origin, end = spans.first[rows], spans.first[rows + 1]
        found = [spans.start[a:b].searchsorted(bounds) for a, b in zip(origin.tolist(), end.tolist(), strict=True)]
        self.lo, self.hi = np.array(found, np.int64).reshape(-1, 2).T
        self.size = end - origin
        inside, sizes = self.hi - self.lo, np.array([v.size for v in levels])
        fits = (inside[:, None] <= max(_BLOCKS * pixels, 8) * sizes) | (sizes == sizes[-1])
        self.level = np.where(inside <= _DENSE * pixels, 0, np.argmax(fits, axis=1))
        self._ranges = self._own_ranges()
        self._has_wide = np.zeros(len(rows), bool)

    def _own_ranges(self) -> list[slice]:
        """Return per row the blocks of its own level that lie in the window whole."""
        out = np.zeros((len(self.rows), 2), np.int64)
        for level in np.unique(self.level).tolist():
            of = self.level == level
            out[of] = (np.stack(self._inner(level), axis=1) + self.levels[level].first[self.rows][:, None])[of]
        return [slice(a, max(a, b)) for a, b in out.tolist()]

    def answer(self, max_spans: int, *, order: Array, present: Array) -> Window:
        """Return the window; ``order`` leads back to the given events, ``present`` tells the categories of each row of the index."""
        over = self._overhang()
        (row, span), items = self._descend(over)
        spans = self.levels[0]
        length = spans.end[span] - spans.start[span]
        power, least = self._threshold(length, max_spans)
        shown = length >= least
        small, broad = Items.joined(items), self._items(0, row[~shown], span[~shown])
        grid = paint(self._own, small, broad, pixels=self.scale.pixels, level=self.level, present=present[self.rows])
        row, span = row[shown], span[shown]
        by = np.lexsort((span, row))
        row, span = row[by], span[by]
        found = Spans(
            order[span].astype(np.int64),
            row.astype(np.int32),
            spans.start[span],
            length[shown][by],
            spans.category[span],
        )
        num_events = int((self.hi - self.lo).sum()) + len(over[0])
        return Window(self.scale.t0, self.scale.t1, self.scale.pixels, len(self.rows), found, grid, power, num_events)

    # ---------------------------------------------------------------------------------------------- which blocks
    def _items(self, level: int, row: Array, block: Array) -> Items:
        here = self.levels[level]
        sums = (here.busy[block], here.surplus[block]) if level else ()
        return self.scale.items(row, here.start[block], here.end[block], here.category[block], *sums)

    def _own(self, rows: Array, mixed: bool) -> Items:
        """Return the blocks of some rows of one level, the wide ones with no weight; categories only if they are ``mixed``."""
        level = int(self.level[rows[0]])
        here, parts = self.levels[level], [self._ranges[r] for r in rows.tolist()]
        start, end = (np.concatenate([f[p] for p in parts]) for f in (here.start, here.end))
        category = np.concatenate([here.category[p] for p in parts]) if mixed else _NOT_READ
        sums = [np.concatenate([f[p] for p in parts]) for f in (here.busy, here.surplus)[: 1 + mixed] if level]
        sums += sums[:1] if not mixed else []
        row = np.repeat(np.arange(len(rows)), [p.stop - p.start for p in parts])
        items = self.scale.items(row, start, end, category, *sums)
        if self._has_wide[rows].any():
            wide = end - start >= self.pixel
            items.busy[wide] = items.surplus[wide] = 0.0
        return items

    def _open(self, level: int, row: Array, block: Array) -> tuple[Array, Array]:
        """Return the blocks of the next lower level that some blocks consist of."""
        above, below = self.levels[level], self.levels[level - 1]
        at = self.rows[row]
        lo = below.first[at] + (block - above.first[at]) * (above.size // below.size)
        counts = np.minimum(above.size // below.size, below.first[at + 1] - lo)
        return np.repeat(row, counts), _runs(lo, counts)

    def _overhang(self) -> tuple[Array, Array]:
        """Return (row, span) of the spans that began before the window and last into it."""
        top = len(self.levels) - 1
        counts = -(-self.lo // self.levels[top].size)
        row, block = np.repeat(np.arange(len(self.rows)), counts), _runs(self.levels[top].first[self.rows], counts)
        for level in range(top, -1, -1):
            here = self.levels[level]
            before = (block - here.first[self.rows[row]]) * here.size < self.lo[row]
            keep = before & (here.end[block] > self.scale.t0)
            row, block = row[keep], block[keep]
            if level:
                row, block = self._open(level, row, block)
        return row, block

    def _inner(self, level: int) -> tuple[Array, Array]:
        """Return per row the range of blocks of a level, counted from the row's first, that lie in the window whole."""
        size = self.levels[level].size
        return -(-self.lo // size), np.where(self.hi == self.size, -(-self.hi // size), self.hi // size)

    def _fringe(self, level: int) -> tuple[Array, Array]:
        """Return (row, block) of the blocks that the rows of a higher level leave uncovered at both ends of the window."""
        rows = np.flatnonzero(self.level > level)
        if not len(rows):
            return rows, rows
        ratio = self.levels[level + 1].size // self.levels[level].size
        (lo, hi), (inner_lo, inner_hi) = self._inner(level), self._inner(level + 1)
        first = np.concatenate([lo[rows], np.maximum(inner_hi * ratio, lo)[rows]])
        last = np.concatenate([np.minimum(inner_lo * ratio, hi)[rows], hi[rows]])
        counts = np.maximum(last - first, 0)
        rows = np.concatenate([rows, rows])
        return np.repeat(rows, counts), _runs(self.levels[level].first[self.rows[rows]] + first, counts)

    def _wide(self, level: int) -> tuple[Array, Array]:
        """Return (row, block) of the rows of this level that are a pixel wide or wider."""
        here, rows, found = self.levels[level], np.flatnonzero(self.level == level), [np.empty(0, np.int64)]
        for r in rows.tolist():
            part = self._ranges[r]
            width = here.end[part] - here.start[part]
            self._has_wide[r] = width.max(initial=-1) >= self.pixel
            found.append(np.flatnonzero(width >= self.pixel) + part.start if self._has_wide[r] else found[0])
        return np.repeat(rows, [len(f) for f in found[1:]]), np.concatenate(found)

    def _descend(self, over: tuple[Array, Array]) -> tuple[tuple[Array, Array], list[Items]]:
        """Return (row, span) of all spans of a pixel or wider, and what else does not lie in the rows' own levels."""
        items: list[Items] = []
        row = block = np.empty(0, np.int64)
        for level in range(int(self.level.max(initial=0)), -1, -1):
            here = self.levels[level]
            parts = [(row, block), self._fringe(level), *([over] if level == 0 else [])]
            row, block = (np.concatenate(p) for p in zip(*parts, strict=True))
            wide = here.end[block] - here.start[block] >= self.pixel
            items.append(self._items(level, row[~wide], block[~wide]))
            own = self._wide(level)
            row, block = np.concatenate([row[wide], own[0]]), np.concatenate([block[wide], own[1]])
            if level:
                row, block = self._open(level, row, block)
        return (row, block), items

    def _threshold(self, length: Array, max_spans: int) -> tuple[int, int]:
        """Return the least power of two of pixels, and its ns, that no more than ``max_spans`` lengths reach."""
        most = -1
        if len(length) > max_spans:
            most = int(np.partition(length, len(length) - max_spans - 1)[len(length) - max_spans - 1])
        power, least = 1, self.pixel
        while least <= most:
            power *= 2
            least = -(-power * (self.scale.t1 - self.scale.t0) // self.scale.pixels)
        return power, min(least, 2**63 - 1)
