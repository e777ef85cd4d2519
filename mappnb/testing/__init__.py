"""Public test kit: runs with known content, megatron-core on the CPU, and a reference training job."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mappnb.testing.gpt_settings import TrainSettings as TrainSettings
    from mappnb.testing.launcher import launch as launch
    from mappnb.testing.megatron_cpu import megatron_on_cpu as megatron_on_cpu
    from mappnb.testing.runs import make_run as make_run

__all__ = ["TrainSettings", "launch", "make_run", "megatron_on_cpu"]

_WHERE = {
    "make_run": "runs",
    "megatron_on_cpu": "megatron_cpu",
    "TrainSettings": "gpt_settings",
    "launch": "launcher",
}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'mappnb.testing' has no attribute {name!r}")
    return getattr(importlib.import_module(f"mappnb.testing.{_WHERE[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
