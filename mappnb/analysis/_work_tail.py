"""The rows of one rank that a live run adds: a growing stream is read on from where it was, a closed segment by its index."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from mappnb.analysis._work_block import COLUMNS
from mappnb.segments import Index, decode_closed, missing_value, read_index
from mappnb.store import Segment, Store
from mappnb.table_specs import META, TABLES, merge_meta
from mappnb.terms import Flag, Op

__all__ = ["RankTail"]

Array = np.ndarray[Any, Any]
Rows = dict[str, Array]
_SPEC = TABLES["events"]


@dataclass(slots=True)
class _Open:
    """A growing stream: how far it was read, and its rows since."""

    offset: int = 0
    schema: bytes = b""
    meta: dict[str, Any] = field(default_factory=dict)
    rows: list[Rows] = field(default_factory=list)

    def read(self, data: bytes) -> list[Rows]:
        """Take what the file holds from ``offset`` on, as far as it is whole; returns the new rows."""
        source = pa.BufferReader(self.schema + data)
        fresh, at = [], 0
        try:
            reader = pa.ipc.open_stream(source)
            at = source.tell()
            if not self.schema:
                self.schema, self.meta = data[:at], json.loads((reader.schema.metadata or {})[META])
                self.offset += at
                data = data[at:]
            while True:
                batch, custom = reader.read_next_batch_with_custom_metadata()
                if custom and custom[META] != b"{}":
                    merge_meta(self.meta, json.loads(custom[META]))
                self.offset, at = self.offset + source.tell() - at, source.tell()
                if batch.num_rows:
                    fresh.append(batch)
        except (StopIteration, pa.ArrowInvalid, OSError, ValueError, KeyError):
            pass  # the rest is not whole yet: next time
        if not fresh:
            return []
        table = pa.Table.from_batches(fresh)  # a second of events each: converted once, not batch by batch
        rows = {c: np.asarray(table.column(c).to_numpy()) for c in COLUMNS}
        keep = (rows["flags"] & Flag.OPEN) == 0
        out = [{c: v[keep] for c, v in rows.items()}] if keep.any() else []
        self.rows += out
        return out


class RankTail:
    """What of one rank's events was not used yet.

    Parameters
    ----------
    store : Store
        The run directory.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self.ended = -1
        self._sizes: dict[int, int] = {}
        self._open: dict[int, _Open] = {}
        self._closed: dict[int, tuple[Segment, Index]] = {}
        self._used = -1

    def look(self, segments: list[Segment]) -> bool:
        """Take note of the rank's files; True if they grew. ``ended`` is the last step that is known to have ended."""
        grown = False
        for segment in segments:
            if self._sizes.get(segment.number) == segment.size:
                continue
            try:
                self._take(segment)
            except (OSError, ValueError, pa.ArrowInvalid):  # replaced or removed since it was listed: next time
                continue
            self._sizes[segment.number] = segment.size
            grown = True
        return grown

    def _take(self, segment: Segment) -> None:
        if segment.closed:
            index = read_index(self.store.open(segment))
            self._open.pop(segment.number, None)
            if index.rows and index.bounds[3] > self._used:
                self._closed[segment.number] = segment, index
                self.ended = max(self.ended, index.bounds[3] - 1)
            return
        tail = self._open.setdefault(segment.number, _Open())
        fresh = tail.read(self.store.fs.cat_file(segment.path, start=tail.offset))
        marks = [int(k) for k, v in tail.meta.get("sites", {}).items() if v[1] == Op.ITERATION]
        for rows in fresh:
            done = rows["step"][np.isin(rows["site"], marks)]
            self.ended = max(self.ended, int(rows["step"].max()) - 1, int(done.max(initial=-1)))

    @property
    def seen(self) -> int:
        """The last step of which there are rows."""
        steps = [i.bounds[3] for _, i in self._closed.values()]
        steps += [int(r["step"].max()) for o in self._open.values() for r in o.rows]
        return max(steps, default=self._used)

    def rows(self, last: int) -> list[tuple[Rows, dict[str, Any]]]:
        """Return the rows not used yet that may belong to steps up to ``last``, with the descriptions of sites; later ones are kept."""
        out = []
        for number, (segment, index) in sorted(self._closed.items()):
            groups = index.overlapping(None, (self._used + 1, last))
            if groups:
                out.append((self._decoded(segment, index, groups), index.meta.get("sites", {})))
            if index.bounds[3] <= last:
                del self._closed[number]
        for tail in self._open.values():
            out += [(r, tail.meta.get("sites", {})) for r in _joined(tail.rows)]
            tail.rows = [r for r in tail.rows if r["step"].max() > last]
        low, self._used = self._used, last
        return [
            ({c: v[keep] if len(v) > 1 else v for c, v in r.items()}, s)
            for r, s in out
            if (keep := r["step"] > low).any()
        ]

    def skip(self, last: int) -> None:
        """Forget the rows of steps up to ``last``: they were read otherwise."""
        self._used = last
        self._closed = {k: v for k, v in self._closed.items() if v[1].bounds[3] > last}
        for tail in self._open.values():
            tail.rows = [r for r in tail.rows if r["step"].max() > last]

    def _decoded(self, segment: Segment, index: Index, groups: list[int]) -> Rows:
        table = decode_closed(self.store.open(segment), index, COLUMNS, groups)
        rows, constant = int(index.row_groups[groups, 4].sum()), index.meta.get("constant", {})
        out = {}
        for name in COLUMNS:
            if table is not None and name in index.stored:
                out[name] = np.asarray(table.column(name).to_numpy(), _SPEC.numpy_dtype(name))
            else:
                out[name] = np.full(rows, constant.get(name, missing_value(_SPEC, name)), _SPEC.numpy_dtype(name))
        return out


def _joined(rows: list[Rows]) -> list[Rows]:
    """Return rows of one segment as one piece."""
    return [{c: np.concatenate([r[c] for r in rows]) for c in COLUMNS}] if rows else []
