"""The compiled module is really there: a pure-Python fallback must not hide a broken build."""

from __future__ import annotations

import importlib.machinery
from pathlib import Path

from mappnb import _core
from mappnb.capture._record import RECORD_DTYPE
from mappnb.capture.recorder import Recorder


def test_core_is_a_compiled_file() -> None:
    assert _core.__file__ is not None
    path = Path(_core.__file__)
    assert path.is_file()
    assert path.name.endswith(tuple(importlib.machinery.EXTENSION_SUFFIXES))


def test_recorder_is_native_by_default(monkeypatch) -> None:
    monkeypatch.delenv("MAPPNB_PURE_PYTHON", raising=False)
    assert Recorder().native
    monkeypatch.setenv("MAPPNB_PURE_PYTHON", "1")
    assert not Recorder().native


def test_compiled_layout_is_the_declared_one() -> None:
    assert _core.record_dtype() == RECORD_DTYPE
    assert RECORD_DTYPE.itemsize == 88
