"""Idle, compute and non-compute time of device lanes, and overlap, as HolisticTraceAnalysis counts them."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import xarray as xr

from mappnb.analysis._input import events_of
from mappnb.analysis._intervals import union_length
from mappnb.run import Run
from mappnb.terms import UNTOLD_STREAM, Category

__all__ = ["hta_breakdown"]

Array = np.ndarray[Any, Any]
_COMMUNICATION = re.compile(r"^nccl.*Kernel")
_NO_COMPUTE = re.compile(r"^Memcpy|^Memset|^dma|.*Memcpy|.*Sync")
_COMPUTE, _COMM, _OTHER = 0, 1, 2
_WORK = (Category.COMPUTE, Category.OPTIMIZER, Category.EVALUATION)


def hta_breakdown(
    run: Run | xr.Dataset,
    *,
    step: int | slice | None = None,
    include_last_step: bool = False,
    whole_us: bool | None = None,
) -> xr.Dataset:
    """Return how long each rank's device was idle, computed, or did something else, by HolisticTraceAnalysis' definitions.

    Parameters
    ----------
    run : Run or Dataset, dims (event,)
        Events; only those of device lanes count: a ``stream`` of 0 or more. Device work whose trace tells no stream
        (:data:`mappnb.terms.UNTOLD_STREAM` and above) counts where it lies within a step.
    step : int or slice, optional
        Steps to look at. Where given, all of them count, and ``include_last_step`` says nothing.
    include_last_step : bool
        False leaves out the last step of a rank that has several, as HTA does by default.
    whole_us : bool, optional
        Round the ranks' own times inwards to whole µs before anything is counted, as HTA does where a trace has fractions of a µs:
        starts up, ends down, in doubles (quarters of a µs for times since 1970). The numbers are then HTA's to the µs; without it
        they are exact. By default imported traces are rounded, and recorded and simulated ones are not.

    Returns
    -------
    Dataset, dims (rank,)
        ``span_ns`` first start to last end of the device events; ``idle_ns`` no event ran; ``compute_ns`` a computation kernel ran;
        ``non_compute_ns = span_ns - idle_ns - compute_ns``, ns. ``communication_ns`` a communication kernel ran; ``overlap_fraction``
        both ran, over ``communication_ns``: 0 to 1, NaN without communication. Ranks without device events are not in it.

    Notes
    -----
    HolisticTraceAnalysis 0.5: ``BreakdownAnalysis.get_temporal_breakdown`` and ``CommunicationAnalysis.get_comm_comp_overlap``
    (which print percent). Communication is a transfer, or a name ``^nccl.*Kernel``; memory is ``Memcpy``, ``Memset``, ``dma``;
    the rest computes, except names with ``Sync`` in them. The traps of these definitions: a collective that waits for a late rank
    is not idle but non-compute, so a victim looks busy; ``compute_ns`` holds the communication it hides, so that the overlap is in
    no other number; each rank has its own span, so shares of different ranks are not of the same time; a kernel with ``Sync`` in its
    name (SyncBatchNorm) does not compute; and the last step is left out. HTA 0.5 takes device work without a
    stream for host work. With several steps, HTA also drops device events whose launch it has not seen (``issue_ns`` below 0). HTA
    counts exactly with ``HTA_DISABLE_NS_ROUNDING=1``. For steps that sum to one window over all ranks
    see :func:`mappnb.analysis.breakdown`.
    """
    events = events_of(run, step)
    events = events.isel(event=np.flatnonzero(_counted(events, whole=step is not None or include_last_step)))
    ranks, cell = np.unique(events["rank"].values, return_inverse=True)
    start, end = _times(events, whole_us=bool(events.attrs.get("imported", False)) if whole_us is None else whole_us)
    kind = _kinds(events)

    def busy(mask: Array) -> Array:
        return union_length(cell[mask], start[mask], end[mask], len(ranks))

    first, last = np.full(len(ranks), np.iinfo(np.int64).max), np.full(len(ranks), np.iinfo(np.int64).min)
    np.minimum.at(first, cell, start)
    np.maximum.at(last, cell, end)
    span = last - first if len(ranks) else np.zeros(0, np.int64)
    compute, communication = busy(kind == _COMPUTE), busy(kind == _COMM)
    idle = span - busy(np.ones(len(kind), bool))
    both = compute + communication - busy(kind != _OTHER)
    fraction = np.full(len(ranks), np.nan)
    np.divide(both, communication, out=fraction, where=communication > 0)
    columns = {
        "span_ns": (span, "first start to last end of the device events"),
        "idle_ns": (idle, "no device event ran"),
        "compute_ns": (compute, "a computation kernel ran"),
        "non_compute_ns": (span - idle - compute, "something ran that does not compute, and no computation kernel"),
        "communication_ns": (communication, "a communication kernel ran"),
    }
    data: dict[str, Any] = {k: ("rank", v, {"units": "ns", "long_name": text}) for k, (v, text) in columns.items()}
    text = "communication beside computation, over communication"
    data["overlap_fraction"] = ("rank", fraction, {"units": "1", "long_name": text})
    return xr.Dataset(data, coords={"rank": ranks}, attrs=dict(events.attrs))


def _times(events: xr.Dataset, *, whole_us: bool) -> tuple[Array, Array]:
    """Return start and end in ns; in whole µs of the rank's own clock, where an event within one µs ends before it starts."""
    if not whole_us:
        start = events.start_ns.values.astype(np.int64)
        return start, start + events.duration_ns.values
    own, length = events.raw_start_ns.values.astype(np.int64), events.duration_ns.values
    start = own // 1000 + own % 1000 / 1000  # the double that HTA has: since 1970, quarters of a µs
    end = start + length / 1000
    return np.ceil(start).astype(np.int64) * 1000, np.floor(end).astype(np.int64) * 1000


def _counted(events: xr.Dataset, *, whole: bool) -> Array:
    """Mask of the device events that HTA would count."""
    stream, step, issue = events.stream.values, events["step"].values, events.issue_ns.values
    device = (stream >= 0) & ((stream < UNTOLD_STREAM) | (step >= 0))
    ranks, cell = np.unique(events["rank"].values, return_inverse=True)
    last = np.full(len(ranks), -1, np.int64)
    np.maximum.at(last, cell, step)
    several = np.zeros(len(ranks), bool)
    several[cell[(step >= 0) & (step < last[cell])]] = True
    launches = np.zeros(len(ranks), bool)
    launches[cell[device & (issue >= 0)]] = True
    out = device & ~(several & launches)[cell] | device & (issue >= 0)
    return np.asarray(out if whole else out & ~(several[cell] & (step == last[cell])))


def _kinds(events: xr.Dataset) -> Array:
    """Return computation, communication or other, for each event."""
    names, which = np.unique(events.name.values.astype(str), return_inverse=True)
    nccl = np.array([_COMMUNICATION.match(n) is not None for n in names], bool)[which]
    silent = np.array([_NO_COMPUTE.match(n) is not None for n in names], bool)[which]
    category = events.category.values
    moving = (category == Category.COLLECTIVE) | (category == Category.P2P)
    works = np.isin(category, _WORK) & ~silent
    return np.where(nccl | moving, _COMM, np.where(works, _COMPUTE, _OTHER))
