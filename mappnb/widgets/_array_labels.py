"""Texts of an array made safe and short: names, coordinate values, tokens, numbers; and values packed for the browser."""

from __future__ import annotations

import base64
import json
import unicodedata
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr

from mappnb.widgets._array_grid import Axis
from mappnb.widgets._array_values import kind_of

__all__ = ["TOKENS", "Labels", "clean", "labels_of", "pack", "packs_as_text", "shorten", "value_text"]

Array = np.ndarray[Any, Any]

TOKENS = "mappnb_tokens_"
"""Prefix of the coordinates that carry the tokens of a view along."""

_BIDI = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\u2028\u2029\ufeff")
_NAMED = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


def clean(text: object, most: int = 60) -> str:
    """Return a text with control characters and direction overrides spelled out, cut to ``most`` characters."""
    raw = str(text)
    cut = raw[:most] if len(raw) <= most else raw[: most - 1] + "…"
    return "".join(_shown(c) for c in cut)


def _shown(char: str) -> str:
    if char in _NAMED:
        return _NAMED[char]
    if char in _BIDI or unicodedata.category(char) in ("Cc", "Cs"):
        return f"\\x{ord(char):02x}" if ord(char) < 256 else f"\\u{ord(char):04x}"
    return char


def value_text(value: Any) -> str:
    """Return one value as text from which it can be read back exactly; texts as they are."""
    if isinstance(value, bytes):
        return repr(value)
    if isinstance(value, np.generic) and value.dtype.kind == "V":
        return str(value.item()) if value.dtype.names else str(np.float32(value))
    return str(value)


@dataclass(frozen=True, slots=True)
class Labels:
    """What is known of the shown positions of an axis besides their index.

    Attributes
    ----------
    coord : tuple of str, or None
        Value of the index coordinate.
    tokens : tuple of str, or None
        Text: tokens that were given, or the first coordinate of strings.
    """

    coord: tuple[str, ...] | None = None
    tokens: tuple[str, ...] | None = None

    def best(self, axis: Axis, place: int) -> str:
        """Return the text for the n-th shown position: token, else coordinate, else index."""
        for texts in (self.tokens, self.coord):
            if texts is not None:
                return texts[place]
        return str(int(axis.positions()[place]))


def _text_coord(da: xr.DataArray, dim: Hashable) -> Hashable | None:
    """Return the name of the coordinate that says a text for each position: tokens that were given come first."""
    if f"{TOKENS}{dim}" in da.coords:
        return f"{TOKENS}{dim}"
    for name, coord in da.coords.items():
        kind = coord.dtype.kind
        if coord.dims != (dim,) or coord.size == 0 or kind not in "USTO":
            continue
        if kind != "O" or isinstance(coord.variable[0].values.item(), str):
            return name
    return None


def labels_of(da: xr.DataArray, axis: Axis) -> Labels:
    """Return the texts of the shown positions of an axis; only these are read."""
    if axis.dim is None:
        return Labels()
    places = axis.positions()
    name = _text_coord(da, axis.dim)
    tokens = None if name is None else tuple(clean(t) for t in da.coords[name].variable[places].values.tolist())
    coord = None
    if axis.dim in da.coords and axis.dim != name:
        coord = tuple(clean(value_text(v)) for v in da.coords[axis.dim].variable[places].values)
    return Labels(coord, tokens)


def shorten(texts: Sequence[str], most_bytes: int) -> list[str]:
    """Return texts cut so far that all together take at most ``most_bytes`` inside a page, if 4 characters each do."""
    out = list(texts)
    for most in (60, 40, 24, 14, 8, 4):
        out = [t if len(t) <= most else t[: most - 1] + "…" for t in texts]
        if (
            sum(len(json.dumps(t, ensure_ascii=False).encode()) + 4 * sum(map(t.count, "<>&'")) for t in out)
            <= most_bytes
        ):
            break
    return out


def packs_as_text(dtype: np.dtype[Any]) -> bool:
    """Return True for values that go to the page as words rather than as bytes."""
    return kind_of(dtype) in ("text", "time") or dtype.itemsize > (16 if dtype.kind == "c" else 8)


def pack(values: Array, *, most_bytes: int) -> dict[str, Any]:
    """Return values for the page: ``t`` type and ``v`` bytes in base64; for what is not a number ``s`` words and ``v`` their places.

    Parameters
    ----------
    values : array
        As stored, in the order of the page.
    most_bytes : int
        Bound on the words; they are cut to keep it.
    """
    flat = values.ravel()
    if packs_as_text(flat.dtype):
        texts = [clean(value_text(v)) for v in flat]
        words = {t: k for k, t in enumerate(dict.fromkeys(texts))}
        places = np.array([words[t] for t in texts], "<u2")
        return {"t": "u2", "s": shorten(list(words), most_bytes), "v": base64.b64encode(places.tobytes()).decode()}
    if flat.dtype.kind == "V":
        flat = flat.astype(np.float32)
    kind = "b" if flat.dtype.kind == "b" else flat.dtype.kind
    if kind in "iu":
        kinds = [np.dtype(f"{k}{n}") for n in (1, 2, 4, 8) for k in ("u", "i")]
        low, high = int(flat.min()), int(flat.max())
        kept = next(k for k in kinds if np.iinfo(k).min <= low and high <= np.iinfo(k).max)
        flat, kind = flat.astype(kept), kept.kind
    little = flat.astype(flat.dtype.newbyteorder("<"))
    return {"t": f"{kind}{flat.dtype.itemsize}", "v": base64.b64encode(little.tobytes()).decode()}
