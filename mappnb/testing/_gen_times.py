"""True times of every operation, step by step: noise, faults, one replay a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from mappnb.replay import replay
from mappnb.testing._gen_effects import Work, apply
from mappnb.testing._gen_faults import Fault
from mappnb.testing._gen_graph import Step
from mappnb.testing._gen_program import What
from mappnb.testing._gen_settings import Noise

__all__ = ["START_S", "Times", "makespans", "rank_factor", "simulate"]

Floats = npt.NDArray[np.float64]
START_S = 1.0
"""True time at which the first step begins, s since the run was created."""
BETWEEN_S = 5e-4
_CAP = 100.0


@dataclass(frozen=True, eq=False)
class Times:
    """True times of one step.

    Attributes
    ----------
    number : int
        The step.
    start_s, end_s : array, dims (op,)
        s since the run was created; a receive starts when its rank comes to it; infinite where it never came to that.
    gaps : list of (int, float)
        Recorded gaps before operations: (operation, length in s).
    """

    number: int
    start_s: Floats
    end_s: Floats
    gaps: list[tuple[int, float]]

    def makespan_s(self, step: Step) -> float:
        """Return last end minus first start over all ranks, s; infinite if the step never ended."""
        return float(self.end_s[step.ends].max() - self.start_s[step.begins].min())


def rank_factor(noise: Noise, step: Step, seed: int) -> Floats:
    """Return what each rank is slower by all along, dims (rank,)."""
    rng, size = np.random.default_rng([seed, 0, 1]), step.members.ranks.size
    if noise.rank_ratios:
        return _ratios(noise.rank_ratios, 0.0, size, rng)
    return np.asarray(np.exp(noise.rank_sigma * rng.standard_normal(size)), np.float64)


def simulate(
    step: Step, noise: Noise, faults: Sequence[tuple[int, Fault]], *, num_steps: int, seed: int
) -> Iterator[Times]:
    """Yield the times of one step after the other; ends after a step that never ended.

    Parameters
    ----------
    step : Step
        The graph.
    noise : Noise
        How durations vary.
    faults : sequence of (int, Fault)
        Faults, each with its number among all: what a fault draws does not depend on which others there are.
    num_steps : int
        Steps to simulate.
    seed : int
        Of all that is drawn. No draw of noise depends on the faults.
    """
    own, drift = rank_factor(noise, step, seed), np.zeros(step.members.ranks.size)
    free = np.full(len(own), START_S)
    receives = np.flatnonzero(step.what == What.RECV)
    for number in range(num_steps):
        rng = np.random.default_rng([seed, number, 2])
        memory = noise.drift_memory if number else 0.0
        drift = memory * drift + np.sqrt(1 - memory**2) * rng.standard_normal(len(own))
        work = Work(step, number, seed, step.graph.duration_s.copy(), np.zeros(len(step.graph)), [])
        _add_noise(work, noise, own * np.exp(noise.drift_sigma * drift), rng)
        _checkpoints(work)
        for index, fault in faults:
            apply(fault, index, work)
        work.delay[step.begins] = free + BETWEEN_S
        done = replay(replace(step.graph, duration_s=work.duration, delay_s=work.delay))
        start = done.start_s
        start[receives] = done.end_s[receives - step.replicas]
        yield Times(number, start, done.end_s, work.gaps)
        free = done.end_s[step.ends]
        if not np.isfinite(free).all():
            return


def _add_noise(work: Work, noise: Noise, factor: Floats, rng: np.random.Generator) -> None:
    step = work.step
    compute = np.flatnonzero((step.what == What.COMPUTE) | (step.what == What.OPTIMIZER) | (step.what == What.DATA))
    own = _ratios(noise.compute_ratios, noise.compute_sigma, len(compute), rng)
    work.duration[compute] *= factor[step.rank[compute]] * own
    late = rng.random(len(compute)) < noise.jitter_probability
    length = np.minimum((1 - rng.random(len(compute))) ** (-1 / noise.jitter_tail), _CAP) * noise.jitter_s
    work.delay[compute[late]] += length[late]
    _add_transfer_noise(work, noise, rng)


def _add_transfer_noise(work: Work, noise: Noise, rng: np.random.Generator) -> None:
    step = work.step
    moving = np.flatnonzero((step.what == What.JOIN) | (step.what < 0))
    is_join = step.what[moving] == What.JOIN
    joins = moving[is_join]
    if noise.collective_ratios or noise.message_ratios:
        for ops, samples in ((joins, noise.collective_ratios), (moving[~is_join], noise.message_ratios)):
            work.duration[ops] *= _ratios(samples, noise.network_sigma, len(ops), rng)
    else:
        work.duration[moving] *= _ratios((), noise.network_sigma, len(moving), rng)
    _share(work, joins)
    if noise.exit_samples_s:
        work.duration[joins] += _ratios(noise.exit_samples_s, 0.0, len(joins), rng)
    elif noise.exit_s:
        work.duration[joins] += rng.exponential(noise.exit_s, len(joins))


def _ratios(samples: tuple[float, ...], sigma: float, size: int, rng: np.random.Generator) -> Floats:
    """Draw factors: out of the samples where there are some, else log-normal of mean 1."""
    if samples:
        return np.asarray(samples, np.float64)[rng.integers(len(samples), size=size)]
    z = rng.standard_normal(size)
    return np.asarray(np.exp(sigma * z - sigma**2 / 2), np.float64) if sigma else np.ones(size)


def _share(work: Work, joins: npt.NDArray[np.int64]) -> None:
    """Give all members of a collective the time of the first one: it moves its data for all at once."""
    work.duration[joins] = work.duration[work.step.leaders][work.step.graph.groups[joins]]


def _checkpoints(work: Work) -> None:
    every = work.step.plan.checkpoint_every
    if every and (work.number + 1) % every:
        work.duration[work.step.what == What.CHECKPOINT] = 0.0


def makespans(step: Step, noise: Noise, faults: Sequence[tuple[int, Fault]], *, num_steps: int, seed: int) -> Floats:
    """Return the makespan of each step, s; NaN where it never ended or never began."""
    out = np.full(num_steps, np.nan)
    for times in simulate(step, noise, faults, num_steps=num_steps, seed=seed):
        span = times.makespan_s(step)
        out[times.number] = span if np.isfinite(span) else np.nan
    return out
