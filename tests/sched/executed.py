"""Schedules that really run: torch.distributed.pipelining's runtime on gloo ranks of this host, with work that only sleeps.

Sleeping takes time but no processor, so that four ranks fit on two cores. The steps are recorded by mappnb, as those of a user are.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import xarray as xr

import mappnb
from mappnb.sched import Schedule, Straggler, schedule, simulate
from mappnb.sched.fit import FittedCosts, fit_costs
from mappnb.sched.measure import measure
from mappnb.sched.replays import recorded_schedule, replay_steps

RANKS, MICROBATCHES, STEPS = 4, 8, 6
NAMES = ("gpipe", "1f1b", "interleaved", "interleaved_zb", "zb_v")
WORK_S = {"F": 0.060, "I": 0.072, "W": 0.048}  # of a rank's whole share for one microbatch


class Executed(NamedTuple):
    """A schedule, and the events of its steps on the ranks."""

    name: str
    sched: Schedule
    events: xr.Dataset


def build(name: str) -> Schedule:
    """The schedule ``name`` for the ranks here; two chunks where there is a choice or the family fixes them."""
    chunks = 1 if name in ("gpipe", "1f1b", "zb_h1") else 2
    return schedule(name, num_stages=RANKS * chunks, num_chunks=chunks, num_microbatches=MICROBATCHES)


def sleeping(seconds: dict[str, float], chunks: int) -> None:
    """Give each action of torch's stages its fixed length, whatever its little tensors take."""
    from torch.distributed.pipelining.stage import _PipelineStageBase as Base

    forward, backward, weight = Base.forward_one_chunk, Base.backward_one_chunk, Base.backward_weight_one_chunk

    def until(begin: float, length: float) -> None:
        time.sleep(max(0.0, begin + length / chunks - time.perf_counter()))

    def slow_forward(self, *args, **kwargs):
        begin = time.perf_counter()
        out = forward(self, *args, **kwargs)
        until(begin, seconds["F"])
        return out

    def slow_backward(self, *args, **kwargs):
        begin = time.perf_counter()
        full = kwargs.get("full_backward", True)
        out = backward(self, *args, **kwargs)
        until(begin, seconds["I"] + (seconds["W"] if full else 0.0))
        return out

    def slow_weight(self, *args, **kwargs):
        begin = time.perf_counter()
        out = weight(self, *args, **kwargs)
        until(begin, seconds["W"])
        return out

    Base.forward_one_chunk, Base.backward_one_chunk, Base.backward_weight_one_chunk = (
        slow_forward,
        slow_backward,
        slow_weight,
    )


def wake_at_once() -> None:
    """Let the threads of this process run as soon as they wake, whatever else the machine does; they sleep nearly always."""
    with contextlib.suppress(PermissionError):
        for thread in os.listdir("/proc/self/task"):
            os.sched_setscheduler(int(thread), os.SCHED_RR, os.sched_param(1))


def run_rank(text: str, stages: list[int], chunks: int, run_dir: str, seconds: dict[str, float], priority: bool) -> int:
    """One rank: torch reads our CSV and runs it ``STEPS`` times, recorded."""
    import torch
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    sleeping(seconds, chunks)
    with mappnb.record(run_dir, plan="base"):
        width, total = 8, RANKS * chunks
        made = [PipelineStage(torch.nn.Linear(width, width), s, total, torch.device("cpu")) for s in stages]
        runtime = _PipelineScheduleRuntime(made, MICROBATCHES, loss_fn=lambda out, _: out.square().mean())
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "schedule.csv"
            path.write_text(text)
            runtime._load_csv(str(path))
        x = torch.ones(MICROBATCHES, width)
        for step in range(STEPS):
            dist.barrier()
            if step == 1 and priority:
                wake_at_once()
            if 0 in stages:
                runtime.step(x, target=x if total - 1 in stages else None)
            else:
                runtime.step(target=x if total - 1 in stages else None)
            mappnb.step()
    dist.destroy_process_group()
    return rank


def execute(
    name: str, folder: str | os.PathLike[str], *, priority: bool = True, slow: dict[int, float] | None = None
) -> Executed:
    """Run a schedule on gloo ranks and return what was recorded, all steps but the first.

    Without ``priority`` the ranks wake when the machine has time for them, as any program's. The work of ranks in ``slow`` takes
    that many times as long.
    """
    from capture.ranks import run_ranks

    sched = build(name)
    run_dir = Path(folder) / (name if slow is None else f"{name}-slow")
    place = (sched.to_csv(), list(sched.placement.forward), sched.num_chunks)
    preload = ("torch.distributed.pipelining", "mappnb.capture.session", "mappnb.sched")
    run_ranks(one_rank, RANKS, *place, str(run_dir), WORK_S, priority, slow or {}, preload=preload)
    return Executed(name, sched, mappnb.attach(run_dir).sel(step=slice(1, STEPS)))


def one_rank(text, forward, chunks, run_dir, seconds, priority, slow):
    rank = int(os.environ["RANK"])
    seconds = {kind: s * slow.get(rank, 1.0) for kind, s in seconds.items()}
    return run_rank(text, [s for s, r in enumerate(forward) if r == rank], chunks, run_dir, seconds, priority)


def spans_s(run: Executed) -> np.ndarray:
    """First start to last end of the actions of each step, s."""
    steps = measure(run.events, steps=slice(1, STEPS)).actions.groupby("step")
    return ((steps.end_ns.max() - steps.start_ns.min()) / 1e9).to_numpy()


def replay_error(run: Executed) -> pd.DataFrame:
    """Our engine on the measured durations of each step, with the latency of the messages as recorded."""
    costs = fit_costs(run.events, steps=slice(1, STEPS))
    return replay_steps(
        run.events, schedule=run.sched, steps=slice(1, STEPS), p2p_s=costs.p2p_s, launch_s=costs.launch_s
    )


def fitted(run: Executed) -> FittedCosts:
    """The costs of a run; of backwards that are not split, the share of W is told."""
    whole = WORK_S["I"] + WORK_S["W"]
    return fit_costs(run.events, steps=slice(1, STEPS), weight_fraction=WORK_S["W"] / whole)


def prediction(source: Executed, target: Executed, *stragglers: Straggler) -> tuple[float, float]:
    """(predicted, measured median) span of ``target`` in s, from costs that were fitted on ``source``."""
    found = simulate(target.sched, fitted(source), stragglers=stragglers)
    return float(found.makespan_s), float(np.median(spans_s(target)))


__all__ = [
    "NAMES",
    "Executed",
    "execute",
    "fit_costs",
    "prediction",
    "recorded_schedule",
    "replay_error",
    "spans_s",
]
