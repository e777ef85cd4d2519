"""Three cures for microbatches of unequal work, priced by replay: what each microbatch would cost under them."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
import pandas as pd

from mappnb.analysis._skew_fit import Fit
from mappnb.analysis._skew_times import Documents

__all__ = ["ASSUMES", "deal", "orders", "split_by_document"]

Array = np.ndarray[Any, Any]
Sums = pd.DataFrame
"""``tokens`` and ``squares`` by (step, dp_rank, microbatch)."""

ASSUMES: Final[Mapping[str, str]] = {
    "balanced packing": (
        "documents of one step are dealt anew to all microbatches of all replicas, the costliest first to the cheapest replica, and within "
        "it to the cheapest microbatch, in the best of four orders; a microbatch may have any number of tokens; where all had the "
        "same, time that does not go with the squares is taken to go with the tokens; memory and the order of the data are not looked at"
    ),
    "reordered microbatches": (
        "each replica keeps its documents and microbatches, and runs these in the best of four orders (as they were, costliest first, "
        "costliest last, costliest in the middle), the same kind of order on all replicas of a step"
    ),
    "context-parallel split by document": (
        "each document is split evenly over the replicas, so that microbatches of one number cost the same on all; what that sends is free"
    ),
}
"""What the price of each cure takes for granted."""


def deal(documents: Documents, cost: Callable[[Array], Array]) -> Documents:
    """Return the documents dealt anew in each step: costliest first to the cheapest replica, within it to the cheapest microbatch.

    Parameters
    ----------
    documents : Documents
        As they were.
    cost : callable
        Cost of documents, s, by their lengths.

    Notes
    -----
    Graham's longest-processing-time rule: within 4/3 of the best possible (SIAM J. Appl. Math. 17, 1969).
    """
    price = cost(documents.tokens)
    dp, mb = documents.dp_rank.copy(), documents.microbatch.copy()
    for step in np.unique(documents.step).tolist():
        mine = np.flatnonzero(documents.step == step)
        replicas = np.unique(documents.dp_rank[mine])
        of_replica = _emptiest(price[mine], len(replicas))
        for r, replica in enumerate(replicas.tolist()):
            own = mine[of_replica == r]
            numbers = np.unique(documents.microbatch[mine[documents.dp_rank[mine] == replica]])
            dp[own], mb[own] = replica, numbers[_emptiest(price[own], len(numbers))]
    return Documents(documents.step, dp, mb, documents.tokens)


def _emptiest(price: Array, bins: int) -> Array:
    """Put the costliest first into the bin that is cheapest so far; return the bin of each."""
    heap = [(0.0, i) for i in range(bins)]
    out = np.empty(len(price), np.int64)
    for item in np.argsort(-price, kind="stable").tolist():
        load, i = heap[0]
        out[item] = i
        heapq.heapreplace(heap, (load + float(price[item]), i))
    return out


def orders(sums: Sums, fit: Fit) -> dict[str, Sums]:
    """Return the sums of each microbatch under four orders of each replica's microbatches."""
    out = {"as they were": sums}
    price = pd.Series(fit.predict(sums["tokens"].to_numpy(), sums["squares"].to_numpy()), sums.index)
    names = ("costliest first", "costliest last", "costliest in the middle")
    parts: dict[str, list[Sums]] = {n: [] for n in names}
    for _, mine in price.groupby(level=["step", "dp_rank"]):
        down = mine.sort_values(ascending=False, kind="stable").index
        middle = [*down[1::2][::-1], *down[::2]]
        for name, order in zip(names, (down, down[::-1], pd.MultiIndex.from_tuples(middle)), strict=True):
            parts[name].append(pd.DataFrame(sums.loc[order].to_numpy(), mine.index, sums.columns))
    for name in names:
        out[name] = pd.concat(parts[name])
    return out


def split_by_document(sums: Sums) -> Sums:
    """Return the sums of each microbatch where all replicas share all documents of one number evenly."""
    means: Sums = sums.groupby(level=["step", "microbatch"]).transform("mean")
    return means
