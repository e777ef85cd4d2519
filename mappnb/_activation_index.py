"""Which blocks of activations a run has: their tables and shards, read once per file and shared where files are alike."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from typing import Any

import numpy as np

from mappnb._activation_assembly import Box
from mappnb._activation_chunks import BlockFile
from mappnb._activation_parts import SAMPLE_KEY, Part, Shard
from mappnb.activation_blocks import ArrayInfo
from mappnb.activation_codecs import PARTS, decode, part_name
from mappnb.errors import FormatVersionError, SchemaError
from mappnb.store import Segment, Store

__all__ = ["BlockIndex", "BlockSource", "Found", "WEIGHTS", "newest_of_steps"]

Array = np.ndarray[Any, Any]
_READERS = 8
WEIGHTS = "weights"
_TEXTS = ("token_id", "position", "mask", "prompt")
_TABLES = (*_TEXTS, "token_index", "token_index_sp", *SAMPLE_KEY)


@dataclass(frozen=True, slots=True)
class BlockSource:
    """Values of one point in one block, decoded when read."""

    file: BlockFile
    stream: str
    name: str

    def read(self, box: Box) -> Array:
        """Return the values inside a box of the decoded array; only the chunks that it touches are read."""
        info = self.file.streams[self.stream][self.name]
        mode = _mode(info)
        stored = (*box[:-1], slice(0, info.shape[-1])) if mode == "topk" else box
        parts = {}
        for part in PARTS[mode]:
            inside = stored[:-1] if part == "scale" else stored
            parts[part] = self.file.read(self.stream, part_name(self.name, part), inside)
        values = decode(mode, parts, info.attrs)
        return values[..., box[-1]] if mode == "topk" else values


@dataclass(frozen=True, slots=True)
class Found:
    """One stream in one block.

    Attributes
    ----------
    part : Part
        Samples and shards; no shards in streams of statistics.
    stream : str
        Its name.
    file : BlockFile
        Where it is.
    others : tuple of str
        Arrays that are neither tables nor tensors.
    """

    part: Part
    stream: str
    file: BlockFile
    others: tuple[str, ...] = ()

    @property
    def attrs(self) -> Mapping[str, Any]:
        """Attributes of the block."""
        return self.file.attrs

    @property
    def arrays(self) -> Mapping[str, ArrayInfo]:
        """What is known of the stream's arrays; the same object in blocks that are alike."""
        return self.file.streams[self.stream]

    @property
    def steps(self) -> list[int]:
        """Steps that it has something of."""
        return sorted({s for s in self.part.samples[:, 0].tolist() if s >= 0})


class BlockIndex:
    """The blocks of a run, as far as they were there at the last look.

    Parameters
    ----------
    store : Store
        The run directory; what cannot be read is noted in its ``problems``.

    Attributes
    ----------
    files : dict of str to BlockFile
        By path; blocks never change once they are there.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self.files: dict[str, BlockFile] = {}
        self.bad: set[str] = set()
        self._found: dict[str, list[Found]] = {}
        self._shared: dict[bytes, Array] = {}
        self._forms: dict[int, tuple[Mapping[str, ArrayInfo], tuple[str, ...], tuple[str, ...]]] = {}

    def look(self, incarnations: Iterable[int]) -> list[Found]:
        """Return every stream of every block, by incarnation, rank and number; files seen before are not read again."""
        segments = [s for number in incarnations for s in self.store.activation_blocks(number)]
        new = [s for s in segments if s.path not in self._found and s.path not in self.bad]
        if len(new) > 1:
            with ThreadPoolExecutor(_READERS) as pool:  # it is the wait for a network disk that is shared out
                list(pool.map(self._open, new))
        elif new:
            self._open(new[0])
        return [f for s in segments for f in self._found.get(s.path, ())]

    def _open(self, segment: Segment) -> None:
        try:
            file = BlockFile(segment.path, None if self.store.local else self.store.fs)
            found = [self._stream(file, segment, name) for name in file.streams]
            file.forget()
        except (SchemaError, FormatVersionError, OSError) as err:
            if not isinstance(err, FileNotFoundError):
                self.bad.add(segment.path)
                self.store.problems[self.store.relative(segment.path)] = f"unreadable ({err}); skipped"
            return
        self.files[segment.path] = file
        self._found[segment.path] = found

    def _stream(self, file: BlockFile, segment: Segment, stream: str) -> Found:
        arrays = file.streams[stream]
        named = {c: file.read(stream, c) for c in SAMPLE_KEY if c in arrays}
        rows = max((len(v) for v in named.values()), default=0)
        columns = [named[c] if c in named else np.zeros(rows, np.int64) for c in SAMPLE_KEY]
        samples = self._share(np.stack(columns, axis=1).astype(np.int64))
        slots = self._slots(file, stream, "token_index")
        points, others = self._form(arrays, stream)
        shards = {n: _shard(file, stream, n, arrays[n]) for n in points}
        part = Part(
            segment.path,
            segment.incarnation,
            segment.rank,
            samples,
            slots if slots is not None else self._share(_whole(shards)),
            self._slots(file, stream, "token_index_sp"),
            shards,
            {n: partial(_table, file, stream, n) for n in _TEXTS if n in arrays},
        )
        return Found(part, stream, file, others)

    def _form(self, arrays: Mapping[str, ArrayInfo], stream: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the names of tensors, and of all else that is no table; once for blocks that are alike."""
        known = self._forms.get(id(arrays))
        if known is None or known[0] is not arrays:
            modes = {n: str(i.attrs.get("mode", "")) for n, i in arrays.items()}
            side = {part_name(n, p) for n, mode in modes.items() for p in (*PARTS.get(mode, ()), "present") if p}
            own = [n for n in arrays if n not in _TABLES and n not in side]
            first = "step" if stream == WEIGHTS else "sample"
            points = tuple(n for n in own if arrays[n].dims[:1] == (first,))
            known = self._forms[id(arrays)] = (arrays, points, tuple(n for n in own if n not in points))
        return known[1], known[2]

    def _slots(self, file: BlockFile, stream: str, name: str) -> Array | None:
        """Return where the tokens of a block belong: one row for all samples where they agree."""
        if name not in file.streams[stream]:
            return None
        table = file.read(stream, name).astype(np.int64)
        if table.ndim == 2 and len(table) and (table == table[0]).all():
            table = table[0]
        return self._share(table)

    def _share(self, table: Array) -> Array:
        """Return an equal table that was seen before, if there is one: ranks of a stage have the same samples."""
        key = str(table.shape).encode() + table.tobytes()  # all are int64
        return self._shared.setdefault(key, table)


def _table(file: BlockFile, stream: str, name: str) -> Array:
    values, texts = file.read(stream, name), file.streams[stream][name].attrs.get("texts")
    return values if texts is None else np.array(texts, object)[values]


def _whole(shards: Mapping[str, Shard]) -> Array:
    """Return the slots of a block that has no table of them: its tokens are whole sequences."""
    lengths = [s.shape[s.dims.index("token")] for s in shards.values() if "token" in s.dims]
    return np.arange(max(lengths, default=0))


def _shard(file: BlockFile, stream: str, name: str, info: ArrayInfo) -> Shard:
    """Return what a stored point is part of, from its attributes."""
    attrs = info.attrs
    mode = _mode(info)
    if mode not in PARTS:
        raise SchemaError(
            f"{file.path}: {stream}/{name} is packed by mode {mode!r}; known: {', '.join(PARTS)}; upgrade mappnb"
        )
    shard = attrs.get("shard") or {}
    split = {d: (int(s["start"]), int(s["stop"]), int(s["total"])) for d, s in (shard.get("split") or {}).items()}
    shape, dims = info.shape, info.dims
    dims = ("sample", *dims[1:]) if stream == WEIGHTS else dims
    if mode == "topk":
        shape = (*shape[:-1], int(attrs["length"]))
        dims = (*dims[:-1], _feature(shard, dims[-1]))
    elif dims[-1] not in (shard.get("dims") or [dims[-1]]) and mode == "bucket":
        split = _bucket_split(split, shard, shape[-1], dims[-1])
    return Shard(
        BlockSource(file, stream, name),
        shape,
        dims,
        _decoded_dtype(mode, info),
        tuple(int(x) for x in attrs.get("layers", ())),
        split,
        {d: np.asarray(v, np.int64) for d, v in (attrs.get("chosen") or {}).items()},
        attrs.get("token_index") == "token_index_sp",
        attrs.get("combine") == "sum",
        _held(file, stream, f"{name}_present"),
        attrs,
    )


def _mode(info: ArrayInfo) -> str:
    """Return how a point is packed; numbers per head are not packed."""
    mode = str(info.attrs.get("mode", "full"))
    return "full" if mode == "heads" else mode


def _held(file: BlockFile, stream: str, name: str) -> Callable[[], Array] | None:
    """Return what reads, once, which samples and layers were captured."""
    if name not in file.streams[stream]:
        return None
    return cache(partial(file.read, stream, name))


def _feature(shard: Mapping[str, Any], dim: str) -> str:
    return str((shard.get("dims") or [dim])[-1])


def _bucket_split(
    split: Mapping[str, tuple[int, int, int]], shard: Mapping[str, Any], buckets: int, dim: str
) -> dict[str, tuple[int, int, int]]:
    """Return where a shard's buckets are among all: shards are equal, and each has buckets of its own."""
    feature = _feature(shard, dim)
    out = {d: s for d, s in split.items() if d != feature}
    if feature in split:
        start, stop, total = split[feature]
        number, count = start // (stop - start), total // (stop - start)
        out[dim] = (number * buckets, (number + 1) * buckets, count * buckets)
    return out


@lru_cache(maxsize=64)
def _result(mode: str, stored: np.dtype[Any], dtype: str) -> np.dtype[Any]:
    attrs = {"dtype": dtype, "length": 1}
    parts = {p: np.zeros((1,) if p == "scale" else (1, 1), np.uint16 if p == "index" else stored) for p in PARTS[mode]}
    return np.dtype(decode(mode, parts, attrs).dtype)


def _decoded_dtype(mode: str, info: ArrayInfo) -> np.dtype[Any]:
    result: np.dtype[Any] = _result(mode, info.dtype, str(info.attrs.get("dtype", "")))
    return result


def newest_of_steps(found: Sequence[Found], more: Iterable[tuple[int, int]] = ()) -> dict[int, int]:
    """Return step -> newest incarnation that has it: a restart repeats steps, and the last time counts."""
    out: dict[int, int] = {}
    for one in found:
        for step in one.steps:
            out[step] = max(out.get(step, 0), one.part.incarnation)
    for step, incarnation in more:
        out[step] = max(out.get(step, 0), incarnation)
    return out
