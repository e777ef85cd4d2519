"""The model of a run, recorded or imported: which rules it is made by, which steps it has, who is on which host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import xarray as xr

from mappnb.analysis._input import events_of
from mappnb.analysis._whatif_artifact import model_of_trace
from mappnb.analysis._whatif_model import Model
from mappnb.analysis._whatif_recorded import model_of_events
from mappnb.analysis._whatif_trace import is_trace
from mappnb.errors import MappnbError
from mappnb.run import Run

__all__ = ["hosts_of", "model_of"]

Array = np.ndarray[Any, Any]
Steps = int | slice | Sequence[int]


def model_of(run: Run | xr.Dataset, step: Steps | None) -> Model:
    """Return the operations of a run.

    Raises
    ------
    MappnbError
        If there are no events, or none of the steps.
    """
    told = _told(run)
    if told is not None or (isinstance(run, xr.Dataset) and is_trace(events_of(run))):
        events = events_of(run)
        folded, order = told or ({}, {})
        return model_of_trace(events, folded=folded, order=order, steps=_wanted(events, step))
    whole = events_of(run, step) if isinstance(step, int | slice) else events_of(run)
    return model_of_events(whole, run=run, steps=_wanted(whole, step))


def _told(run: Run | xr.Dataset) -> tuple[dict[str, int], dict[int, int]] | None:
    """Return the folded sizes and the ranks' own numbers of an imported StragglerAnalysis trace; None of other runs."""
    if not isinstance(run, Run):
        return None
    found = [
        (rank, info["straggler_analysis"])
        for incarnation in run.incarnations
        for rank, info in incarnation.ranks.items()
        if isinstance(info.get("straggler_analysis"), dict)
    ]
    if not found:
        return None
    return dict(found[0][1].get("folded") or {}), {r: int(x.get("source_rank", r)) for r, x in found}


def _wanted(events: xr.Dataset, step: Steps | None) -> Array | None:
    """Return the numbers of the steps asked for; None for all."""
    there = np.unique(events["step"].values)
    there = there[there >= 0]
    if not len(there):
        asked = "" if step is None else f" for step={step!r}"
        raise MappnbError(
            f"what_if: the run has no events of a step{asked}; see run.steps for the steps that there are"
        )
    if step is None:
        return None
    if isinstance(step, slice):
        low, high = step.start if step.start is not None else -np.inf, step.stop if step.stop is not None else np.inf
        wanted = there[(there >= low) & (there <= high)]
    else:
        wanted = np.atleast_1d(np.asarray(step))
        if len(missing := np.setdiff1d(wanted, there)):
            raise MappnbError(
                f"what_if: no step {missing[0]}; the run has steps {there[0]} to {there[-1]} ({len(there)} of them)"
            )
    if not len(wanted):
        raise MappnbError(f"what_if: no step in {step!r}; the run has steps {there[0]} to {there[-1]}")
    return np.unique(wanted)


def hosts_of(run: Run | xr.Dataset) -> dict[int, str]:
    """Return the host of each rank; empty for a dataset, which does not know them."""
    if not isinstance(run, Run):
        return {}
    table = run.ranks
    if table.empty:
        return {}
    return dict(zip(table.index.get_level_values("rank").tolist(), table["host"].astype(str).tolist(), strict=True))
