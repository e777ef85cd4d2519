"""The self-time table in plain numpy, from events in memory: what the native one is tested against."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from mappnb.analysis._identity import transfer_keys
from mappnb.analysis._work_cells import Columns, cells_of
from mappnb.analysis._work_parts import COMPUTE_KINDS, HOST, KINDS, WAIT, kinds_of
from mappnb.analysis._work_table import Table
from mappnb.analysis.matching import Calls, calls_of
from mappnb.terms import Category, Flag

__all__ = ["reference_table"]

Array = np.ndarray[Any, Any]


def reference_table(events: xr.Dataset) -> Table:
    """Return the self-time table of events in memory, dims (event,). See :func:`mappnb.analysis.work`."""
    events = _newest(_real(events))
    return _table(events)


def _real(events: xr.Dataset) -> xr.Dataset:
    """Drop events outside steps, and marks of steps that were begun and never worked in."""
    unreal = (events.category.values == Category.MARK) & ((events.flags.values & Flag.CLIPPED) != 0)
    keep = (events["step"].values >= 0) & ~unreal
    return events if keep.all() else events.isel(event=np.flatnonzero(keep))


def _newest(events: xr.Dataset) -> xr.Dataset:
    """Keep the newest run of each step."""
    incarnation = events.incarnation.values
    if not len(incarnation) or incarnation.min() == incarnation.max():
        return events
    _, row = np.unique(events["step"].values, return_inverse=True)
    newest = np.full(row.max() + 1, -1)
    np.maximum.at(newest, row, incarnation)
    return events.isel(event=np.flatnonzero(incarnation == newest[row]))


def _table(events: xr.Dataset) -> Table:
    steps, row = np.unique(events["step"].values, return_inverse=True)
    ranks, col = np.unique(events["rank"].values, return_inverse=True)
    kind = _kinds(events)
    part, part_kind, part_stage = _parts_of(kind, events.stage.values)
    start = events.start_ns.values.astype(np.int64)
    calls = calls_of(events, "auto")
    cell = row * len(ranks) + col
    lane = np.stack([cell, events.thread.values, events.stream.values], 1)
    columns = Columns(
        cell=cell,
        rank=events["rank"].values,
        start=start,
        end=start + events.duration_ns.values,
        lane=np.unique(lane, axis=0, return_inverse=True)[1].ravel(),
        kind=kind,
        part=part,
        aside=(kind > HOST) & (kind < WAIT) & ((events.flags.values & Flag.ASYNC) != 0),
        issue=_issues(kind, events.stream.values, cell),
        call=_calls(events, calls),
    )
    cells = cells_of(columns, num_cells=len(steps) * len(ranks), num_parts=len(part_kind))
    grid = (len(steps), len(ranks))
    return Table(
        steps,
        ranks,
        list(zip(part_kind.tolist(), part_stage.tolist(), strict=True)),
        cells.self_ns.reshape(*grid, len(part_kind)),
        cells.count.reshape(*grid, len(part_kind)),
        np.stack(
            [
                cells.first,
                cells.last,
                cells.wait_ns,
                cells.transfer_ns,
                cells.covered_ns,
                cells.imposed_ns,
                cells.last_calls,
                cells.calls,
            ]
        ).reshape(8, *grid),
    )


def _kinds(events: xr.Dataset) -> Array:
    """Return the kind of each event."""
    words = [events[n].values for n in ("category", "op", "name", "phase")]
    code = np.zeros(len(words[0]), np.int64)
    for word in words:
        each, unique = pd.factorize(word)
        code = pd.factorize(code * (len(unique) + 1) + each)[0]
    _, first, back = np.unique(code, return_index=True, return_inverse=True)
    return np.asarray(kinds_of(*(w[first] for w in words))[back])


def _parts_of(kind: Array, stage: Array) -> tuple[Array, Array, Array]:
    """Return the part of each span (0 for transfers), and kind and stage of each part; host is always the last."""
    stage = np.where(kind < len(COMPUTE_KINDS), np.maximum(stage, -1), -1).astype(np.int64)
    key = np.minimum(kind, HOST).astype(np.int64) * 2**16 + stage + 1
    found = np.unique(np.append(key, HOST * 2**16))
    return np.searchsorted(found, key), (found >> 16).astype(np.int64), (found & 0xFFFF) - 1


def _calls(events: xr.Dataset, calls: Calls) -> Array:
    """Return the call of each transfer, and of each wait for one; -1 for none."""
    out = np.full(events.sizes["event"], -1, np.int64)
    out[calls.index] = calls.call
    waits = np.flatnonzero((events.category.values == Category.WAIT) & (events.seq.values >= 0))
    by_number = ~calls.transfers.by_order[calls.transfers.channel[calls.entry]]
    index, call = calls.index[by_number], calls.call[by_number]
    if not len(waits) or not len(index):
        return out
    both = np.concatenate([index, waits])
    source, target, _ = transfer_keys(events, both)
    fields = [source, target, *(events[n].values[both].astype(np.int64) for n in ("incarnation", "group", "seq"))]
    _, same = np.unique(np.stack(fields, 1), axis=0, return_inverse=True)
    same = same.ravel()
    of_key = np.full(same.max() + 1, -1, np.int64)
    of_key[same[: len(index)]] = call
    out[waits] = of_key[same[len(index) :]]
    return out


def _issues(kind: Array, stream: Array, cell: Array) -> Array:
    """Return which host spans only issued work: compute and optimizer where the rank computes on a device lane in that step."""
    on_device = np.unique(cell[(kind < len(COMPUTE_KINDS)) & (stream >= 0)])
    return np.asarray((kind <= KINDS.index("optimizer")) & (stream < 0) & np.isin(cell, on_device))
