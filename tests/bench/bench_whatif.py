"""What a what-if costs, CPU s: ``python bench_whatif.py [folder with the StragglerAnalysis traces]``."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import mappnb
from mappnb import Layout, analysis
from mappnb.testing import SlowRank, generate_run

TRACES = Path(__file__).parents[3] / "shared" / "data" / "straggler_analysis"
CASES = {
    "64 ranks, 10 steps": {"layout": Layout(tp=2, dp=4, pp=8), "num_microbatches": 16, "num_steps": 10},
    "1024 ranks, 1 step": {"layout": Layout(tp=8, dp=16, pp=8), "num_microbatches": 16, "num_steps": 1},
}


def spent(function: Callable[[], object]) -> tuple[float, object]:
    """CPU s and result."""
    begin = time.process_time()
    out = function()
    return time.process_time() - begin, out


def report(name: str, run: mappnb.Run) -> None:
    """One line: events, the whole analysis, one more fix."""
    events = run.events.sizes["event"]
    whole, found = spent(lambda: analysis.what_if(run))
    few, _ = spent(lambda: analysis.what_if(run, by=(), fix={"rank": 5}))
    several, _ = spent(lambda: analysis.price_fixes(run, fixes=[{"rank": r} for r in range(10)]))
    print(
        f"| {name} | {events} | {found.sizes['step']} | {whole:.2f} | {few:.2f} | {several:.2f} | {float(found.replay_error):.1e} |"
    )


def main(folder: Path) -> None:
    """Print a table."""
    print(
        "| run | events | steps taken | what_if, all attributions | one fix | ten fixes (price_fixes) | replay error |"
    )
    print("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as there:
        for name in ("AR", "SE") if folder.is_dir() else ():
            mappnb.import_trace(folder / f"trace-{name}.parquet", f"{there}/{name}")
            report(name, mappnb.attach(f"{there}/{name}"))
        for i, (name, options) in enumerate(CASES.items()):
            generate_run(f"{there}/{i}", faults=[SlowRank(rank=5, factor=1.3)], seed=1, **options)
            report(name, mappnb.attach(f"{there}/{i}"))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else TRACES)
