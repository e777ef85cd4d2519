"""A simulated step as rows of events: what a recorded run would have written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import xarray as xr

from mappnb.clockmodel import ClockModel
from mappnb.datasets import dataset_attrs
from mappnb.layout import Layout
from mappnb.replay import Replayed
from mappnb.sched import codes as c
from mappnb.sched.costs import CostTables, Floats
from mappnb.sched.graph import Ids, StepGraph
from mappnb.sched.schedule import Schedule
from mappnb.schema import EVENTS, empty
from mappnb.terms import EVENT, Category, Flag, Op, Phase

__all__ = ["PIPELINE_GROUP", "chunks", "columns", "dataset", "layout_of_schedule"]

Array = np.ndarray[Any, Any]
Columns = dict[str, Array]
PIPELINE_GROUP = 1
"""Group id of the pipeline's messages in simulated events."""
_PHASES = np.array([Phase.FORWARD, Phase.BACKWARD, Phase.BACKWARD_INPUT, Phase.BACKWARD_WEIGHT], object)
_EXTRA = {"start_s": "s", "end_s": "s", "slack_s": "s", "critical": "1"}


def columns(built: StepGraph, costs: CostTables, done: Replayed, slack: Floats, critical: Array) -> Columns:
    """Return the columns of one step's events: actions, sends, receives, reductions, optimizers.

    Parameters
    ----------
    built : StepGraph
        The graph of the step.
    costs : CostTables
        Its costs.
    done : Replayed
        Its replay.
    slack : array, dims (op,)
        How much later each operation may end, s.
    critical : array of bool, dims (op,)
        Whether it is on the critical path.
    """
    parts = [_actions(built, done, slack, critical)]
    if len(built.messages.producer):
        parts += _messages(built, costs, done, slack, critical)
    parts += [_reductions(built, done, slack, critical), _optimizers(built, costs, done, slack, critical)]
    return {name: np.concatenate([p[name] for p in parts]) for name in parts[0]}


def _rows(count: int, start: Floats, end: Floats, slack: Array, critical: Array, **values: Any) -> Columns:
    out = empty(EVENTS, {EVENT: count})
    out.update(incarnation=np.zeros(count, np.int32), depth=np.zeros(count, np.int16), thread=np.zeros(count, np.int32))
    out["phase"] = np.full(count, Phase.NONE.value, object)
    for name, value in values.items():
        plain = str(value) if isinstance(value, str) else value  # a plain str, not an enum's
        out[name] = np.broadcast_to(np.asarray(plain, EVENTS[name].numpy_dtype), (count,)).copy()
    return {**out, "start_s": start, "end_s": end, "slack_s": slack, "critical": critical}


def _actions(built: StepGraph, done: Replayed, slack: Floats, critical: Array) -> Columns:
    sched = built.schedule
    start, end = built.action_times(done)
    kind, stage, mb = c.kind(sched.codes), c.stage(sched.codes), c.microbatch(sched.codes)
    words = zip(stage.tolist(), kind.tolist(), mb.tolist(), strict=True)
    return _rows(
        len(sched),
        start,
        end,
        slack[built.unit],
        critical[built.unit],
        rank=np.repeat(np.arange(sched.num_ranks), np.diff(sched.offsets)),
        category=Category.COMPUTE,
        op=np.where(kind == 0, Op.FORWARD_STEP.value, Op.BACKWARD_STEP.value),
        name=np.array([f"{s}{'FBIW'[k]}{m}" for s, k, m in words], object),
        phase=np.array([p.value for p in _PHASES], object)[kind],
        stage=stage,
        chunk=chunks(sched, stage, mb, backward=kind != 0),
        microbatch=mb,
    )


def _messages(built: StepGraph, costs: CostTables, done: Replayed, slack: Floats, critical: Array) -> list[Columns]:
    """Return the rows of sends and receives. A receive blocks its rank where the rank waits for it, else it runs beside the work."""
    sched, msg = built.schedule, built.messages
    k = len(msg.producer)
    op = built.first_message + np.arange(k)
    left, gone = done.start_s[op], done.end_s[op]
    arrival = gone + msg.latency_s
    stage, mb = c.stage(sched.codes), c.microbatch(sched.codes)
    end = done.end_s[built.unit]
    free = end.copy()  # when the rank goes on after each action
    blocking = costs.send != "async"
    if blocking:
        held = arrival if costs.send == "sync" else gone
        np.maximum.at(free, msg.producer, held)
    unit = built.unit[msg.consumer]
    before = np.where(np.isin(unit, sched.offsets[:-1]), 0.0, free[np.maximum(unit - 1, 0)])
    waited = (arrival > before) & (arrival == done.start_s[unit])
    waited[np.flatnonzero(waited)[_again(unit[waited])]] = False  # one wait at a time
    seq = _count_up(msg.link)
    size = np.where(msg.ships, costs.ship_bytes, costs.message_bytes).astype(np.int64)
    common = {"category": Category.P2P, "group": PIPELINE_GROUP, "seq": seq, "bytes": size}
    send = _rows(
        k,
        end[msg.producer] if blocking else left,
        (arrival if costs.send == "sync" else gone),
        slack[op],
        critical[op],
        rank=msg.source,
        op=Op.SEND,
        peer=msg.destination,
        stage=stage[msg.producer],
        microbatch=mb[msg.producer],
        flags=0 if blocking else int(Flag.ASYNC | Flag.OVERLAPPED),
        **common,
    )
    recv = _rows(
        k,
        np.where(waited, before, left),
        arrival,
        np.full(k, np.nan),
        np.zeros(k, bool),
        rank=msg.destination,
        op=Op.RECV,
        peer=msg.source,
        stage=stage[msg.consumer],
        microbatch=mb[msg.consumer],
        flags=np.where(waited, 0, int(Flag.ASYNC | Flag.OVERLAPPED)),
        **common,
    )
    return [send, recv]


def _again(values: Array) -> Array:
    """Return the positions of values that came before."""
    first = np.unique(values, return_index=True)[1]
    return np.setdiff1d(np.arange(len(values)), first)


def _count_up(key: Ids) -> Ids:
    """Return for each entry how many equal ones came before."""
    order = np.argsort(key, kind="stable")
    ordered = key[order]
    first = np.searchsorted(ordered, ordered, side="left")
    out = np.empty(len(key), np.int64)
    out[order] = np.arange(len(key)) - first
    return out


def _reductions(built: StepGraph, done: Replayed, slack: Floats, critical: Array) -> Columns:
    red = built.reductions
    op = built.first_reduction + np.arange(len(red.after))
    return _rows(
        len(op),
        done.start_s[op],
        done.end_s[op],
        slack[op],
        critical[op],
        rank=red.rank,
        category=Category.COLLECTIVE,
        op=Op.REDUCE_SCATTER,
        name="gradients",
        stage=red.stage,
        chunk=chunks(built.schedule, red.stage, np.zeros_like(red.stage), backward=np.ones(len(op), bool)),
        flags=int(Flag.ASYNC | Flag.OVERLAPPED),
    )


def _optimizers(built: StepGraph, costs: CostTables, done: Replayed, slack: Floats, critical: Array) -> Columns:
    ranks = built.schedule.num_ranks if costs.optimizer_s > 0 else 0
    op = built.first_optimizer + np.arange(ranks)
    return _rows(
        ranks,
        done.start_s[op],
        done.end_s[op],
        slack[op],
        critical[op],
        rank=np.arange(ranks),
        category=Category.OPTIMIZER,
        op=Op.OPTIMIZER_STEP,
    )


def chunks(sched: Schedule, stage: Array, microbatch: Array, *, backward: Array) -> Array:
    """Return the chunk of each stage on its rank, from 0 in model order; a mirrored copy counts on from the others."""
    table = sched.placement.table()
    count = np.zeros_like(table)
    for half, side in np.ndindex(table.shape[:2]):
        ranks = table[half, side]
        count[half, side] = [np.count_nonzero(ranks[:s] == ranks[s]) for s in range(len(ranks))]
    first = sched.placement.mirrored_from
    late = np.zeros(len(stage), np.int64) if first is None else (microbatch >= first).astype(np.int64)
    return np.asarray(count[late, backward.astype(np.int64), stage] + late * sched.num_chunks, np.int16)


def layout_of_schedule(sched: Schedule) -> Layout:
    """Return the layout of a job of one pipeline that runs the schedule."""
    v = sched.num_chunks
    wave = (
        v > 1 and sched.placement.forward[sched.num_ranks : 2 * sched.num_ranks] == tuple(range(sched.num_ranks))[::-1]
    )
    return Layout(pp=sched.num_ranks, num_chunks=v, stage_order="v" if wave else "interleaved")


def dataset(
    sched: Schedule, steps: Sequence[Columns], step_s: Sequence[float], others: Mapping[str, xr.Variable]
) -> xr.Dataset:
    """Return the events of simulated steps that follow one another, in order of start, dims (event,).

    ``others`` are added. They may have dims named as a variable of the events (``rank``, ``step``): xarray takes that variable as a
    coordinate along the events then.
    """
    begin = np.concatenate(([0.0], np.cumsum(step_s)[:-1])) if len(step_s) else np.zeros(0)
    data = {name: np.concatenate([s[name] for s in steps]) for name in steps[0]}
    number = np.repeat(np.arange(len(steps)), [len(s["rank"]) for s in steps])
    data["step"] = number.astype(np.int32)
    for name in ("start_s", "end_s"):
        data[name] = data[name] + begin[number]
    data["start_ns"] = np.rint(data["start_s"] * 1e9).astype(np.int64)
    data["raw_start_ns"] = data["start_ns"].copy()
    data["duration_ns"] = np.rint(data["end_s"] * 1e9).astype(np.int64) - data["start_ns"]
    order = np.argsort(data["start_ns"], kind="stable")
    variables = {
        name: xr.Variable((EVENT,), data[name][order], {"units": var.unit, "long_name": var.meaning}, fastpath=True)
        for name, var in EVENTS.items()
    }
    for name, unit in _EXTRA.items():
        variables[name] = xr.Variable((EVENT,), data[name][order], {"units": unit})
    groups = {
        PIPELINE_GROUP: {
            "ranks": list(range(sched.num_ranks)),
            "backend": "simulated",
            "desc": "pp",
            "name": "pp",
            "ordinal": 0,
        }
    }
    attrs = dataset_attrs(
        run_id="simulated", layout=layout_of_schedule(sched), groups=groups, clock=ClockModel("simulated", {}, {})
    )
    return xr.Dataset({**variables, **others}, attrs={**attrs, "schedule": repr(sched)})
