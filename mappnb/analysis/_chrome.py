"""The lines of a Chrome trace: spans, names of processes and tracks, flows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import xarray as xr

from mappnb.terms import UNTOLD_STREAM, Category, Flag

__all__ = ["STREAMS", "TRANSFERS", "flow_lines", "name_lines", "span_lines", "tracks"]

Array = np.ndarray[Any, Any]
STREAMS, TRANSFERS = 1000, 100_000
"""First track of device streams, and of transfers that run beside the work."""
_UNTOLD = 50_000  # first track of streams that a trace did not tell
_ARGS = ("step", "stage", "chunk", "microbatch", "layer", "bytes", "group", "seq", "peer", "stream")
_TEXTS = ("op", "phase", "dtype")


def tracks(events: xr.Dataset) -> Array:
    """Return the track of each event of one rank; events sorted by start.

    Transfers beside the work go to tracks of their own, the first that is free, so that spans of one track never cross for them.
    """
    stream = events.stream.values.astype(np.int64)
    numbered = np.where(stream >= UNTOLD_STREAM, _UNTOLD + stream - UNTOLD_STREAM, STREAMS + stream)
    out = np.where(stream >= 0, numbered, events.thread.values.astype(np.int64))
    moving = np.isin(events.category.values, (Category.COLLECTIVE, Category.P2P))
    beside = moving & ((events.flags.values & Flag.ASYNC) != 0) & (stream < 0)
    start, end = events.start_ns.values, events.start_ns.values + events.duration_ns.values
    free: list[int] = []
    for i in np.flatnonzero(beside).tolist():
        at = next((k for k, until in enumerate(free) if until <= start[i]), len(free))
        free[at:] = [int(end[i]), *free[at + 1 :]]
        out[i] = TRANSFERS + at
    return np.asarray(out)


def _micros(ns: int) -> str:
    """Return ns as µs with three decimals: exact, which a double of µs since 1970 is not."""
    sign, ns = ("-", -ns) if ns < 0 else ("", ns)
    return f"{sign}{ns // 1000}.{ns % 1000:03d}"


def _texts(values: Array) -> list[str]:
    known: dict[str, str] = {}
    return [known.setdefault(v, json.dumps(v)) for v in map(str, values.tolist())]


def span_lines(events: xr.Dataset, names: Array, track: Array) -> Iterator[str]:
    """Yield a complete event ("X") for each event."""
    process = (events.incarnation.values.astype(np.int64) * 1_000_000 + events["rank"].values).tolist()
    labels = _texts(np.where(names.astype(str) == "", events.op.values, names))
    category = _texts(events.category.values)
    times = zip(events.start_ns.values.tolist(), events.duration_ns.values.tolist(), strict=True)
    args = _args(events, names, track)
    rows = zip(labels, category, process, track.tolist(), times, args, strict=True)
    for name, cat, pid, tid, (start, length), arg in rows:
        yield (
            f'{{"ph": "X", "name": {name}, "cat": {cat}, "pid": {pid}, "tid": {tid}, "ts": {_micros(start)}, '
            f'"dur": {_micros(length)}, "args": {{{arg}}}}}'
        )


def _args(events: xr.Dataset, names: Array, track: Array) -> list[str]:
    parts: list[list[str]] = [[] for _ in range(events.sizes["event"])]
    for part, name in zip(parts, names.astype(str).tolist(), strict=True):
        if not name:  # the label is the op: the importer knows by this that there is no name
            part.append('"name": ""')
    thread = events.thread.values
    for i in np.flatnonzero((thread != track) & (thread >= 0)).tolist():
        parts[i].append(f'"thread": {thread[i]}')
    for name in _TEXTS:
        for part, value, text in zip(parts, events[name].values, _texts(events[name].values), strict=True):
            if value not in ("", "none"):
                part.append(f'"{name}": {text}')
    for name in _ARGS:
        # 63-bit ids of groups do not fit into a JavaScript number
        form = '"{}": "{}"' if name == "group" else '"{}": {}'
        for part, value in zip(parts, events[name].values.tolist(), strict=True):
            if value >= 0:
                part.append(form.format(name, value))
    for part, value in zip(parts, events.flags.values.tolist(), strict=True):
        if value:
            part.append(f'"flags": {value}')
    return [", ".join(part) for part in parts]


def name_lines(incarnation: int, rank: int, text: str, track: Array) -> Iterator[str]:
    """Yield the metadata events ("M") that name a process and its tracks."""
    pid = incarnation * 1_000_000 + rank

    def line(kind: str, tid: int, **args: Any) -> str:
        return json.dumps({"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": args})

    yield line("process_name", 0, name=text)
    yield line("process_sort_index", 0, sort_index=pid)
    for tid in np.unique(track).tolist():
        if tid >= TRANSFERS:
            name = f"transfers in flight {tid - TRANSFERS}"
        else:
            name = f"stream {tid - STREAMS}" if tid >= STREAMS else f"thread {tid}"
            name = f"device lane {tid - _UNTOLD}" if tid >= _UNTOLD else name
        yield line("thread_name", tid, name=name)
        yield line("thread_sort_index", tid, sort_index=tid)


def flow_lines(call: Array, process: Array, track: Array, start: Array) -> Iterator[str]:
    """Yield the flow events ("s", "t", "f") of each call of two members or more, in the order in which they came."""
    order = np.lexsort((process, start, call))
    ids, counts = np.unique(call[order], return_counts=True)
    at = 0
    for number, count in zip(ids.tolist(), counts.tolist(), strict=True):
        for k, i in enumerate(order[at : at + count].tolist() if count > 1 else []):
            ph = "s" if k == 0 else "f" if k == count - 1 else "t"
            bind = ', "bp": "e"' if ph == "f" else ""
            yield (
                f'{{"ph": "{ph}", "id": {number}, "name": "call", "cat": "call", "pid": {process[i]}, "tid": {track[i]}, '
                f'"ts": {_micros(int(start[i]))}{bind}}}'
            )
        at += count
