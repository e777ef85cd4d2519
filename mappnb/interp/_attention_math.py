"""Scores and pattern of one head, a tile of queries at a time, in float64: the reference that everything else must equal."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mappnb.capture.activations.attention_rules import AttentionRules

__all__ = ["Floats", "Head", "Keys", "complete_rows", "score_tile", "softmax_rows", "tiles"]

Floats = npt.NDArray[np.floating[Any]]
Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]

_TILE_ELEMENTS = 2**18


@dataclass(frozen=True, slots=True)
class Head:
    """The rules as one head has them; ``before`` and ``behind``: how many keys it sees on either side, None = all."""

    scale: float
    before: int | None
    behind: int | None
    softcap: float | None
    slope: float
    sink: float

    @classmethod
    def of(cls, rules: AttentionRules, head: int) -> Head:
        """Take the part of head ``head`` (global number) out of the rules of its layer."""
        before, behind = rules.reach()
        return cls(
            scale=rules.scale,
            before=before,
            behind=behind,
            softcap=rules.softcap,
            slope=0.0 if rules.slopes is None else rules.slopes[head],
            sink=-np.inf if rules.sinks is None else rules.sinks[head],
        )


@dataclass(frozen=True, slots=True)
class Keys:
    """Where the keys of a sample are, in order, and which of them may be attended to."""

    slots: Ints
    usable: Bools

    def range(self, head: Head, queries: Ints) -> slice:
        """Return the keys that any of ``queries`` can see."""
        start, stop = 0, len(self.slots)
        if head.before is not None:
            start = int(np.searchsorted(self.slots, queries[0] - head.before, side="left"))
        if head.behind is not None:
            stop = int(np.searchsorted(self.slots, queries[-1] + head.behind, side="right"))
        return slice(start, max(start, stop))


def tiles(num_queries: int, num_keys: int) -> Iterator[slice]:
    """Cut the queries so that a tile of float64 scores stays at 2 MiB."""
    step = max(1, _TILE_ELEMENTS // max(1, num_keys))
    for start in range(0, num_queries, step):
        yield slice(start, min(num_queries, start + step))


def score_tile(q: Floats, k: Floats, head: Head, queries: Ints, keys: Keys) -> Floats:
    """Return what goes into the softmax.

    Parameters
    ----------
    q : array, dims (query, head_dim)
        Of the queries in the slots ``queries``.
    k : array, dims (key, head_dim)
        Of ``keys``.
    head : Head
        Its rules.
    queries : int array, dims (query,)
        Slots.
    keys : Keys
        Slots and which may be seen.

    Returns
    -------
    float64 array, dims (query, key)
        -inf where a query does not see a key.
    """
    scores = np.asarray(q, np.float64) @ np.asarray(k, np.float64).T
    scores *= head.scale
    if head.softcap:
        scores /= head.softcap
        np.tanh(scores, out=scores)
        scores *= head.softcap
    apart = keys.slots[None, :] - queries[:, None]
    if head.slope:
        scores -= head.slope * np.abs(apart)
    hidden = np.broadcast_to(~keys.usable[None, :], scores.shape)
    if head.behind is not None:
        hidden = hidden | (apart > head.behind)
    if head.before is not None:
        hidden = hidden | (apart < -head.before)
    np.copyto(scores, -np.inf, where=hidden)
    return scores


def softmax_rows(scores: Floats, sink: float = -np.inf) -> tuple[Floats, Floats]:
    """Return the pattern and the share of the sink; ``scores`` is overwritten.

    Parameters
    ----------
    scores : float64 array, dims (query, key)
        From `score_tile`.
    sink : float
        Logit beside each row; -inf = none.

    Returns
    -------
    array, dims (query, key), and array, dims (query,)
        Rows and sink sum to 1; a row that sees nothing is 0.

    Notes
    -----
    ``SoftmaxOne`` of megatron-core (``fusions/fused_softmax.py``): the logit is appended, and its share dropped.
    """
    top = np.maximum(scores.max(axis=1, keepdims=True, initial=-np.inf), sink)
    top[np.isneginf(top)] = 0.0
    scores -= top
    np.exp(scores, out=scores)
    rest = np.exp(sink - top)
    total = scores.sum(axis=1, keepdims=True) + rest
    total[total == 0.0] = 1.0
    scores /= total
    return scores, (rest / total)[:, 0]


def complete_rows(head: Head, queries: Ints, slots: Ints, known: Bools) -> Bools:
    """Say which rows are exact: all keys that the query can see were recorded, or are padding.

    Parameters
    ----------
    head : Head
        Its rules.
    queries : int array, dims (query,)
        Slots.
    slots : int array, dims (key,)
        Slots of the stored keys.
    known : bool array, dims (key,)
        Recorded, or padding.

    Returns
    -------
    bool array, dims (query,)
    """
    last = int(max(slots.max(initial=-1), queries.max(initial=-1)))
    count = np.zeros(last + 2, np.int64)
    count[slots[known] + 1] = 1
    count = count.cumsum()
    start = np.zeros_like(queries) if head.before is None else np.maximum(queries - head.before, 0)
    stop = np.full_like(queries, last) if head.behind is None else np.minimum(queries + head.behind, last)
    complete: Bools = count[stop + 1] - count[start] == stop + 1 - start
    return complete
