"""Patterns that are there already, as the attention view takes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from mappnb.errors import MappnbError
from mappnb.widgets._attn_source import Score, Tokens, facts_of, samples_of, trimmed

__all__ = ["ArraySource"]

Array = np.ndarray[Any, Any]

_DIMS = ("sample", "layer", "head", "query", "key")


class ArraySource:
    """Patterns of an array, dims ([sample | step,] layer, head, query, key); of numpy arrays the last ones count."""

    def __init__(self, given: xr.DataArray | Array, tokens: Any = None) -> None:
        self._patterns = _arranged(given)
        held = self._patterns
        num = int(held.sizes["query"])
        if num != held.sizes["key"] or num == 0:
            raise MappnbError(f"patterns have {num} queries and {held.sizes['key']} keys; expected as many, at least 1")
        self.layers, self.heads = _labels(held, "layer"), _labels(held, "head")
        self.facts: Mapping[str, Any] = facts_of(held.to_dataset(name="pattern"))
        self.samples: pd.DataFrame = samples_of(held.to_dataset(name="pattern"))
        self._texts = _texts_of(held, tokens)

    def tokens(self, sample: int) -> Tokens:
        """Return the tokens of a sample."""
        texts = self._texts[sample]
        held = self._patterns
        real = (
            held["mask"].isel(sample=sample).values if "mask" in held.coords and "sample" in held["mask"].dims else None
        )
        slots = held["query"].values if "query" in held.coords else np.arange(len(texts))
        return trimmed(texts, np.ones(len(texts), bool) if real is None else real.astype(bool), slots)

    def pattern(self, sample: int, layer: int, head: int, query: Array | None = None) -> Array:
        """Return the attention of one head."""
        tokens = self.tokens(sample)
        rows: Any = tokens.kept if query is None else tokens.first + query
        at = {"sample": sample, "layer": self.layers.index(layer), "head": self.heads.index(head)}
        one = self._patterns.isel({**at, "query": rows, "key": tokens.kept})
        return np.asarray(one.values, np.float32)

    def prepare(self, sample: int, layer: int) -> None:
        """Prepare nothing: the patterns are there."""

    def scores(self, sample: int) -> list[Score]:
        """Return nothing: scores are worked out from queries and keys."""
        return []

    def release(self) -> None:
        """Keep nothing."""


def _labels(held: xr.DataArray, dim: str) -> tuple[int, ...]:
    return tuple(int(v) for v in held[dim].values) if dim in held.coords else tuple(range(held.sizes[dim]))


def _arranged(given: xr.DataArray | Array) -> xr.DataArray:
    """Return patterns with the five dims."""
    if not isinstance(given, xr.DataArray):
        given = np.asarray(given)
        if not 2 <= given.ndim <= 5:
            raise MappnbError(f"patterns have shape {given.shape}; expected dims ([sample,] layer, head, query, key)")
        given = xr.DataArray(given, dims=_DIMS[5 - given.ndim :])
    if "step" in given.dims and "sample" not in given.dims:
        steps = given["step"].values if "step" in given.coords else np.arange(given.sizes["step"])
        given = given.drop_vars("step", errors="ignore").rename(step="sample").assign_coords(step=("sample", steps))
    given = given.expand_dims([d for d in ("sample", "layer", "head") if d not in given.dims])
    if set(given.dims) != set(_DIMS):
        raise MappnbError(
            f"patterns have dims {tuple(given.dims)}; expected ([sample | step,] layer, head, query, key)"
        )
    if not np.issubdtype(given.dtype, np.floating):
        raise MappnbError(f"patterns are {given.dtype}; expected numbers from 0 to 1, as float")
    if 0 in given.shape:
        raise MappnbError(f"patterns are empty: {dict(given.sizes)}")
    return given.transpose(*_DIMS)


def _texts_of(held: xr.DataArray, tokens: Any) -> list[list[Any]]:
    """Return the token texts of each sample."""
    num, samples = int(held.sizes["query"]), int(held.sizes["sample"])
    if tokens is None:
        for name in ("token_text", "query_token", "key_token"):
            if name in held.coords:
                values = held[name].values
                tokens = list(values) if values.ndim == 1 else [list(v) for v in values]
                break
        else:
            tokens = [str(i) for i in range(num)]
    tokens = list(tokens)
    nested = len(tokens) > 0 and isinstance(tokens[0], (list, tuple, np.ndarray))
    texts = [list(t) for t in tokens] if nested else [tokens] * samples
    if len(texts) != samples or any(len(t) != num for t in texts):
        found = f"{len(texts)} lists of {[len(t) for t in texts][:5]}" if nested else f"{len(tokens)}"
        raise MappnbError(f"tokens: {found}; expected {num} texts, or such a list for each of {samples} samples")
    return texts
