"""The rows of a Chrome trace as columns, and its spans: complete events, begins and ends, asynchronous ones."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mappnb.capture.importers._counters import Counters
from mappnb.capture.importers._gather import Few
from mappnb.capture.importers._lanes import begin_end_pairs
from mappnb.capture.importers._tracejson import MISSING, MOST_NS, Batch, TraceText, usable
from mappnb.capture.importers._traces import Lanes

__all__ = ["OWN_COLUMNS", "OWN_FIELDS", "ChromeRows", "SpanTable", "gather_rows", "spans_of"]

Array = np.ndarray[Any, Any]
_WANTED = b"XBEbeSFiIR"
_OWN = {"op": "s", "phase": "s", "dtype": "s", "group": "s", "category": "s", "name": "s"}
_OWN |= dict.fromkeys(
    ("step", "stage", "chunk", "microbatch", "layer", "bytes", "seq", "peer", "stream", "thread", "flags"), "i"
)
OWN_COLUMNS = tuple(_OWN)
OWN_FIELDS: tuple[tuple[str, str, str], ...] = tuple(("args", name, kind) for name, kind in _OWN.items())
"""The args of the spans of our own export (:func:`mappnb.analysis.export_chrome`)."""
_NOT_KEPT = {"tid", "bp", "ts", "counter", "args.name"}
_NO_SPAN = {
    "M": "names of processes and threads",
    "C": "counter samples",
    "s": "ends of flow arrows",
    "t": "ends of flow arrows",
    "f": "ends of flow arrows",
    "n": "instants of asynchronous spans",
    "T": "instants of asynchronous spans",
    "p": "instants of asynchronous spans",
}


@dataclass
class ChromeRows:
    """What a file holds, dims (row,).

    Attributes
    ----------
    columns : dict of str to array
        ph, ts, dur, pid, lane, name, cat, id and the further fields that were asked for.
    lanes : Lanes
        (pid, tid) by number.
    process_names, thread_names : dict
        Numbers of names by pid, and by (pid, tid).
    counters : Counters
        Samples of counters.
    own : Few
        What our own export says of its spans: ``row``, and the columns of :data:`OWN_FIELDS`.
    skipped, repairs : dict of str to int
        What was left out, what was mended.
    """

    columns: dict[str, Array] = field(default_factory=dict)
    lanes: Lanes = field(default_factory=Lanes)
    process_names: dict[int, int] = field(default_factory=dict)
    thread_names: dict[tuple[int, int], int] = field(default_factory=dict)
    counters: Counters = field(default_factory=Counters)
    own: Few = field(default_factory=lambda: Few(np.zeros(0, np.int64), {}))
    skipped: dict[str, int] = field(default_factory=dict)
    repairs: dict[str, int] = field(default_factory=dict)


@dataclass
class SpanTable:
    """Spans of some rows, dims (span,).

    Attributes
    ----------
    begin, end : array of int
        Row that begins and row that ends each span: the same for complete events, an end of -1 where there is none.
    start_ns, duration_ns : array of int
        Times.
    asynchronous, instant, is_open : array of bool
        Not nested in its thread; no span but an instant; without an end.
    """

    begin: Array
    end: Array
    start_ns: Array
    duration_ns: Array
    asynchronous: Array
    instant: Array
    is_open: Array


def gather_rows(batches: Iterable[Batch], trace: TraceText, *, time: str = "ts") -> ChromeRows:
    """Return the rows of a file that make spans.

    Parameters
    ----------
    batches : iterable of dict
        Events; must have ``args.name`` for the names of processes and threads.
    trace : TraceText
        That the batches fill.
    time : str
        The field that holds the time.
    """
    out = ChromeRows()
    parts: dict[str, list[Array]] = {}
    own: list[tuple[Array, dict[str, Array]]] = []
    num = 0
    for batch in batches:
        ph = batch["ph"]
        wanted = np.isin(ph, list(_WANTED))
        keep = np.flatnonzero(wanted & usable(batch[time]))
        _add(out.skipped, "rows without a usable time", int(wanted.sum()) - len(keep))
        if "counter" in batch:
            out.counters.add(batch, time=time)
            wanted |= ph == ord("C")
        for letter, n in enumerate(np.bincount(ph[~wanted], minlength=256).tolist()):
            _add(out.skipped, _NO_SPAN.get(chr(letter), f"events of phase {chr(letter)!r}"), n)
        _note_names(out, batch, trace.names)
        lane = out.lanes.number(batch["pid"][keep], batch["tid"][keep])
        ours = {f"args.{n}" for n in OWN_COLUMNS} if "args.op" in batch else set()
        some = {k: v[keep] for k, v in batch.items() if k not in _NOT_KEPT | ours}
        for name, values in {**some, "lane": lane, "ts": batch[time][keep]}.items():
            parts.setdefault(name, []).append(values)
        if ours:
            told = np.flatnonzero(batch["args.op"][keep] >= 0)
            own.append((told + num, {n: batch[f"args.{n}"][keep[told]] for n in OWN_COLUMNS}))
        num += len(keep)
    out.columns = {name: np.concatenate(pieces) for name, pieces in parts.items()}
    if own:
        columns = {n: np.concatenate([c[n] for _, c in own]) for n in OWN_COLUMNS}
        out.own = Few(np.concatenate([rows for rows, _ in own]), columns)
    return out


def _add(into: dict[str, int], key: str, n: int) -> None:
    if n:
        into[key] = into.get(key, 0) + int(n)


def _note_names(out: ChromeRows, batch: Batch, names: list[str]) -> None:
    rows = np.flatnonzero((batch["ph"] == ord("M")) & (batch["args.name"] >= 0) & (batch["name"] >= 0))
    for pid, tid, kind, name in zip(
        *(batch[n][rows].tolist() for n in ("pid", "tid", "name", "args.name")), strict=True
    ):
        if len(out.thread_names) < 4096 and names[kind] == "thread_name":
            out.thread_names[pid, tid] = name
        elif len(out.process_names) < 65536 and names[kind] == "process_name":
            out.process_names[pid] = name


def spans_of(rows: ChromeRows) -> SpanTable:
    """Return the spans. Ends without a begin and durations that cannot be are counted in ``rows.repairs``."""
    c = rows.columns
    ph = c.get("ph", np.zeros(0, np.uint8))
    complete = np.flatnonzero(ph == ord("X"))
    instant = np.flatnonzero(np.isin(ph, list(b"iIR")))
    begin, end = _pairs(rows, np.flatnonzero(np.isin(ph, list(b"BE"))), b"B", c.get("lane"))
    opened, closed = _pairs(rows, np.flatnonzero(np.isin(ph, list(b"beSF"))), b"bS", None)
    first = np.concatenate([complete, begin, opened, instant])
    last = np.concatenate([complete, end, closed, instant])
    kind = np.repeat(np.arange(4), [len(complete), len(begin), len(opened), len(instant)])
    ts = c.get("ts", np.zeros(0, np.int64))
    start = ts[first]
    duration = np.where(last >= 0, ts[last] if len(ts) else 0, int(ts.max(initial=0))) - start
    own = c.get("dur", np.zeros(0, np.int64))[complete]
    _add(rows.repairs, "missing_durations", int((own == MISSING).sum()))
    _add(rows.repairs, "negative_durations", int(((own < 0) & (own != MISSING)).sum() + (duration < 0).sum()))
    duration[: len(complete)] = own
    is_open = last < 0
    _add(rows.repairs, "spans_without_an_end", int(is_open.sum()))
    return SpanTable(first, last, start, np.clip(duration, 0, MOST_NS), kind == 2, kind == 3, is_open)


def _pairs(rows: ChromeRows, mine: Array, begins: bytes, lane: Array | None) -> tuple[Array, Array]:
    """Pair begins and ends: of a thread, or (``lane`` None) of one category and id."""
    if not len(mine):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    c = rows.columns
    if lane is None:
        key = np.stack([c["cat"][mine].astype(np.int64), c["id"][mine]], axis=1)
        _, where = np.unique(key, axis=0, return_inverse=True)
        where = where.reshape(-1)
    else:
        where = lane[mine]
    begin, end, lost = begin_end_pairs(where, c["name"][mine], np.isin(c["ph"][mine], list(begins)), c["ts"][mine])
    _add(rows.repairs, "ends_without_a_begin", len(lost))
    return mine[begin], np.where(end >= 0, mine[end], -1)
