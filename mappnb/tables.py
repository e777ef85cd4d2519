"""Columns of a run's tables, read lazily: an index of every segment first, rows only where a question needs them."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, groupby
from typing import Any, TypeAlias, TypeVar

import numpy as np
import pyarrow as pa

from mappnb.schema import SITE_FIELDS
from mappnb.segments import (
    Index,
    decode_closed,
    read_index,
    read_open,
    read_small,
    rows_of,
    rows_of_alike,
    verify_closed,
)
from mappnb.store import Segment, Store
from mappnb.table_specs import TABLES, Columns

__all__ = ["Sites", "TableReader", "step_range"]

Array = np.ndarray[Any, Any]
_WORKERS = max(2, min(8, os.cpu_count() or 2))
_AT_ONCE = 64
_SMALL_BYTES = 32768
_In = TypeVar("_In")
_Out = TypeVar("_Out")
_Decoded: TypeAlias = "pa.Table | Exception | None"


def _each(call: Callable[[_In], _Out], items: Sequence[_In]) -> list[_Out]:
    """Return what ``call`` gives for each item, by a few threads; several items at a time, where they are many and small."""
    size = max(1, min(_AT_ONCE, len(items) // (8 * _WORKERS)))
    some = [items[i : i + size] for i in range(0, len(items), size)]
    with ThreadPoolExecutor(_WORKERS) as pool:
        return list(chain.from_iterable(pool.map(lambda part: [call(item) for item in part], some)))


class Sites:
    """Numbers the static descriptions of events (category, op, name, phase, layer, dtype) over all ranks of a run."""

    def __init__(self) -> None:
        self.rows: list[tuple[Any, ...]] = []
        self._ids: dict[tuple[Any, ...], int] = {}

    def code(self, site: tuple[Any, ...]) -> int:
        """Return the number of a description."""
        if (found := self._ids.get(site)) is None:
            found = self._ids[site] = len(self.rows)
            self.rows.append(site)
        return found

    def lookup(self, stored: Mapping[str, list[Any]]) -> Array:
        """Return an array that maps the site ids of one segment to numbers of this table; unknown ids map to -1."""
        ids = {int(k): self.code(_site(v)) for k, v in stored.items()}
        out = np.full(max(ids, default=-1) + 1, -1, np.int32)
        for local, code in ids.items():
            out[local] = code
        return out

    def values(self, name: str) -> Array:
        """Return one field of every description, for indexing by codes; the last entry serves code -1."""
        i = SITE_FIELDS.index(name)
        if name == "layer":
            return np.array([r[i] for r in self.rows] + [-1], np.int32)
        return np.array([r[i] for r in self.rows] + [""], object)

    def where(self, name: str, wanted: Collection[str]) -> Array:
        """Return the mask over codes of the descriptions whose field is among ``wanted``; code -1 is never."""
        i = SITE_FIELDS.index(name)
        return np.array([r[i] in wanted for r in self.rows] + [False], bool)


def _site(row: list[Any]) -> tuple[Any, ...]:
    """Return a stored description as a tuple of this version's length; text and numbers only."""
    text = [str(v) for v in row[:4]] + [""] * (4 - len(row))
    layer = row[4] if len(row) > 4 and isinstance(row[4], int) else -1
    return (*text, layer, str(row[5]) if len(row) > 5 else "")


@dataclass(slots=True)
class _Part:
    """One segment in a reader's snapshot."""

    segment: Segment
    rows: int
    meta: dict[str, Any]
    index: Index | None = None
    columns: Columns | None = None
    table: pa.Table | None = None
    lookup: Array = field(default_factory=lambda: np.empty(0, np.int32))

    @property
    def key(self) -> tuple[int, int]:
        return self.segment.incarnation, self.segment.rank


class TableReader:
    """A snapshot of one table over incarnations and ranks; :meth:`refresh` takes the next.

    Parameters
    ----------
    store : Store
        The run directory.
    name : str
        Key of ``mappnb.table_specs.TABLES``.
    incarnations : list of int
        Those to read.
    """

    def __init__(self, store: Store, name: str, incarnations: list[int]) -> None:
        self.store, self.spec = store, TABLES[name]
        self.incarnations = incarnations
        self.sites = Sites()
        self.parts: list[_Part] = []
        self._cache: dict[str, _Part] = {}
        self.refresh()

    @property
    def has_sites(self) -> bool:
        """True for the table of events."""
        return "site" in self.spec.columns

    @property
    def rows(self) -> int:
        """Number of rows in the snapshot."""
        return sum(p.rows for p in self.parts)

    def refresh(self, incarnations: list[int] | None = None) -> None:
        """Look again: closed segments are never read twice, growing ones only if they have grown."""
        self.incarnations = incarnations or self.incarnations
        found = [s for i in self.incarnations for s in self.store.segments(self.spec.name, i)]
        self.parts = [p for p in _each(self._part, found) if p is not None]
        self._cache = {p.segment.path: p for p in self.parts}
        for part in self.parts:
            if self.has_sites and not len(part.lookup):
                part.lookup = self.sites.lookup(part.meta.get("sites", {}))

    def _part(self, segment: Segment) -> _Part | None:
        known = self._cache.get(segment.path)
        if known is not None and known.segment.size == segment.size:
            return known
        try:
            if segment.closed and self.store.local and segment.size <= _SMALL_BYTES:
                index, table = read_small(segment.path, rows=not self.has_sites)
                return self._checked(_Part(segment, index.rows, index.meta, index=index, table=table))
            source = self.store.open(segment)
            if segment.closed:
                index = read_index(source)
                return self._checked(_Part(segment, index.rows, index.meta, index=index))
            columns, meta = read_open(source, self.spec)
            return self._checked(_Part(segment, len(columns[self.spec.start]), meta, columns=columns))
        except FileNotFoundError:
            return self._replaced(segment)
        except Exception as err:  # noqa: BLE001 (whatever a corrupt file makes pyarrow raise: report it and go on)
            self._problem(segment, err)
            return None

    def _checked(self, part: _Part) -> _Part | None:
        run_id = part.meta.get("run_id")
        if run_id is None and not part.rows:
            if part.meta.get("truncated") and part.segment.size:
                self._problem(part.segment, ValueError("no whole batch in the stream"))
            return None
        if run_id != self.store.info["run_id"]:
            self._problem(part.segment, ValueError(f"belongs to another run ({str(run_id)[:8]})"))
            return None
        return part

    def _replaced(self, segment: Segment) -> _Part | None:
        """Take the Parquet file of an open segment that was closed between listing and reading."""
        again = [
            s
            for s in self.store.segments(self.spec.name, segment.incarnation, [segment.rank])
            if s.number == segment.number
        ]
        return self._part(again[0]) if again and again[0].closed and not segment.closed else None

    def _problem(self, segment: Segment, err: Exception) -> None:
        place = segment.path.removeprefix(self.store.root).lstrip("/")
        self.store.problems[place] = f"unreadable ({type(err).__name__}: {str(err)[:120]}); skipped"

    def _decode(self, part: _Part, columns: tuple[str, ...], row_groups: list[int] | None) -> _Decoded:
        """Decode a closed part; what goes wrong is returned, to be told in the calling thread."""
        if part.index is None:
            return None
        if row_groups is None and part.table is not None:
            table, part.table = part.table, None  # held for the first question only: many of them are not small
            return table
        groups = list(range(len(part.index.row_groups))) if row_groups is None else row_groups
        try:
            return decode_closed(part.index.file or self.store.open(part.segment), part.index, columns, groups)
        except Exception as err:  # noqa: BLE001 (whatever a corrupt file makes pyarrow raise)
            return err

    def _rows(
        self,
        part: _Part,
        found: _Decoded,
        columns: tuple[str, ...],
        row_groups: list[int] | None,
        keep: Callable[[Columns], Array] | None = None,
        keep_by: tuple[str, ...] = (),
    ) -> Columns:
        """Columns of one part, decoded before; with "site" already in the numbers of ``self.sites``."""
        if isinstance(found, Exception):
            self._problem(part.segment, found)
            warnings.warn(f"{part.segment.path}: {found}; its rows are left out", stacklevel=3)
            return {c: np.empty(0, self.spec.numpy_dtype(c)) for c in columns}
        if part.index is None:
            assert part.columns is not None
            mask = keep(part.columns) if keep is not None else slice(None)
            out = {c: part.columns[c][mask] for c in columns}
        else:
            groups = list(range(len(part.index.row_groups))) if row_groups is None else row_groups
            out = rows_of(found, self.spec, part.index, columns, groups, keep=keep, keep_by=keep_by)
        return {**out, "site": _codes(part.lookup, out["site"])} if "site" in out else out

    def _span(self, lo: int, hi: int | None) -> list[tuple[_Part, slice]]:
        """Parts that hold the rows ``lo`` to ``hi``, each with the slice of its own rows."""
        hi = self.rows if hi is None else hi
        out, first = [], 0
        for part in self.parts:
            a, b = max(lo - first, 0), min(hi - first, part.rows)
            if a < b:
                out.append((part, slice(a, b)))
            first += part.rows
        return out

    def column(self, name: str, lo: int = 0, hi: int | None = None) -> Array:
        """Return one stored column, rows ``lo`` to ``hi``, in the order of ranks and segments. Unreadable rows are filled."""
        spans = self._span(lo, hi)
        decoded = _each(lambda item: self._decode(item[0], (name,), None), spans)
        pieces = [np.empty(0, self.spec.numpy_dtype(name))]
        for (part, rows), found in zip(spans, decoded, strict=True):
            column = self._rows(part, found, (name,), None)[name]
            if len(column) != part.rows:
                column = np.full(part.rows, "" if column.dtype == object else 0, column.dtype)
            pieces.append(column[rows])
        return np.concatenate(pieces)

    def verify(self) -> None:
        """Decode every closed segment with its checksums; what is wrong goes to ``store.problems``."""
        for part in self.parts:
            try:
                if part.index is not None and verify_closed(self.store.open(part.segment)) != part.index.rows:
                    raise ValueError(f"does not hold the {part.index.rows} rows that its index says")
            except Exception as err:  # noqa: BLE001 (whatever a corrupt file makes pyarrow raise)
                self._problem(part.segment, err)

    def per_part(
        self, value: Callable[[tuple[int, int]], int], dtype: Any, lo: int = 0, hi: int | None = None
    ) -> Array:
        """Return, for the rows ``lo`` to ``hi``, what ``value`` says of their (incarnation, rank)."""
        spans = self._span(lo, hi)
        return np.repeat(np.array([value(p.key) for p, _ in spans], dtype), [s.stop - s.start for _, s in spans])

    def window(
        self,
        *,
        columns: list[str] | None = None,
        keys: Collection[tuple[int, int]] | None = None,
        time_ns: Callable[[tuple[int, int]], tuple[int, int]] | None = None,
        steps: tuple[int, int] | None = None,
        sites: Array | None = None,
    ) -> tuple[Columns, Array, Array]:
        """Read the rows of a window.

        Parameters
        ----------
        columns : list of str, optional
            Stored columns wanted; all by default.
        keys : collection of (incarnation, rank), optional
            Those wanted; all by default.
        time_ns : callable, optional
            Gives for an (incarnation, rank) the window ``[t0, t1)`` in ns of the rank's own clock; rows that overlap it are read.
        steps : (int, int), optional
            First and last step, inclusive.
        sites : array of bool, optional
            Mask over site numbers, as from :meth:`Sites.where`.

        Returns
        -------
        columns : dict
            The rows, in the order of ranks and segments.
        incarnation, rank : array
            Of each row.
        """
        wanted = tuple(columns or self.spec.columns)
        keep_by = self._needed(time_ns is not None, steps is not None, sites is not None)
        parts = [p for p in self.parts if keys is None or p.key in keys]

        items = self._touched(parts, time_ns, steps)
        parts = [part for part, _, _ in items]
        needed = tuple(dict.fromkeys((*wanted, *keep_by)))
        decoded = _each(lambda item: self._decode(item[0], needed, item[2]), items)
        if not keep_by:
            pieces, counts = self._whole(parts, decoded, wanted)
        else:
            pieces = []
            for (part, span, groups), found in zip(items, decoded, strict=True):
                mask = partial(self._mask, part, span, steps, sites)
                pieces.append(self._rows(part, found, wanted, groups, mask, keep_by))
            counts = [len(p[wanted[0]]) for p in pieces]
        out = {c: np.concatenate([np.empty(0, self.spec.numpy_dtype(c)), *(p[c] for p in pieces)]) for c in wanted}
        place = np.array([p.key for p in parts], np.int32).reshape(-1, 2)
        return out, np.repeat(place[:, 0], counts), np.repeat(place[:, 1], counts)

    def _whole(
        self, parts: list[_Part], decoded: list[_Decoded], wanted: tuple[str, ...]
    ) -> tuple[list[Columns], list[int]]:
        """Return all rows, and how many each part has. Neighbours that store the same columns are taken together."""

        def stores(item: tuple[_Part, _Decoded]) -> frozenset[str] | None:
            part, found = item
            alone = part.index is None or isinstance(found, Exception) or "site" in wanted
            return None if alone or part.index is None else part.index.stored

        pieces, counts = [], []
        for alike, group in groupby(zip(parts, decoded, strict=True), stores):
            some = list(group)
            if alike is None:
                alone = [self._rows(part, found, wanted, None) for part, found in some]
                pieces += alone
                counts += [len(p[wanted[0]]) for p in alone]
            else:
                indexes = [part.index for part, _ in some if part.index is not None]
                tables = [found for _, found in some if not isinstance(found, Exception)]
                pieces.append(rows_of_alike(tables, self.spec, indexes, wanted))
                counts += [i.rows for i in indexes]
        return pieces, counts

    def _touched(
        self,
        parts: list[_Part],
        time_ns: Callable[[tuple[int, int]], tuple[int, int]] | None,
        steps: tuple[int, int] | None,
    ) -> list[tuple[_Part, tuple[int, int] | None, list[int] | None]]:
        """Return the parts that may hold rows of a window, each with the window on its own clock and the row groups to decode."""
        out: list[tuple[_Part, tuple[int, int] | None, list[int] | None]] = []
        for part in parts:
            span = None if time_ns is None else time_ns(part.key)
            cut = part.index is not None and not (span is None and steps is None)
            groups = part.index.overlapping(span, steps) if cut and part.index is not None else None
            if groups is None or groups:
                out.append((part, span, groups))
        return out

    def _needed(self, time: bool, step: bool, site: bool) -> tuple[str, ...]:
        spec = self.spec
        bounds = [spec.start, "duration_ns" if spec.end == "+duration_ns" else spec.end] if time else []
        return (*bounds, *(["step"] if step else []), *(["site"] if site else []))

    def _mask(
        self,
        part: _Part,
        span: tuple[int, int] | None,
        steps: tuple[int, int] | None,
        sites: Array | None,
        rows: Columns,
    ) -> Array:
        masks = []
        if span is not None:
            start, end = self.spec.bounds(rows)
            masks.append((start < span[1]) & ((end > span[0]) | (start >= span[0])))
        if steps is not None:
            masks.append((rows["step"] >= steps[0]) & (rows["step"] <= steps[1]))
        if sites is not None:
            masks.append(sites[_codes(part.lookup, rows["site"])])
        return masks[0] if len(masks) == 1 else np.asarray(np.logical_and.reduce(masks))


def _codes(lookup: Array, site: Array) -> Array:
    """Map stored site ids to numbers; ids that the segment does not describe become -1."""
    if not len(lookup):
        return np.full(len(site), -1, np.int32)
    known = (site >= 0) & (site < len(lookup))
    return np.where(known, lookup[np.where(known, site, 0)], np.int32(-1))


def step_range(step: int | slice | None) -> tuple[int, int] | None:
    """Return the first and last step that ``step=`` asks for, both included; None for all."""
    if step is None:
        return None
    if isinstance(step, slice):
        return (-(2**31) if step.start is None else int(step.start), 2**31 - 1 if step.stop is None else int(step.stop))
    return int(step), int(step)
