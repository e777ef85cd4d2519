"""Telemetry with a fake NVML, without NVML, and with an NVML that fails."""

from __future__ import annotations

import gc
import math
import os
import sys
import time
import types

import pytest

from mappnb.capture._machine import Proc, Psutil, find_machine
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


def test_without_proc_and_psutil_nothing_is_raised(visible, tmp_path):
    visible.setitem(sys.modules, "psutil", None)
    visible.setitem(sys.modules, "pynvml", FakeNvml(("init",)))
    sample = Telemetry(str(tmp_path)).sample()
    assert sample.keys() == TELEMETRY.keys() - {"time_ns"}
    assert math.isnan(sample["rss_bytes"]) and math.isnan(sample["host_cpu_fraction"])
    assert sample["cpu_fraction"] != sample["cpu_fraction"]


def test_psutil_where_there_is_no_proc(visible, tmp_path):
    visible.setitem(sys.modules, "pynvml", FakeNvml(("init",)))
    sample = Telemetry(str(tmp_path)).sample()
    assert sample["rss_bytes"] > 1e6 and 0.0 <= sample["host_memory_fraction"] <= 1.0


# ---------------------------------------------------------------------------------------------------------- the machine
PROC = {
    "self/statm": "5000 1234 300 1 0 900 0\n",
    "self/schedstat": "111 2500000000 3\n",
    "stat": "cpu  10 20 30 400 50 6 7 8 9 10\ncpu0 1 1 1 1 1 1 1 1 1 1\nintr 5\n",
    "meminfo": "MemTotal:       1000 kB\nMemFree:         100 kB\nMemAvailable:    250 kB\nBuffers:  1 kB\n",
    "cpuinfo": "processor\t: 0\nmodel name\t: some CPU\ncpu MHz\t\t: 2445.406\ncache size\t: 512 KB\n",
    "net/dev": "Inter-| Receive | Transmit\n face |bytes ...\n"
    "    lo: 7 1 0 0 0 0 0 0 7 1 0 0 0 0 0 0\n  eth0:100 1 0 0 0 0 0 0 1000 1 0 0 0 0 0 0\n",
}


@pytest.fixture
def proc(tmp_path):
    for name, text in PROC.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_what_proc_says(proc):
    machine = find_machine(str(proc))
    assert isinstance(machine, Proc)
    assert machine.rss_bytes() == 1234 * os.sysconf("SC_PAGE_SIZE")
    assert machine.waited_s() == 2.5
    assert machine.cpu_times() == (10 + 20 + 30 + 6 + 7 + 8, 531)
    assert machine.memory_fraction() == 0.75
    assert machine.net_bytes() == (1007, 107)
    assert machine.cpu_mhz() in (2445.406, pytest.approx(machine.cpu_mhz()))


def test_files_stay_open_and_are_read_anew(proc, visible):
    visible.setitem(sys.modules, "pynvml", FakeNvml(("init",)))
    telemetry = Telemetry(str(proc))
    telemetry.sample()
    before = len(os.listdir("/proc/self/fd"))
    (proc / "stat").write_text("cpu  20 20 30 430 50 6 7 8 9 10\n")
    (proc / "net/dev").write_text(PROC["net/dev"].replace("eth0:100 ", "eth0:150 "))
    sample = telemetry.sample()
    assert sample["host_cpu_fraction"] == 0.25
    assert (sample["net_sent_bytes"], sample["net_received_bytes"]) == (0.0, 50.0)
    assert len(os.listdir("/proc/self/fd")) == before
    del telemetry
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) < before


@pytest.mark.parametrize("broken", PROC)
def test_a_file_that_cannot_be_read_leaves_the_others(proc, visible, broken):
    visible.setitem(sys.modules, "pynvml", FakeNvml(("init",)))
    (proc / broken).write_text("")
    telemetry = Telemetry(str(proc))
    telemetry.sample()
    missing = {name for name, value in telemetry.sample().items() if math.isnan(value)}
    told = {
        "self/statm": {"rss_bytes"},
        "self/schedstat": {"run_queue_fraction"},
        "stat": {"host_cpu_fraction"},
        "meminfo": {"host_memory_fraction"},
        "cpuinfo": {"cpu_mhz"} if math.isnan(telemetry.sample()["cpu_mhz"]) else set(),
        "net/dev": set(),
    }[broken]
    assert missing - set(GPU) - {"host_cpu_fraction"} == told - {"host_cpu_fraction"}
    assert told <= missing


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="no /proc")
def test_proc_and_psutil_agree():
    ours, theirs = Proc(), Psutil()
    assert ours.rss_bytes() == pytest.approx(theirs.rss_bytes(), rel=0.05)
    assert ours.memory_fraction() == pytest.approx(theirs.memory_fraction(), abs=0.05)
    tick = os.sysconf("SC_CLK_TCK")
    assert [t / tick for t in ours.cpu_times()] == pytest.approx(theirs.cpu_times(), rel=0.01, abs=1.0)
    assert ours.net_bytes() == pytest.approx(theirs.net_bytes(), rel=0.05, abs=1e6)
