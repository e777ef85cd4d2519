"""What a watcher reads of a growing run: the self-time table, how far every rank has come, and whether the job still lives."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xarray as xr

from mappnb._watch_near import Near
from mappnb.analysis._work_live import GONE_S, WorkTable
from mappnb.run import Run

__all__ = ["Feed", "Look"]

Array = np.ndarray[Any, Any]
ORDERLY = ("finished", "exit", "imported")
"""Ends of a recording that are none by a signal or an exception."""
SETTLED_S = 1.0
"""Time without a change, s, after which nothing of an ended run is missing: a recorder writes once a second."""
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

    def __init__(self, run: Run, *, gone_s: float = GONE_S) -> None:
        self.run, self.gone_s = run, gone_s
        self.work = WorkTable(run, gone_s=gone_s)
        self._near = Near(self.work)
        self._table: xr.Dataset | None = None
        self._first, self._last = -1, -1  # steps of the newest incarnation
        self._incarnation = -1

    def look(self) -> Look:
        """Return what there is now."""
        fresh = self.work.update()
        self.run._look()  # who there is and how it goes; tables stay as they were read
        newest = self.run.incarnations[-1] if self.run.incarnations else None
        if newest is None or not len(newest.ranks):
            return Look(None, -1, -1, -1, 0, "waiting")
        if newest.number != self._incarnation:
            self._incarnation, self._first, self._last = newest.number, -1, -1
        self._near.note(newest.number)
        if fresh is not None:
            self._extend(fresh)
        infos = dict(newest.ranks)
        ends = {r: str(i["ended"].get("reason", "")) for r, i in infos.items() if i.get("ended")}
        quiet_s = self.work.quiet_s
        over = len(ends) == newest.world_size and quiet_s > min(SETTLED_S, self.gone_s)
        return Look(
            self._table, self._last, newest.number, self._first, newest.world_size, "ended" if over else "recording",
            {r: str(i["degraded"]) for r, i in infos.items() if i.get("degraded")},
            {r: why for r, why in ends.items() if why not in ORDERLY}, quiet_s,
        )  # fmt: skip

    def near(self, first: int) -> Run:
        """Return the run as it is now, to look into the steps from ``first`` on; some of what is older is missing in it."""
        return self._near.run(first)

    def _extend(self, fresh: xr.Dataset) -> None:
        """Add the steps that have ended since the last look; of those that were repeated, the last try counts."""
        steps = fresh["step"].values
        self._first = int(steps[0]) if self._first < 0 else self._first
        self._last = int(steps[-1])
        if self._table is None:
            self._table = fresh
            return
        held = self._table.isel(step=np.flatnonzero(self._table["step"].values < steps[0]))
        self._table = _joined(_shortened(held), fresh)


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
    first, then = (_widened(t, parts, ranks) for t in (before, after))
    data = {
        n: (v.dims, np.concatenate([v.values, then[n].values], v.dims.index("step")), v.attrs)
        for n, v in first.data_vars.items()
    }
    coords: dict[str, Any] = {"rank": first["rank"], "part": first["part"]}
    coords["step"] = np.concatenate([t["step"].values for t in (first, then)])
    kinds = {"part_kind": object, "part_stage": np.int64, "host": object}
    for name, dim in _BESIDE.items():
        named = _named(before, after, name, dim)
        coords[name] = dim, np.array([named[x] for x in first[dim].values.tolist()], kinds[name])
    return xr.Dataset(data, coords=coords, attrs=first.attrs)


def _named(before: xr.Dataset, after: xr.Dataset, name: str, dim: str) -> dict[Any, Any]:
    """Return a coordinate that lies beside a dimension as a mapping."""
    return {k: v for t in (before, after) for k, v in zip(t[dim].values.tolist(), t[name].values.tolist(), strict=True)}


def _widened(table: xr.Dataset, parts: list[str], ranks: Array) -> xr.Dataset:
    bare = table.drop_vars(list(_BESIDE))
    if bare["part"].values.tolist() == parts and np.array_equal(bare["rank"].values, ranks):
        return bare
    return bare.reindex(part=parts, rank=ranks, fill_value={n: v.dtype.type(0) for n, v in bare.data_vars.items()})
