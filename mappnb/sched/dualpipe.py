"""dualpipe, dualpipe_v: forwards and backwards of two directions overlap in pairs."""

from __future__ import annotations

from typing import NamedTuple

from mappnb.errors import ScheduleError
from mappnb.sched.placement import Placement
from mappnb.sched.registry import register, require_multiple, too_large
from mappnb.sched.rows import B, F, I, Row, W, from_rows
from mappnb.sched.schedule import Schedule

__all__ = ["dualpipe", "dualpipe_v"]


@register("dualpipe")
def dualpipe(*, num_stages: int, num_microbatches: int) -> Schedule:
    """Microbatches enter at both ends, half of them at each (DualPipe: DeepSeek-V3, arXiv:2412.19437, 3.2.1, Fig. 5, Table 2).

    Parameters
    ----------
    num_stages : int
        Ranks p, an even number; rank r holds the weights of stages r and p − 1 − r.
    num_microbatches : int
        An even number m of at least 2 p; the first half enters at rank 0, the other at rank p − 1.

    Raises
    ------
    ScheduleError
        If p or m is odd, or m too small.

    Notes
    -----
    F of one direction and B of the other run as a pair (:attr:`Schedule.pairs`); its time F&B is ``Costs.overlapped_s``. The rank that
    idles longest does so for (p/2 − 1)(F&B + B − 3 W), with B = I + W the whole backward of a stage: exact for F = I ≥ W and any
    F&B up to F + B, more than it idles where I is longer than F, less where I is shorter than W. The peak is p + 1 activations of a
    stage.
    """
    too_large("dualpipe", num_stages, num_microbatches)
    p, m = num_stages, num_microbatches
    require_multiple("dualpipe", "num_stages", p, 2, "two directions")
    require_multiple("dualpipe", "num_microbatches", m, 2, "two directions")
    if m < 2 * p:
        raise ScheduleError(f"dualpipe: {m} microbatches for {p} ranks; expected at least 2 p = {2 * p}")
    half, orders = m // 2, []
    for r in range(p):
        near = _Chunk(min(r, p - 1 - r), 0 if r < p // 2 else half)
        far = _Chunk(p - 1 - near.stage, half - near.first)
        orders.append(_Order(near, far).build(p // 2, near.stage, half))
    return from_rows(
        [o.row for o in orders],
        placement=Placement.bidirectional(p, half),
        name="dualpipe",
        pairs=[o.pairs for o in orders],
    )


@register("dualpipe_v", chunks=2)
def dualpipe_v(*, num_stages: int, num_microbatches: int) -> Schedule:
    """DualPipe cut in half: the model runs down the ranks and back up, no weights are held twice (DualPipeV, Sea AI Lab and DeepSeek).

    Parameters
    ----------
    num_stages : int
        Stages s = 2 p on p ranks.
    num_microbatches : int
        At least s.

    Raises
    ------
    ScheduleError
        If there are fewer microbatches than stages.

    Notes
    -----
    Described in the read-me of ``deepseek-ai/DualPipe``; the order of torch's ``ScheduleDualPipeV``. The bubble is that of
    :func:`dualpipe` over s ranks, (p − 1)(F&B + B − 3 W) in the times of a chunk. The peak is s + 1 activations of a chunk, or p + 1/2
    of a rank's share.
    """
    too_large("dualpipe_v", num_stages, num_microbatches)
    p, m = num_stages // 2, num_microbatches
    if m < num_stages:
        raise ScheduleError(
            f"dualpipe_v: {m} microbatches for {num_stages} stages; expected at least as many, {num_stages}"
        )
    orders = [_Order(_Chunk(r, 0), _Chunk(num_stages - 1 - r, 0)).build(p, r, m) for r in range(p)]
    return from_rows(
        [o.row for o in orders], placement=Placement.wave(p), name="dualpipe_v", pairs=[o.pairs for o in orders]
    )


class _Chunk(NamedTuple):
    """A stage that a rank holds, and the first of the microbatches that pass it there."""

    stage: int
    first: int


class _Order:
    """The order of one rank; its chunk 0 is near the end at which its microbatches enter, its chunk 1 near the loss."""

    def __init__(self, near: _Chunk, far: _Chunk) -> None:
        self.chunks = (near, far)
        self.row: Row = []
        self.pairs: list[int] = []
        self.forwards, self.backwards = [0, 0], [0, 0]
        self.waiting: Row = []  # Ws of the Is so far, the oldest first

    def forward(self, chunk: int) -> None:
        stage, first = self.chunks[chunk]
        self.row.append((stage, F, first + self.forwards[chunk]))
        self.forwards[chunk] += 1

    def backward(self, chunk: int, *, split: bool = False) -> None:
        stage, first = self.chunks[chunk]
        mb = first + self.backwards[chunk]
        self.row.append((stage, I if split else B, mb))
        self.backwards[chunk] += 1
        if split:
            self.waiting.append((stage, W, mb))

    def weight(self) -> None:
        """Run the oldest W that waits, if one does."""
        self.row += self.waiting[:1]
        del self.waiting[:1]

    def pair(self, forward: int, backward: int) -> None:
        """Run F of one chunk and B of the other together."""
        self.pairs.append(len(self.row))
        self.forward(forward)
        self.backward(backward)

    def build(self, p: int, r: int, n: int) -> _Order:
        """Fill in the order of rank ``r`` of ``p`` (those up to the turn) for ``n`` microbatches in each chunk."""
        later = p - 1 - r
        for _ in range(2 * later):
            self.forward(0)
        for _ in range(r + 1):
            self.forward(0)
            self.forward(1)
        for _ in range(later):
            self.backward(1, split=True)
            self.weight()
            self.forward(1)
        self._steady(n - 2 * p + r + 1, at_turn=later == 0)
        for _ in range(later):
            self.backward(1)
            self.pair(1, 0)
        self._end(r, later)
        return self

    def _steady(self, count: int, *, at_turn: bool) -> None:
        for k in range(count):
            if k == 0 and at_turn:  # the first of the turn wait for each other: no pair
                self.forward(0)
                self.backward(1)
            else:
                self.pair(0, 1)
            self.pair(1, 0)

    def _end(self, r: int, later: int) -> None:
        """Run the backwards that are left; in their second half the Ws wait, so that the next rank gets its gradient sooner."""
        for k in range(2 * (r + 1)):
            self.backward(1 - k % 2, split=k > r)
        for _ in range(later):
            self.weight()
            self.backward(0, split=True)
        for _ in range(r + 1):
            self.weight()
