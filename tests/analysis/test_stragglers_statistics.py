"""The statistics under find_stragglers: levels against brute force, error rates against simulation, spells against what was put in."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mappnb.analysis import _straggler_tests
from mappnb.analysis._straggler_base import USUAL, Table, baseline, own_baseline
from mappnb.analysis._straggler_find import Settings, find_ranks
from mappnb.analysis._straggler_tests import Noise, chernoff, noise_of, rejected, spells, tail


def table(compute, role=None):
    steps, ranks = compute.shape
    role = np.zeros(ranks, np.int64) if role is None else role
    return Table(
        np.arange(steps), np.arange(ranks), role, np.full(ranks, "", object), {"compute": compute}, {},
        np.isfinite(compute), np.full(steps, 1.5 * float(np.nanmedian(compute))),
    )  # fmt: skip


def no_calls(compute):
    zero = np.zeros(compute.shape)
    return {"imposed_s": zero, "wait_s": zero, "transfer_s": zero, "calls": zero}


@given(
    values=st.lists(
        st.lists(st.sampled_from([1.0, 1.5, 2.0, 3.0, 7.0, math.nan]), min_size=6, max_size=6), min_size=1, max_size=4
    ),
    quantile=st.sampled_from([0.25, 0.5]),
)
def test_baseline_is_the_quantile_of_the_others(values, quantile):
    seconds, role = np.array(values), np.array([0, 0, 0, 0, 1, 1])
    base, peers = baseline(seconds, role, relative=False, quantile=quantile)
    for s in range(len(seconds)):
        for r in range(6):
            others = [seconds[s, q] for q in range(6) if q != r and role[q] == role[r] and not np.isnan(seconds[s, q])]
            assert peers[s, r] == len(others)
            if others:
                assert base[s, r] == pytest.approx(np.quantile(others, quantile))
            else:
                assert np.isnan(base[s, r])


def test_baseline_is_unbiased_and_stands_three_slow_in_four():
    rng = np.random.default_rng(0)
    seconds = np.exp(0.02 * rng.standard_normal((4000, 8)))
    base, _ = baseline(seconds, np.zeros(8, np.int64))
    assert float((seconds / base - 1).mean()) == pytest.approx(0, abs=0.003)
    seconds[:, :4] *= 1.5  # half of them are slow
    ratio = (seconds / baseline(seconds, np.zeros(8, np.int64))[0]).mean(0)
    assert ratio[:4] == pytest.approx(1.5, rel=0.05) and ratio[4:] == pytest.approx(1.0, rel=0.05)


def test_hidden_cells_say_nothing_and_levels_are_kept():
    seconds = np.array([[1.0, 1.0, 4.0, 1.0, 2.0, 2.0]])
    role, hidden = np.array([0, 0, 0, 0, 1, 1]), np.zeros((1, 6), bool)
    known = {}
    first = baseline(seconds, role, hidden, relative=False, quantile=0.5, known=known, kind="a")[0]
    assert first[0, 0] == 1.0 and set(known) == {("a", 0), ("a", 1)}
    hidden[0, [0, 1]] = True
    second = baseline(seconds, role, hidden, relative=False, quantile=0.5, known=known, kind="a")[0]
    assert second[0, 3] == 4.0 and second[0, 4] == first[0, 4]


@given(st.lists(st.sampled_from([-0.1, 0.0, 0.02, 0.04, 0.05, 0.3, math.nan, math.inf]), min_size=1, max_size=9))
def test_the_best_run_has_the_largest_sum(values):
    """Against all runs; the one column as many columns are."""
    series, least = np.array(values), 0.04
    first, last = _straggler_tests._best_run(series, least)
    many = _straggler_tests._best_runs(np.stack([series, series[::-1]], 1), least)
    assert (first, last) == (many[0][0], many[1][0])
    gain = np.where(np.isfinite(series), np.clip(np.nan_to_num(series), -0.12, 0.12) - 0.02, 0)
    best = max(gain[a : b + 1].sum() for a in range(len(gain)) for b in range(a, len(gain)))
    if best <= 1e-12:
        assert last == -1 or gain[first : last + 1].sum() == pytest.approx(best, abs=1e-12)
    else:
        assert gain[first : last + 1].sum() == pytest.approx(best)


def test_the_usual_level_leaves_out_steps_without_the_rank():
    rng = np.random.default_rng(3)
    seconds = np.exp(0.02 * rng.standard_normal((41, 6)))
    seconds[3:9, 1] = seconds[40, 4] = math.nan
    jump = np.abs(np.diff(seconds, axis=0))
    sigma = np.nanmedian(jump, axis=0) * 1.4826 / math.sqrt(2)
    low = np.nanquantile(seconds, USUAL, axis=0) + 0.8416212335729143 * sigma
    expected = np.minimum(low, np.nanmedian(seconds, axis=0))
    assert own_baseline(seconds, np.ones(6, bool), relative=False)[0] == pytest.approx(expected, rel=1e-14)


def test_own_baseline_takes_out_what_all_did():
    rng = np.random.default_rng(1)
    usual, together = np.array([1.0, 2.0, 3.0]), 1 + 0.2 * rng.random(40)
    seconds = usual * together[:, None]
    seconds[25:, 1] *= 1.3
    ratio = seconds / own_baseline(seconds, np.ones(3, bool))
    assert ratio[:25, 1] == pytest.approx(1, abs=0.1) and ratio[25:, 1] / ratio[25:, 0] == pytest.approx(1.3, rel=1e-6)
    assert np.ptp(ratio[:, 0]) < 1e-6


@pytest.mark.parametrize(
    ("t", "df", "p"), [(1.812, 10, 0.05), (2.764, 10, 0.01), (4.587, 10, 5e-4), (2.132, 4, 0.05), (7.173, 4, 1e-3)]
)
def test_tail_is_students(t, df, p):
    assert 0.99 * p <= tail(t, df) <= 1.25 * p  # printed tables of Student's t; the approximation errs on the safe side


@given(number=st.integers(1, 30), chance=st.floats(0.01, 0.5), count=st.integers(0, 30))
def test_chernoff_is_above_the_binomial_tail(number, chance, count):
    exact = sum(math.comb(number, k) * chance**k * (1 - chance) ** (number - k) for k in range(count, number + 1))
    if count <= number:
        assert chernoff(count, number, chance) >= exact - 1e-12


def test_rejected_is_benjamini_hochberg():
    p = np.array([0.01, 0.04, 0.03, 0.005, 0.5])  # bounds at rate 0.05: 0.01, 0.02, 0.03, 0.04, 0.05
    assert rejected(p, 0.05).tolist() == [True, True, True, True, False]
    assert not rejected(np.array([0.2, 0.9]), 0.05).any() and rejected(np.empty(0), 0.05).shape == (0,)


@pytest.mark.parametrize(("first", "last", "size"), [(0, 39, 0.1), (10, 39, 0.1), (5, 12, 0.2), (38, 39, 1.0)])
def test_a_spell_is_found_where_it_is(first, last, size):
    rng = np.random.default_rng(2)
    excess = 0.005 * rng.standard_normal((40, 16))
    excess[first : last + 1, 7] += size
    found = spells(excess, noise_of(excess, np.zeros(16, np.int64)), least=0.03)
    good = {c: s for c, s in found.items() if s.p < 1e-3}
    assert set(good) == {7} and (good[7].first, good[7].last) == (first, last)
    assert good[7].level == pytest.approx(size, rel=0.1) and good[7].lasting


def test_what_comes_and_goes_is_found():
    rng = np.random.default_rng(3)
    excess = 0.005 * rng.standard_normal((40, 16))
    bad = [2, 9, 10, 17, 25, 31, 38]
    excess[bad, 4] += 0.3
    found = spells(excess, noise_of(excess, np.zeros(16, np.int64)), least=0.03)
    assert found[4].active.tolist() == bad and not found[4].lasting and found[4].p < 1e-6


def test_one_hiccup_is_nothing():
    rng = np.random.default_rng(4)
    excess = 0.005 * rng.standard_normal((40, 16))
    excess[20, 4] += 3.0
    found = spells(excess, noise_of(excess, np.zeros(16, np.int64)), least=0.03)
    assert not [s for s in found.values() if s.p < 0.01]


def test_noise_is_measured_beside_slow_ranks():
    rng = np.random.default_rng(5)
    excess = 0.01 * rng.standard_normal(64) + 0.02 * rng.standard_normal((60, 64))
    excess[:, :20] += 0.5  # a third of them is slow
    noise = noise_of(excess, np.zeros(64, np.int64))
    assert noise.spread == pytest.approx(0.0125, rel=0.4) and noise.step == pytest.approx(0.02, rel=0.15)
    assert 1.0 <= noise.slow < 1.6
    assert Noise(0.01, 10, 0.02, 1.0).z(0.05, 16) == pytest.approx(0.05 / math.hypot(0.01, 0.005))


SETTINGS = Settings(0.005, 0.03, 0.01, 0.05)


@pytest.mark.parametrize(
    ("ranks", "roles", "steps", "spread", "noise"),
    [(4, 1, 6, 0.01, 0.02), (4, 2, 20, 0.01, 0.05), (16, 2, 20, 0.005, 0.10), (64, 4, 10, 0.004, 0.01)],
)
def test_clean_tables_raise_no_alarm(ranks, roles, steps, spread, noise):
    rng, alarms = np.random.default_rng(6), 0
    for _ in range(60):
        compute = np.exp(spread * rng.standard_normal(ranks) + noise * rng.standard_normal((steps, ranks)))
        alarms += bool(find_ranks(table(compute, np.arange(ranks) % roles), no_calls(compute), SETTINGS)[0])
    assert alarms <= 2  # 0.3 are due at a rate of 0.005


@pytest.mark.parametrize(("factor", "within"), [(2.0, 2), (1.1, 5)])
def test_onset_is_seen_within_steps(factor, within):
    rng, late = np.random.default_rng(7), 0
    for _ in range(20):
        compute = np.exp(0.004 * rng.standard_normal(8) + 0.01 * rng.standard_normal((12 + within, 8)))
        compute[12:, 3] *= factor
        found = find_ranks(table(compute), no_calls(compute), SETTINGS)[0]
        late += [f.subject for f in found] != ["3"]
    assert late <= 1


def test_a_second_culprit_is_not_hidden_by_a_first_among_four():
    rng = np.random.default_rng(8)
    compute = np.exp(0.004 * rng.standard_normal(4) + 0.01 * rng.standard_normal((20, 4)))
    compute[:, 1] *= 2.0
    compute[:, 2] *= 1.2
    found = {f.subject: f.ratio for f in find_ranks(table(compute), no_calls(compute), SETTINGS)[0]}
    assert (
        set(found) == {"1", "2"}
        and found["1"] == pytest.approx(2.0, rel=0.05)
        and found["2"] == pytest.approx(1.2, rel=0.05)
    )
