"""Orders written down action by action, rank by rank, and turned into a schedule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mappnb.sched import codes
from mappnb.sched.placement import Placement
from mappnb.sched.schedule import Schedule

__all__ = ["B", "F", "I", "W", "Row", "from_rows"]

F, B, I, W = range(4)  # noqa: E741 - the field's letters; numbers of KINDS
Row = list[tuple[int, int, int]]
"""What one rank runs: (stage, number of the kind, microbatch)."""


def from_rows(
    rows: Sequence[Row],
    *,
    placement: Placement,
    name: str,
    options: Mapping[str, Any] | None = None,
    pairs: Sequence[Sequence[int]] = (),
    recompute: bool = False,
) -> Schedule:
    """Return the schedule of the orders of all ranks.

    Parameters
    ----------
    rows : sequence of lists
        (stage, number of the kind, microbatch) of each action, by rank.
    placement, name, options, recompute
        As of :class:`~mappnb.sched.schedule.Schedule`.
    pairs : sequence of sequences of int
        By rank, the positions of the actions that run together with the next one.
    """
    offsets = np.concatenate(([0], np.cumsum([len(row) for row in rows]))).astype(np.int64)
    table = np.array([action for row in rows for action in row], np.uint32).reshape(-1, 3)
    packed = codes.pack(table[:, 0], table[:, 1], table[:, 2])
    for start, where in zip(offsets.tolist(), pairs, strict=False):
        packed[start + np.asarray(where, np.int64)] |= codes.PAIRED
    return Schedule.from_codes(packed, offsets, placement=placement, name=name, options=options, recompute=recompute)
