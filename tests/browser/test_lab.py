"""The timeline where it is used: a real JupyterLab (and Notebook 7) in a real browser, cut off from the world."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from browser import lab

from mappnb.layout import Layout
from mappnb.testing.runs import make_run

pytestmark = [pytest.mark.browser, pytest.mark.timeout(420)]

DOCS = Path(__file__).parents[2] / "docs"
STEP_BARS = re.search(r"```python\n(.*?)```", (DOCS / "views.md").read_text(), re.S)[1]  # the documented view, followed
CELLS = [
    "import mappnb\nrun = mappnb.attach('run')\nrun",
    "timeline = run.timeline()\ntimeline",
    "import xarray as xr, numpy as np\nxr.DataArray(np.arange(12.).reshape(3, 4), dims=('layer', 'token')).mapp.show()",
    f"{STEP_BARS}\nStepBars(run)",
]
VIEW = ".mappnb-timeline .mappnb-canvas-top"
DRAWN = ".mappnb-timeline .mappnb-canvas"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    pytest.importorskip("playwright.sync_api", reason="needs playwright")
    pytest.importorskip("jupyterlab", reason="needs jupyterlab")
    where = tmp_path_factory.mktemp("lab")
    make_run(where / "run", layout=Layout(pp=4, dp=2), num_steps=6, num_microbatches=8, slow={5: 1.5})
    return where


def opened(browser, address, notebook, *, width=1280, app="lab"):
    context = browser.new_context(viewport={"width": width, "height": 1000}, color_scheme="light")
    page = lab.Lab(context, address, app=app)
    page.open(notebook)
    return page


READY = "() => { const v = document.querySelector('.mappnb-timeline'); return Boolean(v && v.mappnbView && v.mappnbView.state.window); }"
COLOURS = """c => { const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data; const seen = new Set();
  for (let i = 0; i < d.length; i += 64) seen.add((d[i] << 16) | (d[i + 1] << 8) | d[i + 2]); return seen.size; }"""


def shapes(page) -> int:
    """How many colours the canvas holds."""
    return page.page.locator(DRAWN).first.evaluate(COLOURS)


def test_timeline_in_jupyterlab(folder, browser, tmp_path):
    lab.write_notebook(folder / "look.ipynb", CELLS)
    (tmp_path / "home").mkdir()
    with lab.server(folder, home=tmp_path / "home") as address:
        page = opened(browser, address, "look.ipynb")
        page.run_all()
        page.page.wait_for_selector(VIEW, timeout=60_000)
        page.page.wait_for_function(READY, timeout=30_000)
        page.page.wait_for_selector(".step-bar", timeout=20_000)
        assert page.page.locator(".step-bar").count() == 6
        _draws_and_answers(page)
        _runs_again(page)
        _themes(page)
        _reopens(page, folder)
        assert page.outside == [] and page.page_errors == []


def _draws_and_answers(page) -> None:
    assert shapes(page) > 5
    assert page.page.locator(".mappnb-still:visible").count() == 0, "the twin hides behind the live view"
    before = json.loads(page.kernel("print('[%.9f, %.9f]' % (timeline.window.start, timeline.window.stop))"))
    canvas = page.page.locator(VIEW).first
    canvas.focus()
    page.page.keyboard.press("w")
    page.page.keyboard.press("w")
    page.page.keyboard.press("d")
    page.page.wait_for_timeout(1200)
    after = json.loads(page.kernel("print('[%.9f, %.9f]' % (timeline.window.start, timeline.window.stop))"))
    assert after[1] - after[0] < before[1] - before[0]
    assert page.page.locator(".jp-Notebook .jp-Cell").count() == len(CELLS), "no key reached the notebook"
    box = canvas.bounding_box()
    for y in range(60, int(box["height"]) - 4, 9):
        page.page.mouse.click(box["x"] + box["width"] * 0.6, box["y"] + y)
        page.page.wait_for_timeout(250)
        if int(page.kernel("print(len(timeline.selection))")) == 1:
            break
    frame = json.loads(
        page.kernel("print(timeline.selection.to_dataframe()[['rank', 'duration_ns']].to_json(orient='records'))")
    )
    assert len(frame) == 1 and frame[0]["duration_ns"] > 0
    page.page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + box["height"] * 0.5)
    page.page.keyboard.down("Control")
    page.page.mouse.wheel(0, -300)
    page.page.keyboard.up("Control")
    page.page.wait_for_timeout(1200)
    zoomed = json.loads(page.kernel("print('[%.9f, %.9f]' % (timeline.window.start, timeline.window.stop))"))
    assert zoomed[1] - zoomed[0] < after[1] - after[0]
    assert page.kernel("print(timeline.errors)") == "[]"
    assert page.kernel("print(timeline.binary)") == "True"


def _runs_again(page) -> None:
    """Cells that run again leave no view behind."""
    count = "from mappnb.widgets.view import View; print(len([v for v in View._live if not v.closed]))"
    before = int(page.kernel(count))
    for _ in range(3):
        page.run_all()
    assert int(page.kernel(count)) == before
    page.page.wait_for_function(READY, timeout=30_000)


def _themes(page) -> None:
    def ground() -> str:
        return page.page.evaluate("() => getComputedStyle(document.querySelector('.mappnb-timeline')).color")

    light = ground()
    page.theme("JupyterLab Dark")
    page.page.wait_for_timeout(500)
    assert ground() != light
    page.theme("JupyterLab Light")


def _reopens(page, folder) -> None:
    page.save()
    size = (folder / "look.ipynb").stat().st_size
    assert size < 250_000, size
    page.page.reload()
    page.page.wait_for_selector(VIEW, timeout=60_000)  # the kernel lives: the view comes back
    page.page.wait_for_function(READY, timeout=30_000)
    page.page.evaluate(
        "async () => { const s = window.jupyterapp.shell.currentWidget.context.sessionContext; await s.session.kernel.shutdown(); }"
    )
    page.page.goto(f"{page.address}/lab/tree/look.ipynb?token=secret&reset")
    page.page.wait_for_selector(".mappnb-still", timeout=60_000, state="attached")
    page.page.wait_for_timeout(2500)
    assert page.page.locator(".mappnb-still:visible").count() >= 1, "a notebook without its kernel shows the twin"


@pytest.mark.slow
def test_timeline_in_notebook_7(folder, browser, tmp_path):
    pytest.importorskip("notebook", reason="needs notebook")
    lab.write_notebook(folder / "seven.ipynb", CELLS[:2])
    (tmp_path / "home").mkdir()
    with lab.server(folder, home=tmp_path / "home", app="notebook") as address:
        page = opened(browser, address, "seven.ipynb", app="notebook")
        page.run_all()
        page.page.wait_for_selector(VIEW, timeout=60_000)
        page.page.wait_for_function(READY, timeout=30_000)
        assert shapes(page) > 5
        assert page.kernel("print(timeline.errors, timeline.binary)") == "[] True"
        # Notebook 7.6 itself raises this one on an empty notebook, without any view
        own = [e for e in page.page_errors if "reading 'schema'" not in e]
        assert page.outside == [] and own == []


APP = """
import marimo
app = marimo.App()
@app.cell
def _():
    import marimo, mappnb
    timeline = mappnb.attach("run").timeline()
    shown = marimo.ui.anywidget(timeline)
    shown
    return
"""


@pytest.mark.slow
def test_timeline_in_marimo(folder, browser, tmp_path):
    """The canvas alone: marimo has its own way to show widgets."""
    pytest.importorskip("marimo", reason="needs marimo")
    (folder / "app.py").write_text(APP)
    with lab.marimo(folder, "app.py", home=tmp_path) as address:
        page = lab.Lab(browser.new_context(viewport={"width": 1280, "height": 900}), address)
        page.page.goto(address)
        page.page.wait_for_selector(VIEW, timeout=90_000)
        view = page.page.locator(".mappnb-timeline").first  # in a shadow root, which a locator looks into
        for _ in range(60):
            if view.evaluate("v => Boolean(v.mappnbView && v.mappnbView.state.window)"):
                break
            page.page.wait_for_timeout(500)
        assert shapes(page) > 5


@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 1920])
def test_notebooks_open_in_jupyterlab(browser, tmp_path, width):
    """The shipped notebooks, whole, in both widths; pictures are left in the test's folder."""
    source = Path(__file__).parents[2] / "notebooks"
    if not (source / "data").exists():
        pytest.skip("notebooks/make_data.py has not been run")
    where = tmp_path / "notebooks"
    shutil.copytree(source, where)
    (tmp_path / "home").mkdir()
    with lab.server(where, home=tmp_path / "home") as address:
        for name, view in (("00_quickstart", VIEW), ("10_timeline", VIEW), ("30_schedules", ".mappnb-lab")):
            page = opened(browser, address, f"{name}.ipynb", width=width)
            page.run_all(timeout_s=180)
            page.page.wait_for_selector(view, timeout=60_000)
            for theme in ("JupyterLab Light", "JupyterLab Dark"):
                page.theme(theme)
                page.page.wait_for_timeout(1500)
                page.page.screenshot(path=tmp_path / f"{name}-{theme[-5:].strip()}-{width}.png")
            assert page.outside == [] and page.page_errors == []
