"""generate_run(): realistic runs of 1 to 10,000 ranks out of a simulated schedule, with the truth beside them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from mappnb.errors import CostError, LayoutError, ScheduleError, did_you_mean
from mappnb.layout import Layout
from mappnb.sched.costs import Costs
from mappnb.sched.graph import build
from mappnb.sched.registry import schedule as build_schedule
from mappnb.sched.schedule import Schedule
from mappnb.testing import _gen_faults as f
from mappnb.testing._gen_clocks import make_clocks
from mappnb.testing._gen_effects import active, check, stopped_at, subjects
from mappnb.testing._gen_graph import Members, Step, build_step
from mappnb.testing._gen_program import PP, Plan
from mappnb.testing._gen_samples import needs_telemetry
from mappnb.testing._gen_settings import Clocks, Noise, Traffic
from mappnb.testing._gen_times import Times, makespans, rank_factor, simulate
from mappnb.testing._gen_truth import FaultTruth, Truth
from mappnb.testing._gen_write import Output

__all__ = ["generate_run"]

DETAILS: tuple[str, ...] = ("actions", "layers")
BLOCK_OPS = 16_000_000
"""Operations kept in memory at most before they are written (16 bytes each)."""


def generate_run(
    run_dir: str | os.PathLike[str],
    *,
    layout: Layout,
    schedule: str | Schedule = "1f1b",
    num_microbatches: int = 8,
    num_steps: int = 3,
    costs: Costs | None = None,
    num_layers: int | None = None,
    noise: Noise | None = None,
    faults: Sequence[f.Fault] = (),
    clocks: Clocks | None = None,
    traffic: Traffic | None = None,
    seed: int = 0,
    ranks_per_host: int = 8,
    detail: str = "actions",
    data_s: float = 2e-4,
    checkpoint_every: int = 0,
    checkpoint_s: float = 0.2,
    seq_length: int = 4096,
    telemetry: bool | None = None,
    telemetry_every_s: float = 1.0,
    ended: bool = True,
    segment_rows: int = 65536,
) -> Truth:
    """Write a run as capture would have, of a job whose every time and fault is known, and return that truth.

    Parameters
    ----------
    run_dir : path
        A new or empty folder.
    layout : Layout
        Parallel layout: its pipeline ranks and chunks must be those of the schedule.
    schedule : str or Schedule
        A registered name, built for the layout, or a schedule.
    num_microbatches, num_steps : int
        Microbatches of a step (of a schedule by name); steps.
    costs : Costs, optional
        Compute, messages, gradient reduction and optimizer, in s; 20 ms a forward, twice that a backward by default.
    num_layers : int, optional
        Layers of the whole model, dealt to the stages; two a stage by default.
    noise : Noise, optional
        How durations vary where nothing is wrong; ``Noise.none()`` for none.
    faults : sequence of Fault
        What is wrong: ``SlowRank(rank=3, factor=1.3)`` and its like.
    clocks : Clocks, optional
        Clocks of the hosts; by default without error or drift.
    traffic : Traffic, optional
        What collectives move.
    seed : int
        Of everything that is drawn; the same arguments and seed write the same bytes.
    ranks_per_host : int
        Ranks are dealt to hosts in blocks.
    detail : str
        ``"actions"``: a collective of a kind for each forward or backward. ``"layers"``: layers, each with its own collectives.
    data_s : float
        Mean time of reading a microbatch on the first and last stage, s; 0: not recorded.
    checkpoint_every, checkpoint_s : int, float
        Steps between checkpoints (0: none), and the time of one in s.
    seq_length : int
        Tokens of a microbatch.
    telemetry : bool, optional
        Write telemetry, a sample each ``telemetry_every_s`` (s), two a step at least; by default where a fault shows in it.
    telemetry_every_s : float
        See there.
    ended : bool
        False leaves the last segments open, as a running job does.
    segment_rows : int
        Events per closed segment.

    Returns
    -------
    Truth
        Makespans, faults with their exact effects, clocks. Also in ``truth.json`` of the run directory, which no reader looks at.

    Raises
    ------
    LayoutError, ScheduleError, CostError
        If layout, schedule, costs and faults do not fit together; the message says what would.
    RunExistsError
        If the folder is not empty.

    Notes
    -----
    One replay of a graph of all ranks per step: nobody leaves a collective before the last has arrived, and a message is received
    after it was sent; sends that hold their rank (``Costs.send``) follow one another. The effect of a fault is the makespan minus
    that of the same run without it: noise does not depend on faults.
    """
    _check_numbers(num_steps, ranks_per_host, detail, data_s, checkpoint_every, checkpoint_s, segment_rows)
    noise, clocks, traffic = noise or Noise(), clocks or Clocks(), traffic or Traffic()
    sched = _schedule(schedule, layout, num_microbatches)
    plan = _plan(sched, layout, costs or _default_costs(), num_layers, traffic, detail)
    plan.data_s, plan.checkpoint_every, plan.checkpoint_s = data_s, checkpoint_every, checkpoint_s
    ends = plan.ends if plan.shares_embedding else None
    members = Members.of(layout, ranks_per_host=ranks_per_host, ends=ends)
    _check_experts(layout, members)
    step = build_step(plan, members)
    for fault in faults:
        check(fault, step, num_steps)
    numbered = list(enumerate(faults))
    clock = make_clocks(clocks, members, seed)
    out = Output(
        Path(run_dir), step, clock, clocks, numbered, seed, seq_length, segment_rows,
        needs_telemetry(numbered) if telemetry is None else telemetry, telemetry_every_s, ended,
    )  # fmt: skip
    out.create()
    step_s = _write(out, noise, num_steps)
    settings = {"num_steps": num_steps, "seed": seed}
    clean = makespans(step, noise, [], **settings) if faults else step_s
    truth = Truth(
        run_dir=os.fspath(run_dir),
        step_s=step_s,
        clean_step_s=clean,
        faults=[_fault_truth(step, noise, numbered, i, step_s, clean, **settings) for i in range(len(faults))],
        clocks=clock,
        hosts=[f"host{h}" for h in members.host],
        rank_factor=rank_factor(noise, step, seed),
    )
    truth.save()
    return truth


def _default_costs() -> Costs:
    return Costs(
        forward_s=0.020, backward_input_s=0.020, backward_weight_s=0.020, p2p_s=2e-5, message_bytes=32 * 2**20,
        bandwidth=25e9, optimizer_s=0.004,
    )  # fmt: skip


def _check_numbers(
    num_steps: int, ranks_per_host: int, detail: str, data_s: float, every: int, checkpoint_s: float, segment_rows: int
) -> None:
    for name, value, least in (
        ("num_steps", num_steps, 1),
        ("ranks_per_host", ranks_per_host, 1),
        ("segment_rows", segment_rows, 1),
        ("data_s", data_s, 0),
        ("checkpoint_every", every, 0),
        ("checkpoint_s", checkpoint_s, 0),
    ):
        if not value >= least:
            raise CostError(f"generate_run: {name} is {value!r}; expected at least {least}")
    if detail not in DETAILS:
        raise CostError(
            f"generate_run: detail is {detail!r}; expected one of {', '.join(DETAILS)}{did_you_mean(detail, DETAILS)}"
        )


def _schedule(schedule: str | Schedule, layout: Layout, num_microbatches: int) -> Schedule:
    """Return a valid schedule whose ranks and stages are those of the layout."""
    if isinstance(schedule, str):
        name, sizes = schedule, {"num_microbatches": num_microbatches, "num_chunks": layout.num_chunks}
        schedule = build_schedule(name, num_stages=layout.num_stages, **sizes)
        if (
            schedule.placement.backward is not None and layout.pp % 2 == 0
        ):  # a rank for the forwards, one for the backwards
            schedule = build_schedule(name, num_stages=layout.num_stages // 2, **sizes)
    schedule.validate()
    if schedule.num_ranks != layout.pp:
        raise ScheduleError(
            f"{schedule!r} has {schedule.num_ranks} pipeline ranks, the layout {layout} has pp={layout.pp}; "
            f"use Layout(pp={schedule.num_ranks}, ...)"
        )
    place = schedule.placement
    if place.mirrored is None and place.backward is None:
        if schedule.num_chunks != layout.num_chunks:
            raise ScheduleError(
                f"{schedule!r} has {schedule.num_chunks} chunks per rank, the layout {layout.num_chunks}; "
                f"use Layout(num_chunks={schedule.num_chunks}, ...)"
            )
        if tuple(layout.place(s)[0] for s in range(layout.num_stages)) != place.forward:
            other = "v" if layout.stage_order == "interleaved" else "interleaved"
            raise ScheduleError(
                f"{schedule!r} has its stages on ranks {place.forward}, which is not the layout's stage order "
                f"{layout.stage_order!r}; use Layout(stage_order={other!r}, ...)"
            )
    return schedule


def _plan(sched: Schedule, layout: Layout, costs: Costs, num_layers: int | None, traffic: Traffic, detail: str) -> Plan:
    tables = costs.tables(sched)
    if tables.by_events or costs.ranks_per_host is not None:
        raise CostError(
            "generate_run: costs with interference or ranks_per_host are not generated; leave them out "
            "(hosts are given by generate_run(ranks_per_host=))"
        )
    layers = 2 * sched.num_stages if num_layers is None else num_layers
    if layers < sched.num_stages:
        raise LayoutError(
            f"num_layers is {layers}; the {sched.num_stages} stages need at least one layer each: give {sched.num_stages} or more"
        )
    cuts = [round(i * layers / sched.num_stages) for i in range(sched.num_stages + 1)]
    graph = build(sched, tables)
    ranges = [range(a, b) for a, b in pairwise(cuts)]
    return Plan(
        sched,
        tables,
        layout,
        graph.messages,
        graph.unit,
        ranges,
        traffic,
        detail,
        data_s=0.0,
        checkpoint_s=0.0,
        checkpoint_every=0,
    )


def _check_experts(layout: Layout, members: Members) -> None:
    """Raise LayoutError if an expert group reaches over several stages: its collectives would wait for one another."""
    for group in members.groups["ep"]:
        stages = np.unique(members.coords["pp"][list(group)])
        if len(stages) > 1:
            raise LayoutError(
                f"the expert group of ranks {list(group)[:8]} has members on pipeline ranks {stages.tolist()}, for order {layout.order!r} "
                f"puts pp before other axes and etp {layout.etp} is not tp {layout.tp}; use Layout(etp={layout.tp}) or an order that "
                "ends in pp, such as 'tp-cp-ep-dp-pp'"
            )


def _write(out: Output, noise: Noise, num_steps: int) -> Any:
    """Simulate and write block by block; return the makespans, s."""
    step_s = np.full(num_steps, np.nan)
    per_block = max(1, BLOCK_OPS // len(out.step.graph))
    block: list[Times] = []
    for times in simulate(out.step, noise, out.faults, num_steps=num_steps, seed=out.seed):
        if len(block) == per_block:
            out.write(block, last=False)
            block = []
        block.append(times)
        span = times.makespan_s(out.step)
        step_s[times.number] = span if np.isfinite(span) else np.nan
    out.write(block, last=True)
    return step_s


def _fault_truth(
    step: Step,
    noise: Noise,
    faults: list[tuple[int, f.Fault]],
    i: int,
    step_s: Any,
    clean: Any,
    *,
    num_steps: int,
    seed: int,
) -> FaultTruth:
    fault = faults[i][1]
    if isinstance(fault, f.MissingRank):
        without = step_s
    elif len(faults) == 1:
        without = clean
    else:
        others = [(j, x) for j, x in faults if j != i]
        without = makespans(step, noise, others, num_steps=num_steps, seed=seed)
    kind, named, ranks = subjects(fault, step.members, step)
    ran = min(num_steps, int(np.argmax(np.isnan(step_s))) + 1 if np.isnan(step_s).any() else num_steps)
    steps = [n for n in range(ran) if active(fault, i, n, seed)]
    if isinstance(fault, f.CheckpointStall):
        steps = [n for n in steps if (n + 1) % step.plan.checkpoint_every == 0]
    detail = asdict(fault)
    if isinstance(fault, f.KilledRank):
        detail |= _blocked(step, fault)
    return FaultTruth(fault.kind, kind, named, ranks, steps, np.asarray(step_s - without), detail)


def _blocked(step: Step, fault: f.KilledRank) -> dict[str, Any]:
    """Return the first collective that a rank which stops never enters."""
    p = int(step.members.coords["pp"][fault.rank])
    slot = (stopped_at(fault, step) - int(step.base[p])) // step.replicas
    for row in step.programs[p].rows:
        if row.first >= slot and 0 <= row.axis < PP:
            axis = ("tp", "cp", "ep", "dp-cp", "embd", "world")[row.axis]
            number = int(step.members.group_of[axis][fault.rank])
            return {
                "group": int(step.members.ids[axis][number]),
                "seq": row.seq + fault.first_step * row.per_step,
                "op": row.site[1],
                "axis": axis,
                "members": list(step.members.groups[axis][number]),
            }
    return {}
