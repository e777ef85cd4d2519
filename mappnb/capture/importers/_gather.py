"""Gathers the spans of one Kineto file: some 40 bytes an event, and what only few events have apart."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mappnb.capture.importers._counters import COUNTER_FIELD, Counters
from mappnb.capture.importers._growing import GrowingColumn
from mappnb.capture.importers._tracejson import MISSING, MOST_NS, Batch, TraceText, usable
from mappnb.capture.importers._traces import Lanes

__all__ = ["KINETO_FIELDS", "Few", "Flows", "Spans", "gather"]

Array = np.ndarray[Any, Any]

_COMM = {
    "Collective name": "s",
    "Process Group Name": "s",
    "Process Group Ranks": "s",
    "Process Group Description": "s",
    "In msg nelems": "i",
    "Out msg nelems": "i",
    "dtype": "s",
    "Seq": "i",
    "Comms Id": "s",
    "Group size": "i",
    "Src Rank": "i",
    "Dst Rank": "i",
    "bytes": "i",
    "graph id": "i",
}
KINETO_FIELDS: tuple[tuple[str, str, str], ...] = (
    ("args", "correlation", "i"),
    ("args", "stream", "i"),
    ("args", "device", "i"),
    ("args", "name", "s"),
    *(("args", name, kind) for name, kind in _COMM.items()),
    COUNTER_FIELD,
)
"""The args that Kineto's importer asks for."""

_KEPT: dict[str, type] = {"ts": np.int64, "dur": np.int64, "lane": np.int32, "pair": np.int32}
_KEPT |= {"correlation": np.int64, "stream": np.int32}


@dataclass
class Few:
    """Columns of the few events that have any of them: ``row`` tells which."""

    row: Array
    columns: dict[str, Array]


@dataclass
class Flows:
    """Arrows between events, kept as long as no event of a device tells its correlation: id, lane, time, and which end."""

    id: Array
    lane: Array
    ts: Array
    start: Array


@dataclass
class Spans:
    """The complete events (``ph`` X) of a file, dims (event,): ts, dur, lane, pair, correlation, stream.

    Attributes
    ----------
    columns : dict of str to array
        As listed; ``stream`` -1 where the args have none, -2 where it is out of range.
    pairs : dict of (int, int) to int
        (name, category) -> number in the column ``pair``; -1: none.
    few : Few
        What kernels of collectives and copies have beside.
    flows : Flows
        Of category ac2g.
    lanes : Lanes
        (pid, tid) by number.
    lane_names : dict of (int, int) to int
        Name of a thread by its (pid, tid), number among the names.
    devices : dict of int to int
        Device -> events on it.
    counters : Counters
        Samples of counters.
    skipped, repairs : dict of str to int
        What was left out, what was mended.
    """

    columns: dict[str, Array] = field(default_factory=dict)
    pairs: dict[tuple[int, int], int] = field(default_factory=dict)
    few: Few = field(default_factory=lambda: Few(np.zeros(0, np.int64), {}))
    flows: Flows = field(default_factory=lambda: Flows(*(np.zeros(0, np.int64) for _ in range(4))))
    lanes: Lanes = field(default_factory=Lanes)
    lane_names: dict[tuple[int, int], int] = field(default_factory=dict)
    devices: dict[int, int] = field(default_factory=dict)
    counters: Counters = field(default_factory=Counters)
    skipped: dict[str, int] = field(default_factory=dict)
    repairs: dict[str, int] = field(default_factory=dict)


_LEFT_OUT = {
    ord("s"): "ends of flow arrows",
    ord("t"): "ends of flow arrows",
    ord("f"): "ends of flow arrows",
    ord("M"): "names of processes and threads",
    ord("i"): "instants",
    ord("I"): "instants",
}


def gather(batches: Iterable[Batch], trace: TraceText) -> Spans:
    """Return the spans of a file.

    Parameters
    ----------
    batches : iterable of dict
        Events, with :data:`KINETO_FIELDS`.
    trace : TraceText
        That the batches fill.
    """
    out = Spans()
    kept = {name: GrowingColumn(dtype) for name, dtype in _KEPT.items()}
    few: list[tuple[Array, dict[str, Array]]] = []
    flows: list[Flows] = []
    num, correlated = 0, False
    for batch in batches:
        _count(out, batch)
        _note_names(out, batch)
        out.counters.add(batch)
        keep = np.flatnonzero((batch["ph"] == ord("X")) & usable(batch["ts"]))
        rows = keep if len(keep) < len(batch["ph"]) else slice(None)
        some = {k.removeprefix("args."): v[rows] for k, v in batch.items() if k != "args.name"}
        _mend_durations(out, some)
        some["lane"] = out.lanes.number(some["pid"], some["tid"])
        some["pair"] = _pairs(out, some["name"], some["cat"])
        _note_devices(out, some["device"])
        wide = some["stream"]
        some["stream"] = np.where(wide == MISSING, -1, np.where((wide < 0) | (wide >= 1 << 31), -2, wide))
        for name, column in kept.items():
            column.append(some[name])
        has = np.flatnonzero(np.any([some[n] != (MISSING if k == "i" else -1) for n, k in _COMM.items()], axis=0))
        few.append((has + num, {n: some[n][has] for n in _COMM}))
        correlated = correlated or bool(((some["stream"] != -1) & (some["correlation"] != MISSING)).any())
        if correlated:
            flows.clear()
        else:
            flows.append(_flows(out, batch, trace))
        num += len(keep)
    for name in _KEPT:
        out.columns[name] = kept.pop(name).whole()
    if few:
        out.few = Few(np.concatenate([f[0] for f in few]), {n: np.concatenate([f[1][n] for f in few]) for n in _COMM})
    if flows:
        out.flows = Flows(*(np.concatenate([getattr(f, n) for f in flows]) for n in ("id", "lane", "ts", "start")))
    return out


def _pairs(out: Spans, name: Array, cat: Array) -> Array:
    """Return the number of each event's (name, category), dims (event,)."""
    key = name.astype(np.int64) << 32 | cat.astype(np.int64) + 1
    found, number = np.unique(key, return_inverse=True)
    numbers = [out.pairs.setdefault((k >> 32, (k & 0xFFFFFFFF) - 1), len(out.pairs)) for k in found.tolist()]
    return np.array(numbers, np.int32)[number]


def _add(into: dict[str, int], key: str, n: int) -> None:
    if n:
        into[key] = into.get(key, 0) + int(n)


def _count(out: Spans, batch: Batch) -> None:
    counts = np.bincount(batch["ph"], minlength=256)
    for letter in np.flatnonzero(counts).tolist():
        if letter not in b"XC":
            _add(out.skipped, _LEFT_OUT.get(letter, f"events of phase {chr(letter)!r}"), int(counts[letter]))
    _add(out.skipped, "spans without a usable time", int(((batch["ph"] == ord("X")) & ~usable(batch["ts"])).sum()))


def _note_names(out: Spans, batch: Batch) -> None:
    rows = np.flatnonzero((batch["ph"] == ord("M")) & (batch["args.name"] >= 0))
    pids, tids, names = (batch[n][rows].tolist() for n in ("pid", "tid", "args.name"))
    for pid, tid, name in zip(pids, tids, names, strict=True):
        if len(out.lane_names) < 4096:
            out.lane_names[pid, tid] = name


def _note_devices(out: Spans, device: Array) -> None:
    for number, n in zip(*(x.tolist() for x in np.unique(device[device >= 0], return_counts=True)), strict=True):
        out.devices[number] = out.devices.get(number, 0) + n


def _mend_durations(out: Spans, some: dict[str, Array]) -> None:
    dur = some["dur"]
    _add(out.repairs, "missing_durations", int((dur == MISSING).sum()))
    _add(out.repairs, "negative_durations", int(((dur < 0) & (dur != MISSING)).sum()))
    some["dur"] = np.clip(dur, 0, MOST_NS)


def _flows(out: Spans, batch: Batch, trace: TraceText) -> Flows:
    arrows = [i for i, n in enumerate(trace.names[:4096]) if n == "ac2g"]
    ph = batch["ph"]
    rows = np.flatnonzero(np.isin(ph, (ord("s"), ord("f"))) & np.isin(batch["cat"], arrows) & (batch["ts"] != MISSING))
    lane = out.lanes.number(batch["pid"][rows], batch["tid"][rows]).astype(np.int64)
    return Flows(batch["id"][rows], lane, batch["ts"][rows], (ph[rows] == ord("s")).astype(np.int64))
