"""Why a subject is slow: by what kind of time is too long, which parts of the work are, and what telemetry says beside."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import xarray as xr

from mappnb.analysis._straggler_base import baseline
from mappnb.analysis._straggler_find import Excess, Finding
from mappnb.analysis._work_parts import COMPUTE_KINDS

__all__ = ["CAUSES", "explain", "phase_ratios"]

Array = np.ndarray[Any, Any]
CAUSES: tuple[str, ...] = (
    "hardware", "layer", "data_skew", "stage_imbalance", "link", "host", "moe_load", "checkpoint", "unknown",
)  # fmt: skip
"""Every cause that is told apart."""
ONE_FACTOR = 0.35
"""Phases are slow by one factor if their log ratios differ by at most this share of their mean. The slow GPU of AR has 2.50 and 2.26,
which is 0.12; slow in the forward alone is 2."""
NORMAL = 0.2
"""A phase is not slow if its excess is at most this share of that of the slow one: what noise and a busier processor leave."""
SAME = 0.02
"""Log ratios that differ by less are the same whatever their mean: phases differ by as much between healthy ranks."""
MOST_STEPS = 100
"""Steps that phases are compared in at most, evenly spread."""
LEAST_SHARE = 0.05
"""Phases with less than this share of the compute of a rank are not asked."""
_OF_KIND = {"data": "host", "gc": "host", "host": "host", "checkpoint": "checkpoint"}
_WORDS = {
    "compute": "compute",
    "optimizer": "optimizer",
    "data": "waiting for the next batch",
    "checkpoint": "saving a checkpoint",
    "evaluation": "evaluation",
    "gc": "garbage collection",
    "host": "holes between its spans",
}


def phase_ratios(work: xr.Dataset, excess: Excess, finding: Finding) -> dict[str, float]:
    """Return by phase what a finding's ranks take over what their peers take, or they themselves in other steps, in its steps.

    Parameters
    ----------
    work : Dataset, dims (step, rank, part)
        Self-time table, judged steps.
    excess : Excess
        Excess of all ranks, for their roles.
    finding : Finding
        Ranks and steps.
    """
    kinds = work["part_kind"].values.astype(str)
    role = excess.table.role
    columns = np.flatnonzero(np.isin(role, np.unique(role[finding.ranks])))  # the ranks and their peers are enough
    mine = np.flatnonzero(np.isin(columns, finding.ranks))
    active = finding.active[:: max(len(finding.active) // MOST_STEPS, 1)]
    table = work["seconds"].values[active[:, None], columns]
    rest = np.setdiff1d(np.arange(work.sizes["step"]), finding.active)[:MOST_STEPS]
    usual = work["seconds"].values[rest[:, None], columns]  # of the other steps, for ranks without peers
    others = np.zeros(table.shape[:2], bool)
    others[:, mine] = True
    seconds = {k: table[:, :, kinds == k].sum(2) for k in COMPUTE_KINDS if (kinds == k).any()}
    total = sum(float(s[:, mine].sum()) for s in seconds.values())
    out: dict[str, float] = {}
    for kind, s in seconds.items():
        if s[:, mine].sum() < LEAST_SHARE * total:
            continue
        base = baseline(np.where(s > 0, s, np.nan), role[columns], others)[0][:, mine]
        if not finding.peers and len(usual):
            base = np.median(usual[:, mine][:, :, kinds == kind].sum(2), axis=0, keepdims=True)
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = s[:, mine] / base
        if np.isfinite(ratio).any():
            out[kind] = float(np.nanmedian(ratio))
    return out


def explain(finding: Finding, work: xr.Dataset, excess: Excess) -> None:
    """Give a finding its cause, as far as the self-time table knows, and the evidence for it."""
    if finding.subject_kind not in ("rank", "host") or not finding.kinds:
        return
    main = max(finding.kinds, key=lambda k: finding.kinds[k])
    for kind, cost in sorted(finding.kinds.items(), key=lambda x: -x[1]):
        if kind != "compute":
            finding.evidence.append(f"{cost:.3g} s/step more in {_WORDS[kind]}")
    finding.cause = _OF_KIND.get(main, "unknown")
    if main not in ("compute", "optimizer"):
        return
    ratios = phase_ratios(work, excess, finding)
    if len(ratios) < 2:
        finding.cause = "hardware" if len(ratios) == 1 else "unknown"
        return
    words = ", ".join(f"{k} {v:.2f}" for k, v in ratios.items())
    if one_factor(ratios):
        finding.cause = "hardware"
        finding.evidence.append(f"{words}: one factor")
    elif (alone := only_phase(ratios)) is not None:
        finding.cause = "layer"
        finding.evidence.append(f"{words}: only its {alone}")
    else:
        finding.evidence.append(f"{words}: not one factor")


def only_phase(ratios: Mapping[str, float]) -> str | None:
    """Return the phase that alone is slow, None where there is none."""
    excess = sorted(((max(v - 1, 0.0), k) for k, v in ratios.items()), reverse=True)
    return excess[0][1] if excess[0][0] > 0 and all(x <= NORMAL * excess[0][0] for x, _ in excess[1:]) else None


def one_factor(ratios: Mapping[str, float]) -> bool:
    """Return whether phases are all slow by about the same factor."""
    logs = np.log(list(ratios.values()))
    return bool(np.ptp(logs) <= max(SAME, ONE_FACTOR * abs(float(logs.mean()))))
