"""Fixtures that all tests share."""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(20261130)


@pytest.fixture
def make(tmp_path):
    """make_run into a fresh folder, attached."""
    import mappnb
    from mappnb.testing.runs import make_run

    def build(name: str = "run", **options):
        return mappnb.attach(make_run(tmp_path / name, **options))

    return build


def pytest_configure() -> None:
    """Take Ctrl-C as usual where the shell that started this in the background has it ignored: the tests' programs inherit that."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
