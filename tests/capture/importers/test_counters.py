"""Counter samples become rows of run.metrics."""

from __future__ import annotations

import numpy as np
from capture.importers.trace_files import document, event

import mappnb
from mappnb.capture.importers import import_trace


def counter(name, ts, pid=1, **args):
    return {"ph": "C", "name": name, "pid": pid, "ts": ts, "args": args}


def test_counters_of_kineto(tmp_path):
    rows = [event(ts=1.7e15, dur=9), event(cat="kernel", name="k", ts=1.7e15 + 1, args={"stream": 7})]
    rows += [counter("GPU power", 1.7e15 + i, watts=300.5 + i) for i in range(3)]
    rows += [counter("memory", 1.7e15 + 2.5, used=2e9, free=5, note="text"), counter("none", 1.7e15, x="y")]
    rows += [{"ph": "C", "name": "no args", "ts": 1.7e15}]
    (tmp_path / "a.json").write_bytes(document(rows, distributedInfo={"rank": 0}))
    report = import_trace(tmp_path / "a.json", tmp_path / "run")
    metrics = mappnb.attach(tmp_path / "run").metrics
    assert metrics.name.values.tolist() == ["GPU power"] * 3 + ["memory: used", "memory: free"]
    assert metrics.value.values.tolist() == [300.5, 301.5, 302.5, 2e9, 5]
    assert (np.diff(metrics.time_ns.values) == [1000, 1000, 500, 0]).all() and set(metrics["index"].values) == {0}
    assert report.skipped == {"counter samples without a number": 2}


def test_counters_of_the_processes_of_a_chrome_trace(tmp_path):
    rows = [event(ph="M", name="process_name", pid=p, args={"name": f"rank {p - 4}"}) for p in (4, 5)]
    rows += [event(ts=10, pid=p, cat="x") for p in (4, 5)]
    rows += [counter("load", 12 + p, pid=p, value=p) for p in (4, 5, 5)]
    (tmp_path / "a.json").write_bytes(document(rows))
    report = import_trace(tmp_path / "a.json", tmp_path / "run", format="chrome")
    metrics = mappnb.attach(tmp_path / "run").metrics
    found = zip(
        metrics["rank"].values.tolist(), metrics.name.values.tolist(), metrics.value.values.tolist(), strict=True
    )
    assert sorted(found) == [(0, "load", 4.0), (1, "load", 5.0), (1, "load", 5.0)]
    assert set(report.skipped) == {"names of processes and threads"}
