"""Every notebook runs on a CPU, and the cells that state a result give it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))


FOLDER = Path(__file__).parents[1] / "notebooks"


@pytest.fixture(scope="module")
def data():
    """The runs that the notebooks open, recorded if they are not there yet."""
    subprocess.run([sys.executable, str(FOLDER / "make_data.py")], check=True, timeout=280, capture_output=True)


def test_there_are_notebooks():
    assert NOTEBOOKS


@pytest.mark.dist
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebook_runs(path, data):
    command = [sys.executable, "-m", "pytest", "-q", "--nbval-lax", "-p", "no:cacheprovider", "-W", "ignore", str(path)]
    out = subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=path.parent, check=False)
    assert out.returncode == 0, out.stdout[-3000:]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebook_is_clean(path):
    """No saved widget state, no outputs but those of cells that state a result, no long helper functions."""
    notebook = nbformat.read(path, as_version=4)
    assert "widgets" not in notebook.metadata
    cells = [c for c in notebook.cells if c.cell_type == "code"]
    stated = [c for c in cells if "NBVAL_CHECK_OUTPUT" in c.source]
    assert stated and all(not c.outputs for c in cells if c not in stated)
    assert all(c.source.count("\n") < 15 for c in cells)
