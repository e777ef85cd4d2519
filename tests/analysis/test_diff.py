"""diff() on HTA's pair of traces, on counted cases, and on generated runs with and without a fault."""

from __future__ import annotations

import numpy as np
import pytest
from analysis.kineto_json import DATA, NEEDS_DATA, events_of, load

import mappnb
from mappnb import Layout, analysis
from mappnb.errors import MappnbError
from mappnb.testing import SlowRank, generate_run


@pytest.fixture(scope="module")
def pair():
    if not DATA.exists():
        pytest.skip(NEEDS_DATA)
    return [events_of({0: load(DATA / f"hta/trace_compare/{name}/{name}.json.gz")}) for name in ("base", "test")]


def test_trace_compare_of_hta(pair):
    table = analysis.diff(*pair, by=("name",))
    assert set(table.index[table.status == "added"]) == {"AddmmBackward0", "All2All_Pooled_Req", "CatBackward0"}
    assert not (table.status == "removed").any()
    one = analysis.diff(*pair, by=("name",), step_before=1010, step_after=1010)
    assert round(one.total_s_before["nccl:all_reduce"] * 1e6) == 67 and one.status["nccl:all_reduce"] == "removed"
    first = analysis.diff(*pair, by=("name",), step_before=1009, step_after=1009)
    assert round(first.total_s_before["nccl:all_reduce"] * 1e6) == 66 and first.ratio["nccl:all_reduce"] == 1


def test_counts_and_totals_are_those_of_a_loop(pair):
    table = analysis.diff(*pair, by=("category", "name"))
    for side, events in zip(("before", "after"), pair, strict=True):
        keys = list(zip(events.category.values, events.name.values, strict=True))
        for key in set(keys):
            mine = [d for k, d in zip(keys, events.duration_ns.values.tolist(), strict=True) if k == key]
            row = table.loc[key]
            assert row[f"count_{side}"] == len(mine)
            assert row[f"total_s_{side}"] == pytest.approx(sum(mine) / 1e9)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    path = tmp_path_factory.mktemp("diff")
    layout, common = Layout(pp=2, dp=2), {"num_steps": 6, "num_microbatches": 4}
    generate_run(path / "a", layout=layout, seed=1, **common)
    generate_run(path / "b", layout=layout, seed=2, **common)
    generate_run(path / "slow", layout=layout, seed=3, faults=[SlowRank(rank=3, factor=1.3, first_step=3)], **common)
    return {name: mappnb.attach(path / name) for name in ("a", "b", "slow")}


def test_two_clean_runs_do_not_differ(runs):
    table = analysis.diff(runs["a"], runs["b"])
    assert not table.status.isin(["added", "removed"]).any()
    compute = table.xs("compute", level="category")
    assert (compute.status == "same").all()
    assert (analysis.diff(runs["a"], runs["a"]).status == "same").all()


def test_a_fault_is_found_where_it_is(runs):
    table = analysis.diff(
        runs["slow"], runs["slow"], by=("op", "rank"), step_before=slice(0, 2), step_after=slice(3, 5)
    )
    slower = table[
        (table.status == "slower") & table.index.get_level_values("op").isin(["forward_step", "backward_step"])
    ]
    assert set(slower.index) == {("forward_step", 3), ("backward_step", 3)}
    np.testing.assert_allclose(slower.ratio, 1.3, rtol=0.03)
    again = runs["slow"].events.mapp.diff(runs["a"], by="op", step_before=slice(3, None))
    assert again.status["backward_step"] == "faster"


def test_steps_are_compared_and_not_totals(runs):
    table = analysis.diff(runs["a"], runs["a"], by=("op",), step_after=slice(0, 2))
    assert (table.count_before == 2 * table.count_after).all()
    assert table.ratio["forward_step"] == pytest.approx(1, abs=0.02)


def test_too_few_samples_are_undecided(runs):
    table = analysis.diff(runs["a"], runs["slow"], by=("op", "rank", "microbatch"), step_before=1, step_after=4)
    assert table.loc[("forward_step", 3, 0)].status == "undecided"


def test_messages(runs):
    with pytest.raises(MappnbError, match="'stag', which is no variable of events; did you mean 'stage'"):
        analysis.diff(runs["a"], runs["b"], by=("op", "stag"))
    with pytest.raises(MappnbError, match="by is empty"):
        analysis.diff(runs["a"], runs["b"], by=())
    with pytest.raises(MappnbError, match="no events"):
        analysis.diff(runs["a"], runs["b"], step_after=99)
