"""How far simulated and executed schedules differ: torch's runtime on four gloo ranks of this host, with work that sleeps.

Replay: each step's own durations through our engine. Prediction: costs fitted on one schedule's steps, the step of another.

    OMP_NUM_THREADS=1 python tests/bench/bench_executed_schedules.py [--ordinary] [gpipe 1f1b ...]

The ranks ask for real-time scheduling, so that they wake on time beside other work; ``--ordinary`` leaves that out.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "sched")]


def main() -> None:
    import executed
    import numpy as np

    ordinary = "--ordinary" in sys.argv
    names = [n for n in sys.argv[1:] if n != "--ordinary"] or executed.NAMES
    with tempfile.TemporaryDirectory(prefix="mappnb-bench-") as folder:
        runs = [executed.execute(name, folder, priority=not ordinary) for name in names]
        print(f"work of a rank for one microbatch, s: {executed.WORK_S}; {executed.MICROBATCHES} microbatches")
        print("\nreplay          step     latency  launch   median error  largest")
        for run in runs:
            error = executed.replay_error(run).error_fraction.abs()
            costs, step = (
                executed.fit_costs(run.events, steps=slice(1, executed.STEPS)),
                np.median(executed.spans_s(run)),
            )
            link = f"{costs.p2p_s * 1e3:5.2f} ms {costs.launch_s * 1e3:5.2f} ms"
            print(f"{run.name:15} {step:.4f} s {link}  {error.median():9.2%} {error.max():9.2%}")
        print(
            "\nprediction: costs of the row's steps, step of the column\n"
            + " " * 15
            + "".join(f"{n:>15}" for n in names)
        )
        off = []
        for source in runs:
            errors = [p / m - 1 for p, m in (executed.prediction(source, target) for target in runs)]
            off += [abs(e) for e, target in zip(errors, runs, strict=True) if target is not source]
            print(f"{source.name:15}" + "".join(f"{e:>+15.2%}" for e in errors))
        if off:
            print(f"another schedule: median {np.median(off):.2%}, largest {max(off):.2%}")


if __name__ == "__main__":
    main()
