"""The run directory: the only module that knows the paths inside it. Ranks join and write; readers list and read.

No file is written by two ranks, nothing needs a barrier, and the directory is the manifest: a reader lists what is
there, ignores ``*.tmp`` and reports what it cannot read.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fsspec

from mappnb.errors import FormatVersionError, NotARunError, RunExistsError
from mappnb.schema import FORMAT_VERSION
from mappnb.segments import TABLES, TableWriter, write_file

__all__ = ["Incarnation", "RunWriter", "Segment", "Store"]

_RUN, _INCARNATION, _RANKS = "run.json", "incarnation.json", "ranks"
_INC_NAME, _RANK_NAME = "inc={:03d}", "rank={:05d}"
_INC = re.compile(r"inc=(\d+)$")
_RANK = re.compile(r"rank=(\d+)(?:\.json)?$")
_SEGMENT = re.compile(r"(seg|open)-(\d+)\.(?:parquet|arrows)$")


# ---------------------------------------------------------------------------------------------------- writing
def _publish(path: Path, content: Mapping[str, Any]) -> bool:
    """Write a JSON file that must not exist yet; False if another process was first. The content is whole or absent."""
    tmp = path.with_name(f"{path.name}.{os.getpid()}.{uuid.uuid4().hex[:8]}.tmp")
    tmp.write_text(json.dumps(content, indent=1))
    try:
        os.link(tmp, path)
    except FileExistsError:
        return False
    except OSError:  # a file system without hard links
        with contextlib.suppress(FileExistsError), open(path, "x") as sink:
            sink.write(json.dumps(content, indent=1))
            return True
        return False
    finally:
        tmp.unlink(missing_ok=True)
    return True


@dataclass
class RunWriter:
    """One rank's hold on a run directory. Make it with :meth:`join`.

    Attributes
    ----------
    root : Path
        The run directory.
    run_id : str
        Identity of the run, the same for all ranks and incarnations.
    created_wall_ns : int
        Wall-clock time at which the run was created: zero of the run clock.
    incarnation : int
        Number of this restart of the job.
    rank, world_size : int
        Global rank and number of ranks.
    """

    root: Path
    run_id: str
    created_wall_ns: int
    incarnation: int
    rank: int
    world_size: int
    _tables: dict[str, TableWriter] = field(default_factory=dict)

    @classmethod
    def join(
        cls,
        run_dir: str | os.PathLike[str],
        *,
        rank: int,
        world_size: int,
        launch: Mapping[str, str],
        resume: bool = False,
        created_wall_ns: int | None = None,
    ) -> RunWriter:
        """Create the run directory, or join the one that the other ranks of this launch made.

        Parameters
        ----------
        run_dir : path
            On storage that all ranks see.
        rank, world_size : int
            Global rank and number of ranks.
        launch : mapping of str to str
            What this launch of the job has in common over its ranks and no other launch has, such as the launcher's
            job id and restart count. ``job`` in it tells restarts of one job: they continue the run by themselves.
        resume : bool
            Continue a run that another job wrote, as a new incarnation. Nothing is ever overwritten.
        created_wall_ns : int, optional
            Zero of the run clock, should this rank be the first; now by default.

        Raises
        ------
        RunExistsError
            If the directory holds a run of another job and ``resume`` is False, or other files.
        FormatVersionError
            If a newer mappnb wrote it.
        """
        root = Path(run_dir)
        root.mkdir(parents=True, exist_ok=True)
        if not (root / _RUN).exists():
            _refuse_foreign(root)
        fresh = {
            "format_version": FORMAT_VERSION,
            "run_id": uuid.uuid4().hex,
            "created_wall_ns": created_wall_ns or time.time_ns(),
            "created_by": {"host": socket.gethostname(), "rank": rank, "pid": os.getpid()},
            "launch": dict(launch),
        }
        _publish(root / _RUN, fresh)
        run = json.loads((root / _RUN).read_text())
        _check_version(run, str(root))
        number = _join_incarnation(root, rank=rank, world_size=world_size, launch=launch, resume=resume)
        return cls(root, run["run_id"], run["created_wall_ns"], number, rank, world_size)

    @property
    def path(self) -> Path:
        """The folder of this incarnation."""
        return self.root / _INC_NAME.format(self.incarnation)

    def _rank_file(self) -> Path:
        return self.path / _RANKS / f"{_RANK_NAME.format(self.rank)}.json"

    def write_rank(self, content: Mapping[str, Any]) -> None:
        """Write what is known of this rank: host, device, layout, groups, first clock anchor. Replaces what was there."""
        whole = {
            "format_version": FORMAT_VERSION,
            "run_id": self.run_id,
            "incarnation": self.incarnation,
            "rank": self.rank,
            "world_size": self.world_size,
            **content,
        }
        path = self._rank_file()
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, lambda sink: sink.write(json.dumps(whole, indent=1).encode()))

    def reserve(self, size: int = 16384) -> None:
        """Hold back a little space, so that a note can still be left when the disk is full (:meth:`release`)."""
        path = self._rank_file().with_suffix(".reserve.tmp")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(os.urandom(size))

    def release(self) -> None:
        """Give the space of :meth:`reserve` back."""
        self._rank_file().with_suffix(".reserve.tmp").unlink(missing_ok=True)

    def table(self, name: str, *, site: Callable[[int], Iterable[Any]] | None = None, **options: Any) -> TableWriter:
        """Return the writer of one of this rank's tables (``mappnb.segments.TABLES``)."""
        if name not in self._tables:
            header = {
                "format_version": FORMAT_VERSION,
                "run_id": self.run_id,
                "incarnation": self.incarnation,
                "rank": self.rank,
                "table": name,
            }
            folder = self.path / name / _RANK_NAME.format(self.rank)
            self._tables[name] = TableWriter(folder, TABLES[name], header, site=site, **options)
        return self._tables[name]

    def close(self) -> None:
        """Close every table."""
        for table in self._tables.values():
            table.close()
        self.release()

    def abandon(self) -> None:
        """Let go of every table without writing."""
        for table in self._tables.values():
            table.abandon()


def _refuse_foreign(root: Path) -> None:
    others = [
        p.name for p in root.iterdir() if not p.name.endswith(".tmp") and p.name != _RUN and not _INC.match(p.name)
    ]
    if others and not (root / _RUN).exists():
        shown = ", ".join(sorted(others)[:3]) + (", ..." if len(others) > 3 else "")
        raise RunExistsError(
            f"{root}: the folder is not empty and not a run directory (holds {shown}); give mappnb.record a new or an empty folder"
        )


def _check_version(info: Mapping[str, Any], where: str) -> None:
    version = info.get("format_version")
    if not isinstance(version, int):
        raise NotARunError(f"{where}: run.json has no format_version; the file was not written by mappnb")
    if version > FORMAT_VERSION:
        raise FormatVersionError(
            f"{where}: written in format {version}, this mappnb reads formats up to {FORMAT_VERSION}; "
            f"upgrade with 'pip install -U mappnb'"
        )


def _join_incarnation(root: Path, *, rank: int, world_size: int, launch: Mapping[str, str], resume: bool) -> int:
    """Find the incarnation of this launch, or begin the next one."""
    for _ in range(1000):
        known = sorted(int(m[1]) for p in root.iterdir() if (m := _INC.match(p.name)))
        last = known[-1] if known else -1
        if last >= 0:
            info_path = root / _INC_NAME.format(last) / _INCARNATION
            if not info_path.exists():  # another rank is between mkdir and publish
                time.sleep(0.01)
                if not _stale(info_path.parent):
                    continue
            info = json.loads(info_path.read_text()) if info_path.exists() else {}
            mine = info_path.parent / _RANKS / f"{_RANK_NAME.format(rank)}.json"
            if info.get("launch") == dict(launch) and info.get("world_size") == world_size and not mine.exists():
                return last
            if info and not (resume or _continues(info.get("launch", {}), launch)):
                raise RunExistsError(
                    f"{root}: holds a run already (incarnation {last}, {info.get('world_size')} ranks, created by another job); "
                    f"choose a new run directory, or continue this run with mappnb.record(..., resume=True) "
                    f"or 'mappnb exec --resume'; nothing was overwritten"
                )
        folder = root / _INC_NAME.format(last + 1)
        folder.mkdir(exist_ok=True)
        content = {
            "format_version": FORMAT_VERSION,
            "incarnation": last + 1,
            "world_size": world_size,
            "created_wall_ns": time.time_ns(),
            "launch": dict(launch),
        }
        _publish(folder / _INCARNATION, content)  # whoever was first: look again and join
    raise RunExistsError(
        f"{root}: could not agree on an incarnation with the other ranks; is the storage shared and coherent?"
    )


def _continues(before: Mapping[str, str], now: Mapping[str, str]) -> bool:
    """Return True if a launch is a restart of the one before: same named job, or the same launcher with a higher restart count."""
    if now.get("job") and before.get("job") == now["job"]:
        return True
    counter = "TORCHELASTIC_RESTART_COUNT"
    same = {k: v for k, v in before.items() if k not in (counter, "id")} == {
        k: v for k, v in now.items() if k not in (counter, "id")
    }
    return same and before.get(counter, "0").isdigit() and int(now.get(counter, "0")) > int(before.get(counter, "0"))


def _stale(folder: Path, seconds: float = 10.0) -> bool:
    try:
        return time.time() - folder.stat().st_mtime > seconds
    except OSError:
        return False


# ---------------------------------------------------------------------------------------------------- reading
@dataclass(frozen=True, slots=True)
class Segment:
    """One file of a table: where it is and what its name says."""

    path: str
    incarnation: int
    rank: int
    number: int
    closed: bool
    size: int


@dataclass(slots=True)
class Incarnation:
    """One restart of the job, as its folder tells.

    Attributes
    ----------
    number : int
        From 0.
    info : dict
        Content of ``incarnation.json``; empty if it is missing.
    ranks : dict of int to dict
        Content of each rank's file that is there.
    """

    number: int
    info: dict[str, Any]
    ranks: dict[int, dict[str, Any]]

    @property
    def world_size(self) -> int:
        """Number of ranks that the job had."""
        return int(self.info.get("world_size") or max(self.ranks, default=-1) + 1)

    @property
    def missing_ranks(self) -> list[int]:
        """Ranks that left no file."""
        return [r for r in range(self.world_size) if r not in self.ranks]


class Store:
    """Reads a run directory; never writes.

    Parameters
    ----------
    root : path or URL
        A local folder, or whatever fsspec opens.

    Raises
    ------
    NotARunError
        If there is no ``run.json``; the message says what was found instead.
    FormatVersionError
        If a newer mappnb wrote it.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.fs, self.root = fsspec.core.url_to_fs(os.fspath(root))
        self.root = self.root.rstrip("/") or "/"
        self.local = type(self.fs).__name__ == "LocalFileSystem"
        self.problems: dict[str, str] = {}
        self.info = self._read_run()

    def _path(self, *parts: str) -> str:
        return "/".join((self.root, *parts))

    def _ls(self, *parts: str) -> list[tuple[str, int]]:
        """Names and sizes of a folder's entries, temporary files left out; empty if there is no such folder."""
        path = self._path(*parts)
        try:
            if self.local:
                with os.scandir(path) as entries:
                    found = [(e.name, e.stat().st_size) for e in entries if not e.name.endswith(".tmp")]
            else:
                found = [
                    (e["name"].rstrip("/").rsplit("/", 1)[-1], e["size"] or 0)
                    for e in self.fs.ls(path, detail=True, refresh=True)
                ]
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(e for e in found if not e[0].endswith(".tmp"))

    def _json(self, *parts: str) -> dict[str, Any] | None:
        """Content of a JSON file, or None with the problem noted."""
        path = self._path(*parts)
        try:
            content = json.loads(self.fs.cat_file(path))
            if not isinstance(content, dict):
                raise ValueError("not a JSON object")
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as err:
            self.problems["/".join(parts)] = f"unreadable ({err}); skipped"
            return None
        return content

    def _read_run(self) -> dict[str, Any]:
        if not self.fs.exists(self.root):
            raise NotARunError(
                f"{self.root}: no such folder; give the folder that was passed to mappnb.record or 'mappnb exec --run-dir'"
            )
        if not self.fs.isdir(self.root):
            raise NotARunError(
                f"{self.root}: a file, not a run directory; to read a trace file use mappnb.import_trace(src, run_dir)"
            )
        info = self._json(_RUN)
        if info is None:
            raise NotARunError(self._what_is_here())
        _check_version(info, self.root)
        return info

    def _what_is_here(self) -> str:
        names = [n for n, _ in self._ls()]
        if _RUN in names:
            return f"{self.root}: run.json is {self.problems.get(_RUN, 'unreadable')}; restore it, or attach to a copy of the run"
        if not names:
            return f"{self.root}: the folder is empty: no rank has begun to record yet; attach again when the job runs"
        runs = [n for n in names if self.fs.exists(self._path(n, _RUN))]
        if runs:
            choice = ", ".join(repr(self._path(n)) for n in runs[:4]) + (", ..." if len(runs) > 4 else "")
            return f"{self.root}: not a run directory, but it holds {len(runs)} of them; attach to one: {choice}"
        if any(_INC.match(n) for n in names):
            return (
                f"{self.root}: run.json is missing beside {names[0]}; restore it from the place the run was copied from"
            )
        return f"{self.root}: not a run directory (no run.json; found {', '.join(names[:4])}{', ...' if len(names) > 4 else ''})"

    def incarnations(self) -> list[Incarnation]:
        """Return every incarnation with its ranks, the oldest first. Notes files of another run in ``problems``."""
        out = []
        for name, _ in self._ls():
            if (match := _INC.match(name)) is None:
                continue
            info = self._json(name, _INCARNATION)
            if info is None:
                self.problems.setdefault(
                    f"{name}/{_INCARNATION}", "missing; the number of ranks is taken from the rank files"
                )
            ranks = {}
            for file, _ in self._ls(name, _RANKS):
                if (m := _RANK.match(file)) and (content := self._json(name, _RANKS, file)) is not None:
                    ranks[int(m[1])] = content
                    self._check_identity(f"{name}/{_RANKS}/{file}", content)
            out.append(Incarnation(int(match[1]), info or {}, ranks))
        return sorted(out, key=lambda i: i.number)

    def _check_identity(self, where: str, content: Mapping[str, Any]) -> None:
        if content.get("run_id", self.info["run_id"]) != self.info["run_id"]:
            self.problems[where] = (
                f"belongs to another run ({content['run_id'][:8]}, this one is {self.info['run_id'][:8]}): two runs were copied "
                f"into one folder; take them apart, or trust nothing here"
            )

    def segments(self, table: str, incarnation: int, ranks: Iterable[int] | None = None) -> list[Segment]:
        """Return the files of a table, by rank and number. A closed segment hides the open one of the same number."""
        folder = (_INC_NAME.format(incarnation), table)
        if ranks is None:
            ranks = [int(m[1]) for n, _ in self._ls(*folder) if (m := _RANK.match(n))]
        out = []
        for rank in ranks:
            name = _RANK_NAME.format(rank)
            found: dict[int, Segment] = {}
            for file, size in self._ls(*folder, name):  # "open" sorts before "seg"
                if (m := _SEGMENT.match(file)) is None:
                    continue
                path = self._path(*folder, name, file)
                found[int(m[2])] = Segment(path, incarnation, rank, int(m[2]), m[1] == "seg", size)
            out += [found[k] for k in sorted(found)]
            self._note_gaps(table, incarnation, rank, sorted(found))
        return out

    def _note_gaps(self, table: str, incarnation: int, rank: int, numbers: list[int]) -> None:
        lost = sorted(set(range(numbers[-1])) - set(numbers)) if numbers else []
        if lost:
            self.problems[f"{_INC_NAME.format(incarnation)}/{table}/{_RANK_NAME.format(rank)}"] = (
                f"segments {', '.join(map(str, lost[:5]))}{', ...' if len(lost) > 5 else ''} are missing; their rows are lost"
            )

    def open(self, segment: Segment) -> Any:
        """Return what pyarrow can read: the path of a local file, else an open binary file."""
        return segment.path if self.local else self.fs.open(segment.path, "rb")

    def size_bytes(self) -> int:
        """Return the size of all files of the run."""
        if self.local:
            return sum(f.stat().st_size for f in Path(self.root).rglob("*") if f.is_file())
        return int(self.fs.du(self.root))
