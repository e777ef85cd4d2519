"""Context parallelism without TransformerEngine: a core attention that gathers keys and values.

megatron-core's own ``DotProductAttention`` refuses a context-parallel size above 1. This one gathers K and V over the
context-parallel group in megatron's load-balanced order: the sequence is cut in ``2 * cp_size`` pieces and rank ``r``
holds pieces ``r`` and ``2 * cp_size - 1 - r``, so that every rank has equally much to do under a causal mask.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.dot_product_attention import DotProductAttention

__all__ = ["GatheringDotProductAttention", "local_share", "piece_order"]


def piece_order(cp_size: int) -> list[int]:
    """Return the number of each sequence piece, in the order in which a gather over the group returns them.

    Parameters
    ----------
    cp_size : int
        Ranks in the context-parallel group.

    Returns
    -------
    list of int
        ``[0, 3, 1, 2]`` for two ranks.
    """
    return [piece for rank in range(cp_size) for piece in (rank, 2 * cp_size - 1 - rank)]


def local_share(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """Return this rank's two pieces of a whole sequence.

    Parameters
    ----------
    tensor : Tensor
        Has the whole sequence along ``dim``.
    dim : int
        The sequence dimension.

    Returns
    -------
    Tensor
        Contiguous, ``1 / cp_size`` as long along ``dim``.
    """
    size, rank = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
    pieces = tensor.chunk(2 * size, dim)
    return torch.cat([pieces[rank], pieces[2 * size - 1 - rank]], dim).contiguous()


class _GatherSequence(torch.autograd.Function):  # type: ignore[misc]
    """Gather the whole sequence along dimension 0; the backward pass sums and scatters."""

    @staticmethod
    def forward(ctx: Any, share: torch.Tensor) -> torch.Tensor:
        group = parallel_state.get_context_parallel_group()
        size = group.size()
        gathered = share.new_empty((size * share.size(0), *share.shape[1:]))
        dist.all_gather_into_tensor(gathered, share.contiguous(), group=group)
        pieces = gathered.chunk(2 * size, 0)
        order = piece_order(size)
        return torch.cat([pieces[order.index(piece)] for piece in range(2 * size)], 0)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        group = parallel_state.get_context_parallel_group()
        size = group.size()
        pieces = grad.chunk(2 * size, 0)
        ordered = torch.cat([pieces[piece] for piece in piece_order(size)], 0).contiguous()
        share = grad.new_empty((grad.size(0) // size, *grad.shape[1:]))
        dist.reduce_scatter_tensor(share, ordered, group=group)
        return share


class GatheringDotProductAttention(DotProductAttention):  # type: ignore[misc]
    """megatron-core's local core attention, for any context-parallel size.

    Notes
    -----
    Put in place through the layer spec (``core_attention``); megatron-core is not patched. Its collectives go through
    torch.distributed like any other, so a recorder sees them.
    """

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        cp_size, config.context_parallel_size = config.context_parallel_size, 1
        try:
            super().__init__(config, *args, **kwargs)
        finally:
            config.context_parallel_size = cp_size

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Attend from this rank's queries to the keys and values of the whole sequence.

        Parameters
        ----------
        query, key, value : Tensor, dims (sequence / cp_size, batch, head, head_dim)
            This rank's share.
        attention_mask : Tensor, dims (batch, 1, sequence, sequence)
            Mask of the whole sequence; this rank takes the rows of its queries.
        *args, **kwargs
            As for ``DotProductAttention.forward``.

        Returns
        -------
        Tensor, dims (sequence / cp_size, batch, hidden / tp_size)
            The context.
        """
        key, value = (_GatherSequence.apply(part) for part in (key, value))
        mask = local_share(attention_mask, 2)
        context: torch.Tensor = super().forward(query, key, value, mask, *args, **kwargs)
        return context
