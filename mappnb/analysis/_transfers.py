"""What each call moved and how long that took with the waiting taken out: the observations that links are judged by."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from mappnb.analysis._identity import call_ids, is_point_to_point, is_sending
from mappnb.datasets import groups_of
from mappnb.terms import Category, Flag, Op

__all__ = ["BUS_FACTORS", "bus_factor", "transfers"]

Array = np.ndarray[Any, Any]
SEND_RECV = "send_recv"
_UNSURE = int(Flag.OPEN | Flag.CLIPPED | Flag.FAILED)
_BLOCKED_NS = 1000
"""A wait for a receive that is shorter than this found the message there."""
BUS_FACTORS: dict[str, tuple[float, bool]] = {
    Op.ALL_REDUCE: (2.0, True),
    Op.ALL_GATHER: (1.0, True),
    Op.REDUCE_SCATTER: (1.0, True),
    Op.ALL_TO_ALL: (1.0, True),
    Op.GATHER: (1.0, True),
    Op.SCATTER: (1.0, True),
    Op.BROADCAST: (1.0, False),
    Op.REDUCE: (1.0, False),
    SEND_RECV: (1.0, False),
}
"""Factor of each operation on bytes over time, and whether ``(n - 1) / n`` of a group of n comes with it."""


def bus_factor(op: Array, size: Array) -> Array:
    """Return bus bandwidth over algorithm bandwidth, as nccl-tests (doc/PERFORMANCE.md) defines it; 1 for what it does not list.

    Parameters
    ----------
    op : object array, shape (call,)
        Operation.
    size : int array, shape (call,)
        Number of ranks of the group.
    """
    share = np.where(size > 1, (size - 1) / np.maximum(size, 1), 1.0)
    names, which = np.unique(op.astype(str), return_inverse=True)
    known = [BUS_FACTORS.get(n, (1.0, False)) for n in names]
    factor = np.array([f for f, _ in known] or [1.0])[which]
    return np.asarray(factor * np.where(np.array([s for _, s in known] or [False])[which], share, 1.0))


def transfers(events: xr.Dataset, hosts: Mapping[int, str]) -> tuple[pd.DataFrame, dict[int, list[int]]]:
    """Return one row per call of a collective or message between ranks, and the ranks of each group.

    Parameters
    ----------
    events : Dataset, dims (event,)
        Events of all ranks.
    hosts : mapping of int to str
        Host of each rank, as far as known.

    Returns
    -------
    calls : DataFrame
        ``op``; ``lane``, number of the pair of ranks or of the group; ``source``, ``destination``, -1 for a collective; ``group``;
        ``size``, ranks; ``bytes`` (the largest of the members), ``mean_bytes``; ``seconds``, NaN where the waiting cannot be told
        from the transfer; ``least_s``, of messages whose receiver came last: what it was still held, a lower bound;
        ``reach``, "intra" or "inter" host; ``step``.
    members : dict of int to list of int
        Ranks of each group: by the table of groups, else those that were seen.
    """
    index = np.flatnonzero(
        np.isin(events.category.values, (Category.COLLECTIVE, Category.P2P, Category.WAIT)) & (events.seq.values >= 0)
    )
    chosen = events.isel(event=index)
    rows = pd.DataFrame(
        {n: chosen[n].values for n in ("rank", "step", "op", "group", "seq", "peer", "bytes", "flags", "stream")}
    )
    rows["flags"] = rows["flags"].astype(np.int64)
    rows["call"], rows["start"] = call_ids(chosen), chosen.start_ns.values.astype(np.int64)
    rows["end"] = rows["start"] + chosen.duration_ns.values
    rows["wait"] = chosen.category.values == Category.WAIT
    pair, sending = is_point_to_point(chosen), is_sending(chosen)
    members = _members(events, rows)
    parts = [_collectives(rows[~pair & ~rows["wait"]], members), _messages(rows[pair], sending[pair], events)]
    out = pd.concat([p for p in parts if len(p)] or parts[:1], ignore_index=True)
    out["lane"] = out.groupby(["source", "destination", "group"], sort=True).ngroup()
    out["reach"] = _reach(out, members, hosts)
    return out, members


def _members(events: xr.Dataset, rows: pd.DataFrame) -> dict[int, list[int]]:
    known = {gid: [int(r) for r in g.get("ranks", [])] for gid, g in groups_of(events).items()}
    if not known:
        seen = rows[["group", "rank"]].drop_duplicates().sort_values(["group", "rank"])
        for group, rank in seen.to_numpy(np.int64).tolist():
            known.setdefault(group, []).append(rank)
    return known


def _collectives(rows: pd.DataFrame, members: Mapping[int, list[int]]) -> pd.DataFrame:
    on_device = rows["stream"] >= 0
    rows = rows[on_device | ~rows["call"].isin(rows["call"][on_device].unique())]  # a kernel tells more than its issue
    rows = rows.assign(ns=rows["end"] - rows["start"], bad=(rows["flags"] & (_UNSURE | int(Flag.ASYNC))) != 0)
    grouped = rows.groupby("call")
    out = grouped.agg(
        op=("op", "first"), group=("group", "first"), step=("step", "min"), seen=("rank", "nunique"), rows=("rank", "size"),
        bytes=("bytes", "max"), mean_bytes=("bytes", "mean"), ns=("ns", "min"), bad=("bad", "any"),
    )  # fmt: skip
    sizes = {g: len(m) for g, m in members.items()}
    out["size"] = out["group"].map(sizes).fillna(out["seen"]).astype(int)
    # who comes last waits for nobody: the shortest stay is the transfer, whatever the clocks say
    sure = (out["seen"] == out["size"]) & (out["rows"] == out["size"]) & ~out["bad"] & (out["ns"] > 0)
    out["seconds"] = (out["ns"] / 1e9).where(sure)
    out["source"] = out["destination"] = -1
    out = out[(out["bytes"] > 0) & (out["size"] > 1)]
    return out[["op", "group", "step", "size", "bytes", "mean_bytes", "seconds", "source", "destination"]]


def _messages(rows: pd.DataFrame, sending: Array, events: xr.Dataset) -> pd.DataFrame:
    sends = rows[sending & ~rows["wait"]].drop_duplicates("call").set_index("call")
    receives = rows[~sending & ~rows["wait"]].drop_duplicates("call").set_index("call")
    waits = rows[~sending & rows["wait"]].drop_duplicates("call").set_index("call")
    both = sends.join(receives[["start", "end", "flags"]].add_suffix("_in"), how="inner")
    both = both.join(waits[["start", "end"]].add_suffix("_wait"), how="left")
    waited = both["start_wait"].notna()
    there = both["start_in"].where(~waited, both["start_wait"])
    at = both["end_in"].where(~waited, both["end_wait"])
    simulated = events.attrs.get("clock_model") == "simulated"
    blocked = ((both["flags_in"] & int(Flag.ASYNC)) == 0) | (waited & (at - there > _BLOCKED_NS)) | simulated
    both = both.assign(there=there, at=at, blocked=blocked).sort_values(["group", "rank", "peer", "seq"])
    before = both.groupby(["group", "rank", "peer"])["at"].shift()
    begin = np.fmax(both["start"], before.fillna(-np.inf))  # messages of a link follow one another
    ns = both["at"] - begin
    sure = both["blocked"] & (both["there"] <= begin) & ((both["flags"] | both["flags_in"]) & _UNSURE == 0)
    out = pd.DataFrame({"op": SEND_RECV, "group": both["group"], "size": 2, "bytes": both["bytes"]})
    out["mean_bytes"], out["seconds"] = out["bytes"].astype(float), (ns / 1e9).where(sure)
    late = both["blocked"] & (both["there"] > begin) & ((both["flags"] | both["flags_in"]) & _UNSURE == 0)
    out["least_s"] = ((both["at"] - both["there"]) / 1e9).where(late)
    out["source"], out["destination"], out["step"] = both["rank"], both["peer"], both["step"]
    return out[out["bytes"] > 0]


def _reach(out: pd.DataFrame, members: Mapping[int, list[int]], hosts: Mapping[int, str]) -> Array:
    crossing = {g: len({hosts.get(r, "") for r in ranks}) > 1 for g, ranks in members.items()}
    source, target = (out[n].map(lambda r: hosts.get(int(r), "")) for n in ("source", "destination"))
    inter = np.where(out["source"] >= 0, source != target, out["group"].map(crossing).fillna(False).astype(bool))
    return np.where(inter, "inter", "intra").astype(object)
