"""The reference GPT: megatron-core's model, DDP and optimizer, with weights that do not depend on the layout."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.transformer_config import TransformerConfig

from mappnb.testing.cpu_groups import plain_config
from mappnb.testing.gpt_spec import block_spec

if TYPE_CHECKING:
    from mappnb.testing.gpt_settings import TrainSettings

__all__ = ["build_model", "build_optimizer", "connect", "init_by_name", "model_config"]

INIT_STD = 0.02
BUCKET_SIZE = 200_000  # parameters; small, so that overlap has several buckets to work with


def model_config(settings: TrainSettings, device: torch.device) -> TransformerConfig:
    """Return megatron-core's configuration for this job: float32, no fused kernels, so that layouts agree.

    Parameters
    ----------
    settings : TrainSettings
        The job.
    device : torch.device
        Where it trains.

    Returns
    -------
    TransformerConfig
        The same on every rank.
    """
    s = settings
    options: dict[str, Any] = {}
    if s.experts:
        options |= {"num_moe_experts": s.experts, "moe_router_topk": 2, "moe_token_dispatcher_type": s.dispatcher}
        options |= {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.0, "moe_grouped_gemm": False}
        options |= {"expert_model_parallel_size": s.ep, "expert_tensor_parallel_size": 1, "add_bias_linear": False}
    if s.recompute:
        options |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    if s.gated_mlp:
        options |= {"gated_linear_unit": True, "activation_func": torch.nn.functional.silu}
    config: TransformerConfig = plain_config(
        tp=s.tp,
        pp=s.pp,
        vpp=s.vpp,
        cp=s.cp,
        sequence_parallel=s.sequence_parallel,
        dtype=torch.float32,
        num_layers=s.layers,
        hidden_size=s.hidden,
        num_attention_heads=s.heads,
        num_query_groups=s.kv_heads or s.heads,
        ffn_hidden_size=4 * s.hidden,
        hidden_dropout=s.dropout,
        attention_dropout=s.dropout,
        use_cpu_initialization=device.type == "cpu",
        **options,
    )
    return config


def build_model(settings: TrainSettings, config: TransformerConfig, device: torch.device) -> list[Any]:
    """Build this rank's model chunks, each in megatron-core's DDP.

    Parameters
    ----------
    settings : TrainSettings
        The job.
    config : TransformerConfig
        From `model_config`.
    device : torch.device
        Where the weights go.

    Returns
    -------
    list of DistributedDataParallel
        One per model chunk, ``settings.vpp`` in all.
    """
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=settings.overlap,
        use_distributed_optimizer=settings.distributed_optimizer,
        overlap_param_gather=settings.overlap and settings.distributed_optimizer,
        bucket_size=BUCKET_SIZE if settings.overlap else None,
    )
    chunks = []
    for index in range(settings.vpp):
        chunk = index if settings.vpp > 1 else None
        model = GPTModel(
            config=config,
            transformer_layer_spec=block_spec(config, chunk=chunk),
            vocab_size=settings.vocab,
            max_sequence_length=settings.sequence_length,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=chunk),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=chunk),
            position_embedding_type="rope",
            share_embeddings_and_output_weights=not settings.untie,
            vp_stage=chunk,
        )
        init_by_name(model, seed=settings.seed)
        chunks.append(DistributedDataParallel(config=config, ddp_config=ddp_config, module=model.to(device)))
    return chunks


def build_optimizer(settings: TrainSettings, chunks: list[Any]) -> Any:
    """Return megatron-core's Adam over ``chunks``, in float32."""
    config = OptimizerConfig(
        optimizer="adam",
        lr=settings.lr,
        weight_decay=0.0,
        clip_grad=settings.clip,
        adam_eps=1e-8,
        use_distributed_optimizer=settings.distributed_optimizer,
        bf16=False,
        fp16=False,
    )
    return get_megatron_optimizer(config, chunks, use_gloo_process_groups=False)


def connect(settings: TrainSettings, config: TransformerConfig, chunks: list[Any], optimizer: Any) -> None:
    """Give megatron-core's schedules the callbacks by which they drive DDP and the optimizer.

    Parameters
    ----------
    settings : TrainSettings
        The job.
    config : TransformerConfig
        Changed in place.
    chunks : list of DistributedDataParallel
        From `build_model`.
    optimizer : MegatronOptimizer
        From `build_optimizer`.
    """

    def each(method: str) -> Any:
        calls = [getattr(chunk, method) for chunk in chunks]
        return calls if settings.vpp > 1 else calls[0]

    config.no_sync_func = each("no_sync")
    if settings.overlap:
        config.grad_sync_func = each("start_grad_sync")
        if settings.distributed_optimizer:
            config.param_sync_func = each("start_param_sync")
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss


@torch.no_grad()  # type: ignore[untyped-decorator]
def init_by_name(model: Any, *, seed: int) -> None:
    """Give every weight the value it has in every layout.

    Parameters
    ----------
    model : GPTModel
        One model chunk, changed in place.
    seed : int
        Another seed gives another model.

    Notes
    -----
    The whole weight is drawn from a generator seeded by the parameter's *global* name (global layer and expert
    numbers), then this rank's tensor-parallel share is taken. megatron-core's own CPU initialisation agrees between
    tensor-parallel sizes, but not between pipeline sizes.
    """
    for local_name, parameter in model.named_parameters():
        name = global_name(model, local_name)
        if name.endswith("bias"):
            parameter.zero_()
        elif "layernorm" in name:
            parameter.fill_(1.0)
        else:
            parameter.copy_(_tensor_parallel_share(model.config, name, parameter, seed))


def global_name(model: Any, name: str) -> str:
    """Name of a parameter of one model chunk as it would be in an unsharded model.

    Parameters
    ----------
    model : GPTModel
        One model chunk.
    name : str
        As in ``model.named_parameters()``.

    Returns
    -------
    str
        With global layer and expert numbers; a tied output layer has the name of the embedding.
    """
    if name == "output_layer.weight" and model.share_embeddings_and_output_weights:
        return "embedding.word_embeddings.weight"
    if name.startswith("decoder.layers."):
        _, _, index, rest = name.split(".", 3)
        name = f"decoder.layers.{model.decoder.layers[int(index)].layer_number - 1}.{rest}"
    if ".local_experts." in name:
        head, tail = name.split(".local_experts.")
        index, rest = tail.split(".", 1)
        local_experts = model.config.num_moe_experts // model.config.expert_model_parallel_size
        first = parallel_state.get_expert_model_parallel_rank() * local_experts
        name = f"{head}.experts.{first + int(index)}.{rest}"
    return name


def _tensor_parallel_share(config: TransformerConfig, name: str, parameter: torch.Tensor, seed: int) -> torch.Tensor:
    """Draw the whole weight ``name`` and return the part of it that belongs in ``parameter``."""
    expert = not getattr(parameter, "allreduce", True)
    if expert:
        size = parallel_state.get_expert_tensor_parallel_world_size()
        rank = parallel_state.get_expert_tensor_parallel_rank()
    else:
        size = parallel_state.get_tensor_model_parallel_world_size()
        rank = parallel_state.get_tensor_model_parallel_rank()
    sharded = getattr(parameter, "tensor_model_parallel", False)
    dim = getattr(parameter, "partition_dim", 0) if sharded else 0
    size, rank = (size, rank) if sharded else (1, 0)
    shape = list(parameter.shape)
    shape[dim] *= size
    residual = "linear_proj" in name or "linear_fc2" in name
    std = INIT_STD / (2 * config.num_layers) ** 0.5 if residual else INIT_STD
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}:{name}".encode()))
    whole = torch.randn(shape, generator=generator) * std
    # a gated MLP's first layer is [gate; up]: each rank has its part of both. linear_qkv is [q of a group, k, v] group after group,
    # and each rank has its groups (with fewer groups than ranks, part of one: megatron-core gathers its output)
    blocks = whole.chunk(2 if config.gated_linear_unit and "linear_fc1" in name else 1, dim)
    return torch.cat([block.chunk(size, dim)[rank] for block in blocks], dim)
