"""Measured messages, reductions and optimizer steps: what a run shows of the costs between the actions."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd
import xarray as xr

from mappnb.analysis._intervals import union_length
from mappnb.analysis.matching import last_arrival_ns
from mappnb.datasets import groups_of, layout_of
from mappnb.sched.measure import Measured, blocking, enclosing, pipeline_ranks, waits_ns
from mappnb.terms import Category, Flag, Op

__all__ = ["Link", "launch_s", "link_of", "message_table", "optimizer_s", "reduce_s"]

Array = npt.NDArray[Any]
_VARIES = 2.0
"""Latency and bandwidth are told apart where the largest message is at least this many times the smallest."""
_SMALL = 0.01
"""Collectives below this fraction of the rank's largest gradient reduction are not reductions of gradients (losses, flags)."""
_NO_RECEIVE = -2
_KEYS = ("incarnation", "group", "source", "destination", "seq")
_REDUCING = (Op.ALL_REDUCE, Op.REDUCE_SCATTER, Op.REDUCE)


class Link(NamedTuple):
    """What messages between pipeline ranks cost.

    Attributes
    ----------
    p2p_s : float
        Latency, s.
    bandwidth : float
        Bytes/s; infinite where the sizes of the messages do not tell it.
    message_bytes, ship_bytes : float
        Median size of a message to the next stage, and of one from the forward to the backward of a stage, bytes.
    send : str
        ``"async"``, ``"sync"`` or ``"blocking"``, as of :class:`mappnb.Costs`.
    notes : tuple of str
        What a reader of the numbers should know.
    """

    p2p_s: float = 0.0
    bandwidth: float = float("inf")
    message_bytes: float = 0.0
    ship_bytes: float = 0.0
    send: str = "async"
    notes: tuple[str, ...] = ()


def message_table(events: xr.Dataset) -> pd.DataFrame:
    """Return the messages between pipeline ranks whose two sides are both in the events.

    Parameters
    ----------
    events : Dataset, dims (event,)
        Recorded, imported or simulated.

    Returns
    -------
    DataFrame
        One row per message: ``source, destination`` (global ranks), ``bytes``, ``send_start_s, send_end_s, recv_start_s, recv_end_s``
        (s from the first message; an asynchronous receive counts from where the program began to wait for it), ``transfer_s`` (end of the
        receive after the later of the two starts), ``clear`` (the
        receiver was there first, so that the transfer is sure), ``ship`` (both sides are the same stage) and ``flying`` (the send did
        not block).

    Notes
    -----
    The rule of arXiv:2505.05713, 3: transfer = end − max(start over both sides).
    """
    rows = np.flatnonzero((events.category.values == Category.P2P) & (events.seq.values >= 0))
    op, rank = events.op.values[rows], events["rank"].values[rows].astype(np.int64)
    peer = events.peer.values[rows].astype(np.int64)
    begin = int(events.start_ns.values.min(initial=0)) if not len(rows) else int(events.start_ns.values[rows].min())
    start = (events.start_ns.values[rows] - begin) / 1e9
    frame = pd.DataFrame(
        {
            "incarnation": events.incarnation.values[rows],
            "group": events.group.values[rows],
            "seq": events.seq.values[rows],
            "source": np.where(op == Op.SEND, rank, peer),
            "destination": np.where(op == Op.SEND, peer, rank),
            "bytes": events.bytes.values[rows],
            "stage": events.stage.values[rows],
            "start_s": start,
            "end_s": start + events.duration_ns.values[rows] / 1e9,
            "flying": (events["flags"].values[rows] & Flag.ASYNC) != 0,
            "clipped": (events["flags"].values[rows] & Flag.CLIPPED) != 0,
        }
    )
    frame = _from_wait(events, frame, op == Op.RECV, begin)
    keys = list(_KEYS)
    both = frame[op == Op.SEND].merge(frame[op == Op.RECV], on=keys, suffixes=("_send", "_recv"))
    return _table(events, both.loc[~both.clipped_recv])


def _from_wait(events: xr.Dataset, frame: pd.DataFrame, receives: Array, begin: int) -> pd.DataFrame:
    """Let asynchronous receives begin where the program began to wait for them; NaN where that is not known but could be."""
    waits = np.flatnonzero((events.op.values == Op.WAIT) & (events.name.values == Op.RECV) & (events.seq.values >= 0))
    if not len(waits):
        return frame
    start = pd.Series((events.start_ns.values[waits] - begin) / 1e9, index=_keys(events, waits, "peer", "rank"))
    start = start[~start.index.duplicated()]
    mine = np.flatnonzero(receives & frame.flying.to_numpy())
    begun = start.reindex(pd.MultiIndex.from_frame(frame.loc[mine, list(_KEYS)]))
    column = frame.start_s.to_numpy(copy=True)
    column[mine] = begun.to_numpy()
    return frame.assign(start_s=column)


def _keys(events: xr.Dataset, rows: Array, source: str, destination: str) -> pd.MultiIndex:
    """Return the identities of messages: (incarnation, group, source, destination, seq)."""
    names = ("incarnation", "group", source, destination, "seq")
    return pd.MultiIndex.from_arrays([events[n].values[rows].astype(np.int64) for n in names], names=_KEYS)


def _table(events: xr.Dataset, both: pd.DataFrame) -> pd.DataFrame:
    at = pipeline_ranks(events)
    inside = both[["source", "destination"]].to_numpy()
    known = ((inside >= 0) & (inside < len(at))).all(axis=1)
    both = both.iloc[np.flatnonzero(known)]
    both = both.iloc[np.flatnonzero(at[both.source] != at[both.destination])]
    out = pd.DataFrame(
        {
            "source": both.source,
            "destination": both.destination,
            "bytes": both.bytes_send.clip(lower=0),
            "send_start_s": both.start_s_send,
            "send_end_s": both.end_s_send,
            "recv_start_s": both.start_s_recv,
            "recv_end_s": both.end_s_recv,
            "transfer_s": both.end_s_recv - both[["start_s_send", "start_s_recv"]].max(axis=1),
            "clear": both.start_s_recv <= both.start_s_send,
            "ship": (both.stage_send == both.stage_recv) & (both.stage_send >= 0),
            "flying": both.flying_send,
        }
    )
    return out.sort_values("send_start_s", kind="stable", ignore_index=True)


def link_of(measured: Measured) -> Link:
    """Return latency, bandwidth and size of the messages of a run.

    Parameters
    ----------
    measured : Measured
        Its actions and events.

    Notes
    -----
    Where sizes differ, the line through the median transfer of each size: slopes between all pairs of sizes, the median of them weighted
    by their distance (Theil and Sen). Where all are alike, latency and bandwidth cannot be told apart, and everything is latency:
    a link on which messages do not meet costs the same either way. :func:`mappnb.sched.fit_link` tells them apart where they meet.
    """
    table = message_table(measured.events)
    if not len(table):
        several = measured.actions["rank"].nunique() > 1 and measured.actions.stage.nunique() > 1
        return Link(notes=("no messages between stages in the trace: p2p_s is 0; see fit_link",) if several else ())
    notes: tuple[str, ...] = ()
    sure = table[table.clear]
    if not len(sure):
        sure = table
        notes = ("every receive began after its send: transfers may be longer than they look",)
    latency, bandwidth = _line(sure.bytes.to_numpy(np.float64), sure.transfer_s.to_numpy().clip(min=0.0))
    if bandwidth == np.inf:
        notes += ("all messages are of like size: p2p_s holds the whole transfer, bandwidth is infinite",)
    sizes = [float(table.bytes[mine].median()) if mine.any() else 0.0 for mine in (~table.ship, table.ship)]
    return Link(latency, bandwidth, sizes[0], sizes[1], _send_mode(table), notes)


def _line(size: Array, seconds: Array) -> tuple[float, float]:
    """Return (latency in s, bandwidth in bytes/s) of transfers, robust against slow ones."""
    sizes, which = np.unique(size, return_inverse=True)
    middle = np.array([np.median(seconds[which == i]) for i in range(len(sizes))])
    if sizes[-1] < _VARIES * sizes[0] or sizes[-1] == 0:
        return float(np.median(seconds)), float("inf")
    i, j = np.triu_indices(len(sizes), 1)
    slopes, weight = (middle[j] - middle[i]) / (sizes[j] - sizes[i]), sizes[j] - sizes[i]
    order = np.argsort(slopes)
    half = np.searchsorted(np.cumsum(weight[order]), weight.sum() / 2)
    slope = float(slopes[order][min(int(half), len(order) - 1)])
    if slope <= 0:
        return float(np.median(seconds)), float("inf")
    return max(0.0, float(np.median(middle - slope * sizes))), 1.0 / slope


def _send_mode(table: pd.DataFrame) -> str:
    """Return how sends block: not at all where they are flagged so or over at once; until the arrival; or on the wire only."""
    length = table.send_end_s - table.send_start_s
    if table.flying.mean() > 0.5 or length.median() <= 0.05 * max(float(table.transfer_s.median()), 1e-9):
        return "async"
    early = table[table.clear] if table.clear.any() else table
    late = (early.recv_end_s - early.send_end_s).median()
    return "sync" if late <= 0.05 * float(early.transfer_s.median()) else "blocking"


def launch_s(measured: Measured, p2p_s: float, statistic: str = "median") -> float:
    """Return the time of the program between two actions of a rank in which it waits for nobody, s.

    Parameters
    ----------
    measured : Measured
        Actions and events.
    p2p_s : float
        Latency of the messages, s.
    statistic : str
        ``"median"`` over the gaps, else the mean.

    Notes
    -----
    Of the gaps before which the message had come already: what receiving it takes then (gloo and NCCL move data once the receive is
    posted) is time of the program too. 0 where the messages are not in the trace, for then a gap may be a wait, and where the
    actions were timed on a device, to which the program issues ahead.
    """
    events = measured.events
    if not (events.category.values == Category.P2P).any() or (events.stream.values >= 0).any():
        return 0.0
    frame = measured.actions.sort_values(["incarnation", "rank", "start_ns"], kind="stable")
    place = frame[["incarnation", "rank", "step"]].to_numpy(np.int64)
    alone, first, last = (frame[n].to_numpy() for n in ("alone", "end_ns", "start_ns"))
    next_to = (place[1:] == place[:-1]).all(axis=1) & alone[1:] & alone[:-1] & (last[1:] >= first[:-1])
    if not next_to.any():
        return 0.0
    begin, end, where = first[:-1][next_to], last[1:][next_to], place[:-1][next_to]
    inner = blocking(events)
    start = events.start_ns.values[inner].astype(np.int64)
    inside = np.stack([events[n].values[inner].astype(np.int64) for n in ("incarnation", "rank")], 1)
    lane = np.unique(np.concatenate([where[:, :2], inside]), axis=0, return_inverse=True)[1].ravel()
    owner, within = enclosing(lane[: len(where)], begin, end, lane[len(where) :], start)
    sent = _sent_ns(events, inner)
    there = (sent >= 0) & (sent + p2p_s * 1e9 <= start)
    stop = np.minimum(start + events.duration_ns.values[inner], end[owner])
    late = within & ~there
    free = end - begin - union_length(owner[late], start[late], stop[late], len(begin))
    waits = np.bincount(owner[late & (sent != _NO_RECEIVE)], minlength=len(begin)) > 0
    chosen = free[~waits] if not waits.all() else free
    return float(np.median(chosen) if statistic == "median" else np.mean(chosen)) / 1e9


def _sent_ns(events: xr.Dataset, index: Array) -> Array:
    """Return when the message was sent that each blocking receive, or wait for one, is for, ns; -1 if not known, -2 for others."""
    op, name = events.op.values, events.name.values
    receives = (op[index] == Op.RECV) | ((op[index] == Op.WAIT) & (name[index] == Op.RECV))
    sends = np.flatnonzero((op == Op.SEND) & (events.category.values == Category.P2P) & (events.seq.values >= 0))

    start = pd.Series(events.start_ns.values[sends].astype(np.int64), index=_keys(events, sends, "rank", "peer"))
    start = start[~start.index.duplicated()]
    found = start.reindex(_keys(events, index, "peer", "rank")).fillna(-1).to_numpy(np.int64)
    return np.where(receives, found, _NO_RECEIVE)


def optimizer_s(measured: Measured) -> float:
    """Return the time of the optimizer step without its waits, s: median over steps and ranks; 0 where there is none."""
    events = measured.events
    index = np.flatnonzero((events.category.values == Category.OPTIMIZER) & (events.op.values == Op.OPTIMIZER_STEP))
    if (events.stream.values[index] >= 0).any():
        index = index[events.stream.values[index] >= 0]
    if not len(index):
        return 0.0
    waits, _ = waits_ns(events, index)
    seconds = (events.duration_ns.values[index] - waits) / 1e9
    keys = [events[n].values[index] for n in ("incarnation", "step", "rank")]
    return float(pd.Series(seconds).groupby(keys).sum().median())


def reduce_s(measured: Measured) -> tuple[Array, tuple[str, ...]]:
    """Return the gradient reduction of each stage, of its rank's whole share, s, and notes; zeros where there is none.

    Parameters
    ----------
    measured : Measured
        Actions and events.

    Notes
    -----
    All-reduces and reduce-scatters of data-parallel groups, from the arrival of their last member on. Where the trace says which
    stage they are for, that stage's; else a rank's total stands for each of its stages.
    """
    events = measured.events
    stages = int(measured.actions.stage.max()) + 1
    index = _reductions(events)
    out = np.zeros(stages)
    if not len(index):
        return out, ()
    end = events.start_ns.values[index] + events.duration_ns.values[index]
    seconds = np.maximum(end - last_arrival_ns(events)[index], 0) / 1e9
    frame = pd.DataFrame({n: events[n].values[index] for n in ("incarnation", "step", "rank", "stage")})
    frame["seconds"] = seconds
    by_stage = bool((frame.stage >= 0).all())
    keys = ["incarnation", "step", "rank", *(["stage"] if by_stage else [])]
    total = frame.groupby(keys).seconds.sum().reset_index()
    if by_stage:
        for stage, s in total.groupby("stage").seconds.median().items():
            out[int(str(stage))] = s * measured.num_chunks
    else:
        per_rank = total.groupby("rank").seconds.median()
        places = measured.actions[["rank", "stage"]].drop_duplicates()
        spread = places["rank"].map(per_rank).fillna(0.0).groupby(places.stage).median()
        out[spread.index.to_numpy()] = spread.to_numpy()
    flying = (events["flags"].values[index] & Flag.ASYNC) != 0
    late = flying.any() and events.attrs.get("run_id") != "simulated"
    return out, ("reductions ended when the program waited for them: reduce_s is an upper bound",) if late else ()


def _reductions(events: xr.Dataset) -> Array:
    """Return the indices of gradient reductions: of data-parallel groups, or named so."""
    moving = (events.category.values == Category.COLLECTIVE) & np.isin(events.op.values, _REDUCING)
    named = moving & (events.name.values == "gradients")
    if named.any():
        return np.flatnonzero(named)
    groups, layout = groups_of(events), layout_of(events)
    if layout.dp * layout.cp == 1:
        return np.empty(0, np.int64)
    members = {m for axes in ("dp", "cp-dp") for m in map(tuple, map(sorted, layout.groups(axes))) if len(m) > 1}
    ids = [gid for gid, g in groups.items() if tuple(sorted(g.get("ranks", []))) in members]
    index = np.flatnonzero(moving & np.isin(events.group.values, ids))
    size = pd.Series(events.bytes.values[index].astype(np.int64))
    largest = size.groupby(events["rank"].values[index]).transform("max").to_numpy()
    return index[size.to_numpy() >= _SMALL * largest]
