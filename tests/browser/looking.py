"""What browser tests look at a page with: axe, pictures to look at, and a page that was written to a file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

PICTURES = os.environ.get("MAPPNB_PICTURES")
"""A folder to leave pictures in, to look at."""


def axe_finds(page: Any, within: str) -> list[str]:
    """Violations in the element with this selector, as axe names them."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="needs axe-playwright-python")
    found = axe.Axe().run(page, context=within).response["violations"]
    return [f"{v['id']}: {n['html'][:160]}: {n['failureSummary']}" for v in found for n in v["nodes"]]


def picture(page: Any, name: str, *, of: str | None = None) -> None:
    """Leave a picture of the page, or of the first element with a selector, where one is wanted."""
    if PICTURES:
        page.wait_for_timeout(800)
        path = str(Path(PICTURES) / f"{name}.png")
        if of is None:
            page.screenshot(path=path, full_page=True)
        else:
            page.locator(of).first.screenshot(path=path)


def open_file(browser: Any, path: Path, *, scheme: str, height: int = 1000) -> tuple[Any, list[str], list[str]]:
    """Open a page that stands alone: the page, the addresses it asks for and the errors it raises; close its context."""
    context = browser.new_context(viewport={"width": 1280, "height": height}, color_scheme=scheme)
    page = context.new_page()
    asked: list[str] = []
    failed: list[str] = []
    page.on("request", lambda r: asked.append(r.url))
    page.on("pageerror", lambda e: failed.append(str(e)))
    page.goto(path.as_uri())
    return page, asked, failed
