"""Public test kit: runs with known content, generated runs with their truth, megatron-core on the CPU, a reference training job."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mappnb.testing._gen_faults import CheckpointStall as CheckpointStall
    from mappnb.testing._gen_faults import DataSkew as DataSkew
    from mappnb.testing._gen_faults import Hang as Hang
    from mappnb.testing._gen_faults import HostGaps as HostGaps
    from mappnb.testing._gen_faults import IntermittentRank as IntermittentRank
    from mappnb.testing._gen_faults import KilledRank as KilledRank
    from mappnb.testing._gen_faults import MissingRank as MissingRank
    from mappnb.testing._gen_faults import MoeImbalance as MoeImbalance
    from mappnb.testing._gen_faults import SlowHost as SlowHost
    from mappnb.testing._gen_faults import SlowLayer as SlowLayer
    from mappnb.testing._gen_faults import SlowLink as SlowLink
    from mappnb.testing._gen_faults import SlowNic as SlowNic
    from mappnb.testing._gen_faults import SlowRank as SlowRank
    from mappnb.testing._gen_faults import SlowStage as SlowStage
    from mappnb.testing._gen_noise import noise_of as noise_of
    from mappnb.testing._gen_settings import Clocks as Clocks
    from mappnb.testing._gen_settings import Noise as Noise
    from mappnb.testing._gen_settings import Traffic as Traffic
    from mappnb.testing._gen_truth import ClockTruth as ClockTruth
    from mappnb.testing._gen_truth import FaultTruth as FaultTruth
    from mappnb.testing._gen_truth import Truth as Truth
    from mappnb.testing.generate import generate_run as generate_run
    from mappnb.testing.gpt_settings import TrainSettings as TrainSettings
    from mappnb.testing.launcher import launch as launch
    from mappnb.testing.megatron_cpu import megatron_on_cpu as megatron_on_cpu
    from mappnb.testing.runs import make_run as make_run

__all__ = [
    "CheckpointStall",
    "ClockTruth",
    "Clocks",
    "DataSkew",
    "FaultTruth",
    "Hang",
    "HostGaps",
    "IntermittentRank",
    "KilledRank",
    "MissingRank",
    "MoeImbalance",
    "Noise",
    "SlowHost",
    "SlowLayer",
    "SlowLink",
    "SlowNic",
    "SlowRank",
    "SlowStage",
    "Traffic",
    "TrainSettings",
    "Truth",
    "generate_run",
    "launch",
    "make_run",
    "megatron_on_cpu",
    "noise_of",
]

_FAULTS = (
    "CheckpointStall",
    "DataSkew",
    "Hang",
    "HostGaps",
    "IntermittentRank",
    "KilledRank",
    "MissingRank",
    "MoeImbalance",
    "SlowHost",
    "SlowLayer",
    "SlowLink",
    "SlowNic",
    "SlowRank",
    "SlowStage",
)

_WHERE = {
    "make_run": "runs",
    "megatron_on_cpu": "megatron_cpu",
    "TrainSettings": "gpt_settings",
    "launch": "launcher",
    "generate_run": "generate",
    "noise_of": "_gen_noise",
    **dict.fromkeys(_FAULTS, "_gen_faults"),
    **dict.fromkeys(("Clocks", "Noise", "Traffic"), "_gen_settings"),
    **dict.fromkeys(("ClockTruth", "FaultTruth", "Truth"), "_gen_truth"),
}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'mappnb.testing' has no attribute {name!r}")
    return getattr(importlib.import_module(f"mappnb.testing.{_WHERE[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
