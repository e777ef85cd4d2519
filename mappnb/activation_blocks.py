"""Files of captured activations: one zarr group in one zip file per rank and step block.

A block is written as it comes: each captured tensor is one or more chunks, compressed and appended to a temporary zip file; the
metadata follow at the end, then fsync and rename. A file is there whole or not at all. The files follow zarr format 3, so that
zarr alone opens them; they are written without it, because its event loop would take the training thread's lock for
milliseconds per array.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import time
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numcodecs import blosc

from mappnb._block_json import CLEVEL, array_json, group_json, root_json
from mappnb.errors import FormatVersionError, SchemaError, did_you_mean

__all__ = [
    "BLOCK_FORMAT",
    "BLOCK_NAME",
    "LOG_NAME",
    "SAMPLE_COLUMNS",
    "TOKEN_COLUMNS",
    "ArrayInfo",
    "Block",
    "BlockWriter",
    "OpenBlock",
    "Stored",
    "append_log",
    "check_format",
    "content_of",
    "open_block",
    "read_log",
    "write_block",
]

BLOCK_FORMAT = 1
BLOCK_NAME, LOG_NAME = "block-{:06d}.zarr.zip", "log.jsonl"
SAMPLE_COLUMNS = ("step", "dp_rank", "microbatch", "index")
TOKEN_COLUMNS = ("token_id", "position", "mask", "token_index")
_Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Stored:
    """One array of a block, with the names of its dims.

    Attributes
    ----------
    values : array
        Any numbers; bfloat16 as uint16 with ``attrs["dtype"] = "bfloat16"``.
    dims : tuple of str
        One name per axis.
    attrs : dict
        Plain values.
    chunks : tuple of int or None
        Shape of a chunk; None: one sample and one layer per chunk.
    """

    values: _Array
    dims: tuple[str, ...]
    attrs: Mapping[str, Any] = field(default_factory=dict)
    chunks: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Block:
    """What one file holds: attributes of the rank, and for each stream its arrays by name."""

    attrs: Mapping[str, Any]
    streams: Mapping[str, Mapping[str, Stored]]


@dataclass(frozen=True, slots=True)
class ArrayInfo:
    """What is known of a stored array without reading it."""

    shape: tuple[int, ...]
    chunks: tuple[int, ...]
    dtype: np.dtype[Any]
    dims: tuple[str, ...]
    attrs: Mapping[str, Any]


class BlockWriter:
    """Appends chunks to a block file that appears under its name when it is closed.

    Parameters
    ----------
    path : path
        ``.../block-000012.zarr.zip``; its folder is created.
    attrs : dict
        Attributes of the block: rank, coords, layout, model, plan. ``format_version`` is added.

    Attributes
    ----------
    written_bytes, raw_bytes : int
        Bytes of chunks after and before compression.
    """

    def __init__(self, path: str | os.PathLike[str], attrs: Mapping[str, Any]) -> None:
        self.path = Path(path)
        self.attrs = {**attrs, "format_version": BLOCK_FORMAT}
        self.written_bytes = self.raw_bytes = 0
        self._arrays: dict[str, dict[str, Any]] = {}
        self._shapes: dict[str, list[int]] = {}
        self._date = time.localtime()[:6]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._tmp = self.path.with_name(f"{self.path.name}.{os.getpid()}.tmp")
        self._file = open(self._tmp, "wb")  # noqa: SIM115 (closed by close or abort)
        self._zip = zipfile.ZipFile(self._file, "w", zipfile.ZIP_STORED)

    def declare(
        self, name: str, *, dtype: Any, dims: tuple[str, ...], chunks: tuple[int, ...], attrs: Mapping[str, Any]
    ) -> None:
        """Tell of an array ``stream/array``: its chunks may then come in any order; its shape is what they span."""
        self._arrays[name] = array_json(np.dtype(dtype), dims, chunks, attrs)
        self._shapes[name] = [0] * len(dims)

    def declared(self, name: str) -> bool:
        """Return whether an array has been told of."""
        return name in self._arrays

    def form(self, name: str) -> tuple[np.dtype[Any], tuple[str, ...], tuple[int, ...], dict[str, Any]]:
        """Return dtype, dims, shape of a chunk and attributes of an array that was told of."""
        meta = self._arrays[name]
        chunks = meta["chunk_grid"]["configuration"]["chunk_shape"]
        return np.dtype(meta["data_type"]), tuple(meta["dimension_names"]), tuple(chunks), meta["attributes"]

    def update_attrs(self, name: str, **attrs: Any) -> None:
        """Set attributes of an array that were not known when it was declared."""
        self._arrays[name]["attributes"].update(attrs)

    def put(self, name: str, at: tuple[int, ...], values: _Array) -> None:
        """Write values from element ``at`` on, which begins a chunk; what they do not fill of their last chunks is 0."""
        chunks = self._arrays[name]["chunk_grid"]["configuration"]["chunk_shape"]
        if any(a % c for a, c in zip(at, chunks, strict=True)):
            raise ValueError(f"{name}: values at {at} do not begin a chunk of {tuple(chunks)}")
        shape = self._shapes[name]
        for axis, (first, n) in enumerate(zip(at, values.shape, strict=True)):
            shape[axis] = max(shape[axis], first + n)
        if not values.size:
            return
        for place in itertools.product(*(range(math.ceil(n / c)) for n, c in zip(values.shape, chunks, strict=True))):
            piece = values[tuple(slice(p * c, (p + 1) * c) for p, c in zip(place, chunks, strict=True))]
            key = "/".join(str(p + a // c) for p, a, c in zip(place, at, chunks, strict=True))
            self._chunk(f"{name}/c/{key}" if key else f"{name}/c", piece, tuple(chunks))

    def _chunk(self, key: str, piece: _Array, chunks: tuple[int, ...]) -> None:
        if piece.shape != chunks:
            whole = np.zeros(chunks, piece.dtype)
            whole[tuple(slice(n) for n in piece.shape)] = piece
            piece = whole
        packed = blosc.compress(np.ascontiguousarray(piece), b"zstd", CLEVEL, blosc.SHUFFLE)
        self._entry(key, packed)
        self.raw_bytes += piece.nbytes
        self.written_bytes += len(packed)

    def _entry(self, key: str, data: bytes) -> None:
        self._zip.writestr(zipfile.ZipInfo(key, self._date), data)

    def whole(self, name: str, stored: Stored) -> None:
        """Write an array at once."""
        values = np.asarray(stored.values)
        chunks = stored.chunks or default_chunks(values, stored.dims)
        self.declare(name, dtype=values.dtype, dims=stored.dims, chunks=chunks, attrs=stored.attrs)
        self._shapes[name] = list(values.shape)
        self.put(name, (0,) * values.ndim, values)

    def close(self) -> int:
        """Write the metadata, have all on disk, and give the file its name; returns its size in bytes."""
        try:
            for name, meta in self._arrays.items():
                meta["shape"] = self._shapes[name]
                self._entry(f"{name}/zarr.json", _json(meta))
            streams = sorted({name.split("/")[0] for name in self._arrays})
            for stream in streams:
                self._entry(f"{stream}/zarr.json", _json(group_json({})))
            self._entry("zarr.json", _json(root_json(self.attrs, streams, self._arrays)))
            self._zip.close()
            self._file.flush()
            os.fsync(self._file.fileno())
            size = self._file.tell()
            self._file.close()
            os.replace(self._tmp, self.path)
            return size
        except BaseException:
            self.abort()
            raise

    def abort(self) -> None:
        """Leave nothing behind."""
        for file in (self._file, self._zip):  # in this order the zip file cannot write its directory any more
            with contextlib.suppress(OSError, ValueError):
                file.close()
        self._tmp.unlink(missing_ok=True)


def write_block(path: str | os.PathLike[str], block: Block) -> int:
    """Write a whole block: temporary name, fsync, rename. Returns its size in bytes."""
    writer = BlockWriter(path, block.attrs)
    try:
        for stream, arrays in block.streams.items():
            for name, stored in arrays.items():
                if len(stored.dims) != np.ndim(stored.values):
                    raise SchemaError(
                        f"{stream}/{name}: {np.ndim(stored.values)} axes, but dims {stored.dims}; name each axis once"
                    )
                writer.whole(f"{stream}/{name}", stored)
    except BaseException:
        writer.abort()
        raise
    return writer.close()


class OpenBlock:
    """A block to read: metadata at once, chunks when an array is indexed. Use it in a ``with``, or close it.

    Attributes
    ----------
    path : str
        Where it is.
    attrs : dict
        format_version, rank, coords, layout, model, plan.
    streams : dict
        For each stream its arrays by name, as :class:`ArrayInfo`.
    """

    def __init__(self, path: str, fs: Any = None) -> None:
        self.path, self._fs = path, fs
        self._group: Any = None
        try:
            with self._open() as file, zipfile.ZipFile(file) as archive:
                root = json.loads(archive.read("zarr.json"))
            self.attrs, self.streams = content_of(root)
        except (zipfile.BadZipFile, KeyError, ValueError, EOFError) as err:
            raise SchemaError(
                f"{path}: not a block of activations ({type(err).__name__}: {err}); expected a zip file with one zarr group "
                f"that mappnb wrote; delete or move it away"
            ) from err
        check_format(path, self.attrs)

    def _open(self) -> Any:
        return open(self.path, "rb") if self._fs is None else self._fs.open(self.path, "rb")

    def array(self, stream: str, name: str) -> Any:
        """Return an array of a stream as ``zarr.Array``: indexing it reads only the chunks that are touched."""
        known = self.streams.get(stream)
        if known is None:
            raise SchemaError(
                f"{self.path}: no stream {stream!r}; found {', '.join(self.streams)}{did_you_mean(stream, self.streams)}"
            )
        if name not in known:
            raise SchemaError(
                f"{self.path}: stream {stream!r} has no array {name!r}; found {', '.join(known)}{did_you_mean(name, known)}"
            )
        if self._group is None:
            from mappnb import _block_store

            self._group = _block_store.open_group(self.path, self._fs)
        return self._group[f"{stream}/{name}"]

    def samples(self, stream: str) -> dict[str, _Array]:
        """Return the sample and token tables of a stream, read; rows with step −1 hold no sample (see :data:`SAMPLE_COLUMNS`)."""
        there = [c for c in (*SAMPLE_COLUMNS, *TOKEN_COLUMNS, "token_index_sp") if c in self.streams.get(stream, {})]
        return {c: np.asarray(self.array(stream, c)[...]) for c in there}

    def close(self) -> None:
        """Close the file; an array that is read again opens it again."""
        if self._group is not None:
            self._group.store.close()
            self._group = None

    def __enter__(self) -> OpenBlock:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_block(path: str | os.PathLike[str], fs: Any = None) -> OpenBlock:
    """Open a block file.

    Parameters
    ----------
    path : path
        On this machine, or inside ``fs``.
    fs : fsspec file system, optional
        Where the run directory is.

    Raises
    ------
    SchemaError
        If it is no block: cut off, or another file.
    FormatVersionError
        If a newer mappnb wrote it.
    """
    return OpenBlock(os.fspath(path), fs)


def append_log(folder: Path, entry: Mapping[str, Any]) -> None:
    """Add one line to the log of a rank's blocks, once the block is there."""
    with open(folder / LOG_NAME, "ab") as log:
        log.write(_json(entry) + b"\n")


def read_log(data: bytes) -> list[dict[str, Any]]:
    """Return the lines of a log; one that a kill cut off is left out.

    Each line: ``file``, ``steps`` (all steps in it), ``samples`` (per stream), ``streams`` (names of the arrays per stream),
    ``bytes`` (of the file), ``raw_bytes``, ``repeated`` (tensors that came twice), and so far in this recording ``dropped`` and
    ``thinned`` (tensors left out, per stream).
    """
    out = []
    for line in data.split(b"\n"):
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict) and "file" in entry:
            out.append(entry)
    return out


def content_of(root: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, dict[str, ArrayInfo]]]:
    """Return a block's attributes and its arrays by stream, out of the root's metadata."""
    streams: dict[str, dict[str, ArrayInfo]] = {}
    for name, meta in root["consolidated_metadata"]["metadata"].items():
        if meta.get("node_type") == "array":
            stream, _, array = name.partition("/")
            streams.setdefault(stream, {})[array] = _info(meta)
    return root["attributes"], streams


def _info(meta: Mapping[str, Any]) -> ArrayInfo:
    return ArrayInfo(
        tuple(meta["shape"]),
        tuple(meta["chunk_grid"]["configuration"]["chunk_shape"]),
        _dtype(meta["data_type"]),
        tuple(meta["dimension_names"]),
        meta["attributes"],
    )


_dtype = lru_cache(maxsize=64)(np.dtype)


def check_format(path: str, attrs: Mapping[str, Any]) -> None:
    """Raise FormatVersionError for a block that a newer mappnb wrote."""
    version = attrs.get("format_version")
    if not isinstance(version, int) or version > BLOCK_FORMAT:
        raise FormatVersionError(
            f"{path}: blocks of format {version!r}, this mappnb reads up to {BLOCK_FORMAT}; upgrade with 'pip install -U mappnb'"
        )


def default_chunks(values: _Array, dims: tuple[str, ...]) -> tuple[int, ...]:
    """Return the shape of a chunk: one sample and one layer; tables and statistics in one piece."""
    points = len(dims) > 2 and dims[0] == "sample"
    return tuple(
        1 if points and d in ("sample", "layer") else max(n, 1) for d, n in zip(dims, values.shape, strict=True)
    )


def _json(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, allow_nan=False).encode()
