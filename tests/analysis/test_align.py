"""Clock alignment against known clocks: error, honest bounds, steps, hosts, one-way transfers, bad input."""

from __future__ import annotations

import time

import numpy as np
import pytest
import xarray as xr
from analysis.alignment_runs import DATA, Truth, collectives, dataset, errors, exit_noise, kineto_param_events

import mappnb
from mappnb.analysis import align, aligned, clock_model, ping_pong
from mappnb.analysis._align_bounds import SLICES, feasible
from mappnb.analysis._align_fit import _empty_model
from mappnb.analysis._align_input import observe
from mappnb.analysis._align_solve import group_median, group_quantiles
from mappnb.errors import MappnbError
from mappnb.layout import Layout
from mappnb.testing import Clocks, MissingRank, Noise, generate_run

needs_traces = pytest.mark.skipif(not (DATA / "param").exists(), reason="needs ../shared/data")
TIMES = tuple(np.linspace(0, 1, 9))


def rng(seed=0):
    return np.random.default_rng(seed)


# ----------------------------------------------------------------------------------------------- how well, how surely
def test_without_noise_the_clocks_are_exact():
    events, truth, _, _ = collectives(rng(), num_ranks=6, num_calls=200, noise=lambda r, s: np.zeros(s), outliers=0)
    a = align(events)
    assert np.abs(errors(events, a, truth)).max() < 5
    np.testing.assert_allclose(
        a.drift_ppm, (truth.drift_ppm - truth.drift_ppm[0]) / (1 + truth.drift_ppm[0] * 1e-6), atol=1e-3
    )
    assert int(a.violations.sum()) == 0 and a.attrs["num_steps"] == 0


@needs_traces
@pytest.mark.parametrize(("name", "transfer_ns"), [("param", 2e5), ("AR", 5e6), ("SE", 2e7)])
@pytest.mark.parametrize("steps", [(), ((9, 1.5e10, 2.5e7), (40, 3.1e10, 4e6))])
def test_error_and_bound_with_real_exit_noise(name, transfer_ns, steps):
    """64 ranks, 1,000 collectives, +-50 ms, +-100 ppm, 5 % outliers, noise that the solver has no model of."""
    noise = exit_noise(name)
    found, bound = [], []
    for seed in range(2):
        events, truth, _, exits = collectives(
            rng(seed), noise=lambda r, s: r.choice(noise, s), transfer_ns=transfer_ns, steps=steps
        )
        a = align(events)
        found.append(np.abs(errors(events, a, truth, TIMES)[1:]))
        bound.append(np.broadcast_to(a.bound_ns.values[1:, None], found[-1].shape))
        assert a.attrs["num_steps"] == len(steps)
        injected = 1.4826 * np.median(np.abs(exits[0] - np.median(exits[0], axis=1, keepdims=True)))
        assert a.attrs["residual_ns"] <= 1.2 * injected
    e, b = np.array(found), np.array(bound)
    assert (e <= b).mean() >= 0.95
    assert np.median(b) <= 3 * np.percentile(e, 95)


def test_noise_that_differs_between_ranks_widens_the_bound():
    """Exit noise is one-sided: a noisier rank leaves later, and no method can tell that from an offset. The bound must."""
    scale = np.ones(32)
    scale[[3, 20]] = 8.0
    events, truth, _, _ = collectives(rng(5), num_ranks=32, noise=lambda r, s: r.exponential(3e3, s) * scale)
    a = align(events)
    e = np.abs(errors(events, a, truth, TIMES))
    assert (e[[3, 20]] > 5e3).all() and (e <= a.bound_ns.values[:, None] + 1).mean() > 0.95


def test_bound_shrinks_with_the_number_of_calls():
    few = align(collectives(rng(1), num_ranks=16, num_calls=100)[0])
    many = align(collectives(rng(1), num_ranks=16, num_calls=1600)[0])
    ratio = float(few.sigma_ns[1:].median() / many.sigma_ns[1:].median())
    assert 2.4 < ratio < 7.0  # sqrt(16) = 4


def test_groups_that_only_together_connect_all_ranks():
    groups = [(0, 1, 2, 3), (4, 5, 6, 7), (0, 4), (1, 5)]
    events, truth, _, _ = collectives(rng(2), num_ranks=8, num_calls=300, groups=groups)
    a = align(events)
    e = np.abs(errors(events, a, truth, TIMES)[1:])
    assert (e <= a.bound_ns.values[1:, None]).mean() >= 0.95 and np.percentile(e, 95) < 5e3
    assert float(a.sigma_ns.sel(rank=[4, 5, 6, 7]).median()) > float(
        a.sigma_ns.sel(rank=[1, 2, 3]).median()
    )  # two hops


def test_hard_bounds_hold_the_truth_and_equal_brute_force():
    events, truth, _, _ = collectives(rng(3), num_ranks=5, num_calls=60, drift_ppm=0, groups=[(0, 1, 2), (2, 3, 4)])
    a = align(events)
    true = -(truth.offset_ns - truth.offset_ns[0])
    assert (a.hard_low_ns.values - 1 <= true).all() and (true <= a.hard_high_ns.values + 1).all()
    assert float((a.hard_high_ns - a.hard_low_ns)[1:].min()) > 0

    obs = observe(events)
    model = _empty_model(obs)
    space = feasible(obs, model, 0)
    part = np.clip(((obs.start - (model.mid - model.half)) / (2 * model.half) * SLICES).astype(int), 0, SLICES - 1)
    first = np.zeros(int(obs.call.max()) + 1, int)
    first[obs.call[::-1]] = part[::-1]
    for s in range(SLICES):
        reach = np.full((5, 5), np.inf)  # reach[i, j]: c_j - c_i <= reach
        for c in np.flatnonzero(first == s):
            rows = np.flatnonzero(obs.call == c)
            for i in rows:
                for j in rows:
                    reach[obs.rank[i], obs.rank[j]] = min(reach[obs.rank[i], obs.rank[j]], obs.end[i] - obs.start[j])
        np.fill_diagonal(reach, 0)
        for k in range(5):  # Floyd and Warshall
            reach = np.minimum(reach, reach[:, [k]] + reach[[k], :])
        np.testing.assert_allclose(space.high[:, s], reach[0], atol=1e-3)
        np.testing.assert_allclose(space.low[:, s], -reach[:, 0], atol=1e-3)


def test_median_by_group_equals_numpy():
    values, code = rng().normal(size=200), rng(1).integers(0, 7, 200)
    found = group_median(values, code, 8)
    np.testing.assert_allclose(found[:7], [np.median(values[code == c]) for c in range(7)])
    assert np.isnan(found[7])
    (low,) = group_quantiles(values, code, 7, (0.8,))
    np.testing.assert_allclose(low, [np.quantile(values[code == c], 0.8) for c in range(7)])


# ------------------------------------------------------------------------------------------------------- invariances
def test_order_of_events_and_origin_of_time_do_not_matter():
    events, truth, _, _ = collectives(rng(4), num_ranks=8, num_calls=150)
    one = align(events)
    mixed = events.isel(event=rng(1).permutation(events.sizes["event"]))
    xr.testing.assert_allclose(align(mixed).drop_attrs(), one.drop_attrs(), rtol=1e-9, atol=1e-6)
    far = events.copy(deep=True)
    shift = rng(2).integers(0, 10**15, 8)
    for name in ("start_ns", "raw_start_ns"):
        far[name] = far[name] + shift[far["rank"].values]
    other = align(far)
    same = other.offset_ns.values + shift
    np.testing.assert_allclose(same - same[0], one.offset_ns.values - one.offset_ns.values[0], atol=1e4)
    moved = Truth(truth.offset_ns + shift, truth.drift_ppm)
    assert other.attrs["clock_model"] != one.attrs["clock_model"]
    run_ns = [
        clock_model(other).shift((0, r), moved.raw(np.array([r]), np.array([3e9])).astype(np.int64))
        + moved.raw(np.array([r]), np.array([3e9]))
        for r in range(8)
    ]
    assert np.ptp(np.concatenate(run_ns)) < 1e4


def test_another_reference_rank():
    events, truth, _, _ = collectives(rng(6), num_ranks=8, num_calls=200)
    a = align(events, reference=5)
    assert a.attrs["reference_rank"] == 5 and float(a.sigma_ns.sel(rank=5)) == 0 == float(a.drift_ppm.sel(rank=5))
    assert np.abs(errors(events, a, truth)).max() < 5e3
    with pytest.raises(MappnbError, match="the reference rank 99 has no events"):
        align(events, reference=99)


def test_aligned_events_keep_their_raw_times():
    events, truth, _, noises = collectives(rng(7), num_ranks=8, num_calls=200, steps=[(2, 5e9, 1e7)])
    out = aligned(events)
    assert out.raw_start_ns.equals(events.raw_start_ns) and out.attrs["clock_model"].startswith("align-1:")
    end = (out.start_ns + out.duration_ns).values.reshape(200, 8)
    assert np.median(np.ptp(end, axis=1)) < 3 * np.median(np.ptp(noises[0], axis=1)) + 1e4
    assert np.median(np.ptp((events.start_ns + events.duration_ns).values.reshape(200, 8), axis=1)) > 1e7
    again = aligned(out)  # the raw times are what counts: nothing is aligned twice
    assert np.abs((again.start_ns - out.start_ns).values).max() <= 1000


# ------------------------------------------------------------------------------------------- one-way, hosts and priors
def ping_pongs(n, offset, *, back=True, delay=20_000):
    """P2P between ranks 0 and 1 whose clock is ahead by ``offset`` ns: sends, and receives that end ``delay`` or more later."""
    r = rng(8)
    t = np.arange(n) * 1_000_000
    way = delay + r.exponential(5_000, n).astype(np.int64)
    rows = [(0, "send", 1, t, np.full(n, 3_000)), (1, "recv", 0, t + offset - 1000, way + 1000)]
    if back:
        u = t + 500_000
        rows += [(1, "send", 0, u + offset, np.full(n, 3_000)), (0, "recv", 1, u - 1000, way + 1000)]
    parts = [(np.full(n, k), np.full(n, op, object), np.full(n, p), s, d, np.arange(n)) for k, op, p, s, d in rows]
    rank, op, peer, start, length, seq = (np.concatenate(c) for c in zip(*parts, strict=True))
    return dataset(
        rank=rank, op=op, peer=peer, seq=seq, category="p2p", group=3, bytes=8, start_ns=start, raw_start_ns=start,
        duration_ns=length,
    )  # fmt: skip


def test_messages_both_ways_give_an_interval_and_its_middle():
    a = align(ping_pongs(200, 7_000_000))
    true = -7_000_000
    assert abs(float(a.offset_ns[1]) - true) <= float(a.bound_ns[1]) <= 30_000
    assert float(a.hard_low_ns[1]) <= true <= float(a.hard_high_ns[1])
    assert float(a.sigma_ns[1]) == pytest.approx(float(a.bound_ns[1]) / np.sqrt(3), rel=0.3)


def test_messages_one_way_are_refused():
    with pytest.raises(MappnbError, match=r"no matched collective connects the clocks of these 2 sets of ranks"):
        align(ping_pongs(200, 7_000_000, back=False))


def test_ranks_that_nothing_connects_are_named():
    events, _, _, _ = collectives(rng(), num_ranks=7, num_calls=20, groups=[(0, 1, 2), (3, 4), (5, 6)])
    with pytest.raises(MappnbError, match=r"3 sets of ranks: \[0, 1, 2\]; \[3, 4\]; \[5, 6\]"):
        align(events)


def test_a_prior_connects_and_counts_by_its_sigma():
    events, truth, _, _ = collectives(rng(9), num_ranks=4, num_calls=200, groups=[(0, 1), (2, 3)], drift_ppm=0)
    known = -(truth.offset_ns[2] - truth.offset_ns[0])
    a = align(events, prior={2: (known, 5_000.0)})
    assert np.abs(errors(events, a, truth, (0.5,))).max() < 5_000
    with pytest.raises(MappnbError, match=r"prior for rank 9 .* expected a rank with events"):
        align(events, prior={9: (0.0, 1.0)})


def test_ranks_of_one_host_share_a_clock():
    events, truth, _, _ = collectives(rng(10), num_ranks=6, num_calls=200, drift_ppm=0, offset_ns=0)
    hosts = events.assign_attrs(clocks='{"0": [[0, 1, 2], [3, 4, 5]]}')
    a = align(hosts)
    assert a.clock.values.tolist() == [0, 0, 0, 1, 1, 1]
    assert float(np.ptp(a.offset_ns.values[3:])) == 0 and (a.sigma_ns[:3] == 0).all()
    assert float(a.sigma_ns[3]) < float(align(events).sigma_ns[3])


def test_broadcast_bounds_one_way():
    """Members leave after the root came, the root leaves when it likes: the bound is one-sided, and nothing is measured."""
    events, _, _, _ = collectives(rng(11), num_ranks=3, num_calls=50, drift_ppm=0, ops=("broadcast",))
    with pytest.raises(MappnbError, match="no matched collective"):
        align(events.assign(peer=("event", np.zeros(events.sizes["event"], np.int32))))
    rooted = events.assign(peer=("event", np.zeros(events.sizes["event"], np.int32)))
    obs = observe(rooted)
    space = feasible(obs, _empty_model(obs), 0)
    assert np.isfinite(space.low[1:]).all() and np.isinf(space.high[1:]).all()


def test_ping_pong_takes_the_shortest_way():
    sent = np.arange(8) * 10**6
    out, back = np.array([5, 9, 2, 30, 8, 7, 9, 4]) * 1000, np.array([6, 8, 3, 2, 8, 90, 9, 4]) * 1000
    offset = 12_345_678
    received = sent + out + offset
    found, sigma = ping_pong(sent, received, received + 700, sent + out + 700 + back)
    assert found == -offset + 500 and sigma == pytest.approx(2_500 / np.sqrt(3))


# ---------------------------------------------------------------------------------------------------------- bad input
def test_bad_input():
    with pytest.raises(MappnbError, match="no events; record or import a run"):
        align(dataset(rank=np.empty(0, int)))
    events, truth, _, _ = collectives(rng(12), num_ranks=6, num_calls=120)
    alone = align(events.isel(event=np.flatnonzero(events["rank"].values == 3)))
    assert alone["rank"].values.tolist() == [3] and float(alone.bound_ns[0]) == 0
    gone = events.isel(event=np.flatnonzero(events["rank"].values != 2))  # a rank is missing from the run
    a = align(gone)
    assert a["rank"].values.tolist() == [0, 1, 3, 4, 5]
    late = np.flatnonzero((events["rank"].values != 4) | (events.seq.values < 50))  # and one that stopped early
    b = align(events.isel(event=late))
    assert np.abs(errors(events, b, truth, (0.0, 0.2))).max() < 1e4
    wrong = events.copy(deep=True)
    wrong["seq"] = wrong.seq + (wrong["rank"] == 5) * 10_000  # numbers that disagree: matched by order
    np.testing.assert_allclose(align(wrong).offset_ns, align(events).offset_ns, atol=1)
    with pytest.raises(MappnbError, match="no incarnation 3 in these events"):
        align(events, incarnation=3)


def test_open_and_asynchronous_calls_do_not_measure():
    events, truth, _, _ = collectives(rng(13), num_ranks=4, num_calls=100)
    spoilt = events.copy(deep=True)
    at = np.flatnonzero((spoilt["rank"].values == 1) & (spoilt.seq.values % 2 == 0))
    spoilt.duration_ns.values[at] += 10**9
    spoilt.flags.values[at] = 16
    last = np.flatnonzero(spoilt.seq.values == 99)
    spoilt.flags.values[last] = 1
    a = align(spoilt)
    e = np.abs(errors(events, a, truth))
    assert e.max() < 1e5 and (e <= a.bound_ns.values[:, None]).mean() > 0.9


# --------------------------------------------------------------------------------------------------- runs and real data
@pytest.fixture(scope="module")
def generated(tmp_path_factory):
    path = tmp_path_factory.mktemp("clocks") / "run"
    clocks = Clocks(offset_s=0.05, drift_ppm=100, jumps=((1, 2.5, 0.01),))
    truth = generate_run(path, layout=Layout(tp=4, dp=4, pp=4), num_steps=6, clocks=clocks, seed=1, detail="actions")
    return path, truth


def true_error(run, truth):
    """Error of start_ns of every event, ns, and its rank: against the reference's clock without drift."""
    events = run.events
    rank, raw, start = (events[n].values for n in ("rank", "raw_start_ns", "start_ns"))
    rate = 1 + truth.clocks.drift_ppm[0] * 1e-6
    out = np.empty(len(rank))
    for r in np.unique(rank):
        mine = rank == r
        out[mine] = start[mine] - truth.clocks.true_ns(int(r), raw[mine]) * rate
    return out - np.median(out[rank == 0]), rank


def test_a_run_reads_by_its_alignment(generated):
    path, truth = generated
    before = sorted((p, p.stat().st_mtime_ns) for p in path.rglob("*"))
    run = mappnb.attach(path)
    raw, anchored = run.events.raw_start_ns.values, run.events.start_ns.values
    a = run.align()
    assert a.attrs["num_steps"] == 1 and np.unique(a.clock).size == 8
    e, rank = true_error(run, truth)
    assert (
        np.abs(e) <= a.bound_ns.values[rank] + 50
    ).mean() >= 0.85  # one run of 8 clocks; test_bounds_of_many_runs counts
    assert np.percentile(np.abs(e), 90) < 2_000
    assert run.meta["clock_model"] == run.events.attrs["clock_model"] == a.attrs["clock_model"]
    assert np.array_equal(run.events.raw_start_ns.values, raw)
    assert run.refresh().clock_model.name == a.attrs["clock_model"]
    window = run.sel(time=slice(2.0, 3.0))
    start, end = run.events.start_ns.values, (run.events.start_ns + run.events.duration_ns).values
    assert window.sizes["event"] == int(((start < 3e9) & (end > 2e9)).sum())
    assert (np.diff(window.start_ns.values) >= 0).all()
    done = aligned(mappnb.attach(path).sel(), a)
    np.testing.assert_array_equal(np.sort(done.start_ns.values), np.sort(start))
    assert float(run.steps.step_s.max()) < 2.0
    run.use_clock(None)
    assert np.array_equal(run.events.start_ns.values, anchored) and run.meta["clock_model"] == "anchor-1"
    assert sorted((p, p.stat().st_mtime_ns) for p in path.rglob("*")) == before


def test_pipelines_without_a_common_collective(tmp_path):
    """Messages alone, forwards one way and gradients the other: clocks are bounded, and the bounds hold."""
    truth = generate_run(tmp_path / "r", layout=Layout(pp=4), num_steps=3, ranks_per_host=1, seed=2,
                         clocks=Clocks(offset_s=0.05, drift_ppm=20))  # fmt: skip
    run = mappnb.attach(tmp_path / "r")
    events = run.sel(category="p2p")
    a = align(events)
    run.use_clock(clock_model(a))
    e, rank = true_error(run, truth)
    width = (a.hard_high_ns - a.hard_low_ns).values / 2
    assert (width[1:] > 0).all() and (np.abs(e) <= 2 * width[rank] + 2 * a.bound_ns.values[rank] + 1000).all()


def test_a_missing_rank_is_left_out(tmp_path):
    generate_run(tmp_path / "r", layout=Layout(dp=4), num_steps=3, ranks_per_host=1, faults=[MissingRank(rank=2)],
                 clocks=Clocks(offset_s=0.05), noise=Noise())  # fmt: skip
    assert align(mappnb.attach(tmp_path / "r"))["rank"].values.tolist() == [0, 1, 3]


@needs_traces
def test_a_real_nccl_job_on_one_host_stays_as_it_is():
    """8 V100s of one host (param): ends agree within 7 us before and after, and no drift is made of 8 calls."""
    events = kineto_param_events()
    a = align(events)
    offset = a.offset_ns - a.offset_ns[0]
    assert float(np.abs(offset).max()) < 5_000 and (np.abs(offset) <= a.bound_ns + 3_000).all()
    assert float(np.abs(a.drift_ppm).max()) < 1000 and int(a.violations.sum()) == 0
    out = aligned(events, a)
    ends = (out.start_ns + out.duration_ns).values
    skew = [np.ptp(ends[events["rank"].values == r][0]) for r in range(8)]
    calls = mappnb.analysis.match(out)
    assert np.ptp(calls.end_ns.values, axis=1).max() <= 7_000 and len(skew) == 8
    last = np.bincount(calls["rank"].values[np.arange(8), calls.start_ns.values.argmax(axis=1)], minlength=8)
    assert last[7] == 5


@pytest.mark.slow
@pytest.mark.parametrize("jumps", [(), ((1, 2.5, 0.01),)])
def test_bounds_of_many_runs(tmp_path, jumps):
    """Truth inside the bound in 95 % of cases over generated runs, hosts of 8 ranks, with and without a clock step."""
    inside, error, bound = [], [], []
    for seed in range(8):
        clocks = Clocks(offset_s=0.05, drift_ppm=100, jumps=jumps)
        path = tmp_path / str(seed)
        truth = generate_run(path, layout=Layout(tp=4, dp=4, pp=4), num_steps=8, clocks=clocks, seed=seed)
        run = mappnb.attach(path)
        a = run.align()
        e, rank = true_error(run, truth)
        other = a.clock.values[rank] != a.clock.values[0]
        inside.append((np.abs(e) <= a.bound_ns.values[rank] + 1)[other])
        error.append(np.abs(e)[other])
        bound.append(a.bound_ns.values[rank][other])
    assert np.concatenate(inside).mean() >= 0.95
    assert np.median(np.concatenate(bound)) <= 3 * np.percentile(np.concatenate(error), 95)


@pytest.mark.slow
def test_a_thousand_ranks_in_two_seconds():
    events, truth, _, _ = collectives(rng(), num_ranks=1000, num_calls=1000)
    align(collectives(rng(), num_ranks=8, num_calls=50)[0])
    begin = time.process_time()
    a = align(events)
    assert time.process_time() - begin <= 2.0 * 1.5  # 2 s on a quiet machine; the benchmark checks that
    e = np.abs(errors(events, a, truth)[1:])
    assert (e <= a.bound_ns.values[1:, None]).mean() >= 0.95
