"""The dependency rules of the what-if artifact (arXiv:2505.05713): which operation of a step waits for which, and who meets whom."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, Final

import numpy as np

from mappnb.analysis._whatif_trace import OPTYPES, Trace

__all__ = ["dependencies", "meetings"]

Array = np.ndarray[Any, Any]
Edge = tuple[int, int]

_SLACK_S: Final = 50e-6
"""How far a transfer may lie outside the computations that it serves, s (the artifact's tolerance)."""
_TOWARDS: Final = {"forward-send": 1, "forward-recv": -1, "backward-send": -1, "backward-recv": 1}
"""The peer's stage in model order, seen from the computation that is served."""


class _Stage:
    """Operations of a pipeline rank: lists in the order of start."""

    def __init__(self, trace: Trace, stage: int) -> None:
        self.trace, self.stage = trace, stage
        mine = np.flatnonzero(trace.stage == stage)
        names = [OPTYPES[k] for k in trace.type[mine].tolist()]
        order = sorted(
            range(len(mine)), key=lambda i: (trace.order_start[mine[i]], int(trace.seq[mine[i]]), names[i])
        )  # fmt: skip
        self.of: dict[str, list[int]] = {}
        for i in order:
            self.of.setdefault(names[i], []).append(int(mine[i]))
        self.compute = [int(mine[i]) for i in order if names[i] in ("forward-compute", "backward-compute")]

    def __getitem__(self, name: str) -> list[int]:
        return self.of.get(name, [])

    def by_number(self, name: str) -> list[int]:
        """Return operations of a type in the order of their number."""
        return sorted(self[name], key=lambda i: int(self.trace.seq[i]))

    def latest(self, ops: list[int]) -> int:
        """Return the operation that ends last."""
        return max(ops, key=lambda i: float(self.trace.order_end[i]))


def dependencies(trace: Trace, *, parallel: bool) -> tuple[Array, Array]:
    """Return the dependencies: the second of each pair waits for the first.

    Parameters
    ----------
    trace : Trace
        The operations.
    parallel : bool
        Whether there is data parallelism (context parallelism counts).

    Returns
    -------
    source, target : array, dims (edge,)
        Distinct pairs of operations.

    Notes
    -----
    Rules 1 to 6 of the artifact's dependency model, read off one data-parallel rank of one step.
    """
    separate = OPTYPES.index("separate-grads-all-reduce") in trace.type
    edges: dict[Edge, None] = {}
    for s in range(trace.pp):
        stage = _Stage(trace, s)
        edges.update(dict.fromkeys(_chains(stage)))
        for name in _TOWARDS:
            edges.update(dict.fromkeys(_served(stage, name)))
        edges.update(dict.fromkeys(_first_backward(stage)))
        if parallel:
            edges.update(dict.fromkeys(_parameters(stage)))
        edges.update(dict.fromkeys(_tail(stage, parallel=parallel, separate=separate)))
    pairs = np.array(sorted(edges), np.int64).reshape(-1, 2)
    return pairs[:, 0], pairs[:, 1]


def _chains(stage: _Stage) -> Iterator[Edge]:
    yield from pairwise(stage.compute)
    for name in _TOWARDS:
        yield from pairwise(stage[name])


def _matched(stage: _Stage, name: str) -> tuple[dict[int, int], list[int], list[int]]:
    """Return the number of the computation that each transfer serves, those computations, and the transfers that have a peer."""
    trace, direction = stage.trace, name.partition("-")[0]
    compute = stage.by_number(f"{direction}-compute")
    ops = stage[name]
    if compute:
        latest = max(float(trace.order_start[i]) for i in compute) + _SLACK_S
        earliest = min(float(trace.order_end[i]) for i in compute) - _SLACK_S
        if name.endswith("recv"):
            ops = [i for i in ops if float(trace.order_start[i]) <= latest]
        else:
            ops = [i for i in ops if float(trace.order_end[i]) >= earliest]
    ends = stage.stage in (0, trace.pp - 1)
    first = int(name.endswith("recv") and ends and len(ops) == len(compute) - 1)
    number = {op: first + k for k, op in enumerate(ops)}

    def has_peer(op: int) -> bool:
        k = number[op]
        if k >= len(compute):
            return True
        return 0 <= int(trace.model_stage[compute[k]]) + _TOWARDS[name] < trace.vpp * trace.pp

    return number, compute, [op for op in ops if has_peer(op)]


def _served(stage: _Stage, name: str) -> Iterator[Edge]:
    number, compute, _ = _matched(stage, name)
    for op, k in number.items():
        if name.endswith("send"):
            if k < len(compute):
                yield compute[k], op
            continue
        if k < len(compute):
            yield op, compute[k]
        if 1 <= k <= len(compute):
            yield compute[k - 1], op


def _first_backward(stage: _Stage) -> Iterator[Edge]:
    backward = set(stage["backward-compute"])
    at = next((i for i, op in enumerate(stage.compute) if op in backward), 0)
    if at >= 2:
        for name in ("backward-recv", "backward-send"):
            for op in stage.by_number(name)[:1]:
                yield stage.compute[at - 2], op


def _parameters(stage: _Stage) -> Iterator[Edge]:
    trace = stage.trace
    both = stage["params-all-gather"] + stage["grads-reduce-scatter"]
    names = {op: OPTYPES[int(trace.type[op])] for op in both}
    yield from pairwise(sorted(both, key=lambda i: (trace.order_start[i], int(trace.seq[i]), names[i])))
    gathers = {int(trace.chunk[op]): op for op in stage.by_number("params-all-gather")}  # the last of each chunk
    started: set[int] = set()
    for op in stage["forward-compute"]:
        chunk = int(trace.chunk[op])
        if chunk not in started and chunk in gathers:
            yield gathers[chunk], op
        started.add(chunk)


def _tail(stage: _Stage, *, parallel: bool, separate: bool) -> Iterator[Edge]:
    collections, scatters = stage["gc"], stage["grads-reduce-scatter"]
    if collections and stage.compute:
        yield stage.latest(stage.compute), collections[0]
    norms, embedding = stage["layernorm-grads-all-reduce"], []
    if stage.stage in (0, stage.trace.pp - 1):
        embedding = stage["embedding-grads-all-reduce"]
    rest = stage["optimizer-clip-main-grad"] + stage["optimizer"]
    if not parallel:
        yield from pairwise(collections + norms + embedding + rest)
    elif not separate:
        yield from pairwise(collections + norms + embedding + scatters + rest)
    else:
        after = norms + embedding + stage["separate-grads-all-reduce"] + rest
        yield from pairwise(collections + after)
        yield from pairwise(after)
        if scatters and after:
            yield scatters[-1], after[0]
        yield from _reductions(stage)


def _reductions(stage: _Stage) -> Iterator[Edge]:
    trace = stage.trace
    done: set[int] = set()
    for op in stage.by_number("grads-reduce-scatter"):
        chunk = int(trace.chunk[op])
        mine = [i for i in stage["backward-compute"] if int(trace.chunk[i]) == chunk]
        if mine and chunk not in done:
            yield stage.latest(mine), op
        done.add(chunk)


def meetings(trace: Trace, *, parallel: bool) -> tuple[Array, Array]:
    """Return the operations that meet.

    Parameters
    ----------
    trace : Trace
        The operations.
    parallel : bool
        Whether there is data parallelism.

    Returns
    -------
    group : array, dims (op,)
        Operations of one number go on when the last of them has begun; -1 for those that wait for nobody.
    joined : bool array, dims (op,)
        Whether the data-parallel ranks of the step meet in it, too.
    """
    group, joined = np.full(len(trace.type), -1, np.int64), np.zeros(len(trace.type), bool)
    stages = [_Stage(trace, s) for s in range(trace.pp)]
    for count, (ops, everywhere) in enumerate(_groups(trace, stages, parallel=parallel)):
        group[ops], joined[ops] = count, everywhere
    return group, joined


def _groups(trace: Trace, stages: list[_Stage], *, parallel: bool) -> Iterator[tuple[list[int], bool]]:
    for direction, towards in (("forward", 1), ("backward", -1)):
        real = {(s.stage, side): _matched(s, f"{direction}-{side}")[2] for s in stages for side in ("send", "recv")}
        met: set[int] = set()
        for s in stages:
            there = (s.stage + towards) % trace.pp
            for pair in zip(real[s.stage, "send"], real[there, "recv"], strict=False):
                met.update(pair)
                yield list(pair), False
        for s in stages:
            yield from (([op], False) for side in ("send", "recv") for op in s[f"{direction}-{side}"] if op not in met)
    for s in stages:
        for name in ("params-all-gather", "grads-reduce-scatter", "separate-grads-all-reduce"):
            yield from (([op], parallel) for op in s[name])
    for name, where, everywhere in (
        ("embedding-grads-all-reduce", sorted({0, trace.pp - 1}), False),
        ("optimizer-clip-main-grad", range(trace.pp), True),
    ):
        ops = [stages[s].by_number(name) for s in where]
        for k in range(max(map(len, ops), default=0)):
            yield [o[k] for o in ops if len(o) > k], everywhere
