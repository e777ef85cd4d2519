"""Cells to pixels: tiles with their gaps, and the small pictures that mark what is no ordinary value."""

from __future__ import annotations

from typing import Any

import numpy as np

from mappnb.widgets._array_colours import Index, Scale, ink_on, ramp_ends
from mappnb.widgets._array_grid import GAP, Axis, Grid
from mappnb.widgets._array_values import Mark

__all__ = ["draw", "pattern", "swatch"]

Array = np.ndarray[Any, Any]

LINED = 8
"""From this size on, cells are separated by a line of one pixel."""


def pattern(mark: int, size: int, *, ink: int = Index.INK) -> Array:
    """Return what is drawn over a cell of ``size`` pixels: palette indices, 0 where the cell shows through.

    NaN a cross, infinities a triangle up or down, outside the limits a corner, missing a hatch.
    """
    down, across = np.indices((size, size))
    last = (size - 1 if size >= LINED else size) - 1
    pad = (last + 1) // 5
    inside = (np.minimum(down, across) >= pad) & (np.maximum(down, across) <= last - pad)
    if mark == Mark.NAN:
        thick = 1 if last > 11 else 0
        on, ink = inside & ((abs(down - across) <= thick) | (abs(down + across - last) <= thick)), Index.INK
    elif mark in (Mark.POS_INF, Mark.NEG_INF):
        depth = (down if mark == Mark.POS_INF else last - down) - pad
        on, ink = inside & (abs(across - last / 2) <= (depth + 1) * 0.55), Index.PAPER
    elif mark in (Mark.BELOW, Mark.ABOVE):
        corner = max(2, round(last * 0.45))
        on = (last - across + down if mark == Mark.ABOVE else across + last - down) < corner
        on &= (across <= last) & (down <= last)
    elif mark == Mark.MISSING:
        on, ink = (down + across) % (4 if size < LINED else 5) == 0, Index.HATCH
    else:
        on = np.zeros((size, size), bool)
    return np.where(on, ink, 0).astype(np.uint8)


def _patterns(scale: Scale, size: int) -> Array:
    first, last = ramp_ends(scale)
    inks = {Mark.BELOW: ink_on(first), Mark.ABOVE: ink_on(last)}
    return np.stack([pattern(mark, size, ink=inks.get(mark, Index.INK)) for mark in range(7)])


def swatch(mark: int, scale: Scale, size: int = 14) -> Array:
    """Return the pixels of a cell with a mark, for the legend."""
    first, last = ramp_ends(scale)
    under = {
        Mark.NAN: Index.NAN,
        Mark.POS_INF: Index.INF,
        Mark.NEG_INF: Index.INF,
        Mark.BELOW: first,
        Mark.ABOVE: last,
        Mark.MISSING: Index.CLEAR,
    }[mark]
    over = _patterns(scale, size)[mark]
    return np.where(over > 0, over, under).astype(np.uint8)


def draw(cells: Array, marks: Array, grid: Grid, scale: Scale) -> Array:
    """Return the pixels of one frame as palette indices, shape (height, width).

    Parameters
    ----------
    cells, marks : array of uint8, shape (row, col, y, x)
        Colour and :class:`Mark` of every value shown.
    grid : Grid
        Where they go.
    scale : Scale
        Whose ramp the corners of values outside the limits must stand out from.
    """
    out = np.zeros((grid.height, grid.width), np.uint8)
    (row_of, row_in, row_blank), (col_of, col_in, col_blank) = (_pixels(a, grid.cell) for a in (grid.y, grid.x))
    patterns = _patterns(scale, grid.cell) if marks.any() else None
    wide, high = grid.tile_size
    for tile in grid.tiles:
        if tile.row < 0:
            continue
        picture = cells[tile.row, tile.col][row_of][:, col_of]
        if patterns is not None and (kind := marks[tile.row, tile.col]).any():
            over = patterns[kind[row_of][:, col_of], row_in[:, None], col_in[None, :]]
            picture = np.where(over > 0, over, picture)
        picture[row_blank] = 0
        picture[:, col_blank] = 0
        _dots(picture, grid)
        out[tile.top : tile.top + high, tile.left : tile.left + wide] = picture
    return out


def _pixels(axis: Axis, cell: int) -> tuple[Array, Array, Array]:
    """Return of each pixel along a tile's side: its value, its place in the cell, and whether it stays empty."""
    offsets = axis.offsets(cell, GAP)
    length = int(offsets[-1]) + cell
    of, within, blank = np.zeros(length, np.intp), np.zeros(length, np.intp), np.ones(length, bool)
    for k, start in enumerate(offsets.tolist()):
        of[start : start + cell] = k
        within[start : start + cell] = np.arange(cell)
        blank[start : start + (cell - 1 if cell >= LINED else cell)] = False
    return of, within, blank


def _dots(picture: Array, grid: Grid) -> None:
    """Draw three dots into the gap of each side that is cut: in its middle, or where both gaps cross."""
    for axis, other, turned in ((grid.x, grid.y, picture), (grid.y, grid.x, picture.T)):
        if not axis.truncated:
            continue
        start = axis.head * grid.cell
        middle = other.head * grid.cell + GAP // 2 if other.truncated else turned.shape[0] // 2
        for k in (1, 5, 9):
            turned[max(0, middle - 1) : middle + 1, start + k + 1 : start + k + 3] = Index.DOTS
