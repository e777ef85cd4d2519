"""What unequal data cost, against generated runs in which it is known."""

from __future__ import annotations

import numpy as np
import pytest

import mappnb
from mappnb import analysis
from mappnb.layout import Layout
from mappnb.testing import DataSkew, SlowStage, generate_run


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_skew_costs_what_the_pipeline_pays(tmp_path, schedule):
    skew = DataSkew(sigma=0.8, packed=False)
    options = {"layout": Layout(pp=4, dp=4), "schedule": schedule, "num_steps": 8, "seed": 5}
    truth = generate_run(tmp_path / "run", faults=[skew], **options)
    job = analysis.find_stragglers(mappnb.attach(tmp_path / "run")).iloc[0]
    assert (job.subject_kind, job.cause) == ("job", "data_skew")
    cost = truth.faults[0].effect_s[1:].mean()
    assert job.effect_s == pytest.approx(cost, rel=0.35)
    longest = analysis.work(mappnb.attach(tmp_path / "run"))["seconds"].sum("part")
    excess = float((longest.max("rank") - longest.mean("rank"))[1:].median())
    assert excess < 0.65 * cost  # what the longest rank takes more is less than what the pipeline pays


def test_skew_beside_a_long_stage_is_what_remains(tmp_path):
    faults = [DataSkew(sigma=0.5, packed=False), SlowStage(stage=1, factor=1.5)]
    truth = generate_run(tmp_path / "run", layout=Layout(pp=2, dp=8), faults=faults, num_steps=8, seed=6)
    found = analysis.find_stragglers(mappnb.attach(tmp_path / "run"))
    culprits = found[found.verdict == "culprit"].set_index("cause")
    assert set(culprits.index) == {"stage_imbalance", "data_skew"}
    both = float(np.mean(truth.step_s[1:] - truth.clean_step_s[1:]))
    assert culprits.effect_s.sum() == pytest.approx(both, rel=0.3)


def test_a_work_table_is_taken_as_given(tmp_path):
    generate_run(tmp_path / "run", layout=Layout(dp=4), num_steps=5)
    run = mappnb.attach(tmp_path / "run")
    given = analysis.find_stragglers(run, work=analysis.work(run))
    assert given.equals(analysis.find_stragglers(run))
