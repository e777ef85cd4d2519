"""depth_first: the order that the depth-first policy makes where every transfer is free."""

from __future__ import annotations

from mappnb.sched.costs import Costs
from mappnb.sched.policies import simulate_policy
from mappnb.sched.registry import register
from mappnb.sched.schedule import Schedule

__all__ = ["depth_first"]


@register("depth_first", chunks=None)
def depth_first(*, num_stages: int, num_microbatches: int, num_chunks: int = 1) -> Schedule:
    """MegaDPP's depth-first order: the oldest microbatch first, its deepest chunk first (MegatronApp, arXiv:2507.19845, 5.2).

    Notes
    -----
    Made by the policy ``dfc`` for F = 1, B = 2 and free transfers, with no limit of memory. Unlike ``interleaved`` it takes any number of
    microbatches; where that fits the groups of ``interleaved``, its bubble and its peak are somewhat larger (p 4, m 16, v 2:
    makespan 53.5 F against 52.5 F, 7 activations against 5.5). Not what Lamy-Poirier (arXiv:2211.05953) calls depth-first: that is
    Megatron's interleaved order, here ``interleaved``.
    """
    costs = Costs(forward_s=1.0, backward_input_s=1.0, backward_weight_s=1.0)
    run = simulate_policy(
        "dfc", costs=costs, num_stages=num_stages, num_microbatches=num_microbatches, num_chunks=num_chunks
    )
    made = run.schedule
    return Schedule.from_codes(made.codes, made.offsets, placement=made.placement, name="depth_first")
