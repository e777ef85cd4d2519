"""Tables on disk as a sequence of segments: one growing Arrow stream, and closed Parquet files before it.

A table of one rank is a folder. New rows go to ``open-000043.arrows``, an Arrow IPC stream that is handed to the
operating system at every append, so that a killed process loses nothing it had appended. A full segment is written as
``seg-000043.parquet`` under a temporary name, synced and renamed; then the stream is removed. Nothing is ever
rewritten, so the cost of a row does not grow with the length of the run.
"""

from __future__ import annotations

import io
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from mappnb.terms import Flag

__all__ = [
    "OPEN_NAME",
    "SEGMENT_NAME",
    "TABLES",
    "Columns",
    "Index",
    "TableSpec",
    "TableWriter",
    "read_closed",
    "read_index",
    "read_open",
    "verify_closed",
]

Columns = dict[str, np.ndarray[Any, Any]]
"""Columns of a table by name; all of one length."""

SEGMENT_NAME = "seg-{:06d}.parquet"
OPEN_NAME = "open-{:06d}.arrows"
ROW_GROUP_ROWS = 4096
_META = b"mappnb"


@dataclass(frozen=True, slots=True)
class TableSpec:
    """What a stored table looks like.

    Attributes
    ----------
    name : str
        Folder name.
    columns : dict of str to str
        NumPy dtype of each column; ``"str"`` for text.
    start, end : str
        Columns that bound a row in time; ``end`` may be ``"+duration_ns"`` for ``start + duration_ns``.
    """

    name: str
    columns: dict[str, str]
    start: str
    end: str

    @property
    def arrow_schema(self) -> pa.Schema:
        """The Arrow schema of the columns, without metadata."""
        kinds = {k: pa.string() if d == "str" else pa.from_numpy_dtype(np.dtype(d)) for k, d in self.columns.items()}
        return pa.schema(list(kinds.items()))

    def bounds(self, columns: Columns) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Return (start, end) in ns of every row."""
        start = columns[self.start]
        end: np.ndarray[Any, Any] = start + columns["duration_ns"] if self.end == "+duration_ns" else columns[self.end]
        return start, end

    def numpy_dtype(self, column: str) -> np.dtype[Any]:
        """Return the dtype of a column in memory: object for text."""
        return np.dtype(object if self.columns[column] == "str" else self.columns[column])


_I8 = dict.fromkeys(("start_ns", "duration_ns", "issue_ns", "cpu_ns", "bytes", "seq", "group"), "i8")
_STEP = dict.fromkeys(
    ("loss", "grad_norm", "lr", "tokens", "microbatches", "skipped", "memory_bytes", "memory_peak_bytes"), "f8"
)
_SAMPLE = [
    "cpu_fraction",
    "run_queue_fraction",
    "rss_bytes",
    "host_cpu_fraction",
    "host_memory_fraction",
    "cpu_mhz",
    "net_sent_bytes",
    "net_received_bytes",
    "sm_clock_mhz",
    "memory_clock_mhz",
    "power_w",
    "temperature_c",
]
TABLES: dict[str, TableSpec] = {
    "events": TableSpec(
        "events",
        {
            **_I8,
            **dict.fromkeys(("site", "step", "peer"), "i4"),
            **{
                "stage": "i2",
                "chunk": "i2",
                "microbatch": "i4",
                "depth": "i2",
                "flags": "u2",
                "thread": "i4",
                "stream": "i4",
            },
        },
        "start_ns",
        "+duration_ns",
    ),
    "steps": TableSpec("steps", {"step": "i4", "start_ns": "i8", "end_ns": "i8", **_STEP}, "start_ns", "end_ns"),
    "telemetry": TableSpec(
        "telemetry",
        {
            "time_ns": "i8",
            **dict.fromkeys(_SAMPLE, "f8"),
            **{"throttle_reasons": "i8", "gpu_fraction": "f8", "gpu_memory_bytes": "f8"},
        },
        "time_ns",
        "time_ns",
    ),
    "metrics": TableSpec(
        "metrics",
        {
            "time_ns": "i8",
            "name": "str",
            **{"step": "i4", "chunk": "i2", "microbatch": "i4", "layer": "i4", "index": "i4", "value": "f8"},
        },
        "time_ns",
        "time_ns",
    ),
}
"""The stored tables of a rank."""


def merge_meta(into: dict[str, Any], new: Mapping[str, Any]) -> None:
    """Add the metadata of a later batch: mappings are updated, lists extended, plain values replaced."""
    for key, value in new.items():
        if isinstance(value, Mapping):
            into.setdefault(key, {}).update(value)
        elif isinstance(value, list):
            into.setdefault(key, []).extend(value)
        else:
            into[key] = value


def _row_groups(spec: TableSpec, columns: Columns, rows: int) -> list[list[int]]:
    """Per row group: first start, last end, first and last step, number of rows. Lets a reader skip what it need not decode."""
    start, end = spec.bounds(columns)
    step = columns.get("step", np.full(rows, -1))
    cuts = [slice(a, min(a + ROW_GROUP_ROWS, rows)) for a in range(0, rows, ROW_GROUP_ROWS)]
    return [
        [int(start[c].min()), int(end[c].max()), int(step[c].min()), int(step[c].max()), c.stop - c.start] for c in cuts
    ]


def superseded(columns: Columns) -> np.ndarray[Any, Any]:
    """Return a mask of the rows flagged open for which a later row of the same span exists.

    A span is told by (thread, start_ns, site): two spans of one thread that begin at one site in the same nanosecond
    cannot exist. The last row of a span wins.
    """
    is_open = (columns["flags"] & Flag.OPEN) != 0
    out = np.zeros(len(is_open), bool)
    alike = np.flatnonzero(np.isin(columns["start_ns"], columns["start_ns"][is_open]))
    newest: dict[tuple[int, int, int], int] = {}
    for i in reversed(alike):
        key = (int(columns["thread"][i]), int(columns["start_ns"][i]), int(columns["site"][i]))
        last = newest.setdefault(key, i)
        out[i] = bool(is_open[i]) and last != i
    return out


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
    ) -> None:
        self.directory, self.spec, self.site = directory, spec, site
        self.header, self.max_rows, self.max_age_s = dict(header), max_rows, max_age_s
        self.is_open: Callable[[Columns], np.ndarray[Any, Any]] = lambda columns: np.ones(len(columns["flags"]), bool)
        self.number = 0
        self.rows_written = 0
        self._file: io.FileIO | None = None
        self._stream: pa.ipc.RecordBatchStreamWriter | None = None
        self._batches: list[Columns] = []
        self._meta: dict[str, Any] = {}
        self._rows = 0
        self._opened_s = 0.0
        directory.mkdir(parents=True, exist_ok=True)

    def append(self, columns: Columns, *, meta: Mapping[str, Any] | None = None) -> None:
        """Hand rows to the operating system; close the segment when it is full or old.

        Parameters
        ----------
        columns : dict
            Every column of the table.
        meta : mapping, optional
            Metadata of this batch, such as ``now_ns`` and new clock anchors.

        Raises
        ------
        OSError
            If the disk is full or not writable.
        """
        rows = len(next(iter(columns.values())))
        meta = {**(meta or {}), **self._new_sites(columns)}
        if self._stream is None:
            self._open()
        assert self._stream is not None
        arrays = [
            pa.array(columns[k], type=f.type) for k, f in zip(self.spec.columns, self.spec.arrow_schema, strict=True)
        ]
        batch = pa.record_batch(arrays, schema=self.spec.arrow_schema)
        self._stream.write_batch(batch, custom_metadata={_META: json.dumps(meta)})
        merge_meta(self._meta, meta)
        if rows:
            self._batches.append(columns)
            self._rows += rows
            self.rows_written += rows
        if self._rows >= self.max_rows or time.monotonic() - self._opened_s >= self.max_age_s:
            self.roll()

    def _new_sites(self, columns: Columns) -> dict[str, Any]:
        if self.site is None or not len(columns["site"]):
            return {}
        known = self._meta.get("sites", {})
        return {
            "sites": {str(i): list(self.site(i)) for i in np.unique(columns["site"]).tolist() if str(i) not in known}
        }

    def _open(self) -> None:
        path = self.directory / OPEN_NAME.format(self.number)
        self._file = open(path, "xb", buffering=0)  # noqa: SIM115 (closed in roll)
        schema = self.spec.arrow_schema.with_metadata({_META: json.dumps(self.header)})
        self._stream = pa.ipc.new_stream(self._file, schema)
        self._opened_s = time.monotonic()

    def roll(self) -> None:
        """Close the segment: write its Parquet file, then remove the stream."""
        if self._stream is None or self._file is None:
            return
        kept, carried = self._finished()
        if len(kept[self.spec.start]):
            self._write_parquet(kept)
        self._stream.close()
        self._file.close()
        os.unlink(self.directory / OPEN_NAME.format(self.number))
        self._stream = self._file = None
        self._batches, self._meta, self._rows = [], {}, 0
        self.number += 1
        if len(carried[self.spec.start]):
            self.append(carried)

    def _finished(self) -> tuple[Columns, Columns]:
        """Return (rows for the Parquet file in order of start, rows of spans still open)."""
        if not self._batches:
            none = {k: np.empty(0, self.spec.numpy_dtype(k)) for k in self.spec.columns}
            return none, none
        whole = {k: np.concatenate([b[k] for b in self._batches]) for k in self.spec.columns}
        order = np.argsort(whole[self.spec.start], kind="stable")
        if "flags" not in whole:
            return {k: v[order] for k, v in whole.items()}, {k: v[:0] for k, v in whole.items()}
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
        fields = [f for f in self.spec.arrow_schema if f.name not in constant]
        schema = pa.schema(fields, metadata={_META: json.dumps(meta)})
        table = pa.table([pa.array(columns[f.name], type=f.type) for f in fields], schema=schema)
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
        while self._stream is not None and self._rows:
            before = self._rows
            self.roll()
            if self._rows >= before:
                break
        if self._stream is not None and not self._rows:
            self.roll()

    def abandon(self) -> None:
        """Let go of the files without writing: used when the disk refuses."""
        if self._file is not None:
            self._file.close()
        self._stream = self._file = None


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


@dataclass(slots=True)
class Index:
    """What a reader knows of a closed segment without decoding a row.

    Attributes
    ----------
    meta : dict
        Header, sites, anchors, threads, counters.
    row_groups : array, shape (row group, 5)
        First start and last end (ns, the rank's own clock), first and last step, number of rows.
    footer : pyarrow.parquet.FileMetaData
        The parsed footer, so that reading rows need not parse it again.
    file : pyarrow.parquet.ParquetFile or None
        The file, open, where it has been read.
    """

    meta: dict[str, Any]
    row_groups: np.ndarray[Any, Any]
    footer: Any = None
    file: Any = None
    rows: int = field(init=False)

    def __post_init__(self) -> None:
        self.rows = int(self.row_groups[:, 4].sum())

    def read(self, source: Any, row_groups: list[int], columns: list[str]) -> pa.Table:
        """Decode row groups; a local file stays open for the next call."""
        file, self.file = self.file, None  # taken while in use: two threads never share a reader
        if file is None:
            file = pq.ParquetFile(source, metadata=self.footer, memory_map=isinstance(source, str))
        try:
            return file.read_row_groups(row_groups, columns=columns, use_threads=False)
        finally:
            self.file = file

    def overlapping(self, time_ns: tuple[int, int] | None, steps: tuple[int, int] | None) -> list[int]:
        """Return the row groups that may hold rows of a window: ``[t0, t1)`` in ns, steps first to last inclusive."""
        groups = self.row_groups
        keep = np.ones(len(groups), bool)
        if time_ns is not None:
            keep &= (groups[:, 0] < time_ns[1]) & (groups[:, 1] >= time_ns[0])
        if steps is not None:
            keep &= (groups[:, 2] <= steps[1]) & (groups[:, 3] >= steps[0])
        return [int(i) for i in np.flatnonzero(keep)]


def read_index(source: Any) -> Index:
    """Read the metadata of a closed segment: a path or a binary file. Raises ValueError if it is not one of ours."""
    footer = pq.read_metadata(source)
    found = footer.metadata or {}
    if _META not in found:
        raise ValueError("a Parquet file without mappnb metadata")
    meta = json.loads(found[_META])
    return Index(meta, np.array(meta.pop("row_groups"), np.int64).reshape(-1, 5), footer)


def verify_closed(source: Any) -> int:
    """Decode a closed segment whole, with the checksum of every page; returns the rows, raises OSError where one is wrong."""
    with pq.ParquetFile(source, page_checksum_verification=True) as file:
        return int(file.read(use_threads=False).num_rows)


def _to_numpy(table: pa.Table, spec: TableSpec) -> Columns:
    return {
        name: np.asarray(column.to_numpy(zero_copy_only=False), dtype=spec.numpy_dtype(name))
        for name, column in zip(table.column_names, table.columns, strict=True)
    }


def read_closed(
    source: Any,
    spec: TableSpec,
    *,
    index: Index,
    columns: list[str] | None = None,
    row_groups: list[int] | None = None,
    keep: Callable[[Columns], np.ndarray[Any, Any] | None] | None = None,
) -> Columns:
    """Read rows of a closed segment.

    Parameters
    ----------
    source : path or binary file
        The Parquet file.
    spec : TableSpec
        Its table.
    index : Index
        What :func:`read_index` said of it. Columns that are constant in the segment stand there, not in the file.
    columns : list of str, optional
        Columns wanted; all by default. A column that an older version did not write comes filled with "not applicable".
    row_groups : list of int, optional
        Row groups wanted; all by default.
    keep : callable, optional
        Gets the columns and returns a mask of the rows wanted, or None for all.
    """
    wanted = list(columns or spec.columns)
    names = set(index.footer.schema.names)
    groups = list(range(len(index.row_groups))) if row_groups is None else row_groups
    rows = int(index.row_groups[groups, 4].sum())
    stored = [c for c in wanted if c in names]
    out: Columns = {}
    if stored and groups:
        out = _to_numpy(index.read(source, groups, stored), spec)
        rows = len(out[stored[0]])
    fixed = {c: index.meta.get("constant", {}).get(c, missing_value(spec, c)) for c in wanted if c not in out}
    filler: Columns = {c: np.broadcast_to(np.asarray(v, spec.numpy_dtype(c)), rows) for c, v in fixed.items()}
    mask = keep({**out, **filler}) if keep is not None else None
    if mask is not None:
        out = {c: v[mask] for c, v in out.items()}
        rows = int(mask.sum())
    return {c: out[c] if c in out else np.full(rows, fixed[c], spec.numpy_dtype(c)) for c in wanted}


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
        meta.update(json.loads((reader.schema.metadata or {})[_META]))
        while True:
            batch, custom = reader.read_next_batch_with_custom_metadata()
            batches.append(batch)
            merge_meta(meta, json.loads(custom[_META]) if custom else {})
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
