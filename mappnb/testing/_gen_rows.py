"""From true times to the rows of a rank: events on its own clock, the step table, telemetry and metrics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from mappnb.table_specs import TABLES, Columns
from mappnb.terms import Category, Flag, Op, Phase
from mappnb.testing._gen_graph import Step
from mappnb.testing._gen_program import AXES, PP, What
from mappnb.testing._gen_times import Times
from mappnb.testing._gen_truth import ClockTruth

__all__ = ["EventRows", "step_rows"]

Array = npt.NDArray[Any]
GC = (str(Category.HOST), str(Op.GC), "", str(Phase.NONE), -1, "")
_AXES = (*AXES, "pp")


class EventRows:
    """Makes the event rows of ranks of one pipeline rank.

    Parameters
    ----------
    step : Step
        The graph.
    pp_rank : int
        Pipeline rank.
    clock : ClockTruth
        The clocks.
    """

    def __init__(self, step: Step, pp_rank: int, clock: ClockTruth) -> None:
        self.step, self.pp_rank, self.clock = step, pp_rank, clock
        program = step.programs[pp_rank]
        self.sites = list(dict.fromkeys([*(r.site for r in program.rows), GC]))
        number = {site: i for i, site in enumerate(self.sites)}
        self.site = np.array([number[r.site] for r in program.rows])
        self.first, self.last = program.row_column("first"), program.row_column("last")
        names = ("depth", "stage", "chunk", "microbatch", "num_bytes", "axis", "seq", "per_step", "peer")
        self.fixed = {n: program.row_column(n) for n in names}
        self.saves = program.column("what")[self.first] == What.CHECKPOINT

    def columns(self, times: Sequence[Times], column: int, now_s: float) -> Columns:
        """Return the events of a rank on its own clock.

        Parameters
        ----------
        times : sequence of Times
            Steps in order.
        column : int
            Replica (column of ``step.members.ranks``).
        now_s : float
            The rank's last sign of life, s; what has not ended by then is open.
        """
        rank = int(self.step.members.ranks[self.pp_rank, column])
        start = np.stack([self.step.slots(t.start_s, self.pp_rank)[self.first, column] for t in times])
        end = np.stack([self.step.slots(t.end_s, self.pp_rank)[self.last, column] for t in times])
        every = self.step.plan.checkpoint_every
        numbers = np.array([t.number for t in times])
        seen = start <= now_s
        if every:
            seen &= ~self.saves | ((numbers[:, None] + 1) % every == 0)
        which, row = np.nonzero(seen)
        begin, finish = start[which, row], end[which, row]
        is_open = ~(finish <= now_s)
        raw = self.clock.raw_ns(rank, begin)
        length = self.clock.raw_ns(rank, np.where(is_open, now_s, finish)) - raw
        out = self._filled(rank, numbers[which], row)
        out |= {"start_ns": raw, "duration_ns": length, "flags": np.where(is_open, int(Flag.OPEN), 0)}
        return self._typed(self._with_gaps(out, times, rank, column, now_s))

    def _filled(self, rank: int, number: Array, row: Array) -> dict[str, Array]:
        members, fixed = self.step.members, self.fixed
        axis = fixed["axis"][row]
        ids = np.array([_group_id(self.step, a, rank) for a in _AXES] + [-1])
        seq = fixed["seq"][row]
        out = {name: fixed[name][row] for name in ("depth", "stage", "chunk", "microbatch")}
        peer = fixed["peer"][row]
        column = int(members.group_of["pp"][rank])
        out |= {
            "site": self.site[row],
            "step": number,
            "bytes": fixed["num_bytes"][row],
            "group": ids[axis],
            "seq": np.where(seq >= 0, seq + number * fixed["per_step"][row], -1),
            "peer": np.where((axis == PP) & (peer >= 0), members.ranks[np.maximum(peer, 0), column], -1),
        }
        return out

    def _with_gaps(
        self, out: dict[str, Array], times: Sequence[Times], rank: int, column: int, now_s: float
    ) -> dict[str, Array]:
        """Add the recorded gaps of the rank, such as garbage collections."""
        low, high = self.step.base[self.pp_rank], self.step.base[self.pp_rank + 1]
        mine = [
            (t.number, float(t.start_s[op]), length)
            for t in times
            for op, length in t.gaps
            if low <= op < high and (op - low) % self.step.replicas == column and t.start_s[op] <= now_s
        ]
        if not mine:
            return out
        number, end, length = (np.array(x) for x in zip(*mine, strict=True))
        start = self.clock.raw_ns(rank, end - length)
        rows = len(out["site"])
        out = {k: np.concatenate([v, np.full(len(mine), -1, v.dtype)]) for k, v in out.items()}
        out["site"][rows:], out["step"][rows:], out["depth"][rows:] = self.sites.index(GC), number, 1
        out["start_ns"][rows:], out["duration_ns"][rows:] = start, self.clock.raw_ns(rank, end) - start
        out["flags"][rows:] = 0
        return out

    @staticmethod
    def _typed(out: dict[str, Array]) -> Columns:
        spec = TABLES["events"]
        n = len(out["site"])
        default = {"thread": 0, "flags": 0}
        return {
            c: np.ascontiguousarray(out[c], spec.numpy_dtype(c))
            if c in out
            else np.full(n, default.get(c, -1), spec.numpy_dtype(c))
            for c in spec.columns
        }


def _group_id(step: Step, axis: str, rank: int) -> int:
    number = int(step.members.group_of[axis][rank])
    return int(step.members.ids[axis][number]) if number >= 0 else -1


def step_rows(
    step: Step, times: Sequence[Times], rank: int, clock: ClockTruth, *, now_s: float, tokens: float
) -> Columns:
    """Return the rows of a rank's step table: the steps that ended."""
    first, last = int(step.begins[rank]), int(step.ends[rank])
    done = [t for t in times if t.end_s[last] <= now_s]
    number = np.array([t.number for t in done], np.int32)
    n = len(done)
    last_stage = int(step.members.coords["pp"][rank]) == step.plan.ends[1]
    values: Columns = {
        "step": number,
        "start_ns": clock.raw_ns(rank, np.array([t.start_s[first] for t in done], np.float64)),
        "end_ns": clock.raw_ns(rank, np.array([t.end_s[last] for t in done], np.float64)),
        "loss": 2.0 + 9.0 / (1.0 + number) ** 0.5 if last_stage else np.full(n, np.nan),
        "grad_norm": 1.0 + 4.0 / (1.0 + number),
        "lr": np.full(n, 3e-4),
        "tokens": np.full(n, tokens),
        "microbatches": np.full(n, float(step.plan.schedule.num_microbatches)),
        "skipped": np.zeros(n),
    }
    for name in TABLES["steps"].columns:
        values.setdefault(name, np.full(n, np.nan))
    return values
