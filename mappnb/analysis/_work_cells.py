"""Numbers of the self-time table per (step, rank) cell, from plain columns of events in memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from mappnb.analysis._intervals import innermost_segments, union_length
from mappnb.analysis._work_calls import call_table
from mappnb.analysis._work_parts import COLLECTIVE, HOST, KINDS, WAIT

__all__ = ["Cells", "Columns", "cells_of"]

Array = np.ndarray[Any, Any]
_OPTIMIZER = KINDS.index("optimizer")


@dataclass(slots=True)
class Columns:
    """Events of some steps of all ranks, one entry per event, any order.

    Attributes
    ----------
    cell : int64 array
        ``step index * number of ranks + rank index``.
    rank : int array
        Global rank.
    start, end : int64 array
        Bounds on the run clock, ns.
    lane : int64 array
        Equal for events of one thread or stream of one cell.
    kind : int8 array
        As of :func:`mappnb.analysis._work_parts.kinds_of`.
    part : int array
        Number of the part; any for transfers.
    aside : bool array
        A transfer in flight beside the program (``Flag.ASYNC``): no part of the nesting of its thread.
    issue : bool array
        Host span that only issued work of a device lane.
    call : int64 array
        Call of transfers and waits; -1 for none.
    """

    cell: Array
    rank: Array
    start: Array
    end: Array
    lane: Array
    kind: Array
    part: Array
    aside: Array
    issue: Array
    call: Array


@dataclass(slots=True)
class Cells:
    """Sums over events, in ns or counts: ``self_ns`` and ``count`` have shape (cell, part), all others (cell,)."""

    self_ns: Array
    count: Array
    first: Array
    last: Array
    wait_ns: Array
    transfer_ns: Array
    covered_ns: Array
    imposed_ns: Array
    last_calls: Array
    calls: Array


def cells_of(c: Columns, *, num_cells: int, num_parts: int) -> Cells:
    """Return the sums of each cell.

    Parameters
    ----------
    c : Columns
        Events.
    num_cells, num_parts : int
        Sizes of the table.

    Returns
    -------
    Cells
        ``self_ns`` leaves out host spans; ``covered_ns`` is what anything but host spans covers of the cell's extent.
    """
    first = np.full(num_cells, np.iinfo(np.int64).max)
    last = np.full(num_cells, np.iinfo(np.int64).min)
    np.minimum.at(first, c.cell, c.start)
    np.maximum.at(last, c.cell, c.end)
    arrival, (imposed, last_calls, calls) = _arrivals(c, num_cells)
    span, left, right = _segments(c)
    cell, kind = c.cell[span], np.where(c.issue[span], HOST, c.kind[span])
    own = kind < HOST
    flat = cell[own] * num_parts + c.part[span[own]]
    self_ns = _sums(flat, (right - left)[own], num_cells * num_parts).reshape(num_cells, num_parts)
    counted = (c.kind <= HOST) & ~c.issue
    count = np.bincount(c.cell[counted] * num_parts + c.part[counted], minlength=num_cells * num_parts)
    wait, transfer, covered = _blocked(cell, left, right, kind, np.clip(arrival[span], left, right), num_cells)
    return Cells(
        self_ns, count.reshape(num_cells, num_parts), first, last, wait, transfer, covered, imposed, last_calls, calls
    )  # fmt: skip


def _sums(index: Array, value: Array, size: int) -> Array:
    """Return exact int64 sums of ``value`` by ``index``."""
    out = np.zeros(size, np.int64)
    np.add.at(out, index, value)
    return out


def _segments(c: Columns) -> tuple[Array, Array, Array]:
    """Return (event, start, end) of the innermost pieces of all lanes."""
    inside = np.flatnonzero(~c.aside)
    span, left, right = innermost_segments(c.lane[inside], c.start[inside], c.end[inside])
    return inside[span], left, right


def _arrivals(c: Columns, num_cells: int) -> tuple[Array, tuple[Array, Array, Array]]:
    """Return when the last member of each event's call came (its own start if unknown), and the sums (imposed, last, calls)."""
    entry = np.flatnonzero(c.call >= 0)
    num_calls = int(c.call.max(initial=-1)) + 1
    joins = c.kind[entry] < WAIT
    table = call_table(
        c.call[entry], c.rank[entry], c.start[entry], c.end[entry], joins, ~c.aside[entry], num_calls
    )  # fmt: skip
    arrival = c.start.astype(np.int64).copy()
    met = entry[table.members[c.call[entry]] > 0]
    arrival[met] = table.arrival[c.call[met]]
    late = np.flatnonzero(table.last >= 0)
    cell = c.cell[entry[table.last[late]]]
    imposed = _sums(cell, table.imposed[late], num_cells)
    shared = entry[joins & (table.members[c.call[entry]] > 1)]
    return arrival, (
        imposed,
        np.bincount(cell, minlength=num_cells),
        np.bincount(c.cell[shared], minlength=num_cells),
    )


def _blocked(
    cell: Array, left: Array, right: Array, kind: Array, arrival: Array, num_cells: int
) -> tuple[Array, Array, Array]:
    """Return ns of each cell that it waited, was in transfer, and that anything but host spans cover.

    What runs on another lane of the rank at the same time hides a wait or transfer; of single lanes nothing is hidden.
    """
    busy, moving = kind <= _OPTIMIZER, kind >= COLLECTIVE
    other = (kind > _OPTIMIZER) & (kind < HOST)
    pieces = [
        (cell[busy], left[busy], right[busy]),
        (cell[moving], left[moving], arrival[moving]),
        (cell[moving], arrival[moving], right[moving]),
        (cell[other], left[other], right[other]),
    ]
    columns = [np.concatenate(p) for p in zip(*pieces, strict=True)]
    bounds = np.cumsum([len(p[0]) for p in pieces]).tolist()
    covered = [union_length(columns[0][:n], columns[1][:n], columns[2][:n], num_cells) for n in bounds]
    return covered[1] - covered[0], covered[2] - covered[1], covered[3]
