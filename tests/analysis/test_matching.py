"""Matching by number and by order: what is missing, extra, cut off or at odds is found, and times play no part."""

from __future__ import annotations

import numpy as np
import pytest
import xarray as xr
from analysis.alignment_runs import DATA, dataset, kineto_param_events
from hypothesis import given, settings
from hypothesis import strategies as st

from mappnb.analysis import match, match_report
from mappnb.analysis._match_edit import align_sequences, common_elements
from mappnb.errors import MappnbError
from mappnb.layout import Layout

OPS = ("all_reduce", "all_gather", "reduce_scatter")


def group_events(sequences, *, seq=None, start=None, step=None, group=7):
    """One collective event per token of each rank's sequence: token -> (op, bytes)."""
    rank = np.concatenate([np.full(len(s), r) for r, s in enumerate(sequences)])
    token = np.concatenate([np.asarray(s, np.int64) for s in sequences])
    order = np.concatenate([np.arange(len(s)) for s in sequences])
    begin = order * 1000 + rank * 17 if start is None else start
    return dataset(
        rank=rank, category="collective", op=np.array(OPS, object)[token % 3], bytes=(token // 3 + 1) * 8, group=group,
        seq=-1 if seq is None else np.concatenate(seq), start_ns=begin, raw_start_ns=begin, duration_ns=10,
        step=-1 if step is None else np.concatenate(step),
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------------- edit distance
def longest_common(a, b):
    """Length of the longest common subsequence by the quadratic table."""
    table = np.zeros((len(a) + 1, len(b) + 1), int)
    for i, x in enumerate(a):
        for j, y in enumerate(b):
            table[i + 1, j + 1] = table[i, j] + 1 if x == y else max(table[i, j + 1], table[i + 1, j])
    return int(table[-1, -1])


tokens = st.lists(st.integers(0, 3), max_size=14)


@settings(deadline=None, max_examples=200)
@given(tokens, tokens)
def test_common_elements_are_as_many_as_can_be(a, b):
    pairs = common_elements(np.array(a, np.int64), np.array(b, np.int64))
    assert len(pairs) == longest_common(a, b)
    assert all(a[i] == b[j] for i, j in pairs.tolist())
    assert (np.diff(pairs, axis=0) > 0).all()


@settings(deadline=None, max_examples=100)
@given(st.lists(tokens, min_size=1, max_size=4))
def test_columns_rise_and_hold_equal_elements(sequences):
    columns = align_sequences([np.array(s, np.int64) for s in sequences])
    seen = {}
    for s, c in zip(sequences, columns, strict=True):
        assert (np.diff(c) > 0).all()
        for token, column in zip(s, c.tolist(), strict=True):
            assert seen.setdefault(column, token) == token
    assert sorted(seen) == list(range(len(seen)))


# --------------------------------------------------------------------------------------------------------- by order
def test_order_without_numbers():
    tokens = np.random.default_rng(0).integers(0, 9, 50)
    calls = match(group_events([tokens] * 4))
    assert calls.sizes["call"] == 50 and bool(calls.complete.all()) and calls.seq.values.tolist() == list(range(50))
    assert calls.attrs["unmatched_fraction"] == 0 and calls.attrs["groups_by_order"] == 1


def test_missing_extra_and_truncated_are_told():
    tokens = np.random.default_rng(1).integers(0, 30, 60)
    sequences = [tokens, np.delete(tokens, 20), np.insert(tokens, 30, 99), tokens[:50], tokens[5:]]
    table = match_report(group_events(sequences))
    row = table.iloc[0]
    assert (row.identity, row.num_calls, row.at_odds) == ("order", 61, 0)
    assert (row.missing, row.extra, row.truncated_start, row.truncated_end) == (1, 1, 5, 10)
    assert row.ranks == [1, 2, 3, 4]
    for said in ("rank 1 misses 1", "rank 2 has 1", "rank 4 begins 5 calls late", "rank 3 ends 10 calls early"):
        assert said in row.finding
    calls = match(group_events(sequences))
    whole = (calls["rank"].values >= 0).sum(axis=1)
    assert (whole == 5).sum() == 60 - 1 - 10 - 5 and (whole == 1).sum() == 1


def test_times_play_no_part():
    rng = np.random.default_rng(2)
    tokens = rng.integers(0, 9, 40)
    plain = group_events([tokens, tokens, tokens[3:]])
    shifted = plain.copy(deep=True)
    shifted["start_ns"] = shifted.start_ns + shifted["rank"].astype(np.int64) * 10**12
    shifted["raw_start_ns"] = shifted.start_ns
    assert match(plain)["rank"].equals(match(shifted)["rank"])
    assert match(plain).seq.equals(match(shifted).seq)


def test_numbers_that_disagree_give_way_to_order():
    """A counter of the whole process instead of the group (pytorch#191990): numbers that no two ranks share."""
    tokens = np.random.default_rng(3).integers(0, 9, 30)
    seq = [np.arange(30) * (r + 2) + 1000 * r for r in range(3)]
    calls = match(group_events([tokens] * 3, seq=seq))
    assert calls.attrs["groups_by_order"] == 1 and bool(calls.complete.all())
    by_number = match(group_events([tokens] * 3, seq=seq), identity="seq")
    assert by_number.attrs["unmatched_fraction"] == 1.0
    assert match_report(group_events([tokens] * 3, seq=seq), identity="seq").iloc[0].num_calls == 90


def test_one_rank_at_odds_is_named():
    tokens = np.random.default_rng(4).integers(0, 9, 30)
    wrong = tokens.copy()
    wrong[12] += 1
    seq = [np.arange(30)] * 4
    events = group_events([tokens, tokens, wrong, tokens], seq=seq)
    calls = match(events)
    assert np.flatnonzero(~calls.complete.values).tolist() == [12]
    assert calls.attrs["unmatched_fraction"] == pytest.approx(1 / 30)
    row = match_report(events).iloc[0]
    assert (row.identity, row.at_odds, row.first_at_odds, row.ranks) == ("seq", 1, 12, [2])
    assert "rank 2 against the others" in row.finding


def test_steps_date_a_periodic_order():
    """Nine of ten equal steps: without their numbers nobody could say which one is missing."""
    body = np.tile(np.arange(6), 10)
    step = np.repeat(np.arange(10), 6)
    keep = step != 4
    calls = match(group_events([body, body[keep]], step=[step, step[keep]]))
    alone = (calls["rank"].values >= 0).sum(axis=1) == 1
    assert set(calls.step.values[alone].tolist()) == {4}


def test_p2p_is_first_in_first_out():
    n = 20
    send = {"rank": np.zeros(n, int), "op": np.full(n, "send", object), "peer": np.ones(n, int)}
    recv = {"rank": np.ones(n - 2, int), "op": np.full(n - 2, "recv", object), "peer": np.zeros(n - 2, int)}
    both = {k: np.concatenate([send[k], recv[k]]) for k in send}
    begin = np.concatenate([np.arange(n) * 100, 10**9 + np.arange(n - 2) * 100])
    size = np.concatenate([np.arange(n), np.arange(n - 2)]) % 5 + 1
    events = dataset(**both, category="p2p", group=3, start_ns=begin, raw_start_ns=begin, duration_ns=5, bytes=size)
    calls = match(events)
    assert calls.sizes["call"] == n and int(calls.complete.sum()) == n - 2
    assert match_report(events).iloc[0].truncated_end == 2
    start = calls.start_ns.values[calls.complete.values]
    assert (start[:, 1] - start[:, 0] == 10**9).all()


def test_recorded_runs_match_as_before(make):
    run = make(layout=Layout(pp=2, dp=2), num_microbatches=4, num_steps=3)
    calls = match(run)
    assert bool(calls.complete.all()) and calls.attrs["groups_by_order"] == 0
    assert calls.attrs["unmatched_fraction"] == 0
    ordered = match(run, identity="order")
    assert bool(ordered.complete.all()) and ordered["rank"].equals(calls["rank"])
    assert (match_report(run).finding == "").all()


def test_bad_input(make):
    empty = match(dataset(rank=np.empty(0, int)))
    assert empty.sizes["call"] == 0 and empty.attrs["unmatched_fraction"] == 0.0
    assert len(match_report(dataset(rank=np.empty(0, int)))) == 0
    with pytest.raises(MappnbError, match=r"identity is 'time'; expected one of auto, seq, order"):
        match(dataset(rank=np.empty(0, int)), identity="time")
    lone = match(group_events([np.arange(5)]))
    assert lone.attrs["unmatched_fraction"] == 1.0


@pytest.mark.skipif(not (DATA / "param").exists(), reason="needs ../shared/data/param")
def test_nccl_kernels_of_a_real_job_match_by_order():
    events = kineto_param_events()
    calls = match(events)
    assert calls.sizes == {"call": 8, "member": 8} and bool(calls.complete.all())
    skew = np.ptp(calls.end_ns.values, axis=1) / 1000
    assert skew.max() <= 7
    last = np.bincount(calls["rank"].values[np.arange(8), calls.start_ns.values.argmax(axis=1)], minlength=8)
    assert last.tolist() == [0, 0, 0, 0, 1, 2, 0, 5]


def test_complete_fraction_per_group_and_in_all():
    tokens = np.random.default_rng(6).integers(0, 9, 20)
    torn = np.delete(tokens, 7)
    a = group_events([tokens] * 3, seq=[np.arange(20)] * 3, group=1)
    b = group_events([tokens, torn], seq=[np.arange(20), np.delete(np.arange(20), 7)], group=2)
    events = xr.concat([a, b], "event", data_vars="all").assign_attrs(
        groups='{"1": {"ranks": [0, 1, 2]}, "2": {"ranks": [0, 1]}}'
    )
    table = match_report(events)
    found = dict(zip(table.group, table.complete_fraction, strict=True))
    assert found == {1: 1.0, 2: 19 / 20}
    assert table.attrs == {
        "complete_fraction": 39 / 40, "unmatched_fraction": pytest.approx(1 / 99), "num_calls": 40, "num_complete": 39
    }  # fmt: skip
    assert table.attrs["complete_fraction"] == float(match(events).complete.mean())
    known = events.assign_attrs(groups='{"1": {"ranks": [0, 1, 2, 3]}, "2": {"ranks": [0, 1]}}')  # rank 3 left nothing
    assert match_report(known).set_index("group").complete_fraction.to_dict() == {1: 0.0, 2: 19 / 20}
    assert np.isnan(match_report(dataset(rank=np.empty(0, int))).attrs["complete_fraction"])
