"""What a report says, before it is drawn: numbers of the run, verdicts, prices; and the same as plain values for JSON."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from mappnb import analysis
from mappnb.display import layout_known
from mappnb.errors import MappnbError
from mappnb.run import Run

__all__ = ["add_findings", "plain", "report_data", "summary", "worst_step"]

MOST_EVENTS = 3_000_000
"""Events that the breakdown is made of at most; of longer runs the steps around the median one are taken."""
Facts = dict[str, Any]


def summary(run: Run) -> Facts:
    """Return what terminal and page both show of a run.

    Returns
    -------
    dict
        ``stats`` (Series, :func:`mappnb.analysis.step_statistics`); ``length`` (step,), s; ``step``, the step nearest to the median
        length; ``breakdown`` and ``bubble`` of that step and of all timed steps; ``labels`` of the ranks.

    Raises
    ------
    MappnbError
        If no step has ended.
    """
    stats, length = _lengths(run)
    timed = length.isel(step=slice(min(1, length.sizes["step"] - 1), None)).dropna("step")
    middle = int(timed["step"].values[np.abs(timed.values - stats.step_s_median).argmin()])
    events = run.sel(step=_window(run, timed["step"].values, middle))
    newest = events.isel(event=np.flatnonzero(events.incarnation.values == len(run.incarnations) - 1))
    parts = analysis.breakdown(newest)
    ranks = [int(r) for r in parts["rank"].values]
    placed = run.layout.world_size > 1 and layout_known(run)
    return {
        "stats": stats,
        "length": length,
        "step": middle,
        "breakdown": parts,
        "bubble": analysis.bubble_fraction(newest),
        "labels": {r: f"rank {r}" + (f" · {run.layout.label(r)}" if placed else "") for r in ranks},
    }


def _lengths(run: Run) -> tuple[pd.Series[float], xr.DataArray]:
    """Return statistics and lengths of the steps, from the step table; where there is none, from the events."""
    try:
        return analysis.step_statistics(run), run.steps.step_s
    except MappnbError:
        try:
            table = analysis.work(run)
        except MappnbError:
            table = None
        if table is None:
            raise
    length = table["step_s"]
    timed = length.values[1:] if len(length) > 1 else length.values
    p10, median, p90 = np.quantile(timed, [0.1, 0.5, 0.9])
    values: dict[str, float] = {"num_steps": len(length), "step_s_median": median, "step_s_p10": p10, "step_s_p90": p90}
    values |= dict.fromkeys(("tokens_per_s", "mfu", "loss_first", "loss_last"), math.nan)
    values |= {
        "step_s_max": float(timed.max()),
        "slowest_step": int(length["step"].values[int(length.values.argmax())]),
    }
    return pd.Series(values), length


def _window(run: Run, steps: np.ndarray[Any, Any], middle: int) -> slice:
    """Return the steps to break down: all, or of a long run as many around the middle as fit."""
    rows = run.events.sizes["event"]
    count = max(1, int(len(steps) * min(1.0, MOST_EVENTS / max(rows, 1))))
    at = int(np.searchsorted(steps, middle))
    first = min(max(0, at - count // 2), len(steps) - count)
    return slice(int(steps[first]), int(steps[first + count - 1]))


def add_findings(run: Run, facts: Facts) -> Facts:
    """Return facts with ``work``, ``stragglers``, ``actions`` and ``what_if``; what could not be made is in ``failed``, with the reason."""
    out = {**facts, "failed": dict(facts.get("failed", {}))}

    def make(name: str, call: Callable[[], Any]) -> None:
        if name in out:
            return
        try:
            out[name] = call()
        except MappnbError as err:
            out[name], out["failed"][name] = None, str(err)

    make("work", lambda: analysis.work(run))
    make("stragglers", lambda: analysis.find_stragglers(run, work=out["work"]))
    make("actions", lambda: None if out["stragglers"] is None else analysis.actions(run, stragglers=out["stragglers"]))
    make("what_if", lambda: analysis.what_if(run, by=("dp_rank", "stage", "op")))
    return out


def worst_step(facts: Facts) -> tuple[int, pd.Series[Any]] | None:
    """Return the step in which the largest culprit costs most, and the culprit; None where there is none."""
    found, work = facts["stragglers"], facts["work"]
    if found is None or work is None:
        return None
    culprits = found[(found["verdict"] == "culprit") & (found["first_step"] >= 0)]
    if not len(culprits):
        return None
    row = culprits.iloc[0]
    steps = work["step"].values
    inside = np.flatnonzero((steps >= row["first_step"]) & (steps <= row["last_step"]))
    ranks = np.flatnonzero(np.isin(work["rank"].values, marked_ranks(row, work)))
    cost = work["step_s"].values[inside]
    if row["subject_kind"] in ("rank", "host") and len(ranks):
        own = work["part_kind"].values.astype(str) != "host"
        cost = work["seconds"].values[:, :, own].sum(2)[np.ix_(inside, ranks)].max(1)
    return int(steps[inside[int(np.argmax(cost))]]), row


def marked_ranks(row: pd.Series[Any], work: xr.Dataset) -> list[int]:
    """Return the ranks that a verdict is about."""
    kind, subject = row["subject_kind"], str(row["subject"])
    if kind == "rank":
        return [int(subject)]
    if kind == "host":
        return [int(r) for r in work["rank"].values[work["host"].values.astype(str) == subject]]
    if kind == "link":
        return [int(x) for x in subject.replace("→", "->").split("->") if x.strip().isdigit()]
    if kind == "stage":
        mine = work["part_stage"].values == int(subject)
        return [int(r) for r in work["rank"].values[(work["count"].values[:, :, mine] > 0).any((0, 2))]]
    return []


def report_data(run: Run, facts: Facts) -> dict[str, Any]:
    """Return the report as plain values, ready for JSON: text, numbers (None for none), lists and dictionaries."""
    found, acts, buys = (facts[n] for n in ("stragglers", "actions", "what_if"))
    worst = worst_step(facts)
    meta = run.meta
    out = {
        "run": {
            k: meta[k]
            for k in (
                "run_id",
                "world_size",
                "num_incarnations",
                "state",
                "hosts",
                "versions",
                "missing_ranks",
                "dropped",
            )
        }
        | {"path": run.path, "layout": str(run.layout) if layout_known(run) else None, "degraded": meta["degraded"]},
        "steps": facts["stats"].to_dict(),
        "verdicts": [] if found is None else found[found["verdict"] != "clear"].to_dict("records"),
        "num_clear": 0 if found is None else int((found["verdict"] == "clear").sum()),
        "notes": [] if found is None else list(found.attrs.get("notes", [])),
        "worst_step": None
        if worst is None
        else {"step": worst[0], "subject_kind": worst[1]["subject_kind"], "subject": worst[1]["subject"]},
        "what_if": None if buys is None else _what_if(buys),
        "actions": [] if acts is None else acts.to_dict("records"),
        "unpriced": [] if acts is None else acts.attrs["unpriced"],
        "scope": None if acts is None else {k: v for k, v in acts.attrs.items() if k not in ("unpriced", "notes")},
        "not_made": facts["failed"],
    }
    return {k: plain(v) for k, v in out.items()}


def _what_if(told: xr.Dataset) -> dict[str, Any]:
    out: dict[str, Any] = {str(n): v.item() for n, v in told.data_vars.items() if v.ndim == 0}
    for by in ("stage", "dp_rank", "op"):
        if f"slowdown_by_{by}" in told:
            column = told[f"slowdown_by_{by}"]
            out[f"slowdown_by_{by}"] = dict(
                zip(map(str, column[by].values.tolist()), column.values.tolist(), strict=True)
            )
    return out | {"about": {str(k): v for k, v in told.attrs.items()}}


def plain(value: Any) -> Any:
    """Return a value as strict JSON can hold it."""
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple, set, np.ndarray)):
        return [plain(v) for v in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)
