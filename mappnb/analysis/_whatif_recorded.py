"""Recorded steps as a replay graph: operations by their recorded identities."""

from __future__ import annotations

from typing import Any

import numpy as np
import xarray as xr

from mappnb.analysis._whatif_model import Model
from mappnb.errors import MappnbError
from mappnb.run import Run

__all__ = ["model_of_events"]

Array = np.ndarray[Any, Any]


def model_of_events(events: xr.Dataset, *, run: Run | xr.Dataset, steps: Array | None) -> Model:
    """Return the operations of recorded steps."""
    raise MappnbError("what_if: recorded runs are not there yet; use a StragglerAnalysis trace")
