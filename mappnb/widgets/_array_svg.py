"""The content of a view as one SVG document, for papers and slides: light theme, first frame, the cells embedded as PNG."""

from __future__ import annotations

from mappnb.svg import Canvas
from mappnb.widgets._array_colours import PALETTE, category_colour
from mappnb.widgets._array_content import MARK_NAMES, Content
from mappnb.widgets._array_draw import swatch
from mappnb.widgets._array_grid import Axis
from mappnb.widgets._array_html import gradient, text_width
from mappnb.widgets._array_labels import clean, value_text
from mappnb.widgets._png import data_uri, palette_png

__all__ = ["svg_document"]

_STYLE = "<style>.t{font:11.5px system-ui,sans-serif;fill:#1b1f24}.axis{fill:#57606a}image{image-rendering:pixelated}</style>"
_EDGE, _TOP, _LINE = 14, 62, 20


def svg_document(content: Content | None, title: str) -> str:
    """Return an SVG document of a view; of its title alone for an array without values."""
    if content is None:
        canvas = Canvas(420, 48, title)
        canvas.text(_EDGE, 28, f"{title}: nothing to draw")
        return _document(canvas)
    grid = content.grid
    words = [w for w in (content.coloured(), content.counted(), content.left_out()) if w]
    width = round(max(grid.width, 420, *(text_width(w) for w in words))) + 2 * _EDGE
    bottom = _TOP + grid.height + 16
    canvas = Canvas(width, bottom + 2 * _LINE + len(words) * _LINE, content.summary())
    canvas.parts.append(_STYLE + '<rect width="100%" height="100%" fill="#ffffff"/>')
    canvas.text(_EDGE, 22, f"{content.name} · {title}")
    names = [(grid.y, "↓"), (grid.x, "→"), (grid.row, "rows"), (grid.col, "columns" if grid.row.size > 1 else "tiles")]
    line = "   ".join(f"{word} {_name(axis)}" for axis, word in names if axis.dim is not None)
    canvas.text(_EDGE, _TOP - 14, line, cls="t axis")
    _image(canvas, palette_png(content.frames()[0], PALETTE), _EDGE, _TOP, grid.width, grid.height)
    _titles(canvas, content)
    canvas.width = max(canvas.width, round(_key(canvas, content, bottom)) + _EDGE)
    for k, line in enumerate(words):
        canvas.text(_EDGE, bottom + 2 * _LINE + k * _LINE, line, cls="t axis")
    return _document(canvas)


def _document(canvas: Canvas) -> str:
    size = f'xmlns="http://www.w3.org/2000/svg" height="{canvas.height}" '
    return canvas.render().replace("<svg ", f"<svg {size}", 1).replace('width="100%"', f'width="{canvas.width}"', 1)


def _name(axis: Axis) -> str:
    return f"{clean(axis.dim)} {axis.size:,}" + (f" ({axis.shown} shown)" if axis.truncated else "")


def _image(canvas: Canvas, png: bytes, x: float, y: float, width: int, height: int) -> None:
    canvas.parts.append(f'<image x="{x}" y="{y}" width="{width}" height="{height}" href="{data_uri(png)}"/>')


def _titles(canvas: Canvas, content: Content) -> None:
    grid = content.grid
    ends = ((grid.row, content.labels[-4]), (grid.col, content.labels[-3]))
    for tile in grid.tiles if grid.faceted else ():
        places = zip(ends, (tile.row, tile.col), strict=True)
        text = (
            " · ".join(labels.best(axis, k) for (axis, labels), k in places if axis.size > 1) if tile.row >= 0 else "⋯"
        )
        canvas.text(_EDGE + tile.left, _TOP + tile.top - 5, clean(text, max(3, grid.tile_size[0] // 7)), cls="t axis")


def _key(canvas: Canvas, content: Content, top: float) -> float:
    """Draw ramp, categories and marks side by side; returns where they end."""
    x = float(_EDGE)

    def say(text: str) -> None:
        nonlocal x
        canvas.text(x, top + 10, text)
        x += 1.1 * text_width(text) + 16

    if content.scale.kind in ("sequential", "diverging"):
        canvas.text(x, top + 10, content.number(content.scale.low))
        x += 1.1 * text_width(content.number(content.scale.low)) + 6
        for colour in gradient(content):
            canvas.rect(x, top, 13, 12, fill=colour)
            x += 13
        x += 6
        say(content.number(content.scale.high))
    for k, value in enumerate(content.scale.values):
        canvas.rect(x, top, 12, 12, fill=category_colour(k))
        x += 17
        say(clean(value_text(value), 24))
    for mark in content.occurring:
        _image(canvas, palette_png(swatch(mark, content.scale), PALETTE), x, top - 1, 14, 14)
        x += 19
        say(MARK_NAMES[mark])
    return x
