"""breadth_first: every microbatch through a chunk before the next chunk's turn."""

from __future__ import annotations

from mappnb.errors import ScheduleError
from mappnb.sched.interleaved import one_forward_one_backward
from mappnb.sched.registry import register
from mappnb.sched.schedule import Schedule

__all__ = ["breadth_first"]


@register("breadth_first", chunks=None)
def breadth_first(*, num_stages: int, num_microbatches: int, num_chunks: int = 1) -> Schedule:
    """All forwards chunk by chunk, then all backwards chunk by chunk (Lamy-Poirier, arXiv:2211.05953, Fig. 3d).

    Raises
    ------
    ScheduleError
        If there are fewer microbatches than ranks (with several chunks): the pipeline could not be filled.

    Notes
    -----
    The bubble is (p − 1) T / v, the peak m activations; each chunk's gradients are whole as early as can be, and every transfer
    has the longest window.
    """
    p, m, v = num_stages // num_chunks, num_microbatches, num_chunks
    if v > 1 and m < p:
        raise ScheduleError(f"breadth_first: {m} microbatches for {p} ranks; expected at least {p}, or num_chunks=1")
    return one_forward_one_backward(p, v, m, m, [m * v] * p, name="breadth_first")
