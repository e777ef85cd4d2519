"""The stragglers view without a browser: its cells, levels, selections and messages, against brute force and injected faults."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from itertools import pairwise

import numpy as np
import pandas as pd
import pytest
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st
from widgets.front import Front

import mappnb
from mappnb.errors import MappnbError
from mappnb.layout import Layout
from mappnb.schema import EVENTS
from mappnb.testing._gen_faults import SlowHost, SlowRank
from mappnb.testing.generate import generate_run
from mappnb.widgets import Stragglers, _strag_answers, _strag_data, _strag_static
from mappnb.widgets._strag_data import StragglerData, subject_ranks
from mappnb.widgets._strag_grid import MOST_CELLS, Row, arrange, bins, orders, reduce
from mappnb.widgets._strag_measures import Measures
from mappnb.widgets._strag_ops import op_rows
from mappnb.widgets._strag_where import Where

LAYOUT = Layout(pp=2, dp=2, tp=2)
SLOW, FROM, FACTOR = 5, 3, 1.5


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    where = tmp_path_factory.mktemp("stragglers") / "run"
    generate_run(
        where, layout=LAYOUT, num_steps=8, num_microbatches=4, ranks_per_host=4, seed=1,
        faults=[SlowRank(rank=SLOW, factor=FACTOR, first_step=FROM, throttle=True)],
    )  # fmt: skip
    return where


@pytest.fixture(scope="module")
def run(folder):
    return mappnb.attach(folder)


@pytest.fixture
def view(run):
    made = run.stragglers()
    yield made
    made.close()


def self_times(events: xr.Dataset) -> dict[int, float]:
    """Self time in s of each event of one rank and step, by brute force: its length less that of the spans directly inside it."""
    start, depth = events["start_ns"].values, events["depth"].values
    end = start + events["duration_ns"].values
    out = {}
    for i in range(len(start)):
        others = [k for k in range(len(start)) if k != i and depth[k] == depth[i] + 1]
        inside = [k for k in others if start[k] >= start[i] and end[k] <= end[i]]
        out[i] = (end[i] - start[i] - sum(end[k] - start[k] for k in inside)) / 1e9
    return out


# ------------------------------------------------------------------------------------------------------------- cells
@pytest.mark.parametrize(("rank", "step"), [(0, 0), (SLOW, 6), (7, 2)])
def test_compute_is_the_sum_of_self_times(view, run, rank, step):
    events = run.sel(step=step, rank=rank)
    times = self_times(events)
    expected = sum(t for i, t in times.items() if events["category"].values[i] == "compute")
    mine = view._data.m.values("compute_s")
    assert mine[step, rank] == pytest.approx(expected, rel=1e-9)


def test_the_slow_rank_stands_out_from_its_onset(view):
    ratio = view._data.m.values("ratio")
    assert ratio[FROM:, SLOW] == pytest.approx(FACTOR, rel=0.05)
    rest = np.delete(ratio, SLOW, axis=1)
    assert np.abs(rest - 1).max() < 0.1 and np.abs(ratio[:FROM, SLOW] - 1).max() < 0.1
    above = view._data.m.values("above_s")
    compute = view._data.m.values("compute_s")
    np.testing.assert_allclose(above, compute - compute / ratio)


def test_every_metric_has_values_where_the_rank_was(view):
    m = view._data.m
    assert {
        "ratio",
        "above_s",
        "compute_s",
        "forward_ratio",
        "backward_s",
        "wait_s",
        "imposed_s",
        "last_fraction",
    } <= set(view.metrics)
    for key in view.metrics:
        assert m.values(key).shape == (8, 8)
    np.testing.assert_array_equal(m.values("imposed_s"), view.work["imposed_s"].values)
    assert (m.values("wait_s")[FROM:, SLOW] < np.delete(m.values("wait_s")[FROM:], SLOW, axis=1).min(1)).all(), (
        "who is slow does not wait"
    )


def test_cells_without_events_stay_empty_and_are_said(run):
    events = run.sel()
    events = events.isel(event=np.flatnonzero(~((events["step"].values == 4) & (events["rank"].values == 2))))
    view = Stragglers(events)
    drawn = view.columns
    assert np.isnan(drawn["value"]).sum() == 1
    assert np.isnan(drawn["value"][drawn["row"] == "2", 4]).all()
    assert "Hatched" in view._drawn.caption
    assert "pattern" in view.twin_html()


@pytest.mark.parametrize("order", ["rank", "pp", "dp", "tp", "host"])
def test_rows_are_laid_out(order):
    hosts = [f"node{r // 4}" for r in range(48)]
    layout = Layout(pp=3, dp=4, tp=4)
    rows = arrange(np.arange(48), hosts, layout, order=order, by_host=False)
    got = [r.ranks[0] for r in rows]
    assert sorted(got) == list(range(48))
    if order == "host":
        names = [hosts[r] for r in got]
        assert list(dict.fromkeys(names)) == [f"node{k}" for k in range(12)], "node10 comes behind node9"
        assert [r.group for r in rows] == names
    elif order != "rank":
        place = [layout.coords(r)[order] for r in got]
        assert place == sorted(place)
        assert [r.group for r in rows] == [f"{order} {p}" for p in place]


def test_hosts_have_a_row_each():
    hosts = [f"node{r // 8}" for r in range(1024)]
    layout = Layout(pp=8, dp=16, tp=8)
    rows = arrange(np.arange(1024), hosts, layout, order="pp", by_host=True)
    assert len(rows) == 128 and all(len(r.ranks) == 8 for r in rows)
    assert sorted(r for row in rows for r in row.ranks) == list(range(1024))


@pytest.mark.parametrize("num", [257, 1000, 5000])
def test_many_ranks_share_rows(num):
    rows = arrange(np.arange(num), [""] * num, Layout(dp=num), order="rank", by_host=False)
    assert len(rows) <= 256
    assert [r for row in rows for r in row.ranks] == list(range(num))


def test_orders_are_those_that_tell_ranks_apart():
    assert orders(Layout(pp=2, tp=4), ["a"] * 8) == ["pp", "tp", "rank"]
    assert orders(Layout(dp=8), ["a"] * 4 + ["b"] * 4) == ["host", "dp", "rank"]
    assert orders(Layout(dp=4), [""] * 4) == ["dp", "rank"]


@given(
    steps=st.integers(1, 40),
    ranks=st.integers(1, 12),
    columns=st.integers(1, 40),
    cell=st.sampled_from(["max", "median"]),
    data=st.data(),
)
@settings(max_examples=60, deadline=None)
def test_reduce_is_brute_force(steps, ranks, columns, cell, data):
    values = np.array(
        data.draw(
            st.lists(st.one_of(st.floats(-5, 5), st.just(np.nan)), min_size=steps * ranks, max_size=steps * ranks)
        )
    )
    values = values.reshape(steps, ranks)
    size = max(1, -(-steps // columns))
    cut = [(a, min(a + size, steps)) for a in range(0, steps, size)]
    edges = sorted({0, ranks, *data.draw(st.lists(st.integers(0, ranks), max_size=4))})
    rows = [Row("", "", tuple(range(a, b)), "") for a, b in pairwise(edges)]
    got = reduce(values, rows, cut, cell)
    for i, row in enumerate(rows):
        for k, (a, b) in enumerate(cut):
            block = [v for v in values[a:b, list(row.ranks)].ravel().tolist() if not np.isnan(v)]
            want = np.nan if not block else max(block) if cell == "max" else float(np.median(block))
            assert got[i, k] == pytest.approx(want, nan_ok=True)


@given(steps=st.integers(1, 5000), rows=st.integers(1, 600))
@settings(max_examples=80, deadline=None)
def test_columns_cover_every_step_once_and_stay_few(steps, rows):
    cut = bins(np.arange(steps), rows)
    assert [a for a, _ in cut] == [0, *[b for _, b in cut[:-1]]] and cut[-1][1] == steps
    assert len(cut) * rows <= max(MOST_CELLS, rows) and len(cut) <= 600


# ------------------------------------------------------------------------------------------------------------ levels
def test_a_host_shows_its_ranks(run):
    view = run.stragglers(host="host1")
    assert sorted(view.columns["row"].tolist()) == ["4", "5", "6", "7"]
    assert view.code == "run.stragglers(host='host1')"
    assert [
        c["label"] for c in _strag_answers.picture_told(view._data, view._drawn, theme="light", ground="")["crumbs"]
    ] == [
        "All ranks",
        "host1",
    ]


def test_a_rank_shows_which_part_is_slow(run):
    view = run.stragglers(rank=SLOW)
    drawn = view.columns
    rows = dict(zip(drawn["row"].tolist(), drawn["value"], strict=True))
    work = view.work
    peers = [r for r in range(8) if r != SLOW and LAYOUT.coords(r)["pp"] == LAYOUT.coords(SLOW)["pp"]]
    at = list(work["part"].values).index("forward@1")
    expected = work["seconds"].values[:, SLOW, at] - np.median(work["seconds"].values[:, peers, at], axis=1)
    np.testing.assert_allclose(rows["forward@1"], expected)
    assert (rows["backward@1"][FROM:] > rows["forward@1"][FROM:]).all() and (rows["waits for others"][FROM:] < 0).all()
    view.set(against="ratio")
    ratio = dict(zip(view.columns["row"].tolist(), view.columns["value"], strict=True))
    assert ratio["forward@1"][FROM:] == pytest.approx(FACTOR, rel=0.08)
    view.set(against="seconds")
    seconds = dict(zip(view.columns["row"].tolist(), view.columns["value"], strict=True))
    np.testing.assert_array_equal(seconds["forward@1"], work["seconds"].values[:, SLOW, at])


def test_a_step_shows_operations_against_peers(run):
    view = run.stragglers(rank=SLOW, step=6)
    table = pd.DataFrame(view.columns)
    own = run.sel(step=6, rank=SLOW)
    times = self_times(own)
    compute = sum(t for i, t in times.items() if own["category"].values[i] == "compute")
    assert table.loc[table["category"] == "compute", "own_s"].sum() == pytest.approx(compute)
    assert table["label"].iloc[0] == "backward_step, backward, stage 1", "the largest excess comes first"
    assert "mark" in own["category"].values and "mark" not in set(table["category"]), (
        "a mark around the step is no work"
    )
    assert table["own_s"].iloc[0] / table["peers_s"].iloc[0] == pytest.approx(FACTOR, rel=0.05)
    assert view.code == f"run.stragglers(rank={SLOW}, step=6)"


def test_a_mark_around_the_step_is_no_work(run):
    own = run.sel(step=6, rank=SLOW)
    holed = own.isel(
        event=np.flatnonzero(own["category"].values != "optimizer")
    )  # where it was, only the mark of the step is left
    assert "mark" in holed["category"].values
    assert "mark" not in set(op_rows(holed, SLOW).frame["category"])


def test_operations_of_a_rank_without_peers(run):
    ops = op_rows(run.sel(step=6, rank=SLOW), SLOW)
    assert ops.num_peers == 0 and np.isnan(ops.frame["peers_s"]).all()
    assert len(ops.group) == run.sel(step=6, rank=SLOW).sizes["event"]


def test_a_rank_without_peers_is_measured_by_its_own_steps(tmp_path):
    generate_run(
        tmp_path / "run",
        layout=Layout(pp=4),
        num_steps=12,
        num_microbatches=4,
        seed=2,
        faults=[SlowRank(rank=2, factor=1.6, first_step=8)],
    )
    view = mappnb.attach(tmp_path / "run").stragglers()
    ratio = view._data.m.values("ratio")
    assert ratio[8:, 2].min() > 1.4 and np.abs(ratio[:8] - 1).max() < 0.15
    assert "it has no peer" in mappnb.attach(tmp_path / "run").stragglers(rank=2)._drawn.caption


# -------------------------------------------------------------------------------------------------- verdicts, evidence
def test_verdicts_are_those_of_find_stragglers(view, run):
    pd.testing.assert_frame_equal(view.verdicts, mappnb.analysis.stragglers.find_stragglers(run))
    told = Front(view).ask("verdicts")[0]
    assert told["rows"][0]["cells"][:2] == [f"rank {SLOW}", "culprit"] and told["rows"][0]["ranks"] == [SLOW]
    shown = len(told["rows"]) + told["clear"] + told["left"]
    assert shown == len(view.verdicts)


def test_evidence_is_medians_and_telemetry_of_the_steps(view, run):
    front = Front(view)
    told = front.ask("pick", verdict=0)[0]
    numbers = {row[0].strip(): row[1:] for row in told["numbers"]}
    compute = view._data.m.values("compute_s")
    first, last = told["steps"]
    assert first == FROM
    own = np.median(compute[first : last + 1, SLOW])
    assert numbers["compute"][0] == mappnb.widgets._text.duration_text(own * 1e9)
    assert float(numbers["compute"][2].rstrip("×")) == pytest.approx(FACTOR, rel=0.05)
    samples = run.telemetry
    at, step = samples["time_ns"].values, view._data.window_s(first=first, last=last, rank=SLOW)
    inside = (at / 1e9 > step[0]) & (at / 1e9 < step[1])
    clock = {r: samples["sm_clock_mhz"].values[inside & (samples["rank"].values == r)].mean() for r in range(8)}
    said = {row[0]: row[1:] for row in told["telemetry"]}
    assert float(said["GPU clock"][0].split()[0].replace(",", "")) == pytest.approx(clock[SLOW], rel=0.01)
    assert float(said["GPU clock"][1].split()[0].replace(",", "")) == pytest.approx(clock[0], rel=0.01)
    assert clock[SLOW] < clock[0] and said["clocks cut"][0] != said["clocks cut"][1]
    assert told["verdict"]["kind"] == "culprit" and told["verdict"]["evidence"] == view.verdicts["evidence"].iloc[0]


def test_subjects_become_ranks(view):
    m = view._data.m
    assert subject_ranks("rank", "5", m) == (5,)
    assert subject_ranks("host", "host1", m) == (4, 5, 6, 7)
    assert subject_ranks("stage", "1", m) == (4, 5, 6, 7)
    assert subject_ranks("link", "3->7", m) == (3, 7)
    assert subject_ranks("job", "job", m) == ()


def test_a_whole_stage_stands_beside_the_others(view):
    front = Front(view)
    told = front.ask("pick", ranks=[4, 5, 6, 7], steps=[FROM, 7])[0]
    assert told["beside"] == "other ranks" and told["notes"] == []
    compute = {row[0].strip(): row for row in told["numbers"]}["compute"]
    values = view._data.m.values("compute_s")[FROM:]
    ratio = np.median(values[:, 4:]) / np.median(values[:, :4])
    assert compute[3] == f"{ratio:.2f}×"
    told = front.ask("pick", ranks=[4, 5], steps=[FROM, 7])[0]
    assert told["beside"] == "peers"
    compute = {row[0].strip(): row for row in told["numbers"]}["compute"]
    assert compute[3] == f"{np.median(values[:, 4:6]) / np.median(values[:, 6:]):.2f}×"


FIXED = pd.DataFrame(
    [
        ("host", "host1", "culprit", "hardware", 0.2, 0.2, 3, 7, "all of it"),
        ("link", "1->5", "culprit", "link", 0.1, 0.1, 0, 7, "late"),
        ("job", "job", "undecided", "unknown", 0.05, 0.05, -1, -1, "<b>who knows</b>"),
        ("rank", "0", "clear", "", 0.0, 0.0, -1, -1, ""),
    ],
    columns=["subject_kind", "subject", "verdict", "cause", "effect_s", "effect_fraction", "first_step", "last_step", "evidence"],
)  # fmt: skip


def test_every_kind_of_subject_is_listed_and_can_be_picked(view, monkeypatch):
    monkeypatch.setattr(_strag_data, "find_stragglers", lambda run, **_: FIXED.copy())
    front = Front(view)
    told = front.ask("verdicts")[0]
    assert [r["ranks"] for r in told["rows"]] == [[4, 5, 6, 7], [1, 5], []] and told["clear"] == 1
    assert [r["marked"] for r in told["rows"]] == [True, True, False]
    assert [r["cells"][5] for r in told["rows"]] == ["3–7", "0–7", "–"]
    for i in range(3):
        picked = front.ask("pick", verdict=i)[0]
        assert picked["verdict"]["kind"] == FIXED["verdict"][i]
        assert view.selection["subject"].tolist() == [FIXED["subject"][i]]
        assert picked["numbers"] and picked["ranks"] == told["rows"][i]["ranks"]
    assert "<b>who" not in view.twin_html() and "&lt;b&gt;who" in view.twin_html()


# ------------------------------------------------------------------------------------------------- selection, linking
def test_selection_is_a_table(view, run):
    assert len(view.selection) == 0
    cells = view.select(rank=[1, SLOW], step=slice(2, 4))
    assert len(cells) == 6 and set(cells["rank"]) == {1, SLOW} and set(cells["step"]) == {2, 3, 4}
    row = cells[(cells["rank"] == SLOW) & (cells["step"] == 4)].iloc[0]
    assert row["ratio"] == view._data.m.values("ratio")[4, SLOW] and row["pp_rank"] == LAYOUT.coords(SLOW)["pp"]
    events = view.select(rank=SLOW, step=4)
    assert len(events) == run.sel(step=4, rank=SLOW).sizes["event"]
    assert view.select(host="host1")["rank"].unique().tolist() == [4, 5, 6, 7]
    assert view.select(verdict=0)["subject"].tolist() == [str(SLOW)]
    assert len(view.select()) == 0


def test_an_operation_is_its_events(run):
    view = run.stragglers(rank=SLOW, step=6)
    front = Front(view)
    front.ask("pick", ranks=[SLOW], steps=[6, 6], op=0)
    picked = view.selection
    assert set(picked["op"]) == {"backward_step"} and set(picked["rank"]) == {SLOW} and len(picked) == 4
    assert len(view.chosen) == 4 and view.chosen.ranks == (SLOW,)


def test_a_linked_timeline_goes_to_the_step(view, run):
    view.select(rank=SLOW, step=4)
    timeline = view.timeline()
    events = run.sel(step=4, rank=SLOW)
    bounds = [
        events["start_ns"].values.min() / 1e9,
        (events["start_ns"].values + events["duration_ns"].values).max() / 1e9,
    ]
    assert [timeline.window.start, timeline.window.stop] == pytest.approx(bounds, abs=2e-6)
    view.select(rank=SLOW, step=6)
    events = run.sel(step=6, rank=SLOW)
    assert timeline.window.start == pytest.approx(events["start_ns"].values.min() / 1e9, abs=2e-6)
    assert timeline.errors == [] and view.errors == []
    marked: list = []
    view.tell = lambda kind, **content: marked.append((kind, content))
    timeline.goto(step=2)
    assert marked[-1][0] == "marked" and marked[-1][1]["steps"][0] <= 2 <= marked[-1][1]["steps"][1]
    timeline.select(slice(bounds[0], bounds[1]))
    assert view._picked.ranks == tuple(timeline.selection.ranks)
    assert view.errors == [] and timeline.errors == []
    view.close()
    timeline.goto(step=3)
    assert timeline.errors == []
    timeline.close()


def test_the_timeline_line_can_be_run(view, run):
    front = Front(view)
    front.ask("pick", ranks=[SLOW], steps=[4, 4])
    text = front.ask("timeline")[0]["text"]
    made = eval(text, {"run": run})
    assert SLOW in made._scene.shown_ranks() and made.window.start == pytest.approx(view.window.start, abs=2e-6)
    made.close()


# ---------------------------------------------------------------------------------------------------------- messages
def test_messages_draw_every_level(view):
    front = Front(view)
    state = front.last("state")[0]
    assert state["why"] == "" and state["where"]["order"] == "pp"
    where = state["where"]
    for change, level in (
        ({}, "all"),
        ({"metric": "imposed_s", "order": "dp"}, "all"),
        ({"rows": "host"}, "all"),
        ({"host": "host1"}, "host"),
        ({"rank": SLOW}, "rank"),
        ({"rank": SLOW, "step": 6}, "step"),
    ):
        told = front.ask("heat", where={**where, **change}, theme="dark", ground="rgb(1, 2, 3)")[0]
        assert told["level"] == level and told["figure"]["doc"]["roots"], told.get("text")
        assert level == "step" or len(told["rows"]) == len(view.columns["row"])
        again = eval(view.code, {"run": view._data.run})
        assert again._where == view._where
        again.close()
    assert view.errors == []


def test_prices_are_those_of_what_if(view):
    front = Front(view)
    told = front.ask("prices", by="", theme="light")[0]
    prices = view.prices
    assert f"{float(prices['replay_error']):.2%}" in told["says"] and told["by"] == "stage"
    frame = _strag_answers.price_bars(prices, "rank")
    assert frame["name"].iloc[0] == f"rank {SLOW}"
    np.testing.assert_allclose(frame["cost"], sorted(prices["slowdown_by_rank"].values - 1, reverse=True))
    error = abs(float(prices["replay_error"]))
    assert (frame["reliable"] == (np.abs(frame["cost"]) > error)).all()
    drawn = json.dumps(front.ask("prices", by="rank", theme="light")[0]["figure"])
    assert all(f'"rank {r}"' in drawn for r in range(8))
    assert "expected one of" in front.ask("prices", by="moon", theme="light")[0]["text"]


def test_what_cannot_be_priced_is_said(view, monkeypatch):
    def refuse(*_, **__):
        raise MappnbError("what_if: no dependencies")

    monkeypatch.setattr(_strag_data, "what_if", refuse)
    told = Front(view).ask("prices", by="", theme="light")[0]
    assert told["kind"] == "error" and "no dependencies" in told["text"]


@pytest.mark.parametrize(
    "content",
    [
        {"kind": "heat"},
        {"kind": "heat", "where": {"metric": 3}},
        {"kind": "heat", "where": {"rank": "5"}},
        {"kind": "heat", "where": {"step": 3}},
        {"kind": "heat", "where": {"rank": True}},
        {"kind": "heat", "where": {"order": "moon"}},
        {"kind": "pick", "ranks": "all"},
        {"kind": "pick", "ranks": [99]},
        {"kind": "pick", "verdict": 5000},
        {"kind": "pick", "ranks": [1], "steps": [1]},
        {"kind": "prices", "by": 3},
    ],
)
def test_bad_messages_are_answered_with_a_reason(view, content):
    front = Front(view)
    before = view._where, view._picked
    told = front.ask(**content)[0]
    assert told["kind"] == "error" and told["text"]
    assert (view._where, view._picked) == before


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"metric": "ratoi"}, "did you mean 'ratio'"),
        ({"order": "tpp"}, "did you mean 'tp'"),
        ({"rows": "hots"}, "did you mean 'host'"),
        ({"host": "host9"}, "there are host0, host1"),
        ({"rank": 99}, "there are 0 to 7"),
        ({"rank": 1, "step": 99}, "there are 0 to 7"),
        ({"step": 2}, "give rank= too"),
    ],
)
def test_bad_arguments_name_the_cure(run, options, said):
    with pytest.raises(MappnbError, match=said.replace("=", "=")):
        run.stragglers(**options)


def test_nothing_but_the_id_is_synced(view):
    state = view.get_state()
    told = {k: v for k, v in state.items() if not k.startswith("_") and k not in ("layout", "tabbable", "tooltip")}
    assert set(told) == {"twin_id"} and len(json.dumps(told)) < 100


def test_bokeh_is_loaded_when_the_browser_asks(folder):
    code = (
        f"import sys, mappnb\nview = mappnb.attach({str(folder)!r}).stragglers()\nview.verdicts, view.twin_html(), view.selection\n"
        "assert 'bokeh' not in sys.modules, 'bokeh'\nassert 'torch' not in sys.modules, 'torch'\nprint(view)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "Stragglers(8 ranks, 8 steps)", done.stderr


# ---------------------------------------------------------------------------------------------------------- bad input
def test_no_step_is_said_and_nothing_raises(run, tmp_path):
    events = run.sel(step=3)
    view = Stragglers(events.assign(step=("event", np.full(events.sizes["event"], -1, np.int32))))
    front = Front(view)
    assert "no event belongs to a step" in front.last("state")[0]["why"]
    assert view.describe() == "Stragglers(nothing to judge)" and len(view.verdicts) == 0
    assert "no event belongs to a step" in view.twin_html()
    assert "no event belongs to a step" in view.to_html()
    assert front.ask("heat", where={}, theme="light")[0]["kind"] == "error"
    assert view.code.startswith("mappnb.widgets.Stragglers(") and view.columns == {}
    repr(view.snapshot())
    view.refresh()
    view.close()


def test_an_empty_dataset_is_said():
    empty = xr.Dataset({n: ("event", np.empty(0, object if v.dtype is str else v.dtype)) for n, v in EVENTS.items()})
    view = Stragglers(empty)
    assert view._state()["why"] and view.twin_html()


def test_a_short_run_is_shown_with_what_it_needs(run):
    view = Stragglers(run.sel(step=slice(0, 1)))
    told = Front(view).ask("verdicts")[0]
    assert any("too few" in n or "record at least" in n for n in told["notes"])
    assert view.columns["value"].shape == (8, 2)


def test_one_rank_in_one_step(run):
    view = Stragglers(run.sel(step=2, rank=3))
    assert view.columns["value"].shape == (1, 1)
    front = Front(view)
    for where in ({}, {"rank": 3}, {"rank": 3, "step": 2}):
        assert front.ask("heat", where=where, theme="light")[0]["kind"] == "heat"
    assert front.ask("pick", ranks=[3], steps=[2, 2])[0]["numbers"]


def test_names_of_a_trace_are_escaped(run, monkeypatch):
    monkeypatch.setattr(_strag_static, "_metrics", lambda view: ["ratio"])
    bad = "<img src=x onerror=alert(1)>"
    events = run.sel(step=slice(0, 3))
    names = np.where(events["category"].values == "compute", bad, events["name"].values.astype(object)).astype(object)
    view = Stragglers(events.assign(name=("event", names)), rank=SLOW, step=3)
    html = view.to_html() + view.twin_html() + view.snapshot()._repr_html_()
    assert bad not in html
    assert any(bad in t for t in view.columns["label"].tolist()), "it is there as data"


def test_refresh_shows_what_has_come(tmp_path):
    where = tmp_path / "run"
    generate_run(where, layout=Layout(dp=4), num_steps=10, num_microbatches=4, seed=5, segment_rows=40)
    held = [p for p in sorted(where.glob("inc=*/events/*/seg-*.parquet")) if int(p.stem.split("-")[1]) >= 2]
    assert held, "several segments a rank"
    aside = tmp_path / "aside"
    for p in held:
        to = aside / p.relative_to(where)
        to.parent.mkdir(parents=True, exist_ok=True)
        p.rename(to)
    view = mappnb.attach(where).stragglers()
    front, before = Front(view), view.columns["value"].shape[1]
    view.select(rank=2)
    assert before < 10
    for p in held:
        (aside / p.relative_to(where)).rename(p)
    front.say("refresh")
    assert view.columns["value"].shape[1] == 10 and view._picked.ranks == (2,)
    assert front.last("state")[0]["picked"]["ranks"] == [2] and view.errors == []


def test_a_closed_view_lets_go(run):
    view = run.stragglers()
    view.verdicts  # noqa: B018
    view.close()
    assert view._data.measures is None and "verdicts" not in view._data.__dict__


# ---------------------------------------------------------------------------------------------------------- large runs
def big_work(ranks: int = 1024, steps: int = 1000) -> xr.Dataset:
    """A self-time table of a large run, one rank slow by 1.3 from step 500 on."""
    rng = np.random.default_rng(0)
    parts = np.array(["forward@0", "forward@1", "backward@0", "backward@1", "optimizer", "host"], object)
    stage = np.array([0, 1, 0, 1, -1, -1])
    of = np.arange(ranks) * 2 // ranks
    base = np.array([0.2, 0.2, 0.4, 0.4, 0.02, 0.01])
    seconds = base * (1 + 0.01 * rng.standard_normal((steps, ranks, 6))) * ((stage < 0) | (stage == of[:, None]))
    seconds[500:, min(300, ranks - 1), :4] *= 1.3
    both = ("step", "rank")
    data = {
        "seconds": (("step", "rank", "part"), seconds), "count": (("step", "rank", "part"), (seconds > 0).astype(np.int32)),
        "present": (both, np.ones((steps, ranks), bool)), "step_s": ("step", np.ones(steps)),
        **{n: (both, rng.random((steps, ranks))) for n in ("wait_s", "transfer_s", "imposed_s")},
        **{n: (both, np.full((steps, ranks), 4, np.int32)) for n in ("last_calls", "calls")},
    }  # fmt: skip
    coords = {
        "step": np.arange(steps, dtype=np.int32), "rank": np.arange(ranks, dtype=np.int32), "part": parts,
        "part_kind": ("part", np.array([p.split("@")[0] for p in parts], object)), "part_stage": ("part", stage),
        "host": ("rank", np.array([f"node{r // 8}" for r in range(ranks)], object)),
    }  # fmt: skip
    return xr.Dataset(data, coords)


@pytest.fixture
def big(monkeypatch):
    table = big_work()
    monkeypatch.setattr(_strag_data, "work", lambda run: table)
    layout = Layout(pp=2, dp=64, tp=8)
    events = xr.Dataset(
        {n: ("event", np.empty(0, object if v.dtype is str else v.dtype)) for n, v in EVENTS.items()},
        attrs={"layout": json.dumps(layout.to_dict())},
    )
    return events


def test_a_large_run_is_small_for_the_browser(big, view):
    Front(view).ask("heat", where={}, theme="light")  # bokeh is loaded and warm
    begin = time.process_time()
    large = Stragglers(big)
    front = Front(large)
    told = front.ask("heat", where={}, theme="light", ground="rgb(255, 255, 255)")[0]
    spent = time.process_time() - begin
    assert large.columns["value"].size <= MOST_CELLS and large.columns["value"].shape[0] == 128
    assert front.largest <= 500_000
    assert told["merged"] and "the largest of up to 8 ranks and 7 steps" in told["caption"]
    assert spent < 1.0, f"{spent:.2f} s of CPU; 0.25 s when it was written"
    hot = np.unravel_index(int(np.nanargmax(np.nanmean(large.columns["value"][:, -20:], axis=1))), (128,))[0]
    assert large._drawn.grid.rows[int(hot)].host == "node37", "rank 300 is on node 37"
    assert large._drawn.into[int(hot)] == {"host": "node37"}


def test_the_twin_of_a_large_run_is_small(big, monkeypatch):
    asked = []
    monkeypatch.setattr(_strag_data, "find_stragglers", lambda run, **_: asked.append(run) or FIXED.copy())
    large = Stragglers(big)
    assert len(large.twin_html()) < 200_000 and not asked, "the first look does not wait for the verdicts"
    large.verdicts  # noqa: B018
    assert "1-&gt;5" in large.twin_html()
    large.set(rows="rank")
    assert large.columns["value"].shape[0] <= 256 and len(large.twin_html()) < 200_000


def test_medians_instead_of_the_largest(big):
    large = Stragglers(big, cell="median")
    row = next(i for i, r in enumerate(large._drawn.grid.rows) if r.host == "node37")
    assert np.nanmax(large.columns["value"][row]) < 1.1, "one of eight ranks does not move the median"
    most = Stragglers(big)
    assert np.nanmax(most.columns["value"][row]) > 1.25


def test_measures_know_roles_without_stages():
    table = big_work(16, 4)
    table = table.assign_coords(part_stage=("part", np.full(6, -1)))
    m = Measures(table, Layout(pp=2, dp=8))
    assert m.role.tolist() == [0] * 8 + [1] * 8


def test_places_are_read_from_messages():
    assert Where().moved({"metric": "wait_s", "rank": 3, "host": None}).told()["rank"] == 3
    with pytest.raises(MappnbError, match="expected a text"):
        Where().moved({"order": None})


def test_data_of_a_slow_host(tmp_path):
    where = tmp_path / "run"
    generate_run(
        where,
        layout=Layout(dp=8),
        num_steps=8,
        num_microbatches=4,
        ranks_per_host=2,
        seed=3,
        faults=[SlowHost(host=2, factor=1.4)],
    )
    data = StragglerData(mappnb.attach(where))
    ratio = np.median(data.m.values("ratio"), axis=0)
    assert set(np.argsort(ratio)[-2:].tolist()) == {4, 5} and data.groupings == (
        "stage",
        "dp_rank",
        "rank",
        "host",
        "op",
    )
