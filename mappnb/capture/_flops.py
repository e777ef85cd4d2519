"""How many floating-point operations a token costs, from a Megatron-core transformer configuration."""

from __future__ import annotations

from typing import Any

__all__ = ["training_flops_per_token"]


def training_flops_per_token(config: Any, *, seq_length: int, vocab_size: int) -> float | None:
    """FLOPs of forward and backward for one token, matrix products only.

    Parameters
    ----------
    config
        ``TransformerConfig``: grouped-query attention, gated MLP and mixtures of experts are taken into account.
    seq_length
        Tokens in a sequence; attention is counted as causal, half of the square.
    vocab_size
        Columns of the output layer, padding included.

    Returns
    -------
    float or None
        None for models with other blocks (multi-latent attention, Mamba, multi-token prediction).

    Notes
    -----
    As ``num_floating_point_operations`` of megatron/training/training.py counts, after Narayanan et al.
    (arXiv:2104.04473, appendix): a multiply-add is two operations, and the backward costs twice the forward, so three
    times two per multiply-add. Recomputation is not useful work and not counted.
    """
    if getattr(config, "multi_latent_attention", False) or getattr(config, "mtp_num_layers", None):
        return None
    if getattr(config, "is_hybrid_model", False):
        return None
    num_layers, hidden = int(config.num_layers), int(config.hidden_size)
    attention = _attention(config, seq_length)
    dense, moe = _mlp(config, int(config.ffn_hidden_size)), 0.0
    num_moe = _num_moe_layers(config)
    if num_moe:
        moe = _moe(config)
    products = num_layers * attention + (num_layers - num_moe) * dense + num_moe * moe + hidden * vocab_size
    return 3.0 * 2.0 * products


def _attention(config: Any, seq_length: int) -> float:
    """Multiply-adds per token of one attention block: Q, K, V, output, scores and context."""
    hidden, heads = int(config.hidden_size), int(config.num_attention_heads)
    channels = int(getattr(config, "kv_channels", None) or hidden // heads)
    groups = int(getattr(config, "num_query_groups", None) or heads)
    query, key_value = heads * channels, groups * channels
    return hidden * query + 2 * hidden * key_value + query * hidden + 2 * query * seq_length / 2


def _mlp(config: Any, ffn_size: int) -> float:
    """Multiply-adds per token of an MLP; a gated one has three matrices."""
    return (3 if getattr(config, "gated_linear_unit", False) else 2) * int(config.hidden_size) * ffn_size


def _moe(config: Any) -> float:
    """Multiply-adds per token of a mixture of experts: router, the experts that a token goes to, the shared expert."""
    hidden = int(config.hidden_size)
    expert_ffn = int(getattr(config, "moe_ffn_hidden_size", None) or config.ffn_hidden_size)
    shared_ffn = int(getattr(config, "moe_shared_expert_intermediate_size", None) or 0)
    top_k = int(getattr(config, "moe_router_topk", 1))
    return hidden * int(config.num_moe_experts) + top_k * _mlp(config, expert_ffn) + _mlp(config, shared_ffn)


def _num_moe_layers(config: Any) -> int:
    if not getattr(config, "num_moe_experts", None):
        return 0
    frequency, num_layers = getattr(config, "moe_layer_freq", 1), int(config.num_layers)
    if isinstance(frequency, int):
        return len([i for i in range(num_layers) if i % frequency == 0])
    return sum(1 for is_moe in list(frequency)[:num_layers] if is_moe)
