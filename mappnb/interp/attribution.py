"""Direct logit attribution from recorded activations: what each part of a model adds to a logit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import xarray as xr

from mappnb.activations import stream_with
from mappnb.errors import InterpError, SchemaError
from mappnb.interp._choices import place_of_sample
from mappnb.interp._last_norm import frozen_direction
from mappnb.interp._lens_weights import Readout, Weights, check_vectors

__all__ = ["direct_logit_attribution"]

Array = np.ndarray[Any, Any]
Row = tuple[str, int, int, float]


def direct_logit_attribution(
    activations: xr.Dataset | xr.DataTree,
    weights: Any = None,
    *,
    token: int,
    instead_of: int | None = None,
    position: int = -1,
    sample: int = 0,
    neurons: bool = False,
) -> xr.DataArray:
    """Return what each part of the model adds to the logit of a token, or to the difference of two.

    Parameters
    ----------
    activations : Dataset or DataTree
        One stream with ``embed`` (or ``resid_pre`` of layer 0), ``z``, ``mlp_out`` and ``resid_post`` of every layer.
    weights : optional
        As for `logit_lens`; ``w_o`` and, where the model has them, ``b_o`` are needed too, ``w_out`` for neurons.
    token, instead_of : int
        Ids; without the second, the logit of the first.
    position : int
        Place in the dimension ``token``; negative: counted from the last real token.
    sample : int
        Place in the dimension ``sample``.
    neurons : bool
        Every neuron (``mlp_act`` is needed) in place of its MLP, with the MLP's rest.

    Returns
    -------
    DataArray, dims (component,), unit 1
        Coordinates ``kind`` (embed, head, attention_bias, mlp, neuron, mlp_rest, final_norm_bias), ``layer``, ``unit`` (head or neuron;
        -1: none). ``attrs``: ``logit`` (or difference) as the lens of the last layer gives it, ``unexplained``: that less the sum.

    Raises
    ------
    SchemaError
        If a point or weight was not recorded.
    InterpError
        For a token, position or sample that is not there, or a place where something is missing.

    Notes
    -----
    Elhage et al. 2021, "A Mathematical Framework for Transformer Circuits". The scale of the last norm is held at its value there, so
    the sum is exact but for rounding, as long as nothing else writes to the residual stream (post-norms, experts' shared parts do not
    count as ``mlp_out``: see ``unexplained``).
    """
    points = ("z", "mlp_out", "resid_post") + (("mlp_act",) if neurons else ())
    data = stream_with(activations, *points)
    check_vectors(data, "mlp_out", "resid_post")
    held = Weights.of(weights, activations, need=("unembed", "w_o") + (("w_out",) if neurons else ()))
    here = _place(data, sample, position)
    step = int(here["step"]) if "step" in here.coords else None
    row, readout = held.row(step), held.readout(step)
    layers = [int(x) for x in here["layer"].values]
    _whole(here, layers, int(held.facts.get("num_layers", len(layers))), points)
    toward = _toward(readout, token, instead_of)
    final = np.asarray(here["resid_post"].isel(layer=-1).values, np.float64)
    direction = frozen_direction(toward, final, readout.norm_weight, held.facts)
    constant = 0.0 if readout.norm_bias is None else float(readout.norm_bias.astype(np.float64) @ toward)
    rows: list[Row] = [("embed", -1, -1, float(_embedding(here) @ direction))]
    for at, layer in enumerate(layers):
        rows += _layer_rows(here.isel(layer=at), layer, row, held, direction, neurons=neurons)
    if readout.norm_bias is not None:
        rows.append(("final_norm_bias", -1, -1, constant))
    logit = float(final @ direction) + constant
    return _labelled(rows, logit, token=token, instead_of=instead_of)


def _place(data: xr.Dataset, sample: int, position: int) -> xr.Dataset:
    """Return one token of one sample."""
    if "sample" in data.dims:
        data = data.isel(sample=place_of_sample(sample, data.sizes["sample"]))
    size = data.sizes["token"]
    real = np.asarray(data["mask"].values, bool) if "mask" in data.variables else np.ones(size, bool)
    places = np.flatnonzero(real) if position < 0 else np.arange(size)
    if not -len(places) <= position < len(places):
        raise InterpError(f"position {position}: the sample has {len(places)} real tokens of {size}")
    return data.isel(token=int(places[position]))


def _whole(here: xr.Dataset, layers: list[int], num_layers: int, points: tuple[str, ...]) -> None:
    if layers != list(range(num_layers)):
        raise InterpError(
            f"activations: layers {layers} of {num_layers}; every layer is needed for a sum: record with layers=None"
        )
    for name in (*points, "embed"):
        present = here.variables.get(f"{name}_present")
        if present is not None and not bool(np.asarray(present.values).all()):
            raise InterpError(f"activations: {name} is missing at this place (a rank's shard is not there)")


def _toward(readout: Readout, token: int, instead_of: int | None) -> Array:
    vocab = len(readout.unembed)
    for one in (token, instead_of):
        if one is not None and not 0 <= one < vocab:
            raise InterpError(f"token {one}: the vocabulary has ids 0 to {vocab - 1}")
    toward = readout.unembed[token].astype(np.float64)
    return np.asarray(toward if instead_of is None else toward - readout.unembed[instead_of].astype(np.float64))


def _embedding(here: xr.Dataset) -> Array:
    if "embed" in here:
        return np.asarray(here["embed"].values, np.float64)
    if "resid_pre" in here:
        return np.asarray(here["resid_pre"].isel(layer=0).values, np.float64)
    raise SchemaError("activations: neither embed nor resid_pre beside z; record embed in the same rule")


def _layer_rows(
    here: xr.Dataset, layer: int, row: int, held: Weights, direction: Array, *, neurons: bool
) -> Iterator[Row]:
    """Yield what one layer adds; ``here`` is of this layer and token."""
    w_o = held.get("w_o", row, layer=layer)
    assert w_o is not None
    z = np.asarray(here["z"].transpose("head", "head_dim").values, np.float64)
    if z.shape != w_o.shape[:2]:
        raise SchemaError(f"weights: w_o of layer {layer} has dims (head, head_dim) {w_o.shape[:2]}, z has {z.shape}")
    effects = (z * (w_o.astype(np.float64) @ direction)).sum(1)
    yield from (("head", layer, head, float(v)) for head, v in enumerate(effects))
    bias = held.get("b_o", row, layer=layer)
    if bias is not None:
        yield "attention_bias", layer, -1, float(bias.astype(np.float64) @ direction)
    mlp = float(np.asarray(here["mlp_out"].values, np.float64) @ direction)
    if not neurons:
        yield "mlp", layer, -1, mlp
        return
    w_out = held.get("w_out", row, layer=layer)
    assert w_out is not None
    each = np.asarray(here["mlp_act"].values, np.float64) * (w_out.astype(np.float64) @ direction)
    yield from (("neuron", layer, number, float(v)) for number, v in enumerate(each))
    yield "mlp_rest", layer, -1, mlp - float(each.sum())


def _labelled(rows: list[Row], logit: float, *, token: int, instead_of: int | None) -> xr.DataArray:
    kind, layer, unit, values = (list(column) for column in zip(*rows, strict=True))
    found = np.array(values, np.float64)
    attrs = {"units": "1", "logit": logit, "unexplained": logit - float(found.sum()), "token": token}
    attrs |= {} if instead_of is None else {"instead_of": instead_of}
    coords = {
        "kind": ("component", np.array(kind, object)),
        "layer": ("component", np.array(layer, np.int64)),
        "unit": ("component", np.array(unit, np.int64)),
    }
    return xr.DataArray(found, dims="component", coords=coords, name="direct_effect", attrs=attrs)
