"""Reading one trace-event file: its unit of time, what is said at its head, and its spans gathered in few bytes each."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mappnb.capture.importers._sources import Source
from mappnb.capture.importers._tracejson import EVENT_FIELDS, MISSING, TEXT_KEY, Batch, TraceText, read_batches

__all__ = ["Head", "Lanes", "look", "read_source", "wall_offset_ns"]

_TS = re.compile(rb'"ts"\s*:\s*"?(\d{15,})')
_NS_FROM = 10**17  # as µs this is the year 5138


@dataclass
class Head:
    """What the first 256 KiB of a file tell.

    Attributes
    ----------
    metadata : dict of str to object
        Top-level entries, parsed; those that are cut off are left out.
    shift : int
        Decimal places from the file's unit of time to ns.
    first_ns : int, optional
        The earliest time in the head, in ns.
    whole : bool
        Whether the head is the whole file.
    """

    metadata: dict[str, Any] = field(default_factory=dict)
    shift: int = 3
    first_ns: int | None = None
    whole: bool = False


def parsed(metadata: dict[str, str]) -> dict[str, Any]:
    """Return metadata as values; what is not JSON is left out."""
    out = {}
    for key, text in metadata.items():
        try:
            out[key] = json.loads(text)
        except (ValueError, RecursionError):
            continue
    return out


def look(source: Source) -> Head:
    """Read the head of a file."""
    text = source.head()
    times = [int(m[1]) for m in _TS.finditer(text)]
    shift = 0 if times and min(times) >= _NS_FROM else 3
    trace = TraceText()
    first = None
    for batch in read_batches([text], trace, shift=shift):
        seen = batch["ts"][(batch["ts"] > 0) & (batch["ph"] != ord("M"))]
        if len(seen):
            first = int(seen.min()) if first is None else min(first, int(seen.min()))
    return Head(parsed(trace.metadata), shift, first, trace.state == "done")


def wall_offset_ns(metadata: dict[str, Any]) -> int:
    """Return what to add to the times of a file for wall-clock time: Kineto's ``baseTimeNanoseconds``."""
    base = metadata.get("baseTimeNanoseconds", 0)
    return base if isinstance(base, int) and 0 <= base < 1 << 62 else 0


def read_source(
    source: Source, trace: TraceText, *, fields: Iterable[tuple[str, str, str]], shift: int
) -> Iterator[Batch]:
    """Yield the events of a file. A file whose head is damaged so that no event is found is read again, looking for events anywhere."""
    wanted = [*EVENT_FIELDS, *fields]
    yield from read_batches(source.chunks(), trace, fields=wanted, shift=shift)
    if trace.num_rows == 0 and (
        trace.state == "metadata" or any(trace.repairs.get(k) for k in ("truncated", "junk_bytes"))
    ):
        first = trace.repairs
        again = TraceText()
        for batch in read_batches(source.chunks(), again, fields=wanted, shift=shift, hunt=True):
            trace.names = again.names
            yield batch
        trace.names, trace.num_rows = again.names, again.num_rows
        trace.repairs = {**again.repairs, **first} if again.num_rows == 0 else again.repairs
        trace.repairs["damaged_heads"] = 1
        trace.metadata = {**again.metadata, **trace.metadata}
    if source.damage:
        trace.repairs["damaged_archives"] = 1


class Lanes:
    """Numbers (pid, tid) pairs in order of first use."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], int] = {}

    def __len__(self) -> int:
        return len(self._known)

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """The (pid, tid) of each lane."""
        return list(self._known)

    def number(self, pid: np.ndarray[Any, Any], tid: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return the lane of each row, dims (event,), int32."""
        change = np.flatnonzero((np.diff(pid) != 0) | (np.diff(tid) != 0)) + 1
        heads = np.concatenate([np.zeros(min(len(pid), 1), np.int64), change])
        keys = zip(pid[heads].tolist(), tid[heads].tolist(), strict=True)
        numbers = np.array([self._known.setdefault(k, len(self._known)) for k in keys], np.int32)
        return np.repeat(numbers, np.diff(np.concatenate([heads, [len(pid)]])))

    def label(self, lane: int, names: list[str]) -> tuple[str, str]:
        """Return (pid, tid) of a lane as text."""
        pid, tid = self.pairs[lane]
        return _key_text(pid, names), _key_text(tid, names)


def _key_text(key: int, names: list[str]) -> str:
    if key == MISSING:
        return ""
    at = key - TEXT_KEY
    return names[at] if 0 <= at < len(names) else str(key)
