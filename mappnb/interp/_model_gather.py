"""Collectives of a live model, all of them after the forward: what each rank kept goes to every rank."""

from __future__ import annotations

from typing import Any

import numpy as np

from mappnb.interp._model_taps import Record

__all__ = ["gather_logits", "gather_records"]


def gather_records(records: list[Record], group: Any, device: Any) -> list[Record]:
    """Return the records of all ranks of a group, in the order of the ranks.

    Parameters
    ----------
    records : list of Record
        Of this rank.
    group : ProcessGroup or None
        Ranks that hold parts of one replica of the model; None: this process holds it all.
    device : torch.device
        Where the backend of the group wants its tensors.

    Notes
    -----
    One all_gather of descriptions, then one broadcast a rank: the same calls on every rank, whatever each has kept.
    """
    if group is None or group.size() == 1:
        return records
    import torch
    import torch.distributed as dist

    dtype = np.result_type(np.float32, *(record.values.dtype for record in records))
    heads = [(r.point, r.layer, r.rows, r.slots, r.split, r.values.shape) for r in records]
    described: list[Any] = [None] * group.size()
    dist.all_gather_object(described, (dtype.str, heads), group=group)
    result = []
    for rank, (dtype_name, theirs) in zip(dist.get_process_group_ranks(group), described, strict=True):
        if not theirs:
            continue
        size = sum(int(np.prod(head[-1])) for head in theirs)
        flat = torch.empty(size, dtype=torch.float64 if np.dtype(dtype_name) == np.float64 else torch.float32)
        if rank == dist.get_rank():
            flat = torch.from_numpy(np.concatenate([r.values.astype(dtype).ravel() for r in records]))
        flat = flat.to(device)
        dist.broadcast(flat, src=rank, group=group)
        parts = np.split(flat.cpu().numpy(), np.cumsum([int(np.prod(head[-1])) for head in theirs])[:-1])
        result += [
            Record(point, layer, rows, slots, split, part.reshape(shape))
            for (point, layer, rows, slots, split, shape), part in zip(theirs, parts, strict=True)
        ]
    return result


def gather_logits(
    local: Any, shape: tuple[int, ...], *, dtype: Any, device: Any, shares: list[np.ndarray] | None = None
) -> Any:
    """Return the logits of the last stage on every rank of the replica, bit-equal.

    Parameters
    ----------
    local : Tensor or None, dims (..., vocab / tp_size)
        This rank's columns; None on the other stages.
    shape : tuple of int
        Of the whole: the last entry is the vocabulary, padding included.
    dtype, device
        Of the logits.
    shares : list of ndarray, optional
        Slots of each context-parallel rank; logits without a slot dim are 0 on all of these ranks but one.
    """
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state

    tp, pp = parallel_state.get_tensor_model_parallel_group(), parallel_state.get_pipeline_model_parallel_group()
    whole = torch.empty(shape, dtype=dtype, device=device)
    if local is not None:
        whole = local.contiguous()
        if tp.size() > 1 and local.shape[-1] != shape[-1]:
            parts = [torch.empty_like(whole) for _ in range(tp.size())]
            dist.all_gather(parts, whole, group=tp)
            whole = torch.cat(parts, -1)
        whole = whole if shares is None else _over_shares(whole, shares)
    if pp.size() > 1:
        dist.broadcast(whole, src=dist.get_process_group_ranks(pp)[-1], group=pp)
    return whole


def _over_shares(logits: Any, shares: list[np.ndarray]) -> Any:
    """Put logits of the context-parallel ranks together, dims (row, slot, vocab) or (row, vocab)."""
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state

    group = parallel_state.get_context_parallel_group()
    if logits.dim() == 2:
        dist.all_reduce(logits, group=group)
        return logits
    parts = [torch.empty_like(logits) for _ in shares]
    dist.all_gather(parts, logits.contiguous(), group=group)
    order = torch.as_tensor(np.argsort(np.concatenate(shares)), device=logits.device)
    return torch.cat(parts, 1)[:, order]
