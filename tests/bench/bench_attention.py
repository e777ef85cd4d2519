"""What it takes to compute the pattern of one head again: CPU time, peak memory, and how exact it is.

    OMP_NUM_THREADS=1 python tests/bench/bench_attention.py [--tokens 128 2048 8192]

CPU time of this process, least of five; peak of what numpy and Python allocate (tracemalloc), result included. The naive way is the same
in float32 all at once; the difference is that from float64.
"""

from __future__ import annotations

import argparse
import os
import time
import tracemalloc

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import xarray as xr

from mappnb.interp import attention_pattern, head_statistics

SIZE = 64


def recorded(tokens: int, heads: int = 1, layers: int = 1, window: list[int] | None = None) -> xr.Dataset:
    rng = np.random.default_rng(0)
    shape = (1, layers, tokens, heads, SIZE)
    names = {"q_rot": "head", "k_rot": "kv_head"}
    points = {
        p: (("sample", "layer", "token", d, "head_dim"), rng.normal(size=shape).astype(np.float32))
        for p, d in names.items()
    }
    facts = {"num_heads": heads, "num_kv_heads": heads, "head_dim": SIZE, "window": window}
    ids = rng.integers(0, max(2, tokens // 4), (1, tokens))
    return xr.Dataset(points, {"token_id": (("sample", "token"), ids)}, {"model": facts})


def naive(ds: xr.Dataset, dtype: type) -> np.ndarray:
    q, k = (ds[name].values[0, 0, :, 0].astype(dtype) for name in ("q_rot", "k_rot"))
    scores = q @ k.T * dtype(SIZE**-0.5)
    scores[~np.tri(len(q), dtype=bool)] = -np.inf
    scores -= scores.max(1, keepdims=True)
    np.exp(scores, out=scores)
    return scores / scores.sum(1, keepdims=True)


def cost(function, repeats: int = 5) -> tuple[float, float]:
    best = []
    for _ in range(repeats):
        start = time.process_time()
        function()
        best.append(time.process_time() - start)
    tracemalloc.start()
    function()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return min(best) * 1e3, peak / 2**20


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, nargs="+", default=[128, 2048, 8192])
    print("tokens  what                ms CPU   peak MiB   largest error")
    for tokens in parser.parse_args().tokens:
        ds, near = recorded(tokens), recorded(tokens, window=[255, 0])
        truth = naive(ds, np.float64) if tokens <= 2048 else None
        rows = {
            "whole pattern": lambda ds=ds: attention_pattern(ds, layer=0, head=0),
            "window of 256": lambda near=near: attention_pattern(near, layer=0, head=0),
            "last 64 queries": lambda ds=ds: attention_pattern(ds, layer=0, head=0, query=slice(-64, None)),
            "naive, float32": lambda ds=ds: naive(ds, np.float32),
            "statistics": lambda ds=ds: head_statistics(ds),
        }
        for name, function in rows.items():
            ms, peak = cost(function)
            off = ""
            if truth is not None and name in ("whole pattern", "naive, float32"):
                off = f"{np.abs(np.asarray(function()) - truth).max():.1e}"
            print(f"{tokens:6}  {name:18} {ms:8.2f} {peak:10.1f}   {off}")
    ds = recorded(128, heads=12, layers=12)
    ms, peak = cost(lambda: [attention_pattern(ds, layer=layer, head=None) for layer in range(12)])
    print(f"   128  12 x 12 heads      {ms:8.2f} {peak:10.1f}")
    ms, peak = cost(lambda: head_statistics(ds), 3)
    print(f"   128  12 x 12 statistics {ms:8.2f} {peak:10.1f}")


if __name__ == "__main__":
    main()
