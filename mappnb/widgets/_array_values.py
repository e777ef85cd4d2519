"""What is read of an array, and what is counted of it: the shown part, a bounded sample, the marks."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr

from mappnb.widgets._array_grid import Grid

__all__ = ["MISSING", "Mark", "Survey", "kind_of", "marks_of", "numbers", "read_shown", "survey", "thinned"]

Array = np.ndarray[Any, Any]
Indexers = Mapping[Hashable, slice | Array | int]

MISSING = "mappnb_missing"
"""Name of the coordinate that carries the mask of a view along."""

MOST_COUNTED, MOST_COUNTED_BYTES = 1 << 22, 1 << 24
"""Arrays in memory up to this many values and bytes are counted whole."""
MOST_LOADED = 1 << 18
"""Of an array that is not in memory at most about this many values are loaded beyond the shown part."""
LAZY_BLOCKS = 4
_MOST_SORTED = 1 << 14
_TEXT_KINDS = "USTOV"


class Mark:
    """Codes of what is not an ordinary value."""

    NONE, NAN, POS_INF, NEG_INF, BELOW, ABOVE, MISSING = range(7)


@dataclass(slots=True)
class Survey:
    """What was counted.

    Attributes
    ----------
    size, looked_at : int
        Values of the array, and how many of them were looked at.
    counts : dict of int to int
        Of each :class:`Mark`, over the values looked at; below and above only once the limits are known.
    finite : array
        The ordinary values looked at, as numbers.
    """

    size: int
    looked_at: int
    counts: dict[int, int]
    finite: Array

    @property
    def sampled(self) -> bool:
        """True if not every value was looked at."""
        return self.looked_at < self.size


def kind_of(dtype: np.dtype[Any]) -> str:
    """Return ``number``, ``bool``, ``complex``, ``time`` or ``text``."""
    if dtype.kind in "iuf" or (dtype.kind == "V" and dtype.names is None and "float" in dtype.name):
        return "number"
    return {"b": "bool", "c": "complex", "M": "time", "m": "time"}.get(dtype.kind, "text")


def numbers(values: Array) -> Array:
    """Return values as real numbers that numpy compares fast: complex by magnitude, times by count with NaT as NaN.

    Text gives an empty array.
    """
    kind = kind_of(values.dtype)
    if kind == "complex":
        with np.errstate(over="ignore", invalid="ignore"):
            return np.abs(values)
    if kind == "time":
        ticks = values.astype(np.int64)
        return np.where(np.isnat(values), np.nan, ticks.astype(np.float64))
    if kind == "text":
        return np.empty(0)
    if values.dtype.kind == "V" or values.dtype == np.float16:
        return values.astype(np.float32)
    return values.astype(np.float64) if values.dtype.kind == "f" and values.dtype.itemsize > 8 else values


def marks_of(values: Array, missing: Array | None) -> Array:
    """Return the :class:`Mark` of each number, limits not yet known; missing comes before all others."""
    marks = np.zeros(values.shape, np.uint8)
    if values.dtype.kind == "f":
        marks[np.isnan(values)] = Mark.NAN
        marks[values == np.inf] = Mark.POS_INF
        marks[values == -np.inf] = Mark.NEG_INF
    if missing is not None:
        marks[missing] = Mark.MISSING
    return marks


def _mask(da: xr.DataArray, dims: Sequence[Hashable], indexers: Indexers, values: Array) -> Array | None:
    """Return which of the values no rank has captured, or None if the array says nothing of it."""
    name = MISSING if MISSING in da.coords else "missing"
    coord = da.coords.get(name)
    out = None
    if coord is not None and coord.dtype == bool and coord.dims != (name,):
        taken = coord.variable.isel({d: k for d, k in indexers.items() if d in coord.dims})
        axes = [n for d, n in zip(dims, values.shape, strict=True) if d in taken.dims]
        inner = taken.transpose(*[d for d in dims if d in taken.dims]).values.reshape(axes)
        shape = [n if d in taken.dims else 1 for d, n in zip(dims, values.shape, strict=True)]
        out = np.broadcast_to(inner.reshape(shape), values.shape)
    fill = da.attrs.get("missing_value")
    if fill is not None and np.ndim(fill) == 0 and kind_of(values.dtype) != "text":
        same = values != values if fill != fill else values == fill  # noqa: PLR0124
        out = same if out is None else out | same
    return out


def read_shown(da: xr.DataArray, grid: Grid) -> tuple[Array, Array | None]:
    """Return the shown values, shape of ``grid.axes``, and the mask of those that are missing."""
    picked: dict[Hashable, slice | Array | int] = {a.dim: a.indexer() for a in grid.axes if a.dim is not None}
    picked |= {dim: 0 for dim, _ in grid.fixed}
    dims = [a.dim for a in grid.axes if a.dim is not None]
    values = da.variable.isel(picked).transpose(*dims).values
    mask = _mask(da, dims, picked, values)
    shape = tuple(a.shown for a in grid.axes)
    return values.reshape(shape), None if mask is None else mask.reshape(shape)


def _strides(sizes: Sequence[int], most: int) -> list[int]:
    """Return a step for each dimension so that at most ``most`` values are left, the longest dimension being thinned first."""
    steps = [1] * len(sizes)
    while (left := [math.ceil(n / s) for n, s in zip(sizes, steps, strict=True)]) and math.prod(left) > most:
        i = max(range(len(sizes)), key=lambda k: left[k])
        over = math.prod(left) / most
        steps[i] += max(1, math.floor((min(over, 2.0) - 1) * steps[i]))
    return steps


def _samples(da: xr.DataArray) -> list[dict[Hashable, slice]]:
    """Return which parts to count: all, every n-th of an array in memory, or a few blocks of one that is read for it."""
    sizes = [int(n) for n in da.shape]
    in_memory = isinstance(getattr(da.variable, "_data", None), np.ndarray) and not isinstance(
        getattr(da.variable, "_data", None), np.memmap
    )
    most = min(MOST_COUNTED, MOST_COUNTED_BYTES // da.dtype.itemsize) if in_memory else MOST_LOADED
    if math.prod(sizes) <= most:
        return [{}]
    if in_memory:
        return [{d: slice(None, None, s) for d, s in zip(da.dims, _strides(sizes, most), strict=True)}]
    block: list[int] = []
    room = MOST_LOADED // LAZY_BLOCKS
    pieces = _chunks(da)
    for n in reversed(pieces):  # whole runs of the last dimensions, inside one piece of the store
        block.insert(0, max(1, min(n, room)))
        room //= block[0]
    out = []
    for k in range(LAZY_BLOCKS):
        places = [(math.ceil(n / p) - 1) * k // (LAZY_BLOCKS - 1) * p for n, p in zip(sizes, pieces, strict=True)]
        out.append({d: slice(a, min(a + b, n)) for d, a, b, n in zip(da.dims, places, block, sizes, strict=True)})
    return out


def _chunks(da: xr.DataArray) -> list[int]:
    """Return the shape of the pieces in which the array is stored; of the whole array where that is not known."""
    if da.chunks is not None:
        return [int(c[0]) for c in da.chunks]
    stored = da.encoding.get("chunks")
    return [int(c) for c in stored] if stored and len(stored) == da.ndim else [int(n) for n in da.shape]


def survey(da: xr.DataArray) -> Survey:
    """Return the counts of an array: exact up to ``MOST_COUNTED`` values in memory, else of a sample."""
    if kind_of(da.dtype) == "text":
        return Survey(da.size, 0, {}, np.empty(0))
    counts, finite, looked_at = dict.fromkeys(range(7), 0), [], 0
    for part in _samples(da):
        raw = da.variable.isel(part).values
        mask = _mask(da, list(da.dims), part, raw)
        looked_at += raw.size
        if mask is not None:
            counts[Mark.MISSING] += int(np.count_nonzero(mask))
            raw = raw[~mask]
        values = numbers(np.ascontiguousarray(raw)).ravel()
        if values.dtype.kind == "f" and not (good := np.isfinite(values)).all():
            counts[Mark.NAN] += int(np.count_nonzero(np.isnan(values)))
            counts[Mark.POS_INF] += int(np.count_nonzero(values == np.inf))
            counts[Mark.NEG_INF] += int(np.count_nonzero(values == -np.inf))
            values = values[good]
        finite.append(values)
    return Survey(da.size, looked_at, counts, finite[0] if len(finite) == 1 else np.concatenate(finite))


def thinned(values: Array) -> Array:
    """Return at most about ``2**14`` of the values, evenly spread: enough for quantiles and distinct values."""
    step = max(1, math.ceil(values.size / _MOST_SORTED)) | 1  # odd: so that it walks through all columns of even sizes
    return values[::step]
