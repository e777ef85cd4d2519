"""A Llama of Hugging Face as a megatron-core GPTModel, in any layout of tensor, pipeline, context and sequence parallelism."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from mappnb.testing.cpu_groups import cpu_groups, group_sizes, plain_config
from mappnb.testing.gpt import quiet_megatron
from mappnb.testing.llama_checkpoint import CheckpointError, LlamaCheckpoint
from mappnb.testing.llama_shape import LlamaShape, expected_shapes, misfit

__all__ = ["CheckpointError", "LlamaCheckpoint", "LlamaShape", "llama_config", "load_llama", "megatron_llama"]


@contextmanager
def megatron_llama(
    checkpoint: LlamaCheckpoint | Any,
    *,
    tp: int = 1,
    pp: int = 1,
    vpp: int = 1,
    cp: int = 1,
    sequence_parallel: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Iterator[list[Any]]:
    """Build a Llama on the ranks of this job, which all call this; megatron-core runs on the CPU inside.

    Parameters
    ----------
    checkpoint : LlamaCheckpoint, path or model
        A folder with ``config.json`` and safetensors (each rank reads only its layers), or a ``LlamaForCausalLM``.
    tp, pp, vpp, cp : int
        Sizes; ranks that are left over are data parallel.
    sequence_parallel : bool
        Residuals cut along the sequence.
    dtype : torch.dtype
        Of weights and activations.

    Yields
    ------
    list of GPTModel
        This rank's model chunks, in evaluation mode: ``mappnb.interp.Model(chunks, tokenizer, vocab_size=checkpoint.shape.vocab)``.

    Raises
    ------
    CheckpointError
        If the model cannot be cut so, or is no Llama that megatron-core's layers can be.
    """
    source = checkpoint if isinstance(checkpoint, LlamaCheckpoint) else LlamaCheckpoint.of(checkpoint)
    source.shape.check_layout(tp=tp, pp=pp, vpp=vpp)
    with ExitStack() as stack:
        with warnings.catch_warnings():
            quiet_megatron()
            warnings.filterwarnings("ignore", category=DeprecationWarning)
            stack.enter_context(cpu_groups(group_sizes(tp=tp, pp=pp, vpp=vpp, cp=cp)))
            config = llama_config(
                source.shape, tp=tp, pp=pp, vpp=vpp, cp=cp, sequence_parallel=sequence_parallel, dtype=dtype
            )
            chunks = [_chunk(source.shape, config, chunk if vpp > 1 else None) for chunk in range(vpp)]
            load_llama(chunks, source)
        yield chunks


def llama_config(
    shape: LlamaShape,
    *,
    tp: int = 1,
    pp: int = 1,
    vpp: int = 1,
    cp: int = 1,
    sequence_parallel: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Any:
    """Return megatron-core's configuration of a Llama: RMSNorm, SwiGLU, grouped queries, no biases, no fused kernels.

    Parameters
    ----------
    shape : LlamaShape
        Sizes and constants.
    tp, pp, vpp, cp, sequence_parallel, dtype
        As in `megatron_llama`.

    Returns
    -------
    TransformerConfig
        ``rotary_base`` and ``share_embeddings_and_output_weights`` are arguments of GPTModel, not part of it.
    """
    return plain_config(
        tp=tp,
        pp=pp,
        vpp=vpp,
        cp=cp,
        sequence_parallel=sequence_parallel,
        dtype=dtype,
        num_layers=shape.num_layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.num_heads,
        num_query_groups=shape.num_kv_heads,
        kv_channels=shape.head_dim,
        ffn_hidden_size=shape.ffn,
        normalization="RMSNorm",
        layernorm_epsilon=shape.eps,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        rotary_interleaved=False,
        init_method=torch.nn.init.zeros_,  # not left out: it marks what is cut over ranks
        output_layer_init_method=torch.nn.init.zeros_,
    )


@torch.no_grad()  # type: ignore[untyped-decorator]
def load_llama(chunks: Sequence[Any], checkpoint: LlamaCheckpoint | Any) -> None:
    """Write a checkpoint's weights into this rank's model chunks; no collective.

    Parameters
    ----------
    chunks : sequence of GPTModel
        Changed in place; of megatron-core's local or Transformer Engine layers (the latter untested: their names only).
    checkpoint : LlamaCheckpoint, path or model
        As in `megatron_llama`.

    Raises
    ------
    CheckpointError
        For a tensor that is missing or of another shape, and for a setting of the model that the checkpoint contradicts. The model is
        then unchanged.

    Notes
    -----
    ``linear_qkv`` holds, for each key-value head, the rows of its queries, its key and its value; ``linear_fc1`` holds gate above up,
    on each rank its part of both. Rotation is by halves on both sides (``rotary_interleaved=False``), so rows keep their order.
    """
    from mappnb.capture._megatron_facts import unwrapped

    source = checkpoint if isinstance(checkpoint, LlamaCheckpoint) else LlamaCheckpoint.of(checkpoint)
    cores = [unwrapped(chunk) for chunk in chunks]
    shape = LlamaShape.of_megatron(cores[0])
    shape.check_same(source.shape)
    work = [(parameter, _sources(core, name)) for core in cores for name, parameter in core.named_parameters()]
    _check(source, shape, [name for _, names in work for name in names])
    for parameter, names in work:
        parameter.copy_(_share(source, shape, names, parameter))


def _chunk(shape: LlamaShape, config: Any, chunk: int | None) -> Any:
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel

    from mappnb.testing.gpt_spec import block_spec

    tp = config.tensor_model_parallel_size
    model = GPTModel(
        config=config,
        transformer_layer_spec=block_spec(config, chunk=chunk),
        vocab_size=-(-shape.vocab // tp) * tp,
        max_sequence_length=shape.max_tokens,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=chunk),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=chunk),
        position_embedding_type="rope",
        rotary_base=shape.rope_base,
        share_embeddings_and_output_weights=shape.tied,
        vp_stage=chunk,
    )
    return model.to(config.params_dtype).eval()


_OF_LAYER: Mapping[str, tuple[str, ...]] = {
    "self_attention.linear_qkv.weight": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attention.linear_proj.weight": ("self_attn.o_proj",),
    "mlp.linear_fc1.weight": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.linear_fc2.weight": ("mlp.down_proj",),
    "input_layernorm.weight": ("input_layernorm",),
    "self_attention.linear_qkv.layer_norm_weight": ("input_layernorm",),
    "pre_mlp_layernorm.weight": ("post_attention_layernorm",),
    "mlp.linear_fc1.layer_norm_weight": ("post_attention_layernorm",),
}
_OUTSIDE: Mapping[str, str] = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
}


def _sources(core: Any, name: str) -> tuple[str, ...]:
    """Names of the tensors that make a parameter of a model chunk."""
    from mappnb.testing.gpt_model import global_name

    whole = global_name(core, name)
    if whole in _OUTSIDE:
        return (_OUTSIDE[whole],)
    _, _, layer, rest = (whole.split(".", 3) + [""] * 4)[:4]
    if not whole.startswith("decoder.layers.") or rest not in _OF_LAYER:
        raise CheckpointError(
            f"the model has {whole!r}, which no Llama has; expected a GPTModel with RMSNorm, a gated MLP, rotary positions, "
            "no biases and no q/k norm: see mappnb.testing.llama.llama_config"
        )
    return tuple(f"model.layers.{layer}.{part}.weight" for part in _OF_LAYER[rest])


def _check(source: LlamaCheckpoint, shape: LlamaShape, names: Sequence[str]) -> None:
    """Raise for all tensors that are missing or do not fit, before any is written."""
    expected, found = expected_shapes(shape), source.shapes()
    wrong = [misfit(name, found.get(name), expected[_any_layer(name)]) for name in dict.fromkeys(names)]
    wrong = [line for line in wrong if line]
    if wrong:
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        raise CheckpointError(f"{source.where}: {wrong[0]}{more}")


def _any_layer(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _share(source: LlamaCheckpoint, shape: LlamaShape, names: Sequence[str], parameter: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a parameter."""
    from megatron.core import parallel_state

    size, rank = parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_tensor_model_parallel_rank()
    whole = [source.tensor(name) for name in names]
    if len(whole) == 3:
        whole = [_interleaved(whole, shape)]
    elif names[0].endswith(("embed_tokens.weight", "lm_head.weight")):
        rows = parameter.shape[0] * size - len(whole[0])
        whole = [torch.cat([whole[0], whole[0].new_zeros(rows, whole[0].shape[1])])]
    if "norm" in names[0]:
        return whole[0]
    dim = 1 if names[0].endswith(("o_proj.weight", "down_proj.weight")) else 0
    return torch.cat([part.chunk(size, dim)[rank] for part in whole], dim)


def _interleaved(qkv: Sequence[torch.Tensor], shape: LlamaShape) -> torch.Tensor:
    """Return rows [queries of a group, its key, its value] group after group, as megatron-core's ``linear_qkv`` has them."""
    parts = [part.unflatten(0, (shape.num_kv_heads, -1)) for part in qkv]
    return torch.cat(parts, 1).flatten(0, 1)
