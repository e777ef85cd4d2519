"""Flush when the program is told to stop: SIGTERM, SIGINT and SIGHUP are passed on to whoever handled them before."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mappnb.capture.session import Session

__all__ = ["unwatch", "watch"]

_WATCHED = [s for s in ("SIGTERM", "SIGINT", "SIGHUP") if hasattr(signal, s)]
_previous: dict[int, Any] = {}
_session: Session | None = None


def watch(session: Session) -> None:
    """Install the handlers; does nothing outside the main thread, where Python allows none."""
    global _session  # noqa: PLW0603 (signal handlers are the process's)
    if threading.current_thread() is not threading.main_thread():
        return
    _session = session
    for name in _WATCHED:
        number = getattr(signal, name)
        found = signal.getsignal(number)
        if found is None or found is signal.SIG_IGN:  # not Python's, or ignored on purpose (nohup)
            continue
        _previous[number] = found
        signal.signal(number, _handle)


def unwatch(session: Session) -> None:
    """Put the previous handlers back, where ours are still in place."""
    global _session  # noqa: PLW0603
    if _session is not session or threading.current_thread() is not threading.main_thread():
        return
    for number, handler in _previous.items():
        if signal.getsignal(number) is _handle:
            signal.signal(number, handler)
    _previous.clear()
    _session = None


def _handle(number: int, frame: FrameType | None) -> None:
    session, previous = _session, _previous.get(number, signal.SIG_DFL)
    if session is not None:
        session.flush()
    if callable(previous):
        previous(number, frame)
    elif previous is signal.SIG_DFL:  # die as the signal would have it, so that the parent sees the right status
        if session is not None:
            session.stop(f"signal {signal.Signals(number).name}")
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
