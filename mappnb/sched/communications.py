"""Sends and receives, put into an order of actions."""

from __future__ import annotations

import copy

from mappnb.sched import codes as c
from mappnb.sched.action import Action, Transfer, TransferKind
from mappnb.sched.deadlock import Lanes, compute_lanes
from mappnb.sched.schedule import Schedule
from mappnb.sched.transfers import Routes, routes
from mappnb.sched.validate import validate
from mappnb.terms import Kind

__all__ = ["add_communications"]


def add_communications(sched: Schedule) -> Schedule:
    """Return the schedule with its sends and receives in ``communications``.

    Parameters
    ----------
    sched : Schedule
        Its order of actions is kept; communications that it has already are replaced.

    Returns
    -------
    Schedule
        Each send follows what it sends at once; each receive stands as early as the other rank can have sent, in the order in which
        that rank sends, so that both sides of every pair of ranks agree (sends without tags are first in, first out). There is no
        transfer between stages of one rank.

    Raises
    ------
    ScheduleError
        If the order of actions cannot run.

    Notes
    -----
    The same orders as ``_add_send_recv`` of ``torch.distributed.pipelining`` (2.13) makes of orders without bubbles: all ranks go on
    by one action in turn, where they can. Both sides of a message are written down at once, so that the orders are right for sends that
    are buffered or started without waiting and for sends that wait for their receive.

    The activation that a disaggregated forward rank ships to the backward rank of its stage (``placement.backward``) has no letter in
    torch's format and is not in ``communications``: it follows from the forward and the backward of a stage being on two ranks.
    """
    out = copy.copy(sched)
    out.communications = None
    validate(out)
    orders: list[list[Action | Transfer]] = [[] for _ in range(sched.num_ranks)]
    turn = _Turns(out, compute_lanes(out), routes(out), orders)
    active = [r for r in range(sched.num_ranks) if turn.at[r] < turn.ends[r]]
    while active:
        for rank in active:
            turn.advance(rank)
        active = [r for r in active if turn.at[r] < turn.ends[r]]
    out.communications = tuple(tuple(o) for o in orders)
    return out


class _Turns:
    """Ranks that go on by one action in turn, and write down what they run, send and receive."""

    def __init__(self, sched: Schedule, lanes: Lanes, route: Routes, orders: list[list[Action | Transfer]]) -> None:
        self.at, self.ends = sched.offsets[:-1].tolist(), sched.offsets[1:].tolist()
        self.lanes, self.orders = lanes, orders
        self.actions = c.decode(sched.codes)
        self.paired = c.paired(sched.codes).tolist()
        self.done = bytearray(len(sched)) + b"\1"
        used = route.source >= 0
        self.destination = dict(zip(route.producer[used].tolist(), route.destination[used].tolist(), strict=True))

    def advance(self, rank: int) -> None:
        """Run the next action (or pair) of a rank, if what it needs is there."""
        i, lanes, done = self.at[rank], self.lanes, self.done
        if not (done[lanes.first[i]] and done[lanes.second[i]]):
            return
        if i in lanes.extra and not all(done[n] for n in lanes.extra[i]):
            return
        self.at[rank] = last = i + (2 if self.paired[i] else 1)
        self.orders[rank] += self.actions[i:last]
        for j in range(i, last):
            done[j] = 1
            if j in self.destination:
                send, receive = _message(self.actions[j])
                self.orders[rank].append(send)
                self.orders[self.destination[j]].append(receive)


def _message(action: Action) -> tuple[Transfer, Transfer]:
    s, mb = action.stage, action.microbatch
    if action.kind is Kind.FORWARD:
        return Transfer(s, TransferKind.SEND_F, mb), Transfer(s + 1, TransferKind.RECV_F, mb)
    return Transfer(s, TransferKind.SEND_B, mb), Transfer(s - 1, TransferKind.RECV_B, mb)
