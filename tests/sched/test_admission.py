"""Credits: no deadlock, for any policy and any timing; and a mere cap that does run into one."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mappnb.errors import CostError, ScheduleError
from mappnb.sched import Costs, Placement, schedule
from mappnb.sched._pypolicy import PyCredits
from mappnb.sched.memory import peak_activation
from mappnb.sched.policies import simulate_policy

from .explore import chain, explore, fits_after, safe_after, trace_to

COSTS = Costs(forward_s=1, backward_input_s=1, backward_weight_s=1)
SHAPES = [
    *[
        (Placement.loop(p, v), m)
        for p, v, m in [(2, 1, 4), (3, 1, 4), (2, 2, 2), (2, 2, 3), (2, 2, 4), (3, 2, 2), (3, 2, 3)]
    ],
    *[(Placement.loop(p, v), m) for p, v, m in [(3, 2, 4), (2, 3, 2), (2, 3, 3), (2, 3, 4), (3, 3, 2), (3, 3, 3)]],
    *[(Placement.loop(p, v), m) for p, v, m in [(2, 2, 5), (4, 2, 3), (4, 2, 4)]],
    *[
        (Placement.wave(p, v), m)
        for p, v, m in [(2, 2, 2), (2, 2, 4), (3, 2, 3), (3, 2, 4), (2, 3, 3), (3, 3, 3), (4, 2, 3)]
    ],
]


def limits(placement, activation, microbatches):
    """From the least that credits take to one below what holds all microbatches."""
    share = np.bincount(placement.forward, activation).astype(int)
    return [share + more for more in range(int(share.max()) * (microbatches - 1))]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda x: f"{x[0].forward}x{x[1]}")
def test_credits_have_no_dead_state(shape):
    placement, m = shape
    activation = np.ones(placement.num_stages, int)
    c = chain(placement, activation)
    for limit in limits(placement, activation, m):
        count, dead = explore(c, m, limit, safe_after)
        assert not dead, (limit, dead[:1])
        assert count > m


@pytest.mark.parametrize("activation", [(3, 1, 2, 1), (1, 3, 1, 2), (1, 1, 4, 4)])
@pytest.mark.parametrize("placement", [Placement.loop(2, 2), Placement.wave(2, 2)], ids=["loop", "wave"])
def test_credits_have_no_dead_state_with_unequal_activations(placement, activation):
    c = chain(placement, activation)
    for limit in limits(placement, activation, 3):
        assert not explore(c, 3, limit, safe_after)[1]
    share = np.bincount(placement.forward, activation).astype(int)
    assert not explore(c, 4, share, safe_after)[1]


@pytest.mark.parametrize(("p", "v", "m"), [(2, 1, 2), (2, 1, 4), (3, 1, 3), (2, 2, 2)])
@pytest.mark.parametrize("kept", [0, 1, 2])
def test_credits_have_no_dead_state_with_split_backwards(p, v, m, kept):
    placement = Placement.wave(p, v)
    activation = np.full(p * v, 2)
    c = chain(placement, activation, split=True, kept=np.full(p * v, kept))
    for limit in limits(placement, activation, m)[::2]:
        assert not explore(c, m, limit, safe_after)[1]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda x: f"{x[0].forward}x{x[1]}")
def test_a_mere_cap_has_dead_states(shape):
    """The same exploration finds the deadlocks of a cap: whenever the chunks of all microbatches but their last can fill a rank."""
    placement, m = shape
    activation = np.ones(placement.num_stages, int)
    c, chunks = chain(placement, activation), placement.num_stages // placement.num_ranks
    for limit in limits(placement, activation, m):
        assert bool(explore(c, m, limit, fits_after)[1]) == (limit[0] <= m * (chunks - 1))


def test_a_dead_state_of_the_cap_and_the_way_there():
    c = chain(Placement.loop(2, 2), (1, 1, 1, 1))
    count, dead = explore(c, 2, [2, 2], fits_after)
    assert dead
    way = trace_to(c, 2, [2, 2], fits_after, dead[0])
    assert sorted(way) == ["0F0", "0F1", "1F0", "1F1"]  # both ranks full of first chunks, no microbatch can get through
    assert not safe_after(c, np.array([[1, 0]]), 1, 0, np.array([2, 2]))[0]  # credits: 0F1 waits until 2F0 has room


# -------------------------------------------------------------------------------- the library's rule is that rule
def _walk(c, placement, activation, m, limit, choose):
    """Walk to the end; at each state compare the library's credits with the definition."""
    ranks = placement.num_ranks
    where = np.array(placement.forward)
    share = np.bincount(where, activation, minlength=ranks)
    actions = np.bincount(where, minlength=ranks) * (3 if any(k == "W" for a in c.actions for k, *_ in a) else 2)
    credits = [PyCredits([float(share[r])] * m, [int(actions[r])] * m, float(limit[r])) for r in range(ranks)]
    state, end = np.zeros((1, m), int), False
    while not end:
        able = []
        for i in range(m):
            for step, (kind, s, to) in enumerate(c.actions[state[0, i]]):
                if kind == "F":
                    expected = bool(safe_after(c, state, i, step, np.asarray(limit))[0])
                    assert (i <= credits[where[s]].bound(float(activation[s]), i)) == expected
                    if not expected:
                        continue
                able.append((i, kind, s, to))
        end = not able
        if able:
            i, kind, s, to = choose(able)
            before, after = c.held[where[s], state[0, i]], c.held[where[s], to]
            takes = float(activation[s]) if kind == "F" else 0.0
            credits[where[s]].run(0 if kind == "F" else 1, i, takes, float(before - after) + takes)
            state[0, i] = to
    assert (c.done[state[0]] == c.done.max()).all()


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_credits_of_the_library_are_the_definition(data):
    p, v, m = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 2)), data.draw(st.integers(1, 4))
    placement = data.draw(st.sampled_from([Placement.loop(p, v), Placement.wave(p, v)]))
    activation = data.draw(st.lists(st.integers(1, 3), min_size=p * v, max_size=p * v))
    split = data.draw(st.booleans()) and p * v <= 4
    c = chain(placement, activation, split=split, kept=np.array(activation) // 2)
    share = np.bincount(placement.forward, activation).astype(int)
    limit = share + data.draw(st.integers(0, int(share.max()) * m))
    _walk(c, placement, activation, m, limit, lambda able: data.draw(st.sampled_from(able)))


# ----------------------------------------------------------------------------------------------------- with times
CASES = [(4, 16, 2), (4, 12, 2), (4, 32, 2), (2, 8, 2), (2, 16, 2), (8, 24, 2), (8, 32, 2), (4, 16, 4), (8, 32, 4)]


@pytest.mark.parametrize(("p", "m", "v"), CASES)
@pytest.mark.parametrize("latency", [0.0, 1.0])
def test_breadth_first_under_the_memory_of_interleaved(p, m, v, latency):
    """The cap that deadlocks in all nine cases; with credits each of the policies comes to its end under it."""
    sizes = {"num_stages": p * v, "num_microbatches": m, "num_chunks": v}
    limit = peak_activation(schedule("interleaved", **sizes)).max()
    costs = Costs(forward_s=1, backward_input_s=1, backward_weight_s=1, p2p_s=latency)
    for name in ("bfc", "dfc") if latency else ("bfc",):
        with pytest.raises(ScheduleError, match=f"deadlock of policy '{name}'"):
            simulate_policy(name, costs=costs, memory_limit=limit, admission="none", **sizes)
    for name in ("bfc", "dfc", "adaptive", "critical_path"):
        for split in (False, True):
            run = simulate_policy(name, costs=costs, memory_limit=limit, split=split, **sizes)
            assert run.peak_activation.max() <= limit
            run.schedule.validate()


@pytest.mark.parametrize("name", ["bfc", "dfc", "adaptive", "critical_path"])
def test_the_least_limit_is_enough_and_less_is_refused(name):
    sizes = {"num_stages": 6, "num_microbatches": 5, "num_chunks": 2}
    run = simulate_policy(name, costs=COSTS, memory_limit=1.0, **sizes)
    np.testing.assert_allclose(run.peak_activation, 1.0)
    with pytest.raises(ScheduleError, match=r"memory_limit on rank 0 is 0.9, .*one microbatch there; give at least 1$"):
        simulate_policy(name, costs=COSTS, memory_limit=0.9, **sizes)
    with pytest.raises(ScheduleError, match=r"on rank 1 is 0.5, .*at least 1$"):
        simulate_policy(name, costs=COSTS, memory_limit=[1, 0.5, 1], **sizes)


def test_the_deadlock_says_what_each_rank_waits_for():
    with pytest.raises(ScheduleError) as err:
        simulate_policy(
            "bfc", costs=COSTS, num_stages=4, num_microbatches=3, num_chunks=2, memory_limit=1, admission="none"
        )
    assert str(err.value).splitlines() == [
        "deadlock of policy 'bfc' after 4 of 24 actions, admission 'none':",
        "rank 0 holds 1 of 1; not admitted: 2F0, 2F1, 0F2; waits to run: 0B0 for 1B0 of rank 1, 0B1 for 1B1 of rank 1",
        "rank 1 holds 1 of 1; waits to run: 1B0 for 2B0 of rank 0, 1B1 for 2B1 of rank 0",
        "admission='credits' has no deadlock under the same limit",
    ]


def test_where_a_limit_makes_no_sense():
    disaggregated = Placement.disaggregated(2)
    with pytest.raises(ScheduleError, match="runs on other ranks"):
        simulate_policy("dfc", costs=COSTS, placement=disaggregated, num_microbatches=2, memory_limit=4)
    heavy = Costs(forward_s=1, backward_input_s=1, backward_weight_s=1, activation=1, activation_weight=2)
    with pytest.raises(CostError, match="W cannot hold more"):
        simulate_policy("dfc", costs=heavy, num_stages=2, num_microbatches=2, memory_limit=4, split=True)
    with pytest.raises(ScheduleError, match="one for each of 2 ranks"):
        simulate_policy("dfc", costs=COSTS, num_stages=2, num_microbatches=2, memory_limit=[1, 1, 1])
