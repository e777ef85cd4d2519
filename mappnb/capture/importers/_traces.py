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

Array = np.ndarray[Any, Any]
_TS = re.compile(rb'"ts"\s*:\s*"?(\d{15,})')
_LANES_AT_ONCE = 32
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


def _mixed(pid: Array, tid: Array) -> Array:
    """Return a number for each pair; different pairs may have the same one."""
    with np.errstate(over="ignore"):
        mixed: Array = pid * np.int64(0x5851F42D4C957F2D) + tid
    return mixed


class Lanes:
    """Numbers (pid, tid) pairs in order of first use."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], int] = {}
        self._pid = self._tid = self._sorted = np.zeros(
            0, np.int64
        )  # of the known lanes, when rows were looked up last
        self._order = np.zeros(0, np.int32)

    def __len__(self) -> int:
        return len(self._known)

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """The (pid, tid) of each lane."""
        return list(self._known)

    def number(self, pid: Array, tid: Array) -> Array:
        """Return the lane of each row, dims (event,), int32."""
        found = np.full(len(pid), -1, np.int32)
        self._look_up(pid, tid, found)
        missed = np.flatnonzero(found < 0)
        for _ in range(_LANES_AT_ONCE):  # a trace has few lanes: each new one is found in all rows at once
            if not len(missed):
                return found
            one, other = pid[missed[0]], tid[missed[0]]
            same = (pid[missed] == one) & (tid[missed] == other)
            found[missed[same]] = self._add(int(one), int(other))
            missed = missed[~same]
        keys = zip(pid[missed].tolist(), tid[missed].tolist(), strict=True)
        found[missed] = [self._add(*k) for k in keys]
        return found

    def _add(self, pid: int, tid: int) -> int:
        return self._known.setdefault((pid, tid), len(self._known))

    def _look_up(self, pid: Array, tid: Array, found: Array) -> None:
        """Put down the lanes of rows whose lane is known."""
        if not self._known:
            return
        if len(self._sorted) != len(self._known):
            self._pid, self._tid = np.array(self.pairs, np.int64).T
            mixed = _mixed(self._pid, self._tid)
            self._order = np.argsort(mixed).astype(np.int32)
            self._sorted = mixed[self._order]
        at = np.searchsorted(self._sorted, _mixed(pid, tid))
        lane = self._order[np.minimum(at, len(self._order) - 1)]
        hit = (self._pid[lane] == pid) & (self._tid[lane] == tid)
        found[hit] = lane[hit]

    def label(self, lane: int, names: list[str]) -> tuple[str, str]:
        """Return (pid, tid) of a lane as text."""
        pid, tid = self.pairs[lane]
        return _key_text(pid, names), _key_text(tid, names)


def _key_text(key: int, names: list[str]) -> str:
    if key == MISSING:
        return ""
    at = key - TEXT_KEY
    return names[at] if 0 <= at < len(names) else str(key)
