"""Reads segment files: an index first, rows where a question needs them; a growing stream as far as it is whole."""

from __future__ import annotations

import json
import resource
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from mappnb.table_specs import META, Columns, TableSpec, merge_meta, superseded
from mappnb.terms import Flag

__all__ = [
    "Index",
    "decode_closed",
    "read_closed",
    "read_index",
    "read_open",
    "read_small",
    "rows_of",
    "rows_of_alike",
    "verify_closed",
]


class _OpenFiles:
    """Segments whose files are open: so many at most that a run of ten thousand ranks does not use up the process's files."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: OrderedDict[int, weakref.ref[Index]] = OrderedDict()

    def keep(self, index: Index) -> None:
        """Take note that the file of ``index`` stays open; close those that were not used for longest."""
        with self._lock:
            self._open[id(index)] = weakref.ref(index)
            self._open.move_to_end(id(index))
            while len(self._open) > _limit():
                oldest = self._open.popitem(last=False)[1]()
                if oldest is not None:
                    oldest.file = None  # whoever reads from it holds it; else this closes it


@cache
def _limit() -> int:
    """Return how many files may stay open: a quarter of what the process may have, at most 1024."""
    return max(16, min(1024, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4))


_OPEN = _OpenFiles()


@dataclass(slots=True, weakref_slot=True)
class Index:
    """What a reader knows of a closed segment without decoding a row.

    Attributes
    ----------
    meta : dict
        Header, sites, anchors, threads, counters.
    row_groups : array, shape (row group, 5)
        First start and last end (ns, the rank's own clock), first and last step, number of rows.
    footer : pyarrow.parquet.FileMetaData
        The parsed footer, so that reading rows need not parse it again; None for small files.
    file : pyarrow.parquet.ParquetFile or None
        The file, open, where it has been read.
    """

    meta: dict[str, Any]
    row_groups: np.ndarray[Any, Any]
    footer: Any = None
    file: Any = None
    rows: int = field(init=False)
    bounds: tuple[int, int, int, int] = field(init=False, default=(0, 0, 0, 0))
    stored: frozenset[str] = field(init=False, default=frozenset())

    def __post_init__(self) -> None:
        groups = self.row_groups
        self.rows = int(groups[:, 4].sum())
        self.stored = frozenset(self.footer.schema.names) if self.footer is not None else frozenset()
        if len(groups) == 1:
            self.bounds = tuple(groups[0, :4].tolist())
        elif len(groups):
            self.bounds = (
                int(groups[:, 0].min()),
                int(groups[:, 1].max()),
                int(groups[:, 2].min()),
                int(groups[:, 3].max()),
            )

    def read(self, source: Any, row_groups: list[int], columns: list[str]) -> pa.Table:
        """Decode row groups; a local file stays open for the next call."""
        file, self.file = self.file, None  # taken while in use: two threads never share a reader
        if file is None:
            file = pq.ParquetFile(source, metadata=self.footer, memory_map=isinstance(source, str))
        try:
            return file.read_row_groups(row_groups, columns=columns, use_threads=False)
        finally:
            self.file = file
            _OPEN.keep(self)

    def overlapping(self, time_ns: tuple[int, int] | None, steps: tuple[int, int] | None) -> list[int]:
        """Return the row groups that may hold rows of a window: ``[t0, t1)`` in ns, steps first to last inclusive."""
        first, end, low, high = self.bounds
        if time_ns is not None and (first >= time_ns[1] or end < time_ns[0]):
            return []
        if steps is not None and (low > steps[1] or high < steps[0]):
            return []
        groups = self.row_groups
        keep = np.ones(len(groups), bool)
        if time_ns is not None:
            keep &= (groups[:, 0] < time_ns[1]) & (groups[:, 1] >= time_ns[0])
        if steps is not None:
            keep &= (groups[:, 2] <= steps[1]) & (groups[:, 3] >= steps[0])
        return [int(i) for i in np.flatnonzero(keep)]


def read_index(source: Any) -> Index:
    """Read the metadata of a closed segment: a path or a binary file. Raises ValueError if it is not one of ours."""
    return _index_of(pq.read_metadata(source))


def read_small(path: str, *, rows: bool) -> tuple[Index, pa.Table | None]:
    """Read a closed segment of a few kB in one go.

    Parameters
    ----------
    path : str
        A local file.
    rows : bool
        Whether its rows will be wanted too.

    Returns
    -------
    index : Index
    table : Table or None
        The rows where they were wanted and can be decoded; whoever wants them else tries again, and tells.
    """
    with open(path, "rb", buffering=0) as source:
        file = pq.ParquetFile(pa.BufferReader(source.read()))
    index = _index_of(file.metadata)
    index.footer = None  # 24 kB in memory, more than the file: parsed again where its rows are wanted again
    try:
        return index, file.read(use_threads=False) if rows else None
    except Exception:  # noqa: BLE001 (whatever a corrupt file makes pyarrow raise)
        return index, None


def _index_of(footer: Any) -> Index:
    found = footer.metadata or {}
    if META not in found:
        raise ValueError("a Parquet file without mappnb metadata")
    meta = json.loads(found[META])
    return Index(meta, np.array(meta.pop("row_groups"), np.int64).reshape(-1, 5), footer)


def verify_closed(source: Any) -> int:
    """Decode a closed segment whole, with the checksum of every page; returns the rows, raises OSError where one is wrong."""
    with pq.ParquetFile(source, page_checksum_verification=True) as file:
        return int(file.read(use_threads=False).num_rows)


def _array(column: pa.ChunkedArray, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Return a column as an array; one chunk of numbers is not copied."""
    whole = column.chunk(0) if column.num_chunks == 1 else column
    return np.asarray(whole.to_numpy(zero_copy_only=False), dtype=dtype)


def _to_numpy(table: pa.Table, spec: TableSpec) -> Columns:
    return {
        name: _array(column, spec.numpy_dtype(name))
        for name, column in zip(table.column_names, table.columns, strict=True)
    }


def decode_closed(source: Any, index: Index, columns: tuple[str, ...], row_groups: list[int]) -> pa.Table | None:
    """Decode the stored ones of some columns; None if none of them is stored. Runs outside Python's lock for the most part."""
    stored = [c for c in columns if c in index.stored]
    return index.read(source, row_groups, stored) if stored and row_groups else None


def rows_of(
    table: pa.Table | None,
    spec: TableSpec,
    index: Index,
    columns: tuple[str, ...],
    row_groups: list[int],
    *,
    keep: Callable[[Columns], np.ndarray[Any, Any]] | None = None,
    keep_by: tuple[str, ...] = (),
) -> Columns:
    """Return rows of a decoded segment.

    Parameters
    ----------
    table : Table or None
        What :func:`decode_closed` gave for ``columns`` and ``keep_by``.
    spec : TableSpec
        Its table.
    index : Index
        Of the segment. Columns that are constant in it stand there, not in the file; one that an older version did not write comes
        filled with "not applicable".
    columns : tuple of str
        Columns wanted.
    row_groups : list of int
        Row groups that were decoded.
    keep : callable, optional
        Gets the columns ``keep_by`` and returns a mask of the rows wanted.
    """
    rows = int(index.row_groups[row_groups, 4].sum())
    constant = index.meta.get("constant", {})

    def column(name: str) -> np.ndarray[Any, Any]:
        dtype = spec.numpy_dtype(name)
        if table is not None and name in index.stored:
            return _array(table.column(name), dtype)
        return np.full(rows, constant.get(name, missing_value(spec, name)), dtype)

    if keep is None:
        return {c: column(c) for c in columns}
    mask = keep({c: column(c) for c in keep_by})
    hits = np.flatnonzero(mask)
    first, rows = (int(hits[0]), int(hits[-1] - hits[0]) + 1) if len(hits) else (0, 0)
    table = None if table is None else table.slice(first, rows)  # a window is few rows of many: cut before a copy
    if len(hits) == rows:
        return {c: column(c) for c in columns}
    hits -= first
    return {c: column(c)[hits] for c in columns}


def rows_of_alike(
    tables: list[pa.Table | None], spec: TableSpec, indexes: list[Index], columns: tuple[str, ...]
) -> Columns:
    """Return the rows of whole segments that store the same ones of ``columns``, one after the other: ten thousand take no loop.

    Parameters
    ----------
    tables, indexes : list
        As for :func:`rows_of`, of each segment.
    spec : TableSpec
        Their table.
    columns : tuple of str
        Columns wanted.
    """
    there = [t for t in tables if t is not None]
    whole = pa.concat_tables(there) if there else None
    rows = [i.rows for i in indexes]

    def column(name: str) -> np.ndarray[Any, Any]:
        if whole is not None and name in indexes[0].stored:
            return _array(whole.column(name), spec.numpy_dtype(name))
        fill = missing_value(spec, name)
        values = [i.meta.get("constant", {}).get(name, fill) for i in indexes]
        return np.repeat(np.array(values, spec.numpy_dtype(name)), rows)

    return {c: column(c) for c in columns}


def read_closed(
    source: Any, spec: TableSpec, *, index: Index, columns: list[str] | None = None, row_groups: list[int] | None = None
) -> Columns:
    """Read rows of a closed segment: all columns and row groups by default."""
    wanted = tuple(columns or spec.columns)
    groups = list(range(len(index.row_groups))) if row_groups is None else row_groups
    return rows_of(decode_closed(source, index, wanted, groups), spec, index, wanted, groups)


def missing_value(spec: TableSpec, name: str) -> Any:
    """Return what stands for "not applicable" in a stored column."""
    return {"f": np.nan, "u": 0, "O": ""}.get(spec.numpy_dtype(name).kind, -1)


def read_open(source: Any, spec: TableSpec) -> tuple[Columns, dict[str, Any]]:
    """Read what is whole of a growing stream.

    Returns
    -------
    columns : dict
        Rows, without those that a later row of the same span replaces. Rows of spans still open last until the newest
        sign of life of the rank (``now_ns`` in the metadata).
    meta : dict
        Header and the merged metadata of all batches; ``truncated`` is True if the last batch was cut.
    """
    data = source.read() if hasattr(source, "read") else Path(source).read_bytes()
    batches: list[pa.RecordBatch] = []
    meta: dict[str, Any] = {}
    try:
        reader = pa.ipc.open_stream(pa.py_buffer(data))
        meta.update(json.loads((reader.schema.metadata or {})[META]))
        while True:
            batch, custom = reader.read_next_batch_with_custom_metadata()
            batches.append(batch)
            merge_meta(meta, json.loads(custom[META]) if custom else {})
    except StopIteration:
        meta["truncated"] = False
    except (pa.ArrowInvalid, OSError, ValueError, KeyError):
        meta["truncated"] = True
    columns = _to_numpy(
        pa.Table.from_batches(batches, schema=batches[0].schema if batches else spec.arrow_schema), spec
    )
    return (_settle(columns, meta) if "flags" in columns else columns), meta


def _settle(columns: Columns, meta: Mapping[str, Any]) -> Columns:
    keep = ~superseded(columns)
    out = {k: v[keep] for k, v in columns.items()}
    still = (out["flags"] & (Flag.OPEN | Flag.CLIPPED)) == Flag.OPEN
    if still.any() and "now_ns" in meta:
        out["duration_ns"] = np.where(
            still, np.maximum(meta["now_ns"] - out["start_ns"], out["duration_ns"]), out["duration_ns"]
        )
    return out
