"""Replays of measured steps: the recorded order and durations through the engine, and the link that makes them fit."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd
import xarray as xr

from mappnb.datasets import layout_of
from mappnb.errors import CostError
from mappnb.run import Run
from mappnb.sched import codes as c
from mappnb.sched.action import Action
from mappnb.sched.costs import SEND_MODES, Costs, CostTables, Floats
from mappnb.sched.measure import Measured, Steps, measure
from mappnb.sched.schedule import Schedule
from mappnb.sched.times import times
from mappnb.terms import Kind

__all__ = ["FittedLink", "fit_link", "recorded_schedule", "replay_steps"]

_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Shares of a transfer that occupy the link which are tried."""
_BETTER = 0.95
"""Time on the wire is taken in place of latency only where it lowers the error of the starts below this fraction."""
_HALVINGS = 30


@dataclass(frozen=True)
class FittedLink:
    """The link with which measured steps replay best: one for all messages and steps.

    Attributes
    ----------
    p2p_s : float
        Latency of a message, s.
    wire_s : float
        Time for which a message occupies its link, s: the next one of the link waits for it.
    send : str
        As of :class:`mappnb.Costs`.
    steps : DataFrame
        As of :func:`replay_steps`, with this link.
    """

    p2p_s: float
    wire_s: float
    send: str
    steps: pd.DataFrame = field(repr=False)

    @property
    def median_error(self) -> float:
        """Median over the steps of the relative error of the replay, without sign."""
        return float(self.steps.error_fraction.abs().median())

    def costs(self, costs: Costs) -> Costs:
        """Return ``costs`` with this link in place of theirs."""
        size = costs.message_bytes or 1.0
        bandwidth = size / self.wire_s if self.wire_s > 0 else np.inf
        return replace(costs, p2p_s=self.p2p_s, message_bytes=size, bandwidth=bandwidth, send=self.send)


class _Step(NamedTuple):
    """One measured step of one pipeline."""

    step: int
    duration_s: Floats  # (kind, stage, microbatch)
    start_s: Floats  # of the actions in the order of the schedule
    span_s: float


def recorded_schedule(run: Run | xr.Dataset, *, step: int | None = None) -> Schedule:
    """Return the order in which each pipeline rank really ran its actions.

    Parameters
    ----------
    run : Run or Dataset, dims (event,)
        Recorded, imported or simulated.
    step : int, optional
        The step to look at; by default the second, or the only one.

    Returns
    -------
    Schedule
        Not validated. Of a run with several pipelines, the one of the lowest rank.

    Raises
    ------
    CostError
        If there are no actions, or some ran beside one another: such an order is no list.
    """
    measured = measure(run, steps=step)
    return _order(_pipeline(measured), measured.steps[0])


def replay_steps(
    run: Run | xr.Dataset,
    *,
    schedule: Schedule | None = None,
    steps: Steps = None,
    p2p_s: float = 0.0,
    wire_s: float = 0.0,
    send: str = "async",
    launch_s: float = 0.0,
) -> pd.DataFrame:
    """Return how well the engine replays measured steps from their own durations.

    Parameters
    ----------
    run : Run or Dataset, dims (event,)
        Recorded, imported or simulated.
    schedule : Schedule, optional
        What the ranks ran; by default the order that was recorded in the first of the steps.
    steps : int, slice or sequence of int, optional
        Steps to replay; by default all but the first.
    p2p_s, wire_s : float
        Latency of a message, and time for which it occupies its link, s.
    send : str
        As of :class:`mappnb.Costs`.
    launch_s : float
        Time of the program between two actions, which is added to each, s.

    Returns
    -------
    DataFrame
        One row per ``step``: ``measured_s`` and ``replayed_s`` (first start to last end of the actions), ``error_fraction`` (replayed over
        measured − 1) and ``start_error_s`` (mean distance of the starts of the actions from the measured ones, s).

    Raises
    ------
    CostError
        If the steps lack actions of the schedule.

    Notes
    -----
    Actions take what they took, waits for tensor-parallel peers inside them included: those peers are not in the replay. The clocks of
    the ranks must agree.
    """
    sched, measured = _measured(run, schedule, steps, launch_s)
    return _replay(sched, measured, _tables(sched), p2p_s, wire_s, send)


def fit_link(
    run: Run | xr.Dataset, *, schedule: Schedule | None = None, steps: Steps = None, send: str = "async"
) -> FittedLink:
    """Return the one link with which the steps of a run replay as long as they were.

    Parameters
    ----------
    run : Run or Dataset, dims (event,)
        Recorded, imported or simulated; its messages need not be in it.
    schedule : Schedule, optional
        What the ranks ran; by default the order that was recorded in the first of the steps.
    steps : int, slice or sequence of int, optional
        Steps to use; by default all but the first.
    send : str
        As of :class:`mappnb.Costs`.

    Raises
    ------
    CostError
        If the steps lack actions of the schedule, or ``send`` is unknown.

    Notes
    -----
    The replayed span grows with the transfer, so that the transfer whose median error is 0 is found by halving. How much of it occupies
    the link is decided by the starts of all actions; latency is taken unless time on the wire is clearly better. What the
    fit leaves is the spread over the steps, and the starts inside them.
    """
    if send not in SEND_MODES:
        raise CostError(f"send is {send!r}; expected one of {', '.join(SEND_MODES)}")
    sched, measured = _measured(run, schedule, steps)
    tables, best = _tables(sched), None
    for share in _SHARES:
        total = _transfer_s(sched, measured, tables, share, send)
        found = _replay(sched, measured, tables, total * (1 - share), total * share, send)
        error = float(found.start_error_s.mean())
        if best is None or error < _BETTER * best[0]:
            best = error, FittedLink(total * (1 - share), total * share, send, found)
    assert best is not None
    return best[1]


def _transfer_s(sched: Schedule, steps: list[_Step], tables: CostTables, share: float, send: str) -> float:
    """Return the transfer time at which the median of replayed over measured is 1, s; 0 if it is above 1 without any."""

    def error(total: float) -> float:
        found = _replay(sched, steps, tables, total * (1 - share), total * share, send)
        return float(found.error_fraction.median())

    low, high = 0.0, max(s.span_s for s in steps)
    if error(low) >= 0 or error(high) <= 0:
        return 0.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if error(middle) < 0 else (low, middle)
    return (low + high) / 2


def _replay(
    sched: Schedule, steps: list[_Step], tables: CostTables, p2p_s: float, wire_s: float, send: str
) -> pd.DataFrame:
    shape = tables.latency_s.shape
    tables = replace(tables, latency_s=np.full(shape, p2p_s), transfer_s=np.full(shape, wire_s), send=send)
    rows = []
    for one in steps:
        start, end = times(sched, replace(tables, duration_s=one.duration_s))
        span = float(end.max() - start.min())
        off = float(np.abs(start - start.min() - one.start_s).mean())
        rows.append((one.step, one.span_s, span, span / one.span_s - 1 if one.span_s else 0.0, off))
    return pd.DataFrame(rows, columns=["step", "measured_s", "replayed_s", "error_fraction", "start_error_s"])


def _tables(sched: Schedule) -> CostTables:
    return Costs(forward_s=0.0, backward_input_s=0.0, backward_weight_s=0.0).tables(sched)


def _measured(
    run: Run | xr.Dataset, schedule: Schedule | None, steps: Steps, launch_s: float = 0.0
) -> tuple[Schedule, list[_Step]]:
    measured = measure(run, steps=steps)
    frame = _pipeline(measured)
    sched = (schedule if schedule is not None else _order(frame, measured.steps[0])).validate()
    return sched, [_one(sched, rows, key, launch_s) for key, rows in frame.groupby(["incarnation", "step"])]


def _pipeline(measured: Measured) -> pd.DataFrame:
    """Return the actions of the pipeline of the lowest rank, ``rank`` being that in the pipeline."""
    frame = measured.actions
    if not frame.alone.all():
        row = frame[~frame.alone].iloc[0]
        raise CostError(
            f"step {row['step']}, rank {row['rank']}: {row['stage']}{row['kind']}{row['microbatch']} ran beside another action; "
            "a replay takes one at a time (overlapped forwards and backwards cannot be replayed)"
        )
    if "layout" not in measured.events.attrs:
        return frame
    layout, lowest = layout_of(measured.events), int(frame["rank"].min())
    members = next(g for g in layout.groups("pp") if lowest in g)
    mine = frame[frame["rank"].isin(members)].copy()
    mine["rank"] = mine["rank"].map({r: i for i, r in enumerate(members)})
    return mine


def _order(frame: pd.DataFrame, step: int) -> Schedule:
    rows = frame[(frame.step == step) & (frame.incarnation == frame.incarnation.min())]
    kinds = {k.value: k for k in Kind}
    ranks: list[list[Action]] = [[] for _ in range(int(rows["rank"].max()) + 1)]
    columns = (rows[n] for n in ("rank", "stage", "kind", "microbatch"))
    for rank, stage, kind, mb in zip(*columns, strict=True):
        ranks[int(rank)].append(Action(int(stage), kinds[str(kind)], int(mb)))
    return Schedule(ranks, name="recorded")


def _one(sched: Schedule, rows: pd.DataFrame, key: Any, launch_s: float) -> _Step:
    shape = (len(c.KINDS), sched.num_stages, sched.num_microbatches)
    kind = rows.kind.map({k.value: i for i, k in enumerate(c.KINDS)}).to_numpy(np.int64)
    where = (kind, rows.stage.to_numpy(np.int64), rows.microbatch.to_numpy(np.int64))
    wanted = (c.kind(sched.codes), c.stage(sched.codes), c.microbatch(sched.codes))
    _fits(sched, shape, where, wanted, int(key[1]))
    duration, start = np.zeros(shape), np.zeros(shape)
    first = int(rows.start_ns.min())
    duration[where] = (rows.end_ns - rows.start_ns).to_numpy() / 1e9 + launch_s
    start[where] = (rows.start_ns.to_numpy() - first) / 1e9
    return _Step(int(key[1]), duration, start[wanted], (int(rows.end_ns.max()) - first) / 1e9)


def _fits(
    sched: Schedule,
    shape: tuple[int, int, int],
    where: tuple[npt.NDArray[Any], ...],
    wanted: tuple[npt.NDArray[Any], ...],
    step: int,
) -> None:
    """Raise CostError unless the step ran each action of the schedule once."""
    inside = all(int(w.max(initial=0)) < n for w, n in zip(where, shape, strict=True))
    if inside:
        there, asked = (
            np.bincount(np.ravel_multi_index(w, shape), minlength=int(np.prod(shape))) for w in (where, wanted)
        )
        if (there == asked).all():
            return
    raise CostError(
        f"step {step}: its {len(where[0])} actions are not the {len(sched)} of {sched!r}; give the schedule that ran "
        "(recorded_schedule(run) reads it off), and whole steps"
    )
