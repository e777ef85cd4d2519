"""What Megatron-core says about the job: parallel layout, step number, model."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations
from typing import Any, Final

from mappnb.capture._flops import training_flops_per_token
from mappnb.capture._patches import loaded
from mappnb.layout import AXES, Layout

__all__ = ["current_iteration", "layout_of", "model_facts", "unwrapped"]

_CONFIG_FIELDS: Final = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "ffn_hidden_size",
    "num_moe_experts",
    "moe_router_topk",
    "recompute_granularity",
    "sequence_parallel",
)


def current_iteration() -> int | None:
    """Return the iteration that ``megatron.training`` is in, if that is how the job runs."""
    module = loaded("megatron.training.global_vars")
    iteration = getattr(getattr(module, "_GLOBAL_ARGS", None), "curr_iteration", None)
    return iteration if isinstance(iteration, int) else None


def layout_of(parallel_state: Any, num_chunks: int) -> tuple[Layout, dict[str, int]] | None:
    """Return the layout and this rank's coordinates, from ``megatron.core.parallel_state``; None before its start."""
    if not parallel_state.model_parallel_is_initialized():
        return None
    sizes: dict[str, Any] = {
        "tp": _call(parallel_state, "get_tensor_model_parallel_world_size", 1),
        "cp": _call(parallel_state, "get_context_parallel_world_size", 1),
        "ep": _call(parallel_state, "get_expert_model_parallel_world_size", 1),
        "dp": _call(parallel_state, "get_data_parallel_world_size", 1),
        "pp": _call(parallel_state, "get_pipeline_model_parallel_world_size", 1),
    }
    coords = {
        "tp": _call(parallel_state, "get_tensor_model_parallel_rank", 0),
        "cp": _call(parallel_state, "get_context_parallel_rank", 0),
        "ep": _call(parallel_state, "get_expert_model_parallel_rank", 0),
        "dp": _call(parallel_state, "get_data_parallel_rank", 0),
        "pp": _call(parallel_state, "get_pipeline_model_parallel_rank", 0),
    }
    etp = _call(parallel_state, "get_expert_tensor_parallel_world_size", sizes["tp"]) if sizes["ep"] > 1 else 1
    sizes.update(etp=etp, num_chunks=max(1, num_chunks))
    return Layout(**sizes, order=_order(parallel_state, sizes)), coords


def _call(parallel_state: Any, name: str, default: int) -> int:
    try:
        value = getattr(parallel_state, name)()
    except (AttributeError, AssertionError, RuntimeError):  # another version, or a group that was not made
        return default
    return default if value is None else int(value)


def _order(parallel_state: Any, sizes: dict[str, Any]) -> str:
    """Find the order of the axes: the first, in Megatron's order of preference, that gives this rank's groups."""
    import torch.distributed as dist

    groups: dict[str, Sequence[int]] = {}
    for axis, name in (("tp", "tensor_model"), ("pp", "pipeline_model"), ("dp", "data"), ("cp", "context")):
        try:
            group = getattr(parallel_state, f"get_{name}_parallel_group")()
            groups[axis] = tuple(dist.get_process_group_ranks(group))
        except (AttributeError, AssertionError, RuntimeError, ValueError):
            continue
    preferred = ["-".join(AXES), "tp-cp-ep-pp-dp"]
    for order in [*preferred, *("-".join(axes) for axes in permutations(AXES))]:
        layout = Layout(**sizes, order=order)
        if all(tuple(ranks) in layout.groups(axis) for axis, ranks in groups.items()):
            return order
    return preferred[0]


def unwrapped(model: Any) -> Any:
    """Return the model inside DistributedDataParallel, Float16Module and the like."""
    while hasattr(model, "module") and not hasattr(model, "decoder"):
        model = model.module
    return model


def model_facts(chunks: Sequence[Any], config: Any, seq_length: int) -> dict[str, Any]:
    """Facts about the model: sizes from its configuration, parameters of this rank, FLOPs per token.

    Returns
    -------
    dict
        ``parameters_local``: on this rank; ``parameters_owned``: those that no rank before this one holds too (tensor
        shards count everywhere, replicated ones on tensor rank 0), so that their sum over the ranks of data- and
        context-parallel rank 0 is the size of the model.
    """
    models = [unwrapped(chunk) for chunk in chunks]
    vocab_size = next((int(m.vocab_size) for m in models if hasattr(m, "vocab_size")), 0)
    parameters = [p for model in models for p in model.parameters()]
    facts: dict[str, Any] = {name: getattr(config, name) for name in _CONFIG_FIELDS if hasattr(config, name)}
    facts.update(
        framework="megatron-core",
        class_name=type(models[0]).__name__,
        parameters_local=sum(p.numel() for p in parameters),
        parameters_owned=sum(p.numel() for p in parameters if _owns(p)),
        seq_length=seq_length,
        vocab_size=vocab_size,
        flops_per_token=training_flops_per_token(config, seq_length=seq_length, vocab_size=vocab_size),
        cuda_graphs=bool(getattr(config, "enable_cuda_graph", False) or _cuda_graph_impl(config)),
    )
    return {key: value for key, value in facts.items() if value is not None}


def _cuda_graph_impl(config: Any) -> bool:
    return getattr(config, "cuda_graph_impl", None) not in (None, "none")


def _owns(parameter: Any) -> bool:
    """Whether this rank is the one of its tensor-parallel group that counts the parameter."""
    if getattr(parameter, "shared", False):  # the last stage's copy of the word embedding
        return False
    parallel_state = loaded("megatron.core.parallel_state")
    if getattr(parameter, "tensor_model_parallel", False) or parallel_state is None:
        return True
    return _call(parallel_state, "get_tensor_model_parallel_rank", 0) == 0
