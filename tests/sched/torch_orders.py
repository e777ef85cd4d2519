"""The orders of ``torch.distributed.pipelining``, without a process group: its schedules read a few attributes of their stages."""

from types import SimpleNamespace

from mappnb.sched.action import Action
from mappnb.terms import Kind

KINDS = {k.value for k in Kind}


def stages(group_size, num_stages, rank, indices):
    """What a schedule asks of the stages of one rank before it runs."""
    return [
        SimpleNamespace(
            group_size=group_size,
            group_rank=rank,
            num_stages=num_stages,
            stage_index=i,
            is_first=i == 0,
            is_last=i == num_stages - 1,
            has_backward=True,
            submod=None,
            stage_index_to_group_rank={s: s % group_size for s in range(num_stages)},
        )
        for i in indices
    ]


def torch_schedule(name, *, ranks, chunks, microbatches, v_shape=False):
    """Torch's schedule object as rank 0 makes it; it holds the orders of all ranks."""
    from torch.distributed.pipelining.schedules import get_schedule_class

    n = ranks * chunks
    indices = (0, n - 1) if v_shape else range(0, n, ranks)
    mine = stages(ranks, n, 0, indices)
    cls = get_schedule_class(name)
    return cls(mine[0] if name in ("GPipe", "1F1B") else mine, microbatches, loss_fn=lambda *_: None)


def torch_orders(name, *, ranks, chunks=1, microbatches, v_shape=False):
    """(actions of each rank, (rank, index) of overlapped pairs): torch's compute order, its idle slots left out."""
    made = torch_schedule(name, ranks=ranks, chunks=chunks, microbatches=microbatches, v_shape=v_shape)
    order = made._get_pipeline_order() if name in ("GPipe", "1F1B") else made.pipeline_order
    rows, pairs = [], set()
    for rank in range(ranks):
        row = []
        for action in order[rank]:
            if action is None:
                continue
            if action.sub_actions:
                pairs.add((rank, len(row)))
            row += [
                Action(a.stage_index, Kind(a.computation_type.value), a.microbatch_index)
                for a in action.sub_actions or (action,)
                if a.computation_type.value in KINDS
            ]
        rows.append(tuple(row))
    return tuple(rows), frozenset(pairs)
