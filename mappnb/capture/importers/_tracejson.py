"""Reads trace-event JSON as columns, a batch at a time: the native reader, what to ask it for, and what it tells at the end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

from mappnb import _core

__all__ = [
    "BATCH_ROWS",
    "EVENT_FIELDS",
    "MISSING",
    "MOST_NS",
    "TEXT_KEY",
    "Batch",
    "TraceText",
    "read_batches",
    "usable",
]

MISSING: int = _core.TRACE_MISSING
"""An integer or a time that an event does not have."""

TEXT_KEY: int = _core.TRACE_TEXT_KEY
"""A pid, tid or id that is text is ``TEXT_KEY`` + its number among the names."""

MOST_NS = 1 << 61
"""The longest duration, and half the latest time (2116), that fits into sums of 64 bits."""

BATCH_ROWS = 1 << 13

EVENT_FIELDS: tuple[tuple[str, str, str], ...] = (
    ("event", "ph", "c"),
    ("event", "ts", "t"),
    ("event", "dur", "t"),
    ("event", "pid", "k"),
    ("event", "tid", "k"),
    ("event", "name", "s"),
    ("event", "cat", "s"),
    ("event", "id", "k"),
    ("event", "bp", "c"),
    ("event", "args", "a"),
)
"""What every trace event may have: (where, name, kind). Kinds: c letter, t time, k integer or text, s text, i integer, f float, a args,
r the args of counter samples as they are written (-1 for other events)."""

Batch = dict[str, np.ndarray[Any, Any]]
"""Columns of some events: ``ts`` and ``dur`` in ns, texts as numbers into :attr:`TraceText.names`."""


@dataclass
class TraceText:
    """What is known of a trace beside its events; complete when its last batch has been read.

    Attributes
    ----------
    names : list of str
        The texts, by number.
    metadata : dict of str to str
        Top-level entries of the document other than the events, as JSON text of at most 64 KiB each.
    repairs : dict of str to int
        What was mended or left out, by kind.
    num_rows, num_bytes : int
        Events and bytes read.
    state : str
        Where in the document the data ended: ``"done"`` for a whole one.
    """

    names: list[str] = field(default_factory=list)
    metadata: dict[str, str] = field(default_factory=dict)
    repairs: dict[str, int] = field(default_factory=dict)
    num_rows: int = 0
    num_bytes: int = 0
    state: str = "start"


def usable(time: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return which times are there and near enough to be added to others, dims (event,), bool."""
    good: np.ndarray[Any, Any] = (time > -MOST_NS) & (time < 2 * MOST_NS)
    return good


def read_batches(
    chunks: Iterable[bytes],
    trace: TraceText,
    *,
    fields: Iterable[tuple[str, str, str]] = EVENT_FIELDS,
    shift: int = 3,
    hunt: bool = False,
) -> Iterator[Batch]:
    """Yield the events of a trace, about :data:`BATCH_ROWS` at a time. The memory does not grow with the trace.

    Parameters
    ----------
    chunks : iterable of bytes
        The JSON text.
    trace : TraceText
        Filled while reading.
    fields : iterable of (str, str, str)
        Wanted fields: where (``"event"`` or ``"args"``), name, kind. Columns of args are named ``args.<name>``.
    shift : int
        Decimal places from the trace's time unit to ns: 3 for µs.
    hunt : bool
        Look for events anywhere, for a document whose head is damaged.

    Yields
    ------
    dict of str to array
        Columns, dims (event,).
    """
    wanted = list(fields)
    reader = _core.TraceReader(wanted, shift, hunt)
    for chunk in chunks:
        reader.feed(chunk)
        if reader.rows >= BATCH_ROWS:
            yield _take(reader, trace)
    reader.finish()
    trace.metadata, trace.repairs, trace.state = reader.metadata, reader.repairs, reader.state
    trace.num_bytes = reader.bytes
    if reader.rows:
        yield _take(reader, trace)


def _take(reader: _core.TraceReader, trace: TraceText) -> Batch:
    trace.names += reader.names(len(trace.names))
    batch = cast(Batch, reader.take())
    trace.num_rows += len(batch["ph"])
    return batch
