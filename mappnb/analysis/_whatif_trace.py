"""The table of a StragglerAnalysis trace: operations × (step, data-parallel rank), times in float32 s of their step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import xarray as xr

from mappnb.datasets import layout_of
from mappnb.errors import MappnbError

__all__ = ["COMMUNICATION", "OPTYPES", "Trace", "is_trace", "read_trace"]

Array = np.ndarray[Any, Any]

COMMUNICATION: Final = (
    "forward-send", "forward-recv", "backward-send", "backward-recv", "params-all-gather", "grads-reduce-scatter",
    "separate-grads-all-reduce", "embedding-grads-all-reduce", "optimizer-clip-main-grad",
)  # fmt: skip
"""Types of operation that wait for others."""
OPTYPES: Final = (
    *COMMUNICATION, "forward-compute", "backward-compute", "layernorm-grads-all-reduce", "optimizer", "gc"
)  # fmt: skip
"""All types of operation of the format."""


@dataclass(frozen=True, eq=False)
class Trace:
    """Operations × columns; a column is a data-parallel rank of a step, columns in the order of steps, then ranks.

    Attributes
    ----------
    steps : array, dims (step,)
        All steps that are kept.
    dp, pp, vpp : int
        Data-parallel ranks, pipeline ranks, chunks of each.
    type, seq, stage : array, dims (op,)
        Of each operation: place in ``OPTYPES``, number among those of its type on its worker, pipeline rank.
    start, end, duration : float32 array, dims (op, column)
        s.
    order_start, order_end : float32 array, dims (op,)
        Times in the step and data-parallel rank that the dependencies are read from.
    chunk, model_stage : array, dims (op,)
        There: chunk, and stage in model order of a computation.
    recorded : float32 array, dims (step,)
        Last end minus first start of each step, s.
    model_step : int
        That step.
    left_out : dict of str to str
        Steps that are not used, and why.
    """

    steps: Array
    dp: int
    pp: int
    vpp: int
    type: Array
    seq: Array
    stage: Array
    start: Array
    end: Array
    duration: Array
    order_start: Array
    order_end: Array
    chunk: Array
    model_stage: Array
    recorded: Array
    model_step: int
    left_out: dict[str, str]


def is_trace(events: xr.Dataset) -> bool:
    """Return whether events came from a StragglerAnalysis trace: every name is a type of that format."""
    names = set(np.unique(events.name.values.astype(str)).tolist()) if events.sizes["event"] else set()
    return {"forward-compute", "optimizer"} <= names <= set(OPTYPES)


def read_trace(events: xr.Dataset) -> Trace:
    """Return the table of the events of a trace.

    Parameters
    ----------
    events : Dataset, dims (event,)
        Of all workers and steps.

    Raises
    ------
    MappnbError
        If no step has the same operations on all data-parallel ranks.

    Notes
    -----
    The trace's own times, float32 s from the step's first start, come back by rounding: above 8 ms exactly, below within 0.5 ns.
    """
    layout = layout_of(events)
    rank, step = events["rank"].values.astype(np.int64), events["step"].values
    steps, number = np.unique(step, return_inverse=True)
    begin = np.full(len(steps), np.iinfo(np.int64).max)
    np.minimum.at(begin, number, events.start_ns.values)
    start_ns = events.start_ns.values - begin[number]
    start = (start_ns / 1e9).astype(np.float32)
    duration = (events.duration_ns.values / 1e9).astype(np.float32)
    names, kind = np.unique(events.name.values.astype(str), return_inverse=True)
    kind = np.array([OPTYPES.index(n) for n in names.tolist()])[kind]
    seq = _numbers(rank, number, kind, start_ns)
    stage, dp = rank // layout.dp, rank % layout.dp
    key = (kind * layout.pp + stage) * (int(seq.max()) + 1) + seq
    column = number * layout.dp + dp
    keys, model, good = _common(key, column, len(steps), layout.dp)
    row, kept = np.searchsorted(keys, key), good[number]
    at = (row[kept], (np.cumsum(good) - 1)[number[kept]] * layout.dp + dp[kept])
    table = {n: np.zeros((len(keys), int(good.sum()) * layout.dp), np.float32) for n in ("start", "end", "duration")}
    for name, values in (("start", start), ("end", start + duration), ("duration", duration)):
        table[name][at] = values[kept]
    mine = np.flatnonzero(column == model)
    mine = mine[np.argsort(row[mine])]
    width = int(seq.max()) + 1
    return Trace(
        steps=steps[good], dp=layout.dp, pp=layout.pp, vpp=layout.num_chunks,
        type=keys // width // layout.pp, seq=keys % width, stage=keys // width % layout.pp, **table,
        order_start=start[mine], order_end=(start + duration)[mine], chunk=events["chunk"].values[mine],
        model_stage=events.stage.values[mine], recorded=_windows(number, len(steps), start, duration)[good],
        model_step=int(steps[model // layout.dp]),
        left_out={str(s): "its operations are not those of the other steps" for s in steps[~good].tolist()},
    )  # fmt: skip


def _windows(step: Array, num_steps: int, start: Array, duration: Array) -> Array:
    """Return last end less first start of each step, dims (step,), float32 s."""
    last, low = np.full(num_steps, -np.inf, np.float32), np.full(num_steps, np.inf, np.float32)
    np.maximum.at(last, step, start + duration)
    np.minimum.at(low, step, start)
    return np.asarray(last - low)


def _numbers(rank: Array, step: Array, kind: Array, start: Array) -> Array:
    """Return the number of each operation among those of its type on its worker in its step, in the order of start."""
    order = np.lexsort((start, kind, step, rank))
    r, s, k = rank[order], step[order], kind[order]
    new = np.ones(len(order), bool)
    new[1:] = (r[1:] != r[:-1]) | (s[1:] != s[:-1]) | (k[1:] != k[:-1])
    first = np.flatnonzero(new)
    out = np.empty(len(order), np.int64)
    out[order] = np.arange(len(order)) - np.repeat(first, np.diff(np.append(first, len(order))))
    return out


def _common(key: Array, column: Array, num_steps: int, dp: int) -> tuple[Array, int, Array]:
    """Return the operations that most columns have, the first column that has them on data-parallel rank 0, and the steps that do."""
    known = np.unique(key)
    code = np.random.default_rng(0).integers(1, 2**62, len(known))[np.searchsorted(known, key)]
    sums = np.zeros(num_steps * dp, np.int64)
    with np.errstate(over="ignore"):
        np.add.at(sums, column, code)
    values, counts = np.unique(sums[sums != 0], return_counts=True)
    common = values[np.argmax(counts)]
    if sums[0] in values[counts == counts.max()]:
        common = sums[0]
    same = (sums == common).reshape(num_steps, dp)
    good = same.all(axis=1)
    if not good.any():
        raise MappnbError(
            f"what_if: none of {num_steps} steps has the same operations on all {dp} data-parallel ranks; the trace is cut, or rows "
            "were skipped at the import (see the notes of mappnb.import_trace): import it again whole"
        )
    model = int(np.argmax(good)) * dp
    return np.unique(key[column == model]), model, good
