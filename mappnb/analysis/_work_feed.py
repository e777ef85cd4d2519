"""Rows of a run, some steps of all ranks at a time: each row group is decoded once, and no more is held than a block needs."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from mappnb.analysis._work_block import COLUMNS, Block, Sites
from mappnb.analysis._work_rows import Decoder, Rows
from mappnb.analysis._work_table import Table
from mappnb.clockmodel import ClockModel
from mappnb.run import Run
from mappnb.tables import TableReader

__all__ = ["dataset_tables", "run_tables"]

Array = np.ndarray[Any, Any]
Pieces = tuple[Any, list[int]]
"""A part, and row groups of it."""

BLOCK_ROWS = 2 * 2**20
"""Rows of a block over all ranks. Measured at 1,024 ranks: twice as many take 5 % less CPU time and 270 MiB more."""
_PASSES = max(1, min(4, os.cpu_count() or 1))
"""Threads that work out ranks at once: what they share are Python's lock, for a few calls a rank, and the memory's speed."""
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

    def take(self, last: int) -> list[Pieces]:
        """Return the row groups to decode for the steps up to ``last``, by part."""
        first = self.next
        while self.below[self.next] <= last:
            self.next += 1
        out: list[Pieces] = []
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
    """Yield one table after the other; while one is summed up, the rows of the next are read already."""
    category, op, name, phase = (reader.sites.values(n)[:-1] for n in ("category", "op", "name", "phase"))
    sites = Sites.of(category, op, name, phase)
    for s in sources:  # what lies before the steps wanted
        while s.next < len(s.high) and s.high[s.next] < low:
            s.next += 1
    ranks, passes = np.array([s.key[1] for s in sources]), min(_PASSES, len(sources))
    decoders = [Decoder(reader, clock) for _ in range(passes)]
    first, done, free = low, None, [Block(ranks, passes) for _ in range(2)]
    with ThreadPoolExecutor(passes) as pool:
        while first <= high and any(s.held or s.below[s.next] <= high for s in sources):
            last, block = _last_step(sources, first, high), free.pop()
            block.begin(first, last)
            left: SimpleQueue[tuple[int, list[Pieces]]] = SimpleQueue()
            for column, s in enumerate(sources):
                left.put((column, s.take(last)))
            work = [pool.submit(_pass, block, i, d, sources, sites, left, last) for i, d in enumerate(decoders)]
            if done is not None:
                yield done.table()
                free.append(done)
            for one in work:
                one.result()
            _tell(reader, decoders)
            first, done = last + 1, block
        if done is not None:
            yield done.table()


def _last_step(sources: list[_Source], first: int, high: int) -> int:
    """Return the last step of the block that begins with ``first``."""
    share = max(1, BLOCK_ROWS // max(1, len(sources)))
    least = min([int(s.below[s.next]) for s in sources] + [first] * any(bool(s.held) for s in sources))
    return min(max(min(s.reach(share) for s in sources), least, first), high)


def _pass(
    block: Block,
    which: int,
    decoder: Decoder,
    sources: list[_Source],
    sites: Sites,
    left: SimpleQueue[tuple[int, list[Pieces]]],
    last: int,
) -> None:
    """Work out one rank after the other, as long as there are any left."""
    with suppress(Empty):
        while True:
            column, wanted = left.get_nowait()
            fresh = ((*decoder.rows(p, g), sites.at(p.lookup)) for p, g in wanted)
            _feed(block, which, column, sources[column], fresh, last)
            block.end_rank(column, which)


def _feed(
    block: Block, which: int, column: int, source: _Source, fresh: Iterable[tuple[Rows, int, Sites]], last: int
) -> None:
    """Give a block the rows of a rank, and keep those of later steps."""
    held, source.held = source.held, []
    for rows, offset, own in chain(held, fresh):
        block.add(column, rows, own, offset=offset, which=which)
        late = rows["step"] > last
        if late.any():
            at = int(late.argmax()) if len(late) > 1 else 0
            source.held.append(({k: v[at:].copy() if len(v) > 1 else v for k, v in rows.items()}, offset, own))


def _tell(reader: TableReader, decoders: list[Decoder]) -> None:
    """Report what could not be read."""
    for part, err in chain.from_iterable(d.problems for d in decoders):
        reader._problem(part.segment, err)
        warnings.warn(f"{part.segment.path}: {err}; its rows are left out", stacklevel=3)
    for d in decoders:
        d.problems.clear()
