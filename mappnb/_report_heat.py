"""Straggler heatmap as SVG: self time against the peers, ranks by steps, in few colours, one path each."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import xarray as xr

from mappnb import svg
from mappnb.analysis._straggler_base import QUARTILE, roles_of
from mappnb.layout import Layout

__all__ = ["heatmap", "peer_ratio"]

Array = np.ndarray[Any, Any]
MOST_ROWS, MOST_COLUMNS = 64, 240
"""Cells that are drawn at most."""
LINE = 14
"""Height of a line of text, px."""
EDGES = (0.9, 0.97, 1.03, 1.1, 1.25, 1.5, 2.0)
"""Between these ratios the colour is the same; 3 % is LEAST_RATIO of find_stragglers."""
COLOURS = ("#2b6cb0", "#90bde0", "var(--line)", "#fbd38d", "#f6974a", "#e05a33", "#b3261e", "#7a0c17")
NAMES = ("below 0.9", "to 0.97", "like its peers", "1.03", "1.1", "1.25", "1.5", "2 and more")


def peer_ratio(work: xr.Dataset, layout: Layout) -> Array:
    """Return self time, holes left out, over that of the peers, dims (step, rank); NaN where there is none.

    Peers are the ranks that work on the same stages; they are summed up by their faster quarter in the step. A rank without peers is
    compared with the faster quarter of its own steps.
    """
    kind = work["part_kind"].values.astype(str)
    own = work["seconds"].values[:, :, kind != "host"].sum(2)
    total = np.where(work["present"].values & (own > 0), own, np.nan)
    out = np.full(total.shape, np.nan)
    role = roles_of(work, layout)
    with warnings.catch_warnings(), np.errstate(divide="ignore", invalid="ignore"):
        warnings.simplefilter("ignore", RuntimeWarning)  # ranks that were not there
        for r in np.unique(role).tolist():
            mine = np.flatnonzero(role == r)
            base = np.nanquantile(total[:, mine], QUARTILE, axis=1 if len(mine) > 1 else 0, keepdims=True)
            out[:, mine] = total[:, mine] / base
    return out


def heatmap(work: xr.Dataset, layout: Layout, *, labels: Mapping[int, str], named: Sequence[int] = ()) -> str:
    """Return the heatmap with its legend.

    Parameters
    ----------
    work : Dataset, dims (step, rank, part)
        Self-time table.
    layout : Layout
        Parallel layout.
    labels : mapping of int to str
        Name of each rank.
    named : sequence of int
        Ranks that are drawn in any case, and marked.
    """
    ratio, ranks, steps = peer_ratio(work, layout), work["rank"].values, work["step"].values
    rows = _rows(ratio, ranks, named)
    cells, first = _columns(ratio[:, rows])
    cell_h = 16 if len(rows) <= 20 else 11
    left, width = 150, 1000
    height = svg.TOP + cell_h * len(rows) + svg.BOTTOM
    canvas = svg.Canvas(width, height, "self time against the peers, ranks by steps")
    w = (width - left - svg.RIGHT) / max(cells.shape[0], 1)
    _cells(canvas, cells, left, w, cell_h)
    for i in _labelled(ranks[rows].tolist(), set(named), every=1 if cell_h >= LINE else 2):
        r = int(ranks[rows[i]])
        mark = "t mark" if r in named else "t"
        canvas.text(left - 8, svg.TOP + cell_h * (i + 1) - 2, labels.get(r, f"rank {r}"), anchor="end", cls=mark)
    for c in sorted({round(x) for x in np.linspace(0, len(first) - 1, min(9, len(first)))}):
        canvas.text(left + (c + 0.5) * w, height - svg.BOTTOM + 16, str(int(steps[first[c]])), anchor="middle")
    canvas.text((left + width - svg.RIGHT) / 2, height - 4, "step", anchor="middle", cls="t axis")
    said = "Self time over that of the peers in the same step" + (
        "; of ranks without peers, over their own usual." if layout.world_size else "."
    )
    if len(rows) < len(ranks):
        said += f" {len(rows)} of {len(ranks)} ranks: those named, and those furthest from their peers."
    if len(first) < len(steps):
        said += f" A column is up to {-(-len(steps) // len(first))} steps, the longest of them is shown."
    return f"<p class='note'>{said}</p>" + svg.legend(list(zip(NAMES, COLOURS, strict=True))) + canvas.render()


def _labelled(ranks: list[int], named: set[int], *, every: int) -> list[int]:
    """Return the rows that get a label, the named ones first, and no two nearer than ``every``."""
    out: list[int] = []
    for i in sorted(range(len(ranks)), key=lambda i: (ranks[i] not in named, i)):
        if all(abs(i - other) >= every for other in out):
            out.append(i)
    return out


def _rows(ratio: Array, ranks: Array, named: Sequence[int]) -> list[int]:
    """Return the columns of ranks to draw, in order."""
    if len(ranks) <= MOST_ROWS:
        return list(range(len(ranks)))
    far = np.nan_to_num(np.nanmax(np.abs(np.where(np.isfinite(ratio), ratio, 1.0) - 1), axis=0))
    far[np.isin(ranks, named)] = np.inf
    return sorted(np.argsort(-far, kind="stable")[:MOST_ROWS].tolist())


def _columns(ratio: Array) -> tuple[Array, Array]:
    """Return cells (column, rank), the largest ratio of the steps of a column, and the first step of each."""
    n = len(ratio)
    size = -(-n // MOST_COLUMNS)
    first = np.arange(0, n, max(size, 1))
    filled = np.where(np.isfinite(ratio), ratio, -np.inf)
    cells = np.maximum.reduceat(filled, first, axis=0) if n else filled
    return np.where(np.isfinite(cells), cells, np.nan), first


def _cells(canvas: svg.Canvas, cells: Array, left: float, w: float, h: float) -> None:
    """Draw one path per colour: neighbours of one colour in a row are one rectangle."""
    code = np.where(np.isfinite(cells), np.digitize(np.nan_to_num(cells), EDGES), -1)
    paths: dict[int, list[str]] = {}
    for r in range(code.shape[1]):
        row = code[:, r]
        cuts = np.flatnonzero(np.diff(row)) + 1
        for a, b in zip([0, *cuts.tolist()], [*cuts.tolist(), len(row)], strict=True):
            if b > a and row[a] >= 0:
                x, y = left + a * w, svg.TOP + r * h
                paths.setdefault(int(row[a]), []).append(
                    f"M{x:.1f} {y:.1f}h{(b - a) * w:.1f}v{h - 1:.1f}h{-(b - a) * w:.1f}z"
                )
    for k, pieces in sorted(paths.items()):
        canvas.parts.append(f'<path d="{"".join(pieces)}" fill="{COLOURS[k]}"/>')
