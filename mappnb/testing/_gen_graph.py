"""The graph of a step over all ranks: every rank's program, messages between them, and collectives as joins."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from mappnb.layout import Layout
from mappnb.replay import Graph
from mappnb.testing._gen_program import AXES, Plan, Program, What, programs
from mappnb.testing.synthetic import group_id

__all__ = ["Members", "Step", "build_step"]

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Members:
    """Who is where: ranks by (pipeline rank, replica), coordinates, hosts, and groups of every axis.

    Attributes
    ----------
    ranks : array, dims (pp rank, replica)
        Global ranks; one column is one pipeline.
    coords : dict of str to array, dims (rank,)
        Coordinates tp, cp, ep, dp, pp.
    host : array, dims (rank,)
        Number of the host.
    groups : dict of str to list of tuple
        Groups of each axis, ``pp`` among them.
    group_of : dict of str to array, dims (rank,)
        Number of each rank's group in ``groups``; -1 where it is in none.
    """

    ranks: Ints
    coords: dict[str, Ints]
    host: Ints
    groups: dict[str, list[tuple[int, ...]]]
    group_of: dict[str, Ints]

    @classmethod
    def of(cls, layout: Layout, *, ranks_per_host: int, ends: tuple[int, int] | None) -> Members:
        """Return the members of a layout; ``ends`` are the pipeline ranks that share an embedding."""
        world = np.arange(layout.world_size)
        coords: dict[str, Ints] = {}
        for rank in world.tolist():
            for axis, value in layout.coords(rank).items():
                coords.setdefault(axis, np.zeros(len(world), np.int64))[rank] = value
        ranks = np.stack([world[coords["pp"] == p] for p in range(layout.pp)])
        groups = {a: layout.groups(a) for a in ("tp", "cp", "ep", "dp-cp")}
        groups["embd"] = (
            [] if ends is None else [tuple(sorted(r)) for r in zip(*ranks[list(ends)].tolist(), strict=True)]
        )
        groups["world"] = [tuple(world.tolist())]
        groups["pp"] = [tuple(col) for col in ranks.T.tolist()]
        group_of = {}
        for axis, members in groups.items():
            table = np.full(len(world), -1, np.int64)
            for i, group in enumerate(members):
                table[list(group)] = i
            group_of[axis] = table
        return cls(ranks, coords, world // ranks_per_host, groups, group_of)

    @cached_property
    def ids(self) -> dict[str, Ints]:
        """63-bit ids of the groups of each axis."""
        return {a: np.array([group_id(a, g) for g in gs], np.int64) for a, gs in self.groups.items()}

    def crossing(self, axis: str) -> npt.NDArray[np.bool_]:
        """Return which groups of an axis have members on more than one host, dims (group,)."""
        return np.array([len(np.unique(self.host[list(g)])) > 1 for g in self.groups[axis]], bool)

    def on_host(self, axis: str, host: int) -> npt.NDArray[np.bool_]:
        """Return which groups of an axis have a member on a host, dims (group,)."""
        out = np.zeros(len(self.groups[axis]), bool)
        mine = self.group_of[axis][self.host == host]
        out[mine[mine >= 0]] = True
        return out


@dataclass(frozen=True, eq=False)
class Step:
    """The graph of a step, and what its operations are. Operations: slots of pipeline rank 0 by (slot, replica), ..., then messages.

    Attributes
    ----------
    plan, members, programs
        What it was built of.
    graph : Graph
        With mean durations.
    base : array, dims (pp rank + 1,)
        First operation of each pipeline rank; the last entry is the first message's.
    rank, what, stage, microbatch, part, axis, layer : array, dims (op,)
        Of each operation; a message's rank is its source; the layer is -1 where an operation is all layers of its action.
    destination : array, dims (op,)
        Rank that a message goes to; -1 for others.
    """

    plan: Plan
    members: Members
    programs: list[Program]
    graph: Graph
    base: Ints
    rank: npt.NDArray[np.int32]
    what: npt.NDArray[np.int8]
    stage: npt.NDArray[np.int16]
    microbatch: npt.NDArray[np.int32]
    part: npt.NDArray[np.int8]
    axis: npt.NDArray[np.int8]
    destination: npt.NDArray[np.int32]
    layer: npt.NDArray[np.int16]

    @property
    def replicas(self) -> int:
        """Number of pipelines."""
        return int(self.members.ranks.shape[1])

    @property
    def num_slots(self) -> int:
        """Number of operations that are slots of ranks; messages come behind."""
        return int(self.base[-1])

    def slots(self, values: npt.NDArray[Any], pp_rank: int) -> npt.NDArray[Any]:
        """Return the values of a pipeline rank's operations, dims (slot, replica), as a view."""
        return values[self.base[pp_rank] : self.base[pp_rank + 1]].reshape(-1, self.replicas)

    def ops(self, rank: int) -> Ints:
        """Return the operations of a global rank, in order."""
        p = int(self.members.coords["pp"][rank])
        column = int(np.searchsorted(self.members.ranks[p], rank))
        return np.arange(self.base[p] + column, self.base[p + 1], self.replicas)

    @cached_property
    def leaders(self) -> Ints:
        """The first member of each join, dims (join,)."""
        ops = np.flatnonzero(self.graph.groups >= 0)
        return ops[np.unique(self.graph.groups[ops], return_index=True)[1]]

    @cached_property
    def begins(self) -> Ints:
        """The first operation of each rank, dims (rank,)."""
        out = np.empty(self.members.ranks.size, np.int64)
        for p, ranks in enumerate(self.members.ranks):
            out[ranks] = self.base[p] + np.arange(self.replicas)
        return out

    @cached_property
    def ends(self) -> Ints:
        """The last operation of each rank, dims (rank,)."""
        out = np.empty(self.members.ranks.size, np.int64)
        for p, ranks in enumerate(self.members.ranks):
            out[ranks] = self.base[p + 1] - self.replicas + np.arange(self.replicas)
        return out


def build_step(plan: Plan, members: Members) -> Step:
    """Return the graph of one step of all ranks, with mean durations."""
    progs = programs(plan)
    replicas = members.ranks.shape[1]
    base = np.concatenate([[0], np.cumsum([len(p.slots) for p in progs])]) * replicas
    messages = len(plan.messages.producer)

    def spread(name: str, dtype: type, message: npt.ArrayLike) -> npt.NDArray[Any]:
        own = np.concatenate([np.repeat(p.column(name).astype(dtype), replicas) for p in progs])
        return np.concatenate([own, np.repeat(np.broadcast_to(np.asarray(message, dtype), (messages,)), replicas)])

    source = members.ranks[plan.messages.source].ravel() if messages else np.empty(0, np.int64)
    target = members.ranks[plan.messages.destination].ravel() if messages else np.empty(0, np.int64)
    rank = np.concatenate([*(np.tile(members.ranks[p], len(g.slots)) for p, g in enumerate(progs)), source])
    axis = spread("axis", np.int8, -1)
    what = spread("what", np.int8, -1)
    group = _join_ids(progs, members, replicas, len(axis))
    bandwidth = _bandwidth(plan, members, rank, axis)
    duration = spread("base_s", np.float64, plan.messages.wire_s)
    join = what == What.JOIN
    duration[join] += plan.traffic.latency_s
    duration += spread("share", np.float64, 0.0) * spread("num_bytes", np.float64, 0.0) / bandwidth
    ranks = plan.schedule.num_ranks
    column = np.tile(np.arange(replicas), len(axis) // replicas)
    lane = np.concatenate([np.repeat(np.repeat(np.arange(ranks), [len(p.slots) for p in progs]), replicas),
                           np.repeat(ranks + plan.messages.link, replicas)])  # fmt: skip
    graph = Graph.from_edges(
        duration, *_edges(plan, progs, base, replicas), stream=(lane * replicas + column).astype(np.int32), group=group
    )
    destination = np.concatenate([np.full(int(base[-1]), -1), target]).astype(np.int32)
    return Step(
        plan, members, progs, graph, base, rank.astype(np.int32), what,
        spread("stage", np.int16, -1), spread("microbatch", np.int32, -1), spread("part", np.int8, 0), axis, destination,
        spread("layer", np.int16, -1),
    )  # fmt: skip


def _join_ids(progs: list[Program], members: Members, replicas: int, num_ops: int) -> npt.NDArray[np.int32]:
    """Return the join of each operation: those of one group, axis and number in the step."""
    out = np.full(num_ops, -1, np.int64)
    known: dict[tuple[int, int], int] = {}  # (axis, number in the step) -> first join
    total, at = 0, 0
    for p, prog in enumerate(progs):
        count = dict.fromkeys(range(len(AXES)), 0)
        for slot in prog.slots:
            if slot.what == What.JOIN:
                name = AXES[slot.axis]
                key = (slot.axis, count[slot.axis])
                count[slot.axis] += 1
                if key not in known:
                    known[key] = total
                    total += len(members.groups[name])
                out[at : at + replicas] = known[key] + members.group_of[name][members.ranks[p]]
            at += replicas
    used = np.unique(out[out >= 0])  # numbers without a gap: a join without members would never end
    out[out >= 0] = np.searchsorted(used, out[out >= 0])
    return out.astype(np.int32)


def _bandwidth(plan: Plan, members: Members, rank: Ints, axis: npt.NDArray[np.int8]) -> Floats:
    """Return the bandwidth of each collective, bytes/s; 1 for other operations."""
    out = np.ones(len(axis))
    for i, name in enumerate(AXES):
        mine = np.flatnonzero(axis == i)
        if len(mine):
            away = members.crossing(name)[members.group_of[name][rank[mine]]]
            out[mine] = np.where(away, plan.traffic.network_bandwidth, plan.traffic.host_bandwidth)
    return out


def _edges(plan: Plan, progs: list[Program], base: Ints, replicas: int) -> tuple[Ints, Ints, Floats]:
    m = plan.messages
    sends, receives, lags = [], [], []
    for i in range(len(m.producer)):
        source, destination = int(m.source[i]), int(m.destination[i])
        wire = int(base[-1]) + i * replicas
        latency = float(m.latency_s[i])
        sends.append(int(base[source]) + progs[source].send[i] * replicas)
        receives.append(wire)
        lags.append(0.0)
        sends.append(wire)
        receives.append(int(base[destination]) + progs[destination].recv[i] * replicas)
        lags.append(latency)
        if i in progs[source].sent:
            sends.append(wire)
            receives.append(int(base[source]) + progs[source].sent[i] * replicas)
            lags.append(latency if plan.tables.send == "sync" else 0.0)
    each = np.arange(replicas)
    first = (np.array(sends, np.int64)[:, None] + each).ravel()
    second = (np.array(receives, np.int64)[:, None] + each).ravel()
    return first, second, np.repeat(np.array(lags, np.float64), replicas)
