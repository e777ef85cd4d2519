"""The docs stay true: every capture point, variable, command and file that they name exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import mappnb
from mappnb.capture.points import CAPTURE_POINTS, PLANS
from mappnb.cli import _parser
from mappnb.schema import EVENTS, METRICS, STEPS, TELEMETRY

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_capture_page_lists_every_point_and_variable():
    text = (ROOT / "docs/capture.md").read_text()
    for point in CAPTURE_POINTS:
        assert f"| {point.name} | {point.what} | {point.when} | `{point.source}` |" in text
    for schema in (EVENTS, STEPS, TELEMETRY, METRICS):
        for name, var in schema.items():
            assert f"| `{name}` |" in text and f"| {var.meaning} |" in text
    plans = (ROOT / "docs/megatron.md").read_text()
    assert all(f"| `{plan}` |" in plans for plan in PLANS)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_page(page):
    text = page.read_text()
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert (page.parent / target).exists(), target
    for name in set(re.findall(r"mappnb\.analysis\.(\w+)", text)):
        assert hasattr(mappnb.analysis, name), name
    for name in set(re.findall(r"\bmappnb\.(attach|record|step|span|testing)\b", text)):
        assert hasattr(mappnb, name)
    commands = set(_parser()._subparsers._group_actions[0].choices)
    assert set(re.findall(r"`mappnb ([a-z]+)", text)) <= commands
    for path in set(re.findall(r"python (tests/bench/\w+\.py)", text)):
        assert (ROOT / path).exists(), path
    assert "http://" not in text and "/work/" not in text


def test_make_targets_of_the_docs_exist():
    makefile = (ROOT / "Makefile").read_text()
    for page in PAGES:
        for target in set(re.findall(r"`?make ([a-z-]+)", page.read_text())):
            assert re.search(rf"^{target}:", makefile, re.M), (page.name, target)
