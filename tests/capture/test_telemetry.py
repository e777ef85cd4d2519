"""Telemetry with a fake NVML, without NVML, and with an NVML that fails."""

from __future__ import annotations

import math
import sys
import time
import types

import pytest

from mappnb.capture.telemetry import Telemetry
from mappnb.schema import TELEMETRY

GPU = ("sm_clock_mhz", "memory_clock_mhz", "power_w", "temperature_c", "gpu_fraction", "gpu_memory_bytes")


class FakeNvml(types.ModuleType):
    """Two devices; the handle is the index."""

    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0

    def __init__(self, failing: tuple[str, ...] = ()) -> None:
        super().__init__("pynvml")
        self.failing = failing
        self.asked: list[str | int] = []

    def _give(self, name, value):
        if name in self.failing:
            raise RuntimeError("NVML_ERROR_NOT_SUPPORTED")
        return value

    def nvmlInit(self):
        return self._give("init", None)

    def nvmlDeviceGetHandleByIndex(self, index):
        self.asked.append(index)
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid):
        self.asked.append(uuid)
        return {"GPU-a": 0, "GPU-b": 1}[uuid]

    def nvmlDeviceGetClockInfo(self, device, kind):
        return self._give("clock", 1000 * kind + device)

    def nvmlDeviceGetPowerUsage(self, device):
        return self._give("power", 300_500)

    def nvmlDeviceGetTemperature(self, device, sensor):
        return self._give("temperature", 61)

    def nvmlDeviceGetCurrentClocksEventReasons(self, device):
        return self._give("reasons", 0x4)

    def nvmlDeviceGetUtilizationRates(self, device):
        return types.SimpleNamespace(gpu=self._give("utilisation", 87))

    def nvmlDeviceGetMemoryInfo(self, device):
        return types.SimpleNamespace(used=self._give("memory", 5 << 30))


@pytest.fixture
def visible(monkeypatch):
    for name in ("CUDA_VISIBLE_DEVICES", "LOCAL_RANK", "SLURM_LOCALID"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def with_nvml(monkeypatch, nvml):
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    return Telemetry()


def test_all_values_of_a_gpu(visible):
    sample = with_nvml(visible, FakeNvml()).sample()
    assert sample.keys() == TELEMETRY.keys() - {"time_ns"}
    assert [sample[name] for name in GPU] == [1000.0, 2000.0, 300.5, 61.0, 0.87, 5 * 2**30]
    assert sample["throttle_reasons"] == 4


@pytest.mark.parametrize(
    ("devices", "local_rank", "asked"),
    [("", "1", 1), ("3,2", "1", 2), ("GPU-b,GPU-a", "0", "GPU-b"), ("5", "3", 5), ("1", "x", 1)],
)
def test_device_of_the_local_rank(visible, devices, local_rank, asked):
    if devices:
        visible.setenv("CUDA_VISIBLE_DEVICES", devices)
    visible.setenv("LOCAL_RANK", local_rank)
    nvml = FakeNvml()
    with_nvml(visible, nvml).sample()
    assert nvml.asked == [asked]


def test_device_is_looked_up_once(visible):
    nvml = FakeNvml()
    telemetry = with_nvml(visible, nvml)
    telemetry.sample()
    telemetry.sample()
    assert nvml.asked == [0]


@pytest.mark.parametrize("failing", ["clock", "power", "temperature", "utilisation", "memory", "reasons"])
def test_a_value_that_fails_is_missing_and_the_others_stay(visible, failing):
    sample = with_nvml(visible, FakeNvml((failing,))).sample()
    missing = {name for name in GPU if math.isnan(sample[name])}
    expected = {
        "clock": {"sm_clock_mhz", "memory_clock_mhz"},
        "power": {"power_w"},
        "temperature": {"temperature_c"},
        "utilisation": {"gpu_fraction"},
        "memory": {"gpu_memory_bytes"},
        "reasons": set(),
    }[failing]
    assert missing == expected
    assert sample["throttle_reasons"] == (-1 if failing == "reasons" else 4)


def test_no_driver_leaves_the_gpu_missing(visible):
    sample = with_nvml(visible, FakeNvml(("init",))).sample()
    assert all(math.isnan(sample[name]) for name in GPU) and sample["throttle_reasons"] == -1
    assert sample["rss_bytes"] > 1e6


def test_cpu_fraction_is_that_of_the_process(visible):
    telemetry = with_nvml(visible, FakeNvml(("init",)))
    first = telemetry.sample()
    assert math.isnan(first["cpu_fraction"])
    wall, cpu = time.monotonic(), time.process_time()
    while time.process_time() - cpu < 0.05:
        pass
    busy = telemetry.sample()
    expected = (time.process_time() - cpu) / (time.monotonic() - wall)
    assert busy["cpu_fraction"] == pytest.approx(expected, rel=0.3)
    assert 0.0 <= busy["host_memory_fraction"] <= 1.0


def test_without_psutil_nothing_is_raised(visible):
    visible.setitem(sys.modules, "psutil", None)
    sample = with_nvml(visible, FakeNvml(("init",))).sample()
    assert math.isnan(sample["rss_bytes"]) and math.isnan(sample["host_cpu_fraction"])
