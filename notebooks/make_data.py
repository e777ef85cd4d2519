"""Records the runs that the notebooks open, once: a minute on two cores.

    python notebooks/make_data.py [--again]

``data/healthy`` and ``data/slow-rank`` are real Megatron-core trainings on four gloo processes (pipeline 2 x data 2); in the second,
rank 1 computes 40 ms longer in each forward. ``data/large`` is synthetic: 32 ranks, for the timeline's level of detail.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

import mappnb
from mappnb.testing import make_run

DATA = Path(__file__).parent / "data"
DEMOS = {"healthy": [], "slow-rank": ["--slow-rank", "1", "--slow-ms", "40"]}


def main() -> None:
    """Record what is not there yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--again", action="store_true", help="record everything anew")
    if parser.parse_args().again:
        shutil.rmtree(DATA, ignore_errors=True)
    DATA.mkdir(exist_ok=True)
    for name, options in DEMOS.items():
        folder = DATA / name
        if not (folder / "report.html").exists():  # the last thing that a demo writes
            command = [sys.executable, "-m", "mappnb", "demo", "--steps", "8", "--run-dir", str(folder), "--replace"]
            subprocess.run([*command, *options], check=True)
    large = DATA / "large"
    if not large.with_suffix(".done").exists():
        shutil.rmtree(large, ignore_errors=True)
        make_run(large, layout=mappnb.Layout(pp=8, dp=4), num_steps=20, num_microbatches=16, slow={13: 1.4})
        large.with_suffix(".done").touch()


if __name__ == "__main__":
    main()
