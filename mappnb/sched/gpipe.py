"""gpipe: all forwards, then all backwards."""

from __future__ import annotations

import numpy as np

from mappnb.sched import codes
from mappnb.sched.placement import Placement
from mappnb.sched.registry import register
from mappnb.sched.schedule import Schedule

__all__ = ["gpipe"]


@register("gpipe")
def gpipe(*, num_stages: int, num_microbatches: int) -> Schedule:
    """All forwards, then all backwards; one stage per rank (GPipe, arXiv:1811.06965, Fig. 2c).

    Notes
    -----
    The bubble is (p − 1) T, the peak m activations on every rank.
    """
    m = num_microbatches
    order = codes.pack(0, np.repeat([0, 1], m), np.tile(np.arange(m), 2))
    all_ranks = (order[None, :] | codes.pack(np.arange(num_stages), 0, 0)[:, None]).reshape(-1)
    offsets = np.arange(num_stages + 1, dtype=np.int64) * 2 * m
    return Schedule.from_codes(all_ranks, offsets, placement=Placement.loop(num_stages), name="gpipe")
