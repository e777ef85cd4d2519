"""From a rank's own clock to the run clock, before any alignment: one offset per host, taken from wall-clock anchors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from mappnb.store import Incarnation

__all__ = ["ClockModel", "anchor_model"]

ANCHOR_MODEL = "anchor-1"


@dataclass(frozen=True, slots=True)
class ClockModel:
    """What to add to a rank's own times to get the run clock.

    Attributes
    ----------
    name : str
        Identity of the model; goes into the attributes of every dataset that used it.
    offset_ns : mapping of (incarnation, rank) to int
        Offset in ns.
    uncertainty_ns : mapping of (incarnation, rank) to int
        Half width in which the host's own wall clock was read, in ns; says nothing of how far apart the wall clocks of two hosts are.
    """

    name: str
    offset_ns: Mapping[tuple[int, int], int]
    uncertainty_ns: Mapping[tuple[int, int], int]

    def offset(self, key: tuple[int, int]) -> int:
        """Return the offset of an (incarnation, rank) in ns; 0 where nothing is known."""
        return self.offset_ns.get(key, 0)


def anchor_model(incarnations: Iterable[Incarnation], created_wall_ns: int) -> ClockModel:
    """Return the model that each host's anchors give: run clock = own clock + (wall - own clock) - time of creation.

    Ranks of one boot of one host share a monotonic clock, so they share one offset, the median over their anchors: times of
    one host stay exactly comparable. Between hosts the model is as good as their wall clocks agree.
    """
    offset: dict[tuple[int, int], int] = {}
    uncertainty: dict[tuple[int, int], int] = {}
    for incarnation in incarnations:
        hosts: dict[Any, list[tuple[int, list[int]]]] = {}
        for rank, info in incarnation.ranks.items():
            clock = info.get("clock") or {}
            anchors = [a for a in clock.get("anchors", []) if isinstance(a, list) and len(a) >= 3]
            hosts.setdefault(clock.get("boot_id") or f"rank {rank}", []).extend((rank, a) for a in anchors)
            if not anchors:
                offset[incarnation.number, rank] = uncertainty[incarnation.number, rank] = 0
        for members in hosts.values():
            if members:
                shift = int(np.median([a[0] - a[1] - created_wall_ns for _, a in members]))
                width = int(min(a[2] for _, a in members))
                for rank in {r for r, _ in members}:
                    offset[incarnation.number, rank], uncertainty[incarnation.number, rank] = shift, width
    return ClockModel(ANCHOR_MODEL, offset, uncertainty)
