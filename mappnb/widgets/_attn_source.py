"""Where the attention view has its patterns from: stored queries and keys, or an array that is there already."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import pandas as pd
import xarray as xr

from mappnb.errors import MappnbError
from mappnb.run import Run

__all__ = ["Cache", "Score", "Source", "StoredSource", "Tokens", "source_of"]

Array = np.ndarray[Any, Any]

SAMPLE_COLUMNS = ("step", "dp_rank", "microbatch", "index", "prompt")
POINTS = ("q_rot", "k_rot")
MOST_CACHED_BYTES = 256 * 2**20
MOST_AT_ONCE = 512
"""Tokens of a sequence of which all heads of a layer are worked out at once."""
_TOKEN_COORDS = ("token_text", "token_id", "mask")


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens of one sample, without the padding at its ends.

    Attributes
    ----------
    first : int
        Position of the first one along ``token``.
    slots : int64 array
        Place of each in the sequence, ascending.
    texts : tuple of object
        As they were stored.
    real : bool array
        False for padding between others.
    """

    first: int
    slots: Array
    texts: tuple[Any, ...]
    real: Array

    def __len__(self) -> int:
        return len(self.texts)

    @property
    def kept(self) -> slice:
        """Positions along ``token``."""
        return slice(self.first, self.first + len(self))


@dataclass(frozen=True, slots=True)
class Score:
    """A number of each head: its name, unit and meaning, and float32 values, dims (layer, head)."""

    name: str
    unit: str
    what: str
    values: Array


class Source(Protocol):
    """What the view needs of its data."""

    layers: tuple[int, ...]
    heads: tuple[int, ...]
    samples: pd.DataFrame
    facts: Mapping[str, Any]

    def tokens(self, sample: int) -> Tokens:
        """Return the tokens of a sample."""

    def pattern(self, sample: int, layer: int, head: int, query: Array | None = None) -> Array:
        """Return attention, float32, dims (query, key), of the tokens of :meth:`tokens` (or of some); NaN where a shard is missing."""

    def prepare(self, sample: int, layer: int) -> None:
        """Take note that all heads of a layer will be asked for."""

    def scores(self, sample: int) -> list[Score]:
        """Return the head scores of a sample; none where there is nothing to work them out of."""

    def release(self) -> None:
        """Let go of what is kept."""


class Cache:
    """The newest arrays, of a limited size together."""

    def __init__(self, most_bytes: int = MOST_CACHED_BYTES) -> None:
        self.most_bytes, self._held, self._bytes = most_bytes, OrderedDict[Any, tuple[Any, int]](), 0

    def get(self, key: Any) -> Any:
        """Return what is kept under a key, or None."""
        if key not in self._held:
            return None
        self._held.move_to_end(key)
        return self._held[key][0]

    def put(self, key: Any, value: Any, size: int) -> Any:
        """Keep a value, let older ones go; returns it."""
        if key in self._held:
            self._bytes -= self._held.pop(key)[1]
        if size <= self.most_bytes:
            self._held[key] = value, size
            self._bytes += size
        while self._bytes > self.most_bytes:
            self._bytes -= self._held.popitem(last=False)[1][1]
        return value

    def clear(self) -> None:
        """Let everything go."""
        self._held.clear()
        self._bytes = 0


def source_of(given: Any, tokens: Any = None) -> Source:
    """Return the source for what was given.

    Parameters
    ----------
    given : Run, DataTree, Dataset or array
        A run or its activations; a dataset with ``q_rot`` and ``k_rot``; or patterns, dims ([sample | step,] layer, head, query, key).
    tokens : sequence of str, optional
        Of patterns: a text for each token, or a list of them for each sample.

    Raises
    ------
    MappnbError
        If there are no queries and keys, or the array is no pattern.
    """
    from mappnb.widgets._attn_array import ArraySource

    if isinstance(given, Run):
        given = given.activations
    if isinstance(given, xr.Dataset) and "pattern" in given and "q_rot" not in given:
        given = given["pattern"]
    if isinstance(given, (xr.DataArray, np.ndarray)):
        return ArraySource(given, tokens)
    if tokens is not None:
        raise MappnbError("tokens= belongs to an array of patterns; activations have their own token texts")
    return StoredSource(given)


class StoredSource:
    """Patterns worked out from stored queries and keys (:func:`mappnb.interp.attention_pattern`), a layer at a time."""

    def __init__(self, activations: xr.DataTree | xr.Dataset) -> None:
        held = _stream(activations)
        if not held.sizes["sample"]:
            raise MappnbError("the activations hold no sample yet: no step with q_rot and k_rot was written")
        self._data = held
        self.layers = _labels(held, "layer")
        self.heads = _labels(held, "head")
        self.facts = facts_of(held)
        self.samples = samples_of(held)
        self._kept = Cache()

    def tokens(self, sample: int) -> Tokens:
        """Return the tokens of a sample; its mask tells what is padding."""
        found: Tokens | None = self._kept.get(("tokens", sample))
        if found is None:
            one = self._data[[n for n in _TOKEN_COORDS if n in self._data.variables]].isel(sample=sample)
            real = one["mask"].values.astype(bool) if "mask" in one.variables else np.ones(one.sizes["token"], bool)
            slots = one["token"].values if "token" in one.coords else np.arange(one.sizes["token"])
            names = [n for n in ("token_text", "token_id") if n in one.variables]
            texts = one[names[0]].values if names else slots
            found = trimmed([t if isinstance(t, (str, bytes)) else str(t) for t in texts], real, slots)
            self._kept.put(("tokens", sample), found, 80 * len(found))
        return found

    def _layer(self, sample: int, layer: int) -> xr.Dataset:
        found = self._kept.get(("layer", sample, layer))
        if found is None:
            one = self._data[list(POINTS)].isel(sample=[sample], layer=[self.layers.index(layer)]).load()
            found = self._kept.put(("layer", sample, layer), one, one.nbytes)
        return found  # type: ignore[no-any-return]

    def prepare(self, sample: int, layer: int) -> None:
        """Work out all heads of a layer at once, where the sequence is short: they are all wanted."""
        key = ("pattern", sample, layer)
        if len(self.tokens(sample)) <= MOST_AT_ONCE and self._kept.get(key) is None:
            found = self._computed(sample, layer, self.heads, None)
            self._kept.put(key, found, found.nbytes)

    def pattern(self, sample: int, layer: int, head: int, query: Array | None = None) -> Array:
        """Return the attention of one head; rows that need what was not recorded are NaN."""
        whole, num = self._kept.get(("pattern", sample, layer)), len(self.tokens(sample))
        one: Array | None = (
            self._kept.get(("head", sample, layer, head)) if whole is None else whole[self.heads.index(head)]
        )
        if one is None:
            if query is not None and num > MOST_AT_ONCE:
                return np.asarray(self._computed(sample, layer, (head,), query)[0])
            one = self._computed(sample, layer, (head,), None)[0]
            self._kept.put(("head", sample, layer, head), one, one.nbytes)
        return one if query is None else one[query]

    def _computed(self, sample: int, layer: int, heads: Sequence[int], query: Array | None) -> Array:
        from mappnb.interp.attention import attention_pattern

        tokens = self.tokens(sample)
        rows: Any = tokens.kept if query is None else (tokens.first + query).tolist()
        found = attention_pattern(self._layer(sample, layer), layer=layer, head=list(heads), query=rows)
        found = found.transpose("head", "query", "key").isel(key=tokens.kept)
        whole = found["complete"].transpose("head", "query").values
        return np.where(whole[:, :, None], found.values, np.nan).astype(np.float32)

    def scores(self, sample: int) -> list[Score]:
        """Return the head scores of a sample (:func:`mappnb.interp.head_statistics`)."""
        from mappnb.interp.heads import head_statistics

        found = self._kept.get(("scores", sample))
        if found is None:
            statistics = head_statistics(self._data[list(POINTS)].isel(sample=[sample]).load())
            found = scores_of(statistics.isel(sample=0))
            self._kept.put(("scores", sample), found, 4 * len(found) * len(self.layers) * len(self.heads))
        return list(found)

    def release(self) -> None:
        """Let go of what is kept."""
        self._kept.clear()


def _stream(activations: Any) -> xr.Dataset:
    """Return the dataset that holds queries and keys, with the facts of the model and a ``sample`` dimension."""
    if isinstance(activations, xr.Dataset):
        held, lacking = activations, [p for p in POINTS if p not in activations.data_vars]
        if lacking:
            found = ", ".join(map(str, activations.data_vars)) or "nothing"
            raise MappnbError(
                f"the dataset has no {' and no '.join(lacking)} (it has {found}); attention is worked out from "
                f"queries and keys after rotary: record them with mappnb.Capture({list(POINTS)})"
            )
    else:
        from mappnb.activations import stream_with

        held = stream_with(activations, *POINTS)
    held = held if "sample" in held.dims else held.expand_dims("sample")
    return held.assign_attrs({**activations.attrs, **held.attrs})


def _labels(data: xr.Dataset, dim: str) -> tuple[int, ...]:
    return tuple(int(v) for v in data[dim].values) if dim in data.coords else tuple(range(data.sizes[dim]))


def scores_of(statistics: xr.Dataset) -> list[Score]:
    """Return the statistics that are one number a head, as scores."""
    out = []
    for name, values in statistics.data_vars.items():
        if set(values.dims) == {"layer", "head"}:
            unit = str(values.attrs.get("units", ""))
            what = str(values.attrs.get("long_name", values.attrs.get("description", "")))
            told = values.transpose("layer", "head").values.astype(np.float32)
            out.append(Score(str(name), "" if unit == "1" else unit, what, told))
    return out


def facts_of(data: xr.Dataset) -> Mapping[str, Any]:
    """Return the facts of the model that a dataset carries; an empty mapping if it has none."""
    found = data.attrs.get("model", {})
    if isinstance(found, str):
        try:
            found = json.loads(found)
        except ValueError:
            return {}
    return found if isinstance(found, dict) else {}


def samples_of(data: xr.Dataset) -> pd.DataFrame:
    """Return a row per sample: ``step, dp_rank, microbatch, index, prompt``; what is not known is -1 or empty."""
    num = int(data.sizes["sample"])
    columns: dict[str, Any] = {}
    for name in SAMPLE_COLUMNS:
        text = name == "prompt"
        values = data[name].values if name in data.coords and data[name].dims == ("sample",) else None
        if values is None:
            values = np.full(num, "" if text else -1, object if text else np.int64)
        columns[name] = [str(v) if v is not None else "" for v in values] if text else values.astype(np.int64)
    return pd.DataFrame(columns)


def trimmed(texts: Sequence[Any], real: Array, slots: Array) -> Tokens:
    """Return tokens without the padding at both ends; all of them if nothing is real."""
    where = np.flatnonzero(real)
    first, last = (int(where[0]), int(where[-1]) + 1) if len(where) else (0, len(texts))
    return Tokens(
        first, np.asarray(slots[first:last], np.int64), tuple(texts[first:last]), np.asarray(real[first:last], bool)
    )
