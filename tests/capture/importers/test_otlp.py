"""Spans of Megatron's instrumentation as OTLP JSON and as the SDK prints them: meaning, steps, ranks and bad input."""

import io
import json
import time
from datetime import UTC, datetime

import numpy as np
import pytest

import mappnb
from mappnb.analysis import match
from mappnb.capture.importers import TraceImportError, import_trace
from mappnb.capture.importers._formats import ImportOptions
from mappnb.capture.importers._sources import Source
from mappnb.capture.importers.otlp import kind_of, read_otlp
from mappnb.terms import Flag

T0 = 1_772_366_400_000_000_000  # ns: 2026-03-01T12:00:00Z
MS = 10**6


def value(v):
    if isinstance(v, bool):
        return {"boolValue": v}
    if isinstance(v, int):
        return {"intValue": str(v)}
    return {"doubleValue": v} if isinstance(v, float) else {"stringValue": v}


def attributes(mapping):
    return [{"key": k, "value": value(v)} for k, v in mapping.items()]


class Spans:
    """Spans of one process; ``add`` returns the id, for the parent of others. Times in ms from T0."""

    def __init__(self, rank=0, *, pid=None, pp=2, world=2, told=True, as_text=False):
        number = str if as_text else int
        sizes = {"pipeline": pp, "tensor": 1, "data": world // pp}
        self.resource = {"host.name": f"node{rank}", "process.pid": pid or 100 + rank, "service.name": "megatron-lm"}
        if told:
            self.resource |= {"dl.rank": number(rank), "dl.world_size": number(world)}
            self.resource |= {f"dl.{k}_parallel.size": number(v) for k, v in sizes.items()}
        self.spans, self.rank, self.pid = [], rank, pid or 100 + rank

    def add(self, name, start, end, parent="", **attrs):
        span_id = f"{self.pid:08x}{len(self.spans):08x}"
        self.spans.append((name, span_id, parent, T0 + int(start * MS), T0 + int(end * MS), attrs))
        return span_id

    def otlp(self):
        spans = [
            {
                "traceId": "a" * 32,
                "spanId": i,
                "parentSpanId": p,
                "name": n,
                "kind": 1,
                "startTimeUnixNano": str(a),
                "endTimeUnixNano": str(b),
                "attributes": attributes({k.replace("__", "."): v for k, v in attrs.items()}),
                "status": {},
            }
            for n, i, p, a, b, attrs in self.spans
        ]
        scope = {"scope": {"name": "nemo.lens"}, "spans": spans}
        return {"resourceSpans": [{"resource": {"attributes": attributes(self.resource)}, "scopeSpans": [scope]}]}

    def printed(self):
        def iso(ns):
            seconds = datetime.fromtimestamp(ns // 10**9, UTC)
            return f"{seconds:%Y-%m-%dT%H:%M:%S}.{ns % 10**9 // 1000:06d}Z"

        return [
            {
                "name": n,
                "context": {"trace_id": "0x" + "a" * 32, "span_id": "0x" + i, "trace_state": "[]"},
                "kind": "SpanKind.INTERNAL",
                "parent_id": "0x" + p if p else None,
                "start_time": iso(a),
                "end_time": iso(b),
                "status": {"status_code": "UNSET"},
                "attributes": {k.replace("__", "."): v for k, v in attrs.items()},
                "resource": {"attributes": self.resource, "schema_url": ""},
            }
            for n, i, p, a, b, attrs in self.spans
        ]


def job(rank, *, documented=True, **options):
    """Two steps of a rank of two stages: forward, send or receive, backward, optimizer."""
    s = Spans(rank, **options)
    train = s.add("megatron.train", 0, 300)
    for step in (10, 11):
        at = (step - 10) * 100 + 10
        name = "megatron.train_step" if documented else "megatron.train.iteration"
        top = s.add(name, at, at + 80, train, megatron__iteration=step, megatron__loss=2.5, megatron__grad_norm=1.25)
        fb = s.add("megatron.forward_backward", at, at + 60, top, megatron__num_microbatches=2)
        for mb in range(2):
            t = at + 10 * mb + rank
            s.add("megatron.microbatch.forward", t, t + 5, fb, megatron__microbatch_id=mb)
            s.add(f"megatron.p2p.{'recv' if rank else 'send'}_forward", t + 5, t + 6, fb)
            s.add("megatron.microbatch.backward", t + 30, t + 38, fb)
            s.add(f"megatron.p2p.{'send' if rank else 'recv'}_backward", t + 38, t + 39, fb)
        s.add("megatron.optimizer_step", at + 62, at + 70, top, megatron__update_successful=step == 10)
    s.add(
        "megatron.save_checkpoint" if documented else "megatron.checkpoint.save",
        200,
        240,
        train,
        megatron__iteration=11,
    )
    return s


def write(path, *values):
    path.write_text("".join(json.dumps(v) + "\n" for v in values))
    return path


@pytest.mark.parametrize("documented", [True, False])
@pytest.mark.parametrize("as_text", [True, False])
def test_spans_of_two_ranks(tmp_path, documented, as_text):
    jobs = [job(r, documented=documented, as_text=as_text) for r in range(2)]
    report = import_trace(write(tmp_path / "spans.jsonl", *(j.otlp() for j in jobs)), tmp_path / "run")
    assert report.format == "otlp" and report.num_events == report.num_read == sum(len(j.spans) for j in jobs)
    assert not report.notes and not report.skipped and not report.repairs
    run = mappnb.attach(tmp_path / "run")
    assert run.layout.pp == 2 and sorted(run.meta["hosts"]) == ["node0", "node1"]
    events = run.sel()
    count = dict(zip(*np.unique(events.category.values.astype(str), return_counts=True), strict=True))
    assert count == {"mark": 4, "host": 6, "compute": 16, "p2p": 16, "optimizer": 4, "checkpoint": 2}
    forward = events.isel(event=events.op.values == "forward_step")
    assert forward.microbatch.values.tolist() == [0, 0, 1, 1] * 2 and set(forward.duration_ns.values.tolist()) == {
        5 * MS
    }
    assert sorted(set(events.step.values.tolist())) == [-1, 10, 11]
    send = events.isel(event=(events.op.values == "send") & (events["rank"].values == 0))
    assert set(send.peer.values.tolist()) == {1} and set(send.phase.values) == {"forward"}
    calls = match(events)
    assert calls.sizes["call"] == 8 and calls.complete.values.all()


def test_steps(tmp_path):
    import_trace(write(tmp_path / "spans.jsonl", job(0).otlp()), tmp_path / "run")
    steps = mappnb.attach(tmp_path / "run").steps.sel(rank=0)
    assert steps.step.values.tolist() == [10, 11] and steps.loss.values.tolist() == [2.5, 2.5]
    assert (steps.end_ns - steps.start_ns).values.tolist() == [80 * MS, 80 * MS]
    assert steps.skipped.values.tolist() == [0, 1] and steps.microbatches.values.tolist() == [2, 2]


def test_one_object_and_indented(tmp_path):
    whole = {"resourceSpans": [g for r in range(2) for g in job(r).otlp()["resourceSpans"]]}
    (tmp_path / "a.json").write_text(json.dumps(whole, indent=1))
    assert sorted(import_trace(tmp_path / "a.json", tmp_path / "run").ranks) == [0, 1]


def test_printed_spans_have_the_same_events(tmp_path):
    write(tmp_path / "otlp.jsonl", job(0).otlp())
    write(tmp_path / "lens_rank0.jsonl", *job(0, told=True).printed())
    one, other = (
        (import_trace(tmp_path / name, tmp_path / f"run-{name}"), mappnb.attach(tmp_path / f"run-{name}").sel())[1]
        for name in ("otlp.jsonl", "lens_rank0.jsonl")
    )
    for name in ("start_ns", "duration_ns", "step", "depth", "microbatch", "op", "category", "name"):
        assert one[name].values.tolist() == other[name].values.tolist(), name


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("megatron.checkpoint.save.finalize", ("checkpoint", "checkpoint_save")),
        ("megatron.checkpoint.exposed_save", ("checkpoint", "checkpoint_save")),
        ("megatron.checkpoint.load.io_read", ("checkpoint", "checkpoint_load")),
        ("megatron.load_checkpoint.io_read", ("checkpoint", "checkpoint_load")),
        ("megatron.evaluate.step", ("evaluation", "evaluate")),
        ("megatron.train.optimizer_step", ("optimizer", "optimizer_step")),
        ("megatron.train.gc_collect", ("host", "gc")),
        ("megatron.train.iteration_report", ("host", "span")),
        ("megatron.pp.recv_forward.linked", ("host", "span")),
        ("megatron.layer.self_attention", ("compute", "attention")),
        ("text_completion gpt", ("host", "span")),
        ("megatron.", ("host", "span")),
    ],
)
def test_names(name, kind):
    assert kind_of(name)[:2] == kind


def test_rank_in_the_name_of_the_file(tmp_path):
    for rank in (0, 3):
        write(tmp_path / f"lens_rank{rank}.jsonl", job(rank, told=False).otlp())
    report = import_trace(tmp_path, tmp_path.parent / "run-names")
    assert sorted(report.ranks) == [0, 3] and report.world_size == 4


def test_a_pattern_counts_more_than_the_content(tmp_path):
    path = write(tmp_path / "node7.jsonl", job(0).otlp())
    assert list(import_trace(path, tmp_path / "run", rank_from=r"node(\d+)").ranks) == [7]


def test_checkpoint_worker_is_another_thread(tmp_path):
    worker = Spans(0, pid=999)
    worker.add("nvrx.checkpoint.save.write", 20, 90)
    import_trace(write(tmp_path / "a.jsonl", job(0).otlp(), worker.otlp()), tmp_path / "run")
    events = mappnb.attach(tmp_path / "run").sel()
    write_event = events.isel(event=events.name.values == "nvrx.checkpoint.save.write")
    assert write_event.thread.values.tolist() == [1] and write_event.flags.values[0] & Flag.OVERLAPPED
    assert write_event.category.values.tolist() == ["checkpoint"]


def test_a_restart_is_said_and_two_jobs_are_refused(tmp_path):
    again = Spans(0, pid=5)
    again.add("megatron.train_step", 500, 600, megatron__iteration=11)
    report = import_trace(write(tmp_path / "a.jsonl", job(0).otlp(), again.otlp()), tmp_path / "run")
    assert any("started 2 times" in n for n in report.notes)
    other = job(0, pid=6)
    with pytest.raises(TraceImportError, match="rank 0 is claimed by 2 processes at the same time"):
        import_trace(write(tmp_path / "b.jsonl", job(0).otlp(), other.otlp()), tmp_path / "run2")


def test_the_same_spans_twice(tmp_path):
    report = import_trace(write(tmp_path / "a.jsonl", job(0).otlp(), job(0).otlp()), tmp_path / "run")
    assert report.skipped == {"spans that are there already": len(job(0).spans)}


def test_no_microbatches(tmp_path):
    s = Spans(0, world=1, pp=1)
    top = s.add("megatron.train_step", 0, 50, megatron__iteration=3)
    s.add("megatron.forward_backward", 0, 40, top)
    report = import_trace(write(tmp_path / "a.jsonl", s.otlp()), tmp_path / "run")
    assert any("counts as compute" in n for n in report.notes)
    events = mappnb.attach(tmp_path / "run").sel()
    assert events.category.values.tolist() == ["mark", "compute"] and events.depth.values.tolist() == [0, 1]


def test_steps_by_time_and_iterations_without_a_number(tmp_path):
    s = Spans(0, world=1, pp=1)
    for n in range(3):
        s.add("megatron.train_step", 10 * n, 10 * n + 9)
        s.add("megatron.microbatch.forward", 10 * n + 2, 10 * n + 4)
    report = import_trace(write(tmp_path / "a.jsonl", s.otlp()), tmp_path / "run")
    assert any("counted from 0" in n for n in report.notes)
    assert mappnb.attach(tmp_path / "run").sel().step.values.tolist() == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize(
    ("change", "count"),
    [
        (lambda s: s.pop("endTimeUnixNano"), ("repairs", "span_without_an_end")),
        (lambda s: s.update(endTimeUnixNano="5"), ("repairs", "end_before_start")),
        (lambda s: s.pop("startTimeUnixNano"), ("skipped", "spans without a name or a start")),
        (lambda s: s.pop("name"), ("skipped", "spans without a name or a start")),
        (lambda s: s.update(startTimeUnixNano="soon"), ("skipped", "spans without a name or a start")),
    ],
)
def test_damaged_spans_are_counted(tmp_path, change, count):
    content = job(0).otlp()
    change(content["resourceSpans"][0]["scopeSpans"][0]["spans"][5])
    report = import_trace(write(tmp_path / "a.jsonl", content), tmp_path / "run")
    assert getattr(report, count[0]) == {count[1]: 1}


def test_circle_of_parents(tmp_path):
    content = job(0).otlp()
    spans = content["resourceSpans"][0]["scopeSpans"][0]["spans"]
    spans[0]["parentSpanId"], spans[1]["parentSpanId"] = spans[1]["spanId"], spans[0]["spanId"]
    assert import_trace(write(tmp_path / "a.jsonl", content), tmp_path / "run").num_events == len(spans)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty file"),
        ('{"resourceSpans": []}', "no span in 1 file"),
        ('{"resourceMetrics": []}\n', "1 exports of metrics or logs"),
        ('{"resourceSpans": [{"scopeSpans": [{"spans": [{"name": "x"', "1 damaged line"),
        ("[1, null]", "2 values that hold no spans"),
    ],
)
def test_nothing_to_import(tmp_path, text, message):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(TraceImportError, match=message):
        import_trace(tmp_path / "a.json", tmp_path / "run", format="otlp")


def test_ranks_that_are_not_told(tmp_path):
    paths = [write(tmp_path / f"{c}.jsonl", job(r, told=False).otlp()) for r, c in enumerate("ab")]
    with pytest.raises(TraceImportError, match="without a rank"):
        import_trace(paths, tmp_path / "run")
    report = import_trace(paths[0], tmp_path / "run")
    assert list(report.ranks) == [0] and any("taken as rank 0" in n for n in report.notes)


def test_cut_file(tmp_path):
    path = write(tmp_path / "a.jsonl", job(0).otlp(), job(1).otlp())
    path.write_text(path.read_text()[:-40])
    report = import_trace(path, tmp_path / "run")
    assert list(report.ranks) == [0] and report.repairs == {"damaged_line": 1}
    assert any("1 of 2 ranks" in n for n in report.notes)


@pytest.mark.parametrize("form", ["otlp", "printed"])
def test_mutations_never_crash(form):
    s = job(0)
    s.spans = s.spans[:8]
    lines = [s.otlp()] if form == "otlp" else s.printed()
    good = "".join(json.dumps(v) + "\n" for v in lines).encode()
    odd = [b"-1", b"1e400", b"NaN", b"99999999999999999999", b"null", b'"7"', b"{}", b"[[1]]", b"true", b"1.5", b'""']
    rng, imported, began = np.random.default_rng(2), 0, time.monotonic()
    numbers = [i for i in range(1, len(good)) if good[i : i + 1].isdigit() and not good[i - 1 : i].isdigit()]
    for number in range(1500):
        data = bytearray(good)
        for _ in range(1 + number % 3):
            at = int(rng.integers(len(data)))
            if number % 4 == 0:
                data[at] = rng.integers(256)
            elif number % 4 == 1:
                del data[at : at + int(rng.integers(1, 60))]
            else:
                at = end = int(rng.choice(numbers)) if number % 4 == 2 else at
                while end < len(data) and bytes(data[end : end + 1]) not in (b",", b"}", b"]"):
                    end += 1
                data[at:end] = odd[int(rng.integers(len(odd)))]
        source = Source("rank0.jsonl", True, lambda data=bytes(data): io.BytesIO(data))
        try:
            got = read_otlp([source], ImportOptions())
            imported += sum(len(r.columns["site"]) > 0 for r in got.ranks)
        except TraceImportError:
            continue
    assert imported > 100 and time.monotonic() - began < 60
