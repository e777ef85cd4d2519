"""zb_v, v_half, v_min: two chunks per rank, placed so that the model runs down the ranks and back up (V-shaped zero bubble)."""

from __future__ import annotations

from mappnb.sched.placement import Placement
from mappnb.sched.registry import register, too_large
from mappnb.sched.rows import F, I, Row, W, from_rows
from mappnb.sched.schedule import Schedule
from mappnb.sched.squeeze import PERIOD, Block, squeezed

__all__ = ["v_half", "v_min", "zb_v"]


@register("zb_v", chunks=2)
def zb_v(*, num_stages: int, num_microbatches: int) -> Schedule:
    """Zero bubble with no more memory than 1F1B (ZB-V: Qi et al., arXiv:2401.10241, section 6; arXiv:2405.15362, Fig. 3).

    Notes
    -----
    For equal F, I and W no rank has a bubble between its first start and its last end (with at least 2 p − 1 microbatches), and
    the step takes (p − 1) F / 2 longer than its work. Every rank holds p activations. The order of torch's
    ``ScheduleZBVZeroBubble``.
    """
    too_large("zb_v", num_stages, num_microbatches)
    p, m = num_stages // 2, num_microbatches
    return from_rows([_zb_v_row(p, m, r) for r in range(p)], placement=Placement.wave(p), name="zb_v")


def _zb_v_row(p: int, m: int, r: int) -> Row:
    """Return the order of one rank; it is written for at least 2 p - 1 microbatches, those too many are left out."""
    n, down, up = max(m, 2 * p - 1), r, 2 * p - 1 - r
    ahead = 2 * (p - r) - 1
    row: Row = [(down, F, k) for k in range(ahead)]
    for k in range(r):
        row += [(up, F, k), (down, F, ahead + k)]
    for k in range(p - r):
        row += [(up, F, r + k), (up, I, k), (up, W, k)]
    for k in range(n - p):  # one microbatch of each chunk in turn, until the last F of either chunk
        if ahead + r + k < n:
            row.append((down, F, ahead + r + k))
        row += [(down, I, k), (down, W, k), (up, F, p + k), (up, I, p - r + k), (up, W, p - r + k)]
    first, second = n - p, n - r
    for k in range(r):
        row += [(down, I, first + k), (up, I, second + k)]
    for k in range(p - r):
        row += [(down, I, first + r + k), (down, W, first + k)]
    row += [(up, W, k) for k in range(second, n)]
    row += [(down, W, k) for k in range(n - r, n)]
    return [action for action in row if action[2] < m]


@register("v_half", chunks=2)
def v_half(*, num_stages: int, num_microbatches: int) -> Schedule:
    """About half of 1F1B's memory at about half of its bubble (V-Half: Qi et al., arXiv:2405.15362, section 3.2, Fig. 4).

    Notes
    -----
    Made from the paper's building block (:mod:`mappnb.sched.squeeze`): from rank to rank F of the first chunk and I of the second come
    two slots later, the other two one slot. The peak is ``(p + 2) // 2`` activations. For equal F, I and W the bubble of one
    rank is 0.278, 0.405 and 0.456 of (p − 1) T for 4, 8 and 16 ranks, with at least 2 p microbatches.
    """
    return _from_block("v_half", num_stages, num_microbatches, 2)


@register("v_min", chunks=2)
def v_min(*, num_stages: int, num_microbatches: int) -> Schedule:
    """About a third of 1F1B's memory, the least of V-shaped schedules (V-Min: Qi et al., arXiv:2405.15362, section 3.2, Fig. 4).

    Notes
    -----
    Made from the paper's building block (:mod:`mappnb.sched.squeeze`): every pass comes one slot later from rank to rank. The peak is
    ``(p + 4) // 3`` activations. For equal F, I and W the bubble of one rank is 0.611, 0.643 and 0.656 of (p − 1) T for 4, 8 and 16
    ranks, with at least 2 p microbatches. For unequal ones it grows with the number of microbatches, past 1F1B's.
    """
    return _from_block("v_min", num_stages, num_microbatches, 1)


def _from_block(name: str, stages: int, m: int, step: int) -> Schedule:
    too_large(name, stages, m)
    p = stages // 2
    return from_rows(squeezed(_block(p, step), m), placement=Placement.wave(p), name=name)


def _block(p: int, step: int) -> Block:
    """Return the slots of the four passes of microbatch 0 by rank: ``step`` slots from rank to rank down the ranks, one slot up.

    The backwards begin as soon after the forwards as leaves no two passes of a rank in one slot of the period.
    """
    for gap in range(PERIOD):
        back = (step + 1) * p - step + 1 + gap
        end = back + step * p + p - 1
        block = [(step * r, (step + 1) * p - step - r, back + step * r, end - r) for r in range(p)]
        if all(len({slot % PERIOD for slot in passes}) == len(passes) for passes in block):
            return block
    raise AssertionError(f"no building block for {p} ranks")  # one of the gaps 0, 2 and 3 does for each p
