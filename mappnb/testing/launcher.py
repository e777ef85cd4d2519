"""Start all ranks of the reference job on this host, follow them, and leave none behind."""

from __future__ import annotations

import json
import re
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, Literal

from mappnb.errors import MappnbError
from mappnb.testing.gpt_settings import StepReport, TrainResult, TrainSettings
from mappnb.testing.megatron_cpu import megatron_version
from mappnb.testing.rank_files import RankFiles, tail
from mappnb.testing.rank_processes import RankProcesses, start_ranks

__all__ = ["LaunchError", "launch"]

POLL_S: Final = 0.05
SETTLE_S: Final = 0.5  # after the first failure: time for the others to show which was really first
CLEAN_END_S: Final = 10.0  # after SIGINT, for the current step and the recorder
TERM_S: Final = 2.0  # after SIGTERM
PORT_TRIES: Final = 3
PORT_TAKEN: Final = re.compile(r"EADDRINUSE|address already in use", re.IGNORECASE)
CONSEQUENCE: Final = re.compile(r"closed by peer|connection reset|broken pipe|remote process exited", re.IGNORECASE)
TAIL_LINES: Final = 30


class LaunchError(MappnbError, RuntimeError):
    """A rank failed, or the job took too long.

    Attributes
    ----------
    rank : int
        The rank that failed first; -1 if none did (time ran out).
    stderr : str
        The end of what that rank wrote to stderr.
    """

    def __init__(self, message: str, *, rank: int = -1, stderr: str = "") -> None:
        super().__init__(message)
        self.rank, self.stderr = rank, stderr


def launch(
    settings: TrainSettings,
    *,
    world_size: int,
    on_line: Callable[[StepReport], None] | None = None,
    timeout_s: float = 600.0,
    start: Literal["auto", "fork", "spawn"] = "auto",
) -> TrainResult:
    """Train on ``world_size`` processes of this host and return rank 0's result.

    Parameters
    ----------
    settings : TrainSettings
        The job; checked before any process starts.
    world_size : int
        Number of ranks.
    on_line : callable, optional
        Gets a `StepReport` after each step, while the job runs.
    timeout_s : float
        Seconds after which the job is ended, start-up included.
    start : {"auto", "fork", "spawn"}
        ``"spawn"``: a fresh Python per rank; ``"fork"``: one Python imports torch and megatron-core, then forks the
        ranks, which starts much faster; ``"auto"``: fork on Linux for CPU jobs, else spawn.

    Returns
    -------
    TrainResult
        Exact losses, gradient norms and times.

    Raises
    ------
    LayoutError, SettingsError
        If the job cannot run on that many ranks.
    DependencyError
        If torch or megatron-core is missing.
    LaunchError
        If a rank fails or time runs out; the other ranks are ended first.
    KeyboardInterrupt
        After Ctrl-C: the ranks have then finished their step, closed their recorder and ended.
    """
    settings.check(world_size)
    megatron_version()
    deadline_s = time.monotonic() + timeout_s
    for tries_left in reversed(range(PORT_TRIES)):
        with tempfile.TemporaryDirectory(prefix="mappnb-launch-") as folder:
            job = _Job(RankFiles(Path(folder)), world_size, on_line)
            try:
                ranks = start_ranks(settings, world_size=world_size, files=job.files, start=start)
                return job.follow(ranks, deadline_s)
            except LaunchError as err:
                if not (tries_left and PORT_TAKEN.search(err.stderr)):
                    raise
    raise LaunchError(f"found no free port in {PORT_TRIES} tries")


class _Job:
    """One try to run a job to its end."""

    def __init__(self, files: RankFiles, world_size: int, on_line: Callable[[StepReport], None] | None) -> None:
        self.files, self._world_size, self._on_line = files, world_size, on_line
        self._seen_bytes = 0
        self._start_s = time.monotonic()

    def follow(self, ranks: RankProcesses, deadline_s: float) -> TrainResult:
        """Follow the ranks to the end; whatever happens, none is left running."""
        try:
            while not all(code == 0 for code in ranks.exit_codes()):
                self._report_progress()
                if any(code not in (None, 0) for code in ranks.exit_codes()):
                    raise self._failure(ranks)
                if time.monotonic() > deadline_s:
                    raise self._out_of_time(ranks)
                time.sleep(POLL_S)
            self._report_progress()
            return TrainResult.from_json(self.files.path("result").read_text())
        except KeyboardInterrupt:
            ranks.signal(signal.SIGINT)
            _wait(ranks, CLEAN_END_S)
            raise
        finally:
            _end(ranks)

    def _report_progress(self) -> None:
        """Hand on the lines that rank 0 has completed since the last call."""
        with self.files.path("stdout").open("rb") as out:
            out.seek(self._seen_bytes)
            text = out.read()
        complete = text[: text.rfind(b"\n") + 1]
        self._seen_bytes += len(complete)
        for line in complete.splitlines():
            if self._on_line is not None and line.startswith(b'{"step"'):
                self._on_line(StepReport(**json.loads(line)))

    def _failure(self, ranks: RankProcesses) -> LaunchError:
        """Return the error of the rank that failed first."""
        _wait(ranks, SETTLE_S)
        codes = ranks.exit_codes()
        failed = sorted(
            (self._failure_key(rank, code), rank, code) for rank, code in enumerate(codes) if code not in (None, 0)
        )
        _, rank, code = failed[0]
        stderr = tail(self.files.path("stderr", rank), lines=TAIL_LINES)
        message = f"rank {rank} of {self._world_size} {_ending(code)}"
        if others := [str(other) for _, other, _ in failed[1:]]:
            message += f" (then rank {', '.join(others)} too)"
        words = f"Its last words:\n{stderr}" if stderr else "It wrote nothing to stderr."
        return LaunchError(f"{message}; all ranks were ended. {words}", rank=rank, stderr=stderr)

    def _failure_key(self, rank: int, code: int | None) -> tuple[bool, float]:
        """Sort key: causes before consequences, a kill from outside first, an error without a note last."""
        path = self.files.path("failure", rank)
        if code is not None and code < 0:
            return False, 0.0
        if not path.exists():
            return False, float("inf")
        note = json.loads(path.read_text())
        return CONSEQUENCE.search(note["message"]) is not None, float(note["time_s"])

    def _out_of_time(self, ranks: RankProcesses) -> LaunchError:
        """Return an error that shows where each rank is."""
        running = [rank for rank, code in enumerate(ranks.exit_codes()) if code is None]
        ranks.signal(signal.SIGUSR1)
        _wait(ranks, SETTLE_S)
        places = "\n".join(f"--- rank {rank}:\n{tail(self.files.path('stderr', rank), lines=12)}" for rank in running)
        return LaunchError(
            f"training on {self._world_size} ranks was ended after {time.monotonic() - self._start_s:.0f} s; still "
            f"running: rank {', '.join(map(str, running))}. Give launch() a larger timeout_s, or see where they "
            f"were:\n{places}"
        )


def _wait(ranks: RankProcesses, limit_s: float) -> None:
    """Wait until all ranks have ended, at most ``limit_s`` seconds."""
    end_s = time.monotonic() + limit_s
    while None in ranks.exit_codes() and time.monotonic() < end_s:
        time.sleep(POLL_S / 2)


def _end(ranks: RankProcesses) -> None:
    """End what still runs: SIGTERM, then SIGKILL; at once when Ctrl-C comes again."""
    try:
        if None in ranks.exit_codes():
            ranks.signal(signal.SIGTERM)
            _wait(ranks, TERM_S)
    finally:
        ranks.kill()


def _ending(code: int | None) -> str:
    """Say in words how a process ended."""
    if code is None or code >= 0:
        return f"failed with exit status {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"was killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
