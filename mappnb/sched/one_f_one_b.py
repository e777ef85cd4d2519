"""1f1b: one forward, one backward in turn."""

from __future__ import annotations

from mappnb.sched.interleaved import one_forward_one_backward
from mappnb.sched.registry import register
from mappnb.sched.schedule import Schedule

__all__ = ["one_f_one_b"]


@register("1f1b")
def one_f_one_b(*, num_stages: int, num_microbatches: int) -> Schedule:
    """One forward, one backward in turn after a warm-up of p − 1 − r forwards; one stage per rank.

    Notes
    -----
    PipeDream-Flush (Narayanan et al., arXiv:2006.09503, Fig. 2b; arXiv:2104.04473, 2.1). The bubble is (p − 1) T as GPipe's, but
    rank r holds at most ``min(p − r, m)`` activations.
    """
    p, m = num_stages, num_microbatches
    return one_forward_one_backward(p, 1, m, m, [p - 1 - r for r in range(p)], name="1f1b")
