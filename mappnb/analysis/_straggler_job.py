"""What slows the whole job: steps in which all ranks compute longer, or are longer in transfers, than they are otherwise."""

from __future__ import annotations

from typing import Any

import numpy as np

from mappnb.analysis._straggler_base import own_baseline
from mappnb.analysis._straggler_find import Excess, Finding, Settings
from mappnb.analysis._straggler_tests import noise_of, spells

__all__ = ["find_job"]

Array = np.ndarray[Any, Any]
LEAST = 0.10
"""Least excess of all ranks over their usual steps: batches of a few percent more or fewer tokens are common."""
SHARE = 0.9
"""Share of the ranks that must be slow together."""
_WORK = "more work in these steps, or a common limit such as power"
_NETWORK = "a network that all share, or one slow part of it that every group reaches"


def find_job(excess: Excess, found: list[Finding], transfer_s: Array, settings: Settings) -> list[Finding]:
    """Return the steps in which (nearly) all ranks are slow; undecided, for they have no healthy peer to be held against.

    Parameters
    ----------
    excess : Excess
        Excess of all ranks.
    found : list of Finding
        What was found already: unequal data make common steps too, a slow link holds many.
    transfer_s : float array, shape (step, rank)
        Blocked in transfers after the last member had come, s.
    settings : Settings
        Thresholds.
    """
    table, compute = excess.table, excess.table.seconds.get("compute")
    if compute is None or len(table.rank) < 2:
        return []
    out = []
    usual = own_baseline(compute, np.ones(len(table.rank), bool), relative=False)
    step_s, size = float(np.median(table.step_s)), float(np.nanmedian(usual))
    if not any(f.subject_kind == "job" for f in found):
        with np.errstate(divide="ignore", invalid="ignore"):
            own = compute / usual - 1
        out += _together(
            own, size, "unknown", "compute {ratio:.2f} times as long as they usually do: " + _WORK, excess, settings
        )
    if not any(f.cause == "link" for f in found):
        blocked = np.where(table.present, transfer_s, np.nan)
        more = (blocked - own_baseline(blocked, np.ones(len(table.rank), bool), relative=False)) / step_s
        said = "are held {seconds:.3g} s longer in transfers than they usually are: " + _NETWORK
        out += _together(more, step_s, "link", said, excess, settings)
    return out


def _together(own: Array, unit_s: float, cause: str, said: str, excess: Excess, settings: Settings) -> list[Finding]:
    """Return the steps in which nine in ten ranks have a relative excess, which times ``unit_s`` is what it costs."""
    table = excess.table
    together = _low(own)[:, None]  # what at least nine in ten ranks are slow by
    spell = spells(together, noise_of(together, np.zeros(1, np.int64)), least=LEAST).get(0)
    if spell is None or spell.p > settings.false_discovery:
        return []
    effect = float(np.median(together[spell.active, 0])) * unit_s
    if effect < settings.least_fraction * float(np.median(table.step_s)):
        return []
    f = Finding("job", "job", list(range(len(table.rank))), "undecided", cause, effect, active=spell.active)
    f.lasting = spell.lasting
    words = said.format(ratio=1 + spell.level, seconds=effect)
    f.evidence = [f"in {len(spell.active)} of {len(table.step)} steps at least nine in ten ranks {words}"]
    return [f]


def _low(own: Array) -> Array:
    """Return of each step the excess that ``SHARE`` of the ranks reach; NaN where nobody is there."""
    ordered = np.sort(own, axis=1)  # NaN last
    number = np.isfinite(ordered).sum(1)
    place = ((1 - SHARE) * np.maximum(number - 1, 0)).astype(np.int64)
    return np.asarray(np.where(number > 0, np.take_along_axis(ordered, place[:, None], 1)[:, 0], np.nan))
