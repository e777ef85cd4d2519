"""Segment files: what goes in comes out, whole, whatever happens in the middle."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mappnb.segment_writer import TableWriter
from mappnb.segments import read_closed, read_index, read_open
from mappnb.table_specs import TABLES, superseded
from mappnb.terms import Flag

SPEC = TABLES["events"]
HEADER = {"run_id": "r", "rank": 0}


def rows(n: int, *, first: int = 0, **values):
    out = {c: np.full(n, 0 if c in ("thread", "flags") else -1, SPEC.numpy_dtype(c)) for c in SPEC.columns}
    out["site"] = np.zeros(n, np.int32)
    out["start_ns"] = np.arange(first, first + n, dtype=np.int64) * 10
    out["duration_ns"] = np.full(n, 5, np.int64)
    return {**out, **{k: np.asarray(v, SPEC.numpy_dtype(k)) for k, v in values.items()}}


WRITERS: list[TableWriter] = []


def writer(path, **options) -> TableWriter:
    WRITERS.append(TableWriter(path, SPEC, HEADER, site=lambda i: ("compute", f"op{i}", "", "none", -1, ""), **options))
    return WRITERS[-1]


@pytest.fixture(autouse=True)
def let_go():
    """Close the files of writers that a test leaves as a killed process would."""
    yield
    while WRITERS:
        WRITERS.pop().abandon()


def read_all(path):
    """Every row of a table folder, by a reader that shares nothing with Store but the file readers."""
    pieces, sites = [], {}
    numbers = sorted({int(p.name.split("-")[1].split(".")[0]) for p in path.iterdir() if not p.name.endswith(".tmp")})
    for k in numbers:
        closed, stream = path / f"seg-{k:06d}.parquet", path / f"open-{k:06d}.arrows"
        if closed.exists():
            index = read_index(str(closed))
            pieces.append(read_closed(str(closed), SPEC, index=index))
            sites.update(index.meta["sites"])
        else:
            columns, meta = read_open(stream, SPEC)
            pieces.append(columns)
            sites.update(meta.get("sites", {}))
    return {c: np.concatenate([rows(0)[c], *(p[c] for p in pieces)]) for c in SPEC.columns}, sites


@settings(max_examples=30, deadline=None)
@given(sizes=st.lists(st.integers(0, 40), min_size=1, max_size=12), max_rows=st.integers(1, 60), close=st.booleans())
def test_rows_come_back(tmp_path_factory, sizes, max_rows, close):
    path = tmp_path_factory.mktemp("table")
    table, first, rng = writer(path, max_rows=max_rows), 0, np.random.default_rng(0)
    given_rows = []
    for n in sizes:
        batch = rows(
            n, first=first, site=rng.integers(0, 5, n), seq=rng.integers(0, 2**40, n), step=rng.integers(0, 3, n)
        )
        given_rows.append(batch)
        table.append(batch)
        first += n
    if close:
        table.close()
    found, sites = read_all(path)
    for c in SPEC.columns:
        np.testing.assert_array_equal(found[c], np.concatenate([g[c] for g in given_rows]), err_msg=c)
    assert set(sites) == {str(i) for g in given_rows for i in g["site"].tolist()}


def test_closed_segment_is_in_order_of_start(tmp_path, rng):
    table = writer(tmp_path, max_rows=100)
    start = rng.permutation(100) * 7
    table.append(rows(100, start_ns=start))
    index = read_index(str(tmp_path / "seg-000000.parquet"))
    np.testing.assert_array_equal(
        read_closed(str(tmp_path / "seg-000000.parquet"), SPEC, index=index)["start_ns"], np.sort(start)
    )
    assert index.rows == 100


def test_index_finds_every_overlapping_row(tmp_path, rng):
    n = 20_000
    table = writer(tmp_path, max_rows=n)
    start, duration = np.sort(rng.integers(0, 10**6, n)), rng.integers(0, 5000, n)
    table.append(rows(n, start_ns=start, duration_ns=duration, step=start // 10**5))
    path = str(tmp_path / "seg-000000.parquet")
    index = read_index(path)
    for t0, t1 in rng.integers(0, 10**6, (50, 2)):
        t0, t1 = sorted((int(t0), int(t1)))
        want = int(((start < t1) & (start + duration > t0)).sum())
        found = read_closed(path, SPEC, index=index, row_groups=index.overlapping((t0, t1), None))
        assert int(((found["start_ns"] < t1) & (found["start_ns"] + found["duration_ns"] > t0)).sum()) == want
    assert len(index.overlapping(None, (3, 3))) < len(index.row_groups)


@pytest.mark.parametrize("cut", [0.0, 0.01, 0.3, 0.7, 0.99])
def test_a_cut_stream_keeps_its_whole_batches(tmp_path, cut):
    table = writer(tmp_path, max_rows=10**9)
    for i in range(20):
        table.append(rows(10, first=10 * i), meta={"now_ns": i})
    path = tmp_path / "open-000000.arrows"
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * cut)])
    columns, meta = read_open(path, SPEC)
    n = len(columns["site"])
    assert n % 10 == 0 and meta["truncated"]
    np.testing.assert_array_equal(columns["start_ns"], rows(n)["start_ns"])
    assert n >= int(200 * cut) - 40


def test_the_end_of_a_span_replaces_its_open_row(tmp_path):
    table = writer(tmp_path, max_rows=10**9)
    table.append(rows(2, flags=[Flag.OPEN, Flag.OPEN], start_ns=[100, 200], duration_ns=[1, 1]), meta={"now_ns": 300})
    table.append(rows(1, start_ns=[200], duration_ns=[150]), meta={"now_ns": 1000})
    columns, _ = read_open(tmp_path / "open-000000.arrows", SPEC)
    assert columns["start_ns"].tolist() == [100, 200]
    assert columns["duration_ns"].tolist() == [900, 150]  # still open: it lasts until the last sign of life
    table.roll()
    index = read_index(str(tmp_path / "seg-000000.parquet"))
    assert index.rows == 1 and (tmp_path / "open-000001.arrows").exists()  # what is open goes on in the next segment
    table.append(rows(1, start_ns=[100], duration_ns=[2000]))
    table.close()
    found, _ = read_all(tmp_path)
    assert sorted(zip(found["start_ns"].tolist(), found["duration_ns"].tolist(), strict=True)) == [
        (100, 2000),
        (200, 150),
    ]
    assert not (found["flags"] & Flag.OPEN).any()


def test_superseded_by_brute_force(rng):
    for _ in range(50):
        n = int(rng.integers(0, 12))
        batch = rows(n, start_ns=rng.integers(0, 3, n), site=rng.integers(0, 2, n), flags=rng.integers(0, 2, n))
        keys = list(zip(batch["thread"].tolist(), batch["start_ns"].tolist(), batch["site"].tolist(), strict=True))
        want = [bool(batch["flags"][i] & 1) and keys[i] in keys[i + 1 :] for i in range(n)]
        assert superseded(batch).tolist() == want


KILLED = """
import sys, time
from pathlib import Path
sys.path.insert(0, {tests!r})
from test_segments import rows, writer
table = writer(Path({path!r}), max_rows=500)
i = 0
while True:
    table.append(rows(50, first=50 * i)); i += 1
    print(50 * i, flush=True)
"""


@pytest.mark.parametrize("kill", range(8))
def test_kill_9_loses_nothing_that_was_appended(tmp_path, kill, rng):
    code = KILLED.format(tests=os.path.dirname(__file__), path=str(tmp_path / "t"))
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    said = [int(child.stdout.readline())]
    time.sleep(0.02 + 0.03 * kill + float(rng.random()) * 0.02)
    os.kill(child.pid, signal.SIGKILL)
    said += [int(line) for line in child.stdout.read().splitlines(keepends=True) if line.endswith("\n")]
    child.wait()
    child.stdout.close()
    found, _ = read_all(tmp_path / "t")
    n = len(found["start_ns"])
    assert n >= said[-1] and n % 50 == 0
    np.testing.assert_array_equal(np.sort(found["start_ns"]), rows(n)["start_ns"])


def test_cost_of_a_row_does_not_grow_with_the_number_of_segments(tmp_path):
    """A count, not a time: bytes handed to the disk per row stay flat (peers rewrite whole files and grow linearly)."""
    table = writer(tmp_path, max_rows=200)
    written = []
    for i in range(40):
        before = sum(p.stat().st_size for p in tmp_path.iterdir())
        table.append(rows(200, first=200 * i))
        written.append(sum(p.stat().st_size for p in tmp_path.iterdir()) - before)
    assert max(written[5:]) <= 1.2 * min(written[5:])


def test_writing_brings_no_pandas_into_the_job(tmp_path):
    """The first flush must not import half a second of packages beside the training loop."""
    code = (
        f"import sys; sys.path.insert(0, {os.path.dirname(__file__)!r}); import numpy as np\n"
        "from pathlib import Path\n"
        "from mappnb.segment_writer import TableWriter\nfrom mappnb.table_specs import TABLES\n"
        "for name in ('events', 'metrics'):\n"
        "    spec = TABLES[name]\n"
        "    row = {c: np.full(3, '' if d == 'str' else 0, spec.numpy_dtype(c)) for c, d in spec.columns.items()}\n"
        f"    table = TableWriter(Path({str(tmp_path)!r}) / name, spec, {{'run_id': 'r'}},\n"
        "        site=(lambda i: ('', '', '', '', 0, '')) if name == 'events' else None)\n"
        "    table.append(row); table.close()\n"
        "import mappnb; mappnb.record\n"
        "print([m for m in ('pandas', 'xarray', 'fsspec', 'zarr') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
