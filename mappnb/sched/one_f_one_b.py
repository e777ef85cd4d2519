"""1f1b: one forward, one backward in turn."""

from __future__ import annotations

from mappnb.sched.interleaved import one_forward_one_backward
from mappnb.sched.registry import register, whole_number
from mappnb.sched.schedule import Schedule

__all__ = ["one_f_one_b"]


@register("1f1b")
def one_f_one_b(*, num_stages: int, num_microbatches: int, extra_warm_up: int = 0) -> Schedule:
    """One forward, one backward in turn after a warm-up of p − 1 − r forwards; one stage per rank.

    Parameters
    ----------
    num_stages, num_microbatches : int
        Sizes.
    extra_warm_up : int
        Forwards by which the warm-up of each rank is longer for every rank behind it: they hide the latency of the links (the warm-up
        depth of PipeMorph, arXiv:2504.19232), and hold as many activations.

    Notes
    -----
    PipeDream-Flush (Narayanan et al., arXiv:2006.09503, Fig. 2b; arXiv:2104.04473, 2.1). The bubble is (p − 1) T as GPipe's, but
    rank r holds at most ``min(p − r, m)`` activations.
    """
    p, m = num_stages, num_microbatches
    extra = whole_number("extra_warm_up", extra_warm_up)
    warm_up = [(p - 1 - r) * (1 + extra) for r in range(p)]
    options = {"extra_warm_up": extra} if extra else {}
    return one_forward_one_backward(p, 1, m, m, warm_up, name="1f1b", options=options)
