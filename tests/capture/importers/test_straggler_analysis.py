"""The real traces AR and SE, whose numbers are known, small tables of known content, and damaged ones."""

import contextlib
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import mappnb
from mappnb.analysis import match
from mappnb.capture.importers import TraceImportError, import_trace
from mappnb.capture.importers.straggler_analysis import parse, read_meta

DATA = Path(__file__).parents[4] / "shared" / "data" / "straggler_analysis"
real = pytest.mark.skipif(not DATA.is_dir(), reason="no ../shared/data: the ByteDance traces are not in the repository")


def table(*, dp=2, pp=2, chunks=1, steps=(7, 9), microbatches=2):
    """Rows of a small job in which forward takes 1 s and backward 2 s, one operation of a worker after the other."""
    rows = []
    for step in steps:
        for d in range(dp):
            for p in range(pp):
                at, count = 0.0, {}

                def op(kind, s, mc=-1, mb=-1, gmc=-1, *, d=d, p=p, step=step, count=count):
                    nonlocal at
                    n = count[kind] = count.get(kind, -1) + 1
                    rows.append((d, p, 10 * (p * dp + d), step, kind, at, s, n, mc, mb, gmc))
                    at += s

                op("params-all-gather", 0.5, 0)
                for way, s, ends in (("forward", 1.0, (0, chunks * pp - 1)), ("backward", 2.0, (chunks * pp - 1, 0))):
                    for c in range(chunks) if way == "forward" else reversed(range(chunks)):
                        gmc = c * pp + p
                        for mb in range(microbatches):
                            if gmc != ends[0] or chunks > 1:  # with chunks, ends have records without a peer
                                op(f"{way}-recv", 0.1)
                            op(f"{way}-compute", s, c, mb, gmc)
                            if gmc != ends[1] or chunks > 1:
                                op(f"{way}-send", 0.1)
                op("gc", 0.0)
                op("layernorm-grads-all-reduce", 0.1)
                if p in (0, pp - 1):
                    op("embedding-grads-all-reduce", 0.2)
                op("grads-reduce-scatter", 0.5, 0)
                op("optimizer-clip-main-grad", 0.1)
                op("optimizer", 0.3)
    names = ["dp_rank", "stage", "rank", "step", "optype", "start_ts", "duration", "seq_id", "mc", "mb_id", "gmc"]
    return pd.DataFrame(rows, columns=names).astype({"start_ts": np.float32, "duration": np.float32})


def write(tmp_path, rows, meta="dp_size: 2\npp_size: 2\ntp_size: 4\nvpp_size: 1\n"):
    rows.to_parquet(tmp_path / "trace-X.parquet")
    if meta:
        (tmp_path / "meta-X.yaml").write_text(meta)
    return tmp_path / "trace-X.parquet"


@real
@pytest.mark.parametrize(
    ("job", "rows", "workers", "steps", "mean_s"),
    [("AR", 117216, 16, 44, 46.6491764), ("SE", 107328, 64, 43, 9.1129960)],
)
def test_real_trace(tmp_path, job, rows, workers, steps, mean_s):
    report = import_trace([DATA / f"trace-{job}.parquet", DATA / f"meta-{job}.yaml"], tmp_path / "run")
    assert report.num_events == report.num_read == rows and not report.skipped and not report.repairs
    run = mappnb.attach(tmp_path / "run")
    assert run.layout.world_size == workers and run.steps.sizes == {"step": steps, "rank": workers}
    length = (run.steps.end_ns.max("rank") - run.steps.start_ns.min("rank")).values / 1e9
    assert length.mean() == pytest.approx(mean_s, rel=1e-6)
    calls = match(run.events)
    assert calls.complete.values.all() and calls.attrs["groups_by_order"] == 0
    events = run.sel()
    source = pd.read_parquet(DATA / f"trace-{job}.parquet")
    assert dict(pd.Series(events.name.values).value_counts()) == {
        k: n for k, n in source.optype.astype(str).value_counts().items() if n
    }
    total = source.duration.astype(float).sum()
    assert events.duration_ns.values.sum() / 1e9 == pytest.approx(total, rel=1e-9)
    layer_norm = events.duration_ns.values[events.name.values == "layernorm-grads-all-reduce"]
    median_s = {"AR": 0.00359849597, "SE": 3.95520001e-05}[job]
    assert np.median(layer_norm) / 1e9 == pytest.approx(median_s, abs=1e-9)


@real
def test_transfers_meet_as_the_artifact_pairs_them(tmp_path):
    """Known median transfers of AR (end less the last start of the pair): they come out only if the pairs are right."""
    import_trace(DATA / "trace-AR.parquet", tmp_path / "run")  # the layout file beside it is found
    events = mappnb.attach(tmp_path / "run").sel()
    calls = match(events)
    transfer = calls.end_ns.values - calls.start_ns.max("member").values[:, None]
    op = calls.op.values
    # forward-recv 1.146, forward-send 1.135, backward-send 1.1425, backward-recv 1.138 ms: all sides together lie between
    assert np.median(transfer[op == "send_recv"][:, :2]) / 1e6 == pytest.approx(1.140, abs=0.005)
    gather = transfer[op == "all_gather"]
    assert np.median(gather[:, :4]) / 1e9 == pytest.approx(0.11600627, abs=1e-6)
    scatter = transfer[op == "reduce_scatter"]
    assert np.median(scatter[:, :4]) / 1e9 == pytest.approx(0.214757919, abs=4e-6)  # the artifact adds in float32


def test_small_trace(tmp_path):
    report = import_trace(write(tmp_path, table()), tmp_path / "run")
    assert "laid one after the other" in str(report) and "no layout file" not in str(report)
    run = mappnb.attach(tmp_path / "run")
    events = run.sel()
    assert match(events).complete.values.all()
    assert (run.layout.dp, run.layout.pp) == (2, 2)
    assert list(run.steps.step.values) == [7, 9]
    one = events.isel(event=(events["rank"].values == 2) & (events.step.values == 9))
    sends = one.isel(event=one.name.values == "backward-send")
    assert sends.peer.values.tolist() == [0, 0] and sends.microbatch.values.tolist() == [0, 1]
    assert set(sends.phase.values) == {"backward"} and set(sends.stage.values.tolist()) == {1}
    recv = one.isel(event=one.name.values == "forward-recv")
    assert recv.peer.values.tolist() == [0, 0]


def test_chunks_and_wrapped_transfers(tmp_path):
    """Two chunks on two pipeline ranks: the last rank sends on to the first, and the pairs keep their direction apart."""
    rows = table(chunks=2)
    import_trace(write(tmp_path, rows, "dp_size: 2\npp_size: 2\nvpp_size: 2\n"), tmp_path / "run")
    events = mappnb.attach(tmp_path / "run").sel()
    calls = match(events, identity="seq")
    paired = calls.op.values == "send_recv"
    assert calls.complete.values.all() and paired.sum() == 2 * 2 * (3 * 2 + 3 * 2)
    mine = events.isel(event=(events["rank"].values == 2) & (events.step.values == 7))
    sends = mine.isel(event=mine.name.values == "forward-send")
    assert sends.peer.values.tolist() == [0, 0, -1, -1] and sends["chunk"].values.tolist() == [0, 0, 1, 1]
    assert sends.seq.values.tolist()[2:] == [-1, -1]
    forward = mine.isel(event=mine.op.values == "forward_step")
    assert sorted(set(forward.stage.values.tolist())) == [1, 3]


def test_stray_transfers_have_no_peer(tmp_path):
    """A receive that begins after the last computation did serves none ('no-op 1' of the artifact)."""
    rows = table(dp=1, steps=(0,))
    extra = rows[(rows.stage == 1) & (rows.optype == "forward-recv")][:1].assign(seq_id=2, start_ts=100.0)
    trace = parse(pd.concat([rows, extra], ignore_index=True), {})
    name = np.array([s[2] for s in trace.sites])[trace.columns["site"]]
    receives = (trace.rank == 1) & (name == "forward-recv")
    assert trace.columns["peer"][receives].tolist() == [0, 0, -1]
    assert trace.columns["microbatch"][receives].tolist() == [0, 1, -1]


def test_a_missing_row_shifts_no_other(tmp_path):
    rows = table()
    gone = rows.index[(rows.optype == "grads-reduce-scatter") & (rows.step == 7) & (rows["rank"] == 0)]
    import_trace(write(tmp_path, rows.drop(gone)), tmp_path / "run")
    calls = match(mappnb.attach(tmp_path / "run").sel(), identity="seq")
    assert (~calls.complete.values).sum() == 1
    assert calls.op.values[~calls.complete.values].tolist() == ["reduce_scatter"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda r: r.assign(optype=r.optype.where(r.optype != "gc", "lunch")), "rows of an unknown optype"),
        (lambda r: r.assign(duration=r.duration.where(r.index != 3, -1.0)), "rows of negative duration"),
        (lambda r: r.assign(start_ts=r.start_ts.where(r.index != 3, np.nan)), "rows without a place or a time"),
        (lambda r: pd.concat([r, r[:5]]), "rows of an operation that is there already"),
        (lambda r: r.assign(stage=r.stage.where(r.index != 3, -1)), "rows without a place or a time"),
    ],
)
def test_bad_rows_are_counted(tmp_path, change, reason):
    report = import_trace(write(tmp_path, change(table())), tmp_path / "run")
    assert list(report.skipped) == [reason] and report.num_events < len(table()) + 5


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: write(p, table()[:0]), "no rows"),
        (lambda p: write(p, table().rename(columns={"optype": "op_type"})), "did you mean 'op_type'"),
        (lambda p: write(p, table().assign(step="a")), "column 'step'"),
        (lambda p: write(p, table(), "dp_size: 1\npp_size: 2\n"), "is it of another job"),
        (lambda p: write(p, table().assign(optype="x")), "none of"),
        (lambda p: write(p, table().assign(dp_rank=10**6, stage=10**6), ""), "cannot be meant"),
    ],
)
def test_tables_that_cannot_be_read(tmp_path, make, message):
    with pytest.raises(TraceImportError, match=message):
        import_trace(make(tmp_path), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_truncated_file(tmp_path):
    path = write(tmp_path, table())
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(TraceImportError, match="is it cut off"):
        import_trace(path, tmp_path / "run")


def test_two_traces_at_once(tmp_path):
    write(tmp_path, table())
    (tmp_path / "trace-Y.parquet").write_bytes((tmp_path / "trace-X.parquet").read_bytes())
    with pytest.raises(TraceImportError, match="2 traces"):
        import_trace(tmp_path, tmp_path.parent / "run2")


def test_layout_file_alone(tmp_path):
    write(tmp_path, table())
    with pytest.raises(TraceImportError, match="no Parquet file"):
        import_trace(tmp_path / "meta-X.yaml", tmp_path / "run")


def test_without_a_layout_file(tmp_path):
    report = import_trace(write(tmp_path, table(), ""), tmp_path / "run")
    assert "no layout file" in str(report)
    assert mappnb.attach(tmp_path / "run").layout.world_size == 4


def test_read_meta_takes_integers_only():
    assert read_meta(b"a: 1\nb: x\n - c: 3\nd : 4 # four\n\xff\xfe: 1\ne: [1]\n") == {"a": 1, "d": 4}


def test_damaged_parquet_never_crashes(tmp_path):
    path = write(tmp_path, table(steps=(0,)))
    good = path.read_bytes()
    rng = np.random.default_rng(0)
    for number in range(150):
        data = bytearray(good)
        for at in rng.integers(0, len(good), 1 + number % 8):
            data[at] = rng.integers(256)
        path.write_bytes(bytes(data))
        with contextlib.suppress(TraceImportError):
            import_trace(path, tmp_path / "run", format="straggler_analysis", replace=True)
