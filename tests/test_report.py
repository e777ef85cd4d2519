"""The report's findings: verdicts, heatmap, worst step, what-if, actions; as a page and as JSON; with whatever a run lacks."""

from __future__ import annotations

import html.parser
import json
import shutil

import numpy as np
import pytest
from live_run import LiveRun

import mappnb
from mappnb import Layout
from mappnb._report_facts import add_findings, report_data, worst_step
from mappnb._report_heat import EDGES, MOST_ROWS, heatmap, peer_ratio
from mappnb.analysis import work
from mappnb.cli import main
from mappnb.report import report_html, summary, verdict_lines, write_report
from mappnb.stepview import step_timeline
from mappnb.testing import SlowRank, SlowStage, generate_run
from mappnb.testing.runs import make_run

LAYOUT = Layout(tp=2, dp=4, pp=2)


def generated(path, *faults, steps=14, layout=LAYOUT, **options):
    generate_run(path, layout=layout, num_steps=steps, num_microbatches=4, seed=1, faults=list(faults), **options)
    return path


@pytest.fixture(scope="module")
def slow(tmp_path_factory):
    return generated(
        tmp_path_factory.mktemp("report") / "run", SlowRank(rank=9, factor=1.5, first_step=5, last_step=10)
    )


@pytest.fixture(scope="module")
def facts(slow):
    run = mappnb.attach(slow)
    return add_findings(run, summary(run))


def text_of(page):
    class Text(html.parser.HTMLParser):
        found: list[str]

        def handle_data(self, data):
            self.found.append(data)

    parser = Text()
    parser.found = []
    parser.feed(page)
    return " ".join(parser.found)


def test_page_and_json_say_the_same(slow, facts, tmp_path):
    out = write_report(mappnb.attach(slow), tmp_path / "x.html", json_output=tmp_path / "x.json", facts=facts)
    text = text_of(out.read_text())
    data = json.loads((tmp_path / "x.json").read_text(), parse_constant=pytest.fail)
    assert [v["subject"] for v in data["verdicts"] if v["verdict"] == "culprit"] == ["9"]
    first = data["actions"][0]
    assert first["subject"] == "9" and first["gain_s"] > 0 and f"{first['gain_gpu_hours']:.3g} GPU-hours" in text
    assert first["evidence"] in text and "host host1 (rank 9)" in text
    assert data["what_if"]["slowdown"] > 1.05 and f"{data['what_if']['slowdown']:.3f}" in text
    assert (
        data["worst_step"]["step"] in range(5, 11) and f"Step {data['worst_step']['step']}: rank 9 (hardware)" in text
    )
    assert (
        set(data["what_if"]["slowdown_by_stage"]) == {"0", "1"} and data["num_clear"] >= 10 and data["not_made"] == {}
    )


def test_json_alone_by_name(slow, tmp_path, capsys):
    assert main(["report", str(slow), "-o", str(tmp_path / "r.json")]) == 0
    assert json.loads((tmp_path / "r.json").read_text())["run"]["world_size"] == 16
    assert capsys.readouterr().out.strip() == str(tmp_path / "r.json")
    assert not (slow / "report.html").exists()


def test_worst_step_is_the_one_in_which_the_culprit_costs_most(facts):
    step, row = worst_step(facts)
    own = facts["work"].sel(rank=9).seconds.sum("part")
    assert step == int(own["step"][int(np.argmax(own.values))]) and row["subject"] == "9"


def test_its_lane_is_marked(slow):
    run = mappnb.attach(slow)
    plain = step_timeline(run.sel(step=6), labels={})
    marked = step_timeline(run.sel(step=6), labels={}, marked=[9])
    assert 'class="t mark">rank 9<' in marked and "mark" not in plain


def test_verdict_lines(facts):
    (line,) = verdict_lines(facts)
    assert line.startswith("rank 9 is slow: hardware, ") and "put right, a step would be" in line


def test_clean_run(tmp_path):
    run = mappnb.attach(generated(tmp_path / "run", steps=12))
    facts = add_findings(run, summary(run))
    text = text_of(report_html(run, facts=facts))
    assert (
        "Nothing to fix found." in text and "would have been named" in text and "Checked: 16 ranks in 12 steps" in text
    )
    assert verdict_lines(facts) == ["nobody is slow"] and report_data(run, facts)["worst_step"] is None


def test_without_a_step_table(slow, tmp_path):
    path = tmp_path / "copy"
    shutil.copytree(slow, path)
    for table in ("steps", "metrics", "telemetry"):
        shutil.rmtree(path / "inc=000" / table, ignore_errors=True)
    text = text_of(report_html(mappnb.attach(path)))
    assert "no losses were recorded" in text and "No losses were recorded." in text and "Rank 9 is slow" in text


def test_of_a_live_run(slow, tmp_path):
    live = LiveRun(slow, tmp_path / "live")
    live.write(0, 8)
    try:
        text = text_of(report_html(mappnb.attach(live.path)))
    finally:
        LiveRun.abandon_all()
    assert "Rank 9 is slow" in text and "has not ended in good order (recording)" in text


def test_too_short_to_judge(tmp_path):
    run = mappnb.attach(make_run(tmp_path / "run", layout=Layout(dp=2), num_steps=2))
    text = text_of(report_html(run))
    assert (
        "Not judged." in text
        and "rank 0, rank 1 : undecided: too short to judge" in text
        and "Nothing to fix" not in text
    )


def test_one_rank(tmp_path):
    run = mappnb.attach(make_run(tmp_path / "run", layout=Layout(), num_steps=6))
    assert "Who is slow" in text_of(report_html(run))


# ---------------------------------------------------------------------------------------------------------- heatmap
def test_ratio_to_peers(slow):
    table = work(mappnb.attach(slow))
    ratio = peer_ratio(table, LAYOUT)
    inside = np.isin(table["step"].values, range(5, 11))
    assert np.nanmedian(ratio[inside, 9]) == pytest.approx(1.5, abs=0.05)
    others = np.delete(ratio, 9, axis=1)
    assert np.nanmax(np.abs(others - 1)) < 0.1


def test_heatmap_of_many_ranks_and_steps_is_small():
    import xarray as xr

    rng = np.random.default_rng(0)
    steps, ranks = 2000, 300
    seconds = rng.normal(1, 0.01, (steps, ranks, 1))
    seconds[700:720, 123] = 1.8
    table = xr.Dataset(
        {
            "seconds": (("step", "rank", "part"), seconds),
            "count": (("step", "rank", "part"), np.ones(seconds.shape, np.int32)),
            "present": (("step", "rank"), np.ones((steps, ranks), bool)),
        },
        coords={
            "step": np.arange(steps), "rank": np.arange(ranks), "part_kind": ("part", np.array(["forward"], object)),
            "part_stage": ("part", [0]),
        },
    )  # fmt: skip
    picture = heatmap(table, Layout(dp=ranks), labels={}, named=[7])
    assert len(picture) < 300_000 and f"{MOST_ROWS} of 300 ranks" in picture and "up to 9 steps" in picture
    assert 'class="t mark">rank 7<' in picture and len(EDGES) == 7
    assert "#b3261e" in picture.split("<svg")[1]  # the colour from 1.5 on


def test_stage_marks_its_ranks(tmp_path):
    run = mappnb.attach(generated(tmp_path / "run", SlowStage(stage=1, factor=1.5)))
    page = report_html(run)
    assert "--decoder-last-pipeline-num-layers" in page
    assert page.count('class="t mark">rank') >= 8


@pytest.mark.slow
def test_of_1024_ranks(tmp_path):
    layout = Layout(tp=8, dp=32, pp=4)
    run = mappnb.attach(generated(tmp_path / "run", SlowRank(rank=17, factor=1.5), steps=6, layout=layout))
    page = report_html(run)
    assert len(page) < 3_000_000 and "Rank 17 is slow" in text_of(page)
