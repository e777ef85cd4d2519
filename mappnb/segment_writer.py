"""Appends rows of one table: a growing Arrow stream, closed as Parquet. Nothing is ever rewritten.

A table of one rank is a folder. New rows go to ``open-000043.arrows``, an Arrow IPC stream that is handed to the
operating system at every append, so that a killed process loses nothing it had appended. A full segment is written as
``seg-000043.parquet`` under a temporary name, synced and renamed; then the stream is removed. So the cost of a row does
not grow with the length of the run.
"""

from __future__ import annotations

import io
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from mappnb.arrow_batches import BatchLayout
from mappnb.table_specs import META, OPEN_NAME, SEGMENT_NAME, Columns, Rows, TableSpec, merge_meta, superseded
from mappnb.terms import Flag

__all__ = ["TableWriter", "write_file"]

ROW_GROUP_ROWS = 2048


def _row_groups(spec: TableSpec, columns: Columns, rows: int) -> list[list[int]]:
    """Per row group: first start, last end, first and last step, number of rows. Lets a reader skip what it need not decode."""
    start, end = spec.bounds(columns)
    step = columns.get("step", np.full(rows, -1))
    cuts = np.arange(0, rows, ROW_GROUP_ROWS)
    first, last = np.minimum.reduceat, np.maximum.reduceat
    sizes = np.diff([*cuts.tolist(), rows])
    bounds = (first(start, cuts), last(end, cuts), first(step, cuts), last(step, cuts), sizes)
    return [list(group) for group in zip(*(b.tolist() for b in bounds), strict=True)]


def _text(column: np.ndarray[Any, Any]) -> tuple[bytes, bytes]:
    """Return a column of text as Arrow keeps it: where each one begins and the last ends, and all of it."""
    texts = [str(text).encode() for text in column]
    offsets = np.zeros(len(texts) + 1, np.int32)
    np.cumsum([len(t) for t in texts], out=offsets[1:])
    return offsets.tobytes(), b"".join(texts)


def _array(column: np.ndarray[Any, Any], kind: pa.DataType) -> pa.Array:
    """Return a column as an Arrow array. ``pa.array`` would import pandas into the training job, half a second of CPU."""
    buffers = _text(column) if kind == pa.string() else (np.ascontiguousarray(column),)
    return pa.Array.from_buffers(kind, len(column), [None, *map(pa.py_buffer, buffers)])


class _WholeFile(io.FileIO):
    """A file that takes all that is written or raises: a nearly full disk takes a part, and says so in a number only."""

    def hand_over(self, data: bytes) -> None:
        """Give every byte to the operating system."""
        left = memoryview(data)
        while left:
            left = left[super().write(left) or 0 :]


class TableWriter:
    """Appends rows of one table of one rank.

    Parameters
    ----------
    directory : Path
        Folder of the table; created.
    spec : TableSpec
        What the rows look like.
    header : mapping
        Metadata put into every segment: run id, incarnation, rank, format version.
    max_rows, max_age_s : int, float
        A segment is closed when it holds this many rows, or when it is this old (seconds).
    site : callable, optional
        Returns the description of a site id (events only).
    stream : bool
        Hand rows to the operating system at every append. False: only when a segment is closed, for a folder that counts for
        nothing before it is whole.
    """

    def __init__(
        self,
        directory: Path,
        spec: TableSpec,
        header: Mapping[str, Any],
        *,
        max_rows: int = 65536,
        max_age_s: float = 600.0,
        site: Callable[[int], Iterable[Any]] | None = None,
        stream: bool = True,
    ) -> None:
        self.directory, self.spec, self.site, self.stream = directory, spec, site, stream
        self.header, self.max_rows, self.max_age_s = dict(header), max_rows, max_age_s
        self.is_open: Callable[[Columns], np.ndarray[Any, Any]] = lambda columns: np.ones(len(columns["flags"]), bool)
        self.number = 0
        self.rows_written = 0
        self._schema = spec.arrow_schema
        self._fields = list(self._schema)
        self._layout = BatchLayout([kind == "str" for kind in spec.columns.values()], META)
        self._is_open = False
        self._file: _WholeFile | None = None
        self._begin = b""  # what the file begins with, until it does
        self._batches: list[Rows] = []
        self._meta: dict[str, Any] = {}
        self._described = np.zeros(256, bool)  # sites that the open segment tells of
        self._rows = 0
        self._opened_s = 0.0
        directory.mkdir(parents=True, exist_ok=True)

    def append(self, columns: Rows, *, meta: Mapping[str, Any] | None = None) -> None:
        """Hand rows to the operating system; close the segment when it is full or old.

        Parameters
        ----------
        columns : dict, or array of records
            Every column of the table. The arrays are kept until the segment is closed.
        meta : mapping, optional
            Metadata of this batch, such as ``now_ns`` and new clock anchors.

        Raises
        ------
        OSError
            If the disk is full or not writable.
        """
        self._put(columns, meta)
        if self._rows >= self.max_rows or time.monotonic() - self._opened_s >= self.max_age_s:
            self.roll()

    def _put(self, columns: Rows, meta: Mapping[str, Any] | None = None) -> None:
        rows = len(columns[self.spec.start])
        meta = {**(meta or {}), **self._new_sites(columns)}
        if not self._is_open:
            self._open()
        if self._file is not None:
            batch = self._layout.message(rows, self._buffers(columns), json.dumps(meta).encode() if meta else b"{}")
            begin, self._begin = self._begin, b""
            self._file.hand_over(begin + batch)
        merge_meta(self._meta, meta)
        if rows:
            self._batches.append(columns)
            self._rows += rows
            self.rows_written += rows

    def _buffers(self, columns: Rows) -> list[bytes]:
        out: list[bytes] = []
        for name, kind in self.spec.columns.items():
            out += _text(columns[name]) if kind == "str" else (columns[name].tobytes(),)
        return out

    def _new_sites(self, columns: Rows) -> dict[str, Any]:
        if self.site is None or not len(columns["site"]):
            return {}
        site = columns["site"]
        if (most := int(site.max())) >= len(self._described):
            self._described = np.concatenate([self._described, np.zeros(most + 1, bool)])
        new = sorted(set(site[~self._described[site]].tolist()))  # np.unique would import numpy.ma into the job
        self._described[new] = True
        return {"sites": {str(i): list(self.site(i)) for i in new}} if new else {}

    def _open(self) -> None:
        if self.stream:
            self._file = _WholeFile(self.directory / OPEN_NAME.format(self.number), "xb")
            self._begin = self._schema.with_metadata({META: json.dumps(self.header)}).serialize().to_pybytes()
        self._opened_s, self._is_open = time.monotonic(), True

    def roll(self) -> None:
        """Close the segment: write its Parquet file, then remove the stream."""
        if not self._is_open:
            return
        kept, carried = self._finished()
        if len(kept[self.spec.start]):
            self._write_parquet(kept)
        if self._file is not None:
            self._file.close()
            os.unlink(self.directory / OPEN_NAME.format(self.number))
        self._file, self._is_open = None, False
        self._batches, self._meta, self._rows = [], {}, 0
        self._described[:] = False
        self.number += bool(len(kept[self.spec.start]))  # a number without a file reads as a loss
        if len(carried[self.spec.start]):
            self._put(carried)  # never full again at once, however many are open

    def _finished(self) -> tuple[Columns, Columns]:
        """Return (rows for the Parquet file in order of start, rows of spans still open)."""
        if not self._batches:
            none = {k: np.empty(0, self.spec.numpy_dtype(k)) for k in self.spec.columns}
            return none, none
        alone = self._batches[0] if len(self._batches) == 1 else None
        whole = {
            k: alone[k] if alone is not None else np.concatenate([b[k] for b in self._batches])
            for k in self.spec.columns
        }
        start = whole[self.spec.start]
        order = slice(None) if (start[1:] >= start[:-1]).all() else np.argsort(start, kind="stable")
        if "flags" not in whole or not (whole["flags"] & Flag.OPEN).any():
            return {k: v[order] for k, v in whole.items()}, {k: v[:0] for k, v in whole.items()}
        order = np.arange(len(start))[order]
        stale = superseded(whole)
        still_open = ~stale & ((whole["flags"] & (Flag.OPEN | Flag.CLIPPED)) == Flag.OPEN)
        still_open &= self.is_open(whole)
        keep = order[~(stale | still_open)[order]]
        return {k: v[keep] for k, v in whole.items()}, {k: v[still_open] for k, v in whole.items()}

    def _write_parquet(self, columns: Columns) -> None:
        rows = len(columns[self.spec.start])
        constant = {
            k: v[0].item()
            for k, v in columns.items()
            if v.dtype.kind in "iu" and k != self.spec.start and (v == v[0]).all()
        }
        row_groups = _row_groups(self.spec, columns, rows)
        meta = {**self.header, **self._meta, "rows": rows, "row_groups": row_groups, "constant": constant}
        fields = [f for f in self._fields if f.name not in constant]
        schema = pa.schema(fields, metadata={META: json.dumps(meta)})
        table = pa.table([_array(columns[f.name], f.type) for f in fields], schema=schema)
        text = [f.name for f in fields if f.type == pa.string()]
        split = {f.name: "BYTE_STREAM_SPLIT" for f in fields if f.type in (pa.int64(), pa.int32(), pa.float64())}
        options = {
            "compression": "lz4",  # decodes twice as fast as zstd here; with split bytes it is about as small
            "row_group_size": ROW_GROUP_ROWS,
            "write_statistics": False,
            "write_page_checksum": True,
            "use_dictionary": text,
            "column_encoding": split,
        }
        write_file(
            self.directory / SEGMENT_NAME.format(self.number), lambda sink: pq.write_table(table, sink, **options)
        )

    def close(self) -> None:
        """Close the last segment."""
        while self._is_open and self._rows:
            before = self._rows
            self.roll()
            if self._rows >= before:
                break
        if self._is_open and not self._rows:
            self.roll()

    def abandon(self) -> None:
        """Let go of the files without writing: used when the disk refuses."""
        if self._file is not None:
            self._file.close()
        self._file, self._is_open = None, False


def write_file(path: Path, write: Callable[[Any], object]) -> None:
    """Write a file so that it is there whole or not at all: temporary name, fsync, rename."""
    tmp = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with open(tmp, "wb") as sink:
            write(sink)
            sink.flush()
            os.fsync(sink.fileno())
        os.replace(tmp, path)
    except BaseException:
        tmp.unlink(missing_ok=True)
        raise
