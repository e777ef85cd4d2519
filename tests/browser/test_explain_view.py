"""The explain view in a real browser: alone with its kernel half, narrow, on several ranks, and as a page without a kernel."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs torch")

from browser import lab
from browser.live_page import LivePage, live
from browser.looking import axe_finds, open_file, picture
from widgets.explain_case import large, small

from mappnb.errors import InterpError
from mappnb.widgets import Explain
from mappnb.widgets._expl_levels import component_name, waterfall

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]

ROOT = ".mappnb-expl"
VIEW = "document.querySelector('.mappnb-expl').mappnbView"
DRAWN = f"""() => {{ const e = document.querySelector('.mappnb-expl'); return Boolean(
  e && e.mappnbView && {VIEW}.table && !{VIEW}.busy.level); }}"""
CELL = f"""([name, layer, column]) => {{ const m = {VIEW}.maps[name], b = m.canvas.getBoundingClientRect();
  return [b.left + m.x(column) + m.cell / 2, b.top + m.y(layer) + m.high / 2]; }}"""
PIXEL = f"""([name, layer, column]) => {{ const m = {VIEW}.maps[name], r = window.devicePixelRatio;
  const at = [(m.x(column) + m.cell / 2) * r, (m.y(layer) + m.high / 2) * r];
  return [...m.canvas.getContext('2d').getImageData(...at, 1, 1).data].slice(0, 3); }}"""


@pytest.fixture(scope="module")
def told():
    return small()


def drawn(shown: LivePage) -> None:
    shown.push()
    shown.page.wait_for_function(DRAWN, timeout=30_000)
    shown.settle(200)


def clean(shown: LivePage) -> None:
    failed = [f for f in shown.failed if "readback" not in f]  # a warning about what the tests read from canvases
    assert failed == [] and shown.view.errors == [] and shown.outside == []


@pytest.fixture(params=[pytest.param("light", marks=pytest.mark.slow), "dark"])
def shown(browser, told, request):
    view = Explain(told)
    with live(browser, view, render="renderExplain", scheme=request.param) as page:
        drawn(page)
        yield page
    view.close()


def row_button(page, told, label: int):
    row = told.table.loc[label]
    return page.locator(f'.mappnb-expl-row[data-row="{label}"]').get_by_role(
        "button", name=component_name(row["component"], row["layer"], row["unit"]), exact=True
    )


def texts(page, column: int) -> list[str]:
    return page.evaluate(
        "n => [...document.querySelectorAll('.mappnb-expl-row')].map((r) => r.children[n].innerText.trim())", column
    )


def test_rows_waterfall_and_maps_say_the_same_as_the_table(shown, told, request):
    page, best = shown.page, told.top(40)
    labels = page.evaluate("() => [...document.querySelectorAll('.mappnb-expl-row')].map((r) => Number(r.dataset.row))")
    assert labels == best.index.tolist()
    seen = [float(t.replace("−", "-")) for t in texts(page, 3)]
    assert seen == pytest.approx(best["attribution"].tolist(), abs=6e-4)
    steps = waterfall(told.table, told.unexplained)
    titles = page.evaluate("() => [...document.querySelectorAll('[data-step] title')].map((t) => t.textContent)")
    assert [t.split(":")[0] for t in titles] == [s.name for s in steps]
    ends = np.cumsum([s.value for s in steps])
    assert [float(t.split("then ")[1].replace("−", "-")) for t in titles] == pytest.approx(ends.tolist(), abs=6e-4)
    heads = shown.view.columns["head_attribution"]
    for flat in (heads.argmax(), heads.argmin()):
        layer, column = np.unravel_index(flat, heads.shape)
        red, _, blue = page.evaluate(PIXEL, ["head", int(layer), int(column)])
        assert (red > blue) == (heads[layer, column] > 0)
    picture(page, f"explain-{request.node.callspec.params['shown']}")
    assert axe_finds(page, ROOT) == []
    clean(shown)
    assert max(size for _, size in shown.sizes) <= 40_000


def test_ablate_upstream_and_back(shown, told):
    page, view = shown.page, shown.view
    label = int(told.table.query("component == 'mlp' and layer == 2 and position == 10").index[0])
    row_button(page, told, label).click()
    shown.settle()
    assert view.selection.index.tolist() == [label]
    page.get_by_role("button", name="Ablate", exact=True).click()
    shown.settle(600)
    real = told.ablate(label)
    panel = page.locator(".mappnb-expl-panel").inner_text().replace("−", "-")
    assert f"{real:+.3f}" in panel and f"{told.table.loc[label, 'attribution']:+.3f}" in panel
    assert f"{told.metric - real:+.3f} instead of {told.metric:+.3f}" in panel
    assert page.get_by_role("button", name="Ablate", exact=True).is_disabled(), "it is known now"
    assert "real ablation" in page.locator(".mappnb-expl-table thead").inner_text()
    page.get_by_role("button", name="Upstream", exact=True).click()
    drawn(shown)
    assert view._where.path == (label,)
    first = told.upstream(label).iloc[0]
    assert texts(page, 0)[0] == component_name(first["component"], first["layer"], first["unit"])
    assert page.locator(".mappnb-expl-waterfall:visible").count() == 0
    assert axe_finds(page, ROOT) == []
    picture(page, "explain-upstream")
    page.get_by_role("navigation", name="Way back").get_by_role("button").first.click()
    drawn(shown)
    assert view._where.path == () and view._where.row == label
    clean(shown)


def test_check_and_its_dots(shown, told):
    page = shown.page
    page.get_by_role("button", name="Check 20").click()
    shown.settle(1500)
    found = told.check(20)
    said = page.locator(".mappnb-expl-check").inner_text()
    assert f"Correlation {found.attrs['correlation']:.2f}; real = {found.attrs['ratio']:.2f} × predicted" in said
    assert page.locator(".mappnb-expl-dot").count() == 20
    at = page.evaluate(
        "() => [...document.querySelectorAll('.mappnb-expl-dot')].map((c) => [Number(c.getAttribute('cx')), Number(c.getAttribute('cy'))])"
    )
    assert np.corrcoef(np.array(at)[:, 0], found["attribution"])[0, 1] > 0.999
    assert np.corrcoef(np.array(at)[:, 1], found["ablation"])[0, 1] < -0.999
    label = int(found.index[0])
    page.locator(f'[data-row="{label}"].mappnb-expl-dot').click()
    shown.settle()
    assert shown.view._where.row == label and shown.view.selection["ablation"].item() == pytest.approx(
        found["ablation"].iloc[0], abs=1e-6
    )
    page.locator(".mappnb-expl-check summary").click()
    assert axe_finds(page, ROOT) == []
    picture(page, "explain-check")
    clean(shown)


def test_choices_by_token_map_and_bar(shown):
    page, view = shown.page, shown.view
    page.locator(".mappnb-expl-token").nth(4).click()
    shown.settle()
    assert view._where.position == 4 and set(view.rows["position"]) == {4}
    assert len(texts(page, 0)) == min(40, len(view.rows))
    page.get_by_role("button", name="All rows").click()
    page.mouse.click(*page.evaluate(CELL, ["head", 1, 9]))
    shown.settle()
    where = view._where
    assert (where.component, where.layer, where.position) == ("head", 1, 9)
    assert sorted(texts(page, 0)) == [f"L1 head {h}" for h in range(4)]
    page.get_by_label("Rank by").select_option("direct_effect")
    page.locator("[data-step='4']").click()
    shown.settle()
    where = view._where
    assert (where.by, where.component, where.layer, where.position) == ("direct_effect", "mlp", 1, None)
    assert axe_finds(page, ROOT) == []
    clean(shown)


def test_keys(shown, told):
    page, view = shown.page, shown.view
    row_button(page, told, int(told.top(1).index[0])).focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    shown.settle()
    label = int(told.top(2).index[1])
    assert view._where.row == label
    page.keyboard.press("a")
    shown.settle(600)
    assert view.ablations["ablation"].tolist() == [pytest.approx(told.ablate(label), abs=1e-6)]
    assert page.evaluate("() => document.activeElement.closest('tr').dataset.row") == str(label), "the focus stays"
    head = int(told.top(40).query("component == 'head'").index[0])
    row_button(page, told, head).focus()
    page.keyboard.press("u")
    drawn(shown)
    assert view._where.path == (head,)
    page.locator(".mappnb-expl-row button").first.focus()
    page.keyboard.press("Backspace")
    drawn(shown)
    assert view._where.path == () and view._where.row == head
    canvas = page.locator(".mappnb-expl-canvas").first
    canvas.focus()
    for key in ("ArrowDown", "ArrowDown", "ArrowRight", "ArrowRight", "Enter"):
        page.keyboard.press(key)
    shown.settle()
    assert (view._where.component, view._where.layer, view._where.position) == ("head", 1, 2)
    assert "L1 heads, “l” (2)" in page.locator(".mappnb-expl-map [aria-live]").first.text_content()
    page.locator('.mappnb-expl-token[aria-pressed="true"]').focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press(" ")
    shown.settle()
    assert view._where.position == 3
    clean(shown)


def test_python_moves_the_browser(shown, told):
    label = int(told.table.query("component == 'head' and layer == 1 and unit == 0 and position == 10").index[0])
    view, page = shown.view, shown.page
    view.set(component="head", layer=1)
    view.select(label)
    view.ablate()
    shown.settle()
    assert page.locator("select[name=component]").input_value() == "head"
    assert page.locator(".mappnb-expl-picked").get_attribute("data-row") == str(label)
    assert "instead of" in page.locator(".mappnb-expl-panel").inner_text()
    view.upstream()
    drawn(shown)
    shown.settle()
    assert page.evaluate(f"() => {VIEW}.table.path") == [label]
    view.check(6)
    view.back()
    shown.settle()
    assert page.locator(".mappnb-expl-dot").count() == 6 and page.evaluate(f"() => {VIEW}.table.path") == []
    clean(shown)


def test_what_fails_is_shown_and_can_be_tried_again(shown, told, monkeypatch):
    page, label = shown.page, int(told.top(1).index[0])

    def fails(self, row):
        raise InterpError("the model was freed; build it again")

    monkeypatch.setattr(type(told), "ablate", fails)
    row_button(page, told, label).click()
    page.get_by_role("button", name="Ablate", exact=True).click()
    shown.settle(600)
    assert page.locator(".mappnb-error").inner_text() == "the model was freed; build it again"
    assert page.get_by_role("button", name="Ablate", exact=True).is_enabled()
    monkeypatch.undo()
    page.get_by_role("button", name="Ablate", exact=True).click()
    shown.settle(600)
    assert page.locator(".mappnb-error").count() == 0 and len(shown.view.ablations) == 1
    assert shown.failed == []


def test_on_several_ranks_it_is_read_only(browser, told, monkeypatch):
    monkeypatch.setitem(told.model.layout, "pp", 2)
    view = Explain(told)
    with live(browser, view, render="renderExplain") as shown:
        drawn(shown)
        assert "spread over ranks (pp=2)" in shown.page.locator(".mappnb-expl-why").inner_text()
        row_button(shown.page, told, int(told.top(1).index[0])).click()
        for name in ("Ablate", "Upstream"):
            assert shown.page.get_by_role("button", name=name, exact=True).is_disabled()
        assert shown.page.get_by_role("button", name="Check 20").count() == 0
        assert axe_finds(shown.page, ROOT) == []
        picture(shown.page, "explain-ranks")
        clean(shown)
    view.close()


@pytest.mark.parametrize("width", [360, 640])
def test_narrow(browser, told, width):
    view = Explain(told)
    with live(browser, view, render="renderExplain", width=width) as shown:
        drawn(shown)
        row_button(shown.page, told, int(told.top(1).index[0])).click()
        shown.settle()
        wide = shown.page.evaluate("() => [document.documentElement.scrollWidth, window.innerWidth]")
        assert wide[0] <= wide[1]
        scroll = shown.page.evaluate(
            "() => { const e = document.querySelector('.mappnb-expl-scroll'); return e.scrollWidth - e.clientWidth; }"
        )
        assert scroll == 0, "every column is seen"
        picture(shown.page, f"explain-{width}")
        assert axe_finds(shown.page, ROOT) == []
        clean(shown)
    view.close()


def test_a_large_one_fetches_small_rows(browser, told):
    found = large(told)
    view = Explain(found)
    with live(browser, view, render="renderExplain") as shown:
        drawn(shown)
        small_one = found.table[found.table["component"] == "mlp"]["attribution"].abs().idxmin()
        row = found.table.loc[small_one]
        shown.page.mouse.click(*shown.page.evaluate(CELL, ["mlp", int(row["layer"]), int(row["position"])]))
        shown.settle(600)
        assert texts(shown.page, 0) == [f"L{row['layer']} MLP"] and view._where.position == row["position"]
        assert shown.page.locator(".mappnb-expl-token b, .mappnb-expl-row b").count() == 0, "tokens are text"
        assert axe_finds(shown.page, ROOT) == []
        picture(shown.page, "explain-large")
        clean(shown)
        assert max(size for _, size in shown.sizes) <= 500_000
    view.close()


def test_it_leaves_nothing_and_a_closed_one_says_so(browser, told):
    view = Explain(told)
    with live(browser, view, render="renderExplain") as shown:
        drawn(shown)
        view.tell("close")
        shown.settle()
        assert "closed" in shown.page.locator(".mappnb-status").inner_text()
        shown.page.evaluate("() => window.undo()")
        assert shown.page.locator(".mappnb-expl").count() == 0 and shown.failed == []
    view.close()


@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.slow)])
def test_page_without_a_kernel(browser, told, tmp_path, scheme):
    label = int(told.table.query("component == 'mlp' and layer == 2 and position == 10").index[0])
    view = Explain(told)
    view.check(20)
    view.ablate(label)
    view.upstream(label)
    view.back()
    view.to_html(tmp_path / "alone.html")
    page, asked, failed = open_file(browser, tmp_path / "alone.html", scheme=scheme)
    page.wait_for_function(DRAWN, timeout=30_000)
    assert "holds no model" in page.locator(".mappnb-expl-why").inner_text()
    assert page.locator(".mappnb-expl-picked").get_attribute("data-row") == str(label)
    assert (
        "instead of" in page.locator(".mappnb-expl-panel").inner_text()
        and page.locator(".mappnb-expl-dot").count() == 20
    )
    assert axe_finds(page, ROOT) == []
    picture(page, f"explain-alone-{scheme}")
    page.get_by_role("button", name="Upstream", exact=True).click()
    page.wait_for_function(f"() => {VIEW}.table.path.length === 1", timeout=5000)
    page.locator("select[name=component]").select_option("mlp")
    page.wait_for_timeout(200)
    assert all(t.endswith("MLP") for t in texts(page, 0))
    page.locator(".mappnb-expl-row button").first.click()
    assert page.get_by_role("button", name="Upstream", exact=True).is_disabled(), "not traced in the notebook"
    assert page.locator(".mappnb-error").count() == 0
    assert failed == [] and all(u.startswith(("file:", "blob:", "data:")) for u in asked)
    page.context.close()
    view.close()


@pytest.mark.slow
def test_in_jupyterlab(browser, tmp_path):
    pytest.importorskip("jupyterlab", reason="needs jupyterlab")
    tests = str(Path(__file__).parents[1])
    cells = [
        f"import sys\nsys.path.insert(0, {tests!r})\nfrom widgets.explain_case import small\nfrom mappnb.widgets import Explain",
        "view = Explain(small())\nview",
    ]
    lab.write_notebook(tmp_path / "look.ipynb", cells)
    (tmp_path / "home").mkdir()
    with lab.server(tmp_path, home=tmp_path / "home") as address:
        context = browser.new_context(viewport={"width": 1280, "height": 1300}, color_scheme="light")
        found = lab.Lab(context, address)
        found.open("look.ipynb")
        found.run_all()
        found.page.wait_for_function(DRAWN, timeout=60_000)
        assert found.page.locator(".mappnb-still-expl:visible").count() == 0, "the twin hides behind the live view"
        found.page.locator(".mappnb-expl-row button").first.focus()
        for key in ("ArrowDown", "Enter", "a"):
            found.page.keyboard.press(key)
        found.page.wait_for_function(f"() => {VIEW}.table.ablated.size === 1", timeout=20_000)
        found.page.keyboard.press("u")
        found.page.wait_for_function(f"() => {VIEW}.table.path.length === 1", timeout=20_000)
        found.page.locator(".mappnb-expl-row button").first.focus()
        for key in ("x", "d", "d", "b"):
            found.page.keyboard.press(key)
        said = found.kernel("print(len(view._where.path), len(view.ablations), view.errors, view.binary)")
        assert said == "1 1 [] True"
        assert found.page.locator(".jp-Notebook .jp-Cell").count() == len(cells), "no key reached the notebook"
        for theme in ("JupyterLab Dark", "JupyterLab Light"):
            found.theme(theme)
            found.page.wait_for_timeout(1000)
            picture(found.page, f"explain-lab-{theme[-5:].strip().lower()}")
        found.save()
        assert (tmp_path / "look.ipynb").stat().st_size < 150_000, "only the twin's picture is in the saved notebook"
        assert found.outside == [] and found.page_errors == []
