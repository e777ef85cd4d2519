"""The direct path to a logit: what each head, neuron and vector in the residual stream adds to it, the last norm frozen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mappnb.errors import InterpError
from mappnb.interp._last_norm import frozen_direction
from mappnb.interp._model_taps import Record, split_of
from mappnb.interp.model import Model

__all__ = ["Direct", "direct_path"]


@dataclass(frozen=True, slots=True, eq=False)
class Direct:
    """How vectors become the logit difference.

    Attributes
    ----------
    direction : ndarray, dims (hidden,)
        A vector ``x`` of the residual stream at the last token adds ``x @ direction``.
    constant : float
        What the bias of the last norm adds.
    heads : ndarray, dims (layer, head, head_dim)
        ``z`` of a head adds ``z @ heads[layer, head]``.
    neurons : ndarray, dims (layer, neuron), or None
        An activation ``a`` of a neuron adds ``a * neurons[layer, neuron]``; None for mixtures of experts.
    attention_bias : ndarray, dims (layer,)
        What the bias of the attention output adds.
    """

    direction: np.ndarray
    constant: float
    heads: np.ndarray
    neurons: np.ndarray | None
    attention_bias: np.ndarray


def direct_path(model: Model, final: np.ndarray, token: int, instead_of: int | None) -> Direct:
    """Return the direct path from the residual stream to a logit, or to a difference of two; a collective.

    Parameters
    ----------
    model : Model
    final : ndarray, dims (hidden,)
        Residual stream before the last norm at the last token.
    token, instead_of : int
        Ids; None: the logit of ``token`` alone.
    """
    row = _unembed_rows(model, [token] if instead_of is None else [token, instead_of])
    toward = row[0] if instead_of is None else row[0] - row[1]
    norm = model.weights(["final_ln_weight", "final_ln_bias"])
    weight = norm["final_ln_weight"].values if "final_ln_weight" in norm else None
    bias = norm["final_ln_bias"].values.astype(np.float64) if "final_ln_bias" in norm else None
    direction = frozen_direction(toward, final, weight, model.facts)
    return _projected(model, direction, 0.0 if bias is None else float(bias @ toward))


def _unembed_rows(model: Model, tokens: Sequence[int]) -> np.ndarray:
    """Rows of the unembedding, dims (token, hidden): each rank tells those it holds."""
    none = np.zeros(0, np.int64)
    found = []
    for name, tensor, shard, _ in model.local_tensors(["unembed"]):
        start = shard.split["vocab"].start if "vocab" in shard.split else 0
        for i, token in enumerate(tokens):
            if start <= token < start + len(tensor):
                row = tensor[token - start].detach().cpu().double().numpy()
                found.append(Record(name, i, none, none, {}, row))
    records = model.gather(found)
    rows = {record.layer: record.values for record in records}
    if len(rows) != len(tokens):
        raise InterpError("the unembedding was not found: this model's output layer is not known by its module names")
    return np.stack([rows[i] for i in range(len(tokens))]).astype(np.float64)


def _projected(model: Model, direction: np.ndarray, constant: float) -> Direct:
    """Each rank projects its own weights; what is gathered is small."""
    import torch

    none = np.zeros(0, np.int64)
    found = []
    for name, tensor, shard, layer in model.local_tensors(["w_o", "b_o", "w_out"]):
        part = tensor.double() @ torch.as_tensor(direction, device=tensor.device)
        found.append(Record(name, layer, none, none, split_of(shard), part.cpu().numpy()))
    records = model.gather(found)
    heads = _whole([r for r in records if r.point == "w_o"], "head", model.num_layers)
    if heads is None:
        raise InterpError(
            "no output projection of attention was found: this model's layers are not known by their module names"
        )
    bias = _whole([r for r in records if r.point == "b_o"], "", model.num_layers)
    neurons = _whole([r for r in records if r.point == "w_out"], "neuron", model.num_layers)
    return Direct(direction, constant, heads, neurons, np.zeros(model.num_layers) if bias is None else bias)


def _whole(records: Sequence[Record], dim: str, num_layers: int) -> np.ndarray | None:
    """Projections of all layers, dims (layer, [unit, ...])."""
    if not records:
        return None
    shape = list(records[0].values.shape)
    if dim in records[0].split:
        shape[0] = records[0].split[dim][2]
    result = np.zeros((num_layers, *shape))
    for record in records:
        if not record.values.ndim:
            result[record.layer] = record.values
            continue
        start, stop, _ = record.split.get(dim, (0, record.values.shape[0], 0))
        result[record.layer, start:stop] = record.values
    return result
