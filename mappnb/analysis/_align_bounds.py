"""What no clock model may contradict: nobody leaves before the last has arrived. Bounds by shortest paths, violations by counting."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from mappnb.analysis._align_grid import Knot, Model
from mappnb.analysis._align_input import Observations

__all__ = ["Feasible", "feasible", "place_between", "violations"]

Array = np.ndarray[Any, Any]
SLICES = 8
MAX_HOPS = 200
_UNKNOWN = 1e18


@dataclass(slots=True)
class Feasible:
    """By how much each clock's true correction may differ from the model's, against the reference clock, ns.

    Attributes
    ----------
    low, high : arrays, shape (clock, slice)
        In each slice of time; infinite where nothing bounds it.
    time : array, shape (slice,)
        Middle of each slice, ns.
    half : float
        Half length of a slice, ns.
    """

    low: Array
    high: Array
    time: Array
    half: float

    def at(self, clock: int, time: float, since: float, until: float) -> tuple[float, float]:
        """Return the bounds at a time for a deviation that is a line between ``since`` and ``until`` (no change of the clock there).

        Notes
        -----
        Two-dimensional linear programming over (offset, slope) by its dual: every bound is one constraint, or two joined by a line.
        """
        inside = (self.time - self.half >= since) & (self.time + self.half <= until)
        inside &= self.low[clock] <= self.high[clock]
        x, low, high = self.time[inside] - time, self.low[clock][inside], self.high[clock][inside]
        near = np.abs(x) <= self.half
        if len(x) < 3:
            widest = float(high.min(initial=np.inf)), float(low.max(initial=-np.inf))
            return (widest[1], widest[0]) if near.any() and widest[1] <= widest[0] else (-np.inf, np.inf)
        slope = _steepest(x, low, high, self.half)
        if not np.isfinite(slope):
            return -np.inf, np.inf
        low, high = low - slope * self.half, high + slope * self.half
        return -_largest(x, -high, -low), _largest(x, low, high)


def _steepest(x: Array, low: Array, high: Array, half: float) -> float:
    """Return the largest size of a slope that lies between all bounds."""
    dx = x[None, :] - x[:, None]
    apart = dx > 2.5 * half
    run = np.where(apart, dx - 2 * half, 1.0)
    up = np.where(apart, (high[None, :] - low[:, None]) / run, np.inf).min(initial=np.inf)
    down = np.where(apart, (high[:, None] - low[None, :]) / run, np.inf).min(initial=np.inf)
    return float(max(up, down, 0.0))


def _largest(x: Array, low: Array, high: Array) -> float:
    """Return the largest value at 0 of a line that lies between bounds at ``x``."""
    best = float(high[x == 0].min(initial=np.inf))
    left, right = np.flatnonzero(x < 0), np.flatnonzero(x > 0)
    if len(left) and len(right):  # two upper bounds on both sides
        a, b = x[left][:, None], x[right][None, :]
        best = min(best, float(((b * high[left][:, None] - a * high[right][None, :]) / (b - a)).min()))
    for side in (left, right):  # an upper bound, and a lower one beyond it
        near, far = np.abs(x[side])[:, None], np.abs(x[side])[None, :]
        beyond = far > near
        value = high[side][:, None] + (high[side][:, None] - low[side][None, :]) * near / np.where(
            beyond, far - near, 1
        )
        best = min(best, float(value[beyond].min(initial=np.inf)))
    return best


def feasible(obs: Observations, model: Model, reference: int) -> Feasible:
    """Return the bounds of every clock against the reference, in slices of time.

    Parameters
    ----------
    obs : Observations
    model : Model
        What the bounds are relative to; its drift must be right within a slice, what it is off by counts in :meth:`Feasible.at`.
    reference : int
        Number of the reference clock.

    Notes
    -----
    For a sender j and a receiver i of a call, ``end_i + c_i >= start_j + c_j``: difference constraints. Bounds against one clock are
    shortest paths from and to it (Cormen et al., *Introduction to Algorithms*, ch. 24.4), found by Bellman and Ford's relaxation with
    calls as nodes in between: the work of a round is one pass over the rows.
    """
    keep = np.flatnonzero(obs.sends | obs.receives)
    clock, call = obs.row_clock[keep], obs.call[keep]
    start = np.where(obs.sends[keep], obs.start[keep] + model.correction(clock, obs.start[keep]), -np.inf)
    end = np.where(obs.receives[keep], obs.end[keep] + model.correction(clock, obs.end[keep]), np.inf)
    edges = np.linspace(model.mid - model.half, model.mid + model.half, SLICES + 1)
    new = np.flatnonzero(np.append(True, call[1:] != call[:-1])) if len(call) else np.empty(0, np.int64)
    number = np.cumsum(np.bincount(new, minlength=len(call))) - 1 if len(call) else new
    first = obs.start[keep][new]
    part = np.clip(np.searchsorted(edges, first, side="right") - 1, 0, SLICES - 1)[number] if len(call) else new
    graph = _Graph(clock * SLICES + part, number, new, obs.num_clocks * SLICES)
    high = graph.farthest(start, end, reference)
    low = -graph.farthest(-end, -start, reference)
    shape = (obs.num_clocks, SLICES)
    middle, half = 0.5 * (edges[1:] + edges[:-1]), float(edges[1] - edges[0]) / 2
    return Feasible(low.reshape(shape), high.reshape(shape), middle, half)


@dataclass(slots=True)
class _Graph:
    node: Array
    call: Array
    new: Array
    num_nodes: int

    def farthest(self, arrive: Array, leave: Array, reference: int) -> Array:
        """Return how far each node may lie above the reference's: ``arrive_j + d_j <= leave_i + d_i`` in each call."""
        out = np.full(self.num_nodes, np.inf)
        out[reference * SLICES : (reference + 1) * SLICES] = 0.0
        if not len(self.call):
            return out
        order = np.argsort(self.node, kind="stable")
        there, begin = np.unique(self.node[order], return_index=True)
        call, came = self.call[order], arrive[order]
        fixed = there // SLICES == reference
        with np.errstate(invalid="ignore"):
            for _ in range(MAX_HOPS):
                soonest = np.minimum.reduceat(leave + out[self.node], self.new)
                reached = np.minimum(out[there], np.minimum.reduceat(soonest[call] - came, begin))
                reached[fixed] = 0.0
                moved = bool((reached < out[there] - 0.5).any())
                out[there] = reached
                if not moved:
                    break
        return out


def violations(obs: Observations, model: Model, sigma: Array) -> tuple[Array, Array]:
    """Return, per rank, in how many calls its end by the model precedes the last arrival by more than chance, and its number of calls.

    Parameters
    ----------
    obs : Observations
    model : Model
    sigma : array, shape (rank,)
        Standard deviation of each rank's correction, ns; three of the pair's combined are allowed, and 1 ns.
    """
    keep = np.flatnonzero(obs.sends | obs.receives)
    counts = np.bincount(obs.rank[keep], minlength=len(obs.ranks))
    if not len(keep):
        return np.zeros(len(obs.ranks), np.int64), counts
    rank, call = obs.rank[keep], obs.call[keep]
    clock = obs.clock[rank]
    start = np.where(obs.sends[keep], obs.start[keep] + model.correction(clock, obs.start[keep]), -_UNKNOWN)
    end = np.where(obs.receives[keep], obs.end[keep] + model.correction(clock, obs.end[keep]), _UNKNOWN)
    new = np.flatnonzero(np.append(True, call[1:] != call[:-1]))
    length = np.diff(np.append(new, len(call)))
    last = np.maximum.reduceat(start, new)
    at = np.flatnonzero(start == np.repeat(last, length))
    who = np.zeros(len(new), np.int64)
    who[np.repeat(np.arange(len(new)), length)[at]] = at
    allowed = 3.0 * np.hypot(sigma[rank], np.repeat(sigma[rank[who]], length)) + 1.0
    broken = end < np.repeat(last, length) - allowed
    return np.bincount(rank, weights=broken, minlength=len(obs.ranks)).astype(np.int64), counts


def place_between(obs: Observations, model: Model, knot: Knot, low: float, high: float) -> float:
    """Return where between two times a step contradicts causality least, ns: what one-way calls tell of when it was.

    Parameters
    ----------
    obs : Observations
    model : Model
        Without the step.
    knot : Knot
        The step.
    low, high : float
        Last measured call before it and first one after it, ns on the clock's own time.
    """
    mine = obs.row_clock == knot.clock
    inside = mine & (obs.end > low) & (obs.start < high)
    called = np.zeros(int(obs.call.max(initial=0)) + 1, bool)
    called[obs.call[inside]] = True
    rows = np.flatnonzero(called[obs.call])
    if not len(rows):
        return knot.at
    clock, call, own = obs.row_clock[rows], obs.call[rows], mine[rows]
    start, end = (t[rows] + model.correction(clock, t[rows]) for t in (obs.start, obs.end))
    new = np.flatnonzero(np.append(True, call[1:] != call[:-1]))
    number = np.cumsum(np.append(True, call[1:] != call[:-1])) - 1
    last = np.maximum.reduceat(np.where(obs.sends[rows] & ~own, start, -_UNKNOWN), new)[number]
    soonest = np.minimum.reduceat(np.where(obs.receives[rows] & ~own, end, _UNKNOWN), new)[number]
    ends, begins = own & obs.receives[rows], own & obs.sends[rows]
    time = np.concatenate([obs.end[rows][ends], obs.start[rows][begins]])
    slack = np.concatenate([(end - last)[ends], (soonest - start)[begins]])
    sign = np.repeat([1.0, -1.0], [int(ends.sum()), int(begins.sum())])
    order = np.argsort(time, kind="stable")
    time, slack, sign = time[order], slack[order], sign[order]
    worst = abs(knot.value)
    before, after = (np.clip(-s, 0.0, worst) for s in (slack, slack + sign * knot.value))
    cost = np.append(0.0, np.cumsum(before)) + np.append(np.cumsum(after[::-1])[::-1], 0.0)
    edges = np.concatenate([[low], time, [high]])
    allowed = np.flatnonzero((edges[1:] > low) & (edges[:-1] < high))
    best = allowed[cost[allowed] <= cost[allowed].min() + 1.0]
    return float(0.5 * (max(edges[best[0]], low) + min(edges[best[-1] + 1], high)))
