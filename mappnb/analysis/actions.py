"""What to change, what it would buy, and how sure that is: findings with a priced cure, at most a few, the largest gain first."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from mappnb.analysis._action_skew import best_cure
from mappnb.analysis._action_words import Cure, cure_of, finding_of
from mappnb.analysis._whatif_source import hosts_of
from mappnb.analysis.stragglers import LEAST_FRACTION, LEAST_RATIO, find_stragglers
from mappnb.analysis.whatif import price_fixes
from mappnb.datasets import layout_of
from mappnb.errors import MappnbError
from mappnb.layout import Layout
from mappnb.run import Run

__all__ = ["ACTION_COLUMNS", "MOST_ACTIONS", "actions"]

MOST_ACTIONS = 5
"""Actions that are given at most: nobody works down a longer list."""
SURE = 3.0
"""A gain of so many times the replay error is sure of its size."""
ACTION_COLUMNS = (
    "finding", "evidence", "action", "target", "gain_s", "gain_fraction", "gain_gpu_hours", "confidence",
    "subject_kind", "subject", "cause", "effect_s", "first_step", "last_step",
)  # fmt: skip


@dataclass
class _Priced:
    """A culprit, its cure, and what the replay says of it."""

    row: Any
    cure: Cure
    gain_s: float = float("nan")
    gain_fraction: float = float("nan")
    gain_gpu_hours: float = float("nan")
    error_s: float = float("nan")
    why_not: str = ""
    more: str = ""

    @property
    def how(self) -> tuple[str, bool | None]:
        """What is ideal."""
        return self.cure.ideal, self.cure.over_stages


def actions(
    run: Run | xr.Dataset,
    *,
    stragglers: pd.DataFrame | None = None,
    step: int | slice | None = None,
    most: int = MOST_ACTIONS,
) -> pd.DataFrame:
    """Return what to change, the largest gain first: finding, evidence, flag or host, gain by replay, confidence.

    Parameters
    ----------
    run : Run or Dataset, dims (event,)
        Events of all ranks, recorded, imported or generated.
    stragglers : DataFrame, optional
        What :func:`mappnb.analysis.find_stragglers` said of the run, where it was asked already.
    step : int or slice, optional
        Steps to look at; all by default.
    most : int
        Actions at most.

    Returns
    -------
    DataFrame
        ``finding``, ``evidence``, ``action`` in words; ``target``: the host, or the flag of Megatron-LM, to change; ``gain_s``: what a
        step would be shorter, by replay, mean over the steps, s; ``gain_fraction`` of the recorded step; ``gain_gpu_hours`` over all
        steps recorded; ``confidence``: high, medium or low; ``subject_kind, subject, cause, effect_s, first_step, last_step`` as of
        find_stragglers. Empty where nothing can be priced. ``attrs``: ``unpriced``, list of {finding, why}: what was found and is no
        action; ``replay_error``; ``together_s``: gain of all these actions at once, s; ``least_effect_s``: the smallest lasting excess
        of a rank that would have been named, s a step; ``num_steps``, ``num_ranks``; ``notes``.

    Raises
    ------
    MappnbError
        If no event belongs to a step, or ``most`` is below 1.

    Notes
    -----
    A gain is that of :func:`mappnb.analysis.price_fixes`: the recorded steps replayed with that subject as its peers are. A gain that
    is not larger than the replay error is no gain, and no action is given for it. Work that is dealt anew (layers to stages,
    documents to microbatches) is priced at the mean, for it does not vanish; where lengths were recorded, by the best of
    :func:`mappnb.analysis.skew_cures`. High confidence: the gain is at least 3 times the
    replay error, the cause is known, and there were peers to compare with; each that fails is one level less.
    """
    if most < 1:
        raise MappnbError(f"actions: most is {most!r}; expected at least 1")
    found = find_stragglers(run, step=step) if stragglers is None else stragglers
    layout, hosts = (run.layout if isinstance(run, Run) else layout_of(run)), hosts_of(run)
    priced = [
        _Priced(r, cure_of(r, layout, hosts)) for r in found[found["verdict"] == "culprit"].itertuples(index=False)
    ]
    attrs = _price(run, step, priced)
    for p in priced:
        _by_lengths(run, step, p)
    good = sorted((p for p in priced if not p.why_not), key=lambda p: -p.gain_s)
    for p in good[most:]:
        p.why_not = f"not among the {most} largest gains ({p.gain_s:.3g} s a step)"
    out = pd.DataFrame([_row(p) for p in good[:most]], columns=list(ACTION_COLUMNS))
    about: dict[Any, Any] = {
        **attrs, **_scope(run, found, layout), "unpriced": _unpriced(priced, found), "notes": list(found.attrs.get("notes", [])),
        "together_s": _together(run, step, good[:most]),
    }  # fmt: skip
    out.attrs = about
    return out


def _price(run: Run | xr.Dataset, step: int | slice | None, priced: list[_Priced]) -> dict[str, Any]:
    """Replay each cure that can be; say of the others why not."""
    attrs: dict[str, Any] = {"replay_error": float("nan")}
    for p in priced:
        p.why_not = "" if p.cure.fix is not None else p.cure.why_not
    for how in dict.fromkeys(p.how for p in priced):
        mine = [p for p in priced if p.cure.fix is not None and p.how == how]
        told = _prices(run, step, mine)
        if told is None:
            continue
        attrs["replay_error"] = float(told["replay_error"])
        scale = _all_steps(run, step) / told.sizes["step"] if told.sizes["step"] else 1.0
        for i, p in enumerate(mine):
            one = told.isel(fix=i)
            p.gain_s, p.gain_fraction = float(one["gain_s"]), float(one["gain_fraction"])
            p.gain_gpu_hours = float(one["gain_gpu_hours"]) * max(1.0, scale)
            p.error_s = attrs["replay_error"] * float(told["step_s"].mean())
            if not (bool(one["reliable_gain"]) and p.gain_s > 0):
                p.why_not = (
                    f"its replay gains {p.gain_s:.3g} s a step, which is not more than the replay error of {p.error_s:.3g} s: "
                    "the rest of the job would wait for something else"
                )
    return attrs


def _by_lengths(run: Run | xr.Dataset, step: int | slice | None, p: _Priced) -> None:
    """Put the best cure for recorded lengths in place of even microbatches, which no packing reaches."""
    if p.row.cause != "data_skew" or p.row.subject_kind != "job" or p.why_not or not isinstance(run, Run):
        return
    best = best_cure(run, step)
    if best is None:
        return
    hours = p.gain_gpu_hours / p.gain_s
    p.gain_s, p.gain_fraction, p.error_s = best.gain_s, best.gain_fraction, best.error_s
    p.gain_gpu_hours = hours * best.gain_s
    p.cure, p.more = replace(p.cure, action=best.action, target=best.target), best.prices


def _prices(run: Run | xr.Dataset, step: int | slice | None, mine: list[_Priced]) -> xr.Dataset | None:
    """Return the prices of cures that have the same ideal; those that cannot be replayed leave the list, and say why."""
    while mine:
        try:
            return _replayed(run, step, mine, [p.cure.fix for p in mine])
        except MappnbError as err:
            wrong = next((p for p in mine if len(mine) == 1 or not _can(run, step, p)), mine[0])
            wrong.why_not = f"cannot be replayed: {err}"
            mine.remove(wrong)
    return None


def _can(run: Run | xr.Dataset, step: int | slice | None, p: _Priced) -> bool:
    try:
        _replayed(run, step, [p], [p.cure.fix])
    except MappnbError:
        return False
    return True


def _replayed(run: Run | xr.Dataset, step: int | slice | None, alike: list[_Priced], fixes: list[Any]) -> xr.Dataset:
    ideal, over_stages = alike[0].how
    return price_fixes(run, fixes=fixes, ideal=ideal, step=step, over_stages=over_stages)


def _together(run: Run | xr.Dataset, step: int | slice | None, good: list[_Priced]) -> float:
    """Return the gain of several cures at once, s; NaN where their ideals differ. It is not their sum."""
    if len(good) < 2 or len({p.how for p in good}) > 1:
        return good[0].gain_s if len(good) == 1 else float("nan")
    parts = [f for p in good for f in (p.cure.fix if isinstance(p.cure.fix, list) else [p.cure.fix])]
    return float(_replayed(run, step, good, [parts])["gain_s"][0])


def _all_steps(run: Run | xr.Dataset, step: int | slice | None) -> int:
    if step is not None or not isinstance(run, Run):
        return 0
    return int(run.steps.sizes.get("step", 0))


def _row(p: _Priced) -> tuple[Any, ...]:
    r, evidence = p.row, "; ".join(filter(None, [p.row.evidence, p.more]))
    return (
        finding_of(r), evidence, p.cure.action, p.cure.target, p.gain_s, p.gain_fraction, p.gain_gpu_hours, _confidence(p),
        r.subject_kind, r.subject, r.cause, r.effect_s, r.first_step, r.last_step,
    )  # fmt: skip


def _confidence(p: _Priced) -> str:
    doubts = [p.gain_s < SURE * p.error_s, p.row.cause in ("", "unknown"), "its own usual one" in p.row.evidence]
    return ("high", "medium", "low")[min(sum(doubts), 2)]


def _unpriced(priced: list[_Priced], found: pd.DataFrame) -> list[dict[str, str]]:
    out = [{"finding": finding_of(p.row), "why": p.why_not} for p in priced if p.why_not]
    undecided = found[found["verdict"] == "undecided"]
    for why, rows in undecided.groupby("evidence", sort=False):
        names = [f"{r.subject_kind} {r.subject}" for r in rows.itertuples(index=False)]
        more = f" and {len(names) - MOST_ACTIONS} more" if len(names) > MOST_ACTIONS else ""
        out.append({"finding": ", ".join(names[:MOST_ACTIONS]) + more, "why": f"undecided: {why}"})
    return out


def _scope(run: Run | xr.Dataset, found: pd.DataFrame, layout: Layout) -> dict[str, Any]:
    """Return how much was looked at, and the smallest effect that would have been named."""
    named = found[np.isfinite(found["effect_fraction"]) & (found["effect_fraction"] != 0)]
    step_s = float((named["effect_s"] / named["effect_fraction"]).median()) if len(named) else float("nan")
    ranks = int((found["subject_kind"] == "rank").sum()) or layout.world_size
    return {"num_ranks": ranks, "step_s": step_s, "least_effect_s": max(LEAST_FRACTION, LEAST_RATIO) * step_s}
