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
_FAR = 1e14


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

    def at(self, clocks: Array, time: float, since: float, until: float) -> tuple[Array, Array]:
        """Return the bounds of clocks at a time, for deviations that are lines between ``since`` and ``until`` (no step there).

        Notes
        -----
        Two-dimensional linear programming over (offset, slope) by its dual: every bound is one constraint, or two joined by a line.
        """
        inside = (self.time - self.half >= since) & (self.time + self.half <= until)
        x = self.time[inside] - time
        low, high = (np.clip(v[clocks][:, inside], -_UNKNOWN, _UNKNOWN) for v in (self.low, self.high))
        usable = low <= high
        low, high = np.where(usable, low, -_UNKNOWN), np.where(usable, high, _UNKNOWN)
        near = np.abs(x) <= self.half  # too little for a slope: what holds at the time itself
        found = [low[:, near].max(axis=1, initial=-_UNKNOWN), high[:, near].min(axis=1, initial=_UNKNOWN)]
        if len(x) > 2:
            slope = np.minimum(_steepest(x, low, high, self.half), 1.0)[:, None] * self.half
            lines = (-_largest(x, -high - slope, slope - low), _largest(x, low - slope, high + slope))
            enough = usable.sum(axis=1) > 2
            found = [np.where(enough, line, one) for line, one in zip(lines, found, strict=True)]
        return np.where(found[0] < -_FAR, -np.inf, found[0]), np.where(found[1] > _FAR, np.inf, found[1])


def _steepest(x: Array, low: Array, high: Array, half: float) -> Array:
    """Return the largest size of a slope that lies between all bounds, shape (clock,)."""
    dx = x[None, :] - x[:, None]
    one, other = np.nonzero(dx > 2.5 * half)
    run = dx[one, other] - 2 * half
    up = ((high[:, other] - low[:, one]) / run).min(axis=1, initial=np.inf)
    down = ((high[:, one] - low[:, other]) / run).min(axis=1, initial=np.inf)
    return np.asarray(np.maximum(np.maximum(up, down), 0.0))


def _largest(x: Array, low: Array, high: Array) -> Array:
    """Return the largest value at 0 of a line that lies between bounds at ``x``, shape (clock,)."""
    best = high[:, x == 0].min(axis=1, initial=np.inf)
    left, right = np.meshgrid(np.flatnonzero(x < 0), np.flatnonzero(x > 0))  # two upper bounds on both sides
    a, b = x[left.ravel()], x[right.ravel()]
    across = (b * high[:, left.ravel()] - a * high[:, right.ravel()]) / (b - a)
    near, far = np.nonzero((x[:, None] * x[None, :] > 0) & (np.abs(x)[None, :] > np.abs(x)[:, None]))
    share = np.abs(x[near]) / (np.abs(x[far]) - np.abs(x[near]))  # an upper bound, and a lower one beyond it
    beyond = high[:, near] + (high[:, near] - low[:, far]) * share
    for bounds in (across, beyond):
        best = np.minimum(best, bounds.min(axis=1, initial=np.inf))
    return np.asarray(best)


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
