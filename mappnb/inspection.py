"""What ``mappnb info`` and ``mappnb check`` say of a run directory."""

from __future__ import annotations

import os

import numpy as np

from mappnb import analysis
from mappnb.activations import streams_of
from mappnb.display import bytes_text, layout_known
from mappnb.run import Run, attach
from mappnb.table_specs import TABLES
from mappnb.terms import Flag

__all__ = ["check_run", "info_text"]


def info_text(run_dir: str | os.PathLike[str]) -> str:
    """Return a few lines on what a run directory holds."""
    run = attach(run_dir)
    streams = _streams_text(run)  # first: what is missing there is told in meta
    meta, steps = run.meta, run.steps
    rows = run._reader("events").rows
    layout = run.layout if layout_known(run) else "not in the trace"
    lines = [
        f"run        {meta['run_id']}  ({meta['state']})",
        f"folder     {run.path}  ({bytes_text(run.store.size_bytes())}, format {meta['format_version']})",
        f"created    {meta['created']:%Y-%m-%d %H:%M:%S} UTC",
        f"layout     {layout}, {meta['world_size']} ranks on {len(meta['hosts'])} host(s): {', '.join(meta['hosts'][:4])}",
        f"steps      {steps.sizes['step']}"
        + (f" ({int(steps.step[0])} to {int(steps.step[-1])})" if steps.sizes["step"] else ""),
        f"events     {rows:,}",
        f"plan       {meta['plan']}",
    ]
    lines += [f"tensors    {text}" for text in streams]
    if meta["versions"]:
        lines.append("versions   " + ", ".join(f"{k} {v}" for k, v in meta["versions"].items()))
    lines += [
        f"restart    incarnation {i.number}: {len(i.ranks)} of {i.world_size} ranks"
        for i in run.incarnations
        if len(run.incarnations) > 1
    ]
    lines += [f"degraded   rank {r}: {why}" for r, why in meta["degraded"].items()]
    if meta["missing_ranks"]:
        lines.append(f"missing    ranks {', '.join(map(str, meta['missing_ranks'][:16]))}")
    lines += [f"skipped    {where}: {why}" for where, why in meta["problems"].items()]
    return "\n".join(lines)


def _streams_text(run: Run) -> list[str]:
    """Return a line for each stream of captured activations; the blocks are only looked at if there are any."""
    if not any(run.store.activation_ranks(i.number) for i in run.incarnations):
        return []
    return [
        f"{name}: {', '.join(map(str, list(ds.data_vars)[:8]))}{', ...' if len(ds.data_vars) > 8 else ''} "
        f"({', '.join(f'{d} {n}' for d, n in ds.sizes.items() if d in ('sample', 'step', 'point', 'layer', 'token'))})"
        for name, ds in streams_of(run.activations).items()
    ]


def _left_out(run: Run) -> list[str]:
    """Return what the capture of activations left out or could not do, by rank."""
    out = []
    for incarnation in run.incarnations:
        for rank, info in sorted(incarnation.ranks.items()):
            counters = info.get("activation_counters") or {}
            for word in ("dropped", "thinned"):
                lost = {k: n for k, n in (counters.get(word) or {}).items() if n}
                out += [f"rank {rank}: {n} tensors of activations {word} in stream {k}" for k, n in lost.items()]
            out += [f"rank {rank}: stream {k}: {why}" for k, why in (counters.get("missed") or {}).items()]
            if why := info.get("degraded_activations"):
                out.append(f"rank {rank}: capture of activations stopped: {why}")
    return out


def check_run(run_dir: str | os.PathLike[str]) -> list[str]:
    """Read every file of a run; return what is missing, damaged or inconsistent, an empty list if nothing is."""
    run = attach(run_dir)
    for table in TABLES:
        run._reader(table).verify()
    _streams_text(run)  # what is missing or damaged there is told among the problems
    meta = run.meta
    out = [f"{where}: {why}" for where, why in meta["problems"].items()]
    out += [f"rank {r}: recording stopped early: {why}" for r, why in meta["degraded"].items()]
    for incarnation in run.incarnations:
        if incarnation.missing_ranks:
            out.append(f"incarnation {incarnation.number}: ranks {incarnation.missing_ranks[:16]} left no file")
        unended = [r for r, i in incarnation.ranks.items() if not i.get("ended")]
        if unended and (meta["state"] != "recording" or incarnation.number < len(run.incarnations) - 1):
            out.append(f"incarnation {incarnation.number}: ranks {unended[:16]} did not end in good order (killed?)")
    if meta["dropped"]:
        out.append(f"{meta['dropped']} events were dropped by recorders under pressure")
    return out + _left_out(run) + _inconsistent(run)


def _inconsistent(run: Run) -> list[str]:
    events = run.sel()
    flags = events.flags.values
    out = []
    if events.sizes["event"] and int(events.duration_ns.min()) < 0:
        out.append(f"{int((events.duration_ns < 0).sum())} events have a negative duration")
    if repaired := int(((flags & Flag.REPAIRED) != 0).sum()):
        out.append(f"{repaired} spans had no end of their own (flag repaired)")
    if still := int(((flags & Flag.OPEN) != 0).sum()):
        out.append(f"{still} spans were open when the recording stopped (flag open)")
    calls = analysis.match(events)
    torn = np.flatnonzero(~calls.complete.values)
    if len(torn):
        first = calls.isel(call=int(torn[0]))
        out.append(
            f"{len(torn)} of {calls.sizes['call']} transfers are not complete on every member, the first: {first.op.item()} "
            f"seq {int(first.seq)} of group {int(first.group)} in step {int(first.step)}"
        )
    return out
