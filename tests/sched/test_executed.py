"""What we simulate against what really ran: torch's runtime on four gloo ranks, recorded, replayed, predicted from one another."""

from __future__ import annotations

import contextlib
import os

import numpy as np
import pytest

from mappnb.sched import Straggler, predictable

pytest.importorskip("torch", reason="runs torch.distributed.pipelining")
from . import executed

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(400)]


def undisturbed() -> bool:
    """Whether ranks that sleep will wake on time: they may ask for it, or the machine has little else to do."""
    with contextlib.suppress(PermissionError):
        policy = os.sched_getscheduler(0)
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
        os.sched_setscheduler(0, policy, os.sched_param(0))
        return True
    return os.getloadavg()[0] < 0.5 * (os.cpu_count() or 1)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    if not undisturbed():
        pytest.skip("needs the right to real-time scheduling, or an idle machine: sleeping ranks wake late here")
    folder = tmp_path_factory.mktemp("executed")
    return {name: executed.execute(name, folder) for name in executed.NAMES}


def test_what_ran_is_our_schedule(runs):
    for run in runs.values():
        found = executed.recorded_schedule(run.events, step=2)
        assert found.ranks == run.sched.ranks, run.name


def test_replays_take_as_long_as_the_steps_did(runs):
    errors = {name: executed.replay_error(run).error_fraction.abs() for name, run in runs.items()}
    print({name: f"median {e.median():.2%} largest {e.max():.2%}" for name, e in errors.items()})
    assert np.median(np.concatenate(list(errors.values()))) <= 0.02
    assert all(e.median() <= 0.02 for e in errors.values()), errors


def test_costs_of_one_schedule_predict_the_others(runs):
    errors = {}
    for source in runs.values():
        for target in runs.values():
            if source is not target:
                predicted, measured = executed.prediction(source, target)
                errors[source.name, target.name] = predicted / measured - 1
    size = np.abs(list(errors.values()))
    print({k: f"{v:+.2%}" for k, v in errors.items()}, f"median {np.median(size):.2%} largest {size.max():.2%}")
    assert np.median(size) <= 0.06 and size.max() <= 0.1, errors
    for source in runs.values():  # the order of the schedules too
        predicted = [executed.prediction(source, t)[0] for t in runs.values()]
        measured = [float(np.median(executed.spans_s(t))) for t in runs.values()]
        clear = [(a, b) for a in range(len(measured)) for b in range(len(measured)) if measured[a] < 0.95 * measured[b]]
        assert clear and all(predicted[a] < predicted[b] for a, b in clear)


def test_an_injected_straggler_is_predicted_and_named(runs, tmp_path):
    """One rank takes twice as long: the clean run's costs with that straggler, and the ranks whose operations changed."""
    slow = executed.execute("1f1b", tmp_path, slow={2: 2.0})
    predicted, measured = executed.prediction(runs["1f1b"], slow, Straggler(rank=2, factor=2.0))
    print(f"predicted {predicted:.4f} s, measured {measured:.4f} s: {predicted / measured - 1:+.2%}")
    assert abs(predicted / measured - 1) <= 0.05
    assert measured > 1.5 * float(np.median(executed.spans_s(runs["1f1b"])))
    verdict = predictable(runs["1f1b"].events, slow.events)
    assert not verdict and set(verdict.changed["rank"]) == {2} and verdict.busy_ratio == pytest.approx(2, rel=0.02)
