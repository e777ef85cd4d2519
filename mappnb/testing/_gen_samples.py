"""Telemetry and metrics of a generated run: what a fault of hardware, host or data shows beside the events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from mappnb.table_specs import TABLES, Columns
from mappnb.testing import _gen_faults as f
from mappnb.testing._gen_effects import Work, active, document_lengths
from mappnb.testing._gen_graph import Step
from mappnb.testing._gen_times import Times
from mappnb.testing._gen_truth import ClockTruth

__all__ = ["metric_rows", "needs_telemetry", "telemetry_rows"]

Floats = npt.NDArray[np.float64]
Faults = Sequence[tuple[int, f.Fault]]
CLOCK_MHZ, MEMORY_MHZ, POWER_W, COOL_C, HOT_C = 1980.0, 2619.0, 640.0, 58.0, 88.0
SW_THERMAL_SLOWDOWN = 0x20  # NVML's bit of the clocks-event reasons
MIN_PER_STEP = 2


def needs_telemetry(faults: Faults) -> bool:
    """Return whether a fault shows in the telemetry."""
    return any(getattr(x, "throttle", False) or getattr(x, "gap", "") == "run_queue" for _, x in faults)


def telemetry_rows(
    step: Step,
    times: Sequence[Times],
    rank: int,
    clock: ClockTruth,
    faults: Faults,
    *,
    every_s: float,
    seed: int,
    now_s: float,
) -> Columns:
    """Return the telemetry of a rank: a sample each ``every_s`` of a step, two at least."""
    first, last = int(step.begins[rank]), int(step.ends[rank])
    at, number = [], []
    for t in times:
        begin, end = float(t.start_s[first]), min(float(t.end_s[last]), now_s)
        count = max(MIN_PER_STEP, int((end - begin) / every_s)) if end > begin else 0
        at.append(begin + (np.arange(count) + 0.5) / max(count, 1) * (end - begin))
        number.append(np.full(count, t.number))
    when, which = np.concatenate(at), np.concatenate(number)
    rng = np.random.default_rng([seed, rank, 5, int(which[0]) if len(which) else 0])
    slow, queue = _slowed(step, rank, which, faults, seed), _queued(step, times, rank, which, faults)
    values = _readings(rng, slow, queue)
    values["time_ns"] = clock.raw_ns(rank, when)
    spec = TABLES["telemetry"]
    return {
        c: np.asarray(values[c], spec.numpy_dtype(c)) if c in values else np.full(len(when), np.nan)
        for c in spec.columns
    }


def _readings(rng: np.random.Generator, slow: Floats, queue: Floats) -> Columns:
    n, hot = len(slow), slow > 1
    return {
        "cpu_fraction": rng.uniform(0.97, 1.0, n) - queue,
        "run_queue_fraction": queue + rng.uniform(0, 0.002, n),
        "host_cpu_fraction": np.clip(rng.normal(0.12, 0.01, n) + queue, 0, 1),
        "host_memory_fraction": np.full(n, 0.31),
        "sm_clock_mhz": np.rint(CLOCK_MHZ / slow + rng.normal(0, 4, n)),
        "memory_clock_mhz": np.full(n, MEMORY_MHZ),
        "power_w": POWER_W / slow + rng.normal(0, 6, n),
        "temperature_c": np.where(hot, HOT_C, COOL_C) + rng.normal(0, 0.8, n),
        "throttle_reasons": np.where(hot, SW_THERMAL_SLOWDOWN, 0),
        "gpu_fraction": rng.uniform(0.95, 1.0, n),
        "gpu_memory_bytes": np.full(n, 68e9),
    }


def _slowed(step: Step, rank: int, which: npt.NDArray[Any], faults: Faults, seed: int) -> Floats:
    out = np.ones(len(which))
    for index, fault in faults:
        if not getattr(fault, "throttle", False):
            continue
        mine = fault.rank == rank if isinstance(fault, f.SlowRank) else (
            isinstance(fault, f.SlowHost) and step.members.host[rank] == fault.host
        )  # fmt: skip
        if mine:
            out *= np.where([active(fault, index, int(n), seed) for n in which], getattr(fault, "factor", 1.0), 1.0)
    return out


def _queued(step: Step, times: Sequence[Times], rank: int, which: npt.NDArray[Any], faults: Faults) -> Floats:
    """Return the share of each step that the rank waited for a CPU."""
    out = np.zeros(len(which))
    for t in times:
        length = float(t.end_s[step.ends[rank]] - t.start_s[step.begins[rank]])
        waited = sum(
            x.length_s * x.per_step
            for _, x in faults
            if isinstance(x, f.HostGaps) and x.rank == rank and x.gap == "run_queue" and x.hits(t.number)
        )
        if np.isfinite(length) and length > 0:
            out[which == t.number] = min(waited / length, 1.0)
    return out


def metric_rows(
    step: Step,
    times: Sequence[Times],
    rank: int,
    clock: ClockTruth,
    faults: Faults,
    *,
    seq_length: int,
    seed: int,
    now_s: float,
) -> Columns | None:
    """Return what a rank counts: document lengths on tensor and context rank 0 of the first stage, tokens of experts; None for nothing."""
    coords = {a: int(v[rank]) for a, v in step.members.coords.items()}
    parts: list[Columns] = []
    for t in times:
        start = float(t.start_s[step.begins[rank]])
        if start > now_s:
            continue
        at = int(clock.raw_ns(rank, start))
        for index, fault in faults:
            if isinstance(fault, f.DataSkew) and _reads(step, coords):
                parts.append(_documents(fault, index, step, t.number, coords["dp"], at, seq_length, seed))
            if isinstance(fault, f.MoeImbalance):
                parts.append(_experts(fault, step, t.number, coords["ep"], at, seq_length))
    if not parts:
        return None
    return {k: np.concatenate([p[k] for p in parts]) for k in parts[0]}


def _reads(step: Step, coords: dict[str, int]) -> bool:
    return coords["pp"] == step.plan.ends[0] and coords["tp"] == coords["cp"] == 0


def _documents(
    fault: f.DataSkew, index: int, step: Step, number: int, dp: int, at: int, seq_length: int, seed: int
) -> Columns:
    m, n = step.plan.schedule.num_microbatches, fault.documents
    if fault.hits(number):
        lengths = document_lengths(fault, Work(step, number, seed, np.empty(0), np.empty(0), []), index)[dp]
    else:
        lengths = np.full((m, n), 1.0 / n)
    lengths = lengths * seq_length
    mb = np.concatenate([np.arange(m), np.repeat(np.arange(m), n)])
    name = np.concatenate([np.full(m, "tokens", object), np.full(m * n, "document_tokens", object)])
    position = np.concatenate([np.zeros(m, int), np.tile(np.arange(n), m)])
    return _metrics(number, at, name, mb, position, np.concatenate([lengths.sum(axis=1), lengths.ravel()]))


def _experts(fault: f.MoeImbalance, step: Step, number: int, ep_rank: int, at: int, seq_length: int) -> Columns:
    tokens = float(seq_length * step.plan.schedule.num_microbatches)
    hot = fault.hits(number) and ep_rank == fault.ep_rank
    value = np.array([tokens * (fault.factor if hot else 1.0)])
    return _metrics(number, at, np.array(["expert_tokens"], object), np.array([-1]), np.array([ep_rank]), value)


def _metrics(number: int, at: int, name: Any, microbatch: Any, position: Any, value: Floats) -> Columns:
    spec, n = TABLES["metrics"], len(value)
    have = {"time_ns": np.full(n, at), "name": name, "step": np.full(n, number), "chunk": np.full(n, -1)}
    have |= {"microbatch": microbatch, "layer": np.full(n, -1), "index": position, "value": value}
    return {c: np.asarray(have[c], spec.numpy_dtype(c)) for c in spec.columns}
