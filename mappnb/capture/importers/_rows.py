"""Events gathered one by one, and JSON values read one by one: what the importers of small formats share."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any, Final

import numpy as np

from mappnb.capture.importers._errors import TraceImportError
from mappnb.capture.importers._formats import ImportOptions, SiteRow
from mappnb.capture.importers._ranks import rank_in_name
from mappnb.capture.importers._sources import Source
from mappnb.schema import EVENTS, missing
from mappnb.table_specs import TABLES, Columns
from mappnb.terms import Phase

__all__ = ["EventRows", "as_int", "as_text", "content", "json_values", "named_group", "told_rank"]

_SITE: Final = "site"
_BOUND: Final = 2**62


class EventRows:
    """Events of one rank as they come; :meth:`columns` makes arrays of them.

    Attributes
    ----------
    sites : list of SiteRow
        What the numbers of the column ``site`` mean.
    """

    def __init__(self) -> None:
        self.sites: list[SiteRow] = []
        self._numbers: dict[SiteRow, int] = {}
        self._rows: dict[str, list[Any]] = {name: [] for name in TABLES["events"].columns}
        self._missing = {n: 0 if n == _SITE else missing(EVENTS[n]) for n in self._rows}
        self._missing |= {"thread": 0, "depth": 0}

    def __len__(self) -> int:
        return len(self._rows[_SITE])

    def add(
        self, category: str, op: str, *, name: str = "", phase: str = Phase.NONE, dtype: str = "", **values: int
    ) -> None:
        """Add one event; ``values`` are columns of the events table (times in ns), the rest is "not applicable"."""
        site = (str(category), str(op), name, str(phase), values.get("layer", -1), dtype)
        number = self._numbers.setdefault(site, len(self.sites))
        if number == len(self.sites):
            self.sites.append(site)
        for column, items in self._rows.items():
            items.append(number if column == _SITE else values.get(column, self._missing[column]))

    def mark_last(self, flag: int) -> None:
        """Set a bit of the flags of the event added last."""
        self._rows["flags"][-1] |= flag

    def columns(self) -> Columns:
        """Return the columns of the events table, dims (event,), in the order they came."""
        return {name: np.array(items, np.int64) for name, items in self._rows.items()}


def content(source: Source, *, limit: int = 4 * 2**30) -> bytes:
    """Return all of a file, unpacked.

    Raises
    ------
    TraceImportError
        If it is longer than ``limit`` bytes.
    """
    pieces, size = [], 0
    for piece in source.chunks():
        size += len(piece)
        if size > limit:
            raise TraceImportError(f"{source.name}: more than {limit} bytes; split it, or import the ranks one by one")
        pieces.append(piece)
    return b"".join(pieces)


def told_rank(name: str, options: ImportOptions) -> int | None:
    """Return the rank that a file's path tells, or None: by the caller's pattern, ``rank`` and a number, or a number at its end."""
    if options.rank_from is not None:
        found = options.rank_from.search(name)
        if found is None:
            return None
        return as_int(found["rank"] if "rank" in options.rank_from.groupindex else found[1], low=0, high=2**24)
    if (rank := rank_in_name(name)) is not None:
        return as_int(rank, low=0, high=2**24)
    stem = re.sub(r"(\.(json|jsonl|ndjson|log|gz|zst|xz|bz2|pickle|pkl|pt|dump|bin))+$", "", name, flags=re.IGNORECASE)
    last = re.search(r"(?:^|[^0-9])(\d{1,7})$", stem)
    return int(last[1]) if last else None


def named_group(*parts: object) -> int:
    """Return the id of a process group from what is equal on all its members: at least 0, below 2**63."""
    text = "|".join(map(str, parts))
    return int.from_bytes(hashlib.blake2b(text.encode(errors="replace"), digest_size=8).digest(), "big") >> 1


def as_int(value: Any, *, low: int = -_BOUND, high: int = _BOUND) -> int | None:
    """Return an integer that came as a number or as digits, or None; also None outside ``low`` to ``high``."""
    if isinstance(value, str):
        digits = value.strip()
        if len(digits) > 24 or not digits.removeprefix("-").isdecimal():
            return None
        value = int(digits)
    if isinstance(value, float):
        if not np.isfinite(value):
            return None
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if low <= value <= high else None


def as_text(value: Any, default: str = "", *, longest: int = 512) -> str:
    """Return a short text: of a string or a number; ``default`` for anything else."""
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        return str(value)[:longest].encode("utf-8", "replace").decode()
    return default


def json_values(data: bytes, repairs: Counter[str]) -> Iterator[Any]:
    """Yield the values of a file of JSON: one a line, or values one after the other, indented or not.

    Parameters
    ----------
    data : bytes
        The whole file.
    repairs : Counter
        Counts ``damaged_line`` for each line that is no JSON, ``cut_document`` where a longer value is.
    """
    lines = data.splitlines()
    first = next((line for line in lines if line.strip()), b"")
    if _parsed(first) is not _DAMAGED or len([1 for line in lines if line.strip()]) == 1:
        for line in lines:
            if line.strip():
                value = _parsed(line)
                if value is _DAMAGED:
                    repairs["damaged_line"] += 1
                else:
                    yield value
        return
    yield from _one_after_the_other(data.decode("utf-8", "replace"), repairs)


_DAMAGED: Final = object()


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return _DAMAGED


def _one_after_the_other(text: str, repairs: Counter[str]) -> Iterator[Any]:
    decoder, at = json.JSONDecoder(), 0
    while at < len(text):
        while at < len(text) and text[at] in " \t\r\n,\ufeff":
            at += 1
        if at == len(text):
            return
        try:
            value, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            repairs["cut_document"] += 1
            return
        yield value
