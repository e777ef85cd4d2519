"""What the activation views draw, as data: heatmaps, points and lines, bars, grids of tokens, tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

__all__ = ["Bars", "Grid", "Heat", "Lines", "Panel", "Scatter", "Table", "number_text", "shown_limits"]

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True, eq=False)
class Heat:
    """Values in cells, row by column; NaN: nothing there.

    Attributes
    ----------
    key : str
        Name of the panel, for picks.
    title : str
        What the colours are.
    values : float array, dims (row, column)
    rows, columns : sequence of str
        Names of both, for axes.
    x_label, y_label : str
    row_titles, column_titles : sequence of str
        Longer names, for the pointer; default the names.
    diverging : bool
        Colours around 0.
    log : bool
        Colours by the logarithm.
    bad : list of (row, column)
        Cells to mark: NaN or infinite values are in them.
    marked_columns : sequence of int
        Columns whose names stand out: the subject of a trace.
    limits : (float, float) or None
        Ends of the colours.
    """

    key: str
    title: str
    values: Array
    rows: Sequence[str]
    columns: Sequence[str]
    x_label: str = ""
    y_label: str = "layer"
    row_titles: Sequence[str] = ()
    column_titles: Sequence[str] = ()
    diverging: bool = False
    log: bool = False
    bad: Sequence[tuple[int, int]] = ()
    marked_columns: Sequence[int] = ()
    limits: tuple[float, float] | None = None
    kind: str = "heat"

    def drawn(self) -> Array:
        """Return what the colours are of: logarithms, if asked for; NaN where there is none."""
        values = np.asarray(self.values, np.float64)
        if not self.log:
            return np.where(np.isfinite(values), values, np.nan)
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.where(np.isfinite(values) & (values > 0), np.log10(values), np.nan)

    def ends(self) -> tuple[float, float]:
        """Return the ends of the colours, as :meth:`drawn` has them."""
        if self.limits is not None:
            return self.limits
        return shown_limits(self.drawn(), diverging=self.diverging)


@dataclass(frozen=True, slots=True, eq=False)
class Scatter:
    """Points in a plane, joined to lines.

    Attributes
    ----------
    x, y : float array, dims (point,)
    line : int array, dims (point,)
        Points of one line are joined, in order of ``order``.
    order : int array, dims (point,)
    colour : float array, dims (point,)
        What the colours are of.
    titles : sequence of str
        For the pointer.
    stops : sequence of (str, float)
        Names of some colours, for the key: empty for a scale.
    """

    key: str
    title: str
    x: Array
    y: Array
    line: Array
    order: Array
    colour: Array
    titles: Sequence[str]
    x_label: str
    y_label: str
    colour_label: str = ""
    kind: str = "scatter"


@dataclass(frozen=True, slots=True, eq=False)
class Lines:
    """One or more lines over a common axis: (name, values) each."""

    key: str
    title: str
    x: Array
    lines: Sequence[tuple[str, Array]]
    x_label: str
    y_label: str
    log: bool = False
    ticks: Sequence[str] = ()
    kind: str = "lines"


@dataclass(frozen=True, slots=True, eq=False)
class Bars:
    """A histogram: values by place; ``other`` in outline."""

    key: str
    title: str
    x: Array
    values: Array
    x_label: str
    y_label: str
    other: Array | None = None
    legend: tuple[str, str] = ("", "")
    kind: str = "bars"


@dataclass(frozen=True, slots=True, eq=False)
class Grid:
    """Texts in coloured cells, row by column.

    Attributes
    ----------
    texts : object array, dims (row, column)
        ``""``: nothing there.
    values : float array, dims (row, column)
        What the colours are of.
    rows, columns : sequence of str
        Heads of both.
    low, high : float
        Ends of the colours.
    titles : object array, dims (row, column)
        For the pointer.
    """

    key: str
    title: str
    texts: Array
    values: Array
    rows: Sequence[str]
    columns: Sequence[str]
    low: float
    high: float
    titles: Array
    x_label: str = ""
    kind: str = "grid"


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """Rows of text. ``picks``: what choosing a row asks for, a mapping of choices and panel, row and column, each."""

    key: str
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    picks: Sequence[dict[str, Any]] = ()
    note: str = ""
    numeric: Sequence[int] = field(default_factory=tuple)
    kind: str = "table"


Panel = Heat | Scatter | Lines | Bars | Grid | Table


def shown_limits(values: Array, *, diverging: bool) -> tuple[float, float]:
    """Return ends of colours: of all that is finite, around 0 if the values have signs; never of no length."""
    there = values[np.isfinite(values)]
    if not there.size:
        return (-1.0, 1.0) if diverging else (0.0, 1.0)
    low, high = float(there.min()), float(there.max())
    if diverging:
        end = max(abs(low), abs(high)) or 1.0
        return -end, end
    if high - low <= 1e-12 * max(abs(low), abs(high), 1e-300):
        return low - 0.5 * (abs(low) or 1.0), high + 0.5 * (abs(high) or 1.0)
    return low, high


def number_text(value: float, digits: int = 3) -> str:
    """Return a number in few digits."""
    if not np.isfinite(value):
        return "NaN" if np.isnan(value) else ("∞" if value > 0 else "−∞")
    if value != 0 and not 1e-3 <= abs(value) < 1e5:
        mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
        return f"{mantissa}e{int(exponent)}".replace("-", "−")
    return f"{value:.{digits}g}".replace("-", "−") if abs(value) < 1000 else f"{value:,.0f}".replace("-", "−")
