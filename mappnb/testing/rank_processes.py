"""The processes of one launched job: started one by one, or forked from one that has everything loaded."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Final, Literal, Protocol

from mappnb.testing.gpt_settings import TrainSettings
from mappnb.testing.interrupt import LAUNCHER_PID
from mappnb.testing.rank_files import RankFiles, rank_environment

__all__ = ["ForkedRanks", "RankProcesses", "SpawnedRanks", "can_fork", "start_ranks"]

START_FAILED: Final = 1
FORK_MAIN = ("-m", "mappnb.testing.fork_ranks")  # tests put a script of theirs here, to break a rank


class RankProcesses(Protocol):
    """All ranks of a job."""

    def exit_codes(self) -> list[int | None]:
        """Exit status of each rank, negative for a signal; None while it runs."""

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to every rank that runs, and to what it started."""

    def kill(self) -> None:
        """End every process of the job at once, and wait for it."""


def can_fork(settings: TrainSettings) -> bool:
    """Say whether forking is safe and sensible: on Linux, for a job that will not touch a GPU."""
    gpu = any(Path("/dev").glob("nvidia[0-9]*"))
    return sys.platform.startswith("linux") and (settings.device == "cpu" or not gpu)


def start_ranks(
    settings: TrainSettings, *, world_size: int, files: RankFiles, start: Literal["auto", "fork", "spawn"]
) -> RankProcesses:
    """Start all ranks and return at once.

    Parameters
    ----------
    settings : TrainSettings
        The job.
    world_size : int
        Number of ranks.
    files : RankFiles
        Where the ranks leave their output.
    start : {"auto", "fork", "spawn"}
        How; see `mappnb.testing.launcher.launch`.

    Returns
    -------
    RankProcesses
        To follow and to end them.
    """
    fork = can_fork(settings) if start == "auto" else start == "fork"
    return (ForkedRanks if fork else SpawnedRanks)(settings, world_size=world_size, files=files)


def _free_port() -> int:
    """Return a port that is free now; somebody may take it before rank 0 does, so `launch` tries again."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _popen(arguments: list[str], *, stdout: Path, stderr: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start Python in a session of its own: Ctrl-C in a terminal reaches the launcher only, which passes it on."""
    with stdout.open("ab") as out, stderr.open("ab") as err:
        return subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            env={**os.environ, **environment, LAUNCHER_PID: str(os.getpid())},
            start_new_session=True,
        )


def _send(pid: int, number: signal.Signals) -> None:
    """Signal the process group ``pid``, which may be gone."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


class SpawnedRanks:
    """One ``python -m mappnb.testing.gpt`` per rank."""

    def __init__(self, settings: TrainSettings, *, world_size: int, files: RankFiles) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []
        port = _free_port()
        try:
            for rank in range(world_size):
                arguments = ["-m", "mappnb.testing.gpt", *files.rank_arguments(rank, settings.to_json())]
                process = _popen(
                    arguments,
                    stdout=files.path("stdout", rank),
                    stderr=files.path("stderr", rank),
                    environment=rank_environment(rank, world_size, port),
                )
                self._processes.append(process)
        except BaseException:
            self.kill()
            raise

    def exit_codes(self) -> list[int | None]:
        """Exit status of each rank, negative for a signal; None while it runs."""
        return [process.poll() for process in self._processes]

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to every rank that runs, and to what it started."""
        for process in self._processes:
            if process.poll() is None:
                _send(process.pid, number)

    def kill(self) -> None:
        """End every rank at once, and wait for it."""
        self.signal(signal.SIGKILL)
        for process in self._processes:
            process.wait()


class ForkedRanks:
    """One ``python -m mappnb.testing.fork_ranks``, whose children are the ranks."""

    def __init__(self, settings: TrainSettings, *, world_size: int, files: RankFiles) -> None:
        self._world_size, self._files = world_size, files
        self._codes: list[int | None] = [None] * world_size
        self._pids: dict[int, int] = {}
        port = _free_port()
        arguments = [*FORK_MAIN, "--settings-json", settings.to_json()]
        arguments += ["--folder", str(files.folder), "--world-size", str(world_size), "--port", str(port)]
        self._parent = _popen(
            arguments,
            stdout=files.path("stdout"),
            stderr=files.path("stderr"),
            environment=rank_environment(0, world_size, port),
        )

    def exit_codes(self) -> list[int | None]:
        """Exit status of each rank, negative for a signal; None while it runs."""
        parent_ended = self._parent.poll() is not None  # asked first: what it wrote before is then complete
        for rank, code in enumerate(self._codes):
            note = self._files.path("exit", rank)
            if code is None and note.exists():
                self._codes[rank] = int(note.read_text())
            elif code is None and parent_ended:
                self._codes[rank] = self._parent.returncode or START_FAILED
        return list(self._codes)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to every rank that runs, and to what it started."""
        pids, codes = self._rank_pids(), self.exit_codes()
        if not pids and self._parent.poll() is None:  # still importing
            _send(self._parent.pid, number)
        for rank, pid in pids.items():
            if codes[rank] is None:
                _send(pid, number)

    def kill(self) -> None:
        """End every process of the job at once, and wait for it."""
        if self._parent.poll() is None:
            self.signal(signal.SIGKILL)
            if None in self.exit_codes():  # ranks that were forked but not yet written down die with their parent
                _send(self._parent.pid, signal.SIGKILL)
        self._parent.wait()

    def _rank_pids(self) -> dict[int, int]:
        note = self._files.path("pids")
        if not self._pids and note.exists():
            self._pids = {int(rank): pid for rank, pid in json.loads(note.read_text()).items()}
        return self._pids
