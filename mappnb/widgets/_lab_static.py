"""The schedule lab without a kernel: a picture with its numbers, and one page with timelines and plots that need nothing else."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING, Any

import numpy as np

from mappnb.svg import Canvas, ticks
from mappnb.widgets._lab_answers import pack_columns, table_columns, table_rows
from mappnb.widgets._lab_controls import Units
from mappnb.widgets._lab_lanes import CLASSES, Lane
from mappnb.widgets._lab_model import LabModel
from mappnb.widgets._lab_plots import columns, figures, memory_columns
from mappnb.widgets._messages import with_arrays
from mappnb.widgets._plot_view import bokeh_told
from mappnb.widgets._png import data_uri, palette_png
from mappnb.widgets._ramp import palette_of
from mappnb.widgets._static_view import PictureSnapshot, page_html

if TYPE_CHECKING:
    from mappnb.widgets.schedule_lab import ScheduleLab

__all__ = ["page", "picture", "snapshot", "table_html", "twin"]

Array = np.ndarray[Any, Any]
WIDTH, GUTTER, HEAD, BOTTOM = 1000, 58, 20, 24
MOST_RANKS = 64
FONT = "font:12px system-ui,sans-serif"
STYLE = (
    "<style>.mappnb-still-lab text{font:11px system-ui,sans-serif;fill:var(--jp-ui-font-color1,currentColor)}"
    ".mappnb-still-lab .axis{fill:var(--jp-ui-font-color2,currentColor)}"
    ".mappnb-still-lab line{stroke:var(--jp-border-color2,#bbb);stroke-width:.5}"
    ".mappnb-lab-numbers{border-collapse:collapse;font:12px system-ui,sans-serif}"
    ".mappnb-lab-numbers :is(th,td){padding:2px 12px 2px 0;text-align:left}"
    "[data-mappnb-twin]{animation:mappnb-late 0s 1.5s both}@keyframes mappnb-late{from{display:none}to{display:block}}</style>"
)


def picture(model: LabModel, lanes: list[Lane], units: Units, *, width: int = WIDTH) -> str:
    """Return the timelines on their common axis as an SVG element."""
    row = [max(3, min(12, 120 // max(v.num_ranks, 1))) for v in lanes]
    heights = [
        HEAD + (min(v.num_ranks, MOST_RANKS) * r if v.num_ranks else 14) + 8 for v, r in zip(lanes, row, strict=True)
    ]
    canvas = Canvas(width, sum(heights) + BOTTOM, "Pipeline schedules on a common time axis")
    longest = max(model.longest_s, 1e-12)
    plot = width - GUTTER - 10
    bottom = sum(heights)
    for tick in ticks(0.0, longest * units.time_scale, 8):
        x = GUTTER + tick / (longest * units.time_scale) * plot
        canvas.line(x, 4, x, bottom + 4)
        canvas.text(x, bottom + 17, f"{tick:g}", anchor="middle", cls="axis")
    canvas.text(GUTTER - 8, bottom + 17, units.time, anchor="end", cls="axis")
    y = 0
    for lane, size, height in zip(lanes, row, heights, strict=True):
        canvas.text(4, y + 13, _heading(model, lane, units))
        if lane.num_ranks:
            canvas.parts.append(_raster(lane, longest, plot, size, y + HEAD))
            every = max(1, -(-11 // size))
            for r in range(0, min(lane.num_ranks, MOST_RANKS), every):
                canvas.text(GUTTER - 6, y + HEAD + r * size + size / 2 + 4, str(r), anchor="end", cls="axis")
        y += height
    return canvas.render().replace("<svg ", '<svg class="mappnb-still-lab" ', 1)


def _heading(model: LabModel, lane: Lane, units: Units) -> str:
    outcome = model.find(lane.label)
    if outcome is None or outcome.numbers is None:
        said = lane.why.splitlines()[0][:120] if lane.why else f"{lane.end / 1e9 * units.time_scale:.4g} {units.time}"
    else:
        said = f"{outcome.numbers.step_s * units.time_scale:.4g} {units.time}, bubble {outcome.numbers.bubble_fraction:.1%}"
        said += f"; {outcome.why.splitlines()[0][:110]}" if outcome.why else ""
    return f"{lane.label}: {said}"


def _raster(lane: Lane, longest_s: float, plot: int, size: int, top: int) -> str:
    """Return the rows of a lane as an embedded PNG, one pixel line per rank, stretched."""
    pixels = 2 * plot
    window = lane.index.query(
        0,
        max(int(longest_s * 1e9), 1),
        pixels=pixels,
        rows=np.arange(min(lane.num_ranks, MOST_RANKS)),
        max_spans=40_000,
    )
    out = np.zeros((window.num_rows, pixels), np.uint8)
    if window.grid is not None:
        there = window.grid.category != 255
        out[there] = window.grid.category[there] + 1
    scale = pixels / (window.t1_ns - window.t0_ns)
    spans = window.spans
    left = np.clip((spans.start_ns * scale).astype(np.int64), 0, pixels - 1)
    right = np.clip(((spans.start_ns + spans.duration_ns) * scale).astype(np.int64), left + 1, pixels)
    for r, a, b, kind in zip(spans.row.tolist(), left.tolist(), right.tolist(), spans.category.tolist(), strict=True):
        out[r, a:b] = kind + 1
        if b - a > 5:
            out[r, b - 1] = 0
    lines = np.zeros((window.num_rows * size, pixels), np.uint8)
    for k in range(size - 1 if size > 3 else size):
        lines[k::size] = out
    uri = data_uri(palette_png(lines, palette_of([c[1] for c in CLASSES])))
    return (
        f'<image x="{GUTTER}" y="{top}" width="{plot}" height="{window.num_rows * size}" preserveAspectRatio="none" '
        f'style="image-rendering:pixelated" href="{uri}"/>'
    )


def table_html(model: LabModel, units: Units) -> str:
    """Return the numbers as an HTML table."""
    rows = table_rows(model, units)
    whys = any(row["why"] for row in rows)
    heads = [*table_columns(units), *(["why"] if whys else [])]
    head = "".join(f'<th scope="col">{html.escape(c)}</th>' for c in heads)
    cells = [[*row["cells"], *([row["why"].split("\n\n")[0]] if whys else [])] for row in rows]
    body = "".join(f"<tr>{''.join(f'<td>{html.escape(t)}</td>' for t in row)}</tr>" for row in cells)
    return f'<table class="mappnb-lab-numbers"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'


def _key(lanes: list[Lane]) -> str:
    used = sorted({int(k) for v in lanes for k in np.unique(v.kind)})
    return "".join(
        f'<span style="display:inline-block;margin-right:12px"><span style="display:inline-block;width:10px;height:10px;'
        f'background:{CLASSES[k][1]};margin-right:4px"></span>{html.escape(CLASSES[k][0])}</span>'
        for k in used
    )


def twin(model: LabModel, lanes: list[Lane], units: Units, said: str) -> str:
    """Return picture and numbers as an HTML fragment."""
    replay = f"<p>{html.escape(model.replay.says())}</p>" if model.replay is not None else ""
    caption = f'<figcaption style="font:12px system-ui,sans-serif">{html.escape(said)}, as it was saved<br>'
    caption += f"{_key(lanes)}{replay}</figcaption>"
    return f'{STYLE}<figure style="margin:0">{picture(model, lanes, units)}{caption}</figure>{table_html(model, units)}'


def snapshot(model: LabModel, lanes: list[Lane], units: Units, *, code: str, said: str) -> PictureSnapshot:
    """Return a picture of the lab as it is: its timelines, its numbers as a table, and the key of its colours."""
    return PictureSnapshot(picture(model, lanes, units), table_html(model, units), code, said, _key(lanes), STYLE, FONT)


# --------------------------------------------------------------------------------------------------------------- page
def page(lab: ScheduleLab, model: LabModel, lanes: list[Lane], units: Units) -> str:
    """Return one self-contained HTML page: timelines that pan and zoom by themselves, the plots, the numbers."""
    from mappnb.widgets.schedule_lab import ScheduleLab

    state = lab.state(whole=True)
    content, _ = with_arrays(dict(state.content), state.arrays, binary=False)
    scales = {"time_scale": units.time_scale, "memory_scale": units.memory_scale}
    data = columns(model, lab.selected, **scales)
    made = {t: figures(data, theme=t, time_unit=units.time, memory_unit=units.memory) for t in ("light", "dark")}
    whole = {
        "state": content,
        "lanes": {lane.label: _lane_data(lane, model) for lane in lanes},
        "memory": {o.entry.label: _memory_of(model, o.entry.label, scales) for o in model.outcomes},
        "figures": made,
        "bokeh": bokeh_told(),
        "code": lab.code,
    }
    parts = ("static_kernel.js", "static_answers.js", "lab_static.js")
    return page_html(lab.describe(), ScheduleLab, whole, parts=parts, model="StaticLab", render="renderLab")


def _memory_of(model: LabModel, label: str, scales: dict[str, float]) -> dict[str, Any]:
    told, arrays = pack_columns({"memory": memory_columns(model, label, **scales)})
    return with_arrays({"kind": "pick", "selected": label, "plots": told}, arrays, binary=False)[0]


def _lane_data(lane: Lane, model: LabModel) -> dict[str, Any]:
    """Return a lane as the static kernel of the timelines takes it."""
    every = np.arange(len(lane.rank))
    arrays = {
        "row": lane.rank.astype("<u4"),
        "x": lane.start_ns.astype("<f8"),
        "w": (lane.end_ns - lane.start_ns).astype("<f8"),
        "cat": lane.kind.astype("u1"),
        "label": every.astype("<u4"),
    }
    told = {"meta": {"kind": "meta", **lane.meta(model.longest_s * 1e9)}, "labels": lane.words(every)}
    return with_arrays(told, arrays, binary=False)[0]
