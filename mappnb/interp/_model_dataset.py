"""From what all ranks kept to one labelled dataset, in the caller's order of tokens."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import xarray as xr

from mappnb.activation_points import POINTS, WEIGHTS
from mappnb.errors import InterpError
from mappnb.interp._model_batch import Batch
from mappnb.interp._model_taps import Record

__all__ = ["activations_of", "sample_coords", "weights_of_records"]


def activations_of(
    records: Sequence[Record],
    batch: Batch,
    *,
    facts: Mapping[str, Any],
    layout: Mapping[str, int],
    texts: Callable[[np.ndarray], np.ndarray],
) -> xr.Dataset:
    """Return activations as one dataset.

    Parameters
    ----------
    records : sequence of Record
        Of all ranks.
    batch : Batch
        The batch that was run.
    facts, layout : mapping
        Go into the attributes, as JSON.
    texts : callable
        Token ids -> texts of the same shape.

    Returns
    -------
    Dataset, dims (sample, layer, token, ...)
        One variable a point, gradients as ``{point}_grad``; ``{point}_present`` is False where no rank had anything (values 0).
    """
    layers = sorted({record.layer for record in records if record.layer >= 0})
    coords = sample_coords(batch, texts(batch.tokens))
    if layers:
        coords["layer"] = ("layer", np.array(layers))
    variables: dict[str, Any] = {}
    for name in dict.fromkeys(record.point for record in records):
        mine = [record for record in records if record.point == name]
        point = POINTS[name.removesuffix("_grad")]
        values, present = _placed(mine, batch, layers if point.per_layer else [-1])
        dims = ("sample", *(["layer"] if point.per_layer else []), "token", *point.dims)
        if not point.per_layer:
            values, present = values[:, 0], present[:, 0]
        variables[name] = (dims, values)
        coords[f"{name}_present"] = (dims[: present.ndim], present)
    attrs = {"model": json.dumps(dict(facts)), "layout": json.dumps(dict(layout))}
    return xr.Dataset(variables, coords=coords, attrs=attrs)


def sample_coords(batch: Batch, texts: np.ndarray) -> dict[str, Any]:
    """Return the coordinates of samples and tokens that activations of every source have; ``texts``, dims (sample, token)."""
    count, width = batch.tokens.shape
    zeros = np.zeros(count, np.int64)
    index = np.arange(count)
    lines = ["".join(row[real]) for row, real in zip(texts, batch.mask, strict=True)]
    return {
        "sample": index,
        "token": np.arange(width),
        **dict.fromkeys(("step", "dp_rank", "microbatch", "incarnation"), ("sample", zeros)),
        "index": ("sample", index),
        "prompt": ("sample", np.array(lines, dtype=object)),
        "token_id": (("sample", "token"), batch.tokens),
        "token_text": (("sample", "token"), texts),
        "position": (("sample", "token"), batch.position),
        "mask": (("sample", "token"), batch.mask),
    }


def _placed(records: Sequence[Record], batch: Batch, layers: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Values, dims (sample, layer, token, *features), and where there are any: without the dims that no rank splits."""
    first = records[0]
    point = POINTS[first.point.removesuffix("_grad")]
    full = _whole_shape(first, point.dims, first.values.shape[2:])
    rows, slots = batch.packed.shape
    split_dims = 1 if point.split else 0
    values = np.zeros((rows, len(layers), slots, *full), first.values.dtype)
    present = np.zeros((rows, len(layers), slots, *full[:split_dims]), bool)
    for record in records:
        here = slice(int(record.rows[0]), int(record.rows[-1]) + 1), layers.index(record.layer)
        where: tuple[Any, ...] = (slice(None), record.slots, *_own_part(record, point.dims))
        values[here][where] = record.values
        present[here][where[: 2 + split_dims]] = True
    return _user_order(values, batch), _user_order(present, batch)


def _whole_shape(record: Record, dims: Sequence[str], own: Sequence[int]) -> tuple[int, ...]:
    """Sizes of the dims over all ranks, from those of one rank's part."""
    return tuple(record.split[dim][2] if dim in record.split else size for dim, size in zip(dims, own, strict=True))


def _own_part(record: Record, dims: Sequence[str]) -> tuple[slice, ...]:
    """Where this rank's part lies along each dim."""
    return tuple(slice(*record.split[dim][:2]) if dim in record.split else slice(None) for dim in dims)


def _user_order(values: np.ndarray, batch: Batch) -> np.ndarray:
    """From packed rows and slots, dims (row, layer, slot, ...), to the caller's samples and tokens."""
    count, width = batch.tokens.shape
    values = values[:count, :, :width]
    if (batch.place == np.arange(width)).all():
        return values
    place = batch.place.reshape((count, 1, width, *[1] * (values.ndim - 3)))
    return np.take_along_axis(values, place, 2)


def weights_of_records(records: Sequence[Record], names: Sequence[str]) -> xr.Dataset:
    """Return weights of all ranks as one dataset, dims ([layer,] ...)."""
    variables: dict[str, Any] = {}
    for name in names:
        mine = [record for record in records if record.point == name]
        if not mine:
            raise InterpError(f"weight {name!r}: this model has none by that name; it may have no such bias")
        point = WEIGHTS[name]
        layers = sorted({record.layer for record in mine})
        first = mine[0]
        values = np.zeros((len(layers), *_whole_shape(first, point.dims, first.values.shape)), first.values.dtype)
        for record in mine:
            where: tuple[Any, ...] = (layers.index(record.layer), *_own_part(record, point.dims))
            values[where] = record.values
        if point.per_layer:
            variables[name] = (("layer", *point.dims), values)
            variables.setdefault("layer", ("layer", np.array(layers)))
        else:
            variables[name] = (point.dims, values[0])
    return xr.Dataset(variables).set_coords(["layer"] if "layer" in variables else [])
