"""Level of detail for timelines: what of millions of spans to draw in a window, at a cost that depends on the picture.

The spans of each display row are sorted by start and summed up in a pyramid: blocks of 4 spans, then pairs of blocks. A query takes
blocks that are narrower than a pixel as they are, and opens the others.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mappnb._pyramid_levels import LIMIT, Level, build_levels, ordered
from mappnb._pyramid_paint import NOTHING, Grid
from mappnb._pyramid_query import Query, Spans, Window
from mappnb.errors import MappnbError

__all__ = ["NOTHING", "Grid", "SpanIndex", "Spans", "Window", "ordered"]

Array = np.ndarray[Any, Any]
_HEAP = 2**25 - 2**13
"""Bytes to take and give back once: glibc then keeps freed blocks up to that size, and a query's temporaries cost no page faults
(measured: a third of its time). Not touched, so no memory is used."""


class SpanIndex:
    """Spans of many display rows, ready for :meth:`query` at any zoom. Made by :meth:`build`; never changed afterwards."""

    def __init__(self, levels: list[Level], order: Array, present: Array) -> None:
        self._levels, self._order, self._present = levels, order, present

    @classmethod
    def build(cls, row: Array, start_ns: Array, duration_ns: Array, category: Array, *, num_rows: int) -> SpanIndex:
        """Index spans.

        Parameters
        ----------
        row : int array, dims (event,)
            Display row, 0 to ``num_rows - 1``. Spans of one row need not be disjoint; where they are, a query is fastest.
        start_ns, duration_ns : int64 array, dims (event,)
            ns. Times are cut at ±(2**62 - 1); a negative length counts as 0. A length of 0 is a mark, drawn one pixel wide.
        category : uint8 array, dims (event,)
            Below 255.
        num_rows : int
            Number of display rows.

        Raises
        ------
        MappnbError
            If the arrays differ in length, or a row or category is out of range.
        """
        row, start = np.asarray(row, np.int64), np.asarray(start_ns, np.int64)
        duration, category = np.asarray(duration_ns, np.int64), np.asarray(category, np.uint8)
        if not len(row) == len(start) == len(duration) == len(category):
            raise MappnbError(
                f"span index: {len(row)} rows, {len(start)} starts, {len(duration)} lengths and {len(category)} categories; "
                f"give arrays of one length"
            )
        if len(row) and not 0 <= int(row.min()) <= int(row.max()) < num_rows:
            raise MappnbError(f"span index: rows {row.min()} to {row.max()}; expected 0 to {num_rows - 1}")
        if len(row) and category.max() >= NOTHING:
            raise MappnbError(f"span index: category {NOTHING} stands for nothing; use 0 to {NOTHING - 1}")
        order = ordered(row, start)
        first = np.concatenate([[0], np.cumsum(np.bincount(row, minlength=num_rows))]).astype(np.int64)
        start = np.clip(start[order], -LIMIT, LIMIT)
        end = np.minimum(start + np.clip(duration[order], 0, LIMIT), LIMIT)
        levels = build_levels(start, end, category[order], first)
        present = np.bincount(row * NOTHING + category, minlength=num_rows * NOTHING) > 0
        order = order.astype(np.int32) if len(order) < 2**31 else order
        np.empty(_HEAP, np.uint8)
        return cls(levels, order, present.reshape(num_rows, NOTHING))

    def renamed(self, event: Array) -> SpanIndex:
        """Return the same index, where span i is told as event ``event[i]``: int array, dims (event,). Shares its memory."""
        return SpanIndex(self._levels, np.asarray(event)[self._order], self._present)

    @property
    def num_rows(self) -> int:
        """Number of display rows."""
        return len(self._levels[0].first) - 1

    @property
    def num_events(self) -> int:
        """Number of spans."""
        return len(self._order)

    @property
    def nbytes(self) -> int:
        """Memory held, bytes."""
        levels = sum(a.nbytes for v in self._levels for a in (v.first, v.start, v.end, v.category, v.busy, v.surplus))
        return int(levels + self._order.nbytes)

    @property
    def extent_ns(self) -> tuple[int, int]:
        """First start and last end, ns; (0, 0) without spans."""
        if not self.num_events:
            return 0, 0
        return int(self._levels[-1].start.min()), int(self._levels[-1].end.max())

    def query(
        self,
        t0_ns: int,
        t1_ns: int,
        *,
        pixels: int,
        rows: Array | None = None,
        max_spans: int = 20_000,
        max_cells: int = 4_000_000,
    ) -> Window:
        """Return what to draw of a window.

        Parameters
        ----------
        t0_ns, t1_ns : int
            Window ``[t0, t1)``, ns.
        pixels : int
            Its width.
        rows : int array, dims (row,), optional
            Display rows wanted, in the order in which to show them; all by default.
        max_spans : int
            Largest number of spans to return one by one.
        max_cells : int
            Largest picture, rows × pixels, that is answered.

        Returns
        -------
        Window

        Raises
        ------
        MappnbError
            If the window is empty or out of range, the picture too large, or a row does not exist.

        Notes
        -----
        Exact: the spans, the number of events, and which pixels anything is in, to one pixel. ``busy`` and ``category`` take a block
        narrower than a pixel as spread evenly over its width. A category that covers more than half of every block of a pixel is
        always the one shown: the blocks' categories are found by weighted majority vote (Boyer and Moore, MJRTY, 1981), which can
        be merged. Rows whose spans overlap cost more, by the number of spans of a pixel or wider.
        """
        wanted = np.arange(self.num_rows) if rows is None else np.asarray(rows, np.int64)
        if not -LIMIT <= t0_ns < t1_ns <= LIMIT or pixels < 1:
            raise MappnbError(
                f"window {t0_ns} to {t1_ns} ns of {pixels} pixels; expected t0 < t1 within ±2**62 ns, and a pixel"
            )
        if len(wanted) * pixels > max_cells:
            raise MappnbError(f"{len(wanted)} rows × {pixels} pixels; at most {max_cells} cells: ask for fewer rows")
        if len(wanted) and not 0 <= int(wanted.min()) <= int(wanted.max()) < self.num_rows:
            raise MappnbError(f"rows {wanted.min()} to {wanted.max()}; the index has rows 0 to {self.num_rows - 1}")
        query = Query(self._levels, int(t0_ns), int(t1_ns), int(pixels), wanted)
        return query.answer(max_spans, order=self._order, present=self._present)
