"""Ranks that come late and are not slow: victims, and whose."""

from __future__ import annotations

from typing import Any

import numpy as np

from mappnb.analysis._straggler_find import Excess, Finding
from mappnb.analysis._straggler_rows import own_excess
from mappnb.analysis._straggler_tests import median_steps
from mappnb.layout import Layout

__all__ = ["find_victims"]

Array = np.ndarray[Any, Any]
PASSED_ON = 0.3
"""A rank is a victim if, while the culprit is slow, others wait for it for this share of the culprit's effect more than for its peers."""


def find_victims(found: list[Finding], excess: Excess, layout: Layout) -> list[Finding]:
    """Return the ranks that make others wait because they wait for a culprit themselves.

    Parameters
    ----------
    found : list of Finding
        Culprits.
    excess : Excess
        Excess of all ranks.
    layout : Layout
        Tells who works with whom.
    """
    culprits = [f for f in found if f.verdict == "culprit" and f.subject_kind in ("rank", "host")]
    guilty = {r for f in found if f.subject_kind in ("rank", "host") for r in f.ranks}
    out: dict[int, Finding] = {}
    own, ratio = own_excess(excess)
    for f in sorted(culprits, key=lambda f: -f.effect_s):
        late = median_steps(excess.imposed[f.active])
        for r in np.flatnonzero(late >= PASSED_ON * f.effect_s).tolist():
            if r in guilty or r in out or not _work_together(r, f, excess, layout):
                continue
            text = (
                f"self time {ratio[r]:.3f} times its peers', but the others wait {late[r]:.3g} s/step more for it: "
                f"it waits for {f.subject_kind} {f.subject}"
            )
            name = str(int(excess.table.rank[r]))
            out[r] = Finding("rank", name, [r], "victim", effect_s=float(own[r]), active=f.active, evidence=[text])
    return list(out.values())


def _work_together(rank: int, culprit: Finding, excess: Excess, layout: Layout) -> bool:
    """Return whether a rank exchanges microbatches or pieces of a layer with a culprit: the same replica, or an expert group."""
    ranks = excess.table.rank
    if int(ranks.max()) >= layout.world_size:
        return True
    here = layout.coords(int(ranks[rank]))
    for r in culprit.ranks:
        there = layout.coords(int(ranks[r]))
        if here["dp"] == there["dp"] or (layout.ep > 1 and here["pp"] == there["pp"]):
            return True
    return False
