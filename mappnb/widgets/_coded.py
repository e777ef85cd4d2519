"""Columns of descriptions kept as one small number per event: what ten million events need of memory, not of time."""

from __future__ import annotations

from typing import Any

import numpy as np
import xarray as xr
from xarray.core import indexing

__all__ = ["Coded", "coded_variable", "coding_of"]

Array = np.ndarray[Any, Any]


class Coded(xr.backends.BackendArray):
    """``table[codes]``, worked out for what is looked at.

    Parameters
    ----------
    codes : int32 array, dims (event,)
    table : array, dims (code,)
        Its last entry serves code -1.
    """

    def __init__(self, codes: Array, table: Array) -> None:
        self.codes, self.table = codes, table
        self.shape, self.dtype = codes.shape, table.dtype

    def __getitem__(self, key: indexing.ExplicitIndexer) -> Any:
        return indexing.explicit_indexing_adapter(key, self.shape, indexing.IndexingSupport.OUTER, self._get)

    def _get(self, key: tuple[Any, ...]) -> Any:
        return self.table[self.codes[key[0]]]


def coded_variable(codes: Array, table: Array, *, like: xr.Variable) -> xr.Variable:
    """Return a coded column as a variable with the dims and attributes of ``like``."""
    return xr.Variable(like.dims, indexing.LazilyIndexedArray(Coded(codes, table)), like.attrs)


def coding_of(variable: xr.Variable) -> Coded | None:
    """Return the codes of a variable that :func:`coded_variable` made, whole; None for any other."""
    data = getattr(variable, "_data", None)
    array = getattr(data, "array", None)
    return array if isinstance(array, Coded) and variable.shape == array.shape else None
