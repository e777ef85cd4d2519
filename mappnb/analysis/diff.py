"""What differs between two runs, or between two stretches of one: operations that came, went, or take another time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
import xarray as xr

from mappnb.analysis._input import events_of
from mappnb.analysis.stepstats import timed_elsewhere
from mappnb.errors import MappnbError, did_you_mean
from mappnb.run import Run
from mappnb.schema import EVENTS

__all__ = ["diff"]

NOISE = 0.01
"""Least relative uncertainty of a mean: boost clocks, placement and neighbours differ by this much between two runs of one job."""
SIGMAS = 4.0
"""Differences beyond this many standard errors are not noise: 1 in 16,000 by chance, for hundreds of operations."""


def diff(
    before: Run | xr.Dataset,
    after: Run | xr.Dataset,
    *,
    by: Sequence[str] = ("category", "op", "name", "phase"),
    step_before: int | slice | None = None,
    step_after: int | slice | None = None,
    noise: float = NOISE,
    sigmas: float = SIGMAS,
) -> pd.DataFrame:
    """Return how often each operation ran and how long it took, before and after.

    Parameters
    ----------
    before, after : Run or Dataset, dims (event,)
        Two runs, or the same one twice with two stretches of steps.
    by : sequence of str
        Event variables that say which events are the same operation: ``("op",)``, ``("name", "stage")``, ``("op", "rank")``.
    step_before, step_after : int or slice, optional
        Steps to look at; all by default.
    noise : float
        Least relative uncertainty of what a step takes.
    sigmas : float
        Standard errors from which a difference counts.

    Returns
    -------
    DataFrame
        Index ``by``; ``count_before``, ``count_after``; ``total_s_before``, ``total_s_after``, s; ``step_s_before``, ``step_s_after``:
        the total of a step over the ranks, mean over the steps, s; ``change_s``, its difference; ``ratio``, after over before; ``z``,
        the difference in standard errors; ``status``: added, removed, slower, faster, same, or undecided where there are
        too few samples to tell. Largest change first.

    Raises
    ------
    MappnbError
        If a name in ``by`` is no event variable, or one side has no events.

    Notes
    -----
    The standard error of a side is the standard deviation of its step totals over the root of their number (three steps or more),
    else that of the durations of its single events, scaled to their sum (three events or more); at least ``noise`` of the
    mean. Spans inside others count in both, as in :func:`mappnb.analysis.op_statistics`; what a device timed is not counted a
    second time as issued. Names that hold addresses or counters never match: leave ``name`` out of ``by``. Steps that
    are missing in one side change nothing, for totals are per step; ranks that are missing do.
    """
    columns = _checked(by)
    sides = [_side(run, step, columns) for run, step in ((before, step_before), (after, step_after))]
    table = sides[0].add_suffix("_before").join(sides[1].add_suffix("_after"), how="outer")
    for name in ("count", "total_s", "step_s"):
        for side in ("before", "after"):
            table[f"{name}_{side}"] = table[f"{name}_{side}"].fillna(0)
    counts = ["count_before", "count_after"]
    table[counts] = table[counts].astype(int)
    table["change_s"] = table["step_s_after"] - table["step_s_before"]
    with np.errstate(divide="ignore", invalid="ignore"):
        table["ratio"] = table["step_s_after"] / table["step_s_before"]
        errors = [np.maximum(table[f"error_{s}"], noise * table[f"step_s_{s}"]) for s in ("before", "after")]
        table["z"] = table["change_s"] / np.hypot(*errors)
    table["status"] = _status(table, sigmas)
    order = table["change_s"].abs().sort_values(ascending=False, kind="stable").index
    return table.loc[order].drop(columns=["error_before", "error_after"])


def _checked(by: Sequence[str]) -> list[str]:
    columns = [by] if isinstance(by, str) else list(by)
    for name in columns:
        if name not in EVENTS:
            raise MappnbError(f"diff: by has {name!r}, which is no variable of events{did_you_mean(name, EVENTS)}")
    if not columns:
        raise MappnbError("diff: by is empty; give at least one variable, such as 'op'")
    return columns


def _side(run: Run | xr.Dataset, step: int | slice | None, columns: list[str]) -> pd.DataFrame:
    """Return count, total_s, step_s and error of each operation of one side."""
    events = events_of(run, step)
    events = events.isel(event=np.flatnonzero(~timed_elsewhere(events)))
    if not events.sizes["event"]:
        raise MappnbError("diff: one side has no events; see run.steps for the steps that there are")
    keys = {name: events[name].values for name in dict.fromkeys([*columns, "incarnation", "step"])}
    frame = pd.DataFrame(keys | {"s": events.duration_ns.values / 1e9})
    steps = len(frame[["incarnation", "step"]].drop_duplicates())
    grouped = frame.groupby(columns, sort=False)["s"]
    out = pd.DataFrame({"count": grouped.count(), "total_s": grouped.sum()})
    out["step_s"] = out["total_s"] / steps
    within = list(dict.fromkeys([*columns, "incarnation", "step"]))
    per_step = frame.groupby(within, sort=False)["s"].sum().groupby(columns, sort=False)
    # a step in which it did not run counts as 0
    squares = per_step.apply(lambda x: float((x**2).sum()))
    spread = np.sqrt(np.maximum(squares / steps - out["step_s"] ** 2, 0) * steps / max(steps - 1, 1))
    single = grouped.std() * np.sqrt(out["count"]) / steps
    out["error"] = spread / np.sqrt(steps) if steps >= 3 else single.where(out["count"] >= 3)
    return out


def _status(table: pd.DataFrame, sigmas: float) -> np.ndarray[tuple[int], np.dtype[np.object_]]:
    z = table["z"].to_numpy()
    out = np.full(len(table), "same", object)
    out[z >= sigmas] = "slower"
    out[z <= -sigmas] = "faster"
    out[np.isnan(z) & (table["change_s"].to_numpy() != 0)] = "undecided"
    out[(table["count_before"] == 0).to_numpy()] = "added"
    out[(table["count_after"] == 0).to_numpy()] = "removed"
    return out
