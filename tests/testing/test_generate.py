"""generate_run: what is written is complete, causal in true time, and what its truth says."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path

import numpy as np
import pytest

import mappnb
from mappnb import Costs, Layout
from mappnb.analysis import breakdown, match
from mappnb.errors import CostError, LayoutError, RunExistsError, ScheduleError
from mappnb.sched import codes
from mappnb.sched.times import times
from mappnb.terms import Flag
from mappnb.testing import (
    CheckpointStall,
    Clocks,
    DataSkew,
    Hang,
    HostGaps,
    IntermittentRank,
    KilledRank,
    MissingRank,
    MoeImbalance,
    Noise,
    SlowHost,
    SlowLink,
    SlowNic,
    SlowRank,
    SlowStage,
    Traffic,
    Truth,
    generate_run,
)

SMALL = Layout(tp=2, dp=2, pp=2)
COSTS = Costs(
    forward_s=0.010, backward_input_s=0.010, backward_weight_s=0.010, p2p_s=5e-5, message_bytes=2**20, bandwidth=10e9,
    optimizer_s=0.002,
)  # fmt: skip


@pytest.fixture(autouse=True)
def _no_sync(request, monkeypatch):
    """What is tested here is what is written, not that it outlives the machine."""
    if "slow" not in request.keywords:
        monkeypatch.setattr("mappnb.segment_writer.os.fsync", lambda file: None)


def generate(path, **options):
    """A run of 8 ranks by default, and its truth."""
    options = {"layout": SMALL, "num_microbatches": 4, "num_steps": 2, "costs": COSTS, **options}
    truth = generate_run(path / "run", **options)
    return mappnb.attach(path / "run"), truth


def true_times(run, truth):
    """Events with start and end in true time, ns, as arrays beside the dataset."""
    events = run.sel()
    start, end = np.empty(events.sizes["event"], np.int64), np.empty(events.sizes["event"], np.int64)
    rank, raw = events["rank"].values, events.raw_start_ns.values
    for r in np.unique(rank):
        mine = rank == r
        start[mine] = truth.clocks.true_ns(int(r), raw[mine])
        end[mine] = truth.clocks.true_ns(int(r), (raw + events.duration_ns.values)[mine])
    return events, start, end


def violations(events, start, end, *, slack_ns=3):
    """How many times somebody left a collective before all had come, or had a message before it was sent."""
    aligned = events.assign(start_ns=("event", start), duration_ns=("event", end - start))
    calls = match(aligned)
    if not calls.sizes["call"]:
        return 0
    there = calls["rank"].values >= 0
    last = np.where(there, calls.start_ns.values, np.iinfo(np.int64).min).max(axis=1)
    p2p = calls.op.values == "send_recv"
    early = (calls.end_ns.values < last[:, None] - slack_ns) & there
    count = int(early[~p2p].any(axis=1).sum())
    send = aligned.isel(event=np.flatnonzero(aligned.op.values == "send"))
    receive = aligned.isel(event=np.flatnonzero(aligned.op.values == "recv"))

    def keyed(ds, source, target, value):
        return {
            key: v
            for *key_parts, v in zip(ds.group.values, source, target, ds.seq.values, value, strict=True)
            for key in [tuple(map(int, key_parts))]
        }

    begun = keyed(send, send["rank"].values, send.peer.values, send.start_ns.values)
    got = keyed(receive, receive.peer.values, receive["rank"].values, (receive.start_ns + receive.duration_ns).values)
    assert begun.keys() == got.keys()
    return count + sum(got[k] < begun[k] - slack_ns for k in begun)


def nested(events):
    """Whether the spans of each rank are properly nested, and `depth` counts what encloses them."""
    for rank in np.unique(events["rank"].values):
        mine = events.isel(event=np.flatnonzero(events["rank"].values == rank))
        start, duration = mine.raw_start_ns.values, mine.duration_ns.values
        order = np.lexsort((mine.depth.values, start))
        stack: list[tuple[int, int]] = []
        for i in order:
            begin, end, depth = int(start[i]), int(start[i] + duration[i]), int(mine.depth.values[i])
            while stack and stack[-1][1] >= depth:
                assert stack.pop()[0] <= begin
            assert len(stack) == depth
            assert not stack or end <= stack[-1][0]
            stack.append((end, depth))


CASES = {
    "1f1b-layers": {"detail": "layers"},
    "interleaved": {"layout": Layout(tp=2, pp=2, dp=2, num_chunks=2), "schedule": "interleaved"},
    "zero-bubble": {"schedule": "zb_h1", "layout": Layout(pp=4, dp=2)},
    "v": {"schedule": "zb_v", "layout": Layout(pp=4, dp=2, num_chunks=2, stage_order="v")},
    "dualpipe": {"schedule": "dualpipe", "layout": Layout(pp=4, dp=2), "num_microbatches": 8},
    "fbd": {"schedule": "fbd", "layout": Layout(pp=4, dp=2)},
    "moe-cp-layers": {"layout": Layout(tp=2, cp=2, ep=4, dp=2, pp=2), "detail": "layers", "ranks_per_host": 4},
    "order": {"layout": Layout(tp=2, dp=2, pp=2, order="tp-pp-cp-ep-dp")},
    "sends": {"costs": Costs(forward_s=0.01, backward_input_s=0.01, backward_weight_s=0.01, p2p_s=1e-3, send="sync")},
    "single": {"layout": Layout(), "checkpoint_every": 2},
}


@pytest.mark.parametrize("case", CASES)
def test_a_run_is_complete_causal_and_nested(tmp_path, case):
    run, truth = generate(tmp_path, clocks=Clocks(offset_s=0.1, drift_ppm=40), **CASES[case])
    calls = match(run)
    assert bool(calls.complete.all())
    events, start, end = true_times(run, truth)
    assert violations(events, start, end) == 0
    nested(events)
    assert len(np.unique(events["rank"].values)) == run.layout.world_size
    stages = run.layout.num_stages // (2 if case == "fbd" else 1)
    forwards = run.layout.dp * run.layout.cp * run.layout.tp * stages * CASES[case].get("num_microbatches", 4)
    assert (events.op.values == "forward_step").sum() == 2 * forwards
    assert truth.step_s.shape == (2,)
    for step in range(2):
        mine = events["step"].values == step
        assert (end[mine].max() - start[mine].min()) / 1e9 == pytest.approx(truth.step_s[step], abs=1e-8)


def test_breakdown_sums_to_the_window_and_the_window_is_the_truth(tmp_path):
    run, truth = generate(tmp_path, checkpoint_every=2, checkpoint_s=0.05)
    parts = breakdown(run)
    np.testing.assert_allclose(parts.seconds.sum("category"), np.broadcast_to(parts.window_s.values[:, None], (2, 8)))
    np.testing.assert_allclose(
        parts.window_s, truth.step_s, atol=2e-6
    )  # the run clock knows no better than its anchors
    saved = parts.seconds.sel(category="checkpoint").values
    assert (saved[0] == 0).all()
    np.testing.assert_allclose(saved[1], 0.05, atol=1e-6)


SCHEDULES = {
    "1f1b": {},
    "gpipe": {},
    "interleaved": {"num_chunks": 2},
    "zb_h1": {},
    "zb_v": {"num_chunks": 2, "stage_order": "v"},
    "dualpipe": {},
}


PLACED = [(name, send) for name in SCHEDULES for send in ("async", "sync", "blocking")]
PLACED.remove(("dualpipe", "sync"))  # here the two sends of a pair follow one another, with two latencies


@pytest.mark.parametrize(("name", "send"), PLACED)
def test_without_noise_every_action_is_where_the_scheduler_puts_it(tmp_path, monkeypatch, name, send):
    monkeypatch.setattr("mappnb.testing._gen_program.ISSUE_S", 0.0)
    layout = Layout(pp=4, **SCHEDULES[name])
    options = {"noise": Noise.none(), "data_s": 0, "traffic": Traffic(embedding_bytes=0), "num_microbatches": 8}
    costs = Costs(
        forward_s=[0.010, 0.012, 0.010, 0.011], backward_input_s=0.011, backward_weight_s=0.009, p2p_s=3e-4,
        message_bytes=1e6, bandwidth=1e9, send=send,
    )  # fmt: skip
    run, _ = generate(tmp_path, layout=layout, schedule=name, costs=costs, num_steps=1, **options)
    sched = mappnb.schedule(name, num_stages=layout.num_stages, num_microbatches=8, num_chunks=layout.num_chunks)
    start, end = times(sched, costs.tables(sched))
    events, begin, finish = true_times(run, Truth.load(tmp_path / "run"))
    actions = np.flatnonzero(np.isin(events.op.values, ["forward_step", "backward_step"]))
    actions = actions[np.lexsort((begin[actions], events["rank"].values[actions]))]
    rank = np.repeat(np.arange(4), np.diff(sched.offsets))
    order = np.lexsort((np.arange(len(sched)), rank))
    np.testing.assert_array_equal(events["rank"].values[actions], rank[order])
    np.testing.assert_array_equal(events.stage.values[actions], codes.stage(sched.codes)[order])
    np.testing.assert_array_equal(events.microbatch.values[actions], codes.microbatch(sched.codes)[order])
    zero = begin[actions].min()
    paired = codes.paired(sched.codes)
    alone = ~(paired | np.roll(paired, 1))[order]  # each of a pair has its own part of their time
    np.testing.assert_allclose((begin[actions] - zero)[alone] / 1e9, start[order][alone], atol=5e-9)
    np.testing.assert_allclose((finish[actions] - zero)[alone] / 1e9, end[order][alone], atol=5e-9)
    assert alone.all() == (name != "dualpipe")
    assert alone.any()


def test_the_same_seed_writes_the_same_bytes_and_another_does_not(tmp_path):
    def digest(name, seed):
        generate_run(
            tmp_path / name, layout=SMALL, num_steps=2, num_microbatches=4, seed=seed, clocks=Clocks(offset_s=0.1),
            faults=[SlowRank(rank=1, factor=1.2, throttle=True), IntermittentRank(rank=2, factor=2.0), DataSkew()],
        )  # fmt: skip
        files = sorted(p for p in Path(tmp_path / name).rglob("*") if p.is_file())
        return {p.relative_to(tmp_path / name): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}

    first = digest("a", 1)
    assert first == digest("b", 1)
    other = digest("c", 2)
    assert all(first[p] != other[p] for p in first if "events" in p.parts)


def test_truth_is_saved_where_no_reader_looks(tmp_path):
    run, truth = generate(tmp_path, faults=[SlowRank(rank=1, factor=1.3), KilledRank(rank=2, first_step=1)])
    assert run.meta["problems"] == {}
    again = Truth.load(tmp_path / "run")
    np.testing.assert_array_equal(again.step_s, truth.step_s)
    assert [f.kind for f in again.faults] == ["slow_rank", "killed_rank"]
    np.testing.assert_array_equal(again.faults[0].effect_s, truth.faults[0].effect_s)
    np.testing.assert_array_equal(again.clocks.offset_ns, truth.clocks.offset_ns)
    with pytest.raises(mappnb.MappnbError, match=r"only runs of mappnb.testing.generate_run"):
        Truth.load(tmp_path)


def test_effects_are_the_difference_to_the_run_without_the_fault(tmp_path):
    faults = [
        SlowRank(rank=1, factor=1.3, first_step=1),
        DataSkew(),
        HostGaps(rank=0, length_s=0.02),
        IntermittentRank(rank=6, factor=2.0, probability=0.5),
    ]
    (tmp_path / "all").mkdir()
    _, truth = generate(tmp_path / "all", num_steps=4, faults=faults)
    assert truth.faults[0].steps == [1, 2, 3]
    (tmp_path / "0").mkdir()
    # the same run without the first fault, made by putting one in its place that does nothing
    _, without = generate(tmp_path / "0", num_steps=4, faults=[MissingRank(rank=7), *faults[1:]])
    np.testing.assert_allclose(truth.faults[0].effect_s, truth.step_s - without.step_s, atol=1e-12)
    assert truth.faults[0].effect_s[0] == 0
    assert (truth.faults[0].effect_s[1:3] > 0.01).all()  # in step 3 it hides behind the intermittent rank
    (tmp_path / "clean").mkdir()
    _, clean = generate(tmp_path / "clean", num_steps=4)
    np.testing.assert_array_equal(truth.clean_step_s, clean.step_s)


def test_raw_clocks_break_causality_and_the_truth_mends_it(tmp_path):
    clocks = Clocks(offset_s=0.05, drift_ppm=50, jumps=((1, 1.2, 0.3),))
    run, truth = generate(tmp_path, layout=Layout(tp=2, dp=2, pp=4), ranks_per_host=4, clocks=clocks)
    events, start, end = true_times(run, truth)
    assert violations(events, start, end) == 0
    run_clock = events.start_ns.values
    assert violations(events, run_clock, run_clock + events.duration_ns.values, slack_ns=1000) > 20
    error = truth.clocks.wall_error_ns
    assert (error[:4] == error[0]).all()
    assert len({int(e) for e in error}) == 4
    assert np.ptp(error) > 1_000_000


def test_clock_truth_is_its_own_inverse(tmp_path):
    clocks = Clocks(drift_ppm=50, jumps=((0, 2.0, 0.5), (0, 3.0, 1.5)))
    _, truth = generate(tmp_path, clocks=clocks)
    at = np.array([0.0, 1.0, 1.999, 2.001, 2.9, 3.1, 1e5])
    back = truth.clocks.true_ns(0, truth.clocks.raw_ns(0, at))
    np.testing.assert_allclose(back, at * 1e9, atol=1.0)


def test_anchors_tell_the_wall_clock_within_their_width(tmp_path):
    run, truth = generate(tmp_path, clocks=Clocks(offset_s=0.2, uncertainty_s=5e-6, drift_ppm=20))
    info = run.incarnations[0].ranks[3]
    wall, own, half = info["clock"]["anchors"][0]
    true = truth.clocks.true_ns(3, own)
    said = wall - run.store.info["created_wall_ns"] - int(truth.clocks.wall_error_ns[3])
    assert abs(int(true) - said) <= half + 1
    assert half < 50_000


def compute_s(run, step=None):
    return breakdown(run, step=step).seconds.sel(category="compute")


def ratio(run, rank, step):
    mine = compute_s(run, step).isel(step=0)
    return float(mine.sel(rank=rank) / mine.median("rank"))


def test_slow_rank_computes_longer_and_the_others_wait(tmp_path):
    run, truth = generate(tmp_path, faults=[SlowRank(rank=3, factor=1.5, first_step=1, throttle=True)])
    assert ratio(run, 3, 0) == pytest.approx(1.0, abs=0.05)
    assert ratio(run, 3, 1) == pytest.approx(1.5, abs=0.05)
    waits = breakdown(run, step=1).seconds.sel(category="wait_peer").isel(step=0)
    assert int(waits.argmin("rank")) == 3
    (fault,) = truth.faults
    assert (fault.subject_kind, fault.subjects, fault.ranks) == ("rank", ["3"], [3])
    samples = run.telemetry
    hot = samples.throttle_reasons.values != 0
    assert set(samples["rank"].values[hot]) == {3}
    np.testing.assert_allclose(samples.sm_clock_mhz.values[hot], 1980 / 1.5, rtol=0.02)
    assert hot.sum() == 2  # in step 1 alone


def test_slow_host_and_slow_stage_hit_all_their_ranks(tmp_path):
    (tmp_path / "host").mkdir()
    run, truth = generate(
        tmp_path / "host", layout=Layout(dp=4, pp=2), ranks_per_host=2, faults=[SlowHost(host=1, factor=1.4)]
    )
    assert truth.faults[0].ranks == [2, 3]
    slow = compute_s(run).mean("step")
    assert (slow.sel(rank=[2, 3]) > 1.3 * slow.sel(rank=[0, 1, 4, 5]).max()).all()
    (tmp_path / "stage").mkdir()
    run, truth = generate(tmp_path / "stage", faults=[SlowStage(stage=1, factor=1.4)])
    assert truth.faults[0].ranks == [4, 5, 6, 7]
    slow = compute_s(run).mean("step")
    assert (slow.sel(rank=[4, 5, 6, 7]) > 1.3 * slow.sel(rank=[0, 1, 2, 3]).max()).all()


def transfer_s(run, source, target):
    """Mean time from the begin of a send to the end of its receive, in s, where the receiver was waiting."""
    calls = match(run)
    at = np.flatnonzero(
        (calls.op.values == "send_recv") & (np.sort(calls["rank"].values, 1)[:, -2:] == sorted((source, target))).all(1)
    )
    events = run.sel()
    sends = events.isel(
        event=np.flatnonzero(
            (events.op.values == "send") & (events["rank"].values == source) & (events.peer.values == target)
        )
    )
    receives = events.isel(
        event=np.flatnonzero(
            (events.op.values == "recv") & (events["rank"].values == target) & (events.peer.values == source)
        )
    )
    assert len(at) >= sends.sizes["event"] > 0
    begun = dict(zip(sends.seq.values.tolist(), sends.start_ns.values.tolist(), strict=True))
    waited = receives.duration_ns.values > 0
    ends = (receives.start_ns + receives.duration_ns).values
    return (
        float(
            np.mean(
                [e - begun[s] for s, e in zip(receives.seq.values[waited].tolist(), ends[waited].tolist(), strict=True)]
            )
        )
        / 1e9
    )


def test_slow_link_slows_one_direction_of_one_pair(tmp_path):
    layout = Layout(pp=2, dp=2)
    run, truth = generate(
        tmp_path, layout=layout, noise=Noise.none(), faults=[SlowLink(source=0, destination=2, extra_s=0.003)]
    )
    assert truth.faults[0].subjects == ["0->2"]
    assert transfer_s(run, 0, 2) - transfer_s(run, 1, 3) == pytest.approx(0.003, abs=1e-4)
    assert (truth.faults[0].effect_s > 0.002).all()


def test_slow_nic_slows_what_crosses_hosts_only(tmp_path):
    layout, size = Layout(tp=2, dp=4), Traffic(layer_bytes=2**28, gradient_bytes=2**30)
    for name, faults in (("a", []), ("b", [SlowNic(host=1, factor=4.0)])):
        (tmp_path / name).mkdir()
        run, _ = generate(
            tmp_path / name, layout=layout, ranks_per_host=4, noise=Noise.none(), traffic=size, faults=faults
        )
        events = run.sel()
        large = events.bytes.values > 2**20
        tp, dp = (
            events.duration_ns.values[large & (events.op.values == op)].min() for op in ("all_reduce", "reduce_scatter")
        )
        if name == "a":
            before = tp, dp
    assert tp == pytest.approx(before[0], rel=0.01)
    assert dp == pytest.approx(4 * before[1], rel=0.01)


def test_data_skew_follows_the_lengths_in_the_metrics(tmp_path):
    fault = DataSkew(documents=4, sigma=1.2)
    run, truth = generate(tmp_path, layout=Layout(dp=4), noise=Noise.none(), faults=[fault], num_microbatches=6)
    metrics = run.metrics
    documents = metrics.isel(sample=np.flatnonzero(metrics.name.values == "document_tokens"))
    events = run.sel()
    forward = events.isel(event=np.flatnonzero(events.op.values == "forward_step"))
    square, length = [], []
    for i in range(forward.sizes["event"]):
        mine = [documents[k].values == forward[k].values[i] for k in ("rank", "step", "microbatch")]
        square.append((documents.value.values[np.logical_and.reduce(mine)] ** 2).sum())
        length.append(forward.duration_ns.values[i])
    assert len(square) == 4 * 2 * 6
    assert np.corrcoef(square, length)[0, 1] > 0.999
    assert (truth.faults[0].effect_s != 0).any()


def test_host_gaps_show_where_they_are(tmp_path):
    for gap in ("gc", "dataloader", "run_queue"):
        (tmp_path / gap).mkdir()
        fault = HostGaps(rank=0, length_s=0.03, per_step=2, gap=gap)
        run, truth = generate(tmp_path / gap, faults=[fault], telemetry=True)
        events = run.sel()
        parts = breakdown(run).seconds.isel(step=0)
        mine, other = parts.sel(rank=0), parts.sel(rank=2)
        assert (truth.faults[0].effect_s > 0.03).all()
        if gap == "dataloader":
            assert float(mine.sel(category="data") - other.sel(category="data")) == pytest.approx(0.06, abs=0.002)
        else:
            assert float(mine.sel(category="host") - other.sel(category="host")) == pytest.approx(0.06, abs=0.004)
        gc = events.op.values == "gc"
        assert gc.sum() == (4 if gap == "gc" else 0)
        nested(events)
        queued = run.telemetry.run_queue_fraction.values[run.telemetry["rank"].values == 0].mean()
        assert (queued > 0.1) == (gap == "run_queue")


def test_moe_imbalance_hits_the_ranks_of_the_experts(tmp_path):
    layout = Layout(dp=4, ep=4)
    run, truth = generate(tmp_path, layout=layout, noise=Noise.none(), faults=[MoeImbalance(ep_rank=2, factor=1.6)])
    assert truth.faults[0].ranks == [2]
    assert ratio(run, 2, 0) == pytest.approx(1.3, abs=0.02)  # half of the layer is behind the dispatch


def test_checkpoint_stall_only_in_steps_with_a_checkpoint(tmp_path):
    run, truth = generate(
        tmp_path, num_steps=4, checkpoint_every=2, checkpoint_s=0.1, faults=[CheckpointStall(rank=5, extra_s=0.4)]
    )  # fmt: skip
    (fault,) = truth.faults
    assert fault.steps == [1, 3]
    assert fault.effect_s[1] == pytest.approx(0.4, abs=0.01)
    saves = run.sel()
    saves = saves.isel(event=np.flatnonzero(saves.op.values == "checkpoint_save"))
    assert set(saves["step"].values) == {1, 3}
    assert saves.duration_ns.values[saves["rank"].values == 5].min() == pytest.approx(0.5e9, rel=0.01)


def test_intermittent_rank_is_slow_in_the_steps_that_the_truth_names(tmp_path):
    run, truth = generate(tmp_path, num_steps=8, faults=[IntermittentRank(rank=2, factor=1.8, probability=0.4)])
    steps = truth.faults[0].steps
    assert 0 < len(steps) < 8
    seen = compute_s(run)
    slow = (seen.sel(rank=2) / seen.median("rank") > 1.5).values
    assert np.flatnonzero(slow).tolist() == steps


def test_missing_rank_leaves_no_file_and_changes_no_time(tmp_path):
    run, truth = generate(tmp_path, faults=[MissingRank(rank=3)])
    assert run.meta["missing_ranks"] == [3]
    assert 3 not in run.sel()["rank"].values
    assert (truth.faults[0].effect_s == 0).all()
    calls = match(run)
    complete = calls.complete.values
    assert 0 < complete.sum() < len(complete)


def test_hang_leaves_the_others_in_the_collective_of_the_truth(tmp_path):
    run, truth = generate(tmp_path, num_steps=3, faults=[Hang(rank=5, first_step=1, at=0.6, wait_s=20)])
    (fault,) = truth.faults
    assert np.isfinite(fault.effect_s).tolist() == [True, False, False]
    events = run.sel()
    still = (events.flags.values & Flag.OPEN) != 0
    assert set(events["step"].values) == {0, 1}
    assert set(events["rank"].values[still]) == set(range(8))
    where = (events.group.values == fault.detail["group"]) & (events.seq.values == fault.detail["seq"])
    assert set(events["rank"].values[where]) == set(fault.detail["members"]) - {5}
    assert still[where].all()
    assert (events.duration_ns.values[still] > 15e9).all()
    assert run.meta["state"] != "ended"
    assert (run.steps.start_ns.sel(step=0) > 0).all()
    nested(events)


def test_killed_rank_stops_and_the_rest_waits(tmp_path):
    run, truth = generate(tmp_path, num_steps=3, faults=[KilledRank(rank=5, first_step=1, wait_s=20)])
    events = run.sel()
    still = (events.flags.values & Flag.OPEN) != 0
    length = events.duration_ns.values
    mine = events["rank"].values == 5
    assert (length[still & mine] < 1e9).all()
    assert (length[still & ~mine] > 15e9).all()
    assert set(events.op.values[still & mine]) == {"iteration", "forward_step"} or set(
        events.op.values[still & mine]
    ) == {
        "iteration",
        "backward_step",
    }
    assert "ended" not in run.incarnations[0].ranks[5]
    assert truth.faults[0].detail["members"]


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"faults": [SlowRank(rank=8, factor=2.0)]}, LayoutError, r"rank is 8; the layout .* ranks 0 to 7"),
        ({"faults": [SlowHost(host=1, factor=2.0)]}, LayoutError, r"host is 1; .* hosts 0 to 0"),
        ({"faults": [SlowStage(stage=2, factor=2.0)]}, LayoutError, r"stage is 2; .* stages 0 to 1"),
        ({"faults": [SlowLink(source=0, destination=1)]}, CostError, r"sends nothing to rank 1; it sends to \[4\]"),
        ({"faults": [MoeImbalance(ep_rank=0, factor=2.0)]}, CostError, r"use a Layout\(ep="),
        ({"faults": [CheckpointStall(rank=0, extra_s=1.0)]}, CostError, r"give checkpoint_every="),
        ({"faults": [HostGaps(rank=0, length_s=1.0, gap="dataloader")], "data_s": 0}, CostError, r"loads no data"),
        ({"faults": [SlowRank(rank=0, factor=2.0, first_step=2)]}, CostError, r"steps 0 to 1"),
        ({"faults": ["slow"]}, CostError, r"is no fault; use one of .*SlowRank"),
        ({"layout": Layout(pp=2), "schedule": mappnb.schedule("1f1b", num_stages=4, num_microbatches=4)}, ScheduleError,
         r"use Layout\(pp=4"),
        ({"schedule": "zb_v", "layout": Layout(pp=2, num_chunks=2)}, ScheduleError, r"use Layout\(stage_order='v'"),
        ({"schedule": "zb_v", "layout": Layout(pp=2)}, ScheduleError, r"has 2 per rank"),
        ({"schedule": "1f2b"}, ScheduleError, r"did you mean '1f1b'"),
        ({"detail": "layer"}, CostError, r"did you mean 'layers'"),
        ({"layout": Layout(tp=2, dp=2, pp=2, ep=2, order="tp-pp-cp-ep-dp")}, LayoutError, r"order that ends in pp"),
        ({"num_layers": 1}, LayoutError, r"give 2 or more"),
        ({"clocks": Clocks(jumps=((9, 1.0, 1.0),))}, LayoutError, r"hosts 0 to 0"),
        ({"costs": Costs(forward_s=1, backward_input_s=1, backward_weight_s=1, interference=0.1)}, CostError, r"leave them out"),
        ({"num_steps": 0}, CostError, r"at least 1"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_with_its_cure(tmp_path, options, error, says):
    with pytest.raises(error, match=says):
        generate(tmp_path, **options)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: SlowRank(rank=0, factor=0.0), r"factor is 0.0; expected a number above 0"),
        (lambda: SlowRank(rank=0, factor=float("nan")), r"factor is nan"),
        (lambda: SlowRank(rank=0, factor=2.0, first_step=3, last_step=2), r"before first_step"),
        (lambda: HostGaps(rank=0, length_s=1.0, gap="gcc"), r"did you mean 'gc'"),
        (lambda: DataSkew(linear=0.8, quadratic=0.4), r"sum to at most 1"),
        (lambda: Clocks(jumps=((0, 1.0, -1.0),)), r"never goes back"),
        (lambda: Noise(jitter_probability=2.0), r"from 0 to 1"),
        (lambda: Traffic(host_bandwidth=0.0), r"above 0"),
    ],
)
def test_settings_refuse_what_cannot_be(make, says):
    with pytest.raises(CostError, match=says):
        make()


def test_a_folder_that_holds_something_is_left_alone(tmp_path):
    (tmp_path / "mine").write_text("x")
    with pytest.raises(RunExistsError, match=r"new or an empty"):
        generate_run(tmp_path, layout=SMALL)


def test_blocks_of_steps_make_the_same_events(tmp_path, monkeypatch):
    (tmp_path / "a").mkdir()
    run, _ = generate(tmp_path / "a", num_steps=4, detail="layers")
    monkeypatch.setattr("mappnb.testing.generate.BLOCK_OPS", 1)
    (tmp_path / "b").mkdir()
    again, _ = generate(tmp_path / "b", num_steps=4, detail="layers", ended=False)
    assert run.sel().equals(again.sel())
    assert again.meta["state"] != "ended"
    assert (
        len(list((tmp_path / "b").rglob("rank=00000/seg-*.parquet"))) == 6
    )  # three closed blocks of events and of steps


@pytest.mark.slow
@pytest.mark.parametrize(("dp", "steps", "limit_s"), [(16, 5, 60), (160, 2, 280)])
def test_thousands_of_ranks(tmp_path, dp, steps, limit_s):
    layout = Layout(tp=8, dp=dp, pp=8)
    began = time.monotonic()
    truth = generate_run(
        tmp_path / "run", layout=layout, num_microbatches=16, num_steps=steps, faults=[SlowRank(rank=3, factor=1.5)]
    )  # fmt: skip
    assert time.monotonic() - began < limit_s
    assert (truth.faults[0].effect_s > 0.1).all()
    if dp == 16:
        run = mappnb.attach(tmp_path / "run")
        assert run.layout.world_size == 1024
        assert bool(match(run, step=1).complete.all())
