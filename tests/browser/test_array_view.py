"""Pictures of arrays in a real browser: themes, marks as pixels, hover, keyboard, accessibility, nothing fetched."""

from __future__ import annotations

import numpy as np
import pytest
import xarray as xr

from mappnb.widgets import _array_colours as colours
from mappnb.widgets import _array_grid as grids
from mappnb.widgets import array_view
from mappnb.widgets._png import data_uri, palette_png

pytestmark = pytest.mark.browser


@pytest.fixture
def open_page(browser, tmp_path):
    """Open a page; at the end it must have asked for nothing else and logged no error."""
    opened = []

    def opens(html, *, theme="light", script=True):
        path = tmp_path / f"page{len(opened)}.html"
        path.write_text(html)
        context = browser.new_context(
            color_scheme=theme, viewport={"width": 900, "height": 900}, offline=True, java_script_enabled=script
        )
        page = context.new_page()
        requests, errors = [], []
        page.on("request", lambda r: requests.append(r.url) if not r.url.startswith("data:image/png") else None)
        page.on("pageerror", lambda e: errors.append(str(e)))
        page.on("console", lambda m: errors.append(m.text) if m.type == "error" else None)
        page.goto(path.as_uri())
        opened.append((context, requests, errors, path))
        return page

    yield opens
    for context, requests, errors, path in opened:
        assert requests == [path.as_uri()] and errors == []
        context.close()


def marked(rng):
    array = rng.standard_normal((20, 30)).astype("f4")
    array[2, 3], array[4, 5], array[6, 7], array[8, 9], array[9, 8] = np.nan, np.inf, -np.inf, 9.0, -9.0
    da = xr.DataArray(array, dims=("token", "hidden"), name="resid")
    missing = xr.DataArray(np.arange(30) >= 26, dims="hidden")
    return array_view(da, missing=missing, vmin=-3, vmax=3, tokens={"token": ["the", "\u202e</b>", "😀", "ש"] * 5})


def body(*views, attrs=""):
    return f"<!doctype html><html lang=en><meta charset=utf-8><title>t</title><body {attrs}>" + "".join(
        v._repr_html_() for v in views
    )


def over(page, view, place, *, nth=0, tile=0):
    """Put the pointer on the middle of a shown cell (y, x)."""
    grid = view.content().grid
    box = page.locator(".mpa").nth(nth).locator("img.mpa-f:visible").bounding_box()
    at = grid.tiles[tile]
    x = at.left + grid.x.offsets(grid.cell, grids.GAP)[place[1]] + grid.cell / 2
    y = at.top + grid.y.offsets(grid.cell, grids.GAP)[place[0]] + grid.cell / 2
    page.mouse.move(box["x"] + float(x), box["y"] + float(y))


def tip(page, nth=0):
    return page.locator(".mpa").nth(nth).locator(".mpa-tip")


@pytest.mark.parametrize("theme", ["light", pytest.param("dark", marks=pytest.mark.slow)])
def test_themes_and_pixels(open_page, rng, tmp_path, theme):
    view = marked(rng)
    page = open_page(view.to_html(tmp_path / "a.html").read_text(), theme=theme)
    shown = page.evaluate("getComputedStyle(document.querySelector('.mpa')).backgroundColor")
    assert shown == {"light": "rgb(255, 255, 255)", "dark": "rgb(21, 24, 28)"}[theme]
    grid, (frame,) = view.content().grid, view.content().frames()
    pixels = page.evaluate(
        "() => { const i = document.querySelector('.mpa-f'), c = document.createElement('canvas'); c.width = i.naturalWidth;"
        " c.height = i.naturalHeight; const g = c.getContext('2d'); g.drawImage(i, 0, 0);"
        " return [...g.getImageData(0, 0, c.width, c.height).data]; }"
    )
    seen = np.array(pixels, np.uint8).reshape(grid.height, grid.width, 4)
    want = np.where(frame[..., None] > 0, colours.PALETTE[frame], 0)
    assert (seen[..., :3] == want).all() and ((seen[..., 3] == 255) == (frame > 0)).all()
    for index in (colours.Index.NAN, colours.Index.INF, colours.Index.HATCH, colours.Index.PAPER, colours.Index.INK):
        assert (frame == index).any()
    assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    assert page.locator(".mpa-k").inner_text().count("NaN") == 1


@pytest.mark.parametrize(("attrs", "theme", "shown"), [
    ("data-jp-theme-light=true style='--jp-layout-color0:#fefefe;--jp-content-font-color1:#111'", "dark", "rgb(254, 254, 254)"),
    ("data-jp-theme-light=false style='--jp-layout-color0:#111;--jp-content-font-color1:#fff'", "light", "rgb(17, 17, 17)"),
    ("class=vscode-dark", "light", "rgb(21, 24, 28)"),
])  # fmt: skip
def test_the_host_says_the_theme(open_page, rng, attrs, theme, shown):
    page = open_page(body(marked(rng), attrs=attrs), theme=theme)
    assert page.evaluate("getComputedStyle(document.querySelector('.mpa')).backgroundColor") == shown
    dim = page.evaluate("getComputedStyle(document.querySelector('.mpa')).getPropertyValue('--mpa-d')")
    assert dim == ("#57606a" if "true" in attrs else "#9aa5b1")


def test_pointing_reads_the_value(open_page, rng):
    view, other = marked(rng), array_view(xr.DataArray(rng.standard_normal((30, 4096, 576)[::-1][:2]), dims=("a", "b")))
    page = open_page(body(view, other))
    exact = view.data.values
    over(page, view, (0, 0))
    assert float(tip(page).locator("b").inner_text()) == float(str(exact[0, 0]))
    assert tip(page).inner_text().split("\n")[1:] == ["token 0 “the”", "hidden 0"]
    over(page, view, (1, 25))
    assert "token 1 “\\u202e</b>”" in tip(page).inner_text()
    for place, text in (
        ((2, 3), "NaN"),
        ((4, 5), "+Inf"),
        ((6, 7), "−Inf"),
        ((8, 9), "9 above the limits"),
        ((9, 8), "-9 below"),
    ):
        over(page, view, place)
        assert tip(page).inner_text().startswith(text)
    over(page, view, (3, 28))
    assert "missing (no rank captured it)" in tip(page).inner_text()
    last = (other.content().grid.y.shown - 1, other.content().grid.x.shown - 1)
    page.locator(".mpa").nth(1).scroll_into_view_if_needed()
    over(page, other, last, nth=1)
    assert tip(page, 1).inner_text().split("\n") == [str(other.data.values[-1, -1]), "a 575", "b 4095"]
    assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    page.mouse.move(2, 2)
    assert tip(page, 1).is_hidden()


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "i8", "u1", "?", "c8", "c16"])
def test_table_by_keyboard_holds_the_exact_values(open_page, rng, dtype):
    bits = rng.integers(0, 256, 16 * 200, dtype=np.uint8)
    array = (bits.view("i8") & 1).astype(bool)[None] if dtype == "?" else bits.view(dtype)[None, :200]
    view = array_view(xr.DataArray(array, dims=("a", "b")))
    page = open_page(body(view))
    summary = page.locator("summary")
    for _ in range(6):
        page.keyboard.press("Tab")
        if summary.evaluate("e => e === document.activeElement"):
            break
    assert page.locator("table").is_hidden()
    page.keyboard.press("Enter")
    page.wait_for_function("document.querySelector('details').open && document.querySelectorAll('tbody td').length > 8")
    got = page.locator("tbody td").all_inner_texts()
    want = array[:, view.content().grid.x.positions()].ravel()
    if dtype == "?":
        assert got == [str(v) for v in want.tolist()]
    elif dtype[0] == "c":
        assert [complex(t) for t in got if "N" not in t] == [complex(str(v)) for v in want if not np.isnan(v)]
    else:
        read = [t.replace("−", "-").replace("Inf", "inf") for t in got]
        numbers = (
            np.array([int(t) for t in read], dtype)
            if dtype in ("i8", "u1")
            else np.array(read).astype("f8").astype(dtype)
        )
        np.testing.assert_array_equal(numbers, want)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "mpa-t"


def test_sliders_choose_the_frame(open_page, rng):
    da = xr.DataArray(rng.standard_normal((2, 3, 2, 2, 4, 4)).astype("f4"), dims=("layer", "head", "r", "c", "y", "x"))
    view = array_view(da.assign_coords(head=[10, 20, 30]))
    page = open_page(body(view))
    assert page.locator(".mpa-s input").count() == 2 and page.locator(".mpa-w").is_hidden()
    page.locator(".mpa-s input").nth(0).focus()
    page.keyboard.press("ArrowRight")
    page.locator(".mpa-s input").nth(1).focus()
    page.keyboard.press("End")
    assert page.locator("output").all_inner_texts() == ["1", "2 (30)"]
    assert page.locator(".mpa-f").count() == 1
    assert page.locator(".mpa-f").get_attribute("src") == data_uri(
        palette_png(view.content().frames()[5], colours.PALETTE)
    )
    over(page, view, (3, 2), tile=3)
    lines = tip(page).inner_text().split("\n")
    assert float(lines[0]) == float(str(da.values[1, 2, 1, 1, 3, 2]))
    assert lines[1:] == ["layer 1", "head 2 (30)", "r 1", "c 1", "y 3", "x 2"]


def test_without_script_the_picture_is_right(open_page, rng):
    sliders = array_view(xr.DataArray(rng.standard_normal((2, 2, 2, 4, 4)), dims=tuple("abcde")))
    page = open_page(body(marked(rng), sliders), script=False)
    assert page.locator(".mpa-f:visible").count() == 2 and page.locator("input").count() == 0
    assert "a 0 of 2" in page.locator(".mpa-w").inner_text()
    page.locator("summary").first.click()
    assert page.locator("table").first.locator("td").count() == 1 + 64


def test_nothing_of_the_data_runs(open_page):
    nasty = "</script><img src=x onerror='window.bad=1'><script>window.bad=1</script>"
    da = xr.DataArray(
        np.array([[nasty, nasty + "b"], ["c", "d"]]), dims=(nasty, "b"), name=nasty, coords={"b": [nasty, "e"]}
    )
    view = array_view(da)
    page = open_page(body(view))
    over(page, view, (0, 0))
    assert tip(page).inner_text().startswith("</script><img")
    page.locator("summary").click()
    assert page.evaluate("window.bad === undefined") and page.locator("img[src=x]").count() == 0


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing(open_page, rng, tmp_path, theme):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="needs axe-playwright-python")
    sliders = array_view(xr.DataArray(rng.integers(0, 4, (2, 2, 2, 4, 4)), dims=tuple("abcde")))
    for view in (marked(rng), sliders):
        page = open_page(view.to_html(tmp_path / "a.html").read_text(), theme=theme)
        page.locator("summary").click()
        over(page, view, (1, 1))
        found = axe.Axe().run(page)
        assert found.violations_count == 0, found.generate_report()


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_labels_do_not_overlap(open_page, rng, theme):
    views = [
        marked(rng),
        array_view(xr.DataArray(rng.standard_normal((30, 4096, 576)[1:]), dims=("token", "hidden"))),
        array_view(xr.DataArray(rng.standard_normal((6, 5, 64, 64)), dims=("layer", "head", "query", "key"))),
        array_view(xr.DataArray(rng.standard_normal((7, 20, 20)), dims=("layer", "query", "key"))),
    ]
    page = open_page(body(*views), theme=theme)
    hits = page.evaluate(
        "() => [...document.querySelectorAll('.mpa-p')].flatMap(p => { const t = [...p.querySelectorAll('.mpa-x,.mpa-v,.mpa-n')]"
        ".filter(e => e.textContent && !e.closest('[hidden]')).map(e => [e.textContent, e.firstElementChild ? e.firstElementChild"
        ".getBoundingClientRect() : e.getBoundingClientRect()]); const out = [];"
        " t.forEach((a, i) => t.slice(i + 1).forEach(b => { const r = a[1], s = b[1]; if (r.left < s.right - 1 && s.left < r.right - 1"
        " && r.top < s.bottom - 2 && s.top < r.bottom - 2) out.push(a[0] + ' | ' + b[0]); })); return out; })"
    )
    assert hits == []
