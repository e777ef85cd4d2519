"""The writer thread: once a second it hands what was recorded to the operating system. Training never waits for it."""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from mappnb.capture._record import Flag
from mappnb.capture.recorder import Recorder
from mappnb.joining import RunWriter
from mappnb.table_specs import TABLES, Columns, Rows, as_records

__all__ = ["EventSink", "WriterThread", "telemetry_records"]

HEARTBEAT_S = 2.0
_SAMPLE = tuple(TABLES["telemetry"].columns)[1:]
_NOTHING = {name: np.nan if TABLES["telemetry"].numpy_dtype(name).kind == "f" else -1 for name in _SAMPLE}
_Key = tuple[int, int, int]
_Records = np.ndarray[Any, Any]


def telemetry_records(time_ns: int, sample: dict[str, Any]) -> Rows:
    """Return the row of one telemetry sample; what it does not hold is missing."""
    row: list[Any] = [time_ns]
    for name in _SAMPLE:
        value = sample.get(name)
        row.append(_NOTHING[name] if value is None else value)
    return as_records("telemetry", [tuple(row)])


def _joined(pieces: list[_Records]) -> _Records:
    """Concatenate records as plain words: numpy copies records field by field, for a tenth of a millisecond."""
    return np.concatenate([piece.view(np.uint64) for piece in pieces]).view(pieces[-1].dtype)


def _keys(records: _Records) -> list[_Key]:
    """Return what tells each span from all others of the rank."""
    return list(zip(records["thread"].tolist(), records["start_ns"].tolist(), records["site"].tolist(), strict=True))


class EventSink:
    """Moves records from the recorder to the events table.

    A span that is still open is written once, flagged open, at the first flush that sees it: whatever hangs is on disk
    within a flush interval. Its finished row replaces it when it comes; if none will ever come, because the recorder
    was off when the span ended, a row flagged open and clipped does.
    """

    def __init__(self, recorder: Recorder, run: RunWriter, **options: Any) -> None:
        self.recorder = recorder
        self.table = run.table("events", site=recorder.describe, **options)
        self.table.is_open = self._is_open
        self._shown: dict[_Key, _Records] = {}
        self._heartbeat_s = 0.0
        self._dropped = self._threads = 0

    def flush(self, extra: dict[str, Any] | None = None) -> int:
        """Write what there is; returns the number of rows."""
        now_ns = self.recorder.now_ns()
        spans = self.recorder.open_spans()  # looked at before the drain: an end that comes meanwhile comes after it
        rows = self.recorder.drain()
        records = self._with_open(spans, rows, now_ns)
        stats = self.recorder.stats()
        due = time.monotonic() - self._heartbeat_s > HEARTBEAT_S
        changed = (stats["dropped"], stats["threads"]) != (self._dropped, self._threads)
        if len(records) or changed or extra or due:
            meta = {"now_ns": now_ns, "dropped": stats["dropped"], **(extra or {})}
            if extra or stats["threads"] != self._threads:
                meta["threads"] = {str(i): [t, n] for i, t, n in self.recorder.threads()}
            self._heartbeat_s, self._dropped, self._threads = time.monotonic(), stats["dropped"], stats["threads"]
            self.table.append(records, meta=meta)
        return len(records)

    def _with_open(self, spans: _Records, rows: _Records, now_ns: int) -> _Records:
        """Return what to write: the open spans that are new, those that are gone without an end, and the finished rows."""
        if not len(spans) and not self._shown:
            return rows
        keys = _keys(spans)
        known = {**self._shown, **{k: spans[i : i + 1] for i, k in enumerate(keys) if k not in self._shown}}
        ended = self._ended(rows, now_ns)
        new = [known[k] for k in keys if k not in self._shown]
        gone = [known[k] for k in self._shown.keys() - set(keys) - ended]
        for span in gone:
            span["flags"] |= int(Flag.CLIPPED)
            span["duration_ns"] = np.maximum(now_ns - span["start_ns"], 0)
        self._shown = {k: known[k] for k in keys if k not in ended}
        return _joined([*gone, *new, rows]) if gone or new else rows

    def _ended(self, rows: _Records, now_ns: int) -> set[_Key]:
        """Return the keys of the finished rows that may be of a span that was open at the last flush, or is at this one."""
        start_ns = rows["start_ns"]
        last_ns = max((k[1] for k in self._shown), default=-1)
        return set(_keys(rows[(start_ns <= last_ns) | (start_ns + rows["duration_ns"] >= now_ns)]))

    def _is_open(self, columns: Columns) -> np.ndarray[Any, Any]:
        keys = zip(columns["thread"].tolist(), columns["start_ns"].tolist(), columns["site"].tolist(), strict=True)
        return np.array([k in self._shown for k in keys], bool)

    def finish(self) -> None:
        """Write the rest; spans that never ended are closed now, flagged open and clipped."""
        self.flush()
        left = self.recorder.open_spans()
        left["flags"] |= int(Flag.CLIPPED)
        records = _joined([left, self.recorder.drain()])
        self._shown = {}
        meta = {"now_ns": self.recorder.now_ns(), "dropped": self.recorder.stats()["dropped"]}
        self.table.append(records, meta=meta)


class WriterThread:
    """Calls ``tick`` at a steady pace, when woken, and a last time at the end.

    Parameters
    ----------
    tick : callable
        ``tick(last, asked)`` does one round of writing, ``asked`` if somebody waits for it; it returns False when there
        will be nothing more to write. It must not raise.
    signalled : callable
        Gets the numbers of the signals that came, whatever the main thread is doing (:attr:`wakeup_fd`).
    interval_s : float
        Seconds between rounds.

    Notes
    -----
    Everything that writes runs in this thread, so a signal handler in the midst of anything can ask for a flush and
    wait for it: asking takes no lock.
    """

    def __init__(
        self, tick: Callable[[bool, bool], bool], signalled: Callable[[set[int]], None], *, interval_s: float
    ) -> None:
        self._tick, self._signalled, self.interval_s = tick, signalled, interval_s
        self._last = False
        self._read_fd = self._write_fd = -1
        self._waiting: deque[Any] = deque()
        self._ended = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="mappnb-writer", daemon=True)

    @property
    def alive(self) -> bool:
        """True while the thread runs."""
        return self._ended.locked()

    @property
    def wakeup_fd(self) -> int:
        """Descriptor for ``signal.set_wakeup_fd``."""
        return self._write_fd

    def start(self) -> None:
        """Start the thread."""
        self._read_fd, self._write_fd = os.pipe()
        os.set_blocking(self._read_fd, False)
        os.set_blocking(self._write_fd, False)
        self._ended.acquire()  # held as long as the thread runs
        try:
            self._thread.start()
        except BaseException:
            self._ended.release()
            raise

    def _run(self) -> None:
        poll, working = select.poll(), True
        poll.register(self._read_fd, select.POLLIN)
        try:
            while True:
                woken = poll.poll(max(1, int(self.interval_s * 1000)) if working else None)
                numbers = set(self._read()) if woken else set()
                last, waiting = self._last, [self._waiting.popleft() for _ in range(len(self._waiting))]
                working = self._tick(last, bool(waiting))
                for request in waiting:
                    request.release()
                if numbers - {0}:
                    self._signalled(numbers - {0})
                if last:
                    return
        finally:
            self._ended.release()

    def _read(self) -> bytes:
        with contextlib.suppress(BlockingIOError):
            return os.read(self._read_fd, 65536)
        return b""

    def wake(self) -> None:
        """Let the next round begin now."""
        if self.alive:
            with contextlib.suppress(OSError):  # a full pipe wakes it too
                os.write(self._write_fd, b"\0")

    def flush(self, timeout_s: float) -> bool:
        """Wait for a round that begins now; False if it is not over in time. Safe in a signal handler."""
        if not self.alive or threading.get_ident() == self._thread.ident:
            return False
        request = threading.Lock()
        request.acquire()
        self._waiting.append(request)
        self.wake()
        return request.acquire(timeout=timeout_s)

    def end(self, timeout_s: float) -> bool:
        """Let the thread do its last round and end; False if it is stuck, as on a dead file system."""
        self._last = True
        self.wake()
        if self.alive and threading.get_ident() != self._thread.ident:
            if not self._ended.acquire(timeout=timeout_s):
                return False
            self._ended.release()
        return True

    def close(self) -> None:
        """Close the descriptors of an ended thread; no signal may be written to them any more."""
        if not self.alive and self._read_fd >= 0:
            os.close(self._read_fd)
            os.close(self._write_fd)
            self._read_fd = self._write_fd = -1
