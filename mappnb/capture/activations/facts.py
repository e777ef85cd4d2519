"""What a reader must know of a model to make sense of its activations: plain values, as JSON holds them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mappnb.capture._megatron_facts import unwrapped
from mappnb.capture.activations.taps_megatron import is_megatron, layers_of, place_of

__all__ = ["model_facts"]


def model_facts(model_or_chunks: Any) -> dict[str, Any]:
    """Return the facts of a model.

    Parameters
    ----------
    model_or_chunks : Module or list of Module
        Model chunks of this rank, or a torch model with a Hugging Face configuration.

    Returns
    -------
    dict
        ``framework``, ``class_name``, ``num_layers``, ``hidden``, ``num_heads``, ``num_kv_heads``, ``head_dim``, ``ffn``, ``vocab``,
        ``num_experts`` (0: dense), ``gated``, ``activation``, ``normalization``, ``eps``, ``zero_centered_gamma``, ``tied``, ``rotary``
        (None, or base, fraction, interleaved), ``softmax_scale``, ``softmax_type``, ``causal``, ``window`` (one, or a list by layer),
        ``softcap``, ``alibi``, ``sinks`` (by layer; None for what only other ranks know), ``dtype``. Unknown ones are left out.

    Notes
    -----
    Sizes are those of the whole model, from its configuration; ``vocab`` is the padded one. No collective.
    """
    chunks = list(model_or_chunks) if isinstance(model_or_chunks, (list, tuple)) else [model_or_chunks]
    cores = [unwrapped(chunk) for chunk in chunks]
    facts = _megatron(cores) if is_megatron(cores[0]) else _hugging_face(cores[0])
    parameter = next(cores[0].parameters(), None)
    if parameter is not None:
        facts["dtype"] = str(parameter.dtype).removeprefix("torch.")
    return {key: value for key, value in facts.items() if value is not None}


def _megatron(cores: Sequence[Any]) -> dict[str, Any]:
    core, config, place = cores[0], cores[0].config, place_of(cores[0])
    layers = [layer for chunk in cores for layer in layers_of(chunk)]
    return {
        "framework": "megatron-core",
        "class_name": type(core).__name__,
        "num_layers": int(config.num_layers),
        "hidden": place.hidden,
        "num_heads": place.heads,
        "num_kv_heads": place.kv_heads,
        "head_dim": place.head_dim,
        "ffn": int(config.ffn_hidden_size),
        "vocab": _vocab(cores, place.tp_size),
        "num_experts": place.experts,
        "sequence_parallel": place.sequence_parallel,
        "gated": bool(getattr(config, "gated_linear_unit", False)),
        "activation": _name_of(getattr(config, "activation_func", None)),
        "normalization": getattr(config, "normalization", None),
        "eps": float(config.layernorm_epsilon),
        "zero_centered_gamma": bool(getattr(config, "layernorm_zero_centered_gamma", False)),
        "tied": getattr(core, "share_embeddings_and_output_weights", None),
        "rotary": _rotary(core, config),
        "softmax_scale": getattr(config, "softmax_scale", None),
        "softmax_type": getattr(config, "softmax_type", "vanilla"),
        "causal": _causal(layers),
        "window": _windows(config),
        "softcap": None,
        "alibi": False,
        "sinks": _sinks(layers, int(config.num_layers), place.tp_size),
    }


def _vocab(cores: Sequence[Any], tp_size: int) -> int | None:
    for core in cores:
        local = getattr(getattr(core, "output_layer", None), "output_size_per_partition", None)
        if local is not None:
            return int(local) * tp_size
    found = getattr(cores[0], "vocab_size", None)
    return None if found is None else int(found)


def _name_of(function: Callable[..., Any] | None) -> str | None:
    return None if function is None else str(getattr(function, "__name__", function))


def _rotary(core: Any, config: Any) -> dict[str, Any] | None:
    if getattr(core, "position_embedding_type", None) not in ("rope", "yarn", "mrope"):
        return None
    return {
        "kind": core.position_embedding_type,
        "base": float(getattr(core, "rotary_base", 10000)),
        "fraction": float(getattr(core, "rotary_percent", 1.0)),
        "interleaved": bool(getattr(config, "rotary_interleaved", False)),
    }


def _causal(layers: Sequence[tuple[int, Any]]) -> bool:
    for _, layer in layers:
        kind = getattr(getattr(layer, "self_attention", None), "attn_mask_type", None)
        if kind is not None:
            return "causal" in str(getattr(kind, "name", kind))
    return True


def _windows(config: Any) -> Any:
    """Window of each layer, as ``transformer.utils.is_layer_window_attention`` chooses them."""
    window = getattr(config, "window_size", None)
    if not window:
        return None
    skip, both = getattr(config, "window_attn_skip_freq", None), [int(side) for side in window]
    if skip is None:
        return both
    numbers = range(1, int(config.num_layers) + 1)
    has = [bool(skip[n - 1]) if isinstance(skip, (list, tuple)) else n % skip != 0 for n in numbers]
    return [both if yes else [-1, -1] for yes in has]


def _sinks(layers: Sequence[tuple[int, Any]], num_layers: int, tp_size: int) -> list[list[float] | None] | None:
    """Learned sinks of each layer and head, of the layers on this rank; None where heads are split over ranks."""
    if tp_size > 1:
        return None
    found: list[list[float] | None] = [None] * num_layers
    for number, layer in layers:
        core = getattr(getattr(layer, "self_attention", None), "core_attention", None)
        offset = getattr(core, "softmax_offset", None)
        if offset is not None and getattr(layer.config, "softmax_type", "") == "learnable":
            found[number] = [float(x) for x in offset.detach().float().cpu().tolist()]
    return found if any(found) else None


def _hugging_face(core: Any) -> dict[str, Any]:
    config = getattr(core, "config", None)
    facts: dict[str, Any] = {"framework": "torch", "class_name": type(core).__name__}
    if config is None:
        return facts

    def first(*names: str) -> Any:
        return next((v for name in names if (v := getattr(config, name, None)) is not None), None)

    hidden, heads = first("hidden_size", "n_embd"), first("num_attention_heads", "n_head")
    activation = first("hidden_act", "activation_function")
    rms = getattr(config, "rms_norm_eps", None)
    llama = first("num_key_value_heads", "rope_theta", "rope_parameters") is not None
    facts.update(
        num_layers=first("num_hidden_layers", "n_layer"),
        hidden=hidden,
        num_heads=heads,
        num_kv_heads=first("num_key_value_heads") or heads,
        head_dim=first("head_dim") or (hidden // heads if hidden and heads else None),
        ffn=first("intermediate_size", "n_inner") or (4 * hidden if hidden else None),
        vocab=first("vocab_size"),
        num_experts=first("num_local_experts", "num_experts") or 0,
        gated=any(name.endswith(("gate_proj", "gate_up_proj")) for name, _ in core.named_modules()),
        activation=None if activation is None else str(activation),
        normalization="RMSNorm" if rms is not None else "LayerNorm",
        eps=first("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps"),
        zero_centered_gamma="gemma" in str(getattr(config, "model_type", "")),
        tied=first("tie_word_embeddings"),
        rotary={"kind": "rope", "base": _rope_base(config), "fraction": 1.0, "interleaved": False} if llama else None,
        softmax_scale=_scale(config),
        softmax_type="vanilla",
        causal=True,
        window=_hf_windows(config),
        softcap=first("attn_logit_softcapping"),
        alibi=False,
    )
    return facts


def _rope_base(config: Any) -> float:
    parameters = getattr(config, "rope_parameters", None)
    base = getattr(config, "rope_theta", None) or (
        parameters.get("rope_theta") if isinstance(parameters, dict) else None
    )
    return float(base or 10000.0)


def _scale(config: Any) -> float | None:
    scalar = getattr(config, "query_pre_attn_scalar", None)
    return None if scalar is None else float(scalar) ** -0.5


def _hf_windows(config: Any) -> Any:
    """Hugging Face's window counts the query itself."""
    size = getattr(config, "sliding_window", None)
    if not size or getattr(config, "use_sliding_window", True) is False:
        return None
    both, kinds = [int(size) - 1, 0], getattr(config, "layer_types", None)
    return [both if kind == "sliding_attention" else [-1, -1] for kind in kinds] if kinds else both
