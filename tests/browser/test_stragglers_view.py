"""The stragglers view in a real browser: alone with its kernel half, in JupyterLab cut off from the world, and as a page."""

from __future__ import annotations

import pytest
from browser import lab
from browser.live_page import LivePage, live
from browser.looking import axe_finds, open_file, picture

import mappnb
from mappnb.layout import Layout
from mappnb.testing._gen_faults import SlowHost, SlowRank
from mappnb.testing.generate import generate_run

pytestmark = [pytest.mark.browser, pytest.mark.timeout(420)]

ROOT = ".mappnb-strag"
SLOW = 13
HEAT = "document.querySelector('.mappnb-strag').mappnbView.heat"
DRAWN = f"""() => {{ const v = document.querySelector('.mappnb-strag');
  return Boolean(v && v.mappnbView && {HEAT}.view && v.mappnbView.verdicts.rows.length); }}"""
AT = f"""([row, col]) => {{ const h = {HEAT}; const b = h.inner.getBoundingClientRect(); const {{ bbox, x_range: x }} = h.view.frame;
  const along = (col + 0.5 - x.start) / (x.end - x.start);
  return [b.left + bbox.left + along * bbox.width, b.top + bbox.top + (row + 0.5) / h.rows * bbox.height]; }}"""
SOURCE = f"""n => {{ const s = {HEAT}.find(n); if (!s) return null;
  return JSON.parse(JSON.stringify(s.data, (k, v) => ArrayBuffer.isView(v) ? [...v] : v)); }}"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    where = tmp_path_factory.mktemp("stragglers")
    generate_run(
        where / "run", layout=Layout(pp=2, dp=4, tp=2), num_steps=12, num_microbatches=4, ranks_per_host=4, seed=4,
        faults=[SlowRank(rank=SLOW, factor=1.5, first_step=4), SlowHost(host=1, factor=1.2, throttle=True)],
    )  # fmt: skip
    return where


@pytest.fixture(scope="module")
def run(folder):
    return mappnb.attach(folder / "run")


def drawn(shown: LivePage) -> None:
    shown.push()
    shown.page.wait_for_function(DRAWN, timeout=30_000)


def level(shown: LivePage, name: str) -> None:
    shown.page.wait_for_function(f"n => {HEAT}.told && {HEAT}.told.level === n", arg=name, timeout=20_000)
    shown.page.wait_for_timeout(200)


@pytest.fixture(params=[pytest.param("light", marks=pytest.mark.slow), "dark"])
def shown(browser, run, request):
    view = run.stragglers()
    with live(browser, view, render="renderStragglers", scheme=request.param) as page:
        drawn(page)
        yield page
    view.close()


def click(shown: LivePage, row: int, col: int, *, twice: bool = False) -> None:
    x, y = shown.page.evaluate(AT, [row, col])
    (shown.page.mouse.dblclick if twice else shown.page.mouse.click)(x, y)
    shown.settle()


def test_heatmap_marks_and_verdicts(shown, request):
    cells = shown.page.evaluate(f"() => [...{HEAT}.values]")
    expected = shown.view.columns["value"]
    assert cells[::12][::-1] == pytest.approx(expected[:, 0].tolist(), rel=1e-6)
    marks = shown.page.evaluate(SOURCE, "marks")
    rows = [r.ranks for r in shown.view._drawn.grid.rows]
    guilty = {rows[int(16 - y)][0] for y, m in zip(marks["y"], marks["marker"], strict=True) if m == "triangle"}
    assert guilty == {SLOW, 4, 5, 6, 7}
    assert shown.page.locator(".mappnb-strag-verdicts tbody tr").count() >= 2
    assert axe_finds(shown.page, ROOT) == []
    picture(shown.page, f"stragglers-{request.node.callspec.params['shown']}")
    assert shown.failed == [] and shown.outside == [] and shown.view.errors == []
    assert max(size for _, size in shown.sizes) <= 500_000


def test_a_verdict_shows_its_evidence(shown):
    shown.page.get_by_role("button", name=f"rank {SLOW}", exact=True).click()
    shown.settle()
    panel = shown.page.locator(".mappnb-strag-evidence")
    assert "culprit" in panel.inner_text() and "1.5" in panel.inner_text()
    assert panel.locator("svg polyline").count() >= 4, "telemetry, this and the others"
    boxes = shown.page.evaluate(SOURCE, "boxes")
    first = shown.view.verdicts["first_step"].iloc[0]
    row = [r.ranks for r in shown.view._drawn.grid.rows].index((SLOW,))
    assert (boxes["left"][0], boxes["right"][0], boxes["top"][0]) == (first, 12, 16 - row)
    assert shown.view.selection["subject"].tolist() == [str(SLOW)]
    panel.get_by_role("button", name="makes others wait").click()
    shown.settle()
    assert shown.view._where.metric == "imposed_s"
    assert axe_finds(shown.page, ROOT) == []
    assert shown.failed == [] and shown.view.errors == []


def test_down_to_an_operation_and_back(shown):
    row = [r.ranks for r in shown.view._drawn.grid.rows].index((SLOW,))
    click(shown, row, 6)
    assert shown.view._picked.ranks == (SLOW,) and shown.view._picked.steps == (6, 6)
    assert (
        "1.5" in shown.page.locator(".mappnb-tip").inner_text()
        and f"rank {SLOW}" in shown.page.locator(".mappnb-tip").inner_text()
    )
    click(shown, row, 6, twice=True)
    level(shown, "rank")
    assert "backward@1" in shown.page.evaluate(f"() => {HEAT}.told.rows.map((r) => r.label)")
    click(shown, 0, 7, twice=True)
    level(shown, "step")
    click(shown, 0, 0)
    chosen = shown.view.selection
    assert set(chosen["op"]) == {"backward_step"} and set(chosen["step"]) == {7} and set(chosen["rank"]) == {SLOW}
    assert axe_finds(shown.page, ROOT) == []
    shown.page.keyboard.press("Backspace")
    level(shown, "rank")
    shown.page.get_by_role("button", name="host3").click()
    level(shown, "host")
    assert len(shown.page.evaluate(f"() => {HEAT}.told.rows")) == 4
    shown.page.get_by_role("button", name="All ranks").click()
    level(shown, "all")
    assert shown.failed == [] and shown.view.errors == []


def test_keys(shown):
    box = shown.page.locator(".mappnb-strag-main .mappnb-strag-figure").first
    box.focus()
    for key in ("ArrowRight", "ArrowRight", "ArrowDown", "ArrowDown", "ArrowDown"):
        shown.page.keyboard.press(key)
    shown.page.keyboard.press(" ")
    shown.settle()
    row = shown.view._drawn.grid.rows[3]
    assert shown.view._picked.ranks == (int(shown.view._data.m.ranks[row.ranks[0]]),) and shown.view._picked.steps == (
        1,
        1,
    )
    assert row.title in box.locator("[aria-live]").inner_text()
    shown.page.keyboard.press("Enter")
    level(shown, "rank")
    shown.page.keyboard.press("Escape")
    level(shown, "host")
    shown.page.keyboard.press("Backspace")
    level(shown, "all")
    assert shown.failed == [] and shown.view.errors == []


def test_prices_and_timeline(shown):
    shown.page.get_by_role("button", name="Replay").click()
    shown.settle(2500)
    panel = shown.page.locator(".mappnb-strag-prices")
    assert "Replay error" in panel.inner_text()
    panel.get_by_label("By").select_option("rank")
    shown.settle(1500)
    names = shown.page.evaluate(
        "() => document.querySelector('.mappnb-strag').mappnbView.prices.figure.find('prices').data.name"
    )
    assert names[0] == f"rank {SLOW}"
    row = [r.ranks for r in shown.view._drawn.grid.rows].index((SLOW,))
    click(shown, row, 5)
    timeline = shown.view.timeline()
    click(shown, row, 8)
    expected = shown.view._data.window_s(first=8, last=8, rank=SLOW)
    assert [timeline.window.start, timeline.window.stop] == pytest.approx(expected, abs=2e-6)
    shown.page.get_by_role("button", name="Show in timeline").click()
    shown.settle()
    assert "linked timeline" in shown.page.locator(".mappnb-status").inner_text()
    timeline.close()
    assert axe_finds(shown.page, ROOT) == []
    assert shown.failed == [] and shown.view.errors == []


def test_a_view_leaves_nothing_and_a_closed_one_says_so(browser, run):
    view = run.stragglers()
    with live(browser, view, render="renderStragglers") as shown:
        drawn(shown)
        view.tell("close")
        shown.settle()
        assert "closed" in shown.page.locator(".mappnb-status").inner_text()
        shown.page.evaluate("() => window.undo()")
        assert shown.page.locator(".mappnb-strag").count() == 0
        assert shown.failed == []
    view.close()


def test_nothing_to_judge(browser, run):
    import numpy as np

    from mappnb.widgets import Stragglers

    events = run.sel(step=3)
    view = Stragglers(events.assign(step=("event", np.full(events.sizes["event"], -1, np.int32))))
    with live(browser, view, render="renderStragglers") as shown:
        shown.settle(800)
        assert "no event belongs to a step" in shown.page.locator(".mappnb-strag-why").inner_text()
        assert shown.page.locator(".mappnb-strag-body:visible").count() == 0
        picture(shown.page, "stragglers-nothing")
        assert shown.failed == [] and view.errors == []


@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.slow)])
def test_page_without_a_kernel(browser, run, tmp_path, scheme):
    view = run.stragglers()
    view.prices  # noqa: B018
    view.to_html(tmp_path / "alone.html")
    page, asked, failed = open_file(browser, tmp_path / "alone.html", scheme=scheme)
    page.wait_for_function(DRAWN, timeout=30_000)
    page.get_by_label("Colour").select_option("imposed_s")
    page.wait_for_timeout(600)
    assert page.evaluate(f"() => {HEAT}.told.where.metric") == "imposed_s"
    page.get_by_role("button", name=f"rank {SLOW}", exact=True).click()
    page.wait_for_timeout(400)
    page.get_by_role("button", name="Look inside").click()
    page.wait_for_function(f"() => {HEAT}.told.level === 'rank'", timeout=10_000)
    page.get_by_role("button", name="Replay").click()
    page.wait_for_timeout(1000)
    assert "Replay error" in page.locator(".mappnb-strag-prices").inner_text()
    picture(page, f"stragglers-alone-{scheme}")
    assert axe_finds(page, ROOT) == []
    assert failed == [] and all(u.startswith(("file:", "blob:", "data:")) for u in asked)
    assert page.locator(".mappnb-error").count() == 0
    page.context.close()
    view.close()


@pytest.mark.slow
def test_in_jupyterlab(browser, folder, tmp_path):
    pytest.importorskip("jupyterlab", reason="needs jupyterlab")
    cells = [
        "import mappnb\nrun = mappnb.attach('run')",
        "view = run.stragglers()\nview",
        "timeline = view.timeline()\ntimeline",
    ]
    lab.write_notebook(folder / "look.ipynb", cells)
    (tmp_path / "home").mkdir()
    with lab.server(folder, home=tmp_path / "home") as address:
        context = browser.new_context(viewport={"width": 1280, "height": 1400}, color_scheme="light")
        found = lab.Lab(context, address)
        found.open("look.ipynb")
        found.run_all()
        found.page.wait_for_function(DRAWN, timeout=60_000)
        assert found.page.locator(".mappnb-still-strag:visible").count() == 0, "the twin hides behind the live view"
        found.page.get_by_role("button", name=f"rank {SLOW}", exact=True).click()
        found.page.wait_for_timeout(1500)
        assert found.kernel("print(view.selection['subject'].tolist())") == f"['{SLOW}']"
        box = found.page.locator(".mappnb-strag-main .mappnb-strag-figure").first
        box.focus()
        found.page.keyboard.press("ArrowDown")
        found.page.keyboard.press("ArrowRight")
        found.page.keyboard.press(" ")
        found.page.wait_for_timeout(1500)
        said = found.kernel("print(len(view.selection) > 3, view.window == timeline.window, view.errors, view.binary)")
        assert said == "True True [] True"
        assert found.page.locator(".jp-Notebook .jp-Cell").count() == len(cells), "no key reached the notebook"
        for theme in ("JupyterLab Dark", "JupyterLab Light"):
            found.theme(theme)
            found.page.wait_for_timeout(1500)
            picture(found.page, f"stragglers-lab-{theme[-5:].strip().lower()}")
        found.save()
        assert (folder / "look.ipynb").stat().st_size < 250_000, "neither data nor BokehJS are in the saved notebook"
        assert found.outside == [] and found.page_errors == []
