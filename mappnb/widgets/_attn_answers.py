"""What the attention view draws, as arrays: thumbnails of heads, one head in cells, one token's weights, frames over steps."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from mappnb.errors import MappnbError
from mappnb.widgets._attn_codes import bins, difference_codes, encode, pooled, strongest
from mappnb.widgets._attn_source import Source

__all__ = [
    "THUMB_QUERIES",
    "Cells",
    "Heads",
    "columns",
    "frames",
    "heads_at_once",
    "overview",
    "row",
    "sample_label",
    "thumb_size",
]

Array = np.ndarray[Any, Any]

MOST_BYTES = 36_864
"""Of the pictures in one message: 144 thumbnails of 16 x 16."""
MOST_CELLS = 180
"""Of one head, along an axis."""
FEW_HEADS = 36
"""So many have larger thumbnails."""
MOST_QUERIES, THUMB_QUERIES = 2048, 256
"""So many rows of a pattern are worked out for a picture of one head, and for a thumbnail; of a longer sequence, every n-th."""


@dataclass(frozen=True, slots=True)
class Heads:
    """Thumbnails of some layers.

    Attributes
    ----------
    codes : uint8 array, dims (layer, head, query cell, key cell)
    first : int
        Position of the first layer.
    every : int
        Each n-th query was looked at.
    """

    codes: Array
    first: int
    every: int


@dataclass(frozen=True, slots=True)
class Cells:
    """One head, or the difference of one head in two samples, in cells.

    Attributes
    ----------
    codes : uint8 array, dims (query cell, key cell)
    queries, keys : int64 arrays
        First token of each cell and the end.
    largest : float
        Largest weight (or size of a difference) in the whole pattern.
    every : int
        Each n-th query was looked at.
    """

    codes: Array
    queries: Array
    keys: Array
    largest: float
    every: int


def thumb_size(num_tokens: int, layers: int, heads: int) -> int:
    """Return the cells of a thumbnail along an axis: 32 for few heads, else 16, so that a layer fits a message; no more than tokens."""
    size = 32 if layers * heads <= FEW_HEADS else 16
    return max(1, min(size, num_tokens, int((MOST_BYTES / heads) ** 0.5)))


def heads_at_once(size: int, layers: int, heads: int) -> int:
    """Return how many layers of thumbnails a message holds."""
    return max(1, min(layers, MOST_BYTES // (heads * size * size)))


def _picked(edges: Array, most: int) -> tuple[Array, Array, int]:
    """Return the tokens to look at, the cells over them, and how many tokens one stands for."""
    first, last = int(edges[0]), int(edges[-1])
    every = -(-(last - first) // most)
    if every <= 1:
        return np.arange(first, last), edges - first, 1
    per = max(1, most // (len(edges) - 1))
    spread = (np.linspace(a, b - 1, min(per, b - a)) for a, b in itertools.pairwise(edges.tolist()))
    picked = [np.unique(p.round().astype(np.int64)) for p in spread]
    ends = np.concatenate([[0], np.cumsum([len(p) for p in picked])])
    return np.concatenate(picked), ends, every


def overview(source: Source, sample: int, *, first: int = 0, compare: int | None = None, pool: str = "max") -> Heads:
    """Return thumbnails of as many layers as a message holds.

    Parameters
    ----------
    source : Source
    sample : int
    first : int
        Position of the first layer.
    compare : int, optional
        Show what is different in this sample: ``sample`` less ``compare``.
    pool : str
        ``"max"`` or ``"mean"``: what a cell of several tokens shows. Of a difference it is the largest.

    Returns
    -------
    Heads
    """
    num = _tokens(source, sample, compare)
    size = thumb_size(num, len(source.layers), len(source.heads))
    count = min(heads_at_once(size, len(source.layers), len(source.heads)), len(source.layers) - first)
    edges = bins(num, size)
    queries, cells, every = _picked(edges, THUMB_QUERIES)
    asked = None if every == 1 else queries
    out = np.empty((count, len(source.heads), size, size), np.uint8)
    for i, layer in enumerate(source.layers[first : first + count]):
        for one in (sample,) if compare is None else (sample, compare):
            source.prepare(one, layer)
        for k, head in enumerate(source.heads):
            values = source.pattern(sample, layer, head, asked)
            if compare is None:
                out[i, k] = encode(pooled(values, cells, edges, pool))
            else:
                values = values - source.pattern(compare, layer, head, asked)
                out[i, k] = difference_codes(strongest(values, cells, edges))
    return Heads(out, first, every)


def columns(
    source: Source,
    sample: int,
    layer: int,
    head: int,
    *,
    compare: int | None = None,
    window: tuple[int, int, int, int] | None = None,
    pool: str = "max",
    most: int = MOST_CELLS,
) -> Cells:
    """Return one head as it is drawn.

    Parameters
    ----------
    source : Source
    sample, layer, head : int
        Layer as its global number.
    compare : int, optional
        Return the difference: ``sample`` less ``compare``.
    window : tuple of int, optional
        First query, query behind the last, first key, key behind the last; positions among the tokens shown. Default: all.
    pool : str
        What a cell of several tokens shows; of a difference, what is furthest from 0.
    most : int
        Cells along an axis.

    Returns
    -------
    Cells
    """
    num = _tokens(source, sample, compare)
    q0, q1, k0, k1 = window or (0, num, 0, num)
    if not (0 <= q0 < q1 <= num and 0 <= k0 < k1 <= num):
        raise MappnbError(f"window is {window}; the sample has {num} tokens")
    rows, keys = q0 + bins(q1 - q0, most), k0 + bins(k1 - k0, most)
    queries, cells, every = _picked(rows, MOST_QUERIES)
    asked = None if len(queries) == num else queries
    values = source.pattern(sample, layer, head, asked)
    if compare is not None:
        values = values - source.pattern(compare, layer, head, asked)
    there = np.abs(values[~np.isnan(values)])
    shown = values[:, k0:k1]
    ends = keys - k0
    codes = (
        encode(pooled(shown, cells, ends, pool)) if compare is None else difference_codes(strongest(shown, cells, ends))
    )
    return Cells(codes, rows, keys, float(there.max()) if there.size else 0.0, every)


def row(source: Source, sample: int, layer: int, head: int, at: int, *, axis: str = "query") -> Array:
    """Return exact weights, float32: where one query looks to, or (``axis="key"``) who looks at one key."""
    num = len(source.tokens(sample))
    if axis not in ("query", "key"):
        raise MappnbError(f"axis is {axis!r:.40}; expected query or key")
    if not 0 <= at < num:
        raise MappnbError(f"{axis} {at} is not there; the sample has {num} tokens")
    if axis == "query":
        return np.asarray(source.pattern(sample, layer, head, np.array([at]))[0])
    return np.asarray(source.pattern(sample, layer, head)[:, at])


def _tokens(source: Source, sample: int, compare: int | None) -> int:
    num = len(source.tokens(sample))
    if compare is not None and (other := len(source.tokens(compare))) != num:
        raise MappnbError(
            f"samples {sample} and {compare} have {num} and {other} tokens: a difference needs as many; look at them side by side"
        )
    return num


def frames(samples: pd.DataFrame, sample: int) -> list[int]:
    """Return the samples of other steps that go with one, by step: those of its prompt, or else of its place in the batch."""
    own = samples.iloc[sample]
    if own["prompt"]:
        same = samples["prompt"] == own["prompt"]
    else:
        same = (samples["prompt"] == "") & np.logical_and.reduce(
            [samples[n] == own[n] for n in ("dp_rank", "microbatch", "index")]
        )
    found = samples[same].reset_index(names="position")
    found["own"] = found["position"] != sample  # of one step this sample comes first
    found = found.sort_values(["step", "own", "position"]).drop_duplicates("step")
    return [int(v) for v in found["position"]]


def sample_label(samples: pd.DataFrame, sample: int) -> str:
    """Return a sample in words: ``step 10, microbatch 1, 0`` or its prompt."""
    row_ = samples.iloc[sample]
    said = [f"step {row_['step']}"] if row_["step"] >= 0 else []
    if row_["prompt"]:
        said.append(repr(str(row_["prompt"])[:40])[1:-1])
    else:
        names = (("dp_rank", "dp"), ("microbatch", "microbatch"), ("index", "sequence"))
        said += [f"{words} {row_[n]}" for n, words in names if row_[n] >= 0 and samples[n].nunique() > 1]
    return ", ".join(said) or f"sample {sample}"
