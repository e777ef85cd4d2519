"""Every benchmark, one after the other: ``make bench``. Run it on a quiet machine; docs/benchmarks.md says what came out."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
COMMANDS = (
    ["bench_recorder.py"],
    ["bench_saving.py"],
    ["bench_reading.py"],
    ["bench_many_ranks.py"],
    ["bench_activation_reading.py"],
    ["bench_overhead_paired.py", "--plan", "base"],
    ["bench_overhead_paired.py", "--plan", "default"],
    ["bench_overhead.py", "--plan", "base"],
    ["bench_overhead.py", "--plan", "default"],
    ["bench_timeline_query.py"],
    ["bench_timeline_pan.py"],
    ["bench_timeline_canvas.py"],
    ["bench_array_view.py"],
    ["bench_schedule_lab.py"],
    ["bench_schedules.py"],
    ["bench_align.py"],
    ["bench_import.py"],
    ["bench_executed_schedules.py"],
    ["bench_stragglers.py", "--set", "report"],
    ["bench_stragglers_speed.py"],
    ["bench_json_to_verdict.py"],
    ["bench_watch.py", "--fault"],
    ["bench_tensor_stats.py"],
    ["bench_activations.py"],
    ["bench_attention_view.py"],
    ["bench_attention.py"],
    ["bench_activation_views.py"],
    ["bench_live.py"],
)


def main() -> int:
    """Run them; returns the number that failed."""
    failed = 0
    for command in COMMANDS:
        print(f"\n== {' '.join(command)}", flush=True)
        failed += subprocess.run([sys.executable, str(HERE / command[0]), *command[1:]], check=False).returncode != 0
    return failed


if __name__ == "__main__":
    sys.exit(main())
