"""What an importer is: a function registered under the name of a format, found by the content of the files."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mappnb.capture.importers._counters import Counters
from mappnb.capture.importers._sources import Source
from mappnb.layout import Layout
from mappnb.table_specs import Columns

__all__ = ["FORMATS", "Format", "ImportOptions", "Imported", "RankRows", "SiteRow", "places_among", "register_format"]

SiteRow = tuple[str, str, str, str, int, str]
"""Category, op, name, phase, layer, dtype of an event (``mappnb.schema.SITE_FIELDS``)."""


@dataclass(frozen=True, slots=True)
class ImportOptions:
    """What the caller asked for.

    Attributes
    ----------
    rank_from : re.Pattern, optional
        Finds the rank in the path of a file: its group ``rank``, or its first group.
    """

    rank_from: re.Pattern[str] | None = None


@dataclass
class RankRows:
    """One rank, ready to be written.

    Attributes
    ----------
    rank : int
        Global rank.
    sources : list of str
        Files that it came from.
    sites : list of SiteRow
        What the numbers in ``columns["site"]`` mean.
    columns : dict of str to array
        Columns of the events table (``mappnb.table_specs.TABLES["events"]``), dims (event,); ``site``, ``start_ns`` and
        ``duration_ns`` are needed, others are "not applicable" where left out. In any order of time.
    few : dict of str to (array of int, array)
        Further columns of which only few events have a value: rows in rising order, and their values.
    tables : dict of str to columns
        Rows of other tables: ``steps``, ``telemetry``, ``metrics``; missing columns likewise.
    facts : dict
        For the rank's file: host, device, layout, coords, groups, ...
    wall_offset_ns : int
        What to add to ``start_ns`` to get wall-clock time in ns since 1970. 0 where the times are that, or where it is not known.
    num_read : int
        Events in the files, of whatever kind.
    skipped : dict of str to int
        Events that were left out on purpose, by reason.
    repairs : dict of str to int
        What was mended, by kind.
    notes : list of str
        What the reader should know: where a guess was made, or why nothing came out.
    """

    rank: int
    sources: list[str]
    sites: list[SiteRow] = field(default_factory=list)
    columns: Columns = field(default_factory=dict)
    few: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    tables: dict[str, Columns] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    wall_offset_ns: int = 0
    num_read: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    repairs: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add_counters(self, counters: Counters, names: list[str], pid: int | None = None) -> None:
        """Make samples of counters rows of the metrics table."""
        rows = counters.columns(names, pid)
        if len(rows["time_ns"]):
            before = self.tables.get("metrics")
            self.tables["metrics"] = {k: np.concatenate([before[k], v]) for k, v in rows.items()} if before else rows
        if counters.unusable:
            self.skipped = {**self.skipped, "counter samples without a number": counters.unusable}


def places_among(rows: np.ndarray[Any, Any], wanted: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the place of each wanted row among a few rows in rising order, as in ``RankRows.few``; -1 for those that are not there."""
    if not len(rows):
        return np.full(len(wanted), -1, np.int64)
    at = np.minimum(np.searchsorted(rows, wanted), len(rows) - 1)
    return np.where(rows[at] == wanted, at, -1)


@dataclass
class Imported:
    """What an importer returns: the ranks one after the other, so that only one of them is in memory.

    Attributes
    ----------
    world_size : int
        Number of ranks of the job, those without a file included.
    ranks : iterator of RankRows
        Each rank once.
    first_wall_ns : int, optional
        About the first time in the trace (wall clock, ns since 1970, or whatever zero the trace has); the run clock starts
        there. It may be set as late as with the first rank; by default it is the first event of that.
    layout : Layout, optional
        Parallel layout, where the trace tells it.
    notes : list of str
        What the reader should know of the whole.
    """

    world_size: int
    ranks: Iterator[RankRows]
    first_wall_ns: int | None = None
    layout: Layout | None = None
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Format:
    """A registered format.

    Attributes
    ----------
    name : str
        As given to ``import_trace(format=)``.
    read : callable
        (sources, options) -> Imported.
    detect : callable
        True if a source, by its name and its first bytes (:meth:`Source.head`), is of this format.
    priority : int
        Formats of higher priority are asked first.
    """

    name: str
    read: Callable[[Sequence[Source], ImportOptions], Imported]
    detect: Callable[[Source], bool]
    priority: int


FORMATS: dict[str, Format] = {}
"""The registered formats by name."""

_Read = Callable[[Sequence[Source], ImportOptions], Imported]


def register_format(name: str, *, detect: Callable[[Source], bool], priority: int = 50) -> Callable[[_Read], _Read]:
    """Register the decorated function as the importer of a format.

    Parameters
    ----------
    name : str
        Name of the format, as given to ``import_trace(format=)``.
    detect : callable
        True if a source is of this format, judged by its name and its first bytes.
    priority : int
        Formats of higher priority are asked first: 100 for what cannot be mistaken, 10 for what fits nearly anything.
    """

    def add(read: _Read) -> _Read:
        FORMATS[name] = Format(name, read, detect, priority)
        return read

    return add
