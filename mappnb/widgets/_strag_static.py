"""The stragglers view without a kernel: a picture with the verdicts, and one page with heatmaps and evidence that needs nothing else."""

from __future__ import annotations

import html
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from mappnb.svg import Canvas
from mappnb.widgets import _strag_answers as told
from mappnb.widgets import _strag_plots as plots
from mappnb.widgets._plot_view import bokeh_told
from mappnb.widgets._png import data_uri, palette_png
from mappnb.widgets._ramp import levels_of, palette_of
from mappnb.widgets._static_view import PictureSnapshot, answer_key, page_html
from mappnb.widgets._strag_data import StragglerData, subject_ranks
from mappnb.widgets._strag_evidence import value_text
from mappnb.widgets._strag_levels import Picture, picture
from mappnb.widgets._strag_picked import Picked
from mappnb.widgets._strag_where import Where

if TYPE_CHECKING:
    from mappnb.widgets.stragglers import Stragglers

__all__ = ["page", "snapshot", "svg", "table_html", "twin"]

Array = np.ndarray[Any, Any]
WIDTH, RIGHT, TOP, BOTTOM = 900, 26, 6, 52
FONT = "font:12px system-ui,sans-serif"
MOST_ROWS = 20
"""Verdicts in the table of a picture."""
MOST_VICTIMS = 5
"""Of these victims."""
MOST_METRICS = 6
"""Heatmaps of a page whose cells are many."""
MANY_CELLS = 5_000
MOST_PICKS = 20
"""Verdicts of a page with their evidence."""
STYLE = (
    "<style>.mappnb-still-strag text{font:11px system-ui,sans-serif;fill:var(--jp-ui-font-color1,currentColor)}"
    ".mappnb-still-strag .axis{fill:var(--jp-ui-font-color2,currentColor)}"
    ".mappnb-still-strag line{stroke:var(--jp-border-color2,#999);stroke-width:1}"
    ".mappnb-strag-list{border-collapse:collapse;font:12px system-ui,sans-serif}"
    ".mappnb-strag-list :is(th,td){padding:2px 12px 2px 0;text-align:left;vertical-align:top}"
    ".mappnb-strag-list :is(th,td):not(:last-child){white-space:nowrap}"
    "[data-mappnb-twin]{animation:mappnb-late 0s 1.5s both}@keyframes mappnb-late{from{display:none}to{display:block}}</style>"
)


def svg(data: StragglerData, drawn: Picture | None) -> str:
    """Return what is drawn as an SVG element; bars of operations and an empty run as text."""
    if drawn is None or drawn.grid is None:
        said = data.why or (drawn.caption if drawn is not None else "nothing to judge")
        canvas = Canvas(WIDTH, 40, said)
        canvas.text(4, 24, said[:140])
        return _classed(canvas)
    grid = drawn.grid
    rows, cols = grid.values.shape
    size = max(2.0, min(16.0, 320.0 / max(rows, 1)))
    groups = grid.groups
    left = (
        12
        + 7 * max((len(r.label[:24]) for r in grid.rows), default=0)
        + (7 * max(len(g[0]) for g in groups) + 10 if groups else 0)
    )
    left = min(left, 280)
    plot, height = WIDTH - left - RIGHT, rows * size
    canvas = Canvas(WIDTH, int(TOP + height + BOTTOM), f"{drawn.label}, ranks by step")
    canvas.parts.append(_pattern())
    canvas.parts.append(f'<rect x="{left}" y="{TOP}" width="{plot}" height="{height:.1f}" fill="url(#mappnb-none)"/>')
    canvas.parts.append(_raster(drawn, left, plot, height))
    every = max(1, int(np.ceil(12 / size)))
    for i in range(0, rows, every):
        canvas.text(left - 5, TOP + (i + 0.5) * size + 4, grid.rows[i].label[:24], anchor="end", cls="axis")
    for k, (label, first, n) in enumerate(groups):
        canvas.text(4, TOP + (first + n / 2) * size + 4, label[:20])
        if k:
            canvas.line(left, TOP + first * size, left + plot, TOP + first * size)
    for c in range(0, cols, max(1, -(-cols // 12))):
        canvas.text(
            left + (c + 0.5) * plot / cols, TOP + height + 14, str(grid.columns[c][0]), anchor="middle", cls="axis"
        )
    canvas.text(left - 5, TOP + height + 14, "step", anchor="end", cls="axis")
    _marks(canvas, data, drawn, left + plot + 4, size)
    _scale(canvas, drawn, left, TOP + height + 24)
    return _classed(canvas)


def _classed(canvas: Canvas) -> str:
    return canvas.render().replace("<svg ", '<svg class="mappnb-still-strag" ', 1)


def _pattern() -> str:
    return (
        '<defs><pattern id="mappnb-none" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        '<rect width="6" height="6" fill="#8a8a8a" fill-opacity=".15"/><rect width="1" height="6" fill="#8a8a8a"/></pattern></defs>'
    )


def _raster(drawn: Picture, left: float, plot: float, height: float) -> str:
    """Return the cells as an embedded PNG of a pixel each, stretched; missing ones are transparent."""
    values = drawn.grid.values if drawn.grid is not None else np.zeros((0, 0))
    levels = levels_of(values, drawn.low, drawn.high, colours=plots.COLOURS)
    uri = data_uri(palette_png(levels, palette_of(plots.palette(drawn.scale, "light"))))
    return (
        f'<image x="{left}" y="{TOP}" width="{plot}" height="{height:.1f}" preserveAspectRatio="none" '
        f'style="image-rendering:pixelated" href="{uri}"/>'
    )


def _marks(canvas: Canvas, data: StragglerData, drawn: Picture, x: float, size: float) -> None:
    """Draw a triangle at the edge of each row with a culprit."""
    if drawn.grid is None or drawn.where.level == "rank" or not data.verdicts_soon:
        return
    frame = data.verdicts
    guilty: set[int] = set()
    for kind, subject, verdict in zip(frame["subject_kind"], frame["subject"], frame["verdict"], strict=True):
        if verdict == "culprit" and kind in told.MARKED:
            guilty |= set(subject_ranks(str(kind), str(subject), data.m))
    for i, row in enumerate(drawn.grid.rows):
        if guilty & set(row.ranks):
            y = TOP + (i + 0.5) * size
            canvas.parts.append(
                f'<polygon points="{x:.1f},{y:.1f} {x + 9:.1f},{y - 5:.1f} {x + 9:.1f},{y + 5:.1f}" fill="#b3261e"/>'
            )


def _scale(canvas: Canvas, drawn: Picture, x: float, y: float) -> None:
    """Draw the colours with their ends."""
    table = palette_of(plots.palette(drawn.scale, "light"))
    strip = data_uri(palette_png(np.arange(1, plots.COLOURS + 1, dtype=np.uint8)[None, :], table))
    ends = [value_text(v, drawn.scale) for v in (drawn.low, drawn.high)]
    canvas.text(x, y + 10, ends[0], cls="axis")
    start = x + 8 + 7 * len(ends[0])
    canvas.parts.append(
        f'<image x="{start:.0f}" y="{y}" width="150" height="11" preserveAspectRatio="none" href="{strip}"/>'
    )
    canvas.text(start + 158, y + 10, f"{ends[1]}   {drawn.label}", cls="axis")


def table_html(data: StragglerData) -> str:
    """Return the verdicts as an HTML table; of a large run only if they are known."""
    if not data.verdicts_soon:
        return f'<p style="{FONT};margin:4px 0">Verdicts: view.verdicts, then view.snapshot().</p>'
    found = told.verdicts_told(data)
    victims = [row["index"] for row in found["rows"] if row["verdict"] == "victim"][MOST_VICTIMS:]
    rows = [row for row in found["rows"] if row["index"] not in victims][:MOST_ROWS]
    out = ""
    if rows:
        head = "".join(f'<th scope="col">{html.escape(c)}</th>' for c in found["columns"])
        body = "".join(f"<tr>{''.join(f'<td>{html.escape(t)}</td>' for t in row['cells'])}</tr>" for row in rows)
        out = f'<table class="mappnb-strag-list"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
    more = len(found["rows"]) + found["left"] - len(rows)
    clear = f"{found['clear']} ranks are clear" if found["clear"] else ""
    said = [f"{more} more are in view.verdicts" if more else "", clear, *found["notes"]]
    line = ". ".join(s for s in said if s)
    return out + (f'<p style="{FONT};margin:4px 0">{html.escape(line)}.</p>' if line else "")


def twin(data: StragglerData, drawn: Picture | None, said: str) -> str:
    """Return picture and verdicts as an HTML fragment."""
    caption = f"{drawn.caption} " if drawn is not None else ""
    words = f'<figcaption style="{FONT}">{html.escape(said)}, as it was saved. {html.escape(caption)}</figcaption>'
    return (
        f'{STYLE}<figure style="margin:0">{svg(data, drawn)}{words}</figure>{table_html(data) if not data.why else ""}'
    )


def snapshot(data: StragglerData, drawn: Picture | None, *, code: str, said: str) -> PictureSnapshot:
    """Return a picture of the view as it is: the heatmap, the verdicts as a table, and what a cell is."""
    data.verdicts  # noqa: B018  (asked for: here they may take their time)
    table = table_html(data) if not data.why else ""
    caption = html.escape(drawn.caption if drawn is not None else data.why)
    return PictureSnapshot(svg(data, drawn), table, code, said, caption, STYLE, FONT)


# --------------------------------------------------------------------------------------------------------------- page
def page(view: Stragglers) -> str:
    """Return one self-contained HTML page: a heatmap per metric, verdicts with their evidence, the culprits' parts, prices if known."""
    data, state = view._data, view._state()
    state["live"] = False
    answers: dict[str, Any] = {}
    if not data.why:
        answers = dict(_answers(view))
        state["where"] = _top(view).told()
        known = _metrics(view)
        state["options"] |= {k: [] for k in ("order", "rows", "cell", "against")}
        state["options"]["metric"] = [m for m in state["options"]["metric"] if m[0] in known]
        state["picked"] = Picked().told()
    whole = {
        "state": state,
        "answers": answers,
        "bokeh": bokeh_told(),
        "code": view.code,
    }
    from mappnb.widgets.stragglers import Stragglers

    parts = ("static_answers.js", "stragglers_static.js")
    return page_html(
        view.describe(), Stragglers, whole, parts=parts, model="StaticStragglers", render="renderStragglers"
    )


def _top(view: Stragglers) -> Where:
    return replace(view._where, host=None, rank=None, step=None)


def _metrics(view: Stragglers) -> list[str]:
    known = list(view._data.m.metrics)
    drawn = picture(view._data, _top(view))
    many = drawn.grid is not None and drawn.grid.values.size > MANY_CELLS
    first = list(dict.fromkeys([view._where.metric, *known]))
    return first[:MOST_METRICS] if many else known


def _answers(view: Stragglers) -> Iterator[tuple[str, Any]]:
    """Yield what the page can be asked for, with the answers."""
    data, top = view._data, _top(view)
    verdicts = told.verdicts_told(data)
    yield "verdicts {}", verdicts
    places = [replace(top, metric=m) for m in _metrics(view)]
    picks: list[tuple[dict[str, Any], list[int], tuple[int, int] | None, int | None]] = []
    for row in verdicts["rows"][:MOST_PICKS]:
        picked = view._of_verdict(row["index"])
        at = [data.m.index(r) for r in picked.ranks]
        picks.append((Picked(verdict=row["index"]).told(), at, picked.steps, row["index"]))
        if len(at) == 1 and row["verdict"] == "culprit":
            places += [replace(top, metric=m, rank=picked.ranks[0]) for m in _metrics(view)]
            picks.append((Picked(picked.ranks).told(), at, None, None))
    for body, at, steps, verdict in picks:
        yield answer_key("pick", body), told.evidence_told(data, at, steps, verdict)
    shown: dict[str, dict[str, Any]] = {}
    for theme in ("light", "dark"):
        look = {"theme": theme, "ground": ""}
        for place in places:
            key = json.dumps([replace(place, metric="ratio" if place.rank is not None else place.metric).told(), theme])
            if key not in shown:  # parts of a rank do not depend on the metric
                shown[key] = told.picture_told(data, picture(data, place), **look)
            yield answer_key("heat", {"where": place.told(), "theme": theme}), {**shown[key], "where": place.told()}
        for by in data.groupings if "prices" in data.__dict__ else ():
            answer = told.price_told(data, by, **look)
            yield answer_key("prices", {"by": by, "theme": theme}), answer
            if by == data.groupings[0]:
                yield answer_key("prices", {"by": "", "theme": theme}), answer
