"""Self time with waits removed, per step and rank: what the straggler detector judges."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from mappnb.analysis._identity import transfer_keys
from mappnb.analysis._input import events_of, issue_only
from mappnb.analysis._work_cells import Cells, Columns, cells_of
from mappnb.analysis._work_parts import COMPUTE_KINDS, HOST, KINDS, WAIT, kinds_of, part_names
from mappnb.analysis.matching import Calls, calls_of
from mappnb.errors import MappnbError
from mappnb.run import Run
from mappnb.terms import Category, Flag

__all__ = ["work"]

Array = np.ndarray[Any, Any]


def work(run: Run | xr.Dataset, *, step: int | slice | None = None) -> xr.Dataset:
    """Return the self time of each rank in each step, by part, with the waits for other ranks taken out.

    Parameters
    ----------
    run : Run or Dataset, dims (event,)
        Events of all ranks, recorded, imported or simulated.
    step : int or slice, optional
        Steps to look at; all by default.

    Returns
    -------
    Dataset, dims (step, rank, part)
        ``seconds`` (step, rank, part), s: self time, nested spans of other parts, waits and transfers taken out; ``count`` (step,
        rank, part): spans; ``present`` (step, rank): the rank has events in the step; ``wait_s`` and ``transfer_s`` (step, rank),
        s: blocked in transfers before and after the last member had come; ``imposed_s`` (step, rank), s: what the rank made others
        wait in the calls to which it came last; ``last_calls`` and ``calls`` (step, rank): calls to which it came last, alone, and
        all that it shared with a recorded rank; ``step_s`` (step,), s: first start to last end over the ranks. Coordinates:
        ``step``, ``rank``, ``host`` (rank,), ``part`` such as ``forward@3``, ``part_kind`` and ``part_stage`` (part,), -1 for no stage.

    Raises
    ------
    MappnbError
        If there are no events in these steps, or none belongs to a step.

    Notes
    -----
    At each instant the innermost span of a thread says what the thread does. Kinds of parts: compute by its phase (``compute``
    where it has none), by stage; optimizer, data, checkpoint, evaluation, gc (garbage collections of Python); ``host``: all else from
    the first start to the last end of the rank in the step, holes included. For a rank with one lane, the parts, ``wait_s`` and
    ``transfer_s`` sum to that extent. Where ranks compute on device lanes, those count and the host spans that issued the work do
    not; waits and transfers that another lane of the rank computes beside are not waits.

    A transfer in flight beside the program (``Flag.ASYNC``) blocks nobody; the event that waits for it does. Calls are matched by
    identity, never by time (:func:`mappnb.analysis.match`). Steps that were repeated after a restart count once, as run last. The
    straggler is who imposes and does not wait (Jiang et al., MegaScale, arXiv:2402.15627, section 5.1, compares compute alone).
    """
    events = events_of(run, step)
    events = _newest(_real(events))
    if not events.sizes["event"]:
        raise MappnbError(_nothing(run, step))
    return _table(events, hosts_of(run))


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


def _nothing(run: Run | xr.Dataset, step: int | slice | None) -> str:
    where = f"{run.path}: " if isinstance(run, Run) else ""
    if step is not None:
        return f"work: {where}no events in step {step}; see run.steps for the steps that there are"
    return (
        f"work: {where}no event belongs to a step; expected events with step 0 or above: record with mappnb.step() around each "
        "iteration (in torch.profiler traces prof.step() marks them), or give the events a 'step' of your own"
    )


def hosts_of(run: Run | xr.Dataset) -> dict[int, str]:
    """Return the host of each rank where it is known; of a dataset, which ranks share one, as ``host of rank 8``."""
    if isinstance(run, Run):
        return {int(r): str(i.get("host") or "") for inc in run.incarnations for r, i in inc.ranks.items()}
    shared = json.loads(run.attrs.get("clocks", "{}"))
    return {int(r): f"host of rank {min(ranks)}" for groups in shared.values() for ranks in groups for r in ranks}


def _table(events: xr.Dataset, hosts: dict[int, str]) -> xr.Dataset:
    steps, row = np.unique(events["step"].values, return_inverse=True)
    ranks, col = np.unique(events["rank"].values, return_inverse=True)
    kind = _kinds(events)
    part, part_kind, part_stage = parts_of(kind, events.stage.values)
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
        issue=issue_only(events),
        call=_calls(events, calls),
    )
    cells = cells_of(columns, num_cells=len(steps) * len(ranks), num_parts=len(part_kind))
    return as_dataset(cells, steps, ranks, part_kind, part_stage, hosts=hosts, attrs=dict(events.attrs))


def _kinds(events: xr.Dataset) -> Array:
    """Return the kind of each event."""
    words = [events[n].values for n in ("category", "op", "name", "phase")]
    code = np.zeros(len(words[0]), np.int64)
    for word in words:
        each, unique = pd.factorize(word)
        code = pd.factorize(code * (len(unique) + 1) + each)[0]
    _, first, back = np.unique(code, return_index=True, return_inverse=True)
    return np.asarray(kinds_of(*(w[first] for w in words))[back])


def parts_of(kind: Array, stage: Array) -> tuple[Array, Array, Array]:
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


def as_dataset(
    cells: Cells,
    steps: Array,
    ranks: Array,
    part_kind: Array,
    part_stage: Array,
    *,
    hosts: dict[int, str],
    attrs: dict[str, Any],
) -> xr.Dataset:
    """Return cells as the labelled table; the last part is ``host``."""
    grid = (len(steps), len(ranks))
    ns = cells.self_ns.copy()
    ns[:, -1] = cells.host_ns
    present = (cells.last >= cells.first).reshape(grid)
    first = np.where(present, cells.first.reshape(grid), np.iinfo(np.int64).max).min(1, initial=np.iinfo(np.int64).max)
    last = np.where(present, cells.last.reshape(grid), np.iinfo(np.int64).min).max(1, initial=np.iinfo(np.int64).min)
    both, every = ("step", "rank"), ("step", "rank", "part")
    data: dict[str, Any] = {
        "seconds": (every, (ns / 1e9).reshape(*grid, -1), {"units": "s", "long_name": "self time"}),
        "count": (every, cells.count.reshape(*grid, -1).astype(np.int32), {"units": "1", "long_name": "spans"}),
        "present": (both, present, {"long_name": "the rank has events in this step"}),
    }
    seconds = {"wait_s": cells.wait_ns, "transfer_s": cells.transfer_ns, "imposed_s": cells.imposed_ns}
    data |= {k: (both, (v / 1e9).reshape(grid), {"units": "s"}) for k, v in seconds.items()}
    numbers = {"last_calls": cells.last_calls, "calls": cells.calls}
    data |= {k: (both, v.reshape(grid).astype(np.int32), {"units": "1"}) for k, v in numbers.items()}
    data["step_s"] = (
        "step",
        (last - first) / 1e9,
        {"units": "s", "long_name": "first start to last end over the ranks"},
    )
    coords = {
        "step": steps.astype(np.int32),
        "rank": ranks.astype(np.int32),
        "part": part_names(part_kind, part_stage),
        "part_kind": ("part", np.array([KINDS[k] for k in part_kind.tolist()], object)),
        "part_stage": ("part", part_stage),
        "host": ("rank", np.array([hosts.get(int(r), "") for r in ranks], object)),
    }
    return xr.Dataset(data, coords=coords, attrs=attrs)
