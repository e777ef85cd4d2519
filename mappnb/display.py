"""How a run shows itself: a stable line of text, and a small escaped HTML table."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mappnb.run import Run

__all__ = ["bytes_text", "layout_known", "layout_told", "run_html", "run_text", "table_html"]


_NO_LAYOUT = "layout not in the trace"


def bytes_text(size: float) -> str:
    """Return a size in words: ``"3.2 MB"``."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(size) < 1000 or unit == "TB":
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return ""


def layout_told(run: Run) -> bool:
    """Return whether a rank has told the layout: ranks of a job that has just begun have not yet."""
    return any(info.get("layout") for i in run.incarnations for info in i.ranks.values())


def layout_known(run: Run) -> bool:
    """Return whether ``run.layout`` is what the job was: False for imported traces of several ranks that do not tell it."""
    imported = any((i.info.get("launch") or {}).get("imported") for i in run.incarnations)
    return layout_told(run) or not imported or run.layout.world_size == 1


def run_text(run: Run) -> str:
    """Return the stable text of a run: no address, path or time in it."""
    meta = run.meta
    notes = "".join(
        f", {text}"
        for text, there in (
            (f"{len(meta['degraded'])} ranks degraded", meta["degraded"]),
            (f"{len(meta['degraded_activations'])} ranks stopped capturing activations", meta["degraded_activations"]),
            (f"{len(meta['missing_ranks'])} ranks missing", meta["missing_ranks"]),
            (f"{len(meta['problems'])} problems", meta["problems"]),
        )
        if there
    )
    restarts = f", {len(run.incarnations)} incarnations" if len(run.incarnations) > 1 else ""
    layout = run.layout if layout_known(run) else _NO_LAYOUT
    return f"Run({meta['world_size']} ranks, {layout}{restarts}{notes})"


def table_html(rows: list[tuple[str, Any]], *, caption: str) -> str:
    """Return a two-column table; every text is escaped."""
    body = "".join(
        f"<tr><th style='text-align:left;font-weight:600;padding:1px 12px 1px 0'>{html.escape(str(k))}</th>"
        f"<td style='text-align:left'>{html.escape(str(v))}</td></tr>"
        for k, v in rows
    )
    return f"<table class='mappnb-run'><caption style='text-align:left;font-weight:600'>{html.escape(caption)}</caption>{body}</table>"


def _listed(items: list[str], most: int = 4) -> str:
    return ", ".join(items[:most]) + (f" and {len(items) - most} more" if len(items) > most else "")


def _activations_text(run: Run) -> str:
    """Return who wrote activations; the blocks are not opened for it."""
    ranks = {r for i in run.incarnations for r in run.store.activation_ranks(i.number)}
    return f"of {len(ranks)} ranks: run.activations" if ranks else ""


def run_html(run: Run) -> str:
    """Return the run as a table: layout, steps, size, state, and what is missing or was lost."""
    meta = run.meta
    steps = run.steps
    versions = ", ".join(f"{k} {v}" for k, v in meta["versions"].items())
    layout = run.layout if layout_known(run) else _NO_LAYOUT
    rows: list[tuple[str, Any]] = [
        ("folder", run.path),
        ("state", meta["state"]),
        ("layout", f"{layout} ({meta['world_size']} ranks on {_listed(meta['hosts'])})"),
        (
            "steps",
            f"{steps.sizes['step']} ({int(steps.step[0])} to {int(steps.step[-1])})"
            if steps.sizes["step"]
            else "none yet",
        ),
        ("created", f"{meta['created']:%Y-%m-%d %H:%M:%S} UTC, {len(run.incarnations)} incarnation(s)"),
        ("size", bytes_text(run.store.size_bytes())),
        ("plan", meta["plan"]),
        ("activations", _activations_text(run)),
        ("versions", versions),
    ]
    rows += [(f"rank {r} degraded", why) for r, why in list(meta["degraded"].items())[:8]]
    rows += [(f"rank {r}, activations", f"stopped: {w}") for r, w in list(meta["degraded_activations"].items())[:8]]
    if meta["missing_ranks"]:
        rows.append(("missing ranks", _listed([str(r) for r in meta["missing_ranks"]], 16)))
    if meta["dropped"]:
        rows.append(("events dropped", f"{meta['dropped']} (recorder under pressure; the oldest were given up)"))
    rows += [(f"skipped {k}", v) for k, v in list(meta["problems"].items())[:8]]
    return table_html([(name, text) for name, text in rows if text != ""], caption="mappnb run")
