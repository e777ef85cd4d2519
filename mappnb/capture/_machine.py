"""What the host and this process do, in running totals: read from /proc through files that stay open, or by psutil."""

from __future__ import annotations

import importlib
import math
import os
import weakref
from typing import Any, Final, Protocol

__all__ = ["Machine", "Proc", "Psutil", "find_machine"]

_NAN: Final = math.nan
_PAGE: Final = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
_CPU_HZ: Final = "/sys/devices/system/cpu/cpu0/cpufreq/scaling_cur_freq"


class Machine(Protocol):
    """Where telemetry's numbers of host and process come from; each may raise."""

    def rss_bytes(self) -> float:
        """Resident set of this process."""
        ...

    def waited_s(self) -> float:
        """Time that the main thread was runnable and waited for a CPU."""
        ...

    def cpu_times(self) -> tuple[float, float]:
        """Busy and whole time of all CPUs, in some unit."""
        ...

    def memory_fraction(self) -> float:
        """Memory of the host in use, over all of it."""
        ...

    def cpu_mhz(self) -> float:
        """Clock of one core: of all cores it would take milliseconds on a large host."""
        ...

    def net_bytes(self) -> tuple[float, float]:
        """Bytes sent and received by the host's network devices."""
        ...


class Proc:
    """Linux: a look at a file that is open already costs a tenth of what psutil needs.

    Parameters
    ----------
    root : str
        Where the kernel's files are; tests give a folder of their own.
    """

    def __init__(self, root: str = "/proc") -> None:
        self._root = root
        self._files: dict[str, int] = {}
        self._has_hz = True
        weakref.finalize(self, _close, self._files)

    def _read(self, name: str, size: int = 4096) -> bytes:
        """Return the first ``size`` bytes of a file as it is now."""
        file = self._files.get(name)
        if file is None:
            file = self._files[name] = os.open(os.path.join(self._root, name), os.O_RDONLY | os.O_CLOEXEC)
        return os.pread(file, size, 0)

    def rss_bytes(self) -> float:
        """Return the resident set of this process."""
        return float(int(self._read("self/statm").split(None, 2)[1]) * _PAGE)

    def waited_s(self) -> float:
        """Return how long the main thread was runnable and waited for a CPU."""
        return int(self._read("self/schedstat").split()[1]) / 1e9

    def cpu_times(self) -> tuple[float, float]:
        """Return busy and whole time of all CPUs in ticks; time of guests is in that of users already."""
        ticks = [int(field) for field in self._read("stat", 512).partition(b"\n")[0].split()[1:9]]
        whole = sum(ticks)
        return whole - ticks[3] - ticks[4], whole

    def memory_fraction(self) -> float:
        """Return the memory of the host in use, over all of it."""
        lines = self._read("meminfo", 512)
        total, available = _kilobytes(lines, b"MemTotal:"), _kilobytes(lines, b"MemAvailable:")
        return (total - available) / total

    def cpu_mhz(self) -> float:
        """Return the clock of the first core."""
        if self._has_hz:
            try:
                return int(self._read(_CPU_HZ)) / 1000.0
            except OSError:  # no frequency scaling, as in a virtual machine
                self._has_hz = False
        line = self._read("cpuinfo", 512).partition(b"cpu MHz")[2].partition(b"\n")[0]  # more costs a core more
        return float(line.partition(b":")[2])

    def net_bytes(self) -> tuple[float, float]:
        """Return the bytes sent and received by all network devices."""
        sent = received = 0
        for line in self._read("net/dev", 65536).splitlines()[2:]:
            fields = line.rpartition(b":")[2].split()
            sent, received = sent + int(fields[8]), received + int(fields[0])
        return sent, received


class Psutil:
    """Other systems. Raises ImportError if psutil is not there."""

    def __init__(self) -> None:
        self._psutil: Any = importlib.import_module("psutil")
        self._process = self._psutil.Process()

    def rss_bytes(self) -> float:
        """Return the resident set of this process."""
        return float(self._process.memory_info().rss)

    def waited_s(self) -> float:
        """Return NaN: nobody tells."""
        return _NAN

    def cpu_times(self) -> tuple[float, float]:
        """Return busy and whole time of all CPUs in seconds."""
        times = self._psutil.cpu_times()
        whole = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
        return whole - times.idle - getattr(times, "iowait", 0.0), whole

    def memory_fraction(self) -> float:
        """Return the memory of the host in use, over all of it."""
        return float(self._psutil.virtual_memory().percent) / 100.0

    def cpu_mhz(self) -> float:
        """Return the clock of the CPUs."""
        return float(self._psutil.cpu_freq().current)

    def net_bytes(self) -> tuple[float, float]:
        """Return the bytes sent and received by all network devices."""
        net = self._psutil.net_io_counters()
        return float(net.bytes_sent), float(net.bytes_recv)


def find_machine(root: str = "/proc") -> Machine | None:
    """Return what can tell of this machine, or None."""
    if os.path.exists(os.path.join(root, "self", "statm")):
        return Proc(root)
    try:
        return Psutil()
    except Exception:  # noqa: BLE001 (telemetry is optional)
        return None


def _kilobytes(lines: bytes, name: bytes) -> int:
    return int(lines.partition(name)[2].split(None, 1)[0])


def _close(files: dict[str, int]) -> None:
    for file in files.values():
        os.close(file)
    files.clear()
