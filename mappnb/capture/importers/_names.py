"""What the names in traces mean: kernels, collectives, CPU operators, annotations, element types."""

from __future__ import annotations

import re
from functools import lru_cache

from mappnb.terms import Category, Op, Phase

__all__ = ["DTYPES", "collective_op", "host_kind", "kernel_kind", "plain_dtype"]

DTYPES: dict[str, tuple[str, int]] = {
    "float": ("float32", 4),
    "double": ("float64", 8),
    "half": ("float16", 2),
    "bfloat16": ("bfloat16", 2),
    "int": ("int32", 4),
    "long": ("int64", 8),
    "long int": ("int64", 8),
    "short": ("int16", 2),
    "char": ("int8", 1),
    "signed char": ("int8", 1),
    "byte": ("uint8", 1),
    "unsigned char": ("uint8", 1),
    "bool": ("bool", 1),
    "float8_e4m3fn": ("float8_e4m3fn", 1),
    "float8_e5m2": ("float8_e5m2", 1),
    "complexfloat": ("complex64", 8),
    "complexdouble": ("complex128", 16),
    "c10::half": ("float16", 2),
    "c10::bfloat16": ("bfloat16", 2),
}
"""Kineto's element types: torch's name and bytes of an element."""

_COLLECTIVES: tuple[tuple[str, Op], ...] = (
    ("reducescatter", Op.REDUCE_SCATTER),
    ("allreduce", Op.ALL_REDUCE),
    ("allgather", Op.ALL_GATHER),
    ("alltoall", Op.ALL_TO_ALL),
    ("broadcast", Op.BROADCAST),
    ("bcast", Op.BROADCAST),
    ("barrier", Op.BARRIER),
    ("scatter", Op.SCATTER),
    ("gather", Op.GATHER),
    ("reduce", Op.REDUCE),
    ("isend", Op.SEND),
    ("irecv", Op.RECV),
    ("recvanysource", Op.RECV),
    ("send", Op.SEND),
    ("recv", Op.RECV),
)
_COMM_KERNEL = re.compile(r"^(nccl|rccl|mscclpp?|oneccl|hccl|msccl)", re.IGNORECASE)
_KERNELS: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern, re.IGNORECASE), op)
    for pattern, op in (
        (r"fmha|flash|attention|sdpa", "attention"),
        (r"gemm|cutlass|cublas|nvjet|^Cijk_|matmul|\bxmma|wgrad|dgrad|conv|winograd|gemv", "gemm"),
        (r"multi_tensor|adam|sgd|lamb|fused_optimizer", "optimizer_kernel"),
        (r"layer_?norm|rms_?norm|batch_?norm|bn_fw|bn_bw|group_?norm", "norm"),
        (r"softmax|cross_entropy|nll_loss", "softmax"),
        (r"embedding|index_select|gather|scatter|indexing", "embedding"),
        (r"elementwise", "elementwise"),
        (r"reduce_kernel|reduction|reduce", "reduce_kernel"),
        (r"^triton_|_triton", "triton"),
    )
)


def collective_op(text: str) -> str:
    """Return the operation that a collective's or a kernel's name tells; empty if none."""
    plain = re.sub(r"[^a-z]", "", text.lower())
    if "sendrecv" in plain:
        return ""
    return next((str(op) for word, op in _COLLECTIVES if word in plain), "")


@lru_cache(maxsize=1 << 14)  # the ranks of a job run the same kernels
def kernel_kind(name: str, kind: str) -> tuple[str, str]:
    """Return (category, op) of device work by its name and Kineto's category (in lower case)."""
    if "memcpy" in kind or name.startswith(("Memcpy", "CopyHost", "dma_")):
        return Category.COMPUTE, "memcpy"
    if "memset" in kind or name.startswith("Memset"):
        return Category.COMPUTE, "memset"
    if "user_annotation" in kind:
        return Category.MARK, Op.SPAN
    if "sync" in kind or "overhead" in kind:
        return Category.MARK, kind
    if _COMM_KERNEL.match(name):
        op = collective_op(name)
        return Category.P2P if op in (Op.SEND, Op.RECV) else Category.COLLECTIVE, op
    return Category.COMPUTE, next((op for pattern, op in _KERNELS if pattern.search(name)), "kernel")


def host_kind(name: str, kind: str) -> tuple[str, str, str]:
    """Return (category, op, phase) of a host event by its name and Kineto's category (in lower case)."""
    lowered = name.lower()
    phase = Phase.BACKWARD if lowered.startswith("autograd::engine") or "backward" in lowered else Phase.NONE
    if name.startswith("ProfilerStep"):
        return Category.MARK, Op.ITERATION, Phase.NONE
    if kind == "trace":
        return Category.MARK, "profiler", Phase.NONE
    if lowered.startswith("gloo:"):
        op = collective_op(name[5:])
        return Category.P2P if op in (Op.SEND, Op.RECV) else Category.COLLECTIVE, op or Op.SPAN, Phase.NONE
    if "dataloader" in lowered and "annotation" in kind:
        return Category.DATA, Op.NEXT_BATCH, Phase.NONE
    if "annotation" in kind:
        return Category.HOST, Op.SPAN, Phase.FORWARD if "forward" in lowered and phase == Phase.NONE else phase
    return Category.HOST, kind or "span", phase


def plain_dtype(text: str) -> tuple[str, int]:
    """Return torch's name of an element type, and its bytes; 0 if it is not known."""
    return DTYPES.get(text.lower(), (text.lower(), 0))
