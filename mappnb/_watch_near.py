"""The newest steps of a live run, to be looked into: of growing streams only the end is read, not all since they were begun."""

from __future__ import annotations

import io
from collections import deque

from mappnb.analysis._work_live import WorkTable
from mappnb.run import Run
from mappnb.segments import read_open
from mappnb.store import Segment
from mappnb.tables import TableReader, _Part

__all__ = ["Near"]

NOTED = 8
"""Places that are remembered of each stream; a step before the oldest of them means reading the stream from its begin."""
APART = 16
"""Steps between two of them: so they reach back further than what is judged (RECENT steps)."""

Place = tuple[int, int, int]
"""Incarnation, rank and number of a stream."""


class Near:
    """Gives a run in which of open streams only the rows from a step on are sure to be there.

    Parameters
    ----------
    work : WorkTable
        What follows the run: it knows how far it has read each stream, and up to which step.
    """

    def __init__(self, work: WorkTable) -> None:
        self._work = work
        self._noted: dict[Place, deque[tuple[int, int]]] = {}  # (newest step before, offset)
        self._run: Run | None = None

    def note(self, incarnation: int) -> None:
        """Take down how far the streams have been read, with the newest step that has rows up to there."""
        current = set()
        for rank, tail in self._work._tails.items():
            for number, stream in tail._open.items():
                place = incarnation, rank, number
                current.add(place)
                noted = self._noted.setdefault(place, deque(maxlen=NOTED))
                if stream.schema and (not noted or tail.ended >= noted[-1][0] + APART):
                    noted.append((tail.seen, stream.offset))
        self._noted = {k: v for k, v in self._noted.items() if k in current}

    def run(self, first: int) -> Run:
        """Return a run with all that is there of the steps from ``first`` on, up to now; some of what is older is missing."""
        if self._run is None:
            self._run = Run(self._work.run.path)
            self._run._chosen = self._work.run._chosen
        run = self._run
        run._look()
        numbers = [i.number for i in run._incarnations]
        for reader in run._readers.values():
            if not isinstance(reader, _NearReader):
                reader.refresh(numbers)
        starts = {p: max((o for seen, o in n if seen < first), default=0) for p, n in self._noted.items()}
        known = run._readers.get("events")
        if isinstance(known, _NearReader):
            known.starts = starts
            known.refresh(numbers)
        else:
            run._readers["events"] = _NearReader(run, self._work, starts)
        return run


class _NearReader(TableReader):
    """Reads the events; streams from where it is told."""

    def __init__(self, run: Run, work: WorkTable, starts: dict[Place, int]) -> None:
        self._work, self.starts = work, starts
        super().__init__(run.store, "events", [i.number for i in run._incarnations])

    def _part(self, segment: Segment) -> _Part | None:
        if not segment.closed:
            self._cache.pop(segment.path, None)  # it may hold less than is wanted now
        return self._end_of(segment) or super()._part(segment)

    def _end_of(self, segment: Segment) -> _Part | None:
        """Return the end of a stream; None where there is no place to begin at, or the file is another by now."""
        start = self.starts.get((segment.incarnation, segment.rank, segment.number), 0)
        tail = self._work._tails.get(segment.rank)
        stream = tail._open.get(segment.number) if tail is not None else None
        if segment.closed or not start or stream is None:
            return None
        try:
            data = self.store.fs.cat_file(segment.path, start=start)
        except OSError:
            return None
        columns, new = read_open(io.BytesIO(stream.schema + data), self.spec)
        if not len(columns[self.spec.start]):
            return None
        sites = {**stream.meta.get("sites", {}), **new.get("sites", {})}
        plain = {k: v for k, v in new.items() if not isinstance(v, dict | list)}
        meta = {**stream.meta, **plain, "sites": sites}
        return self._checked(_Part(segment, len(columns[self.spec.start]), meta, columns=columns))
