"""Importing Kineto JSON: CPU seconds from files to columns against other loaders, 64 ranks against 8, and peak memory.

python tests/bench/bench_import.py [--events 50000] [--pairs 3] [--hta PYTHON]
python tests/bench/bench_import.py --memory 400000

Each loader runs in its own process, in turns with ours, its libraries imported before the clock starts; a ratio is of one turn,
and the median is shown. All make one table sorted by time: ts, dur, tid, name, category, correlation, rank; ours reads besides
what the importer needs of collectives.
``--hta``: a Python with HolisticTraceAnalysis 0.5.0 and pandas 2.3.3 (it cannot load such traces with pandas 3).
"""

from __future__ import annotations

import argparse
import glob
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

RANKS = 8
OPS = ["aten::mm", "aten::addmm", "aten::layer_norm", "aten::gelu", "aten::add_", "aten::copy_", "aten::bmm"]
KERNELS = [
    f"void at::native::vectorized_elementwise_kernel<4, Functor{i}, std::array<char*, 3ul> >(int, Functor{i}, std::array<char*, 3ul>)"
    for i in range(24)
] + [
    f"sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize{t}x128x64_warpgroupsize1x1x1_execute_segment_k_off"
    for t in (64, 128, 192, 256)
]


def generate(folder: Path, events: int) -> None:
    """Write a trace per rank: CPU ops, launches, kernels; each tenth kernel an all-reduce of 8 ranks."""
    folder.mkdir(parents=True, exist_ok=True)
    for rank in range(RANKS):
        rows = list(_rows(rank, events // 3))
        head = {
            "schemaVersion": 1,
            "deviceProperties": [],
            "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": RANKS},
        }
        text = json.dumps(head)[:-1] + ', "traceEvents": [\n' + ",\n".join(json.dumps(r) for r in rows) + "\n]}"
        (folder / f"rank{rank}.json").write_text(text)


def _rows(rank: int, n: int) -> Any:
    rng = np.random.default_rng(rank)
    length, gap = np.round(rng.gamma(4.0, 10.0, n), 3).tolist(), np.round(rng.gamma(3.0, 3.0, n), 3).tolist()
    host, ts, end = {"pid": 1000 + rank, "tid": 1000 + rank}, 1.7e15, 0.0
    for i in range(n):
        ts += 2 * (gap[i] + 8)
        start = max(ts + 12, end + 0.5)
        end = start + length[i]
        args = {"External id": i + 1, "Sequence number": i, "Fwd thread id": 0, "Record function id": 0, "Ev Idx": i}
        common: dict[str, Any] = {"ph": "X", **host}
        yield {**common, "cat": "cpu_op", "name": OPS[i % 7], "ts": round(ts, 3), "dur": gap[i] + 7, "args": args}
        launch = {"External id": i + 1, "cbid": 211, "correlation": i + 1}
        yield {
            **common,
            "cat": "cuda_runtime",
            "name": "cudaLaunchKernel",
            "ts": round(ts + 2, 3),
            "dur": gap[i],
            "args": launch,
        }
        device = {"External id": i + 1, "device": rank, "context": 1, "correlation": i + 1}
        kernel = {"ph": "X", "cat": "kernel", "pid": rank, "ts": round(start, 3), "dur": length[i]}
        if i % 10 == 9:
            call = {
                "Collective name": "allreduce",
                "In msg nelems": 4194304,
                "Out msg nelems": 4194304,
                "Group size": RANKS,
            }
            call |= {"dtype": "BFloat16", "Process Group Name": "0", "Process Group Ranks": str(list(range(RANKS)))}
            name = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
            yield {**kernel, "name": name, "tid": 20, "args": {**device, "stream": 20, **call}}
        else:
            more = {
                "stream": 7,
                "registers per thread": 32,
                "shared memory": 0,
                "blocks per SM": 1.5,
                "warps per SM": 12.0,
            }
            more |= {"grid": [264, 1, 1], "block": [256, 1, 1], "est. achieved occupancy %": 50}
            yield {**kernel, "name": KERNELS[i % len(KERNELS)], "tid": 7, "args": {**device, **more}}


def load_ours(files: list[str]) -> int:
    from mappnb.capture.importers._gather import KINETO_FIELDS
    from mappnb.capture.importers._tracejson import EVENT_FIELDS, TraceText, read_batches

    parts: dict[str, list[Any]] = {}
    for rank, file in enumerate(files):
        trace = TraceText()
        with open(file, "rb") as source:
            chunks = iter(lambda: source.read(1 << 20), b"")
            for batch in read_batches(chunks, trace, fields=(*EVENT_FIELDS, *KINETO_FIELDS)):
                keep = batch["ph"] == ord("X")
                for name in ("ts", "dur", "tid", "name", "cat", "args.correlation"):
                    parts.setdefault(name, []).append(batch[name][keep])
                parts.setdefault("rank", []).append(np.full(int(keep.sum()), rank, np.uint16))
    order = np.argsort(np.concatenate(parts["ts"]), kind="stable")
    table = [np.concatenate(v)[order] for v in parts.values()]
    return len(table[0])


def load_msgspec(files: list[str]) -> int:
    import msgspec

    text, number, real = [("ph", str), ("name", str)], int, float
    kinds = [("ts", real, 0.0), ("dur", real, 0.0), ("pid", number, 0), ("tid", number, 0), ("cat", str, "")]
    args = msgspec.defstruct("Args", [("correlation", int, -1)], gc=False, frozen=True)
    row = msgspec.defstruct("Event", [*text, *kinds, ("args", args, args())], gc=False)
    whole = msgspec.defstruct("Trace", [("traceEvents", list[row])])
    decoder, ids, parts = msgspec.json.Decoder(whole), {}, []
    for rank, file in enumerate(files):
        events = [e for e in decoder.decode(Path(file).read_bytes()).traceEvents if e.ph == "X"]
        names = np.array([ids.setdefault(e.name, len(ids)) for e in events], np.uint16)
        cats = np.array([ids.setdefault(e.cat, len(ids)) for e in events], np.uint8)
        numbers = (np.array([e.ts for e in events]), np.array([e.dur for e in events], np.float32))
        more = (np.array([e.args.correlation for e in events], np.int32), np.array([e.tid for e in events], np.int32))
        parts.append((*numbers, names, cats, *more, np.full(len(events), rank, np.uint16)))
    order = np.argsort(np.concatenate([p[0] for p in parts]), kind="stable")
    table = [np.concatenate([p[k] for p in parts])[order] for k in range(7)]
    return len(table[0])


def load_pandas(files: list[str]) -> int:
    import pandas as pd

    frames = []
    for rank, file in enumerate(files):
        frame = pd.DataFrame(json.loads(Path(file).read_bytes())["traceEvents"])
        frame = frame[frame.ph == "X"]
        frame["correlation"] = [a.get("correlation", -1) for a in frame.args]
        frame["rank"] = rank
        frames.append(frame.drop(columns=["args", "ph"]))
    return len(pd.concat(frames).sort_values("ts", kind="stable"))


def load_import(files: list[str]) -> int:
    """The whole import: parse, link, classify, nest, sort, write."""
    import mappnb

    with tempfile.TemporaryDirectory() as folder:
        return mappnb.import_trace(files, Path(folder) / "run", rank_from=r"rank(\d+)").num_events


def read_only(files: list[str]) -> int:
    from mappnb.capture.importers._gather import KINETO_FIELDS
    from mappnb.capture.importers._tracejson import EVENT_FIELDS, TraceText, read_batches

    trace = TraceText()
    for file in files:
        with open(file, "rb") as source:
            for _ in read_batches(
                iter(lambda: source.read(1 << 20), b""), trace, fields=(*EVENT_FIELDS, *KINETO_FIELDS)
            ):
                pass
    return trace.num_rows


LOADERS = {
    "ours": load_ours,
    "msgspec": load_msgspec,
    "json_pandas": load_pandas,
    "import": load_import,
    "read": read_only,
}
LIBRARIES = {
    "ours": ["mappnb.capture.importers"],
    "read": ["mappnb.capture.importers"],
    "msgspec": ["msgspec"],
    "json_pandas": ["pandas"],
    "import": ["mappnb.capture.importers.kineto", "mappnb.capture.importers.chrome", "mappnb.analysis"],
}
HTA = """
import os, sys
from hta.trace_analysis import TraceAnalysis
start = sum(os.times()[:4])
loaded = TraceAnalysis(trace_dir=sys.argv[1])
count = sum(map(len, loaded.t.traces.values()))
print("\\n", count, sum(os.times()[:4]) - start, int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]) / 1024)
"""


def peak_mb() -> float:
    """Peak resident memory in MiB of this program alone: ``ru_maxrss`` would hold that of the process it was forked from."""
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) / 1024


def measure(*command: str) -> tuple[float, float, int]:
    """Return (CPU seconds, peak resident MB, events) of a loader in its own process."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=env).stdout.split()
    return float(out[-2]), float(out[-1]), int(out[-3])


def ours(mode: str, pattern: str) -> tuple[float, float, int]:
    return measure(sys.executable, __file__, "--mode", mode, "--files", pattern)


def verdict(good: bool) -> str:
    return "met" if good else "MISSED"


def compare(name: str, other: Any, pattern: str, pairs: int, goal: float) -> float:
    """Run a loader and ours in turns; return the median ratio of CPU seconds."""
    ratios, last = [], (0.0, 0.0, 0)
    for turn in range(pairs + 1):
        last, mine = other(), ours("ours", pattern)
        if turn:  # the first warms the cache
            ratios.append(last[0] / mine[0])
    ratio = statistics.median(ratios)
    span = f"{min(ratios):.1f}-{max(ratios):.1f}"
    print(
        f"{name:13}{last[0]:7.2f} s CPU {last[1]:6.0f} MB  {ratio:5.1f} x ours ({span}; goal >= {goal:g}: {verdict(ratio >= goal)})"
    )
    return ratio


def ranks_64(folder: Path) -> None:
    """64 files against 8: the cost of an event."""
    many = folder / "many"
    many.mkdir()
    for rank in range(64):
        os.link(folder / "few" / f"rank{rank % RANKS}.json", many / f"rank{rank}.json")
    for mode in ("ours", "import"):
        ratios = []
        for _ in range(3):
            few, lots = ours(mode, f"{folder}/few/*.json"), ours(mode, f"{many}/*.json")
            ratios.append(lots[0] / lots[2] / (few[0] / few[2]))
        ratio = statistics.median(ratios)
        each = 1e9 * lots[0] / lots[2]
        print(
            f"64 ranks, {mode:7}{each:6.0f} ns an event, {ratio:.2f} x that of 8 (goal <= 1.20: {verdict(ratio <= 1.2)})"
        )


def memory(folder: Path, events: int) -> None:
    """Peak memory of the reader and of an import, for a file and one of four times its size; beyond a file of 300 events."""
    for n, name in ((300, "small"), (events, "one"), (4 * events, "four")):
        (folder / name).mkdir()
        head = {"distributedInfo": {"rank": 0, "world_size": 1}, "deviceProperties": []}
        with open(folder / name / "rank0.json", "w") as sink:
            sink.write(json.dumps(head)[:-1] + ', "traceEvents": [')
            sink.writelines(("," if i else "") + json.dumps(r) for i, r in enumerate(_rows(0, n // 3)))
            sink.write("]}")
    for mode in ("read", "import"):
        small, one, four = (ours(mode, f"{folder}/{n}/*.json") for n in ("small", "one", "four"))
        more, most = one[1] - small[1], four[1] - small[1]
        print(f"memory, {mode:7}{more:6.1f} MiB for {one[2]:,} events, {most:.1f} MiB for {four[2]:,}")
        if mode == "read":
            print(f"  independent of the size of the file: {verdict(most - more < 8)}")
            continue
        for size, (_, _, count) in ((more, one), (most, four)):
            each = size * 2**20 / count
            print(f"  {each:.0f} bytes an event of {count:,} (goal <= 100: {verdict(each <= 100)})")


def main() -> int:
    """Run all; returns 0."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--events", type=int, default=50_000)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--hta", help="a Python that has HolisticTraceAnalysis 0.5.0")
    parser.add_argument(
        "--memory", type=int, help="measure only the peak memory, of this many events and of four times as many"
    )
    parser.add_argument("--mode", choices=LOADERS)
    parser.add_argument("--files", default="")
    args = parser.parse_args()
    if args.mode:
        for module in LIBRARIES[args.mode]:
            importlib.import_module(module)
        start = time.process_time()
        count = LOADERS[args.mode](sorted(glob.glob(args.files)))
        print(count, time.process_time() - start, peak_mb())
        return 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if args.memory:
            memory(folder, args.memory)
            return 0
        generate(folder / "few", args.events)
        pattern = f"{folder}/few/*.json"
        size = sum(f.stat().st_size for f in (folder / "few").iterdir())
        cpu, peak, n = ours("ours", pattern)
        print(
            f"ours         {cpu:7.2f} s CPU {peak:6.0f} MB  {n:,} events, {size / 1e6:.0f} MB: {size / 1e6 / cpu:.0f} MB/s"
        )
        compare("msgspec+numpy", lambda: ours("msgspec", pattern), pattern, args.pairs, 2)
        compare("json+pandas", lambda: ours("json_pandas", pattern), pattern, args.pairs, 8)
        if args.hta:
            compare("HTA 0.5", lambda: measure(args.hta, "-c", HTA, str(folder / "few")), pattern, args.pairs, 15)
        cpu, peak, n = ours("import", pattern)
        print(f"import_trace {cpu:7.2f} s CPU {peak:6.0f} MB  {1e6 * cpu / n:.2f} µs an event, all of it")
        ranks_64(folder)
        memory(folder, 2 * args.events)
    return 0


if __name__ == "__main__":
    sys.exit(main())
