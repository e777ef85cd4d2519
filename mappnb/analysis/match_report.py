"""What did not match: per group, whose calls are missing, extra, cut off or at odds."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from mappnb.analysis._input import events_of
from mappnb.analysis._match_identity import Identity
from mappnb.analysis.matching import Calls, calls_of, complete_calls, unmatched_fraction
from mappnb.datasets import groups_of
from mappnb.run import Run

__all__ = ["match_report"]

Array = np.ndarray[Any, Any]
COLUMNS = (
    "incarnation", "group", "description", "source", "target", "identity", "num_members", "num_present", "num_calls",
    "agreed_fraction", "complete_fraction", "missing", "extra", "truncated_start", "truncated_end", "at_odds", "first_at_odds",
    "ranks", "finding",
)  # fmt: skip


def match_report(
    run: Run | xr.Dataset, *, step: int | slice | None = None, identity: Identity = "auto"
) -> pd.DataFrame:
    """Return, per group (per pair, for p2p), how well its calls match and which ranks differ from the others.

    Parameters
    ----------
    run : Run or Dataset, dims (event,)
        Events of all ranks.
    step : int or slice, optional
        Steps to look at.
    identity : str
        As of :func:`mappnb.analysis.match`.

    Returns
    -------
    DataFrame
        One row per incarnation and group or pair, the worst first. ``identity``: "seq" or "order"; ``num_members`` of the group where that
        is known, else those present; ``agreed_fraction`` of its events that have partners that agree; ``complete_fraction`` of its calls
        that every member of the group made once, with equal op and bytes (NaN where no event has an identity); over members: ``missing``
        calls between a member's first and last, ``extra`` calls that only a minority has, ``truncated_start`` and ``truncated_end``, calls
        before a member's first and after its last; ``at_odds``: calls whose members differ in op or bytes, and the number of the
        ``first_at_odds`` (-1: none); ``ranks`` that differ from the majority; ``finding``: the same in words, empty where all is well.

        ``attrs``, of all groups together: ``complete_fraction`` of the calls, ``unmatched_fraction`` of the events, ``num_calls``,
        ``num_complete``.
    """
    events = events_of(run, step)
    calls = calls_of(events, identity)
    channel = calls.transfers.channel[calls.entry]
    order = np.argsort(channel, kind="stable")
    parts = np.split(order, np.searchsorted(channel[order], np.arange(1, len(calls.transfers.keys))))
    groups = groups_of(events)
    lost = np.bincount(calls.transfers.channel, weights=calls.transfers.number < 0, minlength=len(calls.transfers.keys))
    complete = complete_calls(events, calls)
    rows = (
        [_row(calls, c, rows, groups, int(lost[c]), complete) for c, rows in enumerate(parts)] if len(channel) else []
    )
    table = pd.DataFrame(rows, columns=list(COLUMNS))
    table = table.sort_values("agreed_fraction", kind="stable", ignore_index=True)
    table.attrs |= {
        "complete_fraction": float(complete.mean()) if len(complete) else float("nan"),
        "unmatched_fraction": unmatched_fraction(calls), "num_calls": calls.num_calls, "num_complete": int(complete.sum()),
    }  # fmt: skip
    return table


def _row(
    calls: Calls, channel: int, rows: Array, groups: dict[int, dict[str, Any]], lost: int, complete: Array
) -> dict[str, Any]:
    t = calls.transfers
    incarnation, group, source, target = t.keys[channel].tolist()
    entry, call = calls.entry[rows], calls.call[rows]
    side, rank = t.side[entry] if source >= 0 else t.rank[entry], t.rank[entry]
    known = groups.get(group, {})
    members = {0: source, 1: target} if source >= 0 else {int(r): int(r) for r in np.unique(rank)}
    counts = _presence(call, side, list(members))
    odd, first = _at_odds(calls, entry, call, source >= 0)
    total = len(rows) + lost
    whole = complete[np.unique(call)]
    out: dict[str, Any] = {
        "incarnation": incarnation, "group": group, "description": str(known.get("desc", "")), "source": source, "target": target,
        "identity": "order" if t.by_order[channel] else "seq",
        "num_members": 2 if source >= 0 else len(known.get("ranks", members)), "num_present": len(np.unique(side)),
        "num_calls": len(whole), "agreed_fraction": float(calls.agreed[rows].sum()) / total if total else 0.0,
        "complete_fraction": float(whole.mean()) if len(whole) else float("nan"),
        **{k: int(sum(v.values())) for k, v in counts.items()},
        "at_odds": len(odd), "first_at_odds": first,
    }  # fmt: skip
    who = Counter({members[m]: n for c in counts.values() for m, n in c.items() if n}) + Counter(odd.values())
    out["ranks"] = sorted(r for r in who if r >= 0)
    disagree = "sequence numbers disagree, matched by order; " if t.at_odds[channel] else ""
    out["finding"] = disagree + _words(
        out, counts, members, odd, lost, set(known.get("ranks", ())) - set(members.values())
    )
    return out


def _presence(call: Array, side: Array, members: list[int]) -> dict[str, dict[int, int]]:
    """Return, per member, its missing, extra and truncated calls against those that at least half of the members have."""
    unique, column = np.unique(call, return_inverse=True)
    there = np.zeros((len(members), len(unique)), bool)
    there[np.searchsorted(np.array(members), side), column] = True
    common = 2 * there.sum(axis=0) >= len(members) if len(members) != 2 else np.ones(len(unique), bool)
    out: dict[str, dict[int, int]] = {"missing": {}, "extra": {}, "truncated_start": {}, "truncated_end": {}}
    for i, member in enumerate(members):
        mine = np.flatnonzero(there[i])
        absent = np.flatnonzero(common & ~there[i])
        first, last = (int(mine[0]), int(mine[-1])) if len(mine) else (len(unique), len(unique))
        out["truncated_start"][member] = int((absent < first).sum())
        out["truncated_end"][member] = int((absent > last).sum())
        out["missing"][member] = int(((absent > first) & (absent < last)).sum())
        out["extra"][member] = int((there[i] & ~common).sum())
    return out


def _at_odds(calls: Calls, entry: Array, call: Array, p2p: bool) -> tuple[dict[int, int], int]:
    """Return, per call whose members differ in op or bytes, the rank that is most alone, and the number of the first such call."""
    t = calls.transfers
    key = pd.factorize(t.size[entry] * (int(t.op.max(initial=0)) + 1) + (0 if p2p else t.op[entry]))[0]
    order = np.argsort(call, kind="stable")
    sorted_call, sorted_key = call[order], key[order]
    new = np.flatnonzero(np.append(True, sorted_call[1:] != sorted_call[:-1])) if len(call) else np.empty(0, np.int64)
    if not len(new):
        return {}, -1
    mixed = np.minimum.reduceat(sorted_key, new) != np.maximum.reduceat(sorted_key, new)
    found: dict[int, int] = {}
    numbers: list[int] = []
    for c in sorted_call[new[mixed]].tolist():
        rows = order[sorted_call == c] if len(numbers) < 100 else order[:0]
        numbers.append(c)
        found[c] = _minority(key[rows], t.rank[entry[rows]])
    first = int(t.number[calls.entry[calls.first[numbers]]].min()) if numbers else -1
    return found, first


def _minority(key: Array, rank: Array) -> int:
    """Return the rank whose value the fewest others share; -1 where no one is alone."""
    count = Counter(key.tolist())
    if len(count) < 2 or len(set(count.values())) == 1:
        return -1
    rare = min(count, key=lambda k: count[k])
    return int(rank[key == rare][0])


def _words(
    row: dict[str, Any],
    counts: dict[str, dict[int, int]],
    members: dict[int, int],
    odd: dict[int, int],
    lost: int,
    absent: set[int],
) -> str:
    said = []
    if absent:
        shown = sorted(absent)
        said.append(f"no events of rank{'s' if len(shown) > 1 else ''} {_some(shown)}")
    for name, text in (
        ("missing", "misses {} calls"), ("extra", "has {} calls that most others lack"),
        ("truncated_start", "begins {} calls late"), ("truncated_end", "ends {} calls early"),
    ):  # fmt: skip
        most = Counter({members[m]: n for m, n in counts[name].items() if n}).most_common(3)
        said += [f"rank {r} {text.format(n)}" for r, n in most]
    if odd:
        alone = [r for r, _ in Counter(v for v in odd.values() if v >= 0).most_common(3)]
        by = f", rank {_some(alone)} against the others" if alone else ""
        said.append(f"{len(odd)} calls differ in op or bytes from number {row['first_at_odds']} on{by}")
    if lost:
        said.append(f"{lost} events have no identity")
    return "; ".join(said or ())


def _some(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (" ..." if len(ranks) > 8 else "")
