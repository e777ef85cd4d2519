"""Which recorded events should take equally long, and which do the same work at the same place of a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import xarray as xr

from mappnb.analysis._whatif_model import Words
from mappnb.datasets import groups_of, layout_of
from mappnb.terms import Category, Op, Phase

__all__ = ["Kinds", "kinds_of"]

Array = np.ndarray[Any, Any]

USUAL_SHARE: Final = 0.5
"""A host span found on no more of a stage's (rank, step) pairs than this is occasional: its median is not to be there at all."""
_UNTOLD: Final = frozenset({"", Op.SPAN, Op.MODULE})
"""Operations that say nothing of what is done: there the name tells the kind."""


@dataclass(frozen=True, eq=False)
class Kinds:
    """What each event is, dims (event,).

    Attributes
    ----------
    kind : array
        Number of its kind: category, operation, phase, bytes, size of the group, whether it crosses hosts.
    twin : array
        The same for what the ranks of one stage do at the same place of the same step.
    stage : array
        Stage; of events that tell none that of the rank, where it has only one.
    layer : array
        Layer, -1 for none.
    occasional : bool array
        A host span, such as a garbage collection, that most ranks of the stage do not have in most steps.
    words : Words
        Labels and names; ``words.label`` and ``words.name`` by kind.
    """

    kind: Array
    twin: Array
    stage: Array
    layer: Array
    occasional: Array
    words: Words

    def words_of(self, event: Array) -> Words:
        """Return the words of operations that are pieces of events, dims (op,)."""
        kind = self.kind[event]
        return Words(self.words.labels, self.words.label[kind], self.words.names, self.words.name[kind])


def kinds_of(events: xr.Dataset, hosts: Mapping[int, str]) -> Kinds:
    """Return the kinds of recorded events.

    Parameters
    ----------
    events : Dataset, dims (event,)
        The events.
    hosts : mapping of int to str
        Host of each rank, where known: transfers within and between hosts are two kinds.
    """
    fields = [_codes(events[n].values) for n in ("category", "op", "phase")]
    untold = np.isin(events.op.values.astype(str), list(_UNTOLD)) | (events.stream.values >= 0)
    fields += [
        _codes(np.where(untold, events.name.values, "").astype(str)),
        _codes(events.bytes.values),
        *_reach(events, hosts),
    ]
    kind, first = _numbered(fields)
    stage = _stages(events)
    twin = _twins(events, kind, stage)
    return Kinds(kind, twin, stage, events.layer.values, _occasional(events, kind), _words(events, first))


def _codes(values: Array) -> Array:
    values = values.astype(str) if values.dtype == object else values
    return np.asarray(np.unique(values, return_inverse=True)[1].ravel(), np.int64)


def _numbered(fields: list[Array]) -> tuple[Array, Array]:
    """Return one number for rows that agree in all fields, and the first row of each."""
    code = np.zeros(len(fields[0]), np.int64)
    for field in fields:
        code = _codes(code * (int(field.max(initial=0)) + 2) + field + 1)
    return code, np.unique(code, return_index=True)[1]


def _reach(events: xr.Dataset, hosts: Mapping[int, str]) -> tuple[Array, Array]:
    """Return how many ranks a transfer is among, and whether they are on several hosts; 0 for other events."""
    size, far = np.zeros(events.sizes["event"], np.int64), np.zeros(events.sizes["event"], np.int64)
    category, rank, peer = events.category.values, events["rank"].values, events.peer.values
    pairs = np.flatnonzero((category == Category.P2P) & (peer >= 0))
    size[pairs] = 2
    names = {h: i for i, h in enumerate(sorted(set(hosts.values())))}
    place = np.full(max(int(rank.max(initial=-1)), int(peer.max(initial=-1)), -1) + 1, -1)
    for r, h in hosts.items():
        if r < len(place):
            place[r] = names[h]
    if len(pairs):
        far[pairs] = place[rank[pairs]] != place[peer[pairs]]
    group = events.group.values
    ids, number = np.unique(group, return_inverse=True)
    known = groups_of(events)
    members = [known.get(int(i), {}).get("ranks", []) for i in ids.tolist()]
    calls = np.isin(category, (Category.COLLECTIVE, Category.WAIT)) & (group != -1)
    size[calls] = np.array([len(m) for m in members])[number[calls]]
    spread = np.array([len({hosts.get(int(r), "") for r in m}) > 1 for m in members], np.int64)
    far[calls] = spread[number[calls]]
    return size, far


def _stages(events: xr.Dataset) -> Array:
    layout = layout_of(events)
    stage = events.stage.values.astype(np.int64)
    if layout.num_chunks > 1:
        return np.asarray(stage)
    own = np.array([layout.coords(r)["pp"] for r in range(layout.world_size)])
    rank = events["rank"].values
    return np.asarray(np.where((stage < 0) & (rank < len(own)), own[np.clip(rank, 0, len(own) - 1)], stage))


def _twins(events: xr.Dataset, kind: Array, stage: Array) -> Array:
    """Return one number for the n-th events of a kind in a step, on the ranks of one stage (and towards the same stage)."""
    layout = layout_of(events)
    pp = np.array([layout.coords(r)["pp"] for r in range(layout.world_size)])
    peer = events.peer.values
    there = np.where((peer >= 0) & (peer < len(pp)), pp[np.clip(peer, 0, len(pp) - 1)], -1)
    names = ("step", "microbatch", "layer")
    same, _ = _numbered([kind, stage, there, *(events[n].values.astype(np.int64) for n in names)])
    rank, start = events["rank"].values, events.start_ns.values
    order = np.lexsort((start, same, rank))
    new = np.ones(len(order), bool)
    new[1:] = (rank[order][1:] != rank[order][:-1]) | (same[order][1:] != same[order][:-1])
    first = np.flatnonzero(new)
    nth = np.empty(len(order), np.int64)
    nth[order] = np.arange(len(order)) - np.repeat(first, np.diff(np.append(first, len(order))))
    return _numbered([same, nth])[0]


def _occasional(events: xr.Dataset, kind: Array) -> Array:
    host = np.flatnonzero(events.category.values == Category.HOST)
    out = np.zeros(len(kind), bool)
    if not len(host):
        return out
    rank, step = events["rank"].values.astype(np.int64), events["step"].values.astype(np.int64)
    pair = _numbered([rank, step])[0]
    layout = layout_of(events)
    row = np.zeros(len(rank), np.int64)  # stages are compared where there is nothing else to compare with
    if layout.world_size > layout.pp:
        pp = np.array([layout.coords(r)["pp"] for r in range(layout.world_size)])
        row = pp[np.clip(rank, 0, len(pp) - 1)]
    first = np.unique(pair, return_index=True)[1]
    pairs = np.bincount(row[first], minlength=int(row.max()) + 1)
    found = np.unique(np.stack([kind[host], row[host], pair[host]], 1), axis=0)
    kinds, counts = np.unique(found[:, :2], axis=0, return_counts=True)
    rare = {tuple(k) for k, c in zip(kinds.tolist(), counts.tolist(), strict=True) if c <= USUAL_SHARE * pairs[k[1]]}
    out[host] = [(int(kind[i]), int(row[i])) in rare for i in host.tolist()]
    return out


def _words(events: xr.Dataset, first: Array) -> Words:
    """Return the words of each kind, told by its first event."""
    labels: list[str] = []
    names = []
    for i in first.tolist():
        category, op, name, phase = (str(events[n].values[i]) for n in ("category", "op", "name", "phase"))
        label = op or category
        if category == Category.COMPUTE and phase != Phase.NONE:
            label = phase
        elif category == Category.P2P:
            label = "p2p"
        labels.append(label)
        names.append(frozenset({label, category, op, name, phase} - {"", str(Phase.NONE)}))
    distinct = tuple(dict.fromkeys(labels))
    place = {n: i for i, n in enumerate(distinct)}
    return Words(distinct, np.array([place[n] for n in labels]), tuple(names), np.arange(len(first)))
