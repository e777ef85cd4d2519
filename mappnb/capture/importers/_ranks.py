"""Which rank a file is of: what it says itself, else what its name says, else what the user says."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import PurePath

from mappnb.capture.importers._errors import TraceImportError
from mappnb.capture.importers._formats import ImportOptions
from mappnb.capture.importers._sources import Source

__all__ = ["assign_ranks", "rank_in_name"]

_IN_NAME = (
    re.compile(r"rank[-_.= ]?(\d+)", re.IGNORECASE),
    re.compile(r"worker[-_.= ]?(\d+)", re.IGNORECASE),
    re.compile(r"(?:^|[._-])r(\d+)(?=[._-]|$)", re.IGNORECASE),
)


def rank_in_name(name: str) -> int | None:
    """Return the rank that a path tells, its last part first; None if none does."""
    parts = PurePath(name.replace("!", "/")).parts
    for part in reversed(parts):
        for pattern in _IN_NAME:
            if (found := pattern.search(part)) and len(found[1]) < 7:
                return int(found[1])
    return None


def assign_ranks(
    sources: Sequence[Source], stated: Sequence[int | None], options: ImportOptions
) -> tuple[list[int], list[str]]:
    """Return the rank of each source, and notes on where they come from.

    Parameters
    ----------
    sources : sequence of Source
        Files, one per rank.
    stated : sequence of int or None
        What each file says of itself.
    options : ImportOptions
        With the user's pattern.

    Raises
    ------
    TraceImportError
        If a rank is not told while there are several files, or two files claim one.
    """
    ranks: list[int] = []
    notes: list[str] = []
    for source, own in zip(sources, stated, strict=True):
        rank = _asked(source, options) if options.rank_from else own if own is not None else rank_in_name(source.name)
        if rank is None and len(sources) == 1:
            rank = 0
            notes.append(
                f"{source.name}: no rank in the file or its name; taken as rank 0 (give rank_from= for another)"
            )
        elif rank is None:
            raise TraceImportError(
                f"{source.name}: no rank in the file (distributedInfo.rank) or in its name, and there are {len(sources)} files; "
                f"tell it by a pattern on the path: rank_from=r'node\\d+_(\\d+)' (--rank-from)"
            )
        if rank in ranks:
            raise TraceImportError(
                f"rank {rank} is claimed by both {sources[ranks.index(rank)].name} and {source.name}; import one of them, or tell "
                f"the ranks by a pattern on the path: rank_from=r'rank(\\d+)' (--rank-from)"
            )
        ranks.append(rank)
    return ranks, notes


def _asked(source: Source, options: ImportOptions) -> int:
    pattern = options.rank_from
    found = pattern.search(source.name) if pattern else None
    text = (found.groupdict().get("rank") or found[1]) if found else None
    if pattern is None or text is None or not text.isdecimal() or len(text) > 6:
        shown = pattern.pattern if pattern else ""
        raise TraceImportError(f"{source.name}: rank_from={shown!r} finds no number in this path")
    return int(text)
