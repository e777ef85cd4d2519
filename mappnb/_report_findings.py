"""Sections of the report about who is slow: verdicts, heatmap, the worst step, what-if, actions."""

from __future__ import annotations

import html
from typing import Any

import numpy as np
import pandas as pd

from mappnb import svg
from mappnb._report_facts import marked_ranks, worst_step
from mappnb._report_heat import heatmap
from mappnb._report_page import note, table
from mappnb._report_parts import card_row, seconds
from mappnb.run import Run
from mappnb.stepview import step_timeline

__all__ = ["actions", "heat", "lost", "verdicts", "worst"]

MOST_ROWS = 40
"""Rows of the verdict table at most."""
MOST_BARS = 16
"""Bars of a chart at most: the largest."""
LEAST_SHOWN = 1e-4
"""Smaller replay errors are shown as this."""
HIDDEN = 0.5
"""If a gain is less than this share of the effect, it is said that the rest hides behind something else."""
MOST_LANES = 24
"""Lanes of the worst step at most."""
MOST_LETTERS = 22
"""Letters of a bar's name that have room."""
ORDER = ("culprit", "undecided", "victim")
Facts = dict[str, Any]


def _failed(facts: Facts, name: str) -> str:
    return note(f"Not shown: {facts['failed'].get(name, 'the run lacks what it needs')}")


def verdicts(facts: Facts) -> str:
    """Return who is slow, who is undecided and who only passes a delay on."""
    found: pd.DataFrame | None = facts["stragglers"]
    if found is None:
        return _failed(facts, "stragglers")
    rows = pd.concat([found[found["verdict"] == v] for v in ORDER])
    clear = int((found["verdict"] == "clear").sum())
    out = ""
    if len(rows):
        shown = rows.head(MOST_ROWS)
        frame = pd.DataFrame(
            {
                "verdict": shown["verdict"].to_numpy(),
                "cause": shown["cause"].str.replace("_", " ").to_numpy(),
                "effect a step": [seconds(x) for x in shown["effect_s"]],
                "of the step": [f"{x:+.1%}" for x in shown["effect_fraction"]],
                "steps": [
                    f"{a} to {b}" if a >= 0 else "–"
                    for a, b in zip(shown["first_step"], shown["last_step"], strict=True)
                ],
                "evidence": shown["evidence"].to_numpy(),
            },
            index=[
                "the job" if k == "job" else f"{k} {s}"
                for k, s in zip(shown["subject_kind"], shown["subject"], strict=True)
            ],
        )
        out = f"<div class='scroll'>{table(frame, 'who', text=('verdict', 'cause', 'evidence'))}</div>"
        if len(rows) > MOST_ROWS:
            out += note(f"The first {MOST_ROWS} of {len(rows)}.")
    return (
        out
        + note(f"{clear} subject{'s are' if clear != 1 else ' is'} clear.")
        + "".join(note(text) for text in found.attrs.get("notes", []))
    )


def heat(run: Run, facts: Facts) -> str:
    """Return self time against peers, ranks by steps."""
    if facts["work"] is None:
        return _failed(facts, "work")
    named: list[int] = []
    if facts["stragglers"] is not None:
        for _, row in facts["stragglers"][facts["stragglers"]["verdict"] == "culprit"].iterrows():
            named += marked_ranks(row, facts["work"])
    return heatmap(facts["work"], run.layout, labels=facts["labels"], named=named)


def worst(run: Run, facts: Facts) -> str:
    """Return the step in which the largest culprit costs most."""
    found = worst_step(facts)
    if found is None:
        return note("No culprit, so no step is worse than the others by one.")
    step, row = found
    marked = marked_ranks(row, facts["work"])
    ranks = _beside(run, marked, [int(r) for r in facts["work"]["rank"].values])
    newest = run.sel(step=step, rank=ranks)
    newest = newest.isel(event=np.flatnonzero(newest.incarnation.values == newest.incarnation.values.max()))
    labels = {r: facts["labels"].get(r, f"rank {r}") for r in ranks}
    said = (
        f"Step {step}: {row['subject_kind']} {row['subject']} ({row['cause'].replace('_', ' ')}); its lanes are marked."
    )
    if len(ranks) < run.meta["world_size"]:
        said += f" {len(ranks)} of {run.meta['world_size']} ranks: these, their pipeline and their peers."
    return note(said) + step_timeline(newest, labels=labels, marked=marked)


def _beside(run: Run, marked: list[int], ranks: list[int]) -> list[int]:
    """Return the ranks to draw: all of a small run, else the marked ones, those of their replica and their peers."""
    if len(ranks) <= MOST_LANES:
        return ranks
    layout = run.layout
    out = list(marked[: MOST_LANES // 3])
    if out and max(ranks) < layout.world_size:
        place = {r: layout.coords(r) for r in ranks}
        here, replicas = place[out[0]], {place[r]["dp"] for r in out}
        peers = [r for r in ranks if place[r]["pp"] == here["pp"] and r not in set(out)]
        out += sorted(peers, key=lambda r: sum(place[r][k] != v for k, v in here.items()))[: MOST_LANES // 4]
        pipeline = [r for r in ranks if place[r]["dp"] in replicas and r not in set(out)]
        out += sorted(
            pipeline, key=lambda r: (place[r]["dp"] != here["dp"], sum(place[r][k] != v for k, v in here.items()))
        )
    out += [r for r in ranks if r not in set(out)][:MOST_LANES]
    return sorted(out[:MOST_LANES])


def lost(facts: Facts) -> str:
    """Return what stragglers cost, and which part of the job it comes from."""
    told = facts["what_if"]
    if told is None:
        return _failed(facts, "what_if")
    error = float(told["replay_error"])
    sure = "" if bool(told["reliable"]) else " (not larger than the replay error: no conclusion)"
    cards = [
        (f"{float(told['slowdown']):.3f}", f"slowdown: the steps as replayed over all ideal{sure}"),
        (f"{float(told['wasted_fraction']):.1%}", "of the time would be saved if nothing were slow"),
        (
            f"{float(told['wasted_gpu_hours']):.3g} h",
            f"GPU-hours, over {told.sizes['step']} steps and {told.attrs.get('num_gpus', 0)} GPUs",
        ),
        (_percent(error), "replay error: nothing smaller is known"),
    ]
    charts = "".join(
        f"<div>{_bars(told, by)}</div>" for by in ("stage", "dp_rank", "op") if f"slowdown_by_{by}" in told
    )
    about = note(
        f"Ideal: {told.attrs['ideal']}."
        + (f" Steps: {told.attrs['steps_chosen']}." if told.attrs.get("steps_chosen") else "")
    )
    return card_row(cards) + f"<div class='two' style='margin-top:12px'>{charts}</div>" + about


def _short(text: str) -> str:
    return text if len(text) <= MOST_LETTERS else text[: MOST_LETTERS - 1] + "…"


def _percent(value: float) -> str:
    return f"{value:.2%}" if value >= LEAST_SHOWN else f"below {LEAST_SHOWN:.2%}"


def _bars(told: Any, by: str) -> str:
    column = told[f"slowdown_by_{by}"]
    order = np.argsort(-column.values, kind="stable")[:MOST_BARS]
    order = np.sort(order) if by != "op" else order
    words = {"stage": "stage", "dp_rank": "data-parallel rank", "op": ""}[by]
    labels = [_short(f"{words} {v}".strip().replace("_", " ")) for v in column[by].values[order].tolist()]
    values = [max(0.0, (v - 1) * 100) for v in column.values[order].tolist()]
    title = {"stage": "by stage", "dp_rank": "by data-parallel rank", "op": "by operation"}[by]
    many = f", the {MOST_BARS} largest of {len(column)}" if len(column) > MOST_BARS else ""
    chart = svg.stacked_bars(
        labels, [("slowdown", "var(--c-b-wait_peer)", values)], title=f"slowdown {title}", unit="% longer with only this as measured",
        width=520, bar=18,
    )  # fmt: skip
    return f"<b>{html.escape(title)}</b><span class='dim'>{html.escape(many)}</span>{chart}"


def actions(facts: Facts) -> str:
    """Return what to change, at most five, and what was seen and is no action."""
    told: pd.DataFrame | None = facts["actions"]
    if told is None:
        return _failed(facts, "actions" if "actions" in facts["failed"] else "stragglers")
    out = "".join(_action(i + 1, row, told) for i, row in enumerate(told.itertuples(index=False)))
    unpriced = told.attrs["unpriced"]
    if not len(told) and not unpriced:
        out = "<p><b>Nothing to fix found.</b></p>" + note(_checked(facts))
    elif not len(told) and (facts["stragglers"]["verdict"] == "undecided").all():
        out = "<p><b>Not judged.</b></p>"
    elif not len(told):
        out = "<p><b>No action with a gain that the replay can tell.</b></p>" + note(_checked(facts))
    together = told.attrs.get("together_s", np.nan)
    if len(told) > 1 and np.isfinite(together):
        out += note(f"All of these together: {seconds(together)} a step.")
    if unpriced:
        items = "".join(f"<li><b>{html.escape(u['finding'])}</b>: {html.escape(u['why'])}</li>" for u in unpriced)
        out += f"<h3>Seen, not priced</h3><ul>{items}</ul>"
    return out


def _action(number: int, row: Any, told: pd.DataFrame) -> str:
    error = told.attrs.get("replay_error", np.nan)
    gain = (
        f"{seconds(row.gain_s)} a step ({row.gain_fraction:.1%}), {row.gain_gpu_hours:.3g} GPU-hours over the steps recorded; "
        f"confidence {row.confidence}; replay error {_percent(error)}"
    )
    lines = [
        f"<h3>{number}. {html.escape(row.finding[:1].upper() + row.finding[1:])}</h3>",
        f"<p>{html.escape(row.action[:1].upper() + row.action[1:])}.</p>",
        f"<p>Change: <code>{html.escape(row.target)}</code></p>",
        f"<p class='gain'>Gain: {html.escape(gain)}</p>",
        f"<p class='dim'>{html.escape(row.evidence)}</p>",
    ]
    if row.gain_s < HIDDEN * row.effect_s and row.first_step >= 0:
        costs = f"It costs {seconds(row.effect_s)} in a step in which it is slow"
        lines.append(note(f"{costs}; the rest of that hides behind other waits, or is not in each step."))
    return f"<div class='action'>{''.join(lines)}</div>"


def _checked(facts: Facts) -> str:
    """Return what was looked at, and how small an effect could have been seen."""
    told, work = facts["actions"], facts["work"]
    least = told.attrs.get("least_effect_s", np.nan)
    steps = work.sizes["step"] if work is not None else 0
    seen = (
        f"A rank that takes {seconds(least)} a step longer than its peers, lastingly, would have been named."
        if np.isfinite(least)
        else ""
    )
    return (
        f"Checked: {told.attrs['num_ranks']} ranks in {steps} steps, for ranks, hosts, stages and links that are slow, for unequal data, "
        f"garbage collection, data loading and checkpoints. {seen}"
    )
