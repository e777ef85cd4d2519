"""A Chromium for each file of browser tests."""

from __future__ import annotations

import pytest
from browser import lab


@pytest.fixture(scope="module")  # no longer: its event loop would be in the way of other tests
def browser():
    if lab.CHROMIUM is None:
        pytest.skip("needs Chromium (make chromium)")
    pytest.importorskip("playwright.sync_api", reason="needs playwright")
    with lab.browser() as found:
        yield found
