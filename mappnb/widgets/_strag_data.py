"""What the stragglers view knows of a run: self-time table, verdicts and prices, each worked out once, when it is first looked at."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from mappnb.analysis.stragglers import find_stragglers
from mappnb.analysis.whatif import what_if
from mappnb.analysis.work import work
from mappnb.datasets import layout_of
from mappnb.errors import MappnbError
from mappnb.layout import Layout
from mappnb.run import Run
from mappnb.widgets._strag_measures import Measures

__all__ = ["StragglerData", "subject_ranks"]

Array = np.ndarray[Any, Any]
_COLUMNS = (
    "subject_kind", "subject", "verdict", "cause", "effect_s", "effect_fraction", "first_step", "last_step", "evidence",
)  # fmt: skip
MOST_PRICED_RANKS = 128
"""Ranks that are priced one by one: each is a replay of its own; of larger runs the workers (dp rank, stage), stages and hosts are."""
QUICK_CELLS = 200_000
"""Ranks times steps that are judged in about a second: of more, the picture that is made when the view is shown does not wait for the
verdicts, or the first look at the view would."""
SLOWDOWN_BITS = 0x8 | 0x20 | 0x40 | 0x80
"""Of NVML's clocks-event reasons those that slow a GPU because something is wrong: hardware and thermal slow-downs and the power brake;
not idleness, application clocks or the ordinary power cap."""


class StragglerData:
    """One look at a run.

    Parameters
    ----------
    run : Run or Dataset, dims (event,)

    Attributes
    ----------
    why : str
        Why there is nothing to look at; empty where there is.
    """

    def __init__(self, run: Run | xr.Dataset) -> None:
        self.run = run
        self.why = ""
        self.layout: Layout = run.layout if isinstance(run, Run) else layout_of(run)
        self.measures: Measures | None = None
        try:
            self.measures = Measures(work(run), self.layout)
        except MappnbError as err:
            self.why = str(err).removeprefix("work: ")

    @property
    def m(self) -> Measures:
        """The measures, or MappnbError with the reason why there are none."""
        if self.measures is None:
            raise MappnbError(self.why)
        return self.measures

    @cached_property
    def verdicts(self) -> pd.DataFrame:
        """Who is slow and why (:func:`mappnb.analysis.find_stragglers`); if it cannot tell, no rows, and why in ``attrs["notes"]``."""
        try:
            if self.why:
                raise MappnbError(self.why)
            return find_stragglers(self.run, work=self.m.work)
        except MappnbError as err:
            empty = pd.DataFrame({c: [] for c in _COLUMNS})
            empty.attrs["notes"] = [str(err)]
            return empty

    @property
    def verdicts_soon(self) -> bool:
        """Whether the verdicts are there, or there within about a second."""
        return "verdicts" in self.__dict__ or self.m.present.size <= QUICK_CELLS

    @cached_property
    def groupings(self) -> tuple[str, ...]:
        """What the price can be told by."""
        hosts = ("host",) if len(set(self.m.hosts)) > 1 else ()
        ranks = ("rank",) if len(self.m.ranks) <= MOST_PRICED_RANKS else ()
        return ("stage", "dp_rank", *ranks, *hosts, "op")

    @cached_property
    def prices(self) -> xr.Dataset:
        """What the slow ones cost (:func:`mappnb.analysis.what_if`); MappnbError where the run cannot be replayed."""
        return what_if(self.run, by=self.groupings)

    def events(self, *, step: int, ranks: Sequence[int]) -> xr.Dataset:
        """Return the events of some ranks in a step, in order of start."""
        if isinstance(self.run, Run):
            found = self.run.sel(step=step, rank=list(ranks))
            newest = found["incarnation"].values
            return found.isel(event=np.flatnonzero(newest == newest.max())) if len(newest) else found
        keep = (self.run["step"].values == step) & np.isin(self.run["rank"].values, list(ranks))
        found = self.run.isel(event=np.flatnonzero(keep))
        return found.isel(event=np.argsort(found["start_ns"].values, kind="stable"))

    def window_s(self, *, first: int, last: int, rank: int) -> tuple[float, float] | None:
        """Return first start and last end of a rank from one step to another, s on the run clock; None where it has no events."""
        bounds = []
        for step in dict.fromkeys((first, last)):
            events = self.events(step=step, ranks=[rank])
            if events.sizes["event"]:
                start = events["start_ns"].values
                bounds += [int(start.min()), int((start + events["duration_ns"].values).max())]
        return (min(bounds) / 1e9, max(bounds) / 1e9) if bounds else None

    def steps_in(self, start_s: float, end_s: float) -> tuple[int, int] | None:
        """Return first and last step that overlap a time on the run clock; None if there is none."""
        steps, start, end = self.step_times
        inside = np.flatnonzero((start <= end_s) & (end >= start_s))
        return (int(steps[inside[0]]), int(steps[inside[-1]])) if len(inside) else None

    @cached_property
    def step_times(self) -> tuple[Array, Array, Array]:
        """Step numbers with first start and last end over the ranks, s on the run clock."""
        events = self.run.sel() if isinstance(self.run, Run) and not len(self.run.steps["step"]) else self.run
        if isinstance(events, Run):
            table = events.steps
            start = np.where(table["start_ns"].values >= 0, table["start_ns"].values / 1e9, np.nan)
            end = np.where(table["end_ns"].values >= 0, table["end_ns"].values / 1e9, np.nan)
            first, last = np.nanmin(start, axis=1, initial=np.inf), np.nanmax(end, axis=1, initial=-np.inf)
            return table["step"].values, first, last
        steps, row = np.unique(events["step"].values, return_inverse=True)
        start, end = np.full(len(steps), np.inf), np.full(len(steps), -np.inf)
        np.minimum.at(start, row, events["start_ns"].values / 1e9)
        np.maximum.at(end, row, (events["start_ns"].values + events["duration_ns"].values) / 1e9)
        keep = steps >= 0
        return steps[keep], start[keep], end[keep]

    @cached_property
    def telemetry(self) -> dict[str, Array]:
        """Rank, time (s) and each recorded quantity of the samples; empty without telemetry. ``throttled``: 1 where clocks were cut."""
        if not isinstance(self.run, Run):
            return {}
        try:
            table = self.run.telemetry
        except MappnbError:
            return {}
        if not table.sizes.get("sample"):
            return {}
        out: dict[str, Array] = {"rank": table["rank"].values, "time_s": table["time_ns"].values / 1e9}
        for name in ("sm_clock_mhz", "power_w", "temperature_c", "cpu_fraction", "run_queue_fraction"):
            values = table[name].values
            if np.isfinite(values).any():
                out[name] = values
        reasons = table["throttle_reasons"].values
        if (reasons >= 0).any():
            out["throttled"] = np.where(reasons >= 0, (reasons & SLOWDOWN_BITS) != 0, np.nan).astype(np.float64)
        return out

    def release(self) -> None:
        """Let go of everything."""
        self.measures, self.why = None, "this view is closed"
        for name in ("verdicts", "prices", "telemetry", "groupings", "step_times"):
            self.__dict__.pop(name, None)


def subject_ranks(kind: str, subject: str, m: Measures) -> tuple[int, ...]:
    """Return the positions of the ranks that a verdict is about: of a host or stage all of its ranks, of a link both ends."""
    if kind == "host":
        return tuple(i for i, h in enumerate(m.hosts) if h == subject)
    numbers = [int(p) for p in "".join(c if c.isdigit() else " " for c in subject).split()]
    if kind == "stage" and numbers:
        mine = m.work["part_stage"].values == numbers[0]
        return tuple(np.flatnonzero((m.work["count"].values[:, :, mine] > 0).any((0, 2))).tolist())
    if kind in ("rank", "link"):
        return tuple(np.flatnonzero(np.isin(m.ranks, numbers)).tolist())
    return ()
