"""What a capture plan costs: bytes per step of the rank that captures most, before compression."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from mappnb.capture.activations.plan import CapturePlan
from mappnb.layout import Layout

__all__ = ["estimate"]


def estimate(plan: CapturePlan, facts: Mapping[str, Any], layout: Layout | None = None, **batch: int) -> pd.DataFrame:
    """Return the table of ``CapturePlan.estimate``."""
    raise NotImplementedError
