"""The timelines of the schedule lab: the actions of one schedule as rows of a canvas, one per rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from mappnb.palette import CATEGORY_COLOURS, PHASE_COLOURS
from mappnb.pyramid import SpanIndex
from mappnb.sched import codes as c
from mappnb.terms import Category
from mappnb.widgets._lab_numbers import Numbers
from mappnb.widgets._lab_recorded import Recorded
from mappnb.widgets._messages import Answer
from mappnb.widgets._text import duration_text

__all__ = ["CLASSES", "Lane", "lane_of", "lane_of_recorded"]

Array = np.ndarray[Any, Any]
LABEL_PX = 26
NO_LABEL = 65535
MAX_SPANS = 6_000
MAX_CELLS = 120_000
CLASSES: tuple[tuple[str, str, str], ...] = (
    ("forward", *PHASE_COLOURS["forward"]),
    ("backward", *PHASE_COLOURS["backward"]),
    ("backward input", "#4b3f9c", "#8c86e0"),
    ("backward weight", "#44aa99", "#54b8a7"),
    ("transfer on the critical path", *CATEGORY_COLOURS[Category.COLLECTIVE]),
)
"""(name, light, dark): F, B, I, W by the numbers of their kinds, and what only the bars show."""

_WORDS = ("forward", "backward", "backward for the input", "backward for the weights")


@dataclass(slots=True, eq=False)
class Lane:
    """Actions of one schedule on rows of ranks.

    Attributes
    ----------
    label : str
        Name of the schedule.
    num_ranks : int
    rank, kind, stage, microbatch : int array, dims (action,)
    start_ns, end_ns : int64 array, dims (action,)
    why : str
        Why there is nothing to see, where there is not.
    """

    label: str
    num_ranks: int
    rank: Array
    kind: Array
    stage: Array
    microbatch: Array
    start_ns: Array
    end_ns: Array
    why: str = ""
    version: int = 0
    _index: SpanIndex | None = None

    @classmethod
    def empty(cls, label: str, why: str) -> Lane:
        """Return a lane that says why it is empty."""
        none = np.empty(0, np.int64)
        return cls(label, 0, none, none, none, none, none, none, why)

    @property
    def index(self) -> SpanIndex:
        """Spans by rank; built when first looked at."""
        if self._index is None:
            duration = self.end_ns - self.start_ns
            self._index = SpanIndex.build(
                self.rank, self.start_ns, duration, self.kind.astype(np.uint8), num_rows=self.num_ranks
            )
        return self._index

    @property
    def end(self) -> int:
        """Last end, ns."""
        return int(self.end_ns.max(initial=0))

    def meta(self, extent_ns: float) -> dict[str, Any]:
        """Return what the browser needs to know; ``extent_ns`` is the length of the common time axis."""
        blocks = [
            {"label": f"rank {r}", "title": f"rank {r}", "row0": r, "rows": 1, "group": ""}
            for r in range(self.num_ranks)
        ]
        used = np.unique(self.kind).tolist()
        return {
            "extent": [0.0, max(float(extent_ns), 1.0)],
            "view": None,
            "num_events": len(self.rank),
            "origin_s": 0.0,
            "rows": [{"label": "", "depth": 0}] * self.num_ranks,
            "blocks": blocks,
            "groups": [],
            "categories": [{"name": n, "light": a, "dark": b, "hatch": False} for n, a, b in CLASSES[:4]],
            "steps": {"number": [], "start": [], "end": []},
            "group_by": "rank",
            "group_options": ["rank"],
            "hidden": [],
            "present": [CLASSES[i][0] for i in used],
            "flows": False,
            "note": "",
            "empty": self.why if not len(self.rank) else "",
        }

    def words(self, at: Array) -> list[str]:
        """Return the actions at some positions as they are written: ``3F0``."""
        stage, kind, mb = (x[at].tolist() for x in (self.stage, self.kind, self.microbatch))
        return [f"{s}{'FBIW'[k]}{m}" for s, k, m in zip(stage, kind, mb, strict=True)]

    def window(self, t0: float, t1: float, *, pixels: int, rows: tuple[int, int]) -> Answer:
        """Return what to draw of a window, in ns: spans of a pixel and more, and a grid of the smaller ones."""
        wanted = np.arange(rows[0], max(rows[0], min(rows[1], self.num_ranks)))
        pixels = max(1, min(pixels, MAX_CELLS // max(len(wanted), 1)))
        a, b = int(np.clip(t0, -2e18, 2e18)), int(np.clip(t1, -2e18, 2e18))
        window = self.index.query(a, max(b, a + 1), pixels=pixels, rows=wanted, max_spans=MAX_SPANS)
        spans = window.spans
        labels = np.full(len(spans.event), NO_LABEL, np.uint16)
        wide = np.flatnonzero(spans.duration_ns * (pixels / max(b - a, 1)) >= LABEL_PX)[: NO_LABEL - 1]
        labels[wide] = np.arange(len(wide))
        arrays: dict[str, Array] = {
            "row": spans.row.astype(np.uint16),
            "x": (spans.start_ns - window.t0_ns).astype(np.float32),
            "w": spans.duration_ns.astype(np.float32),
            "cat": spans.category,
            "flag": np.zeros(len(spans.event), np.uint8),
            "label": labels,
            "event": spans.event.astype(np.uint32),
        }
        if window.grid is not None:
            arrays |= {"busy": window.grid.busy, "cats": window.grid.category}
        content = {
            "kind": "window",
            "t0": float(window.t0_ns),
            "t1": float(window.t1_ns),
            "row0": rows[0],
            "row1": rows[0] + len(wanted),
            "pixels": window.pixels,
            "threshold_px": window.threshold_px,
            "num_events": window.num_events,
            "labels": self.words(spans.event[wide]),
        }
        return Answer(content, arrays)

    def describe(self, i: int) -> dict[str, Any]:
        """Return title and fields of one action."""
        start, length = int(self.start_ns[i]), int(self.end_ns[i] - self.start_ns[i])
        fields = [
            ["schedule", self.label],
            ["what", _WORDS[int(self.kind[i])]],
            ["place", f"rank {int(self.rank[i])}, stage {int(self.stage[i])}"],
            ["microbatch", str(int(self.microbatch[i]))],
            ["from, to", f"{duration_text(start)}, {duration_text(start + length)}"],
            ["takes", duration_text(length)],
        ]
        return {
            "event": i,
            "title": self.words(np.array([i]))[0],
            "fields": fields,
            "rank": int(self.rank[i]),
            "start": float(start),
            "duration": float(length),
            "row": int(self.rank[i]),
        }


def _ns(seconds: Array) -> Array:
    return np.rint(seconds * 1e9).astype(np.int64)


def lane_of(label: str, numbers: Numbers) -> Lane:
    """Return the lane of a simulated step; of an overlapped pair each action has half the time, as one is not told from the other."""
    sched = numbers.schedule
    rank = np.repeat(np.arange(sched.num_ranks), np.diff(sched.offsets))
    start, end = _ns(numbers.start_s), _ns(numbers.end_s)
    first = np.flatnonzero(c.paired(sched.codes))
    if len(first):
        middle = (start[first] + end[first]) // 2
        end[first], start[first + 1] = middle, middle
    return Lane(
        label,
        sched.num_ranks,
        rank,
        c.kind(sched.codes).astype(np.int64),
        c.stage(sched.codes).astype(np.int64),
        c.microbatch(sched.codes).astype(np.int64),
        start,
        end,
    )


def lane_of_recorded(recorded: Recorded) -> Lane:
    """Return the lane of a recorded step."""
    return Lane(
        f"recorded, step {recorded.step}",
        int(recorded.rank.max(initial=-1)) + 1,
        recorded.rank,
        recorded.kind,
        recorded.stage,
        recorded.microbatch,
        _ns(recorded.start_s),
        _ns(recorded.end_s),
    )
