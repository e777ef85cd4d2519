"""What recording costs a training step, in CPU time: amplified A/B with a confidence interval.

Many recordings are nested in one process, so that their cost stands out of the machine's noise; blocks of steps with and without
them alternate, and each block is compared with the mean of its neighbours. The difference over the number of recordings is the cost
of one, rather an upper estimate, since nested recordings wrap each other's hooks. The writer thread's work counts: what the block
recorded is flushed inside the timed part.

The cost of recording a step does not depend on what the step computes, but on the number of its events. ``--hidden 32 --sequence 16``
records the same events of a step that takes a tenth of the time: one recording then stands out by itself (``--sessions 1``), and
nothing is nested. What the writer thread does each second is in it for the time that the small step takes.

    OMP_NUM_THREADS=1 python tests/bench/bench_overhead.py [--plan default] [--sessions 10] [--blocks 13]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from mappnb.capture import marks, session, signals
from mappnb.testing.gpt_settings import TrainSettings
from mappnb.testing.gpt_train import run_training

WARM_UP = 3


class Amplifier:
    """Turns recordings on and off between blocks of steps, and keeps the CPU time of each block."""

    def __init__(self, *, plan: str, num_sessions: int, block: int) -> None:
        self.plan, self.num_sessions, self.block = plan, num_sessions, block
        self.folder = tempfile.mkdtemp(prefix="mappnb-bench-")
        self.sessions: list[session.Session] = []
        self.blocks: list[tuple[bool, float, float]] = []  # (on, CPU s per step, wall s per step)
        self.events_per_step = 0.0
        self._at = (0.0, 0.0)
        self._recorded = 0

    def __call__(self, report) -> None:
        place = report.step % self.block
        if (
            place == WARM_UP - 1
        ):  # the first steps of a block warm up: hooks find the model, the run directory is joined
            self._recorded = self._count()
            for one in self.sessions:
                one.flush()
            self._at = (time.process_time(), time.perf_counter())
        elif place == self.block - 1:
            steps = self.block - WARM_UP
            if self.sessions:
                self.events_per_step = (self._count() - self._recorded) / steps
            for one in self.sessions:
                one.flush()
            cpu, wall = time.process_time() - self._at[0], time.perf_counter() - self._at[1]
            self.blocks.append((bool(self.sessions), cpu / steps, wall / steps))
            self._toggle()

    def _count(self) -> int:
        return self.sessions[0].recorder.stats()["recorded"] if self.sessions else 0

    def _toggle(self) -> None:
        if self.sessions:
            for one in reversed(self.sessions):
                one.stop()
            self.sessions = []
            shutil.rmtree(self.folder, ignore_errors=True)
            return
        for i in range(self.num_sessions):
            self.sessions.append(session.record(f"{self.folder}/{len(self.blocks)}-{i}", plan=self.plan).start())


def estimate(blocks: list[tuple[bool, float, float]], num_sessions: int) -> dict[str, float]:
    """Share of a step that one recording costs, with a bootstrap 90 % interval over blocks."""
    diffs, base = [], []
    for i in range(1, len(blocks) - 1):
        if blocks[i][0] and not blocks[i - 1][0] and not blocks[i + 1][0]:
            off = (blocks[i - 1][1] + blocks[i + 1][1]) / 2
            diffs.append((blocks[i][1] - off) / num_sessions)
            base.append(off)
    d, rng = np.array(diffs), np.random.default_rng(0)
    boot = np.median(rng.choice(d, (4000, len(d))), axis=1)
    step = float(np.median(base))
    low, high = np.quantile(boot, [0.05, 0.95])
    return {
        "step_cpu_s": step,
        "cost_s": float(np.median(d)),
        "fraction": float(np.median(d)) / step,
        "low": float(low) / step,
        "high": float(high) / step,
        "pairs": len(d),
    }


def measure(*, plan: str, num_sessions: int, num_blocks: int, block: int, settings: TrainSettings) -> dict[str, float]:
    marks.enter = marks.leave = signals.watch = signals.unwatch = lambda *_: None  # several recordings in one process
    amplifier = Amplifier(plan=plan, num_sessions=num_sessions, block=block)
    try:
        run_training(settings, on_step=amplifier)
    finally:
        for one in reversed(amplifier.sessions):
            one.stop()
        shutil.rmtree(amplifier.folder, ignore_errors=True)
    out = estimate(amplifier.blocks, num_sessions)
    out["events_per_step"] = amplifier.events_per_step
    out["us_per_event"] = 1e6 * out["cost_s"] / max(amplifier.events_per_step, 1)
    out["fraction_of_half_second"] = out["cost_s"] / 0.5
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", default="default")
    parser.add_argument("--sessions", type=int, default=10)
    parser.add_argument("--blocks", type=int, default=13)
    parser.add_argument("--block", type=int, default=11)
    parser.add_argument("--global-batch", type=int, default=4)
    parser.add_argument(
        "--hidden", type=int, default=256, help="a small model costs as much to record and far less to compute"
    )
    parser.add_argument("--sequence", type=int, default=128)
    args = parser.parse_args()
    settings = TrainSettings(
        layers=8,
        hidden=args.hidden,
        sequence_length=args.sequence,
        global_batch=args.global_batch,
        steps=args.blocks * args.block,
        device="cpu",
    )
    out = measure(
        plan=args.plan, num_sessions=args.sessions, num_blocks=args.blocks, block=args.block, settings=settings
    )
    print(json.dumps(out))
    print(
        f"plan {args.plan}: {out['events_per_step']:.0f} events a step, {out['cost_s'] * 1e3:.2f} ms CPU a step of "
        f"{out['step_cpu_s']:.2f} s: "
        f"{out['fraction']:.2%} (90 % interval {out['low']:.2%} to {out['high']:.2%}, {out['pairs']} pairs), "
        f"{out['us_per_event']:.1f} us an event; of a 0.5 s step {out['fraction_of_half_second']:.2%}"
    )


if __name__ == "__main__":
    main()
