"""Schedules of V-shaped pipelines from a building block: repeated, squeezed at its two ends under a limit of memory.

Qi et al., "Pipeline Parallelism with Controllable Memory" (arXiv:2405.15362, section 3): a block says in which slot each rank runs the
passes of one microbatch; repeating it every six slots (two chunks of F, I and W) gives a schedule whose memory follows from the block
alone. At the beginning and the end of the step slots stay empty; later work moves into them as far as memory allows.

Here everything is one slot long: the result is an order, whatever the costs are later.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence

from mappnb.sched.rows import F, I, Row, W

__all__ = ["PERIOD", "Block", "squeezed"]

PERIOD = 6
"""Slots of one microbatch on a rank: F, I and W of two chunks."""
Block = Sequence[Sequence[int]]
"""By rank, the slots of the passes of microbatch 0: F of chunks 0 and 1, I of chunks 1 and 0."""

_PASSES = 4
_WEIGHT = 4  # what stands beside the passes 0 to 3 in an event
Event = tuple[int, int, int, int]  # slot, rank, pass, microbatch (or how many Ws came before)


def squeezed(block: Block, num_microbatches: int) -> list[Row]:
    """Return the order of each rank made from a building block.

    Parameters
    ----------
    block : sequence of sequences, dims (rank, pass)
        No two passes of a rank in one slot modulo :data:`PERIOD`.
    num_microbatches : int
        How often it is repeated.

    Notes
    -----
    First forwards, backwards and Ws of both ends move, then those of the end once more with the Ws taken out and put back into what is
    free. No rank ever holds more activations than the fullest one did before.
    """
    lanes = [_Lane([[at + PERIOD * k for k in range(num_microbatches)] for at in passes]) for passes in block]
    lanes = _run(_squeeze(lanes))
    lanes = _run(_squeeze_end(lanes))
    return [lane.row(r, 2 * len(lanes) - 1 - r) for r, lane in enumerate(lanes)]


class _Lane:
    """What one rank runs in which slot.

    Attributes
    ----------
    slots : list of lists, dims (pass, microbatch)
    weights : list
        Slots of the Ws; each takes the oldest I that waits for one.
    """

    def __init__(self, slots: list[list[int]]) -> None:
        self.slots = slots
        self.busy = {s: t for t, row in enumerate(slots) for s in row}
        self.states = self._fill()

    @property
    def backwards(self) -> list[int]:
        """Slots of all I, sorted."""
        return sorted(self.slots[2] + self.slots[3])

    def _fill(self) -> list[tuple[int, int]]:
        """Put a W into each free slot while an I waits for one; return (waiting, activations held) after each slot."""
        self.weights: list[int] = []
        states: list[tuple[int, int]] = []
        waiting = held = 0
        last = max(self.busy)
        while len(states) <= last or waiting:
            before = waiting
            waiting, held = _after(self.busy.get(len(states)), waiting, held)
            if waiting < before:
                self.weights.append(len(states))
            states.append((waiting, held))
        return states

    def order(self) -> list[int]:
        """Return what the rank runs, in order: the number of a pass, or :data:`_WEIGHT`."""
        timed = [(s, t) for t, row in enumerate(self.slots) for s in row]
        return [t for _, t in sorted(timed + [(s, _WEIGHT) for s in self.weights])]

    def row(self, first_stage: int, second_stage: int) -> Row:
        """Return the order as actions."""
        stages = (first_stage, second_stage, second_stage, first_stage)
        passes = sorted((s, t, k) for t, row in enumerate(self.slots) for k, s in enumerate(row))
        backwards = [(t, k) for _, t, k in passes if t > 1]
        timed = [(s, (stages[t], F if t < 2 else I, k)) for s, t, k in passes]
        timed += [(s, (stages[t], W, k)) for s, (t, k) in zip(self.weights, backwards, strict=True)]
        return [action for _, action in sorted(timed)]


def _after(what: int | None, waiting: int, held: int) -> tuple[int, int]:
    """Return (waiting, held) after a slot in which pass ``what`` runs, or a W if there is none and one waits."""
    if what is None:
        return (waiting - 1, held - 1) if waiting else (0, held)
    return (waiting, held + 1) if what < 2 else (waiting + 1, held)


def _source(slots: Sequence[list[list[int]]], r: int, t: int) -> list[int] | None:
    """Return the slots of the pass that pass ``t`` of rank ``r`` follows, by microbatch."""
    before = r - 1 if t % 2 == 0 else r + 1
    if 0 <= before < len(slots):
        return slots[before][t]
    return slots[r][t - 1] if t else None


def _earliest(lanes: Sequence[_Lane], r: int, t: int, k: int) -> int:
    """Return the first slot after what the pass follows: the pass of the stage before, and its own of the microbatch before."""
    source = _source([lane.slots for lane in lanes], r, t)
    return 1 + max(source[k] if source is not None else -1, lanes[r].slots[t][k - 1] if k else -1)


def _events(lanes: Sequence[_Lane]) -> list[Event]:
    return sorted(
        (s, r, t, k) for r, lane in enumerate(lanes) for t, row in enumerate(lane.slots) for k, s in enumerate(row)
    )


def _squeeze(lanes: list[_Lane]) -> list[_Lane]:
    """Move work of both ends into free slots before it, in the order of time, its W with it."""
    limit = max(held for lane in lanes for _, held in lane.states)
    levels = [[held for _, held in lane.states] for lane in lanes]
    taken = [set(lane.busy) | set(lane.weights) for lane in lanes]
    sources = [lane.backwards for lane in lanes]
    first_back, last_forward = lanes[0].slots[3][0], lanes[0].slots[0][-1]
    weights = [(s, r, _WEIGHT, j) for r, lane in enumerate(lanes) for j, s in enumerate(lane.weights)]
    for s, r, t, k in sorted(_events(lanes) + weights):
        lane, level = lanes[r], levels[r]
        if (first_back, 0) <= (s, r) <= (last_forward, 0):
            continue
        low = 1 + max(sources[r][k], lane.weights[k - 1] if k else -1) if t == _WEIGHT else _earliest(lanes, r, t, k)
        if t < 2:
            low = max(low, _room(level, low, s, limit))
        new = next((q for q in range(low, s) if q not in taken[r]), s)
        taken[r].remove(s)
        taken[r].add(new)
        if t == _WEIGHT:
            lane.weights[k] = new
        else:
            lane.slots[t][k] = new
        if t in (2, 3) and new != s:
            del sources[r][bisect_left(sources[r], s)]
            insort(sources[r], new)
        step = 1 if t < 2 else -1 if t == _WEIGHT else 0
        for q in range(new, s):
            level[q] += step
    return lanes


def _room(level: list[int], low: int, slot: int, limit: int) -> int:
    """Return the first slot from which on, up to ``slot``, one activation more may be held."""
    q = slot
    while q > low and level[q - 1] < limit:
        q -= 1
    return q


def _squeeze_end(lanes: list[_Lane]) -> list[_Lane]:
    """Move passes after rank 0's last F forward into slots without a pass; the Ws take what is then free."""
    lanes = [_Lane(lane.slots) for lane in lanes]
    limit = max(held for lane in lanes for _, held in lane.states)
    last_forward = lanes[0].slots[0][-1]
    for s, r, t, k in _events(lanes):
        if (s, r) <= (last_forward, 0):
            continue
        lane = lanes[r]
        for q in range(_earliest(lanes, r, t, k), s):
            if q not in lane.busy and (states := _moved(lane, s, q, limit)):
                lane.states[q : q + len(states)] = states
                lane.busy[q] = lane.busy.pop(s)
                lane.slots[t][k] = q
                break
    return [_Lane(lane.slots) for lane in lanes]


def _moved(lane: _Lane, old: int, new: int, limit: int) -> list[tuple[int, int]]:
    """Return the lane's states from slot ``new`` on, if the pass in ``old`` ran there; none if memory is too small."""
    waiting, held = lane.states[new - 1] if new else (0, 0)
    states: list[tuple[int, int]] = []
    for q in range(new, len(lane.states)):
        what = lane.busy[old] if q == new else None if q == old else lane.busy.get(q)
        waiting, held = _after(what, waiting, held)
        if held > limit:
            return []
        states.append((waiting, held))
        if q >= old and lane.states[q] == (waiting, held):
            break
    return states


def _run(lanes: Sequence[_Lane]) -> list[_Lane]:
    """Return the slots of the passes when every rank runs its order, Ws too, as early as it can."""
    queues = [deque(lane.order()) for lane in lanes]
    slots: list[list[list[int]]] = [[[] for _ in range(_PASSES)] for _ in lanes]
    clock = [0] * len(lanes)
    while any(queues):
        for r, queue in enumerate(queues):
            while queue:
                t = queue[0]
                if t != _WEIGHT:
                    mine, source = slots[r][t], _source(slots, r, t)
                    if source is not None and len(source) <= len(mine):
                        break
                    if source is not None:
                        clock[r] = max(clock[r], source[len(mine)] + 1)
                    mine.append(clock[r])
                clock[r] += 1
                queue.popleft()
    return [_Lane(mine) for mine in slots]
