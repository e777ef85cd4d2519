"""Are the sends and receives of a schedule right? Each message once, on its ranks, in place, in one order, without deadlock."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from mappnb.sched import codes as c
from mappnb.sched.action import Action, Transfer, TransferKind
from mappnb.sched.deadlock import Lanes, deadlock, needs, positions
from mappnb.sched.faults import Problem, fault
from mappnb.sched.schedule import Schedule

__all__ = ["SENDS", "Routes", "routes", "transfer_problems"]

SENDS: tuple[str, ...] = ("buffered", "rendezvous")
Ints = npt.NDArray[np.int64]
_KINDS = (TransferKind.SEND_F, TransferKind.RECV_F, TransferKind.SEND_B, TransferKind.RECV_B)
_NUMBER: dict[str, int] = {str(k): i for i, k in enumerate((*c.KINDS, *_KINDS))}


@dataclass(frozen=True, eq=False)
class Routes:
    """The messages that a schedule needs: one for each edge between stages of two ranks.

    Message ``(direction * stages + stage) * microbatches + microbatch`` is what ``stage`` sends, forward 0 or backward 1.

    Attributes
    ----------
    source, destination : array, dims (message,)
        Ranks; -1 where there is no such message.
    producer, consumer : array, dims (message,)
        Positions in ``codes`` of the actions that make and use it.
    """

    source: Ints
    destination: Ints
    producer: Ints
    consumer: Ints


def routes(sched: Schedule) -> Routes:
    """Return the messages that a complete schedule needs.

    Notes
    -----
    What a disaggregated forward rank ships to the backward rank of its stage is no message of this kind: it is no edge between stages.
    """
    rank = np.repeat(np.arange(sched.num_ranks), np.diff(sched.offsets))
    forward, backward = positions(sched)
    made = np.stack([forward, backward])
    used = np.full_like(made, -1)
    used[0, :-1], used[1, 1:] = forward[1:], backward[:-1]
    source, destination = rank[made], rank[used]
    crosses = (used >= 0) & (source != destination)
    return Routes(*(np.where(crosses, x, -1).reshape(-1) for x in (source, destination, made, used)))


@dataclass(frozen=True, eq=False)
class _Items:
    """What the ranks run with their transfers, as arrays, dims (node,); ``nodes`` are those of the actions in ``codes``."""

    sched: Schedule
    starts: Ints
    rank: Ints
    kind: Ints
    stage: Ints
    microbatch: Ints

    @cached_property
    def nodes(self) -> Ints:
        return np.flatnonzero(self.kind < 4)

    def problem(self, node: int, text: str) -> Problem:
        rank = int(self.rank[node])
        return fault(self.sched, text, rank, node - int(self.starts[rank]), in_communications=True)

    def name(self, node: int) -> str:
        rank = int(self.rank[node])
        return str(self._order[rank][node - int(self.starts[rank])])

    @property
    def _order(self) -> tuple[tuple[Action | Transfer, ...], ...]:
        return self.sched.communications or ()


def transfer_problems(sched: Schedule, sends: str) -> Iterator[Problem]:
    """Yield what is wrong with the communications of a schedule whose actions alone are right."""
    order = sched.communications or ()
    if len(order) != sched.num_ranks:
        yield Problem(
            f"communications of {len(order)} ranks; the schedule has {sched.num_ranks}: give one order for each"
        )
        return
    everything = [a for r in order for a in r]
    items = _Items(
        sched,
        np.concatenate(([0], np.cumsum([len(r) for r in order]))).astype(np.int64),
        np.repeat(np.arange(len(order)), [len(r) for r in order]),
        np.array([_NUMBER[a.kind] for a in everything], np.int64),
        np.array([a.stage for a in everything], np.int64),
        np.array([a.microbatch for a in everything], np.int64),
    )
    for check in (_same_order, _together, lambda items: _messages(items, sends)):
        found = False
        for problem in check(items):
            found = True
            yield problem
        if found:
            return


def _same_order(items: _Items) -> Iterator[Problem]:
    """Yield the first difference of each rank between its actions and its communications."""
    sched, nodes = items.sched, items.nodes
    if len(nodes) == len(sched) and _equal(items):
        return
    for rank in range(sched.num_ranks):
        mine = nodes[items.rank[nodes] == rank]
        expected = sched.ranks[rank]
        for node, action in zip(mine.tolist(), expected, strict=False):
            if items.name(node) != str(action):
                yield items.problem(node, f"{items.name(node)}, but the order without transfers has {action} here")
                break
        else:
            if len(mine) != len(expected):
                yield Problem(
                    f"rank {rank}: {len(mine)} actions in the communications, {len(expected)} in the order without transfers; "
                    "they must be the same",
                    rank,
                )


def _equal(items: _Items) -> bool:
    codes, nodes = items.sched.codes, items.nodes
    ranks = np.repeat(np.arange(items.sched.num_ranks), np.diff(items.sched.offsets))
    mine = np.stack([items.rank[nodes], items.kind[nodes], items.stage[nodes], items.microbatch[nodes]])
    return np.array_equal(mine, np.stack([ranks, c.kind(codes), c.stage(codes), c.microbatch(codes)]))


def _together(items: _Items) -> Iterator[Problem]:
    """Yield what stands inside a pair."""
    nodes = items.nodes
    for i in np.flatnonzero(c.paired(items.sched.codes)).tolist():
        node = int(nodes[i]) + 1
        if nodes[i + 1] != node:
            yield items.problem(
                node, f"{items.name(node)} stands inside a pair that runs as one; put it before or behind the pair"
            )


def _messages(items: _Items, sends: str) -> Iterator[Problem]:
    route = routes(items.sched)
    found = yield from _counted(items, route)
    if found is None:
        return
    sent, received = found
    clean = True
    for check in (_in_place, _one_order):
        for problem in check(items, route, sent, received):
            clean = False
            yield problem
        if not clean:
            return
    stuck = deadlock(items.sched, _lanes(items, route, sent, received, sends), in_communications=True)
    if stuck is not None:
        yield stuck


def _counted(items: _Items, route: Routes) -> Generator[Problem, None, tuple[Ints, Ints] | None]:
    """Yield what is doubled, missing or not needed; return where each message is sent and received."""
    where = np.full((2, len(route.source)), -1, np.int64)
    bad = False
    for side in (0, 1):
        node = np.flatnonzero((items.kind >= 4) & (items.kind % 2 == side))
        message = _message(items, route, node, side)
        mine = (route.source, route.destination)[side]
        right = (message >= 0) & (mine[message] == items.rank[node])
        where[side][message[right][::-1]] = node[right][::-1]  # the first of doubled ones
        for i in np.flatnonzero(~right | (where[side][message] != node)).tolist():
            bad = True
            yield items.problem(int(node[i]), _not_right(items, mine, where[side], int(node[i]), int(message[i])))
    for side, other in ((0, 1), (1, 0)):
        for m in np.flatnonzero((where[side] < 0) & (route.source >= 0)).tolist():
            bad = True
            yield _absent(items, route, m, side, int(where[other, m]))
    return None if bad else (where[0], where[1])


def _message(items: _Items, route: Routes, node: Ints, side: int) -> Ints:
    """Return the message of each transfer, -1 where the schedule has none like it."""
    stages, count = items.sched.num_stages, items.sched.num_microbatches
    direction = (items.kind[node] - 4) // 2
    stage = items.stage[node] + side * (2 * direction - 1)  # of the sender
    known = (stage >= 0) & (stage < stages) & (items.microbatch[node] >= 0) & (items.microbatch[node] < count)
    message = np.where(known, (direction * stages + stage) * count + items.microbatch[node], 0)
    return np.where(known & (route.source[message] >= 0), message, -1)


def _not_right(items: _Items, mine: Ints, where: Ints, node: int, message: int) -> str:
    """Return what is wrong with one transfer by itself."""
    name, rank = items.name(node), int(items.rank[node])
    if message < 0:
        return f"{name} is not needed: no edge between stages of two ranks is like this; remove it"
    if rank != mine[message]:
        return f"{name} belongs on rank {mine[message]}; move it there"
    first = int(where[message] - items.starts[rank])
    return f"{name} is there a second time, first at position {first}; remove one"


def _transfer(items: _Items, message: int, side: int) -> Transfer:
    stages, count = items.sched.num_stages, items.sched.num_microbatches
    rest, mb = divmod(message, count)
    direction, stage = divmod(rest, stages)
    send = Transfer(stage, _KINDS[2 * direction], mb)
    return send.other if side else send


def _absent(items: _Items, route: Routes, message: int, side: int, other: int) -> Problem:
    name = _transfer(items, message, side)
    action = int((route.producer, route.consumer)[side][message])
    node = int(items.nodes[action])
    place = "behind" if side == 0 else "before"
    partner = f"{_transfer(items, message, 1 - side)} of rank {(route.source, route.destination)[1 - side][message]}"
    why = f"{partner} would wait for ever" if other >= 0 else "its other side is missing, too"
    return items.problem(node, f"{name} is missing ({why}); put it {place} {items.name(node)}")


def _in_place(items: _Items, route: Routes, sent: Ints, received: Ints) -> Iterator[Problem]:
    m = np.flatnonzero(route.source >= 0)
    producer, consumer = items.nodes[route.producer[m]], items.nodes[route.consumer[m]]
    for i in np.flatnonzero(sent[m] < producer).tolist():
        node, made = int(sent[m[i]]), items.name(int(producer[i]))
        yield items.problem(
            node, f"{items.name(node)} comes before {made}, which makes what it sends; put it behind {made}"
        )
    for i in np.flatnonzero(received[m] > consumer).tolist():
        node, use = int(received[m[i]]), items.name(int(consumer[i]))
        yield items.problem(
            node, f"{items.name(node)} comes after {use}, which uses what it receives; put it before {use}"
        )


def _one_order(items: _Items, route: Routes, sent: Ints, received: Ints) -> Iterator[Problem]:
    """Yield where one rank receives in another order than the other sends: messages of two ranks are first in, first out."""
    m = np.flatnonzero(route.source >= 0)
    m = m[np.lexsort((sent[m], route.destination[m], route.source[m]))]
    same = (route.source[m][1:] == route.source[m][:-1]) & (route.destination[m][1:] == route.destination[m][:-1])
    for i in np.flatnonzero(same & (np.diff(received[m]) < 0)).tolist():
        early, late = int(m[i]), int(m[i + 1])
        first, second = items.name(int(received[early])), items.name(int(received[late]))
        yield items.problem(
            int(received[late]),
            f"{second} comes before {first}, but rank {route.source[early]} sends {items.name(int(sent[early]))} before "
            f"{items.name(int(sent[late]))}; receive in the order of the sends",
        )


def _lanes(items: _Items, route: Routes, sent: Ints, received: Ints, sends: str) -> Lanes:
    """Return the ranks as lanes, transfers included."""
    total, nodes = len(items.kind), items.nodes
    to_node = np.append(nodes, total)
    first, second = (np.full(total, total, np.int64) for _ in range(2))
    a, b = needs(items.sched)
    first[nodes], second[nodes] = to_node[a], to_node[b]
    extra: dict[int, tuple[int, ...]] = {}
    for i in nodes[c.paired(items.sched.codes)].tolist():
        extra[i] = (int(first[i + 1]), int(second[i + 1]))
        first[i + 1] = second[i + 1] = total
    m = np.flatnonzero(route.source >= 0)
    out, back = sent[m], received[m]
    partner: dict[int, int] = {}
    if sends == "buffered":
        first[back] = out
    else:  # either side is done when the other side's rank has come to it
        head = np.isin(np.arange(total + 1), items.starts)
        first[back] = np.where(head[out], total, out - 1)
        first[out] = np.where(head[back], total, back - 1)
        partner = dict(zip(out.tolist(), back.tolist(), strict=True)) | dict(
            zip(back.tolist(), out.tolist(), strict=True)
        )
    return Lanes(items.starts.tolist(), first.tolist(), second.tolist(), extra, partner)
