"""Fixtures that all tests share."""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest
from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")
settings.register_profile(
    "mappnb", deadline=None
)  # a busy machine is no error; what takes too long shows in the time-out
settings.load_profile("mappnb")


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
    """Take signals as usual where whatever started this (a shell's background job, nohup) has them ignored: programs inherit that."""
    for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, usual)
