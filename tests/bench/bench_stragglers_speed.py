"""The self-time table, find_stragglers and a live table on a run of many ranks: events, CPU s, memory; each in a process of its own.

python tests/bench/bench_stragglers_speed.py [--ranks 1024] [--steps 1000] [--keep FOLDER]

Files are in the page cache. CPU s are of all threads, imports excluded; making the run takes minutes.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from mappnb.layout import Layout
from mappnb.testing import generate_run

PROBE = """
import resource, sys, time
import mappnb, mappnb.analysis as analysis, pandas, xarray, pyarrow.parquet
from mappnb.analysis.work import work, WorkTable
if "{name}" == "find_stragglers": from mappnb.analysis import find_stragglers
empty = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
begin, wall = time.process_time(), time.perf_counter()
run = mappnb.attach(sys.argv[1])
{question}
cpu, wall = time.process_time() - begin, time.perf_counter() - wall
print(cpu, wall, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - empty) / 1024)
"""
QUESTIONS = {
    "attach and index": "run.events.sizes",
    "work": "work(run)",
    "find_stragglers": "find_stragglers(run)",
}


def probe(path: Path, name: str, question: str) -> str:
    """CPU s, wall s and peak MiB above the imports."""
    code = PROBE.format(name=name, question=question)
    made = subprocess.run([sys.executable, "-c", code, path], check=False, capture_output=True, text=True)
    if made.returncode:
        return made.stderr.strip().splitlines()[-1]
    cpu, wall, memory = (float(v) for v in made.stdout.split())
    return f"CPU {cpu:6.2f} s, wall {wall:6.2f} s, {memory:5.0f} MiB"


def polling(folder: Path, ranks: int) -> None:
    """Follow a run of ``ranks`` ranks that is there and does not grow: what a look costs."""
    from mappnb import attach
    from mappnb.analysis.work import WorkTable

    path = folder / f"poll{ranks}"
    if not path.exists():
        generate_run(path, layout=Layout(dp=ranks), num_microbatches=4, num_steps=50, ended=False)
    table = WorkTable(attach(path))
    table.update()
    begin = time.process_time()
    for _ in range(20):
        table.update()
    print(f"a look that finds nothing new, {ranks:5} ranks: CPU {(time.process_time() - begin) / 20 * 1e3:6.2f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--keep", help="make the run here, or use the one that is there")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(args.keep or temporary)
        path = folder / f"stragglers{args.ranks}x{args.steps}"
        if not path.exists():
            layout = Layout(pp=4, tp=8, dp=args.ranks // 32)
            generate_run(path, layout=layout, num_microbatches=4, num_steps=args.steps, seed=1)
        from mappnb import attach

        print(f"{args.ranks} ranks x {args.steps} steps, {attach(path).events.sizes['event']:,} events")
        for name, question in QUESTIONS.items():
            print(f"{name:18} {probe(path, name, question)}")
        for ranks in (4, 64, 1024):
            polling(folder, ranks)


if __name__ == "__main__":
    main()
