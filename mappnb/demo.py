"""``mappnb demo``: train a real Megatron-core GPT on several processes, record it, attach, and report."""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from mappnb.capture.activations.plan import parse_activations
from mappnb.errors import DependencyError, LayoutError, RunExistsError
from mappnb.report import add_findings, next_steps, summary, verdict_lines, write_report
from mappnb.run import Run, attach
from mappnb.terms import BREAKDOWN
from mappnb.testing.gpt_settings import StepReport, TrainSettings
from mappnb.testing.launcher import launch

__all__ = ["Progress", "demo", "terminal_report"]

CONTENT = {"run.json", "report.html"}


def demo(args: argparse.Namespace) -> int:
    """Run the demo; returns the exit status. The arguments are those of ``mappnb demo --help``."""
    began = time.monotonic()
    _need_torch()
    world_size = args.tp * args.pp * args.dp
    run_dir = Path(args.run_dir).absolute()
    settings = _settings(args, world_size, str(run_dir))
    settings.check(world_size)
    _make_room(run_dir, replace=args.replace)
    print(
        f"mappnb demo: a GPT of {settings.layers} layers on {_layout_text(args)}, {settings.steps} steps, recording into {run_dir}"
    )
    stopped = False
    with Progress(settings.steps, sys.stderr) as progress:
        try:
            result = launch(settings, world_size=world_size, on_line=progress)
            stopped = len(result.losses) < settings.steps
        except KeyboardInterrupt:
            stopped = True
    if stopped:
        print("\nstopped; all ranks have ended", file=sys.stderr)
    run = attach(run_dir)
    if not run.steps.sizes["step"]:
        print(f"no step was finished; what was recorded is in {run_dir}")
        return 130
    facts = add_findings(run, summary(run))
    print(terminal_report(run, facts))
    print(f"report    {write_report(run, facts=facts)}")
    print(f"took      {time.monotonic() - began:.0f} s\n\nopen next, in a notebook (make lab):\n")
    print(_indented(next_steps(str(run_dir), facts["step"])))
    return 130 if stopped else 0


def _need_torch() -> None:
    missing = [m for m in ("torch", "megatron") if importlib.util.find_spec(m) is None]
    if missing:
        raise DependencyError(
            f"the demo trains with Megatron-core, and {' and '.join(missing)} is missing: pip install 'mappnb[megatron]'"
        )


def _settings(args: argparse.Namespace, world_size: int, run_dir: str) -> TrainSettings:
    for name in ("tp", "pp", "dp", "vpp", "steps"):
        if getattr(args, name) < 1:
            raise LayoutError(f"mappnb demo: --{name} is {getattr(args, name)}; expected at least 1")
    inside = parse_activations(args.activations)
    per_replica = max(4, 2 * args.pp)  # microbatches: enough that the pipeline fills
    return TrainSettings(
        tp=args.tp,
        pp=args.pp,
        vpp=args.vpp,
        sequence_parallel=args.sequence_parallel,
        layers=max(4, args.pp * args.vpp),
        heads=max(4, args.tp),
        hidden=128 if args.tp <= 4 else 32 * args.tp,
        global_batch=per_replica * args.dp,
        steps=args.steps,
        slow_rank=args.slow_rank,
        slow_ms=args.slow_ms,
        slow_link=args.slow_link,
        plan=args.plan,
        run_dir=run_dir,
        record_options={
            "activations": None if inside is None else {**inside.to_dict(), "vocabulary": "bytes"},
            "peak_flops": cpu_peak_flops() * min(1.0, (os.cpu_count() or 1) / world_size),
        },
    )


def cpu_peak_flops(seconds: float = 0.2) -> float:
    """Return the FLOP/s of a float32 matrix product of this process, best of a few: the demo's stand-in for a device's peak."""
    a = np.ones((384, 384), np.float32)
    best, end = np.inf, time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        a @ a
        best = min(best, time.perf_counter() - start)
    return float(2 * 384**3 / best)


def _layout_text(args: argparse.Namespace) -> str:
    sizes = [f"{n.upper()} {getattr(args, n)}" for n in ("tp", "pp", "dp") if getattr(args, n) > 1]
    chunks = [f"{args.vpp} chunks a rank"] if args.vpp > 1 else []
    world = args.tp * args.pp * args.dp
    return f"{world} process{'es' if world > 1 else ''}" + (
        f" ({' × '.join(sizes + chunks)})" if sizes or chunks else ""
    )


def _make_room(run_dir: Path, *, replace: bool) -> None:
    """Refuse a folder that holds something; with ``replace`` remove an earlier run, and nothing but a run."""
    if not run_dir.exists() or not any(run_dir.iterdir()):
        return
    strangers = [p.name for p in run_dir.iterdir() if p.name not in CONTENT and not p.name.startswith("inc=")]
    if strangers or not (run_dir / "run.json").exists():
        raise RunExistsError(
            f"{run_dir}: not empty and not (only) a run (holds {', '.join(strangers[:3])}); choose another --run-dir"
        )
    if not replace:
        raise RunExistsError(f"{run_dir}: holds a run already; choose another --run-dir, or add --replace to remove it")
    shutil.rmtree(run_dir)


class Progress:
    """One line of progress: a bar on a terminal, a plain line every few steps elsewhere."""

    def __init__(self, steps: int, out: TextIO) -> None:
        self.steps, self.out = steps, out
        self.terminal = out.isatty()
        self._every = max(1, steps // 5)
        self._began = time.monotonic()

    def __enter__(self) -> Progress:
        if self.terminal:
            self.out.write("starting processes (importing torch and megatron-core) ...\r")
            self.out.flush()
        return self

    def __exit__(self, *_: object) -> None:
        if self.terminal:
            self.out.write("\n")

    def __call__(self, report: StepReport) -> None:
        """Show one step."""
        done = report.step + 1
        text = f"step {done}/{self.steps}  loss {report.loss:.4f}  {report.tokens_per_s:,.0f} tokens/s  {report.step_s * 1e3:.0f} ms"
        if self.terminal:
            filled = round(24 * done / self.steps)
            self.out.write(f"\r{'█' * filled}{'░' * (24 - filled)}  {text}   ")
        elif done % self._every == 0 or done in (1, self.steps):
            self.out.write(text + "\n")
        self.out.flush()


def terminal_report(run: Run, facts: dict[str, Any]) -> str:
    """Return the report for a terminal from :func:`mappnb.report.summary`: step time, bubble, breakdown per rank."""
    stats: Any = facts["stats"]
    bubble = facts["bubble"].median() if facts["bubble"].size else np.nan
    lines = [
        "",
        f"step      {stats.step_s_median * 1e3:.0f} ms median (p10 {stats.step_s_p10 * 1e3:.0f}, p90 {stats.step_s_p90 * 1e3:.0f}), "
        f"slowest {stats.step_s_max * 1e3:.0f} ms at step {int(stats.slowest_step)}",
        f"speed     {stats.tokens_per_s:,.0f} tokens/s"
        + (f", MFU {stats.mfu:.2%} of this machine's matrix product" if np.isfinite(stats.mfu) else ""),
        f"loss      {stats.loss_first:.4f} -> {stats.loss_last:.4f} over {int(stats.num_steps)} steps",
        f"bubble    {float(bubble):.0%} of the pipeline's makespan, median of ranks and steps",
        "",
        "where a step goes, ms (mean over steps)",
        f"{'':24}" + "".join(f"{c.replace('_', ' '):>11}" for c in BREAKDOWN),
    ]
    mean = facts["breakdown"].seconds.mean("step") * 1e3
    lines += [
        f"{facts['labels'][int(r)]:24}" + "".join(f"{v:11.1f}" for v in mean.sel(rank=r).values)
        for r in mean["rank"].values
    ]
    meta = run.meta
    lines += ["", f"events    {run.events.sizes['event']:,} on {meta['world_size']} ranks, {meta['dropped']} dropped"]
    lines += [f"degraded  rank {r}: {why}" for r, why in meta["degraded"].items()]
    lines += [f"verdict   {line}" for line in verdict_lines(facts)]
    return "\n".join(lines)


def _indented(text: str) -> str:
    return "".join(f"    {line}\n" for line in text.splitlines())
