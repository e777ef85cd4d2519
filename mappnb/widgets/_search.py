"""Search in events: a part of a text, or /a regular expression/, over names, operations and categories."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import xarray as xr

from mappnb.errors import MappnbError
from mappnb.widgets._coded import coding_of

__all__ = ["SEARCHED", "find", "matcher", "next_hit"]

Array = np.ndarray[Any, Any]

SEARCHED = ("name", "op", "category", "phase")
"""Columns that are looked through; ``layer:3``, ``microbatch:2``, ``step:5``, ``rank:1``, ``stage:`` and ``chunk:`` look at numbers."""

_NUMBERS = ("rank", "step", "stage", "chunk", "microbatch", "layer", "seq", "peer", "incarnation")
_MAX_PATTERN = 200


def matcher(text: str) -> Callable[[str], bool]:
    """Return the test of one text.

    Parameters
    ----------
    text : str
        Letters of any case that must occur, or a regular expression between slashes.

    Raises
    ------
    MappnbError
        If the expression cannot be read.
    """
    if len(text) > 2 and text.startswith("/") and text.endswith("/"):
        pattern = text[1:-1]
        if len(pattern) > _MAX_PATTERN:
            raise MappnbError(f"the expression has {len(pattern)} characters; at most {_MAX_PATTERN} are searched for")
        try:
            compiled = re.compile(pattern, re.IGNORECASE)
        except re.error as err:
            raise MappnbError(f"/{pattern}/ is no regular expression: {err}") from err
        return lambda value: compiled.search(value) is not None
    wanted = text.casefold()
    return lambda value: wanted in value.casefold()


def find(events: xr.Dataset, text: str) -> Array:
    """Return which events a search finds.

    Parameters
    ----------
    events : Dataset, dims (event,)
    text : str
        Words are all wanted; a word ``layer:3`` asks for a number; see :data:`SEARCHED`.

    Returns
    -------
    bool array, shape (event,)
        All False for an empty text.
    """
    count = int(events.sizes.get("event", 0))
    out = np.ones(count, bool) if text.strip() else np.zeros(count, bool)
    words = [text.strip()] if text.strip().startswith("/") else text.split()
    for word in words:
        field, _, value = word.partition(":")
        if field in _NUMBERS and re.fullmatch(r"-?\d{1,18}", value):
            out &= events[field].values == int(value)
        else:
            test, hit = matcher(word), np.zeros(count, bool)
            for column in SEARCHED:
                coding = coding_of(events[column].variable)
                if coding is None:
                    hit |= _where(events[column].values, test)
                else:
                    hit |= np.array([test(str(t)) for t in coding.table[:-1]] + [False], bool)[coding.codes]
            out &= hit
    return out


def _where(values: Array, test: Callable[[str], bool]) -> Array:
    """Test each distinct text once."""
    known: dict[str, bool] = {}
    for value in set(values.tolist()):
        known[value] = test(str(value))
    if not any(known.values()):
        return np.zeros(len(values), bool)
    return np.fromiter((known[v] for v in values.tolist()), bool, len(values))


def next_hit(hits: Array, start_ns: Array, *, at_ns: int, after: int | None, go: str) -> tuple[int, int]:
    """Return (event, position among the hits from 1) of the hit to show.

    Parameters
    ----------
    hits : int array
        Positions of the events found, in order of start.
    start_ns : int64 array, dims (event,)
    at_ns : int
        Where the reader looks: the first hit from here on is shown first.
    after : int or None
        The hit shown last.
    go : str
        ``"first"``, ``"next"`` or ``"previous"``; both go round.
    """
    if not len(hits):
        return -1, 0
    if go == "first" or after is None or after not in hits:
        place = int(np.searchsorted(start_ns[hits], at_ns)) % len(hits)
        if go == "previous":
            place = (place - 1) % len(hits)
    else:
        place = (int(np.flatnonzero(hits == after)[0]) + (1 if go == "next" else -1)) % len(hits)
    return int(hits[place]), place + 1
