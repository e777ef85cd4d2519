"""Rows by the native decoder: equal to pyarrow's on whatever the writer makes, refused otherwise, and never a crash."""

from __future__ import annotations

import random
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st

import mappnb
from mappnb import _core, analysis
from mappnb.analysis import _work_feed, _work_rows
from mappnb.layout import Layout
from mappnb.testing import generate_run

KINDS = {"a": np.int64, "b": np.int32, "c": np.int16, "d": np.uint16}
SPLIT = {"a": "BYTE_STREAM_SPLIT", "b": "BYTE_STREAM_SPLIT"}
AS_WRITTEN = {
    "compression": "lz4", "write_statistics": False, "write_page_checksum": True, "use_dictionary": False,
    "column_encoding": SPLIT,
}  # fmt: skip


@st.composite
def columns(draw):
    """Columns of a few numbers again and again, of rising ones and of noise: matches near and far, short and long, and none."""
    n = draw(st.integers(1, 700))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    out = {}
    for name, kind in KINDS.items():
        info = np.iinfo(kind)
        shape = draw(st.sampled_from(["pattern", "rising", "noise", "runs"]))
        if shape == "pattern":
            few = draw(st.lists(st.integers(int(info.min), int(info.max)), min_size=1, max_size=40))
            values = np.resize(np.array(few, kind), n)
        elif shape == "rising":
            values = (np.arange(n) * draw(st.integers(0, 2**12))).astype(kind)
        elif shape == "noise":
            values = rng.integers(info.min, info.max, n, kind, endpoint=True)
        else:
            values = np.repeat(rng.integers(info.min, info.max, n, kind), rng.integers(1, 90, n))[:n]
        out[name] = values
    return out


def written(path, data, **others):
    pq.write_table(pa.table(data), path, **{**AS_WRITTEN, "row_group_size": 256, **others})
    return str(path)


def read(path, groups, rows, names=tuple(KINDS)):
    out = [np.full(rows, -7, KINDS[n]) if KINDS[n] != np.uint16 else np.zeros(rows, np.uint16) for n in names]
    _core.SegmentColumns().read(path, groups, list(names), out)
    return dict(zip(names, out, strict=True))


@settings(max_examples=150, deadline=None)
@given(columns(), st.sampled_from(["lz4", "none"]), st.sampled_from([None, 300]), st.data())
def test_what_the_writer_makes_is_read_as_pyarrow_reads_it(tmp_path_factory, data, compression, page, choice):
    page = {} if page is None else {"data_page_size": page, "write_batch_size": 64}  # several pages in a row group
    path = written(tmp_path_factory.mktemp("rows") / "x.parquet", data, compression=compression, **page)
    file = pq.ParquetFile(path)
    every = list(range(file.num_row_groups))
    groups = choice.draw(st.lists(st.sampled_from(every), min_size=1, unique=True).map(sorted))
    expected = file.read_row_groups(groups)
    found = read(path, groups, expected.num_rows)
    for name in KINDS:
        np.testing.assert_array_equal(found[name], expected.column(name).to_numpy())


def numbers(n=600):
    return {k: np.arange(n).astype(d) for k, d in KINDS.items()}


@pytest.mark.parametrize(
    ("others", "words"),
    [
        ({"compression": "zstd"}, "stored in another way"),
        ({"use_dictionary": True, "column_encoding": None}, "stored in another way"),
        ({"column_encoding": {"a": "DELTA_BINARY_PACKED"}}, "a page of another kind"),
        ({"data_page_version": "2.0"}, "a page of another kind"),
    ],
)
def test_another_kind_of_parquet_is_refused(tmp_path, others, words):
    path = written(tmp_path / "x.parquet", numbers(), **others)
    with pytest.raises(RuntimeError, match=words):
        read(path, [0, 1, 2], 600)


def test_what_is_not_there_is_refused(tmp_path):
    path = written(tmp_path / "x.parquet", numbers())
    with pytest.raises(RuntimeError, match="no such row group"):
        read(path, [3], 88)
    with pytest.raises(RuntimeError, match="not as many rows"):
        read(path, [0], 255)
    with pytest.raises(RuntimeError, match="cannot be opened"):
        read(str(tmp_path / "y.parquet"), [0], 256)
    with pytest.raises(RuntimeError, match="another width"):
        _core.SegmentColumns().read(path, [0], ["a"], [np.zeros(256, np.int32)])
    with pytest.raises(RuntimeError, match="no column z"):
        _core.SegmentColumns().read(path, [0], ["z"], [np.zeros(256, np.int32)])
    with pytest.raises(ValueError, match="whole numbers"):
        _core.SegmentColumns().read(path, [0], ["a"], [np.zeros(256)])
    holes = written(tmp_path / "z.parquet", {"a": pa.array([1, None, 3], pa.int64())})
    with pytest.raises(RuntimeError, match="has missing values"):
        read(holes, [0], 3, ("a",))


def test_changed_bytes_are_refused_or_read_but_never_a_crash(tmp_path):
    source, rng, refused = written(tmp_path / "x.parquet", numbers()), random.Random(5), 0
    whole = bytearray((tmp_path / "x.parquet").read_bytes())
    assert source
    for i in range(1000):
        data = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        if i % 10 == 0:
            data = data[: rng.randrange(len(data))] + data[-8:]
        path = tmp_path / "y.parquet"
        path.write_bytes(data)
        try:
            read(str(path), [0, 2], 344)
        except RuntimeError:
            refused += 1
    assert refused > 100


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("rows") / "run"
    generate_run(path, layout=Layout(pp=2, dp=2), num_microbatches=3, num_steps=40, seed=8, segment_rows=300)
    return mappnb.attach(path)


def test_pyarrow_reads_what_is_refused(run, monkeypatch):
    expected, asked = analysis.work(run), []

    class Refuses:
        def read(self, *args):
            asked.append(args[0])
            raise RuntimeError("another kind of Parquet")

    monkeypatch.setattr(_work_feed, "Decoder", partial(_work_rows.Decoder, _native=Refuses()))
    xr.testing.assert_identical(analysis.work(run), expected)
    assert asked


def test_nothing_is_refused_of_what_the_recorder_wrote(run, monkeypatch):
    monkeypatch.setattr(_work_rows, "decode_closed", lambda *_: pytest.fail("pyarrow was asked"))
    assert analysis.work(run).present.all()


@pytest.mark.parametrize("passes", [1, 3])
def test_any_number_of_passes_gives_the_same(run, passes, monkeypatch):
    expected = analysis.work(run)
    monkeypatch.setattr(_work_feed, "_PASSES", passes)
    monkeypatch.setattr(_work_feed, "BLOCK_ROWS", 2000)
    xr.testing.assert_identical(analysis.work(run), expected)


def test_a_segment_that_cannot_be_read_is_told_and_left_out(tmp_path):
    generate_run(tmp_path / "run", layout=Layout(dp=2), num_microbatches=2, num_steps=6, seed=1)
    run = mappnb.attach(tmp_path / "run")
    rows = run.events.sizes["event"]
    segment = next((tmp_path / "run").glob("inc=000/events/rank=00001/*.parquet"))
    data = bytearray(segment.read_bytes())
    data[4:2000] = bytes(1996)
    segment.write_bytes(data)
    with pytest.warns(UserWarning, match="rows are left out"):
        table = analysis.work(run)
    assert rows and table["rank"].values.tolist() == [0]
    assert any("rank=00001" in place for place in run.store.problems)
