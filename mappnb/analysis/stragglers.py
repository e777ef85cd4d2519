"""Who is slow, and why: find_stragglers() on a run, judge() on the self-time table."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from mappnb.analysis import causes
from mappnb.analysis._straggler_base import Table, table_of
from mappnb.analysis._straggler_detail import add_details
from mappnb.analysis._straggler_find import Excess, Finding, Settings, excess_of, find_hosts, find_ranks, find_stages
from mappnb.analysis._straggler_rows import frame
from mappnb.analysis._straggler_victims import find_victims
from mappnb.analysis.work import work as self_time
from mappnb.datasets import layout_of
from mappnb.errors import MappnbError
from mappnb.layout import Layout
from mappnb.run import Run

__all__ = ["find_stragglers", "judge"]

Array = np.ndarray[Any, Any]
FALSE_DISCOVERY = 0.005
"""Of the subjects that are named, at most this share by chance; where nothing is wrong, at most one run in 200 has a false alarm."""
LEAST_RATIO = 0.03
"""Least excess of compute, relative: GPUs of one model differ by up to 2 to 3 % for good (silicon, cooling, place in the chassis)."""
LEAST_FRACTION = 0.01
"""Least cost of a subject, as a share of the median step: less is not worth a visit."""
LEAST_STAGE = 0.05
"""Least excess of a stage over the others, relative: the first and the last stage of a well divided model differ by a few percent."""
WARM_UP = 1
"""Steps at the beginning of a run that are not judged: compilation, allocation, connections."""
MIN_STEPS = 3
"""Judged steps, below which all is undecided: two in a row to tell a spell from a hiccup, and one to have a usual."""


def find_stragglers(
    run: Run | xr.Dataset,
    *,
    step: int | slice | None = None,
    work: xr.Dataset | None = None,
    false_discovery: float = FALSE_DISCOVERY,
    least_ratio: float = LEAST_RATIO,
    least_fraction: float = LEAST_FRACTION,
    least_stage: float = LEAST_STAGE,
    warm_up: int = WARM_UP,
) -> pd.DataFrame:
    """Return who is slow, who only waits or passes a delay on, and why; the largest effect first.

    Parameters
    ----------
    run : Run or Dataset, dims (event,)
        Events of all ranks, recorded, imported or simulated.
    step : int or slice, optional
        Steps to look at; all by default.
    work : Dataset, dims (step, rank, part), optional
        Self-time table of these steps (:func:`mappnb.analysis.work`), where it is there already.
    false_discovery : float
        Share of the named subjects that may be there by chance.
    least_ratio : float
        Least excess of compute over the peers, relative.
    least_fraction : float
        Least cost, as a share of the median step.
    least_stage : float
        Least excess of a stage over the other stages, relative.
    warm_up : int
        Steps at the beginning of the run that are not judged.

    Returns
    -------
    DataFrame
        ``subject_kind``: rank, host, link, stage or job; ``subject``; ``verdict``: culprit, victim (late because of another), clear, or
        undecided (the evidence is one-sided or too little); ``cause``: one of :data:`mappnb.analysis.causes.CAUSES`, empty for
        victim and clear; ``effect_s``: what it costs in a step in which it is slow, s; ``effect_fraction``: that over the median step;
        ``first_step``, ``last_step``: first and last slow step, -1 for none; ``evidence`` in words. A row for each rank that is not
        part of a slow host; other subjects only where they are culprit or undecided. ``attrs["notes"]``: sentences on what could
        not be judged and why; ``attrs["scattered"]``: (subject_kind, subject) of those whose slow steps come and go.

    Raises
    ------
    MappnbError
        If no event belongs to a step, or a threshold is out of range.

    Notes
    -----
    Self time, waits taken out (:func:`mappnb.analysis.work`), against the faster quarter of the ranks of the same stage in the same
    step; of a rank alone on its stage, against its own usual steps and the other stages. See docs/stragglers.md for the method,
    every threshold, and what it cannot know.
    """
    settings = _settings(false_discovery, least_ratio, least_fraction, least_stage, warm_up)
    judged, notes = _judged(self_time(run, step=step) if work is None else work, warm_up)
    layout = _layout(run)
    found = findings_of(judged, layout, settings, warm_up, notes)
    findings, excess = add_details(run, judged, layout, found, settings, notes), found[1]
    return _framed(findings, excess, judged, notes)


def judge(
    work: xr.Dataset,
    *,
    layout: Layout | None = None,
    false_discovery: float = FALSE_DISCOVERY,
    least_ratio: float = LEAST_RATIO,
    least_fraction: float = LEAST_FRACTION,
    least_stage: float = LEAST_STAGE,
    warm_up: int = WARM_UP,
) -> pd.DataFrame:
    """Return the verdicts that the self-time table alone allows; reads nothing else.

    Parameters
    ----------
    work : Dataset, dims (step, rank, part)
        As :func:`mappnb.analysis.work` gives it; it may grow between calls.
    layout : Layout, optional
        Parallel layout; by default that of the table's attributes.
    false_discovery, least_ratio, least_fraction, least_stage, warm_up
        As in :func:`find_stragglers`.

    Returns
    -------
    DataFrame
        As :func:`find_stragglers` returns it, without links and without what only events, metrics or telemetry tell.

    Raises
    ------
    MappnbError
        If a threshold is out of range.
    """
    settings = _settings(false_discovery, least_ratio, least_fraction, least_stage, warm_up)
    judged, notes = _judged(work, warm_up)
    findings, excess = findings_of(judged, layout or layout_of(work), settings, warm_up, notes)
    return _framed(findings, excess, judged, notes)


def _framed(findings: list[Finding], excess: Excess, judged: xr.Dataset, notes: list[str]) -> pd.DataFrame:
    out = frame(findings, excess, judged.attrs.get("begin"))
    out.attrs["notes"] = notes
    out.attrs["scattered"] = [(f.subject_kind, f.subject) for f in findings if len(f.active) and not f.lasting]
    return out


def _settings(
    false_discovery: float, least_ratio: float, least_fraction: float, least_stage: float, warm_up: int
) -> Settings:
    for name, value, top in (
        ("false_discovery", false_discovery, 1.0),
        ("least_ratio", least_ratio, np.inf),
        ("least_fraction", least_fraction, np.inf),
        ("least_stage", least_stage, np.inf),
    ):
        if not 0 < value < top:
            raise MappnbError(
                f"find_stragglers: {name} is {value!r}; expected a number above 0"
                + (" and below 1" if top == 1 else "")
            )
    if not isinstance(warm_up, int) or warm_up < 0:
        raise MappnbError(f"find_stragglers: warm_up is {warm_up!r}; expected a number of steps, 0 or more")
    return Settings(false_discovery, least_ratio, least_fraction, least_stage)


def _layout(run: Run | xr.Dataset) -> Layout:
    return run.layout if isinstance(run, Run) else layout_of(run)


def findings_of(
    judged: xr.Dataset, layout: Layout, settings: Settings, warm_up: int, notes: list[str]
) -> tuple[list[Finding], Excess]:
    """Return what the self-time table tells: findings, and the excess of all ranks; ``notes`` gets what is to be said."""
    table = table_of(judged, layout)
    numbers = {n: judged[n].values.astype(np.float64) for n in ("imposed_s", "wait_s", "transfer_s", "calls")}
    if len(table.step) < MIN_STEPS:
        notes.append(
            f"too short to judge: {len(table.step)} step(s); record at least {MIN_STEPS + warm_up}, of which {warm_up} for warm-up"
        )
        excess = excess_of(table, numbers)
        return _too_short(excess, len(table.step)), excess
    ranks, excess = find_ranks(table, numbers, settings)
    notes += _notes(table, excess)
    if not excess.has_calls.any():
        _doubt(ranks, excess, layout)
    found = find_hosts(ranks, excess)
    found += find_stages(found, settings, table)
    for f in found:
        causes.explain(f, judged, excess)
    return found + find_victims(found, excess, layout), excess


def _doubt(ranks: list[Finding], excess: Excess, layout: Layout) -> None:
    """Make ranks undecided that are slow alike and wait for one another in every layer, where no call tells who waited."""
    ids = excess.table.rank
    if layout.tp * layout.cp * layout.ep == 1 or int(ids.max(initial=0)) >= layout.world_size:
        return
    for axis in ("tp", "cp", "ep"):
        for group in layout.groups(axis):
            mine = [f for f in ranks if int(ids[f.ranks[0]]) in group]
            if len(mine) > 1:
                for f in mine:
                    f.verdict = "undecided"
                    names = ", ".join(x.subject for x in mine)
                    f.evidence.append(
                        f"ranks {names} of one {axis} group are slow alike, and no call tells which of them waits for another"
                    )


def _judged(work: xr.Dataset, warm_up: int) -> tuple[xr.Dataset, list[str]]:
    """Return the table without the warm-up steps of the run, and a note of it."""
    step = work["step"].values
    keep = step >= warm_up
    if keep.all() or not keep.any():
        return work, []
    skipped = ", ".join(map(str, step[~keep].tolist()))
    judged = work.isel(step=slice(int(np.argmax(keep)), None)).assign_attrs(begin=int(step[0]))
    return judged, [f"warm-up not judged: step {skipped}"]


def _too_short(excess: Excess, steps: int) -> list[Finding]:
    out = []
    for r, rank in enumerate(excess.table.rank.tolist()):
        parts = [s[:, r] for s in excess.seconds.values()]
        own = float(np.median(np.nansum(parts, axis=0))) if steps else 0.0
        f = Finding("rank", str(rank), [r], "undecided", "unknown", own)
        f.evidence = [f"too short to judge: {steps} step(s)"]
        out.append(f)
    return out


def _notes(table: Table, excess: Excess) -> list[str]:
    out = []
    alone = int((excess.peers == 0).sum())
    if alone:
        out.append(
            f"{alone} of {len(table.rank)} ranks have no peer on their stage: compared with their own usual steps and with the other "
            "stages; a rank that was slow from the first step cannot be told from a stage with more work"
        )
    if not excess.has_calls.any():
        out.append("no collective or message is matched: judged by durations alone, nobody knows who waited for whom")
    return out
