"""Pictures of the panels of activation views, as SVG: what stays in a notebook that is not run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mappnb.svg import Canvas
from mappnb.widgets._acts_figures import _through, heat_colours, row_height
from mappnb.widgets._acts_panels import Bars, Grid, Heat, Lines, Panel, Scatter, number_text
from mappnb.widgets._lab_plots import series_colours
from mappnb.widgets._png import data_uri, palette_png
from mappnb.widgets._ramp import levels_of, palette_of
from mappnb.widgets._strag_plots import COLOURS

__all__ = ["CLASS", "panel_svg"]

Array = np.ndarray[Any, Any]
CLASS = "mappnb-still-acts"
WIDTH = 900
MOST_POINTS = 4000
"""Of a picture of points: evenly spread ones."""
MOST_COLUMNS = 24
"""Of a grid of texts."""


def panel_svg(panel: Panel) -> str:
    """Return a panel as an SVG element; a table as nothing."""
    draw: dict[type[Any], Callable[[Any], str]] = {
        Heat: _heat,
        Grid: _grid,
        Scatter: _scatter,
        Lines: _lines,
        Bars: _bars,
    }
    made = draw.get(type(panel))
    return "" if made is None else made(panel).replace("<svg ", f'<svg class="{CLASS}" ', 1)


def _heat(panel: Heat) -> str:
    values = panel.drawn()
    rows, cols = values.shape
    low, high = panel.ends()
    size = row_height(rows)
    long = max((len(str(c)) for c in panel.columns), default=1) > 5
    left, top = 16 + 7 * max((len(str(r)[:22]) for r in panel.rows), default=1), 22
    plot, height, below = WIDTH - left - 26, rows * size, 78 if long else 40
    canvas = Canvas(WIDTH, int(top + height + below), panel.title)
    canvas.text(left, 13, panel.title)
    canvas.rect(left, top, plot, height, fill="#8a8a8a", extra=' fill-opacity=".18"')
    uri = data_uri(
        palette_png(levels_of(values, low, high, colours=COLOURS), palette_of(heat_colours(panel.diverging, "light")))
    )
    _image(canvas, uri, left, top, plot, height)
    for i in range(0, rows, max(1, int(np.ceil(12 / size)))):
        canvas.text(left - 5, top + (i + 0.5) * size + 4, str(panel.rows[i])[:22], anchor="end", cls="axis")
    wide, marked = plot / max(cols, 1), set(panel.marked_columns)
    for c in range(0, cols, max(1, int(np.ceil((13 if long else 44) / wide)))):
        x, name = left + (c + 0.5) * wide, f"{'*' if c in marked else ''}{str(panel.columns[c])[:12]}"
        turned = (
            f'transform="rotate(-48 {x:.1f} {top + height + 12:.1f})" text-anchor="end"'
            if long
            else 'text-anchor="middle"'
        )
        canvas.text(x, top + height + 13, name, anchor="middle", cls="axis")
        canvas.parts[-1] = canvas.parts[-1].replace('text-anchor="middle"', turned, 1)
    for r, c in panel.bad:
        canvas.text(left + (c + 0.5) * wide, top + (r + 0.5) * size + 4, "×", anchor="middle", cls="bad")
    ends = [number_text(10**v if panel.log else v) for v in (low, high)]
    _key(canvas, left, top + height + below - 18, ends, heat_colours(panel.diverging, "light"), panel.x_label)
    return canvas.render()


def _image(canvas: Canvas, uri: str, x: float, y: float, wide: float, high: float) -> None:
    canvas.parts.append(
        f'<image x="{x:.1f}" y="{y:.1f}" width="{wide:.1f}" height="{high:.1f}" preserveAspectRatio="none" '
        f'style="image-rendering:pixelated" href="{uri}"/>'
    )


def _key(canvas: Canvas, x: float, y: float, ends: list[str], colours: list[str], label: str = "") -> None:
    """Draw the colours with their ends, and a label at the right."""
    canvas.text(x, y + 10, ends[0], cls="axis")
    start = x + 8 + 7 * len(ends[0])
    strip = data_uri(palette_png(np.arange(1, len(colours) + 1, dtype=np.uint8)[None, :], palette_of(colours)))
    _image(canvas, strip, start, y, 150, 11)
    canvas.text(start + 158, y + 10, ends[1], cls="axis")
    canvas.text(canvas.width - 26, y + 10, label, anchor="end", cls="axis")


def _grid(panel: Grid) -> str:
    rows, cols = len(panel.rows), min(len(panel.columns), MOST_COLUMNS)
    colours = heat_colours(False, "light")
    left, top, high = 16 + 7 * max(len(r) for r in panel.rows), 38, 19
    wide = (WIDTH - left - 10) / max(cols, 1)
    most = max(2, int(wide / 6.6))
    canvas = Canvas(WIDTH, top + rows * high + 30, panel.title)
    canvas.text(left, 13, panel.title)
    values = np.where(np.isfinite(panel.values), panel.values, np.nan)
    levels = levels_of(values, panel.low, panel.high, colours=COLOURS)
    for c in range(cols):
        canvas.text(left + (c + 0.5) * wide, top - 6, _shown(panel.columns[c], most), anchor="middle", cls="axis")
    for r in range(rows):
        canvas.text(left - 5, top + r * high + 13, panel.rows[r], anchor="end", cls="axis")
        for c in range(cols):
            level = int(levels[r, c])
            fill = colours[level - 1] if level else "none"
            x, y = left + c * wide, top + r * high
            canvas.rect(x + 0.5, y + 0.5, wide - 1, high - 1, fill=fill, tip=str(panel.titles[r, c]))
            ink = "onlight" if not level or level < 0.55 * COLOURS else "ondark"
            canvas.text(x + wide / 2, y + 13, _shown(str(panel.texts[r, c]), most), anchor="middle", cls=ink)
    _key(canvas, left, top + rows * high + 10, [number_text(panel.low), number_text(panel.high)], colours)
    return canvas.render()


def _shown(text: str, most: int) -> str:
    """Return a token's text as it can be seen, cut to a length; XML cannot hold control characters."""
    seen = text.replace(" ", "·").replace("\n", "↵")
    seen = "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in seen)
    return seen if len(seen) <= most else f"{seen[: most - 1]}…"


def _frame(
    canvas: Canvas, panel: Scatter | Bars | Lines, x: Array, y: Array, *, log: bool = False
) -> Callable[[float, float], tuple[float, float]]:
    """Draw title, axes and their ends; return what places a point."""
    left, top, right, bottom = 70, 40, 20, 56
    (x0, x1), (y0, y1) = ((float(np.min(v)), float(np.max(v))) if len(v) else (0.0, 1.0) for v in (x, y))
    x1, y1 = (x1 if x1 > x0 else x0 + 1), (y1 if y1 > y0 else y0 + 1)
    plot, high = canvas.width - left - right, canvas.height - top - bottom
    canvas.text(left, 13, panel.title)
    canvas.line(left, top + high, left + plot, top + high)
    canvas.line(left, top, left, top + high)
    for value, at in ((x0, left), (x1, left + plot)):
        canvas.text(at, top + high + 15, number_text(value), anchor="middle", cls="axis")
    for value, at in ((y0, top + high), (y1, top + 8)):
        canvas.text(left - 6, at, number_text(10**value if log else value), anchor="end", cls="axis")
    canvas.text(left + plot / 2, top + high + 15, panel.x_label, anchor="middle", cls="axis")
    canvas.text(left, top - 10, panel.y_label, cls="axis")
    return lambda a, b: (
        left + 6 + (a - x0) / (x1 - x0) * (plot - 12),
        top + high - 6 - (b - y0) / (y1 - y0) * (high - 12),
    )


def _scatter(panel: Scatter) -> str:
    canvas = Canvas(WIDTH, 480, panel.title)
    keep = np.arange(len(panel.x))[:: max(1, -(-len(panel.x) // MOST_POINTS))]
    at = _frame(canvas, panel, panel.x, panel.y)
    low, high = (float(np.min(panel.colour)), float(np.max(panel.colour))) if len(panel.colour) else (0.0, 1.0)
    colours = _through("light")
    level = np.clip((panel.colour - low) / max(high - low, 1e-300), 0, 1) * (len(colours) - 1)
    order = np.lexsort((panel.order, panel.line))
    for number in np.unique(panel.line)[:MOST_POINTS]:
        points = [at(float(panel.x[i]), float(panel.y[i])) for i in order[panel.line[order] == number]]
        if len(points) > 1 and len(panel.x) <= MOST_POINTS:
            joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
            canvas.parts.append(f'<polyline points="{joined}" fill="none" stroke="#8a8a8a" stroke-opacity=".4"/>')
    for i in keep:
        x, y = at(float(panel.x[i]), float(panel.y[i]))
        canvas.parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colours[int(level[i])]}"/>')
    _key(canvas, 70, canvas.height - 20, [number_text(low), number_text(high)], colours, panel.colour_label)
    return canvas.render()


def _lines(panel: Lines) -> str:
    canvas = Canvas(WIDTH, 230, panel.title)
    drawn = [np.log10(np.where(v > 0, v, np.nan)) if panel.log else np.asarray(v, np.float64) for _, v in panel.lines]
    there = [v[np.isfinite(v)] for v in drawn]
    at = _frame(canvas, panel, panel.x, np.concatenate(there), log=panel.log)
    for number, ((name, _), values) in enumerate(zip(panel.lines, drawn, strict=True)):
        colour = series_colours(number, "light")
        points = [at(float(a), float(b)) for a, b in zip(panel.x, values, strict=True) if np.isfinite(b)]
        canvas.path(points, stroke=colour)
        for x, y in points if len(points) <= 60 else []:
            canvas.parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.6" fill="{colour}"/>')
        if len(panel.lines) > 1:
            canvas.rect(90 + 130 * number, canvas.height - 22, 14, 4, fill=colour)
            canvas.text(110 + 130 * number, canvas.height - 15, name[:18], cls="axis")
    return canvas.render()


def _bars(panel: Bars) -> str:
    canvas = Canvas(WIDTH, 240, panel.title)
    at = _frame(canvas, panel, panel.x, np.array([0.0, float(np.max(panel.values, initial=1e-9))]))
    wide = max(1.0, 0.8 * (WIDTH - 90) / max(len(panel.x), 1))
    for x, value in zip(panel.x.tolist(), panel.values.tolist(), strict=True):
        (px, py), (_, ground) = at(x, value), at(x, 0.0)
        canvas.rect(px - wide / 2, py, wide, ground - py, fill="#0072b2")
    return canvas.render()
