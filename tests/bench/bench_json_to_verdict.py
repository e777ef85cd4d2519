"""From raw profiler JSON to a verdict: 8 ranks of 50,000 events, rank 3 slower by 30 %; CPU s without the imports of modules.

python tests/bench/bench_json_to_verdict.py [--events 50000] [--steps 10]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from bench_import import RANKS, _rows

SLOW, FACTOR = 3, 1.3
PROBE = """
import sys, time
from pathlib import Path
import mappnb
from mappnb.analysis import find_stragglers

folder = Path(sys.argv[1])
def verdict(name):
    begin = time.process_time()
    report = mappnb.import_trace(folder / name, folder / f"{name}-run")
    read = time.process_time()
    found = find_stragglers(mappnb.attach(folder / f"{name}-run"))
    return report.num_read, read - begin, time.process_time() - read, found

verdict("few")  # loads what is loaded on first use
events, reading, judging, found = verdict("json")
print(events, reading, judging)
print(found[found.verdict == "culprit"][["subject_kind", "subject", "cause", "effect_fraction"]].to_string())
"""


def write(folder: Path, events: int, steps: int) -> None:
    """Write the trace of each rank, with a mark for each step."""
    folder.mkdir(parents=True)
    ranks = [list(_rows(rank, events // 3)) for rank in range(RANKS)]
    _run_together(ranks)
    for rank, rows in enumerate(ranks):
        host = [r for r in rows if r["cat"] == "cpu_op"]
        cuts = [host[i * len(host) // steps]["ts"] for i in range(steps)] + [rows[-1]["ts"] + 1e5]
        for i in range(steps):
            mark = {
                "ph": "X",
                "cat": "user_annotation",
                "name": f"ProfilerStep#{i}",
                "pid": 1000 + rank,
                "tid": 1000 + rank,
            }
            rows.append({**mark, "ts": cuts[i], "dur": cuts[i + 1] - cuts[i] - 1})
        head = {
            "schemaVersion": 1,
            "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": RANKS},
            "traceEvents": rows,
        }
        (folder / f"rank{rank}.json").write_text(json.dumps(head))


def _run_together(ranks: list[list[dict]]) -> None:
    """Lay the work on a common time line: all wait in an all-reduce for the last to come, the slow rank computes longer."""
    free = [1.7e15] * RANKS
    for place in range(0, len(ranks[0]), 3):
        calls = []
        for rank, rows in enumerate(ranks):
            op, launch, kernel = rows[place : place + 3]
            at = free[rank]
            op["ts"], op["dur"], launch["ts"], launch["dur"] = round(at, 3), 8.0, round(at + 1, 3), 5.0
            kernel["ts"] = round(at + 12, 3)
            if "nccl" in kernel["name"]:
                calls.append(kernel)
            elif rank == SLOW:
                kernel["dur"] = round(kernel["dur"] * FACTOR, 3)
            free[rank] = kernel["ts"] + kernel["dur"] + 0.5
        if calls:
            end = max(c["ts"] for c in calls) + 40
            for rank, call in enumerate(calls):
                call["dur"], free[rank] = round(end - call["ts"], 3), end + 0.5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=50_000)
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write(folder / "json", args.events, args.steps)
        write(folder / "few", 3_000, args.steps)
        made = subprocess.run([sys.executable, "-c", PROBE, folder], capture_output=True, text=True, check=True)
        first, _, rest = made.stdout.partition("\n")
        events, reading, judging = first.split()
        total = float(reading) + float(judging)
        print(
            f"{int(events):,} entries: import {float(reading):.2f} s, verdict {float(judging):.2f} s, together {total:.2f} s CPU (goal 1.5)"
        )
        print(rest)


if __name__ == "__main__":
    main()
