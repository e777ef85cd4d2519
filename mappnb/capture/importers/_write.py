"""Writes imported ranks as a run directory, as capture writes one: beside its place, and moved there when it is whole."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mappnb.capture.importers._errors import TraceImportError
from mappnb.capture.importers._formats import Imported, RankRows, places_among
from mappnb.errors import RunExistsError
from mappnb.joining import RunWriter
from mappnb.paths import RUN
from mappnb.schema import EVENTS, METRICS, STEPS, TELEMETRY, missing
from mappnb.table_specs import TABLES, Columns
from mappnb.terms import Flag

__all__ = ["ImportReport", "new_run", "write_ranks"]

SEGMENT_ROWS = 1 << 15
LEAD_NS = 10**9
"""The run clock starts this much before the first event, so that no time is negative."""

_ROUND = 1024  # wall-clock ns fit a double in steps of 256: readers take medians of such times
_SCHEMAS = {"events": EVENTS, "steps": STEPS, "telemetry": TELEMETRY, "metrics": METRICS}


@dataclass
class ImportReport:
    """What an import did: ``print`` it.

    Attributes
    ----------
    run_dir : Path
        The run directory.
    format : str
        The format that was read.
    world_size : int
        Ranks of the job; ``ranks`` of them had a trace.
    ranks : dict of int to list of str
        Rank -> files it came from.
    num_events : int
        Events written.
    num_read : int
        Events read, of whatever kind.
    skipped : dict of str to int
        Events left out on purpose, by reason.
    repairs : dict of str to int
        What was mended, by kind.
    repaired_in : dict of str to dict of str to int
        Kind -> file (or files, of a rank that came from several) -> how often.
    files_skipped : dict of str to str
        Files that were left out, and why.
    notes : list of str
        What the reader should know.
    """

    run_dir: Path
    format: str
    world_size: int = 0
    ranks: dict[int, list[str]] = field(default_factory=dict)
    num_events: int = 0
    num_read: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    repairs: dict[str, int] = field(default_factory=dict)
    repaired_in: dict[str, dict[str, int]] = field(default_factory=dict)
    files_skipped: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add(self, rank: RankRows) -> None:
        """Count a rank."""
        self.ranks[rank.rank] = rank.sources
        self.num_read += rank.num_read
        self.num_events += len(rank.columns.get("site", ()))
        for total, one in ((self.skipped, rank.skipped), (self.repairs, rank.repairs)):
            for key, value in one.items():
                total[key] = total.get(key, 0) + value
        where = ", ".join(rank.sources[:4]) + (", ..." if len(rank.sources) > 4 else "")
        for kind, value in rank.repairs.items():
            files = self.repaired_in.setdefault(kind, {})
            files[where] = files.get(where, 0) + value
        self.notes += [n for n in rank.notes if n not in self.notes]

    def __str__(self) -> str:
        lines = [
            f"imported  {self.num_events:,} events of {len(self.ranks)} of {self.world_size} ranks from {self.format} "
            f"into {self.run_dir} ({self.num_read:,} entries read)"
        ]
        lines += [f"skipped   {n:,} {why}" for why, n in sorted(self.skipped.items())]
        lines += [_repaired(kind, files) for kind, files in sorted(self.repaired_in.items())]
        lines += [f"left out  {name}: {why}" for name, why in list(self.files_skipped.items())[:20]]
        lines += [f"note      {n}" for n in self.notes[:20]]
        lines += [f"note      ... and {len(self.notes) - 20} more"] if len(self.notes) > 20 else []
        return "\n".join(lines)


_MEANING = {
    "truncated": "cut off at the end; what came before was read",
    "junk_bytes": "bytes that belong to no event, left out",
    "broken_events": "damaged events in the middle, left out",
    "damaged_archives": "packed data damaged or cut off; what came before was read",
    "damaged_heads": "the head is damaged; events were looked for behind it",
}
"""What kinds of repair mean that their names do not say."""


def _repaired(kind: str, files: dict[str, int]) -> str:
    """Return the line of a kind of repair: how often, what it means, and in which files."""
    means = f" ({_MEANING[kind]})" if kind in _MEANING else ""
    each = [f"{name}" + (f": {n:,}" if len(files) > 1 else "") for name, n in files.items()]
    more = f" and {len(each) - 4} more files" if len(each) > 4 else ""
    return f"repaired  {sum(files.values()):,} × {kind.replace('_', ' ')}{means} in {', '.join(each[:4])}{more}"


@contextmanager
def new_run(run_dir: str | os.PathLike[str], *, replace: bool) -> Iterator[Path]:
    """Give a folder to write a run into; it takes the place of ``run_dir`` at the end, or vanishes after an exception.

    Raises
    ------
    RunExistsError
        If ``run_dir`` holds something, unless it is a run directory and ``replace`` is True.
    """
    target = Path(run_dir)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        if not target.is_dir() or not (target / RUN).exists():
            raise RunExistsError(f"{target}: not an empty folder; choose a new or an empty one to import into")
        if not replace:
            raise RunExistsError(
                f"{target}: holds a run already; choose a new folder, or give replace=True (--replace)"
            )
    target.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{target.name}-importing-", dir=target.parent))
    try:
        yield work
        if target.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{target.name}-replaced-", dir=target.parent))
            os.replace(target, old)
            os.replace(work, target)
            shutil.rmtree(old)
        else:
            os.replace(work, target)
        os.chmod(target, 0o755)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise


def write_ranks(work: Path, imported: Imported, report: ImportReport) -> None:
    """Write every rank of an import.

    Raises
    ------
    TraceImportError
        If two files claim one rank, or no rank has an event; the message says why.
    """
    report.world_size = imported.world_size
    report.notes += imported.notes
    first: int | None = None
    launch = {"id": os.urandom(8).hex(), "imported": report.format}
    for rank in imported.ranks:
        if rank.rank in report.ranks:
            raise TraceImportError(_twice(rank, report.ranks[rank.rank]))
        if first is None:
            first = imported.first_wall_ns
        if first is None and len(rank.columns.get("start_ns", ())):
            first = int(rank.columns["start_ns"].min()) + rank.wall_offset_ns
        if (lift := 2 * LEAD_NS - (first or 0)) > 0:  # no wall clock: its zero may as well lie where it suits
            rank.wall_offset_ns += lift
        created = ((first or 0) + max(lift, 0) - LEAD_NS) // _ROUND * _ROUND
        run = RunWriter.join(
            work, rank=rank.rank, world_size=imported.world_size, launch=launch, created_wall_ns=created
        )
        _write_rank(run, rank, imported, report.format)
        report.add(rank)
        rank.columns, rank.few = {}, {}  # before the next is read
    if report.num_events == 0:
        raise TraceImportError(f"nothing to show for: {_why_empty(report)}")


def _twice(rank: RankRows, other: list[str]) -> str:
    return (
        f"rank {rank.rank} is claimed by both {', '.join(other)} and {', '.join(rank.sources)}; import one of them, or tell the "
        f"ranks by a pattern on the file names: rank_from=r'rank(\\d+)' (--rank-from)"
    )


def _why_empty(report: ImportReport) -> str:
    files = ", ".join(f for sources in list(report.ranks.values())[:4] for f in sources) or "no file"
    left = [f"{n} {why}" for why, n in report.skipped.items()] + [
        f"{n} × {kind.replace('_', ' ')}" for kind, n in report.repairs.items()
    ]
    why = "; ".join([*report.notes, *left]) or "the list of events is empty"
    return (
        f"{files}: {report.num_read} entries read, none of them an event with a duration ({why}); nothing was written"
    )


def _write_rank(run: RunWriter, rank: RankRows, imported: Imported, format_name: str) -> None:
    columns = rank.columns
    if len(columns.get("site", ())):
        table = run.table("events", site=lambda i: rank.sites[i], max_rows=SEGMENT_ROWS, max_age_s=1e9, stream=False)
        order = np.argsort(columns["start_ns"], kind="stable")
        now_ns = int((columns["start_ns"] + columns["duration_ns"]).max())
        for at in range(0, len(order), SEGMENT_ROWS):
            some = order[at : at + SEGMENT_ROWS]
            part = {k: v[some] for k, v in columns.items()} | _spread(some, rank.few)
            table.append(_whole("events", part), meta={"now_ns": now_ns})
        del order
    for name, values in rank.tables.items():
        if len(next(iter(values.values()), ())):
            run.table(name, max_age_s=1e9, stream=False).append(_whole(name, values))
    run.write_rank(_facts(run, rank, imported, format_name))
    run.close()


def _spread(wanted: np.ndarray[Any, Any], few: Mapping[str, tuple[Any, Any]]) -> Columns:
    """Return columns of which only few rows have a value: those of the wanted rows, -1 for rows that have none."""
    out: Columns = {}
    places: dict[int, tuple[Any, Any]] = {}  # columns that have the same rows share it
    for name, (rows, values) in few.items():
        out[name] = np.full(len(wanted), -1, np.int64)
        if id(rows) not in places:
            at = places_among(rows, wanted)
            hit = np.flatnonzero(at >= 0)
            places[id(rows)] = hit, at[hit]
        hit, at = places[id(rows)]
        out[name][hit] = values[at]
    return out


def _whole(table: str, given: Columns) -> Columns:
    """Return all columns of a table, in their dtypes: what is not given is "not applicable"."""
    spec, schema = TABLES[table], _SCHEMAS[table]
    rows = len(next(iter(given.values())))
    out = {}
    for name in spec.columns:
        dtype = spec.numpy_dtype(name)
        if name in given:
            out[name] = _fitting(given[name], dtype)
        else:
            nothing: Any = missing(schema[name]) if name in schema else -1
            out[name] = np.full(rows, 0 if name in ("depth", "thread") and table == "events" else nothing, dtype)
    return out


def _fitting(values: np.ndarray[Any, Any], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    if dtype in (values.dtype, object):
        return values.astype(dtype, copy=False)
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        values = np.clip(values, info.min, info.max)
    return values.astype(dtype)


def _facts(run: RunWriter, rank: RankRows, imported: Imported, format_name: str) -> dict[str, Any]:
    start = rank.columns.get("start_ns", np.zeros(0, np.int64))
    first = int(start.min()) if len(start) else run.created_wall_ns - rank.wall_offset_ns
    flags = rank.columns.get("flags")
    layout = imported.layout
    placed = layout is not None and layout.world_size == imported.world_size
    about = {"format": format_name, "sources": rank.sources, "num_read": rank.num_read, "skipped": rank.skipped}
    about |= {"repairs": rank.repairs, "notes": rank.notes}
    if flags is not None:
        about["open"] = int(((flags & Flag.OPEN) != 0).sum())
    return {
        "host": f"rank{rank.rank}",
        "device": "",
        "plan": f"imported from {format_name}",
        "groups": {},
        "degraded": None,
        **({"layout": layout.to_dict(), "coords": layout.coords(rank.rank)} if layout is not None and placed else {}),
        "clock": {
            "boot_id": f"{rank.facts.get('host', '')}|{rank.rank if 'host' not in rank.facts else ''}|{rank.wall_offset_ns}",
            "anchors": [[first + rank.wall_offset_ns, first, 1000]],
        },
        "imported": about,
        "ended": {"reason": "imported", "wall_ns": first + rank.wall_offset_ns},
        **rank.facts,
    }
