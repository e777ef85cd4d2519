"""Schedule: what each pipeline rank runs, in which order, and where each stage lives. Data only, never a time."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mappnb.errors import ScheduleError
from mappnb.sched import codes as c
from mappnb.sched.action import Action, Transfer
from mappnb.sched.placement import Placement
from mappnb.terms import Kind

if TYPE_CHECKING:
    from mappnb.sched.costs import Costs, CostTables

__all__ = ["Schedule"]

Order = tuple[Action | Transfer, ...]
_SHOWN = 40


class Schedule:
    """The order of work of every pipeline rank, and the placement of the stages.

    Parameters
    ----------
    ranks : sequence of sequences of Action
        What each rank runs, in order.
    placement : Placement, optional
        Where each stage lives; read off ``ranks`` by default.
    name : str
        Name of the family, for display.
    options : mapping
        What the family was asked for, for display.
    pairs : iterable of (int, int)
        (rank, index) of actions that run together with the next one of their rank, as one (overlapped forward and backward).
    recompute : bool
        The backward runs the forward of its stage again first (disaggregated pipelines that ship the stage's input only).
    communications : sequence of sequences of Action or Transfer, optional
        The same order with its sends and receives, where these were given (see :meth:`with_communications`).

    Raises
    ------
    ScheduleError
        If the placement cannot be read off: a stage without a forward, or on two ranks.

    Notes
    -----
    A schedule is not checked when it is made: :meth:`validate` does that, and nothing simulates or runs one that fails.
    Inside, actions are 32-bit codes (:mod:`mappnb.sched.codes`); :attr:`ranks` makes objects of them when asked for.
    """

    def __init__(
        self,
        ranks: Sequence[Sequence[Action]],
        *,
        placement: Placement | None = None,
        name: str = "",
        options: Mapping[str, Any] | None = None,
        pairs: Iterable[tuple[int, int]] = (),
        recompute: bool = False,
        communications: Sequence[Sequence[Action | Transfer]] | None = None,
    ) -> None:
        offsets = np.concatenate(([0], np.cumsum([len(r) for r in ranks]))).astype(np.int64)
        values = c.encode([a for r in ranks for a in r])
        for rank, index in pairs:
            if not 0 <= index < len(ranks[rank]) - 1:
                raise ScheduleError(
                    f"rank {rank}: action {index} is paired with the next one, but there is no next one"
                )
            values[offsets[rank] + index] |= c.PAIRED
        self._set(values, offsets, placement, name, options, recompute, communications)

    def _set(
        self,
        codes: c.Codes,
        offsets: npt.NDArray[np.int64],
        placement: Placement | None,
        name: str,
        options: Mapping[str, Any] | None,
        recompute: bool,
        communications: Sequence[Sequence[Action | Transfer]] | None,
    ) -> None:
        codes.setflags(write=False)
        offsets.setflags(write=False)
        self.codes, self.offsets, self._valid = codes, offsets, False
        self.name, self.options, self.recompute = name, MappingProxyType(dict(options or {})), recompute
        self.communications = None if communications is None else tuple(tuple(r) for r in communications)
        self.placement = placement if placement is not None else _read_placement(codes, offsets)

    @classmethod
    def from_codes(
        cls,
        codes: c.Codes,
        offsets: npt.NDArray[np.int64],
        *,
        placement: Placement,
        name: str = "",
        options: Mapping[str, Any] | None = None,
        recompute: bool = False,
    ) -> Schedule:
        """Return a schedule made of arrays, without making an object for each action.

        Parameters
        ----------
        codes : array, dims (action,), uint32
            Actions of rank 0, then of rank 1, and so on (:mod:`mappnb.sched.codes`); made read-only.
        offsets : array, dims (rank + 1,), int64
            Where the actions of each rank begin, and the end; made read-only.
        placement, name, options, recompute
            As of the class.
        """
        self = cls.__new__(cls)
        self._set(codes, offsets, placement, name, options, recompute, None)
        return self

    def reordered(self, codes: c.Codes) -> Schedule:
        """Return the same actions, each rank's in another order: what is known of their sizes is not looked up again.

        Parameters
        ----------
        codes : array, dims (action,), uint32
            The codes of this schedule, permuted within each rank; made read-only.
        """
        other = Schedule.from_codes(
            codes,
            self.offsets,
            placement=self.placement,
            name=self.name,
            options=self.options,
            recompute=self.recompute,
        )
        for name in ("num_chunks", "num_microbatches", "_known"):
            other.__dict__[name] = getattr(self, name)
        return other

    # --------------------------------------------------------------------------------------------------- sizes
    @property
    def num_ranks(self) -> int:
        """Number of pipeline ranks."""
        return len(self.offsets) - 1

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return self.placement.num_stages

    @cached_property
    def num_chunks(self) -> int:
        """Stages that one microbatch passes on one rank: a chunk costs ``1 / num_chunks`` of the rank's share."""
        return int(np.bincount(self.placement.forward).max())

    @cached_property
    def num_microbatches(self) -> int:
        """Number of microbatches of a step."""
        return int(c.microbatch(self.codes).max()) + 1 if len(self.codes) else 0

    @cached_property
    def _known(self) -> tuple[bool, bool]:
        """Whether every action is within the sizes, and whether there are pairs: what the native pass need not look up each time."""
        within = not len(self.codes) or int(c.stage(self.codes).max()) < self.num_stages
        return within, bool(c.paired(self.codes).any())

    def __len__(self) -> int:
        return len(self.codes)

    # ----------------------------------------------------------------------------------------------------- views
    @cached_property
    def ranks(self) -> tuple[tuple[Action, ...], ...]:
        """The actions of each rank, in order."""
        everything = c.decode(self.codes)
        return tuple(
            everything[a:b] for a, b in zip(self.offsets[:-1].tolist(), self.offsets[1:].tolist(), strict=True)
        )

    @cached_property
    def pairs(self) -> frozenset[tuple[int, int]]:
        """(rank, index) of the actions that run together with the next one of their rank."""
        where = np.flatnonzero(c.paired(self.codes))
        rank = np.searchsorted(self.offsets, where, side="right") - 1
        return frozenset(zip(rank.tolist(), (where - self.offsets[rank]).tolist(), strict=True))

    @cached_property
    def _split(self) -> frozenset[tuple[int, int]]:
        """(stage, microbatch) whose backward is split in I and W."""
        mine = self.codes[c.kind(self.codes) == c.KINDS.index(Kind.BACKWARD_INPUT)]
        return frozenset(zip(c.stage(mine).tolist(), c.microbatch(mine).tolist(), strict=True))

    def needs(self, action: Action) -> frozenset[Action]:
        """Return the actions that must have ended (and their messages come) before ``action`` can begin."""
        s, mb = action.stage, action.microbatch
        if action.kind is Kind.FORWARD:
            return frozenset({Action(s - 1, Kind.FORWARD, mb)} if s else ())
        if action.kind is Kind.BACKWARD_WEIGHT:
            return frozenset({Action(s, Kind.BACKWARD_INPUT, mb)})
        needed = {Action(s, Kind.FORWARD, mb)}
        if s + 1 < self.num_stages:
            split = (s + 1, mb) in self._split
            needed.add(Action(s + 1, Kind.BACKWARD_INPUT if split else Kind.BACKWARD, mb))
        return frozenset(needed)

    # --------------------------------------------------------------------------------------------- what it can do
    def validate(
        self,
        *,
        sends: str = "buffered",
        costs: Costs | CostTables | None = None,
        memory_limit: npt.ArrayLike | None = None,
    ) -> Schedule:
        """Check that the schedule can run, and return it.

        Parameters
        ----------
        sends : str
            ``"buffered"``: a send in :attr:`communications` is done at once. ``"rendezvous"``: it holds its rank until the receive
            has begun.
        costs : Costs or CostTables, optional
            Says what activations and static memory take; without it an activation of a rank's whole share counts 1.
        memory_limit : number or array, dims (rank,), optional
            Memory that each rank has, in the unit of the costs; not checked without it.

        Raises
        ------
        ScheduleError
            At the first fault: a missing, doubled or misplaced action, a deadlock (its cycle is shown), messages that one side
            sends in another order than the other side receives them, or more memory than the limit.
        """
        from mappnb.sched.validate import validate

        plain = sends == "buffered" and memory_limit is None
        if not (plain and self._valid):
            validate(self, sends=sends, costs=costs, memory_limit=memory_limit)
        self._valid = True  # whatever else was asked for, the order can run
        return self

    def with_communications(self) -> Schedule:
        """Return the same schedule with its sends and receives in :attr:`communications`.

        Raises
        ------
        ScheduleError
            If the order of actions cannot run.
        """
        from mappnb.sched.communications import add_communications

        return add_communications(self)

    def to_csv(self, path: str | os.PathLike[str] | None = None, *, communications: bool = False) -> str:
        """Return the schedule in the action format of ``torch.distributed.pipelining``, one row per rank, and write it to ``path``.

        Parameters
        ----------
        path : path, optional
            File to write.
        communications : bool
            With sends and receives (torch's ``compute_comms``) or without (``compute_only``).
        """
        from mappnb.sched.csvfiles import to_csv

        text = to_csv(self, communications=communications)
        if path is not None:
            Path(path).write_text(text, encoding="utf-8", newline="\n")
        return text

    @classmethod
    def from_csv(cls, source: str | os.PathLike[str], *, placement: Placement | None = None) -> Schedule:
        """Return the schedule of a CSV file in torch's action format, or of such a text; it is validated.

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
        """
        from mappnb.sched.csvfiles import from_csv

        return from_csv(source, placement=placement)

    # ----------------------------------------------------------------------------------------------------- in words
    def words(self, rank: int) -> list[str]:
        """Return the actions of a rank as words, an overlapped pair as one: ``"(0F4;3B1)"``."""
        actions, start = self.ranks[rank], int(self.offsets[rank])
        pair = c.paired(self.codes[start : start + len(actions)]).tolist()
        out: list[str] = []
        for i, a in enumerate(actions):
            if i and pair[i - 1]:
                out[-1] = f"({out[-1]};{a})"
            else:
                out.append(str(a))
        return out

    def __str__(self) -> str:
        lines = [repr(self)]
        for rank in range(self.num_ranks):
            words = self.words(rank)
            more = f" … {len(words) - _SHOWN} more" if len(words) > _SHOWN else ""
            lines.append(f"rank {rank}: {' '.join(words[:_SHOWN])}{more}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        options = "".join(f", {k}={v!r}" for k, v in self.options.items())
        return (
            f"Schedule({self.name or 'unnamed'!r}, ranks={self.num_ranks}, stages={self.num_stages}, "
            f"microbatches={self.num_microbatches}{options})"
        )

    def __eq__(self, other: object) -> bool:
        """Return True for the same actions in the same order at the same places, whatever their names."""
        if not isinstance(other, Schedule):
            return NotImplemented
        return (
            self.placement == other.placement
            and self.recompute == other.recompute
            and np.array_equal(self.offsets, other.offsets)
            and np.array_equal(self.codes, other.codes)
        )

    def __hash__(self) -> int:
        return hash((self.placement, self.codes.tobytes()))


def _read_placement(codes: c.Codes, offsets: npt.NDArray[np.int64]) -> Placement:
    """Return the placement that the order itself shows; forwards and backwards may differ."""
    rank = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    stage, kind = c.stage(codes), c.kind(codes)
    if not len(codes):
        raise ScheduleError("schedule: no action at all; expected each stage's forwards and backwards")
    tables = []
    for which, letter in ((kind == 0, "forward"), (kind != 0, "backward")):
        where = np.full(int(stage.max()) + 1, -1)
        where[stage[which]] = rank[which]
        wrong = which & (where[stage] != rank)
        if wrong.any():
            s = int(stage[wrong][0])
            raise ScheduleError(
                f"stage {s}: its {letter}s are on rank {where[s]} and on rank {int(rank[wrong][0])}; "
                f"give placement= if the stage has two copies of its weights"
            )
        tables.append(where)
    forward, backward = tables
    if (forward < 0).any():
        raise ScheduleError(f"stage {int(np.flatnonzero(forward < 0)[0])}: no forward; stages go from 0 without a gap")
    same = bool(((backward == forward) | (backward < 0)).all())
    return Placement(
        tuple(forward.tolist()), None if same else tuple(np.where(backward < 0, forward, backward).tolist())
    )
