"""Placement: which rank runs which stage."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mappnb.errors import ScheduleError
from mappnb.terms import Kind

__all__ = ["Placement"]


@dataclass(frozen=True, slots=True)
class Placement:
    """Which pipeline rank runs which stage; ranks are numbered in the pipeline, from 0.

    Attributes
    ----------
    forward : tuple of int
        Rank of each stage's forwards, by stage.
    backward : tuple of int, optional
        Rank of each stage's backwards, where that is another one (forward-backward disaggregation).
    mirrored : tuple of int, optional
        Rank of each stage for the microbatches from ``mirrored_from`` on, which pass through a second copy of the weights
        (bidirectional pipelines such as DualPipe).
    mirrored_from : int, optional
        First microbatch that is mirrored.
    """

    forward: tuple[int, ...]
    backward: tuple[int, ...] | None = None
    mirrored: tuple[int, ...] | None = None
    mirrored_from: int | None = None

    def __post_init__(self) -> None:
        for ranks in (self.forward, self.backward, self.mirrored):
            if ranks is not None and (len(ranks) != len(self.forward) or any(r < 0 for r in ranks)):
                raise ScheduleError(
                    f"placement: {ranks}; expected one rank (>= 0) for each of {len(self.forward)} stages"
                )
        if not self.forward:
            raise ScheduleError("placement: no stage; expected at least one")
        if (self.mirrored is None) != (self.mirrored_from is None):
            raise ScheduleError("placement: mirrored and mirrored_from go together; give both or neither")

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.forward)

    @property
    def num_ranks(self) -> int:
        """Number of pipeline ranks."""
        return 1 + max(max(r) for r in (self.forward, self.backward, self.mirrored) if r is not None)

    def rank(self, stage: int, kind: Kind = Kind.FORWARD, microbatch: int = 0) -> int:
        """Return the rank that runs ``kind`` of ``stage`` for ``microbatch``."""
        if self.mirrored is not None and self.mirrored_from is not None and microbatch >= self.mirrored_from:
            return self.mirrored[stage]
        if self.backward is not None and kind is not Kind.FORWARD:
            return self.backward[stage]
        return self.forward[stage]

    def chunk(self, stage: int, kind: Kind = Kind.FORWARD, microbatch: int = 0) -> int:
        """Return the position of ``stage`` among the stages of its rank, in model order."""
        rank = self.rank(stage, kind, microbatch)
        return sum(self.rank(s, kind, microbatch) == rank for s in range(stage))

    def table(self) -> npt.NDArray[np.int32]:
        """Return the ranks as an array, dims (mirrored, backward, stage)."""
        ordinary = (self.forward, self.backward or self.forward)
        mirrored = ordinary if self.mirrored is None else (self.mirrored, self.mirrored)
        return np.array([ordinary, mirrored], np.int32)

    @classmethod
    def loop(cls, num_ranks: int, num_chunks: int = 1) -> Placement:
        """Return the placement of interleaved pipelines: stage ``chunk * num_ranks + rank``."""
        return cls(tuple(range(num_ranks)) * num_chunks)

    @classmethod
    def wave(cls, num_ranks: int, num_chunks: int = 2) -> Placement:
        """Return the V-shaped placement (waves for more than two chunks): odd chunks run backwards through the ranks."""
        forth = tuple(range(num_ranks))
        return cls(tuple(r for c in range(num_chunks) for r in (forth[::-1] if c % 2 else forth)))

    @classmethod
    def bidirectional(cls, num_ranks: int, mirrored_from: int) -> Placement:
        """Return DualPipe's placement: rank r holds stage r for one half of the microbatches, stage p - 1 - r for the other."""
        forth = tuple(range(num_ranks))
        return cls(forth, mirrored=forth[::-1], mirrored_from=mirrored_from)

    @classmethod
    def disaggregated(cls, num_stages: int) -> Placement:
        """Return forward ranks 0 to p - 1 and backward ranks p to 2 p - 1 for p stages (MegaFBD, arXiv:2507.19845)."""
        return cls(tuple(range(num_stages)), backward=tuple(range(num_stages, 2 * num_stages)))
