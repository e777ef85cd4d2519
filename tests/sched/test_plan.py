"""plan(), the searches behind it, and the exact solver: published results, bounds, limits kept, reasons true."""

from __future__ import annotations

import csv
import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mappnb
from mappnb.errors import ScheduleError
from mappnb.sched import Costs, Placement, edge_tolerance, optimal_schedule, schedule, simulate
from mappnb.sched._policy_run import cost_tables
from mappnb.sched.greedy import GreedyRule, greedy_order
from mappnb.sched.improve import improve, score
from mappnb.sched.memory import peak_activation
from mappnb.sched.split import balanced, even, split_costs
from mappnb.sched.times import times

TABLE = Path(__file__).parents[3] / "shared" / "oracles" / "zero_bubble.csv"
HELD = {"1.5B": 0.366, "14.6B": 0.432}  # M_W / M_B
UNIT = Costs(forward_s=1.0, backward_input_s=1.0, backward_weight_s=1.0)


def rows():
    if not TABLE.exists():
        return []
    with TABLE.open() as file:
        return list(csv.DictReader(line for line in file if not line.startswith("#")))


@pytest.mark.skipif(not TABLE.exists(), reason="the published table is not beside this checkout")
@pytest.mark.parametrize("row", rows(), ids=lambda r: f"{r['model']}-{r['m']}")
def test_plan_is_no_worse_than_the_published_searches(row):
    p, m = int(row["p"]), int(row["m"])
    f, i, w, c = (float(row[k]) for k in "FBWc")
    costs = Costs(forward_s=f, backward_input_s=i, backward_weight_s=w, p2p_s=c, activation_weight=HELD[row["model"]])
    for limit, published in ((p, "zb_1p"), (2 * p, "zb_2p")):
        for chunks in (
            ((1,), (1, 2)) if m <= 32 else ((1,),)
        ):  # with one chunk per rank alone, as they searched, and with more
            table = mappnb.plan(
                costs, num_stages=p, num_microbatches=m, memory_limit=limit, objective="span", num_chunks=chunks,
                schedules=("1f1b", "zb_h1"), policies=False,
            )  # fmt: skip
            best = table.iloc[0]
            assert best.span_bubble_fraction <= float(row[published]) + 5e-5
            ds = simulate(best.order, costs)
            assert float(ds.span_s) == pytest.approx(best.span_s) and float(ds.peak_activation.max()) <= limit + 1e-9
            assert float(ds.span_bubble_fraction) == pytest.approx(best.span_bubble_fraction)


def test_rows_are_ordered_fit_and_can_be_made_again():
    table = mappnb.plan(UNIT, num_stages=4, num_microbatches=8, memory_limit=5, trials=300)
    assert table.step_s.is_monotonic_increasing and (table.peak_memory <= 5 + 1e-9).all()
    assert "gpipe" in table.attrs["too_large"] and table.attrs["too_large"]["gpipe"] == 8
    assert set(table.columns[:6]) == {"schedule", "options", "step_s", "bubble_fraction", "peak_activation", "why"}
    one = table[table.schedule == "interleaved"].iloc[0]
    again = schedule(one.schedule, num_stages=4 * one.options["num_chunks"], num_microbatches=8, **one.options)
    assert again == one.order and float(simulate(again, UNIT).makespan_s) == pytest.approx(one.step_s)
    for row in table.itertuples():
        ds = simulate(row.order, UNIT)
        assert float(ds.makespan_s) == pytest.approx(row.step_s)
        assert float(ds.bubble_fraction) == pytest.approx(row.bubble_fraction)
        assert float(ds.peak_activation.max()) == pytest.approx(row.peak_activation)
    assert "shorter than 1f1b" in table.why[0] and "of 5 on rank" in table.why[0]
    assert all("longer than the best" in why for why in table.why[1:])


def test_a_slow_link_asks_for_a_deeper_warm_up():
    slow = np.full((4, 4), 0.01)
    slow[1, 2] = slow[2, 1] = 1.5
    costs = Costs(forward_s=1.0, backward_input_s=1.0, backward_weight_s=1.0, p2p_s=slow)
    table = mappnb.plan(costs, num_stages=4, num_microbatches=24, schedules=("1f1b",), policies=False, trials=0)
    assert table.options[0] == {"extra_warm_up": 1} or table.options[0] == {"extra_warm_up": 2}
    plain = table[table.options == {}].step_s.iloc[0]
    assert table.step_s[0] < 0.85 * plain


def test_layers_move_away_from_the_loss():
    # 16 layers of 1, the loss as heavy as 3 layers: the last of 4 stages should hold fewer
    heavy = np.array([1.0] * 16 + [3.0])
    costs = Costs(forward_s=heavy, backward_input_s=heavy, backward_weight_s=heavy)
    table = mappnb.plan(
        costs, num_stages=4, num_microbatches=16, num_layers=17, schedules=("1f1b",), policies=False, trials=0
    )
    layers = table.layers[0]
    assert (
        sum(layers) == 17
        and layers[3] <= 3
        and max(np.add.reduceat(heavy, np.concatenate(([0], np.cumsum(layers)[:-1])))) == 5
    )
    evenly = table[[x == even(17, 4) for x in table.layers]].step_s.min()
    # a rank works 5 units at most; 17 / 4 make a share: no later than if all ranks worked so much
    assert table.step_s[0] <= 3 * 5 * (16 + 3) * 4 / 17 + 1e-9 and evenly > 1.1 * table.step_s[0]


def test_split_costs_keep_the_whole():
    unit = np.arange(1.0, 9.0)
    costs = Costs(forward_s=unit, backward_input_s=1.0, backward_weight_s=0.0)
    for layers, chunks in (((2, 2, 2, 2), 1), ((1, 3, 3, 1), 1), ((1,) * 8, 2)):
        split = split_costs(costs, layers, num_ranks=4)
        sched = schedule(
            "1f1b" if chunks == 1 else "interleaved",
            num_stages=4 * chunks,
            num_microbatches=4,
            **({"num_chunks": 2} if chunks == 2 else {}),
        )
        table = split.tables(sched).duration_s[0, :, 0]
        edge = np.concatenate(([0], np.cumsum(layers)))
        np.testing.assert_allclose(table, [unit[a:b].sum() * 4 / 8 for a, b in itertools.pairwise(edge)])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=4, max_size=9), st.integers(2, 4))
def test_balanced_split_is_optimal(cost, stages):
    from itertools import combinations

    total = np.array(cost, float)
    got = balanced(total, stages, range(stages))
    assert sum(got) == len(cost) and min(got) >= 1
    cuts = [(0, *x, len(cost)) for x in combinations(range(1, len(cost)), stages - 1)]
    best = min(max(total[a:b].sum() for a, b in itertools.pairwise(x)) for x in cuts)
    edge = np.concatenate(([0], np.cumsum(got)))
    assert max(total[a:b].sum() for a, b in itertools.pairwise(edge)) == best


def test_microbatch_counts_share_one_batch():
    table = mappnb.plan(UNIT, num_stages=4, num_microbatches=[4, 16], schedules=("1f1b",), policies=False, trials=0)
    by_count = table[table.options == {}].set_index("num_microbatches").step_s
    assert by_count[4] == pytest.approx(3 * (4 + 3)) and by_count[16] == pytest.approx(3 * (16 + 3) / 4)
    assert table.num_microbatches[0] == 16


def test_when_nothing_fits_the_limit_that_would_is_named():
    costs = Costs(forward_s=1, backward_input_s=1, backward_weight_s=1, static_memory=2.5, activation=0.5)
    with pytest.raises(
        ScheduleError, match=r"no schedule fits in 2; .* needs least: 3 on rank 0, of which 2.5 is static"
    ):
        mappnb.plan(
            costs, num_stages=1, num_microbatches=1, memory_limit=2.0, schedules=("1f1b",), policies=False, trials=0
        )
    with pytest.raises(ScheduleError, match=r"1f1b needs least: 4 on rank 0\. Set memory_limit to that"):
        mappnb.plan(
            UNIT,
            num_stages=4,
            num_microbatches=8,
            memory_limit=3,
            schedules=("1f1b", "gpipe"),
            policies=False,
            trials=0,
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"objective": "steps"}, "did you mean 'step'"),
        ({"num_stages": 0}, "num_stages is 0"),
        ({"num_microbatches": []}, "empty"),
        ({"memory_limit": -1}, "memory_limit is -1"),
        ({"memory_limit": [1, 2]}, "one for each of 4 ranks"),
        ({"schedules": ("1f1",)}, "did you mean '1f1b'"),
        ({"num_layers": 3}, "fewer than one for each of 4 ranks"),
    ],
)
def test_bad_input_is_refused(change, message):
    with pytest.raises(ScheduleError, match=message):
        mappnb.plan(UNIT, **({"num_stages": 4, "num_microbatches": 8} | change))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_greedy_orders_are_valid_and_keep_the_limit(data):
    p, v, m = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3)), data.draw(st.integers(1, 7))
    place = data.draw(st.sampled_from([Placement.loop(p, v), Placement.wave(p, v)]))
    rng = np.random.default_rng(data.draw(st.integers(0, 999)))
    held = data.draw(st.sampled_from([None, 0.0, 0.4]))
    costs = Costs(
        forward_s=rng.random(p * v),
        backward_input_s=rng.random(),
        backward_weight_s=rng.random(),
        p2p_s=rng.random(),
        activation_weight=held,
    )
    tables = cost_tables(costs, place, m)
    limit = np.full(p, data.draw(st.floats(1.0, 4.0)))
    choice = st.sampled_from([0.0, 0.3, 1.0])
    window = st.sampled_from([0.0, 1.0, np.inf])
    gap, patience, later = (data.draw(choice) for _ in range(3))
    rule = GreedyRule(
        gap=gap, alternate=data.draw(st.booleans()), window=data.draw(window), patience=patience, later_patience=later
    )
    sched = greedy_order(place, m, tables, limit=limit, rule=rule).validate()
    assert (peak_activation(sched, tables) <= limit + 1e-6).all()
    for objective in ("step", "span"):
        better = improve(sched, tables, limit=limit + 1e-6, objective=objective, trials=60).validate()
        assert (peak_activation(better, tables) <= limit + 2e-6).all()
        assert score(better, *times(better, tables), objective) <= score(sched, *times(sched, tables), objective)


def test_edges_can_be_later_by_their_tolerance_and_no_more():
    sched = schedule("interleaved", num_stages=8, num_microbatches=8, num_chunks=2)
    costs = Costs(
        forward_s=[1.0, 2.0, 1.0, 1.0],
        backward_input_s=1.0,
        backward_weight_s=1.0,
        p2p_s=0.01,
        message_bytes=100,
        bandwidth=1e4,
    )
    base = float(simulate(sched, costs).makespan_s)
    table = edge_tolerance(sched, costs)
    assert len(table) == 8 and (table.tolerance_s <= table.slack_s + 1e-9).all() and (table.tolerance_s > 0.01).any()
    for row in table.itertuples():
        for more, grows in ((row.tolerance_s, False), (row.tolerance_s + 0.01, True)):
            late = np.full((4, 4), 0.01)
            late[row.source, row.destination] += more
            step = float(simulate(sched, Costs(**{**_fields(costs), "p2p_s": late})).makespan_s)
            assert (step > base + 1e-6) == grows
        assert row.bandwidth == pytest.approx(100 / (0.01 + row.tolerance_s))
    assert (edge_tolerance(sched, costs, allowed=0.05).tolerance_s > table.tolerance_s).all()


def _fields(costs):
    import dataclasses

    return {f.name: getattr(costs, f.name) for f in dataclasses.fields(costs)}


def test_exact_solver_proves_the_zero_bubble():
    pytest.importorskip("ortools", reason="OR-tools is optional")
    hint = schedule("zb_h2", num_stages=4, num_microbatches=8)
    found = optimal_schedule(UNIT, num_stages=4, num_microbatches=8, memory_limit=7, hint=hint)
    assert (found.value_s, found.bound_s, found.proven) == (24, 24, True)
    assert (peak_activation(found.schedule.validate()) <= 7).all()


@pytest.mark.slow
def test_exact_solver_proves_zb_h1_optimal():
    pytest.importorskip("ortools", reason="OR-tools is optional")
    hint = schedule("zb_h1", num_stages=4, num_microbatches=8)
    found = optimal_schedule(UNIT, num_stages=4, num_microbatches=8, memory_limit=4, hint=hint, time_limit_s=400)
    assert (found.value_s, found.bound_s, found.proven) == (27, 27, True)
    assert (peak_activation(found.schedule.validate()) <= 4).all()


def test_exact_solver_against_brute_force_and_its_refusals():
    pytest.importorskip("ortools", reason="OR-tools is optional")
    costs = Costs(forward_s=2.0, backward_input_s=3.0, backward_weight_s=1.0, p2p_s=1.0)
    found = optimal_schedule(costs, num_stages=2, num_microbatches=2, objective="step", memory_limit=1)
    # one microbatch at a time: F, hop, F, I, hop, I, and W when there is time
    assert found.proven and found.value_s == found.bound_s == _brute_force(costs, limit=1)
    more = optimal_schedule(costs, num_stages=2, num_microbatches=2, objective="step", memory_limit=2)
    assert more.value_s == _brute_force(costs, limit=2) < found.value_s
    with pytest.raises(ScheduleError, match="no order fits"):
        optimal_schedule(costs, num_stages=2, num_microbatches=2, memory_limit=0.5)
    with pytest.raises(ScheduleError, match="too many to prove"):
        optimal_schedule(costs, num_stages=8, num_microbatches=64)


def _brute_force(costs, limit):
    """The shortest makespan over every order of two ranks and two microbatches."""
    from itertools import permutations

    from mappnb.sched import Action, Schedule
    from mappnb.terms import Kind

    best = np.inf
    kinds = (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
    orders = [[], []]
    for s in (0, 1):
        for row in permutations([Action(s, k, i) for i in (0, 1) for k in kinds]):
            at = {a: n for n, a in enumerate(row)}
            chains = all(at[Action(s, kinds[j], i)] < at[Action(s, kinds[j + 1], i)] for i in (0, 1) for j in (0, 1))
            if chains and at[Action(s, kinds[0], 0)] < at[Action(s, kinds[0], 1)]:
                orders[s].append(row)
    for first in orders[0]:
        for second in orders[1]:
            sched = Schedule([first, second])
            tables = costs.tables(sched)
            if (peak_activation(sched, tables) > limit).any():
                continue
            try:
                best = min(best, float(times(sched, tables)[1].max()))
            except ScheduleError:
                continue
    return best
