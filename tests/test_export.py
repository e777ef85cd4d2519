"""Export: every span comes back, flows are whole, names are escaped, texts are redacted, and SQL reads what is written."""

from __future__ import annotations

import gzip
import json
import re
from collections import Counter
from decimal import Decimal
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import xarray as xr

import mappnb
from mappnb import Layout, analysis
from mappnb.analysis.export import steps_of
from mappnb.cli import main
from mappnb.errors import MappnbError
from mappnb.schema import EVENTS, empty
from mappnb.terms import Flag
from mappnb.testing.runs import make_run

EVIL = 'a"b\\c\n</script>\u2028'


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("export") / "run"
    return mappnb.attach(make_run(path, layout=Layout(pp=2, dp=2), num_steps=3, name=EVIL, num_hosts=2))


def trace_of(path) -> dict:
    data = path.read_bytes()
    return json.loads(gzip.decompress(data) if path.name.endswith(".gz") else data, parse_float=Decimal)


@pytest.mark.parametrize("name", ["t.json", "t.json.gz"])
def test_every_span_comes_back(run, tmp_path, name):
    trace = trace_of(analysis.export(run, tmp_path / name))
    spans = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    got = Counter(
        (e["pid"], e["name"], e["cat"], e["args"]["op"], int(e["ts"] * 1000), int(e["dur"] * 1000)) for e in spans
    )
    ev = run.sel()
    label = np.where(ev.name.values == "", ev.op.values, ev.name.values)
    columns = (ev["rank"], label, ev.category, ev.op, ev.start_ns, ev.duration_ns)
    assert got == Counter(zip(*(np.asarray(c).tolist() for c in columns), strict=True))
    assert any(e["name"] == EVIL for e in spans)
    one = next(e for e in spans if e["args"]["op"] == "recv")
    assert {"step", "microbatch", "bytes", "group", "seq", "peer"} <= one["args"].keys()
    assert "layer" not in one["args"] and "phase" not in one["args"]
    assert [p for p in tmp_path.iterdir() if p.name != name] == []


def test_flows_join_the_members_of_each_call(run, tmp_path):
    trace = trace_of(analysis.export(run, tmp_path / "t.json", step=1))["traceEvents"]
    flows: dict[int, list] = {}
    for e in trace:
        if e["ph"] in "stf":
            flows.setdefault(e["id"], []).append(e)
    calls = analysis.match(run, step=1)
    assert len(flows) == calls.sizes["call"]
    spans = {(e["pid"], e["tid"], e["ts"]) for e in trace if e["ph"] == "X"}
    for parts in flows.values():
        assert [p["ph"] for p in parts] == ["s", *["t"] * (len(parts) - 2), "f"]
        assert all((p["pid"], p["tid"], p["ts"]) in spans for p in parts)
        assert [p["ts"] for p in parts] == sorted(p["ts"] for p in parts)
    sizes = Counter(len(p) for p in flows.values())
    assert sizes == Counter((calls["rank"] >= 0).sum("member").values.tolist())


def test_names_of_processes_and_tracks(run, tmp_path):
    trace = trace_of(analysis.export(run, tmp_path / "t.json", step=0))["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in trace if e["ph"] == "M" and e["name"] == "process_name"}
    assert names[3].startswith("rank 3 (pp1 dp1) ") and len(names) == 4
    assert {e["args"]["name"] for e in trace if e["name"] == "thread_name"} == {"thread 0"}


def test_simulated_events_and_transfers_in_flight(tmp_path):
    sched = mappnb.schedule("1f1b", num_stages=4, num_microbatches=8)
    ds = mappnb.simulate(
        sched, mappnb.Costs(forward_s=0.01, backward_input_s=0.01, backward_weight_s=0.01, p2p_s=0.012)
    )
    trace = trace_of(ds.mapp.export(tmp_path / "t.json"))["traceEvents"]
    spans = [e for e in trace if e["ph"] == "X"]
    assert len(spans) == ds.sizes["event"]
    tracks: dict[tuple, list] = {}
    for e in spans:
        tracks.setdefault((e["pid"], e["tid"]), []).append((e["ts"], e["ts"] + e["dur"]))
    assert max(tid for _, tid in tracks) >= 100_000
    for (_, tid), mine in tracks.items():  # none of these cross
        if tid >= 100_000:
            mine.sort()
            assert all(b[0] >= a[1] for a, b in pairwise(mine))


def hand_made() -> xr.Dataset:
    data = empty(EVENTS, {"event": 3})
    for key, values in {
        "incarnation": [0, 1, 1], "rank": [2, 2, 2], "step": [0, 0, 0], "category": ["compute", "host", "host"],
        "op": ["layer", "span", "span"], "name": ["layers.0", "my secret prompt", "my secret prompt"], "phase": ["none"] * 3,
        "start_ns": [-1_234_567, 2**60 + 1, 2**60 + 5], "duration_ns": [1, 3, 0], "stream": [7, -1, -1], "thread": [0, 3, 3],
        "flags": [0, int(Flag.OPEN), 0], "group": [2**62 + 1, -1, -1],
    }.items():  # fmt: skip
        data[key][:] = values
    return xr.Dataset({k: ("event", v) for k, v in data.items()})


def test_large_and_negative_times_are_exact_and_incarnations_apart(tmp_path):
    trace = trace_of(analysis.export(hand_made(), tmp_path / "t.json"))["traceEvents"]
    spans = [e for e in trace if e["ph"] == "X"]
    assert [(e["pid"], e["tid"], int(e["ts"] * 1000)) for e in spans] == [
        (2, 1007, -1_234_567),
        (1_000_002, 3, 2**60 + 1),
        (1_000_002, 3, 2**60 + 5),
    ]
    assert spans[0]["args"]["group"] == str(2**62 + 1) and spans[1]["args"]["flags"] == 1


@pytest.mark.parametrize("name", ["t.json", "t.parquet"])
def test_redacted(tmp_path, name):
    path = analysis.export(hand_made(), tmp_path / name, redact=True)
    assert b"secret" not in path.read_bytes()
    plain = analysis.export(hand_made(), tmp_path / ("plain-" + name))
    if name == "t.json":
        assert [e["name"] for e in trace_of(path)["traceEvents"] if e["ph"] == "X"] == ["layers.0", "span0", "span0"]
        assert b"my secret prompt" in plain.read_bytes()
    else:
        assert pq.read_table(path)["name"].to_pylist() == ["layers.0", "span0", "span0"]
        assert pq.read_table(plain)["name"].to_pylist()[1] == "my secret prompt"


def test_redacted_hosts(run, tmp_path):
    host = run.ranks.host.iloc[0]
    texts = [analysis.export(run, tmp_path / f"{r}.json", redact=r, step=0).read_text() for r in (False, True)]
    names = [{e["args"]["name"] for e in json.loads(t)["traceEvents"] if e["name"] == "process_name"} for t in texts]
    assert any(n.endswith(host) for n in names[0]) and {n.split()[-1] for n in names[1]} == {"host0", "host1"}


def test_parquet_is_the_dataset(run, tmp_path):
    path = analysis.export(run, tmp_path / "t.parquet", step=slice(1, 2))
    table = pq.read_table(path)
    frame = table.to_pandas().sort_values(["start_ns", "rank", "depth"], ignore_index=True)
    ev = run.sel(step=slice(1, 2)).to_dataframe().sort_values(["start_ns", "rank", "depth"], ignore_index=True)
    for name in EVENTS:
        assert (frame[name].to_numpy() == ev[name].to_numpy()).all(), name
    assert pq.ParquetFile(path).num_row_groups == 4
    meta = json.loads(table.schema.metadata[b"mappnb"])
    assert meta["clock_model"] == ev.attrs.get("clock_model", meta["clock_model"]) and "layout" in meta


def test_the_command(run, tmp_path, capsys):
    out = tmp_path / "t.json.gz"
    assert main(["export", run.path, str(out), "--step", "1:2", "--redact"]) == 0
    assert capsys.readouterr().out.strip() == str(out)
    steps = {e["args"].get("step") for e in trace_of(out)["traceEvents"] if e["ph"] == "X"}
    assert steps == {1, 2}
    assert main(["export", run.path, str(tmp_path / "x"), "--format", "parquet"]) == 0
    assert main(["export", run.path, str(tmp_path / "t.csv")]) == 2
    assert "tells no format; end it in .json" in capsys.readouterr().err
    assert main(["export", run.path, str(tmp_path / "t.json"), "--step", "99"]) == 2
    assert "no events in these steps" in capsys.readouterr().err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["t.json.gz", "x"]  # nothing half written


@pytest.mark.parametrize(
    ("text", "steps"),
    [("7", 7), ("3:9", slice(3, 9)), ("3:", slice(3, None)), (":9", slice(None, 9)), (None, None)],
)
def test_steps(text, steps):
    assert steps_of(text) == steps


@pytest.mark.parametrize("text", ["", "a", "1:2:3", "1-2"])
def test_no_steps(text):
    with pytest.raises(MappnbError, match="expected one step, such as 7"):
        steps_of(text)


def test_unknown_format(run, tmp_path):
    with pytest.raises(MappnbError, match="format 'chrom'; known: chrome, parquet, zarr; did you mean 'chrome'"):
        analysis.export(run, tmp_path / "t.json", format="chrom")


def test_the_importer_reads_it_back(run, tmp_path):
    from mappnb.capture.importers import import_trace

    import_trace(analysis.export(run, tmp_path / "t.json"), tmp_path / "again")
    again, first = mappnb.attach(tmp_path / "again").sel(), run.sel()
    for name in ("rank", "duration_ns"):
        assert Counter(again[name].values.tolist()) == Counter(first[name].values.tolist())
    assert (np.sort(np.diff(np.sort(again.start_ns.values))) == np.sort(np.diff(np.sort(first.start_ns.values)))).all()


def test_sql_of_the_docs(run, tmp_path, monkeypatch):
    duckdb = pytest.importorskip("duckdb", reason="duckdb is not installed; it is in the dev extra")
    page = (Path(__file__).parents[1] / "docs/export.md").read_text()
    monkeypatch.chdir(tmp_path)
    analysis.export(run, "events.parquet")
    frame = run.sel().to_dataframe()
    blocks = re.findall(r"```sql\n(.*?)```", page, re.S)
    base = duckdb.connect()
    results = [base.execute(block.replace("RUN/", f"{run.path}/")).fetchall() for block in blocks]
    totals, last, longest, _, ops = results
    by = frame[frame.step >= 1].groupby(["rank", "category", "op"]).duration_ns.sum()
    assert len(totals) == 20 and all(row[4] == pytest.approx(by[row[:3]] / 1e9) for row in totals)
    calls = analysis.match(run)
    assert sum(row[1] for row in last) == int((calls.op == "all_reduce").sum())
    assert len(longest) == 10 and all(row[6] >= 1 for row in longest)
    median = frame[frame.category == "compute"].groupby(["rank", "op"]).duration_ns.median()
    assert {(r, op): ms for r, op, _, ms in ops} == pytest.approx((median / 1e6).to_dict())
