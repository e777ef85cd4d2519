"""The attention view in a real browser: alone with its kernel half, as a page without one, and in JupyterLab."""

from __future__ import annotations

import numpy as np
import pytest
from browser import lab
from browser.live_page import LivePage, live
from browser.looking import axe_finds, open_file, picture
from widgets.attention_data import activations, kind_of

from mappnb.widgets import Attention
from mappnb.widgets._attn_codes import decode

pytestmark = [pytest.mark.browser, pytest.mark.timeout(420)]

ROOT = ".mappnb-attn"
VIEW = "document.querySelector('.mappnb-attn').mappnbView"
IDLE = """() => { const e = document.querySelector('.mappnb-attn'), v = e && e.mappnbView;
  return Boolean(v && v.state && v.store.idle && !v.pending); }"""
THUMB = f"""(index) => {{ const g = {VIEW}.grid, b = g.canvas.getBoundingClientRect(), [x, y] = g.place(g.order.indexOf(index));
  return [b.left + x + 8, b.top + y + 8]; }}"""
CELL = f"""([q, k]) => {{ const h = {VIEW}.boxes[0].heat, b = h.canvas.getBoundingClientRect();
  return [b.left + (h.x(k) + h.x(k + 1)) / 2, b.top + (h.y(q) + h.y(q + 1)) / 2]; }}"""
PIXEL = f"""([name, q, k]) => {{ const h = {VIEW}.boxes.find((b) => b.name === name).heat, r = window.devicePixelRatio;
  return [...h.canvas.getContext('2d').getImageData(
    (h.x(k) + h.x(k + 1)) / 2 * r, (h.y(q) + h.y(q + 1)) / 2 * r, 1, 1).data].slice(0, 3); }}"""


@pytest.fixture(scope="module")
def data():
    return activations(layers=range(4), heads=6, kv_heads=2, tokens=48, samples=2, steps=(10, 20, 30))


def drawn(shown: LivePage) -> None:
    shown.push()
    shown.page.wait_for_function(IDLE, timeout=30_000)
    shown.page.wait_for_timeout(150)


def clean(shown: LivePage) -> None:
    failed = [f for f in shown.failed if "readback" not in f]  # a warning about what the tests read from canvases
    assert failed == [] and shown.view.errors == [] and shown.outside == []
    assert max(size for _, size in shown.sizes) <= 40_000


@pytest.fixture(params=[pytest.param("light", marks=pytest.mark.slow), "dark"])
def shown(browser, data, request):
    view = Attention(data)
    with live(browser, view, render="renderAttention", scheme=request.param) as page:
        drawn(page)
        yield page
    view.close()


def luminance(rgb) -> float:
    return float(np.dot(rgb, [0.2126, 0.7152, 0.0722]))


def test_thumbnails_show_every_head(shown, request):
    dark = request.node.callspec.params["shown"] == "dark"
    box = shown.page.evaluate(f"() => {{ const g = {VIEW}.grid; return [g.cell, g.left, g.top]; }}")
    codes = shown.view.overview().codes
    read = f"""([index, i, j, size]) => {{ const g = {VIEW}.grid, [x, y] = g.place(index);
      const r = window.devicePixelRatio, s = (g.cell - 3) / size;
      return [...g.canvas.getContext('2d').getImageData((x + (j + 0.5) * s) * r, (y + (i + 0.5) * s) * r, 1, 1).data].slice(0, 3); }}"""
    size = codes.shape[-1]
    for head in range(6):
        weights = decode(codes[1, head])
        strong = np.unravel_index(weights.argmax(), weights.shape)
        inks = [
            luminance(shown.page.evaluate(read, [6 + head, int(i), int(j), size])) for i, j in (strong, (0, size - 1))
        ]
        expected = abs(inks[0] - inks[1])
        assert (inks[0] > inks[1]) == dark and expected > 40 * weights.max(), (kind_of(1, head), box)
    picture(shown.page, f"attention-{'dark' if dark else 'light'}")
    assert axe_finds(shown.page, ROOT) == []
    clean(shown)


def test_a_head_and_what_a_token_attends_to(shown):
    shown.page.mouse.click(*shown.page.evaluate(THUMB, 6 + 4))
    drawn(shown)
    assert (shown.view._where.layer, shown.view._where.head) == (1, 4)
    pattern = shown.view.pattern().values
    shown.page.mouse.click(*shown.page.evaluate(CELL, [20, 3]))
    drawn(shown)
    assert shown.view._where.query == 20 and len(shown.view.selected) == 48
    rows = shown.page.locator(".mappnb-attn-weights tbody tr").all_inner_texts()
    best = int(pattern[20].argmax())
    token, slot, weight = rows[0].split("\t")
    assert int(slot) == best and float(weight) == pytest.approx(pattern[20, best], abs=6e-4)
    assert token.strip() == shown.view.pattern()["key_token"].values[best]
    shown.page.mouse.move(*shown.page.evaluate(CELL, [30, best]))
    shown.page.wait_for_timeout(150)
    assert (
        f"{pattern[30, best]:.2f}" in shown.page.locator(".mappnb-tip:visible").inner_text() or pattern[30, best] < 0.01
    )
    shown.page.get_by_role("button", name="is attended by").click()
    drawn(shown)
    first = shown.page.locator(".mappnb-attn-weights tbody tr").first.inner_text().split("\t")
    assert int(first[1]) == int(pattern[:, 20].argmax())
    assert axe_finds(shown.page, ROOT) == []
    picture(shown.page, "attention-head")
    clean(shown)


def test_keys(shown):
    shown.page.evaluate(f"() => {VIEW}.grid.canvas.focus()")
    for key in ("ArrowRight", "ArrowRight", "ArrowDown", "Enter"):
        shown.page.keyboard.press(key)
    drawn(shown)
    assert (shown.view._where.layer, shown.view._where.head) == (1, 2)
    assert "Layer 1, head 2" in shown.page.locator(".mappnb-attn-detail").inner_text()
    shown.page.keyboard.press("ArrowLeft")
    drawn(shown)
    assert shown.view._where.head == 1, "with a head open the arrows go through the heads"
    shown.page.evaluate(f"() => {VIEW}.boxes[0].heat.canvas.focus()")
    for key in ("ArrowDown", "ArrowDown", "ArrowDown", "Enter"):
        shown.page.keyboard.press(key)
    shown.page.keyboard.press("Shift+ArrowDown")
    drawn(shown)
    assert shown.view._where.query == 2 and (shown.view._where.layer, shown.view._where.head) == (2, 1)
    shown.page.keyboard.press("+")
    shown.page.wait_for_timeout(400)
    q0, q1, k0, k1 = shown.view._where.window
    assert 0 < q1 - q0 < 48 and 0 < k1 - k0 < 48
    shown.page.keyboard.press("0")
    shown.page.wait_for_timeout(400)
    assert shown.view._where.window is None
    shown.page.keyboard.press("Escape")
    drawn(shown)
    assert shown.view._where.layer is None
    assert shown.page.evaluate(f"() => document.activeElement === {VIEW}.grid.canvas")
    clean(shown)


def test_two_samples_and_their_difference(shown):
    shown.view.goto(layer=0, head=5)
    shown.view.compare(1)
    drawn(shown)
    boxes = shown.page.locator(".mappnb-attn-box:visible")
    assert boxes.count() == 3
    a, b = shown.view.pattern().values, shown.view.pattern(sample=1).values
    got = shown.page.evaluate(
        f"() => [[40, 10], [25, 24], [47, 0]].map(([q, k]) => {VIEW}.boxes.map((x) => x.heat.value(q, k)))"
    )
    for (q, k), values in zip(((40, 10), (25, 24), (47, 0)), got, strict=True):
        assert values == pytest.approx([a[q, k], b[q, k], a[q, k] - b[q, k]], abs=0.008)
    more = np.unravel_index((a - b).argmax(), a.shape), np.unravel_index((a - b).argmin(), a.shape)
    warm, cold = (shown.page.evaluate(PIXEL, ["d", int(q), int(k)]) for q, k in more)
    assert warm[0] > warm[2] and cold[2] > cold[0], "orange where A is more, blue where B is"
    shown.page.mouse.move(*shown.page.evaluate(CELL, [40, 10]))
    shown.page.wait_for_timeout(150)
    tip = shown.page.locator(".mappnb-tip:visible").inner_text()
    assert "A − B" in tip
    shown.page.get_by_label("thumbnails", exact=True).select_option("d")
    drawn(shown)
    assert "A − B" in shown.page.locator(".mappnb-attn-overview").inner_text()
    assert axe_finds(shown.page, ROOT) == []
    picture(shown.page, "attention-compare")
    clean(shown)


def test_steps_play(shown):
    shown.view.goto(layer=0, head=5)
    drawn(shown)
    values = []
    assert shown.page.get_by_label("Step", exact=True).get_attribute("max") == "2"
    shown.page.get_by_role("button", name="Play").click()
    for _ in range(40):
        shown.page.wait_for_timeout(150)
        values.append(shown.view._where.sample)
        if values[-1] == 4 and shown.page.get_by_role("button", name="Play").count():
            break
    assert [v for i, v in enumerate(values) if i == 0 or v != values[i - 1]] in ([0, 2, 4], [2, 4]), values
    drawn(shown)
    got = shown.page.evaluate(f"() => {VIEW}.boxes[0].heat.value(40, 10)")
    assert got == pytest.approx(shown.view.pattern().values[40, 10], abs=0.004)
    assert "step 30 (3 of 3)" in shown.page.locator(".mappnb-attn-player").inner_text()
    clean(shown)


def test_order_scores_and_colours(shown):
    shown.page.get_by_label("order", exact=True).select_option("previous_token")
    drawn(shown)
    order = shown.page.evaluate(f"() => {VIEW}.grid.order")
    scores = shown.view.scores["previous_token"]
    assert [scores[i] for i in order] == sorted(scores, reverse=True)
    shown.page.get_by_text("Head scores").click()
    shown.page.wait_for_timeout(200)
    top = shown.page.locator(".mappnb-attn-scores tbody tr").first
    best = shown.view.scores.loc[scores.idxmax()]
    assert kind_of(int(best["layer"]), int(best["head"])) == "previous"
    top.get_by_role("button").click()
    drawn(shown)
    assert shown.view.scores["previous_token"][6 * shown.view._where.layer + shown.view._where.head] == pytest.approx(
        scores.max()
    )
    shown.page.get_by_label("colours", exact=True).select_option("log")
    shown.page.get_by_label("at least", exact=True).fill("0.5")
    shown.page.keyboard.press("Enter")
    drawn(shown)
    assert (shown.view._where.scale, shown.view._where.threshold) == ("log", 0.5)
    pattern = shown.view.pattern().values
    weak = np.argwhere((pattern > 0.001) & (pattern < 0.4))[0]
    assert shown.page.evaluate(PIXEL, ["a", int(weak[0]), int(weak[1])]) == shown.page.evaluate(PIXEL, ["a", 0, 47]), (
        "below the threshold nothing is drawn"
    )
    assert axe_finds(shown.page, ROOT) == []
    clean(shown)


def test_lines(shown):
    shown.view.goto(layer=0, head=2, query=40)
    shown.view.set(mode="lines")
    drawn(shown)
    pattern = shown.view.pattern().values
    box = f"{VIEW}.boxes[0].lines"
    best, worst = int(pattern[40].argmax()), int(pattern[40, :40].argmin())
    read = f"""(k) => {{ const b = {box}, r = window.devicePixelRatio;
      const d = b.canvas.getContext('2d').getImageData((b.sides[1] - 3) * r, (b.y(k) - 1) * r, 2, 4).data;
      let most = 0; for (let i = 0; i < d.length; i += 4) most = Math.max(most, d[i + 3]); return most; }}"""
    assert shown.page.evaluate(read, best) > 3 * shown.page.evaluate(read, worst) + 20
    picture(shown.page, "attention-lines")
    assert axe_finds(shown.page, ROOT) == []
    clean(shown)


def test_narrow_shows_one_thing_at_a_time(browser, data):
    view = Attention(data, compare=1)
    with live(browser, view, render="renderAttention", width=420) as shown:
        drawn(shown)
        assert shown.page.locator(".mappnb-attn-overview").is_visible()
        view.goto(layer=2, head=2, query=5)
        drawn(shown)
        assert not shown.page.locator(".mappnb-attn-overview").is_visible()
        assert shown.page.evaluate("() => document.documentElement.scrollWidth <= window.innerWidth")
        picture(shown.page, "attention-narrow")
        shown.page.get_by_role("button", name="← All heads").click()
        drawn(shown)
        assert shown.page.locator(".mappnb-attn-overview").is_visible()
        clean(shown)
    view.close()


def test_hostile_tokens_stay_text(browser):
    hostile = [
        "<img src=x onerror='window.hurt=1'>",
        "</script><script>window.hurt=1</script>",
        "\u202egnp.exe",
        "a\u0000b",
        "&lt;",
        "'\"`",
    ]
    view = Attention(np.tril(np.full((1, 2, 6, 6), 0.3)), tokens=hostile, layer=0, head=1, query=3)
    with live(browser, view, render="renderAttention") as shown:
        drawn(shown)
        tokens = shown.page.locator(".mappnb-attn-token").all_inner_texts()
        assert tokens == view.pattern()["key_token"].values.tolist()
        assert "⟨U+202E⟩gnp.exe" in tokens and "a⟨00⟩b" in tokens
        assert shown.page.evaluate("() => window.hurt") is None and shown.page.locator(".mappnb-attn img").count() == 0
        clean(shown)
    view.close()


def test_zoom_into_a_long_sequence(browser):
    rng = np.random.default_rng(0)
    pattern = np.tril(rng.random((1, 1, 600, 600))).astype(np.float32)
    view = Attention(pattern, layer=0, head=0)
    with live(browser, view, render="renderAttention") as shown:
        drawn(shown)
        coarse = shown.page.evaluate(f"() => {VIEW}.boxes[0].heat.value(400, 100)")
        assert coarse >= pattern[0, 0, 400, 100] - 0.01
        view.set(window=(380, 420, 80, 120))
        drawn(shown)
        fine = shown.page.evaluate(f"() => {VIEW}.boxes[0].heat.value(400, 100)")
        assert fine == pytest.approx(pattern[0, 0, 400, 100], abs=0.004)
        x, y = shown.page.evaluate(CELL, [400, 100])
        shown.page.mouse.move(x, y)
        shown.page.mouse.down()
        shown.page.mouse.move(x + 60, y + 60, steps=5)
        shown.page.mouse.up()
        drawn(shown)
        shown.page.wait_for_timeout(300)
        assert view._where.window[0] < 380 and view._where.window[2] < 80 and view._where.query is None, (
            "a drag moves, and chooses nothing"
        )
        picture(shown.page, "attention-zoom")
        clean(shown)
    view.close()


def test_a_view_leaves_nothing_and_a_closed_one_says_so(browser, data):
    view = Attention(data)
    with live(browser, view, render="renderAttention") as shown:
        drawn(shown)
        view.tell("close")
        shown.settle()
        assert "closed" in shown.page.locator(".mappnb-status").inner_text()
        shown.page.evaluate("() => window.undo()")
        assert shown.page.locator(".mappnb-attn").count() == 0
        assert shown.failed == []
    view.close()


@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.slow)])
def test_page_without_a_kernel(browser, tmp_path, scheme):
    """12 layers, 12 heads, 128 tokens in one file of at most 2 MB; every head can be opened."""
    view = Attention(activations(), compare=1)
    view.to_html(tmp_path / "alone.html")
    assert (tmp_path / "alone.html").stat().st_size <= 2_000_000
    page, asked, failed = open_file(browser, tmp_path / "alone.html", scheme=scheme)
    page.wait_for_function(IDLE, timeout=30_000)
    for index in (0, 77, 143):
        page.evaluate(f"(i) => {VIEW}.open(i)", index)
        page.wait_for_function(IDLE, timeout=20_000)
        page.wait_for_timeout(150)
        for sample, box in ((0, 0), (1, 1)):
            expected = view.pattern(layer=index // 12, head=index % 12, sample=sample).values
            got = np.array(
                page.evaluate(
                    f"() => [...Array(16384).keys()].map((i) => {VIEW}.boxes[{box}].heat.value(i >> 7, i & 127))"
                )
            ).reshape(128, 128)
            np.testing.assert_allclose(got, expected, atol=0.004)
    page.locator(".mappnb-attn-token").nth(100).click()
    page.wait_for_function(IDLE, timeout=20_000)
    page.wait_for_timeout(200)
    slot = int(page.locator(".mappnb-attn-weights tbody tr").first.inner_text().split("\t")[1])
    both = [view.pattern(layer=11, head=11, sample=s).values[100] for s in (0, 1)]
    assert np.maximum(*both)[slot] == pytest.approx(np.max(both), abs=0.004)
    page.get_by_label("thumbnails", exact=True).select_option("d")
    page.wait_for_function(IDLE, timeout=20_000)
    picture(page, f"attention-alone-{scheme}")
    assert axe_finds(page, ROOT) == []
    assert failed == [] and all(u.startswith(("file:", "blob:", "data:")) for u in asked)
    assert page.locator(".mappnb-error").count() == 0
    page.context.close()
    view.close()


def test_in_jupyterlab(browser, tmp_path):
    pytest.importorskip("jupyterlab", reason="needs jupyterlab")
    cells = [
        "import numpy as np\nfrom mappnb.widgets import Attention\nrng = np.random.default_rng(0)\n"
        "p = np.tril(rng.random((2, 4, 6, 24, 24))); p /= p.sum(-1, keepdims=True)",
        "view = Attention(p, tokens=[f'w{i}' for i in range(24)], compare=1)\nview",
    ]
    lab.write_notebook(tmp_path / "look.ipynb", cells)
    (tmp_path / "home").mkdir()
    with lab.server(tmp_path, home=tmp_path / "home") as address:
        context = browser.new_context(viewport={"width": 1280, "height": 1300}, color_scheme="light")
        found = lab.Lab(context, address)
        found.open("look.ipynb")
        found.run_all()
        found.page.wait_for_function(IDLE, timeout=60_000)
        assert found.page.locator(".mappnb-still-attn:visible").count() == 0, "the twin hides behind the live view"
        found.page.evaluate(f"() => {VIEW}.grid.canvas.focus()")
        for key in ("ArrowDown", "ArrowRight", "Enter", "a", "b", "x", "d", "d"):
            found.page.keyboard.press(key)
        found.page.wait_for_timeout(1500)
        found.page.locator(".mappnb-attn-token").nth(9).click()
        found.page.wait_for_timeout(1500)
        said = found.kernel(
            "print(view._where.layer, view._where.head, view._where.query, len(view.selected), view.errors, view.binary)"
        )
        assert said == "1 1 9 24 [] True"
        assert found.page.locator(".jp-Notebook .jp-Cell").count() == len(cells), "no key reached the notebook"
        for theme in ("JupyterLab Dark", "JupyterLab Light"):
            found.theme(theme)
            found.page.wait_for_timeout(1200)
            picture(found.page, f"attention-lab-{theme[-5:].strip().lower()}")
        found.save()
        assert (tmp_path / "look.ipynb").stat().st_size < 150_000, "no data are in the saved notebook"
        assert found.outside == [] and found.page_errors == []
