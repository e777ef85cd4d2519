"""Local search: small moves on an order that make its step shorter, under a memory limit."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mappnb.errors import ScheduleError
from mappnb.sched import codes as c
from mappnb.sched.costs import CostTables, Floats
from mappnb.sched.memory import changes
from mappnb.sched.schedule import Schedule
from mappnb.sched.times import Hops, hops, times
from mappnb.terms import Kind

__all__ = ["OBJECTIVES", "improve", "score"]

OBJECTIVES: tuple[str, ...] = ("step", "span")
"""What is made short: the makespan, or the longest span of a rank (where the next step need not wait for all ranks)."""
_WEIGHT = c.KINDS.index(Kind.BACKWARD_WEIGHT)
_GAP = 1e-9


def score(sched: Schedule, start: Floats, end: Floats, objective: str) -> tuple[float, float]:
    """Return (the objective, the sum of all ranks' spans or ends), s: the second breaks ties."""
    first, last = start[sched.offsets[:-1]], end[sched.offsets[1:] - 1]
    length = last - first if objective == "span" else last
    return float(length.max()), float(length.sum())


@dataclass(slots=True)
class _State:
    """An order with its times and score."""

    codes: c.Codes
    start: Floats
    end: Floats
    value: tuple[float, float]


class _Search:
    def __init__(
        self, sched: Schedule, costs: CostTables, limit: Floats, objective: str, rng: np.random.Generator
    ) -> None:
        self.sched, self.costs, self.limit, self.objective, self.rng = sched, costs, limit, objective, rng
        self.where: Hops = hops(sched, costs)
        self.lo, self.hi = sched.offsets[:-1].tolist(), sched.offsets[1:].tolist()
        takes, frees = changes(sched, costs)
        self.memory = {int(code): (float(t), float(f)) for code, t, f in zip(sched.codes, takes, frees, strict=True)}
        self.state = self._timed(np.array(sched.codes))
        assert self.state is not None

    def _timed(self, codes: c.Codes) -> _State | None:
        trial = self.sched.reordered(codes)
        try:
            start, end = times(trial, self.costs, where=self.where)
        except ScheduleError:
            return None
        return _State(codes, start, end, score(trial, start, end, self.objective))

    def fits(self, row: c.Codes, rank: int) -> bool:
        held = 0.0
        for code in row.tolist():
            takes, frees = self.memory[code]
            if held + takes > self.limit[rank] * (1 + 1e-9):
                return False
            held += takes - frees
        return True

    def move(self, rank: int, source: int, target: int) -> bool:
        """Move the action at ``source`` of a rank to position ``target``; keep it if that is better."""
        assert self.state is not None
        lo, hi = self.lo[rank], self.hi[rank]
        row = np.array(self.state.codes[lo:hi])
        code = row[source]
        row = np.insert(np.delete(row, source), target, code)
        if not self._in_order(row, source, target) or not self.fits(row, rank):
            return False
        codes = np.array(self.state.codes)
        codes[lo:hi] = row
        trial = self._timed(codes)
        if trial is None or trial.value >= self.state.value:
            return False
        self.state = trial
        return True

    def _in_order(self, row: c.Codes, source: int, target: int) -> bool:
        """Return whether actions of one stage and microbatch are still in the order F, B or I, W, and of one kind by microbatch."""
        a, b = min(source, target), max(source, target) + 1
        moved = int(row[target])
        same = row[a:b] & np.uint32(0x1FFFFFFF) == moved & 0x1FFFFFFF  # stage and microbatch
        kinds = c.kind(row[a:b][same])
        if (np.diff(kinds) < 0).any():
            return False
        stage_and_kind = row[a:b] >> np.uint32(17) == moved >> 17
        return not (np.diff((row[a:b][stage_and_kind] & np.uint32(0x1FFFF)).astype(np.int64)) < 0).any()

    def gaps(self) -> list[tuple[float, int, int]]:
        """Return (idle time, rank, position after it), the longest first."""
        assert self.state is not None
        out = []
        for rank, (lo, hi) in enumerate(zip(self.lo, self.hi, strict=True)):
            idle = self.state.start[lo + 1 : hi] - self.state.end[lo : hi - 1]
            out += [(float(idle[i]), rank, int(i) + 1) for i in np.flatnonzero(idle > _GAP)]
        return sorted(out, reverse=True)

    def candidates(self) -> list[tuple[int, int, int]]:
        """Return moves worth a trial: a weight gradient into a gap or out of the way of what follows, and neighbours swapped."""
        assert self.state is not None
        out = []
        for _, rank, at in self.gaps()[:40]:
            row = self.state.codes[self.lo[rank] : self.hi[rank]]
            kind = c.kind(row)
            later = np.flatnonzero(kind[at:] == _WEIGHT)[:3] + at
            out += [(rank, int(w), at) for w in later]  # fill the gap with what would come later
            earlier = np.flatnonzero(kind[:at] == _WEIGHT)[-3:]
            out += [(rank, int(w), at - 1) for w in earlier]  # or with what came before and held others up
            out += [(rank, at, at - 1)] if at >= 1 else []
            out += [(rank, at, at + 1)] if at + 1 < len(row) else []
            ahead = np.flatnonzero(kind[at + 1 :] == 0)[:1] + at + 1
            out += [(rank, int(f), at) for f in ahead]  # a forward drawn forward
        ranks = self.rng.integers(0, len(self.lo), 24).tolist()
        for rank in ranks:  # and some at random
            n = self.hi[rank] - self.lo[rank]
            at = int(self.rng.integers(0, max(n - 1, 1)))
            out.append((rank, at, min(at + int(self.rng.integers(1, 6)), n - 1)))
            out.append((rank, min(at + int(self.rng.integers(1, 6)), n - 1), at))
        return [m for m in out if m[1] != m[2]]

    def critical(self) -> list[tuple[int, int, int]]:
        """Return moves on the critical path: what follows its neighbour on the rank, though its input was there, before it."""
        assert self.state is not None
        st, out = self.state, []
        kind = c.kind(st.codes)
        at = self._last()
        while at >= 0:
            rank = self._rank_of(at)
            lo, hi = self.lo[rank], self.hi[rank]
            if at == lo or st.start[at] - st.end[at - 1] > _GAP:
                at = self._producer(at)
                continue
            here = at - lo
            out.append((rank, here, here - 1))
            if kind[at - 1] == _WEIGHT:
                idle = np.flatnonzero(st.start[at + 1 : hi] - st.end[at : hi - 1] > _GAP)[:2]
                out += [(rank, here - 1, here + int(i)) for i in idle]
                out += [(rank, here - 1, min(here + k, hi - lo - 1)) for k in (1, 3, 7)]
                out.append((rank, here - 1, hi - lo - 1))
            at -= 1
        return out

    def _last(self) -> int:
        """Return the action that ends the longest rank."""
        assert self.state is not None
        first = self.state.start[self.lo] if self.objective == "span" else 0.0
        return int(self.hi[int(np.argmax(self.state.end[np.array(self.hi) - 1] - first))]) - 1

    def _rank_of(self, at: int) -> int:
        return int(np.searchsorted(self.sched.offsets, at, side="right")) - 1

    def _producer(self, at: int) -> int:
        """Return the action whose result ``at`` waited for; -1 at the begin."""
        assert self.state is not None
        code = self.state.codes[at : at + 1]
        kind, stage, mb = int(c.kind(code)[0]), int(c.stage(code)[0]), int(c.microbatch(code)[0])
        if kind == 0:
            wanted = [c.pack(stage - 1, 0, mb)] if stage else []
        elif stage + 1 < self.sched.num_stages:
            wanted = [c.pack(stage + 1, k, mb) for k in (1, 2)]
        else:
            wanted = [c.pack(stage, 0, mb)]
        found = np.flatnonzero(np.isin(self.state.codes, wanted)) if wanted else np.empty(0, np.int64)
        return int(found[0]) if len(found) else -1

    def run(self, trials: int) -> None:
        idle = 0
        while trials > 0 and idle < 3:
            moved = False
            for rank, source, target in [*self.critical(), *self.candidates()]:
                if trials <= 0:
                    break
                trials -= 1
                moved |= self.move(rank, source, target)
            idle = 0 if moved else idle + 1


def improve(
    sched: Schedule,
    costs: CostTables,
    *,
    limit: npt.NDArray[np.float64],
    objective: str = "step",
    trials: int = 2000,
    seed: int = 0,
) -> Schedule:
    """Return an order at least as good: weight gradients moved into gaps, neighbours swapped, one move at a time.

    Parameters
    ----------
    sched : Schedule
        A valid order without overlapped pairs; each stage's forward and backward on one rank.
    costs : CostTables
        Its costs.
    limit : array, dims (rank,)
        Activation memory of each rank, in the unit of the costs.
    objective : str
        One of :data:`OBJECTIVES`.
    trials : int
        Moves to try at most.
    seed : int
        Of the random moves among them.

    Notes
    -----
    In the spirit of the local search on W of Qi et al. (arXiv:2401.10241, 3.1); each trial is timed by the native pass.
    """
    if sched.pairs or sched.placement.backward is not None or sched.placement.mirrored is not None:
        return sched
    search = _Search(sched, costs, limit, objective, np.random.default_rng(seed))
    search.run(trials)
    assert search.state is not None
    return Schedule.from_codes(
        search.state.codes, sched.offsets, placement=sched.placement, name="searched", options=sched.options
    )
