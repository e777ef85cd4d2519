"""Reads a run directory. The directory is the manifest: what is there is listed, ``*.tmp`` is ignored, and what cannot be read is noted."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import fsspec

from mappnb.errors import NotARunError
from mappnb.paths import (
    ACTIVATIONS,
    BLOCK,
    INC,
    INC_NAME,
    INCARNATION,
    RANK,
    RANK_NAME,
    RANKS,
    RUN,
    SEGMENT,
    check_version,
)

__all__ = ["Incarnation", "Segment", "Store"]

_READERS = 8
_AT_ONCE = 256


class _Entry(NamedTuple):
    """An entry of a folder; equal stamps: the same content (None: not known)."""

    name: str
    size: int
    stamp: tuple[int, int, int] | None = None


class _RankFiles(Mapping[int, dict[str, Any]]):
    """What the ranks tell of themselves. Ten thousand small files take a second: they are read when the first one is looked at."""

    def __init__(self, read: Callable[[], dict[int, dict[str, Any]]]) -> None:
        self._read = read
        self._content: dict[int, dict[str, Any]] | None = None
        self._lock = threading.Lock()

    def _all(self) -> dict[int, dict[str, Any]]:
        with self._lock:
            if self._content is None:
                self._content = self._read()
            return self._content

    def __getitem__(self, rank: int) -> dict[str, Any]:
        return self._all()[rank]

    def __iter__(self) -> Iterator[int]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())


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
    ranks : mapping of int to dict
        Content of each rank's file that is there; read when it is first looked at.
    """

    number: int
    info: dict[str, Any]
    ranks: Mapping[int, dict[str, Any]]

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
        self.kept: dict[str, Any] = {}  # what readers of other files keep between looks
        self._known: dict[str, tuple[tuple[int, int, int], dict[str, Any]]] = {}
        self.info = self._read_run()

    def _path(self, *parts: str) -> str:
        return "/".join((self.root, *parts))

    def _ls(self, *parts: str) -> list[_Entry]:
        """Entries of a folder by name, temporary files left out; empty if there is no such folder."""
        path = self._path(*parts)
        try:
            if self.local:
                with os.scandir(path) as entries:
                    found = [_entry(e) for e in entries if not e.name.endswith(".tmp")]
            else:
                found = [
                    _Entry(e["name"].rstrip("/").rsplit("/", 1)[-1], e["size"] or 0)
                    for e in self.fs.ls(path, detail=True, refresh=True)
                ]
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted((e for e in found if not e.name.endswith(".tmp")), key=lambda e: e.name)

    def _names(self, *parts: str) -> list[str]:
        """Names of a folder's entries, in order; empty if there is no such folder. Asks for nothing else: a network disk is slow."""
        if not self.local:
            return [e.name for e in self._ls(*parts)]
        try:
            return sorted(n for n in os.listdir(self._path(*parts)) if not n.endswith(".tmp"))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def _json(self, *parts: str) -> dict[str, Any] | None:
        """Content of a JSON file, or None with the problem noted."""
        path = self._path(*parts)
        try:
            content = json.loads(_bytes(path) if self.local else self.fs.cat_file(path))
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
        info = self._json(RUN)
        if info is None:
            raise NotARunError(self._what_is_here())
        check_version(info, self.root)
        return info

    def _what_is_here(self) -> str:
        names = self._names()
        if RUN in names:
            return f"{self.root}: run.json is {self.problems.get(RUN, 'unreadable')}; restore it, or attach to a copy of the run"
        if not names:
            return f"{self.root}: the folder is empty: no rank has begun to record yet; attach again when the job runs"
        runs = [n for n in names if self.fs.exists(self._path(n, RUN))]
        if runs:
            choice = ", ".join(repr(self._path(n)) for n in runs[:4]) + (", ..." if len(runs) > 4 else "")
            return f"{self.root}: not a run directory, but it holds {len(runs)} of them; attach to one: {choice}"
        if any(INC.match(n) for n in names):
            return (
                f"{self.root}: run.json is missing beside {names[0]}; restore it from the place the run was copied from"
            )
        return f"{self.root}: not a run directory (no run.json; found {', '.join(names[:4])}{', ...' if len(names) > 4 else ''})"

    def incarnations(self) -> list[Incarnation]:
        """Return every incarnation with its ranks, the oldest first; their files are listed, and read when one is looked at."""
        out = []
        for name in self._names():
            if (match := INC.match(name)) is None:
                continue
            info = self._json(name, INCARNATION)
            if info is None:
                self.problems.setdefault(
                    f"{name}/{INCARNATION}", "missing; the number of ranks is taken from the rank files"
                )
            files = [(int(m[1]), e) for e in self._ls(name, RANKS) if (m := RANK.match(e.name))]
            out.append(Incarnation(int(match[1]), info or {}, _RankFiles(partial(self._read_ranks, name, files))))
        return sorted(out, key=lambda i: i.number)

    def _read_ranks(self, inc: str, files: list[tuple[int, _Entry]]) -> dict[int, dict[str, Any]]:
        """Return the content of rank files, those that did not change since taken as they were. Notes files of another run."""
        parts = [files[i : i + _AT_ONCE] for i in range(0, len(files), _AT_ONCE)]
        with ThreadPoolExecutor(_READERS) as pool:  # the wait for a network disk, not the parsing, is shared out
            read = pool.map(lambda part: [(rank, self._rank_file(inc, entry)) for rank, entry in part], parts)
            return {rank: content for rank, content in chain.from_iterable(read) if content is not None}

    def _rank_file(self, inc: str, entry: _Entry) -> dict[str, Any] | None:
        where = f"{inc}/{RANKS}/{entry.name}"
        known = self._known.get(where)
        if known is not None and known[0] == entry.stamp:
            return known[1]
        content = self._json(inc, RANKS, entry.name)
        if content is not None:
            self._check_identity(where, content)
            if entry.stamp is not None:
                self._known[where] = entry.stamp, content
        return content

    def _check_identity(self, where: str, content: Mapping[str, Any]) -> None:
        if content.get("run_id", self.info["run_id"]) != self.info["run_id"]:
            self.problems[where] = (
                f"belongs to another run ({content['run_id'][:8]}, this one is {self.info['run_id'][:8]}): two runs were copied "
                f"into one folder; take them apart, or trust nothing here"
            )

    def segments(self, table: str, incarnation: int, ranks: Iterable[int] | None = None) -> list[Segment]:
        """Return the files of a table, by rank and number. A closed segment hides the open one of the same number."""
        folder = (INC_NAME.format(incarnation), table)
        if ranks is None:
            ranks = [int(m[1]) for n in self._names(*folder) if (m := RANK.match(n))]
        out = []
        for rank in ranks:
            name = RANK_NAME.format(rank)
            found: dict[int, Segment] = {}
            for entry in self._ls(*folder, name):  # "open" sorts before "seg"
                if (m := SEGMENT.match(entry.name)) is None:
                    continue
                path = self._path(*folder, name, entry.name)
                found[int(m[2])] = Segment(path, incarnation, rank, int(m[2]), m[1] == "seg", entry.size)
            out += [found[k] for k in sorted(found)]
            self._note_gaps(table, incarnation, rank, sorted(found))
        return out

    def activation_ranks(self, incarnation: int) -> list[int]:
        """Return the ranks that have a folder of activations."""
        names = self._names(INC_NAME.format(incarnation), ACTIVATIONS)
        return [int(m[1]) for n in names if (m := RANK.match(n))]

    def activation_blocks(self, incarnation: int) -> list[Segment]:
        """Return the blocks of captured activations, by rank and number."""
        folder = (INC_NAME.format(incarnation), ACTIVATIONS)
        out = []
        for rank in self.activation_ranks(incarnation):
            name = RANK_NAME.format(rank)
            out += [
                Segment(self._path(*folder, name, e.name), incarnation, rank, int(m[1]), True, e.size)
                for e in self._ls(*folder, name)
                if (m := BLOCK.match(e.name))
            ]
        return out

    def relative(self, path: str) -> str:
        """Return a path inside the run directory, as problems are told."""
        return path.removeprefix(self.root).lstrip("/")

    def _note_gaps(self, table: str, incarnation: int, rank: int, numbers: list[int]) -> None:
        lost = sorted(set(range(numbers[-1])) - set(numbers)) if numbers else []
        if lost:
            self.problems[f"{INC_NAME.format(incarnation)}/{table}/{RANK_NAME.format(rank)}"] = (
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


def _entry(found: os.DirEntry[str]) -> _Entry:
    stat = found.stat()
    return _Entry(found.name, stat.st_size, (stat.st_size, stat.st_mtime_ns, stat.st_ino))


def _bytes(path: str) -> bytes:
    with open(path, "rb", buffering=0) as file:
        return bytes(file.read())
