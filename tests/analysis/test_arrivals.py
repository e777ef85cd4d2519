"""Who came last: closed forms, brute force, traces without numbers, and a real job."""

from __future__ import annotations

import time

import numpy as np
import pytest
from analysis.alignment_runs import DATA, collectives, dataset, kineto_param_events
from hypothesis import given, settings
from hypothesis import strategies as st

import mappnb
from mappnb import analysis
from mappnb.analysis import breakdown, last_arrivals
from mappnb.analysis.matching import last_arrival_ns
from mappnb.layout import Layout

NAMES = ("rank", "seq", "start_ns")


def calls(rows, *, group=7, **more):
    """Collectives, one (rank, seq, start) each."""
    columns = {k: np.array([r[i] for r in rows], np.int64) for i, k in enumerate(NAMES)}
    return dataset(
        **{
            "category": "collective", "op": "all_reduce", "group": group, "bytes": 8, "duration_ns": 10, "step": 2,
            "raw_start_ns": columns["start_ns"], **columns, **more,
        }
    )  # fmt: skip


def test_closed_form():
    events = calls([(0, 5, 100), (3, 5, 900), (1, 5, 140), (2, 5, 650), (0, 6, 2000), (1, 6, 1990), (2, 6, 2000)])
    found = last_arrivals(events)
    assert found.last_rank.values.tolist() == [3, 0] and found.second_rank.values.tolist() == [2, 2]  # ties: the lowest
    assert found.margin_ns.values.tolist() == [250, 0] and found.spread_ns.values.tolist() == [800, 10]
    assert found.last_ns.values.tolist() == [900, 2000] and found.num_members.values.tolist() == [4, 3]
    assert found.group.values.tolist() == [7, 7] and found.seq.values.tolist() == [5, 6]
    assert found.op.values.tolist() == ["all_reduce"] * 2 and found.step.values.tolist() == [2, 2]
    assert found.bytes.values.tolist() == [8, 8] and found.margin_ns.attrs["units"] == "ns"
    assert last_arrivals(events, step=1).sizes["call"] == 0
    assert events.mapp.last_arrivals(step=2).identical(last_arrivals(events, step=2))


def test_messages_and_calls_of_one_rank_are_left_out():
    events = calls([(0, 0, 5), (0, 1, 10), (1, 1, 12), (1, 1, 99)])  # rank 1 twice: its first counts
    found = last_arrivals(events, identity="seq")
    assert found.seq.values.tolist() == [1] and int(found.margin_ns[0]) == 2 and not bool(found.complete[0])
    p2p = events.assign(category=("event", np.full(4, "p2p", object)), peer=("event", np.array([1, 1, 0, 0], np.int32)))
    assert last_arrivals(p2p).sizes["call"] == 0
    assert last_arrivals(dataset(rank=np.empty(0, int))).sizes["call"] == 0


@settings(deadline=None, max_examples=60)
@given(
    st.dictionaries(st.tuples(st.integers(0, 4), st.integers(0, 5)), st.integers(-50, 50), max_size=25),
    st.integers(0, 9),
)
def test_equals_brute_force(starts, seed):
    rows = [(rank, seq, start) for (rank, seq), start in starts.items()]
    np.random.default_rng(seed).shuffle(rows)
    found = last_arrivals(calls(rows), identity="seq")
    want = []
    for seq in sorted({s for _, s in starts}):
        came = sorted(((-t, r) for (r, s), t in starts.items() if s == seq))
        if len(came) > 1:
            (last, who), (next_, other) = came[:2]
            want.append((seq, who, other, next_ - last, came[-1][0] - last, len(came)))
    names = ("seq", "last_rank", "second_rank", "margin_ns", "spread_ns", "num_members")
    assert list(zip(*(found[n].values.tolist() for n in names), strict=True)) == want


def test_a_slow_rank_comes_last_by_what_it_is_slow(make):
    found = last_arrivals(make(layout=Layout(dp=4), slow={2: 1.5}, num_microbatches=4, num_steps=3))
    assert set(found.last_rank.values.tolist()) == {2} and bool(found.complete.all())
    np.testing.assert_array_equal(found.margin_ns, 0.5 * 4 * 3 * 10_000_000)
    np.testing.assert_array_equal(found.spread_ns, found.margin_ns)


@pytest.mark.skipif(not (DATA / "param").exists(), reason="needs ../shared/data/param")
def test_rank_7_comes_last_in_five_of_eight_calls_of_a_real_job():
    found = last_arrivals(kineto_param_events())  # NCCL kernels carry no numbers
    assert np.bincount(found.last_rank.values, minlength=8).tolist() == [0, 0, 0, 0, 1, 2, 0, 5]
    assert bool(found.complete.all()) and (found.margin_ns > 0).all() and (found.margin_ns <= found.spread_ns).all()


@pytest.mark.slow
def test_a_million_members_in_a_second():
    events = collectives(np.random.default_rng(0), num_ranks=64, num_calls=15_625)[0]
    begin = time.process_time()
    assert last_arrivals(events).sizes["call"] == 15_625
    assert time.process_time() - begin <= 1.5  # 0.5 s on a quiet machine


# ------------------------------------------------------------------------------------------------------ imported runs
def test_arrivals_of_imported_events_need_no_numbers():
    rows = [(rank, -1, 1000 * k + 100 * rank) for k in range(4) for rank in range(3)]
    plain = calls(rows)
    imported = plain.assign_attrs(imported="kineto")
    last = plain.start_ns.values // 1000 * 1000 + 200
    assert (last_arrival_ns(imported) == last).all()
    assert (last_arrival_ns(plain) == plain.start_ns.values).all()
    assert (last_arrival_ns(plain, identity="auto") == last).all()
    wait = breakdown(imported.assign(duration_ns=("event", np.full(12, 300)))).seconds.sel(category="wait_peer")
    np.testing.assert_allclose(wait.isel(step=0) * 1e9, [4 * 200, 4 * 100, 0])


def test_waits_of_imported_events_wait_for_their_own_ranks_call():
    """By order, equal numbers of two ranks are different calls."""
    events = calls([(0, 0, 0), (0, 1, 1000), (1, 7, 50), (1, 0, 1500), (0, 0, 10), (0, 1, 1010), (1, 0, 1510)])
    what = np.array(["collective"] * 4 + ["wait"] * 3, object)
    size = np.array([1, 2, 1, 2, 1, 2, 2])
    events = events.assign(category=("event", what), bytes=("event", size)).assign_attrs(imported="kineto")
    assert last_arrival_ns(events, identity="order").tolist() == [50, 1500, 50, 1500, 50, 1500, 1500]


def test_an_imported_run_says_so(make, tmp_path):
    run = make(layout=Layout(dp=2), num_steps=2)
    assert "imported" not in run.events.attrs
    mappnb.import_trace(analysis.export(run, tmp_path / "t.json"), tmp_path / "again")
    again = mappnb.attach(tmp_path / "again")
    assert again.events.attrs["imported"] == again.sel(step=0).attrs["imported"] == "chrome"
