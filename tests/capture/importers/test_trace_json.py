"""The native trace reader: equal to the plain one on valid JSON, exact in time, and not to be broken."""

from __future__ import annotations

import json
import random
import time
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
from capture.importers.trace_files import (
    DATA,
    FIELDS,
    NEEDS_DATA,
    dlrm_rank0,
    document,
    event,
    mutated,
    read_all,
    real_small,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from mappnb.capture.importers._pytracejson import read_columns
from mappnb.capture.importers._tracejson import MISSING, TEXT_KEY

MUTATIONS = 300
texts = st.text(max_size=12) | st.sampled_from(['a "b"', "C:\\new", "日本", "😀", "\ud800", "}", '"},{"', "\x01", ""])
plain = st.text("abc xyz", max_size=5)
scalars = st.none() | st.booleans() | st.integers() | st.floats() | texts | st.integers().map(str)
arrays = st.lists(st.integers(-9, 9) | plain | st.none() | st.booleans(), max_size=4) | st.dictionaries(
    plain, st.integers(0, 9), max_size=2
)
args_of = st.dictionaries(
    st.sampled_from(["stream", "correlation", "grid", "blocks per SM", "name", "other"]), scalars | arrays, max_size=6
)
field_of = st.sampled_from(["ph", "ts", "dur", "pid", "tid", "name", "cat", "id", "bp", "extra"])
events_of = st.builds(
    lambda fields, args: {"ph": "X", **fields, **({} if args is None else {"args": args})},
    st.dictionaries(field_of, scalars | arrays, max_size=8),
    st.none() | args_of,
)


def twin(text: bytes):
    columns, trace = read_columns(text, fields=FIELDS)
    out = {k: v.tolist() for k, v in columns.items()}
    for where, name, kind in FIELDS:
        key = name if where == "event" else f"args.{name}"
        if kind == "s":
            out[key] = [trace.names[i] if i >= 0 else None for i in out[key]]
        if kind == "k":
            out[key] = [trace.names[x - TEXT_KEY] if 0 <= x - TEXT_KEY < len(trace.names) else x for x in out[key]]
    return out, trace


def native(text: bytes, **options):
    out, trace = read_all(text, **options)
    for name in ("pid", "tid", "id"):
        out[name] = [
            trace.names[x - TEXT_KEY] if 0 <= x - TEXT_KEY < len(trace.names) else x for x in out.get(name, [])
        ]
    return out, trace


@settings(max_examples=80, deadline=None)
@given(
    events=st.lists(events_of, max_size=6),
    more=st.dictionaries(
        st.sampled_from(["schemaVersion", "traceName", "distributedInfo"]), scalars | arrays, max_size=3
    ),
    bare=st.booleans(),
    ascii_only=st.booleans(),
    first=st.booleans(),
    chunk=st.sampled_from([1, 7, 64, 1 << 20]),
    indent=st.sampled_from([None, 1]),
)
def test_equals_the_plain_reader(events, more, bare, ascii_only, first, chunk, indent):
    content = events if bare else {"traceEvents": events, **more} if first else {**more, "traceEvents": events}
    containers = any(isinstance(v, list | dict) for e in events for v in [*e.values(), *e.get("args", {}).values()])
    text = json.dumps(content, ensure_ascii=ascii_only, indent=None if containers else indent).encode(
        "utf-8", "replace"
    )
    expected, plain_trace = twin(text)
    found, trace = native(text, chunk=chunk)
    assert trace.num_rows == plain_trace.num_rows
    for name in expected:
        assert trace.num_rows == 0 or np.array_equal(found[name], expected[name], equal_nan="blocks" in name), name
    assert trace.state == "done" and set(trace.metadata) == set(plain_trace.metadata)
    structural = {
        "truncated",
        "lost_quotes",
        "unescaped_quotes",
        "broken_events",
        "junk_bytes",
        "oversized_events",
        "missing_commas",
    }
    assert not structural & set(trace.repairs)


@given(
    whole=st.integers(0, 9_200_000_000_000_000),
    digits=st.integers(0, 12),
    fraction=st.integers(0, 10**12),
    negative=st.booleans(),
)
def test_times_are_exact(whole, digits, fraction, negative):
    text = f"{'-' if negative else ''}{whole}" + (f".{fraction % 10**digits:0{digits}d}" if digits else "")
    exact = abs(Fraction(Decimal(text)) * 1000)
    rounded = int(exact + Fraction(1, 2)) * (-1 if negative else 1)
    found, _ = read_all(b'[{"ph":"X","ts":' + text.encode() + b',"dur":"' + text.encode() + b'"}]')
    assert found["ts"] == found["dur"] == [rounded]


@pytest.mark.parametrize(
    ("text", "shift", "ns"),
    [
        ("1712195495519689.123", 3, 1712195495519689123),
        ("9007199254740993", 3, 9007199254740993000),  # 2**53 + 1: no double
        ("1712195495519689123", 0, 1712195495519689123),
        ("1.7e15", 3, 1_700_000_000_000_000_000),
        ("0.0005", 3, 1),
        ("0.00049", 3, 0),
        ("1e40", 3, MISSING),
        ("9223372036854775808", 0, MISSING),
    ],
)
def test_times_beyond_doubles(text, shift, ns):
    found, trace = read_all(b'[{"ph":"X","ts":' + text.encode() + b"}]", shift=shift)
    assert found["ts"] == [ns]
    assert trace.repairs == ({} if ns != MISSING else {"out_of_range": 1})


def one(body: bytes):
    """The event of interest between two sound ones; all three must be there."""
    sound = b'{"ph": "X", "name": "sound", "ts": 1, "dur": 1}'
    out, trace = read_all(b'{"traceEvents": [' + sound + b", " + body + b", " + sound + b'], "traceName": "t"}')
    assert out["name"][0] == out["name"][-1] == "sound" and trace.metadata["traceName"] == '"t"'
    return {k: v[1] for k, v in out.items() if len(v) == 3}, trace.repairs


@pytest.mark.parametrize(
    ("body", "name", "repair"),
    [
        (b'{"ph": "X", "name": "say "hi" now", "ts": 2}', 'say "hi" now', "unescaped_quotes"),
        (b'{"ph": "X", "name": "C:\\Windows\\new", "ts": 2}', "C:\\Windows\new", "bad_escapes"),
        (b'{"ph": "X", "name": "tab\there", "ts": 2}', "tab\there", "control_characters"),
        (b'{"ph": "X", "name": "two\nlines", "ts": 2}', "two\nlines", "control_characters"),
        (b'{"ph": "X", "name": "bad \xff byte", "ts": 2}', "bad � byte", "bad_utf8"),
        (b'{"ph": "X", "name": "lost, "cat": "op", "ts": 2}', "lost", "lost_quotes"),
        (b'{"ph": "X", "ts": 2, "name": "lost\n}', "lost", "lost_quotes"),
        (b'{"ph": "X", "ts": 2, "name": "lost}', "lost", "lost_quotes"),
        (b'{"ph": "X", "name": "n" "ts": 2}', "n", "missing_commas"),
        (b'{"ph": "X", "name": "first", "name": "last", "ts": 2}', "last", "duplicate_keys"),
        (b'{"ph": "X", "name": "n", "ts": "2"}', "n", "numbers_as_text"),
        (b'{"ph": "X", "name": "n", "ts": 2, "dur": NaN}', "n", "not_a_number"),
        (b'{"ph": "X", "name": "n", "ts": 2, "dur": undefined}', "n", "bad_values"),
        (b'{"ph": "X", "name": "n", "ts": 2, "args": {"blocks per SM": -Infinity}}', "n", "not_a_number"),
        (b'{"ph": "X", "name": "\\ud83d lone", "ts": 2}', "� lone", "bad_escapes"),
    ],
)
def test_repairs(body, name, repair):
    found, repairs = one(body)
    assert found["name"] == name and found["ts"] == 2000
    assert repairs.get(repair), repairs


def test_a_backslash_before_the_last_quote_costs_no_event():
    found, repairs = one(b'{"ph": "X", "name": "C:\\dir\\", "cat": "c", "ts": 2}')
    assert found["name"].startswith("C:\\dir") and found["ts"] == 2000 and repairs["lost_quotes"] == 1


@pytest.mark.parametrize("body", [b"{]}", b"3", b"nonsense", b'{"a": 1}', b"{}"])
def test_a_broken_event_costs_only_itself(body):
    sound = b'{"ph": "X", "name": "sound", "ts": 1}'
    out, trace = read_all(b'{"traceEvents": [' + sound + b"," + body + b"," + sound + b'], "displayTimeUnit": "ms"}')
    assert out["name"] == ["sound", "sound"] and trace.repairs
    assert trace.metadata == {"displayTimeUnit": '"ms"'}


def test_a_cut_end_keeps_what_came_before():
    text = document([event(ts=i) for i in range(100)])
    for cut in range(len(text) - 1, len(text) - 300, -7):
        out, trace = read_all(text[:cut])
        assert len(out["ph"]) >= 95 and trace.repairs.get("truncated")


def test_forms_of_documents():
    rows = [event(ts=i) for i in range(5)]
    lines = b"\n".join(json.dumps(r).encode() for r in rows)
    for text in (json.dumps(rows).encode(), b"\xef\xbb\xbf " + document(rows), lines, json.dumps(rows).encode()[:-1]):
        out, _ = read_all(text)
        assert out["ts"] == [0, 1000, 2000, 3000, 4000]


def test_huge_metadata_is_cut_and_does_not_matter():
    text = document([event()], junk="x" * 3_000_000, more=[{"a": [1] * 200_000}], distributedInfo={"rank": 3})
    out, trace = read_all(text, chunk=50_000)
    assert len(out["ph"]) == 1 and trace.metadata["distributedInfo"] == '{"rank": 3}'
    assert trace.repairs == {"long_strings": 2} and all(len(v) <= 1 << 16 for v in trace.metadata.values())


def test_a_huge_event_is_left_out():
    rows = [event(ts=1), event(ts=2, args={"big": "x" * 20_000_000}), event(ts=3)]
    out, trace = read_all(document(rows), chunk=1 << 18)
    assert out["ts"] == [1000, 3000] and trace.repairs["oversized_events"] == 1


@pytest.mark.parametrize(
    "piece", [b'{"a":[', b'"', b"\\", b'"\n', b'},{"', b"[" * 50, b'{"ph":"X","name":"', b'" " ', b"\n   "]
)
def test_never_quadratic(piece):
    def seconds(n: int) -> float:
        begin = time.process_time()
        read_all(b'{"traceEvents": [{"ph": "X", "name": "' + piece * n)
        return time.process_time() - begin

    once = max(seconds(10_000), 0.002)
    assert seconds(80_000) < 8 * once * 6 + 1.0  # 8 times the bytes; quadratic would be 64


def fuzz(text: bytes, mutations: int, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(mutations):
        broken = mutated(text, rng)
        out, trace = read_all(broken, chunk=rng.choice([37, 4096, 1 << 20]))
        assert out.get("ph") or trace.repairs or trace.metadata or len(broken) <= 40, broken[:200]


@pytest.mark.skipif(not DATA.is_dir(), reason=NEEDS_DATA)
@pytest.mark.parametrize("name", real_small())
def test_mutations(name):
    fuzz(real_small()[name], MUTATIONS // 3, 1)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(not DATA.is_dir(), reason=NEEDS_DATA)
@pytest.mark.parametrize("name", real_small())
def test_ten_thousand_mutations(name):
    fuzz(real_small()[name], 10_000, 2)


@pytest.mark.skipif(not DATA.is_dir(), reason=NEEDS_DATA)
@pytest.mark.parametrize("name", [*real_small(), "dlrm"])
def test_real_traces_equal_the_plain_reader(name):
    text = dlrm_rank0() if name == "dlrm" else real_small()[name]
    expected, _ = twin(text)
    found, trace = native(text, chunk=10_007)
    assert not trace.repairs and trace.state == "done"
    for key in expected:
        if key != "args.grid":  # raw text in the file's own spacing
            assert not expected[key] or np.array_equal(found[key], expected[key], equal_nan="blocks" in key), key
