"""Attach, window queries and import: 64 ranks × 200,000 events.

python tests/bench/bench_reading.py [--keep FOLDER]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mappnb
from mappnb.layout import Layout
from mappnb.testing.runs import make_run

LAYERS, MICROBATCHES, EVENTS = 6, 16, 200_000


def timed(what: str, call: Callable[[], Any], *, repeat: int = 15) -> Any:
    """Print wall and CPU ms: of the first call, and the median and least of the repeats."""
    walls, cpus = [], []
    for _ in range(repeat):
        wall, cpu = time.perf_counter(), time.process_time()
        result = call()
        walls.append(1e3 * (time.perf_counter() - wall))
        cpus.append(1e3 * (time.process_time() - cpu))
    middle = sorted(walls)[len(walls) // 2]
    print(
        f"{what:48} first {walls[0]:7.1f}  median {middle:7.1f}  least {min(walls):7.1f}  (CPU least {min(cpus):7.1f}) ms"
    )
    return result


def import_costs(codes: list[str], *, rounds: int = 9) -> list[float]:
    """Least CPU seconds of fresh interpreters, the codes taking turns."""
    least = [float("inf")] * len(codes)
    for _ in range(rounds):
        for i, code in enumerate(codes):
            probe = [sys.executable, "-c", f"import time; {code}; print(time.process_time())"]
            least[i] = min(least[i], float(subprocess.run(probe, capture_output=True, text=True, check=True).stdout))
    return least


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keep", help="make the run here, or use the one that is there")
    args = parser.parse_args()
    readers = "import numpy, pandas, xarray"
    codes = [
        readers,
        f"{readers}, mappnb",
        f"{readers}, mappnb; mappnb.attach; mappnb.analysis",
        "pass",
        "import mappnb; mappnb.record",
    ]
    base, plain, reading, nothing, recording = import_costs(codes)
    print(f"{'import mappnb':48} {plain - base:.3f} s CPU above numpy + pandas + xarray ({base:.2f} s)")
    print(f"{'... and attach, analysis':48} {reading - base:.3f} s CPU above the same")
    print(f"{'import mappnb; mappnb.record, in the job':48} {recording - nothing:.3f} s CPU above a bare interpreter")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(args.keep or folder) / "run"
        if not path.exists():
            per_step = MICROBATCHES * (2 + 2 * LAYERS + 3) + 4
            make_run(
                path,
                layout=Layout(pp=8, dp=8),
                num_microbatches=MICROBATCHES,
                num_layers=LAYERS,
                num_steps=EVENTS // per_step,
            )
        run = timed("attach", lambda: mappnb.attach(path))
        print(f"  {run.events.sizes['event']:,} events, {run.store.size_bytes() / 1e6:.0f} MB")
        timed(
            "attach and first window, 64 ranks, 0.1 s",
            lambda: mappnb.attach(path).sel(time=slice(50.0, 50.1)),
            repeat=5,
        )
        window = timed("window, 64 ranks, 0.1 s", lambda: run.sel(time=slice(50.0, 50.1)))
        print(f"  {window.sizes['event']:,} events")
        timed("window, 16 ranks, 0.1 s", lambda: run.sel(time=slice(50.0, 50.1), rank=range(16)))
        timed("window, 1 rank, 1 s", lambda: run.sel(time=slice(50.0, 51.0), rank=3))
        whole = timed("one step, 64 ranks", lambda: run.sel(step=300))
        print(f"  {whole.sizes['event']:,} events")
        timed("breakdown of one step, 64 ranks", lambda: mappnb.analysis.breakdown(whole), repeat=5)
        timed("steps table", lambda: mappnb.attach(path).steps, repeat=5)


if __name__ == "__main__":
    main()
