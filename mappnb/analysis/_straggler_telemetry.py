"""What telemetry and metrics say beside a finding: clocks, heat, throttling, run queue, tokens of experts."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import xarray as xr

from mappnb.analysis._straggler_find import Excess, Finding
from mappnb.errors import MappnbError
from mappnb.layout import Layout
from mappnb.run import Run

__all__ = ["Beside"]

Array = np.ndarray[Any, Any]
LOWER_CLOCK = 0.97
"""A clock confirms hardware if it is below this share of the peers': GPUs of one model differ by 1 to 2 % in boost clocks."""
IDLE_REASONS = 0x1 | 0x2
"""NVML's reasons for a lower clock that are no fault: idle, and clocks set by the application."""
QUEUED = 0.02
"""Share of the time in the run queue, above the peers', that explains a late host: a process that has its CPUs waits below 0.5 %."""
MORE_TOKENS = 1.05
"""Tokens of the experts of a rank over the mean of its group, from which they explain that it computes longer."""
_REASONS = {
    0x4: "software power cap", 0x8: "hardware slowdown", 0x10: "sync boost", 0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown", 0x80: "hardware power brake", 0x100: "display clocks",
}  # fmt: skip
"""NVML's clocks-event reasons (nvml.h, nvmlClocksEventReason*)."""


class Beside:
    """Telemetry and metrics of a run.

    Parameters
    ----------
    run : Run or Dataset
        A dataset of events has neither.
    excess : Excess
        Excess of all ranks.
    """

    def __init__(self, run: Run | xr.Dataset, excess: Excess) -> None:
        self.run, self.excess = run, excess

    @cached_property
    def telemetry(self) -> xr.Dataset | None:
        """Samples, or None where there are none."""
        return self._samples("telemetry")

    @cached_property
    def metrics(self) -> xr.Dataset | None:
        """Samples, or None where there are none."""
        return self._samples("metrics")

    def _samples(self, name: str) -> xr.Dataset | None:
        if not isinstance(self.run, Run):
            return None
        try:
            found: xr.Dataset = getattr(self.run, name)
        except MappnbError:
            return None
        return found.load() if found.sizes.get("sample", 0) else None

    def compare(self, name: str, finding: Finding) -> tuple[float, float] | None:
        """Return the median of a reading on the ranks of a finding and on all other ranks, in its slow steps."""
        t = self.telemetry
        if t is None or name not in t or not np.isfinite(t[name].values).any():
            return None
        ids = self.excess.table.rank[finding.ranks]
        when = self._when(t, finding)
        value, rank = t[name].values[when], t["rank"].values[when]
        mine, others = value[np.isin(rank, ids)], value[~np.isin(rank, ids)]
        if not np.isfinite(mine).any() or not np.isfinite(others).any():
            return None
        return float(np.nanmedian(mine)), float(np.nanmedian(others))

    def _when(self, t: xr.Dataset, finding: Finding) -> Array:
        """Return which samples were taken in the slow steps; all where it is not known when these were."""
        everything = np.ones(t.sizes["sample"], bool)
        steps = self.run.steps if isinstance(self.run, Run) else xr.Dataset()
        if "start_ns" not in steps:
            return everything
        rows = np.flatnonzero(np.isin(steps["step"].values, self.excess.table.step[finding.active]))
        if not len(rows):
            return everything
        start = np.where(steps.start_ns.values[rows] > 0, steps.start_ns.values[rows], 2**62).min(1)
        end, at = steps.end_ns.values[rows].max(1), t.time_ns.values
        slot = np.searchsorted(start, at, "right") - 1
        inside = (slot >= 0) & (at <= end[np.maximum(slot, 0)])
        return inside if inside.any() else everything

    def hardware(self, finding: Finding) -> list[str]:
        """Return what confirms that a processor is slow: clocks, reasons, heat."""
        out = []
        clock = self.compare("sm_clock_mhz", finding)
        if clock is not None and clock[0] < LOWER_CLOCK * clock[1]:
            out.append(f"SM clock {clock[0]:.0f} MHz against {clock[1]:.0f}")
        reasons = self.compare("throttle_reasons", finding)
        if reasons is not None and (bits := int(reasons[0]) & ~IDLE_REASONS & ~int(reasons[1])):
            out.append("throttled by " + ", ".join(w for b, w in _REASONS.items() if bits & b))
        heat = self.compare("temperature_c", finding)
        if out and heat is not None and heat[0] > heat[1] + 5:
            out.append(f"{heat[0]:.0f} °C against {heat[1]:.0f}")
        return out

    def run_queue(self, finding: Finding) -> str:
        """Return the time that a rank waited for a CPU, in words; empty where it is no more than that of others."""
        share = self.compare("run_queue_fraction", finding)
        if share is None or share[0] < share[1] + QUEUED:
            return ""
        return f"{share[0]:.2f} of the time in the run queue against {share[1]:.3f}: its CPU is shared"

    def tokens(self, layout: Layout) -> dict[int, float]:
        """Return the tokens that the experts of each rank got over the mean of its expert group, by rank."""
        m = self.metrics
        if m is None or layout.ep == 1:
            return {}
        mine = m.name.values == "expert_tokens"
        rank, value = m["rank"].values[mine], m.value.values[mine].astype(np.float64)
        if not len(rank):
            return {}
        ranks, at = np.unique(rank, return_inverse=True)
        load = dict(zip(ranks.tolist(), np.bincount(at, weights=value).tolist(), strict=True))
        out: dict[int, float] = {}
        for group in layout.groups("ep"):
            each = [load[r] for r in group if r in load]
            mean = float(np.mean(each)) if each else 0.0
            out |= {r: load[r] / mean for r in group if r in load and mean > 0}
        return out
