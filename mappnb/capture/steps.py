"""The step table inside the job: what a step was worth, kept until it can be read without waiting for a device."""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mappnb.segments import TABLES, Columns

__all__ = ["Pending", "StepTable"]

_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
_MEAN, _SUM = ("loss", "grad_norm", "lr"), ("tokens", "microbatches")


class Pending:
    """A number that may still be on a device: :meth:`ready` never waits.

    Parameters
    ----------
    value : float or tensor
        A tensor on a GPU is copied to pinned memory behind the work already queued, and read once that has run
        (untested on GPU).
    """

    __slots__ = ("_event", "_value")

    def __init__(self, value: Any) -> None:
        self._event = None
        if hasattr(value, "detach"):
            value = value.detach()
            if value.is_cuda:
                torch = sys.modules["torch"]
                value = value.to("cpu", non_blocking=True)
                self._event = torch.cuda.Event()
                self._event.record()
        self._value = value

    def ready(self) -> bool:
        """Return True when :meth:`values` need not wait."""
        return self._event is None or bool(self._event.query())

    def values(self) -> np.ndarray[Any, Any]:
        """Return the numbers, shape (n,), float64."""
        value = self._value
        array = value.double().numpy() if hasattr(value, "double") else np.asarray(value, np.float64)
        return np.atleast_1d(array).astype(np.float64).ravel()


def resident_bytes() -> float:
    """Return the resident set of this process in bytes; NaN where the system does not tell. About 5 µs."""
    try:
        with open("/proc/self/statm", "rb") as f:
            return float(int(f.read().split()[1]) * _PAGE)
    except (OSError, IndexError, ValueError):
        return float("nan")


def memory_of_step() -> tuple[float, float]:
    """Return (in use, peak since the last call) in bytes: of the CUDA allocator, else of the process.

    The CUDA peak is reset here, once a step, so that it belongs to the step. On a CPU the peak is the larger of what is in
    use at the step's end and the telemetry samples of the step.
    """
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        peak = float(torch.cuda.max_memory_allocated())
        torch.cuda.reset_peak_memory_stats()
        return float(torch.cuda.memory_allocated()), peak
    now = resident_bytes()
    return now, now


@dataclass(slots=True)
class _Row:
    step: int
    start_ns: int
    end_ns: int = -1
    memory: tuple[float, float] = (float("nan"), float("nan"))
    values: dict[str, list[Pending]] = field(default_factory=dict)

    def ready(self) -> bool:
        return all(p.ready() for pending in self.values.values() for p in pending)

    def number(self, name: str) -> float:
        found = [p.values() for p in self.values.get(name, [])]
        if not found:
            return float("nan")
        every = np.concatenate(found)
        return float(every.mean() if name in _MEAN else every.sum() if name in _SUM else every[-1])


class StepTable:
    """Collects the values of the current step; finished rows are taken by the writer thread."""

    def __init__(self) -> None:
        self._current: _Row | None = None
        self._finished: deque[_Row] = deque()
        self.peak_seen = 0.0

    @property
    def open(self) -> bool:
        """True between begin and end of a step."""
        return self._current is not None

    def begin(self, step: int, start_ns: int) -> None:
        """Begin a row."""
        self._current = _Row(step, start_ns)

    def add(self, **values: Any) -> None:
        """Add values to the current row, or to the last one that ended; before the first step they are dropped."""
        row = self._current or (self._finished[-1] if self._finished else None)
        if row is not None:
            for name, value in values.items():
                row.values.setdefault(name, []).append(Pending(value))

    def end(self, end_ns: int, memory: Callable[[], tuple[float, float]] = memory_of_step) -> None:
        """End the current row."""
        if self._current is not None:
            used, peak = memory()
            self._current.end_ns, self._current.memory = end_ns, (used, max(peak, self.peak_seen))
            self.peak_seen = 0.0
            self._finished.append(self._current)
            self._current = None

    def cancel(self) -> None:
        """Forget the current row."""
        self._current = None

    def take(self, *, everything: bool = False) -> Columns | None:
        """Return finished rows whose numbers can be read, oldest first; None if there is none.

        Parameters
        ----------
        everything : bool
            At the end of the run: wait for the last numbers, and take the last row though values may still be added.
        """
        rows: list[_Row] = []
        keep = 0 if everything else 1  # the newest may still get values, such as the loss reported after the step
        while len(self._finished) > keep and (everything or self._finished[0].ready()):
            rows.append(self._finished.popleft())
        if not rows:
            return None
        spec = TABLES["steps"]
        out: Columns = {
            "step": np.array([r.step for r in rows], np.int32),
            "start_ns": np.array([r.start_ns for r in rows], np.int64),
            "end_ns": np.array([r.end_ns for r in rows], np.int64),
            "memory_bytes": np.array([r.memory[0] for r in rows]),
            "memory_peak_bytes": np.array([r.memory[1] for r in rows]),
        }
        for name in spec.columns:
            if name not in out:
                out[name] = np.array([r.number(name) for r in rows])
        return out
