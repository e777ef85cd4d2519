"""Some rows of a column that may not be in memory."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import xarray as xr

from mappnb.widgets._coded import coding_of

__all__ = ["take"]

Array = np.ndarray[Any, Any]
NEAR_ROWS, MOST_READS = 20_000, 80


def take(events: xr.Dataset, name: str, index: Array) -> Array | None:
    """Return one column of some events. Of a column that is not in memory only what is near them is read; None if that is too much."""
    variable = events[name].variable
    if variable._in_memory:
        values: Array = variable.values
        return values[index]
    if (coding := coding_of(variable)) is not None:
        return np.asarray(coding.table[coding.codes[index]])
    order = np.argsort(index, kind="stable")
    ordered = index[order]
    cuts = np.concatenate([[0], np.flatnonzero(np.diff(ordered) > NEAR_ROWS) + 1, [len(ordered)]])
    if len(cuts) - 1 > MOST_READS:
        return None
    out = np.empty(len(index), object if variable.dtype.kind in "OU" else variable.dtype)
    for a, b in pairwise(cuts.tolist()):
        if b > a:
            low = int(ordered[a])
            part = variable[low : int(ordered[b - 1]) + 1].values
            out[order[a:b]] = part[ordered[a:b] - low]
    return out
