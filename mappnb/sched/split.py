"""Uneven stages: which layers each stage holds, and what the costs are then."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from mappnb.errors import CostError
from mappnb.sched.costs import Costs, Distribution, Floats

__all__ = ["balanced", "even", "scaled", "split_costs", "unit_costs"]

_DEPTH = ("forward_s", "backward_input_s", "backward_weight_s", "reduce_s", "activation", "activation_weight")


def unit_costs(costs: Costs, units: int) -> Floats:
    """Return the time of one microbatch in each unit of the depth (layers, embedding, loss), forward and backward, up to a factor."""
    total = np.zeros(units)
    for name in _DEPTH[:3]:
        total += _array(name, getattr(costs, name), units)
    return total


def _array(name: str, value: Any, units: int) -> Floats:
    if isinstance(value, Distribution):
        value = value.mean()
    if isinstance(value, (list, tuple)):
        value = [v.mean() if isinstance(v, Distribution) else v for v in value]
    array = np.asarray(value, np.float64)
    if array.ndim == 2:
        array = array.mean(axis=1)
    if array.ndim == 1 and len(array) not in (1, units):
        raise CostError(f"{name}: {len(array)} entries over the depth; expected one for each of {units} units")
    return np.array(np.broadcast_to(array, (units,)), np.float64)


def split_costs(costs: Costs, layers: Sequence[int], *, num_ranks: int) -> Costs:
    """Return the costs when stage i holds ``layers[i]`` units of the depth.

    Parameters
    ----------
    costs : Costs
        Over the depth in units: entry i is that of unit i, in a rank's whole share as :class:`Costs` has it.
    layers : sequence of int
        Units of each stage, in model order; they sum to the number of units.
    num_ranks : int
        Pipeline ranks.

    Raises
    ------
    CostError
        If a stage holds nothing, or an array has another number of entries.
    """
    if min(layers) < 1:
        raise CostError(f"layers is {tuple(layers)}; expected at least 1 in each stage")
    units, chunks = int(sum(layers)), len(layers) / num_ranks
    edge = np.concatenate(([0], np.cumsum(layers)))
    changed: dict[str, Any] = {}
    for name in _DEPTH:
        value = getattr(costs, name)
        if value is not None:
            total = np.concatenate(([0.0], np.cumsum(_array(name, value, units)))) * num_ranks / units
            changed[name] = np.diff(total[edge]) * chunks
    return replace(costs, **changed)


def even(units: int, stages: int) -> tuple[int, ...]:
    """Return as equal parts as can be, the longer ones in the middle: the ends hold embedding and loss."""
    low, more = divmod(units, stages)
    first = (stages - more) // 2
    return tuple(low + (first <= i < first + more) for i in range(stages))


def balanced(cost: Floats, stages: int, rank_of: Sequence[int]) -> tuple[int, ...]:
    """Return the parts whose costliest stage costs least (and the costliest rank little), by dynamic programming.

    Parameters
    ----------
    cost : array, dims (unit,)
        Cost of each unit.
    stages : int
        Parts to make, each of at least one unit.
    rank_of : sequence of int
        Rank of each stage; for one stage per rank the result is optimal.
    """
    n = len(cost)
    total = np.concatenate(([0.0], np.cumsum(cost)))
    best = np.full((stages + 1, n + 1), np.inf)
    cut = np.zeros((stages + 1, n + 1), np.int64)
    best[0, 0] = 0.0
    for k in range(1, stages + 1):
        for j in range(k, n - (stages - k) + 1):
            worst = np.maximum(best[k - 1, k - 1 : j], total[j] - total[k - 1 : j])
            at = int(np.argmin(worst))
            best[k, j], cut[k, j] = worst[at], at + k - 1
    parts, j = [], n
    for k in range(stages, 0, -1):
        parts.append(j - int(cut[k, j]))
        j = int(cut[k, j])
    return _level(tuple(parts[::-1]), total, rank_of)


def _level(parts: tuple[int, ...], total: Floats, rank_of: Sequence[int]) -> tuple[int, ...]:
    """Move single units between neighbouring stages while the costliest rank gets cheaper."""

    def worst(of: tuple[int, ...]) -> tuple[float, float]:
        stage = np.diff(total[np.concatenate(([0], np.cumsum(of)))])
        rank = np.bincount(np.asarray(rank_of), stage)
        return float(rank.max()), float((rank**2).sum())

    value = worst(parts)
    while True:
        trials = [t for i in range(len(parts) - 1) for d in (1, -1) if (t := moved(parts, i, d)) is not None]
        ranked = sorted((worst(t), t) for t in trials)
        if not ranked or ranked[0][0] >= value:
            return parts
        value, parts = ranked[0]


def moved(parts: tuple[int, ...], at: int, by: int) -> tuple[int, ...] | None:
    """Return the parts with ``by`` units moved over the border behind part ``at``; None if one would be empty."""
    new = list(parts)
    new[at] += by
    new[at + 1] -= by
    return tuple(new) if min(new) >= 1 else None


def scaled(costs: Costs, *, work: float, memory: float) -> Costs:
    """Return costs with the compute of a microbatch times ``work``, and its activations and messages times ``memory``."""
    changed: dict[str, Any] = {}
    for name in ("forward_s", "backward_input_s", "backward_weight_s", "overlapped_s"):
        changed[name] = _times(getattr(costs, name), work)
    for name in ("activation", "activation_weight", "message_bytes", "ship_bytes"):
        changed[name] = _times(getattr(costs, name), memory)
    return replace(costs, **changed)


def _times(value: Any, factor: float) -> Any:
    if value is None or factor == 1.0:
        return value
    if isinstance(value, Distribution):
        return _Scaled(value, factor)
    if isinstance(value, (list, tuple)):
        return [_times(v, factor) for v in value]
    return np.asarray(value, np.float64) * factor


class _Scaled:
    """A distribution times a number."""

    def __init__(self, of: Distribution, factor: float) -> None:
        self._of, self._factor = of, factor

    def rvs(self, size: int, random_state: np.random.Generator) -> Any:
        return np.asarray(self._of.rvs(size, random_state=random_state)) * self._factor

    def mean(self) -> Any:
        return self._of.mean() * self._factor
