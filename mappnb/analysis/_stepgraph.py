"""A recorded step as a graph for the replay engine: program order, calls and launches joined, times as they were."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xarray as xr

from mappnb.analysis._identity import call_ids, is_point_to_point, is_sending
from mappnb.analysis._intervals import innermost_segments
from mappnb.replay import Graph
from mappnb.terms import Category, Flag

__all__ = ["ARRIVE", "BESIDE", "JOIN", "LEAVE", "WIRE", "WORK", "RecordedGraph", "recorded_graph"]

Array = np.ndarray[Any, Any]
WORK, ARRIVE, LEAVE, JOIN, WIRE, BESIDE = range(6)
_NEAR_NS = 1000
"""Work of a rank that begins within this many ns after something beside it ended is taken to have waited for it."""


@dataclass(eq=False)
class RecordedGraph:
    """The graph of a recorded step.

    Attributes
    ----------
    graph : Graph
        Its times are in ns, not s: whole numbers, so that sums are exact.
    event : array, dims (op,), int64
        Index of the event that each operation is a piece of; of a join the last to arrive, of a message the send.
    kind : array, dims (op,)
        ``WORK`` of a thread or stream; ``ARRIVE`` at and ``LEAVE`` of a transfer; ``JOIN``, where the last member has come; ``WIRE``, a
        message on its way; ``BESIDE``, a transfer that its rank does not wait for.
    begin_ns : int
        First start.
    start_ns, end_ns : array, dims (op,), int64
        When it ran as recorded.
    """

    graph: Graph
    event: Array
    kind: Array
    begin_ns: int
    start_ns: Array
    end_ns: Array


@dataclass(eq=False)
class _Nodes:
    """Operations while they are collected. ``fixed``: starts as soon as its dependencies end, and lasts to its recorded end."""

    event: list[int] = field(default_factory=list)
    start: list[int] = field(default_factory=list)
    end: list[int] = field(default_factory=list)
    kind: list[int] = field(default_factory=list)
    source: list[int] = field(default_factory=list)
    target: list[int] = field(default_factory=list)

    def add(self, kind: int, event: int, start: int, end: int, after: tuple[int, ...] = ()) -> int:
        node = len(self.event)
        self.kind.append(kind)
        self.event.append(event)
        self.start.append(start)
        self.end.append(max(start, end))
        for one in after:
            self.edge(one, node)
        return node

    def edge(self, source: int, target: int) -> None:
        self.source.append(source)
        self.target.append(target)


def recorded_graph(events: xr.Dataset) -> RecordedGraph:
    """Return the graph of the events of one step, all ranks."""
    return _Builder(events).build()


class _Builder:
    def __init__(self, events: xr.Dataset) -> None:
        self.ev, self.nodes = events, _Nodes()
        self.start = events.start_ns.values.astype(np.int64)
        self.end = self.start + events.duration_ns.values
        self.call, category = call_ids(events), events.category.values
        moving = np.isin(category, (Category.COLLECTIVE, Category.P2P))
        self.beside = moving & ((events.flags.values & Flag.ASYNC) != 0)
        self.computes = (category == Category.COMPUTE) & (events.microbatch.values >= 0)
        self.transfer = (moving | (category == Category.WAIT)) & (self.call >= 0) & ~self.beside
        rank, stream = events["rank"].values, events.stream.values
        host = np.where(stream >= 0, -1, events.thread.values)
        keys = np.stack([rank, stream, host], 1) if len(rank) else np.empty((0, 3), np.int64)
        lanes, lane = np.unique(keys, axis=0, return_inverse=True)
        self.lane = lane.ravel()
        self.rank, self.wait = rank, category == Category.WAIT
        self.hosts = {int(r): np.flatnonzero((lanes[:, 0] == r) & (lanes[:, 1] < 0)) for r in np.unique(rank)}
        self.places = [events[name].values for name in ("rank", "stage", "microbatch")]
        self.bytes = events.bytes.values
        self.pairs = [events[name].values for name in ("group", "rank", "peer", "seq")]
        self.compute: dict[tuple[int, ...], tuple[list[int], list[int]]] = {}
        self.arrive: dict[int, int] = {}
        self.leave: dict[int, int] = {}

    def build(self) -> RecordedGraph:
        self._lanes()
        self._beside()
        self._calls()
        self._launches()
        self._waits_beside()
        return self._graph()

    # ------------------------------------------------------------------------------------------------- lanes
    def _issued(self) -> tuple[Array, Array]:
        """Return device events whose launch is known, and when they were launched on the run clock."""
        issue, raw = self.ev.issue_ns.values, self.ev.raw_start_ns.values
        index = np.flatnonzero((self.ev.stream.values >= 0) & (issue >= 0))
        return index, issue[index] + np.where(raw[index] >= 0, self.start[index] - raw[index], 0)

    def _cuts(self) -> tuple[Array, Array]:
        """Return (lane, time) at which work hands something over, and must be cut in two."""
        beside = np.flatnonzero(self.beside)
        index, at = self._issued()
        launching = [self.hosts[r] for r in self.rank[index].tolist()]
        lanes = np.concatenate([self.lane[beside], *launching]).astype(np.int64)
        times = np.concatenate(
            [self.start[beside], *(np.full(len(x), t, np.int64) for x, t in zip(launching, at, strict=True))]
        )
        return lanes, times.astype(np.int64)

    def _lanes(self) -> None:
        inside = np.flatnonzero(~self.beside)
        span, left, right = innermost_segments(self.lane[inside], self.start[inside], self.end[inside])
        span = inside[span]
        # instants of transfers have no segment, yet others may wait for them
        instants = np.flatnonzero(self.transfer & (self.end <= self.start))
        span = np.concatenate([span, instants])
        left, right = np.concatenate([left, self.start[instants]]), np.concatenate([right, self.end[instants]])
        last = np.full(len(self.start), -1, np.int64)
        np.maximum.at(last, span, right)
        moves = self.transfer[span] & (right == last[span])
        span, left, right, moves = self._cut(span, left, right, moves)
        order = np.lexsort((span, right, left, self.lane[span]))
        self.ends: dict[int, tuple[list[int], list[int]]] = {}
        before, lane_before = -1, -1
        for i in order.tolist():
            event, lane = int(span[i]), int(self.lane[span[i]])
            after = (before,) if lane == lane_before and before >= 0 else ()
            times, made = self.ends.setdefault(lane, ([], []))
            if moves[i]:
                at = self.nodes.add(ARRIVE, event, int(left[i]), int(left[i]), after)
                self.arrive[event] = at
                before = self.leave[event] = self.nodes.add(LEAVE, event, int(left[i]), int(right[i]), (at,))
                times.append(int(left[i]))
                made.append(at)
            else:
                before = self.nodes.add(WORK, event, int(left[i]), int(right[i]), after)
                if self.computes[event]:
                    starts, works = self.compute.setdefault(self._place(event), ([], []))
                    starts.append(int(left[i]))
                    works.append(before)
            times.append(int(right[i]))
            made.append(before)
            lane_before = lane

    def _cut(self, span: Array, left: Array, right: Array, moves: Array) -> tuple[Array, Array, Array, Array]:
        lanes, times = self._cuts()
        if not len(lanes) or not len(span):
            return span, left, right, moves
        low, width = int(left.min()), np.int64(int(right.max()) - int(left.min()) + 2)
        order = np.lexsort((right, left, self.lane[span]))
        span, left, right, moves = span[order], left[order], right[order], moves[order]
        key = self.lane[span] * width + left - low
        found = np.searchsorted(key, lanes * width + np.clip(times - low, 0, width - 1), side="right") - 1
        ok = (found >= 0) & (self.lane[span[found]] == lanes) & (left[found] < times) & (times < right[found])
        ok &= ~moves[found]
        pieces = np.concatenate([np.arange(len(span)), found[ok]])
        begin = np.concatenate([left, times[ok]])
        both = np.unique(np.stack([pieces, begin], 1), axis=0)
        piece, begin = both[:, 0], both[:, 1]
        end = right[piece].copy()
        same = piece[1:] == piece[:-1]
        end[:-1][same] = begin[1:][same]
        return span[piece], begin, end, moves[piece]

    def _before(self, lane: int, time: int, event: int) -> tuple[int, ...]:
        """Return the last operation of a lane that had ended by then; of instants at that time, one of an earlier row."""
        times, made = self.ends.get(lane, ([], []))
        at = bisect_right(times, time) - 1
        while at >= 0 and self.nodes.event[made[at]] > event and self.nodes.start[made[at]] == time:
            at -= 1
        return (made[at],) if at >= 0 else ()

    # ------------------------------------------------------------------------------------------------- calls
    def _beside(self) -> None:
        for event in np.flatnonzero(self.beside).tolist():
            at = int(self.start[event])
            self.arrive[event] = self.nodes.add(ARRIVE, event, at, at, self._before(int(self.lane[event]), at, event))

    def _calls(self) -> None:
        members: dict[int, list[int]] = {}
        for event in np.flatnonzero(self.call >= 0).tolist():
            if event in self.arrive:
                members.setdefault(int(self.call[event]), []).append(event)
        pair, sending = is_point_to_point(self.ev), is_sending(self.ev)
        self.links: dict[tuple[int, int, int], list[_Message]] = {}
        for events in members.values():
            if pair[events[0]]:
                self._message(events, sending)
            else:
                self._collective(events)
        shortest = [self._shortest(messages) for messages in self.links.values()]
        known: dict[int, list[int]] = {}
        for messages, least in zip(self.links.values(), shortest, strict=True):
            if least >= 0:
                known.setdefault(self._size(messages), []).append(least)
        for messages, least in zip(self.links.values(), shortest, strict=True):
            other = known.get(self._size(messages), [0])  # where every message waited for its receiver: as other links
            self._link(messages, least if least >= 0 else sorted(other)[len(other) // 2])
        for event in np.flatnonzero(self.beside & (self.call < 0)).tolist():
            self.nodes.add(BESIDE, event, int(self.start[event]), int(self.end[event]), (self.arrive[event],))

    def _collective(self, events: list[int]) -> None:
        issued = [e for e in events if not self.wait[e]]
        if not issued:
            return
        last = max(issued, key=lambda e: self.nodes.start[self.arrive[e]])
        at = self.nodes.start[self.arrive[last]]
        join = self.nodes.add(JOIN, last, at, at, tuple(self.arrive[e] for e in issued))
        waiting = {int(self.rank[e]) for e in events if self.wait[e]}
        for e in events:
            if self.wait[e]:  # one that took time waited for the end of the call, another found it done
                if self.end[e] - self.start[e] > _NEAR_NS:
                    self.nodes.edge(self.nodes.add(BESIDE, last, at, int(self.end[e]), (join,)), self.leave[e])
            elif e in self.leave:
                self.nodes.edge(join, self.leave[e])
            elif int(self.rank[e]) not in waiting:
                self.nodes.add(BESIDE, e, at, int(self.end[e]), (join,))

    def _message(self, events: list[int], sending: Array) -> None:
        wait = self.wait
        sends = [e for e in events if sending[e] and not wait[e]]
        receives = [e for e in events if not sending[e] and not wait[e]]
        if len(sends) != 1 or len(receives) != 1:
            return
        waits = [e for e in events if wait[e] and not sending[e]]
        held = tuple(e for e in events if sending[e] and e in self.leave)
        ends = waits or receives  # who gets the message: the wait for it, or the receive itself
        group, rank, peer, seq = (int(v[sends[0]]) for v in self.pairs)
        self.links.setdefault((group, rank, peer), []).append(_Message(seq, sends[0], receives[0], ends[0], held))

    def _size(self, messages: list[_Message]) -> int:
        return int(self.bytes[messages[0].send])

    def _shortest(self, messages: list[_Message]) -> int:
        """Return the shortest time that a message of a link took, of those that were waited for, in ns; -1 if none was."""
        messages.sort(key=lambda m: m.seq)
        previous, shortest = -(2**62), -1
        for m in messages:
            begin, there, at = max(int(self.start[m.send]), previous), self._came(m), int(self.end[m.ends])
            if there <= begin and not 0 <= shortest <= at - begin:
                shortest = at - begin
            previous = at
        return shortest

    def _came(self, m: _Message) -> int:
        return self.nodes.start[self.arrive[m.ends]]

    def _link(self, messages: list[_Message], shortest: int) -> None:
        """Add the messages of a link, one behind the other. Who came last is told by the shortest time that one has taken."""
        previous, wire = -(2**62), -1
        for m in messages:
            begin, there, at = max(int(self.start[m.send]), previous), self._came(m), int(self.end[m.ends])
            late = begin + shortest < there  # the message was there before its receiver
            end = max(begin, min(begin + shortest, there) if late else at)
            after = (self.arrive[m.send], wire) if wire >= 0 else (self.arrive[m.send],)
            wire = self.nodes.add(WIRE, m.send, begin, end, after)
            previous = end
            if m.ends in self.leave:
                self.nodes.edge(wire, self.leave[m.ends])
            else:
                self._consumed(m.receive, wire)
            for event in m.held:
                self._held(event, m, wire, end, shortest if late else -1)

    def _consumed(self, receive: int, wire: int) -> None:
        """Tell what a receive beside the work is for: the next compute of its rank, stage and microbatch."""
        starts, made = self.compute.get(self._place(receive), ([], []))
        at = bisect_left(starts, self.nodes.end[wire] - 1)  # 1: times are rounded to ns
        if at < len(made):
            self.nodes.edge(wire, made[at])

    def _place(self, event: int) -> tuple[int, ...]:
        return tuple(int(v[event]) for v in self.places)

    def _held(self, event: int, m: _Message, wire: int, end: int, shortest: int) -> None:
        """Let a send, or the wait for one, hold its rank until the receiver has come, or until the message is there, if it did.

        ``shortest`` is what a message takes where the receiver came late, else -1: one that waits for its receiver takes that after it,
        or less, if others of the link are slower: a receiver that comes after the message could have been there, and before the send
        goes on, is what it waited for.
        """
        until, posted = int(self.end[event]), int(self.start[m.receive])
        rendezvous = until > posted + shortest // 2 or until >= posted >= end
        if shortest >= 0 and rendezvous and posted > int(self.start[event]):
            self.nodes.edge(self.arrive[m.receive], self.leave[event])
        elif until >= end - _NEAR_NS:
            self.nodes.edge(wire, self.leave[event])

    # --------------------------------------------------------------------------------------------- what else waits
    def _launches(self) -> None:
        index, at = self._issued()
        first: dict[int, int] = {}
        for node, event in enumerate(self.nodes.event):
            if self.nodes.kind[node] in (WORK, ARRIVE):
                first.setdefault(event, node)
        for event, time in zip(index.tolist(), at.tolist(), strict=True):
            lanes = self.hosts[int(self.rank[event])].tolist()
            found = [n for lane in lanes for n in self._before(lane, time, event)]
            if found and event in first:
                self.nodes.edge(max(found, key=lambda n: self.nodes.end[n]), first[event])

    def _waits_beside(self) -> None:
        """Work that begins after a gap, when something beside it has just ended, waited for that."""
        simulated = self.ev.attrs.get("clock_model") == "simulated"
        rank = self.rank
        beside: dict[int, list[tuple[int, int]]] = {}
        for node, kind in enumerate(self.nodes.kind):
            if kind == BESIDE or (simulated and kind == WORK):  # simulated times are exact: what meets belongs together
                key = -1 if simulated else int(rank[self.nodes.event[node]])
                beside.setdefault(key, []).append((self.nodes.end[node], node))
        arrays = {k: (np.array([t for t, _ in sorted(v)]), [n for _, n in sorted(v)]) for k, v in beside.items()}
        before: dict[int, int] = {}
        for source, target in zip(self.nodes.source, self.nodes.target, strict=True):
            before[target] = max(before.get(target, -(2**62)), self.nodes.end[source])
        for node, kind in enumerate(self.nodes.kind):
            if kind not in (WORK, ARRIVE) or before.get(node, -(2**62)) >= self.nodes.start[node]:
                continue
            times, made = arrays.get(-1 if simulated else int(rank[self.nodes.event[node]]), (np.empty(0), []))
            at = int(np.searchsorted(times, self.nodes.start[node], side="right")) - 1
            near = 1 if simulated else _NEAR_NS
            if (
                at >= 0
                and self.nodes.start[node] - times[at] <= near
                and made[at] != node
                and self._later(made[at], node)
            ):
                self.nodes.edge(made[at], node)

    def _later(self, source: int, target: int) -> bool:
        return self.nodes.start[source] < self.nodes.start[target]

    # ------------------------------------------------------------------------------------------------- the graph
    def _graph(self) -> RecordedGraph:
        nodes = self.nodes
        kind, event = np.array(nodes.kind, np.int64), np.array(nodes.event, np.int64)
        start, end = np.array(nodes.start, np.int64), np.array(nodes.end, np.int64)
        source, target = np.array(nodes.source, np.int64), np.array(nodes.target, np.int64)
        begin = int(start.min(initial=np.iinfo(np.int64).max)) if len(start) else 0
        ready = np.full(len(start), begin, np.int64)
        np.maximum.at(ready, target, end[source])
        free = (kind == WORK) | (kind == ARRIVE)
        delay = np.where(free, np.maximum(start - ready, 0), 0)
        at = np.where(free, np.maximum(start, ready), ready)
        graph = Graph.from_edges(
            np.maximum(np.where(free, end - start, end - at), 0).astype(np.float64),
            source,
            target,
            0.0,
            stream=np.full(len(start), -1, np.int32),
            delay_s=delay.astype(np.float64),
        )
        return RecordedGraph(graph, event, kind, begin, at, end)


@dataclass(frozen=True, slots=True)
class _Message:
    """A transfer between two ranks: events of the send, of the receive, of what ended when it was there, of what the send held up."""

    seq: int
    send: int
    receive: int
    ends: int
    held: tuple[int, ...]
