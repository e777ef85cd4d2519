"""From excess self time to ranks, hosts and stages that are slow."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np

from mappnb.analysis._straggler_base import KINDS, Levels, Table, baseline, own_baseline
from mappnb.analysis._straggler_tests import Spell, median_steps, noise_of, rejected, spells

__all__ = ["Excess", "Finding", "Settings", "excess_of", "find_hosts", "find_ranks", "find_stages"]

Array = np.ndarray[Any, Any]
ROUNDS = 2
"""How often the slow are found and left out of the baselines of the others."""
SUPPORT = 0.2
"""Share of its excess that others must have waited for a rank, or that it must have waited less than its peers, before it is called
a culprit: half of a delay is often taken up by slack of a pipeline, an unrelated excess has none of it."""
RANKS_OF_HOST = 0.8
"""Share of its ranks that must be slow before a host is named (as SHARE of :mod:`mappnb.analysis._suspects`)."""
ALIKE = 0.5
"""Ranks of a slow host are slow alike: the excess of each is within this share of the host's median."""
AFTERWARDS = ("checkpoint", "evaluation")
"""What is done at the end of a step: the others wait for it in the next one."""
HOLES = 0.05
"""If the ranks of a role usually have holes of this share of a step, the waits of the run are not all recorded, and holes say nothing."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Thresholds: see :func:`mappnb.analysis.find_stragglers`."""

    false_discovery: float
    least_ratio: float
    least_fraction: float
    least_stage: float


@dataclass(slots=True)
class Finding:
    """One subject and what is said about it; positions are rows and columns of the table."""

    subject_kind: str
    subject: str
    ranks: list[int]
    verdict: str
    cause: str = ""
    effect_s: float = 0.0
    ratio: float = 1.0
    z: float = 0.0
    active: Array = field(default_factory=lambda: np.empty(0, np.int64))
    lasting: bool = True
    kinds: dict[str, float] = field(default_factory=dict)
    imposed_s: float = float("nan")
    peers: int = 0
    evidence: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Excess:
    """Self time over that of the peers.

    Attributes
    ----------
    table : Table
        What it was made of, judged steps only.
    seconds : dict of str to float array, shape (step, rank)
        By kind, s; NaN where there is nothing to compare with.
    compute : float array, shape (step, rank)
        What the peers compute, s: excesses are relative to it.
    peers : int array, shape (rank,)
        How many peers; 0: compared with its own usual steps.
    imposed : float array, shape (step, rank)
        What the rank made others wait more than its peers did, s.
    waited_less : float array, shape (step, rank)
        How much less than its peers the rank was blocked, s.
    has_calls : bool array, shape (rank,)
        The rank took part in calls with others.
    """

    table: Table
    seconds: dict[str, Array]
    compute: Array
    peers: Array
    imposed: Array
    waited_less: Array
    has_calls: Array


def excess_of(table: Table, work: dict[str, Array], hidden: Array | None = None, known: Levels | None = None) -> Excess:
    """Return what each rank took more than its peers.

    Parameters
    ----------
    table : Table
        Judged steps.
    work : dict of str to array, shape (step, rank)
        ``imposed_s``, ``wait_s``, ``transfer_s`` and ``calls`` of the same steps.
    hidden : bool array, shape (step, rank), optional
        Cells that are known to be slow and say nothing about others.
    known : dict, optional
        As of :func:`mappnb.analysis._straggler_base.baseline`.
    """
    known = {} if known is None else known
    total = table.seconds.get("compute")
    if total is None:
        total = np.where(table.present, sum(np.nan_to_num(s) for s in table.seconds.values()), np.nan)
    level, _ = baseline(total, table.role, hidden, known=known, kind="compute")
    there = np.isfinite(total).any(0)
    peers = np.bincount(table.role[there], minlength=int(table.role.max(initial=0)) + 1)[table.role] - there
    alone = peers < 1
    if alone.any():
        level = np.where(alone, own_baseline(total, alone), level)
    out = {}
    for kind, seconds in table.seconds.items():
        if kind == "compute":
            out[kind] = seconds - level
            continue
        base, _ = baseline(seconds, table.role, hidden, relative=False, known=known, kind=kind)
        if alone.any():
            base = np.where(alone, own_baseline(seconds, alone, relative=False), base)
        out[kind] = seconds - base
    imposed = work["imposed_s"]
    imposed = imposed - baseline(imposed, table.role, hidden, relative=False, known=known, kind="imposed")[0]
    blocked = np.where(table.present, work["wait_s"] + work["transfer_s"], np.nan)
    less = baseline(blocked, table.role, hidden, relative=False, quantile=0.5, known=known, kind="blocked")[0] - blocked
    has_calls = np.asarray((work["calls"] > 0).any(0))
    if "host" in out:
        out["host"] = _held_up(out["host"], table, imposed, has_calls)
    return Excess(table, out, level, peers, imposed, less, has_calls)


def _held_up(holes: Array, table: Table, imposed: Array, has_calls: Array) -> Array:
    """Return holes as far as others waited for them: a hole that delays nobody is a wait that was not recorded."""
    usual = median_steps(table.seconds["host"]) / float(np.median(table.step_s))
    if len(usual) and max(float(np.nanmedian(usual[table.role == g])) for g in np.unique(table.role)) >= HOLES:
        return np.where(np.isfinite(holes), 0.0, np.nan)
    return np.where(has_calls, np.fmin(holes, np.maximum(imposed, 0)), holes)


def relative(excess: Excess, kind: str) -> Array:
    """Return the excess of a kind relative to the compute of the peers."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(excess.seconds[kind] / excess.compute)


def find_ranks(table: Table, work: dict[str, Array], settings: Settings) -> tuple[list[Finding], Excess]:
    """Return the ranks that are slow, and the excess of all ranks once those are left out of the baselines."""
    table = _worth_judging(table, settings)
    hidden, known = np.zeros(table.present.shape, bool), cast("Levels", {})
    for _ in range(ROUNDS):
        excess = excess_of(table, work, hidden, known)
        found = _slow(excess, settings)
        if not found:
            return [], excess
        hidden = np.zeros_like(hidden)
        for rank, kinds in found.items():
            for spell in kinds.values():
                hidden[spell.active, rank] = True
    excess = excess_of(table, work, hidden, known)
    return [_finding(excess, rank, kinds) for rank, kinds in found.items()], excess


def _worth_judging(table: Table, settings: Settings) -> Table:
    """Return the table without the kinds of time of which no rank has ever enough to matter."""
    least_s = settings.least_fraction * float(np.median(table.step_s))
    kept = {k: s for k, s in table.seconds.items() if k == "compute" or np.nanmax(s, initial=0.0) >= least_s}
    return replace(table, seconds=kept)


def _slow(excess: Excess, settings: Settings) -> dict[int, dict[str, Spell]]:
    """Return by rank and kind the spells that are no chance and worth their cost."""
    step_s = float(np.median(excess.table.step_s))
    tested: list[tuple[int, str, Spell]] = []
    number = 0
    for kind, seconds in excess.seconds.items():
        series = relative(excess, kind)
        noise = noise_of(series, excess.table.role)
        number += int(np.isfinite(series).any(0).sum())
        least = settings.least_ratio if kind == "compute" else settings.least_fraction
        for rank, spell in spells(series, noise, least=least).items():
            if np.nanmedian(seconds[spell.active, rank]) >= settings.least_fraction * step_s:
                tested.append((rank, kind, spell))
    p = np.ones(number)
    p[: len(tested)] = [s.p for _, _, s in tested]
    out: dict[int, dict[str, Spell]] = {}
    for (rank, kind, spell), real in zip(tested, rejected(p, settings.false_discovery), strict=False):
        if real:
            out.setdefault(rank, {})[kind] = spell
    return out


def _finding(excess: Excess, rank: int, kinds: dict[str, Spell]) -> Finding:
    active = np.unique(np.concatenate([s.active for s in kinds.values()]))
    cost = {k: float(np.nanmedian(excess.seconds[k][s.active, rank])) for k, s in kinds.items()}
    main = max(cost, key=lambda k: cost[k])
    spell = kinds[main]
    compute = float(np.nanmedian(excess.compute[active, rank]))
    total = sum(_in_steps(excess.seconds[k][:, rank], s.active) for k, s in kinds.items())
    effect = float(np.median(np.asarray(total)[active]))
    out = Finding("rank", str(int(excess.table.rank[rank])), [rank], "culprit", effect_s=effect)
    out.ratio, out.z, out.active, out.lasting, out.kinds = (
        1 + out.effect_s / compute,
        spell.z,
        active,
        spell.lasting,
        cost,
    )
    out.peers = int(excess.peers[rank])
    when = active + 1 if main in AFTERWARDS else active
    when = when[when < len(excess.imposed)]
    if out.peers and len(when):
        out.imposed_s = float(np.nanmedian(excess.imposed[when, rank]))
    less = float(np.nanmedian(excess.waited_less[when, rank])) if out.peers and len(when) else float("nan")
    if out.peers and excess.has_calls[rank] and np.fmax(out.imposed_s, less) < SUPPORT * out.effect_s:
        out.verdict = "undecided"
        out.evidence.append("but the others do not wait for it")
    if not out.peers and active[0] == 0:
        out.verdict = "undecided"
        out.evidence.append("from the first step on, and it has no peer: it may be the later steps that are unusual")
    return out


def _in_steps(series: Array, active: Array) -> Array:
    """Return a series with 0 outside these steps."""
    out = np.zeros(len(series))
    out[active] = np.nan_to_num(series[active])
    return out


def find_hosts(ranks: list[Finding], excess: Excess) -> list[Finding]:
    """Return the findings with the ranks of a host that is slow as a whole put together."""
    host = excess.table.host.astype(str)
    names = [h for h in dict.fromkeys(host.tolist()) if h]
    if len(names) < 2:
        return ranks
    left = list(ranks)
    for name in names:
        mine = np.flatnonzero(host == name)
        slow = [f for f in left if f.subject_kind == "rank" and f.ranks[0] in mine]
        if len(mine) < 2 or len(slow) < max(2.0, RANKS_OF_HOST * len(mine)):
            continue
        middle = float(np.median([f.ratio - 1 for f in slow]))
        alike = [f for f in slow if abs(f.ratio - 1 - middle) <= ALIKE * middle]
        if len(alike) < max(2.0, RANKS_OF_HOST * len(mine)):
            continue
        left = [f for f in left if f not in alike]
        left.append(_together("host", name, alike, len(mine)))
    return left


def _together(kind: str, subject: str, parts: list[Finding], members: int) -> Finding:
    out = replace(parts[0], subject_kind=kind, subject=subject, ranks=[f.ranks[0] for f in parts])
    out.effect_s = float(
        np.max([f.effect_s for f in parts])
    )  # they are slow at the same time: the others wait for the slowest
    out.ratio, out.z = float(np.median([f.ratio for f in parts])), float(np.median([f.z for f in parts]))
    counts = np.unique(np.concatenate([f.active for f in parts]), return_counts=True)
    out.active = counts[0][counts[1] >= len(parts) / 2]
    kinds = {k: [f.kinds[k] for f in parts if k in f.kinds] for k in KINDS}
    out.kinds = {k: float(np.median(v)) for k, v in kinds.items() if v}
    out.imposed_s = float(np.nanmedian([f.imposed_s for f in parts]))
    if sum(f.verdict == "culprit" for f in parts) * 2 >= len(parts):
        out.verdict, out.evidence = "culprit", []
    out.evidence = [*out.evidence, f"{len(parts)} of its {members} ranks are slow alike"]
    return out


def find_stages(ranks: Iterable[Finding], settings: Settings, table: Table) -> list[Finding]:
    """Return the stages that take longer than the others on all their ranks.

    Parameters
    ----------
    ranks : iterable of Finding
        What was found of ranks and hosts: their slow steps are left out.
    settings : Settings
        Thresholds.
    table : Table
        The table.
    """
    stages = list(table.stages)
    if len(stages) < 2:
        return []
    level = np.stack([_stage_level(*table.stages[s], ranks) for s in stages], 1)
    base, _ = baseline(level, np.zeros(len(stages), np.int64), relative=False, quantile=0.5)
    series = level / base - 1
    noise = noise_of(series, np.arange(len(stages)))
    step_s, out = float(np.median(table.step_s)), []
    found = {c: s for c, s in spells(series, noise, least=settings.least_stage).items() if s.lasting}
    p = np.ones(len(stages))
    p[list(found)] = [s.p for s in found.values()]
    for c in np.flatnonzero(rejected(p, settings.false_discovery)).tolist():
        spell = found[c]
        others = np.delete(level, c, axis=1)[spell.active]
        effect = float(np.nanmedian(level[spell.active, c] - np.nanmean(others, 1)))
        if effect < settings.least_fraction * step_s:
            continue
        mine = table.stages[stages[c]][0].tolist()
        f = Finding("stage", str(stages[c]), mine, "culprit", "stage_imbalance", effect, 1 + spell.level, spell.z)
        f.kinds, f.peers, f.active = {"compute": effect}, len(stages) - 1, spell.active
        out.append(_renamed(f, table))
    return out


def _stage_level(columns: Array, seconds: Array, ranks: Iterable[Finding]) -> Array:
    """Return what most ranks of a stage take in each step, s; the steps in which one is known to be slow are left out."""
    place = {int(c): i for i, c in enumerate(columns)}
    known = [(f.active, [place[c] for c in f.ranks if c in place]) for f in ranks]
    if any(mine for _, mine in known):
        seconds = seconds.copy()
        for active, mine in known:
            seconds[active[:, None], mine] = np.nan
    return median_steps(seconds.T)


def _renamed(stage: Finding, table: Table) -> Finding:
    """Return a stage that became slow within the run under the name of its only rank, or of the host that it fills."""
    began = stage.active[0] > 0
    if len(stage.ranks) == 1:
        if began:
            return replace(stage, subject_kind="rank", subject=str(int(table.rank[stage.ranks[0]])), cause="", peers=0)
        stage.evidence.append("it has one rank: a rank that was slow from the first step would look the same")
        return stage
    hosts = set(table.host[stage.ranks].astype(str).tolist())
    if len(hosts) == 1 and "" not in hosts and len(set(table.host.astype(str).tolist())) > 1:
        name = hosts.pop()
        if began:
            return replace(stage, subject_kind="host", subject=name, cause="", peers=0)
        stage.evidence.append(f"all of them on {name}: a host that was slow from the first step would look the same")
    return stage
