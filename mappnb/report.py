"""A self-contained HTML report of a run, and the same as JSON: numbers, pictures, verdicts, and what to change."""

from __future__ import annotations

import html
import json
import os
from pathlib import Path
from typing import Any

from mappnb import _report_findings as findings
from mappnb import _report_parts as parts
from mappnb._report_facts import add_findings, report_data, summary
from mappnb._report_page import page, section
from mappnb.run import Run, attach
from mappnb.segment_writer import write_file

__all__ = ["add_findings", "next_steps", "report_data", "report_html", "summary", "verdict_lines", "write_report"]


MOST_LINES = 5
"""Verdicts in a terminal at most."""


def write_report(
    run_dir: Run | str | os.PathLike[str],
    output: str | os.PathLike[str] | None = None,
    *,
    json_output: str | os.PathLike[str] | None = None,
    facts: dict[str, Any] | None = None,
) -> Path:
    """Write the report of a run into one HTML file that needs nothing else, or as JSON; returns its path.

    Parameters
    ----------
    run_dir : Run or path
        The run.
    output : path, optional
        The file; ``report.html`` in the run directory by default. A name that ends in ``.json`` gets the JSON alone.
    json_output : path, optional
        A file for the JSON beside the page.
    facts : dict, optional
        What :func:`summary` said of the run, where it was asked already.

    Raises
    ------
    MappnbError
        If no step has ended.
    """
    run = run_dir if isinstance(run_dir, Run) else attach(run_dir)
    path = Path(output) if output is not None else Path(run.path) / "report.html"
    whole = add_findings(run, facts or summary(run))
    files = {path: _json(run, whole) if path.suffix == ".json" else report_html(run, facts=whole)}
    if json_output is not None:
        files[Path(json_output)] = _json(run, whole)
    for name, text in files.items():
        content = text.encode()
        write_file(name, lambda sink, content=content: sink.write(content))  # type: ignore[misc]
    return path


def _json(run: Run, facts: dict[str, Any]) -> str:
    return json.dumps(report_data(run, facts), indent=1, allow_nan=False)


def report_html(run: Run, *, facts: dict[str, Any] | None = None) -> str:
    """Return the report of a run as an HTML page; ``facts`` as in :func:`write_report`."""
    facts = add_findings(run, facts or summary(run))
    name = Path(run.path).name
    body = [
        f"<h1>{html.escape(name)}</h1>",
        f"<p class='lead'>{html.escape(parts.lead(run))}</p>",
        parts.warnings(run),
        parts.cards(run, facts),
        section("What to change", lambda: findings.actions(facts)),
        section("Who is slow", lambda: findings.verdicts(facts)),
        section("Each rank against its peers", lambda: findings.heat(run, facts)),
        section("The worst step", lambda: findings.worst(run, facts)),
        section("What it costs", lambda: findings.lost(facts)),
        section("Loss and step time", lambda: parts.curves(run, facts)),
        section(
            f"One step, rank by rank (step {facts['step']}, the nearest to the median)",
            lambda: parts.timeline(run, facts),
        ),
        section("Where the time goes", lambda: parts.breakdown(facts)),
        section("Operations", lambda: parts.operations(run, facts)),
        section("How these numbers were got", lambda: parts.method(run)),
        section("What to open next", lambda: f"<pre>{html.escape(next_steps(run.path, facts['step']))}</pre>"),
    ]
    return page(name, body)


def verdict_lines(facts: dict[str, Any]) -> list[str]:
    """Return who is slow, why, and what it would buy to change that, in a line each; ``facts`` with findings, else nothing."""
    found, told = facts.get("stragglers"), facts.get("actions")
    if found is None:
        return [facts["failed"]["stragglers"]] if "stragglers" in facts.get("failed", {}) else []
    out = []
    for r in found[found["verdict"] == "culprit"].head(MOST_LINES).itertuples(index=False):
        buys = ""
        if told is not None:
            mine = told[(told["subject_kind"] == r.subject_kind) & (told["subject"] == r.subject)]
            buys = f"; put right, a step would be {parts.seconds(mine['gain_s'].iloc[0])} shorter" if len(mine) else ""
        cost = f"{parts.seconds(r.effect_s)} a step ({r.effect_fraction:+.0%})"
        out.append(f"{r.subject_kind} {r.subject} is slow: {r.cause.replace('_', ' ')}, {cost}{buys}")
    undecided = found[found["verdict"] == "undecided"]["subject"].tolist()
    out += [f"undecided: {', '.join(undecided[:8])}"] if undecided and not out else []
    return out or ["nobody is slow"]


def next_steps(path: str, step: int) -> str:
    """Return the lines to type in a notebook."""
    return (
        f"import mappnb\nrun = mappnb.attach({path!r})\nrun                                        # what is there\n"
        "mappnb.analysis.find_stragglers(run)       # who is slow, and why\n"
        "mappnb.analysis.actions(run)               # what to change, and what it buys\n"
        f"run.sel(step={step}, category='collective')  # events as an xarray Dataset\n"
        f"mappnb.analysis.breakdown(run, step={step}).seconds.sel(step={step}).to_pandas()\n"
        "run.steps.loss.mean('rank').to_series()    # the loss curve"
    )
