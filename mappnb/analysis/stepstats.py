"""Step statistics: how long steps took, how that varied, and which ops the time went into."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from mappnb.analysis._input import events_of, issue_only
from mappnb.errors import MappnbError
from mappnb.run import Run

__all__ = ["op_statistics", "step_statistics", "timed_elsewhere"]


def step_statistics(run: Run, *, skip_first: int = 1) -> pd.Series[Any]:
    """Return what a step costs: quantiles of its length, throughput, MFU and loss.

    Parameters
    ----------
    run : Run
        A recorded run.
    skip_first : int
        Steps left out at the beginning, where memory is allocated and caches are cold; fewer where the run is that short.

    Returns
    -------
    Series
        ``num_steps``; ``step_s_median``, ``step_s_p10``, ``step_s_p90``, ``step_s_max``, in s; ``slowest_step``; ``tokens_per_s`` (median);
        ``mfu`` (median); ``loss_first`` and ``loss_last``, mean over the ranks that see it; ``grad_norm_last``.

    Raises
    ------
    MappnbError
        If no step has ended yet.
    """
    steps = run.steps
    whole = steps.isel(step=np.flatnonzero(np.isfinite(steps.step_s.values)))
    if not whole.sizes["step"]:
        raise MappnbError(f"{run.path}: no step has ended yet; call run.refresh() when the job is further")
    timed = whole.isel(step=slice(min(skip_first, whole.sizes["step"] - 1), None))
    length = timed.step_s.values
    loss = whole.loss.mean("rank", skipna=True).values
    return pd.Series(
        {
            "num_steps": whole.sizes["step"],
            "step_s_median": float(np.median(length)),
            "step_s_p10": float(np.quantile(length, 0.1)),
            "step_s_p90": float(np.quantile(length, 0.9)),
            "step_s_max": float(length.max()),
            "slowest_step": int(timed["step"].values[length.argmax()]),
            "tokens_per_s": float(np.nanmedian(timed.tokens_per_s))
            if np.isfinite(timed.tokens_per_s).any()
            else np.nan,
            "mfu": float(np.nanmedian(timed.mfu)) if np.isfinite(timed.mfu).any() else np.nan,
            "loss_first": float(loss[0]),
            "loss_last": float(loss[-1]),
            "grad_norm_last": float(np.nanmax(whole.grad_norm.values[-1]))
            if np.isfinite(whole.grad_norm[-1]).any()
            else np.nan,
        }
    )


def op_statistics(run: Run | xr.Dataset, *, step: int | slice | None = None) -> pd.DataFrame:
    """Return count and duration of each operation; what a device timed is not counted a second time as issued.

    Parameters
    ----------
    run : Run or Dataset, dims (event,)
    step : int or slice, optional
        Steps to look at; all by default.

    Returns
    -------
    DataFrame
        Index (category, op, phase); ``count``, ``total_s``, ``median_s``, ``p90_s``, in s, spans inside them included; longest total first.

    Notes
    -----
    A compute or optimizer span that a device ran has two rows: the host's, in which it was issued, and the device's. Where a rank has
    device rows of a (category, op, phase), these alone are counted; where it has none, its host rows are.
    """
    events = events_of(run, step)
    events = events.isel(event=np.flatnonzero(~timed_elsewhere(events)))
    names = ["category", "op", "phase"]
    frame = pd.DataFrame({n: pd.Categorical(events[n].values) for n in names} | {"s": events.duration_ns.values / 1e9})
    grouped = frame.groupby(names, observed=True)["s"]
    table = pd.DataFrame(
        {
            "count": grouped.count(),
            "total_s": grouped.sum(),
            "median_s": grouped.median(),
            "p90_s": grouped.quantile(0.9),
        }
    )
    return table.sort_values("total_s", ascending=False)


def timed_elsewhere(events: xr.Dataset) -> np.ndarray[Any, Any]:
    """Return which events are only the issue of work of which the rank has device rows."""
    issue = issue_only(events)
    if not issue.any():
        return issue
    keys = pd.DataFrame({n: events[n].values for n in ("rank", "category", "op", "phase")})
    key = keys.groupby(list(keys), sort=False).ngroup().to_numpy()
    return np.asarray(issue & np.isin(key, key[events.stream.values >= 0]))
