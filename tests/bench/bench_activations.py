"""What capturing activations costs, in CPU time: one point, against nnsight's save; and a captured step of the default plan.

Forwards with and without hooks take turns on one model; the median difference over the number of points is what a point costs. The
model is small, so that the copy of the tensor costs next to nothing: what is measured is the machinery. nnsight, where it is
installed, saves the same points of the same model in the same turns (its cost of a trace and of a save, from traces of 1 and of all
points).

The captured step is one of Megatron-core's GPT with 4 layers of hidden size 512: every second step is captured (statistics of every
point), and the CPU time of the whole process, writer threads too, is compared with that of its neighbours.

    OMP_NUM_THREADS=1 python tests/bench/bench_activations.py [--steps 24] [--only points|step]
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import tempfile
import time
import warnings

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch

from mappnb.capture import session
from mappnb.capture.activations.microbatch import Microbatch
from mappnb.capture.activations.plan import Capture, CapturePlan
from mappnb.capture.activations.sink import ActivationSink
from mappnb.capture.activations.taps import attached, find_taps
from mappnb.testing.gpt_settings import TrainSettings

NAMES = {"embed": "emb", "resid_pre": "blocks.*.input", "mlp_pre": "blocks.*.up", "mlp_act": "blocks.*.down.input"}
NAMES |= {"mlp_out": "blocks.*.down", "resid_post": "blocks.*"}
BLOCKS, HIDDEN = 12, 32


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(HIDDEN, HIDDEN), torch.nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = torch.nn.Embedding(64, HIDDEN)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, ids):
        x = self.emb(ids)
        for block in self.blocks:
            x = block(x)
        return x


def cpu_us(call) -> float:
    begin = time.thread_time_ns()
    call()
    return (time.thread_time_ns() - begin) / 1e3


def turns(ways: dict, num_turns: int) -> dict[str, np.ndarray]:
    """CPU time in µs of each way in each turn."""
    for way in ways.values():
        way()
    return {
        name: np.array(times)
        for name, times in zip(
            ways, zip(*([cpu_us(w) for w in ways.values()] for _ in range(num_turns)), strict=True), strict=True
        )
    }


def points(num_turns: int) -> None:
    torch.manual_seed(0)
    net, ids = Net().eval(), torch.randint(0, 64, (1, 16))
    taps = find_taps(net, names=NAMES)
    kept: dict[str, torch.Tensor] = {}

    def with_hooks(chosen, handler):
        def run() -> None:
            kept.clear()
            with attached(chosen, handler):
                net(ids)

        return run

    def save(tap, x) -> None:
        kept[tap.name] = x.clone()

    ways = {"bare": lambda: net(ids), "look": with_hooks(taps, lambda tap, x: None), "save": with_hooks(taps, save)}
    if importlib.util.find_spec("nnsight") is not None:
        ways |= nnsight_ways(net, ids, taps)
    with torch.no_grad():
        found = turns(ways, num_turns)
        steady = hooks_that_stay(net, ids, taps, save, num_turns)
    n = len(taps)
    print(f"{n} points of {BLOCKS} blocks; a bare forward {np.median(found['bare']):.0f} µs")
    print(
        f"a point, hooks on already (what training pays): look {steady['look'] / n:.1f} µs, copy {steady['save'] / n:.1f} µs, "
        f"record in full {steady['record'] / n:.1f} µs (goal 34)"
    )
    for name in ("look", "save"):
        print(
            f"a point, hooks put on and off for one forward: {name} {np.median(found[name] - found['bare']) / n:.1f} µs"
        )
    if "nnsight all" in found:
        one, every = (np.median(found[k] - found["bare"]) for k in ("nnsight one", "nnsight all"))
        num = 2 * BLOCKS
        print(
            f"nnsight (keeps a reference, no copy): a trace with one save {one:.0f} µs, each further save "
            f"{(every - one) / (num - 1):.1f} µs, all in all {every / num:.1f} µs a save of {num}"
        )


def hooks_that_stay(net, ids, taps, save, num_turns: int) -> dict[str, float]:
    """Median cost in µs of hooks that are on; they are put on and taken off outside of what is timed."""
    costs, folder = {}, tempfile.mkdtemp(prefix="mappnb-bench-")
    sink = ActivationSink(
        CapturePlan(Capture(list(NAMES)), names=NAMES), {"model": {"num_layers": BLOCKS}}, lambda: folder
    )
    for name, handler in (
        ("look", lambda tap, x: None),
        ("save", save),
        ("record", lambda tap, x: sink.put(0, tap, x)),
    ):
        differences = []
        for turn in range(num_turns):
            bare = cpu_us(lambda: net(ids))
            sink.begin(Microbatch(turn, 0, 0, 0, 1, np.arange(16), 16, token_ids=ids))
            with attached(taps, handler):
                differences.append(cpu_us(lambda: net(ids)) - bare)
            sink.end_step(turn)
        costs[name] = float(np.median(differences))
    assert sink.on, sink.reason
    sink.close()
    shutil.rmtree(folder, ignore_errors=True)
    return costs


def nnsight_ways(net, ids, taps) -> dict:
    from nnsight import NNsight

    model = NNsight(net)

    def one() -> None:
        with model.trace(ids):
            model.blocks[0].up.output.save()

    def every() -> None:
        with model.trace(ids):
            for number in range(BLOCKS):
                model.blocks[number].up.output.save()
                model.blocks[number].output.save()

    return {"nnsight one": one, "nnsight all": every}


def step(num_steps: int) -> None:
    from mappnb.testing.gpt_train import run_training

    folder = tempfile.mkdtemp(prefix="mappnb-bench-")
    plan = {"rules": [{"points": ["all"], "mode": "stats", "every": 2}]}
    recording = session.record(f"{folder}/run", plan="base", activations=plan)
    times, last = [], [time.process_time()]

    def on_step(report) -> None:
        now = time.process_time()
        times.append(now - last[0])
        last[0] = time.process_time()

    settings = TrainSettings(
        layers=4, hidden=512, heads=8, sequence_length=128, global_batch=4, steps=num_steps, device="cpu"
    )
    try:
        with recording, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run_training(settings, on_step=on_step)
            problem = recording.meta.get("degraded_activations")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    assert not problem, problem
    cpu_s = np.array(times[2:]).reshape(-1, 2)  # even steps are captured
    cost = np.median(cpu_s[:, 0] - cpu_s[:, 1])
    boot = np.median(np.random.default_rng(0).choice(cpu_s[:, 0] - cpu_s[:, 1], (4000, len(cpu_s))), axis=1)
    low, high = np.quantile(boot, [0.05, 0.95])
    base = np.median(cpu_s[:, 1])
    print(
        f"default plan: a captured step {cost / base:.1%} ({low / base:.1%} to {high / base:.1%}) of a step of {base * 1e3:.0f} ms CPU "
        f"(goal 10 %), averaged over ten steps {cost / base / 10:.2%} (goal 3 %); {len(cpu_s)} pairs"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--turns", type=int, default=60)
    parser.add_argument("--only", choices=["points", "step"])
    args = parser.parse_args()
    if args.only != "step":
        points(args.turns)
    if args.only != "points":
        step(args.steps - args.steps % 2 + 2)


if __name__ == "__main__":
    main()
