"""The figures of the stragglers view: heatmap, bars of operations, telemetry, prices. bokeh is loaded on first use."""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from mappnb.palette import CATEGORY_COLOURS, DIVERGING, RISING
from mappnb.widgets._lab_plots import THEMES
from mappnb.widgets._ramp import between
from mappnb.widgets._strag_levels import Picture

__all__ = [
    "VERDICTS",
    "bars_figure",
    "heat_figure",
    "item",
    "look_of",
    "marks_told",
    "palette",
    "price_figure",
    "row_height",
]

Array = np.ndarray[Any, Any]
Look = dict[str, str]
VERDICTS: dict[str, tuple[str, str, str, bool]] = {
    "culprit": ("#b3261e", "#ff8f85", "triangle", True),
    "undecided": ("#8a6d00", "#e0b62e", "diamond", False),
    "victim": ("#57606a", "#a3adb8", "circle", False),
}
"""Verdict -> colour in the light and the dark theme, marker, filled: shape tells as much as colour."""
EDGE = 0.03
"""Room for the marks at the right, in widths of the heatmap."""
COLOURS = 254


def palette(scale: str, theme: str) -> list[str]:
    """Return the colours of a scale, :data:`COLOURS` of them, from low to high."""
    stops = (DIVERGING if scale in ("ratio", "above") else RISING)[theme]
    mixed = between(stops, np.linspace(0, len(stops) - 1, COLOURS)).round().astype(int)
    return [f"#{r:02x}{g:02x}{b:02x}" for r, g, b in mixed.tolist()]


def look_of(theme: str, ground: str = "") -> Look:
    """Return the colours of a theme; ``ground``: ``"rgb(r, g, b)"`` of the page."""
    own = {"ground": ground} if re.fullmatch(r"rgb\(\d{1,3}, \d{1,3}, \d{1,3}\)", ground) else {}
    return {**THEMES[theme], "accent": "#0b62c4" if theme == "light" else "#6cb6ff", **own}


def item(figure: Any) -> dict[str, Any]:
    """Return a figure as bokeh's JSON."""
    embed: Any = importlib.import_module("bokeh.embed")
    made: dict[str, Any] = embed.json_item(figure)
    return made


def _models() -> Any:
    return importlib.import_module("bokeh.models")


def _figure(look: Look, **options: Any) -> Any:
    plotting: Any = importlib.import_module("bokeh.plotting")
    figure = plotting.figure(
        sizing_mode="stretch_width", toolbar_location=None, tools="", background_fill_color=look["ground"],
        border_fill_color=look["ground"], outline_line_color=None, **{"min_border_right": 14, **options},
    )  # fmt: skip
    for axis in (*figure.xaxis, *figure.yaxis):
        _quiet(axis, look)
    for grid in (*figure.xgrid, *figure.ygrid):
        grid.grid_line_color, grid.grid_line_alpha = look["line"], 0.6
    return figure


def _quiet(axis: Any, look: Look) -> None:
    axis.axis_label_text_color = look["muted"]
    axis.axis_label_text_font_style = "normal"
    axis.axis_label_text_font_size = axis.major_label_text_font_size = "11px"
    axis.major_label_text_color = look["text"]
    axis.axis_line_color = axis.major_tick_line_color = look["line"]
    axis.minor_tick_line_color = None


def row_height(rows: int) -> float:
    """Return the height of a row in pixels: all rows fit about one screen."""
    return float(min(22.0, max(560.0 / max(rows, 1), 2.0)))


# ------------------------------------------------------------------------------------------------------------ heatmap
def heat_figure(drawn: Picture, theme: str, ground: str = "") -> Any:
    """Return the heatmap, row 0 on top; the browser reads the source ``cells`` and fills ``boxes`` and ``marks``."""
    look, grid = look_of(theme, ground), drawn.grid
    if grid is None:
        raise ValueError("no cells at this level")
    models = _models()
    rows, cols = grid.values.shape
    height = row_height(rows)
    plot = _plot(look, cols=cols, rows=rows, height=int(rows * height) + 52)
    plot.add_layout(
        models.BoxAnnotation(
            left=0, right=cols, bottom=0, top=rows, fill_color=look["ground"], line_color=None, level="underlay", propagate_hover=True,
            hatch_pattern="right_diagonal_line", hatch_color=look["muted"], hatch_alpha=0.55, hatch_scale=7, hatch_weight=0.8,
        )
    )  # fmt: skip
    mapper = models.LinearColorMapper(
        palette=palette(drawn.scale, theme), low=drawn.low, high=drawn.high, nan_color="rgba(0, 0, 0, 0)"
    )
    image = np.ascontiguousarray(grid.values[::-1].astype(np.float32))
    glyph = models.Image(image="image", x=0, y=0, dw=cols, dh=rows, color_mapper=mapper)
    _add(plot, glyph, name="cells", image=[image])
    _axes(plot, drawn, look, height)
    _overlays(plot, 9 if height >= 9 else 8)
    plot.add_layout(_colour_bar(models, mapper, drawn, look), "right")
    return plot


def _plot(look: Look, *, cols: int, rows: int, height: int) -> Any:
    models = _models()
    return models.Plot(
        sizing_mode="stretch_width", height=height, toolbar_location=None, background_fill_color=look["ground"],
        border_fill_color=look["ground"], outline_line_color=None, min_border_right=14, min_border_top=4,
        x_range=models.Range1d(0, max(cols, 1) * (1 + EDGE)), y_range=models.Range1d(0, max(rows, 1)),
    )  # fmt: skip


def _add(plot: Any, glyph: Any, *, name: str = "", **data: Any) -> None:
    """Add a glyph that looks the same whatever is selected: fewer objects than bokeh makes by itself, and a third of the time."""
    models = _models()
    source = models.ColumnDataSource(name=name or None, data=data)
    plot.add_glyph(source, glyph, selection_glyph=None, nonselection_glyph=None, muted_glyph=None)


def _axes(plot: Any, drawn: Picture, look: Look, height: float) -> None:
    """Label rows and steps, and the groups of rows on an axis of their own, with lines between them."""
    models, grid = _models(), drawn.grid
    assert grid is not None
    rows, cols = grid.values.shape
    steps, labels, names = (models.LinearAxis() for _ in range(3))
    every = next((k for k in (1, 2, 5, 10, 20, 50, 100, 200) if cols / k <= 14), 500)
    _fixed(steps, {c + 0.5: str(grid.columns[c][0]) for c in range(0, cols, every)})
    steps.axis_label = "step"
    every = max(1, int(np.ceil(12 / height)))
    _fixed(labels, {rows - i - 0.5: r.label[:28] for i, r in enumerate(grid.rows) if i % every == 0})
    for axis, side in ((steps, "below"), (labels, "left")):
        _quiet(axis, look)
        plot.add_layout(axis, side)
    groups = grid.groups
    if not groups:
        return
    gap = max(1, int(np.ceil(13 / (height * min(n for _, _, n in groups)))))
    _fixed(names, {rows - first - n / 2: label[:24] for k, (label, first, n) in enumerate(groups) if k % gap == 0})
    _quiet(names, look)
    names.axis_line_color = names.major_tick_line_color = None
    names.major_label_text_font_style = "bold"
    plot.add_layout(names, "left")
    edges = [rows - first for _, first, _ in groups[1:]]
    _add(plot, models.Segment(x0=0, x1=cols, y0="y", y1="y", line_color=look["muted"], line_width=1), y=edges)


def _fixed(axis: Any, ticks: Mapping[float, str]) -> None:
    axis.ticker = _models().FixedTicker(ticks=list(ticks), minor_ticks=[])
    axis.major_label_overrides = dict(ticks)


def _overlays(plot: Any, size: int) -> None:
    """Add what the browser draws on top: boxes around cells, and the marks of the verdicts."""
    models = _models()
    corners = {k: k for k in ("left", "right", "bottom", "top")}
    box = models.Quad(**corners, fill_color=None, line_color="colour", line_width="width")
    _add(plot, box, name="boxes", **{k: [] for k in (*corners, "colour", "width")})
    mark = models.Scatter(
        x="x", y="y", marker="marker", size=size, angle="angle", line_color="colour", line_width=1.5, fill_color="colour", fill_alpha="fill"
    )  # fmt: skip
    _add(plot, mark, name="marks", x=[], y=[], marker=[], angle=[], colour=[], fill=[])


def marks_told(theme: str) -> dict[str, dict[str, Any]]:
    """Return how the browser marks each verdict."""
    return {
        verdict: {
            "colour": dark if theme == "dark" else light,
            "marker": marker,
            "angle": np.pi / 2 if marker == "triangle" else 0.0,
            "fill": float(filled),
        }
        for verdict, (light, dark, marker, filled) in VERDICTS.items()
    }


def _colour_bar(models: Any, mapper: Any, drawn: Picture, look: Look) -> Any:
    formatter = models.PrintfTickFormatter(format="%.3g×") if drawn.scale == "ratio" else models.BasicTickFormatter()
    if drawn.scale == "share":
        formatter = models.NumeralTickFormatter(format="0 %")
    return models.ColorBar(
        color_mapper=mapper, formatter=formatter, ticker=models.BasicTicker(desired_num_ticks=5), width=10, padding=4,
        label_standoff=6, background_fill_color=None, bar_line_color=None, major_label_text_color=look["text"],
        major_label_text_font_size="11px", major_tick_line_color=look["text"], margin=0,
    )  # fmt: skip


# --------------------------------------------------------------------------------------------------------------- bars
def _unit(most: float) -> tuple[str, float]:
    return ("s", 1.0) if most >= 2 else ("ms", 1e3) if most >= 2e-3 else ("µs", 1e6)


def _shorter(text: str, most: int = 46) -> str:
    return text if len(text) <= most else f"{text[: most - 18]}…{text[-17:]}"


def bars_figure(drawn: Picture, theme: str, ground: str = "") -> Any:
    """Return the operations of one rank in one step as bars, the median of its peers below each."""
    look, ops = look_of(theme, ground), drawn.ops
    if ops is None:
        raise ValueError("no bars at this level")
    models = _models()
    frame, rows = ops.frame, len(ops.frame)
    unit, scale = _unit(float(np.nanmax(frame[["own_s", "peers_s"]].to_numpy(), initial=0.0)))
    figure = _figure(look, height=rows * 26 + 52, x_axis_label=f"self time, {unit}", min_border_top=4)
    figure.y_range = models.Range1d(0, max(rows, 1))
    figure.x_range.start, figure.x_range.range_padding = 0, 0.04
    figure.ygrid.grid_line_color = None
    y = rows - np.arange(rows) - 0.5
    _fixed(figure.yaxis[0], {v: _shorter(t) for v, t in zip(y.tolist(), frame["label"], strict=True)})
    dark = theme == "dark"
    known = {str(c): pair[dark] for c, pair in CATEGORY_COLOURS.items()}
    colours = [known.get(c, known["host"]) for c in frame["category"]]
    data = {
        "y": y + 0.1, "low": y - 0.28, "own": frame["own_s"].to_numpy() * scale, "peers": frame["peers_s"].to_numpy() * scale,
        "colour": colours, "label": list(frame["label"]), "count": frame["count"].to_numpy(),
    }  # fmt: skip
    source = models.ColumnDataSource(name="ops", data=data)
    figure.hbar(y="y", right="own", height=0.42, fill_color="colour", line_color=None, source=source)
    figure.hbar(y="low", right="peers", height=0.2, fill_color=look["muted"], line_color=None, source=source)
    corners = {k: k for k in ("left", "right", "bottom", "top")}
    box = models.Quad(**corners, fill_color=None, line_color="colour", line_width="width")
    _add(figure, box, name="boxes", **{k: [] for k in (*corners, "colour", "width")})
    return figure


def price_figure(names: list[str], cost: Array, reliable: Array, error: float, theme: str, ground: str = "") -> Any:
    """Return how much longer steps get with only one part as it was, in percent; bars within the replay error are pale."""
    look, models = look_of(theme, ground), _models()
    rows = len(names)
    figure = _figure(
        look, height=rows * 21 + 50, x_axis_label="steps longer than ideal by, %", min_border_top=4, min_border_right=44
    )
    figure.y_range = models.Range1d(0, max(rows, 1))
    figure.x_range.start, figure.x_range.range_padding = min(0.0, float(cost.min(initial=0.0)) * 110), 0.08
    figure.ygrid.grid_line_color = None
    y = rows - np.arange(rows) - 0.5
    _fixed(figure.yaxis[0], {v: _shorter(t, 30) for v, t in zip(y.tolist(), names, strict=True)})
    fill = "#d55e00" if theme == "light" else "#e8743b"
    data = {
        "y": y, "cost": cost * 100, "alpha": np.where(reliable, 0.95, 0.25), "name": names,
        "said": [f"{v:.1%}" + ("" if ok else " (within the error)") for v, ok in zip(cost.tolist(), reliable.tolist(), strict=True)],
    }  # fmt: skip
    source = models.ColumnDataSource(name="prices", data=data)
    shape = {"height": 0.62, "fill_color": fill, "fill_alpha": "alpha", "line_color": fill, "line_alpha": "alpha"}
    bars = figure.hbar(y="y", right="cost", source=source, **shape)
    figure.text(
        "cost",
        "y",
        "said",
        x_offset=5,
        text_baseline="middle",
        text_font_size="11px",
        text_color=look["text"],
        source=source,
    )
    figure.vspan(x=[abs(error) * 100], line_color=look["muted"], line_dash="dashed", line_width=1.5)
    figure.add_tools(models.HoverTool(renderers=[bars], tooltips=[("", "@name"), ("longer by", "@said")]))
    figure.x_range.end = max(float(cost.max(initial=0.0)) * 135, abs(error) * 150, 1.0)
    return figure
