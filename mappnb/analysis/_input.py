"""What the analyses accept: a run, or an events dataset recorded, imported or simulated."""

from __future__ import annotations

import xarray as xr

from mappnb.errors import MappnbError
from mappnb.run import Run
from mappnb.schema import EVENTS, check

__all__ = ["events_of"]


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
