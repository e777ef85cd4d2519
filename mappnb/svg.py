"""Small static charts as SVG text, for reports and snapshots: no library, no script, themed by CSS variables."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

__all__ = ["Canvas", "legend", "line_chart", "stacked_bars", "ticks"]

LEFT, RIGHT, TOP, BOTTOM = 64, 12, 10, 34


@dataclass
class Canvas:
    """An SVG picture that grows by drawing on it.

    Attributes
    ----------
    width, height : int
        Size in CSS pixels; the picture scales with its container.
    title : str
        Said by screen readers.
    """

    width: int
    height: int
    title: str
    parts: list[str] = field(default_factory=list)

    def rect(self, x: float, y: float, w: float, h: float, *, fill: str, tip: str = "", extra: str = "") -> None:
        """Draw a rectangle; ``tip`` shows when the pointer rests on it."""
        inside = f"<title>{html.escape(tip)}</title>" if tip else ""
        self.parts.append(
            f'<rect x="{x:.2f}" y="{y:.2f}" width="{max(w, 0.4):.2f}" height="{h:.2f}" fill="{fill}"{extra}>{inside}</rect>'
        )

    def text(self, x: float, y: float, text: str, *, anchor: str = "start", cls: str = "t") -> None:
        """Write escaped text."""
        self.parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{cls}">{html.escape(text)}</text>'
        )

    def line(self, x1: float, y1: float, x2: float, y2: float, *, cls: str = "grid") -> None:
        """Draw a line."""
        self.parts.append(f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{cls}"/>')

    def path(self, points: Sequence[tuple[float, float]], *, stroke: str) -> None:
        """Draw a polyline."""
        joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self.parts.append(f'<polyline points="{joined}" fill="none" stroke="{stroke}" stroke-width="2"/>')

    def render(self) -> str:
        """Return the SVG element."""
        label = html.escape(self.title, quote=True)
        body = "".join(self.parts)
        return (
            f'<svg viewBox="0 0 {self.width} {self.height}" role="img" aria-label="{label}" width="100%">{body}</svg>'
        )


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Return round positions between two bounds: steps of 1, 2 or 5 times a power of ten."""
    if not (math.isfinite(low) and math.isfinite(high)) or high <= low:
        return [low]
    raw = (high - low) / most
    unit = 10 ** math.floor(math.log10(raw))
    step = next(unit * m for m in (1, 2, 5, 10) if unit * m >= raw)
    first = math.ceil(low / step - 1e-9)
    return [round(k * step, 12) for k in range(first, math.floor(high / step + 1e-9) + 1)]


def _number(value: float) -> str:
    return f"{value:g}"


def line_chart(
    x: Sequence[float],
    y: Sequence[float],
    *,
    title: str,
    x_label: str,
    y_label: str,
    colour: str,
    width: int = 520,
    height: int = 220,
    zero: bool = False,
) -> str:
    """Return a line chart; points that are not finite are left out.

    Parameters
    ----------
    x, y : sequence of float
        Of one length.
    zero : bool
        Let the vertical axis begin at 0.
    """
    points = [(a, b) for a, b in zip(x, y, strict=True) if math.isfinite(a) and math.isfinite(b)]
    canvas = Canvas(width, height, title)
    if not points:
        canvas.text(width / 2, height / 2, "no data", anchor="middle")
        return canvas.render()
    x0, x1 = min(p[0] for p in points), max(p[0] for p in points)
    y0, y1 = (0.0 if zero else min(p[1] for p in points)), max(p[1] for p in points)
    pad = (y1 - y0 or abs(y1) or 1.0) * 0.08
    y0, y1 = (y0 if zero else y0 - pad), y1 + pad

    def at(a: float, b: float) -> tuple[float, float]:
        across = 0.5 if x1 == x0 else (a - x0) / (x1 - x0)
        return LEFT + across * (width - LEFT - RIGHT), height - BOTTOM - (b - y0) / (y1 - y0) * (height - TOP - BOTTOM)

    for tick in ticks(y0, y1, 5):
        canvas.line(LEFT, at(x0, tick)[1], width - RIGHT, at(x0, tick)[1])
        canvas.text(LEFT - 6, at(x0, tick)[1] + 4, _number(tick), anchor="end")
    for tick in ticks(x0, x1, 8):
        canvas.text(at(tick, y0)[0], height - BOTTOM + 16, _number(tick), anchor="middle")
    canvas.path([at(*p) for p in points], stroke=colour)
    for point in points if len(points) <= 60 else []:
        px, py = at(*point)
        tip = html.escape(f"{x_label} {_number(point[0])}: {point[1]:.4g}")
        canvas.parts.append(
            f'<circle cx="{px:.1f}" cy="{py:.1f}" r="2.6" fill="{colour}"><title>{tip}</title></circle>'
        )
    canvas.text((LEFT + width - RIGHT) / 2, height - 4, x_label, anchor="middle", cls="t axis")
    canvas.text(4, TOP + 4, y_label, cls="t axis")
    return canvas.render()


def stacked_bars(
    labels: Sequence[str],
    parts: Sequence[tuple[str, str, Sequence[float]]],
    *,
    title: str,
    unit: str,
    width: int = 760,
    bar: int = 22,
) -> str:
    """Return horizontal stacked bars.

    Parameters
    ----------
    labels : sequence of str
        One per bar.
    parts : sequence of (name, colour, values)
        Pieces of every bar, from the left; values of the length of ``labels``.
    unit : str
        Unit of the values, for axis and tips.
    """
    left, gap = 150, 7
    height = TOP + len(labels) * (bar + gap) + BOTTOM
    canvas = Canvas(width, height, title)
    longest = max((sum(p[2][i] for p in parts) for i in range(len(labels))), default=0.0) or 1.0
    scale = (width - left - RIGHT) / longest
    for tick in ticks(0.0, longest, 8):
        canvas.line(left + tick * scale, TOP, left + tick * scale, height - BOTTOM + 4)
        canvas.text(left + tick * scale, height - BOTTOM + 18, _number(tick), anchor="middle")
    for i, label in enumerate(labels):
        y, x = TOP + i * (bar + gap), float(left)
        canvas.text(left - 8, y + bar / 2 + 4, label, anchor="end")
        for name, colour, values in parts:
            w = values[i] * scale
            if w <= 0:
                continue
            canvas.rect(
                x, y, w, bar, fill=colour, tip=f"{label}: {name} {values[i]:.4g} {unit} ({values[i] / longest:.1%})"
            )
            if w > 44:
                canvas.text(
                    x + w / 2,
                    y + bar / 2 + 4,
                    f"{values[i]:.3g}",
                    anchor="middle",
                    cls="t inbar" + (" onlight" if name == "idle" else ""),
                )
            x += w
    canvas.text((left + width - RIGHT) / 2, height - 4, unit, anchor="middle", cls="t axis")
    return canvas.render()


def legend(items: Sequence[tuple[str, str]]) -> str:
    """Return an HTML legend of (name, colour)."""
    boxes = "".join(
        f'<span class="key"><i style="background:{colour}"></i>{html.escape(name)}</span>' for name, colour in items
    )
    return f'<p class="legend">{boxes}</p>'
