"""interleaved: one forward, one backward, over several model chunks per rank (Megatron-core's interleaved schedule)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from mappnb import _core
from mappnb.errors import ScheduleError
from mappnb.sched.placement import Placement
from mappnb.sched.registry import positive, register, too_large, whole_number
from mappnb.sched.schedule import Schedule

__all__ = ["interleaved", "one_forward_one_backward"]


@register("interleaved", chunks=None)
def interleaved(
    *,
    num_stages: int,
    num_microbatches: int,
    num_chunks: int = 1,
    group_size: int | None = None,
    extra_warm_up: int = 0,
) -> Schedule:
    """Interleaved 1F1B: groups of microbatches pass through all chunks of a rank in turn (Narayanan et al., arXiv:2104.04473, 2.2).

    Parameters
    ----------
    num_stages, num_microbatches, num_chunks : int
        Sizes; ``num_chunks = 1`` is plain 1F1B.
    group_size : int, optional
        Microbatches that pass one chunk before the next chunk's turn: Megatron's ``microbatch_group_size_per_vp_stage``. The number
        of ranks by default. A larger one holds more activations and has longer windows for its transfers.

    extra_warm_up : int
        As of ``1f1b``: chunk forwards by which the warm-up of each rank is longer for every rank behind it.

    Raises
    ------
    ScheduleError
        If the last, incomplete group would have fewer microbatches than there are ranks: it could not fill the pipeline.

    Notes
    -----
    The order of ``get_schedule_table`` and ``get_pp_rank_microbatches`` in ``megatron.core.pipeline_parallel.schedules`` (0.16):
    warm-up ``2 (p − 1 − r) + (v − 1) g`` forwards. For m a multiple of p and g = p the bubble is (p − 1) T / v and rank r
    holds up to ``(2 (p − 1 − r) + (v − 1) p + 1) / v`` activations of its whole share.
    """
    p, m, v = num_stages // num_chunks, num_microbatches, num_chunks
    g = p if group_size is None else positive("group_size", group_size)
    if v > 1:
        _check_groups(p, m, g)
    extra = whole_number("extra_warm_up", extra_warm_up)
    if v > 1 and extra and m % g:
        raise ScheduleError(
            f"interleaved: extra_warm_up takes whole groups; {m} microbatches leave {m % g} beside groups of {g}: "
            f"take {m - m % g or g} or {m - m % g + g} microbatches"
        )
    if v > 1 and extra and (2 + extra) * (p - 1) > 2 * g:
        need = -(-(2 + extra) * (p - 1) // 2)
        raise ScheduleError(
            f"interleaved: extra_warm_up {extra} with a group_size of {g} would deadlock: rank 0 would wait for forwards that the last "
            f"rank runs after a backward that it gets from rank 0; take a group_size of at least {need}"
        )
    warm_up = [((2 if v > 1 else 1) + extra) * (p - 1 - r) + (v - 1) * g for r in range(p)]
    options = ({} if group_size is None else {"group_size": g}) | ({"extra_warm_up": extra} if extra else {})
    return one_forward_one_backward(p, v, m, g, warm_up, name="interleaved", options=options)


def _check_groups(p: int, m: int, g: int) -> None:
    if g < p and p > 1:
        raise ScheduleError(
            f"interleaved: group_size is {g} for {p} ranks; it must be at least the number of ranks, such as {p}"
        )
    if m < p:
        raise ScheduleError(f"interleaved: {m} microbatches for {p} ranks; expected at least {p}, or num_chunks=1")
    rest = m % g
    if 0 < rest < p:
        low, high = m - rest, m - rest + p
        near = f"{low} or {high}" if low >= p else str(high)
        raise ScheduleError(
            f"interleaved: num_microbatches {m} leaves a last group of {rest}, smaller than the {p} ranks; "
            f"take {near} microbatches, or a group_size that leaves none or at least {p}"
        )


def one_forward_one_backward(
    p: int,
    v: int,
    m: int,
    group: int,
    warm_up: Sequence[int],
    *,
    name: str,
    options: Mapping[str, object] | None = None,
) -> Schedule:
    """Return the schedule in which each rank runs ``warm_up[r]`` forwards, then one forward and one backward in turn, then the rest.

    Parameters
    ----------
    p, v, m : int
        Ranks, chunks per rank, microbatches.
    group : int
        Microbatches that pass one chunk before the next chunk's turn; backwards pass the chunks the other way.
    warm_up : sequence of int
        Forwards before the first backward, by rank.
    """
    too_large(name, p * v, m)
    order = np.empty(2 * p * v * m, np.uint32)
    _core.one_forward_one_backward(p, v, m, group, np.asarray(warm_up, np.int64), order)
    offsets = np.arange(p + 1, dtype=np.int64) * (2 * v * m)
    sched = Schedule.from_codes(order, offsets, placement=Placement.loop(p, v), name=name, options=options)
    sched.__dict__.update(num_microbatches=m, num_chunks=v, _known=(True, False))  # known without a look at the codes
    return sched
