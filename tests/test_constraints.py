"""The pinned versions can be installed on every Python that the project takes."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

CONSTRAINTS = Path(__file__).parents[1] / "constraints.txt"
OLDEST = "3.11.0"


def pinned() -> list[str]:
    lines = [line.split("#")[0].strip() for line in CONSTRAINTS.read_text().splitlines()]
    return [Requirement(line).name for line in lines if "==" in line]


def test_pins_take_the_oldest_python():
    """Debian 12 has Python 3.11.2: a pin that asks for 3.11.5 cannot be installed there."""
    refused, seen = {}, 0
    for name in pinned():
        try:
            wanted = metadata.metadata(name)["Requires-Python"]
        except metadata.PackageNotFoundError:
            continue  # of another lane or system
        seen += 1
        if wanted and not SpecifierSet(wanted).contains(OLDEST):
            refused[name] = wanted
    if seen < 20:
        pytest.skip("the pinned packages are not installed here")
    assert refused == {}
