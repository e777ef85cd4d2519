"""Policies: the native engine is the plain one, the times are the simulator's, and the published points are met."""

import doctest
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mappnb.errors import CostError, ScheduleError
from mappnb.sched import Costs, Placement, schedule
from mappnb.sched.action import Action
from mappnb.sched.memory import peak_activation
from mappnb.sched.policies import POLICIES, Policy, hint, list_schedule, policy, simulate_policy
from mappnb.sched.reference import times_reference
from mappnb.sched.registry import family, schedules
from mappnb.sched.times import times
from mappnb.terms import Kind

COSTED = ("forward_s", "backward_input_s", "backward_weight_s")
SIZES = {"num_stages": 8, "num_microbatches": 16, "num_chunks": 2}


def costs(latency=0.0, **more):
    return Costs(**{"forward_s": 1, "backward_input_s": 1, "backward_weight_s": 1, "p2p_s": latency, **more})


# --------------------------------------------------------------------------------------------- the two engines are one
@st.composite
def placements(draw):
    p, v, m = draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(1, 6))
    first = draw(st.integers(0, m + 1))
    kinds = [Placement.loop(p, v), Placement.wave(p, v), Placement.bidirectional(p, first), Placement.disaggregated(p)]
    return draw(st.sampled_from(kinds)), m


@st.composite
def problems(draw):
    """Arguments of list_schedule: any placement, cost, priority and admission."""
    placement, m = draw(placements())
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    s, r = placement.num_stages, placement.num_ranks
    coarse = draw(st.booleans())  # coarse numbers tie, fine ones round
    tables = draw(st.integers(1, 2))

    def some(*shape):
        return rng.integers(0, 3, shape).astype(float) if coarse else rng.random(shape) * rng.integers(0, 2)

    whole = np.bincount(placement.table()[0, 0], minlength=r).max() * 2.0
    unlimited = placement.backward is not None or draw(st.booleans())
    each = draw(st.sampled_from([1, m]))
    priority = some(tables, 4, s, m)
    return {
        "priority": np.sort(priority, axis=3) if draw(st.booleans()) else priority,
        "placement": placement,
        "num_microbatches": m,
        "costs": costs(
            some(r, r),
            forward_s=some(s, each),
            backward_input_s=some(s, each),
            backward_weight_s=some(s, each),
            message_bytes=draw(st.sampled_from([0, 1])),
            ship_bytes=1,
            bandwidth=0.5 + some(r, r),
            send=draw(st.sampled_from(["async", "sync", "blocking"])),
            activation=1 + some(s),
            activation_weight=draw(st.sampled_from([0.0, 0.5, 1.0])),
        ),
        "split": draw(st.booleans()),
        "alternate": draw(st.booleans()),
        "threshold": draw(st.sampled_from([0.0, 0.5, 2.0])),
        "memory_limit": None if unlimited else whole + draw(st.integers(-2, 4)),
        "admission": draw(st.sampled_from(["none", "credits"])),
    }


@settings(max_examples=200, deadline=None)
@given(problem=problems())
def test_engines_agree_to_the_last_bit_and_with_the_simulators(problem):
    def run(engine):
        try:
            return list_schedule(engine=engine, **problem)
        except ScheduleError as err:
            return str(err)

    native, plain = run("native"), run("python")
    if isinstance(native, str):
        assert native == plain
        assert "deadlock" not in native or problem["admission"] == "none"
        return
    assert native.schedule == plain.schedule
    for a, b in [
        (native.start_s, plain.start_s),
        (native.end_s, plain.end_s),
        (native.peak_activation, plain.peak_activation),
    ]:
        np.testing.assert_array_equal(a, b)
    sched, tables = native.schedule.validate(), problem["costs"].tables(native.schedule)
    for simulate in (times_reference, times):
        start, end = simulate(sched, tables)
        np.testing.assert_array_equal(start, native.start_s)
        np.testing.assert_array_equal(end, native.end_s)
    np.testing.assert_allclose(peak_activation(sched, tables), native.peak_activation)
    if problem["memory_limit"] is not None:
        assert native.peak_activation.max() <= problem["memory_limit"] * (1 + 1e-6)


@pytest.mark.parametrize("name", [n for n in POLICIES if n != "hint"])
@pytest.mark.parametrize("limit", [None, 5.5])
@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_policies_agree_on_larger_sizes(name, limit, chunks):
    sizes = {"num_stages": 4 * chunks, "num_microbatches": 12, "num_chunks": chunks}
    rng = np.random.default_rng(0)
    cost = costs(0.1, forward_s=rng.random((4 * chunks, 12)), message_bytes=1, bandwidth=20)
    native, plain = (
        simulate_policy(name, costs=cost, memory_limit=limit, engine=e, **sizes) for e in ("native", "python")
    )
    assert native.schedule == plain.schedule
    np.testing.assert_array_equal(native.end_s, plain.end_s)


# ----------------------------------------------------------------------------------------------------- published points
@pytest.mark.parametrize(
    ("name", "latency", "bubble", "peak"),
    [("bfc", 0, 0.086, 13), ("dfc", 0, 0.103, 7), ("bfc", 1, 0.179, 16), ("dfc", 1, 0.232, 14)],
)
def test_reference_points(name, latency, bubble, peak):
    """p 4, m 16, v 2, F = 1, B = 2: bubble as printed to three digits, peak of the rank that holds most."""
    run = simulate_policy(name, costs=costs(latency), **SIZES)
    assert abs(run.bubble_fraction - bubble) < 0.0005
    assert run.peak_activation.max() == peak


@pytest.mark.parametrize(("latency", "bubble"), [(0, 0.086), (1, 0.364)])
def test_reference_points_of_the_static_order(latency, bubble):
    sched = schedule("interleaved", **SIZES)
    _, end = times(sched, costs(latency).tables(sched))
    assert abs(1 - 16 * 3 / end.max() - bubble) < 0.0005
    assert peak_activation(sched).max() == 5.5


def test_depth_first_is_the_order_of_the_policy():
    sched = schedule("depth_first", **SIZES)
    assert sched == simulate_policy("dfc", costs=costs(), **SIZES).schedule
    assert sched.words(0)[:10] == ["0F0", "0F1", "0F2", "0F3", "4F0", "4F1", "4F2", "4F3", "0F4", "0F5"]
    for p, m, v in [(1, 1, 1), (3, 1, 2), (3, 7, 3), (4, 5, 2)]:  # any number of microbatches
        schedule("depth_first", num_stages=p * v, num_microbatches=m, num_chunks=v).validate()


@pytest.mark.parametrize("p", [1, 2, 4, 8])
def test_one_chunk_with_free_transfers_is_1f1b(p):
    """With one chunk, depth and breadth are the same; under the memory of 1F1B nothing else than its order is left."""
    fixed = schedule("1f1b", num_stages=p, num_microbatches=8)
    for rule in ("dfc", "bfc", hint(fixed)):
        run = simulate_policy(
            rule, costs=costs(), num_stages=p, num_microbatches=8, memory_limit=peak_activation(fixed)
        )
        assert run.schedule == fixed


# ------------------------------------------------------------------------------------------------------------- each rule
def test_order_on_one_rank():
    """One rank has everything at hand: the rule alone decides."""

    def words(name, m=2, v=2, **more):
        run = simulate_policy(name, costs=costs(), num_stages=v, num_microbatches=m, num_chunks=v, **more)
        return " ".join(run.schedule.words(0))

    assert words("dfc") == "0F0 1F0 1B0 0F1 0B0 1F1 1B1 0B1"
    assert words("bfc") == "0F0 0F1 1F0 1B0 1F1 1B1 0B0 0B1"
    assert words("dfc", m=1, split=True) == "0F0 1F0 1I0 0I0 1W0 0W0"
    assert words("critical_path") == "0F0 0F1 1F0 1F1 1B0 1B1 0B0 0B1"


def test_critical_path_is_the_longest_way():
    rng = np.random.default_rng(3)
    placement, m = Placement.loop(2, 2), 3
    cost = costs(rng.random((2, 2)), message_bytes=1, bandwidth=2, **{k: rng.random((4, m)) for k in COSTED})
    for split in (False, True):
        probe = simulate_policy("dfc", costs=cost, placement=placement, num_microbatches=m, split=split).schedule
        tables = cost.tables(probe)
        found = policy("critical_path").priorities(placement=placement, num_microbatches=m, costs=tables, split=split)
        every = [a for r in probe.ranks for a in r]

        def way(a):
            after = [b for b in every if a in probe.needs(b)]
            hops = [_hop(placement, tables, a, b) + way(b) for b in after]
            return tables.duration_s["FBIW".index(a.kind), a.stage, a.microbatch] + max(hops, default=0.0)

        for a in every:
            assert found[0, "FBIW".index(a.kind), a.stage, a.microbatch] == pytest.approx(-way(a))


def _hop(placement, tables, a, b):
    source, to = (placement.rank(x.stage, x.kind) for x in (a, b))
    return 0.0 if source == to else tables.latency_s[source, to] + tables.transfer_s[source, to]


def test_a_priority_table_orders_what_is_ready():
    """The table of a planner: the last microbatch first."""
    table = np.broadcast_to(-np.arange(4.0), (4, 2, 4))
    run = list_schedule(table, placement=Placement.loop(2), num_microbatches=4, costs=costs())
    assert run.schedule.words(0)[:4] == ["0F3", "0F2", "0F1", "0F0"]
    assert run.schedule.name == "list"


def test_links_are_first_in_first_out():
    """Work takes no time and each message is 1 s on the wire: those of one link follow one another, and then take 0.5 s."""
    cost = costs(0.5, **dict.fromkeys(COSTED, 0), message_bytes=1, bandwidth=1)
    run = simulate_policy("bfc", costs=cost, num_stages=2, num_microbatches=3)
    starts = dict(zip((a for r in run.schedule.ranks for a in r), run.start_s.tolist(), strict=True))
    assert [starts[Action(1, Kind.FORWARD, i)] for i in range(3)] == [1.5, 2.5, 3.5]
    assert [starts[Action(0, Kind.BACKWARD, i)] for i in range(3)] == [3.0, 4.0, 5.0]


# ----------------------------------------------------------------------------------------------------------- adaptive
def test_adaptive_is_depth_first_on_fast_links_and_breadth_first_on_slow_ones():
    def order(name, latency, **more):
        return simulate_policy(name, costs=costs(latency), **SIZES, **more)

    assert order("adaptive", 0.0).schedule == order("dfc", 0.0).schedule
    slow, breadth = order("adaptive", 1.0), order("bfc", 1.0)
    assert slow.makespan_s == breadth.makespan_s
    # with two thirds of the memory it is as fast as breadth-first without a limit; that one is no use under a tight limit
    assert order("adaptive", 1.0, memory_limit=11).makespan_s == breadth.makespan_s < order("dfc", 1.0).makespan_s
    whole = simulate_policy(policy("bfc", window=16), costs=costs(1.0), memory_limit=8, **SIZES)
    assert (
        whole.makespan_s
        > 1.4 * order("dfc", 1.0, memory_limit=8).makespan_s
        > order("bfc", 1.0, memory_limit=8).makespan_s
    )


@pytest.mark.parametrize("latency", [0.0, 1.0])
@pytest.mark.parametrize("limit", [2, 3, 4, 5.5, 8, 12])
def test_breadth_first_goes_in_groups_that_fit(limit, latency):
    """Without groups, new microbatches take the room that those begun need to go on."""
    grouped = simulate_policy("bfc", costs=costs(latency), memory_limit=limit, **SIZES)
    whole = simulate_policy(policy("bfc", window=16), costs=costs(latency), memory_limit=limit, **SIZES)
    room = int(limit) // 4 * 4 or int(limit)
    by_hand = simulate_policy(policy("bfc", window=room), costs=costs(latency), memory_limit=limit, **SIZES)
    assert grouped.schedule == by_hand.schedule and (grouped.peak_activation <= limit + 1e-9).all()
    assert (
        grouped.makespan_s < 0.7 * whole.makespan_s if limit <= 5.5 else grouped.makespan_s <= 1.07 * whole.makespan_s
    )
    free = simulate_policy("bfc", costs=costs(latency), **SIZES)
    assert free.schedule == simulate_policy(policy("bfc", window=16), costs=costs(latency), **SIZES).schedule


@pytest.mark.parametrize(("p", "m", "v"), [(4, 16, 2), (8, 32, 2), (4, 16, 4)])
def test_adaptive_is_no_worse_than_depth_first(p, m, v):
    sizes = {"num_stages": p * v, "num_microbatches": m, "num_chunks": v}
    least = peak_activation(schedule("interleaved", **sizes)).max()
    for latency in (0.0, 0.25, 0.5, 1.0):
        for limit in (None, least, 1.5 * least, 2 * least):
            runs = [simulate_policy(n, costs=costs(latency), memory_limit=limit, **sizes) for n in ("adaptive", "dfc")]
            assert runs[0].makespan_s <= runs[1].makespan_s


# -------------------------------------------------------------------------------------------------------- disturbances
def disturbed(kind, p, m, rng, v=1):
    """Costs with one thing wrong."""
    rank = np.arange(p * v) % p == rng.integers(p)
    factor, latency = np.ones((p * v, m)), np.full((p, p), 0.05)
    if kind == "slow link":
        a = rng.integers(p - 1)
        latency[a, a + 1] = latency[a + 1, a] = rng.uniform(0.5, 3)
    elif kind == "jittery rank":
        factor[rank] = rng.lognormal(0, 0.6, (v, m))
    elif kind == "slow rank":
        factor[rank] = 1.5
    else:
        factor[:] = rng.lognormal(0, 0.5, m)  # sequence lengths
    return costs(latency, **dict.fromkeys(COSTED, factor))


@pytest.mark.parametrize(
    ("kind", "median"), [("slow link", 1.3), ("jittery rank", 1.08), ("slow rank", 1.0), ("unequal microbatches", 1.25)]
)
def test_hint_of_1f1b_beats_its_fixed_order(kind, median):
    rng = np.random.default_rng(5)
    gains = []
    for p, m in [(4, 16), (8, 32)] * 15:
        fixed, cost = schedule("1f1b", num_stages=p, num_microbatches=m), disturbed(kind, p, m, rng)
        _, end = times(fixed, cost.tables(fixed))
        gains.append(end.max() / simulate_policy(hint(fixed), costs=cost).makespan_s)
    assert np.median(gains) >= median
    assert min(gains) > 0.999


@pytest.mark.parametrize("kind", ["slow link", "jittery rank", "slow rank", "unequal microbatches"])
def test_hint_of_interleaved_is_hardly_ever_worse(kind):
    rng = np.random.default_rng(6)
    for p, m in [(4, 16), (8, 32)] * 10:
        fixed = schedule("interleaved", num_stages=2 * p, num_microbatches=m, num_chunks=2)
        cost = disturbed(kind, p, m, rng, v=2)
        _, end = times(fixed, cost.tables(fixed))
        assert end.max() / simulate_policy(hint(fixed), costs=cost).makespan_s > 0.98


def test_hint_of_a_split_schedule_runs_split():
    fixed = schedule("zb_h1", num_stages=4, num_microbatches=8)
    run = simulate_policy(hint(fixed), costs=costs(), memory_limit=peak_activation(fixed).max())
    assert {a.kind for a in run.schedule.ranks[0]} == {Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT}
    whole = simulate_policy(hint(fixed), costs=costs(), split=False)
    assert {a.kind for a in whole.schedule.ranks[0]} == {Kind.FORWARD, Kind.BACKWARD}


@pytest.mark.parametrize("name", schedules())
def test_hint_of_every_schedule(name):
    """Whatever its placement, split or recomputation: it runs, and the simulator times what comes of it the same."""
    chunks = family(name).chunks or 2
    fixed = schedule(name, num_stages=4 * chunks, num_microbatches=8, num_chunks=chunks)
    cost = costs(0.3, message_bytes=1, bandwidth=10, ship_bytes=2)
    run, plain = (simulate_policy(hint(fixed), costs=cost, engine=e) for e in ("native", "python"))
    assert run.schedule == plain.schedule
    assert (run.schedule.placement, run.schedule.recompute) == (fixed.placement, fixed.recompute)
    np.testing.assert_array_equal(times(run.schedule, cost.tables(run.schedule))[1], run.end_s)


# ------------------------------------------------------------------------------------------------------------- messages
@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: policy("dcf"), ScheduleError, "unknown policy 'dcf'; known: dfc, bfc, .*did you mean 'dfc'"),
        (lambda: policy("hint"), ScheduleError, r"takes a schedule.*hint\(schedule\)"),
        (lambda: Policy("adaptive", threshold=-1), ScheduleError, "threshold is -1; expected"),
        (lambda: simulate_policy("dfc", costs=costs()), ScheduleError, "num_stages and num_microbatches are missing"),
        (
            lambda: simulate_policy("dfc", costs=costs(), **{**SIZES, "num_chunks": 3}),
            ScheduleError,
            "multiple of num_ch",
        ),
        (lambda: simulate_policy("dfc", costs=costs(), **SIZES, admission="credit"), ScheduleError, "mean 'credits'"),
        (lambda: simulate_policy("dfc", costs=costs(), **SIZES, engine="c"), ScheduleError, "known: native, python"),
        (lambda: simulate_policy("dfc", costs=costs(interference=0.1), **SIZES), CostError, "leave ranks_per_host and"),
        (
            lambda: list_schedule(np.zeros((4, 2, 2)), placement=Placement.loop(2), num_microbatches=3, costs=costs()),
            ScheduleError,
            r"shape \(4, 2, 2\); expected \(4, 2, 3\)",
        ),
        (
            lambda: simulate_policy(
                hint(schedule("gpipe", num_stages=2, num_microbatches=2)), costs=costs(), num_microbatches=3
            ),
            ScheduleError,
            "its schedule has 2 and 2",
        ),
    ],
)
def test_messages(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_cost_tables_of_other_sizes_are_refused():
    tables = costs().tables(schedule("gpipe", num_stages=2, num_microbatches=2))
    with pytest.raises(CostError, match="for 2 stages, 2 ranks and 1 microbatches; expected 4"):
        simulate_policy("dfc", costs=tables, num_stages=4, num_microbatches=2)


def test_the_page_is_true():
    page = Path(__file__).parents[2] / "docs" / "policies.md"
    blocks = page.read_text().replace("```python", "").replace("```", "")
    test = doctest.DocTestParser().get_doctest(blocks, {}, "policies", str(page), 0)
    said: list[str] = []
    result = doctest.DocTestRunner().run(test, out=said.append)
    assert (result.failed, result.attempted) == (0, 8), "".join(said)


def test_numbers_of_the_page():
    """Those of its text that the examples do not print."""
    least = peak_activation(schedule("interleaved", **SIZES)).max()
    found = {
        (name, latency, limit): simulate_policy(name, costs=costs(latency), memory_limit=limit, **SIZES).makespan_s
        for name, latency, limit in [
            ("bfc", 0, least),
            (policy("bfc", window=16), 0, least),
            ("dfc", 0, least),
            ("adaptive", 0, least),
            ("adaptive", 1, least),
        ]
    }
    assert list(found.values()) == [52.5, 105.0, 53.5, 53.5, 97.0]
    assert simulate_policy("adaptive", costs=costs(1), memory_limit=2 * least, **SIZES).makespan_s == 58.5
    priority = policy("dfc").priorities(placement=Placement.loop(4, 2), num_microbatches=16, costs=costs())
    priority[:, 0] += 1e9  # backwards first, no turns
    run = list_schedule(priority, placement=Placement.loop(4, 2), num_microbatches=16, costs=costs())
    assert abs(run.bubble_fraction - 0.179) < 0.0005
