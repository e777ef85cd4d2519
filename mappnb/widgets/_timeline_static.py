"""A timeline without a kernel: a picture of one window, and a page that pans and zooms by itself."""

from __future__ import annotations

import html
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mappnb.pyramid import NOTHING, Window
from mappnb.svg import ticks
from mappnb.widgets._messages import with_arrays
from mappnb.widgets._png import data_uri, palette_png
from mappnb.widgets._ramp import palette_of
from mappnb.widgets._static_view import page_html
from mappnb.widgets._text import time_text
from mappnb.widgets._timeline_text import TABLE_COLUMNS, labels_of, table_rows
from mappnb.widgets._timeline_window import look
from mappnb.widgets.classes import CLASSES

if TYPE_CHECKING:
    from mappnb.widgets._timeline_state import Loaded, Scene

__all__ = ["Snapshot", "page", "picture", "twin"]

Array = np.ndarray[Any, Any]
WIDTH, GUTTER, ROW, GAP, TOP, BOTTOM = 1200, 150, 11, 5, 22, 4
MOST_ROWS, MOST_LABELS, PAGE_SPANS, PAGE_CELLS = 160, 400, 40_000, 3_000_000
STYLE = (
    "<style>.mappnb-still text{font:11px system-ui,sans-serif;fill:var(--jp-ui-font-color1,currentColor)}"
    ".mappnb-still .on{fill:#fff;font-size:9px}.mappnb-still .ink{fill:#111;font-size:9px}"
    ".mappnb-still line{stroke:var(--jp-border-color2,#bbb);stroke-width:.5}"
    "[data-mappnb-twin]{animation:mappnb-late 0s 1.5s both}@keyframes mappnb-late{from{display:none}to{display:block}}</style>"
)


def _heights(scene: Scene, rows: int) -> Array:
    """Top of each display row in px; a gap before each rank."""
    first = {b.first for b in scene.rows.blocks}
    gaps = np.array([GAP if r in first else 0 for r in range(rows)])
    return TOP + np.cumsum(gaps) + np.arange(rows) * ROW


def picture(scene: Scene, visible: tuple[float, float], *, width: int = WIDTH) -> str:
    """Return one window as an SVG element: the spans as a small raster, words and axes as text."""
    rows = min(scene.num_rows, MOST_ROWS)
    if not rows:
        return ""
    loaded, window = look(scene, *visible, pixels=width - GUTTER, rows=(0, rows))
    top = _heights(scene, rows)
    height = int(top[-1]) + ROW + BOTTOM
    raster = _raster(window, top - TOP, height - TOP)
    palette = palette_of([c.light for c in CLASSES])
    parts = [
        f'<image x="{GUTTER}" y="{TOP}" width="{width - GUTTER}" height="{height - TOP}" preserveAspectRatio="none" '
        f'style="image-rendering:pixelated" href="{data_uri(palette_png(raster, palette))}"/>'
    ]
    parts += _axis(scene, visible, width, height)
    parts += [
        f'<text x="4" y="{int(top[b.first]) + 9}">{html.escape(b.label[:26])}</text>'
        for b in scene.rows.blocks
        if b.first < rows
    ]
    parts += _words(loaded, window, top, width)
    label = html.escape(scene.describe(), quote=True)
    return f'<svg class="mappnb-still" viewBox="0 0 {width} {height}" width="100%" role="img" aria-label="{label}">{"".join(parts)}</svg>'


def _raster(window: Window, top: Array, height: int) -> Array:
    """Colour index of every pixel: 0 = nothing, class + 1."""
    out = np.zeros((height, window.pixels), np.uint8)
    scale = window.pixels / (window.t1_ns - window.t0_ns)
    lines = np.zeros((window.num_rows, window.pixels), np.uint8)
    if window.grid is not None:
        there = window.grid.category != NOTHING
        lines[there] = window.grid.category[there] + 1
    spans = window.spans
    left = np.clip(((spans.start_ns - window.t0_ns) * scale).astype(np.int64), 0, window.pixels - 1)
    right = np.clip(
        ((spans.start_ns + spans.duration_ns - window.t0_ns) * scale).astype(np.int64), left + 1, window.pixels
    )
    for row, a, b, c in zip(spans.row.tolist(), left.tolist(), right.tolist(), spans.category.tolist(), strict=True):
        lines[row, a:b] = c + 1
        if b - a > 3:
            lines[row, b - 1] = 0  # neighbours stay apart
    for row in range(window.num_rows):
        out[top[row] : top[row] + ROW - 1] = lines[row]
    return out


def _axis(scene: Scene, visible: tuple[float, float], width: int, height: int) -> list[str]:
    t0, t1 = (scene.ns(t) / 1e9 for t in visible)
    out = []
    for tick in ticks(t0, t1, 8):
        x = GUTTER + (tick - t0) / max(t1 - t0, 1e-12) * (width - GUTTER)
        if GUTTER <= x <= width - 20:
            out.append(
                f'<line x1="{x:.1f}" y1="{TOP - 4}" x2="{x:.1f}" y2="{height}"/><text x="{x + 3:.1f}" y="12">{tick:.9g} s</text>'
            )
    return out


def _words(loaded: Loaded, window: Window, top: Array, width: int) -> list[str]:
    spans = window.spans
    scale = window.pixels / (window.t1_ns - window.t0_ns)
    wide = np.flatnonzero(spans.duration_ns * scale >= 34)
    wide = wide[np.argsort(-spans.duration_ns[wide], kind="stable")][:MOST_LABELS]
    if not len(wide):
        return []
    label, texts = labels_of(loaded.events, spans.event[wide])
    out = []
    for i, at in enumerate(wide.tolist()):
        left = max(0.0, (int(spans.start_ns[at]) - window.t0_ns) * scale)
        room = (
            min(float(window.pixels), (int(spans.start_ns[at] + spans.duration_ns[at]) - window.t0_ns) * scale) - left
        )
        word = texts[label[i]]
        if len(word) * 5.2 < room - 4:
            ink, y = "on" if _dark(spans.category[at]) else "ink", int(top[spans.row[at]]) + 8
            out.append(f'<text class="{ink}" x="{GUTTER + left + 3:.1f}" y="{y}">{html.escape(word)}</text>')
    return out


def _dark(kind: int) -> bool:
    """Whether white letters are read better on the colour of a class than black ones (WCAG relative luminance)."""
    channels = [int(CLASSES[kind].light[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return bool(0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2] < 0.179)


def _legend(loaded: Loaded) -> str:
    there = np.unique(loaded.classes).tolist()
    return "".join(
        f'<span style="display:inline-block;margin-right:12px"><span style="display:inline-block;width:10px;height:10px;'
        f'background:{CLASSES[c].light};margin-right:4px"></span>{html.escape(CLASSES[c].name)}</span>'
        for c in there
    )


def twin(scene: Scene, visible: tuple[float, float]) -> str:
    """Return the picture with its legend, as an HTML fragment."""
    if not scene.num_rows:
        return ""
    loaded = scene.loaded(*visible)
    t0, t1 = (scene.ns(t) / 1e9 for t in visible)
    said = html.escape(f"{scene.describe()}: {time_text(t0)} to {time_text(t1)}, as it was when the notebook was saved")
    caption = f'<figcaption style="font:12px system-ui,sans-serif">{said}<br>{_legend(loaded)}</figcaption>'
    return f'{STYLE}<figure style="margin:0">{picture(scene, visible)}{caption}</figure>'


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A picture of a timeline that stays in the notebook, with the longest span of each class.

    Attributes
    ----------
    svg : str
        The picture.
    table : list of list of str
        rank, start, duration, category, operation, name, step, microbatch of the longest span of each class.
    code : str
        The line that makes the view again.
    """

    svg: str
    table: list[list[str]]
    code: str
    text: str
    legend: str

    @classmethod
    def of(cls, scene: Scene, visible: tuple[float, float], *, code: str) -> Snapshot:
        """Take a picture of a window."""
        loaded, at = scene.events_in(*visible, 0, scene.num_rows)
        duration, kind = loaded.events["duration_ns"].values[at], loaded.classes[at]
        longest = np.array([at[kind == c][duration[kind == c].argmax()] for c in np.unique(kind).tolist()], np.int64)
        return cls(picture(scene, visible), table_rows(loaded.events, longest), code, scene.describe(), _legend(loaded))

    def __repr__(self) -> str:
        return f"Snapshot of {self.text}"

    def _repr_html_(self) -> str:
        body = "".join("<tr>" + "".join(f"<td>{html.escape(t)}</td>" for t in row) + "</tr>" for row in self.table)
        head = f"<tr>{''.join(f'<th>{h}</th>' for h in TABLE_COLUMNS)}</tr>"
        return (
            f'{STYLE}<figure style="margin:0">{self.svg}<figcaption>{self.legend}</figcaption></figure>'
            f"<details><summary>longest span of each class; <code>{html.escape(self.code)}</code></summary>"
            f"<table>{head}{body}</table></details>"
        )

    def save(self, path: Any) -> None:
        """Write the picture as an SVG file."""
        text = self.svg.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)


def page(scene: Scene, visible: tuple[float, float], *, title: str) -> str:
    """Return one self-contained HTML page that pans, zooms, searches and selects by itself."""
    from mappnb.widgets.timeline import Timeline

    extent = scene.extent
    pixels = min(8192, PAGE_CELLS // max(scene.num_rows, 1))
    loaded, window = look(scene, *extent, pixels=pixels, rows=(0, scene.num_rows), max_spans=PAGE_SPANS)
    spans = window.spans
    if window.num_events <= PAGE_SPANS:
        loaded, at = scene.events_in(*extent, 0, scene.num_rows)
        row = scene.display_rows(loaded)[at]
        event, start, duration, kind = (
            at,
            loaded.events["start_ns"].values[at],
            loaded.events["duration_ns"].values[at],
            loaded.classes[at],
        )
    else:
        event, row, start, duration, kind = spans.event, spans.row, spans.start_ns, spans.duration_ns, spans.category
    label, texts = labels_of(loaded.events, event)
    left_out = window.num_events - len(event)
    arrays = {
        "row": row.astype("<u4"),
        "x": (start - scene.origin_ns).astype("<f8"),
        "w": duration.astype("<f8"),
        "cat": kind.astype("u1"),
        "label": label.astype("<u4"),
        "event": event.astype("<u4"),
    }
    data = {
        "meta": {"kind": "meta", "view": list(visible), **scene.meta()},
        "labels": texts,
        "note": f"{left_out:,} spans narrower than 1/{pixels // window.threshold_px} of the run are not in this page"
        if left_out > 0
        else "",
        **with_arrays({}, arrays, binary=False)[0],
    }
    return page_html(title, Timeline, data, parts=("static_kernel.js",), model="StaticModel", render="renderTimeline")
