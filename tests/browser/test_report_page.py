"""The report in a real browser: drawn, in both themes, without a request to anywhere."""

from __future__ import annotations

import pytest

from mappnb.layout import Layout
from mappnb.report import write_report
from mappnb.testing.runs import make_run

pytestmark = pytest.mark.browser


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_report_page(browser, tmp_path, theme):
    run_dir = make_run(tmp_path / "run", layout=Layout(pp=4, dp=2), num_microbatches=8)
    path = write_report(run_dir)
    context = browser.new_context(color_scheme=theme, viewport={"width": 1100, "height": 900}, offline=True)
    page = context.new_page()
    requests, errors = [], []
    page.on("request", lambda r: requests.append(r.url))
    page.on("pageerror", lambda e: errors.append(str(e)))
    page.on("console", lambda m: errors.append(m.text) if m.type == "error" else None)
    page.goto(path.as_uri())
    assert requests == [path.as_uri()] and errors == []
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert background == {"light": "rgb(255, 255, 255)", "dark": "rgb(21, 24, 28)"}[theme]
    timeline = (
        "[...document.querySelectorAll('svg')].find(s => s.getAttribute('aria-label') === 'timeline of one step')"
    )
    forward = page.evaluate(f"getComputedStyle({timeline}.querySelector('rect[stroke]')).fill")
    assert forward.startswith("rgb") and forward != "rgb(0, 0, 0)"
    blocks = page.evaluate(f"{timeline}.querySelectorAll('rect[stroke]').length")
    assert blocks == 8 * 2 * 8
    assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    texts = page.evaluate(
        "[...document.querySelectorAll('svg text')].every(t => { const b = t.getBBox(), s = t.ownerSVGElement.viewBox.baseVal;"
        " return b.x >= -1 && b.x + b.width <= s.width + 1 && b.y + b.height <= s.height + 2; })"
    )
    assert texts, "every label lies inside its picture"
    assert len(page.screenshot(full_page=True)) > 50_000
    context.close()
