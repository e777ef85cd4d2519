"""The step table and the metrics inside the job: kept until they can be read without waiting for a device."""

from __future__ import annotations

import logging
import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mappnb.table_specs import TABLES, Rows, as_records

__all__ = ["Deferred", "MetricTable", "Pending", "StepRow", "StepTable"]

log = logging.getLogger("mappnb")
MAX_WAITING_METRICS = 262_144
RESIDENT_AGE_S = 7.0  # telemetry of the named plans comes sooner
_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
_MEAN, _SUM = ("loss", "grad_norm", "lr"), ("tokens", "microbatches")
_VALUES = tuple(TABLES["steps"].columns)[3:]


@dataclass(frozen=True, slots=True)
class Deferred:
    """Numbers that are worked out on the writer thread: ``work(array)``; nobody else may change the array."""

    work: Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]
    array: np.ndarray[Any, Any]


class Pending:
    """A number, or several, that may still be on a device: :meth:`ready` never waits.

    Parameters
    ----------
    value : float, array or tensor
        Copied here, since the program may change it in place. A tensor on a GPU is copied to pinned memory behind the
        work already queued, and read once that has run (untested on GPU).

    Raises
    ------
    TypeError, ValueError, RuntimeError
        If it is not numbers.
    """

    __slots__ = ("_event", "_value")

    def __init__(self, value: Any) -> None:
        self._event = None
        if isinstance(value, (int, float)):
            value = float(value)
        elif isinstance(value, Deferred):
            pass
        elif hasattr(value, "detach"):
            value = value.detach()
            if not value.is_cuda and value.numel() == 1:
                value = float(value.item())  # a tenth of the price of an array
            elif value.is_cuda:
                torch = sys.modules["torch"]
                value = value.to("cpu", non_blocking=True)
                self._event = torch.cuda.Event()
                self._event.record()
            else:
                value = np.array(value.double().numpy(), np.float64)
        else:
            value = np.array(value, np.float64)
        self._value = value

    def ready(self) -> bool:
        """Return True when :meth:`values` need not wait."""
        return self._event is None or bool(self._event.query())

    def values(self) -> np.ndarray[Any, Any]:
        """Return the numbers, shape (n,), float64."""
        value = self._value
        if isinstance(value, float):
            return np.array([value])
        if isinstance(value, Deferred):
            return np.asarray(value.work(value.array), np.float64).reshape(-1)
        array: np.ndarray[Any, Any] = value.double().numpy() if hasattr(value, "double") else value
        return array.reshape(-1) if array.dtype == np.float64 else array.astype(np.float64).reshape(-1)

    def numbers(self) -> list[float]:
        """Return the same as a list."""
        found: list[float] = [self._value] if isinstance(self._value, float) else self.values().tolist()
        return found


class _Reader:
    """Makes :class:`Pending` of what a program gives; what is no number is left out and said once per name."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def read(self, name: str, value: Any) -> Pending | None:
        """Return the pending value, or None."""
        try:
            return Pending(value)
        except (TypeError, ValueError, RuntimeError) as err:
            if name not in self._said:
                self._said.add(name)
                log.warning("mappnb: %s is not a number (%s); such values are left out", name, str(err)[:80])
            return None


def resident_bytes() -> float:
    """Return the resident set of this process in bytes; NaN where the system does not tell. 0.1 ms and more."""
    try:
        with open("/proc/self/statm", "rb") as f:
            return float(int(f.read().split()[1]) * _PAGE)
    except (OSError, IndexError, ValueError):
        return float("nan")


def memory_of_step() -> tuple[float, float] | None:
    """Return (in use, peak since the last call) in bytes of the CUDA allocator; None where CUDA is not in use.

    The CUDA peak is reset here, once a step, so that it belongs to the step.
    """
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    if cuda is not None and cuda.is_initialized():  # is_available() would start CUDA, and forks would fail
        peak = float(cuda.max_memory_allocated())
        cuda.reset_peak_memory_stats()
        return float(cuda.memory_allocated()), peak
    return None


@dataclass(slots=True, eq=False)
class StepRow:
    """One step: its values are appended by the training thread, and read by the writer thread without a lock."""

    step: int
    start_ns: int
    end_ns: int = -1
    memory: tuple[float, float] = (float("nan"), float("nan"))
    values: list[tuple[str, Pending]] = field(default_factory=list)
    written: int = -1  # number of values that the row on disk holds; -1 = there is none

    @property
    def changed(self) -> bool:
        """True if the row on disk does not say everything."""
        return len(self.values) != self.written

    def ready(self) -> bool:
        """Return True when no value need be waited for."""
        return all(p.ready() for _, p in self.values[:])

    def record(self) -> tuple[Any, ...]:
        """Return the row as it was found to be ready: of each value a mean, a sum, or the last given; NaN if none was."""
        given: dict[str, list[float]] = {}
        for name, pending in self.values[: max(self.written, 0)]:
            given.setdefault(name, []).extend(pending.numbers())
        known = {"memory_bytes": self.memory[0], "memory_peak_bytes": self.memory[1]}
        for name, numbers in given.items():
            if numbers:
                total = sum(numbers) if name in _MEAN or name in _SUM else numbers[-1]
                known[name] = total / len(numbers) if name in _MEAN else total
        return (self.step, self.start_ns, self.end_ns, *(known.get(name, math.nan) for name in _VALUES))


class StepTable:
    """Collects the values of the current step; finished rows are taken by the writer thread.

    A row is written at the first flush after its end. It is written once more if values come later, such as the loss
    that a loop reports after the optimizer's step; readers take the last row of a step.
    """

    def __init__(self) -> None:
        self._current: StepRow | None = None
        self._last: StepRow | None = None
        self._finished: deque[StepRow] = deque()
        self._held: list[StepRow] = []  # the writer thread's
        self._early: deque[tuple[str, Pending]] = deque(maxlen=256)
        self._reader = _Reader()
        self._resident = (-math.inf, float("nan"))  # time in s, bytes
        self._peak_seen = 0.0

    @property
    def open(self) -> bool:
        """True between begin and end of a step."""
        return self._current is not None

    def begin(self, step: int, start_ns: int, *, early: bool = False) -> None:
        """Begin a row; with ``early`` it gets the values that were added before there was any."""
        self._current = StepRow(step, start_ns)
        if early:
            self._current.values += self._early
        self._early.clear()

    def add(self, **values: Any) -> None:
        """Add values to the current row, or to the last one that ended."""
        row = self._current or self._last
        into = self._early if row is None else row.values
        for name, value in values.items():
            if (pending := self._reader.read(name, value)) is not None:
                into.append((name, pending))

    def see_resident(self, num_bytes: float) -> None:
        """Take the resident set of the process, as telemetry has just sampled it."""
        self._resident = (time.monotonic(), num_bytes)
        self._peak_seen = max(self._peak_seen, num_bytes)

    def _memory_of_process(self) -> tuple[float, float]:
        """Resident set and its peak in bytes; asking the system costs 0.1 ms and more, so not at every step."""
        if time.monotonic() - self._resident[0] > RESIDENT_AGE_S:
            self.see_resident(resident_bytes())
        used = self._resident[1]
        peak, self._peak_seen = max(used, self._peak_seen), 0.0
        return used, peak

    def end(self, end_ns: int, memory: Callable[[], tuple[float, float] | None] = memory_of_step) -> None:
        """End the current row."""
        if (row := self.detach(end_ns, memory)) is not None:
            self.put(row)

    def detach(self, end_ns: int, memory: Callable[[], tuple[float, float] | None] = memory_of_step) -> StepRow | None:
        """End the current row and hand it over; :meth:`put` puts it into the table, if it is to be there."""
        row, self._current = self._current, None
        if row is not None:
            row.end_ns, row.memory = end_ns, memory() or self._memory_of_process()
        return row

    def put(self, row: StepRow) -> None:
        """Add a row that has ended."""
        if self._last is None or row.start_ns >= self._last.start_ns:
            self._last = row
        self._finished.append(row)

    def cancel(self) -> None:
        """Forget the current row."""
        self._current = None

    def take(self, *, everything: bool = False) -> Rows | None:
        """Return finished rows that are not on disk as they are now and can be read, oldest first; None if there is none.

        Parameters
        ----------
        everything : bool
            At the end of the run: wait for the last numbers.
        """
        while self._finished:
            self._held.append(self._finished.popleft())
        rows = [r for r in self._held if r.changed and (everything or r.ready())]
        for row in rows:
            row.written = len(row.values)
        self._held = [r for r in self._held if r is self._last or r.changed]
        return as_records("steps", [row.record() for row in rows]) if rows else None


class MetricTable:
    """Numbers by name, step, microbatch and layer; taken by the writer thread once they can be read.

    Attributes
    ----------
    dropped : int
        Values that were lost because ``MAX_WAITING_METRICS`` waited already.
    """

    def __init__(self) -> None:
        self._new: deque[tuple[tuple[Any, ...], int, Pending]] = deque(maxlen=MAX_WAITING_METRICS)
        self._held: list[tuple[tuple[Any, ...], int, Pending]] = []
        self._reader = _Reader()
        self.dropped = 0

    def add(self, place: tuple[Any, ...], index: int, value: Any) -> None:
        """Keep a number, or a 1-d tensor as numbers from ``index`` on; ``place`` is time, name, step, chunk, microbatch, layer."""
        if (pending := self._reader.read(str(place[1]), value)) is not None:
            self.dropped += len(self._new) == MAX_WAITING_METRICS
            self._new.append((place, index, pending))

    def take(self, *, everything: bool = False) -> Rows | None:
        """Return the rows that can be read, None if there is none; with ``everything`` wait for all."""
        while self._new:
            self._held.append(self._new.popleft())
        if everything or all(row[2].ready() for row in self._held):
            ready, self._held = self._held, []
        else:
            ready = [row for row in self._held if row[2].ready()]
            taken = {id(row) for row in ready}
            self._held = [row for row in self._held if id(row) not in taken]
        rows = [(*place, index + i, v) for place, index, p in ready for i, v in enumerate(p.numbers())]
        return as_records("metrics", rows) if rows else None
