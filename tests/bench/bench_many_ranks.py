"""attach, the ranks' files and the step table of a run of many ranks; each in a process of its own, files in the page cache.

python tests/bench/bench_many_ranks.py [--ranks 10240] [--rounds 5] [--keep FOLDER]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from mappnb.layout import Layout
from mappnb.testing import generate_run

PROBE = """
import sys, time
import mappnb, mappnb.analysis, pandas, xarray, pyarrow.parquet
begin = time.perf_counter(), time.process_time()
def lap():
    print(time.perf_counter() - begin[0], time.process_time() - begin[1])
run = mappnb.attach(sys.argv[1])
lap()
{question}
lap()
"""
QUESTIONS = {"run.meta": "run.meta", "run.layout": "run.layout", "run.steps": "run.steps", "run.events": "run.events"}


def probe(path: Path, question: str) -> list[float]:
    """Wall and CPU s of attach, and of attach and a question together."""
    made = subprocess.run(
        [sys.executable, "-c", PROBE.format(question=question), path], capture_output=True, text=True, check=True
    )
    return [float(v) for v in made.stdout.split()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=10240)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--keep", help="make the run here, or use the one that is there")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(args.keep or folder) / f"run{args.ranks}"
        if not path.exists():
            layout = Layout(pp=16, tp=8, dp=args.ranks // 128) if args.ranks % 128 == 0 else Layout(dp=args.ranks)
            generate_run(path, layout=layout, num_microbatches=16, num_steps=2)
        print(f"{args.ranks} ranks, {args.rounds} processes each: wall s median (least), CPU s median")
        for name, question in QUESTIONS.items():
            rounds = [probe(path, question) for _ in range(args.rounds)]
            for what, at in (("attach", 0), (f"attach and {name}", 2)):
                wall, cpu = [r[at] for r in rounds], [r[at + 1] for r in rounds]
                print(f"{what:24} {median(wall):6.2f} ({min(wall):.2f}), CPU {median(cpu):.2f}")


if __name__ == "__main__":
    main()
