"""Where every value of an array goes on the page: dimensions to roles, axes cut to head and tail, tiles to pixels. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mappnb.errors import SchemaError, did_you_mean

__all__ = ["Axis", "Grid", "Roles", "Tile", "assign_roles", "cut", "fit", "make_grid"]

MIN_CELL, LINE_CELL, MAX_CELL = 4, 10, 22
GAP, BETWEEN, TITLE = 14, 12, 18
MOST_HEIGHT = 640
MOST_FRAMES, FRAME_CELLS = 16, 400
FACET_WEIGHT = 0.35


@dataclass(frozen=True, slots=True)
class Axis:
    """The part of a dimension that is shown: the first ``head`` and the last ``tail`` of ``size`` positions."""

    dim: Hashable
    size: int
    head: int
    tail: int = 0

    @property
    def shown(self) -> int:
        """Number of positions shown."""
        return self.head + self.tail

    @property
    def truncated(self) -> bool:
        """True if positions are left out between head and tail."""
        return self.shown < self.size

    def positions(self) -> np.ndarray[Any, Any]:
        """Return the shown positions, ascending."""
        return np.concatenate([np.arange(self.head), np.arange(self.size - self.tail, self.size)])

    def indexer(self) -> slice | np.ndarray[Any, Any]:
        """Return what picks them: a slice where that is possible, since a slice is cheaper to read."""
        return self.positions() if self.tail else slice(0, self.head)

    def offsets(self, pitch: int, gap: int) -> np.ndarray[Any, Any]:
        """Return the pixel at which each shown position begins, ``gap`` pixels being left between head and tail."""
        at = np.arange(self.shown) * pitch
        return at + np.where((np.arange(self.shown) >= self.head) & self.truncated, gap, 0)


@dataclass(frozen=True, slots=True)
class Roles:
    """What each dimension is drawn as; None where the array has too few dimensions."""

    x: Hashable | None
    y: Hashable | None
    row: Hashable | None
    col: Hashable | None
    rest: tuple[Hashable, ...]


@dataclass(frozen=True, slots=True)
class Tile:
    """One facet: its pixel, and its position among the shown rows and columns; ``row`` -1 for a stand-in of those left out."""

    left: int
    top: int
    row: int
    col: int


@dataclass(frozen=True, slots=True)
class Grid:
    """The whole picture.

    Attributes
    ----------
    x, y, row, col : Axis
        Of size 1 where the array has no such dimension.
    sliders : tuple of Axis
        Dimensions whose every position is a frame of its own.
    fixed : tuple of (dim, size)
        Dimensions of which only the first position is shown.
    cell : int
        Pixels of a value, both ways.
    """

    x: Axis
    y: Axis
    row: Axis
    col: Axis
    sliders: tuple[Axis, ...]
    fixed: tuple[tuple[Hashable, int], ...]
    cell: int
    tiles: tuple[Tile, ...]
    width: int
    height: int

    @property
    def num_frames(self) -> int:
        """Number of pictures that the sliders choose from."""
        return math.prod(a.size for a in self.sliders)

    @property
    def axes(self) -> tuple[Axis, ...]:
        """All axes in the order in which values are stored: sliders, row, column, y, x."""
        return (*self.sliders, self.row, self.col, self.y, self.x)

    @property
    def num_cells(self) -> int:
        """Number of values shown, over all frames."""
        return math.prod(a.shown for a in self.axes)

    @property
    def tile_size(self) -> tuple[int, int]:
        """Width and height of a tile in pixels."""
        return _span(self.x, self.cell), _span(self.y, self.cell)

    @property
    def faceted(self) -> bool:
        """True if there is more than one tile."""
        return len(self.tiles) > 1


def assign_roles(sizes: Mapping[Hashable, int], **chosen: Hashable | None) -> Roles:
    """Return which dimension is drawn as what.

    Parameters
    ----------
    sizes : mapping of dim to int
        Of the array, in its order.
    **chosen : dim
        ``x``, ``y``, ``row``, ``col`` as the caller wants them; the others take the last free dimensions, those of size 1 only where
        nothing else is left.

    Raises
    ------
    SchemaError
        If a chosen dimension is not one of the array, or is chosen twice.
    """
    taken = {role: dim for role, dim in chosen.items() if dim is not None}
    for role, dim in taken.items():
        if dim not in sizes:
            raise SchemaError(
                f"{role}={dim!r}: the array has dims {tuple(sizes)}{did_you_mean(str(dim), map(str, sizes))}"
            )
    if len(set(taken.values())) < len(taken):
        raise SchemaError(f"a dimension has one role only; got {taken}")
    free = [d for d in sizes if d not in taken.values()]
    wide = [d for d in free if sizes[d] != 1] if len(sizes) > 2 else list(free)
    for role in ("x", "y"):
        source = wide or free
        if role not in taken and source:
            taken[role] = source[-1]
            wide, free = ([d for d in left if d != taken[role]] for left in (wide, free))
    for role in ("col", "row"):
        if role not in taken and wide and len(sizes) > 2:
            taken[role] = wide.pop()
    rest = tuple(d for d in sizes if d not in taken.values())
    return Roles(taken.get("x"), taken.get("y"), taken.get("row"), taken.get("col"), rest)


def cut(dim: Hashable, size: int, shown: int) -> Axis:
    """Return an axis with the first and last positions of ``size``, at most ``shown`` of them; all where they fit."""
    if size <= shown:
        return Axis(dim, size, size)
    return Axis(dim, size, math.ceil(shown / 2), shown // 2)


def fit(sizes: Sequence[int], limit: int, facet: int = 0) -> tuple[int, ...]:
    """Return how many positions of (row, col, y, x) are shown at a common limit; facets get a smaller share, or ``facet``."""
    facet = facet or max(2, round(limit * FACET_WEIGHT))
    return tuple(min(size, share) for size, share in zip(sizes, (facet, facet, limit, limit), strict=True))


def _span(axis: Axis, cell: int) -> int:
    return axis.shown * cell + (GAP if axis.truncated else 0)


def _split_rest(
    rest: Sequence[Hashable], sizes: Mapping[Hashable, int], most: int
) -> tuple[list[Axis], list[tuple[Hashable, int]]]:
    """Return the dimensions that get a slider, as many of the last as their frames allow, and those that are fixed at 0."""
    frames = 1
    sliders: list[Axis] = []
    fixed: list[tuple[Hashable, int]] = []
    for dim in reversed(rest):
        if sizes[dim] > 1 and frames * sizes[dim] <= most:
            frames *= sizes[dim]
            sliders.insert(0, Axis(dim, sizes[dim], sizes[dim]))
        else:
            fixed.insert(0, (dim, sizes[dim]))
    return sliders, fixed


def make_grid(sizes: Mapping[Hashable, int], roles: Roles, *, most_cells: int, width: int) -> Grid:
    """Return the largest picture of at most ``most_cells`` values in ``width`` pixels.

    Parameters
    ----------
    sizes : mapping of dim to int
        Of the array; none is 0.
    roles : Roles
        From :func:`assign_roles`.
    most_cells : int
        Bound on the values shown, over all frames; at least 2 of each axis are shown whatever it says.
    width : int
        Of the picture, in CSS pixels.
    """
    sliders, fixed = _split_rest(roles.rest, sizes, min(MOST_FRAMES, most_cells // FRAME_CELLS))
    frames = math.prod(a.size for a in sliders)
    dims = (roles.row, roles.col, roles.y, roles.x)
    full = [1 if d is None else sizes[d] for d in dims]

    def tried(limit: int, facet: int = 0) -> tuple[list[Axis], _Placed] | None:
        shown = fit(full, limit, facet)
        axes = [cut(d, n, s) for d, n, s in zip(dims, full, shown, strict=True)]
        placed = _place(axes, width) if math.prod(shown) * frames <= max(most_cells, 16) else None
        return None if placed is None else (axes, placed)

    top = max(2, *full, round(max(full[:2]) / FACET_WEIGHT) + 1)
    limit = _largest(lambda n: tried(n) is not None, top)
    facet = max(2, round(limit * FACET_WEIGHT))
    best = tried(_largest(lambda n: tried(n, facet) is not None, top), facet)  # tiles use what the facets left over
    if best is None:
        axes = [cut(d, n, s) for d, n, s in zip(dims, full, fit(full, 2), strict=True)]
        best = axes, _place(axes, 1 << 20) or (MIN_CELL, (), 0, 0)
    (row, col, y, x), (cell, tiles, total_width, total_height) = best
    return Grid(x, y, row, col, tuple(sliders), tuple(fixed), cell, tiles, total_width, total_height)


def _largest(fits: Callable[[int], bool], top: int) -> int:
    """Return the largest number from 2 to ``top`` that fits, by halving; 2 if none does."""
    low, high = 2, top
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


_Placed = tuple[int, tuple[Tile, ...], int, int]


def _place(axes: Sequence[Axis], width: int) -> _Placed | None:
    """Return the tiles at the largest cell with which they fit, or None if they do not fit at the smallest."""
    row, col, y, x = axes
    wrapped = row.size == 1 and col.size > 1
    least = LINE_CELL if y.size == 1 and not wrapped and row.size == 1 else MIN_CELL
    found: _Placed | None = None
    for cell in range(MAX_CELL, least - 1, -1):
        tile = (_span(x, cell), _span(y, cell))
        tiles, total = _wrapped(col, tile, width) if wrapped else _crossed(row, col, tile)
        if total[0] > width or total[1] > MOST_HEIGHT:
            continue
        if found is None:
            found = (cell, tiles, *total)
        if not wrapped or cell < 0.7 * found[0]:
            break
        last = sum(t.top == tiles[-1].top for t in tiles)
        if last >= 0.6 * sum(
            t.top == tiles[0].top for t in tiles
        ):  # no nearly empty last line, if slightly smaller cells avoid it
            return cell, tiles, *total
    return found


def _wrapped(col: Axis, tile: tuple[int, int], width: int) -> tuple[tuple[Tile, ...], tuple[int, int]]:
    """Return the tiles of one facet dimension in reading order, a slot being left for those that are not shown."""
    slots = list(range(col.shown))
    if col.truncated:
        slots.insert(col.head, -1)
    step_x, step_y = tile[0] + BETWEEN, tile[1] + BETWEEN + TITLE
    columns = max(1, min(len(slots), (width + BETWEEN) // step_x))
    tiles = tuple(
        Tile((k % columns) * step_x, TITLE + (k // columns) * step_y, 0 if slot >= 0 else -1, slot)
        for k, slot in enumerate(slots)
    )
    lines = math.ceil(len(slots) / columns)
    return tiles, (columns * step_x - BETWEEN, lines * step_y - BETWEEN)


def _crossed(row: Axis, col: Axis, tile: tuple[int, int]) -> tuple[tuple[Tile, ...], tuple[int, int]]:
    """Return the tiles of two facet dimensions as rows and columns, a wider gap standing for those that are not shown."""
    title = TITLE if row.size > 1 or col.size > 1 else 0
    lefts = col.offsets(tile[0] + BETWEEN, 2 * GAP)
    tops = row.offsets(tile[1] + BETWEEN + title, GAP) + title
    tiles = tuple(Tile(int(x), int(y), r, c) for r, y in enumerate(tops) for c, x in enumerate(lefts))
    return tiles, (int(lefts[-1]) + tile[0], int(tops[-1]) + tile[1])
