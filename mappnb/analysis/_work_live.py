"""The self-time table of a run that is being recorded: the steps that ended since the last look, and nothing read twice."""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np
import xarray as xr

from mappnb.analysis._work_block import Block, Sites
from mappnb.analysis._work_feed import run_tables
from mappnb.analysis._work_table import Table, as_dataset, join
from mappnb.analysis._work_tail import RankTail
from mappnb.clockmodel import ClockModel
from mappnb.run import Run
from mappnb.store import Incarnation, Segment
from mappnb.tables import Sites as SiteNumbers

__all__ = ["GONE_S", "WorkTable"]

GONE_S = 10.0
"""A rank that has written nothing for so long is not waited for: twice ``mappnb.run.LIVE_S``, for recorders write every second."""
CLOCK_S = 60.0
"""How long a clock model of a live run is used. A clock of 50 ppm drifts 3 ms in that time; between hosts anchors are no better."""


class WorkTable:
    """Follows a live run; :meth:`update` gives the self-time table of the steps that ended since.

    Parameters
    ----------
    run : Run
        The run. It is looked at only at the first update; later ones list its folders and read what was added.
    gone_s : float
        A rank that has written nothing for this long, in s, is not waited for.

    Notes
    -----
    A step is complete once every rank has ended it, those that are gone and those that have left the job aside. Rows of a device that
    come after their step was handed out are left out. After a restart the new incarnation begins anew: its steps count.
    """

    def __init__(self, run: Run, *, gone_s: float = GONE_S) -> None:
        self.run, self.gone_s = run, gone_s
        self._number = -1
        self._tails: dict[int, RankTail] = {}
        self._changed_s: dict[int, float] = {}
        self._left: set[int] = set()
        self._used = -1
        self._first = True
        self._clock: tuple[float, ClockModel] | None = None
        self._sites = SiteNumbers()

    def update(self) -> xr.Dataset | None:
        """Return the table of the steps completed since the last update, as :func:`mappnb.analysis.work` gives it; else None."""
        incarnation = self._look()
        if incarnation is None:
            return None
        last = self._complete(incarnation)
        if last <= self._used:
            return None
        tables = self._read_all(last) if self._first else [self._read(last)]
        self._first, self._used = False, last
        if not any(t.present.any() for t in tables):
            return None
        hosts = {int(r): str(i.get("host") or "") for r, i in incarnation.ranks.items()}
        return as_dataset(join(tables), hosts=hosts, attrs=dict(self.run._attrs()))

    @property
    def quiet_s(self) -> float:
        """Time since a rank of the newest restart has written anything, s; 0 before the first update."""
        return time.monotonic() - max(self._changed_s.values()) if self._changed_s else 0.0

    # ---------------------------------------------------------------------------------------------- what there is
    def _look(self) -> Incarnation | None:
        """Take note of what grew; returns the newest restart."""
        incarnations = self.run.store.incarnations()
        if not incarnations:
            return None
        newest = incarnations[-1]
        if newest.number != self._number:
            restarted = self._number >= 0
            self._number, self._tails, self._changed_s, self._left, self._used = newest.number, {}, {}, set(), -1
            self._first = not restarted
        by_rank: dict[int, list[Segment]] = {}
        for segment in self.run.store.segments("events", newest.number):
            by_rank.setdefault(segment.rank, []).append(segment)
        now = time.monotonic()
        for rank in range(newest.world_size):
            tail = self._tails.setdefault(rank, RankTail(self.run.store))
            if tail.look(by_rank.get(rank, [])) or rank not in self._changed_s:
                self._changed_s[rank] = now - self._age_s(by_rank.get(rank, []))
        return newest

    def _age_s(self, segments: list[Segment]) -> float:
        """Return how long ago the newest file changed, s; 0 where the file system does not tell."""
        if not segments or not self.run.store.local:
            return 0.0
        try:
            return max(0.0, time.time() - os.stat(segments[-1].path).st_mtime)
        except OSError:
            return 0.0

    def _complete(self, incarnation: Incarnation) -> int:
        """Return the last step that every rank that counts has ended."""
        now = time.monotonic()
        idle = {r for r, at in self._changed_s.items() if now - at > min(1.0, self.gone_s) and r not in self._left}
        if idle:
            infos = incarnation.ranks
            self._left |= {r for r in idle if r in infos and infos[r].get("ended")}
        gone = {r for r in idle if now - self._changed_s[r] > self.gone_s}
        waited = [t.ended for r, t in self._tails.items() if r not in gone and r not in self._left]
        if waited:
            return min(waited)
        left = [self._tails[r].seen for r in self._left]  # nobody writes any more
        return max(left, default=max((t.ended for t in self._tails.values()), default=-1))

    # ----------------------------------------------------------------------------------------------- what it says
    def _model(self) -> ClockModel:
        now = time.monotonic()
        if self._clock is None or now - self._clock[0] > CLOCK_S:
            self.run._look()  # rank files only: tables stay as they were read
            self._clock = now, self.run.clock_model
        return self._clock[1]

    def _read_all(self, last: int) -> list[Table]:
        """Read what was there before the first update as a whole run is read."""
        self.run.refresh()
        tables = list(run_tables(self.run, (0, last)))
        for tail in self._tails.values():
            tail.skip(last)
        return tables

    def _read(self, last: int) -> Table:
        clock, ranks = self._model(), sorted(self._tails)
        pieces = [self._tails[r].rows(last) for r in ranks]
        lookups: dict[int, Any] = {}
        for _, described in (p for some in pieces for p in some):
            lookups.setdefault(id(described), self._sites.lookup(described))
        category, op, name, phase = (self._sites.values(n)[:-1] for n in ("category", "op", "name", "phase"))
        sites = Sites.of(category, op, name, phase)
        block = Block(np.array(ranks, np.int64))
        block.begin(self._used + 1, last)
        for column, some in enumerate(pieces):
            key = (self._number, ranks[column])
            for rows, described in some:
                own = rows["start_ns"]
                start = own + clock.shift(key, own)
                end = own + rows["duration_ns"]
                length = np.maximum(end + clock.shift(key, end) - start, 0)
                block.add(column, {**rows, "start_ns": start, "duration_ns": length}, sites.at(lookups[id(described)]))
            block.end_rank(column)
        return block.table()
