"""What the self-time table cannot tell: links, data, layers, telemetry; reads events of few steps and ranks."""

from __future__ import annotations

import numpy as np
import xarray as xr

from mappnb.analysis._straggler_find import Excess, Finding, Settings
from mappnb.analysis._straggler_links import find_links
from mappnb.analysis._straggler_source import Source
from mappnb.run import Run

__all__ = ["add_details"]


def add_details(
    run: Run | xr.Dataset,
    judged: xr.Dataset,
    findings: list[Finding],
    excess: Excess,
    settings: Settings,
    notes: list[str],
) -> list[Finding]:
    """Return findings with links, data and layers looked into.

    Parameters
    ----------
    run : Run or Dataset, dims (event,)
        Events of all ranks.
    judged : Dataset, dims (step, rank, part)
        Self-time table of the judged steps.
    findings : list of Finding
        What the table tells.
    excess : Excess
        Excess of all ranks.
    settings : Settings
        Thresholds.
    notes : list of str
        Gets what is to be said.
    """
    if len(excess.table.step) < 2:
        return findings
    source = Source(run, judged)
    transfer_s = judged["transfer_s"].values.astype(np.float64)
    links = find_links(source, excess, transfer_s, settings, notes)
    return findings + links
