"""What :func:`mappnb.record` was asked for, checked before anything starts."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from mappnb.capture.activations.plan import parse_activations
from mappnb.capture.points import Plan, Probe, parse_plan
from mappnb.errors import CaptureError

__all__ = ["RecordOptions"]

MAX_FLUSH_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordOptions:
    """The arguments of :func:`mappnb.record`, where they are described.

    Raises
    ------
    CaptureError
        For a value that cannot work.
    """

    plan: str | Plan
    activations: Any
    control: bool
    resume: bool
    rank: int | None
    world_size: int | None
    peak_flops: float | None
    start_step: int
    flush_s: float
    notes: dict[str, Any] | None
    probes: list[Probe] | None
    segment_rows: int

    def __post_init__(self) -> None:
        """Check everything."""
        object.__setattr__(self, "plan", parse_plan(self.plan))
        object.__setattr__(self, "activations", parse_activations(self.activations))
        _check_place(self.rank, self.world_size)
        if not isinstance(self.flush_s, (int, float)) or not 0 < self.flush_s <= MAX_FLUSH_S:  # NaN compares false
            raise CaptureError(
                f"mappnb.record: flush_s is {self.flush_s!r}; expected seconds above 0 and at most {MAX_FLUSH_S:.0f}, "
                f"such as 1.0"
            )
        if not isinstance(self.segment_rows, int) or self.segment_rows < 1:
            raise CaptureError(
                f"mappnb.record: segment_rows is {self.segment_rows!r}; expected a number of events, at least 1"
            )
        if not isinstance(self.start_step, int):
            raise CaptureError(f"mappnb.record: start_step is {self.start_step!r}; expected the number of a step")
        try:
            json.dumps(self.notes)
        except (TypeError, ValueError) as err:
            raise CaptureError(f"mappnb.record: notes must be plain values, as JSON holds them: {err}") from err

    @property
    def parsed_plan(self) -> Plan:
        """The plan itself."""
        return parse_plan(self.plan)

    @property
    def place(self) -> tuple[int, int] | None:
        """Rank and world size, if they were given."""
        return None if self.rank is None or self.world_size is None else (self.rank, self.world_size)

    @property
    def facts(self) -> dict[str, Any]:
        """What is kept with the rank."""
        facts: dict[str, Any] = {"plan": self.parsed_plan.name}
        if self.activations is not None:
            facts["activations"] = {**self.activations.to_dict(), "vocabulary": None}  # may be long; the blocks have it
        return {**facts, "peak_flops": self.peak_flops, "notes": dict(self.notes or {})}


def _check_place(rank: int | None, world_size: int | None) -> None:
    if (rank is None) != (world_size is None):
        raise CaptureError("mappnb.record: give rank and world_size together, or neither")
    if rank is not None and world_size is not None and not 0 <= rank < world_size:
        raise CaptureError(f"mappnb.record: rank is {rank} of world_size {world_size}; expected 0 to world_size - 1")
