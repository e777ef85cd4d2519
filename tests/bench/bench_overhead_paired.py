"""What one recording costs a training step, in CPU time: recorded and unrecorded steps of one process, pair by pair.

One recording is paused and resumed between steps: of each pair of neighbours one step, drawn by lot, is recorded. The median of the
differences of the *training thread's* CPU time is what recording costs it. The writer thread's CPU time is read from its own clock,
per second. What remains of the hooks while the recording is paused is not in it (bench_overhead.py has that too, and is noisier).

The cost does not depend on what a step computes but on its events, so a small model tells it best: the noise is that of its short
step. ``--hidden 256 --sequence 128`` is the step of half a second for which the goals are set.

    OMP_NUM_THREADS=1 python tests/bench/bench_overhead_paired.py [--plan default] [--steps 400]
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import threading
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from mappnb.capture import session
from mappnb.testing.gpt_settings import TrainSettings
from mappnb.testing.gpt_train import run_training

START, FIRST = 2, 8  # the recording begins here; the first steps that count


class Pairs:
    """Pauses and resumes one recording between steps, and keeps the CPU time of each step."""

    def __init__(self, *, plan: str, num_steps: int, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        first = rng.random(num_steps // 2 + 1) < 0.5
        self.on = np.stack([first, ~first], 1).ravel()[:num_steps]
        self.folder = tempfile.mkdtemp(prefix="mappnb-bench-")
        self.recording = session.record(f"{self.folder}/run", plan=plan)
        self.cpu_s = np.full(num_steps, np.nan)
        self.events = 0.0
        self.writer_per_s = float("nan")
        self._at_s, self._writer_from = 0.0, (0.0, 0.0)

    def __call__(self, report) -> None:
        now, step, last = time.thread_time(), report.step, len(self.on) - 1
        if step == START:
            self.recording.start()
        if step >= FIRST:
            self.cpu_s[step] = now - self._at_s
        if step == FIRST:
            self._writer_from = self._writer_cpu(), time.perf_counter()
            self.events = self.recording.recorder.stats()["recorded"]
        if step == last:
            cpu, wall = self._writer_cpu() - self._writer_from[0], time.perf_counter() - self._writer_from[1]
            self.writer_per_s = cpu / wall
            self.events = (self.recording.recorder.stats()["recorded"] - self.events) / max(
                self.on[FIRST + 1 :].sum(), 1
            )
        if START <= step < last:
            self.recording.unpause() if self.on[step + 1] else self.recording.pause()
        self._at_s = time.thread_time()

    @staticmethod
    def _writer_cpu() -> float:
        writer = next(t for t in threading.enumerate() if t.name == "mappnb-writer")
        return time.clock_gettime(time.pthread_getcpuclockid(writer.ident))

    def estimate(self) -> dict[str, float]:
        """Median cost of a recorded step in the training thread, with a bootstrap 90 % interval."""
        pairs = self.cpu_s[FIRST:].reshape(-1, 2)
        recorded = self.on[FIRST:].reshape(-1, 2)
        differences = np.where(recorded[:, 0], pairs[:, 0] - pairs[:, 1], pairs[:, 1] - pairs[:, 0])
        boot = np.median(np.random.default_rng(0).choice(differences, (4000, len(differences))), axis=1)
        low, high = np.quantile(boot, [0.05, 0.95])
        step = float(np.median(pairs[~recorded]))
        return {"step": step, "cost": float(np.median(differences)), "low": low, "high": high, "pairs": len(pairs)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", default="default")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--hidden", type=int, default=32)
    parser.add_argument("--sequence", type=int, default=16)
    args = parser.parse_args()
    num_steps = args.steps + args.steps % 2
    pairs = Pairs(plan=args.plan, num_steps=num_steps)
    settings = TrainSettings(
        layers=8,
        hidden=args.hidden,
        sequence_length=args.sequence,
        global_batch=4,
        steps=num_steps,
        device="cpu",
    )
    try:
        run_training(settings, on_step=pairs)
    finally:
        pairs.recording.stop()
        shutil.rmtree(pairs.folder, ignore_errors=True)
    out = pairs.estimate()
    writer = pairs.writer_per_s
    print(
        f"plan {args.plan}: {pairs.events:.0f} events a step; training thread {out['cost'] * 1e3:.2f} ms CPU a step (90 % interval "
        f"{out['low'] * 1e3:.2f} to {out['high'] * 1e3:.2f}, {out['pairs']} pairs, step {out['step'] * 1e3:.0f} ms), "
        f"writer thread {writer * 1e3:.2f} ms a second"
    )
    share = [(v + 0.5 * writer) / 0.5 for v in (out["cost"], out["low"], out["high"])]
    print(f"of a step of 0.5 s: {share[0]:.2%} ({share[1]:.2%} to {share[2]:.2%})")


if __name__ == "__main__":
    main()
