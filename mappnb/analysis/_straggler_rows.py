"""Findings in words and rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from mappnb.analysis._straggler_base import Table
from mappnb.analysis._straggler_find import Excess, Finding

__all__ = ["COLUMNS", "frame", "own_excess", "sentence"]

Array = np.ndarray[Any, Any]

COLUMNS = (
    "subject_kind", "subject", "verdict", "cause", "effect_s", "effect_fraction", "first_step", "last_step", "evidence",
)  # fmt: skip


def frame(findings: list[Finding], excess: Excess, begin: int | None = None) -> pd.DataFrame:
    """Return one row per finding and one for each rank that is clear, the largest effect first.

    Parameters
    ----------
    findings : list of Finding
        What is said.
    excess : Excess
        Excess of all ranks.
    begin : int, optional
        First step of the run, if it was warm-up and not judged: what was slow from the first judged step on was slow from there.
    """
    table = excess.table
    step_s = float(np.median(table.step_s)) if len(table.step_s) else float("nan")
    rows = [
        (f.subject_kind, f.subject, f.verdict, f.cause if f.verdict in ("culprit", "undecided") else "", f.effect_s,
         f.effect_s / step_s, *_steps(f, table, begin), sentence(f, table))
        for f in findings
    ]  # fmt: skip
    named = {r for f in findings if f.subject_kind in ("rank", "host") for r in f.ranks}
    rest = [r for r in range(len(table.rank)) if r not in named]
    own, ratio = own_excess(excess)
    rows += [
        (
            "rank",
            str(int(table.rank[r])),
            "clear",
            "",
            own[r],
            own[r] / step_s,
            -1,
            -1,
            f"self time {ratio[r]:.3f} times its peers'",
        )
        for r in rest
    ]
    out = pd.DataFrame(rows, columns=list(COLUMNS))
    return out.sort_values("effect_s", ascending=False, kind="stable").reset_index(drop=True)


def own_excess(excess: Excess) -> tuple[Array, Array]:
    """Return of each rank the median excess of its self time, holes left out, s, and that as a ratio to its peers."""
    parts = [np.nan_to_num(s) for k, s in excess.seconds.items() if k != "host"]
    total = np.asarray(sum(parts) if parts else np.zeros(excess.table.present.shape))
    if not len(total):
        return np.zeros(total.shape[1]), np.ones(total.shape[1])
    own = np.median(total, axis=0)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = 1 + np.median(total / excess.compute, axis=0)
    return own, np.where(np.isfinite(ratio), ratio, 1.0)


def _steps(f: Finding, table: Table, begin: int | None) -> tuple[int, int]:
    if not len(f.active):
        return -1, -1
    first = int(table.step[f.active[0]])
    if f.active[0] == 0 and f.lasting and begin is not None:
        first = begin
    return first, int(table.step[f.active[-1]])


def sentence(f: Finding, table: Table) -> str:
    """Return the evidence of a finding as one sentence."""
    parts = []
    if f.verdict == "victim" or "transfer" in f.kinds:
        return "; ".join(f.evidence)
    if f.subject_kind in ("rank", "host") and len(f.active):
        whose = _count(f.peers, "its peer's", "its {} peers'") if f.peers else "its own usual one"
        parts.append(
            f"self time {f.ratio:.2f} times {whose} in {len(f.active)} of {len(table.step)} steps (z {f.z:.0f})"
        )
        if np.isfinite(f.imposed_s) and f.imposed_s > 0:
            parts.append(f"the others waited {f.imposed_s:.3g} s/step more for it")
    elif f.subject_kind == "stage":
        parts.append(
            f"{_count(len(f.ranks), 'its only rank computes', 'its {} ranks compute')} {f.ratio:.2f} times as long as those of "
            f"{_count(f.peers, 'the other stage', 'the {} other stages')} in {len(f.active)} of {len(table.step)} steps (z {f.z:.0f})"
        )
    return "; ".join([*parts, *f.evidence])


def _count(number: int, one: str, many: str) -> str:
    return (one if number == 1 else many).format(number)
