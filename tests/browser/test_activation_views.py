"""The activation views in a real browser: what is drawn, keys, picks, jumps, both themes, axe, and pages without a kernel."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from browser import lab
from browser.live_page import LivePage, live
from browser.looking import axe_finds, picture
from widgets.activation_views import faulty, trace, tree

from mappnb.widgets import ActivationStats, CausalTrace, Densities, Lens, Trajectories

pytestmark = [pytest.mark.browser, pytest.mark.timeout(420)]

ROOT = ".mappnb-acts"
VIEW = "document.querySelector('.mappnb-acts').mappnbView"
IDLE = """() => { const e = document.querySelector('.mappnb-acts'), v = e && e.mappnbView;
  return Boolean(v && v.drawn && v.drawn === v.turn && !v.connection.flying.size); }"""
CELL = f"""([key, row, col]) => {{ const f = {VIEW}.figures.find((f) => f.drawing && f.drawing.told.key === key).drawing;
  f.node.scrollIntoView({{ block: 'center' }});
  const b = f.inner.getBoundingClientRect(), {{ bbox }} = f.view.frame;
  return [b.left + bbox.left + (col + 0.5) / f.cols * bbox.width, b.top + bbox.top + (row + 0.5) / f.rows * bbox.height]; }}"""
POINT = f"""(index) => {{ const f = {VIEW}.figures[0].drawing, b = f.inner.getBoundingClientRect(), [x, y] = f.pixel(index);
  return [b.left + x, b.top + y]; }}"""


def drawn(shown: LivePage) -> None:
    shown.push()
    shown.page.wait_for_function(IDLE, timeout=30_000)
    shown.page.wait_for_timeout(250)


def clean(shown: LivePage) -> None:
    assert shown.failed == [] and shown.view.errors == [] and shown.outside == []
    assert max(size for kind, size in shown.sizes if kind != "bokeh") <= 300_000
    assert axe_finds(shown.page, ROOT) == []


MAKERS = {
    "stats": lambda: ActivationStats(faulty()),
    "lens": lambda: Lens(tree()),
    "trajectories": lambda: Trajectories(tree()),
    "trace": lambda: CausalTrace(trace()),
    "densities": lambda: Densities(tree()),
}


@pytest.fixture(params=[pytest.param("light", marks=pytest.mark.slow), "dark"])
def scheme(request):
    return request.param


@pytest.fixture
def shown(browser, scheme, request):
    view = MAKERS[request.param]()
    with live(browser, view, render="renderActivations", scheme=scheme) as page:
        drawn(page)
        yield page
    view.close()


def side(shown: LivePage) -> str:
    return shown.page.locator(".mappnb-acts-side").inner_text()


@pytest.mark.parametrize("shown", ["stats"], indirect=True)
def test_statistics(shown, scheme):
    shown.page.mouse.move(*shown.page.evaluate(CELL, ["heat", 2, 9]))
    shown.page.wait_for_timeout(100)
    assert "layer 5, step 90" in shown.page.locator(".mappnb-tip:visible").inner_text()
    shown.page.mouse.click(*shown.page.evaluate(CELL, ["heat", 2, 9]))
    drawn(shown)
    assert shown.view.selected.iloc[0][["step", "layer", "point"]].tolist() == [90, 5, "resid_post"]
    assert "step 90, layer 5 resid_post" in side(shown)
    picture(shown.page, f"stats-{scheme}")
    jump = shown.page.locator(".mappnb-acts-jump", has_text="step 150").first
    jump.click()
    drawn(shown)
    assert shown.view.selected.iloc[0]["step"] == 150 and shown.view.selected.iloc[0]["num_nan"] == 3
    assert shown.view._where["statistic"] == "num_nan"
    picture(shown.page, f"stats-nan-{scheme}")
    shown.page.locator("select[aria-label='Show']").select_option(
        label="change of distribution since the first step, bit"
    )
    drawn(shown)
    assert shown.view._where["statistic"] == "js" and shown.view._pick is None
    clean(shown)


@pytest.mark.parametrize("shown", ["lens"], indirect=True)
def test_lens(shown, scheme):
    cells = shown.page.locator(".mappnb-acts-tokens td")
    assert cells.count() == 12 * 24
    first = shown.view.lens["top_text"].values[0, -1, 2, 0]
    assert cells.nth(2).inner_text().strip() == first.strip().replace("\n", "↵")
    cells.nth(2).click()
    drawn(shown)
    assert len(shown.view.selected) == 10 and "layer 11, after" in side(shown)
    shown.page.keyboard.press("ArrowDown")
    shown.page.keyboard.press("Enter")
    drawn(shown)
    assert int(shown.view.selected["layer"].iloc[0]) == 10
    followed = shown.page.locator(".mappnb-acts-side .mappnb-acts-jump").nth(3)
    followed.click()
    drawn(shown)
    assert shown.view._pick["token"] == int(shown.view.selected["top_id"].iloc[3])
    picture(shown.page, f"lens-{scheme}")
    shown.page.locator("select[aria-label='Colour']").select_option(index=3)
    drawn(shown)
    shown.page.locator("select[aria-label='Tokens']").select_option(index=1)
    drawn(shown)
    assert shown.view._where["first"] == 24 and shown.page.locator(".mappnb-acts-tokens td").count() == 12 * 4
    picture(shown.page, f"lens-entropy-{scheme}")
    assert shown.page.locator(".mappnb-acts-tokens b").count() == 0
    clean(shown)


@pytest.mark.parametrize("shown", ["trajectories"], indirect=True)
def test_trajectories(shown, scheme):
    shown.page.mouse.move(*shown.page.evaluate(POINT, 40))
    shown.page.wait_for_timeout(100)
    assert shown.page.locator(".mappnb-tip:visible").inner_text().strip()
    shown.page.mouse.click(*shown.page.evaluate(POINT, 40))
    drawn(shown)
    at = shown.view._pick["index"]
    mine = shown.view.selected.iloc[0]
    assert mine["pc1"] == pytest.approx(float(shown.view._points(shown.view._where)["x"][at]))
    picture(shown.page, f"trajectories-{scheme}")
    for label, index in (("Sample", 1), ("Lines over", 1), ("Colour", 1)):
        shown.page.locator(f"select[aria-label='{label}']").select_option(index=index)
        drawn(shown)
    shown.page.locator(".mappnb-acts-pick").focus()
    for key in ("ArrowRight", "ArrowRight", "Enter"):
        shown.page.keyboard.press(key)
    drawn(shown)
    assert shown.view._pick["index"] == 1
    picture(shown.page, f"trajectories-token-{scheme}")
    clean(shown)


@pytest.mark.parametrize("shown", ["trace"], indirect=True)
def test_trace(shown, scheme):
    shown.page.mouse.click(*shown.page.evaluate(CELL, ["mlp", 8, 2]))
    drawn(shown)
    row = shown.view.selected.iloc[0]
    assert (row["kind"], row["layer"], row["token"]) == ("mlp", 3, 2)
    assert row["indirect_effect"] == pytest.approx(float(trace()["indirect_effect"].sel(kind="mlp")[3, 2]))
    picture(shown.page, f"trace-{scheme}")
    clean(shown)


@pytest.mark.parametrize("shown", ["densities"], indirect=True)
def test_densities(shown, scheme):
    shown.page.mouse.click(*shown.page.evaluate(CELL, ["cells", 4, 7]))
    drawn(shown)
    values = tree()["full"]["resid_post"].values[0, 0, 4]
    np.testing.assert_allclose(shown.view.selected["value"], values, rtol=1e-6)
    picture(shown.page, f"densities-{scheme}")
    shown.page.locator("select[aria-label='Point']").select_option("z")
    drawn(shown)
    shown.page.locator("select[aria-label='Head']").select_option(index=2)
    drawn(shown)
    assert shown.view._where["head"] == 2 and shown.view.values.shape == (28, 8)
    picture(shown.page, f"densities-z-{scheme}")
    clean(shown)


@pytest.mark.parametrize("name", [*MAKERS])
def test_a_page_without_a_kernel(browser, tmp_path, name):
    view = MAKERS[name]()
    html = view.to_html(tmp_path / "view.html")
    view.close()
    assert len(html.encode()) <= 2_000_000
    context = browser.new_context(viewport={"width": 1200, "height": 1000}, offline=True)
    page = context.new_page()
    failed: list[str] = []
    page.on("pageerror", lambda e: failed.append(str(e)))
    page.on("console", lambda m: failed.append(m.text) if m.type in ("error", "warning") else None)
    page.goto((tmp_path / "view.html").as_uri())
    page.wait_for_function(IDLE, timeout=30_000)
    select = page.locator("select").first
    if select.count():
        select.select_option(index=1)
        page.wait_for_function(IDLE, timeout=30_000)
    page.wait_for_timeout(300)
    assert page.locator(".mappnb-error:visible").count() == 0 and failed == []
    picture(page, f"page-{name}")
    context.close()


@pytest.mark.parametrize("name", [*MAKERS])
def test_the_picture_that_stays(browser, name):
    view = MAKERS[name]()
    first = next(iter(picks for _, picks in view.places() if picks), [])
    if first:
        view._select(first[0])
    context = browser.new_context(viewport={"width": 1000, "height": 1000})
    page = context.new_page()
    page.set_content(f"<html><body style='background:#fff'>{view.snapshot()._repr_html_()}</body></html>")
    assert page.locator("svg").count() >= 1
    picture(page, f"still-{name}")
    context.close()
    view.close()


@pytest.mark.slow
def test_in_jupyterlab(browser, tmp_path):
    pytest.importorskip("jupyterlab", reason="needs jupyterlab")
    cells = [
        f"import sys; sys.path.insert(0, {str(Path(__file__).parents[1])!r})\nfrom widgets.activation_views import faulty\n"
        "from mappnb.widgets import ActivationStats",
        "view = ActivationStats(faulty())\nview",
    ]
    lab.write_notebook(tmp_path / "look.ipynb", cells)
    (tmp_path / "home").mkdir()
    with lab.server(tmp_path, home=tmp_path / "home") as address:
        context = browser.new_context(viewport={"width": 1280, "height": 1300}, color_scheme="light")
        found = lab.Lab(context, address)
        found.open("look.ipynb")
        found.run_all()
        found.page.wait_for_function(IDLE, timeout=60_000)
        assert found.page.locator(".mappnb-still-acts:visible").count() == 0, "the twin hides behind the live view"
        found.page.locator(".mappnb-acts-pick").focus()
        for key in ("ArrowDown", "ArrowDown", "ArrowRight", "ArrowRight", "Enter", "a", "b", "x", "d", "d"):
            found.page.keyboard.press(key)
        found.page.wait_for_timeout(1500)
        said = found.kernel("print(*view.selected[['step', 'layer']].iloc[0], view.errors, view.binary)")
        assert said == "20 6 [] True"
        assert found.page.locator(".jp-Notebook .jp-Cell").count() == len(cells), "no key reached the notebook"
        for theme in ("JupyterLab Dark", "JupyterLab Light"):
            found.theme(theme)
            found.page.wait_for_timeout(1500)
            picture(found.page, f"stats-lab-{theme[-5:].strip().lower()}")
        found.save()
        assert (tmp_path / "look.ipynb").stat().st_size < 150_000, "neither data nor BokehJS are in the saved notebook"
        assert found.outside == [] and found.page_errors == []
