"""zb_h1, zb_h2: backwards split in two, so that weight gradients fill the pipeline's bubble (handcrafted zero bubble)."""

from __future__ import annotations

from collections.abc import Sequence

from mappnb.errors import ScheduleError
from mappnb.sched.placement import Placement
from mappnb.sched.registry import register, too_large
from mappnb.sched.rows import F, I, Row, W, from_rows
from mappnb.sched.schedule import Schedule

__all__ = ["delayed_weights", "zb_h1", "zb_h2"]


@register("zb_h1")
def zb_h1(*, num_stages: int, num_microbatches: int) -> Schedule:
    """1F1B with the weight gradients of rank r put off by r microbatches (ZB-H1: Qi et al., arXiv:2401.10241, 2.1, Fig. 2).

    Notes
    -----
    The bubble is (p − 1)(F + I − W) against 1F1B's (p − 1)(F + I + W), where W is no longer than F and I; with a latency c and equal
    F, I and W it is longer by 4 (p − 1) c. Rank r holds at most p − r activations and of r more the part that W needs, so
    never more than rank 0 of 1F1B.
    """
    too_large("zb_h1", num_stages, num_microbatches)
    p, m = num_stages, num_microbatches
    visits = [[(r, mb) for mb in range(m)] for r in range(p)]
    rows = [delayed_weights(v, v, warm_up=p - 1 - r, delay=r) for r, v in enumerate(visits)]
    return from_rows(rows, placement=Placement.loop(p), name="zb_h1")


@register("zb_h2")
def zb_h2(*, num_stages: int, num_microbatches: int) -> Schedule:
    """Rank r runs 2 (p − 1 − r) forwards ahead and puts 2 r weight gradients off (ZB-H2: Qi et al., arXiv:2401.10241, 2.2, Fig. 3).

    Raises
    ------
    ScheduleError
        If there are fewer than 2 p − 1 microbatches: the warm-up of rank 0 takes as many.

    Notes
    -----
    From its first start to its last end a rank has a bubble of (p − 1)(F + I − 2 W) where W is no longer than F and I; with a
    latency c and equal F, I and W it is 2 (p − 1) c. The ranks end one after the other as they began, so that an optimizer step that
    waits for all of them (for the norm of the gradient) brings a bubble back. Every rank holds up to 2 p − 1 activations.
    """
    too_large("zb_h2", num_stages, num_microbatches)
    p, m = num_stages, num_microbatches
    if m < 2 * p - 1:
        raise ScheduleError(
            f"zb_h2: {m} microbatches for {p} ranks; expected at least 2 p - 1 = {2 * p - 1}, or take zb_h1"
        )
    visits = [[(r, mb) for mb in range(m)] for r in range(p)]
    rows = [delayed_weights(v, v, warm_up=2 * (p - 1 - r), delay=2 * r) for r, v in enumerate(visits)]
    return from_rows(rows, placement=Placement.loop(p), name="zb_h2")


def delayed_weights(
    forward: Sequence[tuple[int, int]], backward: Sequence[tuple[int, int]], *, warm_up: int, delay: int
) -> Row:
    """Return the order of one rank: ``warm_up`` forwards, then one F and one I in turn, then the Is left; each W ``delay`` Is late.

    Parameters
    ----------
    forward, backward : sequence of (stage, microbatch)
        What the rank visits, in the order of its visits.
    warm_up : int
        Forwards before the first F and I in turn.
    delay : int
        How many later I a W lets pass; the Ws that are left come at the end.
    """
    ahead = min(warm_up, len(forward))
    row: Row = [(s, F, mb) for s, mb in forward[:ahead]]
    for k, (s, mb) in enumerate(backward):
        if ahead + k < len(forward):
            row.append((forward[ahead + k][0], F, forward[ahead + k][1]))
        row.append((s, I, mb))
        if k >= delay:
            row.append((backward[k - delay][0], W, backward[k - delay][1]))
    row += [(s, W, mb) for s, mb in backward[max(0, len(backward) - delay) :]]
    return row
