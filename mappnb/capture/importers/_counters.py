"""Counter samples of a trace (``ph`` C): numbers over time, which become rows of the metrics table."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from mappnb.capture.importers._tracejson import Batch, usable
from mappnb.table_specs import Columns

__all__ = ["COUNTER_FIELD", "Counters"]

Array = np.ndarray[Any, Any]
COUNTER_FIELD = ("event", "counter", "r")
"""What to ask the reader for: the args of counter samples, as they are written."""


class Counters:
    """The counter samples of a file.

    Attributes
    ----------
    unusable : int
        Samples without a time, a name or a number.
    """

    def __init__(self) -> None:
        self._parts: list[tuple[Array, ...]] = []
        self.unusable = 0

    def add(self, batch: Batch, *, time: str = "ts") -> None:
        """Take the samples of a batch."""
        rows = np.flatnonzero(batch["ph"] == ord("C"))
        if len(rows):
            good = rows[usable(batch[time][rows]) & (batch["name"][rows] >= 0) & (batch["counter"][rows] >= 0)]
            self.unusable += len(rows) - len(good)
            self._parts.append(tuple(batch[n][good] for n in (time, "pid", "name", "counter")))

    def columns(self, names: list[str], pid: int | None = None) -> Columns:
        """Return rows of the metrics table.

        Parameters
        ----------
        names : list of str
            The texts of the trace.
        pid : int, optional
            Only the counters of this process.

        Returns
        -------
        dict of str to array
            ``time_ns``, ``name``, ``value``. A counter of several series gives a row for each: ``counter: series``.
        """
        times: list[int] = []
        labels: list[str] = []
        values: list[float] = []
        for part in self._parts:
            for time, process, name, raw in zip(*(x.tolist() for x in part), strict=True):
                if pid is not None and process != pid:
                    continue
                series = _numbers(names[raw])
                self.unusable += not series
                for key, value in series.items():
                    times.append(time)
                    labels.append(names[name] if len(series) == 1 else f"{names[name]}: {key}")
                    values.append(value)
        return {
            "time_ns": np.array(times, np.int64),
            "name": np.array(labels, object),
            "value": np.array(values, np.float64),
            "index": np.zeros(len(times), np.int32),
        }


def _numbers(text: str) -> dict[str, float]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    items = found.items() if isinstance(found, dict) else ()
    return {k: float(v) for k, v in items if isinstance(v, int | float) and not isinstance(v, bool) and abs(v) < 1e300}
