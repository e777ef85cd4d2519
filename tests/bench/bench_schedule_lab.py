"""What one move of a slider of the schedule lab costs the kernel: 16 ranks, 128 microbatches, 2 chunks per rank.

    python tests/bench/bench_schedule_lab.py

Of each schedule alone, and of four together: simulating anew and packing the answer, the spans of the lanes (1000 pixels wide) and the
columns of the plots included. The goal is 50 ms for one schedule.
"""

from __future__ import annotations

import json
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


def measure(names: tuple[str, ...], limit: float | None) -> tuple[float, int, int]:
    """Median ms of a move, actions, and bytes of all messages of the last answer."""
    lab = ScheduleLab(COSTS, schedules=names, num_ranks=16, num_microbatches=128, num_chunks=2, memory_limit=limit)
    front, taken = Front(lab), []
    for move in range(MOVES):
        front.sent.clear()
        begin = time.perf_counter()
        front.say("set", values={"forward_s": 10 + 0.1 * move}, view={"pixels": 1000, "t0": None, "t1": None})
        taken.append(1e3 * (time.perf_counter() - begin))
    actions = sum(len(s) for s in lab.schedules.values() if s is not None)
    size = sum(len(json.dumps(content)) + sum(len(b) for b in buffers) for content, buffers in front.sent)
    assert not lab.errors, lab.errors
    lab.close()
    return statistics.median(taken), actions, size


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
            taken, actions, size = measure(names, limit)
            slow += len(names) == 1 and taken > GOAL_MS
            said = "no limit" if limit is None else f"limit {limit:g}"
            print(f"{', '.join(names):34s} {said:9s} {actions:6d} actions: {taken:5.1f} ms, answer {size / 1e3:.0f} kB")
    print(f"goal: {GOAL_MS} ms for one schedule: {'missed' if slow else 'met'}")
    return int(slow > 0)


if __name__ == "__main__":
    sys.exit(main())
