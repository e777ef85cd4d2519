"""From a rank's own clock to the run clock: one offset per host, from wall-clock anchors, until an alignment gives better ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np

from mappnb.store import Incarnation

__all__ = ["ClockModel", "ClockPieces", "anchor_model", "shared_clocks"]

Array = np.ndarray[Any, Any]

ANCHOR_MODEL = "anchor-1"


@dataclass(frozen=True, slots=True)
class ClockPieces:
    """A correction that drifts, and may step: ``offset_ns + rate * (t - at_ns)`` for times ``t`` from ``since_ns`` on.

    Attributes
    ----------
    since_ns, at_ns : tuple of int
        Where each piece begins and what it is given at, ns on the rank's own clock; rising.
    offset_ns : tuple of int
        What is added at ``at_ns``, ns.
    rate : tuple of float
        What is added per ns of the rank's own clock.
    """

    since_ns: tuple[int, ...]
    at_ns: tuple[int, ...]
    offset_ns: tuple[int, ...]
    rate: tuple[float, ...]

    def shift(self, own_ns: Array) -> Array:
        """Return what is added to times of the rank's own clock, ns."""
        piece = np.maximum(np.searchsorted(np.array(self.since_ns), own_ns, side="right") - 1, 0)
        at, offset = np.array(self.at_ns, np.int64), np.array(self.offset_ns, np.int64)
        return np.asarray(offset[piece] + np.rint(np.array(self.rate)[piece] * (own_ns - at[piece])).astype(np.int64))


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
        Of an alignment: half width of the offset that covers the truth in 95 % of cases.
    pieces : mapping of (incarnation, rank) to ClockPieces
        Corrections that drift or step; ``offset_ns`` is then their value in the middle of what was aligned.
    """

    name: str
    offset_ns: Mapping[tuple[int, int], int]
    uncertainty_ns: Mapping[tuple[int, int], int]
    pieces: Mapping[tuple[int, int], ClockPieces] = field(default_factory=dict)

    def offset(self, key: tuple[int, int]) -> int:
        """Return the offset of an (incarnation, rank) in ns; 0 where nothing is known."""
        return self.offset_ns.get(key, 0)

    def shift(self, key: tuple[int, int], own_ns: Array) -> Array:
        """Return what to add to times of an (incarnation, rank)'s own clock, ns, drift and steps included."""
        pieces = self.pieces.get(key)
        return np.full(np.shape(own_ns), self.offset(key), np.int64) if pieces is None else pieces.shift(own_ns)

    def own_ns(self, key: tuple[int, int], run_ns: int) -> int:
        """Return what the own clock of an (incarnation, rank) showed at a time of the run clock, ns."""
        if key not in self.pieces:
            return run_ns - self.offset(key)
        own = np.array([run_ns - self.offset(key)], np.int64)
        for _ in range(3):
            own = run_ns - self.shift(key, own)
        return int(own[0])


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
                shift = int(median(a[0] - a[1] - created_wall_ns for _, a in members))
                width = int(min(a[2] for _, a in members))
                for rank in {r for r, _ in members}:
                    offset[incarnation.number, rank], uncertainty[incarnation.number, rank] = shift, width
    return ClockModel(ANCHOR_MODEL, offset, uncertainty)


def shared_clocks(incarnation: Incarnation) -> list[list[int]]:
    """Return the ranks of each clock that several ranks share: those of one boot of one host."""
    hosts: dict[str, list[int]] = {}
    for rank, info in sorted(incarnation.ranks.items()):
        if boot := (info.get("clock") or {}).get("boot_id"):
            hosts.setdefault(f"{boot}", []).append(int(rank))
    return [ranks for ranks in hosts.values() if len(ranks) > 1]
