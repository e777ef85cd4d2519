"""Reading activations: 64 ranks × 100 blocks; one head's queries and keys of a model of 12 layers.

python tests/bench/bench_activation_reading.py [--keep FOLDER]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

import mappnb
from mappnb.activation_blocks import Block, Stored, write_block
from mappnb.activation_stats import FIELDS, NUM_BINS
from mappnb.layout import Layout

sys.path.insert(0, str(Path(__file__).parents[1]))
from activation_runs import block_of, folder_of, write_run

LAYOUT, STEPS = Layout(tp=4, pp=2, dp=8), 100
POINTS = ("q_rot", "k_rot", "resid_post")


def statistics(step: int, rng: np.random.Generator) -> dict[str, Stored]:
    """A stream of statistics of 20 points of 2 layers."""
    out = {"step": Stored(np.array([step]), ("step",))}
    for number in range(20):
        fields = np.abs(rng.standard_normal((1, 2, len(FIELDS))))
        out[f"point{number}"] = Stored(fields, ("step", "layer", "field"), {"mode": "stats", "layers": [0, 1]})
        counts = np.ones((1, 2, NUM_BINS), np.int64)
        out[f"point{number}_histogram"] = Stored(counts, ("step", "layer", "bin"))
    return out


def many_ranks(path: Path) -> None:
    """A run of 64 ranks, 100 blocks each."""
    rng = np.random.default_rng(1)
    write_run(path, LAYOUT, points=POINTS, steps=())
    for rank in range(LAYOUT.world_size):
        first = block_of(rank, LAYOUT, 0, points=POINTS, microbatches=2)
        for step in range(STEPS):
            arrays = {**first.streams["full"], "step": Stored(np.full(4, step), ("sample",))}
            block = Block(first.attrs, {"full": arrays, "stats": statistics(step, rng)})
            write_block(folder_of(path, rank) / f"block-{step:06d}.zarr.zip", block)


def twelve_layers(path: Path) -> None:
    """One rank, 8 samples of 128 tokens, 12 layers, 12 heads of 64."""
    rng, shape = np.random.default_rng(2), (8, 12, 128, 12, 64)
    write_run(path, steps=())
    arrays = {c: Stored(np.zeros(8, np.int64), ("sample",)) for c in ("step", "dp_rank", "microbatch")}
    arrays |= {"index": Stored(np.arange(8), ("sample",))}
    arrays |= {"token_index": Stored(np.tile(np.arange(128, dtype=np.int32), (8, 1)), ("sample", "token"))}
    for name, dim in (("q_rot", "head"), ("k_rot", "kv_head")):
        values = rng.standard_normal(shape).astype(np.float32)
        attrs = {"mode": "full", "layers": list(range(12)), "shard": {}}
        arrays[name] = Stored(values, ("sample", "layer", "token", dim, "head_dim"), attrs)
    write_block(
        folder_of(path, 0) / "block-000000.zarr.zip", Block({"layout": {}, "model": {}, "plan": {}}, {"full": arrays})
    )


def timed(what: str, call, repeat: int = 1):
    walls, cpus = [], []
    for _ in range(repeat):
        wall, cpu = time.perf_counter(), time.process_time()
        result = call()
        walls.append(1e3 * (time.perf_counter() - wall))
        cpus.append(1e3 * (time.process_time() - cpu))
    print(f"{what:64} least {min(walls):8.1f} ms wall, {min(cpus):8.1f} ms CPU", flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keep", default="")
    keep = parser.parse_args().keep
    folder = Path(keep or tempfile.mkdtemp(prefix="mappnb-bench-"))
    for name, make in (("many", many_ranks), ("twelve", twelve_layers)):
        if not (folder / name).exists():
            make(folder / name)
    size = sum(f.stat().st_size for f in (folder / "many").rglob("*.zip"))
    print(f"{LAYOUT.world_size} ranks x {STEPS} blocks, {size / 1e6:.0f} MB")
    run = timed("attach", lambda: mappnb.attach(folder / "many"))
    tree = timed("run.activations", lambda: run.activations)
    ds = tree["full"].to_dataset()
    print(f"  {dict(ds.sizes)}")
    timed("run.refresh().activations, nothing new", lambda: run.refresh().activations, 3)
    timed("one layer of one sample", lambda: ds["q_rot"].isel(layer=1, sample=7).values, 5)
    timed("one head of one layer, every sample", lambda: ds["q_rot"].isel(layer=1, head=0, token=3).values)
    timed("statistics of every point, merged over the ranks", lambda: tree["stats"]["std"].values)
    one = mappnb.attach(folder / "twelve").activations["full"].to_dataset()
    head = lambda: [one[p].isel(sample=3, layer=5)[:, 2].values for p in ("q_rot", "k_rot")]  # noqa: E731
    timed("q and k of one (layer, head), 12 layers, 128 tokens", head, 9)


if __name__ == "__main__":
    main()
