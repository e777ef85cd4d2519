"""Colours as numbers: between the stops of a scale, and as the palette of an embedded picture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = ["between", "levels_of", "palette_of"]

Array = np.ndarray[Any, Any]


def _rgb(colours: Sequence[str]) -> Array:
    return np.array([[int(c[i : i + 2], 16) for i in (1, 3, 5)] for c in colours], np.float64)


def between(stops: Sequence[str], at: Any) -> Array:
    """Return mixed colours, float, shape (..., 3), 0 to 255.

    Parameters
    ----------
    stops : sequence of str
        Colours, ``"#rrggbb"``.
    at : number or array, shape (...)
        Place along the stops: 0 is the first, 1 the second.
    """
    rgb = _rgb(stops)
    return np.stack([np.interp(at, np.arange(len(stops)), rgb[:, c]) for c in range(3)], -1)


def palette_of(colours: Sequence[str]) -> Array:
    """Return the palette of a picture (:func:`palette_png`), uint8, shape (1 + colours, 3): in front the one that is transparent."""
    return np.concatenate([np.full((1, 3), 255), _rgb(colours)]).astype(np.uint8)


def levels_of(values: Array, low: float, high: float, *, colours: int) -> Array:
    """Return the pixels of a picture, uint8, as ``values``: 1 to ``colours`` from ``low`` to ``high``, 0 where a value is NaN."""
    share = (values - low) / max(high - low, 1e-300)
    level = np.where(np.isnan(share), -1, np.clip(np.nan_to_num(share) * (colours - 1), 0, colours - 1)) + 1
    return np.asarray(level.round().astype(np.uint8))
