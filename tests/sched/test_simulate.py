"""simulate(): closed forms, what the dataset says, stragglers by hand, draws."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import mappnb
from mappnb.analysis import breakdown, bubble_fraction, match
from mappnb.errors import CostError, ScheduleError
from mappnb.sched import (
    Action,
    Costs,
    Empirical,
    Placement,
    Schedule,
    Straggler,
    memory_over_time,
    monte_carlo,
    schedule,
    simulate,
)
from mappnb.sched.graph import build
from mappnb.sched.times import times
from mappnb.schema import EVENTS, check
from mappnb.terms import Kind

UNIT = Costs(forward_s=1.0, backward_input_s=1.0, backward_weight_s=1.0)
FULL = Costs(
    forward_s=1.0,
    backward_input_s=1.2,
    backward_weight_s=0.8,
    p2p_s=0.05,
    message_bytes=10,
    bandwidth=100,
    reduce_s=0.7,
    optimizer_s=0.3,
)


@pytest.mark.parametrize(("p", "m"), [(1, 1), (2, 4), (4, 8), (8, 24), (3, 7)])
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_bubbles_of_gpipe_and_1f1b(name, p, m):
    ds = simulate(schedule(name, num_stages=p, num_microbatches=m), UNIT)
    assert float(ds.makespan_s) == 3 * (m + p - 1)
    assert float(ds.bubble_fraction) == pytest.approx((p - 1) / (m + p - 1))
    np.testing.assert_allclose(bubble_fraction(ds), (p - 1) / (m + p - 1))
    peak = [m] * p if name == "gpipe" else [min(p - r, m) for r in range(p)]
    assert ds.peak_activation.values.tolist() == peak


@pytest.mark.parametrize(("p", "m", "c"), [(2, 4, 0.01), (3, 9, 0.01), (4, 8, 0.02), (8, 16, 0.01)])
def test_latency_of_gpipe_and_1f1b(p, m, c):
    costs = Costs(forward_s=1.0, backward_input_s=1.0, backward_weight_s=1.0, p2p_s=c)
    ds = simulate(schedule("gpipe", num_stages=p, num_microbatches=m), costs)
    assert float(ds.makespan_s) == pytest.approx(3 * (m + p - 1) + 2 * (p - 1) * c)
    ds = simulate(schedule("1f1b", num_stages=p, num_microbatches=m), costs)
    assert float(ds.makespan_s) == pytest.approx(3 * (m + p - 1) + 2 * c * ((p - 1) * (m + p - 1) // p))


@pytest.mark.parametrize(("p", "m", "v"), [(2, 4, 2), (4, 8, 2), (4, 16, 4), (8, 16, 2)])
def test_interleaved_and_breadth_first(p, m, v):
    ds = simulate(schedule("interleaved", num_stages=p * v, num_microbatches=m, num_chunks=v), UNIT)
    assert float(ds.makespan_s) == pytest.approx(3 * m + 3 * (p - 1) / v)
    expected = [min((2 * (p - 1 - r) + (v - 1) * p + 1) / v, m) for r in range(p)]
    np.testing.assert_allclose(ds.peak_activation, expected)
    ds = simulate(schedule("breadth_first", num_stages=p * v, num_microbatches=m, num_chunks=v), UNIT)
    assert float(ds.makespan_s) == pytest.approx(3 * m + 3 * (p - 1) / v)
    assert ds.peak_activation.values.tolist() == [m] * p


def test_events_are_a_run_like_any_other():
    sched = schedule("interleaved", num_stages=8, num_microbatches=8, num_chunks=2)
    ds = mappnb.simulate(sched, FULL)
    check(ds, EVENTS, name="simulated")
    start, end = times(sched, FULL.tables(sched))
    action = ds.isel(event=np.flatnonzero(ds.category.values == "compute"))
    at = {n: (s, e) for n, s, e in zip(action.name.values, action.start_s.values, action.end_s.values, strict=True)}
    words = [str(a) for r in sched.ranks for a in r]
    assert at == dict(zip(words, zip(start, end, strict=True), strict=True))
    np.testing.assert_array_equal(action["chunk"], action.stage.values // 4)
    np.testing.assert_array_equal(action["rank"], action.stage.values % 4)
    calls = match(ds)
    assert calls.sizes["call"] == 2 * 8 * 7 and bool(calls.complete.all())
    seconds = breakdown(ds).seconds.sum("category")
    np.testing.assert_allclose(seconds, float(ds.makespan_s))
    spent = breakdown(ds).seconds.sel(step=0)
    np.testing.assert_allclose(spent.sel(category="compute"), 8 * 3.0)
    assert (spent.sel(category=["wait_peer", "transfer"]) > 0).all()
    assert mappnb.analysis.breakdown(ds).overlapped_s.sum() > 0


def test_slack_and_critical_path():
    ds = simulate(schedule("1f1b", num_stages=3, num_microbatches=4), FULL)
    assert float(ds.critical_path_s) <= float(ds.makespan_s)
    on_path = ds.isel(event=np.flatnonzero(ds.critical.values))
    assert (on_path.slack_s.values < 1e-9).all()
    assert float((on_path.end_s - on_path.start_s).sum()) == pytest.approx(float(ds.critical_path_s))
    assert float(ds.makespan_s - ds.critical_path_s) == pytest.approx(0.05 * np.sum(on_path.op.values == "send"))


def test_an_edge_may_be_late_by_its_slack_and_no_more():
    sched = schedule("gpipe", num_stages=3, num_microbatches=4)
    costs = Costs(
        forward_s=[1.0, 3.0, 1.0], backward_input_s=1.0, backward_weight_s=1.0, p2p_s=0.1, message_bytes=8, bandwidth=80
    )
    ds = simulate(sched, costs)
    for edge in range(ds.sizes["edge"]):
        slack = float(ds.edge_slack_s[edge])
        built = build(sched, costs.tables(sched))
        mine = np.flatnonzero(built.messages.link == edge)
        longest = []
        for one in mine:  # each message alone, later by the slack of the tightest
            for more in (slack, slack + 0.01):
                again = build(sched, costs.tables(sched))
                again.graph.lag_s[np.flatnonzero(again.graph.dep == again.first_message + one)] += more
                longest.append((more > slack, again.run().end_s.max()))
        assert all(e <= float(ds.makespan_s) + 1e-9 for later, e in longest if not later)
        assert any(e > float(ds.makespan_s) + 1e-3 for later, e in longest if later)
        assert float(ds.edge_bandwidth[edge]) == pytest.approx(8 / (0.1 + slack))


@pytest.mark.parametrize(
    ("straggler", "expected"),
    [
        (Straggler(rank=1, factor=2.0), 3 * 2 * 4 + 3),  # the slow rank of two works 24 s; its neighbour adds F and B
        (Straggler(stage=1, factor=2.0, kinds="F"), 15 + 4),
        (Straggler(rank=0, extra_s=1.5, microbatches=[0], kinds="F"), 15 + 1.5),
        (Straggler(link=(0, 1), factor=1.0, extra_s=0.25), 15 + 0.5),
    ],
)
def test_stragglers_by_hand(straggler, expected):
    sched = schedule("1f1b", num_stages=2, num_microbatches=4)
    assert float(simulate(sched, UNIT).makespan_s) == 15
    assert float(simulate(sched, UNIT, stragglers=[straggler]).makespan_s) == pytest.approx(expected)


def test_stragglers_of_single_steps_and_of_a_mirrored_rank():
    sched = schedule("1f1b", num_stages=2, num_microbatches=4)
    ds = simulate(sched, UNIT, num_steps=3, stragglers=[Straggler(rank=1, factor=2.0, steps=[1])])
    assert ds.step_s.values.tolist() == [15, 27, 15] and float(ds.makespan_s) == 19
    assert bubble_fraction(ds).sizes == {"step": 3, "rank": 2}
    place = Placement.bidirectional(2, 1)
    ranks = [
        [Action(s, k, i) for i in (0, 1) for k in (Kind.FORWARD,) for s in (0, 1) if place.rank(s, k, i) == r]
        for r in (0, 1)
    ]
    ranks = [r + [Action(a.stage, Kind.BACKWARD, a.microbatch) for a in reversed(r)] for r in ranks]
    both = simulate(Schedule(ranks, placement=place), UNIT, stragglers=[Straggler(rank=1, factor=3.0)])
    slow = both.isel(event=np.flatnonzero((both.category.values == "compute") & (both["rank"].values == 1)))
    assert set((slow.end_s - slow.start_s).values) == {3.0, 6.0}


def test_draws_are_shared_between_schedules():
    costs = Costs(forward_s=Empirical(np.array([1.0, 2.0])), backward_input_s=1.0, backward_weight_s=0.0)
    one, two = (schedule(n, num_stages=4, num_microbatches=8) for n in ("gpipe", "1f1b"))
    a, b = monte_carlo(one, costs, draws=40, seed=3), monte_carlo(two, costs, draws=40, seed=3)
    assert a.equals(monte_carlo(one, costs, draws=40, seed=3)) and len(set(a.makespan_s.values)) > 5
    other = monte_carlo(two, costs, draws=40, seed=4)
    assert np.corrcoef(a.makespan_s, b.makespan_s)[0, 1] > 0.5 > abs(np.corrcoef(a.makespan_s, other.makespan_s)[0, 1])
    assert float(simulate(one, costs).makespan_s) == 2.5 * 11  # without a seed, the mean
    assert float(simulate(one, costs, seed=1).makespan_s) != 2.5 * 11


def test_disaggregated_memory_is_held_on_both_sides_while_it_goes():
    f = [[Action(0, Kind.FORWARD, i) for i in range(3)]]
    b = [[Action(0, Kind.BACKWARD, i) for i in range(3)]]
    sched = Schedule(f + b, placement=Placement.disaggregated(1))
    costs = Costs(forward_s=1.0, backward_input_s=2.0, backward_weight_s=2.0, ship_bytes=2.0, bandwidth=1.0)
    ds = simulate(sched, costs)
    assert float(ds.makespan_s) == 1 + 2 + 3 * 4
    # messages go from 1 to 3, 3 to 5, 5 to 7: the forward rank holds all three at 2.5, the backward rank at 6
    assert ds.peak_activation.values.tolist() == [3, 3]
    again = Schedule(f + b, placement=Placement.disaggregated(1), recompute=True)
    ds = simulate(again, costs)
    assert float(ds.makespan_s) == 1 + 2 + 3 * 5 and ds.peak_activation.values.tolist() == [1, 1]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Costs(forward_s=-1, backward_input_s=1, backward_weight_s=1), "forward_s is -1"),
        (lambda: Costs(forward_s=[1, np.nan], backward_input_s=1, backward_weight_s=1), "forward_s is nan at 1"),
        (lambda: Costs(forward_s="fast", backward_input_s=1, backward_weight_s=1), "'fast'; expected a number"),
        (lambda: Costs(forward_s=1, backward_input_s=1, backward_weight_s=1, send="maybe"), "async, sync, blocking"),
        (lambda: Costs(forward_s=1, backward_input_s=1, backward_weight_s=1, bandwidth=0), "above 0"),
        (lambda: Costs(forward_s=1, backward_input_s=1, backward_weight_s=1, ranks_per_host=0), "at least 1"),
        (lambda: Straggler(factor=2), "name a rank"),
        (lambda: Straggler(rank=1, link=(0, 1)), "name a rank"),
        (lambda: Straggler(rank=1, factor=0), "factor is 0"),
        (lambda: Straggler(rank=1, kinds="FX"), "kinds"),
        (lambda: Empirical(np.array([])), "at least one sample"),
    ],
)
def test_bad_costs_are_refused_at_once(make, message):
    with pytest.raises(CostError, match=message):
        make()


def test_costs_and_stragglers_that_do_not_fit_the_schedule():
    sched = schedule("1f1b", num_stages=2, num_microbatches=4)
    with pytest.raises(CostError, match=r"p2p_s: shape .* the schedule has 2 ranks"):
        simulate(sched, Costs(forward_s=1, backward_input_s=1, backward_weight_s=1, p2p_s=np.ones((3, 3))))
    with pytest.raises(CostError, match="3 entries over the microbatches; the schedule has 4"):
        simulate(sched, Costs(forward_s=np.ones((2, 3)), backward_input_s=1, backward_weight_s=1))
    with pytest.raises(CostError, match="ranks 0 to 1"):
        simulate(sched, UNIT, stragglers=[Straggler(rank=2, factor=2)])
    with pytest.raises(ScheduleError):
        simulate(Schedule([[Action(0, Kind.BACKWARD, 0), Action(0, Kind.FORWARD, 0)]]), UNIT)
    with pytest.raises(TypeError):
        Costs(forward_s=1)  # type: ignore[call-arg]


def test_costs_over_the_depth_are_averaged_over_each_stage():
    costs = Costs(forward_s=[1.0, 2.0, 3.0, 6.0], backward_input_s=1.0, backward_weight_s=0.0)
    two = costs.tables(schedule("1f1b", num_stages=2, num_microbatches=2))
    assert two.duration_s[0, :, 0].tolist() == [1.5, 4.5]
    eight = costs.tables(schedule("interleaved", num_stages=8, num_microbatches=4, num_chunks=2))
    assert eight.duration_s[0, :, 0].tolist() == [0.5, 0.5, 1, 1, 1.5, 1.5, 3, 3]
    three = costs.tables(schedule("1f1b", num_stages=3, num_microbatches=2))
    np.testing.assert_allclose(
        three.duration_s[0, :, 0], [(1 + 2 / 3) / (4 / 3), (4 / 3 + 2) / (4 / 3), (1 + 6) / (4 / 3)]
    )


def test_memory_over_time_by_hand():
    costs = Costs(
        forward_s=1.0,
        backward_input_s=1.0,
        backward_weight_s=1.0,
        activation=4.0,
        activation_weight=1.0,
        static_memory=[10.0, 20.0],
    )
    whole = memory_over_time(schedule("1f1b", num_stages=2, num_microbatches=2), costs)
    last = whole[whole["rank"] == 1]
    assert last.time_s.tolist() == [1, 4, 4, 7] and last.memory.tolist() == [24, 20, 24, 20]
    first = whole[whole["rank"] == 0]
    assert first.time_s.tolist() == [0, 1, 6, 9] and first.activation.tolist() == [4, 8, 4, 0]
    split = memory_over_time(
        schedule("zb_h1", num_stages=1, num_microbatches=1), Costs(**{**_of(costs), "static_memory": 0.0})
    )
    assert split.activation.tolist() == [4, 1, 0]  # F, then I frees all but what W needs, then W
    peak = whole.groupby("rank").activation.max()
    assert (
        peak.tolist()
        == simulate(schedule("1f1b", num_stages=2, num_microbatches=2), costs).peak_activation.values.tolist()
    )


def _of(costs):
    return {f.name: getattr(costs, f.name) for f in dataclasses.fields(costs)}
