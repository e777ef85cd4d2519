"""Attention in one byte a cell: roots, so that small weights keep their digits; and many tokens in few cells."""

from __future__ import annotations

from typing import Any

import numpy as np

from mappnb.errors import MappnbError, did_you_mean

__all__ = [
    "MISSING",
    "POOLS",
    "bins",
    "decode",
    "difference_codes",
    "difference_values",
    "encode",
    "pooled",
    "strongest",
]

Array = np.ndarray[Any, Any]

MISSING = 255
"""The code of what is not there."""
POOLS: dict[str, str] = {"max": "largest", "mean": "mean"}
"""What a cell of several tokens shows."""
_TOP, _MIDDLE = 254, 127


def encode(weights: Array) -> Array:
    """Return attention weights, 0 to 1, as uint8: ``round(254 sqrt(w))``, NaN as :data:`MISSING`.

    Notes
    -----
    The error is at most ``0.00394 sqrt(w) + 4e-6``: 0.004 of a weight of 1, 0.0004 of one of 0.01; what is below 3.9e-6 becomes 0.
    """
    with np.errstate(invalid="ignore"):
        codes = np.rint(_TOP * np.sqrt(np.clip(weights, 0.0, 1.0)))
    return np.where(np.isnan(codes), MISSING, codes).astype(np.uint8)


def decode(codes: Array) -> Array:
    """Return the float32 weights of codes; NaN where nothing is."""
    values = (codes.astype(np.float32) / _TOP) ** 2
    return np.where(codes == MISSING, np.float32(np.nan), values)


def difference_codes(values: Array) -> Array:
    """Return differences of weights, -1 to 1, as uint8: the sign and the root of the size around 127, NaN as :data:`MISSING`."""
    with np.errstate(invalid="ignore"):
        codes = _MIDDLE + np.rint(_MIDDLE * np.sign(values) * np.sqrt(np.minimum(np.abs(values), 1.0)))
    return np.where(np.isnan(codes), MISSING, codes).astype(np.uint8)


def difference_values(codes: Array) -> Array:
    """Return the float32 differences of codes; NaN where nothing is."""
    share = (codes.astype(np.float32) - _MIDDLE) / _MIDDLE
    return np.where(codes == MISSING, np.float32(np.nan), np.sign(share) * share**2)


def bins(size: int, cells: int) -> Array:
    """Return the first token of each cell and the end: int64 array, shape (cells + 1,); no cell is empty."""
    cells = max(1, min(size, cells))
    return (np.arange(cells + 1) * size) // cells


def pooled(values: Array, rows: Array, columns: Array, pool: str) -> Array:
    """Return a pattern in cells.

    Parameters
    ----------
    values : float array, dims (..., query, key)
    rows, columns : int arrays
        As :func:`bins` gives them.
    pool : str
        One of :data:`POOLS`. NaN is left out; a cell of nothing else is NaN.

    Returns
    -------
    float32 array, dims (..., row, column)
    """
    if pool not in POOLS:
        raise MappnbError(f"pool is {pool!r}; expected one of {', '.join(POOLS)}{did_you_mean(pool, POOLS)}")
    if len(rows) - 1 == values.shape[-2] and len(columns) - 1 == values.shape[-1]:
        return values.astype(np.float32, copy=False)
    if pool == "max":
        out: Array = _reduced(np.fmax, values, rows, columns)
        return out.astype(np.float32, copy=False)
    there = ~np.isnan(values)
    count = _reduced(np.add, there.astype(np.float32), rows, columns)
    total = _reduced(np.add, np.where(there, values, 0.0), rows, columns)
    with np.errstate(invalid="ignore"):
        return np.where(count > 0, total / np.maximum(count, 1), np.nan).astype(np.float32)


def strongest(values: Array, rows: Array, columns: Array) -> Array:
    """Return of each cell the value that is furthest from zero, with its sign: for differences."""
    high, low = (_reduced(f, values, rows, columns) for f in (np.fmax, np.fmin))
    return np.where(np.abs(high) >= np.abs(low), high, low).astype(np.float32)


def _reduced(ufunc: Any, values: Array, rows: Array, columns: Array) -> Array:
    out: Array = ufunc.reduceat(ufunc.reduceat(values, columns[:-1], axis=-1), rows[:-1], axis=-2)
    return out
