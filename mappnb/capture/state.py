"""What this rank tells of itself: host, layout, groups, model, and what went wrong. Becomes the rank's JSON file."""

from __future__ import annotations

import threading
from typing import Any

from mappnb.capture import launchinfo

__all__ = ["RankState"]


class RankState:
    """A small dictionary that the training thread changes and the writer thread writes when it has changed."""

    def __init__(self, facts: dict[str, Any]) -> None:
        self.content: dict[str, Any] = {"degraded": None, **{k: v for k, v in facts.items() if v is not None}}
        self._changed = False
        self._lock = threading.RLock()  # a signal handler may interrupt a change, and change something itself

    @property
    def rank(self) -> int | str:
        """The rank, "?" before it is known: for messages."""
        found = self.content.get("rank", "?")
        return found if isinstance(found, int) else str(found)

    def set(self, **values: Any) -> None:
        """Set plain values."""
        with self._lock:
            self.content.update(values)
            self._changed = True

    def add(self, table: str, key: str, value: Any) -> None:
        """Set one entry of a mapping."""
        with self._lock:
            self.content.setdefault(table, {})[key] = value
            self._changed = True

    def take_changed(self) -> bool:
        """Return True once after a change."""
        with self._lock:
            changed, self._changed = self._changed, False
            return changed

    def snapshot(self) -> dict[str, Any]:
        """Return a copy to be written, with host, device and versions as they are now."""
        with self._lock:
            copied = {k: dict(v) if isinstance(v, dict) else v for k, v in self.content.items()}
        return {**launchinfo.host_info(), "versions": launchinfo.versions(), **copied}
