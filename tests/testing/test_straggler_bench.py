"""The judge of the detectors: cases are what they say, and scores count as they should."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

import mappnb
from mappnb import Layout
from mappnb.testing import HostGaps, Noise, SlowRank, generate_run

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))
import straggler_cases
from bench_stragglers import hits, score
from straggler_baselines import latest, longer_than_peers


def row(kind, subject, cause="hardware", effect_s=0.1, first_step=0):
    return {"subject_kind": kind, "subject": subject, "cause": cause, "effect_s": effect_s, "first_step": first_step}


def fault(kind, subject, ranks=(), fraction=0.2, causes=("hardware",)):
    return {
        "subject_kind": kind, "subjects": [subject], "ranks": list(ranks), "effect_s": 0.1, "effect_fraction": fraction,
        "clean_step_s": 0.5, "first_step": 2, "causes": list(causes),
    }  # fmt: skip


def result(faults, said):
    return {"faults": faults, "find_stragglers": said, "latest": said}


def test_a_row_hits_its_own_subject_only():
    assert hits(row("rank", "3"), fault("rank", "3", [3]), "find_stragglers")
    assert not hits(row("rank", "4"), fault("rank", "3", [3]), "find_stragglers")
    assert not hits(row("rank", "3"), fault("host", "host0", [0, 1, 2, 3]), "find_stragglers")
    assert hits(row("rank", "3"), fault("host", "host0", [0, 1, 2, 3]), "latest")
    assert hits(row("link", "3 → 7"), fault("link", "3->7", [3, 7]), "find_stragglers")
    assert not hits(row("link", "7->3"), fault("link", "3->7", [3, 7]), "find_stragglers")
    assert hits(row("job", "lengths"), fault("job", "job"), "find_stragglers")


def test_scores_count_what_was_found_and_what_was_not():
    results = [
        result(
            [fault("rank", "3", [3])], [row("rank", "3", first_step=3), row("rank", "5")]
        ),  # right, and one too many
        result([fault("rank", "4", [4])], []),  # missed
        result(
            [fault("rank", "4", [4], causes=("layer",))], [row("rank", "4", effect_s=0.2, first_step=9)]
        ),  # wrong cause
        result([fault("rank", "1", [1], fraction=0.05)], [row("rank", "1")]),  # small
        result([], [row("rank", "0")]),  # an alarm
        result([], []),
    ]
    clear = score(results, "find_stragglers", clear=True)
    assert (clear["faults"], clear["recall"], clear["precision"]) == (3, pytest.approx(2 / 3), pytest.approx(2 / 4))
    assert (clear["cause"], clear["alarms"], clear["clean"]) == (0.5, 0.5, 2)
    assert clear["effect"] == pytest.approx(0.1)  # 0 and 0.2 of the step
    assert clear["first"] == 0.5
    small = score(results, "find_stragglers", clear=False)
    assert (small["faults"], small["recall"], small["precision"]) == (1, 1.0, 0.5)


@pytest.mark.parametrize("kind", [*straggler_cases.KINDS, *straggler_cases.EXTRA])
def test_cases_repeat_themselves_and_tell_their_causes(kind):
    first, again, other = (straggler_cases.case_of(kind, s) for s in (3, 3, 4))
    assert first == again and first.options["seed"] != other.options["seed"]
    assert len(first.causes) == len(first.options["faults"]) == {"none": 0, "two": 2}.get(kind, 1)
    assert all(first.causes)
    assert 64 <= first.options["layout"].world_size <= 1024 and 12 <= first.options["num_steps"] <= 30
    assert first.options["noise"] == Noise()


def test_baselines_find_what_they_are_made_for(tmp_path, monkeypatch):
    monkeypatch.setattr("mappnb.segment_writer.os.fsync", lambda file: None)
    layout = Layout(tp=2, dp=4)
    for name, faults in (
        ("slow", [SlowRank(rank=5, factor=1.5)]),
        ("gap", [HostGaps(rank=5, length_s=0.2)]),
        ("none", []),
    ):
        generate_run(tmp_path / name, layout=layout, faults=faults, num_steps=4, noise=Noise.none())
    slow, gap, none = (mappnb.attach(tmp_path / name).sel() for name in ("slow", "gap", "none"))
    assert latest(slow, 1) == latest(gap, 1) == [5]
    assert latest(none, 1) == longer_than_peers(none, layout) == []
    assert longer_than_peers(slow, layout) == [4, 5]  # a tensor peer waits within its spans
    assert longer_than_peers(gap, layout) == [4]  # here it alone does
    assert np.isfinite(slow.duration_ns.values).all()
