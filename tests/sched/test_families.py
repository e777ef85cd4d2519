"""Every registered family: complete, free of deadlock, at its closed forms; sizes that cannot be are refused with ones that can."""

import itertools
import time
from collections import Counter

import numpy as np
import pytest

from mappnb.errors import ScheduleError
from mappnb.sched import Placement, codes, schedule
from mappnb.sched.memory import peak_activation
from mappnb.sched.registry import FAMILIES, family, schedules
from mappnb.terms import Kind

from .sim import bubbles, costs, idle, times

GRID = [(1, 1), (1, 4), (2, 2), (2, 7), (3, 6), (4, 4), (4, 16), (5, 11), (8, 32)]
TIMES = [(1.0, 1.2, 0.8), (2.0, 1.0, 0.5), (1.0, 1.0, 0.0)]
"""F, I, W with W no longer than F and I, where the closed forms hold."""
EQUAL = (1.0, 1.0, 1.0)


def sizes(name, p, m, v=2):
    """Sizes of ``p`` ranks and about ``m`` microbatches that the family takes."""
    chunks = family(name).chunks or v
    if name == "zb_h2":
        m = max(m, 2 * p - 1)
    elif name == "dualpipe":
        p, m = 2 * ((p + 1) // 2), 2 * m
        m = max(m, 2 * p)
    elif name == "dualpipe_v":
        m = max(m, 2 * p)
    elif family(name).chunks is None and chunks > 1:
        m = (m + p - 1) // p * p
    return {"num_stages": p * chunks, "num_microbatches": m, "num_chunks": chunks}


def each(name):
    for p, m in GRID:
        for v in (1, 2, 3) if family(name).chunks is None else (2,):
            size = sizes(name, p, m, v)
            yield size["num_stages"] // size["num_chunks"], size["num_microbatches"], size["num_chunks"], size


@pytest.mark.parametrize("name", schedules())
def test_complete_and_free_of_deadlock(name):
    for _, m, _, size in each(name):
        made = schedule(name, **size)
        seen = Counter((a.stage, a.microbatch, a.kind) for row in made.ranks for a in row)
        assert set(seen.values()) == {1}
        for stage in range(made.num_stages):
            for mb in range(m):
                kinds = {k for k in Kind if (stage, mb, k) in seen}
                assert kinds - {Kind.FORWARD} in ({Kind.BACKWARD}, {Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT})
                assert Kind.FORWARD in kinds
        assert made.num_microbatches == m
        for rank, row in enumerate(made.ranks):
            assert {made.placement.rank(a.stage, a.kind, a.microbatch) for a in row} == {rank}
        start, end = times(made, costs())
        assert len(start) == len(made) == sum(seen.values())
        assert (end > start).all()


@pytest.mark.parametrize("name", schedules())
def test_valid(name):
    schedule(name, **sizes(name, 4, 16)).validate()


@pytest.mark.parametrize("name", schedules())
def test_is_known_by_its_name(name):
    made = schedule(name, **sizes(name, 2, 4))
    assert made.name == name
    assert family(name).build.__doc__


def test_all_families_are_listed():
    assert {"zb_h1", "zb_h2", "zb_v", "v_half", "v_min", "interleaved_zb", "dualpipe", "dualpipe_v", "fbd"} <= set(
        schedules()
    )
    assert len(set(FAMILIES)) == len(FAMILIES)


# ------------------------------------------------------------------------------------------------------ closed forms
@pytest.mark.parametrize("fiw", TIMES)
def test_bubble_of_one_chunk(fiw):
    f, i, w = fiw
    for p, m in GRID:
        work = m * sum(fiw)
        size = {"num_stages": p, "num_microbatches": m}
        for name in ("gpipe", "1f1b"):
            assert bubbles(schedule(name, **size), costs(*fiw))[0] - work == pytest.approx((p - 1) * sum(fiw))
        assert bubbles(schedule("fbd", **size), costs(*fiw))[0] == pytest.approx(p * sum(fiw) + (m - 1) * max(f, i + w))


@pytest.mark.parametrize("fiw", TIMES)
@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
def test_bubble_of_zero_bubble(p, fiw):
    f, i, w = fiw
    for m in (2 * p - 1, 3 * p):
        work = m * sum(fiw)
        makespan, span = bubbles(schedule("zb_h1", num_stages=p, num_microbatches=m), costs(*fiw))
        assert makespan - work == span - work == pytest.approx((p - 1) * (f + i - w))
        _, span = bubbles(schedule("zb_h2", num_stages=p, num_microbatches=m), costs(*fiw))
        assert span - work == pytest.approx((p - 1) * (f + i - 2 * w))


@pytest.mark.parametrize("fiw", TIMES)
@pytest.mark.parametrize("v", [1, 2, 4])
@pytest.mark.parametrize("p", [1, 2, 4, 8])
def test_bubble_of_chunks(p, v, fiw):
    f, i, w = fiw
    for m in (p, 3 * p):
        size = {"num_stages": p * v, "num_microbatches": m, "num_chunks": v}
        work, bubble = m * sum(fiw), (p - 1) / v
        assert bubbles(schedule("interleaved_zb", **size), costs(*fiw))[0] - work == pytest.approx(bubble * (f + i - w))
        for name in ("interleaved", "breadth_first"):
            assert bubbles(schedule(name, **size), costs(*fiw))[0] - work == pytest.approx(bubble * sum(fiw))


@pytest.mark.parametrize("p", [1, 2, 3, 4, 9])
def test_zb_v_has_no_bubble_at_equal_times(p):
    for m in (2 * p - 1, 2 * p, 4 * p):
        makespan, span = bubbles(schedule("zb_v", num_stages=2 * p, num_microbatches=m), costs(*EQUAL))
        assert span == pytest.approx(3 * m)
        assert makespan - 3 * m == pytest.approx((p - 1) / 2)


@pytest.mark.parametrize(
    ("name", "fiw", "bubble"),
    [
        ("v_half", EQUAL, {4: 5 / 18, 8: 17 / 42, 16: 41 / 90}),
        ("v_min", EQUAL, {4: 11 / 18, 8: 27 / 42, 16: 59 / 90}),
        ("v_half", (10, 12, 8), {4: 0.433, 8: 0.548, 16: 0.596}),
    ],
)
def test_bubble_of_v_half_and_v_min(name, fiw, bubble):
    """0.278, 0.405, 0.456 and 0.611, 0.643, 0.656 of (p − 1) T, with 2 p microbatches or more; other times: V-Half's known values."""
    for p, expected in bubble.items():
        for m in (2 * p, 2 * p + 3) if p > 8 else (2 * p, 4 * p, 4 * p + 3):
            _, span = bubbles(schedule(name, num_stages=2 * p, num_microbatches=m), costs(*fiw))
            assert (span - m * sum(fiw)) / (p - 1) / sum(fiw) == pytest.approx(expected, abs=5e-4)


@pytest.mark.parametrize("p", [2, 3, 4, 5, 8])
def test_v_schedules_lie_between_zero_bubble_and_1f1b(p):
    """At equal times less memory costs bubble, and none of them comes to 1F1B's."""
    got = [
        bubbles(schedule(n, num_stages=2 * p, num_microbatches=4 * p), costs(*EQUAL))[0]
        for n in ("zb_v", "v_half", "v_min")
    ]
    assert got == sorted(got)
    assert got[-1] < 12 * p + 3 * (p - 1)


@pytest.mark.parametrize("share", [1.0, 0.8])
@pytest.mark.parametrize("fiw", [EQUAL, (1.0, 1.0, 0.5)])
@pytest.mark.parametrize("p", [2, 4, 6, 12])
def test_bubble_of_dualpipe(p, fiw, share):
    """(PP/2 − 1)(F&B + B − 3 W) is the longest idle time of a rank, for any time of a pair; the same in chunks for the V."""
    f, i, w = fiw
    pair = share * sum(fiw)
    bubble = (p / 2 - 1) * (pair + i + w - 3 * w)
    cost = costs(*fiw, overlapped_s=pair)
    for m in (2 * p, 2 * p + 2):
        made = schedule("dualpipe", num_stages=p, num_microbatches=m)
        assert idle(made, cost).max() == pytest.approx(bubble)
        folded = schedule("dualpipe_v", num_stages=p, num_microbatches=m)
        assert idle(folded, cost).max() == pytest.approx(bubble / 2)  # two chunks: each costs half of a rank's share
        if share == 1.0:
            assert bubbles(made, cost)[0] - m * sum(fiw) == pytest.approx(bubble)


def test_dualpipe_is_dualpipe_v_and_its_mirror_image():
    """Half of the ranks of DualPipe run DualPipeV's order; the other half the same for the other direction."""
    p, m = 8, 20
    both = schedule("dualpipe", num_stages=p, num_microbatches=m)
    folded = schedule("dualpipe_v", num_stages=p, num_microbatches=m // 2)
    for r in range(p // 2):
        one = [(a.stage, a.kind, a.microbatch % (m // 2)) for a in both.ranks[r]]
        other = [(p - 1 - a.stage, a.kind, (a.microbatch + m // 2) % m % (m // 2)) for a in both.ranks[p - 1 - r]]
        assert one == [(a.stage, a.kind, a.microbatch) for a in folded.ranks[r]]
        assert [(p - 1 - s, k, mb) for s, k, mb in other] == one
    assert {i for r, i in both.pairs if r == 1} == {i for r, i in folded.pairs if r == 1}
    assert both.placement == Placement.bidirectional(p, m // 2)


@pytest.mark.parametrize("name", ["dualpipe", "dualpipe_v"])
def test_pairs_are_a_forward_and_a_backward_of_different_stages(name):
    made = schedule(name, **sizes(name, 4, 16))
    assert made.pairs
    for rank, at in made.pairs:
        first, second = made.ranks[rank][at : at + 2]
        assert (first.kind, second.kind) == (Kind.FORWARD, Kind.BACKWARD)
        assert first.stage != second.stage


@pytest.mark.parametrize("fiw", [(1, 1, 1), (5, 1, 1)])
@pytest.mark.parametrize(("p", "m"), [(1, 1), (3, 2), (4, 9)])
def test_fbd(p, m, fiw):
    f, i, w = fiw
    for activations, b in (("ship", i + w), ("recompute", f + i + w)):
        made = schedule("fbd", num_stages=p, num_microbatches=m, activations=activations)
        assert bubbles(made, costs(*fiw))[0] == pytest.approx(p * (f + b) + (m - 1) * max(f, b))
        assert made.recompute == (activations == "recompute")
        assert made.num_ranks == 2 * p
        backwards = schedule("1f1b", num_stages=p, num_microbatches=m).ranks
        for s in range(p):
            assert {a.kind for a in made.ranks[s]} == {Kind.FORWARD}
            assert made.ranks[p + s] == tuple(a for a in backwards[s] if a.kind is Kind.BACKWARD)


# ------------------------------------------------------------------------------------------------------------ memory
@pytest.mark.parametrize("p", [1, 2, 3, 4, 5, 8, 9, 12])
def test_peaks(p):
    ranks = np.arange(p)
    for m in (2 * p, 2 * p + 1, 4 * p):
        size = {"num_stages": p, "num_microbatches": m}
        double = {"num_stages": 2 * p, "num_microbatches": m}
        np.testing.assert_array_equal(peak_activation(schedule("gpipe", **size)), m)
        np.testing.assert_array_equal(peak_activation(schedule("1f1b", **size)), np.minimum(p - ranks, m))
        np.testing.assert_array_equal(peak_activation(schedule("zb_h1", **size)), p)
        np.testing.assert_array_equal(peak_activation(schedule("zb_h2", **size)), 2 * p - 1)
        np.testing.assert_array_equal(peak_activation(schedule("zb_v", **double)), p)
        assert peak_activation(schedule("v_half", **double)).max() == (p + 2) // 2
        assert peak_activation(schedule("v_min", **double)).max() == (p + 4) // 3
        np.testing.assert_array_equal(peak_activation(schedule("dualpipe_v", **double)), p + 0.5)
        np.testing.assert_array_equal(peak_activation(schedule("fbd", **size)), 1)
        if p % 2 == 0:
            np.testing.assert_array_equal(
                peak_activation(schedule("dualpipe", num_stages=p, num_microbatches=2 * m)), p + 1
            )


@pytest.mark.parametrize("v", [1, 2, 4])
@pytest.mark.parametrize("p", [1, 2, 4, 8])
def test_peaks_with_chunks(p, v):
    for m in (p, 2 * p, 4 * p):
        size = {"num_stages": p * v, "num_microbatches": m, "num_chunks": v}
        np.testing.assert_allclose(peak_activation(schedule("interleaved_zb", **size)), p)
        np.testing.assert_allclose(peak_activation(schedule("breadth_first", **size)), m)
        warm_up = 2 * (p - 1 - np.arange(p)) + (v - 1) * p + 1 if v > 1 else p - np.arange(p)
        np.testing.assert_allclose(peak_activation(schedule("interleaved", **size)), np.minimum(warm_up / v, m))


@pytest.mark.parametrize("held", [0.0, 0.366, 1.0])
def test_peak_of_zb_h1_with_the_part_that_w_needs(held):
    """Zero Bubble, Table 2: (p − i + 1) M_B + (i − 1) M_W on the i-th rank from 1."""
    p = 8
    made = schedule("zb_h1", num_stages=p, num_microbatches=24)
    got = peak_activation(made, costs(activation_weight=held).tables(made))
    np.testing.assert_allclose(got, [p - r + r * held for r in range(p)])


# -------------------------------------------------------------------------------------------------------- refusals
@pytest.mark.parametrize(
    ("name", "size", "says"),
    [
        (
            "zb_h2",
            {"num_stages": 4, "num_microbatches": 6},
            "6 microbatches for 4 ranks; expected at least 2 p - 1 = 7",
        ),
        ("dualpipe", {"num_stages": 5, "num_microbatches": 20}, "num_stages is 5; .* such as 4 or 6"),
        ("dualpipe", {"num_stages": 4, "num_microbatches": 9}, "num_microbatches is 9; .* such as 8 or 10"),
        ("dualpipe", {"num_stages": 4, "num_microbatches": 6}, "6 microbatches for 4 ranks; expected at least 2 p = 8"),
        ("dualpipe_v", {"num_stages": 8, "num_microbatches": 7}, "7 microbatches for 8 stages; .* at least as many, 8"),
        ("dualpipe_v", {"num_stages": 7, "num_microbatches": 8}, "num_stages is 7; .* such as 6 or 8"),
        ("zb_v", {"num_stages": 3, "num_microbatches": 8}, "num_stages is 3; .* such as 2 or 4"),
        ("v_half", {"num_stages": 8, "num_microbatches": 8, "num_chunks": 4}, "num_chunks is 4; this schedule has 2"),
        (
            "interleaved_zb",
            {"num_stages": 8, "num_microbatches": 3, "num_chunks": 2},
            "3 microbatches for 4 ranks; expected at least 4, or num_chunks=1",
        ),
        (
            "interleaved_zb",
            {"num_stages": 8, "num_microbatches": 18, "num_chunks": 2},
            "num_microbatches 18 makes no 4 equal rounds over 4 ranks; take 16 or 20",
        ),
        ("interleaved", {"num_stages": 8, "num_microbatches": 9, "num_chunks": 2}, "take 8 or 12"),
        (
            "fbd",
            {"num_stages": 2, "num_microbatches": 4, "activations": "shipp"},
            "ship, recompute; did you mean 'ship'",
        ),
        (
            "fbd",
            {"num_stages": 2, "num_microbatches": 4, "activation": "ship"},
            "unknown option 'activation'; .*'activations'",
        ),
        ("zb_v", {"num_stages": 4, "num_microbatches": 4, "limit": 3}, "zb_v: unknown option 'limit'; known: none"),
        ("zb_h1", {"num_stages": 2, "num_microbatches": 1 << 18}, "at most"),
    ],
)
def test_refusals_name_what_would_work(name, size, says):
    with pytest.raises(ScheduleError, match=says):
        schedule(name, **size)


@pytest.mark.parametrize("p", [2, 3, 4, 6])
def test_named_rounds_do_work(p):
    """The numbers that the refusal of interleaved_zb names are the nearest ones that it takes."""
    for m in range(p, 6 * p):
        try:
            schedule("interleaved_zb", num_stages=2 * p, num_microbatches=m, num_chunks=2)
        except ScheduleError as err:
            low, high = (int(n) for n in str(err).split("take ")[1].split(" or "))
            assert low < m < high
            for near in (low, high):
                schedule("interleaved_zb", num_stages=2 * p, num_microbatches=near, num_chunks=2)


# ------------------------------------------------------------------------------------------------------------- size
@pytest.mark.parametrize("name", schedules())
def test_large_ones_are_made_quickly(name):
    size = sizes(name, 16, 256)
    schedule(name, **sizes(name, 2, 4))
    began = time.process_time()
    made = schedule(name, **size)
    assert time.process_time() - began < 1.5  # a few times what it takes: other work may run beside
    assert len(made) == len(codes.kind(made.codes))


def test_group_sizes_and_warm_ups_that_are_taken_can_run():
    taken = refused = 0
    for p in range(1, 5):
        for v, m, g, extra in itertools.product((2, 3), range(p, 3 * p + 1), (None, p, p + 1, 2 * p, 3 * p), (0, 1, 3)):
            sizes = {"num_stages": p * v, "num_microbatches": m, "num_chunks": v}
            try:
                sched = schedule("interleaved", **sizes, group_size=g, extra_warm_up=extra)
            except ScheduleError:
                refused += 1
                continue
            sched.validate()
            taken += 1
    assert taken > 200 and refused > 100
    with pytest.raises(ScheduleError, match=r"would deadlock.* group_size of at least 5"):
        schedule("interleaved", num_stages=8, num_microbatches=8, num_chunks=2, extra_warm_up=1)
    with pytest.raises(ScheduleError, match="take 12 or 16 microbatches"):
        schedule("interleaved", num_stages=4, num_microbatches=14, num_chunks=2, group_size=4, extra_warm_up=1)
    with pytest.raises(ScheduleError, match="extra_warm_up is -1"):
        schedule("1f1b", num_stages=4, num_microbatches=8, extra_warm_up=-1)


@pytest.mark.parametrize("extra", [0, 1, 2])
def test_extra_warm_up_hides_the_latency_of_1f1b_and_holds_more(extra):
    sched = schedule("1f1b", num_stages=4, num_microbatches=32, extra_warm_up=extra).validate()
    assert peak_activation(sched).tolist() == [min(32, (3 - r) * (1 + extra) + 1) for r in range(4)]
    makespan = [
        bubbles(schedule("1f1b", num_stages=4, num_microbatches=32, extra_warm_up=e), costs(p2p_s=0.9))[0]
        for e in (0, extra)
    ]
    assert makespan[1] < makespan[0] if extra else makespan[1] == makespan[0]
