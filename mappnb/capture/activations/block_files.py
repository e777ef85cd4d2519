"""The block that is being written: pieces in, files out. Lives in the writer thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mappnb.activation_blocks import BLOCK_NAME, BlockWriter, Stored, append_log
from mappnb.activation_codecs import encode, part_name
from mappnb.capture.activations.block_stats import StreamStats
from mappnb.capture.activations.block_tables import StreamTable
from mappnb.capture.activations.pieces import Pending, Piece, StatsOfStep, WeightPiece

__all__ = ["BlockFiles"]

BLOCK_BYTES = 64 << 20
FILE_BYTES = 1 << 30
JOIN_S = 30.0
CHUNK_BYTES = 16 << 20
_Array = np.ndarray[Any, Any]


class BlockFiles:
    """Writes pieces into the block that is open, and closes it when it is large or old enough.

    Parameters
    ----------
    folder : path
        Of this rank; created.
    attrs : callable
        Returns the attributes of the next block, by its number.
    join_s : float
        How long small steps are joined into one block.

    Attributes
    ----------
    bytes, raw_bytes, blocks : int
        Files committed so far: their bytes, the bytes of their chunks before compression, their number.
    """

    def __init__(
        self, folder: Path, attrs: Callable[[int], Mapping[str, Any]], *, join_s: float = JOIN_S, give_back: Any = None
    ) -> None:
        self.folder, self._attrs, self._join_s, self._give_back = folder, attrs, join_s, give_back
        self.bytes = self.raw_bytes = self.blocks = 0
        self._number = _next_number(folder)
        self._writer: BlockWriter | None = None
        self._begin()

    def _begin(self) -> None:
        self._tables: dict[str, StreamTable] = {}
        self._layers: dict[str, list[int]] = {}
        self._present: dict[str, dict[tuple[int, int], int]] = {}
        self._stats: dict[str, StreamStats] = {}
        self._weight_steps: list[int] = []
        self._seen: dict[str, Mapping[str, Any]] = {}
        self._repeated = 0
        self._opened_s = time.monotonic()

    @property
    def writer(self) -> BlockWriter:
        """The open block; opened when the first piece comes."""
        if self._writer is None:
            name = BLOCK_NAME.format(self._number)
            self._writer = BlockWriter(self.folder / name, self._attrs(self._number))
            self._opened_s = time.monotonic()
        return self._writer

    def add(self, piece: Piece) -> None:
        """Write a piece of a tensor."""
        parts, attrs = self._packed(piece), piece.attrs
        whole = f"{piece.stream}/{piece.name}"
        if not self._fits(whole, piece, parts):
            self.commit()
        self._seen[whole] = attrs
        table = self._tables.setdefault(piece.stream, StreamTable(piece.tokens.batch))
        row = table.row_of(piece.tokens)
        layer = self._layer_place(whole, piece.layer)
        present = self._present.setdefault(whole, {})
        if (row, layer) in present:
            self._repeated += 1
        else:
            for part, values in parts.items():
                self._put(part_name(whole, part), part, piece, attrs, values, row, layer)
            present[row, layer] = piece.tokens.batch
        for pending in piece.parts.values():
            self._done(pending)

    def _packed(self, piece: Piece) -> dict[str, _Array]:
        if piece.pack is not None:
            tensor = piece.parts[""].array()
            parts, _ = encode(piece.attrs["mode"], tensor, dtype=piece.attrs["dtype"], **piece.pack)
        else:
            parts = {name: pending.array() for name, pending in piece.parts.items()}
        if "index" in parts:
            small = np.uint16 if piece.attrs["length"] <= 1 << 16 else np.uint32
            parts["index"] = parts["index"].astype(small, copy=False)
        return parts

    def _fits(self, whole: str, piece: Piece, parts: Mapping[str, _Array]) -> bool:
        """Return whether a piece goes into the arrays that are there: same numbers, same features, same packing."""
        if self._writer is None:
            return True
        if self._writer.written_bytes > FILE_BYTES:
            return False
        if not self._writer.declared(whole):
            return True
        dtype, dims, chunks, known = self._writer.form(whole)
        after = 1 + (piece.layer >= 0)
        features = chunks[after + ("token" in dims) :]
        return (
            dtype == parts[""].dtype
            and len(dims) == after + len(piece.dims)
            and features == parts[""].shape[len(parts[""].shape) - len(features) :]
            and (self._seen.get(whole) is piece.attrs or all(known.get(k) == v for k, v in piece.attrs.items()))
        )

    def _layer_place(self, whole: str, layer: int) -> int:
        layers = self._layers.setdefault(whole, [])
        if layer not in layers:
            layers.append(layer)
        return layers.index(layer)

    def _put(
        self, array: str, part: str, piece: Piece, attrs: Mapping[str, Any], values: _Array, row: int, layer: int
    ) -> None:
        per_layer = piece.layer >= 0
        if per_layer:
            values = values[:, None]
        if not self.writer.declared(array):
            inner = piece.dims[:-1] if part == "scale" else piece.dims
            dims = ("sample", *(("layer",) if per_layer else ()), *inner)
            batch = self._tables[piece.stream].batch
            chunks = _chunks((batch, *values.shape[1:]), values.dtype.itemsize, dims)
            self.writer.declare(array, dtype=values.dtype, dims=dims, chunks=chunks, attrs={} if part else attrs)
        at = (row, layer) if per_layer else (row,)
        self.writer.put(array, (*at, *(0,) * (values.ndim - len(at))), values)

    def _done(self, pending: Pending) -> None:
        if self._give_back is not None and pending.reusable:
            self._give_back(pending.tensor)

    def add_stats(self, stats: StatsOfStep) -> None:
        """Keep the statistics of a step for this block."""
        _ = self.writer
        self._stats.setdefault(stats.stream, StreamStats()).add(stats)

    def add_weight(self, piece: WeightPiece) -> None:
        """Write a parameter."""
        if piece.step not in self._weight_steps:
            self._weight_steps.append(piece.step)
        values, array = piece.values.array()[None], f"weights/{piece.name}"
        per_layer = piece.layer >= 0
        if per_layer:
            values = values[:, None]
        if not self.writer.declared(array):
            dims = ("step", *(("layer",) if per_layer else ()), *piece.dims)
            chunks = _chunks(values.shape, values.dtype.itemsize, dims)
            self.writer.declare(array, dtype=values.dtype, dims=dims, chunks=chunks, attrs=piece.attrs)
        place = self._layer_place(array, piece.layer)
        at = (self._weight_steps.index(piece.step), place) if per_layer else (self._weight_steps.index(piece.step),)
        self.writer.put(array, (*at, *(0,) * (values.ndim - len(at))), values)
        self._done(piece.values)

    @property
    def is_due(self) -> bool:
        """True if, at the end of a step, the block is large or old enough to be closed."""
        return self._writer is not None and (self._writer.written_bytes >= BLOCK_BYTES or self.is_old)

    @property
    def is_old(self) -> bool:
        """True if something has waited for its block to be closed for longer than steps are joined."""
        return self._writer is not None and time.monotonic() - self._opened_s >= self._join_s

    def commit(self, **counters: Any) -> None:
        """Close the block that is open, and add it to the log."""
        if self._writer is None:
            return
        writer, streams = self._writer, self._contents()
        steps = set(self._weight_steps).union(
            *(t.steps for t in self._tables.values()), *(t.steps for t in self._stats.values())
        )
        size = writer.close()
        self._writer = None
        self.bytes, self.raw_bytes, self.blocks = self.bytes + size, self.raw_bytes + writer.raw_bytes, self.blocks + 1
        entry = {
            "file": writer.path.name,
            "steps": sorted(steps),
            "samples": {name: t.num_rows for name, t in self._tables.items()},
            "streams": streams,
            "bytes": size,
            "raw_bytes": writer.raw_bytes,
            "repeated": self._repeated,
            **counters,
        }
        append_log(self.folder, entry)
        self._number += 1
        self._begin()

    def _contents(self) -> dict[str, list[str]]:
        """Write the tables of the block; returns the names of its arrays by stream."""
        writer = self.writer
        for whole, layers in self._layers.items():
            writer.update_attrs(whole, layers=[] if layers == [-1] else layers)
        streams: dict[str, list[str]] = {}
        for whole in self._layers:
            stream, _, name = whole.partition("/")
            streams.setdefault(stream, []).append(name)
        for stream, table in self._tables.items():
            for name, stored in table.arrays():
                writer.whole(f"{stream}/{name}", stored)
        for whole, places in self._present.items():
            per_layer = self._layers[whole] != [-1]
            there = np.zeros((self._tables[whole.partition("/")[0]].num_rows, len(self._layers[whole])), bool)
            for (row, layer), batch in places.items():
                there[row : row + batch, layer] = True
            stored = Stored(there, ("sample", "layer")) if per_layer else Stored(there[:, 0], ("sample",))
            writer.whole(f"{whole}_present", stored)
        for stream, stats in self._stats.items():
            streams[stream] = stats.names
            for name, stored in stats.arrays():
                writer.whole(f"{stream}/{name}", stored)
        if self._weight_steps:
            writer.whole("weights/step", Stored(np.array(self._weight_steps, np.int64), ("step",)))
        return streams

    def abort(self) -> None:
        """Leave the open block."""
        if self._writer is not None:
            self._writer.abort()
            self._writer = None


def _chunks(shape: tuple[int, ...], item_bytes: int, dims: tuple[str, ...]) -> tuple[int, ...]:
    """Return the shape of a chunk: one microbatch and one layer, cut by sample, then by token where that is large."""
    chunks = [1 if d in ("layer", "step") else max(n, 1) for d, n in zip(dims, shape, strict=True)]
    if np.prod(chunks) * item_bytes > CHUNK_BYTES and dims[0] == "sample":
        chunks[0] = 1
    if "token" in dims:
        at = dims.index("token")
        while np.prod(chunks) * item_bytes > CHUNK_BYTES and chunks[at] > 1:
            chunks[at] = -(-chunks[at] // 2)
    return tuple(chunks)


def _next_number(folder: Path) -> int:
    """Return a number after those of the blocks that are there."""
    numbers = [int(p.name[6:12]) for p in folder.glob("block-*.zarr.zip") if p.name[6:12].isdigit()]
    return max(numbers, default=-1) + 1
