"""The writer thread: once a second it hands what was recorded to the operating system. Training never waits for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from mappnb.capture._record import RECORD_DTYPE, Flag
from mappnb.capture.recorder import Recorder
from mappnb.segments import TABLES, Columns
from mappnb.store import RunWriter

__all__ = ["EventSink", "WriterThread", "metric_columns", "telemetry_columns"]

HEARTBEAT_S = 10.0
_EVENT_COLUMNS = tuple(TABLES["events"].columns)


def event_columns(records: np.ndarray[Any, Any]) -> Columns:
    """Return the columns of recorder records."""
    return {name: np.ascontiguousarray(records[name]) for name in _EVENT_COLUMNS}


def metric_columns(rows: list[tuple[Any, ...]]) -> Columns:
    """Return the columns of metric rows, in the order of the table's spec."""
    spec = TABLES["metrics"]
    return {name: np.array([r[i] for r in rows], spec.numpy_dtype(name)) for i, name in enumerate(spec.columns)}


class EventSink:
    """Moves records from the recorder to the events table.

    A span that is still open is written once, flagged open, at the first flush that sees it: whatever hangs is on disk
    within a flush interval. Its finished row replaces it when it comes.
    """

    def __init__(self, recorder: Recorder, run: RunWriter, **options: Any) -> None:
        self.recorder = recorder
        self.table = run.table("events", site=lambda i: recorder._sites[i], **options)
        self.table.is_open = self._is_open
        self._shown: set[tuple[int, int, int]] = set()
        self._heartbeat_s = 0.0
        self._dropped = 0

    def flush(self, extra: dict[str, Any] | None = None) -> int:
        """Write what there is; returns the number of rows."""
        now_ns = self.recorder.now_ns()
        open_rows = self._newly_open(self.recorder.open_spans())
        rows = self.recorder.drain()
        records = np.concatenate([open_rows, rows]) if len(open_rows) else rows  # looked at first, so they come first
        dropped = self.recorder.stats()["dropped"]
        due = time.monotonic() - self._heartbeat_s > HEARTBEAT_S
        if len(records) or dropped != self._dropped or extra or due:
            self._heartbeat_s, self._dropped = time.monotonic(), dropped
            self.table.append(event_columns(records), meta={"now_ns": now_ns, "dropped": dropped, **(extra or {})})
        return len(records)

    def _newly_open(self, spans: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        keys = [(int(s["thread"]), int(s["start_ns"]), int(s["site"])) for s in spans]
        new = [k not in self._shown for k in keys]
        self._shown = set(keys)
        return spans[np.array(new, bool)] if len(spans) else np.empty(0, RECORD_DTYPE)

    def _is_open(self, columns: Columns) -> np.ndarray[Any, Any]:
        keys = zip(columns["thread"].tolist(), columns["start_ns"].tolist(), columns["site"].tolist(), strict=True)
        return np.array([k in self._shown for k in keys], bool)

    def finish(self) -> None:
        """Write the rest; spans that never ended are closed now, flagged open and clipped."""
        spans = self.recorder.open_spans()
        spans["flags"] |= int(Flag.CLIPPED)
        records = np.concatenate([self.recorder.drain(), spans])
        self.table.append(event_columns(records), meta={"now_ns": self.recorder.now_ns(), "dropped": self.recorder.stats()["dropped"]})


class WriterThread:
    """Calls ``tick`` at a steady pace until stopped; a failure in it goes to ``fail`` and ends the thread.

    Parameters
    ----------
    tick : callable
        One round of writing.
    fail : callable
        Receives the exception of a failed round.
    interval_s : float
        Seconds between rounds.
    """

    def __init__(self, tick: Callable[[], None], fail: Callable[[str, BaseException], None], *, interval_s: float) -> None:
        self._tick, self._fail, self.interval_s = tick, fail, interval_s
        self._wake = threading.Event()
        self._stop = False
        self._busy = threading.Lock()
        self._in_round = 0
        self._thread = threading.Thread(target=self._run, name="mappnb-writer", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def _run(self) -> None:
        while not self._stop:
            self._wake.wait(self.interval_s)
            self._wake.clear()
            if self._stop or not self.once():
                return

    def once(self, timeout_s: float = -1.0) -> bool:
        """Do one round now, in the calling thread; False if it failed, or if another round is not over in time."""
        if self._in_round == threading.get_ident() or not self._busy.acquire(timeout=timeout_s):
            return False
        try:
            self._in_round = threading.get_ident()
            self._tick()
        except BaseException as err:  # noqa: BLE001 (capture never kills training: whatever it is, it goes to fail)
            self._fail("writer", err)
            return False
        finally:
            self._in_round = 0
            self._busy.release()
        return True

    def wake(self) -> None:
        """Let the next round begin now."""
        self._wake.set()

    def stop(self, timeout_s: float = 30.0) -> bool:
        """End the thread; False if it is stuck, as on a dead file system."""
        self._stop = True
        self._wake.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()


def telemetry_columns(time_ns: int, sample: dict[str, Any]) -> Columns:
    """Return the columns of one telemetry sample; what it does not hold is missing."""
    spec = TABLES["telemetry"]
    out: Columns = {"time_ns": np.array([time_ns], np.int64)}
    for name in list(spec.columns)[1:]:
        dtype = spec.numpy_dtype(name)
        value = sample.get(name)
        out[name] = np.array([(np.nan if dtype.kind == "f" else -1) if value is None else value], dtype)
    return out
