"""A StragglerAnalysis trace as a replay graph: the artifact's dependency model, transfers and launch delays."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import xarray as xr

from mappnb.analysis._whatif_model import Model, Words
from mappnb.analysis._whatif_rules import dependencies, meetings
from mappnb.analysis._whatif_trace import COMMUNICATION, OPTYPES, Trace, read_trace
from mappnb.replay import Graph

__all__ = ["model_of_trace"]

Array = np.ndarray[Any, Any]

NEGATIVE_S: Final = np.float32(-0.010)
"""Transfers and launch delays at or below this are clocks that do not agree, and count as 0, s (the artifact's tolerance)."""
_LABELS: Final = {
    "forward-send": "forward-pp-comm",
    "forward-recv": "forward-pp-comm",
    "backward-send": "backward-pp-comm",
    "backward-recv": "backward-pp-comm",
}
_MEDIAN: Final = (*COMMUNICATION, "layernorm-grads-all-reduce")
"""Types whose ``ideal="mean"`` is a median."""


def model_of_trace(
    events: xr.Dataset, *, folded: dict[str, int], order: dict[int, int], steps: Array | None = None
) -> Model:
    """Return the operations of a trace by the rules of the artifact.

    Parameters
    ----------
    events : Dataset, dims (event,)
        All events of the trace: dependencies are read from its smallest step, whichever are asked for.
    folded : dict of str to int
        Sizes of the job as its layout file states them: ``tp_size``, ``dsp_size``, ``world_size``; empty where not known.
    order : dict of int to int
        The file's own number of each rank.
    steps : array, optional
        Numbers of the steps to keep; all by default.

    Raises
    ------
    MappnbError
        If no step is whole.
    """
    trace = read_trace(events)
    parallel = trace.dp * folded.get("dsp_size", 1) > 1
    source, target = dependencies(trace, parallel=parallel)
    group, joined = meetings(trace, parallel=parallel)
    measured = _measured(trace, group, joined)
    delay = _delays(trace, source, target)
    keep = np.ones(len(trace.steps), bool) if steps is None else np.isin(trace.steps, steps)
    columns = np.flatnonzero(np.repeat(keep, trace.dp))
    graph = _graph(measured[:, columns], delay[:, columns], source, target, group, joined, trace.dp)
    gpus = folded.get("world_size", trace.dp * trace.pp * folded.get("tp_size", 1) * folded.get("dsp_size", 1))
    return _model(trace, graph, keep, gpus, order, told=bool(folded))


def _measured(trace: Trace, group: Array, joined: Array) -> Array:
    """Return what each operation took itself, dims (op, column), float32 s: of those that meet, after the last had begun."""
    out = trace.duration.copy()
    moves = np.isin(trace.type, [OPTYPES.index(n) for n in COMMUNICATION])
    grouped = np.flatnonzero(group >= 0)
    last = np.full((int(group.max(initial=-1)) + 1, trace.start.shape[1]), -np.inf, np.float32)
    np.maximum.at(last, group[grouped], trace.start[grouped])
    everywhere = np.zeros(len(last), bool)
    everywhere[group[grouped]] = joined[grouped]
    widest = last[everywhere].reshape(-1, len(trace.steps), trace.dp).max(axis=2, keepdims=True)
    last[everywhere] = np.broadcast_to(widest, (len(widest), len(trace.steps), trace.dp)).reshape(len(widest), -1)
    rows = np.flatnonzero(moves & (group >= 0))
    out[rows] = trace.end[rows] - last[group[rows]]
    out[rows] = np.where(out[rows] <= NEGATIVE_S, np.float32(0), out[rows])
    return out


def _delays(trace: Trace, source: Array, target: Array) -> Array:
    """Return from the end of what each operation waited for to its start, dims (op, column), float32 s."""
    ready = np.full(trace.start.shape, -np.inf, np.float32)
    np.maximum.at(ready, target, trace.end[source])
    ready[~np.isfinite(ready)] = 0
    out = trace.start - ready
    return np.asarray(np.where(out <= NEGATIVE_S, np.float32(0), out))


def _graph(measured: Array, delay: Array, source: Array, target: Array, group: Array, joined: Array, dp: int) -> Graph:
    """Return the graph of all columns: operation ``column * num_ops + op``."""
    ops, columns = measured.shape
    base = np.arange(columns)[:, None]
    groups = int(group.max(initial=-1)) + 1
    place = np.where(joined[None, :], base // dp * dp, base) * groups + group[None, :]
    where = np.where(group[None, :] >= 0, place, -1).ravel()
    used = np.unique(where[where >= 0])
    where[where >= 0] = np.searchsorted(used, where[where >= 0])
    return Graph.from_edges(
        measured.T.ravel().astype(np.float64), (base * ops + source).ravel(), (base * ops + target).ravel(), 0.0,
        stream=np.full(ops * columns, -1, np.int32), group=where.astype(np.int32),
        delay_s=np.ascontiguousarray(delay.T.ravel(), np.float64),
    )  # fmt: skip


def _model(trace: Trace, graph: Graph, keep: Array, gpus: int, order: dict[int, int], *, told: bool) -> Model:
    kept, ops = int(keep.sum()), len(trace.type)
    step = np.repeat(np.arange(kept), trace.dp * ops)
    dp = np.tile(np.repeat(np.arange(trace.dp), ops), kept)
    types = np.tile(trace.type, kept * trace.dp)
    stage = np.tile(trace.stage, kept * trace.dp)
    rank = stage * trace.dp + dp
    sender, receiver = _links(trace, types, stage, rank, np.tile(trace.seq, kept * trace.dp))
    present = [OPTYPES[k] for k in np.unique(trace.type).tolist()]
    labels = tuple(dict.fromkeys(_LABELS.get(n, n) for n in present))
    label = np.array([labels.index(_LABELS.get(n, n)) if n in present else -1 for n in OPTYPES])
    names = tuple(frozenset({n, _LABELS.get(n, n), *_words(n)}) for n in OPTYPES)
    attrs = {
        "model": "dependency model of arXiv:2505.05713, from data-parallel rank 0 of step " + str(trace.model_step),
        "steps_left_out": "; ".join(f"step {s}: {why}" for s, why in trace.left_out.items()),
        "gpus": f"{gpus} GPUs" + ("" if told else "; sizes folded into one worker by the trace are not known"),
    }
    return Model(
        source="straggler_analysis", graph=graph, steps=trace.steps[keep], step=step,
        recorded_s=trace.recorded[keep].astype(np.float64), final=types == OPTYPES.index("optimizer"),
        rank=rank, dp_rank=dp, stage=stage, sender=sender, receiver=receiver,
        words=Words(labels, label[types], names, types), kind=types,
        twin=step * ops + np.tile(np.arange(ops), kept * trace.dp),
        by_mean=~np.isin(types, [OPTYPES.index(n) for n in _MEDIAN]),
        single=np.isin(types, [OPTYPES.index(n) for n in COMMUNICATION]),
        num_gpus=gpus, order=order, attrs=attrs,
    )  # fmt: skip


def _words(name: str) -> set[str]:
    """Return the words of mappnb for a type."""
    out = {name.replace("-", "_")}
    for word in ("forward", "backward"):
        if name == f"{word}-compute":
            out |= {word, "compute"}
    for end, word in (
        ("all-gather", "all_gather"), ("reduce-scatter", "reduce_scatter"), ("all-reduce", "all_reduce"), ("grad", "all_reduce"),
    ):  # fmt: skip
        if name.endswith(end):
            out |= {word, "collective"}
    if name.endswith(("send", "recv")):
        out |= {"p2p", name.split("-")[1]}
    return out


def _links(trace: Trace, types: Array, stage: Array, rank: Array, seq: Array) -> tuple[Array, Array]:
    """Return the ranks that each send and receive goes between; -1 for other operations."""
    sender, receiver = np.full(len(types), -1), np.full(len(types), -1)
    for name, sends, shift in (
        ("forward-send", True, 1), ("forward-recv", False, -1), ("backward-send", True, -1), ("backward-recv", False, 1),
    ):  # fmt: skip
        mine = types == OPTYPES.index(name)
        other = (stage + shift) % trace.pp * trace.dp + rank % trace.dp
        sender[mine] = (rank if sends else other)[mine]
        receiver[mine] = (other if sends else rank)[mine]
    return sender, receiver
