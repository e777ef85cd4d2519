"""What one move of a slider of the schedule lab costs the kernel: 16 ranks, 128 microbatches, 2 chunks per rank.

    python tests/bench/bench_schedule_lab.py

Of each schedule alone, and of four together: simulating anew and packing the answer (``set``), and answering the windows of the lanes
(1000 pixels wide). The goal is 50 ms for one schedule.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from widgets.front import Front

import mappnb
from mappnb.widgets import ScheduleLab

GOAL_MS, MOVES = 50, 25
COSTS = mappnb.Costs(
    forward_s=0.010, backward_input_s=0.011, backward_weight_s=0.009, p2p_s=0.001, message_bytes=1e7, bandwidth=5e9
)


def measure(names: tuple[str, ...], limit: float | None) -> tuple[float, float, int, int]:
    """Median ms of ``set`` and of the windows, actions, and bytes of the largest message."""
    lab = ScheduleLab(COSTS, schedules=names, num_ranks=16, num_microbatches=128, num_chunks=2, memory_limit=limit)
    front, computed, drawn = Front(lab), [], []
    for move in range(MOVES):
        begin = time.perf_counter()
        front.ask("set", values={"forward_s": 10 + 0.1 * move})
        middle = time.perf_counter()
        for name in names:
            front.ask("window", lane=name, t0=0.0, t1=6e9, pixels=1000, row0=0, row1=16)
        computed.append(1e3 * (middle - begin))
        drawn.append(1e3 * (time.perf_counter() - middle))
    actions = sum(len(s) for s in lab.schedules.values() if s is not None)
    assert not lab.errors, lab.errors
    largest = front.largest
    lab.close()
    return statistics.median(computed), statistics.median(drawn), actions, largest


def main() -> int:
    """Print a line for each case; returns 1 if one schedule takes longer than the goal."""
    slow = 0
    for names in (
        ("1f1b",),
        ("interleaved",),
        ("zb_h1",),
        ("zb_v",),
        ("dfc",),
        ("1f1b", "interleaved", "zb_h1", "zb_v"),
    ):
        for limit in (None, 8.0):
            computed, drawn, actions, largest = measure(names, limit)
            slow += len(names) == 1 and computed + drawn > GOAL_MS
            said = "no limit" if limit is None else f"limit {limit:g}"
            print(
                f"{', '.join(names):34s} {said:9s} {actions:6d} actions: set {computed:5.1f} ms, windows {drawn:5.1f} ms, "
                f"largest message {largest / 1e3:.0f} kB"
            )
    print(f"goal: {GOAL_MS} ms for one schedule: {'missed' if slow else 'met'}")
    return int(slow > 0)


if __name__ == "__main__":
    sys.exit(main())
