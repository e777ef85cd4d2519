"""The evidence panel of the stragglers view: one subject's numbers beside its peers', and what telemetry says."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mappnb.analysis._work_parts import COMPUTE_KINDS
from mappnb.widgets._strag_data import StragglerData
from mappnb.widgets._strag_measures import Measures
from mappnb.widgets._text import duration_text

__all__ = ["TELEMETRY", "Evidence", "evidence", "telemetry_lines", "value_text"]

Array = np.ndarray[Any, Any]
TELEMETRY: dict[str, tuple[str, str]] = {
    "sm_clock_mhz": ("GPU clock", "MHz"),
    "power_w": ("power", "W"),
    "temperature_c": ("temperature", "°C"),
    "throttled": ("clocks cut", ""),
    "cpu_fraction": ("CPU", ""),
    "run_queue_fraction": ("run-queue wait", ""),
}
"""Quantity -> (words, unit)."""
NOTHING = ("0 s", "–")
MOST_BINS = 100
"""Points of a line: the width of the panel in pixels over three."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is known of a subject in some steps.

    Attributes
    ----------
    title : str
    numbers : list of (label, own, peers, difference, metric key)
        Medians over its steps, of its ranks and of their peers, as text.
    telemetry : list of (words, own, others)
    lines : dict of str to (time_s, own, others)
        For the plots; NaN where there is no sample.
    notes : list of str
    beside : str
        Whose numbers stand beside: ``"peers"``, or ``"other ranks"`` where there are none.
    """

    title: str
    numbers: list[tuple[str, str, str, str, str]]
    telemetry: list[tuple[str, str, str]]
    lines: dict[str, tuple[Array, Array, Array]]
    notes: list[str] = field(default_factory=list)
    beside: str = "peers"


def value_text(value: float, scale: str) -> str:
    """Return a value of a metric in words."""
    if not np.isfinite(value):
        return "–"
    if scale == "ratio":
        return f"{value:.3g}×"
    if scale == "share":
        return f"{value:.0%}"
    said = duration_text(abs(value) * 1e9) if abs(value) >= 5e-10 else "0 s"
    return f"{'−' if value < 0 else '+'}{said}" if scale == "above" else said


def evidence(data: StragglerData, ranks: Sequence[int], *, steps: tuple[int, int] | None, title: str) -> Evidence:
    """Return the numbers of some ranks.

    Parameters
    ----------
    data : StragglerData
    ranks : sequence of int
        Positions of the subject's ranks.
    steps : (int, int), optional
        First and last step; all by default.
    title : str
    """
    m = data.m
    inside = np.ones(len(m.steps), bool) if steps is None else (m.steps >= steps[0]) & (m.steps <= steps[1])
    mine = list(ranks)
    others, beside = _others(m, mine)
    numbers = [_line(m, key, label, inside, mine, others) for key, label in _keys(m)] if mine and inside.any() else []
    numbers = [n for n in numbers if any(text not in NOTHING for text in n[1:3])]
    told, lines = telemetry_lines(data, mine, _span(data, steps, mine))
    notes = (
        ["no peer: the heatmap compares it with its own usual steps"] if len(mine) == 1 and beside != "peers" else []
    )
    if not data.telemetry:
        notes.append("no telemetry in this run: record it to see clocks, power, temperature and the run queue")
    elif not told:
        notes.append("no telemetry of these ranks")
    return Evidence(title, numbers, told, lines, notes, beside)


def _others(m: Measures, mine: list[int]) -> tuple[Array, str]:
    """Return the ranks that a subject stands beside, and what they are: its peers; of a whole stage, which has none, all others."""
    rest = ~np.isin(np.arange(len(m.role)), mine)
    alike = rest & np.isin(m.role, m.role[mine]) if mine else np.zeros(len(rest), bool)
    if alike.any():
        return np.flatnonzero(alike), "peers"
    return np.flatnonzero(rest) if mine else np.empty(0, np.int64), "other ranks"


def _keys(m: Measures) -> list[tuple[str, str]]:
    phases = [k for k in m.kinds if k in COMPUTE_KINDS]
    rest = [k for k in m.kinds if k not in COMPUTE_KINDS]
    keys = ["compute_s", *(f"{k}_s" for k in (phases if len(phases) > 1 else []) + rest)]
    keys += ["wait_s", "transfer_s", "imposed_s"]
    found = [(k, m.metrics[k].label.removesuffix(", s")) for k in keys if k in m.metrics]
    return [(k, f"  {label}" if k.removesuffix("_s") in phases else label) for k, label in found]


def _line(
    m: Measures, key: str, label: str, inside: Array, mine: list[int], others: Array
) -> tuple[str, str, str, str, str]:
    values = m.values(key)[inside]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        own = float(np.nanmedian(values[:, mine])) if np.isfinite(values[:, mine]).any() else np.nan
        peers = float(np.nanmedian(values[:, others])) if len(others) else np.nan
    change = f"{own / peers:.2f}×" if peers > 0 and own / peers < 100 else value_text(own - peers, "above")
    same = not np.isfinite(peers)
    return label, value_text(own, "seconds"), value_text(peers, "seconds"), "–" if same else change, key


def _span(data: StragglerData, steps: tuple[int, int] | None, mine: list[int]) -> tuple[float, float] | None:
    """Return the time of some steps; looked up only if there is telemetry to put beside."""
    if steps is None or not mine or not data.telemetry:
        return None
    return data.window_s(first=steps[0], last=steps[1], rank=int(data.m.ranks[mine[0]]))


def telemetry_lines(
    data: StragglerData, mine: Sequence[int], span: tuple[float, float] | None
) -> tuple[list[tuple[str, str, str]], dict[str, tuple[Array, Array, Array]]]:
    """Return each quantity in words, in the steps of the subject, and as lines over the whole run: own mean, median of the others."""
    samples = data.telemetry
    if not samples or not len(mine):
        return [], {}
    m = data.m
    time = samples["time_s"]
    order = {int(r): i for i, r in enumerate(m.ranks)}
    row = np.array([order.get(int(r), -1) for r in np.unique(samples["rank"])])
    of = row[np.unique(samples["rank"], return_inverse=True)[1]]
    low, high = float(time.min()), float(time.max())
    most = max(1, min(MOST_BINS, int(np.bincount(of[of >= 0]).max(initial=1))))
    at = np.minimum(((time - low) / max(high - low, 1e-9) * most).astype(np.int64), most - 1)
    centre = low + (np.arange(most) + 0.5) * (high - low) / most
    inside = np.ones(most, bool) if span is None else (centre >= span[0]) & (centre <= span[1])
    if not inside.any() and span is not None:
        inside[np.abs(centre - (span[0] + span[1]) / 2).argmin()] = True
    told, lines = [], {}
    for name in (n for n in TELEMETRY if n in samples):
        table = _binned(of, at, samples[name], len(m.ranks), most)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            own = np.nanmean(table[list(mine)], axis=0)
            rest = np.delete(table, list(mine), axis=0)
            others = np.nanmedian(rest, axis=0) if len(rest) else np.full(most, np.nan)
            words = (
                _reading(name, float(np.nanmedian(own[inside]))),
                _reading(name, float(np.nanmedian(others[inside]))),
            )
            if name == "throttled":
                words = (
                    _reading(name, float(np.nanmean(own[inside]))),
                    _reading(name, float(np.nanmean(rest[:, inside]))),
                )
        if np.isfinite(own).any():
            told.append((TELEMETRY[name][0], *words))
            lines[name] = (centre, own, others)
    return told, lines


def _binned(row: Array, at: Array, values: Array, num_rows: int, num_bins: int) -> Array:
    """Return the mean of the samples in each (rank, bin); NaN where there are none."""
    good = (row >= 0) & np.isfinite(values)
    cell = row[good] * num_bins + at[good]
    total = np.bincount(cell, weights=values[good], minlength=num_rows * num_bins)
    count = np.bincount(cell, minlength=num_rows * num_bins)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray((total / count).reshape(num_rows, num_bins))


def _reading(name: str, value: float) -> str:
    if not np.isfinite(value):
        return "–"
    if name == "throttled":
        return f"{value:.0%}"
    unit = TELEMETRY[name][1]
    return f"{value:,.0f} {unit}" if unit else f"{value:.1%}"
