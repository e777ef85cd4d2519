"""One look at the events of a run: what there is, without decoding it, and columns that stay as they are while the run grows."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import xarray as xr

from mappnb import datasets
from mappnb.errors import MappnbError
from mappnb.run import Run
from mappnb.terms import EVENT
from mappnb.widgets._coded import coded_variable
from mappnb.widgets._loaded import Classify

__all__ = ["Snapshot"]

Array = np.ndarray[Any, Any]
_T = TypeVar("_T")


class Snapshot:
    """The events of a run as they are now; a later :meth:`Run.refresh` does not change them.

    Parameters
    ----------
    run : Run
        Looked at as it is; not refreshed.
    """

    def __init__(self, run: Run) -> None:
        self.run, self.clock, self.attrs = run, run.clock_model, dict(run.events.attrs)
        self._reader = copy.copy(run._reader("events"))  # its list of segments is replaced by a refresh, never changed
        self.parts = [p for p in self._reader.parts if p.rows]
        self.events = datasets.events_lazy(self._reader, self.clock, self.attrs)

    @property
    def num_events(self) -> int:
        """Number of events."""
        return int(self._reader.rows)

    @property
    def signature(self) -> tuple[tuple[str, int], ...]:
        """What tells whether anything was written between two snapshots."""
        return tuple((p.segment.path, p.segment.size) for p in self._reader.parts)

    @property
    def extent_ns(self) -> tuple[int, int]:
        """First start and last end on the run clock, ns; (0, 0) without events."""
        bounds = [self._bounds(p) for p in self.parts]
        return (min(b[0] for b in bounds), max(b[1] for b in bounds)) if bounds else (0, 0)

    def _bounds(self, part: Any) -> tuple[int, int]:
        if part.index is not None:
            own = np.array(part.index.bounds[:2], np.int64)
        else:
            start = part.columns["start_ns"]
            own = np.array([start.min(), (start + part.columns["duration_ns"]).max()], np.int64)
        first, last = (own + self.clock.shift(part.key, own)).tolist()
        return first, last

    def num_near(self, t0_ns: int, t1_ns: int) -> int:
        """Return how many events may overlap a window: those of all row groups that do."""
        total = 0
        for part in self.parts:
            t0, t1 = self.clock.own_ns(part.key, t0_ns), self.clock.own_ns(part.key, t1_ns)
            if part.columns is not None:
                start = part.columns["start_ns"]
                total += int(((start < t1) & (start + part.columns["duration_ns"] >= t0)).sum())
            elif part.index is not None:
                total += int(part.index.row_groups[part.index.overlapping((t0, t1), None), 4].sum())
        return total

    def ranks(self) -> list[tuple[int, slice]]:
        """Return (rank, events) of each (incarnation, rank), in the order of ``events``."""
        out: list[tuple[tuple[int, int], slice]] = []
        first = 0
        for part in self._reader.parts:
            last = first + part.rows
            if out and out[-1][0] == part.key:
                out[-1] = (part.key, slice(out[-1][1].start, last))
            else:
                out.append((part.key, slice(first, last)))
            first = last
        return [(key[1], rows) for key, rows in out]

    def classes(self, classify: Classify, rows: slice = slice(0, None)) -> Array:
        """Return the class of some events; only the descriptions of the run's sites are looked at."""
        sites = self._reader.sites
        fields = {f: (EVENT, sites.values(f)) for f in ("category", "op", "phase")}
        of_site = np.asarray(classify(xr.Dataset(fields)), np.uint8)
        return np.asarray(of_site[self._reader.column("site", rows.start or 0, rows.stop)])

    def sites(self, rows: slice) -> Array:
        """Return the number of the description of some events, int32 array, dims (event,)."""
        return np.asarray(self._reader.column("site", rows.start or 0, rows.stop), np.int32)

    def coded(self, name: str, sites: Array) -> xr.Variable:
        """Return a column of descriptions that is worked out from their numbers when it is looked at."""
        return coded_variable(sites, self._reader.sites.values(name), like=self.events[name].variable)

    def hosts(self) -> dict[int, str]:
        """Return the host of each rank; of the newest incarnation that tells."""
        return {r: str(i["host"]) for inc in self.run.incarnations for r, i in inc.ranks.items() if i.get("host")}

    def threads(self) -> dict[tuple[int, int], str]:
        """Return the name of each (rank, thread) whose program named it."""
        named = ((p.key[1], p.meta.get("threads") or {}) for p in self.parts)
        return {(rank, int(i)): str(t[1]) for rank, all_ in named for i, t in all_.items() if len(t) > 1 and t[1]}

    def reading(self, read: Callable[[], _T]) -> _T:
        """Return what ``read`` returns; a segment that is found unreadable is an error, not a hole.

        Raises
        ------
        MappnbError
            Names the segment and the cure.
        """
        out: list[_T] = []
        with contextlib.suppress(UserWarning):  # the reader's warning, where warnings are errors
            out.append(read())
        problems, root = self.run.store.problems, self.run.store.root
        places = [p.segment.path.removeprefix(root).lstrip("/") for p in self.parts]
        bad = next((p for p in places if p in problems), None)
        if bad is not None or not out:
            raise MappnbError(
                f"{self.run.path}: {bad}: {problems.get(bad or '', 'unreadable')}; the timeline needs all of what it shows: "
                f"run 'mappnb check {self.run.path}', then restore the file or move it out of the run"
            )
        return out[0]
