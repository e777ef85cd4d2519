"""The graph of a step: actions, messages, gradient reductions and the optimizer, for the replay engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mappnb.errors import ScheduleError
from mappnb.replay import DeadlockError, Graph, Replayed, replay
from mappnb.sched import codes as c
from mappnb.sched.costs import CostTables, Floats
from mappnb.sched.memory import Shipped
from mappnb.sched.schedule import Schedule
from mappnb.sched.times import hops

__all__ = ["Messages", "Reductions", "StepGraph", "build"]

Ids = npt.NDArray[np.int64]


class Messages(NamedTuple):
    """The messages of a step, dims (message,), in the order in which each rank sends them.

    Attributes
    ----------
    producer, consumer : array
        Index of the actions that send and need it.
    source, destination : array
        Ranks.
    link : array
        Number of the (source, destination) pair.
    wire_s, latency_s : array
        Time on the wire and latency, s.
    ships : array of bool
        An activation shipped from a stage's forward to its backward on another rank.
    """

    producer: Ids
    consumer: Ids
    source: Ids
    destination: Ids
    link: Ids
    wire_s: Floats
    latency_s: Floats
    ships: npt.NDArray[np.bool_]


class Reductions(NamedTuple):
    """The gradient reductions of a step, dims (reduction,): after which action, on which rank, of which stage, how long (s)."""

    after: Ids
    rank: Ids
    stage: Ids
    duration_s: Floats


@dataclass(frozen=True, eq=False)
class StepGraph:
    """The graph of one step. Operations: actions, then messages, then reductions, then (with an optimizer) a join and the optimizers.

    Attributes
    ----------
    graph : Graph
        For :func:`mappnb.replay.replay`.
    schedule : Schedule
        What it was built of.
    unit : array, dims (action,)
        The operation that runs the action: its own, or that of the first of its pair.
    messages : Messages
        What is sent.
    reductions : Reductions
        Gradient reductions.
    """

    graph: Graph
    schedule: Schedule
    unit: Ids
    messages: Messages
    reductions: Reductions

    @property
    def first_message(self) -> int:
        """Number of the first message among the operations."""
        return len(self.schedule)

    @property
    def first_reduction(self) -> int:
        """Number of the first reduction among the operations."""
        return self.first_message + len(self.messages.producer)

    @property
    def first_optimizer(self) -> int:
        """Number of the first optimizer among the operations."""
        return self.first_reduction + len(self.reductions.after) + 1

    def run(self, *, slack: bool = False) -> Replayed:
        """Return the replay of the graph.

        Raises
        ------
        ScheduleError
            If the ranks wait for one another.
        """
        try:
            return replay(self.graph, slack=slack)
        except DeadlockError as err:
            actions = self.schedule.codes[err.ops[err.ops < len(self.schedule)]]
            first = ", ".join(str(a) for a in c.decode(actions[:4]))
            raise ScheduleError(f"deadlock: {len(actions)} actions wait for one another, such as {first}") from err

    def action_times(self, done: Replayed) -> tuple[Floats, Floats]:
        """Return start and end of every action, s."""
        return done.start_s[self.unit], done.end_s[self.unit]

    def shipped(self, done: Replayed) -> Shipped:
        """Return the activations that go from a stage's forward to its backward on another rank."""
        mine = np.flatnonzero(self.messages.ships)
        op = self.first_message + mine
        return Shipped(self.messages.producer[mine], self.messages.consumer[mine], done.start_s[op], done.end_s[op])


def build(sched: Schedule, costs: CostTables) -> StepGraph:
    """Return the graph of one step of a schedule.

    Parameters
    ----------
    sched : Schedule
        A schedule that :meth:`Schedule.validate` accepts.
    costs : CostTables
        Its costs.
    """
    n, ranks = len(sched), sched.num_ranks
    rank = np.repeat(np.arange(ranks), np.diff(sched.offsets))
    paired = c.paired(sched.codes)
    unit = np.arange(n)
    unit[1:][paired[:-1]] -= 1
    table = _Table(sched)
    messages = _messages(sched, costs, table)
    producer, consumer = table.local(rank)
    reductions = _reductions(sched, costs, rank)
    edges: list[tuple[Ids, Ids, Floats | float]] = [
        (unit[messages.producer], n + np.arange(len(messages.producer)), 0.0),
        (n + np.arange(len(messages.producer)), unit[messages.consumer], messages.latency_s),
        (unit[producer], unit[consumer], 0.0),
        _held(sched, costs, messages, rank, unit),
        (unit[reductions.after], n + len(messages.producer) + np.arange(len(reductions.after)), 0.0),
    ]
    duration = [_durations(sched, costs, paired), messages.wire_s, reductions.duration_s]
    links = int(messages.link.max(initial=-1)) + 1
    stream = [rank, ranks + messages.link, ranks + links + reductions.rank]
    if costs.optimizer_s > 0:
        join = sum(len(d) for d in duration)
        edges += [(np.arange(join), np.full(join, join), 0.0), (np.full(ranks, join), join + 1 + np.arange(ranks), 0.0)]
        duration.append(np.concatenate([[0.0], np.full(ranks, costs.optimizer_s)]))
        stream.append(np.concatenate([[-1], np.arange(ranks)]))
    ops = sum(len(d) for d in duration)
    graph = Graph.from_edges(
        np.concatenate(duration),
        *(np.concatenate([np.broadcast_to(e[i], e[1].shape) for e in edges]) for i in range(3)),
        stream=np.concatenate(stream).astype(np.int32),
        queue=_cards(costs, messages, n, ops),
        slows=_slowed(costs, messages, reductions, n, ops),
        interference=costs.interference,
    )
    return StepGraph(graph, sched, unit, messages, reductions)


class _Table:
    """Where the forward and the backward (B or I) of each (stage, microbatch) are among the actions."""

    def __init__(self, sched: Schedule) -> None:
        kind, self.stage, self.microbatch = c.kind(sched.codes), c.stage(sched.codes), c.microbatch(sched.codes)
        self.backward = (kind != 0).astype(np.int64)
        self.moves = kind != 3
        self.at = np.full((2, sched.num_stages, sched.num_microbatches), -1, np.int64)
        where = np.flatnonzero(self.moves)
        self.at[self.backward[where], self.stage[where], self.microbatch[where]] = where

    def next(self, action: Ids) -> Ids:
        """Return the action that needs the result of each (moving) action next; -1 for the backward of the first stage."""
        back, stage, mb = self.backward[action], self.stage[action], self.microbatch[action]
        last = (back == 0) & (stage == self.at.shape[1] - 1)
        to = np.where(last, stage, stage + 1 - 2 * back)
        return np.where(to >= 0, self.at[np.where(last, 1, back), to, mb], -1)

    def local(self, rank: Ids) -> tuple[Ids, Ids]:
        """Return (producer, consumer) on the same rank."""
        producer = np.flatnonzero(self.moves)
        consumer = self.next(producer)
        mine = (consumer >= 0) & (rank[np.maximum(consumer, 0)] == rank[producer])
        return producer[mine], consumer[mine]


def _durations(sched: Schedule, costs: CostTables, paired: npt.NDArray[np.bool_]) -> Floats:
    mb = c.microbatch(sched.codes) if costs.duration_s.shape[2] > 1 else 0
    duration = costs.duration_s[c.kind(sched.codes), c.stage(sched.codes), mb]
    first = np.flatnonzero(paired)
    duration[first] = (duration[first] + duration[first + 1]) * costs.overlap_ratio
    duration[first + 1] = 0.0
    return np.asarray(duration, np.float64)


def _messages(sched: Schedule, costs: CostTables, table: _Table) -> Messages:
    where = hops(sched, costs)
    producer = np.flatnonzero(table.moves)
    back, stage = table.backward[producer], table.stage[producer]
    mirrored_from = sched.placement.mirrored_from
    half = (
        (table.microbatch[producer] >= mirrored_from).astype(np.int64)
        if mirrored_from is not None
        else np.zeros_like(back)
    )
    consumer = table.next(producer)
    parts = [
        (
            producer,
            consumer,
            where.link[half, back, stage],
            where.wire[half, back, stage],
            where.latency[half, back, stage],
        )
    ]
    if sched.placement.backward is not None:
        f = producer[back == 0]
        s = table.stage[f]
        to = table.at[1, s, table.microbatch[f]]
        parts.append((f, to, where.link[2, 0, s], where.wire[2, 0, s], where.latency[2, 0, s]))
    ships = np.concatenate([np.full(len(x[0]), i > 0) for i, x in enumerate(parts)])
    producer, consumer, link, wire, latency = (np.concatenate([x[i] for x in parts]) for i in range(5))
    order = np.lexsort((ships, producer))
    order = order[link[order] >= 0]
    link = link[order].astype(np.int64)
    source, destination = where.source.astype(np.int64)[link], where.destination.astype(np.int64)[link]
    return Messages(
        producer[order], consumer[order], source, destination, link, wire[order], latency[order], ships[order]
    )


def _reductions(sched: Schedule, costs: CostTables, rank: Ids) -> Reductions:
    """Return a reduction for each (rank, stage) that has weight gradients, after the last of them."""
    kind, stage = c.kind(sched.codes), c.stage(sched.codes).astype(np.int64)
    ends = np.flatnonzero(((kind == 1) | (kind == 3)) & (costs.reduce_s[stage] > 0))
    key = rank[ends] * sched.num_stages + stage[ends]
    _, back = np.unique(key[::-1], return_index=True)
    after = np.sort(ends[len(ends) - 1 - back]) if len(ends) else ends
    return Reductions(after, rank[after], stage[after], costs.reduce_s[stage[after]])


def _held(sched: Schedule, costs: CostTables, messages: Messages, rank: Ids, unit: Ids) -> tuple[Ids, Ids, Floats]:
    """Return the edges by which a sender waits for its own message, unless sends are asynchronous."""
    after = messages.producer + 1
    after = np.where((after < len(unit)) & (unit[np.minimum(after, len(unit) - 1)] != after), after + 1, after)
    same = (after < len(unit)) & (rank[np.minimum(after, len(unit) - 1)] == messages.source)
    if costs.send == "async":
        same[:] = False
    number = len(sched) + np.flatnonzero(same)
    lag = messages.latency_s[same] if costs.send == "sync" else np.zeros(int(same.sum()))
    return number, after[same], lag


def _cards(costs: CostTables, messages: Messages, n: int, ops: int) -> npt.NDArray[np.int32] | None:
    """Return the network cards that each operation occupies: out of the source's host, into the destination's."""
    if costs.host is None or not costs.by_events:
        return None
    source, destination = costs.host[messages.source], costs.host[messages.destination]
    away = source != destination
    queue = np.full((ops, 2), -1, np.int32)
    mine = queue[n : n + len(messages.producer)]
    mine[away, 0] = source[away]
    mine[away, 1] = int(costs.host.max()) + 1 + destination[away]
    return queue


def _slowed(
    costs: CostTables, messages: Messages, reductions: Reductions, n: int, ops: int
) -> npt.NDArray[np.int32] | None:
    """Return the compute streams that each operation slows: those of both ends of a message, that of a reduction."""
    if not costs.interference:
        return None
    slows = np.full((ops, 2), -1, np.int32)
    first = n + len(messages.producer)
    slows[n:first] = np.stack([messages.source, messages.destination], 1)
    slows[first : first + len(reductions.after), 0] = reductions.rank
    return slows
