"""From observations to a model of the clocks: fit, steps, error, bounds, and parts that only one-way transfers connect."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from mappnb.analysis._align_bounds import Feasible, feasible, place_between, violations
from mappnb.analysis._align_grid import Block, Knot, Model, Rows, block_rows, blocks_of, median
from mappnb.analysis._align_input import Observations
from mappnb.analysis._align_solve import (
    System,
    autocorrelation_factor,
    basis_of,
    draws,
    fit,
    group_median,
    huber_factor,
)
from mappnb.analysis._align_steps import MAX_BEND, find_knots, place_knot
from mappnb.errors import MappnbError

__all__ = ["Fit", "fit_clocks"]

Array = np.ndarray[Any, Any]
DRAWS = 40
MAX_ROUNDS = 10
MAX_MOVES = 2
PASSES = 3
NEAR = 0.06
COVERAGE = 2.3
"""Half widths per standard deviation: Student's 97.5 % quantile of about 10 degrees of freedom; blocks are few and tails are long."""
TIMES = 9


@dataclass(slots=True)
class Fit:
    """An alignment by clock, or by rank where said.

    Attributes
    ----------
    model : Model
        Corrections, the reference's offset and drift 0.
    reference : int
        Number of the reference clock.
    sigma, slope_sigma : arrays, shape (clock,)
        Standard deviation of the correction (root mean square over time), ns, and of the slope, ns per ns.
    bound, low, high : arrays, shape (clock,)
        Half width of 95 %, and hard bounds of the deviation in the middle, ns.
    residual : array, shape (rank,)
        Robust standard deviation of single ends, ns; NaN where there are none.
    violations, num_calls : int arrays, shape (rank,)
        Calls left too early by the model, and calls.
    """

    model: Model
    reference: int
    sigma: Array
    slope_sigma: Array
    bound: Array
    low: Array
    high: Array
    residual: Array
    violations: Array
    num_calls: Array


def fit_clocks(
    obs: Observations, reference_rank: int, prior: list[tuple[int, float, float]], rng: np.random.Generator
) -> Fit:
    """Return the alignment of observations against the clock of one rank.

    Raises
    ------
    MappnbError
        If calls do not connect all clocks.
    """
    reference, num = int(obs.clock[reference_rank]), obs.num_clocks
    part = _parts(obs, prior, reference_rank)
    _refuse(obs, _reachable(obs, part), reference)
    model, blocks = _empty_model(obs), blocks_of(obs)
    sigma, slope_sigma = np.zeros(num), np.zeros(num)
    extra = _prior_rows(obs, prior, reference_rank)
    if (_between_clocks(obs, blocks) or extra) and num > 1:
        model, rows, system, rest, row_sigma = _fit(obs, blocks, model, part, extra)
        sigma, slope_sigma = _errors(rows, system, rest, row_sigma, model, reference, rng)
    model = _gauge(_placed(obs, blocks, model), reference)
    residual, uneven = _residuals(obs, blocks, model)
    sigma = np.sqrt(sigma**2 + uneven**2 + uneven[reference] ** 2)
    width = np.zeros(num)
    if (part != part[reference]).any():
        model, width = _join_parts(obs, model, part, reference)
        sigma = np.hypot(sigma, width / np.sqrt(3.0))
    model, low, high = _inside(model, feasible(obs, model, reference), reference)
    bound = np.minimum(np.maximum(COVERAGE * sigma, width), np.maximum(high, -low))
    sigma[reference] = bound[reference] = 0.0
    broken, num_calls = violations(obs, model, sigma[obs.clock])
    return Fit(model, reference, sigma, slope_sigma, bound, low, high, residual, broken, num_calls)


def _empty_model(obs: Observations) -> Model:
    first, last = (float(obs.start.min()), float(obs.end.max())) if len(obs.start) else (0.0, 2.0)
    return Model(np.zeros((obs.num_clocks, 2)), 0.5 * (first + last), max(0.5 * (last - first), 1.0))


# ------------------------------------------------------------------------------------------------------- the graph
def _spread(label: Array, one: Array, other: Array, num_other: int) -> Array:
    """Return the least label that reaches each member of ``one`` through what it shares in ``other``."""
    while True:
        least = np.full(num_other, len(label))
        np.minimum.at(least, other, label[one])
        new = label.copy()
        np.minimum.at(new, one, least[other])
        if (new == label).all():
            return new
        label = new


def _parts(obs: Observations, prior: list[tuple[int, float, float]], reference_rank: int) -> Array:
    """Return the part of each clock: those of one part are measured against each other."""
    keep = np.flatnonzero(obs.measured)
    clock, call = obs.row_clock[keep], obs.call[keep]
    size = int(call.max(initial=-1)) + 2
    told = np.array([obs.clock[r] for r, _, _ in prior] + ([obs.clock[reference_rank]] if prior else []), np.int64)
    one = np.concatenate([clock, told])
    other = np.concatenate([call, np.full(len(told), size - 1)])
    return _spread(np.arange(obs.num_clocks), one, other, size)


def _reachable(obs: Observations, part: Array) -> Array:
    """Return the label of each clock when one-way calls count too."""
    size = int(obs.call.max(initial=-1)) + 1
    keep = np.flatnonzero(obs.sends | obs.receives)
    return _spread(part, obs.row_clock[keep], obs.call[keep], size)


def _refuse(obs: Observations, label: Array, reference: int) -> None:
    apart = np.unique(label)
    if len(apart) < 2:
        return
    shown = [obs.ranks[label[obs.clock] == p].tolist() for p in apart[:6]]
    names = "; ".join(f"{m[:12]}{' ...' if len(m) > 12 else ''}" for m in shown)
    raise MappnbError(
        f"align: no matched collective connects the clocks of these {len(apart)} sets of ranks: {names}"
        f"{' ...' if len(apart) > 6 else ''}; expected calls that join them all: align each set alone (events of its ranks), "
        "give prior= from a ping-pong, or see mappnb.analysis.match_report for what did not match"
    )


# --------------------------------------------------------------------------------------------------------- the fit
def _prior_rows(obs: Observations, prior: list[tuple[int, float, float]], reference_rank: int) -> list[Block]:
    """Return measurements from elsewhere as blocks of one call: the difference of the middle of the span, with a spread of 0."""
    out = []
    model = _empty_model(obs)
    kind = int(obs.kind.max(initial=-1)) + 1
    for rank, offset, sigma in prior:
        own = obs.prior_ns[obs.clock[rank]] - obs.prior_ns[obs.clock[reference_rank]]
        pair = np.array([[[model.mid - (offset - float(own)), model.mid]]])
        out.append(Block(pair, np.array([[rank, reference_rank]]), np.array([kind]), sigma))
    return out


def _fit(
    obs: Observations, blocks: list[Block], model: Model, part: Array, extra: list[Block]
) -> tuple[Model, Rows, System, Array, Array]:
    everything = [*_between_clocks(obs, blocks), *extra]
    for _ in range(PASSES):
        rows = block_rows(everything, obs.clock, model)
        model, system, rest, sigma = fit(rows, obs.clock, part, model)
    straight: set[int] = set()
    moves = 0
    for _ in range(MAX_ROUNDS):
        knots = find_knots(rows, obs.clock, model, rest, sigma, straight)
        again = [k for k in model.knots if any(_same(model, k, n) for n in knots)] if moves < MAX_MOVES else []
        knots = [k for k in knots if not any(_same(model, n, k) for n in model.knots)] + again
        if not knots:
            break
        moves += bool(again)  # a step that is still seen was not placed where it is
        model = replace(model, knots=[k for k in model.knots if k not in again])
        placed = [place_knot(k, blocks, obs.clock, model) for k in knots]
        model = replace(model, knots=[*model.knots, *placed])
        for _ in range(2):
            model, *_ = fit(rows, obs.clock, part, model)
            wild = {k.clock for k in model.knots if k.kink and abs(k.value) > MAX_BEND * model.half}
            straight |= wild
            model = replace(model, knots=[k for k in model.knots if not (k.kink and k.clock in wild)])
            rows = block_rows(everything, obs.clock, model)
        model, system, rest, sigma = fit(rows, obs.clock, part, model)
    return model, rows, system, rest, sigma


def _between_clocks(obs: Observations, blocks: list[Block]) -> list[Block]:
    """Return the cells with members on several clocks: the others tell nothing, and would weigh as if they told that nothing changed."""
    out = []
    for b in blocks:
        clock = obs.clock[b.rank]
        several = (clock != clock[:, :1]).any(axis=1)
        if several.any():
            out.append(replace(b, end=b.end[several], rank=b.rank[several], kind=b.kind[several]))
    return out


def _placed(obs: Observations, blocks: list[Block], model: Model) -> Model:
    """Return the model with every step where one-way calls put it, between the measured calls about it."""
    knots = list(model.knots)
    between = _between_clocks(obs, blocks)
    for i, knot in enumerate(knots):
        if knot.kink:
            continue
        ends = [b.end[np.broadcast_to((obs.clock[b.rank] == knot.clock)[:, None, :], b.end.shape)] for b in between]
        time = np.concatenate([e[np.isfinite(e)] for e in ends])
        before, after = time[time < knot.at], time[time >= knot.at]
        if len(before) and len(after):
            rest = replace(model, knots=[k for k in knots if k is not knot])
            at = place_between(obs, rest, knot, float(before.max()), float(after.min()))
            knots[i] = replace(knot, at=at)
    return replace(model, knots=knots)


def _same(model: Model, one: Knot, other: Knot) -> bool:
    near = NEAR * model.half
    return one.clock == other.clock and one.kink == other.kink and abs(one.at - other.at) < near


def _gauge(model: Model, reference: int) -> Model:
    """Return the model in which the reference's offset and drift are 0; its steps stay its own.

    The common time ``u + c(u)`` is put through the line that takes it back to the reference's own: clocks apart by 0.1 s at 100 ppm would
    be off by 10 µs, were the reference's coefficients only subtracted.
    """
    coef = model.coef[reference]
    scale = 1.0 + coef[1] / model.half
    knots = [replace(k, value=k.value / scale) for k in model.knots]
    return replace(model, coef=(model.coef - coef) / scale, knots=knots)


def _errors(
    rows: Rows, system: System, rest: Array, row_sigma: Array, model: Model, reference: int, rng: np.random.Generator
) -> tuple[Array, Array]:
    """Return the standard deviations of corrections (root mean square over time) and of slopes, against the reference."""
    num = len(model.coef)
    wider = huber_factor(rest, row_sigma)
    lasting = np.sqrt(autocorrelation_factor(rows, rest, row_sigma))
    by_row = draws(rows, system, rest, False, DRAWS, rng) * wider * lasting
    by_kind = draws(rows, system, rest, True, DRAWS, rng) * wider
    times = model.mid + model.half * np.linspace(-1, 1, TIMES)
    variance = np.zeros(num)
    for drawn in (by_row, by_kind):
        against = drawn.copy()
        against[:, :2] -= drawn[reference, :2]
        total = np.zeros(num)
        for t in times:
            basis = basis_of(model, np.arange(num), np.full(num, t), np.full(num, t))
            total += (np.einsum("kp,kps->ks", basis, against) ** 2).mean(axis=1)
        variance = np.maximum(variance, total / len(times))
    slope = (by_row[:, 1] - by_row[reference, 1]).std(axis=1) / model.half
    return np.sqrt(variance), slope


def _residuals(obs: Observations, blocks: list[Block], model: Model) -> tuple[Array, Array]:
    """Return the robust standard deviation of each rank's single ends about their call, and by how much it differs from its peers', ns.

    Exit noise is one-sided: a rank whose ends scatter more than those of the other members is likely to leave later too, by about as much.
    """
    parts = [(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0), np.empty(0))]
    for b in blocks:
        rest = b.end + model.correction(obs.clock[b.rank][:, None, :], b.end)
        rest -= median(rest, 2)
        kind = np.broadcast_to(b.kind[:, None], b.rank.shape)
        size = np.abs(rest)
        middle = 1.4826 * median(size, 1)[:, 0]
        cap = 4 * np.maximum(median(middle, 1), middle)[:, None, :] + 1
        tame = np.minimum(size, cap)  # the median alone is blind to rounded times
        known = np.isfinite(size)
        mean = 1.2533 * np.where(known, tame, 0).sum(axis=1) / np.maximum(known.sum(axis=1), 1)
        parts.append((b.rank.ravel(), kind.ravel(), middle.ravel(), mean.ravel()))
    rank, kind, value, mean = (np.concatenate(p) for p in zip(*parts, strict=True))
    keep = np.isfinite(value)
    rank, kind, value, mean = rank[keep], kind[keep], value[keep], mean[keep]
    num = len(obs.ranks)
    residual = group_median(value, rank, num)
    series, unique = pd.factorize(kind * num + rank)
    own = group_median(mean, np.asarray(series, np.int64), len(unique))
    peers = group_median(own, unique // num, int(kind.max(initial=-1)) + 1)[unique // num]
    weight = 1.0 / np.maximum(peers, 1.0) ** 2
    top = np.bincount(obs.clock[unique % num], weights=weight * np.abs(own - peers), minlength=obs.num_clocks)
    return residual, top / np.maximum(
        np.bincount(obs.clock[unique % num], weights=weight, minlength=obs.num_clocks), 1e-300
    )


# ------------------------------------------------------------------------------------------------------ the bounds
def _join_parts(obs: Observations, model: Model, part: Array, reference: int) -> tuple[Model, Array]:
    """Return the model with every part moved to the middle of what one-way calls allow, and the half widths, ns."""
    coef = model.coef.copy()
    width = np.zeros(len(coef))
    for _ in range(3):
        space = feasible(obs, replace(model, coef=coef), reference)
        for p in np.unique(part[part != part[reference]]):
            mine = part == p
            low, high = space.low[mine].max(axis=0), space.high[mine].min(axis=0)
            told = np.flatnonzero(np.isfinite(low) & np.isfinite(high))
            if not len(told):
                _refuse(obs, np.where(mine, 1, 0), reference)
            middle, x = 0.5 * (low + high)[told], model.x(space.time[told])
            degree = 1 if len(told) > 2 else 0
            line = np.polyfit(x, middle, degree)[::-1]
            coef[mine, : degree + 1] += line
            width[mine] = np.abs(0.5 * (high - low)[told]).max()
    return replace(model, coef=coef), width


def _inside(model: Model, space: Feasible, reference: int) -> tuple[Model, Array, Array]:
    """Return the model moved inside its hard bounds, and the bounds of what it may still be off by in the middle, ns."""
    windows: dict[tuple[float, float], list[int]] = {}
    for k in range(len(model.coef)):
        at = [n.at for n in model.knots if n.clock in (k, reference)]
        since = max([a for a in at if a <= model.mid], default=-np.inf)
        windows.setdefault((since, min([a for a in at if a > model.mid], default=np.inf)), []).append(k)
    low, high = np.full(len(model.coef), -np.inf), np.full(len(model.coef), np.inf)
    coef = model.coef.copy()
    for (since, until), clocks in windows.items():
        mine = np.array(clocks)
        lo, hi = space.at(mine, model.mid, since, until)
        mine, lo, hi = (v[lo <= hi] for v in (mine, lo, hi))  # else noise, or a wrong match; violations tell
        move = np.minimum(np.maximum(0.0, lo), hi)
        coef[mine, 0] += move
        low[mine], high[mine] = lo - move, hi - move
    low[reference] = high[reference] = 0.0
    return replace(model, coef=coef), low, high
