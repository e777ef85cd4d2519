"""Clock steps and changes of drift: where the residuals of a clock change, and between which two calls."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import numpy as np

from mappnb.analysis._align_grid import Block, Knot, Model, Rows, median
from mappnb.analysis._align_solve import group_median

__all__ = ["MAX_BEND", "find_knots", "place_knot"]

Array = np.ndarray[Any, Any]
SPLITS = 96
MIN_GAIN = 40.0
"""Least drop of the squared normalised residuals, in units of their variance; chance makes about 20 of 1,000 clocks."""
LEAST_CALLS = 100
"""At least so many single ends on either side are looked at to place a step."""
KINK_SHARE = 0.6
"""A change of drift must explain so much more than a step to be preferred: clocks step, and drift wanders slowly."""
MAX_BEND = 3e-4
"""Largest change of drift that is believed."""
LEAST_SIDE = 0.04
"""Least share of what is known of a clock on either side of a change."""
CLIP = 5.0
"""Residuals count up to so many standard deviations of their clock's: one block that is far off is no step."""
MIN_SHIFT = 3.0
"""Least size of a step in standard deviations of a single block."""


def find_knots(
    rows: Rows, clock: Array, model: Model, rest: Array, sigma: Array, straight: Set[int] = frozenset()
) -> list[Knot]:
    """Return changes of clocks that the residuals tell of, value 0: of several clocks that change together, the one that changes most.

    Parameters
    ----------
    rows : Rows
    clock : int array, shape (rank,)
    model : Model
        What the residuals are left of.
    rest, sigma : arrays, shape (row,)
        Residuals and their standard deviations, ns.
    straight : set of int
        Clocks whose drift does not change.
    """
    of, x = clock[rows.rank], model.x(rows.time)
    low, high = float(x.min()), float(x.max())
    edges = np.linspace(low, high, SPLITS + 1)
    part = np.clip(np.searchsorted(edges, x, side="right") - 1, 0, SPLITS - 1)
    z = rest / sigma
    own = 1.4826 * group_median(np.abs(z), of, int(clock.max()) + 1)[of]
    z = np.clip(z / (CLIP * np.maximum(own, 1.0)), -1.0, 1.0) * CLIP * np.maximum(own, 1.0)
    gain, shift = _gains(of * SPLITS + part, x, z, 1.0 / sigma, int(clock.max()) + 1, edges[1:-1])
    scale = max((1.4826 * float(np.median(np.abs(z)))) ** 2, 1.0)
    typical = float(np.median(sigma))
    found: list[Knot] = []
    allowed = (gain > MIN_GAIN * scale) & (np.abs(shift) > MIN_SHIFT * typical)
    gain = np.where(allowed, gain, 0.0)
    gain[1] *= KINK_SHARE
    gain[1, list(straight)] = 0.0
    while gain.max(initial=0.0) > 0 and len(found) < 64:
        kind, k, at = (int(i) for i in np.unravel_index(int(gain.argmax()), gain.shape))
        found.append(Knot(k, model.mid + model.half * float(edges[1 + at]), bool(kind), 0.0))
        gain[:, k] = 0.0  # of one clock one change at a time
        gain[:, :, max(0, at - 6) : at + 7] = 0.0  # others may only show its shadow
        rival = gain.max(initial=0.0)
        if rival and rival < 0.05 * float(gain.max()):
            break
    return found


def _gains(code: Array, x: Array, z: Array, root: Array, num_clocks: int, at: Array) -> tuple[Array, Array]:
    """Return what a step, and a change of slope, at each split would explain, and its size; shape (2, clock, split)."""
    w = root * root
    shape = (num_clocks, SPLITS)
    sums = [w, w * x, w * x * x, root * z, root * z * x]
    part = [np.bincount(code, weights=s, minlength=num_clocks * SPLITS).reshape(shape) for s in sums]
    total = [p.sum(axis=1, keepdims=True) for p in part]
    after = [p[:, ::-1].cumsum(axis=1)[:, ::-1][:, 1:] for p in part]
    s0, s1, s2, r0, r1 = after
    cross = [(s0, s1, s0, r0), (s1 - at * s0, s2 - at * s1, s2 - 2 * at * s1 + at * at * s0, r1 - at * r0)]
    t0, t1, t2, q0, q1 = total
    det = np.maximum(t0 * t2 - t1 * t1, 1e-300)
    gains, sizes = [], []
    for g0, g1, gg, gr in cross:  # the candidate less what offset and slope explain of it
        c0, c1 = (t2 * g0 - t1 * g1) / det, (t0 * g1 - t1 * g0) / det
        norm = gg - c0 * g0 - c1 * g1
        inner = gr - c0 * q0 - c1 * q1
        usable = (norm > 1e-3 * np.maximum(gg, 1e-300)) & (np.minimum(s0, t0 - s0) > LEAST_SIDE * t0)
        size = np.where(usable, inner / np.where(usable, norm, 1.0), 0.0)
        gains.append(size * inner)
        sizes.append(size)
    return np.stack(gains), np.stack(sizes)


def place_knot(knot: Knot, blocks: list[Block], clock: Array, model: Model) -> Knot:
    """Return the knot where single calls, and not only blocks of them, put it: half-way between two calls.

    Parameters
    ----------
    knot : Knot
        A step; a change of slope is returned as it is.
    blocks : list of Block
    clock : int array, shape (rank,)
    model : Model
        Without the knot.
    """
    if knot.kink:
        return knot
    times, rests = [], []
    for b in blocks:
        near = (clock[b.rank] == knot.clock).any(axis=1)
        if not near.any():
            continue
        end, who = b.end[near], clock[b.rank[near]]
        rest = end + model.correction(who[:, None, :], end)
        own = np.broadcast_to((who == knot.clock)[:, None, :], end.shape)
        rest -= median(np.where(own, np.nan, rest), 2)
        mine = own & np.isfinite(rest)
        times.append(end[mine])
        rests.append(rest[mine])
    time, rest = (np.concatenate([np.empty(0), *parts]) for parts in (times, rests))
    order = np.argsort(time, kind="stable")
    at, reach = int(np.searchsorted(time[order], knot.at)), model.half * 8 / SPLITS
    low, high = np.searchsorted(time[order], [knot.at - reach, knot.at + reach])
    order = order[max(min(int(low), at - LEAST_CALLS), 0) : max(int(high), at + LEAST_CALLS)]
    if len(order) < 4:
        return knot
    return Knot(knot.clock, _change_point(time[order], rest[order]), knot.kink, knot.value)


def _change_point(time: Array, rest: Array) -> float:
    """Return where a step explains most of what a line leaves: half-way between the two calls about it."""
    low, high = np.quantile(rest, [0.1, 0.9])
    y = np.clip(rest, 2 * low - high, 2 * high - low)
    y = y - y.mean()
    t = (time - time.mean()) / max(float(np.ptp(time)), 1.0)
    n, squares = len(t), max(float(t @ t), 1e-12)
    after = np.arange(n - 1, 0, -1)
    moment, total = (np.cumsum(v[::-1])[::-1][1:] for v in (t, y))
    inner = total - moment / squares * float(t @ y)
    norm = after - after**2 / n - moment**2 / squares
    gain = np.where(norm > 1e-6 * n, inner**2 / np.maximum(norm, 1e-9), 0.0)
    at = int(gain.argmax())
    return float(0.5 * (time[at] + time[at + 1]))
