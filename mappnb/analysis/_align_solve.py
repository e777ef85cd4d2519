"""Weighted least squares over the graph of clocks, robust, and how sure it is by resampling its own residuals."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from mappnb.analysis._align_grid import Knot, Model, Rows

__all__ = [
    "System",
    "autocorrelation_factor",
    "basis_of",
    "draws",
    "fit",
    "group_median",
    "group_quantiles",
    "huber_factor",
    "row_sigma",
]

Array = np.ndarray[Any, Any]
HUBER = 1.5
MAX_SOLVES = 400
LIKELY_DRIFT = 2e-4
"""Standard deviation of a clock's rate from the others', before any call is seen: crystals keep within 1e-4.
Decides for short traces only."""
_MEMORY = 4_000_000
_FLAT = 1e-12


def group_quantiles(values: Array, code: Array, num: int, quantiles: tuple[float, ...]) -> list[Array]:
    """Return quantiles of the values of each code, each of shape (num,); NaN where there is none."""
    order = np.lexsort((values, code))
    count = np.bincount(code, minlength=num)
    first = np.cumsum(count) - count
    has = count > 0
    ordered = values[order]
    out = []
    for quantile in quantiles:
        found = np.full(num, np.nan)
        place = quantile * (count[has] - 1)
        low = ordered[first[has] + np.floor(place).astype(np.int64)]
        high = ordered[first[has] + np.ceil(place).astype(np.int64)]
        found[has] = low + (place % 1.0) * (high - low)
        out.append(found)
    return out


def group_median(values: Array, code: Array, num: int) -> Array:
    """Return the median of the values of each code, shape (num,); NaN where there is none."""
    return group_quantiles(values, code, num, (0.5,))[0]


def _scale(values: Array, code: Array, num: int) -> Array:
    """Return the robust standard deviation of sizes of each code: by the median, or the 80 % quantile where that says more.

    Times that are rounded to µs make most differences 0; the median alone would then take a clock for exact.
    """
    middle, high = group_quantiles(values, code, num, (0.5, 0.8))
    return np.maximum(1.4826 * middle, high / 1.2816)


@dataclass(slots=True)
class System:
    """The normal equations: each cell has a free common time, each clock a column of parameters.

    Attributes
    ----------
    cell, clock : int arrays, shape (row,)
        Cells are numbered in the order of the rows.
    basis : array, shape (row, parameter)
        What each parameter of the row's clock does to it.
    weight : array, shape (row,)
        1 / ns².
    ridge : array, shape (parameter,)
        1 / ns²: how surely each parameter is near 0, before any row is seen.
    """

    cell: Array
    clock: Array
    basis: Array
    weight: Array
    ridge: Array
    num_clocks: int
    _first: Array
    _total: Array
    _order: Array
    _begin: Array
    _there: Array
    _block: Array

    @classmethod
    def of(cls, cell: Array, clock: Array, basis: Array, weight: Array, num_clocks: int, ridge: Array) -> System:
        """Return the system of rows, those of a cell together."""
        first = np.flatnonzero(np.append(True, cell[1:] != cell[:-1]))
        number = np.cumsum(np.append(True, cell[1:] != cell[:-1])) - 1
        total = np.maximum(np.add.reduceat(weight, first), 1e-300)
        order = np.argsort(clock, kind="stable")
        there, begin = np.unique(clock[order], return_index=True)
        out = cls(number, clock, basis, weight, ridge, num_clocks, first, total, order, begin, there, np.empty(0))
        own = weight * (1.0 - weight / total[number])
        block = out.gather((basis[:, :, None] * basis[:, None, :] * own[:, None, None]).reshape(len(cell), -1))
        block = block.reshape(num_clocks, basis.shape[1], basis.shape[1]) + np.diag(ridge)
        scale = np.maximum(np.trace(block, axis1=1, axis2=2), _FLAT * max(float(block.max(initial=0.0)), 1e-300))
        block += np.eye(basis.shape[1]) * (1e-9 * scale + 1e-300)[:, None, None]
        unused = np.einsum("kpp->kp", block) < 1e-6 * scale[:, None]
        block += np.eye(basis.shape[1]) * (unused * scale[:, None])[:, :, None]
        out._block = np.linalg.inv(block)
        return out

    def gather(self, values: Array) -> Array:
        """Return the sums of rows over clocks, shape (clock, ...)."""
        out = np.zeros((self.num_clocks, *values.shape[1:]))
        out[self._there] = np.add.reduceat(values[self._order], self._begin, axis=0)
        return out

    def center(self, values: Array) -> Array:
        """Return what remains of rows, shape (row, draw), when each cell's weighted mean is taken off."""
        mean = np.add.reduceat(values * self.weight[:, None], self._first, axis=0) / self._total[:, None]
        return np.asarray(values - mean[self.cell])

    def right(self, values: Array) -> Array:
        """Return the right-hand side, shape (clock, parameter, draw), of row values (row, draw)."""
        rest = self.center(values) * self.weight[:, None]
        return self.gather(self.basis[:, :, None] * rest[:, None, :])

    def rows(self, parameters: Array) -> Array:
        """Return what parameters (clock, parameter, draw) make of the rows, shape (row, draw)."""
        return np.asarray(np.einsum("rp,rps->rs", self.basis, parameters[self.clock]))

    def solve(self, right: Array, tolerance: float = 1e-7) -> Array:
        """Return the parameters, shape (clock, parameter, draw), by conjugate gradients; what no row tells stays 0."""
        x, rest = np.zeros_like(right), right.copy()
        z = np.einsum("kpq,kqs->kps", self._block, rest)
        step = z.copy()
        size = np.einsum("kps,kps->s", rest, z)
        goal = np.maximum(size * tolerance**2, 1e-16)  # in squared standard deviations
        for _ in range(MAX_SOLVES):
            if (size <= goal).all():
                break
            moved = self.right(self.rows(step)) + self.ridge[:, None] * step
            gain = size / np.maximum(np.einsum("kps,kps->s", step, moved), 1e-300)
            x += gain * step
            rest -= gain * moved
            z = np.einsum("kpq,kqs->kps", self._block, rest)
            new = np.einsum("kps,kps->s", rest, z)
            step = z + step * (new / np.maximum(size, 1e-300))
            size = new
        return x


def basis_of(model: Model, clock: Array, time: Array, common: Array) -> Array:
    """Return the basis of rows, shape (row, parameter): 1, x of the common time, then the knots of the row's clock at its own time."""
    places = knot_columns(model)
    out = np.zeros((len(clock), 2 + max(places, default=-1) + 1))
    out[:, 0], out[:, 1] = 1.0, model.x(common)
    for knot, place in zip(model.knots, places, strict=True):
        mine = np.flatnonzero((clock == knot.clock) & (time >= knot.at))
        out[mine, 2 + place] = (time[mine] - knot.at) / model.half if knot.kink else 1.0
    return out


def knot_columns(model: Model) -> list[int]:
    """Return the column of each knot among those of its clock."""
    seen: dict[int, int] = {}
    out = []
    for knot in model.knots:
        out.append(seen.get(knot.clock, 0))
        seen[knot.clock] = out[-1] + 1
    return out


def row_sigma(rows: Rows, rest: Array) -> Array:
    """Return the standard deviation of each row, ns, from the differences of consecutive rows of its series (kind and member).

    Differences, so that a clock step does not count as noise. Half of the variance is the series' own, half that of its kind: a series
    of a few dozen rows tells its own badly.
    """
    series, _ = pd.factorize(rows.kind * (int(rows.rank.max()) + 1) + rows.rank)
    order = np.lexsort((rows.time, series))
    scaled, sorted_series = (rest * np.sqrt(rows.calls))[order], series[order]
    same = np.flatnonzero(sorted_series[1:] == sorted_series[:-1])
    if not len(same):
        found = np.full(len(rest), max(float(np.abs(rest).mean()), 1.0)) / np.sqrt(rows.calls)
        return np.asarray(np.where(np.isfinite(rows.given), rows.given, found))
    change = np.abs(scaled[same + 1] - scaled[same]) / np.sqrt(2.0)
    num = int(series.max()) + 1
    own = _scale(change, sorted_series[same], num)[series]
    kind = _scale(change, rows.kind[order][same], int(rows.kind.max()) + 1)[rows.kind]
    kind = np.where(np.isfinite(kind), kind, float(np.median(change)))
    many = np.bincount(sorted_series[same], minlength=num)[series] >= 6
    variance = np.where(many, 0.5 * own**2 + 0.5 * kind**2, kind**2)
    floor = max(float(np.median(kind)) * 0.05, 1.0)
    found = np.sqrt(np.maximum(variance, floor**2) / rows.calls)
    return np.asarray(np.where(np.isfinite(rows.given), rows.given, found))


def fit(rows: Rows, clock: Array, part: Array, model: Model, num_rounds: int = 3) -> tuple[Model, System, Array, Array]:
    """Return the model that fits the rows better, its system, and the residuals and standard deviations of the rows, ns.

    Notes
    -----
    Iteratively reweighted least squares with Huber's weights (Huber, *Robust Statistics*, 1981, ch. 7).
    """
    of = clock[rows.rank]
    basis = basis_of(model, of, rows.time, rows.common)
    sigma = 1.0 / np.sqrt(rows.calls)
    weight = np.where(np.isfinite(rows.given), 1.0, rows.calls).astype(np.float64)
    target = -rows.value[:, None]
    ridge = np.zeros(basis.shape[1])
    ridge[1] = (LIKELY_DRIFT * model.half) ** -2.0
    now = np.zeros((len(model.coef), basis.shape[1], 1))
    now[:, :2, 0] = model.coef
    for _ in range(num_rounds):
        system = System.of(rows.cell, of, basis, weight, int(clock.max()) + 1, ridge)
        found = system.solve(system.right(target) - ridge[:, None] * now)
        rest = system.center(system.rows(found) - target)[:, 0]
        sigma = row_sigma(rows, rest)
        weight = np.minimum(1.0, HUBER * sigma / np.maximum(np.abs(rest), 1e-9)) / sigma**2
    sums = [np.bincount(part, weights=found[:, i, 0]) for i in range(2)]
    common = np.stack(sums, axis=1) / np.maximum(np.bincount(part), 1)[:, None]  # of each part: nothing tells it
    coef = model.coef + found[:, :2, 0] - common[part]
    knots = [
        Knot(k.clock, k.at, k.kink, k.value + float(found[k.clock, 2 + place, 0]))
        for k, place in zip(model.knots, knot_columns(model), strict=True)
    ]
    return Model(coef, model.mid, model.half, knots), system, rest, sigma


def hat(system: System) -> Array:
    """Return the leverage of each row: how much of its own error a fit takes up."""
    common = system.weight / system._total[system.cell]
    own = np.einsum("rp,rpq,rq->r", system.basis, system._block[system.clock], system.basis) * system.weight
    return np.asarray(np.minimum(common + own * (1 - common), 0.9))


def autocorrelation_factor(rows: Rows, rest: Array, sigma: Array) -> float:
    """Return by what the variance of a mean over blocks exceeds that of independent blocks, at least 1.

    Pooled over all series: ``1 + 2 Σ ρ_k`` up to the first lag without a positive correlation.
    """
    order = np.lexsort((rows.time, rows.rank, rows.kind))
    z = np.clip(rest / sigma, -4, 4)[order]
    series = (rows.kind * (int(rows.rank.max()) + 1) + rows.rank)[order]
    total, scale = 1.0, float((z * z).mean())
    for lag in range(1, 9):
        if lag >= len(z) or scale <= 0:
            break
        same = series[lag:] == series[:-lag]
        if same.sum() < 20:
            break
        rho = float((z[lag:] * z[:-lag])[same].mean()) / scale
        if rho < 2.0 / np.sqrt(same.sum()):
            break
        total += 2.0 * rho
    return total


def huber_factor(rest: Array, sigma: Array) -> float:
    """Return by what Huber's weights overstate how much the rows tell: ``mean(w) / mean(ψ')``, at least 1 (Huber 1981, ch. 7.6)."""
    z = np.abs(rest) / sigma
    inside = float((z < HUBER).mean())
    return max(float(np.minimum(1.0, HUBER / np.maximum(z, 1e-12)).mean()) / max(inside, 0.2), 1.0)


def draws(rows: Rows, system: System, rest: Array, by_kind: bool, num: int, rng: np.random.Generator) -> Array:
    """Return parameters refitted to resampled residuals, shape (clock, parameter, draw).

    Notes
    -----
    Wild bootstrap (Wu, Annals of Statistics 1986) with Rademacher signs on residuals corrected by their leverage (HC3); signs per row,
    or with ``by_kind`` one per (kind, member): what one kind of call tells of a member may be off by the same all along.
    """
    noise = rest / (1.0 - hat(system))
    series, _ = pd.factorize(rows.kind * (int(rows.rank.max()) + 1) + rows.rank)
    out = []
    size = max(1, min(num, _MEMORY // max(len(rest), 1)))
    for at in range(0, num, size):
        n = min(size, num - at)
        signs = rng.integers(0, 2, (int(series.max()) + 1 if by_kind else len(rest), n)) * 2.0 - 1.0
        values = noise[:, None] * (signs[series] if by_kind else signs)
        prior = np.sqrt(system.ridge)[:, None] * rng.standard_normal((system.num_clocks, len(system.ridge), n))
        out.append(system.solve(system.right(values) + prior, 1e-3))
    return np.concatenate(out, axis=2)
