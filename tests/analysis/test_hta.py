"""hta_breakdown against HolisticTraceAnalysis 0.5 on real traces, and against counting single nanoseconds."""

from __future__ import annotations

import numpy as np
import pytest
import xarray as xr
from analysis.kineto_json import DATA, NEEDS_DATA, events_of, load, load_dlrm
from hypothesis import given, settings
from hypothesis import strategies as st

from mappnb import analysis
from mappnb.schema import EVENTS, empty

needs_data = pytest.mark.skipif(not DATA.exists(), reason=NEEDS_DATA)


def us(parts: xr.Dataset, name: str) -> list[int]:
    return (parts[name].values // 1000).tolist()


@needs_data
def test_dlrm_of_eight_ranks():
    parts = analysis.hta_breakdown(events_of(load_dlrm(), device_only=True))
    assert parts["rank"].values.tolist() == list(range(8))
    assert us(parts, "idle_ns") == [6419, 6428, 7046, 8145, 8887, 9121, 7051, 8308]
    assert us(parts, "compute_ns") == [1034, 1246, 1068, 1240, 1126, 1041, 1051, 1059]
    assert us(parts, "non_compute_ns") == [5556, 11075, 3236, 9468, 6576, 6230, 3308, 1600]
    percent = np.round(parts.overlap_fraction.values * 100, 2).tolist()
    assert percent == [4.50, 2.47, 7.88, 3.31, 0.56, 0.64, 7.56, 9.51]
    total = (parts.communication_ns.values / 1e6).round(2).tolist()
    assert total == [5.80, 11.34, 3.49, 9.77, 6.59, 6.25, 3.56, 1.75]


@needs_data
@pytest.mark.parametrize(
    ("path", "idle", "compute", "other", "overlap"),
    [
        ("ns_resolution_trace/rank-0.Apr_03_18_51_38.1102.pt.trace.json.gz", 10113, 372150, 2371, None),
        ("negative_queue_length_values_check/rank0.json.gz", 705853, 143836, 166865, 1.37),
        pytest.param(
            "mtia_trace_single_rank/mtia_rank_0.json.gz", 5649476, 7305597, 372998, None, marks=pytest.mark.slow
        ),
    ],
)
def test_single_ranks(path, idle, compute, other, overlap):
    parts = analysis.hta_breakdown(events_of({0: load(DATA / "hta" / path)}, device_only=True))
    assert (us(parts, "idle_ns"), us(parts, "compute_ns"), us(parts, "non_compute_ns")) == ([idle], [compute], [other])
    assert int(parts.span_ns[0]) // 1000 == idle + compute + other
    if overlap is not None:
        assert round(float(parts.overlap_fraction[0]) * 100, 2) == overlap


def device_events(spans: list[tuple]) -> xr.Dataset:
    data = empty(EVENTS, {"event": len(spans)})
    for i, (rank, name, start, length) in enumerate(spans):
        data["rank"][i], data["name"][i], data["start_ns"][i], data["duration_ns"][i] = rank, name, start, length
        data["category"][i] = "collective" if name.startswith("nccl") else "compute"
        data["stream"][i] = 7
    return xr.Dataset({k: ("event", v) for k, v in data.items()})


NAMES = ("gemm", "ncclDevKernel_AllReduce", "Memcpy DtoD", "SyncBatchNorm")


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 1), st.sampled_from(NAMES), st.integers(0, 60), st.integers(0, 20)),
        min_size=1,
        max_size=12,
    )
)
def test_equals_a_count_of_single_nanoseconds(spans):
    parts = analysis.hta_breakdown(device_events(spans))
    for rank in parts["rank"].values.tolist():
        mine = [s for s in spans if s[0] == rank]
        low, high = min(s[2] for s in mine), max(s[2] + s[3] for s in mine)
        running = [{s[1] for s in mine if s[2] <= t < s[2] + s[3]} for t in range(low, high)]
        one = parts.sel(rank=rank)
        assert int(one.idle_ns) == sum(not r for r in running)
        assert int(one.compute_ns) == sum("gemm" in r for r in running)
        assert int(one.non_compute_ns) == sum(bool(r) and "gemm" not in r for r in running)
        nccl = sum(NAMES[1] in r for r in running)
        both = sum({"gemm", NAMES[1]} <= r for r in running)
        np.testing.assert_allclose(one.overlap_fraction, both / nccl if nccl else np.nan)


def test_host_spans_do_not_count(make):
    assert analysis.hta_breakdown(make()).sizes["rank"] == 0
