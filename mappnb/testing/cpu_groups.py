"""Megatron-core's process groups on the CPU, and its plainest configuration, for models that are put together by hand."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from mappnb.testing.gpt_settings import TrainSettings
from mappnb.testing.megatron_cpu import megatron_on_cpu

__all__ = ["cpu_groups", "group_sizes", "plain_config"]


@contextmanager
def cpu_groups(settings: TrainSettings) -> Iterator[None]:
    """Run megatron-core on the CPU, with process groups of these sizes; every rank of the job calls it.

    Parameters
    ----------
    settings : TrainSettings
        Its sizes and its seed are used.
    """
    from mappnb.testing import gpt_train

    with (
        megatron_on_cpu(force=True),
        gpt_train._process_group(torch.device("cpu")),
        gpt_train._model_parallel(settings, True),
    ):
        yield


def group_sizes(*, tp: int = 1, pp: int = 1, vpp: int = 1, cp: int = 1) -> TrainSettings:
    """Return settings for `cpu_groups`, of which nothing else counts.

    Parameters
    ----------
    tp, pp, vpp, cp : int
        Sizes; ranks that are left over are data parallel.
    """
    return TrainSettings(
        tp=tp, pp=pp, vpp=vpp, cp=cp, layers=max(4, 2 * pp * vpp), heads=4 * tp, hidden=128 * tp, vocab=256 * tp
    )


def plain_config(
    *, tp: int, pp: int, vpp: int, cp: int = 1, sequence_parallel: bool, dtype: torch.dtype, **model: Any
) -> Any:
    """Return megatron-core's configuration of a model in this layout: no dropout, no fused kernels.

    Parameters
    ----------
    tp, pp, vpp, cp : int
        Sizes.
    sequence_parallel : bool
        Residuals cut along the sequence.
    dtype : torch.dtype
        Of weights and activations.
    **model
        What the model is, or what is to be otherwise.

    Returns
    -------
    TransformerConfig
    """
    from megatron.core.transformer.transformer_config import TransformerConfig

    plain: dict[str, Any] = {
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "virtual_pipeline_model_parallel_size": vpp if vpp > 1 else None,
        "context_parallel_size": cp,
        "sequence_parallel": sequence_parallel,
        "batch_p2p_comm": vpp == 1,
        "overlap_p2p_comm": vpp > 1,
        "use_cpu_initialization": True,
        "pipeline_dtype": dtype,
        "params_dtype": dtype,
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "bias_dropout_fusion": False,
        "bias_activation_fusion": False,
        "apply_rope_fusion": False,
    }
    return TransformerConfig(**plain | model)
