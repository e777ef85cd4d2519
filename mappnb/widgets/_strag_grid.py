"""The cells of the stragglers heatmap: ranks put in order and together, steps put together, never more than a screen holds."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from mappnb.layout import AXES, Layout

__all__ = ["MOST_CELLS", "ORDERS", "Grid", "Row", "arrange", "bins", "orders", "reduce"]

Array = np.ndarray[Any, Any]
ORDERS: tuple[str, ...] = ("rank", "pp", "dp", "tp", "cp", "ep", "host")
"""What ranks can be ordered and put together by."""
MOST_CELLS = 20_000
"""That go to a browser: about what bokeh redraws without a delay that is felt, and more than anybody reads."""
MOST_ROWS = 256
"""Ranks with a row each; of more, hosts have one: less than two pixels a row cannot be told apart."""
MOST_COLUMNS = 600
"""Steps with a column each: the width of the picture in pixels, nearly."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row: its label, a longer one, the ranks in it (positions), and the group that it is in."""

    label: str
    title: str
    ranks: tuple[int, ...]
    group: str
    host: str = ""


@dataclass(frozen=True, slots=True)
class Grid:
    """What the heatmap draws.

    Attributes
    ----------
    values : float array, dims (row, column)
        From the top; NaN where there is nothing.
    rows : tuple of Row
    columns : tuple of (int, int)
        First and last step of each column.
    """

    values: Array
    rows: tuple[Row, ...]
    columns: tuple[tuple[int, int], ...]

    @property
    def groups(self) -> list[tuple[str, int, int]]:
        """(label, first row, number of rows) of the rows that stand together; empty where they are not grouped."""
        out: list[tuple[str, int, int]] = []
        for i, row in enumerate(self.rows):
            if out and out[-1][0] == row.group:
                out[-1] = (row.group, out[-1][1], out[-1][2] + 1)
            else:
                out.append((row.group, i, 1))
        return out if any(label for label, _, _ in out) else []


def orders(layout: Layout, hosts: Sequence[str]) -> list[str]:
    """Return the orders that tell ranks apart here; the first is the default: by stage, else by host, else by number."""
    axes = [a for a in ("pp", "dp", "tp", "cp", "ep") if getattr(layout, a) > 1]
    several = ["host"] if len(set(hosts)) > 1 else []
    first = axes[:1] if axes[:1] == ["pp"] else several
    return list(dict.fromkeys([*first, *axes, *several, "rank"]))


def natural(text: str) -> tuple[Any, ...]:
    """Return a key that puts ``node10`` behind ``node2``."""
    return tuple((0, int(p), "") if p.isdigit() else (1, 0, p) for p in re.split(r"(\d+)", text))


def arrange(
    ranks: Array, hosts: Sequence[str], layout: Layout, *, order: str, by_host: bool, only: Sequence[int] | None = None
) -> list[Row]:
    """Return the rows.

    Parameters
    ----------
    ranks : int array, dims (rank,)
    hosts : sequence of str
        Of each rank.
    layout : Layout
    order : str
        One of :data:`ORDERS`.
    by_host : bool
        A row for each host (and group), not for each rank.
    only : sequence of int, optional
        Positions of the ranks to show; all by default.
    """
    at = range(len(ranks)) if only is None else only
    places = {i: _place(int(ranks[i]), layout) for i in at}
    keyed = sorted((_order(order, hosts[i], places[i]), int(ranks[i]), i) for i in at)
    merged: dict[tuple[str, str], list[int]] = {}
    for _, rank, i in keyed:
        group = _group(order, hosts[i], places[i])
        merged.setdefault((group, (hosts[i] or "host not known") if by_host else f"{rank:09d}"), []).append(i)
    if by_host and order == "host":
        merged = {("", host): list(found) for (_, host), found in merged.items()}
    rows = [_row(group, name, found, ranks, hosts, layout, by_host) for (group, name), found in merged.items()]
    return _fewer(rows)


def _place(rank: int, layout: Layout) -> dict[str, int] | None:
    return layout.coords(rank) if 0 <= rank < layout.world_size else None


def _order(order: str, host: str, place: dict[str, int] | None) -> tuple[Any, ...]:
    if order == "rank":
        return ()
    if order == "host":
        return (not host, natural(host))
    if place is None:
        return (1,)
    rest = tuple(place[a] for a in reversed(AXES) if a not in (order, "ep"))
    return (0, place[order], *rest)


def _group(order: str, host: str, place: dict[str, int] | None) -> str:
    if order == "rank":
        return ""
    if order == "host":
        return host or "host not known"
    return "outside the layout" if place is None else f"{order} {place[order]}"


def _row(
    group: str, name: str, found: list[int], ranks: Array, hosts: Sequence[str], layout: Layout, by_host: bool
) -> Row:
    if by_host:
        numbers = ranks[found]
        label = name
        title = (
            f"{name}: {len(found)} ranks, {int(numbers.min())} to {int(numbers.max())}{f', {group}' if group else ''}"
        )
        return Row(label, title, tuple(found), group, hosts[found[0]])
    rank = int(ranks[found[0]])
    place = layout.label(rank) if layout.world_size > 1 and rank < layout.world_size else ""
    host = hosts[found[0]]
    title = f"rank {rank}" + (f" · {place}" if place else "") + (f" · {host}" if host else "")
    return Row(str(rank), title, (found[0],), group, host)


def _fewer(rows: list[Row]) -> list[Row]:
    """Put neighbours of a group together until there are few enough rows."""
    if len(rows) <= MOST_ROWS:
        return rows
    size = -(-len(rows) // MOST_ROWS)
    out: list[Row] = []
    while len(out) == 0 or len(out) > MOST_ROWS:
        out = []
        for row in rows:
            last = out[-1] if out else None
            if last is not None and last.group == row.group and last.label.count("\0") < size - 1:
                out[-1] = Row(f"{last.label}\0{row.label}", "", last.ranks + row.ranks, row.group)
            else:
                out.append(row)
        if all(a.group != b.group for a, b in pairwise(out)):
            break  # a row for each group: nothing is left to put together
        size += 1
    return [_joined(row) for row in out]


def _joined(row: Row) -> Row:
    if "\0" not in row.label:
        return row
    names = row.label.split("\0")
    label = f"{names[0]}–{names[-1]}"
    return Row(label, f"{label}: {len(row.ranks)} ranks{f', {row.group}' if row.group else ''}", row.ranks, row.group)


def bins(steps: Array, num_rows: int) -> list[tuple[int, int]]:
    """Return (first, behind the last) position of the steps in each column."""
    most = max(1, min(MOST_COLUMNS, MOST_CELLS // max(num_rows, 1)))
    size = max(1, -(-len(steps) // most))
    return [(a, min(a + size, len(steps))) for a in range(0, len(steps), size)]


def reduce(values: Array, rows: Sequence[Row], columns: Sequence[tuple[int, int]], cell: str) -> Array:
    """Return one value per cell, dims (row, column): the largest or the median of its ranks and steps, NaN left out.

    Parameters
    ----------
    values : float array, dims (step, rank)
    rows : sequence of Row
    columns : sequence of (int, int)
        From :func:`bins`.
    cell : str
        ``"max"`` or ``"median"``.
    """
    size = max((b - a for a, b in columns), default=1)
    if size == 1 and all(len(r.ranks) == 1 for r in rows):
        return np.ascontiguousarray(values[:, [r.ranks[0] for r in rows]].T) if rows else np.zeros((0, len(columns)))
    pick = np.nanmax if cell == "max" else np.nanmedian
    out = np.full((len(rows), len(columns)), np.nan)
    pad = len(columns) * size - len(values)
    padded = np.pad(values, ((0, pad), (0, 0)), constant_values=np.nan)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # cells in which nobody was there
        for i, row in enumerate(rows):
            block = padded[:, list(row.ranks)].reshape(len(columns), -1)
            out[i] = pick(block, axis=1)
    return out
