"""The schedule lab where it is used: JupyterLab in a real browser, cut off from the world, in both themes and two widths."""

from __future__ import annotations

import re

import pytest
from browser import lab
from browser.looking import PICTURES, axe_finds, open_file, picture

pytestmark = [pytest.mark.browser, pytest.mark.timeout(420)]

CELLS = [
    "import mappnb\nfrom mappnb.widgets import ScheduleLab\n"
    "costs = mappnb.Costs(forward_s=0.010, backward_input_s=0.011, backward_weight_s=0.009, p2p_s=0.001)",
    "lab = ScheduleLab(costs, schedules=('1f1b', 'interleaved', 'zb_h1', 'zb_v'), memory_limit=4.5)\nlab",
]
ROOT = ".mappnb-lab"
DRAWN = """() => { const v = document.querySelector('.mappnb-lab'); const lab = v && v.mappnbView;
  return Boolean(lab && lab.lanes.size && [...lab.lanes.values()].every(l => l.lane.state.window || l.lane.state.meta.empty)
    && Object.keys(lab.plots.views).length === 3); }"""
PIXELS = """v => [...v.querySelectorAll('.mappnb-lab-canvas canvas:first-of-type')].map(c => {
  const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data; let h = 0;
  for (let i = 0; i < d.length; i += 16) h = (h * 31 + d[i] + d[i + 1] * 7 + d[i + 2] * 13) | 0; return h; })"""
BOKEH = """v => { const { plots } = v.mappnbView; const m = plots.find('memory', 'memory').data;
  return [m.t.length, Math.max(...m.held.flatMap(h => [...h])), [...plots.find('bars', 'names').factors],
    plots.find('pareto', 'pareto').data.name.length]; }"""

AT = """(f, i) => { const { plots } = document.querySelector('.mappnb-lab').mappnbView; const { frame } = [...plots.views.pareto][0];
  const d = plots.find('pareto', 'pareto').data; const b = f.getBoundingClientRect(); const { bbox, x_range: x, y_range: y } = frame;
  return [b.left + bbox.left + (d.step[i] - x.start) / (x.end - x.start) * bbox.width,
    b.top + bbox.top + (1 - (d.peak[i] - y.start) / (y.end - y.start)) * bbox.height]; }"""


def step_of(page, label: str) -> float:
    row = page.page.locator(f".mappnb-lab-table tr[data-label='{label}'] td").first.inner_text()
    return float(re.match(r"[\d.,]+", row)[0].replace(",", ""))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    pytest.importorskip("playwright.sync_api", reason="needs playwright")
    pytest.importorskip("jupyterlab", reason="needs jupyterlab")
    return tmp_path_factory.mktemp("lab")


@pytest.fixture(scope="module")
def page(folder, browser, tmp_path_factory):
    lab.write_notebook(folder / "lab.ipynb", CELLS)
    home = tmp_path_factory.mktemp("home")
    with lab.server(folder, home=home) as address:
        context = browser.new_context(viewport={"width": 1280, "height": 1500}, color_scheme="light")
        found = lab.Lab(context, address)
        found.console = []
        found.page.on("console", lambda m: found.console.append(m.text) if m.type == "error" else None)
        found.open("lab.ipynb")
        before = len(found.console)
        found.run_all()
        found.page.wait_for_function(DRAWN, timeout=60_000)
        found.before = before
        yield found


def view(page):
    return page.page.locator(".mappnb-lab").first


def test_draws_lanes_plots_and_numbers(page):
    assert view(page).locator(".mappnb-lab-lane").count() == 4
    assert view(page).locator(".mappnb-lab-table tbody tr").count() == 4
    assert len(set(view(page).evaluate(PIXELS))) == 4
    ranks, most, names, points = view(page).evaluate(BOKEH)
    assert (ranks, names, points) == (4, ["zb_v", "zb_h1", "interleaved", "1f1b"], 4)
    assert most == pytest.approx(4.0)
    assert page.page.locator(".mappnb-still-lab:visible").count() == 0, "the twin hides behind the live view"
    assert step_of(page, "1f1b") == pytest.approx(
        1e3 * float(page.kernel("print(lab.results.step_s['1f1b'])")), rel=1e-3
    )
    picture(page.page, "lab-1280-light", of=ROOT)


def test_slider_redraws_everything(page):
    before, pixels = step_of(page, "1f1b"), view(page).evaluate(PIXELS)
    slider = page.page.get_by_label("Forward", exact=True)
    slider.focus()
    for _ in range(12):
        page.page.keyboard.press("ArrowRight")
    page.page.wait_for_function(
        "() => { const c = document.querySelector('.mappnb-lab').mappnbView.connection; return !c.isBusy('set'); }"
    )
    page.page.wait_for_timeout(800)
    assert step_of(page, "1f1b") > before
    after = view(page).evaluate(PIXELS)
    assert all(a != b for a, b in zip(after, pixels, strict=True))
    assert float(page.kernel("print(lab.costs.forward_s)")) > 0.010
    assert step_of(page, "zb_v") == pytest.approx(
        1e3 * float(page.kernel("print(lab.results.step_s['zb_v'])")), rel=1e-3
    )
    assert page.page.locator(".jp-Notebook .jp-Cell").count() == len(CELLS), "no key reached the notebook"


def test_straggler_by_keyboard_and_a_reason_instead_of_an_exception(page):
    page.page.get_by_label("Straggler", exact=True).select_option("rank")
    page.page.wait_for_timeout(800)
    assert page.kernel("print(lab._model.stragglers[0].rank)") == "0"
    page.kernel("lab.set(num_microbatches=18)")
    page.page.wait_for_timeout(1200)
    assert "18" in view(page).locator(".mappnb-lab-why:visible").first.inner_text()
    assert "cannot run" in view(page).locator("tr[data-label='interleaved']").inner_text()
    picture(page.page, "lab-1280-light-reason", of=ROOT)
    page.kernel("lab.set(num_microbatches=16)")
    page.page.get_by_label("Straggler", exact=True).select_option("none")
    page.page.wait_for_timeout(1200)


def test_lanes_zoom_together_and_hover_is_linked(page):
    canvas = view(page).locator(".mappnb-canvas-top").first
    canvas.focus()
    for _ in range(3):
        page.page.keyboard.press("w")
    page.page.wait_for_timeout(900)
    ranges = view(page).evaluate(
        "v => { const l = v.mappnbView; const r = l.plots.find('memory', 'time');"
        " const lanes = [...l.lanes.values()].map(x => x.lane.state.view);"
        " return [lanes.map(x => [x.t0, x.t1]), [r.start * l.units.ns, r.end * l.units.ns]]; }"
    )
    lanes, memory = ranges
    assert all(r == lanes[0] for r in lanes)
    assert memory == pytest.approx(lanes[0])
    box = canvas.bounding_box()
    page.page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 40)
    page.page.wait_for_timeout(300)
    assert view(page).evaluate("v => v.mappnbView.plots.find('memory', 'cursor').data.x.length") == 1
    assert view(page).evaluate("v => Boolean([...v.mappnbView.lanes.values()][2].lane.state.hover)")
    figure = view(page).locator(".mappnb-lab-two .mappnb-lab-figure").first
    figure.scroll_into_view_if_needed()
    at = figure.evaluate(AT, 1)
    page.page.mouse.move(at[0] - 3, at[1])
    page.page.mouse.move(*at)
    page.page.wait_for_timeout(400)
    assert view(page).locator(".mappnb-lab-table tr.mappnb-lab-shines").get_attribute("data-label") == "interleaved"
    page.page.mouse.click(*at)
    page.page.wait_for_timeout(600)
    assert page.kernel("print(lab.selected)") == "interleaved"
    page.page.mouse.move(5, 5)
    page.page.get_by_role("button", name="Whole step").click()


def test_other_schedules_can_be_chosen(page):
    page.page.get_by_text(re.compile("Schedules: 4 of")).click()
    page.page.get_by_label("dfc", exact=True).check()
    page.page.wait_for_timeout(1200)
    assert view(page).locator(".mappnb-lab-lane").count() == 5
    assert page.kernel("print('dfc' in lab.schedules)") == "True"
    picture(page.page, "lab-1280-light-chooser", of=ROOT)
    page.page.get_by_text(re.compile("Schedules: 5 of")).click()


@pytest.mark.parametrize("theme", ["JupyterLab Light", "JupyterLab Dark"])
def test_axe_finds_nothing(page, theme):
    page.theme(theme)
    page.page.wait_for_timeout(1500)
    page.page.wait_for_function(DRAWN, timeout=20_000)
    assert axe_finds(page.page, ROOT) == []
    for width in (1280, 1920) if PICTURES else ():
        page.page.set_viewport_size({"width": width, "height": 1500})
        picture(page.page, f"lab-{width}-{theme[-5:].strip().lower()}-final", of=ROOT)
    page.page.set_viewport_size({"width": 1280, "height": 1500})


def test_nothing_goes_outside_and_nothing_fails(page, folder):
    assert page.outside == [] and page.page_errors == []
    assert page.console[page.before :] == []
    assert page.kernel("print(lab.errors, lab.binary)") == "[] True"
    page.save()
    assert (folder / "lab.ipynb").stat().st_size < 250_000, "neither data nor BokehJS are in the saved notebook"


def test_the_cell_runs_again_and_a_closed_lab_says_so(page):
    count = "from mappnb.widgets.view import View; print(len([v for v in View._live if not v.closed]))"
    before = int(page.kernel(count))
    page.run_all()
    assert int(page.kernel(count)) == before
    page.page.wait_for_function(DRAWN, timeout=60_000)  # BokehJS is there already
    page.kernel("again = ScheduleLab(costs)\nagain.close()\nprint(again.closed)")
    assert page.page_errors == [] and page.outside == []


@pytest.mark.slow
def test_notebook_7(folder, browser, tmp_path):
    pytest.importorskip("notebook", reason="needs notebook")
    lab.write_notebook(folder / "seven.ipynb", CELLS)
    (tmp_path / "home").mkdir()
    with lab.server(folder, home=tmp_path / "home", app="notebook") as address:
        found = lab.Lab(browser.new_context(viewport={"width": 1280, "height": 1200}), address, app="notebook")
        found.open("seven.ipynb")
        found.run_all()
        found.page.wait_for_function(DRAWN, timeout=60_000)
        before = step_of(found, "1f1b")
        found.page.get_by_label("Backward, weight", exact=True).press("End")
        found.page.wait_for_timeout(1500)
        assert step_of(found, "1f1b") > 1.5 * before
        assert found.kernel("print(lab.errors, lab.binary)") == "[] True"
        own = [e for e in found.page_errors if "reading 'schema'" not in e]  # Notebook 7.6 raises that by itself
        assert found.outside == [] and own == []


def test_page_without_a_kernel(page, folder, browser):
    """The exported page draws, zooms and picks by itself."""
    page.kernel(f"lab.to_html(r'{folder / 'alone.html'}') and None")
    alone, asked, failed = open_file(browser, folder / "alone.html", scheme="dark", height=1400)
    alone.wait_for_function(DRAWN, timeout=30_000)
    alone.wait_for_timeout(800)
    root = alone.locator(".mappnb-lab").first
    assert len(set(root.evaluate(PIXELS))) == 4
    alone.get_by_role("button", name="zb_h1").click()
    alone.wait_for_timeout(400)
    assert "zb_h1" in root.locator(".mappnb-lab-subhead").first.inner_text()
    picture(alone, "alone-dark")
    assert axe_finds(alone, ROOT) == []
    assert failed == [] and all(u.startswith(("file:", "blob:", "data:")) for u in asked)
