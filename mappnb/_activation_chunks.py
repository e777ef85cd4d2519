"""Reads a block of activations without its zip and zarr libraries: a hundred times faster to open, and only what is asked for is read.

Block files are plain zip archives, stored uncompressed, whose chunks are blosc-packed (see ``mappnb.activation_blocks``); zarr opens
them too, and the tests hold both readings equal.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import struct
import zipfile
from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from mappnb.activation_blocks import ArrayInfo, check_format, content_of
from mappnb.errors import SchemaError

__all__ = ["BlockFile"]

Array = np.ndarray[Any, Any]
TAIL = 65_536  # read at once from the end: most blocks' directory and metadata are in there
_END, _ENTRY = struct.Struct("<4s4H2LH"), struct.Struct("<4s6H3L5H2L")
_LOCAL = 30  # bytes of a local header before name and extra field
_BIG = 0xFFFFFFFF
KEPT = 64  # files whose directory is kept in memory


class _End(NamedTuple):
    """The end of a file: its bytes from ``start`` on, and where the archive's directory begins among them."""

    data: bytes
    start: int
    listing: int


class BlockFile:
    """A block file, open for reading: its metadata, and its chunks by name.

    Parameters
    ----------
    path : str
        On this machine, or inside ``fs``.
    fs : fsspec file system, optional
        Where the file is.

    Attributes
    ----------
    attrs : dict
        Of the block: rank, coords, layout, model, plan.
    streams : dict of dict of ArrayInfo
        For each stream its arrays by name.
    num_reads : int
        Chunks read so far.

    Raises
    ------
    SchemaError
        If it is no block: cut off, or another file.
    FormatVersionError
        If a newer mappnb wrote it.
    """

    def __init__(self, path: str, fs: Any = None) -> None:
        self.path, self._fs, self.num_reads = path, fs, 0
        self._end: _End | None = None
        try:
            self.attrs, self.streams = _parsed(self._entry(b"zarr.json") or b"")
        except (struct.error, KeyError, ValueError, TypeError, EOFError) as err:
            raise SchemaError(
                f"{path}: not a block of activations ({type(err).__name__}: {err}); expected a zip file with one zarr group that "
                f"mappnb wrote; delete or move it away"
            ) from err
        check_format(path, self.attrs)

    # ------------------------------------------------------------------------------------------------ the zip file
    def forget(self) -> None:
        """Give back what was kept of the file; it is read again when needed. Many blocks are known, few are looked into."""
        self._end = None

    def _bytes(self, first: int, last: int) -> bytes:
        end = self._end
        if end is not None and first >= end.start:
            return end.data[first - end.start : last - end.start]
        if self._fs is not None:
            return bytes(self._fs.cat_file(self.path, start=first, end=last))
        with open(self.path, "rb", buffering=0) as file:
            return os.pread(file.fileno(), last - first, first)

    def _load(self) -> _End:
        """Read the end of the file: the archive's directory, and as much as comes with it."""
        if (end := self._end) is not None:
            return end
        size = self._fs.size(self.path) if self._fs is not None else os.stat(self.path).st_size
        start = max(0, size - TAIL)
        data = self._bytes(start, size)
        at = data.rfind(b"PK\x05\x06")
        if at < 0:
            raise EOFError("no directory of a zip file at its end")
        *_, length, offset, _ = _END.unpack_from(data, at)
        if _BIG in (length, offset) or offset + length > size:
            raise EOFError("a zip file of more than 4 GB, or cut off")
        if offset < start:
            start = max(0, offset - TAIL)
            data = self._bytes(start, size)
        self._end = end = _End(data, start, offset - start)
        _recent.append(self)
        if len(_recent) > KEPT:
            _recent.popleft().forget()
        return end

    def _entry(self, name: bytes) -> bytes | None:
        """Return the content of an entry of the archive, or None."""
        end = self._load()
        at = len(end.data)
        while (at := end.data.rfind(name, end.listing, at)) >= 0:
            begin = at - _ENTRY.size
            if begin >= end.listing and end.data[begin : begin + 4] == b"PK\x01\x02":
                fields = _ENTRY.unpack_from(end.data, begin)
                packing, size, name_length, where = fields[4], fields[8], fields[10], fields[-1]
                if name_length == len(name):
                    if packing != zipfile.ZIP_STORED:
                        raise ValueError(f"entry {name.decode()} is compressed by zip; blocks are not")
                    return self._content(int(where), len(name), int(size))
            at += len(name) - 1
        return None

    def _content(self, where: int, name_length: int, size: int) -> bytes:
        data = self._bytes(where, where + _LOCAL + name_length + size)
        extra = int.from_bytes(data[28:30], "little")  # 0 in what we write
        if extra:
            data = self._bytes(where, where + _LOCAL + name_length + extra + size)
        content = data[_LOCAL + name_length + extra :]
        if len(content) != size:
            raise EOFError("cut off")
        return content

    # ------------------------------------------------------------------------------------------------------ arrays
    def chunk(self, stream: str, name: str, place: Sequence[int]) -> Array | None:
        """Return one chunk of an array, or None where nothing was written."""
        info = self.streams[stream][name]
        key = "/".join(map(str, place))
        data = self._entry(f"{stream}/{name}/c/{key}".encode() if key else f"{stream}/{name}/c".encode())
        if data is None:
            return None
        self.num_reads += 1
        return _unpacked(data, info, f"{self.path}: {stream}/{name} chunk {key}")

    def read(self, stream: str, name: str, box: Sequence[slice] | None = None) -> Array:
        """Return an array, or what is inside a box of it: one slice per axis. Only the chunks that are touched are read."""
        info = self.streams[stream][name]
        if box is None and info.shape == info.chunks:  # tables and statistics
            only = self.chunk(stream, name, (0,) * len(info.shape))
            return np.zeros(info.shape, info.dtype) if only is None else only
        box = tuple(slice(0, n) for n in info.shape) if box is None else box
        out = np.zeros([s.stop - s.start for s in box], info.dtype)
        ranges = [
            range(s.start // c, math.ceil(s.stop / c)) if s.stop > s.start else range(0)
            for s, c in zip(box, info.chunks, strict=True)
        ]
        for place in itertools.product(*ranges):
            part = self.chunk(stream, name, place)
            if part is None:
                continue
            origin = [p * c for p, c in zip(place, info.chunks, strict=True)]
            first = [max(s.start, o) for s, o in zip(box, origin, strict=True)]
            last = [min(s.stop, o + c) for s, o, c in zip(box, origin, info.chunks, strict=True)]
            to = tuple(slice(f - s.start, n - s.start) for f, n, s in zip(first, last, box, strict=True))
            out[to] = part[tuple(slice(f - o, n - o) for f, n, o in zip(first, last, origin, strict=True))]
        return out


def _unpacked(data: bytes, info: ArrayInfo, where: str) -> Array:
    from numcodecs import blosc

    try:
        values = np.frombuffer(blosc.decompress(data), info.dtype).reshape(info.chunks)
    except (RuntimeError, ValueError) as err:
        raise SchemaError(
            f"{where}: damaged ({err}); the block cannot be read further: delete it or restore it"
        ) from err
    return np.asarray(values)


@lru_cache(maxsize=256)
def _parsed(root: bytes) -> tuple[dict[str, Any], dict[str, dict[str, ArrayInfo]]]:
    """Return attributes and arrays out of the root's metadata; blocks of a rank that are alike share them."""
    return content_of(json.loads(root))


_recent: deque[BlockFile] = deque()
