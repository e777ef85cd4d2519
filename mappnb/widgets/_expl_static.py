"""The explain view as a picture: tokens, the waterfall of direct effects, the largest rows as bars; and their numbers as a table."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING, Any

import numpy as np

from mappnb.palette import DIVERGING
from mappnb.svg import Canvas, ticks
from mappnb.widgets._attn_tokens import shown, shown_all
from mappnb.widgets._expl_levels import component_name, digits_for, key_of, waterfall
from mappnb.widgets._expl_where import BY
from mappnb.widgets._ramp import between
from mappnb.widgets._static_view import PictureSnapshot

if TYPE_CHECKING:
    from mappnb.widgets.explain import Explain

__all__ = ["snapshot", "svg", "twin"]

WIDTH, LEFT = 900, 52
MOST_BARS = 15
MOST_TOKENS = 200
FALL = 170
"""Height of the waterfall."""
FOR, AGAINST, REST = DIVERGING["light"][5], DIVERGING["light"][1], "#8a8a8a"
FONT = "font:12px system-ui,sans-serif"
STYLE = (
    "<style>.mappnb-still-expl text{font:11px system-ui,sans-serif;fill:var(--jp-ui-font-color1,currentColor)}"
    ".mappnb-still-expl .axis{fill:var(--jp-ui-font-color2,currentColor)}"
    ".mappnb-still-expl text.on{font-family:ui-monospace,monospace;fill:#000}"
    ".mappnb-still-expl text.in{font-family:ui-monospace,monospace;fill:#fff}"
    ".mappnb-still-expl line{stroke:var(--jp-border-color2,#999);stroke-width:1}"
    ".mappnb-expl-list{border-collapse:collapse;font:12px system-ui,sans-serif}"
    ".mappnb-expl-list :is(th,td){padding:2px 14px 2px 0;text-align:left}"
    "[data-mappnb-twin]{animation:mappnb-late 0s 1.5s both}@keyframes mappnb-late{from{display:none}to{display:block}}</style>"
)


def _signed(value: float, digits: int | None = None) -> str:
    if not np.isfinite(value):
        return "–"
    if value == 0:
        return "0"
    return f"{value:+.3g}".replace("-", "−") if digits is None else f"{value:+.{digits}f}".replace("-", "−")


def _measures(view: Explain, rows: Any) -> list[str]:
    """Return what has a column; real ablations only beside their predictions, which an upstream table does not hold."""
    known = [*view._level.measures[::-1], *(["ablation"] if not view._level.path else [])]
    return [name for name in known if name in rows]


def _luminance(rgb: list[float]) -> float:
    """Return the relative luminance (WCAG 2); below 0.179 white reads better on it than black."""
    linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in (c / 255 for c in rgb)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _colour(value: float) -> str:
    return AGAINST if value < 0 else FOR


def svg(view: Explain) -> str:
    """Return the view as an SVG element."""
    rows = view.rows.iloc[:MOST_BARS]
    strip = _strip(view)
    height = strip.height + (FALL + 44 if view._level.path == () else 0) + 34 + 20 * len(rows)
    canvas = Canvas(WIDTH, height, view.describe())
    canvas.parts = strip.parts
    y = float(strip.height)
    if view._level.path == ():
        y = _fall(canvas, view, y)
    _bars(canvas, view, rows, y)
    return canvas.render().replace("<svg ", f'<svg class="mappnb-still-expl" style="max-width:{WIDTH}px" ', 1)


def _strip(view: Explain) -> Canvas:
    """Draw the tokens, coloured by their sums over the chosen component; neurons are left out where their MLPs are in."""
    texts = shown_all(view.explanation.activations["token_text"].values[0])
    first, level, where = max(0, len(texts) - MOST_TOKENS), view._level, view._where
    parts = [name != "neuron" if where.component == "all" else name == where.component for name in level.components]
    sums = view.columns[f"strip_{where.by}"][np.array(parts, bool)].sum(0, dtype=np.float64)
    top = float(np.abs(sums).max(initial=0.0)) or 1.0
    canvas, x, y = Canvas(WIDTH, 0, ""), 0.0, 2.0
    stops = DIVERGING["light"]
    for at in range(first, len(texts)):
        text = texts[at] if len(texts[at]) <= 16 else texts[at][:15] + "…"
        wide = 10 + 6.8 * len(text)
        if x + wide > WIDTH:
            x, y = 0.0, y + 23
        share = 0.5 + np.sign(sums[at]) * np.sqrt(abs(sums[at]) / top) / 2
        rgb = between(stops, share * (len(stops) - 1)).tolist()
        fill = "#" + "".join(f"{round(v):02x}" for v in rgb)
        dark = _luminance(rgb) < 0.179
        canvas.rect(x, y, wide, 20, fill=fill, tip=f"{text} ({at}): {_signed(float(sums[at]))}", extra=' stroke="#999"')
        canvas.text(x + 5, y + 14, text, cls="in" if dark else "on")
        x += wide + 2
    canvas.height = int(y + 34)
    return canvas


def _fall(canvas: Canvas, view: Explain, top: float) -> float:
    """Draw how direct effects add up; return where the next part begins."""
    found = view.explanation
    steps = waterfall(found.table, found.unexplained)
    ends = np.concatenate([[0.0], np.cumsum([s.value for s in steps])])
    low, high = float(ends.min()), float(ends.max())
    pad = ((high - low) or 1.0) * 0.06
    each = (WIDTH - LEFT - 8) / (len(steps) + 1)

    def at(value: float) -> float:
        return top + 16 + (high + pad - value) / (high - low + 2 * pad) * (FALL - 16)

    canvas.text(
        0, top + 8, f"Direct effects add up to {_signed(found.metric)}; unexplained {_signed(found.unexplained)}"
    )
    for tick in ticks(low, high, 4):
        canvas.line(LEFT, at(tick), WIDTH - 8, at(tick))
        canvas.text(LEFT - 5, at(tick) + 4, f"{tick:g}".replace("-", "−"), anchor="end", cls="axis")
    named, free = "", -np.inf
    bars = [
        (s.name, a, b, _colour(s.value) if s.component else REST)
        for s, a, b in zip(steps, ends, ends[1:], strict=False)
    ]
    for i, (name, a, b, fill) in enumerate([*bars, ("sum", 0.0, found.metric, "#57606a")]):
        x, y = LEFT + i * each, min(at(float(a)), at(float(b)))
        tip = f"{name}: {_signed(float(b - a))}, then {_signed(float(b))}"
        canvas.rect(x + 1, y, each - 2, max(abs(at(float(a)) - at(float(b))), 1), fill=fill, tip=tip)
        short = {"embedding": "emb", "unexplained": "rest"}.get(name, name.split(" ")[0])
        if short != named and x >= free:
            canvas.text(x + 1, top + FALL + 16, short, cls="axis")
            free = x + 7.5 * len(short)
        named = short
    return top + FALL + 44


def _bars(canvas: Canvas, view: Explain, rows: Any, top: float) -> None:
    """Draw the largest rows, a column of bars for each measure."""
    measures = _measures(view, rows)
    size = float(np.nan_to_num(np.abs(rows[measures].to_numpy(np.float64))).max(initial=0.0)) or 1.0
    digits = digits_for(size)
    wide = (WIDTH - 230) / len(measures)
    names = {**BY, "ablation": "real ablation"}
    for k, name in enumerate(measures):
        middle = 230 + wide * (k + 0.5) - 30
        canvas.text(middle, top + 10, names[name], anchor="middle")
        canvas.line(middle, top + 16, middle, top + 18 + 20 * len(rows))
        for i, value in enumerate(rows[name].to_numpy(np.float64)):
            y, length = top + 20 + 20 * i, abs(np.nan_to_num(value)) / size * (wide / 2 - 36)
            if length:
                canvas.rect(middle - (length if value < 0 else 0), y, length, 14, fill=_colour(value))
            canvas.text(
                230 + wide * (k + 1) - 4,
                y + 11,
                _signed(value, digits) if np.isfinite(value) else "",
                anchor="end",
                cls="axis",
            )
    for i, (_, row) in enumerate(rows.iterrows()):
        canvas.text(0, top + 31 + 20 * i, component_name(*key_of(row)[:3]))
        canvas.text(120, top + 31 + 20 * i, f"“{shown(row['token'], most=9)}” {int(row['position'])}", cls="axis")


def _table(view: Explain) -> str:
    rows = view.rows.iloc[:MOST_BARS]
    measures = _measures(view, rows)
    digits = digits_for(float(np.nan_to_num(np.abs(rows[measures].to_numpy(np.float64))).max(initial=0.0)))
    head = ["component", "token", "position", *(name.replace("_", " ") for name in measures)]
    cells = [
        [
            *(component_name(*key_of(row)[:3]), shown(row["token"]), str(row["position"])),
            *(_signed(float(row[name]), digits) for name in measures),
        ]
        for _, row in rows.iterrows()
    ]
    names = "".join(f'<th scope="col">{html.escape(h)}</th>' for h in head)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(c)}</td>" for c in row) + "</tr>" for row in cells)
    return f'<table class="mappnb-expl-list"><thead><tr>{names}</tr></thead><tbody>{body}</tbody></table>'


def caption(view: Explain) -> str:
    """Return what the picture shows, in words."""
    said = f"{min(MOST_BARS, len(view.rows))} of {len(view.rows)} rows, by {BY[view._where.by]}"
    if view._level.path:
        said = f"{view._level.title}: shares in its own effect on the metric. {said}"
    if view._check is not None:
        said += f". Attribution against {len(view._check)} real ablations: correlation {view._check.attrs['correlation']:.2f}"
    long = len(view.explanation.tokens) > MOST_TOKENS
    said += f". The last {MOST_TOKENS} tokens of {len(view.explanation.tokens)}" if long else ""
    return f"{said}. Orange: for the token; blue: against it."


def snapshot(view: Explain) -> PictureSnapshot:
    """Return the view as a picture that stays in the notebook."""
    return PictureSnapshot(svg(view), _table(view), view.code, view.describe(), html.escape(caption(view)), STYLE, FONT)


def twin(view: Explain) -> str:
    """Return the picture as an HTML fragment."""
    words = html.escape(f"{view.describe()}, as it was saved. {caption(view)}")
    return f'{STYLE}<figure style="margin:0">{svg(view)}<figcaption style="{FONT}">{words}</figcaption></figure>'
