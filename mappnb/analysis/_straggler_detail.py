"""What the self-time table cannot tell: links, data, layers, telemetry; reads events of few steps and ranks."""

from __future__ import annotations

import numpy as np
import xarray as xr

from mappnb.analysis._straggler_find import Excess, Finding, Settings
from mappnb.analysis._straggler_job import find_job
from mappnb.analysis._straggler_layers import slow_layer
from mappnb.analysis._straggler_links import find_links
from mappnb.analysis._straggler_price import price_skew
from mappnb.analysis._straggler_skew import find_skew
from mappnb.analysis._straggler_source import Source
from mappnb.analysis._straggler_telemetry import MORE_TOKENS, Beside
from mappnb.analysis.skew import length_model
from mappnb.errors import MappnbError
from mappnb.layout import Layout
from mappnb.run import Run

__all__ = ["add_details"]

FITTED = 8
"""Steps to which lengths are fitted at most."""
LOOKED_INTO = 16
"""Findings, the largest first, whose layers are looked into."""


def add_details(
    run: Run | xr.Dataset,
    judged: xr.Dataset,
    layout: Layout,
    found: tuple[list[Finding], Excess],
    settings: Settings,
    notes: list[str],
) -> list[Finding]:
    """Return findings with links, data and layers looked into.

    Parameters
    ----------
    run : Run or Dataset, dims (event,)
        Events of all ranks.
    judged : Dataset, dims (step, rank, part)
        Self-time table of the judged steps.
    layout : Layout
        Parallel layout.
    found : tuple of (list of Finding, Excess)
        What the table tells.
    settings : Settings
        Thresholds.
    notes : list of str
        Gets what is to be said.
    """
    findings, excess = found
    source, beside = Source(run, judged), Beside(run, excess)
    if beside.telemetry is None:
        notes.append("no telemetry: a hardware cause is not confirmed by clocks, a late host not by its run queue")
    if len(excess.table.step) < 2:
        return findings
    _causes(findings, source, excess, layout, beside)
    transfer_s = judged["transfer_s"].values.astype(np.float64)
    links = find_links(source, excess, transfer_s, settings, notes)
    skew = find_skew(source, excess, judged, layout, settings)
    for f in skew:
        _lengths(f, run, beside, excess)
        price_skew(f, findings, source, excess)
    return findings + links + skew + find_job(excess, [*skew, *links], transfer_s, settings)


def _lengths(skew: Finding, run: Run | xr.Dataset, beside: Beside, excess: Excess) -> None:
    """Say how much of the excess recorded lengths explain."""
    if not isinstance(run, Run) or beside.metrics is None or "document_tokens" not in beside.metrics.name.values:
        return
    steps = excess.table.step[skew.active[:FITTED]]
    try:
        explained = length_model(run, step=steps.tolist())["excess_explained"].values
    except MappnbError:
        return  # lengths of other steps only
    if np.isfinite(explained).any():
        share = float(np.nanmedian(explained))
        skew.evidence.append(f"the recorded lengths explain {share:.0%} of the time above the mean (length_model)")


def _causes(findings: list[Finding], source: Source, excess: Excess, layout: Layout, beside: Beside) -> None:
    """Look into the ranks and hosts whose compute or host is slow."""
    judged = [
        f for f in findings if f.subject_kind in ("rank", "host") and f.verdict in ("culprit", "undecided") and f.kinds
    ]
    guilty = {c for f in judged for c in f.ranks}
    tokens = beside.tokens(layout)
    for f in sorted(judged, key=lambda f: -f.effect_s)[:LOOKED_INTO]:
        main = max(f.kinds, key=lambda k: f.kinds[k])
        if main == "host" and (text := beside.run_queue(f)):
            f.evidence.append(text)
        if main != "compute":
            continue
        load = max((tokens.get(int(excess.table.rank[c]), 0.0) for c in f.ranks), default=0.0)
        signs = beside.hardware(f)
        if signs:
            f.cause = "hardware"
            f.evidence += signs
        elif load >= MORE_TOKENS:
            f.cause = "moe_load"
            f.evidence.append(f"its experts got {load:.2f} times the mean number of tokens of their group")
        else:
            _layer(f, source, excess, guilty)


def _layer(f: Finding, source: Source, excess: Excess, guilty: set[int]) -> None:
    slow = slow_layer(f, source, excess, guilty)
    if slow is None:
        return
    if slow.alone:
        f.cause = "layer"
        f.evidence.append(
            f"{slow.name} takes {slow.ratio:.2f} times as long and holds {slow.share:.0%} of the excess; all else {slow.others:.2f} times"
        )
    elif f.cause == "hardware":
        f.evidence.append("no single layer or op of it stands out")
