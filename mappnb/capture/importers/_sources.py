"""Where traces lie: files, folders, archives and lists of them, packed or not. Looks at the content, not at the names."""

from __future__ import annotations

import bz2
import lzma
import os
import shutil
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any

import pyarrow as pa

from mappnb.capture.importers._errors import TraceImportError
from mappnb.paths import RUN

__all__ = ["HEAD_BYTES", "Source", "Sources", "find_sources"]

HEAD_BYTES = 1 << 18
_CHUNK = 1 << 20
_TAR_MAGIC_AT = 257


@dataclass
class Source:
    """One file that may be a trace; unpacked while it is read.

    Attributes
    ----------
    name : str
        How to call it in messages: the path, for a member of an archive ``archive!member``.
    explicit : bool
        Whether the user named this very file.
    damage : str
        Why the packed data could not be read to the end; empty if it could. Known after reading.
    """

    name: str
    explicit: bool
    _open: Callable[[], IO[bytes]]
    damage: str = ""
    _head: bytes | None = None

    def chunks(self) -> Iterator[bytes]:
        """Yield the unpacked content, about 1 MiB at a time. Ends early where the packed data is damaged: see ``damage``."""
        self.damage = ""
        with self._open() as raw:
            first = raw.read(_CHUNK)
            unpack = _unpacker(first)
            try:
                while first:
                    yield from unpack(first)
                    first = raw.read(_CHUNK)
                yield from unpack(b"")
            except (OSError, EOFError, ValueError, zlib.error, lzma.LZMAError) as err:
                self.damage = f"packed data damaged or cut off ({err})"

    def head(self) -> bytes:
        """Return the first 256 KiB of the content."""
        if self._head is None:
            out = bytearray()
            for chunk in self.chunks():
                out += chunk
                if len(out) >= HEAD_BYTES:
                    break
            self._head = bytes(out[:HEAD_BYTES])
        return self._head


_Unpack = Callable[[bytes], Iterable[bytes]]


def _unpacker(first: bytes) -> _Unpack:
    """Return what turns packed pieces into plain ones; an empty piece ends the data."""
    if first[:2] == b"\x1f\x8b":
        return _Members(lambda: zlib.decompressobj(31))
    if first[:4] == b"\x28\xb5\x2f\xfd":
        return _Zstd()
    if first[:3] == b"BZh":
        return _Members(bz2.BZ2Decompressor)
    if first[:6] == b"\xfd7zXZ\x00":
        return _Members(lzma.LZMADecompressor)
    return lambda piece: (piece,) if piece else ()


class _Members:
    """Unpacks gz, bz2 or xz members one after the other, never more than a few MiB at once."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make, self._one, self._begun = make, make(), False

    def __call__(self, piece: bytes) -> Iterator[bytes]:
        if not piece:
            if self._begun and not self._one.eof:
                raise EOFError("the end is missing")
            return
        for at in range(0, len(piece), _CHUNK // 4):
            yield from self._some(piece[at : at + _CHUNK // 4])

    def _some(self, rest: bytes) -> Iterator[bytes]:
        while rest:
            if self._one.eof:
                if not rest.strip(b"\0"):
                    return
                self._one = self._make()
            self._begun = True
            if out := self._one.decompress(rest):
                yield out
            rest = self._one.unused_data if self._one.eof else b""


class _Zstd:
    """Unpacks zstd frames: pyarrow reads from a file, so the pieces are put into one that is not kept."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 (closed when the data ends)

    def __call__(self, piece: bytes) -> Iterator[bytes]:
        if piece:
            self._file.write(piece)
            return
        self._file.seek(0)
        with self._file, pa.CompressedInputStream(pa.PythonFile(self._file, mode="r"), "zstd") as stream:
            while out := stream.read(_CHUNK):
                yield out


@dataclass
class Sources:
    """What was found.

    Attributes
    ----------
    found : list of Source
        Files that may be traces.
    skipped : dict of str to str
        Names of files that are none, and why.
    """

    found: list[Source] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    _folders: list[tempfile.TemporaryDirectory[str]] = field(default_factory=list)

    def close(self) -> None:
        """Remove what was unpacked."""
        for folder in self._folders:
            folder.cleanup()
        self._folders.clear()

    def add_path(self, path: Path, *, explicit: bool) -> None:
        """Add a file, all files of a folder, or all members of an archive."""
        if path.is_dir():
            self._add_folder(path)
        elif not path.exists():
            raise TraceImportError(
                f"{path}: no such file or folder; give the trace, the folder or the archive of traces"
            )
        elif path.stat().st_size == 0:
            self._refuse(str(path), "an empty file", explicit=explicit)
        elif zipfile.is_zipfile(path):
            self._add_zip(path)
        elif _is_tar(path):
            self._add_tar(path)
        else:
            self.found.append(Source(str(path), explicit, partial(_open_file, path)))

    def _refuse(self, name: str, why: str, *, explicit: bool) -> None:
        if explicit:
            raise TraceImportError(f"{name}: {why}; give a trace file")
        self.skipped[name] = why

    def _add_folder(self, folder: Path) -> None:
        if (folder / RUN).exists():
            raise TraceImportError(f"{folder}: a run directory already; open it with mappnb.attach({str(folder)!r})")
        for path in sorted(folder.rglob("*")):
            if path.is_file() and not any(part.startswith(".") for part in path.relative_to(folder).parts):
                self.add_path(path, explicit=False)

    def _add_zip(self, path: Path) -> None:
        with zipfile.ZipFile(path) as archive:
            members = [m.filename for m in archive.infolist() if not m.is_dir() and m.file_size]
        for member in members:
            self.found.append(Source(f"{path}!{member}", False, partial(_open_member, path, member)))

    def _add_tar(self, path: Path) -> None:
        """Take the members of a packed archive out once: reading them in any order would unpack it again for each."""
        folder = tempfile.TemporaryDirectory(prefix="mappnb-import-")
        self._folders.append(folder)
        plain = Source(str(path), False, partial(_open_file, path))
        try:
            with tarfile.open(fileobj=_Stream(plain.chunks()), mode="r|") as archive:  # type: ignore[call-overload]
                for number, member in enumerate(archive):
                    content = archive.extractfile(member) if member.isfile() and member.size else None
                    if content is not None:
                        out = Path(folder.name) / str(number)  # never the name in the archive
                        name = f"{path}!{member.name}"
                        self.found.append(Source(name, False, partial(_open_file, out)))
                        with open(out, "wb") as sink:
                            shutil.copyfileobj(content, sink, _CHUNK)
        except (tarfile.TarError, OSError, EOFError) as err:
            self.skipped[f"{path} (its end)"] = f"the archive is damaged: {err}"
        if plain.damage:
            self.skipped[f"{path} (its end)"] = plain.damage


class _Stream:
    """Pieces of bytes as a file that is only read forward."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks, self._rest = chunks, b""

    def read(self, size: int) -> bytes:
        """Return exactly ``size`` bytes, fewer only at the end."""
        pieces, have = [self._rest], len(self._rest)
        while have < size and (piece := next(self._chunks, b"")):
            pieces.append(piece)
            have += len(piece)
        whole = b"".join(pieces)
        self._rest = whole[size:]
        return whole[:size]


def _open_file(path: Path) -> IO[bytes]:
    return path.open("rb")


def _open_member(path: Path, member: str) -> IO[bytes]:
    with zipfile.ZipFile(path) as archive:
        return archive.open(member)  # keeps the file open until it is closed itself


def _is_tar(path: Path) -> bool:
    head = b""
    for chunk in Source(str(path), False, partial(_open_file, path)).chunks():
        head += chunk
        if len(head) >= _TAR_MAGIC_AT + 5:
            break
    return head[_TAR_MAGIC_AT : _TAR_MAGIC_AT + 5] == b"ustar"


def find_sources(src: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> Sources:
    """Return the files that may be traces.

    Parameters
    ----------
    src : path or iterable of paths
        Files, folders (searched all the way down, hidden files left out), archives (tar, tar.gz, tar.zst, zip).

    Raises
    ------
    TraceImportError
        If a path does not exist, or nothing is there.
    """
    paths = [Path(src)] if isinstance(src, str | os.PathLike) else [Path(p) for p in src]
    out = Sources()
    seen: set[Path] = set()
    for path in paths:
        if path.resolve() not in seen:
            seen.add(path.resolve())
            out.add_path(path, explicit=True)
    if not out.found:
        why = "; ".join(f"{n}: {w}" for n, w in list(out.skipped.items())[:4]) or "no file there"
        raise TraceImportError(f"{', '.join(map(str, paths[:4])) or 'an empty list'}: nothing to import ({why})")
    return out
