"""What the kernel needs to answer a timeline: first paint of the demo's run, pans over 13 million events on 64 ranks, message sizes.

    python tests/bench/bench_timeline_pan.py [--demo notebooks/data/slow-rank] [--large DIR]

``--large`` is the run that bench_reading.py --keep DIR has left, DIR/run; without it the run is written first. Times are wall and CPU ms.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import mappnb
from mappnb.widgets.timeline import Timeline

ROOT = Path(__file__).parents[2]


class Front:
    """Takes what a view sends, and how long it was."""

    def __init__(self, view: Timeline) -> None:
        self.view, self.largest, self.meta = view, 0, {}
        view.send = self.take
        self.say(kind="ready", width=1200, height=560, dpr=1, theme="light")
        view.binary = True

    def take(self, content, buffers=None) -> None:
        self.largest = max(self.largest, len(json.dumps(content)) + sum(len(b) for b in buffers or ()))
        if content["kind"] == "meta":
            self.meta = content
        if content["kind"] == "error":
            raise RuntimeError(content["text"])

    def say(self, **content) -> None:
        self.view._received(None, {"seq": 1, **content}, [])

    def window(self, t0: float, t1: float, rows: int) -> tuple[float, float]:
        """Wall and CPU ms of one answer."""
        wall, cpu = time.perf_counter(), time.process_time()
        self.say(kind="window", t0=t0, t1=t1, pixels=1200, row0=0, row1=rows)
        return 1e3 * (time.perf_counter() - wall), 1e3 * (time.process_time() - cpu)


def first_paint(folder: Path) -> None:
    Timeline(mappnb.attach(folder)).close()  # imports are paid once
    wall, cpu = time.perf_counter(), time.process_time()
    view = Timeline(mappnb.attach(folder))
    front = Front(view)
    front.window(*front.meta["view"], len(front.meta["rows"]))
    print(
        f"first paint of {view!r}: {1e3 * (time.perf_counter() - wall):.0f} ms, {1e3 * (time.process_time() - cpu):.0f} ms CPU; "
        f"largest message {front.largest / 1e3:.0f} kB; twin {len(view.twin_html()) / 1e3:.0f} kB"
    )
    view.close()


def pans(front: Front, label: str) -> None:
    rows = len(front.meta["rows"])
    a, b = front.meta["extent"]
    for part in (1.0, 0.1, 0.01, 1e-3, 1e-4, 1e-5):
        width = (b - a) * part
        places = [a + (b - a - width) * f for f in (0.2, 0.35, 0.5, 0.65, 0.8)]
        for at in places[:1]:
            front.window(at, at + width, rows)
        took = [front.window(at + width * s, at + width * (1 + s), rows) for at in places for s in (0.0, 0.2)]
        wall, cpu = (statistics.median(t[i] for t in took) for i in (0, 1))
        print(f"{label:12} {part:8.0e} of the run: {wall:7.1f} ms wall, {cpu:7.1f} ms CPU a pan, {rows} rows")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--demo", type=Path, default=ROOT / "notebooks/data/slow-rank")
    parser.add_argument("--large", type=Path)
    args = parser.parse_args()
    if args.demo.exists():
        first_paint(args.demo)
    large = args.large
    if large is None:
        large = Path(tempfile.mkdtemp(prefix="mappnb-bench-"))
        subprocess.run([sys.executable, str(ROOT / "tests/bench/bench_reading.py"), "--keep", str(large)], check=True)
        large /= "run"
    began = time.perf_counter()
    view = Timeline(mappnb.attach(large))
    front = Front(view)
    print(f"{view!r}: view made in {time.perf_counter() - began:.2f} s")
    pans(front, "by window")
    front.window(*front.meta["extent"], len(front.meta["rows"]))
    while not view._scene.source.ready and view._scene.source.failed is None:
        time.sleep(0.2)
    print(f"all events in memory after {time.perf_counter() - began:.1f} s")
    pans(front, "in memory")
    print(f"largest message {front.largest / 1e3:.0f} kB")
    view.close()


if __name__ == "__main__":
    main()
