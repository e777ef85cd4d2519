"""The attention view as a picture: all heads, or one head with its tokens, as SVG with a small table."""

from __future__ import annotations

import html
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from mappnb.palette import DIVERGING, RISING
from mappnb.svg import Canvas
from mappnb.widgets._attn_answers import THUMB_QUERIES, Cells, Heads, columns, overview, sample_label
from mappnb.widgets._attn_codes import MISSING, decode, difference_values
from mappnb.widgets._attn_tokens import shown_all
from mappnb.widgets._attn_where import Where
from mappnb.widgets._png import data_uri, palette_png
from mappnb.widgets._ramp import between
from mappnb.widgets._static_view import PictureSnapshot

if TYPE_CHECKING:
    from mappnb.widgets.attention import Attention

__all__ = ["colours", "snapshot", "svg", "twin"]

Array = np.ndarray[Any, Any]

WIDTH, LEFT, TOP = 900, 46, 24
LABEL = 92
"""Room for a token's text beside a heatmap."""
LEAST_LABEL = 11
LOG_LEAST = 1e-4
MOST_CELLS = 128
MOST_ROWS = 10
MOST_WORK = 20_000_000
"""Weights that are worked out for a picture which was not asked for: some 2 s."""
FONT = "font:12px system-ui,sans-serif"
STYLE = (
    "<style>.mappnb-still-attn text{font:11px system-ui,sans-serif;fill:var(--jp-ui-font-color1,currentColor)}"
    ".mappnb-still-attn .axis{fill:var(--jp-ui-font-color2,currentColor)}"
    ".mappnb-attn-list{border-collapse:collapse;font:12px system-ui,sans-serif}"
    ".mappnb-attn-list :is(th,td){padding:2px 14px 2px 0;text-align:left}"
    "[data-mappnb-twin]{animation:mappnb-late 0s 1.5s both}@keyframes mappnb-late{from{display:none}to{display:block}}</style>"
)


def colours(where: Where, *, signed: bool, top: float) -> Array:
    """Return the colour of each code on light ground, uint8, shape (256, 3): as the browser's half does."""
    codes = np.arange(256, dtype=np.uint8)
    values = difference_values(codes) if signed else decode(codes)
    size = np.nan_to_num(np.abs(values).astype(np.float64))
    share = np.minimum(size / top, 1.0)
    if where.scale == "log":
        with np.errstate(divide="ignore"):
            share = np.clip(1 - np.log(share) / math.log(LOG_LEAST), 0, 1)
    elif where.scale == "sqrt":
        share = np.sqrt(share)
    share = np.where((size > 0) & (size >= where.threshold), share, 0.0)
    along = 0.5 + np.sign(values) * share / 2 if signed else share
    stops = (DIVERGING if signed else RISING)["light"]
    out = between(stops, np.nan_to_num(along) * (len(stops) - 1)).round()
    out[MISSING] = 176
    return out.astype(np.uint8)


def _image(codes: Array, table: Array, x: float, y: float, width: float, height: float) -> str:
    """Return codes as an embedded picture of a pixel each, stretched."""
    pixels = np.where(codes == MISSING, 255, np.minimum(codes, 253) + 1).astype(np.uint8)
    palette = np.concatenate([np.full((1, 3), 255), table[:254], table[MISSING:]]).astype(np.uint8)
    return (
        f'<image x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" preserveAspectRatio="none" '
        f'style="image-rendering:pixelated" href="{data_uri(palette_png(pixels, palette))}"/>'
    )


def svg(view: Attention) -> str:
    """Return what is looked at as an SVG element."""
    return _all_heads(view) if view._where.layer is None else _one_head(view)


def _classed(canvas: Canvas) -> str:
    return canvas.render().replace("<svg ", f'<svg class="mappnb-still-attn" style="max-width:{WIDTH}px" ', 1)


def _all_heads(view: Attention) -> str:
    source, where = view._source, view._where
    parts: list[Heads] = []
    first = 0
    while first < len(source.layers):
        parts.append(overview(source, where.sample, first=first, pool=where.pool))
        first += len(parts[-1].codes)
    codes = np.concatenate([p.codes for p in parts])
    layers, heads, size, _ = codes.shape
    sheet = np.pad(codes, ((0, 0), (0, 0), (0, 1), (0, 1)), constant_values=0)
    sheet = sheet.transpose(0, 2, 1, 3).reshape(layers * (size + 1), heads * (size + 1))
    cell = max(6.0, min(60.0, (WIDTH - LEFT) / heads, 640 / layers))
    canvas = Canvas(WIDTH, int(TOP + layers * cell + 8), f"Attention of {layers} layers, {heads} heads each")
    table = colours(where, signed=False, top=1.0)
    canvas.parts.append(_image(sheet, table, LEFT, TOP, heads * cell, layers * cell))
    every = max(1, math.ceil(16 / cell))
    for i in range(0, heads, every):
        words = f"{'head ' if not i and cell > 40 else ''}{source.heads[i]}"
        canvas.text(LEFT + (i + 0.5) * cell - cell / size / 2, TOP - 6, words, anchor="middle", cls="axis")
    for i in range(0, layers, every):
        canvas.text(LEFT - 6, TOP + (i + 0.5) * cell + 4, str(source.layers[i]), anchor="end", cls="axis")
    canvas.text(2, TOP - 6, "layer", cls="axis")
    return _classed(canvas)


def _one_head(view: Attention) -> str:
    source, where = view._source, view._where
    layer, head = view._head_at()
    pairs: list[tuple[str, int, int | None]] = [("", where.sample, None)]
    if where.compare is not None:
        pairs = [("A: ", where.sample, None), ("B: ", where.compare, None)]
        pairs += [("A − B", where.sample, where.compare)] if view._alike else []
    drawn = [columns(source, s, layer, head, compare=c, pool=where.pool, most=MOST_CELLS) for _, s, c in pairs]
    top = max(d.largest for d in drawn) if where.fit else 1.0
    side = min(460.0, WIDTH / len(drawn) - LABEL - 12)
    canvas = Canvas(WIDTH, int(LABEL + side + 34), f"Attention of layer {layer}, head {head}")
    for i, ((name, sample, compare), cells) in enumerate(zip(pairs, drawn, strict=True)):
        x = i * (LABEL + side + 12) + LABEL
        said = name if compare is not None else f"{name}{sample_label(source.samples, sample)}"
        canvas.text(x, LABEL + side + 36 - 10, said[:60])
        table = colours(where, signed=compare is not None, top=top or 1.0)
        canvas.parts.append(_image(cells.codes, table, x, LABEL, side, side))
        _labels(canvas, shown_all(source.tokens(sample).texts), cells, x, side)
    return _classed(canvas)


def _labels(canvas: Canvas, texts: list[str], cells: Cells, x: float, side: float) -> None:
    """Write the tokens along both sides, as many as have room."""
    for vertical, edges in ((False, cells.queries), (True, cells.keys)):
        first, last = int(edges[0]), int(edges[-1])
        each = side / (last - first)
        for i in range(first, last, max(1, math.ceil(LEAST_LABEL / each))):
            along = (i - first + 0.5) * each
            text = texts[i] if len(texts[i]) <= 12 else texts[i][:11] + "…"
            if vertical:
                at = f"translate({x + along + 4:.1f},{LABEL - 5}) rotate(-90)"
                canvas.parts.append(f'<text transform="{at}" class="axis">{html.escape(text)}</text>')
            else:
                canvas.text(x - 5, LABEL + along + 4, text, anchor="end", cls="axis")


def _table(view: Attention) -> str:
    """Return the largest weights, or the head that does most of each thing, as an HTML table."""
    where = view._where
    frame = view.selected
    if where.layer is None:
        scores = [c for c in frame.columns if c not in ("layer", "head")]
        rows = []
        for name in scores:
            if frame[name].notna().any():
                at = int(frame[name].argmin() if name == "entropy" else frame[name].argmax())
                best = frame.iloc[at]
                words = f"{name.replace('_', ' ')}{', least' if name == 'entropy' else ''}"
                rows.append([words, f"layer {int(best['layer'])}, head {int(best['head'])}", f"{best[name]:.3g}"])
        return _html_table(["score", "most in", "value"], rows) if rows else ""
    top = frame.sort_values("attention", ascending=False, kind="stable").head(MOST_ROWS)
    weights = [c for c in ("attention", "attention_b", "difference") if c in top]
    rows = [
        [
            r["query_token"],
            str(r["query"]),
            r["key_token"],
            str(r["key"]),
            *(f"{r[c]:.3f}".replace("-", "−") for c in weights),
        ]
        for r in top.to_dict("records")
    ]
    more = ["B", "A − B"] if "difference" in top else []
    return _html_table(["query", "", "key", "", "attention", *more], rows)


def _html_table(head: list[str], rows: list[list[str]]) -> str:
    names = "".join(f'<th scope="col">{html.escape(h)}</th>' if h else "<td></td>" for h in head)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(c)}</td>" for c in row) + "</tr>" for row in rows)
    return f'<table class="mappnb-attn-list"><thead><tr>{names}</tr></thead><tbody>{body}</tbody></table>'


def caption(view: Attention) -> str:
    """Return what the picture shows, in words."""
    where = view._where
    num = len(view._source.tokens(where.sample))
    which = "every head" if where.layer is None else f"layer {where.layer}, head {where.head}"
    return f"Attention of {which}, {num} tokens: queries downwards, keys to the right; {where.scale} scale."


def snapshot(view: Attention) -> PictureSnapshot:
    """Return the view as a picture that stays in the notebook."""
    return PictureSnapshot(svg(view), _table(view), view.code, view.describe(), html.escape(caption(view)), STYLE, FONT)


def twin(view: Attention) -> str:
    """Return the picture as an HTML fragment."""
    words = html.escape(f"{view.describe()}, as it was saved. {caption(view)}")
    source, where = view._source, view._where
    num = len(source.tokens(where.sample))
    if where.layer is None and len(source.layers) * len(source.heads) * num * min(num, THUMB_QUERIES) > MOST_WORK:
        return f'{STYLE}<p style="{FONT}">{words} No picture was saved: view.snapshot() makes one.</p>'
    return f'{STYLE}<figure style="margin:0">{svg(view)}<figcaption style="{FONT}">{words}</figcaption></figure>'
