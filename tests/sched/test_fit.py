"""fit_costs and its kin: what was put into a simulation comes out again; waits do not; what changed is named."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import xarray as xr

import mappnb
from mappnb.errors import CostError, LayoutError
from mappnb.layout import Layout
from mappnb.sched import (
    Costs,
    Empirical,
    Straggler,
    changed_costs,
    cost_table,
    fit_costs,
    fit_link,
    monte_carlo,
    predictable,
    recorded_schedule,
    replay_steps,
    schedule,
    schedules,
    simulate,
)
from mappnb.sched.fit import FittedCosts
from mappnb.sched.messages import message_table
from mappnb.sched.registry import family
from mappnb.schema import EVENTS, empty
from mappnb.terms import Category, Flag, Op, Phase

P, M = 4, 16
NAMES = schedules()


def build(name, p=P, m=M):
    chunks = family(name).chunks or 2
    return schedule(name, num_stages=p * chunks, num_chunks=chunks, num_microbatches=m)


def uneven(stages, seed=0, **more):
    rng = np.random.default_rng(seed)
    f, i, w = rng.uniform(0.5, 2.0, (3, stages))
    return Costs(forward_s=f, backward_input_s=i, backward_weight_s=w, **more)


def has_split(sched):
    return any(a.kind in "IW" for r in sched.ranks for a in r)


# ------------------------------------------------------------------------------------------------------- round trips
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["even", "uneven"])
def test_what_goes_in_comes_out(name, kind):
    sched = build(name, m=8)
    stages = sched.num_stages
    put = {
        "even": Costs(forward_s=1.0, backward_input_s=1.2, backward_weight_s=0.8),
        "uneven": uneven(stages, 1, p2p_s=0.05, reduce_s=0.7, optimizer_s=0.3),
    }[kind]
    ds = simulate(sched, put)
    got = fit_costs(ds)
    assert isinstance(got, FittedCosts) and isinstance(got, Costs) and got.launch_s == pytest.approx(0, abs=1e-8)
    f, i, w = (np.broadcast_to(getattr(put, n), stages) for n in ("forward_s", "backward_input_s", "backward_weight_s"))
    np.testing.assert_allclose(got.forward_s, f, atol=1e-8)
    np.testing.assert_allclose(got.backward_input_s + got.backward_weight_s, i + w, atol=1e-8)
    if has_split(sched):
        np.testing.assert_allclose(got.backward_weight_s, w, atol=1e-8)
    assert got.p2p_s == pytest.approx(put.p2p_s, abs=1e-8) and got.optimizer_s == pytest.approx(put.optimizer_s)
    np.testing.assert_allclose(got.reduce_s, put.reduce_s, atol=1e-8)
    assert float(simulate(sched, got).makespan_s) == pytest.approx(float(ds.makespan_s), rel=1e-8)


@pytest.mark.parametrize("name", NAMES)
def test_noise_averages_out(name):
    """Every action drawn anew, spread 10 %: the median of a stage's samples is within three standard errors."""
    sched, rng = build(name), np.random.default_rng(7)
    noisy = {n: Empirical(v * rng.normal(1, 0.1, 4000).clip(0.5)) for n, v in (("f", 1.0), ("i", 1.2), ("w", 0.8))}
    put = Costs(forward_s=noisy["f"], backward_input_s=noisy["i"], backward_weight_s=noisy["w"], p2p_s=0.02)
    ds = simulate(sched, put, num_steps=6, seed=3)
    got = fit_costs(ds)
    assert got.steps == (1, 2, 3, 4, 5)
    many = got.table[got.table.samples >= 20]  # of rare kinds, the whole: dualpipe splits few of its backwards
    assert set(many.stage) == set(range(sched.num_stages)) and (many.cv < 0.2).all()
    np.testing.assert_allclose(got.forward_s, 1.0, rtol=0.05)
    np.testing.assert_allclose(got.backward_input_s + got.backward_weight_s, 2.0, rtol=0.08)
    again = float(simulate(sched, got).makespan_s)
    assert again == pytest.approx(float(simulate(sched, put).makespan_s), rel=0.05)


@pytest.mark.parametrize("send", ["async", "blocking", "sync"])
def test_how_sends_block_is_seen(send):
    put = Costs(
        forward_s=1.0, backward_input_s=1.0, backward_weight_s=1.0, p2p_s=0.1, message_bytes=8, bandwidth=80, send=send
    )
    sched = build("1f1b")
    got = fit_costs(simulate(sched, put))
    assert got.send == send and got.message_bytes == 8
    assert got.p2p_s == pytest.approx(0.2) and np.isinf(got.bandwidth)
    assert any("like size" in n for n in got.notes)


def test_latency_and_bandwidth_where_sizes_vary():
    sched = build("1f1b")
    put = Costs(forward_s=1.0, backward_input_s=1.0, backward_weight_s=1.0, p2p_s=0.02, bandwidth=1000.0)
    parts = []
    for step, size in enumerate((10, 10, 20, 60)):
        ds = simulate(sched, replace(put, message_bytes=size))
        part = ds[list(EVENTS)]
        part["step"] = part["step"] + np.int32(step)
        part["start_ns"] = part.start_ns + 10**12 * step
        part["seq"] = part.seq + 1000 * step * (part.seq >= 0)
        parts.append(part)
    got = fit_costs(xr.concat(parts, "event", combine_attrs="override"))
    assert got.p2p_s == pytest.approx(0.02, rel=1e-6) and got.bandwidth == pytest.approx(1000.0, rel=1e-6)
    assert got.message_bytes == 20 and got.steps == (1, 2, 3)


def test_shipped_activations_and_overlapped_pairs():
    put = Costs(
        forward_s=1.0,
        backward_input_s=1.0,
        backward_weight_s=1.0,
        p2p_s=0.1,
        message_bytes=2,
        ship_bytes=20,
        bandwidth=100,
    )
    got = fit_costs(simulate(build("fbd"), put))
    assert (got.message_bytes, got.ship_bytes) == (2, 20)
    assert got.p2p_s == pytest.approx(0.1) and got.bandwidth == pytest.approx(100)
    for name in ("dualpipe", "dualpipe_v"):
        pair = Costs(forward_s=1.0, backward_input_s=1.0, backward_weight_s=1.0, overlapped_s=2.4)
        assert fit_costs(simulate(build(name), pair)).overlapped_s == pytest.approx(2.4)
    assert fit_costs(simulate(build("1f1b"), pair)).overlapped_s is None


def test_statistics():
    sched = build("1f1b")
    skewed = Empirical(np.array([1.0, 1.0, 1.0, 5.0]))
    ds = simulate(sched, Costs(forward_s=skewed, backward_input_s=skewed, backward_weight_s=0.0), num_steps=4, seed=0)
    median, mean, all_of_them = (fit_costs(ds, statistic=s) for s in ("median", "mean", "empirical"))
    assert median.forward_s.tolist() == [1.0] * P
    np.testing.assert_allclose(mean.forward_s, 2.0, atol=0.7)
    assert set(np.concatenate([e.samples for e in all_of_them.forward_s])) == {1.0, 5.0}
    whole = all_of_them.backward_input_s[0].mean() + all_of_them.backward_weight_s[0]
    assert whole == pytest.approx(mean.backward_input_s[0] + mean.backward_weight_s[0])
    drawn = monte_carlo(sched, all_of_them, draws=30, seed=1).makespan_s
    assert float(drawn.std()) > 0 and float(drawn.mean()) > float(simulate(sched, median).makespan_s)
    assert fit_costs(ds, weight_fraction=0.25).backward_weight_s[0] == pytest.approx(0.25)
    for bad, text in (({"statistic": "medain"}, "did you mean 'median'"), ({"weight_fraction": 2}, "from 0 to 1")):
        with pytest.raises(CostError, match=text):
            fit_costs(ds, **bad)


# ----------------------------------------------------------------------------------------------------- written runs
def test_a_run_with_known_times(make):
    run = make(layout=Layout(pp=4, dp=2), num_steps=4, num_microbatches=8, forward_s=0.010, p2p_s=0.001)
    costs = mappnb.fit_costs(run)
    np.testing.assert_allclose(costs.forward_s, 0.010)
    np.testing.assert_allclose(costs.backward_input_s, 0.010)
    np.testing.assert_allclose(costs.backward_weight_s, 0.010)
    assert costs.p2p_s == pytest.approx(0.001) and costs.message_bytes == 4096 and costs.send == "async"
    assert costs.optimizer_s == pytest.approx(0.003)
    np.testing.assert_allclose(costs.reduce_s, 0.002)
    assert costs.steps == (1, 2, 3) and "3 steps used (1 to 3)" in costs.notes[0]
    assert set(costs.table.samples) == {3 * 8 * 2} and (costs.table.cv < 1e-6).all()
    sched = schedule("1f1b", num_stages=4, num_microbatches=8)
    assert recorded_schedule(run) == sched
    assert replay_steps(run, p2p_s=costs.p2p_s).error_fraction.abs().max() < 1e-6
    assert float(simulate(sched, costs).makespan_s) == pytest.approx(
        11 * 0.030 + 2 * 0.001 * (3 * 11 // 4) + 0.005, rel=1e-6
    )


def test_a_slow_replica_does_not_change_a_stage(make):
    run = make(layout=Layout(pp=2, dp=3), slow={2: 3.0}, num_steps=3)
    costs = fit_costs(run)
    np.testing.assert_allclose(costs.forward_s, 0.010)  # the median over three replicas
    assert costs.table.loc[(costs.table.stage == 0) & (costs.table.kind == "F"), "cv"].item() > 0.5


def test_what_changed_is_named(make):
    layout = Layout(pp=4)
    before, after = make("a", layout=layout), make("b", layout=layout, slow={2: 1.5})
    found = changed_costs(before, after)
    assert list(found.stage) == [2, 2] and list(found.kind) == ["B", "F"], "the larger change of a step first"
    np.testing.assert_allclose(found.ratio, 1.5)
    np.testing.assert_allclose(found.step_s, [4 * 0.010, 4 * 0.005], rtol=1e-6)
    assert changed_costs(before, after, tolerance=0.6).empty and changed_costs(before, before).empty
    verdict = predictable(before, after)
    assert not verdict and verdict.busy_ratio == pytest.approx(1.5)
    assert "rank 2 B: 20 ms -> 30 ms (×1.50)" in verdict.why
    assert predictable(before, before).ok and "within 10%" in predictable(before, before).why
    with pytest.raises(CostError, match="stages 0 to 3 and 0 to 1"):
        changed_costs(before, make("c", layout=Layout(pp=2)))
    with pytest.raises(CostError, match="expected 'stage' or 'rank'"):
        changed_costs(before, after, by="layer")


def test_whole_and_split_backwards_compare():
    costs = uneven(P)
    one, two = (simulate(build(n), costs) for n in ("1f1b", "zb_h1"))
    assert changed_costs(one, two).empty
    slow = simulate(build("zb_h1"), costs, stragglers=[Straggler(stage=1, factor=2.0, kinds="W")])
    found = changed_costs(one, slow)
    assert list(found.stage) == [1] and list(found.kind) == ["B"]
    assert predictable(two, slow, by="stage").changed.kind.tolist() == ["W"]


def test_noise_is_no_change():
    noisy = Empirical(np.random.default_rng(0).lognormal(0, 1.0, 500))
    costs = Costs(forward_s=noisy, backward_input_s=noisy, backward_weight_s=0.0)
    one, two = (simulate(build("1f1b"), costs, num_steps=5, seed=s) for s in (1, 2))
    assert changed_costs(one, two).empty
    three = simulate(build("1f1b"), costs, num_steps=5, seed=2, stragglers=[Straggler(stage=3, factor=3.0, kinds="F")])
    assert list(changed_costs(one, three).stage) == [3]


# ------------------------------------------------------------------------------------------------------------- waits
def events(rows, layout=None):
    """A dataset of (rank, category, op, phase, start in ms, length in ms, more) rows."""
    data = empty(EVENTS, {"event": len(rows)})
    for n in ("incarnation", "step", "depth", "thread"):
        data[n][:] = 0
    for k, (rank, category, op, phase, start, length, more) in enumerate(rows):
        values = {"rank": rank, "category": str(category), "op": str(op), "phase": str(phase), **more}
        for n, v in {**values, "start_ns": int(start * 1e6), "duration_ns": int(length * 1e6)}.items():
            data[n][k] = v
    attrs = {"layout": pd.Series((layout or Layout()).to_dict()).to_json()}
    return xr.Dataset({n: (("event",), v) for n, v in data.items()}, attrs=attrs)


def action(rank, start, length, *, stage=0, mb=0, op=Op.FORWARD_STEP, phase=Phase.FORWARD, **more):
    return (rank, Category.COMPUTE, op, phase, start, length, {"stage": stage, "microbatch": mb, **more})


def backward(rank, start, length, **more):
    return action(rank, start, length, op=Op.BACKWARD_STEP, phase=Phase.BACKWARD, **more)


def test_waiting_for_a_tensor_peer_is_no_cost():
    """Rank 1 is slow by 6 ms: rank 0 waits that long inside its forward, in the all-reduce; its transfer of 1 ms counts."""
    call = {"group": 5, "seq": 0, "bytes": 64, "depth": 1}
    rows = [
        action(0, 0, 11),
        (0, Category.COLLECTIVE, Op.ALL_REDUCE, Phase.NONE, 2, 7, call),
        action(1, 0, 11),
        (1, Category.COLLECTIVE, Op.ALL_REDUCE, Phase.NONE, 8, 1, call),
        backward(0, 20, 4),
        backward(1, 20, 4),
    ]
    ds = events(rows, Layout(tp=2))
    table = cost_table(ds)
    assert table[table.kind == "F"].samples.item() == 2
    by_rank = fit_costs(ds)
    assert by_rank.forward_s[0] == pytest.approx((0.005 + 0.011) / 2), "median over the two ranks of the stage"
    assert table[table.kind == "F"].wait_s.item() == pytest.approx(0.003)
    rows[1][-1].pop("seq"), rows[3][-1].update(seq=0)  # one dictionary: both lose their number
    alone = [(*r[:-1], {**r[-1], "seq": -1}) if r[1] == Category.COLLECTIVE else r for r in rows]
    blind = fit_costs(events(alone, Layout(tp=2)))
    assert blind.forward_s[0] == pytest.approx(0.011) and any("no sequence number" in n for n in blind.notes)


def test_messages_inside_an_action_are_no_work():
    rows = [
        action(0, 0, 10),
        (0, Category.P2P, Op.RECV, Phase.NONE, 1, 4, {"depth": 1, "peer": 1, "group": 1, "seq": 0}),
        (0, Category.WAIT, Op.WAIT, Phase.NONE, 6, 1, {"name": "recv", "depth": 1}),
        (0, Category.P2P, Op.SEND, Phase.NONE, 7, 3, {"flags": int(Flag.ASYNC), "peer": 1, "group": 1, "seq": 0}),
        backward(0, 20, 4),
    ]
    assert fit_costs(events(rows)).forward_s[0] == pytest.approx(0.005)


def test_the_time_of_the_program_between_actions():
    """Receives that begin when the message has come take 1 ms, and so does the program: 2 ms before each action."""
    sent = {"peer": 1, "group": 1, "flags": int(Flag.ASYNC)}
    rows = []
    for i in range(6):
        rows += [
            action(0, 10 * i, 9, mb=i),
            (0, Category.P2P, Op.SEND, Phase.NONE, 10 * i + 9, 0.5, {**sent, "seq": i}),
            (1, Category.P2P, Op.RECV, Phase.NONE, 50 + 12 * i - 2, 1, {"peer": 0, "group": 1, "seq": i}),
            action(1, 50 + 12 * i, 10, stage=1, mb=i),
        ]
    rows += [backward(1, 200, 20, stage=1), backward(0, 300, 20)]
    ds = events(rows, Layout(pp=2))
    costs = fit_costs(ds)
    assert costs.launch_s == pytest.approx(0.0015, abs=0.0006)
    sched = schedule("1f1b", num_stages=2, num_microbatches=4)
    with_launch = costs.tables(sched).duration_s
    np.testing.assert_allclose(with_launch - Costs.tables(costs, sched).duration_s, costs.launch_s)
    assert len(message_table(ds)) == 6


def test_evaluation_and_broken_spans_do_not_count():
    rows = [
        action(0, 0, 10),
        backward(0, 10, 20),
        action(0, 40, 3, mb=1, flags=int(Flag.CLIPPED)),
        (0, Category.EVALUATION, Op.EVALUATE, Phase.NONE, 50, 50, {}),
        action(0, 60, 5, mb=2),
    ]
    table = cost_table(events(rows))
    assert table.samples.tolist() == [1, 1] and table.mean_s.tolist() == [0.010, 0.020]


def test_stages_come_from_the_layout_where_the_trace_does_not_say():
    rows = [action(r, 0, 10 + r, stage=-1, chunk=0) for r in range(2)] + [
        backward(r, 30, 5, stage=-1) for r in range(2)
    ]
    assert fit_costs(events(rows, Layout(pp=2))).forward_s.tolist() == pytest.approx([0.010, 0.011])
    bare = events(rows, Layout(pp=2)).drop_attrs()
    with pytest.raises(CostError, match="actions without a stage, and no layout"):
        fit_costs(bare)


# ------------------------------------------------------------------------------------------------------------ errors
def test_what_cannot_be_fitted_says_why(make):
    with pytest.raises(CostError, match=r"no pipeline actions: .* record with plan 'base'"):
        fit_costs(events([(0, Category.HOST, Op.GC, Phase.NONE, 0, 1, {})]))
    with pytest.raises(CostError, match=r"stage 1: no backward that ran alone in steps \[0\]; its actions: 1 F"):
        fit_costs(events([action(0, 0, 1), backward(0, 5, 1), action(1, 0, 1, stage=1)], Layout(pp=2)))
    with pytest.raises(CostError, match="stage 1 has no action"):
        fit_costs(events([action(0, 0, 1), backward(0, 5, 1), action(2, 0, 1, stage=2)], Layout(pp=3)))
    with pytest.raises(CostError, match="no forward_step"):
        fit_costs(events([backward(0, 5, 1)]))
    with pytest.raises(CostError, match="stage 2: the layout pp2 has 2 stages"):
        fit_costs(events([action(0, 0, 1, stage=s) for s in range(3)], Layout(pp=2)))
    with pytest.raises(LayoutError, match="rank 2: the layout pp2 has ranks 0 to 1"):
        fit_costs(events([action(3, 0, 1, stage=0), backward(3, 5, 1)], Layout(pp=2)))
    run = make(num_steps=3)
    with pytest.raises(CostError, match=r"steps slice\(7, 9, None\)"):
        fit_costs(run, steps=slice(7, 9))
    assert fit_costs(run, steps=[0, 2]).steps == (0, 2) and fit_costs(run, steps=1).steps == (1,)


def test_incarnations_of_other_layouts_are_refused():
    first = [action(0, 0, 1), backward(0, 5, 1), action(1, 0, 1, stage=1), backward(1, 5, 1, stage=1)]
    then = [(1 - r[0], *r[1:-1], {**r[-1], "incarnation": 1}) for r in first]
    with pytest.raises(CostError, match=r"incarnations \[0, 1\] place stages differently; .*run.sel\(incarnation"):
        fit_costs(events(first + then, Layout(pp=2)))
    assert len(fit_costs(events(first, Layout(pp=2))).forward_s) == 2


# ----------------------------------------------------------------------------------------------------------- replays
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zb_h1", "zb_v"])
def test_simulated_steps_replay_exactly(name):
    sched = build(name)
    ds = simulate(sched, uneven(sched.num_stages, p2p_s=0.05), num_steps=3)
    assert recorded_schedule(ds).ranks == sched.ranks
    found = replay_steps(ds, schedule=sched, p2p_s=0.05)
    assert found.error_fraction.abs().max() < 1e-8 and found.start_error_s.max() < 1e-7
    link = fit_link(ds, schedule=sched)
    assert link.p2p_s == pytest.approx(0.05, rel=1e-3) and link.wire_s == 0.0 and link.median_error < 1e-6


def test_a_link_on_which_messages_meet_is_told_from_latency():
    """Two chunks a rank and slow links: what occupies the link delays the next message, what is latency does not."""
    sched = build("interleaved")
    put = Costs(forward_s=1.0, backward_input_s=1.0, backward_weight_s=1.0, message_bytes=6, bandwidth=5.0)
    ds = simulate(sched, put)
    link = fit_link(ds)
    assert link.wire_s > 2 * link.p2p_s and link.p2p_s + link.wire_s == pytest.approx(1.2, rel=0.1)
    again = link.costs(fit_costs(ds))
    assert float(simulate(sched, again).span_s) == pytest.approx(float(ds.span_s), rel=0.01)
    with pytest.raises(CostError, match="send is 'later'"):
        fit_link(ds, send="later")


def test_overlapped_actions_are_not_replayed():
    costs = Costs(forward_s=1.0, backward_input_s=1.0, backward_weight_s=1.0)
    with pytest.raises(CostError, match="ran beside another action; a replay takes one at a time"):
        recorded_schedule(simulate(build("dualpipe_v"), costs))
