"""Real training with a real fault: the verdict names it, a clean job has none, and the what-if says what mending it really brought."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest

from mappnb.analysis import find_stragglers, what_if

from . import sleeping_job

HAVE_MEGATRON = bool(importlib.util.find_spec("torch") and importlib.util.find_spec("megatron"))
pytestmark = [
    pytest.mark.dist,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not HAVE_MEGATRON, reason="needs torch and megatron-core"),
]
SEEDS = (1, 2, 3)
RANK = {1: 1, 2: 2, 3: 0}
LINK = {1: (0, 2), 2: (3, 1), 3: (1, 3)}
"""By seed; two stages: ranks 0 and 1 are the first one, 2 and 3 the last."""
DELAY_MS = 60
FAULTS = {
    "clean": lambda seed: {},
    "x1.5": lambda seed: {"slow": {RANK[seed]: 1.5}},
    "x2": lambda seed: {"slow": {RANK[seed]: 2.0}},
    "link": lambda seed: {"slow_link": f"{LINK[seed][0]},{LINK[seed][1]},{DELAY_MS}"},
}
TOLERANCE = 0.05


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """A function that trains the job of a fault and seed, once."""
    if not sleeping_job.undisturbed():
        pytest.skip("needs the right to real-time scheduling, or an idle machine: sleeping ranks wake late here")
    folder, trained = tmp_path_factory.mktemp("jobs"), {}

    def get(fault, seed):
        if (fault, seed) not in trained:
            options = FAULTS[fault](seed)
            trained[fault, seed] = sleeping_job.train_job(folder, f"{fault}-{seed}", seed=seed, **options)
        return trained[fault, seed]

    return get


def culprits(run):
    found = find_stragglers(run)
    print(found.to_string())
    return found[found.verdict == "culprit"]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_clean_job_has_no_culprit(job, seed):
    assert culprits(job("clean", seed).run).empty


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("fault", "factor"), [("x1.5", 1.5), ("x2", 2.0)])
def test_a_slow_rank_is_the_only_culprit(job, fault, factor, seed):
    slow = job(fault, seed)
    found = culprits(slow.run)
    assert found[["subject_kind", "subject", "cause"]].to_numpy().tolist() == [["rank", str(RANK[seed]), "hardware"]]
    more = (factor - 1) * sum(sleeping_job.WORK_S) * sleeping_job.MICROBATCHES
    assert found.effect_s.iloc[0] == pytest.approx(more, rel=0.1)
    assert found.first_step.iloc[0] <= sleeping_job.PRIORITY_STEP + 1
    assert found.last_step.iloc[0] == sleeping_job.STEPS - 1


@pytest.mark.parametrize("seed", SEEDS)
def test_a_slow_link_is_named_or_its_ends_are(job, seed):
    found = culprits(job("link", seed).run)
    source, target = LINK[seed]
    named = set(zip(found.subject_kind, found.subject.str.replace("→", "->"), strict=True))
    assert named and named <= {("link", f"{source}->{target}"), ("rank", str(source)), ("rank", str(target))}
    assert set(found.cause[found.subject_kind == "link"]) <= {"link"}


def spread(*step_s):
    """Standard deviation of the jobs' median steps over their mean, of those that were trained alike; the largest."""
    medians = [[np.median(s) for s in alike] for alike in step_s]
    return max(float(np.std(m, ddof=1) / np.mean(m)) for m in medians)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("fault", ["x1.5", "x2"])
def test_the_predicted_speed_up_is_the_measured_one(job, fault, seed):
    slow, clean = job(fault, seed), job("clean", seed)
    predicted = what_if(slow.run, fix={"rank": RANK[seed]}, by=())
    steps = slice(sleeping_job.PRIORITY_STEP + 1, None)
    saved = float(predicted.step_s.isel(step=steps).median() / predicted.fixed_s.isel(step=steps).median())
    measured = float(np.median(slow.step_s) / np.median(clean.step_s))
    measured_spread = spread([job("clean", s).step_s for s in SEEDS], [job(fault, s).step_s for s in SEEDS])
    print(f"predicted {saved:.4f}, measured {measured:.4f}: {saved / measured - 1:+.2%}; spread {measured_spread:.2%}")
    assert measured > 1.3
    assert abs(saved / measured - 1) <= max(TOLERANCE, 2 * measured_spread)
    assert bool(predicted.reliable_gain)
