"""The demo's training on four gloo ranks of this host, whose compute is mostly sleep: it takes its time, but no processor."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

import mappnb
from mappnb.run import Run

RANKS, MICROBATCHES, STEPS = 4, 8, 16
WORK_S = (0.030, 0.060)
"""A forward and a backward of one microbatch on one rank, beside the few ms of its real work."""
PRIORITY_STEP = 1
"""From this step on ranks that wake go first, where that is allowed; the step before makes all threads that will be."""


class Job(NamedTuple):
    """One recorded job."""

    run: Run
    step_s: np.ndarray


def undisturbed() -> bool:
    """Whether ranks that sleep will wake on time: they may ask for it, or the machine has little else to do."""
    with contextlib.suppress(PermissionError):
        policy = os.sched_getscheduler(0)
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
        os.sched_setscheduler(0, policy, os.sched_param(0))
        return True
    return os.getloadavg()[0] < 0.5 * (os.cpu_count() or 1)


def sleeping(factor: float) -> None:
    """Make each forward sleep behind the model's own, and its backward before the model's own."""
    import torch

    from mappnb.testing import gpt_train

    class Work(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            time.sleep(WORK_S[0] * factor)
            return x.view_as(x)

        @staticmethod
        def backward(ctx, grad):
            time.sleep(WORK_S[1] * factor)
            return grad

    forward_step = gpt_train._Job._forward_step

    def longer(self, iterator, model):
        output, loss = forward_step(self, iterator, model)
        return Work.apply(output), loss

    gpt_train._Job._forward_step = longer


def wake_at_once() -> None:
    """Let the threads of this process run as soon as they wake; they sleep nearly always."""
    with contextlib.suppress(PermissionError):
        for thread in os.listdir("/proc/self/task"):
            os.sched_setscheduler(int(thread), os.SCHED_RR, os.sched_param(1))


def one_rank(settings_json: str, slow: dict[int, float]) -> None:
    """Train as this rank of the job; ranks in ``slow`` take that many times as long."""
    from mappnb.testing.gpt import train
    from mappnb.testing.gpt_settings import TrainSettings

    sleeping(slow.get(int(os.environ["RANK"]), 1.0))
    settings = TrainSettings.from_json(settings_json)
    train(settings, on_step=lambda report: wake_at_once() if report.step == PRIORITY_STEP else None)


def train_job(folder: Path, name: str, *, slow: dict[int, float] | None = None, **settings) -> Job:
    """Train two stages of two replicas, recorded, and return the run and the time of each step from the second on."""
    from capture.ranks import run_ranks

    from mappnb.testing.gpt_settings import TrainSettings

    asked = TrainSettings(
        pp=2, layers=2, hidden=32, heads=2, sequence_length=16, global_batch=2 * MICROBATCHES, steps=STEPS, run_dir=str(folder / name),
        **settings,
    )  # fmt: skip
    preload = ("mappnb.testing.gpt_train", "mappnb.capture.session")
    run_ranks(one_rank, RANKS, json.dumps(dataclasses.asdict(asked)), slow or {}, preload=preload, timeout_s=300.0)
    run = mappnb.attach(folder / name)
    steps = run.steps
    step_s = (steps.end_ns.max("rank") - steps.start_ns.min("rank")).values / 1e9
    return Job(run, step_s[PRIORITY_STEP + 1 :])
