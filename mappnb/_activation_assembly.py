"""Puts the shards of one tensor together: only the parts that a selection touches are read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Protocol

import numpy as np
import xarray as xr
from xarray.core import indexing

__all__ = ["Assembled", "LazyArray", "Memory", "Piece", "Source", "lazy_variable"]

Array = np.ndarray[Any, Any]
Box = tuple[slice, ...]
RUNS = 2  # leading axes (sample, layer) that are stored in chunks of their own: gaps between wanted ones are not read


class Source(Protocol):
    """What holds the values of one piece: an array of a file, or of memory."""

    def read(self, box: Box) -> Array:
        """Return the decoded values inside ``box``, one slice per axis."""
        ...


@dataclass(frozen=True, slots=True)
class Memory:
    """A source in memory."""

    values: Array

    def read(self, box: Box) -> Array:
        """Return the values inside ``box``."""
        return np.asarray(self.values[box])


@dataclass(frozen=True, slots=True)
class Piece:
    """A shard of a tensor: what one rank holds of it.

    Attributes
    ----------
    source : Source
        Its values.
    at : tuple of int array
        Per axis of the piece, the place of each of its entries in the whole tensor; -1: nowhere. One axis (tokens) may have places that
        depend on the sample: dims (sample, token).
    where : str
        Which file or rank it comes from, for messages.
    held : callable, optional
        Returns a bool array, dims (sample, layer) or (sample,): False where the piece holds nothing although its axes say so. Values are
        the fill there already.
    """

    source: Source
    at: tuple[Array, ...]
    where: str = ""
    held: Callable[[], Array] | None = None


class Assembled:
    """A tensor made of pieces, read by selection.

    Parameters
    ----------
    shape : tuple of int
        Of the whole tensor.
    dtype : dtype
        Of its values.
    pieces : sequence of Piece
        Where two overlap, the later one counts, unless ``add``.
    add : bool
        Overlapping pieces are summed: partial sums of a random projection.
    fill : scalar
        Where there is no piece.
    """

    def __init__(
        self, shape: Sequence[int], dtype: Any, pieces: Sequence[Piece], *, add: bool = False, fill: Any = 0
    ) -> None:
        self.shape, self.dtype, self.pieces = tuple(shape), np.dtype(dtype), list(pieces)
        self._add, self._fill = add, fill
        # first and last place of each piece along sample and layer, so that far pieces are passed over at once
        self._ends = [_ends([p.at[axis] for p in self.pieces]) for axis in range(min(RUNS, len(self.shape)))]

    def read(self, key: Sequence[Any]) -> Array:
        """Return the values of a selection.

        Parameters
        ----------
        key : sequence of int, slice or int array, one per axis
            As for outer indexing; an int drops its axis.

        Returns
        -------
        ndarray
            ``fill`` where no piece is.
        """
        return self._gather(key, self.dtype, lambda piece, box: piece.source.read(box))

    def present(self, key: Sequence[Any]) -> Array:
        """Return, for the same selection as :meth:`read`, where a piece is. Reads nothing."""
        return self._gather(key, np.dtype(bool), None)

    def _near(self, unique: Sequence[Array]) -> list[Piece]:
        keep = np.ones(len(self.pieces), bool)
        for (first, last), want in zip(self._ends, unique, strict=False):
            if len(want) == 0:
                return []
            keep &= (first <= want[-1]) & (last >= want[0])
        return [self.pieces[i] for i in np.flatnonzero(keep)]

    def _gather(self, key: Sequence[Any], dtype: np.dtype[Any], read: Callable[[Piece, Box], Array] | None) -> Array:
        places = [_places(k, n) for k, n in zip(key, self.shape, strict=True)]
        pairs = [np.unique(p, return_inverse=True) for p in places]
        unique, back = [u for u, _ in pairs], [b.reshape(-1) for _, b in pairs]
        out = np.full([len(u) for u in unique], self._fill if read else False, dtype)
        inverse = [_inverse(u, n) for u, n in zip(unique, self.shape, strict=True)]
        for piece in self._near(unique):
            for local, target in _overlaps(piece, inverse):
                if read is None:
                    out[np.ix_(*target)] |= _held(piece, local)
                else:
                    self._put(out, piece, local, target, read)
        if any(len(b) != len(u) or not np.array_equal(b, np.arange(len(b))) for b, u in zip(back, unique, strict=True)):
            out = out[np.ix_(*back)]
        return out.reshape([len(b) for b, k in zip(back, key, strict=True) if not _is_int(k)])

    def _put(self, out: Array, piece: Piece, local: list[Array], target: list[Array], read: Any) -> None:
        """Read one overlap box by box and put it in its place."""
        for spans in product(*(_spans(index, runs=axis < RUNS) for axis, index in enumerate(local))):
            box = tuple(slice(int(local[a][lo]), int(local[a][hi - 1]) + 1) for a, (lo, hi) in enumerate(spans))
            values = read(piece, box)
            within = [local[a][lo:hi] - local[a][lo] for a, (lo, hi) in enumerate(spans)]
            if any(len(w) != n for w, n in zip(within, values.shape, strict=True)):
                values = values[np.ix_(*within)]
            there = np.ix_(*(target[a][lo:hi] for a, (lo, hi) in enumerate(spans)))
            if self._add:
                out[there] += values
            else:
                out[there] = values


def _held(piece: Piece, local: list[Array]) -> Array | bool:
    """Return which of some places of a piece it holds, to be spread over the axes after the first ones."""
    if piece.held is None:
        return True
    held = piece.held()
    chosen: Array = held[np.ix_(*local[: held.ndim])]
    return chosen.reshape(*chosen.shape, *[1] * (len(local) - held.ndim))


def _ends(places: Sequence[Array]) -> tuple[Array, Array]:
    known = [p[p >= 0] for p in places]
    first = np.array([k.min() if len(k) else 0 for k in known], np.int64)
    return first, np.array([k.max() if len(k) else -1 for k in known], np.int64)


def _is_int(k: Any) -> bool:
    return isinstance(k, (int, np.integer)) or (isinstance(k, np.ndarray) and k.ndim == 0)


def _places(k: Any, size: int) -> Array:
    """Return the places that one entry of a key names, from 0."""
    if isinstance(k, slice):
        return np.arange(*k.indices(size))
    places = np.atleast_1d(np.asarray(k, np.int64))
    return np.where(places < 0, places + size, places)


def _inverse(wanted: Array, size: int) -> Array:
    """Return place in the whole -> place in the selection; one entry more, for -1, that is in no selection."""
    out = np.full(size + 1, -1, np.int64)
    out[wanted] = np.arange(len(wanted))
    return out


def _overlaps(piece: Piece, inverse: Sequence[Array]) -> Iterator[tuple[list[Array], list[Array]]]:
    """Give (places in the piece, places in the selection) per axis: once, or once per sample where tokens depend on it."""
    found = [inv[at] for inv, at in zip(inverse, piece.at, strict=True)]
    if all(f.ndim == 1 for f in found):
        local = [np.flatnonzero(f >= 0) for f in found]
        if all(len(i) for i in local):
            yield local, [f[i] for f, i in zip(found, local, strict=True)]
        return
    for row in np.flatnonzero(found[0] >= 0):
        own = [found[0][row : row + 1], *(f[row] if f.ndim == 2 else f for f in found[1:])]
        local = [np.array([row]), *(np.flatnonzero(f >= 0) for f in own[1:])]
        if all(len(i) for i in local):
            yield local, [own[0], *(f[i] for f, i in zip(own[1:], local[1:], strict=True))]


def _spans(index: Array, *, runs: bool) -> list[tuple[int, int]]:
    """Cut a rising list of places into runs without gaps; or take it whole, gaps and all."""
    if not runs:
        return [(0, len(index))]
    cuts = np.flatnonzero(np.diff(index) != 1) + 1
    return list(zip([0, *cuts.tolist()], [*cuts.tolist(), len(index)], strict=True))


class LazyArray(xr.backends.BackendArray):
    """What xarray indexes lazily: a shape, a dtype and a function from an outer key to values."""

    def __init__(self, shape: Sequence[int], dtype: Any, read: Callable[[tuple[Any, ...]], Array]) -> None:
        self.shape, self.dtype, self._read = tuple(shape), np.dtype(dtype), read

    def __getitem__(self, key: indexing.ExplicitIndexer) -> Any:
        return indexing.explicit_indexing_adapter(key, self.shape, indexing.IndexingSupport.OUTER, self._read)


def lazy_variable(dims: Sequence[str], array: LazyArray, attrs: dict[str, Any] | None = None) -> xr.Variable:
    """Return a variable that reads what is looked at, and keeps nothing."""
    return xr.Variable(tuple(dims), indexing.LazilyIndexedArray(array), attrs or {})
