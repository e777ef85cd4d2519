"""Flush when the program is told to stop: whoever handled SIGTERM, SIGINT and SIGHUP before still does."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mappnb.capture.session import Session

__all__ = ["deadly", "die", "forget", "name_of", "unwatch", "watch"]

PATIENCE_S = 5.0
_WATCHED = [getattr(signal, s) for s in ("SIGTERM", "SIGINT", "SIGHUP") if hasattr(signal, s)]
_previous: dict[int, Any] = {}
_session: Session | None = None
_wakeup_fd = -1


def watch(session: Session) -> None:
    """Install the handlers; does nothing outside the main thread, where Python allows none.

    Notes
    -----
    What is ignored stays ignored (nohup), and Python's own handler of Ctrl-C is left in place: it raises
    KeyboardInterrupt, which ends the recording as any exception does. Python's handlers run in the main thread only. A
    rank that hangs in a collective would then survive SIGTERM, so the writer thread is told too (``set_wakeup_fd``),
    and ends the process where that is the signal's default action.
    """
    global _session, _wakeup_fd  # noqa: PLW0603 (signal handlers are the process's)
    if threading.current_thread() is not threading.main_thread():
        return
    _session = session
    for number in _WATCHED:
        found = signal.getsignal(number)
        if found in (None, signal.SIG_IGN, signal.default_int_handler, _handle):
            continue
        _previous[number] = found
        signal.signal(number, _handle)
    before = signal.set_wakeup_fd(session.wakeup_fd, warn_on_full_buffer=False)
    if before == -1:
        _wakeup_fd = session.wakeup_fd
    else:  # an event loop's
        signal.set_wakeup_fd(before, warn_on_full_buffer=False)


def unwatch(session: Session) -> bool:
    """Put the previous handlers back, where ours are still in place; False if signals may still be told to ``session``."""
    global _session  # noqa: PLW0603
    if _session is not session:
        return True
    if threading.current_thread() is not threading.main_thread():
        return False
    _session = None
    _restore()
    return True


def forget() -> None:
    """Restore everything in a forked child, whose signals are none of its parent's business."""
    global _session  # noqa: PLW0603
    _session = None
    with contextlib.suppress(ValueError):  # not the main thread, as seen by Python
        _restore()


def _restore() -> None:
    global _wakeup_fd  # noqa: PLW0603
    if _wakeup_fd >= 0:
        found = signal.set_wakeup_fd(-1)
        if found not in (-1, _wakeup_fd):
            signal.set_wakeup_fd(found, warn_on_full_buffer=False)
        _wakeup_fd = -1
    for number, handler in list(_previous.items()):
        if signal.getsignal(number) is _handle:
            signal.signal(number, handler)
            del _previous[number]  # kept otherwise: a handler set since may still call ours


def deadly(number: int) -> bool:
    """Return True for a signal that ends the process by default, and that nobody else handles."""
    return signal.getsignal(number) is _handle and _previous.get(number) is signal.SIG_DFL


def name_of(number: int) -> str:
    """Return the name of a signal."""
    return signal.Signals(number).name


def die(number: int) -> None:
    """End the process as the signal would have it, so that the parent sees the right status. From any thread."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(number, signal.SIG_DFL)
    else:  # Python allows it in the main thread only, which may hang
        import ctypes

        ctypes.CDLL(None).signal(number, None)
    os.kill(os.getpid(), number)


def _handle(number: int, frame: FrameType | None) -> None:
    session, previous = _session, _previous.get(number, signal.SIG_DFL)
    if callable(previous):
        if session is not None:
            session.flush()
        previous(number, frame)
    elif previous is signal.SIG_DFL:
        if session is not None:
            session.end(f"signal {name_of(number)}", timeout_s=PATIENCE_S)
        die(number)
