"""Is an excess more than chance: levels that last, and bad steps that come too often; error rates over many subjects."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

__all__ = ["Noise", "Spell", "chernoff", "median_steps", "noise_of", "rejected", "spells", "tail"]

Array = np.ndarray[Any, Any]
PRIOR_SPREAD = 0.01
"""What healthy ranks are thought to differ by before any is seen: 1 %. Measured: 0.4 to 0.6 % between the workers of a stage in the AR and
SE jobs of the straggler_analysis data; GPUs of one model and clock differ by about 0.5 to 1 %."""
PRIOR_RANKS = 4
"""How many ranks' worth that is: from about ten ranks on, the run itself decides."""
SPREAD_QUANTILE = 1 / 3
"""The spread of healthy ranks is taken from the third of them that is nearest to its peers, so that two thirds may be slow."""
SPREAD_FACTOR = 2.3216
"""One over the 1/3 quantile of the absolute value of a standard normal number."""
LOOKED_AT = 200
"""Steps (and ranks) from which the noise is taken, evenly spread: more make its estimate no better."""
BLOCK = 5
"""Steps in a block: the noise of blocks against that of single steps tells how slowly a rank drifts."""
CLIP = 3.0
"""In the search for the spell, a step counts at most this many times the least effect, so that a single hiccup makes none."""
LEAST_SPELL = 2
"""Steps in a row, below which a slow spell is a hiccup (and may be one of many)."""
ROW_PRIOR = 0.005
"""Hiccups are taken to follow one another once in two hundred, unless the run shows that they do more often."""
LEAST_JUMPS = 4
"""Changes from step to step, below which a spell does not tell its own noise."""
LONG = 8
"""A spell of so many steps is none of the hiccups by which others are judged."""
LEAST_HICCUPS = 3
"""Bad steps of a rank, below which nothing is said about how often they come."""
COVERS = 0.75
"""A spell lasts if so much of it is slow and so many of the bad steps are in it; else the bad steps come and go."""
CLEAN_SHARE = 0.1
"""Share of the ranks with the most bad steps that is left out when the usual number is taken."""


@dataclass(frozen=True, slots=True)
class Noise:
    """What differs where nothing is wrong, all relative to the compute of a step.

    Attributes
    ----------
    spread : float
        Standard deviation of the lasting level of healthy ranks.
    df : float
        Degrees of freedom it is known by.
    step : float
        Standard deviation of a single step of a rank.
    slow : float
        Variance of a mean of n steps times n, over that of a single step: 1 where steps are independent.
    """

    spread: float
    df: float
    step: float
    slow: float

    def z(self, level: Array | float, steps: Array | float) -> Any:
        """Return a level over that many steps in standard errors."""
        return level / np.sqrt(self.spread**2 + self.slow * self.step**2 / steps)


@dataclass(frozen=True, slots=True)
class Spell:
    """When and how much a subject is slow.

    Attributes
    ----------
    first, last : int
        Positions of the first and the last bad step.
    active : int array
        Positions of the bad steps.
    level : float
        Excess in these, relative.
    z : float
        That in standard errors.
    p : float
        Chance to see as much in a subject where nothing is wrong, the search over spells included.
    lasting : bool
        All steps from first to last, rather than some of them.
    """

    first: int
    last: int
    active: Array
    level: float
    z: float
    p: float
    lasting: bool


def median_steps(values: Array) -> Array:
    """Return the median over steps of each column, NaN left out."""
    if len(values) and np.isfinite(values).all():
        return np.asarray(np.median(values, axis=0))
    ordered = np.sort(values, axis=0)
    n = np.isfinite(ordered).sum(0)
    low, high = (np.maximum(n - 1, 0) // 2), n // 2
    pick = [np.take_along_axis(ordered, np.minimum(k, len(ordered) - 1)[None], 0)[0] for k in (low, high)]
    return np.asarray(np.where(n > 0, (pick[0] + pick[1]) / 2, np.nan))


def noise_of(excess: Array, role: Array) -> Noise:
    """Return the noise of relative excesses, slow ranks and steps not counted in.

    Parameters
    ----------
    excess : float array, shape (step, rank)
        Excess over the peers, relative; NaN where there is none.
    role : int array, shape (rank,)
        Peers have the same number.
    """
    level = median_steps(excess[:: max(len(excess) // LOOKED_AT, 1)])
    seen = np.isfinite(level)
    sizes = np.unique(role[seen], return_counts=True)[1]
    told = float(max(np.maximum(sizes - 1, 0).sum() - 1, 0))
    spread2 = PRIOR_RANKS * PRIOR_SPREAD**2
    if told:
        own = SPREAD_FACTOR * float(np.quantile(np.abs(level[seen]), SPREAD_QUANTILE))
        spread2 += told * own**2
    step = _step_sigma(excess)
    blocks = len(excess) // BLOCK
    slow = 1.0
    if blocks >= 3 and step > 0:
        means = excess[: blocks * BLOCK].reshape(blocks, BLOCK, -1).mean(1)
        slow = max(1.0, BLOCK * (_step_sigma(means) / step) ** 2)
    return Noise(math.sqrt(spread2 / (PRIOR_RANKS + told)), PRIOR_RANKS + told, step, slow)


def _step_sigma(excess: Array) -> float:
    """Return the standard deviation of a step, from what one differs by from the next: spells do not count."""
    jump = np.abs(np.diff(excess, axis=0))
    jump = jump[:: max(len(jump) // LOOKED_AT, 1), :: max(jump.shape[1] // LOOKED_AT, 1)]
    if not np.isfinite(jump).any():
        return 0.0
    ordered = np.sort(jump, axis=0)  # NaN last
    place = ((np.isfinite(ordered).sum(0) - 1) * SPREAD_QUANTILE).astype(np.int64)
    each = np.take_along_axis(ordered, np.maximum(place, 0)[None], 0)[0] * SPREAD_FACTOR / math.sqrt(2)
    return float(np.median(each[np.isfinite(each)]))


def spells(excess: Array, noise: Noise, *, least: float) -> dict[int, Spell]:
    """Return what each column shows: a spell that lasts or bad steps too often, whichever is the less likely by chance.

    Parameters
    ----------
    excess : float array, shape (step, subject)
        Excess over the peers, relative; NaN where there is none.
    noise : Noise
        Of the healthy.
    least : float
        Least excess that is looked for, relative.

    Returns
    -------
    dict of int to Spell
        By column; columns without any are left out.
    """
    first, last = _best_runs(excess, least)
    found = {c: (int(first[c]), int(last[c])) for c in np.flatnonzero(last >= 0).tolist()}
    out: dict[int, Spell] = {}
    for c, (a, b) in found.items():
        spell = _lasting(excess[:, c], a, b, noise, least)
        if spell is not None:
            out[c] = spell
    out = _against_hiccups(out, excess)
    for c, spell in _hiccups(excess, noise, least).items():
        if c not in out or (spell.p < out[c].p and not _covers(out[c], spell)):
            out[c] = spell
        elif spell.p < out[c].p:
            out[c] = replace(out[c], p=spell.p)
    return out


def _covers(lasting: Spell, hiccups: Spell) -> bool:
    """Return whether a lasting spell says all that the bad steps say."""
    inside = np.isin(hiccups.active, np.arange(lasting.first, lasting.last + 1)).mean()
    dense = len(lasting.active) / (lasting.last - lasting.first + 1)
    return bool(inside >= COVERS and dense >= COVERS)


def _best_runs(excess: Array, least: float) -> tuple[Array, Array]:
    """Return for each column the first and the last row of the run with the largest sum over half the least effect (-1: none)."""
    gain = _gain(excess, least)
    n = excess.shape[1]
    total, best = np.zeros(n), np.zeros(n)
    begin, first, last = np.zeros(n, np.int64), np.full(n, -1), np.full(n, -1)
    for i, row in enumerate(gain):
        fresh = total <= 0
        begin[fresh] = i
        total = np.where(fresh, row, total + row)
        better = total > best
        best[better], first[better], last[better] = total[better], begin[better], i
    return first, last


def _best_run(series: Array, least: float) -> tuple[int, int]:
    """Return the same for one column: numbers one by one are faster than arrays of one."""
    total = best = 0.0
    begin, first, last = 0, -1, -1
    for i, value in enumerate(_gain(series, least).tolist()):
        if total <= 0:
            begin, total = i, value
        else:
            total += value
        if total > best:
            best, first, last = total, begin, i
    return first, last


def _gain(excess: Array, least: float) -> Array:
    """Return what each cell adds to a run: what it has over half the least effect, within bounds; 0 where there is none."""
    gain = np.clip(np.nan_to_num(excess), -CLIP * least, CLIP * least) - least / 2
    gain[~np.isfinite(excess)] = 0
    return np.asarray(gain)


def _lasting(series: Array, a: int, b: int, noise: Noise, least: float) -> Spell | None:
    """Return the spell around a run, its ends moved to where half its level is reached; None where it is none."""
    inside = _known(series[a : b + 1])
    if len(inside) < LEAST_SPELL:
        return None
    tried = [_moved(series, level, noise, least) for level in (_lower(inside), float(inside.mean())) if level >= least]
    return min((s for s in tried if s is not None), key=lambda s: s.p, default=None)


def _moved(series: Array, level: float, noise: Noise, least: float) -> Spell | None:
    """Return the spell of about that level."""
    for _ in range(2):
        a, b = _best_run(series, level)
        inside = _known(series[a : b + 1])
        if b < 0 or len(inside) < LEAST_SPELL:
            return None
        level = _lower(inside)
        if level < least:
            return None
    number = len(inside)
    wild = max(
        noise.step, _own_sigma(series[a : b + 1])
    )  # where lengths or load vary only from some step on, its noise counts
    z = float(replace(noise, step=wild).z(level, number))
    windows = (
        max(np.isfinite(series).sum() / number, 1.0) ** 2
    )  # places times lengths that the search could have ended in
    active = a + np.flatnonzero(series[a : b + 1] > level / 2)
    return Spell(a, b, active, float(np.median(inside)), z, min(1.0, tail(z, noise.df) * windows), True)


def _own_sigma(series: Array) -> float:
    """Return the standard deviation of a step within a spell; 0 where that is too short to say."""
    jump = np.abs(np.diff(series[np.isfinite(series)]))
    return float(np.median(jump)) * 1.4826 / math.sqrt(2) if len(jump) >= LEAST_JUMPS else 0.0


def _known(values: Array) -> Array:
    """Return the numbers among values, in order."""
    return np.sort(values[np.isfinite(values)])


def _lower(ordered: Array) -> float:
    """Return the median, of two the smaller."""
    return float(ordered[(len(ordered) - 1) // 2])


def _against_hiccups(found: dict[int, Spell], excess: Array) -> dict[int, Spell]:
    """Return the spells with the chance that hiccups, as they come in the run, make one of that length, where that is larger."""
    pool = excess.copy()
    for c, spell in found.items():
        if len(spell.active) >= LONG and spell.p < ROW_PRIOR:
            pool[spell.first : spell.last + 1, c] = np.nan
    n = int(np.isfinite(pool).sum())
    one = np.sort(pool[np.isfinite(pool)])
    pair = np.minimum(pool[1:], pool[:-1])
    two = np.sort(pair[np.isfinite(pair)])
    out = {}
    for c, s in found.items():
        own = pool[:, c] > s.level / 2
        events = len(one) - int(np.searchsorted(one, s.level / 2, "right")) - int(own.sum())
        pairs = len(two) - int(np.searchsorted(two, s.level / 2, "right")) - int((own[1:] & own[:-1]).sum())
        alone = (events + 0.5) / (n + 1)
        follow = min((pairs + 1) / (events + 1 / ROW_PRIOR), 1.0)
        chance = min(1.0, len(excess) * alone * follow ** (len(s.active) - 1))
        out[c] = replace(s, p=max(s.p, float(chance)))
    return out


def _hiccups(excess: Array, noise: Noise, least: float) -> dict[int, Spell]:
    """Return the columns in which bad steps come more often than in the others, by a binomial bound (Chernoff)."""
    bad = excess > max(2 * least, 5 * noise.step, 3 * noise.spread)
    steps, count = np.isfinite(excess).sum(0), bad.sum(0)
    out: dict[int, Spell] = {}
    for c in np.flatnonzero(count >= LEAST_HICCUPS).tolist():
        others = np.delete(np.arange(len(count)), c)
        left = others[np.argsort(count[others], kind="stable")][
            : max(len(others) - math.ceil(CLEAN_SHARE * len(others)), 1)
        ]
        usual = (count[left].sum() + 1) / (steps[left].sum() + 2) if len(left) else 0.5
        p = chernoff(int(count[c]), int(steps[c]), float(usual))
        active = np.flatnonzero(bad[:, c])
        level = float(np.median(excess[active, c]))
        z = float(level / max(math.hypot(noise.spread, noise.step), 1e-12))
        out[c] = Spell(int(active[0]), int(active[-1]), active, level, z, p, False)
    return out


def chernoff(count: int, number: int, chance: float) -> float:
    """Return an upper bound of the probability of ``count`` or more in ``number`` trials of ``chance``."""
    share = count / number if number else 0.0
    if share <= chance:
        return 1.0
    divergence = share * math.log(share / chance)
    if share < 1:
        divergence += (1 - share) * math.log((1 - share) / (1 - chance))
    return math.exp(-number * divergence)


def tail(t: float, df: float) -> float:
    """Return the probability that Student's t exceeds ``t``; by Wallace's normal approximation (Ann. Math. Statist. 1959)."""
    if t <= 0:
        return 1.0
    z = (8 * df + 1) / (8 * df + 3) * math.sqrt(df * math.log1p(t * t / df))
    return 0.5 * math.erfc(z / math.sqrt(2))


def rejected(p: Array, rate: float) -> Array:
    """Return which hypotheses are rejected so that of those at most ``rate`` are true ones (Benjamini and Hochberg 1995).

    Parameters
    ----------
    p : float array
        Probabilities of all hypotheses.
    rate : float
        False discovery rate; where nothing is wrong, the chance of any false alarm.
    """
    order = np.argsort(p, kind="stable")
    passed = np.flatnonzero(p[order] <= rate * np.arange(1, len(p) + 1) / max(len(p), 1))
    out = np.zeros(len(p), bool)
    if len(passed):
        out[order[: passed[-1] + 1]] = True
    return out
