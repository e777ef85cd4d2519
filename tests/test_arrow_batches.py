"""Batches laid out by hand are those that Arrow reads: every column, its metadata, and the next message after it."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mappnb.arrow_batches import BatchLayout
from mappnb.segment_writer import TableWriter, _array, _text
from mappnb.table_specs import META, TABLES

KINDS = {
    "i8": st.integers(-(2**63), 2**63 - 1),
    "i2": st.integers(-(2**15), 2**15 - 1),
    "f8": st.floats(),
    "str": st.text(),
}


def read_back(schema: pa.Schema, messages: list[bytes]) -> list[tuple[pa.RecordBatch, dict[bytes, bytes]]]:
    """Every batch of a stream with its metadata, checked by Arrow itself."""
    reader, out = pa.ipc.open_stream(pa.py_buffer(schema.serialize().to_pybytes() + b"".join(messages))), []
    for _ in messages:
        batch, meta = reader.read_next_batch_with_custom_metadata()
        batch.validate(full=True)
        out.append((batch, dict(meta)))
    return out


@settings(max_examples=100, deadline=None)
@given(
    data=st.data(), kinds=st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=6), metas=st.lists(st.binary())
)
def test_arrow_reads_what_was_laid_out(data, kinds, metas):
    types = {"str": pa.string()}
    schema = pa.schema([(f"c{i}", types.get(k) or pa.from_numpy_dtype(np.dtype(k))) for i, k in enumerate(kinds)])
    layout, messages, wanted = BatchLayout([k == "str" for k in kinds], META), [], []
    for meta in metas:
        rows = data.draw(st.integers(0, 9))
        columns = [data.draw(st.lists(KINDS[k], min_size=rows, max_size=rows)) for k in kinds]
        arrays = [np.array(c, object if k == "str" else k) for c, k in zip(columns, kinds, strict=True)]
        buffers = [b for a, k in zip(arrays, kinds, strict=True) for b in (_text(a) if k == "str" else (a.tobytes(),))]
        messages.append(layout.message(rows, buffers, meta))
        assert len(messages[-1]) % 8 == 0
        wanted.append(pa.record_batch([_array(a, f.type) for a, f in zip(arrays, schema, strict=True)], schema=schema))
    for (batch, found), want, meta in zip(read_back(schema, messages), wanted, metas, strict=True):
        assert found == {META: meta}
        for a, b in zip(batch, want, strict=True):
            np.testing.assert_array_equal(a.to_numpy(zero_copy_only=False), b.to_numpy(zero_copy_only=False))


@pytest.mark.parametrize("rows", [0, 1, 5])
def test_records_and_columns_are_written_alike(tmp_path, rows, rng):
    """An array of records gives byte for byte the file that its columns give."""
    spec = TABLES["events"]
    records = np.zeros(rows, [(k, d) for k, d in spec.columns.items()])
    for name in records.dtype.names:
        records[name] = rng.integers(0, 100, rows) if name != "flags" else 0
    columns = {k: np.ascontiguousarray(records[k]) for k in spec.columns}
    files = []
    for name, given_rows in (("records", records), ("columns", columns)):
        table = TableWriter(tmp_path / name, spec, {"run_id": "r"}, site=lambda _i: ("host", "x"))
        table.append(given_rows, meta={"now_ns": 1})
        files.append((tmp_path / name / "open-000000.arrows").read_bytes())
        table.close()
        files.append(b"".join(p.read_bytes() for p in sorted((tmp_path / name).glob("*.parquet"))))
    assert files[:2] == files[2:]
