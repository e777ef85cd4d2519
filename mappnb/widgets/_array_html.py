"""The content of a view as a page fragment: one picture, its labels, its legend, its numbers as a table."""

from __future__ import annotations

import base64
import html
import json
import unicodedata
from typing import Any

import numpy as np
import xarray as xr

from mappnb.widgets._array_colours import PALETTE, category_colour, ramp_ends
from mappnb.widgets._array_content import MARK_NAMES, WORD_BYTES, Content
from mappnb.widgets._array_draw import swatch
from mappnb.widgets._array_grid import GAP, TITLE, Axis, cut
from mappnb.widgets._array_labels import Labels, clean, pack, value_text
from mappnb.widgets._array_script import SCRIPT, STYLE
from mappnb.widgets._array_values import Mark
from mappnb.widgets._png import data_uri, palette_png

__all__ = ["empty_fragment", "fragment", "gradient", "page", "text_width"]

MOST_DIGITS = 800
_TABLE = 8


def _e(text: object) -> str:
    return html.escape(str(text))


def _bdi(text: object) -> str:
    return f"<bdi>{_e(text)}</bdi>"


def text_width(text: str) -> float:
    """Return about how many pixels a text of 11 px takes."""
    return sum(11.0 if unicodedata.east_asian_width(c) in "WF" else 6.4 for c in text)


def _heading(da: xr.DataArray) -> str:
    name = clean(da.name) if da.name is not None else "array"
    dims = " × ".join(f"{_bdi(clean(d))} {n:,}" for d, n in da.sizes.items()) or "a single value (0-d)"
    unit = f"<span>{_bdi(clean(da.attrs['units'], 24))}</span> " if "units" in da.attrs else ""
    return f'<div class="mpa-h"><b>{_bdi(name)}</b> <span>{_e(da.dtype)}</span> {unit}<span>{dims}</span></div>'


def empty_fragment(da: xr.DataArray) -> str:
    """Return the fragment of an array without values."""
    none = ", ".join(f"{_bdi(clean(d))} has size 0" for d, n in da.sizes.items() if n == 0)
    return f'<div class="mpa"><style>{STYLE}</style>{_heading(da)}<p>Nothing to draw: {none}.</p></div>'


def fragment(content: Content) -> str:
    """Return the view as HTML that needs nothing else and may stand in a page several times."""
    data = html.escape(json.dumps(_data(content), ensure_ascii=False, separators=(",", ":")), quote=False)
    words = " ".join(filter(None, [content.coloured(), content.counted(), content.left_out()]))
    single = (
        f'<p class="mpa-n">{_bdi(clean(value_text(content.values.ravel()[0])))}</p>' if content.da.size == 1 else ""
    )
    return (
        f"<div class=\"mpa\" data-mpa='{data.replace(chr(39), '&#39;')}'><style>{STYLE}</style>{_heading(content.da)}"
        f"{_sliders(content)}{_picture(content)}{_legend(content)}{single}<p>{_e(words)}</p>{_table(content)}"
        f"<script>{SCRIPT}</script></div>"
    )


def page(da: xr.DataArray, body: str) -> str:
    """Return a whole page around a fragment."""
    name = _e(clean(da.name) if da.name is not None else "array")
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'><meta name='viewport' content='width=device-width'>"
        f"<title>{name} · mappnb</title><style>body{{margin:24px;background:#fff;color-scheme:light dark}}"
        "@media(prefers-color-scheme:dark){body{background:#15181c}}h1{position:absolute;width:1px;height:1px;overflow:hidden;"
        f"clip-path:inset(50%)}}</style></head><body><main><h1>{name}</h1>{body}</main></body></html>"
    )


def _data(content: Content) -> dict[str, Any]:
    """Return what the script needs: values in bytes, axes, tiles."""
    grid = content.grid
    axes = []
    for axis, labels in zip(grid.axes, content.labels, strict=True):
        entry: dict[str, Any] = {
            "n": "" if axis.dim is None else clean(axis.dim),
            "s": axis.size,
            "h": axis.head,
            "k": axis.shown,
        }
        entry |= {key: texts for key, texts in (("c", labels.coord), ("w", labels.tokens)) if texts is not None}
        axes.append(entry)
    out = pack(content.values, most_bytes=WORD_BYTES)
    out |= {"a": axes, "f": [[t.left, t.top, t.row, t.col] for t in grid.tiles if t.row >= 0], "p": grid.cell, "g": GAP}
    out["k"] = _corner(content)
    if grid.sliders:
        out["i"] = [data_uri(palette_png(pixels, PALETTE)) for pixels in content.frames()[1:]]
    missing = content.marks == Mark.MISSING
    if missing.any():
        out["m"] = base64.b64encode(np.packbits(missing.ravel(), bitorder="little").tobytes()).decode()
        out["q"] = MARK_NAMES[Mark.MISSING]
    if content.scale.kind in ("sequential", "diverging"):
        out["l"] = [content.scale.low, content.scale.high]
    return out


def _corner(content: Content) -> str:
    names = [clean(a.dim, 24) for a in (content.grid.y, content.grid.x) if a.dim is not None]
    return " \\ ".join(names)


def _sliders(content: Content) -> str:
    """Return where the script puts the sliders, and until then what the one frame shows."""
    first = ", ".join(f"{_bdi(clean(a.dim))} 0 of {a.size}" for a in content.grid.sliders)
    return (
        f'<div class="mpa-s"></div><p class="mpa-w">Shown: {first} (no script runs here, so no slider).</p>'
        if first
        else ""
    )


def _ticks(axis: Axis, labels: Labels, cell: int) -> list[tuple[int, str]]:
    """Return which shown positions of an axis are labelled: all where there is room and something to say, else the ends of each part."""
    every = cell >= 12 and (labels.tokens is not None or labels.coord is not None or axis.shown <= 32)
    ends = {0, axis.head - 1, axis.shown - 1} | ({axis.head} if axis.tail else set())
    out: list[tuple[int, str]] = []
    for k in range(axis.shown) if every else sorted(ends):
        apart = (k - out[-1][0]) * cell + (GAP if k >= axis.head > out[-1][0] else 0) if out else 99
        if apart >= 12:
            out.append((k, clean(labels.best(axis, k), 16)))
    return out


def _picture(content: Content) -> str:
    """Return the frames and, around them, the names of the axes, the titles of the tiles and the ticks."""
    grid, cell = content.grid, content.grid.cell
    y_ticks = _ticks(grid.y, content.labels[-2], cell) if grid.y.dim is not None else []
    x_ticks = _ticks(grid.x, content.labels[-1], cell) if grid.x.dim is not None else []
    left = round(max((text_width(t) for _, t in y_ticks), default=-8.0)) + 8
    top = 20 if grid.y.dim is not None else 2
    first = next(t for t in grid.tiles if t.row >= 0)
    under = left + next(t.left for t in grid.tiles if t.row >= 0 and t.top == grid.tiles[-1].top)
    ticks, below = _x_ticks(content, x_ticks, under, top + grid.height + 3)
    parts = [_frames(content, left, top)]
    y_at = grid.y.offsets(cell, GAP)
    parts += [
        f'<span class="mpa-x" style="left:0;width:{left - 6}px;top:{top + first.top + int(y_at[k]) + (cell - 14) // 2}px;'
        f'text-align:right">{_bdi(t)}</span> '
        for k, t in y_ticks
    ]
    if grid.y.dim is not None:
        parts.append(
            f'<span class="mpa-n" style="left:{left}px;top:0">↓ {_axis_name(grid.y)}{_facet_names(content)}</span> '
        )
    parts += [*_titles(content, left, top), *ticks]
    height = top + grid.height + below
    if grid.x.dim is not None:
        parts.append(f'<span class="mpa-n" style="left:{under}px;top:{height + 2}px">→ {_axis_name(grid.x)}</span> ')
        height += 20
    label = html.escape(content.summary(), quote=True)
    width = left + max(grid.width, 120)
    return (
        f'<div class="mpa-o" role="group" aria-label="picture" tabindex="0"><div role="img" aria-label="{label}">'
        f'<div class="mpa-p" style="--w:{width}px;--h:{height}px">{"".join(parts)}</div></div></div>'
    )


def _axis_name(axis: Axis) -> str:
    cut_words = f" ({axis.shown} shown)" if axis.truncated else ""
    return f"{_bdi(clean(axis.dim))} {axis.size:,}{cut_words}"


def _facet_names(content: Content) -> str:
    named = [(word, a) for word, a in (("rows", content.grid.row), ("columns", content.grid.col)) if a.size > 1]
    if len(named) < 2:
        return ""
    return '<span style="opacity:.85">' + "".join(f" · {word}: {_axis_name(a)}" for word, a in named) + "</span>"


def _frames(content: Content, left: int, top: int) -> str:
    """Return the first frame; the script has the others."""
    grid = content.grid
    uri = data_uri(palette_png(content.frames()[0], PALETTE))
    return (
        f'<img class="mpa-f" alt="" width="{grid.width}" height="{grid.height}" style="left:{left}px;top:{top}px" src="{uri}">'
        f"{_digits(content, left, top)}"
    )


def _digits(content: Content, left: int, top: int) -> str:
    """Return the categories written into their cells, where these are large and few enough and there is one frame."""
    grid, scale = content.grid, content.scale
    widest = max((len(_category(v)) for v in scale.values), default=99)
    if scale.kind != "categories" or grid.sliders or grid.num_cells > MOST_DIGITS or grid.cell < 6 + 6 * widest:
        return ""
    values, marks = content.values, content.marks
    x_at, y_at = (a.offsets(grid.cell, GAP) for a in (grid.x, grid.y))
    middle = (grid.cell - 1) / 2
    rows = []
    for tile in grid.tiles:
        for y, at in enumerate(y_at.tolist()) if tile.row >= 0 else ():
            shown = [
                f'<tspan x="{tile.left + x_at[x] + middle:g}">{_e(_category(values[tile.row, tile.col, y, x].item()))}</tspan>'
                for x in range(grid.x.shown)
                if marks[tile.row, tile.col, y, x] == Mark.NONE
            ]
            rows.append(f'<text y="{tile.top + at + middle + 3.5:g}">{"".join(shown)}</text>')
    return (
        f'<svg aria-hidden="true" width="{grid.width}" height="{grid.height}" style="left:{left}px;top:{top}px">'
        f"{''.join(rows)}</svg>"
    )


def _category(value: Any) -> str:
    return str(int(value)) if isinstance(value, bool) else clean(value_text(value), 24)


def _titles(content: Content, left: int, top: int) -> list[str]:
    grid = content.grid
    if not grid.faceted:
        return []
    out = []
    row_labels, col_labels = content.labels[-4], content.labels[-3]
    for tile in grid.tiles:
        if tile.row < 0:
            text = f"⋯ {grid.col.size - grid.col.shown:,} more"
        else:
            ends = [
                (a, x, k)
                for a, x, k in ((grid.row, row_labels, tile.row), (grid.col, col_labels, tile.col))
                if a.size > 1
            ]
            text = " · ".join(_bdi(x.best(a, k)) for a, x, k in ends)
            plain = " · ".join(x.best(a, k) for a, x, k in ends)
            if len(ends) == 1 and text_width(f"{clean(ends[0][0].dim)} {plain}") <= grid.tile_size[0]:
                text = f"{_bdi(clean(ends[0][0].dim))} {text}"
        out.append(
            f'<span class="mpa-x" style="left:{left + tile.left}px;top:{top + tile.top - TITLE + 3}px;'
            f'width:{grid.tile_size[0]}px">{text}</span> '
        )
    return out + _gaps(content, left, top)


def _gaps(content: Content, left: int, top: int) -> list[str]:
    """Return the dots between rows and columns of tiles where some are left out."""
    grid, out = content.grid, []
    wide, high = grid.tile_size
    for tile in grid.tiles:
        if grid.row.size > 1 and grid.col.truncated and tile.col == grid.col.head:
            at = f"left:{left + tile.left - GAP - 12}px;top:{top + tile.top + high // 2 - 8}px"
            out.append(f'<span class="mpa-x" style="{at}">⋯</span> ')
        if grid.row.truncated and tile.row == grid.row.head:
            at = f"left:{left + tile.left + wide // 2 - 3}px;top:{top + tile.top - TITLE - GAP}px"
            out.append(f'<span class="mpa-x" style="{at}">⋮</span> ')
    return out


def _x_ticks(content: Content, ticks: list[tuple[int, str]], left: int, top: int) -> tuple[list[str], int]:
    """Return the ticks of the horizontal axis and their height: upright texts where they do not fit side by side."""
    if not ticks:
        return [], 0
    cell, at = content.grid.cell, content.grid.x.offsets(content.grid.cell, GAP)
    widths = [text_width(t) for _, t in ticks]
    middles = [left + int(at[k]) + cell / 2 for k, _ in ticks]
    pairs = zip(middles, middles[1:], widths, widths[1:], strict=False)
    if all((b - a) >= (v + w) / 2 + 4 for a, b, v, w in pairs):
        return [
            f'<span class="mpa-x" style="left:{m - 40:g}px;width:80px;text-align:center;top:{top}px">{_bdi(t)}</span> '
            for m, (_, t) in zip(middles, ticks, strict=True)
        ], 18
    if content.labels[-1].tokens is None and len(ticks) > 2:  # upright numbers say less than their ends
        ends = {0, content.grid.x.head - 1, content.grid.x.head, content.grid.x.shown - 1}
        kept = [t for t in ticks if t[0] in ends]
        return _x_ticks(content, kept if len(kept) < len(ticks) else [ticks[0], ticks[-1]], left, top)
    long = min(90, round(max(widths)) + 4)
    return [
        f'<span class="mpa-v" style="left:{m - 7:g}px;top:{top}px;max-height:{long}px">{_bdi(t)}</span> '
        for m, (_, t) in zip(middles, ticks, strict=True)
    ], long + 4


def gradient(content: Content) -> list[str]:
    """Return colours along the ramp of a view, low to high."""
    first, last = ramp_ends(content.scale)
    return ["#{:02x}{:02x}{:02x}".format(*PALETTE[i].tolist()) for i in range(first, last + 1, 10)]


def _legend(content: Content) -> str:
    scale, keys = content.scale, []
    if scale.kind in ("sequential", "diverging") and scale.low < scale.high:
        low, high = (_e(content.number(v)) for v in (scale.low, scale.high))
        bar = f'<i class="mpa-r" style="background:linear-gradient(to right,{",".join(gradient(content))})"></i>'
        keys.append(f"<span>{low}{bar} {high}</span>")
    keys += [
        f'<span><i style="background:{category_colour(k)}"></i>{_bdi(clean(value_text(v), 24))}</span>'
        for k, v in enumerate(scale.values)
    ]
    for mark in content.occurring:
        name = "NaT" if mark == Mark.NAN and content.da.dtype.kind in "Mm" else MARK_NAMES[mark]
        uri = data_uri(palette_png(swatch(mark, scale), PALETTE))
        keys.append(f'<span><img alt="" src="{uri}">{_e(name)}</span>')
    return f'<div class="mpa-k">{" ".join(keys)}</div>' if keys else ""


def _table(content: Content) -> str:
    """Return the numbers of the first tile's corners; the script puts all that are shown in their place."""
    grid = content.grid
    values = content.values.reshape(-1, grid.y.shown, grid.x.shown)[0]
    marks = content.marks.reshape(-1, grid.y.shown, grid.x.shown)[0]
    rows, columns = (cut(a.dim, a.shown, _TABLE).positions().tolist() for a in (grid.y, grid.x))
    x_labels, y_labels = content.labels[-1], content.labels[-2]
    head = "".join(f'<th scope="col">{_bdi(clean(x_labels.best(grid.x, k), 16))}</th>' for k in columns)
    body = ""
    for y in rows:
        texts = [
            MARK_NAMES[Mark.MISSING] if marks[y, x] == Mark.MISSING else clean(value_text(values[y, x]), 32)
            for x in columns
        ]
        cells = "".join(f"<td>{_bdi(t)}</td>" for t in texts)
        body += f'<tr><th scope="row">{_bdi(clean(y_labels.best(grid.y, y), 16))}</th>{cells}</tr>'
    return (
        "<details><summary>Numbers as a table</summary>"
        '<div class="mpa-t" tabindex="0" role="region" aria-label="numbers shown">'
        f"<table><thead><tr><td>{_e(_corner(content))}</td>{head}</tr></thead><tbody>{body}</tbody></table></div></details>"
    )
