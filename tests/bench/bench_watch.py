"""What watching a live run of 64 ranks costs: CPU seconds of the watcher over the seconds that it watched.

python tests/bench/bench_watch.py [--ranks 64] [--minutes 1] [--step-s 1.0]

The job is played: the rows of a generated run are written step by step, as open streams, one step each ``--step-s``. The watcher is
``mappnb watch --json`` in a process of its own, with its default interval; its CPU time is that of the process from the first look on.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))
from live_run import LiveRun

from mappnb import Layout
from mappnb.testing import SlowRank, generate_run


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--step-s", type=float, default=1.0)
    parser.add_argument("--fault", action="store_true", help="a rank is slow from the middle on")
    args = parser.parse_args()
    steps = int(args.minutes * 60 / args.step_s) + 3
    with tempfile.TemporaryDirectory() as folder:
        fault = [SlowRank(rank=17, factor=1.5, first_step=steps // 2)] if args.fault else []
        generate_run(
            f"{folder}/run", layout=Layout(tp=4, pp=4, dp=args.ranks // 16), num_steps=steps, seed=1, faults=fault
        )
        live = LiveRun(f"{folder}/run", f"{folder}/live", closed_every=10**9)
        live.write(0)
        print(json.dumps(watched(live, steps, args.step_s)))
        LiveRun.abandon_all()
    return 0


def watched(live: LiveRun, steps: int, step_s: float) -> dict[str, float]:
    """Play the job beside a watcher; return what the watcher took."""
    job = subprocess.Popen(
        [sys.executable, "-m", "mappnb.cli", "watch", str(live.path), "--json"], stdout=subprocess.PIPE, text=True
    )
    lines: list[dict] = []
    reader = threading.Thread(target=lambda: lines.extend(json.loads(x) for x in job.stdout))
    reader.start()
    while not lines:
        time.sleep(0.05)
    process = psutil.Process(job.pid)
    time.sleep(2)  # the first look
    before, began = sum(process.cpu_times()[:2]), time.monotonic()
    for step in range(1, steps - 2):
        live.write(step)
        time.sleep(max(0.0, began + step * step_s - time.monotonic()))
    cpu_s, wall_s = sum(process.cpu_times()[:2]) - before, time.monotonic() - began
    live.end()
    job.wait(timeout=120)
    reader.join()
    end = lines[-1]
    raised = [x["step"] for x in lines if x["event"] == "raised"]
    return {
        "ranks": len(live.ranks), "wall_s": round(wall_s, 1), "cpu_s": round(cpu_s, 3), "share_of_core": round(cpu_s / wall_s, 4),
        "in_looks_s": round(end["cpu_s"], 3), "looks": end["looks"], "steps": end["num_steps"], "raised_at": raised, "onset": steps // 2,
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
