"""Slow links and network cards: ranks whose transfers take longer than their peers', and what their calls have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from mappnb.analysis._straggler_base import Table, baseline
from mappnb.analysis._straggler_find import Excess, Finding, Settings
from mappnb.analysis._straggler_source import Source
from mappnb.analysis._straggler_tests import Spell, noise_of, rejected, spells
from mappnb.analysis._suspects import MIN_CALLS, judge, suspects_of
from mappnb.analysis._transfers import transfers
from mappnb.analysis.links import hosts_of_events, symmetric

__all__ = ["find_links", "slow_transfers"]

Array = np.ndarray[Any, Any]
EVENTS = 400_000
"""Events that are read at most for one look at the links: about a second."""
MATTERS = 0.1
"""Differences between calls below this share of what a call of the slow rank must take too long do not count: small messages
take 0.3 ms on one link and 3 ms on the next where a host is busy, which is no reason to doubt one that takes 60 ms."""
LOOKS = 3
"""Looks, each at the steps of the worst rank that is not explained yet."""
CLOCK_ERROR_S = 0.01
"""Excess of a message between hosts that their wall clocks may make by themselves: NTP keeps hosts within a few ms."""
SLOW_RATIO, SIGMAS = 1.25, 3.0
"""Differences below a quarter are common between equal links (:func:`mappnb.analysis.links`). Only links of ranks whose transfers are
known to be slow are asked, so that 3 standard errors do where :func:`mappnb.analysis.links`, which asks all, takes 5."""
BESIDE = 0.05
"""A suspect whose calls hold less than this share of the excess of the worst one is noise beside it: a link that is slow by
microseconds explains no second."""


def slow_transfers(excess: Excess, transfer_s: Array, settings: Settings) -> tuple[dict[int, Spell], Array]:
    """Return the ranks whose transfers, waits taken out, take longer than their peers', and the excess of all, s.

    Parameters
    ----------
    excess : Excess
        Excess of all ranks.
    transfer_s : float array, shape (step, rank)
        Blocked in transfers after the last member had come, s.
    settings : Settings
        Thresholds.
    """
    table = excess.table
    seconds = np.where(table.present, transfer_s, np.nan)
    more = seconds - baseline(seconds, table.role, relative=False)[0]
    with np.errstate(divide="ignore", invalid="ignore"):
        series = more / excess.compute
    least_s = settings.least_fraction * float(np.median(table.step_s))
    least = least_s / float(np.nanmedian(excess.compute)) if np.isfinite(excess.compute).any() else np.inf
    if not np.isfinite(least):
        return {}, more
    found = spells(series, noise_of(series, table.role), least=least)
    p = np.ones(int(np.isfinite(series).any(0).sum()))
    p[: len(found)] = [s.p for s in found.values()]
    real = rejected(p, settings.false_discovery)
    return {c: s for (c, s), keep in zip(found.items(), real, strict=False) if keep}, more


def find_links(
    source: Source, excess: Excess, transfer_s: Array, settings: Settings, notes: list[str]
) -> list[Finding]:
    """Return links, network cards and ranks whose transfers are slow.

    Parameters
    ----------
    source : Source
        Events.
    excess : Excess
        Excess of all ranks.
    transfer_s : float array, shape (step, rank)
        As for :func:`slow_transfers`.
    settings : Settings
        Thresholds.
    notes : list of str
        Gets a sentence where transfers are slow and no link is to blame.
    """
    slow, more = slow_transfers(excess, transfer_s, settings)
    found: dict[tuple[str, str], Finding] = {}
    left = dict(slow)
    for _ in range(LOOKS):
        if not left:
            break
        worst = max(left, key=lambda c: _cost(more, left[c], c))
        spell = left[worst]
        suspects, ends = _look(source, spell, _cost(more, spell, worst))
        if len(suspects):
            suspects = suspects[suspects["excess_s"] >= BESIDE * suspects["excess_s"].max()]
        for row in suspects.to_dict("records"):
            f = _finding(row, ends, excess, slow, more, spell)
            if f is not None:
                found.setdefault((f.subject_kind, f.subject), f)
        explained = {c for f in found.values() for c in f.ranks} | {worst}
        left = {c: s for c, s in left.items() if c not in explained and not _same_steps(s, spell)}
    if slow and not found:
        names = ", ".join(str(int(excess.table.rank[c])) for c in list(slow)[:8])
        notes.append(
            f"transfers of rank {names} take longer than their peers', but no link, card or host stands out: "
            "clocks that differ look like that"
        )
    return list(found.values())


def _cost(more: Array, spell: Spell, rank: int) -> float:
    """Return what a rank's transfers take too long in a step of a spell, s."""
    return float(np.nanmedian(more[spell.active, rank]))


def _same_steps(a: Spell, b: Spell) -> bool:
    """Return whether two spells are in the same steps, so that one look at them is enough."""
    return bool(np.isin(b.active, a.active).mean() > 0.5)


def _look(source: Source, spell: Spell, cost_s: float) -> tuple[pd.DataFrame, dict[int, str]]:
    """Return what is suspect among the calls of a spell, which cost the slow rank so much a step, and the host of each rank."""
    steps = source.within(np.arange(spell.first, spell.last + 1), EVENTS)
    events = source.events(steps)
    hosts = hosts_of_events(source.run, events, None)
    calls, members = transfers(events, hosts)
    by_anchors = str(events.attrs.get("clock_model", "")).startswith("anchor")
    calls = _bounded(calls, one_clock=by_anchors)
    if not len(calls) or not calls["seconds"].notna().any():
        return pd.DataFrame(), hosts
    if by_anchors:
        calls = symmetric(calls, hosts)
    least_s = MATTERS * cost_s * len(steps) / max(int(calls["lane"].value_counts().max()), 1)
    judged = judge(calls.assign(seconds=calls["seconds"] + least_s), members, slow_ratio=SLOW_RATIO, sigmas=SIGMAS)
    out = suspects_of(judged, hosts)
    out["evidence"] += f" (differences below {least_s * 1e3:.2g} ms a call do not count)"
    return (_doubted(out, calls, hosts) if by_anchors and len(out) else out), hosts


def _bounded(calls: pd.DataFrame, *, one_clock: bool = False) -> pd.DataFrame:
    """Return the calls; of links of which little but lower bounds is known, these, where they are above what is usual of such messages.

    A receiver that always comes after its message has no time to show but what it was still held: on a slow link that is long.
    Who came last is told by two clocks: with ``one_clock`` only messages within a host are taken.
    """
    if "least_s" not in calls or not calls["least_s"].notna().any():
        return calls
    few = calls["seconds"].groupby(calls["lane"]).transform("count") < MIN_CALLS
    alone = calls["least_s"].notna() & calls["seconds"].isna() & few & ~(one_clock & (calls["reach"] == "inter"))
    kind = [calls[n] for n in ("op", "bytes", "reach")]
    usual = calls["seconds"].groupby(kind).transform("median")
    usual = usual.fillna(calls["least_s"].where(alone).groupby(kind).transform("median"))
    return calls.assign(seconds=calls["seconds"].where(~alone, np.fmax(calls["least_s"], usual)))


def _doubted(suspects: pd.DataFrame, calls: pd.DataFrame, hosts: Mapping[int, str]) -> pd.DataFrame:
    """Make links between hosts undecided that clocks explain: the way back does not tell, the excess is within what they err."""
    rated = calls[(calls["source"] >= 0) & calls["seconds"].notna()]
    here, there = (rated[n].map(lambda r: hosts.get(int(r), "")) for n in ("source", "destination"))
    ways = pd.Series(list(zip(here, there, strict=True)), dtype=object).value_counts().to_dict()
    rows = suspects.to_dict("records")
    for row in rows:
        first, arrow, last = str(row["subject"]).partition("->")
        if row["subject_kind"] != "link" or not arrow:
            continue
        ends = tuple(hosts.get(int(x), "") if x.isdigit() and x not in hosts.values() else x for x in (first, last))
        each_s = float(row["excess_s"]) / max(ways.get(ends, 1), 1)
        if ends[0] != ends[1] and (ends[1], ends[0]) not in ways and each_s < CLOCK_ERROR_S:
            row["verdict"] = "undecided"
            row["evidence"] += (
                "; clocks of the two hosts that differ would look the same, and the way back does not tell"
            )
    return pd.DataFrame(rows, columns=suspects.columns)


def _finding(
    row: Mapping[Any, Any],
    hosts: Mapping[int, str],
    excess: Excess,
    slow: Mapping[int, Spell],
    more: Array,
    spell: Spell,
) -> Finding | None:
    """Return a suspect as a finding; None where no rank that it touches has slow transfers worth their cost."""
    kind, name = str(row["subject_kind"]), str(row["subject"]).split(" (")[0]
    ranks, receiving = _touched(kind, name, hosts, excess.table.rank)
    hit = [c for c in receiving if c in slow] or [c for c in ranks if c in slow]
    if not hit or kind == "group":
        return None
    cost = {c: _cost(more, slow[c], c) for c in hit}
    worst = max(cost, key=lambda c: cost[c])
    effect = _of_card(slow, more, spell, excess.table) if kind in ("nic", "host") else cost[worst]
    kinds = {"nic": "host", "host": "host", "rank": "rank", "link": "link"}
    verdict = "culprit" if row["verdict"] == "suspect" else "undecided"
    f = Finding(kinds[kind], name, ranks, verdict, "link", max(effect, cost[worst]), float(row["ratio"]), slow[worst].z)
    f.kinds, f.active = {"transfer": cost[worst]}, slow[worst].active
    f.evidence = [
        str(row["evidence"]),
        f"{cost[worst]:.3g} s/step more in transfers of rank {int(excess.table.rank[worst])}",
    ]
    return f


def _of_card(slow: Mapping[int, Spell], more: Array, spell: Spell, table: Table) -> float:
    """Return what a card costs, s: a microbatch passes it at each stage on either side, so that the excesses of stages add up."""
    cost: dict[int, float] = {}
    for c, s in slow.items():
        if _same_steps(s, spell):
            role = int(table.role[c])
            cost[role] = max(cost.get(role, 0.0), _cost(more, s, c))
    return sum(cost.values())


def _touched(kind: str, name: str, hosts: Mapping[int, str], rank: Array) -> tuple[list[int], list[int]]:
    """Return the columns of the ranks of a subject, and of those that receive on it."""

    def columns(place: str) -> list[int]:
        if place.isdigit() and place not in hosts.values():
            return np.flatnonzero(rank == int(place)).tolist()
        return [i for i, r in enumerate(rank.tolist()) if hosts.get(int(r)) == place]

    if kind != "link":
        return columns(name), columns(name)
    here, _, there = name.partition("->")
    return columns(here) + columns(there), columns(there)
