"""The program of a pipeline rank in one step: its operations in order (slots), and the events that they leave (rows)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mappnb.layout import Layout
from mappnb.sched import codes as c
from mappnb.sched.costs import CostTables
from mappnb.sched.graph import Messages
from mappnb.sched.schedule import Schedule
from mappnb.terms import Category, Kind, Op, Phase
from mappnb.testing._gen_settings import Traffic

__all__ = ["AXES", "PP", "Plan", "Program", "Slot", "What", "programs"]

Ints = npt.NDArray[np.int64]
AXES: tuple[str, ...] = ("tp", "cp", "ep", "dp-cp", "embd", "world")
"""Groups that collectives run in; a row's axis counts in it."""
PP = len(AXES)
"""Axis of the pipeline groups, in which messages are numbered."""
ISSUE_S = 4e-6
_PHASES = {
    Kind.FORWARD: Phase.FORWARD,
    Kind.BACKWARD: Phase.BACKWARD,
    Kind.BACKWARD_INPUT: Phase.BACKWARD_INPUT,
    Kind.BACKWARD_WEIGHT: Phase.BACKWARD_WEIGHT,
}


class What(IntEnum):
    """What a slot does."""

    BEGIN = 0
    DATA = 1
    RECV = 2
    COMPUTE = 3
    JOIN = 4
    SEND = 5
    SENT = 6
    OPTIMIZER = 7
    CHECKPOINT = 8


class Slot(NamedTuple):
    """One operation of a rank. ``base_s`` is its mean time; that of a join is ``bytes`` times ``share`` over a bandwidth instead."""

    what: int
    base_s: float = 0.0
    stage: int = -1
    microbatch: int = -1
    part: int = 0
    axis: int = -1
    share: float = 0.0
    num_bytes: float = 0.0
    message: int = -1
    layer: int = -1


class Row(NamedTuple):
    """One event: from the start of slot ``first`` to the end of slot ``last``."""

    site: tuple[str, str, str, str, int, str]
    first: int
    last: int
    depth: int
    stage: int = -1
    chunk: int = -1
    microbatch: int = -1
    num_bytes: int = -1
    axis: int = -1
    seq: int = -1
    per_step: int = 0
    peer: int = -1


@dataclass
class Plan:
    """What all programs are made of.

    Attributes
    ----------
    schedule, tables, layout, messages, unit
        The schedule, its costs, the layout; messages and the first action of each action's pair (:mod:`mappnb.sched.graph`).
    layers : list of range
        Global layers of each stage.
    traffic : Traffic
        Sizes of collectives.
    detail : str
        ``"actions"`` or ``"layers"``.
    data_s, checkpoint_s : float
        Mean time of next_batch and of a checkpoint, s.
    checkpoint_every : int
        Steps between checkpoints; 0: none.
    """

    schedule: Schedule
    tables: CostTables
    layout: Layout
    messages: Messages
    unit: Ints
    layers: list[range]
    traffic: Traffic
    detail: str
    data_s: float
    checkpoint_s: float
    checkpoint_every: int

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Members of a group of each axis."""
        x = self.layout
        return {
            "tp": x.tp,
            "cp": x.cp,
            "ep": x.ep,
            "dp-cp": x.dp * x.cp,
            "embd": 2 if self.shares_embedding else 1,
            "world": x.world_size,
        }

    @property
    def shares_embedding(self) -> bool:
        """Whether the first and the last stage, on two ranks, sum the gradient of one embedding."""
        return self.traffic.embedding_bytes > 0 and self.ends[0] != self.ends[1]

    @property
    def ends(self) -> tuple[int, int]:
        """Pipeline ranks of the first and of the last stage."""
        where = self.schedule.placement.forward
        return where[0], where[-1]

    @cached_property
    def received(self) -> Ints:
        """Before which action each message is received: in the order of the sends, none later than it is needed."""
        at = self.unit[self.messages.consumer]
        for link in range(int(self.messages.link.max(initial=-1)) + 1):
            mine = np.flatnonzero(self.messages.link == link)
            at[mine] = np.minimum.accumulate(at[mine][::-1])[::-1]
        return np.asarray(at, np.int64)

    @cached_property
    def message_seq(self) -> tuple[Ints, Ints]:
        """Number of each message in its pair of ranks within a step, and how many the pair has."""
        link = self.messages.link
        total = np.bincount(link, minlength=1)
        order = np.argsort(link, kind="stable")
        first = np.concatenate([[0], np.cumsum(total)])[link[order]]
        seq = np.empty(len(link), np.int64)
        seq[order] = np.arange(len(link)) - first
        return seq, total[link] if len(link) else np.empty(0, np.int64)


@dataclass
class Program:
    """The slots and rows of one pipeline rank; ``send`` and ``recv`` map messages to slots."""

    pp_rank: int
    slots: list[Slot] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    send: dict[int, int] = field(default_factory=dict)
    recv: dict[int, int] = field(default_factory=dict)
    sent: dict[int, int] = field(default_factory=dict)
    chunks: dict[int, int] = field(default_factory=dict)

    def column(self, name: str) -> npt.NDArray[Any]:
        """Return one field of all slots as an array, dims (slot,)."""
        return np.array([getattr(s, name) for s in self.slots])

    def row_column(self, name: str) -> Ints:
        """Return one number of all rows as an array, dims (row,)."""
        return np.array([getattr(r, name) for r in self.rows], np.int64)


def programs(plan: Plan) -> list[Program]:
    """Return the program of each pipeline rank."""
    return [_Builder(plan, p).build() for p in range(plan.schedule.num_ranks)]


class _Builder:
    def __init__(self, plan: Plan, pp_rank: int) -> None:
        self.plan, self.pp_rank = plan, pp_rank
        self.out = Program(pp_rank)
        self._seq = dict.fromkeys(range(len(AXES)), 0)

    def build(self) -> Program:
        sched, out = self.plan.schedule, self.out
        self._slot(Slot(What.BEGIN))
        actions = range(int(sched.offsets[self.pp_rank]), int(sched.offsets[self.pp_rank + 1]))
        codes = sched.codes[actions.start : actions.stop]
        for i, stage in enumerate(sorted(set(c.stage(codes).tolist()))):
            out.chunks[stage] = i
        self._messages_of(actions)
        units: dict[int, list[int]] = {}
        for a in actions:
            units.setdefault(int(self.plan.unit[a]), []).append(a)
        for first, unit in units.items():
            self._unit(first, unit)
        self._tail(sorted(set(c.stage(codes[c.kind(codes) != 0]).tolist())))
        last = len(out.slots) - 1
        out.rows.insert(0, Row(("mark", Op.ITERATION, "", Phase.NONE, -1, ""), 0, last, 0))
        out.rows = [r._replace(per_step=self._seq[r.axis]) if 0 <= r.axis < PP else r for r in out.rows]
        return out

    def _messages_of(self, actions: range) -> None:
        m, received = self.plan.messages, self.plan.received
        self.incoming: dict[int, list[int]] = {}
        self.outgoing: dict[int, list[int]] = {}
        for i in np.flatnonzero(m.destination == self.pp_rank).tolist():
            self.incoming.setdefault(int(received[i]), []).append(i)
        for i in np.flatnonzero(m.source == self.pp_rank).tolist():
            self.outgoing.setdefault(int(m.producer[i]), []).append(i)

    def _slot(self, slot: Slot) -> int:
        self.out.slots.append(slot)
        return len(self.out.slots) - 1

    def _row(self, category: str, op: str, first: int, last: int, depth: int, **more: Any) -> None:
        phase, layer, name = more.pop("phase", Phase.NONE), more.pop("layer", -1), more.pop("name", "")
        dtype = "bfloat16" if category in (Category.COLLECTIVE, Category.P2P) else ""
        self.out.rows.append(
            Row((str(category), str(op), name, str(phase), layer, dtype), first, last, depth, **more)
        )  # fmt: skip

    # ------------------------------------------------------------------------------------------------ the pipeline
    def _unit(self, first: int, unit: list[int]) -> None:
        for i in self.incoming.get(first, ()):
            self._transfer(i, receive=True)
        ratio = self.plan.tables.overlap_ratio if len(unit) > 1 else 1.0
        for a in unit:
            self._action(a, ratio)
        for a in unit:
            for i in self.outgoing.get(a, ()):
                self._transfer(i, receive=False)

    def _transfer(self, message: int, *, receive: bool) -> None:
        plan, m, out = self.plan, self.plan.messages, self.out
        blocking = not receive and plan.tables.send != "async"
        first = last = self._slot(
            Slot(What.RECV, message=message) if receive else Slot(What.SEND, 0.0 if blocking else ISSUE_S)
        )
        (out.recv if receive else out.send)[message] = first
        if blocking:
            last = out.sent[message] = self._slot(Slot(What.SENT))
        seq, per_step = plan.message_seq
        size = plan.tables.ship_bytes if m.ships[message] else plan.tables.message_bytes
        action = plan.schedule.codes[(m.consumer if receive else m.producer)[message]]
        stage = int(c.stage(action))
        self._row(
            Category.P2P, Op.RECV if receive else Op.SEND, first, last, 1,
            stage=stage, chunk=out.chunks[stage], microbatch=int(c.microbatch(action)), num_bytes=int(size), axis=PP,
            seq=int(seq[message]), per_step=int(per_step[message]),
            peer=int((m.source if receive else m.destination)[message]),
        )  # fmt: skip

    def _action(self, action: int, ratio: float) -> None:
        plan = self.plan
        code = plan.schedule.codes[action]
        number, stage, mb = int(c.kind(code)), int(c.stage(code)), int(c.microbatch(code))
        kind = c.KINDS[number]
        place = {"stage": stage, "chunk": self.out.chunks[stage], "microbatch": mb, "phase": _PHASES[kind]}
        self._load(kind, stage, place)
        duration = plan.tables.duration_s[number, stage, mb if plan.tables.duration_s.shape[2] > 1 else 0] * ratio
        layers = list(plan.layers[stage])[:: 1 if kind is Kind.FORWARD else -1]
        first, at = len(self.out.slots), len(self.out.rows)
        if plan.detail == "actions":
            self._layer(duration, -1, kind, 2, place, plan.traffic.layer_bytes * len(layers))
        for layer in layers if plan.detail == "layers" else ():
            begin, row = len(self.out.slots), len(self.out.rows)
            self._layer(duration / len(layers), layer, kind, 3, place, plan.traffic.layer_bytes)
            self._row(Category.COMPUTE, Op.LAYER, begin, len(self.out.slots) - 1, 2, layer=layer, name="layer", **place)
            self.out.rows.insert(row, self.out.rows.pop())
        op = Op.FORWARD_STEP if kind is Kind.FORWARD else Op.BACKWARD_STEP
        self._row(Category.COMPUTE, op, first, len(self.out.slots) - 1, 1, **place)
        self.out.rows.insert(at, self.out.rows.pop())

    def _load(self, kind: Kind, stage: int, place: dict[str, Any]) -> None:
        """Add the reading of a microbatch before a forward of the first or last stage."""
        if kind is Kind.FORWARD and stage in (0, self.plan.schedule.num_stages - 1) and self.plan.data_s > 0:
            slot = self._slot(Slot(What.DATA, self.plan.data_s, stage, place["microbatch"]))
            self._row(Category.DATA, Op.NEXT_BATCH, slot, slot, 1, **{**place, "phase": Phase.NONE})

    def _layer(self, compute_s: float, layer: int, kind: Kind, depth: int, place: dict[str, Any], size: float) -> None:
        """One layer, or all of an action as one (-1): compute in two parts, with the experts' dispatch and combine around the second."""
        plan = self.plan
        talks = kind is not Kind.BACKWARD_WEIGHT
        sequence = plan.traffic.sequence_parallel and plan.detail == "layers"
        experts = talks and plan.layout.ep > 1

        def piece(part: int, share: float) -> None:
            self._slot(Slot(What.COMPUTE, compute_s * share, place["stage"], place["microbatch"], part, layer=layer))

        join: Callable[[str, str], None] = lambda axis, op: self._join(  # noqa: E731 (short for one call)
            axis, op, size, depth, place if talks else None
        )
        if sequence:
            join("tp", Op.ALL_GATHER)
        join("cp", Op.ALL_GATHER if kind is Kind.FORWARD else Op.REDUCE_SCATTER)
        piece(0, 0.5 if plan.layout.ep > 1 else 1.0)
        if plan.layout.ep > 1:
            if experts:
                join("ep", Op.ALL_TO_ALL)
            piece(1, 0.5)
            if experts:
                join("ep", Op.ALL_TO_ALL)
        join("tp", Op.REDUCE_SCATTER if sequence else Op.ALL_REDUCE)

    def _join(
        self, axis: str, op: str, size: float, depth: int, place: dict[str, Any] | None, base_s: float = 0.0
    ) -> None:
        n = self.plan.sizes[axis]
        if n == 1 or place is None:
            return
        number = AXES.index(axis)
        share = (2.0 if op == Op.ALL_REDUCE else 1.0) * (n - 1) / n
        slot = self._slot(
            Slot(
                What.JOIN, base_s, place.get("stage", -1), place.get("microbatch", -1),
                axis=number, share=0.0 if base_s else share, num_bytes=size,
            )
        )  # fmt: skip
        seq, self._seq[number] = self._seq[number], self._seq[number] + 1
        self._row(Category.COLLECTIVE, op, slot, slot, depth, num_bytes=int(size), axis=number, seq=seq, **place)

    # ------------------------------------------------------------------------------------------------ after the pipeline
    def _tail(self, stages: list[int]) -> None:
        plan = self.plan
        size = plan.traffic.gradient_bytes / plan.schedule.num_chunks
        places = [{"stage": s, "chunk": self.out.chunks[s]} for s in stages]
        for place in places:
            self._join("dp-cp", Op.REDUCE_SCATTER, size, 1, place, float(plan.tables.reduce_s[place["stage"]]))
        if self.pp_rank in plan.ends:
            self._join("embd", Op.ALL_REDUCE, plan.traffic.embedding_bytes, 1, {})
        self._join("world", Op.ALL_REDUCE, 4, 1, {})
        slot = self._slot(Slot(What.OPTIMIZER, plan.tables.optimizer_s))
        self._row(Category.OPTIMIZER, Op.OPTIMIZER_STEP, slot, slot, 1)
        for place in places:
            self._join("dp-cp", Op.ALL_GATHER, size, 1, place)
        if plan.checkpoint_every:
            slot = self._slot(Slot(What.CHECKPOINT, plan.checkpoint_s))
            self._row(Category.CHECKPOINT, Op.CHECKPOINT_SAVE, slot, slot, 1)
