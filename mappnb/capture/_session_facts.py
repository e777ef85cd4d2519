"""What a session is told of the job, kept with the rank."""

from __future__ import annotations

from typing import Any

from mappnb.capture.state import RankState
from mappnb.layout import Layout

__all__ = ["SessionFacts"]


class SessionFacts:
    """The methods by which probes tell facts."""

    state: RankState

    def set_layout(self, layout: Layout, coords: dict[str, int]) -> None:
        """Tell the parallel layout and this rank's place in it."""
        self.state.set(layout=layout.to_dict(), coords=dict(coords))

    def add_group(self, group_id: int, **group: Any) -> None:
        """Tell of a process group: ranks, backend, desc, name, ordinal."""
        self.state.add("groups", str(group_id), group)

    def set_model(self, **info: Any) -> None:
        """Tell of the model: parameters, layers, FLOPs per token."""
        for key, value in info.items():
            self.state.add("model", key, value)

    def note(self, **facts: Any) -> None:
        """Keep plain values with the rank."""
        self.state.set(**facts)
