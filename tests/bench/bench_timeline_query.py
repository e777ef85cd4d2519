"""The timeline's level of detail: 12.8 million spans on 64 ranks × 3 depths, every zoom; and first paint of a run.

python tests/bench/bench_timeline_query.py [--events N] [--pixels 1200 2400 ...]

Times are CPU ms of one thread: median of several windows at different places, and the least.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

import mappnb
from mappnb.layout import Layout
from mappnb.pyramid import SpanIndex
from mappnb.testing.runs import make_run
from mappnb.widgets.sources import RunSource

RANKS, DEPTHS = 64, 3
ZOOMS = (1.0, 0.3, 1e-1, 3e-2, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6, 1e-7)


def spans(num_events: int, *, categories: str) -> tuple[np.ndarray, ...]:
    """Disjoint spans of each row; a row of layers has one category, one of transfers and compute four, or all ten at random."""
    rng = np.random.default_rng(0)
    per_row = num_events // (RANKS * DEPTHS)
    rows, starts, lengths, kinds = [], [], [], []
    for row in range(RANKS * DEPTHS):
        start = np.cumsum(rng.integers(100, 100_000, per_row))
        gap = np.append(np.diff(start), 50_000)
        rows.append(np.full(per_row, row, np.int32))
        starts.append(start)
        lengths.append((gap * rng.random(per_row)).astype(np.int64))
        if categories == "random":
            kinds.append(rng.integers(0, 10, per_row).astype(np.uint8))
        elif row % DEPTHS == 1:
            kinds.append(rng.choice(np.array([1, 3, 4, 5], np.uint8), per_row, p=[0.5, 0.4, 0.05, 0.05]))
        else:
            kinds.append(np.full(per_row, row % DEPTHS, np.uint8))
    return tuple(np.concatenate(v) for v in (rows, starts, lengths, kinds))


def cpu_ms(call) -> float:
    began = time.thread_time()
    call()
    return 1e3 * (time.thread_time() - began)


def queries(index: SpanIndex, pixels: int, rows: np.ndarray | None, label: str) -> None:
    lo, hi = index.extent_ns
    cells = []
    for zoom in ZOOMS:
        width = max(int((hi - lo) * zoom), 1)
        places = [lo + int((hi - lo - width) * f) for f in np.linspace(0.2, 0.8, 7)]
        took = [cpu_ms(lambda t0=t0, w=width: index.query(t0, t0 + w, pixels=pixels, rows=rows)) for t0 in places]
        cells.append(f"{statistics.median(took):5.1f}/{min(took):5.1f}")
    print(f"{label:26} {pixels:5} px  " + "  ".join(cells))


def first_paint() -> None:
    """CPU from a run just attached to the first picture, as ``mappnb demo`` leaves one, and of a run 20 times as long."""
    for steps in (20, 400):
        with tempfile.TemporaryDirectory() as folder:
            path = make_run(
                Path(folder) / "run", layout=Layout(pp=2, dp=2, tp=2), num_steps=steps, num_microbatches=8, num_layers=4
            )
            run = mappnb.attach(path)

            def paint(run: mappnb.run.Run = run) -> None:
                source = RunSource(run)
                lo, hi = source.extent_ns
                source.window(lo, hi).index.query(lo, hi, pixels=1200)

            began = time.process_time()
            paint()
            took = 1e3 * (time.process_time() - began)
            print(f"first paint, {RunSource(run).num_events:,} events: {took:.0f} ms CPU")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=12_800_000)
    parser.add_argument("--pixels", type=int, nargs="*", default=[1200, 2400])
    args = parser.parse_args()
    first_paint()
    for categories in ("as in training", "random"):
        arrays = spans(args.events, categories=categories)
        began = time.process_time()
        index = SpanIndex.build(*arrays, num_rows=RANKS * DEPTHS)
        took = time.process_time() - began
        print(f"\ncategories {categories}: {index.num_events:,} spans, built in {took:.1f} s CPU, ", end="")
        print(f"{index.nbytes / index.num_events:.1f} B/span")
        print(f"{'query, ms CPU median/least':39}" + "  ".join(f"{f'zoom {z:g}':>11}" for z in ZOOMS))
        for pixels in args.pixels:
            queries(index, pixels, None, f"{RANKS * DEPTHS} rows")
            queries(index, pixels, np.arange(min(150, RANKS * DEPTHS)), "150 rows")


if __name__ == "__main__":
    main()
