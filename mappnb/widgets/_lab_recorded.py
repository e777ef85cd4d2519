"""What was recorded, for the schedule lab: one step's actions, and how well its replay hits it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from mappnb.datasets import layout_of
from mappnb.errors import CostError
from mappnb.run import Run
from mappnb.sched import codes as c
from mappnb.sched.measure import measure
from mappnb.sched.replays import recorded_schedule
from mappnb.sched.schedule import Schedule

__all__ = ["Recorded", "recorded_of"]

Array = np.ndarray[Any, Any]
_KIND = {k.value: i for i, k in enumerate(c.KINDS)}


@dataclass(frozen=True, slots=True, eq=False)
class Recorded:
    """One recorded step of one pipeline.

    Attributes
    ----------
    step : int
        Its number.
    rank, kind, stage, microbatch : int array, dims (action,)
        Pipeline rank, number of the kind, stage and microbatch of each action.
    start_s, end_s : array, dims (action,)
        From the first start, s.
    steps : Series
        First start to last end of the actions of each step that the costs were measured on, s, by step.
    schedule : Schedule or None
        The order that was recorded; None where actions overlap, and ``why`` says so.
    """

    step: int
    rank: Array
    kind: Array
    stage: Array
    microbatch: Array
    start_s: Array
    end_s: Array
    steps: pd.Series[float]
    schedule: Schedule | None
    why: str
    num_chunks: int

    @property
    def step_s(self) -> float:
        """First start to last end of the actions of this step, s."""
        return float(self.end_s.max(initial=0.0))

    @property
    def median_s(self) -> float:
        """Median of that over the measured steps, s."""
        return float(self.steps.median())

    @property
    def spread(self) -> float:
        """Half the distance of the quartiles of the measured steps over their median: how far steps differ by themselves."""
        low, high = self.steps.quantile([0.25, 0.75])
        return float((high - low) / 2 / self.median_s) if self.median_s else 0.0


def recorded_of(run: Run | xr.Dataset, step: int | None = None) -> Recorded:
    """Return the recorded step to compare with.

    Parameters
    ----------
    run : Run or Dataset, dims (event,)
        Recorded, imported or simulated.
    step : int, optional
        Which; by default the one whose length is nearest to the median.

    Raises
    ------
    CostError
        If there is no such step, or no pipeline actions.
    """
    measured = measure(run)
    if step is not None and step not in measured.steps:
        one = measure(run, steps=step)  # the first step is not among those that costs are measured on
        frame = pd.concat([_pipeline(measured.actions, measured.events), _pipeline(one.actions, one.events)])
    else:
        frame = _pipeline(measured.actions, measured.events)
    frame = frame[frame.incarnation == frame.incarnation.min()]
    spans = frame.groupby("step").end_ns.max() - frame.groupby("step").start_ns.min()
    fitted = spans[spans.index.isin(measured.steps)] / 1e9
    chosen = int((fitted - fitted.median()).abs().idxmin()) if step is None else int(step)
    mine = frame[frame.step == chosen]
    first = int(mine.start_ns.min())
    schedule, why = _order(run, chosen)
    return Recorded(
        step=chosen,
        rank=mine["rank"].to_numpy(np.int64),
        kind=mine.kind.map(_KIND).to_numpy(np.int64),
        stage=mine.stage.to_numpy(np.int64),
        microbatch=mine.microbatch.to_numpy(np.int64),
        start_s=(mine.start_ns.to_numpy() - first) / 1e9,
        end_s=(mine.end_ns.to_numpy() - first) / 1e9,
        steps=fitted,
        schedule=schedule,
        why=why,
        num_chunks=measured.num_chunks,
    )


def _order(run: Run | xr.Dataset, step: int) -> tuple[Schedule | None, str]:
    try:
        return recorded_schedule(run, step=step).validate(), ""
    except CostError as err:
        return None, str(err)
    except ValueError as err:  # an order that cannot run alone: a step cut short, say
        return None, str(err)


def _pipeline(actions: pd.DataFrame, events: xr.Dataset) -> pd.DataFrame:
    """Return the actions of the pipeline of the lowest rank, ``rank`` being that in the pipeline."""
    if "layout" not in events.attrs or not len(actions):
        return actions
    layout, lowest = layout_of(events), int(actions["rank"].min())
    members = next(g for g in layout.groups("pp") if lowest in g)
    mine = actions[actions["rank"].isin(members)].copy()
    mine["rank"] = mine["rank"].map({r: i for i, r in enumerate(members)})
    return mine
