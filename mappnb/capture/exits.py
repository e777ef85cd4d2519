"""The ends of a process that nobody announces: interpreter exit, multiprocessing children, and forks."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mappnb.capture import marks, signals

if TYPE_CHECKING:
    from mappnb.capture.session import Session

__all__ = ["unwatch", "watch"]

_registered: dict[int, tuple[Callable[[], None], Any]] = {}


def watch(session: Session) -> None:
    """Stop the session at the end of the program; children of ``multiprocessing`` end without ``atexit``."""

    def stop() -> None:
        session.stop(_reason())

    atexit.register(stop)
    finalizer = None
    processes = sys.modules.get("multiprocessing.process")
    if processes is not None and processes.parent_process() is not None:
        from multiprocessing.util import Finalize

        finalizer = Finalize(None, stop, exitpriority=0)
    _registered[id(session)] = stop, finalizer


def unwatch(session: Session) -> None:
    """Take back what :func:`watch` did."""
    stop, finalizer = _registered.pop(id(session), (None, None))
    if stop is not None:
        atexit.unregister(stop)
    if finalizer is not None:
        finalizer.cancel()


def _reason() -> str:
    """Name of the exception that ended the program, else ``"exit"``."""
    err = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    return "exit" if err is None else type(err).__name__


def _forked() -> None:
    """In a forked child: the recording is the parent's, and so are its files, its thread and its end."""
    session = marks.current()
    if session is not None:
        session.disown()
        marks.leave(session)
        unwatch(session)
    signals.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
