"""The replay engine against its plain twin, against hand-worked cases, and its latest times against trying them out."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mappnb._pyreplay import replay_reference
from mappnb.replay import DeadlockError, Graph, critical_path, replay


def graph(duration, edges=(), stream=None, **others):
    source, target, lag = zip(*edges, strict=True) if edges else ((), (), ())
    n = len(duration)
    return Graph.from_edges(
        np.array(duration, float), source, target, lag, stream=np.array(stream or [-1] * n, np.int32), **others
    )


@st.composite
def graphs(draw, queues=True, interference=True):
    """Random acyclic graphs: edges go from lower to higher numbers, as streams do; groups never hold two ends of a path."""
    n = draw(st.integers(1, 14))
    number = st.integers(0, 8).map(float)  # whole numbers: ties are common, and sums exact
    edges = draw(st.lists(st.tuples(st.integers(0, n - 1), st.integers(0, n - 1), number), max_size=2 * n))
    edges = [(min(a, b), max(a, b), lag) for a, b, lag in edges if a != b]
    stream = draw(st.lists(st.integers(-1, 2), min_size=n, max_size=n))
    group = np.full(n, -1, np.int32)
    if draw(st.booleans()) and n >= 2:
        a = draw(st.integers(0, n - 2))
        linked = {(s, t) for s, t, _ in edges}
        if (a, a + 1) not in linked and (stream[a] != stream[a + 1] or stream[a] < 0):
            group[a : a + 2] = 0
    ids = st.lists(st.tuples(st.integers(-1, 1), st.integers(-1, 1)), min_size=n, max_size=n)
    queue = np.array(draw(ids), np.int32).reshape(n, 2) if queues else np.full((n, 2), -1, np.int32)
    queue[:, 1] = np.where(queue[:, 1] == queue[:, 0], -1, queue[:, 1])
    queue[group >= 0] = -1
    slows = np.array(draw(ids), np.int32).reshape(n, 2) if interference else np.full((n, 2), -1, np.int32)
    slows[:, 1] = np.where(slows[:, 1] == slows[:, 0], -1, slows[:, 1])
    slows[group >= 0] = -1
    slows[(slows >= 0).any(1) & (np.array(stream) >= 0)] = -1
    return graph(
        draw(st.lists(number, min_size=n, max_size=n)),
        edges,
        stream,
        group=group,
        queue=queue,
        slows=slows,
        interference=draw(st.sampled_from([0.0, 0.5])) if interference else 0.0,
        delay_s=np.array(draw(st.lists(number, min_size=n, max_size=n))),
    )


@settings(max_examples=300, deadline=None)
@given(graphs(queues=False, interference=False))
def test_pass_and_events_equal_the_twin(g):
    start, end = replay_reference(g)
    for by_events in (False, True):
        done = replay(g, by_events=by_events)
        np.testing.assert_array_equal(done.start_s, start)
        np.testing.assert_array_equal(done.end_s, end)


@settings(max_examples=300, deadline=None)
@given(graphs())
def test_queues_and_interference_equal_the_twin(g):
    start, end = replay_reference(g)
    done = replay(g)
    np.testing.assert_allclose(done.start_s, start, rtol=1e-12)
    np.testing.assert_allclose(done.end_s, end, rtol=1e-12)


@settings(max_examples=150, deadline=None)
@given(graphs(queues=False, interference=False), st.data())
def test_slack_is_what_an_operation_can_be_late(g, data):
    done = replay(g, slack=True)
    op = data.draw(st.integers(0, len(g) - 1))
    slack = done.latest_start_s[op] - done.start_s[op]
    assert slack >= 0
    for more, grows in ((slack, False), (slack + 1, True)):
        later = g.delays_s.copy()
        later[op] += more
        end = replay(dataclasses.replace(g, delay_s=later)).end_s.max()
        assert (end > done.end_s.max()) == grows


@settings(max_examples=150, deadline=None)
@given(graphs(interference=False))
def test_critical_path_has_no_gap_and_no_slack(g):
    done = replay(g, slack=True)
    path = critical_path(g, done)
    assert done.end_s[path[-1]] == done.end_s.max()
    np.testing.assert_array_equal(done.latest_end_s[path[-1]], done.end_s.max())
    first = path[0]
    assert done.start_s[first] == g.delays_s[first] or g.groups[first] >= 0 or done.cause[first] == -1
    assert (np.diff(done.end_s[path]) >= 0).all() or (g.groups[path] >= 0).any()


def test_a_queue_serves_who_is_ready_first():
    # two senders share a card: the second to be ready waits for the first, whatever their numbers
    g = graph(
        [5, 1, 2, 2, 0, 0],
        [(0, 2, 0), (1, 3, 0), (2, 4, 0.5), (3, 5, 0.5)],
        queue=np.array([[-1, -1]] * 2 + [[0, -1]] * 2 + [[-1, -1]] * 2, np.int32),
    )
    done = replay(g)
    assert done.end_s.tolist() == [5, 1, 7, 3, 7.5, 3.5]
    g = graph([1, 2, 4, 4], [(0, 2, 0), (1, 3, 0)], queue=np.array([[-1, -1], [-1, -1], [0, 1], [1, -1]], np.int32))
    done = replay(g, slack=True)
    assert done.start_s.tolist() == [0, 0, 1, 5] and done.cause[3] == 2
    assert (done.latest_start_s - done.start_s).tolist() == [0, 3, 0, 0]  # who was served first is taken as given


def test_interference_slows_while_it_lasts():
    # 4 s of work, a transfer runs from 1 to 3: 1 + 2 at 1/1.5 + the rest
    g = graph(
        [1, 2, 4], [(0, 1, 0)], [1, -1, 0], slows=np.array([[-1, -1], [0, -1], [-1, -1]], np.int32), interference=0.5
    )
    assert replay(g).end_s[2] == pytest.approx(3 + (4 - 1 - 2 / 1.5))


def test_a_group_waits_for_its_last_member():
    g = graph([1, 3, 2, 2], [(0, 2, 0), (1, 3, 0)], group=np.array([-1, -1, 0, 0], np.int32))
    done = replay(g, slack=True)
    assert done.start_s[2:].tolist() == [1, 3] and done.end_s[2:].tolist() == [5, 5]
    assert done.late.tolist() == [0, 1, 3, 3]
    assert critical_path(g, done).tolist()[:2] == [1, 3]
    assert (done.latest_start_s - done.start_s).tolist() == [2, 0, 2, 0]


def test_a_cycle_is_an_error_that_names_its_operations():
    g = graph([1, 1, 1, 1], [(0, 1, 0), (2, 1, 0), (1, 2, 0)])
    with pytest.raises(DeadlockError, match="2 of 4 operations wait for one another") as err:
        replay(g)
    assert err.value.ops.tolist() == [1, 2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dep": np.array([7], np.int32)}, "dep"),
        ({"stream": np.array([0], np.int32)}, "length"),
        ({"stream": np.array([-2, 0], np.int32)}, "stream"),
        ({"dep_offsets": np.array([0, 2, 1], np.int64)}, "fall"),
        ({"lag_s": np.zeros(3)}, "lag"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(change, message):
    g = graph([1, 1], [(0, 1, 0)])
    with pytest.raises(ValueError, match=message):
        replay(dataclasses.replace(g, **change))
