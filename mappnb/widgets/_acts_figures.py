"""The figures of the activation views: heatmap and joined points by bokeh, loaded on first use; small charts as plain data."""

from __future__ import annotations

from typing import Any

import numpy as np

from mappnb.widgets._acts_panels import Bars, Grid, Heat, Lines, Panel, Scatter, Table, number_text
from mappnb.widgets._strag_plots import (
    COLOURS,
    Look,
    _add,
    _figure,
    _fixed,
    _models,
    _plot,
    _quiet,
    item,
    look_of,
    palette,
)

__all__ = ["heat_colours", "panel_told", "row_height"]

Array = np.ndarray[Any, Any]


def heat_colours(diverging: bool, theme: str) -> list[str]:
    """Return the colours of a scale from low to high."""
    return palette("ratio" if diverging else "seconds", theme)


def row_height(rows: int) -> float:
    """Return the height of a row in pixels: about 300 in all."""
    return float(min(21.0, max(300.0 / max(rows, 1), 5.0)))


def panel_told(panel: Panel, theme: str, ground: str = "") -> dict[str, Any]:
    """Return a panel for the browser: bokeh's JSON where it is a figure, and what belongs to it."""
    out: dict[str, Any] = {"kind": panel.kind, "key": panel.key, "title": panel.title}
    if isinstance(panel, Heat):
        low, high = panel.ends()
        out["rows"] = [str(t) for t in panel.row_titles or panel.rows]
        out["columns"] = [str(t) for t in panel.column_titles or panel.columns]
        out["log"], out["diverging"], out["limits"] = panel.log, panel.diverging, [low, high]
        out["bad"] = [list(map(int, b)) for b in panel.bad]
        out["figure"] = item(_heat(panel, look_of(theme, ground), theme, low, high))
    elif isinstance(panel, Scatter):
        out["titles"], out["count"] = list(panel.titles), len(panel.x)
        out["figure"] = item(_scatter(panel, look_of(theme, ground), theme))
    elif isinstance(panel, Lines):
        out |= {"x": _numbers(panel.x), "lines": [[name, _numbers(v)] for name, v in panel.lines], "log": panel.log}
        out |= {"x_label": panel.x_label, "y_label": panel.y_label}
    elif isinstance(panel, Bars):
        out |= {"x": _numbers(panel.x), "bars": _numbers(panel.values), "legend": list(panel.legend)}
        out |= {"other": None if panel.other is None else _numbers(panel.other)}
        out |= {"x_label": panel.x_label, "y_label": panel.y_label}
    elif isinstance(panel, Grid):
        out |= _grid_told(panel, theme)
    elif isinstance(panel, Table):
        out |= {"columns": list(panel.columns), "rows": [list(r) for r in panel.rows], "picks": list(panel.picks)}
        out |= {"note": panel.note, "numeric": list(panel.numeric)}
    return out


def _grid_told(panel: Grid, theme: str) -> dict[str, Any]:
    """Return the cells of a grid: texts, titles, and for each the number of its colour (-1: nothing)."""
    span = max(panel.high - panel.low, 1e-300)
    share = np.clip(np.nan_to_num((panel.values - panel.low) / span), 0, 1)
    level = np.where(np.isfinite(panel.values), np.rint(share * (COLOURS - 1)), -1).astype(int)
    return {
        "rows": list(panel.rows), "columns": list(panel.columns), "texts": panel.texts.tolist(), "titles": panel.titles.tolist(),
        "levels": level.tolist(), "palette": heat_colours(False, theme), "limits": [panel.low, panel.high], "x_label": panel.x_label,
    }  # fmt: skip


def _heat(panel: Heat, look: Look, theme: str, low: float, high: float) -> Any:
    """Return a heatmap, row 0 on top; the browser reads the source ``cells`` and fills ``boxes``."""
    models = _models()
    values = panel.drawn()
    rows, cols = values.shape
    height = row_height(rows)
    plot = _plot(look, cols=cols, rows=rows, height=int(rows * height) + 58)
    plot.x_range = models.Range1d(0, max(cols, 1))
    plot.add_layout(
        models.BoxAnnotation(
            left=0, right=cols, bottom=0, top=rows, fill_color=look["ground"], line_color=None, level="underlay", propagate_hover=True,
            hatch_pattern="right_diagonal_line", hatch_color=look["muted"], hatch_alpha=0.55, hatch_scale=7, hatch_weight=0.8,
        )
    )  # fmt: skip
    colours = heat_colours(panel.diverging, theme)
    mapper = models.LinearColorMapper(palette=colours, low=low, high=high, nan_color="rgba(0, 0, 0, 0)")
    glyph = models.Image(image="image", x=0, y=0, dw=cols, dh=rows, color_mapper=mapper)
    _add(plot, glyph, name="cells", image=[np.ascontiguousarray(values[::-1].astype(np.float32))])
    _heat_axes(plot, panel, look, height)
    corners = {k: k for k in ("left", "right", "bottom", "top")}
    box = models.Quad(**corners, fill_color=None, line_color="colour", line_width="width")
    _add(plot, box, name="boxes", **{k: [] for k in (*corners, "colour", "width")})
    bad = np.array(panel.bad, np.float64).reshape(-1, 2)
    if len(bad):
        cross = models.Scatter(x="x", y="y", marker="x", size=9, line_color=look["danger"], line_width=2.2)
        _add(plot, cross, name="bad", x=bad[:, 1] + 0.5, y=rows - bad[:, 0] - 0.5)
    bar = _colour_bar(mapper, look, log=panel.log)
    plot.add_layout(bar, "right")
    return plot


def _heat_axes(plot: Any, panel: Heat, look: Look, height: float) -> None:
    models = _models()
    rows, cols = panel.values.shape
    below, left = models.LinearAxis(), models.LinearAxis()
    long = max((len(str(c)) for c in panel.columns), default=1) > 5
    most = 60 if long else 16
    every = next((k for k in (1, 2, 5, 10, 20, 50, 100, 200) if cols / k <= most), 500)
    marked = set(panel.marked_columns)
    names = {c + 0.5: f"{'*' if c in marked else ''}{str(panel.columns[c])[:14]}" for c in range(0, cols, every)}
    _fixed(below, names)
    if long:
        below.major_label_orientation = 0.9
        plot.height += 24
        plot.min_border_bottom = 58
    step = max(1, int(np.ceil(12 / height)))
    _fixed(left, {rows - i - 0.5: str(r)[:22] for i, r in enumerate(panel.rows) if i % step == 0})
    for axis, side, label in ((below, "below", panel.x_label), (left, "left", panel.y_label)):
        axis.axis_label = label
        _quiet(axis, look)
        plot.add_layout(axis, side)


def _colour_bar(mapper: Any, look: Look, *, log: bool = False, title: str = "") -> Any:
    models = _models()
    ticker: Any = models.BasicTicker(desired_num_ticks=5)
    formatter = models.PrintfTickFormatter(format="%.3g")
    labels: dict[float, str] = _log_ticks(mapper.low, mapper.high) if log else {}
    if labels:
        ticker = models.FixedTicker(ticks=list(labels))
    return models.ColorBar(
        color_mapper=mapper, formatter=formatter, ticker=ticker, width=10, padding=4, title=title or None, label_standoff=6,
        title_text_color=look["text"], title_text_font_size="11px", title_text_font_style="normal", background_fill_color=None,
        bar_line_color=None, major_label_text_color=look["text"], major_label_text_font_size="11px", major_tick_line_color=look["text"],
        margin=0, major_label_overrides=labels,
    )  # fmt: skip


def _log_ticks(low: float, high: float) -> dict[float, str]:
    """Return round values between two powers of ten: place -> text; few of a wide range."""
    wide = high - low
    steps = (
        (1,)
        if wide > 3
        else (1, 3)
        if wide > 1.2
        else (1, 2, 5)
        if wide > 0.5
        else (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8)
    )
    powers = range(int(np.floor(low)), int(np.ceil(high)) + 1, max(1, int(wide // 6)))
    places = {float(np.log10(s) + p): number_text(s * 10.0**p) for p in powers for s in steps}
    return {place: text for place, text in places.items() if low <= place <= high}


def _scatter(panel: Scatter, look: Look, theme: str) -> Any:
    """Return points joined to lines; the browser reads ``points`` and fills ``picked``."""
    models = _models()
    plot = _figure(look, height=470, x_axis_label=panel.x_label, y_axis_label=panel.y_label, min_border_top=6)
    plot.x_range.range_padding = plot.y_range.range_padding = 0.05
    low, high = _ends(panel.colour)
    mapper = models.LinearColorMapper(palette=_through(theme), low=low, high=high)
    segments = _segments(panel)
    if len(segments[0]):
        x0, y0, x1, y1, value = segments
        source = models.ColumnDataSource(data={"x0": x0, "y0": y0, "x1": x1, "y1": y1, "value": value})
        paint = {"field": "value", "transform": mapper}
        plot.segment("x0", "y0", "x1", "y1", source=source, line_color=paint, line_alpha=0.45, line_width=1.2)
    data = {"x": panel.x.astype(np.float32), "y": panel.y.astype(np.float32), "value": panel.colour.astype(np.float32)}
    size = 8 if len(panel.x) <= 400 else 5
    dot = models.Scatter(
        x="x",
        y="y",
        size=size,
        line_color=look["ground"],
        line_width=0.6,
        fill_color={"field": "value", "transform": mapper},
    )
    _add(plot, dot, name="points", **data)
    ring = models.Scatter(x="x", y="y", size="size", fill_color=None, line_color="colour", line_width="width")
    _add(plot, ring, name="picked", x=[], y=[], size=[], colour=[], width=[])
    if high > low:
        plot.add_layout(_colour_bar(mapper, look, title=panel.colour_label), "right")
    return plot


def _through(theme: str) -> list[str]:
    """Return colours of an order, from blue by way of grey to orange, none of them near the ground."""
    ends = (
        ((0, 84, 150), (120, 120, 120), (214, 94, 0))
        if theme == "light"
        else ((90, 170, 235), (150, 150, 150), (255, 178, 92))
    )
    at = np.linspace(0, 2, COLOURS)
    rgb = np.stack([np.interp(at, [0, 1, 2], [e[c] for e in ends]) for c in range(3)], 1).round().astype(int)
    return [f"#{r:02x}{g:02x}{b:02x}" for r, g, b in rgb.tolist()]


def _ends(values: Array) -> tuple[float, float]:
    there = values[np.isfinite(values)]
    return (float(there.min()), float(there.max())) if there.size else (0.0, 1.0)


def _segments(panel: Scatter) -> tuple[Array, ...]:
    """Return the pieces of all lines: from each point to the next of its line."""
    order = np.lexsort((panel.order, panel.line))
    same = panel.line[order][1:] == panel.line[order][:-1]
    a, b = order[:-1][same], order[1:][same]
    return panel.x[a], panel.y[a], panel.x[b], panel.y[b], panel.colour[b]


def _numbers(values: Array) -> list[float | None]:
    """Return values as JSON holds them, in seven digits; None for what is not finite."""
    return [float(f"{v:.7g}") if np.isfinite(v) else None for v in np.asarray(values, np.float64).tolist()]
