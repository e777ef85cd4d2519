"""Recorded steps as one replay graph: operations by their recorded identities, gaps as launch delays."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr

from mappnb.analysis._identity import is_point_to_point, is_sending
from mappnb.analysis._stepgraph import BESIDE, JOIN, LEAVE, WIRE, WORK, RecordedGraph, recorded_graph
from mappnb.analysis._whatif_kinds import Kinds, kinds_of
from mappnb.analysis._whatif_model import Model
from mappnb.datasets import layout_of
from mappnb.replay import Graph
from mappnb.terms import Category, Flag

__all__ = ["model_of_events"]

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, eq=False)
class _Joined:
    """The graphs of all steps behind one another; ``event`` counts in the events of all of them."""

    graph: Graph
    step: Array
    event: Array
    kind: Array
    around_s: Array
    recorded_s: Array


def model_of_events(events: xr.Dataset, *, hosts: Mapping[int, str], attrs: dict[str, Any]) -> Model:
    """Return the operations of recorded steps.

    Parameters
    ----------
    events : Dataset, dims (event,)
        Of whole steps.
    hosts : mapping of int to str
        Host of each rank, where known.
    attrs : dict
        What to say beside.

    Notes
    -----
    Program order on each thread and stream; calls by (group, number), messages by pair and number, device work after its launch
    (:mod:`mappnb.analysis._stepgraph`). Marks (the span of an iteration) are no work: the holes in them are launch delays.
    """
    steps = np.unique(events["step"].values)
    joined = _join(events, steps)
    kinds = kinds_of(events, hosts)
    layout = layout_of(events)
    dp = np.array([layout.coords(r)["dp"] for r in range(layout.world_size)])
    event, kind = joined.event, joined.kind
    rank = np.where(kind == JOIN, -1, events["rank"].values[event])
    sender, receiver = (side[event] for side in _links(events))
    stage = np.where(kind == JOIN, -1, kinds.stage[event])
    computes = (kind == WORK) & (events.category.values == Category.COMPUTE)[event]
    return Model(
        source="recorded", graph=joined.graph, steps=steps, step=joined.step, recorded_s=joined.recorded_s,
        final=np.ones(len(event), bool), rank=rank,
        dp_rank=np.where((rank >= 0) & (rank < len(dp)), dp[np.clip(rank, 0, len(dp) - 1)], -1), stage=stage,
        sender=sender, receiver=receiver, words=kinds.words_of(event),
        kind=_coded(kinds, event, kind), twin=_coded(kinds, event, kind, twins=True),
        place=np.where(np.isin(kind, (WIRE, LEAVE, BESIDE)), -1, stage), layer=kinds.layer[event],
        occasional=kinds.occasional[event] & (kind == WORK),
        by_mean=kind == WORK, single=np.zeros(len(event), bool), num_gpus=int(layout.world_size), unit=_pieces(event, kind),
        microbatch=np.where(computes, events.microbatch.values[event], -1),
        phase=np.where(computes, events.phase.values[event], ""), around_s=joined.around_s,
        attrs=attrs | _says(events, kind),
    )  # fmt: skip


def _says(events: xr.Dataset, kind: Array) -> dict[str, str]:
    """Return what the model is, and what it lacks."""
    says = {"model": "recorded identities: program order, calls, messages, launches"}
    if len(np.unique(events["rank"].values)) > 1 and not np.isin(kind, (JOIN, WIRE)).any():
        says["unconnected"] = (
            "no collective or message has an identity, so no rank waits for another in the replay: what they wait is launch delay, "
            "and slowdowns are of ranks by themselves"
        )
    return says


def _links(events: xr.Dataset) -> tuple[Array, Array]:
    """Return the ranks that the message of each event goes between; -1 for other events."""
    pair, sending = is_point_to_point(events), is_sending(events)
    rank, peer = events["rank"].values.astype(np.int64), events.peer.values.astype(np.int64)
    told = pair & (peer >= 0)
    source, target = np.where(sending, rank, peer), np.where(sending, peer, rank)
    return np.where(told, source, -1), np.where(told, target, -1)


def _coded(kinds: Kinds, event: Array, kind: Array, *, twins: bool = False) -> Array:
    """Return one number for operations of one kind (of one place in the step, too, for twins)."""
    code = (kinds.twin if twins else kinds.kind)[event].astype(np.int64)
    return code * 8 + kind


def _pieces(event: Array, kind: Array) -> Array:
    """Return one number for the pieces of work of one event; other operations have their own."""
    unit = np.where(kind == WORK, event, -1)
    own = np.flatnonzero(kind != WORK)
    unit[own] = int(event.max(initial=-1)) + 1 + np.arange(len(own))
    return np.unique(unit, return_inverse=True)[1].ravel()


def _join(events: xr.Dataset, steps: Array) -> _Joined:
    unreal = (events.category == Category.MARK) & ((events.flags & int(Flag.CLIPPED)) != 0)
    lasting = events.assign(duration_ns=events.duration_ns.where(~unreal, 0)) if unreal.any() else events
    marks = events.category.values == Category.MARK
    parts = list(_graphs(lasting, steps, marks))
    base = np.concatenate([[0], np.cumsum([len(g.graph) for _, g, _, _ in parts])])
    edges = np.concatenate([[0], *(np.asarray(g.graph.dep_offsets[1:]) for _, g, _, _ in parts)])
    at = np.cumsum([0, *(len(g.graph.dep) for _, g, _, _ in parts)])
    edges[1:] += np.repeat(at[:-1], np.diff(base))
    graph = Graph(
        np.concatenate([g.graph.duration_s for _, g, _, _ in parts]) / 1e9, edges.astype(np.int64),
        np.concatenate([g.graph.dep + b for (_, g, _, _), b in zip(parts, base, strict=False)]).astype(np.int32),
        np.concatenate([g.graph.lag_s for _, g, _, _ in parts]), np.full(int(base[-1]), -1, np.int32),
        delay_s=np.concatenate([g.graph.delays_s for _, g, _, _ in parts]) / 1e9,
    )  # fmt: skip
    return _Joined(
        graph, np.repeat(np.arange(len(parts)), np.diff(base)), np.concatenate([i[g.event] for i, g, _, _ in parts]),
        np.concatenate([g.kind for _, g, _, _ in parts]), np.array([a for _, _, a, _ in parts]),
        np.array([w for _, _, _, w in parts]),
    )  # fmt: skip


def _graphs(events: xr.Dataset, steps: Array, marks: Array) -> Iterator[tuple[Array, RecordedGraph, float, float]]:
    """Yield for each step its events, their graph, the time that only marks cover before and after it, s, and its length, s."""
    start = events.start_ns.values
    end = start + events.duration_ns.values
    number = events["step"].values
    order = np.argsort(number, kind="stable")
    bounds = np.searchsorted(number[order], [steps, steps + 1])
    for low, high in bounds.T.tolist():
        mine = np.sort(order[low:high])
        work = mine[~marks[mine]]
        work = work if len(work) else mine
        graph = recorded_graph(events.isel(event=work))
        first, last = int(start[mine].min()), int(end[mine].max())
        around = (last - first) - (int(graph.end_ns.max(initial=graph.begin_ns)) - graph.begin_ns)
        yield work, graph, around / 1e9, (last - first) / 1e9
