"""find_stragglers: injected faults must be found by name, clean runs must stay clear, real jobs must give their known verdicts."""

from __future__ import annotations

from pathlib import Path

import pytest

import mappnb
from mappnb import testing as t
from mappnb.analysis import find_stragglers, work
from mappnb.analysis.stragglers import judge
from mappnb.errors import MappnbError
from mappnb.layout import Layout

DATA = Path(__file__).parents[3] / "shared" / "data" / "straggler_analysis"
LAYOUT = Layout(tp=2, pp=4, dp=4)


def run_with(path, faults=(), *, layout=LAYOUT, num_steps=12, seed=3, **options):
    t.generate_run(
        path / "run", layout=layout, num_steps=num_steps, faults=faults, seed=seed, num_microbatches=4, **options
    )
    return mappnb.attach(path / "run")


def culprits(found):
    rows = found[found["verdict"] == "culprit"]
    return list(zip(rows["subject_kind"], rows["subject"], rows["cause"], strict=True))


def test_nothing_wrong_is_clear(tmp_path):
    found = find_stragglers(run_with(tmp_path))
    assert set(found["verdict"]) == {"clear"} and len(found) == LAYOUT.world_size
    assert set(found["cause"]) == {""} and (found["effect_fraction"].abs() < 0.01).all()


@pytest.mark.parametrize("factor", [1.05, 1.1, 1.5, 2.0])
def test_slow_rank_is_hardware(tmp_path, factor):
    found = find_stragglers(run_with(tmp_path, [t.SlowRank(rank=13, factor=factor)]))
    assert culprits(found) == [("rank", "13", "hardware")]
    first = found.iloc[0]
    compute = 4 * 3 * 0.020
    assert first["subject"] == "13" and first["effect_s"] == pytest.approx((factor - 1) * compute, rel=0.15, abs=0.002)
    assert first["last_step"] == 11


def test_slow_host_is_one_subject(tmp_path):
    found = find_stragglers(run_with(tmp_path, [t.SlowHost(host=2, factor=1.15)], ranks_per_host=4))
    assert culprits(found) == [("host", "host2", "hardware")]
    assert not set(found["subject"]) & {"8", "9", "10", "11"}  # no rows of their own


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (t.SlowStage(stage=3, factor=1.2), ("stage", "3", "stage_imbalance")),
        (t.HostGaps(rank=5, length_s=0.03, gap="gc"), ("rank", "5", "host")),
        (t.HostGaps(rank=5, length_s=0.03, gap="dataloader"), ("rank", "5", "host")),
        (t.HostGaps(rank=18, length_s=0.03, gap="run_queue"), ("rank", "18", "host")),
    ],
)
def test_other_faults(tmp_path, fault, expected):
    assert culprits(find_stragglers(run_with(tmp_path, [fault]))) == [expected]


@pytest.mark.parametrize("name", ["AR", "SE"])
def test_real_jobs(tmp_path, name):
    path = DATA / f"trace-{name}.parquet"
    if not path.exists():
        pytest.skip("the straggler_analysis traces are not here")
    mappnb.import_trace(path, tmp_path / "run")
    found = culprits(find_stragglers(mappnb.attach(tmp_path / "run")))
    long_stage, skew = ("stage", "1", "stage_imbalance"), ("job", "job", "data_skew")
    assert found == {"AR": [("rank", "0", "hardware")], "SE": [long_stage, skew]}[name]


def test_too_short_is_undecided(tmp_path):
    found = find_stragglers(run_with(tmp_path, [t.SlowRank(rank=13, factor=2.0)], num_steps=2))
    assert set(found["verdict"]) == {"undecided"} and found["subject"][0] == "13"
    assert "record at least 4" in " ".join(found.attrs["notes"])


def test_judge_needs_no_disk(tmp_path):
    run = run_with(tmp_path, [t.SlowRank(rank=1, factor=1.5)])
    columns = ["subject_kind", "subject", "verdict", "effect_s", "first_step", "last_step"]
    assert judge(work(run))[columns].equals(find_stragglers(run)[columns])


def test_thresholds_are_checked(tmp_path):
    with pytest.raises(MappnbError, match="false_discovery is 2"):
        judge(work(run_with(tmp_path)), false_discovery=2)
