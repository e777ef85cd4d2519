"""Parts of a stream as one labelled, lazy dataset."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import xarray as xr

from mappnb._activation_assembly import Assembled, LazyArray, Piece, lazy_variable
from mappnb._activation_parts import SAMPLE_KEY, Axes, Part, axes_of, pieces_of
from mappnb.activation_points import POINTS

__all__ = ["UNMASKED", "Copies", "assemble", "point_of", "token_texts"]

Array = np.ndarray[Any, Any]
Copies = dict[str, list[tuple[Piece, Piece]]]
UNMASKED = ("head_dim", "hidden", "component")
"""Dims that ``{point}_present`` does not have: a rank has all of them, or its shards are summed."""
_MEANING = {
    "step": "training step",
    "dp_rank": "data-parallel rank that the sample went to",
    "microbatch": "microbatch of that rank in the step",
    "index": "place of the sample in the microbatch",
}


def assemble(
    parts: Sequence[Part],
    *,
    newest: Mapping[int, int] | None = None,
    vocabulary: Sequence[str] | str | None = None,
    attrs: Mapping[str, Any] | None = None,
    copies: Copies | None = None,
    tellers: Sequence[Part] = (),
) -> xr.Dataset:
    """Put what the ranks hold of one stream together.

    Parameters
    ----------
    parts : sequence of Part
        Of all ranks, in any order; of equal shards only the first is used.
    newest : mapping of step to incarnation, optional
        Which restart of the job counts for a step.
    vocabulary : sequence of str, ``"bytes"`` or None
        Text of each token id; None: the number itself.
    attrs : mapping, optional
        Attributes of the dataset.
    copies : dict, optional
        Gets, by point, pairs of shards that hold the same.
    tellers : sequence of Part, optional
        Parts of other streams: they are asked for token ids, positions and mask where no part of this one was told them, as stages in the
        middle of a pipeline are not.

    Returns
    -------
    Dataset, dims (sample, layer, token, features...)
        One lazy variable per point, with coordinates step, dp_rank, microbatch, index, incarnation (sample,), layer, token (slot in the
        sequence), token_id, token_text, position, mask (sample, token), and ``{point}_present``.
    """
    axes = axes_of(parts, newest)
    names = list(dict.fromkeys(n for p in parts for n in p.shards))
    order = {n: i for i, n in enumerate(POINTS)}
    names.sort(key=lambda n: order.get(point_of(n), len(order)))
    data: dict[str, xr.Variable] = {}
    coords = _coordinates(parts, axes, vocabulary, tellers)
    for name in names:
        held = [p for p in parts if name in p.shards and axes.row_places(p).max(initial=-1) >= 0]
        if not held:
            continue
        whole, same = pieces_of(held, name, axes)
        dims = held[0].shards[name].dims
        data[name] = lazy_variable(dims, LazyArray(whole.shape, whole.dtype, whole.read), _attributes(name, held[0]))
        coords[f"{name}_present"] = _presence(whole, dims, name)
        if copies is not None and same:
            copies[name] = same
    return xr.Dataset(data, coords, dict(attrs or {}))


def point_of(name: str) -> str:
    """Return the point that a variable is of: without ``_grad``."""
    return name.removesuffix("_grad") if name not in POINTS else name


def _attributes(name: str, part: Part) -> dict[str, Any]:
    point, shard = POINTS.get(point_of(name)), part.shards[name]
    what = point.what if point else name
    out = {"long_name": f"gradient of the loss by: {what}" if name != point_of(name) else what, "units": "1"}
    for key in ("mode", "dtype", "k", "size", "reduce", "seed"):
        if key in shard.attrs:
            out[key] = shard.attrs[key]
    return out


def _presence(whole: Assembled, dims: tuple[str, ...], name: str) -> xr.Variable:
    """Return a lazy mask: True where a shard is. Nothing of the shards is read for it."""
    kept = [i for i, d in enumerate(dims) if d not in UNMASKED]

    def read(key: tuple[Any, ...]) -> Array:
        full: list[Any] = [0] * len(dims)
        for i, k in zip(kept, key, strict=True):
            full[i] = k
        return whole.present(full)

    shape = [whole.shape[i] for i in kept]
    return lazy_variable(
        [dims[i] for i in kept],
        LazyArray(shape, bool, read),
        {"long_name": f"where a shard of {name} is; elsewhere its values are 0"},
    )


def _coordinates(
    parts: Sequence[Part], axes: Axes, vocabulary: Sequence[str] | str | None, tellers: Sequence[Part]
) -> dict[str, xr.Variable]:
    out = {
        name: xr.Variable("sample", axes.samples[:, i], {"long_name": _MEANING[name]})
        for i, name in enumerate(SAMPLE_KEY)
    }
    out["incarnation"] = xr.Variable(
        "sample", axes.incarnation, {"long_name": "restart of the job that the sample is of"}
    )
    dims = {d for p in parts for s in p.shards.values() for d in s.dims}
    if "layer" in dims:
        out["layer"] = xr.Variable("layer", axes.layers, {"long_name": "layer of the whole model, from 0"})
    out |= {d: xr.Variable(d, v) for d, v in axes.labels.items()}
    if (prompts := _prompts(parts, axes)) is not None:
        out["prompt"] = xr.Variable("sample", prompts, {"long_name": "name or text of the prompt"})
    if "token" in dims:
        out["token"] = xr.Variable("token", axes.slots, {"long_name": "slot in the sequence, padding counted"})
        out |= _token_tables(parts, axes, vocabulary, tellers)
    return out


def _prompts(parts: Sequence[Part], axes: Axes) -> Array | None:
    found: Array | None = None
    seen: set[int] = set()
    for part in parts:
        rows = axes.row_places(part)
        if id(part.samples) in seen or "prompt" not in part.tables:
            continue
        texts = part.tables["prompt"]()
        seen.add(id(part.samples))
        found = np.full(len(axes.samples), "", object) if found is None else found
        keep = rows[: len(texts)] >= 0
        found[rows[: len(texts)][keep]] = np.asarray(texts, object)[keep]
    return found


class _Table:
    """A token table of one part, read when it is looked at."""

    def __init__(self, table: Callable[[], Array]) -> None:
        self._table = table

    def read(self, box: tuple[slice, ...]) -> Array:
        return np.asarray(self._table()[box])


def _token_tables(
    parts: Sequence[Part], axes: Axes, vocabulary: Sequence[str] | str | None, tellers: Sequence[Part]
) -> dict[str, xr.Variable]:
    kinds = {
        "token_id": (np.int64, -1, "token id; -1 where no rank knew it"),
        "position": (np.int64, -1, "position id that the model was given"),
        "mask": (np.bool_, False, "True for real tokens, False for padding"),
    }
    out = {}
    for name, (dtype, fill, meaning) in kinds.items():
        pieces = _table_pieces(parts, axes, name) or _table_pieces(tellers, axes, name)
        if pieces:
            whole = Assembled((len(axes.samples), len(axes.slots)), dtype, pieces, fill=fill)
            array = LazyArray(whole.shape, dtype, whole.read)
            out[name] = lazy_variable(("sample", "token"), array, {"long_name": meaning})
            if name == "token_id":
                out["token_text"] = _texts(whole, vocabulary)
    return out


def _table_pieces(parts: Sequence[Part], axes: Axes, name: str) -> list[Piece]:
    """Return one piece for each set of samples and tokens, of the first part that knows them."""
    seen: set[tuple[int, int, int]] = set()
    pieces = []
    for part in parts:
        key = (part.incarnation, id(part.samples), id(part.slots))
        rows = axes.row_places(part) if part.tables else np.empty(0, np.int64)
        if key in seen or rows.max(initial=-1) < 0 or name not in part.tables:
            continue
        seen.add(key)
        slots = np.where(part.slots >= 0, np.searchsorted(axes.slots, part.slots), -1)
        missing = ~np.isin(part.slots, axes.slots)
        pieces.append(Piece(_Table(part.tables[name]), (rows, np.where(missing, -1, slots)), part.where))
    return pieces


def _texts(whole: Assembled, vocabulary: Sequence[str] | str | None) -> xr.Variable:
    array = LazyArray(whole.shape, object, lambda key: token_texts(whole.read(key), vocabulary))
    return lazy_variable(("sample", "token"), array, {"long_name": "text of the token"})


def token_texts(ids: Array, vocabulary: Sequence[str] | str | None) -> Array:
    """Return the text of each token id, as an object array: the id itself without a vocabulary, ``""`` for -1."""
    unique, inverse = np.unique(np.asarray(ids, np.int64), return_inverse=True)
    texts = np.array([_text(int(i), vocabulary) for i in unique] or [""], object)
    return texts[inverse.reshape(np.shape(ids))] if np.size(ids) else np.empty(np.shape(ids), object)


def _text(token: int, vocabulary: Sequence[str] | str | None) -> str:
    if token < 0:
        return ""
    if vocabulary == "bytes":
        return chr(token) if token < 256 else str(token)
    if vocabulary is not None and not isinstance(vocabulary, str) and token < len(vocabulary):
        return str(vocabulary[token])
    return str(token)
