"""What a span counts as in the self-time table: a part (a kind, for compute with its stage), or a transfer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mappnb.terms import Category, Op, Phase

__all__ = [
    "COLLECTIVE",
    "COMPUTE_KINDS",
    "HOST",
    "KINDS",
    "RECV",
    "SEND",
    "WAIT",
    "WAIT_RECV",
    "WAIT_SEND",
    "kinds_of",
    "part_names",
]

Array = np.ndarray[Any, Any]

COMPUTE_KINDS: tuple[str, ...] = (
    Phase.FORWARD,
    Phase.BACKWARD,
    Phase.BACKWARD_INPUT,
    Phase.BACKWARD_WEIGHT,
    Phase.RECOMPUTE,
    "compute",
)
"""Kinds that are told apart by stage; ``compute`` is compute of no phase, as traces of kernels have it."""

KINDS: tuple[str, ...] = (*COMPUTE_KINDS, "optimizer", "data", "checkpoint", "evaluation", "gc", "host")
"""Every kind of a part, in the order of the ``part`` coordinate."""

HOST = KINDS.index("host")
COLLECTIVE, SEND, RECV, WAIT, WAIT_SEND, WAIT_RECV = range(len(KINDS), len(KINDS) + 6)
_OWN = {str(c): KINDS.index(c) for c in (Category.OPTIMIZER, Category.DATA, Category.CHECKPOINT, Category.EVALUATION)}


def kinds_of(
    category: Sequence[Any] | Array,
    op: Sequence[Any] | Array,
    name: Sequence[Any] | Array,
    phase: Sequence[Any] | Array,
) -> Array:
    """Return the kind of each static description of a span.

    Parameters
    ----------
    category, op, name, phase : sequence of str
        Words of each description, as in an events dataset.

    Returns
    -------
    int8 array
        Index into ``KINDS``, or one of COLLECTIVE, SEND, RECV, WAIT, WAIT_SEND, WAIT_RECV.
    """
    return np.array([_kind(*row) for row in zip(category, op, name, phase, strict=True)], np.int8)


def _kind(category: str, op: str, name: str, phase: str) -> int:
    if category == Category.COMPUTE:
        return KINDS.index(phase if phase in COMPUTE_KINDS else "compute")
    if category == Category.COLLECTIVE:
        return COLLECTIVE
    if category == Category.P2P:
        return SEND if op == Op.SEND else RECV
    if category == Category.WAIT:
        return WAIT_SEND if name == Op.SEND else WAIT_RECV if name == Op.RECV else WAIT
    return KINDS.index("gc") if op == Op.GC else _OWN.get(category, HOST)


def part_names(kind: Array, stage: Array) -> Array:
    """Return the names of parts, such as ``forward@3``; without a stage the kind alone."""
    pairs = zip(kind.tolist(), stage.tolist(), strict=True)
    return np.array([KINDS[k] if s < 0 else f"{KINDS[k]}@{s}" for k, s in pairs], object)
