"""What captured tensors cost: statistics, the hook's part of each mode, writing. Run ``python tests/bench/bench_tensor_stats.py``.

CPU time of the calling thread for statistics and `put`, of the writer's thread for writing; what is compared takes turns in one process.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from mappnb.activation_stats import tensor_stats
from mappnb.capture.activations.microbatch import Microbatch
from mappnb.capture.activations.plan import Capture, CapturePlan
from mappnb.capture.activations.shard import Shard
from mappnb.capture.activations.sink import ActivationSink

GOAL_MS = 15.0
ROUNDS = 9
MODES: dict[str, dict] = {
    "full": {},
    "cast": {},
    "int8": {},
    "topk": {"k": 16},
    "bucket": {"size": 8},
    "sketch": {"size": 64},
    "stats": {},
}


def torch_list(x: torch.Tensor) -> None:
    """Most of the same by torch calls."""
    finite = x.isfinite()
    x.isnan().sum(), x.isinf().sum(), (x == 0).sum(), finite.sum()
    x.min(), x.max(), x.abs().max()
    mean = x.mean()
    d = x - mean
    d2 = d * d
    d2.mean(), (d2 * d).mean(), (d2 * d2).mean()
    torch.histc(torch.frexp(x).exponent.float(), bins=83, min=-41, max=41)


def cpu_ms(function: Callable[[], object], clock: Callable[[], float] = time.thread_time) -> float:
    begin = clock()
    function()
    return (clock() - begin) * 1e3


def turns(functions: dict[str, Callable[[], object]], rounds: int = ROUNDS) -> dict[str, list[float]]:
    """CPU milliseconds of each function, taking turns."""
    for function in functions.values():
        function()
    out: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            out[name].append(cpu_ms(function))
    return out


def statistics_of_a_tensor() -> None:
    x = torch.randn(2048, 2048)
    kinds = {"float32": x, "bfloat16": x.bfloat16(), "float16": x.half(), "float64": x.double()}
    arrays = {
        k: (v.view(torch.int16).numpy().view(np.uint16) if k == "bfloat16" else v.numpy()) for k, v in kinds.items()
    }
    functions: dict[str, Callable[[], object]] = {
        f"ours, {k}": (lambda k=k, a=a: tensor_stats(a, bfloat16=k == "bfloat16")) for k, a in arrays.items()
    }
    functions |= {"torch, sum alone": x.sum, "torch, the list of calls": lambda: torch_list(x)}
    found = turns(functions)
    print("statistics of 2048 x 2048, CPU ms: least, median")
    for name, ms in found.items():
        print(f"  {name:26} {min(ms):7.2f} {np.median(ms):7.2f}")
    ours, listed, alone = (
        np.array(found[n]) for n in ("ours, float32", "torch, the list of calls", "torch, sum alone")
    )
    print(f"  float32: {np.median(listed / ours):.1f} times faster than the list, {np.median(ours / alone):.1f} sums")
    print(f"  goal {GOAL_MS} ms: {'reached' if np.median(ours) <= GOAL_MS else 'missed'}")


def put_and_write(shape: tuple[int, int, int] = (1, 512, 512), layers: int = 12, steps: int = 4) -> None:
    """What `put` costs the training thread, and what comes to the disk, of values like a residual stream's."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(shape, generator=generator) * torch.rand(shape[-1], generator=generator) * 3
    shard = Shard(("sample", "token", "hidden"), (shape[-1],))
    taps = [SimpleNamespace(point="resid_post", layer=i, shard=shard, name="x") for i in range(layers)]
    ids = torch.arange(shape[1])[None]
    print(f"put of {shape} float32, CPU us in the hook: least, median; clone alone beside it; the file")
    for mode, options in MODES.items():
        with tempfile.TemporaryDirectory() as folder:
            sink = ActivationSink(
                CapturePlan(Capture("resid_post", mode=mode, **options)), {"rank": 0}, lambda f=folder: f
            )
            puts, clones = [], []
            begin, process, mine = time.perf_counter(), time.process_time(), time.thread_time()
            for step in range(steps):
                sink.begin(Microbatch(step, 0, 0, 0, shape[0], np.arange(shape[1]), shape[1], token_ids=ids))
                for tap in taps:
                    puts.append(cpu_ms(lambda tap=tap: sink.put(0, tap, x)) * 1e3)
                    clones.append(cpu_ms(x.clone) * 1e3)
                sink.end_step(step)
            sink.close()
            seconds = time.perf_counter() - begin
            writer = (time.process_time() - process) - (time.thread_time() - mine)
            raw = x.numel() * 4 * layers * steps
            size = sum(p.stat().st_size for p in Path(folder).glob("*.zip"))
            assert not sink.reason, sink.reason
        print(
            f"  {mode:7} {min(puts):7.0f} {np.median(puts):7.0f}   clone {np.median(clones):5.0f}   "
            f"{size / raw:7.4f} of raw   writer {raw / 1e6 / max(writer, 1e-9):6.0f} MB/s CPU   {raw / 1e6 / seconds:6.0f} MB/s wall"
        )


def main() -> None:
    torch.set_num_threads(1)
    statistics_of_a_tensor()
    put_and_write()


if __name__ == "__main__":
    main()
