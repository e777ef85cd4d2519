"""Traces of PyTorch on ROCm, and calls that are told by their Comms Id."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from capture.importers.trace_files import event

import mappnb
from mappnb.capture.importers import import_trace

GEMM = "Cijk_Ailk_Bljk_BBS_BH_Bias_HAS_SAV_UserArgs_MT128x128x64_MI16x16x1_SN_LDSB0_AFC1_AFEM1_AFEM1_ASEM1_CLR1"
NCCL = "ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)"  # RCCL keeps NCCL's names; older ones: rccl...
NORM = "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<c10::BFloat16, float, false>(int)"
COPY = "CopyHostToDevice"


def rocm(rank: int, world: int = 2) -> dict[str, Any]:
    """A rank of Kineto's roctracer backend: hip* calls of cat cuda_runtime, kernels and gpu_memcpy with a stream."""
    t0, host = 1.7e15 + 3 * rank, {"pid": 900 + rank, "tid": 900 + rank}
    work = [
        ("hipMemcpyAsync", COPY, "gpu_memcpy", {"stream": 0, "bytes": 4096}),
        ("hipExtModuleLaunchKernel", GEMM, "kernel", {"stream": 3, "grid": [64, 1, 1], "block": [256, 1, 1]}),
        ("hipLaunchKernel", NORM, "kernel", {"stream": 3}),
        ("hipExtLaunchKernel", NCCL, "kernel", {"stream": 9, "Collective name": "allreduce", "dtype": "BFloat16"}),
        ("hipMemsetAsync", "FillBuffer", "gpu_memset", {"stream": 3}),
    ]
    out = []
    for i, (launch, name, cat, args) in enumerate(work):
        at, link = t0 + 100 * i, {"correlation": 50 + i}
        out.append(event(cat="cuda_runtime", name=launch, ts=at, dur=4, args={"cbid": i, **link}, **host))
        more = (
            {"Process Group Name": "0", "In msg nelems": 512, "Group size": world, "Seq": 7}
            if cat == "kernel" and i == 3
            else {}
        )
        out.append(
            event(
                cat=cat,
                name=name,
                ts=at + 20,
                dur=30,
                args=args | link | more | {"device": rank},
                pid=rank,
                tid=args["stream"],
            )
        )
    out.append(
        event(cat="cuda_runtime", name="hipDeviceSynchronize", ts=t0 + 600, dur=50, args={"correlation": 99}, **host)
    )
    info = {"backend": "nccl", "rank": rank, "world_size": world}
    devices = [{"id": rank, "name": "AMD Instinct MI300X", "totalGlobalMem": 206141652992}]
    return {"schemaVersion": 1, "deviceProperties": devices, "distributedInfo": info, "traceEvents": out}


def test_rocm(tmp_path):
    for rank in range(2):
        (tmp_path / f"rank{rank}.json").write_text(json.dumps(rocm(rank)))
    report = import_trace([tmp_path / f"rank{r}.json" for r in range(2)], tmp_path / "run")
    run = mappnb.attach(tmp_path / "run")
    events = run.events
    device = events.isel(event=np.flatnonzero((events.stream.values >= 0) & (events["rank"].values == 0)))
    found = dict(
        zip(
            device.name.values,
            zip(device.category.values, device.op.values, device.stream.values.tolist(), strict=True),
            strict=True,
        )
    )
    assert report.format == "kineto" and not report.repairs and run.ranks.device.iloc[1] == "cuda:1 AMD Instinct MI300X"
    assert found == {
        COPY: ("compute", "memcpy", 0),
        GEMM: ("compute", "gemm", 3),
        NORM: ("compute", "norm", 3),
        NCCL: ("collective", "all_reduce", 9),
        "FillBuffer": ("compute", "memset", 3),
    }
    assert (device.raw_start_ns.values - device.issue_ns.values == 20_000).all()
    calls = mappnb.analysis.match(run)
    assert calls.sizes == {"call": 1, "member": 2} and calls.complete.all() and calls.seq.item() == 7
    host = events.isel(event=np.flatnonzero(events.stream.values < 0))
    assert set(host.category.values) == {"host"} and {n[:3] for n in host.name.values} == {"hip"}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("rcclGenericKernel_4(ncclDevKernelArgs4K)", "collective"),
        ("ncclKernel_AllReduce_RING_LL_Sum_float", "collective"),
        ("ncclDevKernel_SendRecv", "collective"),
        ("Cijk_Alik_Bljk_HHS_BH", "compute"),
    ],
)
def test_names_of_rccl_and_tensile(name, kind):
    from mappnb.capture.importers._names import kernel_kind

    assert kernel_kind(name, "kernel")[0] == kind


def calls_of(rank: int, order: list[tuple[int, str]]) -> dict[str, Any]:
    out = []
    for i, (seq, comms) in enumerate(order):
        args = {"stream": 20, "correlation": i + 1, "Collective name": "allreduce", "Group size": 2, "dtype": "Float"}
        args |= {
            "Process Group Name": "0",
            "Process Group Ranks": "[0, 1]",
            "Seq": seq,
            "Comms Id": comms,
            "In msg nelems": 8,
        }
        out.append(
            event(
                cat="kernel",
                name="ncclDevKernel_AllReduce",
                ts=1.7e15 + 100 * i + rank,
                dur=50,
                args=args,
                pid=rank,
                tid=20,
            )
        )
    return {
        "distributedInfo": {"rank": rank, "world_size": 2, "backend": "nccl"},
        "deviceProperties": [],
        "traceEvents": out,
    }


def matched(tmp_path, first, second):
    for rank, order in enumerate((first, second)):
        (tmp_path / f"rank{rank}.json").write_text(json.dumps(calls_of(rank, order)))
    import_trace([tmp_path / "rank0.json", tmp_path / "rank1.json"], tmp_path / "run", replace=True)
    calls = mappnb.analysis.match(mappnb.attach(tmp_path / "run"))
    return calls, (calls.start_ns.values - calls.start_ns.values.min()).tolist()


def test_comms_ids_count_more_than_seq(tmp_path):
    """Rank 1 issued the second call first, and its Seq is off by forty."""
    a, b, c = "11400714819323198485", "2654435761", "77"  # 64-bit hashes
    calls, _ = matched(tmp_path, [(5, a), (6, b), (7, c)], [(45, b), (46, a), (47, c)])
    assert calls.sizes == {"call": 3, "member": 2} and calls.complete.all() and calls.seq.values.tolist() == [5, 6, 7]
    order = np.argsort(calls.start_ns.values, axis=0)
    assert order[:, 0].tolist() == [0, 1, 2] and order[:, 1].tolist() == [1, 0, 2]


def test_a_call_that_one_rank_lacks(tmp_path):
    calls, _ = matched(tmp_path, [(1, "a"), (2, "b"), (3, "c")], [(1, "a"), (2, "c")])
    assert calls.sizes["call"] == 3 and calls.complete.values.tolist() == [True, False, True]


def test_comms_ids_of_which_some_are_equal_are_no_numbers(tmp_path):
    """Without a sequence number in torch the id is the group's alone: Seq counts, else the order."""
    calls, _ = matched(tmp_path, [(1, "x"), (2, "x")], [(1, "x"), (2, "x")])
    assert calls.seq.values.tolist() == [1, 2] and calls.complete.all()
