"""Pauses of the host program: Python's garbage collector."""

from __future__ import annotations

import gc
from typing import Any

from mappnb.capture.points import SessionLike
from mappnb.terms import Category, Op

__all__ = ["GcProbe"]


class GcProbe:
    """Records each run of the garbage collector as an event; its name is the generation."""

    name = "gc"

    def __init__(self) -> None:
        self._session: SessionLike | None = None
        self._sites: tuple[int, ...] = ()
        self._token = 0

    def install(self, session: SessionLike) -> None:
        """Put a hook on ``gc.callbacks``."""
        self._session = session
        make = session.recorder.site
        self._sites = tuple(make(category=Category.HOST, op=Op.GC, name=f"generation {i}") for i in range(3))
        gc.callbacks.append(self._called)

    def uninstall(self) -> None:
        """Take the hook off."""
        if self._called in gc.callbacks:
            gc.callbacks.remove(self._called)
        self._session = None

    def _called(self, phase: str, info: dict[str, Any]) -> None:
        session = self._session
        if session is None or not session.recorder.enabled:
            return
        if phase == "start":
            self._token = session.recorder.begin(self._sites[min(int(info.get("generation", 0)), 2)])
        elif self._token:
            session.recorder.end(self._token)
            self._token = 0
