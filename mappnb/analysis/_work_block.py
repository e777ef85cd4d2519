"""Some steps of all ranks on the native side: rows in, the self-time table out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xarray as xr

from mappnb import _core
from mappnb.analysis._work_parts import RECV, SEND, kinds_of
from mappnb.analysis._work_table import Table
from mappnb.analysis.matching import calls_of
from mappnb.schema import EVENTS, empty
from mappnb.terms import Category, Op

__all__ = ["COLUMNS", "Block", "Sites"]

Array = np.ndarray[Any, Any]
COLUMNS: tuple[str, ...] = (
    "start_ns",
    "duration_ns",
    "step",
    "site",
    "stage",
    "group",
    "seq",
    "bytes",
    "peer",
    "thread",
    "stream",
    "flags",
)
"""Stored columns that a block needs, in the order of ``SelfTime.add``."""


@dataclass(frozen=True, slots=True)
class Sites:
    """What the native side must know of static descriptions: kinds, and operations as numbers; the last entry serves unknown ones."""

    kind: Array
    op: Array
    _known: dict[bytes, Sites] = field(default_factory=dict)

    @classmethod
    def of(cls, category: Array, op: Array, name: Array, phase: Array) -> Sites:
        """Return the numbers of descriptions; marks have kind -1, operations of uneven shares are negative."""
        kind = np.where(category == Category.MARK, -1, kinds_of(category, op, name, phase))
        code = {word: i + 1 for i, word in enumerate(dict.fromkeys(op))}
        return cls(
            np.append(kind, -1).astype(np.int8),
            np.array([*(-code[o] if o == Op.ALL_TO_ALL else code[o] for o in op), 0], np.int32),
        )

    def at(self, lookup: Array) -> Sites:
        """Return those of one segment, whose site ids ``lookup`` maps to numbers of these; most segments have the same ids."""
        key = lookup.tobytes()
        if (known := self._known.get(key)) is None:
            lookup = np.append(lookup, -1)
            known = self._known[key] = Sites(self.kind[lookup], self.op[lookup])
        return known


class Block:
    """Takes rows rank by rank.

    Parameters
    ----------
    ranks : int array
        Global ranks of the columns, rising.
    passes : int
        How many threads may add rows at once: each in a pass of its own, each rank in one of them.
    """

    def __init__(self, ranks: Array, passes: int = 1) -> None:
        self.ranks = ranks
        self._native = _core.SelfTime(len(ranks), passes)

    def begin(self, first: int, last: int) -> None:
        """Forget all rows; the steps from ``first`` to ``last`` count, both included."""
        self._native.begin(max(first, 0), min(last, 2**31 - 1))

    def add(self, column: int, rows: Mapping[str, Array], sites: Sites, *, offset: int = 0, which: int = 0) -> None:
        """Take rows of the rank of a column; ``offset`` (ns) is added to their starts. Columns may hold one value for all rows."""
        columns: tuple[Any, ...] = tuple(rows[c] for c in COLUMNS)
        self._native.add(which, int(self.ranks[column]), offset, *columns, sites.kind, sites.op)  # type: ignore[call-arg]

    def end_rank(self, column: int, which: int = 0) -> None:
        """Tell that the rank's rows are all there, those of its pass."""
        self._native.end_rank(which, column)

    def table(self) -> Table:
        """Return the table; all ranks have ended."""
        native = self._native
        self._resolve()
        native.finish()
        steps = np.array(native.steps, np.int64)
        shape = (len(steps), len(self.ranks))
        cells = np.empty((8, *shape), np.int64)
        native.read_cells(cells)
        parts = native.parts  # those of earlier steps too
        self_ns, count = np.empty((*shape, len(parts)), np.int64), np.empty((*shape, len(parts)), np.int32)
        native.read_parts(self_ns, count)
        return Table(steps, self.ranks, list(parts), self_ns, count, cells)

    def _resolve(self) -> None:
        """Give transfers numbers by order where the recorded ones do not hold, as :func:`mappnb.analysis.match` does."""
        which = np.array(self._native.suspects(), np.int64)
        if not len(which):
            return
        found = np.empty((9, len(which)), np.int64)
        self._native.read_entries(which, found)
        kind, group, source, target, seq, tag, column, step, start = found
        sending, pair = kind == SEND, (kind == SEND) | (kind == RECV)
        data: dict[str, Any] = empty(EVENTS, {"event": len(which)})
        data["category"][:] = np.where(pair, Category.P2P, Category.COLLECTIVE)
        data["op"][:] = np.where(pair, np.where(sending, Op.SEND, Op.RECV), "any")
        data["rank"][:] = self.ranks[column]
        data["step"][:] = step
        data["peer"][:] = np.where(sending, target, source)
        for name, value in (
            ("group", group),
            ("seq", seq),
            ("bytes", tag),
            ("start_ns", start),
            ("raw_start_ns", start),
        ):
            data[name][:] = value
        data["incarnation"][:] = 0
        transfers = calls_of(xr.Dataset({k: ("event", v) for k, v in data.items()}), "auto").transfers
        by_order = transfers.by_order[transfers.channel].astype(np.uint8)
        self._native.renumber(which[transfers.index], transfers.number.astype(np.int64), by_order)
