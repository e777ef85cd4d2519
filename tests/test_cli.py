"""The command line and the report: exit statuses, messages, and a page that needs nothing else."""

from __future__ import annotations

import html.parser
import re
import sys

import pytest

import mappnb
from mappnb.cli import main
from mappnb.doctor import doctor
from mappnb.errors import MappnbError
from mappnb.layout import Layout
from mappnb.report import report_html, summary, write_report
from mappnb.stepview import MOST_SHAPES, timeline_columns
from mappnb.testing.runs import make_run


@pytest.fixture
def run_dir(tmp_path):
    return make_run(tmp_path / "my run", layout=Layout(pp=2, dp=2), num_steps=4)


def test_info(run_dir, capsys):
    assert main(["info", str(run_dir)]) == 0
    out = capsys.readouterr().out
    assert "pp2 × dp2, 4 ranks" in out and "(ended)" in out and re.search(r"events +\d", out)


def test_check_of_a_good_run(run_dir, capsys):
    assert main(["check", str(run_dir)]) == 0
    assert "no problem found" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda p: (p / "inc=000/ranks/rank=00002.json").unlink(), "ranks [2] left no file"),
        (lambda p: (p / "inc=000/ranks/rank=00002.json").write_text("{"), "rank=00002.json: unreadable"),
        (lambda p: (p / "inc=000/incarnation.json").unlink(), "incarnation.json: missing"),
        (
            lambda p: (p / "inc=000/events/rank=00001/seg-000000.parquet").write_bytes(b"PAR1"),
            "transfers are not complete on every member",
        ),
        (lambda p: (p / "inc=000/steps/rank=00001/seg-000000.parquet").write_bytes(b""), "steps/rank=00001/seg-000000"),
    ],
)
def test_check_names_the_damage(run_dir, capsys, damage, text):
    damage(run_dir)
    assert main(["check", str(run_dir)]) == 1
    assert text in capsys.readouterr().out


def test_check_decodes_every_page(tmp_path, capsys):
    path = make_run(tmp_path / "run", num_steps=40)
    victim = path / "inc=000/events/rank=00000/seg-000000.parquet"
    data = bytearray(victim.read_bytes())
    data[100:400] = bytes(300)  # the footer is whole: only reading the rows can tell
    victim.write_bytes(data)
    assert main(["check", str(path)]) == 1
    assert "seg-000000.parquet: unreadable" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["info", "check", "report"])
def test_not_a_run(tmp_path, capsys, command):
    assert main([command, str(tmp_path / "nowhere")]) == 2
    err = capsys.readouterr().err
    assert err.startswith("mappnb: ") and "no such folder" in err and "Traceback" not in err


def test_unknown_command_is_usage(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["shedule"])
    assert stop.value.code == 2 and "invalid choice: 'shedule'" in capsys.readouterr().err


def test_doctor(tmp_path, capsys):
    assert main(["doctor", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "native core" in out and "writable" in out
    blocked = tmp_path / "file"
    blocked.write_text("x")
    assert any(f.level == "bad" and "choose a folder" in f.cure for f in doctor(blocked))


class _Page(html.parser.HTMLParser):
    """Collects what would make a browser ask for something, and checks that tags close."""

    def __init__(self):
        super().__init__()
        self.outside, self.tags, self.open = [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.outside += [v for k, v in attrs if k in ("src", "href", "srcset", "action", "data") and v]
        if tag not in ("meta", "br", "img", "i") and not self.get_starttag_text().endswith("/>"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag in self.open:
            while self.open.pop() != tag:
                pass


def test_report_needs_nothing_else(run_dir, capsys):
    assert main(["report", str(run_dir)]) == 0
    path = run_dir / "report.html"
    assert capsys.readouterr().out.strip() == str(path)
    text = path.read_text()
    page = _Page()
    page.feed(text)
    assert page.outside == [] and page.open == [] and "script" not in page.tags
    assert "http" not in re.sub(r"arxiv:\S+", "", text) and "@import" not in text and "url(" not in text
    assert page.tags.count("svg") == 8  # heatmap, three what-if charts, two curves, one step, breakdown
    assert "rank 3 · pp1 dp1" in text


def test_report_escapes_everything(tmp_path):
    evil = "<script>alert(1)</script>"
    run = mappnb.attach(make_run(tmp_path / "<i>run", layout=Layout(dp=2), name=evil))
    text = report_html(run)
    assert "<script" not in text and "<i>run" not in text and "&lt;i&gt;run" in text


def test_report_shows_what_is_missing(tmp_path):
    run = mappnb.attach(make_run(tmp_path / "run", layout=Layout(dp=2), ranks=[0], ended=False))
    text = report_html(run)
    assert "ranks [1] left no file" in text and "not ended in good order" in text


def test_report_of_a_run_without_steps_says_so(tmp_path, capsys):
    path = make_run(tmp_path / "run", num_steps=0)
    assert main(["report", str(path)]) == 2
    assert "no step has ended yet" in capsys.readouterr().err


def test_report_of_many_ranks_stays_small(tmp_path):
    run = mappnb.attach(make_run(tmp_path / "run", layout=Layout(dp=80), num_steps=2))
    text = report_html(run)
    assert "The first 64 of 80 ranks" in text and len(text) < 2_000_000


def test_summary_takes_the_step_nearest_to_the_median(run_dir):
    facts = summary(mappnb.attach(run_dir))
    assert facts["step"] in (1, 2, 3) and facts["stats"].num_steps == 4


def test_timeline_columns(run_dir):
    events = mappnb.attach(run_dir).sel(step=1)
    columns = timeline_columns(events)
    blocks = columns["block"]
    assert blocks.sum() == 4 * 2 * 4  # ranks × (forward, backward) × microbatches
    assert set(columns["what"][blocks]) == {"forward", "backward"}
    assert columns["left_ms"].min() == 0 and (columns["width_ms"] > 0).all() and len(blocks) <= MOST_SHAPES
    frame = events.to_dataframe()
    assert columns["width_ms"].max() == pytest.approx(frame[frame.category != "mark"].duration_ns.max() / 1e6)


def test_write_report_elsewhere(run_dir, tmp_path):
    assert write_report(mappnb.attach(run_dir), tmp_path / "out.html").read_text().startswith("<!doctype html>")


def demo_args(*words):
    return ["demo", *words]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--steps", "0"], "--steps is 0; expected at least 1"),
        (["--pp", "0"], "--pp is 0; expected at least 1"),
        (["--sequence-parallel"], "tp"),
        (["--slow-rank", "9", "--slow-ms", "5"], "9"),
        (["--slow-link", "a,b"], "slow_link"),
        (["--plan", "defualt"], "did you mean 'default'"),
    ],
)
def test_demo_says_what_is_wrong_before_it_starts(tmp_path, capsys, words, text):
    pytest.importorskip("megatron.core", reason="needs torch and megatron-core")
    assert main(["demo", "--run-dir", str(tmp_path / "run"), *words]) == 2
    err = capsys.readouterr().err
    assert text in err and "Traceback" not in err
    assert not (tmp_path / "run").exists()


def test_demo_overwrites_nothing(tmp_path, capsys):
    pytest.importorskip("megatron.core", reason="needs torch and megatron-core")
    run = make_run(tmp_path / "run")
    assert main(["demo", "--run-dir", str(run)]) == 2
    assert "add --replace to remove it" in capsys.readouterr().err
    (run / "notes.txt").write_text("mine")
    assert main(["demo", "--run-dir", str(run), "--replace"]) == 2
    assert "choose another --run-dir" in capsys.readouterr().err
    assert (run / "notes.txt").read_text() == "mine" and mappnb.attach(run).steps.sizes["step"] == 3


def test_module_runs_as_a_program():
    import subprocess

    out = subprocess.run([sys.executable, "-m", "mappnb.cli", "--help"], capture_output=True, text=True, check=True)
    assert "doctor" in out.stdout


def test_views_registry_is_open(run_dir, monkeypatch):
    """A package can add a view: run.<name>() finds it by its entry point."""

    class Entry:
        name = "census"

        def load(self):
            return lambda run, **options: (run.meta["world_size"], options)

    monkeypatch.setattr("mappnb.run.entry_points", lambda group: [Entry()] if group == "mappnb.views" else [])
    run = mappnb.attach(run_dir)
    assert run.census(by="host") == (4, {"by": "host"}) and "census" in dir(run)
    with pytest.raises(AttributeError, match="did you mean 'census'"):
        run.censsus()


def test_errors_are_of_one_family():
    from mappnb import errors

    for name in errors.__all__:
        kind = getattr(errors, name)
        assert not isinstance(kind, type) or issubclass(kind, MappnbError)
