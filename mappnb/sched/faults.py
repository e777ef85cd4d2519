"""What is wrong with a schedule, where, and a picture of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from mappnb.sched.schedule import Schedule

__all__ = ["Problem", "fault", "grid", "lengths", "word"]

_ROWS, _COLUMNS, _AROUND = 30, 12, 4


@dataclass(frozen=True, slots=True)
class Problem:
    """One fault of a schedule.

    Attributes
    ----------
    text : str
        What is wrong, where, and what to do.
    rank : int, optional
        Rank at which it shows.
    position : int, optional
        Position in what that rank runs, from 0.
    in_communications : bool
        The position counts in ``communications``, not in ``ranks``.
    picture : str
        The orders around the fault, steps down and ranks across.
    """

    text: str
    rank: int | None = None
    position: int | None = None
    in_communications: bool = False
    picture: str = ""

    def __str__(self) -> str:
        return f"{self.text}\n\n{self.picture}" if self.picture else self.text


def fault(sched: Schedule, text: str, rank: int, position: int, *, in_communications: bool = False) -> Problem:
    """Return the problem at one action, with its picture."""
    picture = grid(
        lambda r, i: word(sched, r, i, in_communications),
        lengths(sched, in_communications),
        rank,
        position,
    )
    return Problem(f"rank {rank}, position {position}: {text}", rank, position, in_communications, picture)


def lengths(sched: Schedule, in_communications: bool = False) -> list[int]:
    """Return how much each rank runs."""
    if in_communications and sched.communications is not None:
        return [len(r) for r in sched.communications]
    return [b - a for a, b in pairwise(sched.offsets.tolist())]


def word(sched: Schedule, rank: int, position: int, in_communications: bool = False) -> str:
    """Return what a rank runs at a position, as text."""
    if in_communications and sched.communications is not None:
        return str(sched.communications[rank][position])
    return str(sched.ranks[rank][position])


def grid(
    word: Callable[[int, int], str],
    lengths: Sequence[int],
    rank: int,
    position: int,
    *,
    marked: Mapping[int, int] | None = None,
) -> str:
    """Return the orders around a fault as text: steps down, ranks across, an arrow at the fault's row.

    Parameters
    ----------
    word : callable
        ``word(rank, position)`` is what stands in a cell.
    lengths : sequence of int
        Cells of each rank.
    rank, position : int
        The fault.
    marked : mapping, rank to position
        Cells shown in brackets; the fault's by default.

    Notes
    -----
    At most 30 rows and 12 ranks: those that are marked, then those around the fault.
    """
    marked = {rank: position} if marked is None else marked
    ranks = _columns(len(lengths), rank, marked)
    rows = _rows(max(lengths, default=0), position, [p for r, p in marked.items() if r in ranks])
    head = [""] + [f"rank {r}" for r in ranks]
    table = [head]
    for i in rows:
        cells = [_cell(word, r, i, lengths[r], marked.get(r) == i) for r in ranks]
        table.append([f"position {i}", *cells])
    width = [max(len(row[c]) for row in table) for c in range(len(head))]
    lines = ["  ".join(t.ljust(w) for t, w in zip(row, width, strict=True)).rstrip() for row in table]
    if position in rows:
        lines[1 + list(rows).index(position)] += "  <-- here"
    hidden = len(lengths) - len(ranks)
    return "\n".join(lines + ([f"({hidden} more ranks are not shown)"] if hidden else []))


def _cell(word: Callable[[int, int], str], rank: int, position: int, length: int, marked: bool) -> str:
    text = word(rank, position) if position < length else ""
    return f"[{text}]" if marked else text


def _columns(count: int, rank: int, marked: Mapping[int, int]) -> list[int]:
    if count <= _COLUMNS:
        return list(range(count))
    first = list(dict.fromkeys([rank, *marked]))
    near = sorted(range(count), key=lambda r: (abs(r - rank), r))
    return sorted(list(dict.fromkeys([*first, *near]))[:_COLUMNS])


def _rows(longest: int, position: int, marked: Sequence[int]) -> range:
    low, high = min([position, *marked]), max([position, *marked])
    if high - low + 2 * _AROUND >= _ROWS:
        low = high = position
    return range(max(0, low - _AROUND), min(longest, high + _AROUND + 1))
