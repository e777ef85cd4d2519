"""Deadlock: lanes of work that wait for one another, and the cycle in which they do."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mappnb.sched import codes as c
from mappnb.sched.faults import Problem, grid, lengths, word
from mappnb.sched.schedule import Schedule

__all__ = ["Lanes", "compute_lanes", "deadlock", "needs", "positions", "run"]

Ints = npt.NDArray[np.int64]
_SEARCHED = 128
_SHOWN = 24


@dataclass(frozen=True)
class Lanes:
    """Nodes of work, numbered lane by lane; each lane runs its nodes in order, each when its needs are done.

    Attributes
    ----------
    starts : list of int
        First node of each lane, and the end.
    first, second : list of int
        Up to two needs of each node; the number of nodes says none.
    extra : dict
        Further needs: those of the second of a pair, which starts together with the first.
    partner : dict
        The other side of each transfer that waits for it (rendezvous): its need is then that the other side's lane has come so far.
    """

    starts: list[int]
    first: list[int]
    second: list[int]
    extra: dict[int, tuple[int, ...]]
    partner: dict[int, int] = field(default_factory=dict)

    def lane(self, node: int) -> int:
        """Return the lane of a node."""
        return bisect_right(self.starts, node) - 1

    def needs(self, node: int) -> list[int]:
        """Return all needs of a node."""
        found = (self.first[node], self.second[node], *self.extra.get(node, ()))
        return [n for n in found if n < self.starts[-1]]


def positions(sched: Schedule) -> tuple[Ints, Ints]:
    """Return where the forward and the backward (B or I) of each stage and microbatch stand in ``codes``, dims (stage, microbatch).

    The number of actions stands for none.
    """
    kind, stage, mb = c.kind(sched.codes), c.stage(sched.codes), c.microbatch(sched.codes)
    shape = (sched.num_stages, sched.num_microbatches)
    out = []
    for which in (kind == 0, (kind == 1) | (kind == 2)):
        at = np.full(shape, len(kind), np.int64)
        at[stage[which], mb[which]] = np.flatnonzero(which)
        out.append(at)
    return out[0], out[1]


def needs(sched: Schedule) -> tuple[Ints, Ints]:
    """Return the up to two needs of every action as positions in ``codes``; the number of actions says none."""
    kind, stage, mb = c.kind(sched.codes), c.stage(sched.codes), c.microbatch(sched.codes)
    forward, backward = positions(sched)
    none = np.full((1, forward.shape[1]), len(kind), np.int64)
    before = np.concatenate([none, forward])[stage, mb]
    after = np.concatenate([backward[1:], none])[stage, mb]
    first = np.select([kind == 0, kind == 3], [before, backward[stage, mb]], forward[stage, mb])
    return first, np.where((kind == 1) | (kind == 2), after, len(kind))


def compute_lanes(sched: Schedule) -> Lanes:
    """Return the ranks as lanes: program order and data needs, transfers left out."""
    first, second = needs(sched)
    extra: dict[int, tuple[int, ...]] = {}
    for i in np.flatnonzero(c.paired(sched.codes)).tolist():
        extra[i] = (int(first[i + 1]), int(second[i + 1]))
        first[i + 1] = second[i + 1] = len(sched)
    return Lanes(sched.offsets.tolist(), first.tolist(), second.tolist(), extra)


def run(lanes: Lanes) -> list[int]:
    """Return where each lane stands when nothing more can run: its end, or the node that waits for ever.

    Notes
    -----
    One visit of each node; a lane that waits is woken by the node it waits for.
    """
    first, second, extra = lanes.first, lanes.second, lanes.extra
    done = bytearray(lanes.starts[-1]) + b"\1"
    at, ends = lanes.starts[:-1], lanes.starts[1:]
    waiting: dict[int, list[int]] = {}
    ready = deque(range(len(at)))
    while ready:
        lane = ready.popleft()
        i, end = at[lane], ends[lane]
        while i < end and done[first[i]] and done[second[i]]:
            if i in extra and not all(done[n] for n in extra[i]):
                break
            done[i] = 1
            if i in waiting:
                ready += waiting.pop(i)
            i += 1
        at[lane] = i
        if i < end:
            need = first[i] if not done[first[i]] else second[i]
            if done[need]:
                need = next(n for n in extra[i] if not done[n])
            waiting.setdefault(need, []).append(lane)
    return at


class _Link(NamedTuple):
    """A node that is next in its lane, what it waits for, and the node that is next in that one's lane."""

    node: int
    need: int
    behind: int


def deadlock(sched: Schedule, lanes: Lanes, *, in_communications: bool = False) -> Problem | None:
    """Return the cycle in which the lanes wait for one another, or None if all can run."""
    at = run(lanes)
    if at == lanes.starts[1:]:
        return None
    cycle = _cycle(lanes, at)
    names = _Names(sched, lanes, in_communications)
    start = cycle[0].node
    rank = lanes.lane(start)
    marked = {lanes.lane(link.node): link.node - lanes.starts[lanes.lane(link.node)] for link in cycle}
    picture = grid(names.at, lengths(sched, in_communications), rank, marked[rank], marked=marked)
    return Problem(_chain(cycle, lanes, names.unit), rank, marked[rank], in_communications, picture)


class _Names:
    """Nodes in words."""

    def __init__(self, sched: Schedule, lanes: Lanes, in_communications: bool) -> None:
        self.sched, self.lanes, self.in_communications = sched, lanes, in_communications

    def at(self, rank: int, position: int) -> str:
        return word(self.sched, rank, position, self.in_communications)

    def unit(self, node: int, *, whole: bool = False) -> str:
        """Return the name of a node; ``whole`` names both of the pair that begins with it."""
        rank = self.lanes.lane(node)
        name = self.at(rank, node - self.lanes.starts[rank])
        return f"({name};{self.unit(node + 1)})" if whole and node in self.lanes.extra else name


def _cycle(lanes: Lanes, at: list[int]) -> list[_Link]:
    """Return a shortest cycle among the waiting lanes (through one of the first 128 of them, where there are more)."""
    waits: dict[int, dict[int, _Link]] = {}
    for lane, node in enumerate(at):
        if node < lanes.starts[lane + 1]:
            waits[lane] = {}
            for need in lanes.needs(node):
                other = lanes.lane(need)
                if need >= at[other]:
                    link = _Link(node, lanes.partner.get(node, need), at[other])
                    waits[lane].setdefault(other, link)
    lane, seen = next(iter(waits)), set[int]()
    while lane not in seen:  # every waiting lane waits for one that waits: in the end a lane comes again
        seen.add(lane)
        lane = next(iter(waits[lane]))
    found = [_back_to(waits, start) for start in (lane, *list(waits)[:_SEARCHED])]
    return min((f for f in found if f), key=len)


def _back_to(waits: dict[int, dict[int, _Link]], start: int) -> list[_Link]:
    """Return the shortest way from ``start`` back to it, or an empty list."""
    came: dict[int, tuple[int, _Link]] = {}
    queue = deque([start])
    while queue and start not in came:
        lane = queue.popleft()
        for other, link in waits[lane].items():
            if other not in came:
                came[other] = lane, link
                queue.append(other)
    way: list[_Link] = []
    lane = start
    while start in came and (not way or lane != start):
        lane, link = came[lane]
        way.append(link)
    return way[::-1]


def _chain(cycle: list[_Link], lanes: Lanes, name: Callable[..., str]) -> str:
    """Return the cycle as one sentence, and where it can be broken."""
    links, cures = [], []
    for link in cycle:
        need, rank = name(link.need), lanes.lane(link.behind)
        if link.need == link.behind:
            links.append(need)
        elif link.need == link.behind + 1 and link.behind in lanes.extra:
            links.append(f"{need}, which starts together with {name(link.behind)}")
        else:
            behind = name(link.behind, whole=True)
            links.append(f"{need}, which rank {rank} runs after {behind}")
            cures.append(f"{need} before {behind} on rank {rank}")
    if len(links) > _SHOWN:
        links[_SHOWN - 4 : -4] = [f"… ({len(links) - _SHOWN} more) …"]
    node = cycle[0].node
    rank = lanes.lane(node)
    verb = "finish" if node in lanes.partner else "start"
    join = ", which needs " if len(links) <= 4 else ",\n  which needs "
    cure = f"put {', or '.join(cures[:3])}" if cures else "take the pair apart"
    if lanes.partner:
        cure += ", or use sends that do not wait for their receive"
    return (
        f"rank {rank} cannot {verb} {name(node, whole=True)} (position {node - lanes.starts[rank]}): "
        f"it needs {join.join(links)}. To break the cycle, {cure}"
    )
