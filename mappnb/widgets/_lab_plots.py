"""The plots of the schedule lab: columns for bokeh's sources, and the figures that draw them. bokeh is loaded on first use."""

from __future__ import annotations

import gzip
import importlib
import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mappnb.palette import BREAKDOWN_COLOURS
from mappnb.sched.idle import PHASES
from mappnb.widgets._lab_lanes import CLASSES
from mappnb.widgets._lab_model import LabModel

__all__ = ["MARKERS", "Columns", "bokeh_js", "columns", "figures", "legend", "memory_columns", "series_colours"]

Array = np.ndarray[Any, Any]
Columns = dict[str, dict[str, Any]]
"""Source -> column -> array, list of texts, or list of arrays (ragged)."""

SERIES = (
    ("#0072b2", "#4aa3df"),
    ("#d55e00", "#e8743b"),
    ("#007a5a", "#2bb58c"),
    ("#a8518a", "#d893b9"),
    ("#8a6d00", "#e0b62e"),
    ("#5b3f8f", "#a58be0"),
    ("#4d5761", "#a3adb8"),
    ("#8c2d04", "#ffa77d"),
)
"""(light, dark) of the schedules in their order; each has a marker of its own too."""
MARKERS = ("circle", "square", "triangle", "diamond", "inverted_triangle", "hex", "star", "plus")
PARTS = ("busy", *PHASES, "after")
"""Of a bar: time in actions, idle time by phase, and what comes after the last action: gradient reductions and the optimizer."""
_SAID = {"busy": "in actions", **{p: f"idle, {p.replace('_', '-')}" for p in PHASES}, "after": "reductions, optimizer"}
MOST_CHANGES = 500
MOST_NAMES = 9
IDLE = {"warm_up": ("#c9ced4", "#59626c"), "steady": ("#9ba4ae", "#7c8691"), "cool_down": ("#dfe3e7", "#434b54")}
THEMES = {
    "light": {"ground": "#ffffff", "text": "#1b1f24", "muted": "#57606a", "line": "#d0d7de", "danger": "#b3261e"},
    "dark": {"ground": "#15181c", "text": "#e6e9ed", "muted": "#a3adb8", "line": "#3a424b", "danger": "#ff9a91"},
}


def series_marker(index: int) -> str:
    """Return the marker of the index-th schedule: with its colour one of 64 signs."""
    return MARKERS[(index + index // len(SERIES)) % len(MARKERS)]


def series_colours(index: int, theme: str) -> str:
    """Return the colour of the index-th schedule."""
    return SERIES[index % len(SERIES)][theme == "dark"]


def _rank_colour(rank: int, ranks: int, theme: str) -> str:
    """From the first rank's blue to the last one's orange, by way of grey-green: in order of lightness."""
    ends = ((0, 66, 120), (216, 130, 20)) if theme == "light" else ((105, 170, 230), (255, 196, 110))
    share = rank / max(ranks - 1, 1)
    return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in zip(*ends, strict=True))


def columns(model: LabModel, selected: str, *, time_scale: float, memory_scale: float) -> Columns:
    """Return the data of every plot.

    Parameters
    ----------
    model : LabModel
    selected : str
        Label of the schedule whose memory is shown.
    time_scale, memory_scale : float
        Plotted units in a second, and in a unit of the costs' memory.

    Notes
    -----
    Colours are there for both themes, ``colour_light`` and ``colour_dark``.
    """
    return {
        "memory": memory_columns(model, selected, time_scale=time_scale, memory_scale=memory_scale),
        "limit": _limit(model, time_scale, memory_scale),
        "pareto": _pareto(model, time_scale, memory_scale),
        "front": _front(model, time_scale, memory_scale),
        "transfer": _transfer(model, time_scale),
        "bars": _bars(model, time_scale),
    }


def memory_columns(model: LabModel, selected: str, *, time_scale: float, memory_scale: float) -> dict[str, Any]:
    """Return the memory of one schedule over time, a staircase for each rank; empty where it cannot run."""
    outcome = model.find(selected)
    if outcome is None or outcome.numbers is None:
        return {"t": [], "held": [], "name": [], "colour_light": [], "colour_dark": []}
    n = outcome.numbers
    ranks = n.schedule.num_ranks
    times, helds = [], []
    for r in range(ranks):
        mine = n.memory.rank == r
        t, held = _steps(n.memory.time_s[mine], n.memory.held[mine], n.step_s)
        times.append((t * time_scale).astype(np.float32))
        helds.append(((held + n.static_memory[r]) * memory_scale).astype(np.float32))
    colours = {f"colour_{theme}": [_rank_colour(r, ranks, theme) for r in range(ranks)] for theme in THEMES}
    return {"t": times, "held": helds, "name": [f"rank {r}" for r in range(ranks)], **colours}


def _steps(time: Array, held: Array, end: float) -> tuple[Array, Array]:
    """Return the corners of a staircase; of many changes the largest value in each of MOST_CHANGES equal times."""
    if len(time) > MOST_CHANGES:
        cell = np.minimum((time / max(end, 1e-300) * MOST_CHANGES).astype(np.int64), MOST_CHANGES - 1)
        top = np.full(MOST_CHANGES, -np.inf)
        np.maximum.at(top, cell, held)
        last = np.full(MOST_CHANGES, -1)
        np.maximum.at(last, cell, np.arange(len(cell)))
        carried = held[np.maximum(np.maximum.accumulate(last), 0)]  # where nothing changes, what was held last
        top = np.where(np.isinf(top), np.concatenate([[0.0], carried[:-1]]), top)
        time, held = np.arange(MOST_CHANGES) * (end / MOST_CHANGES), top
    t = np.repeat(np.concatenate([[0.0], time, [end]]), 2)[1:-1]
    h = np.repeat(np.concatenate([[0.0], held]), 2)
    return t, h


def _limit(model: LabModel, time_scale: float, memory_scale: float) -> dict[str, Any]:
    limit = model.settings.memory_limit
    levels = (
        [] if limit is None else sorted({float(v) * memory_scale for v in np.atleast_1d(np.asarray(limit, np.float64))})
    )
    return {"y": np.array(levels, np.float32)}


def _pareto(model: LabModel, time_scale: float, memory_scale: float) -> dict[str, Any]:
    rows = [(i, o, o.numbers) for i, o in enumerate(model.outcomes) if o.numbers is not None]
    step = np.array([n.step_s * time_scale for _, _, n in rows], np.float32)
    peak = np.array([n.peak_memory.max() * memory_scale for _, _, n in rows], np.float32)
    names = [o.entry.label for _, o, _ in rows]
    return {
        "step": step,
        "peak": peak,
        "name": names,
        "said": _said(step, peak, names),
        **_places(step),
        **{f"colour_{theme}": [series_colours(i, theme) for i, _, _ in rows] for theme in THEMES},
        "fill": np.array([0.9 if o.fits else 0.0 for _, o, _ in rows], np.float32),
        "marker": [series_marker(i) for i, _, _ in rows],
        "says": ["fits" if o.fits else "does not fit in the memory limit" for _, o, _ in rows],
    }


def best(step: Array, peak: Array) -> npt.NDArray[np.bool_]:
    """Return which points are on the Pareto front: no other is at most as long and as large, and one of them less."""
    out = np.ones(len(step), bool)
    for i in range(len(step)):
        less = (step <= step[i]) & (peak <= peak[i]) & ((step < step[i]) | (peak < peak[i]))
        out[i] = not less.any()
    return out


def _front(model: LabModel, time_scale: float, memory_scale: float) -> dict[str, Any]:
    """Return the corners of the line along the Pareto front."""
    done = [o.numbers for o in model.outcomes if o.numbers is not None]
    step = np.array([n.step_s * time_scale for n in done], np.float32)
    peak = np.array([n.peak_memory.max() * memory_scale for n in done], np.float32)
    at = np.flatnonzero(best(step, peak)) if done else np.zeros(0, np.int64)
    at = at[np.lexsort((-peak[at], step[at]))]
    x, y = step[at], peak[at]
    return {"x": np.repeat(x, 2)[1:], "y": np.repeat(y, 2)[:-1]}


def _places(step: Array) -> dict[str, Any]:
    """Return where the text of each point goes: to its right, in the right half to its left; above and below by turns."""
    late = step > (step.min(initial=np.inf) + step.max(initial=-np.inf)) / 2 if len(step) else np.zeros(0, bool)
    turn = np.argsort(np.argsort(step, kind="stable"), kind="stable") % 2
    return {
        "align": ["right" if v else "left" for v in late],
        "dx": np.where(late, -9, 9).astype(np.float32),
        "dy": np.where(turn, 20, -7).astype(np.float32),
    }


def _said(step: Array, peak: Array, names: list[str]) -> list[str]:
    """Return the text beside each point: of many only of the best; points that lie (nearly) on one another share one."""
    out = list(names)
    if len(names) > MOST_NAMES:
        out = [name if there else "" for name, there in zip(names, best(step, peak).tolist(), strict=True)]
    for i in range(len(names)):
        for k in range(i):
            apart = abs(step[i] - step[k]) > 0.04 * np.ptp(step) or abs(peak[i] - peak[k]) > 0.06 * np.ptp(peak)
            if not apart and out[k] and out[i]:
                out[k], out[i] = f"{out[k]}, {names[i]}", ""
                break
    return out


def _bars(model: LabModel, time_scale: float) -> dict[str, Any]:
    done = [(o.entry.label, o.numbers) for o in model.outcomes if o.numbers is not None]
    parts = np.array([[n.busy_s, *n.idle_s, n.step_s - n.actions_s] for _, n in done], np.float32).reshape(
        -1, len(PARTS)
    )
    out: dict[str, Any] = {"name": [label for label, _ in done]}
    return out | {part: parts[:, i] * np.float32(time_scale) for i, part in enumerate(PARTS)}


def _transfer(model: LabModel, time_scale: float) -> dict[str, Any]:
    rows = [o for o in model.outcomes if o.numbers is not None]
    return {
        "name": [o.entry.label for o in rows],
        "transfer": np.array([o.numbers.transfer_s * time_scale for o in rows if o.numbers], np.float32),
    }


# ------------------------------------------------------------------------------------------------------------ figures
@cache
def bokeh_js() -> tuple[str, bytes]:
    """Return BokehJS's version and its core, gzipped: that of the installed package, so that both halves agree; no network."""
    bokeh = importlib.import_module("bokeh")
    path = Path(str(bokeh.__file__)).parent / "server" / "static" / "js" / "bokeh.min.js"
    return str(bokeh.__version__), gzip.compress(path.read_bytes(), 6)


def figures(data: Columns, *, theme: str, time_unit: str, memory_unit: str, ground: str = "") -> dict[str, Any]:
    """Return each figure as bokeh's JSON, by name: ``memory``, ``pareto``, ``bars``.

    Parameters
    ----------
    data : mapping
        From :func:`columns`.
    theme : str
        ``"light"`` or ``"dark"``.
    time_unit, memory_unit : str
        Units of the columns.
    ground : str
        Colour of the ground, ``"rgb(r, g, b)"``; that of the theme if it is anything else.
    """
    look = {
        **THEMES[theme],
        **({"ground": ground} if re.fullmatch(r"rgb\(\d{1,3}, \d{1,3}, \d{1,3}\)", ground) else {}),
    }
    embed: Any = importlib.import_module("bokeh.embed")
    made = {
        "memory": _memory_figure(data, look, theme, time_unit, memory_unit),
        "pareto": _pareto_figure(data, look, theme, time_unit, memory_unit),
        "bars": _bars_figure(data, look, theme, time_unit),
    }
    return {name: embed.json_item(figure) for name, figure in made.items()}


def _source(data: Columns, name: str) -> Any:
    models: Any = importlib.import_module("bokeh.models")
    return models.ColumnDataSource(
        name=name, data={k: v if isinstance(v, np.ndarray) else list(v) for k, v in data[name].items()}
    )


def _figure(look: dict[str, str], **options: Any) -> Any:
    plotting: Any = importlib.import_module("bokeh.plotting")
    figure = plotting.figure(
        sizing_mode="stretch_width",
        toolbar_location=None,
        tools="",
        background_fill_color=look["ground"],
        border_fill_color=look["ground"],
        outline_line_color=look["line"],
        **{"min_border_right": 14, **options},
    )
    for axis in (*figure.xaxis, *figure.yaxis):
        axis.axis_label_text_color = look["muted"]
        axis.axis_label_text_font_style = "normal"
        axis.axis_label_text_font_size = axis.major_label_text_font_size = "11px"
        axis.major_label_text_color = look["text"]
        axis.axis_line_color = axis.major_tick_line_color = look["muted"]
        axis.minor_tick_line_color = None
    for grid in (*figure.xgrid, *figure.ygrid):
        grid.grid_line_color = look["line"]
        grid.grid_line_alpha = 0.6
    return figure


def _tool(renderers: list[Any], tips: list[tuple[str, str]], **options: Any) -> Any:
    models: Any = importlib.import_module("bokeh.models")
    return models.HoverTool(renderers=renderers, tooltips=tips, **options)


def _memory_figure(data: Columns, look: dict[str, str], theme: str, time_unit: str, memory_unit: str) -> Any:
    models: Any = importlib.import_module("bokeh.models")
    figure = _figure(
        look,
        height=170,
        min_border_left=64,
        min_border_right=0,
        y_axis_label=memory_unit,
        x_axis_label=f"time, {time_unit}",
    )
    figure.x_range = models.Range1d(0, 1, name="time")
    figure.y_range = models.DataRange1d(start=0, range_padding=0.08, only_visible=True)
    lines = figure.multi_line(
        "t", "held", line_color=f"colour_{theme}", line_width=1.6, line_alpha=0.9, source=_source(data, "memory")
    )
    figure.hspan(y="y", line_color=look["danger"], line_dash="dashed", line_width=2, source=_source(data, "limit"))
    cursor = models.ColumnDataSource(name="cursor", data={"x": []})
    figure.vspan(x="x", line_color=look["muted"], line_width=1, source=cursor)
    tips = [("", "@name"), ("holds", f"$snap_y{{0.00}} {memory_unit}"), ("at", f"$x{{0.000}} {time_unit}")]
    figure.add_tools(_tool([lines], tips, line_policy="prev", name="hover"))
    return figure


def _pareto_figure(data: Columns, look: dict[str, str], theme: str, time_unit: str, memory_unit: str) -> Any:
    figure = _figure(
        look,
        height=max(250, 70 + 22 * len(data["pareto"]["name"])),
        x_axis_label=f"step, {time_unit}",
        y_axis_label=f"peak of the fullest rank, {memory_unit}",
    )
    figure.x_range.range_padding, figure.y_range.range_padding = 0.22, 0.36
    source = _source(data, "pareto")
    figure.line("x", "y", line_color=look["muted"], line_dash="dotted", line_width=1.5, source=_source(data, "front"))
    colour, text = f"colour_{theme}", {"text_font_size": "11px", "text_color": look["text"], "text_align": "align"}
    points = figure.scatter(
        "step",
        "peak",
        marker="marker",
        size=13,
        fill_color=colour,
        fill_alpha="fill",
        line_color=colour,
        line_width=2,
        source=source,
    )
    figure.text("step", "peak", "said", x_offset="dx", y_offset="dy", source=source, **text)
    figure.hspan(y="y", line_color=look["danger"], line_dash="dashed", line_width=2, source=_source(data, "limit"))
    tips = [
        ("", "@name"),
        ("step", f"@step{{0.000}} {time_unit}"),
        ("peak", f"@peak{{0.00}} {memory_unit}"),
        ("", "@says"),
    ]
    figure.add_tools(_tool([points], tips, name="hover"))
    return figure


def _bars_figure(data: Columns, look: dict[str, str], theme: str, time_unit: str) -> Any:
    models: Any = importlib.import_module("bokeh.models")
    names = list(reversed(data["bars"]["name"])) or ["none"]
    figure = _figure(
        look,
        height=max(250, 70 + 22 * len(names)),
        y_range=models.FactorRange(*names, name="names"),
        x_axis_label=f"mean of the ranks, {time_unit}",
    )
    figure.x_range.start = 0
    figure.x_range.range_padding = 0.03
    figure.ygrid.grid_line_color = None
    dark = theme == "dark"
    colours = [colour for _, colour in legend(theme)[: len(PARTS)]]
    parts = list(PARTS)
    stacks = figure.hbar_stack(
        parts, y="name", height=0.56, color=colours, line_color=look["ground"], source=_source(data, "bars")
    )
    for part, bar in zip(parts, stacks, strict=True):
        figure.add_tools(_tool([bar], [("", "@name"), (_SAID[part], f"@{part}{{0.000}} {time_unit}")], name="hover"))
    under = models.Dodge(value=-0.37, range=figure.y_range)
    path = figure.hbar(
        y={"field": "name", "transform": under},
        right="transfer",
        height=0.13,
        color=CLASSES[4][1 + dark],
        source=_source(data, "transfer"),
    )
    figure.add_tools(
        _tool(
            [path], [("", "@name"), ("transfers on the critical path", f"@transfer{{0.000}} {time_unit}")], name="hover"
        )
    )
    return figure


def legend(theme: str) -> list[tuple[str, str]]:
    """Return (name, colour) of the parts of the bars."""
    dark = theme == "dark"
    of = {"busy": BREAKDOWN_COLOURS["compute"], **IDLE, "after": BREAKDOWN_COLOURS["optimizer"]}
    return [*((_SAID[p], of[p][dark]) for p in PARTS), (CLASSES[4][0], CLASSES[4][1 + dark])]
