"""Costs of a real recorded Megatron-core job."""

from __future__ import annotations

import dataclasses
import importlib.util

import numpy as np
import pytest

import mappnb
from mappnb.sched import fit_link, recorded_schedule, replay_steps, schedule, simulate
from mappnb.testing.gpt_settings import TrainSettings
from mappnb.testing.launcher import launch

HAVE_MEGATRON = bool(importlib.util.find_spec("torch") and importlib.util.find_spec("megatron"))
pytestmark = [
    pytest.mark.dist,
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not HAVE_MEGATRON, reason="needs torch and megatron-core"),
]
STEPS = 8
TINY = TrainSettings(hidden=64, sequence_length=32, steps=STEPS, lr=3e-3)


@pytest.mark.parametrize(
    ("world_size", "changes", "name"),
    [
        pytest.param(2, {"pp": 2, "vpp": 2}, "interleaved", id="pp2_vpp2"),
        pytest.param(4, {"pp": 2}, "1f1b", id="pp2_dp2"),
        pytest.param(4, {"tp": 2, "pp": 2}, "1f1b", id="tp2_pp2"),
    ],
)
def test_costs_of_a_recorded_job(tmp_path, world_size, changes, name):
    settings = dataclasses.replace(TINY, run_dir=str(tmp_path / "run"), **changes)
    launch(settings, world_size=world_size, start="fork")
    run = mappnb.attach(tmp_path / "run")
    chunks, m = settings.vpp, settings.num_microbatches(world_size)
    sched = schedule(name, num_stages=2 * chunks, num_chunks=chunks, num_microbatches=m)
    assert recorded_schedule(run) == sched, "Megatron's order is ours"
    costs = mappnb.fit_costs(run)
    assert set(costs.table.samples) == {(STEPS - 1) * m * world_size // 2}
    assert (costs.forward_s > 0).all() and (costs.backward_weight_s > 0).all() and len(costs.forward_s) == 2 * chunks
    assert costs.forward_s[-1] > costs.forward_s[:-1].min(), "the last stage has the loss"
    assert 0 < costs.p2p_s < 0.05 and costs.message_bytes == 64 * 32 * 4 * settings.micro_batch
    assert costs.optimizer_s > 0 and 0 < costs.launch_s < 0.01
    assert np.all(np.asarray(costs.reduce_s) > 0) == (settings.pp * settings.tp < world_size)
    waits = costs.table.wait_s.max()
    assert (waits > 0) == (settings.tp > 1), "tensor peers wait for one another inside the actions"
    simulated = float(simulate(sched, costs).span_s)
    found = replay_steps(run, p2p_s=costs.p2p_s, launch_s=costs.launch_s)
    link = fit_link(run)
    print(
        found.error_fraction.to_numpy().round(3), f"simulated {simulated:.4f} measured {found.measured_s.median():.4f}"
    )
    print(f"link {link.p2p_s * 1e3:.2f} ms, {link.median_error:.2%}")
    assert found.error_fraction.abs().median() < 0.5  # milliseconds of work on cores that other processes share
    assert 0.3 < simulated / float(found.measured_s.median()) < 1.5
