"""A trace that does not tell the layout is not shown as if it did."""

from __future__ import annotations

import pytest
from capture.importers.trace_files import write_kineto

import mappnb
from mappnb import Layout, analysis
from mappnb.capture.importers import import_trace
from mappnb.inspection import info_text
from mappnb.testing import generate_run
from mappnb.testing.runs import make_run


@pytest.fixture
def run(tmp_path):
    import_trace(write_kineto(tmp_path / "t"), tmp_path / "run")
    return mappnb.attach(tmp_path / "run")


def test_no_layout_is_shown_where_the_trace_tells_none(run, tmp_path):
    assert repr(run) == "Run(4 ranks, layout not in the trace)"
    assert "layout not in the trace (4 ranks on host0, host1)" in run._repr_html_() and "dp4" not in run._repr_html_()
    info = info_text(run.path)
    assert "layout     not in the trace, 4 ranks" in info and "dp4" not in info and "versions" not in info
    assert run.layout == Layout(dp=4)  # what analyses work with
    assert "dp3" not in analysis.export(run, tmp_path / "t.json").read_text()


def test_a_single_rank_needs_no_layout(tmp_path):
    import_trace(write_kineto(tmp_path / "t", 1), tmp_path / "run")
    assert repr(mappnb.attach(tmp_path / "run")) == "Run(1 ranks, single rank)"


def test_a_generated_run_shows_no_empty_rows(tmp_path):
    generate_run(tmp_path / "run", layout=Layout(dp=2), num_steps=1)
    run = mappnb.attach(tmp_path / "run")
    assert not run.meta["versions"] and "versions" not in run._repr_html_()
    assert "<td style='text-align:left'></td>" not in run._repr_html_()


def test_recorded_runs_show_theirs(tmp_path):
    run = mappnb.attach(make_run(tmp_path / "run", layout=Layout(dp=2)))
    assert repr(run) == "Run(2 ranks, dp2)"
