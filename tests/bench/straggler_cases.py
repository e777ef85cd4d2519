"""Generated runs with a known fault, for bench_stragglers.py: sizes, layouts, faults and noise drawn by seed."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

import mappnb
from mappnb import Layout
from mappnb.capture.importers import import_trace
from mappnb.testing import (
    CheckpointStall,
    Clocks,
    DataSkew,
    HostGaps,
    IntermittentRank,
    MoeImbalance,
    Noise,
    SlowHost,
    SlowLayer,
    SlowLink,
    SlowNic,
    SlowRank,
    SlowStage,
    noise_of,
)

DATA = Path(__file__).parents[3] / "shared" / "data"
MICROBATCH_S = 0.060
"""Forward and backward of one microbatch with generate_run's default costs, s."""
REPORT_SEEDS = 1000
"""Seeds of the report set begin here; those below are for tuning."""


@dataclass
class Case:
    """One run: what to generate, and the cause that is right for each fault."""

    kind: str
    seed: int
    options: dict[str, Any]
    causes: list[set[str]] = field(default_factory=list)


# ------------------------------------------------------------------------------------------------------ layouts
SMALL = [
    {"tp": 4, "dp": 4, "pp": 4}, {"tp": 2, "dp": 8, "pp": 4}, {"tp": 1, "dp": 16, "pp": 4}, {"tp": 8, "dp": 2, "pp": 4},
    {"tp": 4, "dp": 8, "pp": 2}, {"tp": 8, "dp": 1, "pp": 8}, {"tp": 4, "dp": 16, "pp": 1}, {"tp": 2, "dp": 4, "pp": 8},
]  # fmt: skip
MIDDLE = [
    {"tp": 4, "dp": 8, "pp": 4},
    {"tp": 8, "dp": 4, "pp": 4},
    {"tp": 1, "dp": 32, "pp": 4},
    {"tp": 8, "dp": 2, "pp": 8},
]
LARGE = [{"tp": 8, "dp": 8, "pp": 4}, {"tp": 4, "dp": 16, "pp": 8}, {"tp": 8, "dp": 32, "pp": 4}]
SCHEDULES = ("1f1b", "interleaved", "zb_h1")
CHANCE = (0.70, 0.25, 0.05)
"""Of 64, 128, and 256 to 1,024 ranks."""


def draw_layout(rng: np.random.Generator, fits: Callable[[dict[str, int]], bool]) -> tuple[Layout, str]:
    """Draw sizes that fit a fault, and a schedule."""
    menu = (SMALL, MIDDLE, LARGE)[int(rng.choice(3, p=CHANCE))]
    sizes = [s for s in menu if fits(s)]
    size = dict(sizes[int(rng.integers(len(sizes)))])
    name = str(rng.choice(SCHEDULES)) if size["pp"] > 1 else "1f1b"
    if name == "interleaved":
        size["num_chunks"] = 2
    return Layout(**size), name


# ------------------------------------------------------------------------------------------------------ faults
@dataclass
class Draw:
    """What a fault is drawn with."""

    rng: np.random.Generator
    layout: Layout
    num_steps: int
    num_microbatches: int

    @property
    def rank(self) -> int:
        """Any rank."""
        return int(self.rng.integers(self.layout.world_size))

    @property
    def when(self) -> dict[str, int]:
        """From the first step on, or from somewhere in the first half."""
        late = self.rng.random() < 0.5
        return {"first_step": int(self.rng.integers(3, self.num_steps // 2 + 1)) if late else 0}

    @property
    def step_s(self) -> float:
        """About how long a step takes, s."""
        return (self.num_microbatches + self.layout.pp - 1) * MICROBATCH_S

    def between(self, low: float, high: float) -> float:
        """A number between two others."""
        return float(self.rng.uniform(low, high))


def slow_rank(factor: float) -> Callable[[Draw], list[Any]]:
    return lambda d: [SlowRank(rank=d.rank, factor=factor, throttle=d.rng.random() < 0.5, **d.when)]


def slow_layer(d: Draw) -> list[Any]:
    rank = d.rank
    stages = [d.layout.stage(d.layout.coords(rank)["pp"], c) for c in range(d.layout.num_chunks)]
    return [
        SlowLayer(
            rank=rank, layer=LAYERS * stages[0] + int(d.rng.integers(LAYERS)), factor=d.between(2.0, 4.0), **d.when
        )
    ]


LAYERS = 2
"""Layers of a stage (generate_run's default)."""


def slow_host(d: Draw) -> list[Any]:
    host = int(d.rng.integers(d.layout.world_size // 8))
    return [SlowHost(host=host, factor=d.between(1.1, 1.6), throttle=d.rng.random() < 0.5, **d.when)]


def neighbours(d: Draw) -> tuple[int, int]:
    """A rank and the one that holds the next stage of the same replica."""
    rank = d.rank
    at = d.layout.coords(rank)
    at = {k: at[k] for k in ("tp", "cp", "dp", "pp")}
    pp = min(at["pp"], d.layout.pp - 2)
    ends = [d.layout.rank(**{**at, "pp": p}) for p in (pp, pp + 1)]
    return (ends[0], ends[1]) if d.rng.random() < 0.5 else (ends[1], ends[0])


def slow_link(d: Draw) -> list[Any]:
    source, destination = neighbours(d)
    return [SlowLink(source=source, destination=destination, extra_s=d.between(0.25, 1.0) * MICROBATCH_S, **d.when)]


def gaps(gap: str) -> Callable[[Draw], list[Any]]:
    def draw(d: Draw) -> list[Any]:
        ends = (0, d.layout.pp - 1)
        ranks = [r for r in range(d.layout.world_size) if gap != "dataloader" or d.layout.coords(r)["pp"] in ends]
        number = int(d.rng.integers(1, 4))
        length = d.between(0.12, 0.4) * d.step_s / number
        return [HostGaps(rank=int(d.rng.choice(ranks)), length_s=length, per_step=number, gap=gap, **d.when)]

    return draw


def two(d: Draw) -> list[Any]:
    """Two culprits of any kind that a rank alone can be."""
    first, second = (int(r) for r in d.rng.choice(d.layout.world_size, 2, replace=False))
    out = [SlowRank(rank=first, factor=d.between(1.15, 1.6), **d.when)]
    if d.rng.random() < 0.5:
        return [*out, SlowRank(rank=second, factor=d.between(1.15, 1.6), **d.when)]
    return [*out, HostGaps(rank=second, length_s=d.between(0.15, 0.4) * d.step_s, **d.when)]


def moe(d: Draw) -> list[Any]:
    return [MoeImbalance(ep_rank=int(d.rng.integers(d.layout.ep)), factor=d.between(1.3, 2.0), **d.when)]


def any_layout(_: dict[str, int]) -> bool:
    return True


def with_peers(size: dict[str, int]) -> bool:
    """Several hosts hold the ranks of a stage, and a host not all of them."""
    return size["tp"] * size["dp"] > 8


def with_pipeline(size: dict[str, int]) -> bool:
    return size["pp"] > 1


HARDWARE = {"hardware"}
KINDS: dict[str, tuple[Callable[[Draw], list[Any]], set[str], Callable[[dict[str, int]], bool]]] = {
    "none": (lambda d: [], set(), any_layout),
    "rank x1.05": (slow_rank(1.05), HARDWARE, any_layout),
    "rank x1.1": (slow_rank(1.1), HARDWARE, any_layout),
    "rank x1.5": (slow_rank(1.5), HARDWARE, any_layout),
    "rank x2": (slow_rank(2.0), HARDWARE, any_layout),
    "layer": (slow_layer, {"layer"}, any_layout),
    "host": (slow_host, HARDWARE, with_peers),
    "link": (slow_link, {"link"}, with_pipeline),
    "data loader": (gaps("dataloader"), {"host"}, any_layout),
    "gc": (gaps("gc"), {"host"}, any_layout),
    "lengths": (
        lambda d: [DataSkew(packed=False, sigma=d.between(0.3, 1.1), **d.when)],
        {"data_skew"},
        lambda s: s["dp"] > 1,
    ),
    "last stage": (
        lambda d: [SlowStage(stage=d.layout.num_stages - 1, factor=d.between(1.15, 1.8))],
        {"stage_imbalance"},
        lambda s: with_pipeline(s) and with_peers(s),
    ),
    "two": (two, set(), any_layout),
    "intermittent": (
        lambda d: [IntermittentRank(rank=d.rank, factor=d.between(1.3, 2.0), probability=0.2)],
        HARDWARE,
        any_layout,
    ),
}
EXTRA: dict[str, tuple[Callable[[Draw], list[Any]], set[str], Callable[[dict[str, int]], bool]]] = {
    "run queue": (gaps("run_queue"), {"host"}, any_layout),
    "moe": (moe, {"moe_load"}, lambda s: s["tp"] == 1 and s["dp"] % 8 == 0),
    "checkpoint": (
        lambda d: [CheckpointStall(rank=d.rank, extra_s=d.between(0.3, 1.0) * d.step_s)],
        {"checkpoint"},
        any_layout,
    ),
    "nic": (
        lambda d: [SlowNic(host=int(d.rng.integers(d.layout.world_size // 8)), factor=d.between(4, 20), **d.when)],
        {"link"},
        with_peers,
    ),
}
"""Not in the list that the aims name; asked for by name."""


def case_of(kind: str, seed: int) -> Case:
    """Draw the run of a kind and seed."""
    faults_of, causes, fits = (KINDS | EXTRA)[kind]
    number = [*KINDS, *EXTRA].index(kind)
    rng = np.random.default_rng([seed, number])
    layout, name = draw_layout(rng, fits)
    if kind == "moe":
        layout = dataclasses.replace(layout, ep=8)
    num_microbatches = layout.pp * int(rng.integers(2, 4)) if layout.pp > 1 else 8
    large = layout.world_size > 128
    least = 24 if kind == "intermittent" else 12
    num_steps = int(rng.integers(least, 16 if large and least == 12 else 31))
    draw = Draw(rng, layout, num_steps, num_microbatches)
    faults = faults_of(draw)
    options: dict[str, Any] = {
        "layout": layout, "schedule": name, "num_microbatches": num_microbatches, "num_steps": num_steps, "faults": faults,
        "seed": seed * 100 + number, "detail": "layers" if kind == "layer" else "actions",
    }  # fmt: skip
    if kind == "checkpoint":
        options |= {"checkpoint_every": 3}
    if rng.random() < 1 / 3:  # hosts that only NTP keeps together
        options["clocks"] = Clocks(offset_s=1e-3, drift_ppm=20)
    options["noise"] = real_noise(seed) if seed >= REPORT_SEEDS else Noise()
    expected = (
        [HARDWARE if isinstance(f, SlowRank) else {"host"} for f in faults] if kind == "two" else [causes] * len(faults)
    )
    return Case(kind, seed, options, expected)


# ------------------------------------------------------------------------------------------------------ noise
@cache
def traces() -> dict[str, Noise]:
    """The noise of the real traces: AR without its culprit, SE without the effect of lengths, exits of param."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, source, options in (
            ("AR", DATA / "straggler_analysis" / "trace-AR.parquet", {"exclude_ranks": [0]}),
            ("SE", DATA / "straggler_analysis" / "trace-SE.parquet", {"by_length": True}),
            ("param", DATA / "param" / "dlrm_kineto.tar.gz", {}),
        ):
            import_trace(source, f"{folder}/{name}")
            found[name] = noise_of(mappnb.attach(f"{folder}/{name}"), **options)
    exits, ar = found.pop("param").exit_samples_s, found["AR"]
    lasting = {k: getattr(ar, k) for k in ("rank_ratios", "drift_sigma", "drift_memory")}  # which SE's lengths hide
    found["SE"] = dataclasses.replace(found["SE"], **lasting)
    return {name: dataclasses.replace(noise, exit_samples_s=exits) for name, noise in found.items()}


def real_noise(seed: int) -> Noise:
    """Even seeds have the noise of AR, odd ones that of SE."""
    return traces()["SE" if seed % 2 else "AR"]
