"""Events of collectives with known clocks, and exit noise resampled from real traces: what alignment is tested on."""

from __future__ import annotations

import io
import json
import tarfile
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import xarray as xr

from mappnb.schema import EVENTS, missing

DATA = Path(__file__).resolve().parents[2].parent / "shared" / "data"


@dataclass
class Truth:
    """``raw = t (1 + drift) + offset + steps``, ns, per rank."""

    offset_ns: np.ndarray
    drift_ppm: np.ndarray
    steps: list[tuple[int, float, float]] = field(default_factory=list)  # rank, at ns, by ns

    def raw(self, rank: np.ndarray, t: np.ndarray) -> np.ndarray:
        out = t * (1 + self.drift_ppm[rank] * 1e-6) + self.offset_ns[rank]
        for r, at, by in self.steps:
            out = out + np.where((rank == r) & (t >= at), by, 0.0)
        return out

    def true(self, rank: int, raw: np.ndarray) -> np.ndarray:
        shown = raw - self.offset_ns[rank]
        rate = 1 + self.drift_ppm[rank] * 1e-6
        before = np.zeros_like(shown, dtype=float)
        for r, at, by in sorted(self.steps, key=lambda s: s[1]):
            if r == rank:
                before = before + np.where(shown - before >= at * rate + by, by, 0.0)
        return (shown - before) / rate


def dataset(**columns) -> xr.Dataset:
    """Events given by what differs from "not applicable"."""
    n = len(columns["rank"])
    defaults = {"incarnation": 0, "step": -1, "thread": 0, "depth": 0, "phase": "none", "flags": 0}
    data = {}
    for name, var in EVENTS.items():
        value = columns.get(name, defaults.get(name, missing(var)))
        if var.dtype is str and isinstance(value, str):
            array = np.full(n, value, object)
        else:
            array = np.array(np.broadcast_to(value, (n,)), var.numpy_dtype)
        data[name] = xr.Variable("event", array, fastpath=True)
    return xr.Dataset(data)


def collectives(
    rng,
    *,
    num_ranks=64,
    num_calls=1000,
    groups=None,
    noise=None,
    outliers=0.05,
    outlier_ns=1e6,
    offset_ns=5e7,
    drift_ppm=100.0,
    steps=(),
    period_ns=5e7,
    transfer_ns=2e5,
    wait_ns=2e6,
    ops=("all_reduce",),
):
    """Return (events, truth, true times of ends, noise of ends). ``noise(rng, shape)`` gives exit noise in ns, >= 0."""
    truth = Truth(rng.uniform(-1, 1, num_ranks) * offset_ns, rng.uniform(-1, 1, num_ranks) * drift_ppm, list(steps))
    groups = groups or [tuple(range(num_ranks))]
    noise = noise or (lambda rng, shape: rng.exponential(3e3, shape))
    at = np.cumsum(rng.gamma(2, period_ns / 2, num_calls)) + 1e9
    ranks, group, seq, start, end, op, noises = [], [], [], [], [], [], []
    for g, members in enumerate(groups):
        m = np.array(members)
        arrive = at[:, None] + rng.gamma(2, wait_ns / 2, (num_calls, len(m))) + g * 1e5
        exits = noise(rng, (num_calls, len(m)))
        late = rng.random(exits.shape) < outliers
        bad = exits + np.where(late, rng.exponential(outlier_ns, exits.shape), 0.0)
        done = arrive.max(axis=1, keepdims=True) + transfer_ns * rng.lognormal(0, 0.2, (num_calls, 1)) + bad
        who = np.broadcast_to(m, done.shape)
        start.append(truth.raw(who, arrive).ravel())
        end.append(truth.raw(who, done).ravel())
        ranks.append(who.ravel())
        group.append(np.full(done.size, 100 + g))
        seq.append(np.repeat(np.arange(num_calls), len(m)))
        op.append(np.repeat(np.array(ops, object)[np.arange(num_calls) % len(ops)], len(m)))
        noises.append(exits)
    begin = np.rint(np.concatenate(start)).astype(np.int64)
    events = dataset(
        rank=np.concatenate(ranks), group=np.concatenate(group), seq=np.concatenate(seq), start_ns=begin, raw_start_ns=begin,
        duration_ns=np.rint(np.concatenate(end)).astype(np.int64) - begin, category="collective", op=np.concatenate(op), bytes=1024,
    )  # fmt: skip
    return events, truth, at, noises


def errors(events, alignment, truth, times=(0.0, 0.25, 0.5, 0.75, 1.0)):
    """Error of the aligned clocks against the reference's, ns, (rank, time): difference from the truth, rate of the reference removed."""
    from mappnb.analysis import clock_model

    model = clock_model(alignment)
    ranks = alignment["rank"].values
    ref = int(alignment.attrs["reference_rank"])
    first, last = events.start_ns.values.min() + 6e7, (events.start_ns + events.duration_ns).values.max() - 6e7
    out = np.empty((len(ranks), len(times)))
    for j, f in enumerate(times):
        t = first + f * (last - first)
        shown = {r: truth.raw(np.array([r]), np.array([t])) for r in {*ranks.tolist(), ref}}
        run = {r: v + model.shift((0, int(r)), np.rint(v).astype(np.int64)) for r, v in shown.items()}
        clean = Truth(truth.offset_ns, truth.drift_ppm).raw(
            np.array([ref]), np.array([t])
        )  # what the reference would show without steps
        out[:, j] = [float((run[r] - clean)[0]) for r in ranks.tolist()]
    return out


def kineto_param():
    """Return {rank: list of (name, start us, duration us)} of the NCCL kernels in ../shared/data/param."""
    out = {}
    with tarfile.open(DATA / "param" / "dlrm_kineto.tar.gz") as archive:
        for member in archive.getmembers():
            if not member.isfile():
                continue
            content = json.load(io.TextIOWrapper(archive.extractfile(member), "utf-8"))
            kernels = [e for e in content["traceEvents"] if e.get("cat") == "kernel" and e["name"].startswith("nccl")]
            rows = sorted((e["ts"], e["dur"], e["name"]) for e in kernels)
            out[content["distributedInfo"]["rank"]] = rows
    return out


def kineto_param_events():
    """Return the NCCL kernels of ../shared/data/param as events: one group, no sequence numbers; times from the first start on."""
    rows = [(r, ts, dur, name) for r, kernels in kineto_param().items() for ts, dur, name in kernels]
    rank, ts, dur, name = (np.array(c) for c in zip(*rows, strict=True))
    op = np.where(np.char.find(name, "AllReduce") >= 0, "all_reduce", "all_to_all").astype(object)
    start = (ts - ts.min()) * 1000
    return dataset(
        rank=rank, category="collective", op=op, group=1, start_ns=start, raw_start_ns=start, duration_ns=dur * 1000
    )


def exit_noise(name):
    """Return ends minus the first end of their collective, ns, as the traces have it: "param", "AR" or "SE"."""
    if name == "param":
        rows = kineto_param()
        ends = np.array([[ts + dur for ts, dur, _ in rows[r]] for r in sorted(rows)], np.int64).T
        ends = (ends - ends.min()) * 1e3
        return (ends - ends.min(axis=1, keepdims=True)).ravel()
    import pandas as pd

    trace = pd.read_parquet(DATA / "straggler_analysis" / f"trace-{name}.parquet")
    wanted = trace[trace.optype.isin(["grads-reduce-scatter", "params-all-gather"])]
    end = wanted.start_ts.astype(float) + wanted.duration.astype(float)
    keys = [wanted[c] for c in ("step", "stage", "optype", "mc", "seq_id")]
    first = end.groupby(keys, observed=True).transform("min")
    count = end.groupby(keys, observed=True).transform("count")
    return ((end - first) * 1e9)[count > 1].to_numpy()
