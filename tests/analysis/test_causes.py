"""Causes: an injected fault of each kind is found, named and explained; two culprits, links and data beside one another."""

from __future__ import annotations

import dataclasses
import re
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

import mappnb
from mappnb import testing as t
from mappnb.analysis import (
    _straggler_find,
    _straggler_layers,
    _straggler_skew,
    _straggler_telemetry,
    _straggler_tests,
    causes,
    find_stragglers,
    stragglers,
)
from mappnb.analysis._straggler_tests import Spell
from mappnb.layout import Layout

LAYOUT = Layout(tp=2, pp=4, dp=4)


def run_with(path, faults, *, layout=LAYOUT, num_steps=12, seed=4, **options):
    options = {"num_microbatches": 4, "ranks_per_host": 4} | options
    t.generate_run(path / "run", layout=layout, num_steps=num_steps, faults=faults, seed=seed, **options)
    return mappnb.attach(path / "run")


def culprits(found):
    rows = found[found["verdict"] == "culprit"]
    return sorted(zip(rows["subject_kind"], rows["subject"], rows["cause"], strict=True))


def evidence(found, subject):
    return str(found[found["subject"] == subject].iloc[0]["evidence"])


def test_throttling_is_confirmed_by_telemetry(tmp_path):
    found = find_stragglers(run_with(tmp_path, [t.SlowRank(rank=13, factor=1.5, throttle=True, first_step=5)]))
    assert culprits(found) == [("rank", "13", "hardware")]
    said = evidence(found, "13")
    assert re.search(
        r"SM clock 13\d\d MHz against 19\d\d; throttled by software thermal slowdown; \d+ °C against 5\d", said
    )
    assert found.iloc[0]["first_step"] == 5 and "one factor" in evidence(found, "13")


def test_one_layer(tmp_path):
    found = find_stragglers(run_with(tmp_path, [t.SlowLayer(rank=9, layer=3, factor=2.5)], detail="layers"))
    assert culprits(found) == [("rank", "9", "layer")] and "layer 3 takes 2.5" in evidence(found, "9")


def test_all_layers_alike_is_hardware(tmp_path):
    found = find_stragglers(run_with(tmp_path, [t.SlowRank(rank=9, factor=1.5)], detail="layers"))
    assert culprits(found) == [("rank", "9", "hardware")] and "no single layer" in evidence(found, "9")


def test_tokens_of_experts(tmp_path):
    layout = dataclasses.replace(Layout(pp=2, dp=8), ep=4)
    found = find_stragglers(run_with(tmp_path, [t.MoeImbalance(ep_rank=2, factor=1.6)], layout=layout))
    wanted = [r for r in range(16) if layout.coords(r)["ep"] == 2]
    assert culprits(found) == sorted(("rank", str(r), "moe_load") for r in wanted)
    assert "its experts got 1.39 times the mean" in evidence(found, str(wanted[0]))  # 1.6 of a mean of 1.15


def test_checkpoint(tmp_path):
    found = find_stragglers(run_with(tmp_path, [t.CheckpointStall(rank=7, extra_s=0.3)], checkpoint_every=3))
    assert culprits(found) == [("rank", "7", "checkpoint")]
    assert found.iloc[0]["effect_s"] == pytest.approx(0.3, rel=0.05)


def test_run_queue(tmp_path):
    found = find_stragglers(run_with(tmp_path, [t.HostGaps(rank=7, length_s=0.05, gap="run_queue")]))
    assert culprits(found) == [("rank", "7", "host")] and "in the run queue against" in evidence(found, "7")


def test_link_between_hosts(tmp_path):
    source = LAYOUT.rank(pp=1, dp=2)
    target = LAYOUT.rank(pp=2, dp=2)
    found = find_stragglers(
        run_with(tmp_path, [t.SlowLink(source=source, destination=target, extra_s=0.02, first_step=4)])
    )
    assert culprits(found) == [("link", f"{source}->{target}", "link")]
    assert found.iloc[0]["first_step"] == 4
    assert 0.25 * 4 * 0.02 < found.iloc[0]["effect_s"] < 1.1 * 4 * 0.02  # part of it passes while the receiver computes


def test_network_card(tmp_path):
    found = find_stragglers(run_with(tmp_path, [t.SlowNic(host=3, factor=12)], layout=Layout(tp=2, pp=4, dp=8)))
    assert culprits(found) == [("host", "host3", "link")]


def test_data_skew_with_recorded_lengths(tmp_path):
    found = find_stragglers(
        run_with(tmp_path, [t.DataSkew(packed=False)], layout=Layout(pp=2, dp=8), num_microbatches=6)
    )
    assert culprits(found) == [("job", "job", "data_skew")]
    share = int(re.search(r"lengths explain (\d+)%", evidence(found, "job"))[1])
    assert 85 <= share <= 100


def test_slow_rank_beside_data_skew(tmp_path):
    faults = [t.DataSkew(), t.SlowRank(rank=5, factor=1.6)]
    found = find_stragglers(run_with(tmp_path, faults, layout=Layout(pp=2, dp=8), num_microbatches=6, num_steps=20))
    assert ("rank", "5", "hardware") in culprits(found) and {x[1] for x in culprits(found)} <= {"5", "job"}


def test_two_culprits_and_their_victims(tmp_path):
    faults = [t.SlowRank(rank=2, factor=1.6), t.HostGaps(rank=29, length_s=0.08)]
    found = find_stragglers(run_with(tmp_path, faults))
    assert culprits(found) == [("rank", "2", "hardware"), ("rank", "29", "host")]
    victims = found[found["verdict"] == "victim"]
    replica = {LAYOUT.coords(r)["dp"] for r in (2, 29)}
    assert len(victims) and {LAYOUT.coords(int(r))["dp"] for r in victims["subject"]} <= replica
    assert (victims["effect_s"].abs() < 0.02).all() and (victims["cause"] == "").all()


def test_what_comes_and_goes(tmp_path):
    run = run_with(tmp_path, [t.IntermittentRank(rank=11, factor=1.5, probability=0.25)], num_steps=30)
    found = find_stragglers(run)
    assert culprits(found) == [("rank", "11", "hardware")]
    assert found.iloc[0]["effect_s"] == pytest.approx(0.5 * 4 * 0.06, rel=0.15)


def test_rank_without_peers_is_held_against_its_own_past(tmp_path):
    found = find_stragglers(
        run_with(tmp_path, [t.SlowRank(rank=1, factor=1.4, first_step=8)], layout=Layout(pp=4), num_steps=20)
    )
    assert culprits(found) == [("rank", "1", "hardware")] and "its own usual one" in evidence(found, "1")
    assert any("no peer" in n for n in found.attrs["notes"])


def test_stage_of_one_rank_from_the_first_step(tmp_path):
    found = find_stragglers(run_with(tmp_path, [t.SlowRank(rank=1, factor=1.4)], layout=Layout(pp=4), num_steps=20))
    assert culprits(found) == [("stage", "1", "stage_imbalance")] and "would look the same" in evidence(found, "1")


def test_without_calls_ranks_of_a_tensor_group_are_undecided(tmp_path):
    events = run_with(tmp_path, [t.SlowRank(rank=6, factor=1.5)]).sel()
    moving = np.isin(events.category.values, ["collective", "p2p", "wait"])
    found = find_stragglers(events.isel(event=np.flatnonzero(~moving)))
    assert not culprits(found) and set(found[found["verdict"] == "undecided"]["subject"]) == {"6", "7"}
    assert any("durations alone" in n for n in found.attrs["notes"])


def test_clocks_that_differ_blame_nobody(tmp_path):
    clocks = t.Clocks(offset_s=0.05, drift_ppm=50)
    found = find_stragglers(run_with(tmp_path, [t.SlowRank(rank=6, factor=1.5)], clocks=clocks))
    assert culprits(found) == [("rank", "6", "hardware")]


def test_missing_ranks_and_unequal_steps(tmp_path):
    events = run_with(tmp_path, [t.SlowRank(rank=6, factor=1.5)]).sel()
    rank, step = events["rank"].values, events["step"].values
    kept = (rank % 5 != 2) & (step <= 6 + rank % 4)
    found = find_stragglers(events.isel(event=np.flatnonzero(kept)))
    assert culprits(found) == [("rank", "6", "hardware")] and found.iloc[0]["last_step"] == 8


def test_phases():
    assert causes.one_factor({"forward": 2.5, "backward": 2.26}) and causes.one_factor(
        {"forward": 1.1, "backward": 1.09}
    )
    assert not causes.one_factor({"forward": 2.0, "backward": 1.0})
    assert causes.only_phase({"forward": 4.0, "backward": 0.95}) == "forward"
    assert causes.only_phase({"forward": 2.0, "backward": 1.6}) is None


def test_every_cause_is_a_word_of_the_list(tmp_path):
    found = find_stragglers(run_with(tmp_path, [t.SlowRank(rank=1, factor=2.0), t.HostGaps(rank=9, length_s=0.05)]))
    assert set(found["cause"]) <= {*causes.CAUSES, ""}


def test_the_page_states_the_thresholds_as_they_are():
    page = (Path(__file__).parents[2] / "docs" / "stragglers.md").read_text()
    modules = (
        stragglers,
        causes,
        _straggler_find,
        _straggler_layers,
        _straggler_skew,
        _straggler_telemetry,
        _straggler_tests,
    )
    for name, value in re.findall(r"\| `([A-Z_]+)`[^|]*\| ([\d./]+)", page):
        here = [getattr(m, name) for m in modules if hasattr(m, name)]
        assert here and here[0] == pytest.approx(float(Fraction(value))), name
    for name, value in re.findall(r"\| `([a-z_]+)` \| ([\d.]+) \|", page):
        assert getattr(stragglers, name.upper()) == float(value), name


def test_spell_is_a_value():
    spell = Spell(0, 1, np.arange(2), 0.1, 5.0, 0.001, True)
    with pytest.raises(dataclasses.FrozenInstanceError):
        spell.first = 3
