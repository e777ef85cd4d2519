"""The longest stretches in which a rank computes nothing, and what it did instead."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from mappnb.analysis._identity import call_ids, is_point_to_point
from mappnb.analysis._input import events_of, issue_only
from mappnb.analysis._intervals import innermost_segments
from mappnb.datasets import groups_of
from mappnb.errors import MappnbError
from mappnb.run import Run
from mappnb.terms import Category, Flag, Op, Phase

__all__ = ["idle_blocks"]

Array = np.ndarray[Any, Any]
_BACKWARD = (Phase.BACKWARD, Phase.BACKWARD_INPUT, Phase.BACKWARD_WEIGHT)
_MOVING = (Category.COLLECTIVE, Category.P2P, Category.WAIT)
_NEVER = 2**62
_COLUMNS = [
    "step",
    "rank",
    "start_s",
    "duration_s",
    "reason",
    "peer",
    "op",
    "reason_s",
    "root",
    "root_reason",
    "phase",
    "explanation",
]
_TEXT = {
    "busy": "computes",
    "wait_p2p": "waits for rank {peer} to {other}",
    "wait_collective": "waits in {op} for rank {peer}, the last to come",
    "wait_self": "waits in {op}, to which it came last itself",
    "wait_absent": "waits in {op} for rank {peer}, which has not come",
    "transfer": "{op} is in transfer",
    "data": "waits for the next batch",
    "checkpoint": "saves or loads a checkpoint",
    "evaluation": "evaluates",
    "gc": "garbage collection of Python",
    "host": "host work or launch gap",
    "gap": "in no recorded span",
    "not_begun": "has not begun the step",
    "finished": "has no more events in the step, which goes on elsewhere",
}


def idle_blocks(
    run: Run | xr.Dataset, *, step: int | slice | None = None, top: int = 20, rank: int | None = None
) -> pd.DataFrame:
    """Return the longest idle blocks of all ranks and steps, with a reason each.

    Parameters
    ----------
    run : Run or Dataset, dims (event,)
        Events of all ranks.
    step : int or slice, optional
        Steps to look at; all by default.
    top : int
        How many blocks.
    rank : int, optional
        Blocks of this rank alone; the others are still looked at for reasons.

    Returns
    -------
    DataFrame
        Longest first: ``step``, ``rank``; ``start_s`` on the run clock, ``duration_s``, s; ``reason``, that of most of the block, and
        ``reason_s`` that it fills, s; ``peer``, the rank that was waited for, or -1; ``op``; ``root`` and ``root_reason``, the rank
        at the end of the chain of waits, and what it did most of the block; ``phase``: warm_up (before the rank's first
        backward), cool_down (after its last forward), steady, or empty; ``explanation`` in words. Reasons: wait_p2p, wait_collective,
        wait_self (a wait for a call to which the rank came last itself), wait_absent (a call that never ended, for want of ``peer``),
        transfer, data, checkpoint, evaluation, gc, host, gap, not_begun, finished; of a root also busy.

    Notes
    -----
    A block is a longest interval of the step window (first start to last end over all ranks) in which no thread or stream of the
    rank is innermost in a compute or optimizer span; where a rank computes on a device, only the device counts. A blocking
    transfer counts as waiting until its last member has come, and as transfer after that; the last to come is named, which is
    who was waited for, not always who is to blame: it may have waited before. ``root`` follows that, from rank to rank, by what
    each of them did for most of the same time. Other hosts' arrivals are as good as the clocks.
    """
    events = events_of(run, step)
    unreal = (events.category.values == Category.MARK) & ((events.flags.values & Flag.CLIPPED) != 0)
    events = events.isel(event=np.flatnonzero((events["step"].values >= 0) & ~unreal))
    if not events.sizes["event"]:
        raise MappnbError("idle_blocks: no events in these steps; see run.steps for the steps that there are")
    pieces = _pieces(events)
    blocks = _blocks(events, pieces[pieces["reason"] == "busy"])
    if rank is not None:
        blocks = blocks[blocks["rank"] == rank].reset_index(drop=True)
    blocks = blocks.sort_values("ns", ascending=False, kind="stable").head(max(top, 0)).reset_index(drop=True)
    return _explained(blocks, pieces, events)


def _pieces(events: xr.Dataset) -> pd.DataFrame:
    """Return the innermost segments of all lanes with a reason; transfers are cut where their last member came."""
    category, flags = events.category.values, events.flags.values
    beside = np.isin(category, (Category.COLLECTIVE, Category.P2P)) & ((flags & Flag.ASYNC) != 0)
    inside = np.flatnonzero(~beside)
    keys = np.stack([events[n].values[inside] for n in ("rank", "step", "thread", "stream")], 1)
    lane = np.unique(keys, axis=0, return_inverse=True)[1].ravel()
    start = events.start_ns.values[inside].astype(np.int64)
    span, left, right = innermost_segments(lane, start, start + events.duration_ns.values[inside])
    span = inside[span]
    calls = _last(events)
    reason, peer = _reasons(events, span), np.full(len(span), -1, np.int64)
    moving = np.isin(category[span], _MOVING)
    came, who = calls.came[span], calls.who[span]
    wait = moving & (came > left)
    pair = is_point_to_point(events)[span]
    own = who == events["rank"].values[span]
    kinds = np.where(
        came >= _NEVER, "wait_absent", np.where(own, "wait_self", np.where(pair, "wait_p2p", "wait_collective"))
    )
    parts = []
    for mask, kind, a, b, other in (
        (~moving, reason, left, right, peer),
        (wait, kinds, left, np.minimum(came, right), who),
        (moving & (right > came), np.full(len(span), "transfer", object), np.maximum(left, came), right, peer),
    ):
        parts.append(
            pd.DataFrame(
                {"span": span[mask], "left": a[mask], "right": b[mask], "reason": kind[mask], "peer": other[mask]}
            )
        )
    out = pd.concat(parts, ignore_index=True)
    for name in ("rank", "step"):
        out[name] = events[name].values[out["span"].to_numpy()]
    op = np.where(
        category == Category.WAIT, events.name.values, events.op.values
    )  # a wait is named by what it waits for
    return out.assign(op=op[out["span"].to_numpy()])


def _reasons(events: xr.Dataset, span: Array) -> Array:
    category = events.category.values[span]
    out = np.full(len(span), "host", object)
    for name in ("data", "checkpoint", "evaluation"):
        out[category == name] = name
    out[events.op.values[span] == Op.GC] = "gc"
    busy = np.isin(category, (Category.COMPUTE, Category.OPTIMIZER)) & ~issue_only(events)[span]
    out[busy] = "busy"
    return out


@dataclass(frozen=True, slots=True)
class _Last:
    """Of each event, when the last member of its call came, ns, and which rank that was."""

    came: Array
    who: Array


def _last(events: xr.Dataset) -> _Last:
    call, start = call_ids(events), events.start_ns.values.astype(np.int64)
    came, who = start.copy(), events["rank"].values.astype(np.int64)
    members = np.flatnonzero((call >= 0) & (events.category.values != Category.WAIT))
    order = members[np.lexsort((start[members], call[members]))]
    last = np.ones(len(order), bool)
    last[:-1] = call[order][1:] != call[order][:-1]
    first, rank = np.full(int(call.max(initial=-1)) + 1, -(2**62)), np.full(int(call.max(initial=-1)) + 1, -1)
    first[call[order[last]]], rank[call[order[last]]] = start[order[last]], who[order[last]]
    mine = (call >= 0) & (first[call] > -(2**62)) if len(first) else np.zeros(len(call), bool)
    came[mine], who[mine] = first[call[mine]], rank[call[mine]]
    for i in np.flatnonzero(mine & ((events.flags.values & Flag.OPEN) != 0)).tolist():
        absent = _absent(events, i, set(events["rank"].values[members[call[members] == call[i]]].tolist()))
        if absent >= 0:
            came[i], who[i] = _NEVER, absent
    return _Last(came, who)


def _absent(events: xr.Dataset, event: int, seen: set[int]) -> int:
    """Return the first rank that an open call lacks, -1 for none."""
    peer = int(events.peer.values[event])
    if events.category.values[event] == Category.P2P:
        return peer if peer not in seen else -1
    wanted = groups_of(events).get(int(events.group.values[event]), {}).get("ranks", [])
    return min((int(r) for r in wanted if int(r) not in seen), default=-1)


def _blocks(events: xr.Dataset, busy: pd.DataFrame) -> pd.DataFrame:
    """Return the gaps between the busy intervals of each rank and step, within the window of the step."""
    start = events.start_ns.values.astype(np.int64)
    seen = pd.DataFrame(
        {
            "step": events["step"].values,
            "rank": events["rank"].values,
            "a": start,
            "b": start + events.duration_ns.values,
        }
    )
    window = seen.groupby("step").agg(a=("a", "min"), b=("b", "max"))
    rows: list[tuple[int, int, int, int]] = []
    intervals = dict(iter(busy.groupby(["step", "rank"])[["left", "right"]]))
    for step, rank in seen[["step", "rank"]].drop_duplicates().sort_values(["step", "rank"]).itertuples(index=False):
        low, high = int(window["a"][step]), int(window["b"][step])
        mine = intervals.get((step, rank))
        spans = mine.to_numpy(np.int64) if mine is not None else np.empty((0, 2), np.int64)
        spans = spans[np.argsort(spans[:, 0], kind="stable")]
        ends = np.maximum.accumulate(np.concatenate([[low], spans[:, 1]]))
        begins = np.concatenate([spans[:, 0], [high]])
        gaps = np.flatnonzero(begins > ends)
        pairs = zip(ends[gaps].tolist(), begins[gaps].tolist(), strict=True)
        rows += [(int(step), int(rank), left, right) for left, right in pairs]
    out = pd.DataFrame(rows, columns=["step", "rank", "left", "right"])
    return out.assign(ns=out["right"] - out["left"])


def _explained(blocks: pd.DataFrame, pieces: pd.DataFrame, events: xr.Dataset) -> pd.DataFrame:
    found = dict(iter(pieces.groupby(["step", "rank"])))
    actions = _actions(events)
    rows = []
    for step, rank, left, right in blocks[["step", "rank", "left", "right"]].to_numpy(np.int64).tolist():
        mine = found.get((step, rank), pieces.iloc[:0])
        reason, peer, op, ns = _reason(left, right, mine[mine["reason"] != "busy"])
        root, why = _root(found, step, rank, (reason, peer), left, right)
        phase = _phase(actions.get((step, rank)), (left + right) / 2)
        text = _TEXT[reason].format(peer=peer, op=op or "a transfer", other="receive" if op == Op.SEND else "send")
        text += "" if 2 * ns >= right - left else " (less than half of the block)"
        text += (
            ""
            if root in (rank, -1)
            else f"; at the end of the chain rank {root} {_TEXT[why].format(peer=-1, op='a call', other='send')}"
        )
        rows.append((step, rank, left / 1e9, (right - left) / 1e9, reason, peer, op, ns / 1e9, root, why, phase, text))
    return pd.DataFrame(rows, columns=_COLUMNS)


def _root(
    found: dict[Any, pd.DataFrame], step: int, rank: int, first: tuple[str, int], left: int, right: int
) -> tuple[int, str]:
    """Return the rank at the end of the chain of waits, and what it did most of the time."""
    reason, peer = first
    seen = {rank}
    while reason in ("wait_p2p", "wait_collective", "wait_absent") and peer not in seen and (step, peer) in found:
        rank = peer
        seen.add(rank)
        reason, peer, _, _ = _reason(left, right, found[step, rank])
    return rank, reason


def _reason(left: int, right: int, mine: pd.DataFrame) -> tuple[str, int, str, int]:
    """Return (reason, peer, op, ns) of what fills most of a block."""
    here = mine[(mine["left"] < right) & (mine["right"] > left)]
    best = ("gap", -1, "", 0)
    covered = 0
    if len(here):
        ns = here["right"].clip(upper=right) - here["left"].clip(lower=left)
        plain = (
            here["reason"] == "host"
        )  # beside something that says more, on another thread or stream, it says nothing
        keep = ~plain if 2 * int(ns[~plain].sum()) >= right - left else plain | ~plain
        total = ns[keep].groupby([here["reason"][keep], here["peer"][keep], here["op"][keep]]).sum()
        at = int(np.argmax(total.to_numpy()))
        reason, peer, op = total.index.to_list()[at]
        best, covered = (str(reason), int(peer), str(op), int(total.to_numpy()[at])), int(ns.sum())
    empty = right - left - covered
    if empty <= best[3]:
        return best
    if not len(mine) or int(mine["left"].min()) >= right or (len(here) and int(here["left"].min()) > left + empty // 2):
        return "not_begun", -1, "", empty
    return ("finished" if int(mine["right"].max()) <= left + covered else "gap"), -1, "", empty


def _actions(events: xr.Dataset) -> dict[tuple[int, int], tuple[int, int]]:
    """Return by (step, rank): start of the first backward and end of the last forward, ns."""
    op, compute = events.op.values, (events.category.values == Category.COMPUTE) & ~issue_only(events)
    back = np.isin(events.phase.values, _BACKWARD) | (op == Op.BACKWARD_STEP)
    forward = (events.phase.values == Phase.FORWARD) | (op == Op.FORWARD_STEP)
    start = events.start_ns.values.astype(np.int64)
    frame = pd.DataFrame({"step": events["step"].values, "rank": events["rank"].values})
    frame["first"] = np.where(compute & back, start, 2**62)
    frame["last"] = np.where(compute & forward, start + events.duration_ns.values, -(2**62))
    grouped = frame.groupby(["step", "rank"]).agg(first=("first", "min"), last=("last", "max"))
    found = grouped[(grouped["first"] < 2**62) & (grouped["last"] > -(2**62))]
    return {
        (int(s), int(r)): (int(a), int(b))
        for (s, r), a, b in zip(found.index, found["first"], found["last"], strict=True)
    }


def _phase(action: tuple[int, int] | None, middle: float) -> str:
    if action is None:
        return ""
    first_back, last_forward = action
    return "warm_up" if middle < first_back else "cool_down" if middle > last_forward else "steady"
