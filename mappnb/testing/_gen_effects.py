"""What each fault does to the durations of a step, who is at fault, and whether it fits the run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from mappnb.errors import CostError, LayoutError
from mappnb.testing import _gen_faults as f
from mappnb.testing._gen_graph import Members, Step
from mappnb.testing._gen_program import AXES, What

__all__ = ["Work", "active", "apply", "check", "document_lengths", "subjects"]

Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]


@dataclass(eq=False)
class Work:
    """The durations and delays of the operations of one step, s, and the gaps that are recorded: (operation, s)."""

    step: Step
    number: int
    seed: int
    duration: Floats
    delay: Floats
    gaps: list[tuple[int, float]]

    def rng(self, index: int) -> np.random.Generator:
        """Return the generator of fault ``index`` in this step: the same whichever other faults there are."""
        return np.random.default_rng([self.seed, self.number, 1000 + index])


def active(fault: f.Fault, index: int, number: int, seed: int) -> bool:
    """Return whether a fault happens in a step, the draw of an intermittent one included."""
    if not fault.hits(number):
        return False
    if isinstance(fault, f.IntermittentRank):
        return bool(np.random.default_rng([seed, number, 1000 + index]).random() < fault.probability)
    return not isinstance(fault, f.KilledRank) or number == fault.first_step


def apply(fault: f.Fault, index: int, work: Work) -> None:
    """Change the work of a step as a fault does."""
    change = _EFFECTS.get(type(fault))
    if change is not None and active(fault, index, work.number, work.seed):
        change(fault, work, index)


def _scale_compute(work: Work, where: Mask, factor: float | Floats) -> None:
    mine = where & (work.step.what == What.COMPUTE)
    work.duration[mine] *= factor if isinstance(factor, float) else factor[mine]


def _slow_rank(fault: Any, work: Work, _: int) -> None:
    _scale_compute(work, work.step.rank == fault.rank, float(fault.factor))


def _slow_host(fault: f.SlowHost, work: Work, _: int) -> None:
    _scale_compute(work, work.step.members.host[work.step.rank] == fault.host, float(fault.factor))


def _slow_stage(fault: f.SlowStage, work: Work, _: int) -> None:
    _scale_compute(work, work.step.stage == fault.stage, float(fault.factor))


def _slow_layer(fault: f.SlowLayer, work: Work, _: int) -> None:
    step = work.step
    mine = step.rank == fault.rank
    if step.plan.detail == "layers":
        _scale_compute(work, mine & (step.layer == fault.layer), float(fault.factor))
        return
    stage = _stage_of(fault.layer, step)
    share = 1.0 / len(step.plan.layers[stage])
    _scale_compute(work, mine & (step.stage == stage), 1.0 + share * (fault.factor - 1.0))


def _stage_of(layer: int, step: Step) -> int:
    """Return the stage that holds a layer; -1 if none does."""
    return next((s for s, layers in enumerate(step.plan.layers) if layer in layers), -1)


def _slow_link(fault: f.SlowLink, work: Work, _: int) -> None:
    mine = (work.step.rank == fault.source) & (work.step.destination == fault.destination)
    work.duration[mine] = work.duration[mine] * fault.factor + fault.extra_s


def _slow_nic(fault: f.SlowNic, work: Work, _: int) -> None:
    step, host = work.step, work.step.members.host
    source, target = host[step.rank], host[np.maximum(step.destination, 0)]
    mine = (step.destination >= 0) & (source != target) & ((source == fault.host) | (target == fault.host))
    for i, name in enumerate(AXES):
        slow = step.members.on_host(name, fault.host) & step.members.crossing(name)
        joins = np.flatnonzero(step.axis == i)
        mine[joins] = slow[step.members.group_of[name][step.rank[joins]]] if len(slow) else False
    work.duration[mine] *= fault.factor


def _data_skew(fault: f.DataSkew, work: Work, index: int) -> None:
    step = work.step
    lengths = document_lengths(fault, work, index)
    total, square = lengths.sum(axis=2), (lengths**2).sum(axis=2)
    mean = 1.0 if fault.packed else float(np.exp(fault.sigma**2 / 2))
    expected = _expected_square(fault)
    fixed = 1.0 - fault.linear - fault.quadratic
    factor = fixed + fault.linear * total / mean + fault.quadratic * square / expected
    dp = step.members.coords["dp"][step.rank]
    _scale_compute(work, step.microbatch >= 0, factor[dp, np.maximum(step.microbatch, 0)])


def document_lengths(fault: f.DataSkew, work: Work, index: int) -> Floats:
    """Return the lengths of the documents, dims (dp rank, microbatch, document), as shares of a full sequence."""
    sizes = (work.step.plan.layout.dp, work.step.plan.schedule.num_microbatches, fault.documents)
    lengths = np.exp(fault.sigma * work.rng(index).standard_normal(sizes)) / fault.documents
    return lengths / lengths.sum(axis=2, keepdims=True) if fault.packed else lengths


def _expected_square(fault: f.DataSkew) -> float:
    """Return the mean of the sum of squares: of independent lengths by its formula, of packed ones by a fixed large draw."""
    if not fault.packed:
        return float(np.exp(2 * fault.sigma**2)) / fault.documents
    draw = np.exp(fault.sigma * np.random.default_rng(0).standard_normal((4096, fault.documents)))
    share = draw / draw.sum(axis=1, keepdims=True)
    return float((share**2).sum(axis=1).mean())


def _host_gaps(fault: f.HostGaps, work: Work, index: int) -> None:
    step, ops = work.step, work.step.ops(fault.rank)
    wanted = step.what[ops] == (What.DATA if fault.gap == "dataloader" else What.COMPUTE)
    if fault.gap == "gc":  # between actions, never inside one: before the first operation of its action
        wanted &= np.concatenate([[True], _new_action(step, ops)])
    places = ops[wanted]
    if not len(places):
        return
    for op in np.sort(work.rng(index).choice(places, min(fault.per_step, len(places)), replace=False)).tolist():
        if fault.gap == "dataloader":
            work.duration[op] += fault.length_s
        else:
            work.delay[op] += fault.length_s
        if fault.gap == "gc":
            work.gaps.append((op, fault.length_s))


def _new_action(step: Step, ops: npt.NDArray[np.int64]) -> Mask:
    """Return where the operation before is no part of an action."""
    return np.asarray(~np.isin(step.what[ops[:-1]], (What.COMPUTE, What.JOIN)), np.bool_)


def _moe(fault: f.MoeImbalance, work: Work, _: int) -> None:
    step = work.step
    mine = (step.members.coords["ep"][step.rank] == fault.ep_rank) & (step.part == 1)
    _scale_compute(work, mine, float(fault.factor))


def _checkpoint(fault: f.CheckpointStall, work: Work, _: int) -> None:
    if (work.number + 1) % work.step.plan.checkpoint_every == 0:
        mine = (work.step.rank == fault.rank) & (work.step.what == What.CHECKPOINT)
        work.duration[mine] += fault.extra_s


def stopped_at(fault: f.KilledRank, step: Step) -> int:
    """Return the operation at which a rank stops."""
    ops = step.ops(fault.rank)
    ops = ops[step.what[ops] == (What.JOIN if isinstance(fault, f.Hang) else What.COMPUTE)]
    return int(ops[min(int(fault.at * len(ops)), len(ops) - 1)])


def _kill(fault: f.KilledRank, work: Work, _: int) -> None:
    work.duration[stopped_at(fault, work.step)] = np.inf


def _hang(fault: f.Hang, work: Work, _: int) -> None:
    work.delay[stopped_at(fault, work.step)] = np.inf


_EFFECTS: Mapping[type, Callable[[Any, Work, int], None]] = {
    f.SlowRank: _slow_rank,
    f.IntermittentRank: _slow_rank,
    f.SlowHost: _slow_host,
    f.SlowLayer: _slow_layer,
    f.SlowStage: _slow_stage,
    f.SlowLink: _slow_link,
    f.SlowNic: _slow_nic,
    f.DataSkew: _data_skew,
    f.HostGaps: _host_gaps,
    f.MoeImbalance: _moe,
    f.CheckpointStall: _checkpoint,
    f.KilledRank: _kill,
    f.Hang: _hang,
}


def subjects(fault: f.Fault, members: Members, step: Step) -> tuple[str, list[str], list[int]]:
    """Return (kind of subject, subjects, global ranks at fault)."""
    if isinstance(fault, (f.SlowHost, f.SlowNic)):
        return "host", [f"host{fault.host}"], np.flatnonzero(members.host == fault.host).tolist()
    if isinstance(fault, f.SlowLink):
        return "link", [f"{fault.source}->{fault.destination}"], [fault.source, fault.destination]
    if isinstance(fault, f.SlowStage):
        ranks = np.unique(step.rank[(step.stage == fault.stage) & (step.what == What.COMPUTE)]).tolist()
        return "stage", [str(fault.stage)], ranks
    if isinstance(fault, f.MoeImbalance):
        ranks = np.flatnonzero(members.coords["ep"] == fault.ep_rank).tolist()
        return "rank", [str(r) for r in ranks], ranks
    rank = getattr(fault, "rank", None)
    return ("job", ["job"], []) if rank is None else ("rank", [str(rank)], [rank])


def check(fault: object, step: Step, num_steps: int) -> None:
    """Raise LayoutError or CostError unless a fault fits the run; the message names what would."""
    if not isinstance(fault, f.Fault) or type(fault) is f.Fault:
        raise CostError(f"faults: {fault!r} is no fault; use one of {', '.join(n for n in f.__all__ if n != 'Fault')}")
    name = type(fault).__name__
    if fault.first_step >= num_steps:
        raise CostError(f"{name}: first_step is {fault.first_step}; the run has steps 0 to {num_steps - 1}")
    for what, size in _sizes(step):
        if any(field.name == what for field in fields(fault)) and not 0 <= getattr(fault, what) < size:
            raise LayoutError(
                f"{name}: {what} is {getattr(fault, what)}; the layout {step.plan.layout} has {what.replace('_', ' ')}s "
                f"0 to {size - 1}: choose one of these"
            )
    for problem in _unfit(fault, step):
        raise CostError(f"{name}: {problem}")


def _sizes(step: Step) -> Iterator[tuple[str, int]]:
    world = step.plan.layout.world_size
    yield from (("rank", world), ("source", world), ("destination", world))
    yield from (("host", int(step.members.host.max()) + 1), ("stage", step.plan.schedule.num_stages))
    yield "ep_rank", step.plan.layout.ep


def _unfit(fault: f.Fault, step: Step) -> Iterator[str]:
    if isinstance(fault, f.SlowLink):
        mine = (step.rank == fault.source) & (step.destination == fault.destination)
        if not mine.any():
            peers = np.unique(step.destination[(step.rank == fault.source) & (step.destination >= 0)]).tolist()
            yield f"rank {fault.source} sends nothing to rank {fault.destination}; it sends to {peers or 'nobody'}: choose one of these"
    if isinstance(fault, f.SlowLayer):
        stages = np.unique(step.stage[(step.rank == fault.rank) & (step.what == What.COMPUTE)]).tolist()
        if _stage_of(fault.layer, step) not in stages:
            layers = [x for s in stages for x in step.plan.layers[s]]
            yield f"rank {fault.rank} has no layer {fault.layer}; it has layers {layers[:20]}: choose one of these"
    if isinstance(fault, f.MoeImbalance) and step.plan.layout.ep == 1:
        yield "the layout has no expert parallelism; use a Layout(ep=...) above 1"
    if isinstance(fault, f.CheckpointStall) and not step.plan.checkpoint_every:
        yield "the run saves no checkpoint; give checkpoint_every="
    if isinstance(fault, f.HostGaps) and fault.gap == "dataloader":
        loaders = np.unique(step.rank[step.what == What.DATA]).tolist()
        if fault.rank not in loaders:
            yield f"rank {fault.rank} loads no data; ranks that do: {loaders[:20]} (and give data_s= above 0)"
    if isinstance(fault, f.Hang) and step.plan.layout.world_size == 1:
        yield "a single rank has no collective to hang in; use a larger layout"
