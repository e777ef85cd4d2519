"""Weight points: the parameters that a lens or an attribution needs, as this rank holds them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mappnb.activation_points import WEIGHTS, point_names
from mappnb.capture._megatron_facts import _call, unwrapped
from mappnb.capture._patches import loaded
from mappnb.capture.activations.shard import Shard, Split
from mappnb.capture.activations.taps_megatron import Place, is_megatron, layers_of, place_of
from mappnb.errors import CaptureError, MappnbError

__all__ = ["weights_of"]

Found = dict[str, tuple[Any, Shard, int]]


def weights_of(
    model_or_chunks: Any, names: str | Iterable[str] | None = None, *, error: type[MappnbError] = CaptureError
) -> Found:
    """Return the weight points of a model that this rank holds.

    Parameters
    ----------
    model_or_chunks : Module or list of Module
        Model chunks of this rank, or a torch model with module names as in Hugging Face's Llama or GPT-2.
    names : str or iterable of str, optional
        Keys of `mappnb.activation_points.WEIGHTS`, with or without a layer; default all.
    error : type
        Class of the error to raise.

    Returns
    -------
    dict
        Full name (``"layers.3.w_o"``, ``"unembed"``) -> local tensor (detached, canonical dims, often a view), its shard, and its
        global layer (-1: none).

    Raises
    ------
    CaptureError
        Or ``error``, for a weight that does not exist.
    """
    chunks = list(model_or_chunks) if isinstance(model_or_chunks, (list, tuple)) else [model_or_chunks]
    asked = point_names(list(WEIGHTS) if names is None else names, error=error)
    found: Found = {}
    for chunk in chunks:
        core = unwrapped(chunk)
        found.update(_megatron(core) if is_megatron(core) else _torch(chunk))
    wanted = {(name.point, name.layer) for name in asked}
    return {
        name: item
        for name, item in found.items()
        if (point := name.rpartition(".")[2], item[2]) in wanted or (point, -1) in wanted
    }


def _megatron(core: Any) -> Found:
    place, found = place_of(core), Found()
    if getattr(core, "post_process", True):
        weight = getattr(getattr(core, "output_layer", None), "weight", None)
        if weight is None and hasattr(core, "shared_embedding_or_output_weight"):
            weight = core.shared_embedding_or_output_weight()
        _add(found, "unembed", -1, weight, place, split="vocab")
        _add_norm(found, getattr(core.decoder, "final_layernorm", None), place)
    for number, layer in layers_of(core):
        projection = getattr(getattr(layer, "self_attention", None), "linear_proj", None)
        weight = getattr(projection, "weight", None)
        if weight is not None and weight.shape[1] % place.head_dim == 0:
            heads = weight.detach().t().unflatten(0, (-1, place.head_dim))
            _add(found, "w_o", number, heads, place, split="head")
        _add(found, "b_o", number, getattr(projection, "bias", None), place)
        if getattr(core.config, "softmax_type", "") == "learnable":
            attention = getattr(getattr(layer, "self_attention", None), "core_attention", None)
            _add(found, "sinks", number, getattr(attention, "softmax_offset", None), place, split="head")
        second = getattr(getattr(layer, "mlp", None), "linear_fc2", None)
        weight = getattr(second, "weight", None)
        _add(found, "w_out", number, None if weight is None else weight.detach().t(), place, split="neuron")
    return found


def _torch(model: Any) -> Found:
    from mappnb.capture.activations import taps_torch

    place, parts = taps_torch.weights_of(model)
    found = Found()
    for name, layer, tensor in parts:
        _add(found, name, layer, tensor, place)
    return found


def _add_norm(found: Found, norm: Any, place: Place) -> None:
    _add(found, "final_ln_weight", -1, getattr(norm, "weight", None), place)
    _add(found, "final_ln_bias", -1, getattr(norm, "bias", None), place)


def _add(found: Found, name: str, layer: int, tensor: Any, place: Place, *, split: str = "") -> None:
    if tensor is None:
        return
    tensor = tensor.detach()
    shared = place.tp_size > 1 and not split
    parts = {}
    if split and place.tp_size > 1:
        parts[split] = Split.even(place.tp_rank, place.tp_size, tensor.shape[0] * place.tp_size)
    shard = Shard(
        WEIGHTS[name].dims,
        tuple(tensor.shape),
        split=parts,
        replicated=shared,
        writes=(not shared or place.tp_rank == 0) and _is_first_replica(),
    )
    found[f"layers.{layer}.{name}" if layer >= 0 else name] = (tensor, shard, layer)


def _is_first_replica() -> bool:
    """Whether this rank is the first of those that hold the same parameters: over data and context parallelism."""
    state = loaded("megatron.core.parallel_state")
    if state is None or not state.model_parallel_is_initialized():
        return True
    return not any(_call(state, f"get_{axis}_parallel_rank", 0) for axis in ("data", "context"))
