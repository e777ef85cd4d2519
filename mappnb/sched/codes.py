"""Actions as 32-bit codes, so that schedules of millions of actions are arrays and not objects.

Bits, the lowest first: 17 for the microbatch, 12 for the stage, 2 for the kind (F 0, B 1, I 2, W 3), 1 that says that the action
runs together with the next one (an overlapped forward and backward). ``csrc/schedule.hpp`` reads the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from mappnb.errors import ScheduleError
from mappnb.sched.action import Action
from mappnb.terms import Kind

__all__ = [
    "KINDS",
    "MAX_MICROBATCHES",
    "MAX_STAGES",
    "PAIRED",
    "Codes",
    "decode",
    "encode",
    "kind",
    "microbatch",
    "pack",
    "paired",
    "stage",
]

Codes = npt.NDArray[np.uint32]
KINDS: tuple[Kind, ...] = (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
"""Kinds by their number."""
MAX_MICROBATCHES, MAX_STAGES = 1 << 17, 1 << 12
PAIRED = np.uint32(1 << 31)
_NUMBER = {k: i for i, k in enumerate(KINDS)}


def pack(stage: npt.ArrayLike, kind: npt.ArrayLike, microbatch: npt.ArrayLike) -> Codes:
    """Return the codes of actions given as numbers; ``kind`` counts in :data:`KINDS`."""
    s, k, m = (np.asarray(a, np.uint32) for a in (stage, kind, microbatch))
    codes: Codes = m | (s << np.uint32(17)) | (k << np.uint32(29))
    return codes


def microbatch(codes: Codes) -> npt.NDArray[np.int32]:
    """Return the microbatch of each action."""
    return (codes & np.uint32(MAX_MICROBATCHES - 1)).astype(np.int32)


def stage(codes: Codes) -> npt.NDArray[np.int32]:
    """Return the stage of each action."""
    return ((codes >> np.uint32(17)) & np.uint32(MAX_STAGES - 1)).astype(np.int32)


def kind(codes: Codes) -> npt.NDArray[np.int32]:
    """Return the number of each action's kind."""
    return ((codes >> np.uint32(29)) & np.uint32(3)).astype(np.int32)


def paired(codes: Codes) -> npt.NDArray[np.bool_]:
    """Return where an action runs together with the next one."""
    return np.asarray((codes & PAIRED) != 0, np.bool_)


def encode(actions: Sequence[Action]) -> Codes:
    """Return the codes of actions.

    Raises
    ------
    ScheduleError
        If a stage or microbatch is outside what a code can hold.
    """
    for a in actions:
        if not (0 <= a.stage < MAX_STAGES and 0 <= a.microbatch < MAX_MICROBATCHES):
            raise ScheduleError(
                f"action {a}: stages go from 0 to {MAX_STAGES - 1}, microbatches from 0 to {MAX_MICROBATCHES - 1}"
            )
    return pack([a.stage for a in actions], [_NUMBER[Kind(a.kind)] for a in actions], [a.microbatch for a in actions])


def decode(codes: Codes) -> tuple[Action, ...]:
    """Return the actions of codes; pairs are not told apart."""
    triples = zip(stage(codes).tolist(), kind(codes).tolist(), microbatch(codes).tolist(), strict=True)
    return tuple(Action(s, KINDS[k], m) for s, k, m in triples)
