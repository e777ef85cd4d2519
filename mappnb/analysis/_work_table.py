"""The self-time table as plain arrays, and as the labelled dataset that is handed out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr

from mappnb.analysis._work_parts import HOST, KINDS, part_names

__all__ = ["Table", "as_dataset", "join"]

Array = np.ndarray[Any, Any]
FIRST, LAST, WAIT, TRANSFER, COVERED, IMPOSED, LAST_CALLS, CALLS = range(8)


@dataclass(slots=True)
class Table:
    """Sums of some steps, in ns or counts.

    Attributes
    ----------
    steps, ranks : int array
        Of the rows and columns; ranks rise.
    parts : list of (int, int)
        Kind, as an index into KINDS, and stage (-1 for none) of each part.
    self_ns, count : int array, shape (step, rank, part)
        Self time without that of host spans, ns; number of spans.
    cells : int64 array, shape (8, step, rank)
        First start and last end, time waited, in transfer, covered by anything but host spans, imposed on others, ns; calls to which
        the rank came last, and all calls.
    """

    steps: Array
    ranks: Array
    parts: list[tuple[int, int]]
    self_ns: Array
    count: Array
    cells: Array

    @property
    def present(self) -> Array:
        """Where the rank has events in the step, shape (step, rank)."""
        return np.asarray(self.cells[LAST] >= self.cells[FIRST])


def join(tables: list[Table]) -> Table:
    """Return tables of different steps as one, by step; of tables with the same step the last one counts. The list is empty then.

    So that no more than a block is in memory twice.
    """
    present = [t.present for t in tables]
    every = np.concatenate([t.steps[p.any(1)] for t, p in zip(tables, present, strict=True)])
    number = np.repeat(np.arange(len(tables)), [int(p.any(1).sum()) for p in present])
    steps, row = np.unique(every, return_inverse=True)
    newest = np.full(len(steps), -1)
    np.maximum.at(newest, row, number)
    ranks, parts = set(), {(HOST, -1)}
    kept = []
    for i, (t, p) in enumerate(zip(tables, present, strict=True)):
        own = np.flatnonzero(p.any(1))
        own = own[newest[np.searchsorted(steps, t.steps[own])] == i]
        kept.append(own)
        ranks |= set(t.ranks[p[own].any(0)].tolist())
        parts |= {t.parts[k] for k in np.flatnonzero(t.count[own].any((0, 1)))}
    return _joined(tables, kept, steps, np.array(sorted(ranks), np.int64), sorted(parts))


def _joined(tables: list[Table], kept: list[Array], steps: Array, ranks: Array, parts: list[tuple[int, int]]) -> Table:
    """Return the rows ``kept`` of each table as one table."""
    shape = (len(steps), len(ranks))
    out = Table(
        steps,
        ranks,
        parts,
        np.zeros((*shape, len(parts)), np.int64),
        np.zeros((*shape, len(parts)), np.int32),
        _none(shape),
    )
    for own in reversed(kept):
        _put(out, tables.pop(), own)
    return out


def _none(shape: tuple[int, int]) -> Array:
    cells = np.zeros((8, *shape), np.int64)
    cells[FIRST], cells[LAST] = np.iinfo(np.int64).max, np.iinfo(np.int64).min
    return cells


def _put(out: Table, table: Table, own: Array) -> None:
    """Write rows of a table into one that has their steps, ranks and parts."""
    row = np.searchsorted(out.steps, table.steps[own])
    col = np.searchsorted(out.ranks, table.ranks)
    held = (col < len(out.ranks)) & (out.ranks[np.minimum(col, len(out.ranks) - 1)] == table.ranks)
    col, mine = col[held], np.flatnonzero(held)
    at, of = _cells(row, col), _cells(own, mine)
    for i, part in enumerate(table.parts):
        if part not in out.parts:
            continue
        k = out.parts.index(part)
        out.self_ns[..., k][at] = table.self_ns[..., i][of]
        out.count[..., k][at] = table.count[..., i][of]
    for k in range(len(out.cells)):
        out.cells[k][at] = table.cells[k][of]


def _cells(row: Array, col: Array) -> tuple[Any, Any]:
    """Return an index of these rows and columns: slices, where they are side by side, for those are copied five times as fast."""
    spans = [_span(row), _span(col)]
    return (row[:, None], col) if None in spans else (spans[0], spans[1])


def _span(at: Array) -> slice | None:
    if len(at) and at[-1] - at[0] + 1 == len(at) and (np.diff(at) == 1).all():
        return slice(int(at[0]), int(at[-1]) + 1)
    return None


def as_dataset(table: Table, *, hosts: dict[int, str], attrs: dict[str, Any]) -> xr.Dataset:
    """Return the labelled table; dims and units as of :func:`mappnb.analysis.work`."""
    c, present = table.cells, table.present
    first, last = (np.where(present, c[k], c[k][present].max(initial=0)) for k in (FIRST, LAST))
    extent = np.where(present, last - first, 0)
    seconds = table.self_ns / 1e9
    seconds[..., table.parts.index((HOST, -1))] = (extent - c[COVERED]) / 1e9
    both, every = ("step", "rank"), ("step", "rank", "part")
    data: dict[str, Any] = {
        "seconds": (every, seconds, {"units": "s", "long_name": "self time"}),
        "count": (every, table.count.astype(np.int32, copy=False), {"units": "1", "long_name": "spans"}),
        "present": (both, present, {"long_name": "the rank has events in this step"}),
    }
    data |= {
        n: (both, c[k] / 1e9, {"units": "s"})
        for n, k in (("wait_s", WAIT), ("transfer_s", TRANSFER), ("imposed_s", IMPOSED))
    }
    data |= {
        n: (both, c[k].astype(np.int32), {"units": "1"}) for n, k in (("last_calls", LAST_CALLS), ("calls", CALLS))
    }
    window = np.where(present, c[LAST], np.iinfo(np.int64).min).max(1) - np.where(
        present, c[FIRST], np.iinfo(np.int64).max
    ).min(1)
    data["step_s"] = ("step", window / 1e9, {"units": "s", "long_name": "first start to last end over the ranks"})
    kind, stage = (np.array(v, np.int64) for v in zip(*table.parts, strict=True))
    coords = {
        "step": table.steps.astype(np.int32),
        "rank": table.ranks.astype(np.int32),
        "part": part_names(kind, stage),
        "part_kind": ("part", np.array([KINDS[k] for k in kind.tolist()], object)),
        "part_stage": ("part", stage),
        "host": ("rank", np.array([hosts.get(int(r), "") for r in table.ranks], object)),
    }
    return xr.Dataset(data, coords=coords, attrs=attrs)
