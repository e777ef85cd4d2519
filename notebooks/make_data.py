"""Records the runs that the notebooks open, once: two minutes on two cores.

    python notebooks/make_data.py [--again]

``data/healthy`` and ``data/slow-rank`` are real Megatron-core trainings on four gloo processes (pipeline 2 x data 2); in the second,
rank 1 computes 40 ms longer in each forward. ``data/large`` is synthetic: 32 ranks, for the timeline's level of detail.

``data/sharded`` holds activations of four ranks (tensor 2 x pipeline 2). ``data/words`` is a small model that learns sentences and repeated
words within a minute (`mappnb.testing.small_world`), with its activations on the way; in ``data/broken`` a neuron gives NaN from step 45 on.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

import mappnb
from mappnb.testing import TrainSettings, launch, make_run

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
    activations()


def activations() -> None:
    """Record what notebooks 40 and 41 look into."""
    from mappnb.testing.small_world import WORDS, train_small_world

    if not (DATA / "sharded.done").exists():
        shutil.rmtree(DATA / "sharded", ignore_errors=True)
        rules = [mappnb.Capture("all", mode="stats", every=2), mappnb.Capture("all", every=4, name="tensors")]
        plan = mappnb.CapturePlan(*rules, vocabulary="bytes").to_dict()
        options = {"run_dir": str(DATA / "sharded"), "record_options": {"activations": plan}}
        launch(TrainSettings(tp=2, pp=2, kv_heads=2, hidden=64, steps=10, **options), world_size=4)
        (DATA / "sharded.done").touch()
    words = {"vocabulary": list(WORDS)}
    if not (DATA / "words.safetensors").exists():
        shutil.rmtree(DATA / "words", ignore_errors=True)
        plan = mappnb.CapturePlan(
            mappnb.Capture("all", mode="stats", every=10),
            mappnb.Capture(["q_rot", "k_rot"], mode="heads", every=20),
            mappnb.Capture(
                ["embed", "q_rot", "k_rot", "z", "mlp_out", "resid_post"], steps=[0, 100, 200, 300, 399], name="tensors"
            ),
            mappnb.Capture(
                ["unembed", "final_ln_weight", "final_ln_bias", "w_o", "b_o"],
                steps=[0, 100, 200, 300, 399],
                name="model",
            ),
            **words,
        )
        train_small_world(DATA / "words.safetensors", run_dir=DATA / "words", activations=plan)
    if not (DATA / "broken.safetensors").exists():
        shutil.rmtree(DATA / "broken", ignore_errors=True)
        plan = mappnb.CapturePlan(mappnb.Capture("all", mode="stats", every=1), **words)
        train_small_world(DATA / "broken.safetensors", steps=60, run_dir=DATA / "broken", activations=plan, break_at=45)


if __name__ == "__main__":
    main()
