"""CPU cost of saving an event, from 5 to 100 segments: it must stay flat, whatever the length of the run.

python tests/bench/bench_saving.py
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from mappnb.segment_writer import TableWriter
from mappnb.table_specs import TABLES

ROWS, BATCH = 65_536, 512
MARKS = (5, 10, 20, 50, 100)


def main() -> dict[int, float]:
    """Write 100 segments in batches as a flush a second gives them; ns of CPU per event of the segments before each mark."""
    spec, rng = TABLES["events"], np.random.default_rng(0)
    batch = {
        c: np.full(BATCH, -1, spec.numpy_dtype(c)) if c != "flags" else np.zeros(BATCH, np.uint16) for c in spec.columns
    }
    batch["thread"] = np.zeros(BATCH, np.int32)
    per_segment = []
    with tempfile.TemporaryDirectory() as folder:
        table = TableWriter(
            Path(folder),
            spec,
            {"run_id": "bench"},
            site=lambda i: ("compute", f"op{i}", "", "none", i, ""),
            max_age_s=1e9,
        )
        clock = 0
        for _ in range(max(MARKS)):
            spent = 0.0
            for _ in range(ROWS // BATCH):
                rows = dict(batch)
                rows["start_ns"] = clock + np.cumsum(rng.integers(1_000, 2_000_000, BATCH))
                clock = int(rows["start_ns"][-1])
                rows["duration_ns"] = rng.integers(1_000, 5_000_000, BATCH)
                rows["site"] = rng.integers(0, 200, BATCH).astype(np.int32)
                rows["seq"] = np.arange(BATCH, dtype=np.int64)
                start = time.process_time()
                table.append(rows, meta={"now_ns": clock})
                spent += time.process_time() - start
            per_segment.append(1e9 * spent / ROWS)
        table.close()
        size = sum(p.stat().st_size for p in Path(folder).iterdir())
    out = {mark: statistics.median(per_segment[max(0, mark - 5) : mark]) for mark in MARKS}
    for mark, cost in out.items():
        print(f"after {mark:3} segments: {cost:6.0f} ns CPU per event")
    print(
        f"spread {max(out.values()) / min(out.values()):.2f} (target <= 1.20 between 5 and 100 segments: {out[100] / out[5]:.2f})"
    )
    print(f"size   {size / (ROWS * max(MARKS)):.1f} bytes per event (random durations)")
    return out


if __name__ == "__main__":
    main()
