"""The replay engine: a graph of operations, replayed with each as early as what it waits for allows.

Schedules are simulated on it, and what-if questions on recorded steps are answered by it. Compiled (``csrc/replay.cpp``);
:mod:`mappnb._pyreplay` is its plain twin.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mappnb import _core
from mappnb.errors import MappnbError

__all__ = ["DeadlockError", "Graph", "Replayed", "critical_path", "replay"]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int32]


class DeadlockError(MappnbError, ValueError):
    """A graph whose operations wait for one another; ``ops`` are those that never ran."""

    def __init__(self, message: str, ops: Ints) -> None:
        super().__init__(message)
        self.ops = ops


@dataclass(frozen=True, eq=False)
class Graph:
    """Operations, what each waits for, and what it occupies.

    Attributes
    ----------
    duration_s : array, dims (op,)
        Work of each operation, s.
    dep_offsets : array, dims (op + 1,), int64
        Where the dependencies of each operation begin in ``dep``, and the end.
    dep : array, dims (edge,), int32
        The operations that must have ended.
    lag_s : array, dims (edge,)
        Least time from the end of the dependency to the start, s: the latency of a message.
    stream : array, dims (op,), int32
        Operations of one stream run one at a time, in the order of their index (a compute stream; a link whose messages come from
        one rank). -1: none.
    queue : array, dims (op, 2), int32
        Up to two resources that an operation occupies while it runs, served in the order in which operations become ready (the
        network cards of a message's two hosts). -1: none.
    group : array, dims (op,), int32
        A join: every member begins when it is ready, and ends ``duration_s`` after the last member has begun (a collective, or the
        two sides of a message). -1: none.
    delay_s : array, dims (op,)
        Time between the last dependency and the start, s (launch delay).
    slows : array, dims (op, 2), int32
        Up to two streams whose operations run slower while this one runs. -1: none.
    interference : float
        By which fraction: 0.1 makes 10 % more time.
    """

    duration_s: Floats
    dep_offsets: npt.NDArray[np.int64]
    dep: Ints
    lag_s: Floats
    stream: Ints
    queue: Ints | None = None
    group: Ints | None = None
    delay_s: Floats | None = None
    slows: Ints | None = None
    interference: float = 0.0
    _blank: tuple[Ints, Ints, Floats] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        n = len(self.duration_s)
        object.__setattr__(self, "_blank", (np.full((n, 2), -1, np.int32), np.full(n, -1, np.int32), np.zeros(n)))

    def __len__(self) -> int:
        return len(self.duration_s)

    @property
    def queues(self) -> Ints:
        """``queue``, or -1 throughout."""
        return self._blank[0] if self.queue is None else self.queue

    @property
    def groups(self) -> Ints:
        """``group``, or -1 throughout."""
        return self._blank[1] if self.group is None else self.group

    @property
    def delays_s(self) -> Floats:
        """``delay_s``, or 0 throughout."""
        return self._blank[2] if self.delay_s is None else self.delay_s

    @property
    def slowed(self) -> Ints:
        """``slows``, or -1 throughout."""
        return self._blank[0] if self.slows is None else self.slows

    @classmethod
    def from_edges(
        cls, duration_s: Floats, source: npt.ArrayLike, target: npt.ArrayLike, lag_s: npt.ArrayLike, **others: object
    ) -> Graph:
        """Return the graph whose edge i says that ``target[i]`` waits for ``source[i]``, and ``lag_s[i]`` more.

        Parameters
        ----------
        duration_s : array, dims (op,)
            Work of each operation, s.
        source, target, lag_s : array, dims (edge,)
            The edges, in any order.
        **others
            The other attributes.
        """
        source, target = np.asarray(source, np.int64), np.asarray(target, np.int64)
        order = np.argsort(target, kind="stable")
        offsets = np.zeros(len(duration_s) + 1, np.int64)
        np.cumsum(np.bincount(target, minlength=len(duration_s)), out=offsets[1:])
        lag = np.broadcast_to(np.asarray(lag_s, np.float64), source.shape)
        return cls(
            np.ascontiguousarray(duration_s, np.float64),
            offsets,
            source[order].astype(np.int32),
            np.ascontiguousarray(lag[order]),
            **others,  # type: ignore[arg-type]
        )


class Replayed(NamedTuple):
    """When each operation ran.

    Attributes
    ----------
    start_s, end_s : array, dims (op,)
        Start and end, s from the begin of the replay.
    cause : array, dims (op,), int32
        The operation whose end decided the start (a dependency, the one before on the stream, the one served before); -1 for none.
    late : array, dims (op,), int32
        The member of its group that began last; the operation itself where there is no group.
    latest_start_s, latest_end_s : array, dims (op,)
        The latest start and end that leave the last end of all where it is; empty unless asked for. ``latest_start_s - start_s`` is
        the slack.
    """

    start_s: Floats
    end_s: Floats
    cause: Ints
    late: Ints
    latest_start_s: Floats
    latest_end_s: Floats


def replay(graph: Graph, *, slack: bool = False, by_events: bool = False) -> Replayed:
    """Return when each operation of a graph runs, each as early as it can.

    Parameters
    ----------
    graph : Graph
        What to replay.
    slack : bool
        Also work out the latest times.
    by_events : bool
        Go through time event by event even where a pass over the graph would do (for tests of the engine).

    Raises
    ------
    DeadlockError
        If operations wait for one another.
    ValueError
        If the arrays do not fit together.

    Notes
    -----
    Linear in operations and edges without queues and interference; else a heap of events. What the queues serve first is decided by
    readiness in the replay, and taken as given by the latest times.
    """
    n = len(graph)
    start, end = np.empty(n), np.empty(n)
    cause, late = np.empty(n, np.int32), np.empty(n, np.int32)
    last = (np.empty(n), np.empty(n)) if slack else (np.empty(0), np.empty(0))
    done = _core.replay(
        graph.duration_s, graph.delays_s, graph.stream, graph.queues, graph.groups, graph.slowed, graph.interference,
        graph.dep_offsets, graph.dep, graph.lag_s,
        max(_count(graph.stream), _count(graph.slowed)), _count(graph.queues), _count(graph.groups), by_events,
        start, end, cause, late, *last,
    )  # fmt: skip
    if done < n:
        never = np.flatnonzero(_never(graph)).astype(np.int32)
        raise DeadlockError(f"{len(never)} of {n} operations wait for one another, such as {never[:5].tolist()}", never)
    return Replayed(start, end, cause, late, *last)


def critical_path(graph: Graph, done: Replayed) -> Ints:
    """Return the operations that decide the last end, in the order of time.

    Parameters
    ----------
    graph : Graph
        What was replayed.
    done : Replayed
        Its replay.

    Returns
    -------
    array, dims (step of the path,), int32
        Each one's start is decided by the end of the one before. Of a group, the member that came last and the member that the path
        goes on from.
    """
    path: list[int] = []
    at = int(np.argmax(done.end_s)) if len(graph) else -1
    while at >= 0:
        path.append(at)
        last = int(done.late[at])
        if last != at:
            path.append(last)
        at = int(done.cause[last])
    return np.array(path[::-1], np.int32)


def _count(ids: Ints) -> int:
    return int(ids.max(initial=-1)) + 1


def _never(graph: Graph) -> npt.NDArray[np.bool_]:
    """Return which operations never run: a plain count, for the message alone."""
    from mappnb._pyreplay import replay_reference

    return np.asarray(np.isnan(replay_reference(graph)[1]), np.bool_)
