"""Layer spec of the reference GPT: megatron-core's local layers, with two parts exchanged (no patching).

S1: norms that allow sequence parallelism. S2: a core attention that allows context parallelism.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig

__all__ = ["TorchNorm", "block_spec"]


class TorchNorm:
    """A torch norm whose parameters are marked for sequence parallelism.

    Notes
    -----
    megatron-core's ``WrappedTorchNorm`` refuses sequence parallelism. All that it asks of a norm is this mark:
    ``finalize_model_grads`` then sums the gradients over the tensor-parallel group.
    """

    def __new__(cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> torch.nn.Module:
        """Return a ``torch.nn.LayerNorm`` or ``RMSNorm``, as ``config.normalization`` says."""
        kinds: dict[str, type[torch.nn.Module]] = {"LayerNorm": torch.nn.LayerNorm, "RMSNorm": torch.nn.RMSNorm}
        norm = kinds[config.normalization](hidden_size, eps=eps)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm


def block_spec(config: TransformerConfig, *, chunk: int | None = None) -> Any:
    """Build the spec of one model chunk on this rank.

    Parameters
    ----------
    config : TransformerConfig
        Of the whole model.
    chunk : int, optional
        Model chunk (virtual pipeline stage) on this rank.

    Returns
    -------
    TransformerBlockSubmodules
        For ``GPTModel(transformer_layer_spec=...)``.
    """
    layer = get_gpt_layer_local_spec(num_experts=config.num_moe_experts, moe_grouped_gemm=False)
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = TorchNorm
    if config.context_parallel_size > 1:
        from mappnb.testing.context_parallel import GatheringDotProductAttention

        layer.submodules.self_attention.submodules.core_attention = GatheringDotProductAttention
    return TransformerBlockSubmodules([layer] * get_num_layers_to_build(config, chunk), TorchNorm)
