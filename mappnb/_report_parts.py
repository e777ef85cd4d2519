"""Sections of the report about the run as it is: cards, curves, one step, where the time goes."""

from __future__ import annotations

import html
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from mappnb import analysis, svg
from mappnb._report_page import note, table
from mappnb.display import bytes_text, layout_known
from mappnb.run import Run
from mappnb.stepview import step_timeline
from mappnb.terms import BREAKDOWN

__all__ = [
    "MOST_RANKS", "breakdown", "card_row", "cards", "curves", "lead", "method", "operations", "seconds", "timeline", "warnings",
]  # fmt: skip

MOST_RANKS = 64
"""Lanes and bars that are drawn at most."""


def lead(run: Run) -> str:
    """Return one line on what and where the run is."""
    meta = run.meta
    versions = ", ".join(f"{k} {v}" for k, v in meta["versions"].items())
    where = f"{run.layout if layout_known(run) else 'layout not in the trace'}, {meta['world_size']} ranks on {len(meta['hosts'])} host(s)"
    return " · ".join(filter(None, [where, f"{meta['created']:%Y-%m-%d %H:%M} UTC", f"plan {meta['plan']}", versions]))


def warnings(run: Run) -> str:
    """Return what is missing or was lost."""
    meta = run.meta
    lines = [f"rank {r}: recording stopped early: {why}" for r, why in meta["degraded"].items()]
    lines += [f"ranks {meta['missing_ranks'][:16]} left no file"] if meta["missing_ranks"] else []
    lines += [f"{where}: {why}" for where, why in list(meta["problems"].items())[:8]]
    lines += [f"{meta['dropped']} events were dropped under pressure"] if meta["dropped"] else []
    lines += [f"the run has not ended in good order ({meta['state']})"] if meta["state"] != "ended" else []
    return "".join(f"<p class='warn'>{html.escape(line)}</p>" for line in lines)


def seconds(value: float) -> str:
    """Return a time in words: ``"46.7 s"``, ``"812 ms"``, ``"0.4 ms"``."""
    if not np.isfinite(value):
        return "–"
    if abs(value) >= 1:
        return f"{value:,.3g} s" if abs(value) < 1000 else f"{value:,.0f} s"
    return f"{value * 1e3:.0f} ms" if abs(value) >= 0.01 else f"{value * 1e3:.2g} ms"


def cards(run: Run, facts: dict[str, Any]) -> str:
    """Return the numbers that one looks at first."""
    stats, bubble = facts["stats"], facts["bubble"]
    shown = [
        (seconds(stats.step_s_median), f"step, median (p10 {seconds(stats.step_s_p10)}, p90 {seconds(stats.step_s_p90)})"),
        (f"{stats.tokens_per_s:,.0f}" if np.isfinite(stats.tokens_per_s) else "–", "tokens per second"),
        (f"{stats.mfu:.2%}" if np.isfinite(stats.mfu) else "–", "model FLOPs utilisation"),
        (f"{float(bubble.median()):.0%}" if bubble.size else "–", "pipeline bubble, median of ranks and steps"),
        (f"{stats.loss_first:.3f} → {stats.loss_last:.3f}", f"loss over {int(stats.num_steps)} steps")
        if np.isfinite(stats.loss_last) else (f"{int(stats.num_steps)}", "steps; no losses were recorded"),
        (bytes_text(run.store.size_bytes()), f"{run.events.sizes['event']:,} events on disk"),
    ]  # fmt: skip
    return card_row(shown)


def card_row(shown: list[tuple[str, str]]) -> str:
    """Return (number, what it is) as cards."""
    cards = "".join(f"<div class='card'><b>{html.escape(a)}</b><span>{html.escape(b)}</span></div>" for a, b in shown)
    return f"<div class='cards'>{cards}</div>"


def curves(run: Run, facts: dict[str, Any]) -> str:
    """Return loss and step time by step."""
    length = facts["length"]
    x = length["step"].values.astype(float).tolist()
    unit, scale = ("s", 1.0) if float(length.median()) >= 1 else ("ms", 1e3)
    colour = "var(--c-b-wait_peer)"
    b = svg.line_chart(
        x,
        (length.values * scale).tolist(),
        title="step time by step",
        x_label="step",
        y_label=unit,
        colour=colour,
        zero=True,
    )
    loss = run.steps.get("loss")
    if loss is None or not np.isfinite(loss.values).any():
        return f"<div class='two'><div>{b}</div><div>{note('No losses were recorded.')}</div></div>"
    mean = loss.mean("rank", skipna=True)
    xs = mean["step"].values.astype(float).tolist()
    a = svg.line_chart(
        xs, mean.values.tolist(), title="loss by step", x_label="step", y_label="loss", colour="var(--c-b-compute)"
    )
    return f"<div class='two'><div>{a}</div><div>{b}</div></div>"


def timeline(run: Run, facts: dict[str, Any]) -> str:
    """Return the median step, rank by rank."""
    ranks = sorted(facts["labels"])[:MOST_RANKS]
    events = run.sel(step=facts["step"], rank=ranks, incarnation=len(run.incarnations) - 1)
    many = len(facts["labels"])
    said = note(f"The first {MOST_RANKS} of {many} ranks.") if many > MOST_RANKS else ""
    return said + step_timeline(events, labels=facts["labels"])


def breakdown(facts: dict[str, Any]) -> str:
    """Return where the time goes, by rank."""
    parts: xr.Dataset = facts["breakdown"]
    mean = parts.seconds.mean("step").isel(rank=slice(0, MOST_RANKS)) * 1e3
    labels = [facts["labels"][int(r)] for r in mean["rank"].values]
    rows = [(str(c), f"var(--c-b-{c})", mean.sel(category=c).values.tolist()) for c in BREAKDOWN]
    key = svg.legend([(name.replace("_", " "), colour) for name, colour, _ in rows])
    chart = svg.stacked_bars(
        labels, rows, title="mean time per step by category and rank", unit="ms per step, mean over steps", width=1000
    )
    bubble = parts.bubble_s.mean("step").to_pandas() * 1e3
    beside = pd.DataFrame(
        {"overlapped": parts.overlapped_s.mean("step").values * 1e3, **{c: bubble[c] for c in bubble}},
        index=parts["rank"].values,
    )
    beside.index = [facts["labels"][int(r)] for r in beside.index]
    beside.columns = ["overlapped transfer", *(f"bubble: {c.replace('_', '-')}" for c in bubble)]
    return key + chart + f"<div class='scroll'>{table(beside.head(MOST_RANKS).round(1), 'ms per step')}</div>"


def operations(run: Run, facts: dict[str, Any]) -> str:
    """Return the operations that take longest."""
    ops = analysis.op_statistics(run, step=facts["step"]).head(16).reset_index()
    ops["op"] = ops["op"].astype(str) + np.where(
        ops["phase"].astype(str) == "none", "", " · " + ops["phase"].astype(str)
    )
    shown = pd.DataFrame(
        {
            "category": ops["category"].astype(str).to_numpy(),
            "count": ops["count"].to_numpy(),
            "total ms": (ops["total_s"] * 1e3).round(2).to_numpy(),
            "median ms": (ops["median_s"] * 1e3).round(3).to_numpy(),
            "p90 ms": (ops["p90_s"] * 1e3).round(3).to_numpy(),
        },
        index=ops["op"].to_numpy(),
    )
    return f"<div class='scroll'>{table(shown, 'operation')}</div>"


def method(run: Run) -> str:
    """Return how the numbers were got."""
    lines = [
        "The window of a step reaches from the first start to the last end of its events over all ranks; the categories exclude one "
        "another and sum to it (mappnb.analysis.breakdown).",
        "Wait for a peer: from a rank's own arrival at a collective or transfer until its last member has arrived. Transfer: from then on.",
        "Bubble: time in which a rank runs no forward and no backward, between the first start and the last end of these over all ranks.",
        f"Times of ranks on different hosts are compared by the clock model {run.meta['clock_model']!r}; on one host they are exact.",
        "MFU: model FLOPs of the tokens over the peak of all devices; without a known peak none is given.",
        "The first step is left out of medians and means.",
        "Verdicts: self time, waits taken out, against peers of the same role (mappnb.analysis.find_stragglers). Gains: the recorded steps "
        "replayed with the subject as its peers are (mappnb.analysis.actions); none is given that is not larger than the replay error.",
    ]
    return "<ul>" + "".join(f"<li>{html.escape(line)}</li>" for line in lines) + "</ul>"
