"""Attention without a stored matrix: scores, pattern and context of any head, computed from recorded queries and keys when asked for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import xarray as xr

from mappnb.errors import InterpError
from mappnb.interp._attention_math import (
    Bools,
    Floats,
    Head,
    Ints,
    Keys,
    complete_rows,
    score_tile,
    softmax_rows,
    tiles,
)
from mappnb.interp._attention_source import LayerArrays, Source

__all__ = ["attention_pattern", "attention_scores", "check_context", "context"]

Query = int | slice | Iterable[int] | None


def attention_pattern(
    activations: xr.Dataset | xr.DataTree,
    *,
    layer: int | Iterable[int] | None,
    head: int | Iterable[int] | None,
    sample: int = 0,
    query: Query = None,
) -> xr.DataArray:
    """Return how each query shares its attention among the keys, after the softmax.

    Parameters
    ----------
    activations : Dataset or DataTree
        ``run.activations``, or a dataset of its shape with ``q_rot``, dims (sample, layer, token, head, head_dim), and ``k_rot``, dims
        (sample, layer, token, kv_head, head_dim); the model's facts in ``attrs["model"]``.
    layer, head : int, several, or None
        Global numbers from 0. An int gives no dimension; None = all that there are.
    sample : int
        Position in the dimension ``sample``.
    query : int, slice, several, or None
        Positions in the dimension ``token`` of the queries; None = all. Only these rows are computed.

    Returns
    -------
    DataArray, dims ([layer, head,] query, key), unit 1
        Rows sum to 1; with a sink to 1 less ``sink`` (query). What a query does not see is 0, rows of padding are 0. Float32, or float64
        where the queries are; computed in float64. Coordinates: ``query`` and ``key`` (slots), their token ids and texts where known,
        ``query_mask`` and ``key_mask`` (False = padding), ``complete`` (query): False where a query, or a key that it sees, was not
        recorded: such a row is not what the model did, and ``attrs["note"]`` says so.

    Raises
    ------
    SchemaError
        If no stream holds both points, or facts of the model are missing.
    InterpError
        For a layer, head, sample or query that is not there.

    Notes
    -----
    ``softmax(softcap(scale * q.k) + alibi)`` over the keys that causality, window and padding leave, by the model's facts (see
    `mappnb.capture.activations.attention_rules.attention_rules`). The same as ``DotProductAttention`` of megatron-core (there a hidden
    score is -10000, whose exponential is 0 beside any score above -9000), as transformers' eager attention, and as the math of
    ``torch.nn.functional.scaled_dot_product_attention``. Beside the result it takes about 10 MiB: tiles of queries, 2 MiB in float64 each.
    """
    return _matrix(activations, layer, head, sample, query, scores=False)


def attention_scores(
    activations: xr.Dataset | xr.DataTree,
    *,
    layer: int | Iterable[int] | None,
    head: int | Iterable[int] | None,
    sample: int = 0,
    query: Query = None,
) -> xr.DataArray:
    """Return what goes into the softmax: scaled dot products with softcap and ALiBi.

    Parameters
    ----------
    activations, layer, head, sample, query
        As for `attention_pattern`.

    Returns
    -------
    DataArray, dims ([layer, head,] query, key), unit 1
        -inf where a query does not see a key.

    Raises
    ------
    SchemaError, InterpError
        As `attention_pattern`.
    """
    return _matrix(activations, layer, head, sample, query, scores=True)


def context(
    activations: xr.Dataset | xr.DataTree,
    *,
    layer: int | Iterable[int] | None,
    head: int | Iterable[int] | None = None,
    sample: int = 0,
    query: Query = None,
) -> xr.DataArray:
    """Return what the heads bring: the pattern times the values, which is the point ``z`` computed again.

    Parameters
    ----------
    activations, layer, head, sample, query
        As for `attention_pattern`; ``v`` is needed too.

    Returns
    -------
    DataArray, dims ([layer,] token[, head], head_dim)
        As ``z`` has it; rows of padding are 0.

    Raises
    ------
    SchemaError, InterpError
        As `attention_pattern`.
    """
    return _context(activations, layer, head, sample, query)


def _context(activations: Any, layer: Any, head: Any, sample: int, query: Query) -> xr.DataArray:
    work = Work.of(activations, layer, head, sample, query, ("q_rot", "k_rot", "v"))
    width = work.source.data["v"].sizes["head_dim"]
    values = np.zeros((len(work.layers), len(work.queries), len(work.heads), width), work.dtype)
    complete = np.zeros((len(work.layers), len(work.queries), len(work.heads)), bool)
    for at, number in enumerate(work.layers):
        arrays = work.source.read(number, work.heads, work.sample)
        for place, part in enumerate(work.parts(number, arrays)):
            complete[at, :, place] = part.complete
            v = np.asarray(arrays.points["v"][:, part.kv_at], np.float64)
            for rows, columns, scores in part.tiles():
                pattern, _ = softmax_rows(scores, part.head.sink)
                values[at, rows, place] = pattern @ v[columns]
    values[:, ~work.real] = 0.0
    dims = ("layer", "token", "head", "head_dim")
    result = xr.DataArray(values, dims=dims, name="context", attrs={"sample": work.sample, "units": "1"})
    result = result.assign_coords(layer=work.layers, token=work.queries, head=work.heads)
    result = result.assign_coords(complete=(dims[:3], complete), mask=("token", work.real))
    return work.squeezed(result, {"layer": layer, "head": head, "token": query})


def check_context(
    activations: xr.Dataset | xr.DataTree,
    *,
    layer: int | Iterable[int] | None = None,
    sample: int = 0,
) -> xr.DataArray:
    """Return by how much the recomputed context differs from the captured ``z``.

    Parameters
    ----------
    activations : Dataset or DataTree
        With ``q_rot``, ``k_rot``, ``v`` and ``z`` in one stream.
    layer : int, several, or None
        Layers to check; None = all.
    sample : int
        Position in the dimension ``sample``.

    Returns
    -------
    DataArray, dims (layer, head)
        Greatest absolute difference over tokens and head_dim; padding and incomplete rows are left out (0 where nothing else is).

    Raises
    ------
    SchemaError, InterpError
        As `attention_pattern`.

    Notes
    -----
    Where this is not small, the facts of the model are not those of its attention.
    """
    source = Source.open(activations, "q_rot", "k_rot", "v", "z")
    again = _context(source, source.check_layers(layer), None, sample, None)
    z = source.data["z"]
    z = z.isel(sample=source.check_sample(sample)) if "sample" in z.dims else z
    z = z.isel(layer=[source.layers.index(int(number)) for number in again["layer"].values])
    z = z.transpose("layer", "token", "head", "head_dim")
    there = np.asarray((again["complete"] & again["mask"]).transpose("layer", "token", "head").values, bool)
    off = np.abs(np.asarray(again.values, np.float64) - np.asarray(z.values, np.float64)).max(axis=3)
    values = np.where(there, off, 0.0).max(axis=1)
    coords = {"layer": again["layer"].values, "head": again["head"].values}
    return xr.DataArray(values, dims=("layer", "head"), coords=coords, name="context_difference", attrs={"units": "1"})


@dataclass(frozen=True, slots=True)
class Part:
    """One head of one layer: what `score_tile` needs, and which rows are exact."""

    head: Head
    kv_at: int
    q: Floats
    k: Floats
    keys: Keys
    queries: Ints
    complete: Bools

    def tiles(self) -> Iterator[tuple[slice, slice, Floats]]:
        """Yield rows, columns and their scores; columns outside are not seen."""
        for rows in tiles(len(self.queries), len(self.keys.slots)):
            slots = self.queries[rows]
            columns = self.keys.range(self.head, slots)
            near = Keys(self.keys.slots[columns], self.keys.usable[columns])
            yield rows, columns, score_tile(self.q[rows], self.k[columns], self.head, slots, near)


@dataclass(frozen=True, slots=True)
class Work:
    """What was asked for, checked."""

    source: Source
    layers: list[int]
    heads: list[int]
    sample: int
    positions: Ints
    queries: Ints
    mask: Bools
    told: Bools
    dtype: npt.DTypeLike

    @classmethod
    def of(cls, activations: Any, layer: Any, head: Any, sample: int, query: Query, points: tuple[str, ...]) -> Work:
        opened = isinstance(activations, Source)
        source = replace(activations, points=points) if opened else Source.open(activations, *points)
        position = source.check_sample(sample)
        slots = source.slots
        chosen = _positions(query, len(slots))
        double = source.data["q_rot"].dtype == np.float64
        return cls(
            source=source,
            layers=source.check_layers(layer),
            heads=source.check_heads(head),
            sample=position,
            positions=chosen,
            queries=slots[chosen],
            mask=source.mask(position),
            told=source.told(position),
            dtype=np.float64 if double else np.float32,
        )

    @property
    def real(self) -> Bools:
        """False for queries that are padding, dims (query,)."""
        real: Bools = self.mask[self.positions]
        return real

    def parts(self, layer: int, arrays: LayerArrays) -> Iterator[Part]:
        """Yield the heads asked for of one layer."""
        rules, slots = self.source.rules(layer, self.sample), self.source.slots
        others = [point for point in self.source.points if point != "q_rot"]
        for place, (number, kv_at) in enumerate(zip(self.heads, self.source.kv_index(self.heads), strict=True)):
            head = Head.of(rules, number)
            there = np.all([arrays.present[point][:, kv_at] for point in others], axis=0)
            asked = arrays.present["q_rot"][self.positions, place]
            padding = ~self.mask & self.told
            exact = complete_rows(head, self.queries, slots, there | padding) & (asked | padding[self.positions])
            q, k = arrays.points["q_rot"][self.positions, place], arrays.points["k_rot"][:, kv_at]
            yield Part(head, kv_at, q, k, Keys(slots, there & self.mask), self.queries, exact)

    def squeezed(self, result: xr.DataArray, asked: dict[str, Any]) -> xr.DataArray:
        """Drop the dimensions that were asked for by one number, and say which rows are not exact."""
        for dim, value in asked.items():
            if isinstance(value, int | np.integer):
                result = result.isel({dim: 0})
        complete = result["complete"]
        ends = int(self.source.slots[self.mask].max(initial=-1))  # shorter samples have no rows after their end
        place = result["query" if "query" in result.coords else "token"]
        if few := int((~complete & (place <= ends)).sum()):
            result.attrs["note"] = (
                f"{few} of {complete.size} rows are not what the model did: their query, or keys that they see, were not recorded "
                "(coordinate complete); they are computed from what is there"
            )
        return result


def _positions(query: Query, size: int) -> Ints:
    if query is None:
        query = slice(None)
    if isinstance(query, slice):
        return np.arange(size, dtype=np.int64)[query]
    wanted = [int(query)] if isinstance(query, int | np.integer) else [int(one) for one in query]
    for one in wanted:
        if not -size <= one < size:
            raise InterpError(
                f"activations: no query {one}; expected 0 to {size - 1}, positions in the dimension token"
            )
    return np.array(sorted(one % size for one in wanted), dtype=np.int64)


def _matrix(activations: Any, layer: Any, head: Any, sample: int, query: Query, *, scores: bool) -> xr.DataArray:
    work = Work.of(activations, layer, head, sample, query, ("q_rot", "k_rot"))
    shape = len(work.layers), len(work.heads), len(work.queries), len(work.mask)
    values = np.full(shape, -np.inf if scores else 0.0, work.dtype)
    shares = np.zeros(shape[:3], work.dtype)
    complete = np.zeros(shape[:3], bool)
    sinks = False
    for at, number in enumerate(work.layers):
        for place, part in enumerate(work.parts(number, work.source.read(number, work.heads, work.sample))):
            complete[at, place] = part.complete
            sinks = sinks or np.isfinite(part.head.sink)
            for rows, columns, tile in part.tiles():
                rest: Any = 0.0
                if not scores:
                    tile, rest = softmax_rows(tile, part.head.sink)  # noqa: PLW2901  # the scores have become the pattern
                values[at, place, rows, columns] = tile
                shares[at, place, rows] = rest
    values[:, :, ~work.real] = -np.inf if scores else 0.0
    shares[:, :, ~work.real] = 0.0
    dims = ("layer", "head", "query", "key")
    name = "attention_scores" if scores else "attention_pattern"
    result = xr.DataArray(values, dims=dims, name=name, attrs={"sample": work.sample, "units": "1"})
    result = result.assign_coords(_coordinates(work) | {"complete": (dims[:3], complete)})
    if sinks and not scores:
        result = result.assign_coords(sink=(dims[:3], shares))
    return work.squeezed(result, {"layer": layer, "head": head, "query": query})


def _coordinates(work: Work) -> dict[str, Any]:
    """Slots, masks, token ids and texts along both dimensions."""
    slots = work.source.slots
    coords: dict[str, Any] = {"layer": work.layers, "head": work.heads, "query": work.queries, "key": slots}
    known = {"mask": work.mask}
    for name in ("token_id", "token_text"):
        if (values := work.source.of_sample(name, work.sample)) is not None:
            known[name] = values
    for name, values in known.items():
        coords |= {f"query_{name}": ("query", values[work.positions]), f"key_{name}": ("key", values)}
    return coords
