"""What the schedule lab tells its browser half: lanes, table, columns of the plots."""

from __future__ import annotations

from typing import Any

import numpy as np

from mappnb.widgets._lab_controls import Units
from mappnb.widgets._lab_lanes import Lane
from mappnb.widgets._lab_model import REPLAY, LabModel, Outcome
from mappnb.widgets._lab_plots import SERIES, Columns
from mappnb.widgets._messages import number, whole

__all__ = ["lanes_told", "number_text", "pack_columns", "table_columns", "table_rows", "windows_told"]

Array = np.ndarray[Any, Any]


def table_columns(units: Units) -> list[str]:
    """Return the heads of the table of numbers."""
    peak = f"peak, {units.memory}"
    return ["schedule", "step", "change", "bubble", "span bubble", peak, "critical path", "tightest link", "fits"]


def number_text(value: float, unit: str = "", digits: int = 4) -> str:
    """Return a number with its unit; a dash for what is not a number."""
    if not np.isfinite(value):
        return "–"
    said = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.{digits}g}"
    return f"{said} {unit}" if unit else said


def change_text(model: LabModel, outcome: Outcome) -> str:
    """Return how the step differs from the reference; of a recorded run nothing below the error of the replay."""
    reference = model.reference
    if outcome.numbers is None or reference is None or reference.numbers is None:
        return "–"
    if outcome is reference:
        return "reference"
    change = outcome.numbers.step_s / reference.numbers.step_s - 1
    if model.replay is not None and abs(change) <= model.replay.resolution:
        return "within the error"
    return f"{change:+.1%}" if abs(change) >= 5e-4 else "same"


def edge_text(edge: tuple[int, int, float] | None, units: Units) -> str:
    """Return a link with what its messages have to spare."""
    if edge is None:
        return "–"
    spare = edge[2] * units.time_scale
    return f"{edge[0]}→{edge[1]}, {f'{number_text(spare, units.time, 3)} to spare' if spare > 1e-9 else 'nothing to spare'}"


def table_rows(model: LabModel, units: Units) -> list[dict[str, Any]]:
    """Return a row for each entry: its label, its texts by :func:`table_columns`, and why it does not run or fit."""
    out = []
    for i, o in enumerate(model.outcomes):
        n = o.numbers
        cells = [o.entry.label, *["–"] * 7, "cannot run"]
        if n is not None:
            edge = n.tightest
            cells = [
                o.entry.label,
                number_text(n.step_s * units.time_scale, units.time),
                change_text(model, o)
                + ("" if n.schedule.num_ranks == model.sizes.num_ranks else f", {n.schedule.num_ranks} ranks"),
                f"{n.bubble_fraction:.1%}",
                f"{n.span_bubble_fraction:.1%}",
                number_text(float(n.peak_memory.max(initial=0.0)) * units.memory_scale, digits=3),
                number_text(n.critical_path_s * units.time_scale, units.time),
                edge_text(edge, units),
                "yes" if o.fits else "no",
            ]
        out.append({"label": o.entry.label, "cells": cells, "why": o.why, "fits": o.fits, "index": i})
    return out


def lanes_told(model: LabModel, lanes: list[Lane], units: Units) -> list[dict[str, Any]]:
    """Return what each lane is, with the meta of its canvas on the common time axis."""
    extent = model.longest_s * 1e9
    shift = len(lanes) - len(model.outcomes)
    out = []
    for i, lane in enumerate(lanes):
        index = i - shift
        outcome = model.outcomes[index] if index >= 0 else None
        n = outcome.numbers if outcome is not None else None
        if outcome is None:
            said = f"{number_text(model.recorded.step_s * units.time_scale if model.recorded else 0.0, units.time)}, as measured"
        elif n is None:
            said = "cannot run"
        else:
            said = f"{number_text(n.step_s * units.time_scale, units.time)}, bubble {n.bubble_fraction:.1%}"
            if n.schedule.num_ranks != model.sizes.num_ranks:
                said += f", {n.schedule.num_ranks} ranks"
        if lane.label == REPLAY and model.replay is not None:
            said += ", recorded order at these costs"
        out.append(
            {
                "label": lane.label,
                "says": said,
                "why": outcome.why if outcome is not None else "",
                "colours": SERIES[index % len(SERIES)] if index >= 0 else None,
                "pickable": n is not None,
                "meta": lane.meta(extent),
            }
        )
    return out


def windows_told(lanes: list[Lane], view: Any, longest_s: float) -> tuple[list[dict[str, Any]], dict[str, Array]]:
    """Return the window of every lane at the common view, so that the browser need not ask for each.

    Parameters
    ----------
    lanes : list of Lane
    view : mapping
        What the browser looks at: ``pixels``, and ``t0`` and ``t1`` in ns, or null for the whole step. Anything else: no windows.
    longest_s : float
        Length of the common time axis, s.
    """
    if not isinstance(view, dict) or not view.get("pixels"):
        return [], {}
    pixels = whole(view, "pixels", 16, 8192)
    whole_ns = max(longest_s * 1e9, 1.0)
    air = max(whole_ns, 20.0) * 0.004  # as the browser shows the whole
    t0, t1 = (-air, whole_ns + air) if view.get("t0") is None else (number(view, "t0"), number(view, "t1"))
    told: list[dict[str, Any]] = []
    arrays: dict[str, Array] = {}
    for i, lane in enumerate(lanes):
        if not lane.num_ranks or not t1 > t0:
            continue
        answer = lane.window(t0, t1, pixels=pixels, rows=(0, lane.num_ranks))
        told.append({**answer.content, "label": lane.label, "prefix": f"w{i}."})
        arrays |= {f"w{i}.{name}": array for name, array in answer.arrays.items()}
    return told, arrays


def pack_columns(columns: Columns) -> tuple[dict[str, Any], dict[str, Array]]:
    """Return columns as JSON that names arrays, and the arrays: ragged columns as one array and the ends of its parts."""
    told: dict[str, Any] = {}
    arrays: dict[str, Array] = {}
    for source, data in columns.items():
        told[source] = {}
        for name, value in data.items():
            key = f"{source}.{name}"
            if isinstance(value, np.ndarray):
                arrays[key] = value.astype(np.float32)
                told[source][name] = {"array": key}
            elif value and isinstance(value[0], np.ndarray):
                arrays[key] = np.concatenate(value).astype(np.float32)
                arrays[f"{key}.ends"] = np.cumsum([len(v) for v in value]).astype(np.uint32)
                told[source][name] = {"ragged": key}
            else:
                told[source][name] = {"list": list(value)}
    return told, arrays
