"""What a watcher reads of a growing run: the self-time table, how far every rank has come, and whether the job still lives."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xarray as xr

from mappnb.analysis import work
from mappnb.run import Run

__all__ = ["Feed", "Look"]

Array = np.ndarray[Any, Any]
ORDERLY = ("finished", "exit", "imported")
"""Ends of a recording that are none by a signal or an exception."""
_BESIDE = {"part_kind": "part", "part_stage": "part", "host": "rank"}
KEPT_FIRST, KEPT_LAST = 64, 256
"""Steps of the beginning and of the end that are kept: more than are judged."""


@dataclass(frozen=True)
class Look:
    """What there is at one look.

    Attributes
    ----------
    table : Dataset, dims (step, rank, part), or None
        Self-time table; its newest steps may still grow.
    last : int
        Newest step that has ended on every rank; -1 for none.
    incarnation, first_step : int
        Newest incarnation of the job, and the first step of it (-1: none yet).
    world_size : int
        Ranks that the job has.
    state : str
        ``"waiting"`` (no rank has come), ``"recording"``, ``"ended"`` (every rank has told that it ended).
    degraded : dict of int to str
        Ranks whose recorder has turned itself off, and why.
    failed : dict of int to str
        Ranks that ended by a signal or an exception, and by which.
    quiet_s : float
        Time since anything of the run has changed on disk, s.
    """

    table: xr.Dataset | None
    last: int
    incarnation: int
    first_step: int
    world_size: int
    state: str
    degraded: dict[int, str] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    quiet_s: float = 0.0


class Feed:
    """Looks at a run again and again; reads what is new, and never writes.

    Parameters
    ----------
    run : Run
        The run; nobody else may refresh it.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self._table: xr.Dataset | None = None
        self._read = -1  # newest step in the table
        self._incarnation = -1

    def look(self) -> Look:
        """Return what there is now."""
        self.run.refresh()
        newest = self.run.incarnations[-1] if self.run.incarnations else None
        if newest is None or not len(newest.ranks):
            return Look(None, -1, -1, -1, 0, "waiting")
        infos = dict(newest.ranks)
        degraded = {r: str(i["degraded"]) for r, i in infos.items() if i.get("degraded")}
        ends = {r: str(i["ended"].get("reason", "")) for r, i in infos.items() if i.get("ended")}
        first, last = self._reached(newest.number, set(ends), set(degraded))
        if newest.number != self._incarnation:
            self._incarnation = newest.number
            self._read = min(self._read, first - 1) if first >= 0 else self._read
        self._extend(last)
        return Look(
            self._table, last, newest.number, first, newest.world_size,
            "ended" if len(ends) == newest.world_size else "recording",
            degraded, {r: why for r, why in ends.items() if why not in ORDERLY},
            max(0.0, time.time() - self.run.last_seen_s),
        )  # fmt: skip

    def _extend(self, last: int) -> None:
        """Add the steps that have ended since the last look."""
        if last <= self._read:
            return
        fresh = work(self.run, step=slice(self._read + 1, last))
        fresh = fresh.isel(step=np.flatnonzero(fresh["step"].values > self._read))
        if self._table is None:
            self._table = fresh
        else:
            held = self._table.isel(step=np.flatnonzero(self._table["step"].values <= self._read))
            self._table = _joined(_shortened(held), fresh)
        self._read = last

    def _reached(self, incarnation: int, ended: set[int], degraded: set[int]) -> tuple[int, int]:
        """Return the first step of an incarnation, and the newest that has ended on all ranks that go on."""
        low: dict[int, int] = {}
        high: dict[int, int] = {}
        for part in self.run._reader("events").parts:
            if part.key[0] != incarnation or not part.rows:
                continue
            if part.index is not None:
                a, b = part.index.bounds[2:]
            else:
                steps = (part.columns or {})["step"]
                a, b = int(steps[steps >= 0].min(initial=2**31 - 1)), int(steps.max())
            rank = part.key[1]
            if b >= 0:
                low[rank], high[rank] = min(low.get(rank, a), max(a, 0)), max(high.get(rank, b), b)
        if not high:
            return -1, -1
        done = [h if r in ended else h - 1 for r, h in high.items() if r not in degraded or r in ended]
        return min(low.values()), min(done, default=max(high.values()) - 1)


def _shortened(table: xr.Dataset) -> xr.Dataset:
    """Return a table without the steps in its middle, that are not judged any more."""
    size = table.sizes["step"]
    if size <= KEPT_FIRST + 2 * KEPT_LAST:
        return table
    return table.isel(step=np.r_[:KEPT_FIRST, size - KEPT_LAST : size])


def _joined(before: xr.Dataset, after: xr.Dataset) -> xr.Dataset:
    """Return two tables of different steps as one; ranks and parts that one of them lacks were not there, or took no time."""
    parts = list(dict.fromkeys([*before["part"].values.tolist(), *after["part"].values.tolist()]))
    ranks = np.union1d(before["rank"].values, after["rank"].values)
    both = [_widened(t, parts, ranks) for t in (before, after)]
    out = xr.concat(
        both,
        "step",
        data_vars="minimal",
        coords="minimal",
        compat="override",
        join="override",
        combine_attrs="override",
    )
    named = {n: _named(before, after, n, dim) for n, dim in _BESIDE.items()}
    kinds = {"part_kind": object, "part_stage": np.int64, "host": object}
    beside = {n: np.array([named[n][x] for x in out[d].values.tolist()], kinds[n]) for n, d in _BESIDE.items()}
    return out.assign_coords({n: (_BESIDE[n], v) for n, v in beside.items()})


def _named(before: xr.Dataset, after: xr.Dataset, name: str, dim: str) -> dict[Any, Any]:
    """Return a coordinate that lies beside a dimension as a mapping."""
    return {k: v for t in (before, after) for k, v in zip(t[dim].values.tolist(), t[name].values.tolist(), strict=True)}


def _widened(table: xr.Dataset, parts: list[str], ranks: Array) -> xr.Dataset:
    bare = table.drop_vars(list(_BESIDE))
    if bare["part"].values.tolist() == parts and np.array_equal(bare["rank"].values, ranks):
        return bare
    return bare.reindex(part=parts, rank=ranks, fill_value={n: v.dtype.type(0) for n, v in bare.data_vars.items()})
