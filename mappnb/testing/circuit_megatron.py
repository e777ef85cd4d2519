"""A compiled circuit as a megatron-core GPTModel, in any layout of tensor, pipeline and sequence parallelism."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from mappnb.testing.circuits import Circuit, CircuitError
from mappnb.testing.cpu_groups import cpu_groups, group_sizes, plain_config

__all__ = ["CircuitModel", "load_circuit", "megatron_circuit"]


@dataclass(frozen=True, slots=True)
class CircuitModel:
    """Part of a circuit on this rank.

    Attributes
    ----------
    circuit : Circuit
        What it was compiled from.
    config : TransformerConfig
        Of the whole model.
    chunks : list of GPTModel
        This rank's model chunks.
    """

    circuit: Circuit
    config: Any
    chunks: list[Any]

    def forward(self, tokens: Any, mask: Any = None, *, backward: bool = False) -> npt.NDArray[np.float64] | None:
        """Run the model through megatron's schedule; all ranks must call it.

        Parameters
        ----------
        tokens : int array, dims (sample, token)
            Under sequence parallelism as many tokens as the tensor-parallel size divides.
        mask : bool array, dims (sample, token), optional
            False for padding: hidden as a key, and not counted in the positions.
        backward : bool
            Run backward too, from the sum of the logits, so that a recorder sees a step of training.

        Returns
        -------
        array, dims (sample, token, vocab), or None
            The logits, on ranks of the last stage.
        """
        from megatron.core.pipeline_parallel import get_forward_backward_func

        ids, real = self.circuit.checked(tokens, mask)
        samples, length = ids.shape
        size = self.config.tensor_model_parallel_size
        if self.config.sequence_parallel and length % size:
            raise CircuitError(
                f"{length} tokens a sample; expected a multiple of the tensor-parallel size {size}: add padding and a mask"
            )
        batch = _batch(ids, real)

        kept = []

        def step(_: Any, model: Any) -> Any:
            output = model(*batch)
            return output, finish

        def finish(logits: torch.Tensor, **_: Any) -> Any:
            kept.append(logits.detach())
            return (logits.sum(), {}) if backward else logits

        get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=None if len(self.chunks) == 1 else [None] * len(self.chunks),
            model=self.chunks if len(self.chunks) > 1 else self.chunks[0],
            num_microbatches=1 if len(self.chunks) == 1 else self.config.pipeline_model_parallel_size,
            seq_length=length,
            micro_batch_size=samples,
            forward_only=not backward,
            collect_non_loss_data=not backward,
        )
        return np.asarray(kept[0].numpy(), np.float64) if kept else None


@contextmanager
def megatron_circuit(
    circuit: Circuit,
    *,
    tp: int = 1,
    pp: int = 1,
    vpp: int = 1,
    sequence_parallel: bool = False,
    dtype: torch.dtype = torch.float64,
) -> Iterator[CircuitModel]:
    """Build a circuit on the ranks of this job, which all call this; megatron-core runs on the CPU inside.

    Parameters
    ----------
    circuit : Circuit
        Its heads and its vocabulary must divide by ``tp``, its layers by ``pp * vpp``.
    tp, pp, vpp : int
        Sizes; ranks that are left over are data parallel.
    sequence_parallel : bool
        Residuals cut along the sequence.
    dtype : torch.dtype
        Of weights and activations.

    Yields
    ------
    CircuitModel
        This rank's part.

    Raises
    ------
    CircuitError
        If the circuit cannot be cut so.
    """
    if circuit.num_heads % tp or circuit.vocab % tp or circuit.num_layers % (pp * vpp):
        raise CircuitError(
            f"{circuit.num_layers} layers, {circuit.num_heads} heads, vocab {circuit.vocab}: not to be cut by tp {tp}, pp {pp} x vpp {vpp}"
        )
    with cpu_groups(group_sizes(tp=tp, pp=pp, vpp=vpp)):
        config = _config(circuit, tp=tp, pp=pp, vpp=vpp, sequence_parallel=sequence_parallel, dtype=dtype)
        chunks = [_chunk(circuit, config, chunk if vpp > 1 else None) for chunk in range(vpp)]
        yield CircuitModel(circuit, config, chunks)


@torch.no_grad()  # type: ignore[untyped-decorator]
def load_circuit(circuit: Circuit, model: Any) -> None:
    """Write the circuit's weights into a GPTModel of its shape.

    Parameters
    ----------
    circuit : Circuit
        Source.
    model : GPTModel
        One model chunk, changed in place: local spec, identity norms, untied output layer, learned positions.

    Raises
    ------
    CircuitError
        For a weight of another shape.
    """
    from megatron.core import parallel_state

    from mappnb.testing.gpt_model import global_name

    weights = circuit.weights()
    size, rank = parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_tensor_model_parallel_rank()
    for local_name, parameter in model.named_parameters():
        name = global_name(model, local_name)
        if name not in weights:
            parameter.zero_()
            continue
        whole = torch.from_numpy(weights[name])
        if getattr(parameter, "tensor_model_parallel", False):
            whole = whole.chunk(size, parameter.partition_dim)[rank]
        if whole.shape != parameter.shape:
            raise CircuitError(
                f"{name} is {tuple(parameter.shape)} in the model; the circuit has {tuple(whole.shape)} for this rank"
            )
        parameter.copy_(whole)


def _config(circuit: Circuit, *, tp: int, **layout: Any) -> Any:
    return plain_config(
        tp=tp,
        **layout,
        num_layers=circuit.num_layers,
        hidden_size=circuit.hidden,
        num_attention_heads=circuit.num_heads,
        kv_channels=circuit.head_dim,
        ffn_hidden_size=4 * tp,
    )


def _chunk(circuit: Circuit, config: Any, chunk: int | None) -> Any:
    """One model chunk with the circuit's weights: identities in place of norms."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build

    layer = get_gpt_layer_local_spec()
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = IdentityOp
    model = GPTModel(
        config=config,
        transformer_layer_spec=TransformerBlockSubmodules([layer] * get_num_layers_to_build(config, chunk), IdentityOp),
        vocab_size=circuit.vocab,
        max_sequence_length=circuit.max_tokens,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=chunk),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=chunk),
        parallel_output=False,
        position_embedding_type="learned_absolute",
        share_embeddings_and_output_weights=False,
        vp_stage=chunk,
    )
    model.eval()
    load_circuit(circuit, model)
    return model


def _batch(ids: npt.NDArray[np.int64], real: npt.NDArray[np.bool_]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, positions and mask (True = hidden) as GPTModel takes them."""
    length = ids.shape[1]
    seen = np.tri(length, dtype=bool)[None, None] & real[:, None, None, :]
    positions = np.maximum(real.cumsum(axis=1) - 1, 0)
    return torch.from_numpy(ids), torch.from_numpy(positions), torch.from_numpy(~seen)
