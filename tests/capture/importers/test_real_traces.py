"""Real traces: what is known of them must come out."""

from __future__ import annotations

import gzip
import random
import shutil

import numpy as np
import pytest
from capture.importers.trace_files import DATA, NEEDS_DATA, mutated

import mappnb
from mappnb.capture.importers import TraceImportError, import_trace
from mappnb.layout import Layout
from mappnb.terms import UNTOLD_STREAM, Op

pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason=NEEDS_DATA)
HTA = DATA / "hta"


@pytest.fixture(scope="module")
def dlrm(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dlrm") / "run"
    report = import_trace(DATA / "param" / "dlrm_kineto.tar.gz", folder)
    return report, mappnb.attach(folder)


def test_dlrm_ranks_and_counts(dlrm):
    report, run = dlrm
    assert sorted(report.ranks) == list(range(8)) and not report.repairs and report.num_read == 26538
    counts = np.bincount(run.events["rank"].values)
    assert report.num_events == counts.sum() == 19789
    read = [r["imported"]["num_read"] for r in run.incarnations[0].ranks.values()]
    assert min(read) == 3250 and max(read) == 3474
    assert run.incarnations[0].ranks[0]["device"] == "cuda:0 Tesla V100-SXM2-32GB"


def test_dlrm_collectives(dlrm):
    run = dlrm[1]
    calls = mappnb.analysis.match(run)
    assert calls.sizes == {"call": 8, "member": 8} and calls.complete.all()
    assert sorted(calls.op.values) == ["all_reduce"] * 3 + ["all_to_all"] * 5
    skew = (calls.end_ns.max("member") - calls.end_ns.min("member")).values
    assert skew.max() == 7000 and np.median(skew) <= 4000
    late = calls["rank"].values[0][calls.start_ns.argmax("member").values]
    assert np.bincount(late, minlength=8).tolist() == [0, 0, 0, 0, 1, 2, 0, 5]


def test_dlrm_hta_numbers(dlrm):
    found = mappnb.analysis.hta_breakdown(dlrm[1], include_last_step=True)
    assert (found.idle_ns.values // 1000).tolist() == [6419, 6428, 7046, 8145, 8887, 9121, 7051, 8308]
    assert (found.compute_ns.values // 1000).tolist() == [1034, 1246, 1068, 1240, 1126, 1041, 1051, 1059]
    assert (found.non_compute_ns.values // 1000).tolist() == [5556, 11075, 3236, 9468, 6576, 6230, 3308, 1600]


def test_queue_trace_hta_numbers(tmp_path):
    report = import_trace(HTA / "negative_queue_length_values_check", tmp_path / "run")
    run = mappnb.attach(tmp_path / "run")
    found = mappnb.analysis.hta_breakdown(run)
    assert report.num_read == 108936 and report.world_size == 16 and len(run.meta["missing_ranks"]) == 15
    assert [found[n].item() // 1000 for n in ("idle_ns", "compute_ns", "non_compute_ns")] == [705853, 143836, 166865]
    events = run.events
    copies = events.isel(event=np.flatnonzero(np.isin(events.op.values, ["memcpy"])))
    assert len(set(events.stream.values)) == 7 and len(set(copies.name.values)) == 4  # 6 streams and the host


def test_ns_trace_is_exact(tmp_path):
    report = import_trace(HTA / "ns_resolution_trace", tmp_path / "run")
    events = mappnb.attach(tmp_path / "run").events
    path = next((HTA / "ns_resolution_trace").glob("*.gz"))
    text = gzip.decompress(path.read_bytes())
    assert report.num_read == 68692 and report.num_events == text.count(b'"ph": "X"')
    assert int((events.raw_start_ns.values % 1000 != 0).sum()) > 40_000
    first = text.index(b'"ts": ') + 6
    whole, fraction = text[first : text.index(b",", first)].decode().split(".")
    assert int(whole) * 1000 + int(fraction.ljust(3, "0")) in set(events.raw_start_ns.values.tolist())
    assert int((events.stream.values >= 0).sum()) == 4350 + 1600 + 145


def test_mtia(tmp_path):
    report = import_trace(HTA / "mtia_trace_single_rank", tmp_path / "run")
    events = mappnb.attach(tmp_path / "run").events
    device = events.stream.values >= 0
    assert report.num_read == 455739 and device.sum() == 25814
    assert (events.issue_ns.values[device] > 0).sum() >= 3453 and not report.repairs
    assert (events.stream.values >= UNTOLD_STREAM).sum() == 137  # transfers without a stream: host work to HTA


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("mtia_trace_single_rank", (5649476, 7305597, 372998)),
        ("ns_resolution_trace", (10113, 372150, 2371)),
        ("negative_queue_length_values_check", (705853, 143836, 166865)),
    ],
)
def test_breakdown_is_that_of_hta(tmp_path, name, parts):
    """What ``TraceAnalysis.get_temporal_breakdown`` of HolisticTraceAnalysis 0.5.0 (pandas 2.3.3) printed for these files."""
    import_trace(HTA / name, tmp_path / "run")
    events = mappnb.attach(tmp_path / "run").events
    told = events.isel(event=np.flatnonzero(events.stream.values < UNTOLD_STREAM))  # HTA: the rest is host work
    found = mappnb.analysis.hta_breakdown(told)
    assert [found[n].item() for n in ("idle_ns", "compute_ns", "non_compute_ns")] == [n * 1000 for n in parts]
    if name == "mtia_trace_single_rank":  # HTA_DISABLE_NS_ROUNDING=1
        exact = mappnb.analysis.hta_breakdown(told, whole_us=False)
        assert exact.idle_ns.item() // 1000 == 5627274 and exact.span_ns.item() // 1000 == 13328071


def test_device_work_without_a_stream_counts_within_a_step(tmp_path):
    """The values listed for this file (idle 5648827, compute 7305596, other 373924, of 13328347 us) hold such work."""
    import_trace(HTA / "mtia_trace_single_rank", tmp_path / "run")
    found = mappnb.analysis.hta_breakdown(mappnb.attach(tmp_path / "run"))
    assert found.span_ns.item() == 13_328_347_000
    got = [found[n].item() / 1000 for n in ("idle_ns", "compute_ns", "non_compute_ns")]
    np.testing.assert_allclose(got, (5648827, 7305596, 373924), atol=6.5, rtol=0)


@pytest.mark.parametrize(
    ("name", "num_read", "note"),
    [
        ("cpu_only", 30, "no trace of 299 of 300 ranks"),
        ("rank_non_gpu", 2467, "no device events"),
        ("rank_unavailable", 2467, "no rank in the file or its name; taken as rank 0"),
        ("distributed_info_unavailable", 2467, "no rank in the file or its name; taken as rank 0"),
        ("triton_example", 71, "taken as rank 0"),
        ("trace_compare/base", 33, ""),
        ("trace_compare/test", 34, ""),
        ("execution_trace", 111, "an execution trace of PyTorch"),
        ("critical_path/alexnet", 1408, ""),
        ("critical_path/simple_add", 1348, ""),
        ("critical_path/cuda_event_sync", 92, ""),
        ("critical_path/cuda_event_sync_multi_stream", 149, ""),
    ],
)
def test_hta_files(tmp_path, name, num_read, note):
    report = import_trace(HTA / name, tmp_path / "run")
    assert report.num_read == num_read and report.num_events > 0 and not report.repairs
    assert note in str(report)
    assert mappnb.attach(tmp_path / "run").events.sizes["event"] == report.num_events


def test_gloo_on_the_cpu(tmp_path):
    import_trace(HTA / "cpu_only", tmp_path / "run")
    events = mappnb.attach(tmp_path / "run").events
    assert set(events["rank"].values) == {34} and int((events.op.values == "all_reduce").sum()) == 10
    assert str(events.start_ns.attrs.get("units", "ns")) == "ns"


@pytest.mark.parametrize(("kind", "median_ms"), [("interleaved", 714.4), ("dpp", 954.6)])
def test_megascan_profiles(tmp_path, kind, median_ms):
    report = import_trace(DATA / "megascan" / f"pp4_vpp4_{kind}_20iters.json", tmp_path / "run")
    run = mappnb.attach(tmp_path / "run")
    events = run.events
    assert report.format == "megascan" and report.num_read == 10480 and not report.repairs
    assert run.layout == Layout(pp=4, num_chunks=4) and run.steps.sizes == {"step": 20, "rank": 4}
    work = events.isel(event=np.flatnonzero(np.isin(events.op.values, [Op.FORWARD_STEP, Op.BACKWARD_STEP])))
    assert work.sizes["event"] == 5120 and sorted(set(work.stage.values)) == list(range(16))
    assert set(work.microbatch.values) == set(range(8)) and set(work["chunk"].values) == set(range(4))
    length = run.steps.end_ns.max("rank") - run.steps.start_ns.min("rank")
    assert float(length.median()) / 1e6 == pytest.approx(median_ms, abs=0.1)
    last = work.isel(event=np.flatnonzero(work.stage.values == 15))
    forward = last.duration_ns.values[last.op.values == Op.FORWARD_STEP]
    others = work.duration_ns.values[(work.op.values == Op.FORWARD_STEP) & (work.stage.values != 15)]
    assert np.median(forward) > 2 * np.median(others)  # the last stage holds the loss
    assert kind == "dpp" or np.median(forward) / 1e6 == pytest.approx(17.2, abs=0.1)


def test_two_megascan_runs_are_not_one(tmp_path):
    with pytest.raises(TraceImportError, match=r"rank 0 is claimed by both .*dpp.*interleaved"):
        import_trace(DATA / "megascan", tmp_path / "run")


def _fuzz(tmp_path, name: str, times: int) -> None:
    path = next((HTA / name).glob("*trace.json.gz"))
    text = gzip.decompress(path.read_bytes())
    rng = random.Random(5)
    for _ in range(times):
        (tmp_path / "a.json").write_bytes(mutated(text, rng))
        try:
            assert import_trace(tmp_path / "a.json", tmp_path / "run", replace=True).num_events > 0
        except TraceImportError as err:
            why = str(err)
            assert any(
                w in why for w in ("nothing to show for", "without trace events", "an empty file", "not a trace")
            ), why
    shutil.rmtree(tmp_path / "run", ignore_errors=True)


def test_mutated_files_import_or_say_why(tmp_path):
    _fuzz(tmp_path, "critical_path/cuda_event_sync", 60)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", ["critical_path/cuda_event_sync", "cpu_only"])
def test_many_mutated_files_import_or_say_why(tmp_path, name):
    _fuzz(tmp_path, name, 3000)
