"""The steps that a timeline can go to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mappnb.errors import MappnbError

if TYPE_CHECKING:
    from mappnb.widgets.sources import Source

__all__ = ["Steps"]

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Steps:
    """Steps in order of start: number, first start and last end over all ranks, ns on the run clock; int64 arrays, dims (step,)."""

    number: Array
    start_ns: Array
    end_ns: Array

    @classmethod
    def of(cls, source: Source) -> Steps:
        """Return the steps that a source tells of."""
        return cls(*source.steps())

    def __len__(self) -> int:
        return len(self.number)

    def lengths(self) -> dict[int, int]:
        """Return the length of each step, ns; of a repeated one the last."""
        return dict(zip(self.number.tolist(), (self.end_ns - self.start_ns).tolist(), strict=True))

    def numbered(self, step: int) -> tuple[int, int]:
        """Return (start, end) of a step, the last of that number. Raises MappnbError."""
        at = np.flatnonzero(self.number == step)
        if not len(at):
            there = f"{self.number.min()} to {self.number.max()}" if len(self) else "none"
            raise MappnbError(f"no step {step} in the events; steps: {there}")
        return int(self.start_ns[at[-1]]), int(self.end_ns[at[-1]])

    def last_whole(self) -> tuple[int, int] | None:
        """Return (start, end) of the last step that is over, None without steps."""
        at = np.flatnonzero(self.end_ns > self.start_ns)
        return (int(self.start_ns[at[-1]]), int(self.end_ns[at[-1]])) if len(at) else None

    def go(self, go: str, at_ns: int) -> tuple[int, int, int, str] | None:
        """Return (number, start, end, text) of the next, previous, first, last or worst step seen from ``at_ns``.

        Raises
        ------
        MappnbError
            If ``go`` is none of these words.
        """
        if not len(self):
            return None
        here = int(np.searchsorted(self.start_ns, at_ns, side="right")) - 1
        length = self.end_ns - self.start_ns
        places = {
            "next": here + 1,
            "previous": here - 1,
            "first": 0,
            "last": len(self) - 1,
            "worst": int(length.argmax()),
        }
        if go not in places:
            raise MappnbError(f"go {go!r}; expected one of {', '.join(places)}")
        i = min(max(places[go], 0), len(self) - 1)
        said = ""
        if go == "worst":
            said = f", the longest: {length[i] / max(float(np.median(length)), 1.0):.2f} × the median"
        return int(self.number[i]), int(self.start_ns[i]), int(self.end_ns[i]), said

    def told(self, origin_ns: int, most: int) -> dict[str, list[Any]]:
        """Return the steps as the browser gets them; the last ``most``."""
        part = slice(max(0, len(self) - most), None)
        return {
            "number": self.number[part].tolist(),
            "start": (self.start_ns[part] - origin_ns).astype(float).tolist(),
            "end": (self.end_ns[part] - origin_ns).astype(float).tolist(),
        }
