"""The native pass and the replay graph against the plain reference simulator, on random schedules and costs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mappnb.errors import ScheduleError
from mappnb.sched import Action, Costs, Placement, Schedule, schedule
from mappnb.sched.graph import build
from mappnb.sched.reference import times_reference
from mappnb.sched.times import span_s, times
from mappnb.terms import Kind


@st.composite
def built(draw):
    """A registered schedule, or one of two ranks with disaggregation, a mirrored half or pairs."""
    p, m = draw(st.integers(1, 4)), draw(st.integers(1, 8))
    name = draw(st.sampled_from(["gpipe", "1f1b", "interleaved", "breadth_first", "apart", "mirrored", "pairs"]))
    if name in ("interleaved", "breadth_first"):
        v = draw(st.integers(2, 3))
        return schedule(name, num_stages=p * v, num_microbatches=p * draw(st.integers(1, 3)), num_chunks=v)
    if name in ("gpipe", "1f1b"):
        return schedule(name, num_stages=p, num_microbatches=m)
    if name == "apart":
        ranks = [[Action(s, Kind.FORWARD, i) for i in range(m)] for s in range(p)]
        ranks += [[Action(s, Kind.BACKWARD, i) for i in range(m)] for s in range(p)]
        return Schedule(ranks, placement=Placement.disaggregated(p), recompute=draw(st.booleans()))
    if name == "mirrored":
        place = Placement.bidirectional(2, m)
        ranks = [[], []]
        for i in range(2 * m):
            for kind in (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT):
                for s in (0, 1):
                    ranks[place.rank(s, kind, i)].append(Action(s, kind, i))
        return Schedule(ranks, placement=place)
    first = [Action(0, Kind.FORWARD, 0), Action(0, Kind.FORWARD, 1)]
    for i in range(m):
        first += [Action(0, Kind.FORWARD, i + 2), Action(0, Kind.BACKWARD, i)]
    first += [Action(0, Kind.BACKWARD, m), Action(0, Kind.BACKWARD, m + 1)]
    second = [Action(1, k, i) for i in range(m + 2) for k in (Kind.FORWARD, Kind.BACKWARD)]
    return Schedule([first, second], pairs=[(0, 2 + 2 * i) for i in range(m)])


@st.composite
def costs_for(draw, sched):
    rng = np.random.default_rng(draw(st.integers(0, 2**31)))
    s, m, r = sched.num_stages, sched.num_microbatches, sched.num_ranks
    shape = draw(st.sampled_from([(), (s,), (s, m)]))
    return Costs(
        forward_s=rng.random(shape),
        backward_input_s=rng.random(s),
        backward_weight_s=rng.random(),
        p2p_s=draw(st.sampled_from([0.0, rng.random((r, r))])),
        message_bytes=draw(st.sampled_from([0.0, 3.0])),
        ship_bytes=draw(st.sampled_from([0.0, 5.0])),
        bandwidth=draw(st.sampled_from([np.inf, 7.0, 1 + 9 * rng.random((r, r))])),
        send=draw(st.sampled_from(["async", "sync", "blocking"])),
        overlapped_s=draw(st.sampled_from([None, 0.7])),
    )


@settings(max_examples=250, deadline=None)
@given(st.data())
def test_pass_and_graph_equal_the_reference(data):
    sched = data.draw(built())
    tables = data.draw(costs_for(sched)).tables(sched)
    start, end = times_reference(sched, tables)
    for got in (times(sched, tables), build(sched, tables).action_times(build(sched, tables).run())):
        np.testing.assert_allclose(got[0], start, rtol=1e-12, atol=1e-15)
        np.testing.assert_allclose(got[1], end, rtol=1e-12, atol=1e-15)


def test_latency_and_bandwidth_by_hand():
    # two ranks, two microbatches: 1 s of forward, messages 3 s on the wire each, one after the other, and 0.5 s of latency
    sched = schedule("gpipe", num_stages=2, num_microbatches=2)
    costs = Costs(forward_s=1, backward_input_s=1, backward_weight_s=0, p2p_s=0.5, message_bytes=6, bandwidth=2)
    start, end = times(sched, costs.tables(sched))
    at = dict(
        zip(map(str, (a for r in sched.ranks for a in r)), zip(start.tolist(), end.tolist(), strict=True), strict=True)
    )
    assert at["0F0"] == (0, 1) and at["0F1"] == (1, 2)
    assert at["1F0"] == (4.5, 5.5) and at["1F1"] == (7.5, 8.5)  # the second message left the wire at 7
    sync = Costs(
        forward_s=1, backward_input_s=1, backward_weight_s=0, p2p_s=0.5, message_bytes=6, bandwidth=2, send="sync"
    )
    start, _ = times(sched, sync.tables(sched))
    assert start[1] == 4.5  # the sender goes on when its message has come
    held = Costs(
        forward_s=1, backward_input_s=1, backward_weight_s=0, p2p_s=0.5, message_bytes=6, bandwidth=2, send="blocking"
    )
    start, _ = times(sched, held.tables(sched))
    assert start[1] == 4.0  # when it has left the wire


def test_ranks_of_a_host_share_its_card():
    # stages 0 and 1 on one host, 2 and 3 on the other; only the message 1 -> 2 and back goes through the cards
    sched = schedule("gpipe", num_stages=4, num_microbatches=1)
    one = {"forward_s": 1, "backward_input_s": 1, "backward_weight_s": 0, "message_bytes": 4, "bandwidth": 4}
    plain = times(sched, Costs(**one).tables(sched))[1].max()
    card = times(sched, Costs(**one, ranks_per_host=2, nic_bandwidth=2).tables(sched))[1].max()
    assert (plain, card) == (8 + 6, 8 + 6 + 2)
    # two ranks of one host send to two of the other at once: they take turns
    two = Schedule(
        [[Action(s, k, mb) for s, mb in ((r, 0),) for k in (Kind.FORWARD, Kind.BACKWARD)] for r in range(1)]
        + [[Action(1, Kind.FORWARD, 0), Action(1, Kind.BACKWARD, 0)]]
    )
    assert times(two, Costs(**one, ranks_per_host=1).tables(two))[1].max() == 4 + 2


def test_reductions_slow_the_work_beside_them():
    sched = schedule("gpipe", num_stages=1, num_microbatches=1)
    costs = Costs(forward_s=1, backward_input_s=1, backward_weight_s=1, reduce_s=2, optimizer_s=0.5, interference=0.5)
    built_ = build(sched, costs.tables(sched))
    done = built_.run()
    assert done.end_s[built_.first_reduction] == 5 and done.start_s[built_.first_optimizer] == 5
    assert done.end_s.max() == 5.5


def test_a_deadlock_says_where_each_rank_is():
    stuck = Schedule(
        [
            [Action(0, Kind.BACKWARD, 0), Action(0, Kind.FORWARD, 0)],
            [Action(1, Kind.FORWARD, 0), Action(1, Kind.BACKWARD, 0)],
        ]
    )
    tables = Costs(forward_s=1, backward_input_s=1, backward_weight_s=1).tables(stuck)
    with pytest.raises(ScheduleError, match="rank 0 at 0B0, rank 1 at 1F0"):
        times(stuck, tables)
    with pytest.raises(ScheduleError, match="deadlock"):
        build(stuck, tables).run()
    with pytest.raises(ScheduleError, match="deadlock"):
        times_reference(stuck, tables)


def test_span_is_the_longest_of_one_rank():
    sched = schedule("1f1b", num_stages=4, num_microbatches=8)
    start, end = times(sched, Costs(forward_s=1, backward_input_s=1, backward_weight_s=1).tables(sched))
    assert span_s(sched, start, end) == 33 and end.max() == 33
