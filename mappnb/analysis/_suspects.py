"""From lanes that are slow to what they have in common: a link, a rank, a network card, a host."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

__all__ = ["Lanes", "judge", "suspects_of"]

Array = np.ndarray[Any, Any]
MIN_CALLS = 3
"""Calls of a lane in a class, below which it is not judged: the spread of fewer says nothing."""
MIN_LANES = 3
"""Lanes of a class, below which none is judged: of two, one is always slower."""
FLOOR = 0.02
"""Least standard deviation of log time between lanes that are alike: cables and switches differ."""
SHARE = 0.8
"""Share of its lanes that must be slow before a rank, card or host is named."""
LATENCY_BYTES = 2**20
"""Below this size latency counts: times of a class are compared as they are, above it times per byte."""
QUARTILE = 0.25
"""Lanes are slow against the faster quarter: a bad card may be in more than half of the lanes."""
COLUMNS = ("subject_kind", "subject", "verdict", "ratio", "excess_s", "num_slow", "num_lanes", "evidence")


@dataclass(frozen=True, slots=True)
class Lanes:
    """Every pair of ranks and every group that moved something.

    Attributes
    ----------
    table : DataFrame
        Index ``lane``: ``source``, ``destination`` (-1 for a group), ``group``, ``reach``; ``log_ratio`` to the median of its classes, and
        ``score``, that in standard errors; ``log_slow``, ``z`` and ``slow`` against the faster quarter; ``judged``; ``excess_s`` over
        the usual; ``calls``.
    ranks : dict of int to list of int
        Ranks of each lane.
    """

    table: pd.DataFrame
    ranks: dict[int, list[int]]


def judge(calls: pd.DataFrame, members: Mapping[int, list[int]], *, slow_ratio: float, sigmas: float) -> Lanes:
    """Return how each lane compares with the lanes that did the same.

    Parameters
    ----------
    calls : DataFrame
        As :func:`mappnb.analysis._transfers.transfers` gives it.
    members : mapping of int to list of int
        Ranks of each group.
    slow_ratio, sigmas : float
        A lane is slow that takes that many times as long, by that many standard errors.
    """
    by_class = _classes(calls)
    first = calls.drop_duplicates("lane").set_index("lane")[["source", "destination", "group", "reach"]]
    table = first.sort_index()
    weight = 1 / by_class["sigma"] ** 2
    total = weight.groupby(by_class["lane"]).sum()
    for name in ("log_ratio", "log_slow"):
        table[name] = (by_class[name] * weight).groupby(by_class["lane"]).sum() / total
    table["z"], table["score"] = table["log_slow"] * np.sqrt(total), table["log_ratio"] * np.sqrt(total)
    table["calls"] = by_class.groupby("lane")["calls"].sum()
    table["calls"] = table["calls"].fillna(0).astype(int)
    table["excess_s"] = by_class.groupby("lane")["excess_s"].sum()
    table["judged"] = table["z"].notna()
    table["slow"] = table["judged"] & (table["log_slow"] >= np.log(slow_ratio)) & (table["z"] >= sigmas)
    ends = zip(table.index.tolist(), table["source"], table["destination"], table["group"], strict=True)
    ranks = {int(k): [int(s), int(d)] if s >= 0 else members.get(int(g), []) for k, s, d, g in ends}
    return Lanes(table, ranks)


def _classes(calls: pd.DataFrame) -> pd.DataFrame:
    """Return one row per class and lane: log time against the class's median and faster quarter, and its standard error."""
    rated = calls[calls["seconds"].notna()].copy()
    rated["size_class"] = np.floor(np.log2(np.maximum(rated["bytes"].to_numpy(np.float64), 1))).astype(int)
    size = np.maximum(rated["bytes"].to_numpy(np.float64), 1)
    scale = np.where(rated["size_class"] >= np.log2(LATENCY_BYTES), size / 2.0 ** rated["size_class"], 1.0)
    rated["log_s"] = np.log(rated["seconds"] / scale)
    keys = ["op", "size_class", "size", "reach"]
    grouped = rated.groupby([*keys, "lane"])["log_s"]
    table = pd.DataFrame({"log_s": grouped.median(), "calls": grouped.count(), "all_s": np.exp(grouped.mean())})
    deviation = (rated["log_s"] - grouped.transform("median")).abs()
    spread = 1.4826 * deviation.groupby([rated[k] for k in [*keys, "lane"]]).median()
    table["error"] = 1.2533 * spread / np.sqrt(table["calls"])
    table = table[table["calls"] >= MIN_CALLS]
    within = table.groupby(keys)["log_s"]
    table = table.assign(lanes=within.transform("count"), middle=within.transform("median"))
    table = table[table["lanes"] >= MIN_LANES]
    low = table.groupby(keys)["log_s"].transform("quantile", QUARTILE)
    # scatter of lanes that are alike: of the faster half around the faster quarter, which for a normal law is 0.39 sigma
    near = (table["log_s"] - low).abs().where(table["log_s"] <= table["middle"])
    scatter = near.groupby(level=keys).transform("median").fillna(0) / 0.39
    table["sigma"] = np.hypot(np.maximum(scatter, FLOOR), table["error"])
    table["log_ratio"], table["log_slow"] = table["log_s"] - table["middle"], table["log_s"] - low
    table["excess_s"] = table["all_s"] * (1 - np.exp(-table["log_slow"])) * table["calls"]
    return table.reset_index()


@dataclass(frozen=True, slots=True)
class _Subject:
    kind: str
    name: str
    lanes: frozenset[int]
    others: int
    need: int


def suspects_of(lanes: Lanes, hosts: Mapping[int, str]) -> pd.DataFrame:
    """Return what the slow lanes have in common: as few subjects as explain them, the one with most first."""
    table = lanes.table
    slow = set(table.index[table["slow"]].tolist())
    judged = set(table.index[table["judged"]].tolist())
    subjects = [s for s in _subjects(lanes, hosts, slow) if _fits(s, slow, judged)]
    rows, left = [], set(slow)
    while left:
        ranked = sorted(subjects, key=lambda s: (-len(s.lanes & left), len(s.lanes & judged)))
        if not ranked or not ranked[0].lanes & left:
            break
        best = ranked[0]
        equal = [s for s in ranked if s is not best and s.lanes & judged == best.lanes & judged]
        rows.append(_row(best, equal, table, slow, judged))
        left -= best.lanes
    rows += [_group_row(lanes, k, table) for k in sorted(left)]
    out = pd.DataFrame(rows, columns=list(COLUMNS))
    return out.sort_values("excess_s", ascending=False, kind="stable").reset_index(drop=True)


def _fits(s: _Subject, slow: set[int], judged: set[int]) -> bool:
    seen = s.lanes & judged
    return bool(seen) and len(s.lanes & slow) >= max(s.need, SHARE * len(seen)) and s.others >= s.need


def _subjects(lanes: Lanes, hosts: Mapping[int, str], slow: set[int]) -> Iterator[_Subject]:
    """Yield what could be at fault: everything that a slow lane touches, with all the lanes that it would slow down."""
    table = lanes.table[lanes.table["judged"]]
    ends = {
        int(k): (int(s), int(d)) for k, s, d in zip(table.index, table["source"], table["destination"], strict=True)
    }
    for k in sorted(slow):
        if ends[k][0] >= 0:
            yield _Subject("link", f"{ends[k][0]}->{ends[k][1]}", frozenset([k]), 1, 1)
    at_rank = {r: str(r) for k in ends for r in lanes.ranks[k]}
    yield from _places("rank", at_rank, ends, lanes, slow)
    if len(set(hosts.values())) < 2:
        return
    inter = {k: e for k, e in ends.items() if table["reach"][k] == "inter"}
    yield from _places("nic", hosts, inter, lanes, slow)
    inside = {hosts.get(lanes.ranks[k][0]) for k in ends if k not in inter}
    yield from (s for s in _places("host", hosts, ends, lanes, slow) if s.name.split(" (")[0] in inside)
    ways: dict[tuple[str, str], list[int]] = {}
    for k, (source, target) in inter.items():
        if source >= 0:
            ways.setdefault((hosts.get(source, ""), hosts.get(target, "")), []).append(k)
    for (here, there), mine in ways.items():
        yield _Subject("link", f"{here}->{there}", frozenset(mine), len(mine), 2)


def _places(
    kind: str, place: Mapping[int, str], ends: Mapping[int, tuple[int, int]], lanes: Lanes, slow: set[int]
) -> Iterator[_Subject]:
    """Yield each rank or host with all its lanes, with those that it sends on, and with those that it receives on."""
    touching: dict[str, list[int]] = {}
    for k in ends:
        for name in dict.fromkeys(place.get(r, "") for r in lanes.ranks[k]):
            touching.setdefault(name, []).append(k)
    for name in sorted({place.get(r, "") for k in slow for r in lanes.ranks[k]} & touching.keys()):
        mine = touching[name]
        out = [k for k in mine if ends[k][0] >= 0 and place.get(ends[k][0]) == name]
        into = [k for k in mine if ends[k][0] >= 0 and place.get(ends[k][1]) == name]
        for text, some in ((name, mine), (f"{name} (sends)", out), (f"{name} (receives)", into)):
            others = {frozenset(place.get(r, "") for r in lanes.ranks[k]) - {name} for k in some}
            yield _Subject(kind, text, frozenset(some), len(others), 2)


def _row(s: _Subject, equal: list[_Subject], table: pd.DataFrame, slow: set[int], judged: set[int]) -> tuple[Any, ...]:
    mine, seen = sorted(s.lanes & slow), s.lanes & judged
    ratio = float(np.exp(table["log_slow"][mine].median()))
    excess = float(table["excess_s"][mine].sum())
    text = f"{len(mine)} of {len(seen)} lanes take {ratio:.2f} times as long as the faster quarter of their kind"
    text += (
        f" (z {table['z'][mine].min():.0f} to {table['z'][mine].max():.0f}, {int(table['calls'][mine].sum())} calls)"
    )
    if s.kind == "link" and len(seen) > 1:
        text += "; the card of either host would look the same where it has no other lanes to compare"
    unlike = [e for e in equal if e.kind != s.kind or e.name.split(" (")[0] != s.name.split(" (")[0]]
    if unlike:
        text += "; the same lanes are those of " + ", ".join(f"{e.kind} {e.name}" for e in unlike[:3])
    return s.kind, s.name, "undecided" if unlike else "suspect", ratio, excess, len(mine), len(seen), text


def _group_row(lanes: Lanes, lane: int, table: pd.DataFrame) -> tuple[Any, ...]:
    ratio = float(np.exp(table["log_slow"][lane]))
    ranks = ", ".join(map(str, lanes.ranks[lane][:16])) + (", ..." if len(lanes.ranks[lane]) > 16 else "")
    text = (
        f"collectives of these ranks take {ratio:.2f} times as long as others of their kind; no one of them stands out"
    )
    return "group", ranks, "undecided", ratio, float(table["excess_s"][lane]), 1, 1, text
