"""What the stragglers view tells its browser half: pictures with their rows, the list of verdicts, evidence, prices."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from mappnb.errors import MappnbError
from mappnb.palette import CATEGORY_COLOURS
from mappnb.run import Run
from mappnb.widgets import _strag_plots as plots
from mappnb.widgets._strag_data import StragglerData, subject_ranks
from mappnb.widgets._strag_evidence import TELEMETRY, Evidence, evidence
from mappnb.widgets._strag_grid import orders
from mappnb.widgets._strag_levels import Picture, crumbs
from mappnb.widgets._strag_where import AGAINST, CELLS, ROWS, Where
from mappnb.widgets._text import duration_text

__all__ = [
    "evidence_told",
    "options_told",
    "picture_told",
    "price_bars",
    "price_told",
    "subject_title",
    "verdicts_told",
]

VERDICT_COLUMNS = ("subject", "verdict", "cause", "effect", "share of step", "steps", "evidence")
MARKED = ("rank", "host", "link")
"""Subjects with marks at their rows; those of a stage or the job would hide the others."""
MOST_VERDICTS = 200
"""Rows of the list that go to the browser; the rest is in ``view.verdicts``."""
LEAST_SHARE = 0.05
"""Height of a line of shares at least: what differs by less looks flat."""
MOST_BARS = 16
"""Bars of a price: the largest; the rest is in ``view.prices``."""
_GROUPING_WORDS = {"stage": "stage", "dp_rank": "dp rank", "rank": "rank", "host": "host", "op": "operation"}


def options_told(data: StragglerData) -> dict[str, Any]:
    """Return the choices of the tool bar: (value, words) each."""
    m = data.m
    several = len(set(m.hosts)) > 1
    return {
        "metric": [[k, v.label] for k, v in m.metrics.items()],
        "order": [[o, {"rank": "rank number"}.get(o, o)] for o in orders(data.layout, m.hosts)],
        "rows": [[r, {"auto": "automatic", "rank": "ranks", "host": "hosts"}[r]] for r in (ROWS if several else ())],
        "cell": [[c, {"max": "largest", "median": "median"}[c]] for c in CELLS],
        "against": [[k, v] for k, v in AGAINST.items()],
    }


def picture_told(data: StragglerData, drawn: Picture, *, theme: str, ground: str) -> dict[str, Any]:
    """Return a picture for the browser: bokeh's JSON and what its rows and columns are."""
    out: dict[str, Any] = {
        "where": drawn.where.told(), "level": drawn.where.level, "crumbs": crumbs(data, drawn.where), "label": drawn.label,
        "caption": drawn.caption, "scale": drawn.scale, "limits": [drawn.low, drawn.high], "rows": [], "columns": [],
    }  # fmt: skip
    if drawn.grid is not None:
        ranks = data.m.ranks
        out["figure"] = plots.item(plots.heat_figure(drawn, theme, ground))
        out["rows"] = [
            {"label": r.label, "title": r.title, "ranks": ranks[list(r.ranks)].tolist(), "into": into}
            for r, into in zip(drawn.grid.rows, drawn.into, strict=True)
        ]
        out["columns"] = [[a, b, s] for (a, b), s in zip(drawn.grid.columns, drawn.steps_into, strict=True)]
        out["merged"] = any(len(r.ranks) > 1 for r in drawn.grid.rows) or any(a != b for a, b in drawn.grid.columns)
        out["marks"] = plots.marks_told(theme)
    elif drawn.ops is not None:
        out["figure"] = plots.item(plots.bars_figure(drawn, theme, ground))
        out["bars"] = [_bar_text(row) for row in drawn.ops.frame.to_dict("records")]
        here = set(drawn.ops.frame["category"])
        out["legend"] = [[c, *v] for c, v in CATEGORY_COLOURS.items() if str(c) in here]
    return out


def _bar_text(row: Any) -> list[str]:
    own = f"this rank {duration_text(row['own_s'] * 1e9)} in {int(row['count'])} spans"
    peers = f"median of its peers {duration_text(row['peers_s'] * 1e9)}" if np.isfinite(row["peers_s"]) else "no peers"
    return [str(row["label"]), own, peers]


def subject_title(row: Any) -> str:
    """Return a subject of the verdicts in words: ``rank 3``, ``host node1``."""
    kind, subject = str(row["subject_kind"]), str(row["subject"])
    return (
        subject if kind == "job" and subject else subject if subject.startswith(kind) else f"{kind} {subject}".strip()
    )


def steps_text(first: int, last: int) -> str:
    """Return a range of steps in words."""
    if first < 0:
        return "–"
    return str(first) if first == last else f"{first}–{last}"


def verdicts_told(data: StragglerData) -> dict[str, Any]:
    """Return the list of verdicts: culprits, victims and undecided ones; those that are clear as a number."""
    frame = data.verdicts
    notes = [str(n) for n in frame.attrs.get("notes", [])]
    rows: list[dict[str, Any]] = []
    clear = left = 0
    for i, row in enumerate(frame.to_dict("records")):
        if row["verdict"] == "clear":
            clear += 1
            continue
        if len(rows) >= MOST_VERDICTS:
            left += 1
            continue
        first, last = int(row["first_step"]), int(row["last_step"])
        ranks = subject_ranks(str(row["subject_kind"]), str(row["subject"]), data.m) if not data.why else ()
        effect = float(row["effect_s"])
        sign = "−" if effect < 0 else ""
        rows.append(
            {
                "index": i,
                "verdict": str(row["verdict"]),
                "ranks": data.m.ranks[list(ranks)].tolist() if ranks else [],
                "marked": str(row["subject_kind"]) in MARKED,
                "cells": [
                    subject_title(row), str(row["verdict"]), str(row["cause"]).replace("_", " "),
                    f"{sign}{duration_text(abs(effect) * 1e9)}/step" if np.isfinite(effect) else "–",
                    f"{float(row['effect_fraction']):.1%}".replace("-", "−") if np.isfinite(float(row["effect_fraction"])) else "–",
                    steps_text(first, last), str(row["evidence"]),
                ],
            }
        )  # fmt: skip
    return {"columns": list(VERDICT_COLUMNS), "rows": rows, "clear": clear, "left": left, "notes": notes}


def evidence_told(
    data: StragglerData, ranks: list[int], steps: tuple[int, int] | None, verdict: int | None
) -> dict[str, Any]:
    """Return the evidence panel of some ranks (positions); of a verdict with its sentence."""
    row = None if verdict is None else data.verdicts.iloc[verdict]
    ranks = ranks or (list(range(len(data.m.ranks))) if row is not None else [])  # of the job: all
    title = subject_title(row) if row is not None else _title(data, ranks)
    if steps is not None:
        title += f", step{'s' if steps[0] != steps[1] else ''} {steps_text(*steps)}"
    found: Evidence = evidence(data, ranks, steps=steps, title=title)
    out: dict[str, Any] = {
        "title": found.title,
        "numbers": [list(n) for n in found.numbers],
        "telemetry": [list(t) for t in found.telemetry],
        "notes": found.notes,
        "beside": found.beside,
        "verdict": None,
        "ranks": [] if row is not None and str(row["subject_kind"]) == "job" else data.m.ranks[ranks].tolist(),
        "steps": None if steps is None else list(steps),
    }
    if row is not None:
        cause = str(row["cause"]).replace("_", " ")
        said = f"{row['verdict']}{f': {cause}' if cause else ''}"
        out["verdict"] = {"kind": str(row["verdict"]), "text": said, "evidence": str(row["evidence"])}
    if found.lines:
        out["lines"] = [
            {**_line(*line), "least": 0.0 if TELEMETRY[name][1] else LEAST_SHARE} for name, line in found.lines.items()
        ]
        out["span"] = None
        if steps is not None and ranks:
            span = data.window_s(first=steps[0], last=steps[1], rank=int(data.m.ranks[ranks[0]]))
            out["span"] = None if span is None else list(span)
    return out


def _line(time: Any, own: Any, others: Any) -> dict[str, list[float | None]]:
    """Return a line of telemetry as JSON holds it: short, null for what is not there."""
    named = {"t": time, "own": own, "others": others}
    return {k: [float(f"{x:.6g}") if np.isfinite(x) else None for x in v.tolist()] for k, v in named.items()}


def _title(data: StragglerData, ranks: list[int]) -> str:
    m = data.m
    if len(ranks) == 1:
        rank = int(m.ranks[ranks[0]])
        label = data.layout.label(rank) if rank < data.layout.world_size > 1 else ""
        host = m.hosts[ranks[0]]
        return f"rank {rank}" + (f" · {label}" if label else "") + (f" · {host}" if host else "")
    hosts = {m.hosts[r] for r in ranks}
    if len(hosts) == 1 and (host := next(iter(hosts))) and len(ranks) == m.hosts.count(host):
        return f"host {host} ({len(ranks)} ranks)"
    numbers = m.ranks[ranks]
    return f"{len(ranks)} ranks, {int(numbers.min())} to {int(numbers.max())}" if len(ranks) else "the job"


def price_bars(prices: xr.Dataset, by: str) -> pd.DataFrame:
    """Return the price of each part of a grouping, the dearest first: ``name``, ``cost`` (slowdown less 1), ``reliable``."""
    name = f"slowdown_by_{by}"
    if name not in prices:
        raise MappnbError(f"the replay tells no price by {by}")
    cost = prices[name].values - 1
    sure = (
        prices[f"reliable_by_{by}"].values
        if f"reliable_by_{by}" in prices
        else np.abs(cost) > abs(float(prices["replay_error"]))
    )
    names = [str(v) for v in prices[by].values]
    words = _GROUPING_WORDS[by]
    frame = pd.DataFrame(
        {
            "name": names if by in ("host", "op") else [f"{words} {n}" for n in names],
            "cost": cost,
            "reliable": sure.astype(bool),
        }
    )
    return frame.sort_values("cost", ascending=False, kind="stable").reset_index(drop=True)


def price_told(data: StragglerData, by: str, *, theme: str, ground: str) -> dict[str, Any]:
    """Return the what-if bars of a grouping with the error of the replay."""
    prices, known = data.prices, list(data.groupings)
    if by not in known:
        raise MappnbError(f"no price by {by!r:.60}; expected one of {', '.join(known)}")
    frame = price_bars(prices, by)
    top = frame.head(MOST_BARS)
    error, slow = float(prices["replay_error"]), float(prices["slowdown"])
    hours = float(prices["wasted_gpu_hours"]) if "wasted_gpu_hours" in prices else float("nan")
    said = f"Steps are {slow - 1:.1%} longer than with every operation ideal ({str(prices.attrs.get('ideal', 'median')).split(': ')[-1]})"
    said += f", {hours:.3g} GPU-hours of what was recorded" if np.isfinite(hours) else ""
    said += f". Replay error {error:.2%}: nothing smaller is a finding."
    more = f" The {len(frame) - len(top)} smaller ones are left out." if len(frame) > len(top) else ""
    ranks = (
        ""
        if "rank" in known
        else f" With {len(data.m.ranks)} ranks they are not priced one by one: see dp ranks, stages and hosts."
    )
    return {
        "says": said,
        "caption": f"A bar: only this as measured, all else ideal. Dashed: the replay error; pale bars are within it.{more}{ranks}",
        "by": by,
        "options": [[k, _GROUPING_WORDS[k]] for k in known],
        "figure": plots.item(
            plots.price_figure(
                list(top["name"]), top["cost"].to_numpy(), top["reliable"].to_numpy(), error, theme, ground
            )
        ),
    }


def is_live(run: Run | xr.Dataset) -> bool:
    """Return whether the run is still being recorded."""
    return isinstance(run, Run) and run.meta["state"] == "recording"


def place_of(where: Where, defaults: Where) -> list[str]:
    """Return the keyword arguments that lead to a place."""
    return [f"{k}={v!r}" for k, v in where.told().items() if v != getattr(defaults, k)]
