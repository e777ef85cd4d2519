"""Who moved how much to whom, how fast, and which links, ranks, network cards or hosts are slow."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from mappnb.analysis._input import events_of
from mappnb.analysis._suspects import COLUMNS, Lanes, judge, suspects_of
from mappnb.analysis._transfers import bus_factor, transfers
from mappnb.errors import MappnbError
from mappnb.run import Run
from mappnb.terms import Op

__all__ = ["link_suspects", "links"]

Array = np.ndarray[Any, Any]
MOST_RANKS = 1024
"""Ranks up to which rank by rank matrices are made; above, only those of hosts."""
MOST_MEMBERS = 512
"""Collectives of larger groups are in no cell: each of their pairs says next to nothing."""


def links(
    run: Run | xr.Dataset,
    *,
    step: int | slice | None = None,
    hosts: Mapping[int, str] | None = None,
    slow_ratio: float = 1.25,
    sigmas: float = 5.0,
) -> xr.Dataset:
    """Return what each rank and host moved to each other one, how fast, and against others of the same kind.

    Parameters
    ----------
    run : Run or Dataset, dims (event,)
        Events of all ranks.
    step : int or slice, optional
        Steps to look at; all by default.
    hosts : mapping of int to str, optional
        Host of each rank: by default what the run knows, of a dataset the ranks that share a clock; else one host is assumed.
    slow_ratio, sigmas : float
        What is slow takes this many times as long, by this many standard errors. Defaults: differences below a quarter are
        common between equal links, and 5 standard errors leave no false alarm in ten thousands of links.

    Returns
    -------
    Dataset
        (op, source, destination), ranks: ``bytes`` that went; ``seconds`` of transfer, waiting removed; ``bus_bandwidth``, bytes/s, over
        the calls whose waiting can be told; ``num_calls``; ``ratio``, times as long as the median of its class takes; ``score``, log
        ratio in standard errors; both NaN where there is too little to compare with. The same with ``host_`` in front over
        (op, source_host, destination_host).

        ``load_imbalance`` (group,): bytes that the busiest member of an all_to_all sends over the mean of the group, mean over the calls;
        1 where all send alike. ``token_imbalance`` (expert_group,), of a run that recorded ``expert_tokens``: the same of the tokens that
        the experts of each rank got, in sum. ``attrs["suspects"]``: JSON for :func:`link_suspects`.

    Raises
    ------
    MappnbError
        If there is no transfer with bytes and a sequence number.

    Notes
    -----
    Class: operation, power of 2 of the bytes, size of the group, within a host or between hosts; only within a class is anything
    compared, by time per byte from 1 MiB on, by time below. Bus bandwidth as nccl-tests defines it (doc/PERFORMANCE.md): bytes over time,
    times 2(n-1)/n for all_reduce, (n-1)/n for all_gather, reduce_scatter and all_to_all, 1 for send and broadcast; a collective's bytes
    are spread evenly over the other members, so that a rank's row sums to its bus bytes. Time of a collective: the shortest stay of a
    member, who came last and waited for nobody: no clock enters. Time of a message: from the send, or the arrival of the one before
    on its link, to its end at the receiver, where the receiver was there before that; between hosts this is as good as the clocks. Where
    these are wall clocks only, half of the difference between the two directions of two hosts is taken out, so that a lasting
    slowness of all links in one direction is not seen. Asynchronous collectives count in ``bytes`` alone.
    """
    events = events_of(run, step)
    place = hosts_of_events(run, events, hosts)
    calls, members = transfers(events, place)
    if not len(calls):
        raise MappnbError("links: no transfer with bytes and a sequence number in these events; see run.collectives")
    if str(events.attrs.get("clock_model", "")).startswith("anchor"):
        calls = symmetric(calls, place)
    judged = judge(calls, members, slow_ratio=slow_ratio, sigmas=sigmas)
    ranks = sorted({r for ends in judged.ranks.values() for r in ends})
    cells = _cells(calls, judged)
    out = _matrices(cells, ranks, "source", "destination", "") if len(ranks) <= MOST_RANKS else xr.Dataset()
    names = {r: place.get(r, "") for r in ranks}
    by_host = cells.assign(source=cells["source"].map(names), destination=cells["destination"].map(names))
    out = out.merge(_matrices(by_host, sorted(set(names.values())), "source_host", "destination_host", "host_"))
    out = out.assign(_imbalance(calls) | (_tokens(run, step) if isinstance(run, Run) else {}))
    suspects = suspects_of(judged, place)
    out.attrs = dict(events.attrs) | {"suspects": suspects.to_json(orient="records")}
    return out


def link_suspects(run: Run | xr.Dataset, **options: Any) -> pd.DataFrame:
    """Return what is slow among links, ranks, network cards and hosts; empty where nothing is.

    Parameters
    ----------
    run : Run or Dataset
        Events, or what :func:`links` returned.
    **options
        Those of :func:`links`.

    Returns
    -------
    DataFrame
        ``subject_kind``: link, rank, nic (transfers of a host that leave it), host (those inside it too), or group; ``subject``:
        ``"3->7"``, ``"3"``, ``"host1"``, with ``(sends)`` or ``(receives)`` where only one direction is slow; ``verdict``: suspect, or
        undecided where others explain the same; ``ratio`` to the faster quarter of its kind; ``excess_s``, what its transfers took
        more, s (much of it may be hidden behind work: ask :func:`mappnb.analysis.critical_path`); ``num_slow`` of ``num_lanes``
        judged; ``evidence`` in words. Largest excess first.

    Notes
    -----
    A link is one pair of ranks in one direction; a rank, card or host is named where at least four in five of its lanes are slow, at
    least two, and to at least two others. The fewest subjects that explain the slow lanes are given. Abstains: classes of fewer
    than three lanes, lanes of fewer than three calls, and what is slow in more than three quarters of the lanes of a class.
    """
    found = run if isinstance(run, xr.Dataset) and "suspects" in run.attrs else links(run, **options)
    return pd.DataFrame(json.loads(found.attrs["suspects"]), columns=list(COLUMNS))


def hosts_of_events(run: Run | xr.Dataset, events: xr.Dataset, hosts: Mapping[int, str] | None) -> dict[int, str]:
    """Return the host of each rank: those given, else what the run knows, else the ranks that share a clock."""
    if hosts is not None:
        return {int(r): str(h) for r, h in hosts.items()}
    if isinstance(run, Run):
        return {r: str(info.get("host", "")) for i in run.incarnations for r, info in i.ranks.items()}
    clocks = json.loads(events.attrs.get("clocks", "{}"))  # of each incarnation, the ranks that share a clock: a host
    newest: list[list[int]] = clocks[max(clocks, key=int)] if clocks else []
    return {r: f"host of rank {ranks[0]}" for ranks in newest for r in ranks}


def symmetric(calls: pd.DataFrame, hosts: Mapping[int, str]) -> pd.DataFrame:
    """Take out of messages between hosts what their clocks may differ by: half the difference of the two directions."""
    inter = (calls["source"] >= 0) & (calls["reach"] == "inter") & calls["seconds"].notna()
    if not inter.any():
        return calls
    here, there = (calls.loc[inter, n].map(lambda r: hosts.get(int(r), "")) for n in ("source", "destination"))
    size = np.floor(np.log2(calls.loc[inter, "bytes"].to_numpy(np.float64)))
    frame = pd.DataFrame({"a": here, "b": there, "size": size, "s": calls.loc[inter, "seconds"]})
    middle = frame.groupby(["a", "b", "size"])["s"].median()
    order: list[Any] = ["a", "b", "size"]
    back = middle.rename_axis(["b", "a", "size"]).reorder_levels(order)
    shift = ((middle - back) / 2).reindex(pd.MultiIndex.from_frame(frame[["a", "b", "size"]])).fillna(0).to_numpy()
    seconds = calls["seconds"].copy()
    seconds[inter] = seconds[inter] - shift
    return calls.assign(seconds=seconds.where(seconds > 0))


def _cells(calls: pd.DataFrame, judged: Lanes) -> pd.DataFrame:
    """Return one row per operation and ordered pair of ranks: what a lane's calls moved on it."""
    factor = bus_factor(calls["op"].to_numpy(object), calls["size"].to_numpy())
    bus = factor * calls["mean_bytes"]
    rated = calls["seconds"].notna()
    per_lane = (
        calls[["op", "lane"]]
        .assign(bus=bus, rated=bus.where(rated, 0.0), calls=1)
        .assign(seconds=calls["seconds"].fillna(0.0))
        .groupby(["op", "lane"], sort=True)
        .sum()
        .reset_index()
    )
    pairs: dict[int, tuple[Array, Array, float]] = {}
    for lane in per_lane["lane"].unique().tolist():
        ends = np.array(judged.ranks[lane])
        if judged.table["source"][lane] >= 0:
            pairs[lane] = ends[:1], ends[1:], 1.0
        elif len(ends) <= MOST_MEMBERS:
            a, b = (x.ravel() for x in np.meshgrid(ends, ends, indexing="ij"))
            pairs[lane] = a[a != b], b[a != b], 1.0 / (len(ends) - 1)
    per_lane = per_lane[per_lane["lane"].isin(list(pairs))].reset_index(drop=True)
    cut = [pairs[lane] for lane in per_lane["lane"].tolist()]
    cells = per_lane.loc[np.repeat(np.arange(len(cut)), [len(a) for a, _, _ in cut])].reset_index(drop=True)
    for i, name in enumerate(("source", "destination")):
        cells[name] = np.concatenate([c[i] for c in cut]) if cut else np.empty(0, np.int64)
    cells["bytes"] = cells["bus"] * np.repeat([s for _, _, s in cut], [len(a) for a, _, _ in cut])
    cells["log_ratio"], cells["score"] = (cells["lane"].map(judged.table[n]) for n in ("log_ratio", "score"))
    return cells


_MEANING = {
    "bytes": ("bytes", "bytes that went, collectives spread evenly over the members"),
    "seconds": ("s", "time of transfer, waiting removed"),
    "bus_bandwidth": ("bytes/s", "bus bandwidth, as nccl-tests defines it"),
    "num_calls": ("1", "calls"),
    "ratio": ("1", "times as long as the median of its class takes; NaN: nothing to compare with"),
    "score": ("1", "log ratio in standard errors"),
}


def _matrices(cells: pd.DataFrame, ends: list[Any], source: str, target: str, prefix: str) -> xr.Dataset:
    ops, op = np.unique(cells["op"].to_numpy(object).astype(str), return_inverse=True)
    number = {e: i for i, e in enumerate(ends)}
    at = (op, cells["source"].map(number).to_numpy(), cells["destination"].map(number).to_numpy())
    shape = (len(ops), len(ends), len(ends))

    def total(values: Any) -> Array:
        out = np.zeros(shape)
        np.add.at(out, at, np.nan_to_num(np.asarray(values, np.float64)))
        return out

    seconds, known, judged = total(cells["seconds"]), total(cells["rated"]), cells["score"].notna()
    count = total(judged)
    with np.errstate(divide="ignore", invalid="ignore"):
        grids = {
            "bytes": total(cells["bytes"]),
            "seconds": seconds,
            "bus_bandwidth": known / seconds,
            "num_calls": total(cells["calls"]).astype(np.int64),
            "ratio": np.exp(total(cells["log_ratio"].where(judged)) / count),
            "score": total(cells["score"]) / np.sqrt(count),
        }
    dims = ("op", source, target)
    data = {prefix + n: (dims, v, {"units": _MEANING[n][0], "long_name": _MEANING[n][1]}) for n, v in grids.items()}
    labels: Array = np.array(ends) if prefix == "" else np.array(ends, object)
    return xr.Dataset(data, coords={"op": ops.astype(object), source: labels, target: labels})


def _imbalance(calls: pd.DataFrame) -> dict[str, xr.DataArray]:
    """Return max over mean of what the members of each all_to_all send."""
    mine = calls[calls["op"] == Op.ALL_TO_ALL]
    if not len(mine):
        return {}
    ratio = (mine["bytes"] / mine["mean_bytes"]).groupby(mine["group"]).mean()
    attrs = {"units": "1", "long_name": "bytes that the busiest member of an all_to_all sends, over the mean"}
    array = xr.DataArray(ratio.to_numpy(), dims="group", coords={"group": ratio.index.to_numpy()}, attrs=attrs)
    return {"load_imbalance": array}


def _tokens(run: Run, step: int | slice | None) -> dict[str, xr.DataArray]:
    """Return max over mean of the tokens that the experts of the ranks of each expert group got."""
    metrics = run.metrics
    mine = metrics.isel(sample=np.flatnonzero(metrics.name.values == "expert_tokens"))
    if step is not None:
        low, high = (step.start, step.stop) if isinstance(step, slice) else (step, step)
        inside = (mine["step"] >= (-(2**31) if low is None else low)) & (
            mine["step"] <= (2**31 - 1 if high is None else high)
        )
        mine = mine.isel(sample=np.flatnonzero(inside.values))
    groups = [g for g in run.layout.groups("ep") if len(g) > 1]
    if not mine.sizes["sample"] or not groups:
        return {}
    load = pd.Series(mine.value.values).groupby(mine["rank"].values).sum()
    each = [load.reindex(list(g)).to_numpy() for g in groups]
    names = np.array([", ".join(map(str, g)) for g in groups], object)
    attrs = {"units": "1", "long_name": "tokens of the busiest rank's experts, over the mean of the group"}
    values = [float(np.nanmax(v) / np.nanmean(v)) if np.isfinite(v).any() else np.nan for v in each]
    return {"token_imbalance": xr.DataArray(values, dims="expert_group", coords={"expert_group": names}, attrs=attrs)}
