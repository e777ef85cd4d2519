"""What the stored tables look like, and what both sides of a segment file must agree on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from mappnb.terms import Flag

__all__ = [
    "META",
    "OPEN_NAME",
    "SEGMENT_NAME",
    "TABLES",
    "Columns",
    "Rows",
    "TableSpec",
    "as_records",
    "merge_meta",
    "superseded",
]

Columns = dict[str, np.ndarray[Any, Any]]
"""Columns of a table by name; all of one length."""

Rows = Columns | np.ndarray[Any, np.dtype[np.void]]
"""Columns, or an array of records with the same names."""

SEGMENT_NAME = "seg-{:06d}.parquet"
OPEN_NAME = "open-{:06d}.arrows"
META = b"mappnb"


_DTYPES: dict[str, np.dtype[Any]] = {d: np.dtype(d) for d in ("i8", "i4", "i2", "u2", "f8")} | {"str": np.dtype(object)}


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
        return _DTYPES[self.columns[column]]


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


_RECORDS = {spec.name: np.dtype([(c, spec.numpy_dtype(c)) for c in spec.columns]) for spec in TABLES.values()}


def as_records(table: str, rows: list[tuple[Any, ...]]) -> np.ndarray[Any, np.dtype[np.void]]:
    """Return rows of a table as records: one array for all columns, where few rows are made often."""
    return np.array(rows, _RECORDS[table])


def merge_meta(into: dict[str, Any], new: Mapping[str, Any]) -> None:
    """Add the metadata of a later batch: mappings are updated, lists extended, plain values replaced."""
    for key, value in new.items():
        if isinstance(value, Mapping):
            into.setdefault(key, {}).update(value)
        elif isinstance(value, list):
            into.setdefault(key, []).extend(value)
        else:
            into[key] = value


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
