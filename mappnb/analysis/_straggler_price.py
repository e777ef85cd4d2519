"""What unequal data cost: not what the longest rank takes more, but what a replay with even microbatches saves."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mappnb.analysis._straggler_find import Excess, Finding
from mappnb.analysis._straggler_source import Source, longest_stretch
from mappnb.analysis.whatif import price_fixes
from mappnb.errors import MappnbError

__all__ = ["price_skew"]

STEPS = 3
"""Steps that are replayed at most: lengths are drawn anew in each, and the mean of three is within a fifth of the truth."""
EVENTS = 300_000
"""Events that are replayed at most: 3 to 4 s of CPU time. A longer step keeps the excess of its longest rank."""


def price_skew(skew: Finding, others: Iterable[Finding], source: Source, excess: Excess) -> None:
    """Give unequal data the effect that a replay says: the gain of even compute, once the other culprits are mended.

    Parameters
    ----------
    skew : Finding
        The job; its effect is replaced, and the evidence says how it was got.
    others : iterable of Finding
        What else was found: its part of the gain is not the data's.
    source : Source
        Events.
    excess : Excess
        Excess of all ranks, for their numbers.

    Notes
    -----
    In a pipeline the job pays for the longest microbatch at each stage that it passes, which no sum over a rank tells: on generated
    runs of 4 to 8 stages the excess of the longest rank was a fifth to a half of what the lengths cost.
    """
    steps = longest_stretch(skew.active)[:STEPS]
    if not len(steps) or source.events_of_step(int(steps[0])) > EVENTS:
        return
    steps = source.within(steps, EVENTS)
    culprits = [f for f in others if f.verdict == "culprit" and f.subject_kind in ("rank", "host", "stage")]
    mended: list[dict[str, Any]] = [_fix(f, excess) for f in culprits]
    stages = any(f.subject_kind == "stage" for f in culprits)
    even = {"op": "compute"}
    fixes = [[even, *mended], mended] if mended else [even]
    try:
        found = price_fixes(source.events(steps), fixes=fixes, ideal="mean", over_stages=stages)
    except MappnbError:
        return  # no replay of this trace: the excess of the longest rank stands
    gain = found["gain_s"].values
    price = float(gain[0] - gain[1]) if mended else float(gain[0])
    if not bool(found["reliable_gain"].values[0]) or not price > 0:
        return
    skew.effect_s = price
    after = " once the culprits above are mended" if mended else ""
    skew.evidence.append(f"replayed with even microbatches {len(steps)} step(s) are {price:.3g} s shorter{after}")


def _fix(finding: Finding, excess: Excess) -> dict[str, Any]:
    if finding.subject_kind == "stage":
        return {"stage": int(finding.subject)}
    return {"rank": [int(excess.table.rank[c]) for c in finding.ranks]}
