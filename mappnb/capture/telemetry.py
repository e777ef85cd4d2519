"""Samples of what the machine is doing: GPU clocks, power, temperature and throttling; CPU and memory of the host."""

from __future__ import annotations

import importlib
import math
import os
import time
from typing import Any, Final

from mappnb.capture._machine import find_machine
from mappnb.capture._patches import loaded
from mappnb.schema import TELEMETRY

__all__ = ["Telemetry"]

_NAN: Final = math.nan
_MISSING: Final[dict[str, float]] = {
    **{name: _NAN for name in TELEMETRY if name != "time_ns"},
    "throttle_reasons": -1,
}


class Telemetry:
    """Takes samples; what the machine does not tell is NaN (-1 for the throttle mask), and nothing is ever raised.

    Parameters
    ----------
    proc : str
        Where Linux has its files; tests give another folder.

    Notes
    -----
    The GPU is the one that this process uses: the current CUDA device, by its UUID; before CUDA is initialised the
    local rank's entry of ``CUDA_VISIBLE_DEVICES``. NVML is never asked to set anything.
    """

    def __init__(self, proc: str = "/proc") -> None:
        self._machine = find_machine(proc)
        self._nvml: Any = None
        self._device: Any = None
        self._device_key: object = None
        self._last: dict[str, float] = {}
        self._last_cpu = self._cpu_times()
        try:
            nvml = importlib.import_module("pynvml")
            nvml.nvmlInit()
            self._nvml = nvml
        except Exception:  # noqa: BLE001 (no driver, no package)
            self._nvml = None

    def sample(self) -> dict[str, float]:
        """Return one sample: all names of ``mappnb.schema.TELEMETRY`` but the time."""
        return {**_MISSING, **self._of_process(), **self._of_host(), **self._of_gpu()}

    def _rate(self, name: str, total: float, now: float) -> float:
        """Growth of a running total per second since the last sample; NaN the first time."""
        last, then = self._last.get(name), self._last.get(f"{name}.time")
        self._last[name], self._last[f"{name}.time"] = total, now
        return (total - last) / (now - then) if last is not None and then is not None and now > then else _NAN

    def _growth(self, name: str, total: float) -> float:
        last = self._last.get(name)
        self._last[name] = total
        return total - last if last is not None else _NAN

    def _of_process(self) -> dict[str, float]:
        now, machine = time.monotonic(), self._machine
        values = {"cpu_fraction": self._rate("cpu", time.process_time(), now)}
        if machine is not None:
            values["run_queue_fraction"] = _quietly(lambda: self._rate("queue", machine.waited_s(), now))
            values["rss_bytes"] = _quietly(machine.rss_bytes)
        return values

    def _of_host(self) -> dict[str, float]:
        machine = self._machine
        if machine is None:
            return {}
        sent, received = _quietly(machine.net_bytes, (_NAN, _NAN))
        (busy_then, whole_then), (busy, whole) = self._last_cpu, self._cpu_times()
        self._last_cpu = busy, whole
        return {
            "host_cpu_fraction": _quietly(lambda: min(max((busy - busy_then) / (whole - whole_then), 0.0), 1.0)),
            "host_memory_fraction": _quietly(machine.memory_fraction),
            "cpu_mhz": _quietly(machine.cpu_mhz),
            "net_sent_bytes": self._growth("sent", sent),
            "net_received_bytes": self._growth("received", received),
        }

    def _cpu_times(self) -> tuple[float, float]:
        machine = self._machine
        found: tuple[float, float] = (_NAN, _NAN) if machine is None else _quietly(machine.cpu_times, (_NAN, _NAN))
        return found

    def _of_gpu(self) -> dict[str, float]:
        nvml = self._nvml
        device = self._find_device() if nvml is not None else None
        if device is None:
            return {}
        reasons: Any = getattr(
            nvml,
            "nvmlDeviceGetCurrentClocksEventReasons",
            getattr(nvml, "nvmlDeviceGetCurrentClocksThrottleReasons", None),
        )
        return {
            "sm_clock_mhz": _quietly(lambda: float(nvml.nvmlDeviceGetClockInfo(device, nvml.NVML_CLOCK_SM))),
            "memory_clock_mhz": _quietly(lambda: float(nvml.nvmlDeviceGetClockInfo(device, nvml.NVML_CLOCK_MEM))),
            "power_w": _quietly(lambda: nvml.nvmlDeviceGetPowerUsage(device) / 1000.0),
            "temperature_c": _quietly(lambda: float(nvml.nvmlDeviceGetTemperature(device, nvml.NVML_TEMPERATURE_GPU))),
            "throttle_reasons": _quietly(lambda: int(reasons(device)), -1),
            "gpu_fraction": _quietly(lambda: nvml.nvmlDeviceGetUtilizationRates(device).gpu / 100.0),
            "gpu_memory_bytes": _quietly(lambda: float(nvml.nvmlDeviceGetMemoryInfo(device).used)),
        }

    def _find_device(self) -> Any:
        """NVML's handle of the GPU of this process, looked up again when that changes."""
        key = _cuda_uuid() or _visible_device()
        if key != self._device_key:
            self._device_key = key
            self._device = _quietly(lambda: self._handle(key), None)
        return self._device

    def _handle(self, key: str | int) -> Any:
        if isinstance(key, int):
            return self._nvml.nvmlDeviceGetHandleByIndex(key)
        try:
            return self._nvml.nvmlDeviceGetHandleByUUID(key)
        except Exception:  # noqa: BLE001 (older bindings want bytes)
            return self._nvml.nvmlDeviceGetHandleByUUID(key.encode())


def _quietly(read: Any, missing: Any = _NAN) -> Any:
    """Return what ``read`` returns, or ``missing`` if it cannot."""
    try:
        return read()
    except Exception:  # noqa: BLE001 (each value is optional)
        return missing


def _cuda_uuid() -> str | None:
    """UUID of the current CUDA device; None unless the program has initialised CUDA (we never do)."""
    cuda = getattr(loaded("torch"), "cuda", None)
    try:
        if cuda is None or not cuda.is_initialized():
            return None
        uuid = str(cuda.get_device_properties(cuda.current_device()).uuid)
    except Exception:  # noqa: BLE001
        return None
    return uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"


def _visible_device() -> str | int:
    """Return the local rank's device by ``CUDA_VISIBLE_DEVICES``: an NVML index or a UUID."""
    try:
        local_rank = int(os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")))
    except ValueError:
        local_rank = 0
    visible = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    if not visible:
        return local_rank
    name = visible[local_rank] if local_rank < len(visible) else visible[0]
    return int(name) if name.isdigit() else name
