"""make_run(): a run directory with known content, written in no time, for tests and benchmarks of readers and analyses."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mappnb.joining import RunWriter
from mappnb.layout import Layout
from mappnb.table_specs import TABLES, Columns
from mappnb.testing.synthetic import SyntheticStep, group_id

__all__ = ["make_run"]


def make_run(
    run_dir: str | os.PathLike[str],
    *,
    layout: Layout | None = None,
    num_steps: int = 3,
    num_microbatches: int = 4,
    num_layers: int = 2,
    forward_s: float = 0.010,
    p2p_s: float = 0.001,
    slow: Mapping[int, float] | None = None,
    clock_offset_ns: Mapping[int, int] | None = None,
    num_hosts: int = 1,
    ended: bool = True,
    segment_rows: int = 65536,
    ranks: list[int] | None = None,
    resume: bool = False,
    name: str = "model",
) -> Path:
    """Write a run whose every time is known: 1F1B, backward twice the forward, an all-reduce over dp, an optimizer step.

    Parameters
    ----------
    run_dir : path
        A new or empty folder.
    layout : Layout
        Parallel layout; a single rank by default.
    num_steps, num_microbatches, num_layers : int
        Steps; microbatches a step; layers a stage (each a span inside its forward and backward).
    forward_s, p2p_s : float
        Length in s of a forward step and of a transfer between stages.
    slow : mapping of int to float, optional
        Factor on the compute of single ranks.
    clock_offset_ns : mapping of int to int, optional
        What single ranks' monotonic clocks are ahead by; their anchors tell it.
    num_hosts : int
        Ranks are dealt to hosts in blocks.
    ended : bool
        False leaves the last segment open, as a running or killed job does.
    segment_rows : int
        Events per closed segment.
    ranks : list of int, optional
        Ranks that leave files; all by default.
    resume : bool
        Add an incarnation to the run that is there.
    name : str
        Name of the layer spans, for tests of escaping.

    Returns
    -------
    Path
        The run directory.
    """
    layout = layout or Layout()
    step = SyntheticStep(
        layout,
        num_microbatches=num_microbatches,
        num_layers=num_layers,
        forward_s=forward_s,
        p2p_s=p2p_s,
        slow=slow or {},
    )
    launch = {"id": os.urandom(8).hex(), **({"job": "synthetic"} if resume else {})}
    for rank in ranks if ranks is not None else range(layout.world_size):
        run = RunWriter.join(run_dir, rank=rank, world_size=layout.world_size, launch=launch, resume=resume)
        shift = (clock_offset_ns or {}).get(rank, 0) + 10**9
        _write_rank(
            run,
            step,
            num_steps,
            shift,
            host=rank * num_hosts // layout.world_size,
            ended=ended,
            rows=segment_rows,
            name=name,
        )
    return Path(run_dir)


def _write_rank(
    run: RunWriter, step: SyntheticStep, num_steps: int, shift: int, *, host: int, ended: bool, rows: int, name: str
) -> None:
    sites, columns = step.columns(run.rank, name=name)
    table = run.table("events", site=lambda i: sites[i], max_rows=rows, max_age_s=1e9)
    every = _tiled(columns, num_steps, step.length_ns, shift)
    for first in range(0, len(every["site"]), rows):
        table.append(
            {k: v[first : first + rows] for k, v in every.items()}, meta={"now_ns": shift + num_steps * step.length_ns}
        )
    run.table("steps", max_age_s=1e9).append(
        _steps(step, num_steps, shift, last_stage=step.layout.coords(run.rank)["pp"] == step.layout.pp - 1)
    )
    run.write_rank(_facts(run, step, shift, host=host, ended=ended))
    if ended:
        run.close()
    else:
        run.abandon()


def _tiled(columns: Columns, num_steps: int, length_ns: int, shift: int) -> Columns:
    n = len(columns["site"])
    out = {k: np.tile(v, num_steps) for k, v in columns.items()}
    number = np.repeat(np.arange(num_steps), n)
    out["step"] = number.astype(np.int32)
    out["start_ns"] = out["start_ns"] + number * length_ns + shift
    for group in np.unique(columns["group"][columns["group"] >= 0]):
        for peer in np.unique(columns["peer"][columns["group"] == group]):
            for site in np.unique(columns["site"][(columns["group"] == group) & (columns["peer"] == peer)]):
                mine = (out["group"] == group) & (out["peer"] == peer) & (out["site"] == site)
                per_step = int(mine.sum()) // max(num_steps, 1)
                out["seq"][mine] += number[mine] * per_step
    return out


def _steps(step: SyntheticStep, num_steps: int, shift: int, *, last_stage: bool) -> Columns:
    number = np.arange(num_steps)
    start = number * step.length_ns + shift
    values: Columns = {"step": number.astype(np.int32), "start_ns": start, "end_ns": start + step.work_ns}
    values["loss"] = np.where(last_stage, 5.0 / (1 + number), np.nan)
    values["tokens"] = np.full(num_steps, 64.0 * step.num_microbatches)
    for name in TABLES["steps"].columns:
        values.setdefault(name, np.full(num_steps, np.nan))
    return values


def _facts(run: RunWriter, step: SyntheticStep, shift: int, *, host: int, ended: bool) -> dict[str, Any]:
    layout = step.layout
    groups = {
        str(group_id(axis, members)): {
            "ranks": list(members),
            "backend": "gloo",
            "desc": axis,
            "name": axis,
            "ordinal": 0,
        }
        for axis in ("dp", "pp")
        for members in layout.groups(axis)
        if run.rank in members
    }
    return {
        "host": f"host{host}",
        "device": "cpu",
        "plan": "synthetic",
        "layout": layout.to_dict(),
        "coords": layout.coords(run.rank),
        "groups": groups,
        "degraded": None,
        "model": {"flops_per_token": 1e6},
        "peak_flops": 1e12,
        "clock": {"boot_id": f"boot{host}-{shift}", "anchors": [[run.created_wall_ns + 10**9, shift, 100]]},
        **({"ended": {"reason": "finished", "wall_ns": run.created_wall_ns}} if ended else {}),
    }
