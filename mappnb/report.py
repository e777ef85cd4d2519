"""A self-contained HTML report of a run: numbers, pictures, how they were got, and what to open next."""

from __future__ import annotations

import html
import os
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from mappnb import analysis, palette, svg
from mappnb.display import bytes_text, layout_known
from mappnb.run import Run, attach
from mappnb.segment_writer import write_file
from mappnb.stepview import step_timeline
from mappnb.terms import BREAKDOWN

__all__ = ["report_html", "summary", "write_report"]

MOST_RANKS = 64
_STYLE = """
:root{--bg:#fff;--fg:#1b1f24;--dim:#5c6670;--line:#d8dde3;--card:#f6f8fa;color-scheme:light dark}
@media(prefers-color-scheme:dark){:root{--bg:#15181c;--fg:#e6e9ed;--dim:#9aa5b1;--line:#343b43;--card:#1d2227}}
body{background:var(--bg);color:var(--fg);font:15px/1.5 system-ui,sans-serif;max-width:1060px;margin:28px auto;padding:0 18px}
h1{font-size:24px;margin:0}h2{font-size:18px;margin:34px 0 6px}p.lead{color:var(--dim);margin:2px 0 18px}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:10px}
.card{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:9px 12px}
.card b{display:block;font-size:20px;font-weight:600}.card span{color:var(--dim);font-size:13px}
.two{display:grid;grid-template-columns:repeat(auto-fit,minmax(420px,1fr));gap:18px}
svg{display:block;max-width:100%;margin-bottom:14px}svg .t{font:11.5px system-ui,sans-serif;fill:var(--fg)}svg .axis{fill:var(--dim)}
svg .grid{stroke:var(--line);stroke-width:1}svg .inbar{fill:#fff}svg .onlight{fill:var(--fg)}
.legend{margin:6px 0;font-size:13px}.key{margin-right:14px;white-space:nowrap}.key i{display:inline-block;width:12px;height:12px;
border-radius:2px;margin-right:5px;vertical-align:-1px}
table{border-collapse:collapse;font-size:13.5px;font-variant-numeric:tabular-nums}
th,td{padding:3px 12px 3px 0;border-bottom:1px solid var(--line);text-align:right}th:first-child,td:first-child{text-align:left}
.scroll{overflow-x:auto}.warn{border-left:4px solid #d55e00;background:var(--card);padding:8px 12px}
code,pre{font:13px ui-monospace,monospace}
pre{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:10px 12px;overflow-x:auto}
details{margin:6px 0;color:var(--dim)}
"""


def summary(run: Run) -> dict[str, Any]:
    """Return what terminal and page both show of a run.

    Returns
    -------
    dict
        ``stats`` (Series, :func:`mappnb.analysis.step_statistics`); ``step``, the step nearest to the median length; ``breakdown`` and
        ``bubble`` of that step and of all timed steps; ``labels`` of the ranks.

    Raises
    ------
    MappnbError
        If no step has ended.
    """
    stats = analysis.step_statistics(run)
    length = run.steps.step_s
    timed = length.isel(step=slice(min(1, length.sizes["step"] - 1), None)).dropna("step")
    middle = int(timed["step"].values[np.abs(timed.values - stats.step_s_median).argmin()])
    events = run.sel(step=slice(int(timed["step"].values[0]), int(timed["step"].values[-1])))
    newest = events.isel(event=np.flatnonzero(events.incarnation.values == len(run.incarnations) - 1))
    parts = analysis.breakdown(newest)
    ranks = [int(r) for r in parts["rank"].values]
    placed = run.layout.world_size > 1 and layout_known(run)
    labels = {r: f"rank {r}" + (f" · {run.layout.label(r)}" if placed else "") for r in ranks}
    return {
        "stats": stats,
        "step": middle,
        "breakdown": parts,
        "bubble": analysis.bubble_fraction(newest),
        "labels": labels,
    }


def write_report(
    run_dir: Run | str | os.PathLike[str],
    output: str | os.PathLike[str] | None = None,
    *,
    facts: dict[str, Any] | None = None,
) -> Path:
    """Write the report of a run into one HTML file that needs nothing else; returns its path.

    Parameters
    ----------
    run_dir : Run or path
        The run.
    output : path, optional
        The file; ``report.html`` in the run directory by default.
    facts : dict, optional
        What :func:`summary` said of the run, where it was asked already.
    """
    run = run_dir if isinstance(run_dir, Run) else attach(run_dir)
    path = Path(output) if output is not None else Path(run.path) / "report.html"
    page = report_html(run, facts=facts).encode()
    write_file(path, lambda sink: sink.write(page))
    return path


def report_html(run: Run, *, facts: dict[str, Any] | None = None) -> str:
    """Return the report of a run as an HTML page; ``facts`` as in :func:`write_report`."""
    facts = facts or summary(run)
    body = [
        f"<h1>{html.escape(Path(run.path).name)}</h1>",
        f"<p class='lead'>{html.escape(_lead(run))}</p>",
        _warnings(run),
        _cards(run, facts),
        "<h2>Loss and step time</h2>",
        _curves(run),
        f"<h2>One step, rank by rank (step {facts['step']}, the nearest to the median)</h2>",
        _timeline(run, facts),
        "<h2>Where the time goes</h2>",
        _breakdown(facts),
        "<h2>Operations</h2>",
        _operations(run, facts),
        "<h2>How these numbers were got</h2>",
        _method(run),
        "<h2>What to open next</h2>",
        f"<pre>{html.escape(next_steps(run.path, facts['step']))}</pre>",
    ]
    style = palette.css() + _STYLE
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'><meta name='viewport' content='width=device-width'>"
        f"<title>{html.escape(Path(run.path).name)} · mappnb</title><style>{style}</style></head><body>{''.join(body)}</body></html>"
    )


def next_steps(path: str, step: int) -> str:
    """Return the lines to type in a notebook."""
    return (
        f"import mappnb\nrun = mappnb.attach({path!r})\nrun                                        # what is there\n"
        f"run.sel(step={step}, category='collective')  # events as an xarray Dataset\n"
        f"mappnb.analysis.breakdown(run, step={step}).seconds.sel(step={step}).to_pandas()\n"
        "run.steps.loss.mean('rank').to_series()    # the loss curve"
    )


def _lead(run: Run) -> str:
    meta = run.meta
    versions = ", ".join(f"{k} {v}" for k, v in meta["versions"].items())
    where = f"{run.layout if layout_known(run) else 'layout not in the trace'}, {meta['world_size']} ranks on {len(meta['hosts'])} host(s)"
    return " · ".join(filter(None, [where, f"{meta['created']:%Y-%m-%d %H:%M} UTC", f"plan {meta['plan']}", versions]))


def _warnings(run: Run) -> str:
    meta = run.meta
    lines = [f"rank {r}: recording stopped early: {why}" for r, why in meta["degraded"].items()]
    lines += [f"ranks {meta['missing_ranks'][:16]} left no file"] if meta["missing_ranks"] else []
    lines += [f"{where}: {why}" for where, why in list(meta["problems"].items())[:8]]
    lines += [f"{meta['dropped']} events were dropped under pressure"] if meta["dropped"] else []
    lines += [f"the run has not ended in good order ({meta['state']})"] if meta["state"] != "ended" else []
    return "".join(f"<p class='warn'>{html.escape(line)}</p>" for line in lines)


def _cards(run: Run, facts: dict[str, Any]) -> str:
    stats = facts["stats"]
    bubble = facts["bubble"]
    cards = [
        (
            f"{stats.step_s_median * 1e3:.0f} ms",
            f"step, median (p10 {stats.step_s_p10 * 1e3:.0f}, p90 {stats.step_s_p90 * 1e3:.0f})",
        ),
        (f"{stats.tokens_per_s:,.0f}" if np.isfinite(stats.tokens_per_s) else "–", "tokens per second"),
        (f"{stats.mfu:.2%}" if np.isfinite(stats.mfu) else "–", "model FLOPs utilisation"),
        (f"{float(bubble.median()):.0%}" if bubble.size else "–", "pipeline bubble, median of ranks and steps"),
        (
            f"{stats.loss_first:.3f} → {stats.loss_last:.3f}" if np.isfinite(stats.loss_last) else "–",
            f"loss over {int(stats.num_steps)} steps",
        ),
        (bytes_text(run.store.size_bytes()), f"{run.events.sizes['event']:,} events on disk"),
    ]
    return (
        "<div class='cards'>"
        + "".join(f"<div class='card'><b>{html.escape(a)}</b><span>{html.escape(b)}</span></div>" for a, b in cards)
        + "</div>"
    )


def _curves(run: Run) -> str:
    steps = run.steps
    x = steps["step"].values.astype(float).tolist()
    loss = steps.loss.mean("rank", skipna=True).values.tolist()
    length = (steps.step_s.values * 1e3).tolist()
    a = svg.line_chart(x, loss, title="loss by step", x_label="step", y_label="loss", colour="var(--c-b-compute)")
    b = svg.line_chart(
        x, length, title="step time by step", x_label="step", y_label="ms", colour="var(--c-b-wait_peer)", zero=True
    )
    return f"<div class='two'><div>{a}</div><div>{b}</div></div>"


def _timeline(run: Run, facts: dict[str, Any]) -> str:
    ranks = sorted(facts["labels"])[:MOST_RANKS]
    events = run.sel(step=facts["step"], rank=ranks, incarnation=len(run.incarnations) - 1)
    note = (
        f"<p>The first {MOST_RANKS} of {len(facts['labels'])} ranks.</p>" if len(facts["labels"]) > MOST_RANKS else ""
    )
    return note + step_timeline(events, labels=facts["labels"])


def _breakdown(facts: dict[str, Any]) -> str:
    parts: xr.Dataset = facts["breakdown"]
    mean = parts.seconds.mean("step").isel(rank=slice(0, MOST_RANKS)) * 1e3
    labels = [facts["labels"][int(r)] for r in mean["rank"].values]
    rows = [(str(c), f"var(--c-b-{c})", mean.sel(category=c).values.tolist()) for c in BREAKDOWN]
    key = svg.legend([(name.replace("_", " "), colour) for name, colour, _ in rows])
    chart = svg.stacked_bars(
        labels, rows, title="mean time per step by category and rank", unit="ms per step, mean over steps", width=1000
    )
    bubble = parts.bubble_s.mean("step").to_pandas() * 1e3
    table = pd.DataFrame(
        {"overlapped": parts.overlapped_s.mean("step").values * 1e3, **{c: bubble[c] for c in bubble}},
        index=parts["rank"].values,
    )
    table.index = [facts["labels"][int(r)] for r in table.index]
    table.columns = ["overlapped transfer", *(f"bubble: {c.replace('_', '-')}" for c in bubble)]
    return key + chart + f"<div class='scroll'>{_table(table.head(MOST_RANKS).round(1), 'ms per step')}</div>"


def _operations(run: Run, facts: dict[str, Any]) -> str:
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
    return f"<div class='scroll'>{_table(shown, 'operation')}</div>"


def _table(frame: pd.DataFrame, corner: str) -> str:
    head = "".join(f"<th>{html.escape(str(c))}</th>" for c in (corner, *frame.columns))
    rows = "".join(
        f"<tr><td>{html.escape(str(i))}</td>" + "".join(f"<td>{html.escape(str(v))}</td>" for v in row) + "</tr>"
        for i, row in zip(frame.index, frame.to_numpy().tolist(), strict=True)
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def _method(run: Run) -> str:
    lines = [
        "The window of a step reaches from the first start to the last end of its events over all ranks; the categories exclude one "
        "another and sum to it (mappnb.analysis.breakdown).",
        "Wait for a peer: from a rank's own arrival at a collective or transfer until its last member has arrived. Transfer: from then on.",
        "Bubble: time in which a rank runs no forward and no backward, between the first start and the last end of these over all ranks.",
        f"Times of ranks on different hosts are compared by the clock model {run.meta['clock_model']!r}; on one host they are exact.",
        "MFU: model FLOPs of the tokens over the peak of all devices; without a known peak none is given.",
        "The first step is left out of medians and means.",
    ]
    return "<ul>" + "".join(f"<li>{html.escape(line)}</li>" for line in lines) + "</ul>"
