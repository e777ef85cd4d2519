"""MegaScan's files per rank: times, steps, groups and layout; and reading in bounded memory."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
from capture.importers.trace_files import event

import mappnb
from mappnb.capture.importers import TraceImportError, import_trace
from mappnb.layout import Layout
from mappnb.terms import UNTOLD_STREAM


def rank_file(folder, layout: Layout, rank: int, *, iterations: int = 3):
    """Rows as MegatronApp's trace.py writes them: ns from each iteration's begin, args beside the fields, on E."""
    at = layout.coords(rank)
    base = {"dp_rk": at["dp"], "pp_rk": at["pp"], "tp_rk": at["tp"], "dev": rank, "g_rk": rank}
    others = [r for group in layout.groups("tp") if rank in group for r in group if r != rank]
    rows = []
    for k in range(iterations):
        rows.append({"name": "iteration", "ph": "B", "pad_before": 1000 if k else 0})
        for m in range(2):
            t = 10_000 * m
            rows.append({"name": "forward", "ph": "B", "rel_ts": t + 100, **base})
            rows.append({"name": "transformer_layer_3", "ph": "B", "rel_ts": t + 200, **base})
            rows.append({"name": "_reduce", "ph": "B", "rel_ts": t + 300, **base})
            rows.append({"name": "_reduce", "ph": "E", "rel_ts": t + 400, **base, "group": others, "data": 4096})
            rows.append({"name": "transformer_layer_3", "ph": "E", "rel_ts": t + 500, **base})
            rows.append({"name": "forward", "ph": "E", "rel_ts": t + 600, **base, "microbatch": m, "model_chunk": 0})
        rows.append(
            {"name": "iteration", "ph": "E", "rel_ts": 20_000, **base, "duration_wall": 25_000, "duration_cuda": 20_000}
        )
    name = f"benchmark-data-{at['dp']}-pipeline-{at['pp']}-tensor-{at['tp']}.json"
    (folder / name).write_text(json.dumps(rows, indent=2))


@pytest.fixture
def layout(tmp_path):
    out = Layout(tp=2, pp=2, dp=2)
    (tmp_path / "traces").mkdir()
    for rank in range(8):
        rank_file(tmp_path / "traces", out, rank)
    return out


def test_files_per_rank(tmp_path, layout):
    report = import_trace(tmp_path / "traces", tmp_path / "run")
    run = mappnb.attach(tmp_path / "run")
    assert report.format == "megascan" and not report.repairs and run.layout == layout
    events = run.events.isel(event=np.flatnonzero(run.events["rank"].values == 5))
    forward = events.isel(event=np.flatnonzero(events.op.values == "forward_step"))
    zero = [0, 26_000, 52_000]  # duration_wall and pad_before of the iterations before
    assert forward.raw_start_ns.values.tolist() == [z + t for z in zero for t in (100, 10_100)]
    assert forward.duration_ns.values.tolist() == [500] * 6 and forward["step"].values.tolist() == [0, 0, 1, 1, 2, 2]
    assert forward.microbatch.values.tolist() == [0, 1] * 3 and set(forward.stage.values) == {1}
    layer = events.isel(event=np.flatnonzero(events.op.values == "layer"))
    assert set(layer.layer.values) == {3} and set(layer.depth.values) == {2}


def test_collectives_match_by_group_and_order(tmp_path, layout):
    import_trace(tmp_path / "traces", tmp_path / "run")
    calls = mappnb.analysis.match(mappnb.attach(tmp_path / "run"))
    assert (
        calls.sizes == {"call": 4 * 6, "member": 2}
        and calls.complete.all()
        and set(calls.bytes.values.ravel()) == {4096}
    )


def test_one_rank_twice(tmp_path, layout):
    (tmp_path / "traces" / "copy.json").write_bytes(next((tmp_path / "traces").glob("*-1.json")).read_bytes())
    with pytest.raises(TraceImportError, match=r"rank \d is claimed by both"):
        import_trace(tmp_path / "traces", tmp_path / "run")


def test_arrows_stand_in_for_correlation(tmp_path):
    rows = [event(cat="cpu_op", ts=1.7e15, dur=10, pid=1, tid=1)]
    rows.append(event(ph="s", id=7, cat="ac2g", name="ac2g", ts=1.7e15 + 2, pid=1, tid=1))
    rows.append(event(cat="kernel", name="k", ts=1.7e15 + 9, dur=4, pid=0, tid=3))
    rows.append(event(ph="f", bp="e", id=7, cat="ac2g", name="ac2g", ts=1.7e15 + 9, pid=0, tid=3))
    (tmp_path / "a.json").write_text(json.dumps({"distributedInfo": {"rank": 0}, "traceEvents": rows}))
    import_trace(tmp_path / "a.json", tmp_path / "run")
    events = mappnb.attach(tmp_path / "run").events
    assert events.issue_ns.values.tolist() == [-1, 1_700_000_000_000_002_000]
    assert events.stream.values.tolist() == [-1, UNTOLD_STREAM + 1]  # its args tell none


_PEAK = """
import sys
from mappnb.capture.importers import import_trace
from mappnb.capture.importers._tracejson import TraceText, read_batches
peak = lambda: int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]) / 1024
if sys.argv[2] == "read":
    with open(sys.argv[1], "rb") as source:
        for _ in read_batches(iter(lambda: source.read(1 << 20), b""), TraceText()):
            pass
else:
    import_trace(sys.argv[1], sys.argv[2])
print(peak())
"""


def _peak_mb(*args: str) -> float:
    done = subprocess.run([sys.executable, "-c", _PEAK, *args], capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_memory_is_bounded(tmp_path):
    sizes = {"tiny": 300, "one": 150_000, "four": 600_000}
    for name, n in sizes.items():
        with open(tmp_path / f"{name}.json", "w") as sink:
            sink.write('{"distributedInfo": {"rank": 0}, "traceEvents": [')
            sink.writelines(("," if i else "") + json.dumps(event(ts=i, args={"correlation": i})) for i in range(n))
            sink.write("]}")
    read = {n: _peak_mb(str(tmp_path / f"{n}.json"), "read") for n in sizes}
    assert read["four"] - read["one"] < 4
    whole = {n: _peak_mb(str(tmp_path / f"{n}.json"), str(tmp_path / f"run-{n}")) for n in sizes}
    assert (whole["four"] - whole["tiny"]) * 2**20 / sizes["four"] <= 100
