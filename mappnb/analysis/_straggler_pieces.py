"""Self time of the pieces of compute in a few steps: by microbatch for data skew, by layer and op for a drill-down."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from mappnb.analysis._input import issue_only
from mappnb.analysis._intervals import innermost_segments
from mappnb.terms import Category, Flag, Op, Phase

__all__ = ["pieces"]

Array = np.ndarray[Any, Any]
_BACKWARD = (Phase.BACKWARD, Phase.BACKWARD_INPUT, Phase.BACKWARD_WEIGHT)


def pieces(events: xr.Dataset) -> pd.DataFrame:
    """Return the self time of each compute span: transfers and inner spans taken out.

    Parameters
    ----------
    events : Dataset, dims (event,)
        Events of some steps.

    Returns
    -------
    DataFrame
        ``rank``, ``step``, ``stage``, ``microbatch``, ``layer``, ``op``, ``name``, ``direction`` (forward, backward or empty), ``seconds``.
    """
    aside = (events.flags.values & Flag.ASYNC) != 0
    kept = np.flatnonzero(~aside & (events["step"].values >= 0))
    events = events.isel(event=kept)
    start = events.start_ns.values.astype(np.int64)
    keys = np.stack([events[n].values.astype(np.int64) for n in ("rank", "step", "thread", "stream")], 1)
    lane = np.unique(keys, axis=0, return_inverse=True)[1].ravel()
    span, left, right = innermost_segments(lane, start, start + events.duration_ns.values)
    own = np.bincount(span, weights=(right - left) / 1e9, minlength=events.sizes["event"])
    compute = np.flatnonzero((events.category.values == Category.COMPUTE) & ~issue_only(events))
    out = pd.DataFrame(
        {n: events[n].values[compute] for n in ("rank", "step", "stage", "microbatch", "layer", "op", "name")}
    )
    phase, op = events.phase.values[compute], events.op.values[compute]
    back = np.isin(phase, _BACKWARD) | (op == Op.BACKWARD_STEP)
    forward = ~back & ((phase == Phase.FORWARD) | (op == Op.FORWARD_STEP))
    return out.assign(direction=np.where(back, "backward", np.where(forward, "forward", "")), seconds=own[compute])
