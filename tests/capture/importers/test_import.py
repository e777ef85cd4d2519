"""import_trace on small traces made here: ranks, formats, archives, damage, and messages that name the cure."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import tarfile
import zipfile

import numpy as np
import pyarrow as pa
import pytest
from capture.importers.trace_files import document, event, kineto, write_kineto

import mappnb
from mappnb.capture.importers import FORMATS, TraceImportError, import_trace
from mappnb.cli import main
from mappnb.errors import RunExistsError
from mappnb.terms import Flag


def test_a_run_like_a_recorded_one(tmp_path):
    report = import_trace(write_kineto(tmp_path / "t"), tmp_path / "run")
    run = mappnb.attach(tmp_path / "run")
    assert report.format == "kineto" and sorted(report.ranks) == [0, 1, 2, 3] and not report.repairs
    assert run.meta["state"] == "ended" and not run.meta["problems"] and run.meta["world_size"] == 4
    assert run.meta["hosts"] == ["host0", "host1"] and list(run.steps.step) == [10, 11, 12]
    events = run.events
    assert report.num_events == events.sizes["event"] == 4 * 3 * 7
    kernels = events.isel(event=np.flatnonzero(events.stream.values >= 0))
    assert set(kernels.op.values) == {"gemm", "all_reduce"} and set(kernels.stream.values) == {7, 20}
    assert int(events.start_ns.min()) > 0 and set(kernels["step"].values) == {10, 11, 12}
    assert (kernels.issue_ns.values < kernels.raw_start_ns.values).all() and (kernels.issue_ns.values > 0).all()


def test_times_and_links_are_exact(tmp_path):
    import_trace(write_kineto(tmp_path / "t", 1), tmp_path / "run")
    events = mappnb.attach(tmp_path / "run").events
    reduces = events.isel(event=np.flatnonzero(events.op.values == "all_reduce"))
    first = 1_700_000_000_000_000_000 + 250_500  # 50 + 200.5 µs
    assert reduces.raw_start_ns.values.tolist() == [first + k * 10**6 for k in range(3)]
    assert reduces.issue_ns.values.tolist() == [1_700_000_000_000_032_000 + k * 10**6 for k in range(3)]
    assert reduces.duration_ns.values.tolist() == [100_500] * 3 and reduces.bytes.values.tolist() == [2048] * 3
    assert set(reduces.dtype.values) == {"bfloat16"}


@pytest.mark.parametrize("groups", [True, False])
def test_collectives_match(tmp_path, groups):
    import_trace(write_kineto(tmp_path / "t", groups=groups), tmp_path / "run")
    run = mappnb.attach(tmp_path / "run")
    calls = mappnb.analysis.match(run)
    assert calls.sizes == {"call": 3, "member": 4} and calls.complete.all()
    assert calls.seq.values.tolist() == ([100, 101, 102] if groups else [0, 1, 2])
    (group,) = run.groups.values()
    assert group["ranks"] == [0, 1, 2, 3]


def test_depth_and_threads(tmp_path):
    rows = [
        event(ts=0, dur=100),
        event(ts=10, dur=50),
        event(ts=20, dur=0),
        event(ts=60, dur=10),
        event(tid=3, ts=30, dur=5),
    ]
    (tmp_path / "a.json").write_bytes(document(rows, distributedInfo={"rank": 0}))
    import_trace(tmp_path / "a.json", tmp_path / "run")
    events = mappnb.attach(tmp_path / "run").events
    assert dict(zip((events.raw_start_ns.values // 1000).tolist(), events.depth.values.tolist(), strict=True)) == {
        0: 0,
        10: 1,
        20: 2,
        30: 0,
        60: 1,
    }
    assert len(set(events.thread.values)) == 2


def test_zero_times_bad_durations_and_missing_ones(tmp_path):
    rows = [
        event(ts=1.7e15),
        event(ts=0, dur=0),
        event(ts=1.7e15 + 5, dur=-3),
        {"ph": "X", "ts": 1.7e15 + 9},
        event(ts=None),
    ]
    (tmp_path / "a.json").write_bytes(document(rows, distributedInfo={"rank": 0}))
    report = import_trace(tmp_path / "a.json", tmp_path / "run")
    assert report.num_events == 3 and report.repairs == {"negative_durations": 1, "missing_durations": 1}
    assert report.skipped == {"spans at time zero, which is no time here": 1, "spans without a usable time": 1}


def test_nanosecond_traces_and_base_time(tmp_path):
    (tmp_path / "rank0.json").write_bytes(document([event(ts=1712195495519689123, cat="kernel")]))
    base = 1727743122000000000
    (tmp_path / "rank1.json").write_bytes(document([event(ts=2413669096090.1)], baseTimeNanoseconds=base))
    import_trace([tmp_path / "rank0.json"], tmp_path / "a", rank_from=r"rank(\d)")
    import_trace([tmp_path / "rank1.json"], tmp_path / "b", rank_from=r"rank(\d)")
    assert mappnb.attach(tmp_path / "a").events.raw_start_ns.values.tolist() == [1712195495519689123]
    run = mappnb.attach(tmp_path / "b")
    created = run.store.info["created_wall_ns"]
    assert int(run.events.start_ns[0]) + created == base + 2413669096090100


def pack(kind: str, text: bytes) -> bytes:
    if kind == "zst":
        sink = io.BytesIO()
        with pa.CompressedOutputStream(pa.PythonFile(sink, mode="w"), "zstd") as stream:
            stream.write(text)
            stream.flush()
            sink.close = lambda: None  # type: ignore[method-assign]
        return sink.getvalue()
    return {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress, "plain": bytes}[kind](text)


@pytest.mark.parametrize("kind", ["plain", "gz", "zst", "bz2", "xz"])
def test_packed_files_by_content_not_by_name(tmp_path, kind):
    (tmp_path / "odd name.bin").write_bytes(pack(kind, json.dumps(kineto(0, 1)).encode()))
    report = import_trace(tmp_path / "odd name.bin", tmp_path / "run")
    assert report.num_events == 21 and not report.repairs


@pytest.mark.parametrize("mode", ["w", "w:gz", "w:xz", "zst", "zip"])
def test_archives_of_ranks(tmp_path, mode):
    files = {f"job/trace.{r}/x_{r}.json": json.dumps(kineto(r)).encode() for r in range(4)} | {
        "job/readme.txt": b"hello"
    }
    path = tmp_path / "traces"
    if mode == "zip":
        with zipfile.ZipFile(path, "w") as archive:
            for name, text in files.items():
                archive.writestr(name, text)
    else:
        raw = io.BytesIO()
        with tarfile.open(fileobj=raw, mode="w" if mode == "zst" else mode) as tar:
            for name, text in files.items():
                info = tarfile.TarInfo(name)
                info.size = len(text)
                tar.addfile(info, io.BytesIO(text))
        path.write_bytes(pack("zst", raw.getvalue()) if mode == "zst" else raw.getvalue())
    report = import_trace(path, tmp_path / "run")
    assert sorted(report.ranks) == [0, 1, 2, 3] and report.num_events == 84
    assert list(report.files_skipped.values()) == ["not a trace: begins with b'hello'"]


def test_a_cut_gz_gives_what_it_holds(tmp_path):
    packed = gzip.compress(document([event(ts=i) for i in range(20_000)], distributedInfo={"rank": 0}))
    (tmp_path / "a.json.gz").write_bytes(packed[: len(packed) // 2])
    report = import_trace(tmp_path / "a.json.gz", tmp_path / "run")
    assert 4_000 < report.num_events < 20_000
    assert report.repairs["damaged_archives"] == 1 and "damaged or cut off" in str(report)


def test_a_damaged_head_is_hunted_through(tmp_path):
    rows = json.dumps([event(ts=i) for i in range(9)]).encode()
    (tmp_path / "a.json").write_bytes(b'{"deviceProperties": [{"id": 0, "traceEvents": ' + rows + b"}")
    report = import_trace(tmp_path / "a.json", tmp_path / "run")
    assert report.num_events == 9 and report.repairs["damaged_heads"] == 1
    (tmp_path / "a.json").write_bytes(b'{"traceName": "C:\\dir\\", "traceEvents": ' + rows + b"}")
    assert import_trace(tmp_path / "a.json", tmp_path / "run", replace=True).num_events >= 8


def test_ranks_by_name_and_pattern(tmp_path):
    for folder, name in (("n0_1", "t.json"), ("n0_5", "t.json")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).write_bytes(document([event()]))
    with pytest.raises(TraceImportError, match=r"no rank in the file.*2 files.*rank_from="):
        import_trace(tmp_path, tmp_path / "run")
    report = import_trace([tmp_path / "n0_1", tmp_path / "n0_5"], tmp_path / "run", rank_from=r"n\d_(\d)")
    assert sorted(report.ranks) == [1, 5] and "no trace of 4 of 6 ranks: 0, 2, 3, 4" in str(report)
    assert mappnb.attach(tmp_path / "run").meta["missing_ranks"] == [0, 2, 3, 4]


def test_two_files_of_one_rank(tmp_path):
    for name in ("a.json", "b.json"):
        (tmp_path / name).write_text(json.dumps(kineto(3)))
    with pytest.raises(TraceImportError, match=r"rank 3 is claimed by both .*a\.json and .*b\.json.*--rank-from"):
        import_trace([tmp_path / "a.json", tmp_path / "b.json"], tmp_path / "run")
    assert not (tmp_path / "run").exists() and not list(tmp_path.glob(".run*"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (document([]), "the list of events is empty|list of trace events is empty"),
        (document([event(ph="M"), event(ph="C")]), "2 entries read, none of them an event"),
        (b'{"traceEvents": null, "deviceProperties": []}', "traceEvents are not a list"),
        (b'{"deviceProperties": [], "traceEvents": [', "truncated|empty"),
        (b'{"schema": "1.0.1", "nodes": []}', "an execution trace of PyTorch"),
        (b'{"a": 1}', "JSON, but without trace events"),
        (b"\x89PNG\r\n", "not a trace: begins with"),
        (b"   ", "an empty file"),
        (b"", "an empty file"),
    ],
)
def test_nothing_says_why(tmp_path, content, message):
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(TraceImportError, match=message):
        import_trace(tmp_path / "a.json", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_an_empty_rank_among_others_is_told(tmp_path):
    write_kineto(tmp_path / "t", 2)
    (tmp_path / "t" / "trace_1.json").write_bytes(document([], distributedInfo={"rank": 1, "world_size": 2}))
    report = import_trace(tmp_path / "t", tmp_path / "run")
    assert "trace_1.json: its list of trace events is empty" in str(report)
    assert mappnb.attach(tmp_path / "run").meta["missing_ranks"] == []


def test_other_files_in_a_folder(tmp_path):
    folder = write_kineto(tmp_path / "t", 2)
    (folder / "notes.txt").write_text("hello")
    (folder / "plot.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    (folder / "empty.json").write_bytes(b"")
    (folder / ".hidden").write_text("x")
    report = import_trace(folder, tmp_path / "run")
    assert len(report.ranks) == 2 and len(report.files_skipped) == 3
    assert "empty.json: an empty file" in str(report)


def test_the_target_folder(tmp_path):
    folder = write_kineto(tmp_path / "t", 1)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("years of work")
    for replace in (False, True):
        with pytest.raises(RunExistsError, match="not an empty folder"):
            import_trace(folder, tmp_path / "full", replace=replace)
    import_trace(folder, tmp_path / "run")
    with pytest.raises(RunExistsError, match="--replace"):
        import_trace(folder, tmp_path / "run")
    assert import_trace(folder, tmp_path / "run", replace=True).num_events == 21
    with pytest.raises(TraceImportError, match="a run directory already"):
        import_trace(tmp_path / "run", tmp_path / "again")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"format": "kinetto"}, "did you mean 'kineto'"),
        ({"rank_from": "("}, "not a regular expression"),
        ({"rank_from": "rank"}, "put it in brackets"),
        ({"rank_from": r"node(\d+)"}, "finds no number in this path"),
    ],
)
def test_wrong_options(tmp_path, options, message):
    with pytest.raises(TraceImportError, match=message):
        import_trace(write_kineto(tmp_path / "t", 1), tmp_path / "run", **options)


def test_missing_source(tmp_path):
    with pytest.raises(TraceImportError, match="no such file or folder"):
        import_trace(tmp_path / "gone", tmp_path / "run")
    (tmp_path / "void").mkdir()
    with pytest.raises(TraceImportError, match="nothing to import"):
        import_trace(tmp_path / "void", tmp_path / "run")


def test_command_line(tmp_path, capsys):
    folder = write_kineto(tmp_path / "t", 2)
    assert main(["import", str(folder / "trace_0.json"), str(folder / "trace_1.json"), str(tmp_path / "run")]) == 0
    assert "42 events of 2 of 2 ranks from kineto" in capsys.readouterr().out
    assert main(["import", str(folder), str(tmp_path / "run")]) == 2
    assert "--replace" in capsys.readouterr().err
    assert (
        main(
            ["import", str(folder), str(tmp_path / "run"), "--replace", "--format", "chrome", "--rank-from", r"_(\d)\."]
        )
        == 0
    )
    assert main(["check", str(tmp_path / "run")]) == 0


def test_chrome_spans(tmp_path):
    rows = [
        {"ph": "B", "name": "forward", "pid": 1, "tid": 1, "ts": 0},
        {"ph": "B", "name": "inner", "pid": 1, "tid": 1, "ts": 1},
        {"ph": "E", "pid": 1, "tid": 1, "ts": 2},
        {"ph": "B", "name": "never closed", "pid": 1, "tid": 1, "ts": 3},
        {"ph": "E", "name": "forward", "pid": 1, "tid": 1, "ts": 10},
        {"ph": "E", "name": "stray", "pid": 1, "tid": 1, "ts": 11},
        {"ph": "b", "cat": "net", "id": "0x1f", "name": "request", "pid": 1, "tid": 1, "ts": 4},
        {"ph": "e", "cat": "net", "id": 31, "name": "request", "pid": 1, "tid": 2, "ts": 40},
        {"ph": "X", "name": "all_reduce", "pid": 1, "tid": 3, "ts": 5, "dur": 2},
        {"ph": "i", "name": "mark", "pid": 1, "tid": 1, "ts": 6},
        {"ph": "C", "name": "mem", "pid": 1, "ts": 6, "args": {"x": 1}},
        {"ph": "s", "id": 1, "pid": 1, "tid": 1, "ts": 6},
    ]
    (tmp_path / "a.json").write_text(json.dumps(rows))
    report = import_trace(tmp_path / "a.json", tmp_path / "run")
    events = mappnb.attach(tmp_path / "run").events
    found = {
        n: (int(d), int(k), o)
        for n, d, k, o in zip(
            events.name.values, events.duration_ns.values, events.depth.values, events.op.values, strict=True
        )
    }
    assert report.format == "chrome" and len(found) == 6
    assert found["forward"] == (10_000, 0, "forward_step") and found["inner"] == (1000, 1, "span")
    assert (
        found["request"] == (36_000, 0, "net")
        and found["all_reduce"] == (2000, 0, "all_reduce")
        and found["mark"][0] == 0
    )
    flags = dict(zip(events.name.values, events.flags.values, strict=True))
    assert flags["never closed"] == Flag.REPAIRED and flags["request"] == Flag.ASYNC
    assert report.repairs == {"ends_without_a_begin": 1, "spans_without_an_end": 1}
    assert report.skipped == {"ends of flow arrows": 1}


def test_chrome_processes_named_by_rank(tmp_path):
    rows = [{"ph": "M", "name": "process_name", "pid": 10 + r, "args": {"name": f"Rank {r}"}} for r in range(3)]
    rows += [{"ph": "X", "name": "f", "pid": 10 + r, "tid": 1, "ts": r, "dur": 1} for r in range(3)]
    (tmp_path / "merged.json").write_text(json.dumps(rows))
    report = import_trace(tmp_path / "merged.json", tmp_path / "run")
    assert sorted(report.ranks) == [0, 1, 2] and report.num_read == 6
    assert sorted(mappnb.attach(tmp_path / "run").events["rank"].values.tolist()) == [0, 1, 2]


def test_formats_are_registered():
    assert {"kineto", "chrome", "megascan"} <= set(FORMATS)
