"""Plain-Python twin of the replay engine: one loop over events in the order of time, whatever the graph."""

from __future__ import annotations

import heapq
from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from mappnb.replay import Graph

__all__ = ["replay_reference"]

END, READY, START = 0, 1, 2


def replay_reference(graph: Graph) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return start and end in s of every operation; NaN where operations wait for one another. See :func:`mappnb.replay.replay`."""
    return _Loop(graph).run()


class _Loop:
    def __init__(self, graph: Graph) -> None:
        n = len(graph)
        self.g = graph
        self.duration, self.delay = graph.duration_s.tolist(), graph.delays_s.tolist()
        self.stream, self.group = graph.stream.tolist(), graph.groups.tolist()
        self.queue = [[q for q in row if q >= 0] for row in graph.queues.tolist()]
        slows = graph.slowed.tolist() if graph.interference else [[]] * n
        self.slows = [[s for s in row if s >= 0] for row in slows]
        self.unmet = np.diff(graph.dep_offsets).tolist()
        self.followers: list[list[tuple[int, float]]] = [[] for _ in range(n)]
        for op in range(n):
            for e in range(int(graph.dep_offsets[op]), int(graph.dep_offsets[op + 1])):
                self.followers[int(graph.dep[e])].append((op, float(graph.lag_s[e])))
        before: dict[int, int] = {}
        for op, s in enumerate(self.stream):
            if s >= 0:
                if s in before:
                    self.followers[before[s]].append((op, 0.0))
                    self.unmet[op] += 1
                before[s] = op
        self.members = defaultdict(list)
        for op, group in enumerate(self.group):
            if group >= 0:
                self.members[group].append(op)
        self.missing = {group: len(ops) for group, ops in self.members.items()}
        self.start, self.end = [0.0] * n, [float("nan")] * n
        self.free: defaultdict[int, float] = defaultdict(float)
        self.running: dict[int, int] = {}
        self.active: defaultdict[int, int] = defaultdict(int)
        self.remaining, self.since, self.version = [0.0] * n, [0.0] * n, [0] * n
        self.events: list[tuple[float, int, int, int]] = []

    def run(self) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        for op, unmet in enumerate(self.unmet):
            if unmet == 0:
                self._push(self.delay[op], READY, op)
        while self.events:
            time, what, op, version = heapq.heappop(self.events)
            if what == READY:
                self._ready(op, time)
            elif what == START:
                self._begin(op, time)
            elif version == self.version[op]:
                self._finish(op, time)
        return np.array(self.start), np.array(self.end)

    def _push(self, time: float, what: int, op: int) -> None:
        heapq.heappush(self.events, (time, what, op, self.version[op]))

    def _ready(self, op: int, time: float) -> None:
        self.start[op] = time
        group = self.group[op]
        if group >= 0:
            self.missing[group] -= 1
            if not self.missing[group]:
                for member in self.members[group]:
                    self._push(time + self.duration[member], END, member)
            return
        begin = max([time, *(self.free[q] for q in self.queue[op])])
        for q in self.queue[op]:
            self.free[q] = begin + self.duration[op]
        self.start[op] = begin
        if begin > time:
            self._push(begin, START, op)
        else:
            self._begin(op, time)

    def _begin(self, op: int, time: float) -> None:
        for s in self.slows[op]:
            self.active[s] += 1
            if self.active[s] == 1:
                self._turn(s, time, 1.0, 1.0 + self.g.interference)
        s, length = self.stream[op], self.duration[op]
        if s >= 0:
            self.running[s], self.remaining[op], self.since[op] = op, length, time
            if self.active[s] > 0:
                length *= 1.0 + self.g.interference
        self._push(time + length, END, op)

    def _turn(self, stream: int, time: float, was: float, now: float) -> None:
        op = self.running.get(stream)
        if op is not None:
            self.remaining[op] = max(0.0, self.remaining[op] - (time - self.since[op]) / was)
            self.since[op] = time
            self.version[op] += 1
            self._push(time + self.remaining[op] * now, END, op)

    def _finish(self, op: int, time: float) -> None:
        s = self.stream[op]
        if s >= 0 and self.running.get(s) == op:
            del self.running[s]
        if self.group[op] < 0:
            for k in self.slows[op]:
                self.active[k] -= 1
                if self.active[k] == 0:
                    self._turn(k, time, 1.0 + self.g.interference, 1.0)
        self.end[op] = time
        for next_op, lag in self.followers[op]:
            self.start[next_op] = max(self.start[next_op], time + lag)
            self.unmet[next_op] -= 1
            if not self.unmet[next_op]:
                self._push(self.start[next_op] + self.delay[next_op], READY, next_op)
