"""Rows of one rank out of closed segments: by the native decoder where it knows the file, by pyarrow where it does not."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from mappnb import _core
from mappnb.analysis._work_block import COLUMNS
from mappnb.clockmodel import ClockModel
from mappnb.segments import decode_closed, missing_value
from mappnb.table_specs import TABLES
from mappnb.tables import TableReader

__all__ = ["Decoder", "Rows"]

Array = np.ndarray[Any, Any]
Rows = dict[str, Array]
_SPEC = TABLES["events"]
DTYPES = {c: _SPEC.numpy_dtype(c) for c in COLUMNS}
_ALIGN = 64


@lru_cache(4096)
def _one(name: str, value: int | None) -> Array:
    """Return a constant of a segment as an array of one value; that of an older version's column, which it lacks, is None."""
    return np.full(1, missing_value(_SPEC, name) if value is None else value, DTYPES[name])


@dataclass(slots=True)
class Decoder:
    """Decodes row groups of one part after the other, for one thread; rows are good until the next call.

    Parameters
    ----------
    reader : TableReader
        The table of events.
    clock : ClockModel
        Puts starts on the run clock.
    """

    reader: TableReader
    clock: ClockModel
    problems: list[tuple[Any, Exception]] = field(default_factory=list)
    _native: Any = field(default_factory=_core.SegmentColumns)
    _buffer: Array = field(default_factory=lambda: np.empty(0, np.uint8))

    def rows(self, part: Any, groups: list[int]) -> tuple[Rows, int]:
        """Return the columns of row groups, constant ones as one value, and what to add to starts for the run clock, ns.

        Parameters
        ----------
        part : part of a TableReader
            A segment; all of it where it still grows.
        groups : list of int
            Row groups of a closed one. Where they cannot be read there are no rows, and ``problems`` says why.
        """
        out = {c: part.columns[c] for c in COLUMNS} if part.index is None else self._closed(part, groups)
        if part.key not in self.clock.pieces:
            return out, self.clock.offset(part.key)
        own = out["start_ns"]
        end, start = own + out["duration_ns"], own + self.clock.shift(part.key, own)
        return {
            **out,
            "start_ns": start,
            "duration_ns": np.maximum(end + self.clock.shift(part.key, end) - start, 0),
        }, 0

    def _closed(self, part: Any, groups: list[int]) -> Rows:
        constant = part.index.meta.get("constant", {})
        number = int(part.index.row_groups[groups, 4].sum())
        stored = [c for c in COLUMNS if c in part.index.stored]
        try:
            out = self._stored(part, groups, stored, number)
        except Exception as err:  # noqa: BLE001 (whatever a corrupt file makes pyarrow raise)
            self.problems.append((part, err))
            return {c: np.empty(0, DTYPES[c]) for c in COLUMNS}
        for name in COLUMNS:
            if name not in out:
                out[name] = _one(name, constant.get(name))
        if "start_ns" not in stored:  # starts tell how many rows there are
            out["start_ns"] = np.repeat(out["start_ns"], number)
        return out

    def _stored(self, part: Any, groups: list[int], names: list[str], number: int) -> Rows:
        if names and self.reader.store.local:
            out = self._room(names, number)
            try:
                self._native.read(part.segment.path, groups, names, list(out.values()))
            except RuntimeError:  # another kind of Parquet, or a file that pyarrow will say more about
                pass
            else:
                return out
        source = part.index.file or self.reader.store.open(part.segment)
        table = decode_closed(source, part.index, COLUMNS, groups)
        return {} if table is None else {n: self._array(table.column(n), n) for n in names}

    def _array(self, column: Any, name: str) -> Array:
        whole = column.chunk(0) if column.num_chunks == 1 else column
        return np.asarray(whole.to_numpy(zero_copy_only=False), DTYPES[name])

    def _room(self, names: list[str], number: int) -> Rows:
        """Return arrays for the columns, in memory that is used again."""
        dtypes = [DTYPES[n] for n in names]
        sizes = [-(-number * d.itemsize // _ALIGN) * _ALIGN for d in dtypes]
        if len(self._buffer) < sum(sizes):
            self._buffer = np.empty(sum(sizes), np.uint8)
        out, at = {}, 0
        for name, dtype, size in zip(names, dtypes, sizes, strict=True):
            out[name] = self._buffer[at : at + number * dtype.itemsize].view(dtype)
            at += size
        return out
