"""Edits of activations inside a running model: patch, zero, set, add, scale, noise, by global layer, token and head."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import xarray as xr

from mappnb.activation_points import POINTS, parse_point, resolve
from mappnb.errors import InterpError, did_you_mean

__all__ = ["KINDS", "Edit", "check_edits", "edited"]

KINDS: dict[str, str] = {
    "zero": "0",
    "set": "value",
    "add": "x + value",
    "scale": "x * value",
    "mean": "value averaged over its samples and tokens",
    "patch": "the same place in value, activations of another forward",
    "noise": "x + value * standard normal numbers, equal in every layout",
}
"""What each kind puts in the place of x."""

_HEADS, _UNITS = ("head", "kv_head"), ("hidden", "neuron", "expert", "vocab")


class Activations:
    """Activations as the value of edits: each layer is taken out once, for all edits that share it."""

    def __init__(self, data: xr.Dataset | xr.DataArray) -> None:
        self._data = data
        self._layers: dict[tuple[str, int, bool], np.ndarray] = {}

    def __repr__(self) -> str:
        return f"<activations {dict(self._data.sizes)}>"

    def layer(self, point: str, layer: int, *, mean: bool) -> np.ndarray:
        """Return values of one layer, dims (sample, token, *features); averaged over real tokens, (1, 1, *features)."""
        key = point, layer, mean
        if key not in self._layers:
            self._layers[key] = self._taken(point, layer, mean)
        return self._layers[key]

    def _taken(self, point: str, layer: int, mean: bool) -> np.ndarray:
        value = self._data
        if isinstance(value, xr.Dataset):
            if point not in value:
                held = ", ".join(map(str, value.data_vars))
                raise InterpError(f"edit of {point}: the activations hold {held}; capture {point!r} too")
            value = value[point]
        if "layer" in value.dims:
            held_layers = value["layer"].values.tolist()
            if layer not in held_layers:
                raise InterpError(
                    f"edit of {point}: the activations hold layers {held_layers}, not {layer}; capture it too"
                )
            value = value.sel(layer=layer)
        for dim in ("token", "sample"):
            value = value if dim in value.dims else value.expand_dims(dim)
        if mean:
            real = value["mask"] if "mask" in value.coords else xr.ones_like(value["token"], bool)
            value = value.where(real).mean(["sample", "token"]).expand_dims(["sample", "token"])
        return np.asarray(value.transpose("sample", "token", *POINTS[point].dims).values)


@dataclass(frozen=True, eq=False, kw_only=True)
class Edit:
    """One change of the activations at one point, by global indices; each rank changes its own part.

    Attributes
    ----------
    point : str
        Point, such as ``"resid_post"`` or ``"layers.3.z"`` (TransformerLens and Hugging Face names too).
    layer : int or sequence of int, optional
        Global layers; default that of ``point``, else every layer.
    tokens : int or sequence of int or slice, optional
        Slots of the batch as it was given, negative from the end; default every slot.
    samples : int or sequence of int, optional
        Samples of the batch; default all.
    heads, neurons : int or sequence of int, optional
        Heads (points with heads) or neurons, hidden dims, experts (the others); default all.
    kind : str
        A key of `KINDS`.
    value : number, array, DataArray or Dataset, optional
        Broadcasts to (sample, token, *features) of the samples and tokens chosen, with all heads or neurons. ``patch`` and ``mean``
        take activations (`Forward.activations`) too: one sample stands for all.
    strength : float
        ``x + strength * (new - x)``; 0 leaves the model bit-identical.
    seed : int
        Of ``noise``.

    Raises
    ------
    InterpError
        For a point, kind or value that does not fit.
    """

    point: str
    layer: int | Sequence[int] | None = None
    tokens: int | Sequence[int] | slice | None = None
    samples: int | Sequence[int] | None = None
    heads: int | Sequence[int] | None = None
    neurons: int | Sequence[int] | None = None
    kind: str = "zero"
    value: Any = None
    strength: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        """Check what does not depend on the model."""
        name = parse_point(resolve(self.point, error=InterpError), error=InterpError)
        if name.grad or name.point not in POINTS:
            raise InterpError(f"edit of {self.point!r}: activations can be edited, gradients and weights cannot")
        object.__setattr__(self, "point", name.point)
        if self.layer is None and name.layer >= 0:
            object.__setattr__(self, "layer", name.layer)
        if self.kind not in KINDS:
            raise InterpError(f"kind is {self.kind!r}; known: {', '.join(KINDS)}{did_you_mean(self.kind, KINDS)}")
        if (self.value is None) != (self.kind == "zero"):
            wants = "takes no value" if self.kind == "zero" else f"needs a value: {KINDS[self.kind]}"
            raise InterpError(f"edit of {self.point}: kind {self.kind!r} {wants}")
        if isinstance(self.value, (xr.Dataset, xr.DataArray)):
            object.__setattr__(self, "value", Activations(self.value))
        if self.kind == "mean" and not isinstance(self.value, Activations):
            raise InterpError(
                f"edit of {self.point}: kind 'mean' averages activations; for a vector of your own take kind 'set'"
            )
        dims = POINTS[self.point].dims
        for what, known in (("heads", _HEADS), ("neurons", _UNITS)):
            if getattr(self, what) is not None and dims[0] not in known:
                raise InterpError(f"edit of {self.point}: it has dims {', '.join(dims)}, no {what}; leave {what} out")

    @cached_property
    def layers(self) -> tuple[int, ...] | None:
        """Global layers, None for all."""
        if self.layer is None or not POINTS[self.point].per_layer:
            return None
        return tuple(int(i) for i in np.atleast_1d(np.asarray(self.layer)))

    @cached_property
    def units(self) -> np.ndarray | None:
        """Global indices along the first feature dim, None for all."""
        units = self.heads if self.heads is not None else self.neurons
        return None if units is None else np.atleast_1d(np.asarray(units, np.int64))

    def at(self, layer: int) -> bool:
        """Return whether this edit changes ``layer`` (-1: a point that no layer holds)."""
        return self.layers is None or layer in self.layers

    def source(self, layer: int, samples: np.ndarray, tokens: np.ndarray) -> Any:
        """Return the value for one layer and the samples and tokens chosen: an array or tensor that broadcasts to them."""
        if not isinstance(self.value, Activations):
            return self.value
        whole = self.value.layer(self.point, layer, mean=self.kind == "mean")
        return _chosen(whole, samples, tokens, self)

    def normal(self, shape: tuple[int, ...], layer: int) -> Any:
        """Return the random numbers of ``noise``, which do not depend on the layout."""
        import torch

        generator = torch.Generator().manual_seed(zlib.crc32(f"{self.seed}:{self.point}:{layer}".encode()))
        return torch.randn(shape, generator=generator)


def _chosen(values: np.ndarray, samples: np.ndarray, tokens: np.ndarray, edit: Edit) -> np.ndarray:
    """Take the same samples and tokens of activations as the edit has; a single one stands for all."""
    for axis, (what, indices) in enumerate((("sample", samples), ("token", tokens))):
        size = values.shape[axis]
        if size == 1:
            continue
        if len(indices) and indices.max() >= size:
            raise InterpError(
                f"edit of {edit.point}: {what} {indices.max()}; the activations given have {size} {what}s: both runs need prompts "
                "of the same length"
            )
        values = values.take(indices, axis)
    return values


@dataclass(frozen=True, slots=True, eq=False)
class Where:
    """Where a tensor of this rank lies in the batch.

    Attributes
    ----------
    rows : ndarray of int
        Batch row of each sample of the tensor.
    slots : ndarray of int
        Packed slot of each token of the tensor.
    place : ndarray of int, dims (sample, token), optional
        Packed slot of each user slot; default equal.
    num_slots : int
        User slots.
    split : dict
        Feature dim -> (start, stop, total).
    """

    rows: np.ndarray
    slots: np.ndarray
    place: np.ndarray | None
    num_slots: int
    split: dict[str, tuple[int, int, int]]


class EditSet:
    """All edits of one forward, found by point and layer."""

    def __init__(self, edits: Sequence[Edit]) -> None:
        self.edits = [edit for edit in edits if edit.strength != 0]
        self.points = sorted({edit.point for edit in self.edits})

    def at(self, point: str, layer: int) -> list[Edit]:
        """Return the edits of one point of one layer, in their order."""
        return [edit for edit in self.edits if edit.point == point and edit.at(layer)]

    def apply(self, point: str, layer: int, tensor: Any, where: Where) -> Any:
        """Return the tensor with all its edits made, or None where there are none."""
        if not (edits := self.at(point, layer)):
            return None
        result = tensor.clone()
        for edit in edits:
            _apply(edit, layer, result, where)
        return result


def _apply(edit: Edit, layer: int, tensor: Any, where: Where) -> None:
    """Make one edit in place."""
    import torch

    dims = POINTS[edit.point].dims
    start, stop, total = where.split.get(dims[0], (0, tensor.shape[2], tensor.shape[2]))
    full = (total, *tensor.shape[3:])
    pairs = _pairs(edit, where)
    units = _units(edit, dims[0], total)
    kept = None if units is None else units[(units >= start) & (units < stop)]
    if not len(pairs.row) or (kept is not None and not len(kept)):
        return
    index = [torch.as_tensor(part, device=tensor.device) for part in (pairs.row, pairs.slot)]
    if kept is not None:
        index = [*(part[:, None] for part in index), torch.as_tensor(kept - start, device=tensor.device)[None]]

    def local(value: Any) -> Any:
        """Return the local part of a value that broadcasts to (sample, token, *features)."""
        whole = torch.as_tensor(value, device=tensor.device).to(tensor.dtype)
        try:
            whole = whole.expand((len(pairs.samples), len(pairs.tokens), *full))
        except RuntimeError:
            raise InterpError(
                f"edit of {edit.point}, layer {layer}: value has shape {tuple(whole.shape)}; expected what broadcasts to "
                f"(sample, token, {', '.join(dims)}) = {(len(pairs.samples), len(pairs.tokens), *full)}"
            ) from None
        chosen = whole[torch.as_tensor(pairs.sample), torch.as_tensor(pairs.token)]
        return chosen[:, start:stop] if kept is None else chosen[:, torch.as_tensor(kept)]

    old = tensor[tuple(index)]
    new = _new(edit, layer, old, local, pairs, full)
    tensor[tuple(index)] = new if edit.strength == 1 else old + edit.strength * (new - old)


def _new(edit: Edit, layer: int, old: Any, local: Any, pairs: _Pairs, full: tuple[int, ...]) -> Any:
    if edit.kind == "zero":
        return old.new_zeros(old.shape)
    value = edit.source(layer, pairs.samples, pairs.tokens)
    if edit.kind == "add":
        return old + local(value)
    if edit.kind == "scale":
        return old * local(value)
    if edit.kind == "noise":
        return old + local(value) * local(edit.normal((len(pairs.samples), len(pairs.tokens), *full), layer))
    return local(value)


@dataclass(frozen=True, slots=True)
class _Pairs:
    """(sample, token) pairs of an edit that lie in the tensor."""

    row: np.ndarray  # in the tensor
    slot: np.ndarray
    sample: np.ndarray  # among the samples chosen
    token: np.ndarray
    samples: np.ndarray  # chosen
    tokens: np.ndarray


def _pairs(edit: Edit, where: Where) -> _Pairs:
    num_samples = len(where.place) if where.place is not None else int(where.rows.max()) + 1
    samples = _indices(edit.samples, num_samples, "sample", edit)
    tokens = _indices(edit.tokens, where.num_slots, "token", edit)
    i, j = (part.ravel() for part in np.meshgrid(np.arange(len(samples)), np.arange(len(tokens)), indexing="ij"))
    slot = tokens[j] if where.place is None else where.place[samples[i], tokens[j]]
    row, local = _find(samples[i], where.rows), _find(slot, where.slots)
    here = (row >= 0) & (local >= 0)
    return _Pairs(row[here], local[here], i[here], j[here], samples, tokens)


def _find(wanted: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Position of each wanted value in ``values``, -1 where it is not."""
    table = np.full(int(max(wanted.max(initial=0), values.max(initial=0))) + 1, -1)
    table[values] = np.arange(len(values))
    return np.asarray(table[wanted])


def _indices(chosen: Any, size: int, what: str, edit: Edit) -> np.ndarray:
    if chosen is None or isinstance(chosen, slice):
        return np.arange(size)[chosen if chosen is not None else slice(None)]
    indices = np.atleast_1d(np.asarray(chosen, np.int64))
    if ((indices < -size) | (indices >= size)).any():
        raise InterpError(f"edit of {edit.point}: {what} {indices.tolist()}; the batch has {what}s 0 to {size - 1}")
    return np.asarray(indices % size)


def _units(edit: Edit, dim: str, total: int) -> np.ndarray | None:
    if edit.units is None:
        return None
    if ((edit.units < -total) | (edit.units >= total)).any():
        raise InterpError(f"edit of {edit.point}: {dim} {edit.units.tolist()}; the model has {dim}s 0 to {total - 1}")
    return np.asarray(edit.units % total)


_SIZES = {"head": "num_heads", "kv_head": "num_kv_heads", "neuron": "ffn", "hidden": "hidden", "vocab": "vocab"}


def check_edits(edits: Sequence[Edit], facts: Mapping[str, Any], shape: tuple[int, ...]) -> None:
    """Raise unless edits fit the model and the batch: on every rank, before any of them runs.

    Parameters
    ----------
    edits : sequence of Edit
        Of one forward.
    facts : mapping
        Of the model.
    shape : tuple of int
        Samples and tokens of the batch.

    Raises
    ------
    InterpError
        For a layer, sample, token, head or neuron that does not exist, or a value of another shape.
    """
    num_layers = int(facts["num_layers"])
    for edit in edits:
        for layer in edit.layers or ():
            if not 0 <= layer < num_layers:
                raise InterpError(f"edit of {edit.point}: layer {layer}; the model has layers 0 to {num_layers - 1}")
        point = POINTS[edit.point]
        samples = _indices(edit.samples, shape[0], "sample", edit)
        tokens = _indices(edit.tokens, shape[1], "token", edit)
        sizes = [facts.get(_SIZES.get(dim, dim)) for dim in point.dims]
        if edit.units is not None and sizes[0]:
            _units(edit, point.dims[0], int(sizes[0]))
        every = range(num_layers) if point.per_layer else (-1,)
        full = (len(samples), len(tokens), *(int(size or 0) for size in sizes)) if all(sizes) else None
        for layer in (edit.layers or every) if isinstance(edit.value, Activations) else (-1,):
            value = edit.source(layer, samples, tokens)
            if value is not None and full is not None:
                _check_shape(edit, tuple(np.shape(value)), full)


def _check_shape(edit: Edit, given: tuple[int, ...], full: tuple[int, ...]) -> None:
    if len(given) > len(full) or any(a not in (1, b) for a, b in zip(given[::-1], full[::-1], strict=False)):
        raise InterpError(
            f"edit of {edit.point}: value has shape {given}; expected what broadcasts to (sample, token, "
            f"{', '.join(POINTS[edit.point].dims)}) = {full}"
        )


@contextmanager
def edited(model: Any, edits: Sequence[Edit]) -> Iterator[None]:
    """Apply edits to every forward that runs inside the block, of training or of the model's own calls.

    Parameters
    ----------
    model : Model, module or list of modules
        As for `Model`.
    edits : sequence of Edit
        Tokens are slots of the batch as the model gets it; samples those of a microbatch.

    Notes
    -----
    Gradients flow through; a ``value`` that requires a gradient gets one.
    """
    from mappnb.interp._model_taps import edit_handler
    from mappnb.interp.model import Model

    with edit_handler(model if isinstance(model, Model) else Model(model), edits):
        yield
