"""interleaved_zb: zero bubble's split backwards over several model chunks per rank."""

from __future__ import annotations

from mappnb.errors import ScheduleError
from mappnb.sched.placement import Placement
from mappnb.sched.registry import register, too_large
from mappnb.sched.rows import from_rows
from mappnb.sched.schedule import Schedule
from mappnb.sched.zero_bubble import delayed_weights

__all__ = ["interleaved_zb"]


@register("interleaved_zb", chunks=None)
def interleaved_zb(*, num_stages: int, num_microbatches: int, num_chunks: int = 1) -> Schedule:
    """ZB-H1 over several chunks per rank (Qi et al., arXiv:2401.10241, 2.1, with the chunks of Narayanan et al., arXiv:2104.04473, 2.2).

    Raises
    ------
    ScheduleError
        With several chunks: if there are fewer microbatches than ranks, or they make no equal rounds.

    Notes
    -----
    The microbatches go through the chunks in ``m // p`` equal rounds; rank r runs ``p − 1 − r`` forwards of its share and ``(v − 1)``
    rounds ahead, and puts r weight gradients off: the order of torch's ``ScheduleInterleavedZeroBubble``. The bubble is
    (p − 1)(F + I − W) / v where W is no longer than F and I. For m a multiple of p every rank holds p activations, with larger rounds of g
    microbatches ``p + (v − 1)(g − p) / v``. One chunk is ZB-H1.
    """
    too_large("interleaved_zb", num_stages, num_microbatches)
    p, m, v = num_stages // num_chunks, num_microbatches, num_chunks
    size = m if v == 1 else _round(p, m)
    visits = [(c, start + k) for start in range(0, m, size) for c in range(v) for k in range(size)]
    rows = [
        delayed_weights(
            [(c * p + r, k) for c, k in visits],
            [((v - 1 - c) * p + r, k) for c, k in visits],
            warm_up=(v - 1) * size + p - 1 - r,
            delay=r,
        )
        for r in range(p)
    ]
    return from_rows(rows, placement=Placement.loop(p, v), name="interleaved_zb")


def _round(p: int, m: int) -> int:
    """Return the microbatches of one of m // p equal rounds."""
    if m < p:
        raise ScheduleError(f"interleaved_zb: {m} microbatches for {p} ranks; expected at least {p}, or num_chunks=1")
    if m % (m // p):
        low = next(n for n in range(m, 0, -1) if n % (n // p) == 0)
        high = next(n for n in range(m, 2 * m) if n % (n // p) == 0)
        raise ScheduleError(
            f"interleaved_zb: num_microbatches {m} makes no {m // p} equal rounds over {p} ranks; take {low} or {high}"
        )
    return m // (m // p)
