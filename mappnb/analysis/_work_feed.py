"""Rows of a run, some steps of all ranks at a time: each row group is decoded once, and no more is held than a block needs."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from mappnb.analysis._work_block import COLUMNS, Block, Sites
from mappnb.analysis._work_table import Table
from mappnb.clockmodel import ClockModel
from mappnb.run import Run
from mappnb.segments import decode_closed, missing_value
from mappnb.tables import TableReader

__all__ = ["dataset_tables", "run_tables"]

Array = np.ndarray[Any, Any]
Rows = dict[str, Array]

BLOCK_ROWS = 8 * 2**20
"""Rows of a block over all ranks. Measured at 1,024 ranks: four row groups of a rank at a time, below 1 GB."""
_READERS, _AHEAD = 2, 8
_END = 2**31 - 1


@dataclass(slots=True)
class _Source:
    """Row groups of one rank in order, and the rows that were decoded and not used."""

    key: tuple[int, int]
    parts: list[Any]
    part: Array
    group: Array
    rows: Array
    low: Array
    high: Array
    next: int = 0
    held: list[tuple[Rows, int, Sites]] = field(default_factory=list)
    below: Array = field(init=False)

    def __post_init__(self) -> None:
        # the least step of this row group and all that follow
        self.below = np.append(np.minimum.accumulate(self.low[::-1])[::-1], _END + 1)

    @classmethod
    def of(cls, key: tuple[int, int], parts: list[Any]) -> _Source:
        """Return the row groups of a rank's parts; a part that still grows counts as one."""
        bounds = []
        for i, part in enumerate(parts):
            if part.index is not None:
                bounds += [(i, g, int(b[4]), int(b[2]), int(b[3])) for g, b in enumerate(part.index.row_groups)]
            elif part.rows:
                step = part.columns["step"]
                bounds.append((i, -1, part.rows, int(step.min()), int(step.max())))
        return cls(key, parts, *np.array(bounds, np.int64).reshape(-1, 5).T)

    def reach(self, rows: int) -> int:
        """Return the last step that is whole once ``rows`` more rows are decoded."""
        total = np.cumsum(self.rows[self.next :])
        upto = min(self.next + int(np.searchsorted(total, rows)) + 1, len(self.rows))
        if upto > self.next:  # the rest of the part too, if it is not much: a file is opened once then
            end = int(np.searchsorted(self.part, self.part[upto - 1], side="right"))
            upto = end if total[end - self.next - 1] <= 2 * rows else upto
        return int(self.below[upto]) - 1

    def take(self, last: int) -> list[tuple[Any, list[int]]]:
        """Return the row groups to decode for the steps up to ``last``, by part."""
        first = self.next
        while self.below[self.next] <= last:
            self.next += 1
        out: list[tuple[Any, list[int]]] = []
        for i in range(first, self.next):
            part = self.parts[self.part[i]]
            if out and out[-1][0] is part:
                out[-1][1].append(int(self.group[i]))
            else:
                out.append((part, [int(self.group[i])]))
        return out


def dataset_tables(events: xr.Dataset) -> Iterator[Table]:
    """Yield the self-time table of events in memory, dims (event,), one per restart in order."""
    words = [events[n].values for n in ("category", "op", "name", "phase")]
    code = np.zeros(len(words[0]), np.int64)
    for word in words:
        each, unique = pd.factorize(word)
        code = pd.factorize(code * (len(unique) + 1) + each)[0]
    first = np.unique(code, return_index=True)[1]
    category, op, name, phase = (w[first] for w in words)
    sites = Sites.of(category, op, name, phase)
    columns = {c: events[c].values for c in COLUMNS if c != "site"} | {"site": code.astype(np.int32)}
    number, rank = events.incarnation.values, events["rank"].values
    order = np.lexsort((rank, number))
    number, rank = number[order], rank[order]
    columns = {c: v[order] for c, v in columns.items()}
    for one in np.unique(number):
        lo, hi = np.searchsorted(number, [one, one + 1])
        ranks = np.unique(rank[lo:hi])
        block = Block(ranks)
        block.begin(0, _END)
        for column, bounds in enumerate(lo + np.searchsorted(rank[lo:hi], [ranks, ranks + 1]).T):
            block.add(column, {c: v[slice(*bounds)] for c, v in columns.items()}, sites)
            block.end_rank(column)
        yield block.table()


def run_tables(run: Run, steps: tuple[int, int] | None) -> Iterator[Table]:
    """Yield the self-time table of a run block by block, restarts in order.

    Parameters
    ----------
    run : Run
        The run.
    steps : (int, int), optional
        First and last step, both included; all by default.
    """
    reader, clock = run._reader("events"), run.clock_model
    low, high = (0, _END) if steps is None else (max(steps[0], 0), min(steps[1], _END))
    by_rank: dict[tuple[int, int], list[Any]] = {}
    for part in reader.parts:
        by_rank.setdefault(part.key, []).append(part)
    for number in sorted({k[0] for k in by_rank}):
        sources = [_Source.of(k, by_rank[k]) for k in sorted(by_rank) if k[0] == number]
        yield from _blocks(reader, clock, sources, low, high)


def _blocks(reader: TableReader, clock: ClockModel, sources: list[_Source], low: int, high: int) -> Iterator[Table]:
    category, op, name, phase = (reader.sites.values(n)[:-1] for n in ("category", "op", "name", "phase"))
    sites = Sites.of(category, op, name, phase)
    share = max(1, BLOCK_ROWS // max(1, len(sources)))
    for s in sources:  # what lies before the steps wanted
        while s.next < len(s.high) and s.high[s.next] < low:
            s.next += 1
    first, block = low, Block(np.array([s.key[1] for s in sources]))
    with ThreadPoolExecutor(_READERS) as pool:
        while first <= high and any(s.held or s.below[s.next] <= high for s in sources):
            least = min([int(s.below[s.next]) for s in sources] + [first] * any(bool(s.held) for s in sources))
            last = min(max(min(s.reach(share) for s in sources), least, first), high)
            block.begin(first, last)
            for column, pieces in enumerate(_ahead(pool, reader, [s.take(last) for s in sources])):
                fresh = [(*_rows(reader, p, g, t, clock), sites.at(p.lookup)) for p, g, t in pieces]
                _feed(block, column, sources[column], fresh, last)
            yield block.table()
            first = last + 1


def _ahead(
    pool: ThreadPoolExecutor, reader: TableReader, wanted: list[list[tuple[Any, list[int]]]]
) -> Iterator[list[tuple[Any, list[int], Any]]]:
    """Yield each rank's row groups decoded, a few ranks ahead of the one that is worked on."""
    pending: deque[Any] = deque()
    for pieces in wanted:
        pending.append(pool.submit(lambda some: [(p, g, _decoded(reader, p, g)) for p, g in some], pieces))
        if len(pending) > _AHEAD:
            yield pending.popleft().result()
    while pending:
        yield pending.popleft().result()


def _feed(block: Block, column: int, source: _Source, fresh: list[tuple[Rows, int, Sites]], last: int) -> None:
    """Give a block the rows of a rank, and keep those of later steps."""
    held, source.held = source.held, []
    for rows, offset, sites in (*held, *fresh):
        block.add(column, rows, sites, offset=offset)
        late = rows["step"] > last
        if late.any():
            at = int(late.argmax()) if len(late) > 1 else 0
            source.held.append(({k: v[at:].copy() if len(v) > 1 else v for k, v in rows.items()}, offset, sites))
    block.end_rank(column)


def _decoded(reader: TableReader, part: Any, groups: list[int]) -> Any:
    """Decode row groups of a closed part; what goes wrong is returned, to be told in the calling thread."""
    if part.index is None:
        return None
    try:
        return decode_closed(part.index.file or reader.store.open(part.segment), part.index, COLUMNS, groups)
    except Exception as err:  # noqa: BLE001 (whatever a corrupt file makes pyarrow raise)
        return err


def _rows(reader: TableReader, part: Any, groups: list[int], table: Any, clock: ClockModel) -> tuple[Rows, int]:
    """Return the columns of decoded row groups, constant ones as one value, and what to add to starts for the run clock, ns."""
    spec = reader.spec
    if isinstance(table, Exception):
        reader._problem(part.segment, table)
        warnings.warn(f"{part.segment.path}: {table}; its rows are left out", stacklevel=2)
        return {c: np.empty(0, spec.numpy_dtype(c)) for c in COLUMNS}, 0
    if part.index is None:
        out = {c: part.columns[c] for c in COLUMNS}
    else:
        constant = part.index.meta.get("constant", {})
        rows = int(part.index.row_groups[groups, 4].sum())
        out = {}
        for name in COLUMNS:
            dtype = spec.numpy_dtype(name)
            if table is not None and name in part.index.stored:
                column = table.column(name)
                whole = column.chunk(0) if column.num_chunks == 1 else column
                out[name] = np.asarray(whole.to_numpy(zero_copy_only=False), dtype)
            else:  # starts tell how many rows there are
                out[name] = np.full(
                    rows if name == "start_ns" else 1, constant.get(name, missing_value(spec, name)), dtype
                )
    if part.key not in clock.pieces:
        return out, clock.offset(part.key)
    own = out["start_ns"]
    end, start = own + out["duration_ns"], own + clock.shift(part.key, own)
    return {**out, "start_ns": start, "duration_ns": np.maximum(end + clock.shift(part.key, end) - start, 0)}, 0
