"""The statistics of one stream in a block that is being written: merged over microbatches as they come, stored at its end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from mappnb.activation_blocks import Stored
from mappnb.activation_stats import FIELDS, NUM_BINS, empty, merge_all
from mappnb.capture.activations.pieces import StatsOfStep

__all__ = ["StreamStats"]

_Array = np.ndarray[Any, Any]
_Pair = tuple[_Array, _Array]


class StreamStats:
    """Statistics of one stream, by step, point and layer."""

    def __init__(self) -> None:
        self._steps: dict[int, dict[tuple[str, int], _Pair]] = {}
        self._shards: dict[str, Mapping[str, Any]] = {}

    @property
    def steps(self) -> set[int]:
        """Steps of which there are statistics."""
        return set(self._steps)

    @property
    def names(self) -> list[str]:
        """Names of the points, in the order in which they came."""
        return list(dict.fromkeys(name for held in self._steps.values() for name, _ in held))

    def add(self, stats: StatsOfStep) -> None:
        """Merge the microbatches of a step: all points that have as many at once, since calls of numpy are what it costs."""
        held = self._steps.setdefault(stats.step, {})
        pairs = {
            key: [*([held[key]] if key in held else ()), *(_pair(row) for row in rows)]
            for key, rows in stats.rows.items()
        }
        alike: dict[int, list[tuple[str, int]]] = {}
        for key, those in pairs.items():
            held.setdefault(key, those[0])  # in order
            alike.setdefault(len(those), []).append(key)
        for keys in alike.values():
            fields = merge_all(np.array([[pair[0] for pair in pairs[key]] for key in keys]), axis=1)
            histograms = np.array([[pair[1] for pair in pairs[key]] for key in keys]).sum(axis=1)
            held.update(zip(keys, zip(fields, histograms, strict=True), strict=True))
        self._shards = {**stats.shards, **self._shards}

    def arrays(self) -> Iterator[tuple[str, Stored]]:
        """Give the arrays to be stored."""
        steps = sorted(self._steps)
        yield "step", Stored(np.array(steps, np.int64), ("step",))
        for name in self.names:
            layers = sorted({layer for held in self._steps.values() for n, layer in held if n == name})
            fields, histogram = empty((len(steps), len(layers)))
            for row, step in enumerate(steps):
                for column, layer in enumerate(layers):
                    if (pair := self._steps[step].get((name, layer))) is not None:
                        fields[row, column], histogram[row, column] = pair
            dims: tuple[str, ...] = ("step", "layer")
            attrs = {"mode": "stats", "layers": layers, "fields": list(FIELDS), "shard": self._shards.get(name, {})}
            if layers == [-1]:
                dims, fields, histogram, attrs["layers"] = ("step",), fields[:, 0], histogram[:, 0], []
            yield name, Stored(fields, (*dims, "field"), attrs)
            yield f"{name}_histogram", Stored(histogram, (*dims, "bin"), {"layers": attrs["layers"]})


def _pair(row: Any) -> _Pair:
    """Return fields and histogram of one tensor, also of a row that came from a GPU."""
    if isinstance(row, tuple):
        return row
    values = row.array()
    return values[: len(FIELDS)], values[len(FIELDS) : len(FIELDS) + NUM_BINS].astype(np.int64)
