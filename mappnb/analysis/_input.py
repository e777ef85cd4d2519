"""What the analyses accept: a run, or an events dataset recorded, imported or simulated."""

from __future__ import annotations

from typing import Any

import numpy as np
import xarray as xr

from mappnb.errors import MappnbError
from mappnb.run import Run
from mappnb.schema import EVENTS, check
from mappnb.terms import Category

__all__ = ["events_of", "issue_only"]

Array = np.ndarray[Any, Any]


def events_of(run: Run | xr.Dataset, step: int | slice | None = None) -> xr.Dataset:
    """Return the events of a run or dataset, checked, optionally of some steps only.

    Parameters
    ----------
    run : Run or Dataset, dims (event,)
        A run is read from disk; a dataset is taken as it is.
    step : int or slice, optional
        One step, or ``slice(first, last)``, both ends included.

    Raises
    ------
    SchemaError
        If a dataset lacks a variable of the schema.
    MappnbError
        If it is neither a run nor a dataset.
    """
    if isinstance(run, Run):
        return run.sel(step=step)
    if not isinstance(run, xr.Dataset):
        raise MappnbError(
            f"expected a Run or an events Dataset, got {type(run).__name__}; open a run with mappnb.attach(run_dir)"
        )
    check(run, EVENTS, name="events")
    if step is None:
        return run
    bounds = slice(step, step) if isinstance(step, int) else step
    inside = (run["step"] >= (bounds.start if bounds.start is not None else -(2**31))) & (
        run["step"] <= (bounds.stop if bounds.stop is not None else 2**31 - 1)
    )
    return run.isel(event=inside.values.nonzero()[0])


def issue_only(events: xr.Dataset) -> Array:
    """Return which spans tell when device work was issued, and not when it ran.

    Parameters
    ----------
    events : Dataset, dims (event,)

    Returns
    -------
    bool array, shape (event,)
        True for compute and optimizer spans of host lanes (``stream`` below 0) of the ranks that have compute on a device
        lane in these events: there the device lanes tell the time. False everywhere where nothing ran on a device.
    """
    category, rank, on_device = events.category.values, events["rank"].values, events.stream.values >= 0
    compute = category == Category.COMPUTE
    timed = np.unique(rank[on_device & compute])
    return np.asarray((compute | (category == Category.OPTIMIZER)) & ~on_device & np.isin(rank, timed))
