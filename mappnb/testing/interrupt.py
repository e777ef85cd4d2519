"""What one rank does about signals: stop after the current step, and never outlive its launcher."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import signal
import sys
import time
from collections.abc import Iterator
from types import FrameType

__all__ = ["LAUNCHER_PID", "StopFlag", "die_with_parent", "dump_stack_on_signal", "stop_at_sigint"]

LAUNCHER_PID = "MAPPNB_LAUNCHER_PID"  # environment variable
PATIENCE_S = 1.0
PR_SET_PDEATHSIG = 1


class StopFlag:
    """Says whether this rank was told to stop after the current step.

    Attributes
    ----------
    is_set : bool
        True once `set` was called.
    training : bool
        True while there is a current step, so that stopping can wait for its end.
    """

    def __init__(self) -> None:
        self.is_set = self.training = False
        self._first_s = 0.0

    def set(self) -> None:
        """Ask for a stop. Asking again after a second means now: KeyboardInterrupt."""
        now_s = time.monotonic()
        if self.is_set and now_s - self._first_s > PATIENCE_S:
            raise KeyboardInterrupt
        if not self.is_set:
            self.is_set, self._first_s = True, now_s


@contextlib.contextmanager
def stop_at_sigint() -> Iterator[StopFlag]:
    """Turn SIGINT into a `StopFlag` for the enclosed block (main thread only).

    Yields
    ------
    StopFlag
        Set once the signal came. Launchers may send it twice in a row; that counts once.
    """
    flag = StopFlag()

    def handler(_signal: int, _frame: FrameType | None) -> None:
        flag.set()
        if not flag.training:  # still starting: there is nothing to finish
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, handler)
    try:
        yield flag
    finally:
        signal.signal(signal.SIGINT, before)


def die_with_parent(parent_pid: int) -> None:
    """Have Linux kill this process when ``parent_pid`` ends, however it ends; elsewhere do nothing.

    Parameters
    ----------
    parent_pid : int
        The launcher; if it is gone already, this process exits here.
    """
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        sys.exit(f"mappnb: the launcher (pid {parent_pid}) has ended")


def dump_stack_on_signal() -> None:
    """Write this process's Python stack to stderr on SIGUSR1, also while it waits inside gloo."""
    if hasattr(faulthandler, "register"):
        faulthandler.register(signal.SIGUSR1, all_threads=False)
