"""Statistics of tensors: what is counted, exact merging, the fields a reader shows; the numpy twin of the native pass.

A row of statistics is an array of :data:`FIELDS` (float64) and a histogram of :data:`NUM_BINS` counts (int64). Moments are central
and not divided, so that rows merge exactly: over microbatches in the job, over ranks when reading.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from mappnb import _core

__all__ = [
    "BIN_EXPONENTS",
    "FIELDS",
    "NUM_BINS",
    "STATS",
    "describe",
    "empty",
    "merge",
    "merge_all",
    "tensor_stats",
    "tensor_stats_reference",
]

_Array = np.ndarray[Any, Any]
FIELDS: Final = (
    "count",
    "mean",
    "m2",
    "m3",
    "m4",
    "min",
    "max",
    "num_zero",
    "num_nan",
    "num_posinf",
    "num_neginf",
)
"""What is stored: number of finite values, their mean, sums of powers 2 to 4 of the distance from it, ends, and what is counted apart."""
STATS: Final = (
    "count",
    "mean",
    "var",
    "std",
    "min",
    "max",
    "absmax",
    "skewness",
    "kurtosis",
    "sparsity",
    "num_nan",
    "num_inf",
)
"""What :func:`describe` returns."""
LOWEST, HIGHEST = -40, 40
NUM_BINS: Final = HIGHEST - LOWEST + 3
BIN_EXPONENTS: Final = np.arange(LOWEST - 1, HIGHEST + 2)
"""floor(log2 |x|) of each bin; the first takes all below, the last all above; zeros are in none (``num_zero``)."""
_AT = {name: i for i, name in enumerate(FIELDS)}


def empty(shape: tuple[int, ...] = ()) -> tuple[_Array, _Array]:
    """Return the statistics of nothing: fields, dims (*shape, field), and histogram, dims (*shape, bin)."""
    fields = np.zeros((*shape, len(FIELDS)))
    fields[..., _AT["min"]], fields[..., _AT["max"]] = np.inf, -np.inf
    return fields, np.zeros((*shape, NUM_BINS), np.int64)


def merge(a: _Array, b: _Array) -> _Array:
    """Merge the fields of two parts of a tensor; dims (..., field), broadcast. Histograms merge by adding them.

    Notes
    -----
    Pébay (2008), "Formulas for robust, one-pass parallel computation of covariances and arbitrary-order statistical moments",
    equations 3.1 to 3.4; for the variance Chan, Golub and LeVeque (1979).
    """
    n_a, mean_a, m2_a, m3_a, m4_a = (a[..., i] for i in range(5))
    n_b, mean_b, m2_b, m3_b, m4_b = (b[..., i] for i in range(5))
    n = n_a + n_b
    safe = np.where(n > 0, n, 1)
    d = np.where((n_a > 0) & (n_b > 0), mean_b - mean_a, 0)
    f_a, f_b = n_a / safe, n_b / safe
    out = np.empty(np.broadcast_shapes(a.shape, b.shape))
    out[..., 0] = n
    out[..., 1] = np.where(n_a > 0, mean_a + d * f_b, np.where(n_b > 0, mean_b, 0))
    out[..., 2] = m2_a + m2_b + d**2 * n_a * f_b
    out[..., 3] = m3_a + m3_b + d**3 * n_a * f_b * (f_a - f_b) + 3 * d * (f_a * m2_b - f_b * m2_a)
    out[..., 4] = (
        m4_a
        + m4_b
        + d**4 * n_a * f_b * (f_a**2 - f_a * f_b + f_b**2)
        + 6 * d**2 * (f_a**2 * m2_b + f_b**2 * m2_a)
        + 4 * d * (f_a * m3_b - f_b * m3_a)
    )
    out[..., 5] = np.minimum(a[..., 5], b[..., 5])
    out[..., 6] = np.maximum(a[..., 6], b[..., 6])
    out[..., 7:] = a[..., 7:] + b[..., 7:]
    return out


def merge_all(fields: _Array, axis: int = 0) -> _Array:
    """Merge fields along an axis, by halves: the last axis is the field."""
    parts = np.moveaxis(fields, axis, 0)
    if not len(parts):
        return empty(parts.shape[1:-1])[0]
    while len(parts) > 1:
        even = len(parts) // 2 * 2
        parts = np.concatenate([merge(parts[0:even:2], parts[1:even:2]), parts[even:]])
    return np.asarray(parts[0])


def describe(fields: _Array) -> dict[str, _Array]:
    """Return the statistics that people read, by name (:data:`STATS`); each has the dims of ``fields`` without the last.

    ``var`` is the population's (divided by count), ``kurtosis`` is not reduced by 3 (a normal distribution has 3), ``sparsity`` is
    the fraction of exact zeros; all are over finite values, NaN where there is none.
    """
    of = {name: np.asarray(fields[..., i]) for name, i in _AT.items()}
    count = of["count"]
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        var = of["m2"] / count
        std = np.sqrt(var)
        skewness = of["m3"] / count / (var * std)
        kurtosis = of["m4"] / count / var**2
        sparsity = of["num_zero"] / count
    lowest, highest = (np.where(count > 0, of[name], np.nan) for name in ("min", "max"))
    return {
        "count": count,
        "mean": np.where(count > 0, of["mean"], np.nan),
        "var": var,
        "std": std,
        "min": lowest,
        "max": highest,
        "absmax": np.maximum(np.abs(lowest), np.abs(highest)),
        "skewness": skewness,
        "kurtosis": kurtosis,
        "sparsity": sparsity,
        "num_nan": of["num_nan"],
        "num_inf": of["num_posinf"] + of["num_neginf"],
    }


def tensor_stats(values: _Array, *, bfloat16: bool = False) -> tuple[_Array, _Array]:
    """Return fields and histogram of an array, by one native pass; the lock of Python is free meanwhile.

    Parameters
    ----------
    values : array, any dims
        float16, float32 or float64; other numbers are converted to float64. Rows of contiguous values at a regular distance, in any
        order of dims, are read where they are; else a copy is made.
    bfloat16 : bool
        The values are the bits of bfloat16 numbers (uint16 or int16).

    Returns
    -------
    fields : array, dims (field,)
        See :data:`FIELDS`.
    histogram : array, dims (bin,)
        See :data:`BIN_EXPONENTS`.

    Notes
    -----
    Sums are in double precision by blocks of 1024 values around the block's own mean, merged by Pébay's formulas. Equal to
    :func:`tensor_stats_reference` to about 1e-15 of each moment's scale.
    """
    x = np.asarray(values)
    if not bfloat16 and (x.dtype.kind != "f" or x.dtype.itemsize > 8 or not x.dtype.isnative):
        x = x.astype(np.float64)
    fields, histogram = np.empty(len(FIELDS)), np.empty(NUM_BINS, np.int64)
    _core.tensor_stats(_rows(x), fields, histogram, bfloat16)
    return fields, histogram


def _rows(x: _Array) -> _Array:
    """Return the values as a matrix with contiguous rows, in any order; a view where the strides allow one."""
    if x.flags.c_contiguous:
        return x.reshape(1, -1)
    order = sorted((i for i in range(x.ndim) if x.shape[i] != 1), key=lambda i: -abs(x.strides[i]))
    x = x.transpose([*(i for i in range(x.ndim) if x.shape[i] == 1), *order])
    if x.flags.c_contiguous:
        return x.reshape(1, -1)
    if x.size and x.strides[-1] == x.itemsize:
        first = x.ndim - 1
        while first > 0 and x.strides[first - 1] == x.strides[first] * x.shape[first]:
            first -= 1
        columns = int(np.prod(x.shape[first:]))
        whole = all(x.strides[i - 1] == x.strides[i] * x.shape[i] for i in range(1, first))
        if whole and first and x.strides[first - 1] >= columns * x.itemsize:
            return np.lib.stride_tricks.as_strided(
                x, (x.size // columns, columns), (x.strides[first - 1], x.itemsize), writeable=False
            )
    return np.ascontiguousarray(x).reshape(1, -1)


def tensor_stats_reference(values: _Array) -> tuple[_Array, _Array]:
    """Return fields and histogram of an array, by numpy: slow, plain, the oracle of :func:`mappnb._core.tensor_stats`."""
    with np.errstate(invalid="ignore"):  # a signalling NaN
        x = np.asarray(values, np.float64).ravel()
    finite = x[np.isfinite(x)]
    fields, histogram = empty()
    fields[7:] = (finite == 0).sum(), np.isnan(x).sum(), (x == np.inf).sum(), (x == -np.inf).sum()
    if len(finite):
        mean = finite.mean()
        d = finite - mean
        with np.errstate(over="ignore"):
            fields[:7] = len(finite), mean, (d**2).sum(), (d**3).sum(), (d**4).sum(), finite.min(), finite.max()
        exponents = np.frexp(finite[finite != 0])[1] - 1
        np.add.at(histogram, np.clip(exponents, LOWEST - 1, HIGHEST + 1) - (LOWEST - 1), 1)
    return fields, histogram
