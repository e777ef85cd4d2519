"""Which colour a value gets: limits, ramps, categories."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mappnb.errors import SchemaError
from mappnb.widgets._array_values import Mark, Survey, kind_of, thinned

__all__ = ["PALETTE", "Index", "Scale", "category_colour", "choose_scale", "codes", "ink_on", "ramp", "ramp_ends"]

Array = np.ndarray[Any, Any]

STEPS = 101
MOST_CATEGORIES = 12
_FIRST_RAMP, _FIRST_CATEGORY = 16, 16 + 2 * STEPS
_SEQUENTIAL = ("#10204e", "#1b4a86", "#1f7a98", "#43a68f", "#97cc78", "#f4ec9a")
_DIVERGING = ("#0a3a70", "#2f78b7", "#8dbde0", "#f3f2ee", "#f2b37c", "#cd661c", "#74290a")
_CATEGORIES = (
    "#d3d8de", "#56b4e9", "#e69f00", "#2fb38a", "#f0e442", "#e58bb8", "#f0764a", "#9db4ff", "#b5a07c", "#7fd6d6", "#c9a0f0", "#a6d854",
)  # fmt: skip


class Index:
    """Places in :data:`PALETTE` of what is neither ramp nor category."""

    CLEAR, DOTS, INK, PAPER, NAN, INF, HATCH = range(7)


_FIXED = {
    Index.DOTS: "#7d8590",
    Index.INK: "#101418",
    Index.PAPER: "#ffffff",
    Index.NAN: "#9aa1aa",
    Index.INF: "#c2307f",
    Index.HATCH: "#7d8590",
}


def _rgb(colour: str) -> list[int]:
    return [int(colour[k : k + 2], 16) for k in (1, 3, 5)]


def ramp(anchors: Sequence[str], steps: int = STEPS) -> Array:
    """Return ``steps`` colours through the anchors, shape (steps, 3)."""
    stops = np.array([_rgb(a) for a in anchors], float)
    at = np.linspace(0, len(anchors) - 1, steps)
    mixed = [np.interp(at, np.arange(len(anchors)), stops[:, k]) for k in range(3)]
    out: Array = np.rint(np.stack(mixed, -1)).astype(np.uint8)
    return out


def _palette() -> Array:
    out = np.zeros((_FIRST_CATEGORY + MOST_CATEGORIES, 3), np.uint8)
    for index, colour in _FIXED.items():
        out[index] = _rgb(colour)
    out[_FIRST_RAMP : _FIRST_RAMP + STEPS] = ramp(_SEQUENTIAL)
    out[_FIRST_RAMP + STEPS : _FIRST_CATEGORY] = ramp(_DIVERGING)
    out[_FIRST_CATEGORY:] = [_rgb(c) for c in _CATEGORIES]
    return out


PALETTE = _palette()
"""Colours of a picture: 0 transparent, marks, the sequential ramp, the diverging ramp, categories."""


@dataclass(frozen=True, slots=True)
class Scale:
    """How numbers become colours.

    Attributes
    ----------
    kind : str
        ``sequential``, ``diverging``, ``categories``, or ``none`` for text that has too many words.
    low, high : float
        Limits; ``center`` lies in the middle of a diverging ramp.
    how : str
        Where the limits come from, in words.
    values : tuple
        The categories, ascending; numbers or texts.
    """

    kind: str
    low: float = 0.0
    high: float = 0.0
    center: float = 0.0
    how: str = ""
    values: tuple[Any, ...] = ()


def _categories(shown: Array, survey: Survey, dtype: np.dtype[Any]) -> tuple[Any, ...]:
    """Return the distinct values if there are few; nothing for numbers that are not whole."""
    kind = kind_of(dtype)
    if kind == "text":
        words = sorted({str(v) for v in shown.ravel().tolist()})
        return tuple(words) if len(words) <= MOST_CATEGORIES else ()
    if dtype.kind not in "iub":
        return ()
    distinct = np.unique(np.concatenate([thinned(survey.finite), shown.ravel().astype(survey.finite.dtype)]))
    return tuple(distinct.tolist()) if len(distinct) <= MOST_CATEGORIES else ()


def _span(shown: Array, survey: Survey) -> tuple[float, float, str]:
    """Return the limits that the data suggest: least to greatest, or without the outermost hundredths where these lie far off."""
    ends = [part for part in (survey.finite, shown) if part.size]
    if not ends:
        return 0.0, 0.0, "no finite value"
    low, high = float(min(p.min() for p in ends)), float(max(p.max() for p in ends))
    usual = np.percentile(thinned(np.concatenate([thinned(p) for p in ends])).astype(np.float64), [1, 99])
    inner_low, inner_high = float(usual[0]), float(usual[1])
    room = 0.75 * (inner_high - inner_low)
    if room > 0 and (low < inner_low - room or high > inner_high + room):
        return inner_low, inner_high, "1st to 99th percentile"
    return low, high, "least to greatest"


def choose_scale(
    shown: Array,
    survey: Survey,
    dtype: np.dtype[Any],
    *,
    vmin: float | None = None,
    vmax: float | None = None,
    center: float | None = None,
) -> Scale:
    """Return the colours for an array.

    Parameters
    ----------
    shown : array
        The ordinary values that are drawn: finite numbers, or texts.
    survey : Survey
        What was counted of the whole array.
    dtype : dtype
        Of the array.
    vmin, vmax, center : float, optional
        What the caller wants instead.

    Raises
    ------
    SchemaError
        If the limits are not finite or in the wrong order.
    """
    given = [v for v in (vmin, vmax, center) if v is not None]
    if not all(math.isfinite(v) for v in given) or (vmin is not None and vmax is not None and vmin > vmax):
        raise SchemaError(f"vmin={vmin}, vmax={vmax}, center={center}: give finite limits, vmin <= vmax")
    if not given and (values := _categories(shown, survey, dtype)):
        return Scale("categories", values=values)
    if kind_of(dtype) == "text":
        return Scale("none")
    low, high, how = _span(shown, survey)
    low, high = low if vmin is None else vmin, high if vmax is None else vmax
    low, high = (min(low, high), high) if vmin is None else (low, max(low, high))
    named = " and ".join(word for word, v in (("vmin", vmin), ("vmax", vmax)) if v is not None)
    how = f"{named} as given" if named else how
    signed = low < 0 < high and dtype.kind not in "Mc"
    if center is None and not signed:
        return Scale("sequential", low, high, (low + high) / 2, how)
    middle = 0.0 if center is None else center
    reach = max(abs(low / 2 - middle / 2), abs(high / 2 - middle / 2)) * 2
    limit = float(np.finfo(np.float64).max)
    low = max(middle - reach, -limit) if vmin is None else vmin
    high = min(middle + reach, limit) if vmax is None else vmax
    return Scale("diverging", low, high, middle, how)


def ramp_ends(scale: Scale) -> tuple[int, int]:
    """Return the palette indices of the first and the last colour of a ramp."""
    first = _FIRST_RAMP + (STEPS if scale.kind == "diverging" else 0)
    return first, first + STEPS - 1


def ink_on(index: int) -> int:
    """Return the palette index of white or near-black, whichever stands out from a colour."""
    red, green, blue = PALETTE[index].astype(float).tolist()
    return Index.INK if 0.299 * red + 0.587 * green + 0.114 * blue > 140 else Index.PAPER


def _ramp_index(values: Array, scale: Scale) -> Array:
    """Return the step of the ramp, 0..100, of each number; below and above the limits the outermost."""
    v = np.nan_to_num(values.astype(np.float64), nan=scale.center, posinf=scale.high, neginf=scale.low)
    v = np.clip(v, scale.low, scale.high) / 2  # halves: the width of the whole range of float64 is no float64

    def share(start: float, stop: float) -> Array:
        width = stop / 2 - start / 2
        return np.clip((v - start / 2) / width, 0, 1) if width > 0 else np.full(v.shape, 0.5)

    if scale.kind == "sequential":
        place = share(scale.low, scale.high)
    else:
        below, above = v < scale.center / 2, v > scale.center / 2
        place = np.where(below, share(scale.low, scale.center) / 2, 0.5)
        place = np.where(above, 0.5 + share(scale.center, scale.high) / 2, place)
    out: Array = np.rint(place * (STEPS - 1)).astype(np.uint8)
    return out


def codes(values: Array, marks: Array, scale: Scale) -> Array:
    """Return the index into :data:`PALETTE` of each value, and complete ``marks`` with what lies outside the limits."""
    ordinary = marks == Mark.NONE
    if scale.kind == "none":
        out = np.full(marks.shape, _FIRST_CATEGORY, np.uint8)
    elif scale.kind == "categories":
        out = _category_index(values, scale)
    else:
        with np.errstate(invalid="ignore"):
            marks[ordinary & (values < scale.low)] = Mark.BELOW
            marks[ordinary & (values > scale.high)] = Mark.ABOVE
        out = (ramp_ends(scale)[0] + _ramp_index(values, scale)).astype(np.uint8)
    for mark, index in (
        (Mark.NAN, Index.NAN),
        (Mark.POS_INF, Index.INF),
        (Mark.NEG_INF, Index.INF),
        (Mark.MISSING, Index.CLEAR),
    ):
        out[marks == mark] = index
    return out


def _category_index(values: Array, scale: Scale) -> Array:
    last = len(scale.values) - 1
    if values.dtype.kind in "biuf":
        found = np.searchsorted(np.array(scale.values), values)
    else:
        place = {word: k for k, word in enumerate(scale.values)}
        found = np.array([place.get(str(v), 0) for v in values.ravel().tolist()], np.intp).reshape(values.shape)
    return (_FIRST_CATEGORY + np.minimum(found, last)).astype(np.uint8)


def category_colour(place: int) -> str:
    """Return the colour of the n-th category."""
    return _CATEGORIES[place]
