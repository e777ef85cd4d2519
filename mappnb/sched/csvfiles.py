"""Schedules as CSV files, in the action format of ``torch.distributed.pipelining``: one row for each rank."""

from __future__ import annotations

import csv
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from mappnb.errors import ScheduleError
from mappnb.sched import codes as c
from mappnb.sched.action import Action, Transfer, TransferKind
from mappnb.sched.communications import add_communications
from mappnb.sched.placement import Placement
from mappnb.sched.schedule import Schedule
from mappnb.sched.validate import Problem, problems

__all__ = ["from_csv", "to_csv"]

_CELL = re.compile(r"([0-9]{1,9})(F|B|I|W|SEND_F|RECV_F|SEND_B|RECV_B)([0-9]{1,9})")
_PAIR = re.compile(r"\(([^;()]*);([^;()]*)\)OVERLAP_F_B")
_DROPPED = re.compile(r"[0-9]+(UNSHARD|RESHARD|REDUCE_GRAD)[0-9]*")
_NUMBER: dict[str, int] = {str(k): i for i, k in enumerate(c.KINDS)}
_TRANSFERS: dict[str, TransferKind] = {str(k): k for k in TransferKind}


def to_csv(sched: Schedule, communications: bool = False) -> str:
    """Return a schedule as CSV text, one row for each rank.

    Parameters
    ----------
    sched : Schedule
        Its sends and receives are added where it has none.
    communications : bool
        With sends and receives (torch's ``compute_comms``) or without (``compute_only``).

    Returns
    -------
    str
        Cells such as ``0F0``, ``1B3``, ``2SEND_F0``, ``(0F1;7B2)OVERLAP_F_B``. Name, options and ``recompute`` are not in it, nor is a
        placement with two copies of a stage (give that to :func:`from_csv` again).

    Notes
    -----
    The activations that disaggregated forward ranks ship have no letter in the format and are left out; torch itself refuses files
    in which a stage is on two ranks.
    """
    if not communications:
        orders: list[list[str]] = [_words(sched, r, sched.ranks[r]) for r in range(sched.num_ranks)]
    else:
        full = sched if sched.communications is not None else add_communications(sched)
        orders = [_words(sched, r, order) for r, order in enumerate(full.communications or ())]
    return "".join(",".join(words) + "\n" for words in orders)


def _words(sched: Schedule, rank: int, order: tuple[Action | Transfer, ...]) -> list[str]:
    """Return the cells of a rank, a pair as one."""
    start, end = sched.offsets[rank : rank + 2].tolist()
    paired = iter(c.paired(sched.codes[start:end]).tolist())
    words: list[str] = []
    joins = False
    for a in order:
        if joins:
            words[-1] = f"({words[-1]};{a})OVERLAP_F_B"
        else:
            words.append(str(a))
        joins = isinstance(a, Action) and next(paired, False)
    return words


def from_csv(source: str | os.PathLike[str], placement: Placement | None = None) -> Schedule:
    """Return the schedule of a CSV file in torch's action format, validated.

    Parameters
    ----------
    source : path or str
        A file, or text that holds a line break or comma.
    placement : Placement, optional
        Where each stage lives; by default each stage is where most of its forwards (and of its backwards) are.

    Raises
    ------
    ScheduleError
        If the file cannot be read or the schedule cannot run. Says the file, the row and rank, the column and the cell.

    Notes
    -----
    Empty cells are bubbles and dropped: an order has no times. ``UNSHARD``, ``RESHARD`` and ``REDUCE_GRAD`` cells (sharded weights and
    the reduction of gradients) are read and dropped, too: :class:`~mappnb.Costs` says what a reduction costs. Rows may differ in length; a
    row without actions is a rank that runs nothing, but at the end of the file it is no rank.
    """
    name, text = _text(source)
    table = _Table(name)
    for rank, row in enumerate(_rows(name, text)):
        table.read(rank, row)
    table.drop_trailing()
    if not table.codes:
        raise ScheduleError(f"{name}: no action; expected one row for each rank, with cells such as 0F0,0B0")
    sched = table.schedule(placement)
    found = next(iter(problems(sched)), None)
    if found is not None:
        raise ScheduleError(table.located(found))
    return sched


def _text(source: str | os.PathLike[str]) -> tuple[str, str]:
    if isinstance(source, str) and (
        not source.strip() or "\n" in source or ("," in source and not os.path.isfile(source))
    ):
        return "CSV text", source
    path = Path(source)
    try:
        return str(path), path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as err:
        raise ScheduleError(
            f"{path}: byte {err.start} is not UTF-8; expected text with cells such as 0F0,0B0 (save the sheet as CSV, UTF-8)"
        ) from err
    except (OSError, ValueError) as err:
        raise ScheduleError(
            f"cannot read {str(path)!r}: {getattr(err, 'strerror', None) or err}; give a CSV file, or its text"
        ) from err


def _rows(name: str, text: str) -> Iterator[list[str]]:
    reader = csv.reader(text.splitlines(), strict=True)
    try:
        yield from reader
    except csv.Error as err:
        raise ScheduleError(f"{name}, line {reader.line_num}: {err}; expected cells such as 0F0,0B0") from None


@dataclass
class _Table:
    """What was read so far, and from which cells."""

    name: str
    codes: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    cells: list[list[tuple[int, str]]] = field(default_factory=list)  # of each rank's actions
    all_cells: list[list[tuple[int, str]]] = field(default_factory=list)  # of its actions and transfers
    orders: list[list[Action | Transfer]] = field(default_factory=list)
    transfers: bool = False

    def read(self, rank: int, row: list[str]) -> None:
        """Take in the row of one rank."""
        self.cells.append([])
        self.all_cells.append([])
        self.orders.append([])
        before = len(self.codes)
        for column, cell in enumerate(row):
            word = cell.strip()
            if match := _CELL.fullmatch(word):
                self._add(rank, column, word, match)
            elif word and not _DROPPED.fullmatch(word):
                self._pair(rank, column, word)
        self.lengths.append(len(self.codes) - before)

    def _pair(self, rank: int, column: int, word: str) -> None:
        pair = _PAIR.fullmatch(word)
        parts = [_CELL.fullmatch(part.strip()) for part in pair.groups()] if pair else []
        for match in parts or (None,):
            if match is None or match[2] not in _NUMBER:
                raise ScheduleError(
                    f"{self._place(rank, column, word)}: cannot read it; expected <stage><F|B|I|W><microbatch> such as 0F0, "
                    "a transfer such as 0SEND_F0, a pair such as (0F1;1B0)OVERLAP_F_B, or nothing"
                )
            self._add(rank, column, word, match)
        self.codes[-2] |= int(c.PAIRED)

    def _add(self, rank: int, column: int, word: str, match: re.Match[str]) -> None:
        stage, kind, mb = int(match[1]), match[2], int(match[3])
        if stage >= c.MAX_STAGES or mb >= c.MAX_MICROBATCHES:
            raise ScheduleError(
                f"{self._place(rank, column, word)}: stages go from 0 to {c.MAX_STAGES - 1}, "
                f"microbatches from 0 to {c.MAX_MICROBATCHES - 1}"
            )
        place = (column, word)
        self.all_cells[rank].append(place)
        if (number := _NUMBER.get(kind)) is not None:
            self.codes.append(mb | stage << 17 | number << 29)
            self.cells[rank].append(place)
            self.orders[rank].append(Action(stage, c.KINDS[number], mb))
        else:
            self.transfers = True
            self.orders[rank].append(Transfer(stage, _TRANSFERS[kind], mb))

    def drop_trailing(self) -> None:
        """Forget rows without cells at the end."""
        while self.orders and not self.orders[-1]:
            for rows in (self.orders, self.cells, self.all_cells, self.lengths):
                rows.pop()

    def schedule(self, placement: Placement | None) -> Schedule:
        """Return what was read, not yet validated."""
        codes = np.array(self.codes, np.uint32)
        offsets = np.concatenate(([0], np.cumsum(self.lengths))).astype(np.int64)
        sched = Schedule.from_codes(codes, offsets, placement=placement or _majority(codes, offsets))
        if self.transfers:
            sched.communications = tuple(tuple(o) for o in self.orders)
        return sched

    def located(self, problem: Problem) -> str:
        """Return a problem with its row, column and cell."""
        if problem.rank is None or problem.rank >= len(self.cells):
            return f"{self.name}: {problem}"
        cells = (self.all_cells if problem.in_communications else self.cells)[problem.rank]
        if problem.position is None or problem.position >= len(cells):
            return f"{self.name}, row {problem.rank + 1}: {problem}"
        return f"{self._place(problem.rank, *cells[problem.position])}: {problem}"

    def _place(self, rank: int, column: int, word: str) -> str:
        shown = word if len(word) <= 60 else word[:60] + "…"
        return f"{self.name}, row {rank + 1} (rank {rank}), column {column + 1} ({shown!r})"


def _majority(codes: c.Codes, offsets: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> Placement:
    """Return the placement in which each stage is on the rank of most of its forwards, and backwards; the lower one of equals."""
    rank = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    stage, kind = c.stage(codes), c.kind(codes)
    stages, ranks = int(stage.max()) + 1, len(offsets) - 1
    tables = [np.full(stages, -1, np.int64)]  # a tie among the backwards goes to the rank of the forwards
    for which in (kind == 0, kind != 0):
        key, count = np.unique(stage[which].astype(np.int64) * ranks + rank[which], return_counts=True)
        most = np.full(stages, -1, np.int64)
        for i in np.lexsort((-key, tables[-1][key // ranks] == key % ranks, count)).tolist():
            most[key[i] // ranks] = key[i] % ranks
        tables.append(most)
    _, forward, backward = tables
    forward = np.where(forward < 0, np.maximum(backward, 0), forward)
    backward = np.where(backward < 0, forward, backward)
    same = bool((forward == backward).all())
    return Placement(tuple(forward.tolist()), None if same else tuple(backward.tolist()))
