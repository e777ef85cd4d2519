"""Every state that a pipeline can reach when any action that is ready and admitted may run next: the oracle of the admission rule.

Time plays no part, so that every policy, every duration and every delay of a message is covered. A microbatch's own state is how far
its chain has come (and which of its W have run); a state of the pipeline is one such number for each microbatch.
"""

from typing import NamedTuple

import numpy as np


class Chain(NamedTuple):
    """States of one microbatch; -1 where a state has fewer than ``step`` next actions."""

    actions: list  # by state: [(kind, stage, next state)]
    next: np.ndarray  # (step, state)
    rank: np.ndarray  # (step, state)
    takes: np.ndarray  # (step, state), of a forward; -1 for the others
    held: np.ndarray  # (rank, state)
    remaining: np.ndarray  # (rank, state)
    finished: np.ndarray  # (rank, state)
    done: np.ndarray  # (state,), number of actions


def chain(placement, activation, *, split=False, kept=None):
    """The states of one microbatch; ``activation`` by stage, ``kept`` the part of it that is held until W."""
    stages = len(activation)
    order = [("F", s) for s in range(stages)] + [("I" if split else "B", s) for s in reversed(range(stages))]
    index, actions = {(0, frozenset()): 0}, []
    todo = [(0, frozenset())]
    while todo:
        position, weights = todo.pop(0)
        steps = []
        if position < len(order):
            steps.append((*order[position], (position + 1, weights)))
        if split:
            ready = {s for _, s in order[stages:position]} - weights
            steps += [("W", s, (position, weights | {s})) for s in sorted(ready)]
        for _, _, after in steps:
            if after not in index:
                index[after] = len(index)
                todo.append(after)
        actions.append([(k, s, index[after]) for k, s, after in steps])
    return _tables(list(index), actions, order, placement, activation, kept if split else np.zeros(stages), split)


def _tables(states, actions, order, placement, activation, kept, split):
    stages, ranks = len(activation), placement.num_ranks
    where = np.array(placement.forward)
    widest, n = max(map(len, actions)), len(states)
    after, rank, takes = (np.full((widest, n), -1) for _ in range(3))
    held, remaining = np.zeros((ranks, n), int), np.zeros((ranks, n), int)
    finished = np.zeros((ranks, n), bool)
    for q, (position, weights) in enumerate(states):
        for t, (k, s, to) in enumerate(actions[q]):
            after[t, q], rank[t, q] = to, where[s]
            if k == "F":
                takes[t, q] = activation[s]
        for r in range(ranks):
            mine = [s for s in range(stages) if where[s] == r]
            backward = {s for _, s in order[stages:position]}
            for s in mine:
                if position <= s:
                    remaining[r, q] += activation[s]
                elif s not in backward:
                    held[r, q] += activation[s]
                elif s not in weights:
                    held[r, q] += kept[s]
            finished[r, q] = all(s in (weights if split else backward) for s in mine)
    done = np.array([position + len(weights) for position, weights in states])
    return Chain(actions, after, rank, takes, held, remaining, finished, done)


def safe_after(c, states, i, step, limit):
    """Where a forward (transition ``step`` of microbatch i) may begin by the banker's rule, as it is defined; dims (state,)."""
    q = states[:, i]
    rank, takes = c.rank[step, q], c.takes[step, q]
    held, remaining, finished = (x[rank[:, None], states] for x in (c.held, c.remaining, c.finished))
    held[:, i] += takes
    remaining[:, i] -= takes
    free = limit[rank] - held.sum(axis=1)
    before = np.cumsum(held, axis=1) - held
    if_finished = np.where(finished, held, 0)  # a finished microbatch holds nothing
    assert not if_finished.any()
    return (finished | (remaining <= free[:, None] + before)).all(axis=1)


def fits_after(c, states, i, step, limit):
    """Where it may begin by a mere cap."""
    rank, takes = c.rank[step, states[:, i]], c.takes[step, states[:, i]]
    return c.held[rank[:, None], states].sum(axis=1) + takes <= limit[rank]


def explore(c, microbatches, limit, admits):
    """Return (number of reachable states, those without a next one that are not the end)."""
    limit, size = np.asarray(limit), len(c.done)
    weight = size ** np.arange(microbatches)
    frontier, count, dead = np.zeros((1, microbatches), int), 0, []
    whole = int(c.done.max()) * microbatches
    while len(frontier):
        count += len(frontier)
        assert (c.held[:, frontier].sum(axis=2) <= limit[:, None]).all()
        moved, found = np.zeros(len(frontier), bool), []
        for i in range(microbatches):
            for step in range(len(c.next)):
                exists = c.next[step, frontier[:, i]] >= 0
                forward = exists & (c.takes[step, frontier[:, i]] >= 0)
                exists[forward] = admits(c, frontier[forward], i, step, limit)
                after = frontier[exists].copy()
                after[:, i] = c.next[step, after[:, i]]
                moved |= exists
                found.append(after)
        at_end = c.done[frontier].sum(axis=1) == whole
        dead += frontier[~moved & ~at_end].tolist()
        following = np.concatenate(found)
        _, first = np.unique(following @ weight, return_index=True)
        frontier = following[first]
    return count, dead


def trace_to(c, microbatches, limit, admits, target):
    """Return one sequence of actions that ends in ``target``, as words, found backwards from it by depth-first search."""
    limit = np.asarray(limit)
    seen, stack = set(), [((0,) * microbatches, ())]
    while stack:
        state, path = stack.pop()
        if list(state) == list(target):
            return list(path)
        if state in seen or any(c.done[q] > c.done[t] for q, t in zip(state, target, strict=True)):
            continue
        seen.add(state)
        for i, q in enumerate(state):
            for step, (kind, stage, to) in enumerate(c.actions[q]):
                if kind != "F" or admits(c, np.array([state]), i, step, limit)[0]:
                    stack.append(((*state[:i], to, *state[i + 1 :]), (*path, f"{stage}{kind}{i}")))
    return None
