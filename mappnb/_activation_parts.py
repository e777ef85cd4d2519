"""What one rank holds of one stream of activations, and where it belongs in the whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mappnb._activation_assembly import Assembled, Piece, Source

__all__ = ["SAMPLE_KEY", "Axes", "Part", "Shard", "axes_of", "pieces_of", "sample_rows"]

Array = np.ndarray[Any, Any]
SAMPLE_KEY = ("step", "dp_rank", "microbatch", "index")


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's share of one point over the samples of a part.

    Attributes
    ----------
    source : Source
        Values, decoded.
    shape, dims : tuple
        (sample, [layer,] token, features...).
    dtype : dtype
        Of the decoded values.
    layers : tuple of int
        Global layers, from 0; empty for a point that belongs to no layer.
    split : mapping of str to (start, stop, total)
        Feature dims of which this is a part.
    chosen : mapping of str to int array
        Feature dims of which only these were kept: global numbers, one per entry.
    sequence_parallel : bool
        True if its tokens are those of the part's ``slots_sp``.
    add : bool
        True if the shards of a split dim are partial sums.
    held : callable, optional
        As of :class:`mappnb._activation_assembly.Piece`.
    attrs : mapping
        Mode and its parameters.
    """

    source: Source
    shape: tuple[int, ...]
    dims: tuple[str, ...]
    dtype: np.dtype[Any]
    layers: tuple[int, ...] = ()
    split: Mapping[str, tuple[int, int, int]] = field(default_factory=dict)
    chosen: Mapping[str, Array] = field(default_factory=dict)
    sequence_parallel: bool = False
    add: bool = False
    held: Callable[[], Array] | None = None
    attrs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank holds of one stream: some samples, where their tokens belong, and shards of points.

    Attributes
    ----------
    where : str
        Its file, for messages.
    incarnation, rank : int
        Who wrote it.
    samples : int array, dims (sample, key)
        Step, data-parallel rank, microbatch and index of each sample; step −1: no sample.
    slots : int array, dims (token,) or (sample, token)
        Place of each local token in its whole sequence; −1: none. The former if all samples have the same.
    slots_sp : int array or None
        The same for points whose tokens sequence parallelism splits.
    shards : mapping of str to Shard
        By point.
    tables : mapping of str to callable
        What reads token_id, position, mask, each dims (sample, token), and prompt, dims (sample,): those that there are.
    """

    where: str
    incarnation: int
    rank: int
    samples: Array
    slots: Array
    slots_sp: Array | None
    shards: Mapping[str, Shard]
    tables: Mapping[str, Callable[[], Array]] = field(default_factory=dict)

    def tokens_of(self, shard: Shard) -> Array:
        """Return the slots of a shard's tokens."""
        return self.slots_sp if shard.sequence_parallel and self.slots_sp is not None else self.slots


class Places:
    """Where the entries of shards' axes are in the whole: worked out once for shards that are alike, and numbered."""

    def __init__(self) -> None:
        self._known: dict[Any, tuple[int, Array]] = {}
        self._numbers: dict[bytes, int] = {}

    def of(self, part: Part, shard: Shard, axis: int, axes: Axes) -> tuple[int, Array]:
        """Return places of one axis, and a number that equal places share."""
        dim, size = shard.dims[axis], shard.shape[axis]
        start = shard.split[dim][0] if dim in shard.split and not shard.add else 0
        key: Any = (dim, start, size)
        if dim == "sample":
            key = (dim, part.incarnation, id(part.samples), size)
        elif dim == "layer":
            key = (dim, shard.layers)
        elif dim == "token":
            key = (dim, id(part.tokens_of(shard)), size)
        elif dim in shard.chosen:
            key = (dim, id(shard.chosen[dim]))
        found = self._known.get(key)
        if found is None:
            at = _places(part, shard, dim, size, start, axes)
            found = self._known[key] = (self._numbers.setdefault(at.tobytes(), len(self._numbers)), at)
        return found


@dataclass(frozen=True, slots=True)
class Axes:
    """The axes of the whole: labels of samples, layers and tokens, and the sizes of the other dims.

    Attributes
    ----------
    samples : int array, dims (sample, key)
        In order.
    incarnation : int array, dims (sample,)
        Which restart of the job each comes from.
    layers, slots : int array
        Layers and token slots that any shard has.
    sizes : mapping of str to int
        Of every dim.
    labels : mapping of str to int array
        Feature dims that were not kept whole: the global numbers of what is there.
    rows : mapping of (int, int) to int array
        Incarnation and ``id`` of a part's ``samples`` -> place of each of its rows, −1: left out.
    places : Places
        What is known of the shards' axes.
    """

    samples: Array
    incarnation: Array
    layers: Array
    slots: Array
    sizes: Mapping[str, int]
    labels: Mapping[str, Array]
    rows: Mapping[tuple[int, int], Array]
    places: Places = field(default_factory=Places)

    def row_places(self, part: Part) -> Array:
        """Return where the samples of a part are in the whole; −1: nowhere."""
        known = self.rows.get((part.incarnation, id(part.samples)))
        if known is None:  # of another stream
            places = {
                tuple(key): i for i, key in enumerate(self.samples.tolist()) if self.incarnation[i] == part.incarnation
            }
            known = np.array([places.get(tuple(key), -1) for key in part.samples.tolist()], np.int64)
        return known


def sample_rows(
    parts: Iterable[Part], newest: Mapping[int, int] | None = None
) -> tuple[Array, Array, dict[tuple[int, int], Array]]:
    """Return all samples in order, their incarnation, and where each table's rows are among them.

    Parameters
    ----------
    parts : iterable of Part
        Tables that several parts share are looked at once.
    newest : mapping of step to incarnation, optional
        Samples of a step from other incarnations are left out: a restart repeated it.
    """
    tables = {(p.incarnation, id(p.samples)): p.samples for p in parts}
    kept, rows = [], {}
    for key, table in tables.items():
        keep = table[:, 0] >= 0
        if newest is not None:
            keep &= np.array([newest.get(int(s), key[0]) == key[0] for s in table[:, 0]], bool)
        kept.append(np.column_stack([table, np.full(len(table), key[0])])[keep])
        rows[key] = keep
    whole = np.concatenate(kept) if kept else np.empty((0, 5), np.int64)
    unique, inverse = np.unique(whole, axis=0, return_inverse=True)
    inverse, at = inverse.reshape(-1), 0
    out = {}
    for key, keep in rows.items():
        places = np.full(len(keep), -1, np.int64)
        places[keep] = inverse[at : at + int(keep.sum())]
        at += int(keep.sum())
        out[key] = places
    return unique[:, :4], unique[:, 4], out


def axes_of(parts: Sequence[Part], newest: Mapping[int, int] | None = None) -> Axes:
    """Return the axes that hold all parts."""
    samples, incarnation, rows = sample_rows(parts, newest)
    layers: set[int] = set()
    slots: dict[int, Array] = {}
    sizes: dict[str, int] = {}
    chosen: dict[str, set[int]] = {}
    for part in parts:
        if not len(part.samples) or rows[part.incarnation, id(part.samples)].max() < 0:
            continue
        for shard in part.shards.values():
            layers.update(shard.layers)
            tokens = part.tokens_of(shard)
            slots[id(tokens)] = tokens
            for dim, n in zip(shard.dims, shard.shape, strict=True):
                if dim in ("sample", "layer", "token"):
                    continue
                sizes[dim] = max(sizes.get(dim, 0), shard.split[dim][2] if dim in shard.split else n)
                if dim in shard.chosen:
                    chosen.setdefault(dim, set()).update(map(int, shard.chosen[dim]))
    known = np.unique(np.concatenate([np.unique(s) for s in slots.values()])) if slots else np.empty(0, np.int64)
    known = known[known >= 0]
    labels = {dim: np.array(sorted(v), np.int64) for dim, v in chosen.items()}
    sizes.update({dim: len(v) for dim, v in labels.items()})
    sizes.update(sample=len(samples), layer=len(layers), token=len(known))
    return Axes(samples, incarnation, np.array(sorted(layers), np.int64), known, sizes, labels, rows)


def pieces_of(parts: Sequence[Part], point: str, axes: Axes) -> tuple[Assembled, list[tuple[Piece, Piece]]]:
    """Return the whole tensor of one point, and pairs of equal pieces that several ranks wrote: only the first is read."""
    first: dict[Any, Piece] = {}
    copies: list[tuple[Piece, Piece]] = []
    dtypes: set[np.dtype[Any]] = set()
    add = False
    dims: tuple[str, ...] = ()
    for part in parts:
        shard = part.shards.get(point)
        if shard is None:
            continue
        places = [axes.places.of(part, shard, axis, axes) for axis in range(len(shard.dims))]
        key: tuple[Any, ...] = tuple(number for number, _ in places)
        if shard.add:
            key = (*key, *sorted((d, s[0]) for d, s in shard.split.items()))
        piece = Piece(shard.source, tuple(at for _, at in places), part.where, shard.held)
        if key in first:
            copies.append((first[key], piece))
            continue
        first[key] = piece
        dtypes.add(shard.dtype)
        add, dims = shard.add, shard.dims
    shape = [axes.sizes[d] for d in dims]
    return Assembled(shape, np.result_type(*dtypes), list(first.values()), add=add), copies


def _places(part: Part, shard: Shard, dim: str, size: int, start: int, axes: Axes) -> Array:
    if dim == "sample":
        return axes.row_places(part)[:size]
    if dim == "layer":
        return np.searchsorted(axes.layers, np.asarray(shard.layers, np.int64))
    if dim == "token":
        slots = part.tokens_of(shard)[..., :size]
        return np.where(slots >= 0, np.searchsorted(axes.slots, slots), -1)
    if dim in shard.chosen:
        return np.searchsorted(axes.labels[dim], shard.chosen[dim])
    return np.arange(start, start + size)
