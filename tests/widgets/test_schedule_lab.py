"""The schedule lab without a browser: its numbers are simulate()'s, its knobs answer, what cannot run says why."""

from __future__ import annotations

import gzip
import json
import re
import subprocess
import sys

import numpy as np
import pytest
import xarray as xr
from widgets.front import Front

import mappnb
from mappnb.analysis.bubbles import bubble_seconds
from mappnb.errors import CostError, MappnbError, ScheduleError
from mappnb.layout import Layout
from mappnb.sched import Empirical, Straggler
from mappnb.sched.idle import PHASES
from mappnb.testing.runs import make_run
from mappnb.widgets import ScheduleLab
from mappnb.widgets._lab_entries import Builder, Sizes, choices, entries_of
from mappnb.widgets._lab_numbers import lab_columns
from mappnb.widgets._lab_plots import best, columns

COSTS = mappnb.Costs(
    forward_s=0.010, backward_input_s=0.011, backward_weight_s=0.009, p2p_s=0.001, message_bytes=1e7, bandwidth=5e9
)
DEEP = mappnb.Costs(
    forward_s=[0.010, 0.012, 0.010, 0.014],
    backward_input_s=0.011,
    backward_weight_s=0.009,
    p2p_s=0.001,
    optimizer_s=0.02,
    reduce_s=0.01,
    activation=2e9,
    static_memory=1e9,
)
SLOW = (Straggler(rank=1, factor=1.4), Straggler(link=(0, 1), factor=3.0))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lab") / "run"
    make_run(folder, layout=Layout(pp=4, dp=2), num_steps=4, num_microbatches=8)
    return mappnb.attach(folder)


@pytest.fixture
def lab():
    view = ScheduleLab(COSTS, schedules=("1f1b", "interleaved", "zb_v", "dfc"), memory_limit=5)
    yield view
    view.close()


# -------------------------------------------------------------------------------------------------------- the numbers
@pytest.mark.parametrize("costs", [COSTS, DEEP], ids=["numbers", "arrays"])
@pytest.mark.parametrize("stragglers", [(), SLOW], ids=["even", "slow"])
@pytest.mark.parametrize("name", choices())
def test_numbers_are_those_of_simulate(name, costs, stragglers):
    (entry,) = entries_of([name])
    schedule = Builder().build(entry, Sizes(4, 16, 2), costs, stragglers=stragglers)
    mine, theirs = (
        lab_columns(schedule, costs, stragglers=stragglers),
        mappnb.simulate(schedule, costs, stragglers=stragglers),
    )
    for one, other in (
        ("step_s", "makespan_s"),
        ("span_s",) * 2,
        ("bubble_fraction",) * 2,
        ("span_bubble_fraction",) * 2,
    ):
        assert getattr(mine, one) == float(theirs[other]), one
    assert mine.critical_path_s == float(theirs.critical_path_s)
    np.testing.assert_array_equal(mine.memory.peak, theirs.peak_activation)
    np.testing.assert_array_equal(mine.peak_memory, theirs.peak_memory)
    np.testing.assert_array_equal([e[2] for e in mine.edges], theirs.edge_slack_s)
    np.testing.assert_array_equal([e[:2] for e in mine.edges], np.stack([theirs.source, theirs.destination], 1))
    idle = bubble_seconds(theirs).isel(step=0).mean("rank").sel(phase=list(PHASES))
    np.testing.assert_allclose(mine.idle_s, idle, atol=1e-7)
    assert mine.busy_s + mine.idle_s.sum() == pytest.approx(mine.actions_s)
    assert 0 <= mine.transfer_s <= mine.step_s


def test_draws_are_those_of_simulate(rng):
    costs = mappnb.Costs(forward_s=Empirical(rng.gamma(9, 1, 50)), backward_input_s=1.0, backward_weight_s=1.0)
    schedule = mappnb.schedule("1f1b", num_stages=4, num_microbatches=8)
    for seed in (None, 0, 7):
        assert lab_columns(schedule, costs, seed=seed).step_s == float(
            mappnb.simulate(schedule, costs, seed=seed).makespan_s
        )
    view = ScheduleLab(costs, schedules=["1f1b", "dfc"], num_microbatches=8)
    mean = view.results.step_s["1f1b"]
    front = Front(view)
    drawn = front.ask("set", values={"draw": True})[0]
    assert drawn["values"]["draw"] is True and view.results.step_s["1f1b"] != mean
    policy = view.schedules["dfc"]
    assert view.results.step_s["dfc"] == float(mappnb.simulate(policy, costs, seed=0).makespan_s)
    assert "seed=0" in view.code
    front.ask("set", values={"draw": False})
    assert view.results.step_s["1f1b"] == mean


def test_memory_over_time_reaches_the_peak():
    view = ScheduleLab(COSTS, num_ranks=8, num_microbatches=700, schedules=["1f1b"])
    drawn = columns(view._model, "1f1b", time_scale=1.0, memory_scale=1.0)["memory"]
    assert [h.max() for h in drawn["held"]] == view._model.outcomes[0].numbers.memory.peak.tolist()
    assert all(
        (np.diff(t) >= 0).all() and len(t) == len(h) < 1100 for t, h in zip(drawn["t"], drawn["held"], strict=True)
    )
    assert view.results.step_s["1f1b"] == pytest.approx(float(drawn["t"][0][-1]), rel=1e-6)


def test_pareto_front(rng):
    step, peak = rng.integers(1, 8, (2, 30)).astype(float)
    mine = best(step, peak)
    for i in range(30):
        beaten = any(
            step[k] <= step[i] and peak[k] <= peak[i] and (step[k], peak[k]) != (step[i], peak[i]) for k in range(30)
        )
        assert mine[i] == (not beaten)
    view = ScheduleLab(COSTS, schedules=choices())
    drawn = columns(view._model, "1f1b", time_scale=1e3, memory_scale=1.0)
    front = {n for n, s in zip(drawn["pareto"]["name"], drawn["pareto"]["said"], strict=True) if s}
    assert (
        front
        and len(front) <= 9
        and (np.diff(drawn["front"]["x"]) >= 0).all()
        and (np.diff(drawn["front"]["y"]) <= 0).all()
    )


def test_bars_sum_to_the_step():
    view = ScheduleLab(DEEP, schedules=["1f1b", "zb_v"])
    bars = columns(view._model, "1f1b", time_scale=1e3, memory_scale=1.0)["bars"]
    whole = sum(bars[p] for p in ("busy", *PHASES, "after"))
    assert (bars["after"] > 20).all(), "the optimizer takes 20 ms"
    np.testing.assert_allclose(whole, 1e3 * view.results.step_s, rtol=1e-5)


# ------------------------------------------------------------------------------------------------ a view in a notebook
def test_knobs_simulate_anew(lab):
    front = Front(lab)
    content, _ = front.last("state")
    assert {c["name"] for c in content["controls"]} >= {"forward_s", "transfer_s", "memory_limit", "slow_kind", "draw"}
    assert all(len(c["help"]) > 20 and c["label"] for c in content["controls"])
    assert content["values"]["forward_s"] == pytest.approx(10) and content["values"]["transfer_s"] == pytest.approx(2)
    told, arrays = front.ask("set", values={"forward_s": 20.0, "p2p_s": 3.0, "transfer_s": 4.0, "num_microbatches": 8})
    assert lab.costs.forward_s == pytest.approx(0.02) and lab.costs.bandwidth == pytest.approx(1e7 / 0.004)
    expected = mappnb.simulate(mappnb.schedule("1f1b", num_stages=4, num_microbatches=8), lab.costs)
    assert lab.results.step_s["1f1b"] == float(expected.makespan_s)
    assert told["table"]["rows"][0]["cells"][1] == f"{float(expected.makespan_s) * 1e3:.4g} ms"
    assert arrays["pareto.step"][0] == pytest.approx(float(expected.makespan_s) * 1e3, rel=1e-6)
    assert lab.errors == []


def test_windows_come_with_the_answer(lab):
    """What a lane would ask for next is in the answer to a move."""
    front = Front(lab)
    told, arrays = front.ask("set", values={"forward_s": 12.0}, view={"pixels": 900, "t0": None, "t1": None})
    assert [w["label"] for w in told["windows"]] == list(lab.schedules)
    whole = told["lanes"][0]["meta"]["extent"][1]
    for window in told["windows"]:
        rows = (0, 4)
        view = {"t0": -0.004 * whole, "t1": 1.004 * whole, "pixels": 900, "row0": rows[0], "row1": rows[1]}
        _, asked = front.ask("window", lane=window["label"], **view)
        for name, array in asked.items():
            np.testing.assert_array_equal(arrays[f"{window['prefix']}{name}"], array)
    told, _ = front.ask("set", values={"num_microbatches": 18}, view={"pixels": 900, "t0": 1e6, "t1": 2e6})
    assert "interleaved" not in [w["label"] for w in told["windows"]] and told["windows"][0]["t1"] == 2e6
    assert front.ask("set", values={}, view=[3])[0]["windows"] == [] and lab.errors == []


def test_straggler_knob(lab):
    front = Front(lab)
    before = lab.results.step_s["zb_v"]
    front.ask("set", values={"slow_kind": "rank", "slow_which": 2, "slow_factor": 2.0})
    assert lab._model.stragglers == (Straggler(rank=2, factor=2.0),) and lab.results.step_s["zb_v"] > 1.3 * before
    front.ask("set", values={"slow_kind": "link", "slow_which": 3})
    assert lab._model.stragglers[0].link == (3, 0)
    told = front.ask("set", values={"slow_kind": "stage", "slow_which": 6})[0]
    assert told["table"]["rows"][0]["why"] == "straggler: stage 6; the schedule has stages 0 to 3"
    assert told["table"]["rows"][2]["fits"], "zb_v has eight stages"
    front.ask("set", values={"slow_kind": "none"})
    assert lab.results.step_s["zb_v"] == before


def test_what_cannot_run_says_why(lab):
    front = Front(lab)
    told = front.ask("set", values={"num_microbatches": 18})[0]
    row = next(r for r in told["table"]["rows"] if r["label"] == "interleaved")
    with pytest.raises(ScheduleError) as direct:
        mappnb.schedule("interleaved", num_stages=8, num_microbatches=18, num_chunks=2)
    assert row["why"] == str(direct.value) and row["cells"][-1] == "cannot run"
    lane = next(v for v in told["lanes"] if v["label"] == "interleaved")
    assert lane["meta"]["empty"] == row["why"] and not lane["pickable"]
    assert np.isnan(lab.results.step_s["interleaved"]) and lab.results.why["interleaved"] == row["why"]
    assert lab.schedules["interleaved"] is None and lab.schedules["1f1b"] is not None
    assert lab.errors == []


def test_what_does_not_fit_is_drawn_with_the_reason():
    view = ScheduleLab(COSTS, schedules=["gpipe", "1f1b", "dfc"], memory_limit=4.0)
    told = Front(view).last("state")[0]
    assert "memory exceeds 4" in told["table"]["rows"][0]["why"] and told["lanes"][0]["pickable"]
    assert view.results.fits.tolist() == [False, True, True], "a policy keeps to the limit"
    assert view.results.peak_memory["dfc"] <= 4.0
    view.set(memory_limit=None)
    assert view.results.fits.all() and view.results.why.eq("").all()


def test_lanes_share_their_time_axis_and_answer_windows(lab):
    front = Front(lab)
    lanes = front.last("state")[0]["lanes"]
    assert len({tuple(v["meta"]["extent"]) for v in lanes}) == 1
    extent = lanes[0]["meta"]["extent"]
    assert extent[1] == pytest.approx(lab.results.step_s.max() * 1e9)
    content, arrays = front.ask("window", lane="interleaved", t0=0.0, t1=extent[1], pixels=1200, row0=0, row1=4)
    assert content["lane"] == "interleaved" and content["num_events"] == 2 * 8 * 16
    assert set(arrays["row"]) == {0, 1, 2, 3} and arrays["cat"].max() == 1
    zoomed, arrays = front.ask("window", lane="zb_v", t0=0.0, t1=extent[1] / 50, pixels=1200, row0=0, row1=4)
    assert zoomed["labels"][0] == "0F0" and len(arrays["row"]) < 20
    said = front.ask("describe", lane="zb_v", event=0)[0]
    assert said["title"] == "0F0" and ["place", "rank 0, stage 0"] in said["fields"]
    assert front.ask("ready", lane="zb_v")[0]["kind"] == "meta"
    front.say("window", lane="zb_v", t0=1.0, t1=0.0, pixels=10, row0=0, row1=4)
    assert "ends after it begins" in lab.errors[-1]


def test_choose_and_pick(lab):
    front = Front(lab)
    told = front.ask("choose", names=["zb_h2", "1f1b"])[0]
    assert [r["label"] for r in told["table"]["rows"]] == ["zb_h2", "1f1b"] and lab.selected == "1f1b"
    content, arrays = front.ask("pick", label="zb_h2")
    assert lab.selected == "zb_h2" and content["plots"]["memory"]["name"]["list"] == [f"rank {r}" for r in range(4)]
    assert arrays["memory.held"].max() == lab.results.peak_memory["zb_h2"]
    front.say("pick", label="zb_h3")
    assert "did you mean 'zb_h2'" in lab.errors[-1]
    front.say("choose", names=["nothing"])
    assert "unknown schedule 'nothing'" in lab.errors[-1]
    lab.selected = "1f1b"
    assert front.last("pick")[0]["selected"] == "1f1b"


@pytest.mark.parametrize(
    "values",
    [
        {"forward_s": "x"},
        {"forward_s": -1},
        {"p2p_s": None},
        {"slow_kind": "host"},
        {"draw": 3},
        {"num_microbatches": []},
    ],
)
def test_what_the_browser_sends_is_not_trusted(lab, values):
    before = lab.results
    Front(lab).say("set", values=values)
    assert len(lab.errors) == 1
    assert lab.results.equals(before)


def test_messages_are_small():
    view = ScheduleLab(COSTS, num_ranks=16, num_microbatches=128)
    front = Front(view)
    for label in view.schedules:
        front.ask("window", lane=label, t0=0.0, t1=6e9, pixels=2000, row0=0, row1=16)
    front.ask("set", values={"forward_s": 11.0})
    assert front.largest < 300_000


# ------------------------------------------------------------------------------------------------------ code and state
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"schedules": ["zb_v", ("interleaved", {"num_chunks": 4}), "adaptive"], "num_ranks": 2, "memory_limit": 3.5},
        {"stragglers": [Straggler(stage=1, factor=1.7)], "num_microbatches": 12, "seed": 4, "selected": "1f1b"},
        {"stragglers": [Straggler(rank=0, factor=1.2, kinds="F"), Straggler(link=(1, 2), factor=5.0)]},
    ],
)
def test_code_makes_the_same_lab(options):
    view = ScheduleLab(COSTS, **options)
    Front(view).ask("set", values={"backward_input_s": 14.5})
    again = eval(view.code, {"mappnb": mappnb})
    assert again.results.equals(view.results) and again.code == view.code and again.selected == view.selected


def test_code_of_costs_that_are_arrays():
    view = ScheduleLab(
        DEEP, schedules=["1f1b", mappnb.schedule("zb_h1", num_stages=4, num_microbatches=16)], adjust={"forward_s": 1.5}
    )
    assert view.costs.forward_s == pytest.approx(1.5 * np.asarray(DEEP.forward_s))
    again = eval(view.code, {"mappnb": mappnb, "costs": DEEP, "zb_h1": view.schedules["zb_h1"]})
    assert again.results.equals(view.results)


def test_description_is_stable(lab):
    assert repr(lab) == "ScheduleLab(1f1b, interleaved, zb_v, dfc; 4 ranks, 16 microbatches)"


def test_nothing_is_synced_but_an_id(lab):
    synced = {k for k in lab.get_state() if not k.startswith(("_", "layout", "tabbable", "tooltip"))}
    assert synced == {"twin_id"}
    lab.close()
    assert lab.closed and lab._lanes == [] and lab._model.outcomes == []


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"schedules": ["1f1"]}, ScheduleError, "did you mean '1f1b'"),
        ({"schedules": [3]}, ScheduleError, "expected a name"),
        ({"adjust": {"forwards": 1.0}}, CostError, "did you mean 'forward_s'"),
        ({"adjust": {"p2p_s": -1.0}}, CostError, "at least 0"),
        ({"selected": "zb"}, MappnbError, "no schedule 'zb'"),
    ],
)
def test_bad_options(options, error, said):
    with pytest.raises(error, match=re.escape(said)):
        ScheduleLab(COSTS, **options)


# ------------------------------------------------------------------------------------------------------- recorded runs
def test_lab_of_a_run(run):
    view = run.schedule_lab(schedules=["1f1b", "interleaved"])
    assert list(view.schedules) == ["replay", "1f1b", "interleaved"]
    replay = view._model.replay
    expected = mappnb.simulate(view.schedules["replay"], mappnb.fit_costs(run))
    ends = expected.end_s.values[expected.category.values == "compute"]
    assert replay.replayed_s == pytest.approx(float(ends.max()))
    assert view.replay_error == replay.replayed_s / replay.recorded_s - 1
    told = Front(view).last("state")[0]
    assert told["lanes"][0]["label"].startswith("recorded, step") and not told["lanes"][0]["pickable"]
    assert f"replay error {replay.error:+.1%}" in told["says"] and "not told apart" in told["says"]
    assert view.results.attrs["replay_error"] == replay.error
    assert told["table"]["rows"][0]["cells"][2] == "reference"
    again = eval(view.code, {"run": run, "mappnb": mappnb})
    assert again.results.equals(view.results)


def test_no_conclusion_below_the_replay_error(run):
    view = run.schedule_lab(schedules=["1f1b", "gpipe", "interleaved"])
    for outcome, row in zip(view._model.outcomes, Front(view).last("state")[0]["table"]["rows"], strict=True):
        change = outcome.numbers.step_s / view._model.outcomes[0].numbers.step_s - 1
        told = row["cells"][2]
        assert told == "reference" or (told == "within the error") == (abs(change) <= view._model.replay.resolution)


def test_lab_of_simulated_events_replays_exactly():
    events = mappnb.simulate(mappnb.schedule("zb_h1", num_stages=4, num_microbatches=8), COSTS, num_steps=3)
    assert isinstance(events, xr.Dataset)
    view = ScheduleLab(run=events, schedules=["1f1b"])
    assert view.schedules["replay"] == mappnb.schedule("zb_h1", num_stages=4, num_microbatches=8)
    assert abs(view.replay_error) < 0.01
    assert view.results.step_s["1f1b"] > view.results.step_s["replay"]
    again = eval(view.code, {"mappnb": mappnb, "run": events})
    assert again.results.equals(view.results)


def test_costs_given_beside_a_run(run):
    view = ScheduleLab(COSTS, run=run, schedules=["1f1b"])
    assert view.costs is COSTS and "costs, run=run" in view.code


# -------------------------------------------------------------------------------------------------------------- static
def test_twin_and_snapshot(lab, tmp_path):
    twin = lab.twin_html()
    assert "<svg" in twin and "zb_v" in twin and "<script" not in twin and len(twin) < 60_000
    shot = lab.snapshot()
    assert repr(shot) == f"Snapshot of {lab.describe()}" and "mappnb.Costs" in shot._repr_html_()
    shot.save(tmp_path / "lab.svg")
    import xml.etree.ElementTree as ET

    assert ET.parse(tmp_path / "lab.svg").getroot().tag.endswith("svg")


def test_page_is_self_contained(lab, tmp_path):
    html = lab.to_html(tmp_path / "lab.html")
    assert (tmp_path / "lab.html").read_text(encoding="utf-8") == html and len(html) < 1_500_000
    data = json.loads(re.search(r'id="data">(.*?)</script>', html, re.S)[1])
    assert set(data["lanes"]) == set(data["memory"]) == set(lab.schedules)
    assert set(data["figures"]) == {"light", "dark"} and data["code"] == lab.code
    assert not re.search(r"<(script|link|img)[^>]+(src|href)=", html)


def test_names_are_escaped():
    evil = mappnb.sched.Schedule(
        mappnb.schedule("1f1b", num_stages=2, num_microbatches=2).ranks, name="</script><img src=x onerror=alert(1)>"
    )
    view = ScheduleLab(COSTS, schedules=[evil], num_ranks=2, num_microbatches=2)
    for html in (view.twin_html(), view.to_html(), view.snapshot()._repr_html_()):
        assert "<img src=x" not in html


def test_bokeh_comes_from_the_kernel(lab):
    import bokeh

    front = Front(lab)
    content, arrays = front.ask("bokeh", version="")
    assert content["version"] == bokeh.__version__
    script = gzip.decompress(b"".join(arrays[f"js{i}"].tobytes() for i in range(2)))
    assert b"BokehJS" in script or b"Bokeh" in script
    assert front.ask("bokeh", version=bokeh.__version__)[1] == {}
    made = front.ask("figures", theme="dark", ground="rgb(1, 2, 3)")[0]["figures"]
    assert set(made) == {"memory", "pareto", "bars"} and "rgb(1, 2, 3)" in json.dumps(made)
    assert "javascript" not in json.dumps(front.ask("figures", theme="light", ground="javascript:0")[0])


def test_bokeh_is_not_imported_with_mappnb():
    code = "import sys, mappnb.widgets; assert 'bokeh' not in sys.modules; mappnb.widgets.ScheduleLab; assert 'bokeh' not in sys.modules"
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=60)
