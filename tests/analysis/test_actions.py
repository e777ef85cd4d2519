"""Actions: each fault gets its cure, its gain is what the run without the fault takes less, and nothing is priced that is not there."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import mappnb
from mappnb import Layout, analysis
from mappnb.analysis import actions, find_stragglers
from mappnb.analysis._action_words import cure_of
from mappnb.analysis.actions import ACTION_COLUMNS
from mappnb.errors import MappnbError
from mappnb.testing import DataSkew, HostGaps, Noise, SlowHost, SlowLink, SlowRank, SlowStage, generate_run

LAYOUT = Layout(tp=2, dp=4, pp=2)
DATA = Path(__file__).parents[3] / "shared" / "data" / "straggler_analysis"


def generated(path, *faults, layout=LAYOUT, steps=16, **options):
    truth = generate_run(
        path,
        layout=layout,
        num_steps=steps,
        num_microbatches=4,
        seed=2,
        ranks_per_host=4,
        faults=list(faults),
        **options,
    )
    return mappnb.attach(path), truth


@pytest.mark.parametrize(
    ("fault", "target", "share"),
    [
        (SlowRank(rank=9, factor=1.5), "host host2 (rank 9)", 0.1),
        (SlowHost(host=1, factor=1.4), "host host1", 0.1),
        (HostGaps(rank=5, length_s=0.1), "--manual-gc --manual-gc-interval", 0.1),
        (SlowLink(source=1, destination=9, extra_s=0.05), "host0 and host host2", 0.1),
        (SlowStage(stage=1, factor=1.5), "--decoder-last-pipeline-num-layers", None),
    ],
    ids=lambda x: getattr(x, "kind", None),
)
def test_a_fault_gets_its_cure_and_its_price(tmp_path, fault, target, share):
    run, truth = generated(tmp_path / "run", fault)
    told = actions(run)
    assert tuple(told.columns) == ACTION_COLUMNS and len(told) == 1
    first = told.iloc[0]
    assert target in first.target or target in first.action
    effect = float(np.mean(truth.faults[0].effect_s))
    assert first.gain_s > 0 and first.gain_fraction == pytest.approx(first.gain_s / truth.step_s.mean(), rel=0.02)
    if share is not None:  # what the run without the fault takes less, noise being the same
        assert first.gain_s == pytest.approx(effect, rel=share, abs=0.003)
    else:  # layers dealt anew do not vanish: two stages of 1.5 and 1 become 1.25 each
        assert first.gain_s < effect
    assert first.gain_gpu_hours == pytest.approx(first.gain_s * 16 * 16 / 3600, rel=0.1)
    assert first.confidence in ("high", "medium")


def test_the_largest_gain_comes_first_and_no_more_than_asked(tmp_path):
    run, _ = generated(tmp_path / "run", SlowRank(rank=9, factor=1.6), SlowRank(rank=2, factor=1.3))
    told = actions(run)
    assert told.gain_s.is_monotonic_decreasing and 1 <= len(told) <= 2
    one = actions(run, most=1)
    assert len(one) == 1 and one.subject[0] == told.subject[0]
    assert len(one.attrs["unpriced"]) == 1
    if len(told) == 2:
        assert told.attrs["together_s"] > told.gain_s[0]


def test_nothing_in_a_clean_run(tmp_path):
    run, _ = generated(tmp_path / "run")
    told = actions(run)
    assert not len(told) and told.attrs["unpriced"] == []
    assert 0 < told.attrs["least_effect_s"] < 0.1 * told.attrs["step_s"] and told.attrs["num_ranks"] == 16


def test_what_buys_nothing_is_said_and_not_shown(tmp_path):
    """Of two equally slow ranks in one step, neither alone buys anything."""
    faults = [SlowRank(rank=r, factor=1.5) for r in (0, 2, 4)]
    run, _ = generated(tmp_path / "run", *faults, noise=Noise.none())
    told = actions(run)
    seen = [u["finding"] for u in told.attrs["unpriced"]]
    assert len(told) + len(seen) >= 1
    for u in told.attrs["unpriced"]:
        assert "replay" in u["why"] or "undecided" in u["why"]


def test_stragglers_that_were_found_are_not_looked_for_again(tmp_path, monkeypatch):
    run, _ = generated(tmp_path / "run", SlowRank(rank=9, factor=1.5))
    found = find_stragglers(run)
    import sys

    module = sys.modules["mappnb.analysis.actions"]
    monkeypatch.setattr(module, "find_stragglers", pytest.fail)
    assert actions(run, stragglers=found).subject[0] == "9"


def test_a_dataset_is_as_good_as_a_run(tmp_path):
    run, _ = generated(tmp_path / "run", SlowRank(rank=9, factor=1.5))
    told, again = actions(run), run.sel().mapp.actions()
    assert again.gain_s[0] == pytest.approx(told.gain_s[0]) and again.attrs["num_ranks"] == 16


def test_wrong_number(tmp_path):
    run, _ = generated(tmp_path / "run", steps=4)
    with pytest.raises(MappnbError, match="most is 0; expected at least 1"):
        actions(run, most=0)


class Row:
    """What cure_of reads of a verdict."""

    def __init__(self, kind, subject, cause, evidence=""):
        self.subject_kind, self.subject, self.cause, self.evidence = kind, subject, cause, evidence


@pytest.mark.parametrize(
    ("row", "flag"),
    [
        (Row("rank", "3", "host", "0.1 s/step more in waiting for the next batch"), "--num-workers"),
        (Row("rank", "3", "host", "holes between its spans"), "host b (rank 3)"),
        (Row("rank", "3", "checkpoint"), "--async-save"),
        (Row("job", "job", "moe_load"), "--moe-expert-capacity-factor"),
        (Row("stage", "0", "stage_imbalance"), "--decoder-first-pipeline-num-layers"),
        (Row("stage", "1", "stage_imbalance"), "--pipeline-model-parallel-layout"),
        (Row("stage", "3", "stage_imbalance"), "--account-for-loss-in-pipeline-split"),
        (Row("link", "0->3", "link"), "host a and host b"),
    ],
    ids=lambda x: x if isinstance(x, str) else None,
)
def test_flags(row, flag):
    assert flag in cure_of(row, Layout(pp=4), {0: "a", 1: "a", 2: "b", 3: "b"}).target


@pytest.mark.skipif(not DATA.exists(), reason="the StragglerAnalysis traces are not beside the checkout")
def test_published_traces(tmp_path):
    mappnb.import_trace(DATA / "trace-AR.parquet", tmp_path / "ar")
    told = actions(mappnb.attach(tmp_path / "ar"))
    assert (
        told.subject_kind.tolist() == ["rank"]
        and told.subject[0] == "0"
        and told.gain_fraction[0] == pytest.approx(0.5, abs=0.03)
    )
    mappnb.import_trace(DATA / "trace-SE.parquet", tmp_path / "se")
    told = actions(mappnb.attach(tmp_path / "se"))
    assert set(told.cause) == {"data_skew", "stage_imbalance"} and (told.gain_fraction > 0.1).all()


def test_recorded_lengths_choose_the_cure_of_unequal_data(tmp_path):
    generate_run(
        tmp_path / "run", layout=Layout(pp=2, dp=4), faults=[DataSkew(sigma=0.8, packed=False)], num_steps=8, seed=5
    )
    run = mappnb.attach(tmp_path / "run")
    told = analysis.actions(run).set_index("cause").loc["data_skew"]
    cures = analysis.skew_cures(run)
    of_data = cures["gain_s"].sel(cure=["balanced packing", "reordered microbatches"])
    assert told.gain_s == float(of_data.max()) > 0
    assert str(of_data["cure"].values[int(of_data.values.argmax())]).split()[0] in told.action
    assert all(name in told.evidence for name in cures["cure"].values)
    gpu_hours = told.gain_s * run.steps.sizes["step"] * 8 / 3600
    assert told.gain_gpu_hours == pytest.approx(gpu_hours)
