"""What we export as a Chrome trace comes back as it was."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import xarray as xr

import mappnb
from mappnb import Layout, analysis
from mappnb.capture.importers import import_trace
from mappnb.schema import EVENTS, empty
from mappnb.terms import UNTOLD_STREAM, Flag
from mappnb.testing.runs import make_run

KEPT = ("rank", "category", "op", "name", "phase", "layer", "dtype", "step", "stage", "chunk", "microbatch")
KEPT += ("bytes", "group", "seq", "peer", "stream", "thread", "flags", "duration_ns")


def rows_of(events: xr.Dataset) -> Counter:
    start = events.start_ns.values - events.start_ns.values.min()
    return Counter(zip(start.tolist(), *(events[k].values.tolist() for k in KEPT), strict=True))


@pytest.mark.parametrize("name", ["a name of nothing known", ""])
def test_a_run_comes_back(tmp_path, name):
    run = mappnb.attach(make_run(tmp_path / "run", layout=Layout(pp=2, dp=2), num_steps=2, name=name, num_hosts=2))
    import_trace(analysis.export(run, tmp_path / "t.json"), tmp_path / "again")
    again = mappnb.attach(tmp_path / "again")
    assert rows_of(again.sel()) == rows_of(run.sel())
    assert again.layout == run.layout and again.groups.keys() == run.groups.keys() and repr(again) == repr(run)
    first, second = analysis.match(run), analysis.match(again)
    assert first.sizes == second.sizes and (first.complete.values == second.complete.values).all()


def test_odd_layers_streams_and_restarts_come_back(tmp_path):
    data = empty(EVENTS, {"event": 4})
    for key, values in {
        "incarnation": [0, 0, 0, 1], "rank": [5, 5, 5, 5], "step": [0, 0, 1, 1], "category": ["compute"] * 3 + ["host"],
        "op": ["layer", "layer", "gemm", "span"], "name": ["zork", "", "k", "send 3"], "phase": ["forward", "none", "none", "none"],
        "layer": [3, 4, -1, -1], "start_ns": [1000, 2000, 3000, 4000], "duration_ns": [10, 3, 5, 7], "thread": [0, 0, -1, 2],
        "stream": [-1, -1, UNTOLD_STREAM + 3, -1], "flags": [0, int(Flag.OVERLAPPED), 0, 0], "group": [-1, 2**62 + 1, -1, -1],
    }.items():  # fmt: skip
        data[key][:] = values
    events = xr.Dataset({k: ("event", v) for k, v in data.items()})
    path = analysis.export(events, tmp_path / "t.json")
    report = import_trace(path, tmp_path / "run")
    again = mappnb.attach(tmp_path / "run").sel()
    assert "restarts of the exported run are put together" in str(report) and set(again["rank"].values) == {5}
    assert _without(rows_of(again), "thread") == _without(rows_of(events), "thread")
    assert "device lane 3" in path.read_text() and "transfers in flight" not in path.read_text()


def _without(rows: Counter, name: str) -> Counter:
    at = 1 + KEPT.index(name)
    return Counter({k[:at] + k[at + 1 :]: n for k, n in rows.items()})


def test_a_foreign_trace_with_an_op_is_not_ours(tmp_path):
    (tmp_path / "a.json").write_text(
        '[{"ph": "X", "name": "x", "cat": "disk", "ts": 1, "dur": 2, "pid": 1, "tid": 1, "args": {"op": "read"}}]'
    )
    import_trace(tmp_path / "a.json", tmp_path / "run", format="chrome")
    events = mappnb.attach(tmp_path / "run").events
    assert (events.category.item(), events.op.item(), events.name.item()) == ("host", "disk", "x")
    assert np.all(events.group.values == -1)
