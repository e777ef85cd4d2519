"""What is selected in the stragglers view, and what that is as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from mappnb.errors import MappnbError
from mappnb.schema import EVENTS
from mappnb.widgets._strag_data import StragglerData
from mappnb.widgets._strag_ops import MOST_PEERS, op_rows
from mappnb.widgets.selection import Selection

__all__ = ["Picked", "events_of", "frame_of"]


@dataclass(frozen=True, slots=True)
class Picked:
    """A selection.

    Attributes
    ----------
    ranks : tuple of int
    steps : (int, int) or None
        First and last; None for all.
    verdict : int or None
        Row of the verdicts.
    op : int or None
        Bar of the picture of one step.
    """

    ranks: tuple[int, ...] = ()
    steps: tuple[int, int] | None = None
    verdict: int | None = None
    op: int | None = None

    def __bool__(self) -> bool:
        return bool(self.ranks) or self.verdict is not None

    def told(self) -> dict[str, Any]:
        """Return it for a message."""
        steps = None if self.steps is None else list(self.steps)
        return {"ranks": list(self.ranks), "steps": steps, "verdict": self.verdict, "op": self.op}

    @property
    def one_step(self) -> bool:
        """Whether it is one rank in one step."""
        return (
            self.verdict is None and len(self.ranks) == 1 and self.steps is not None and self.steps[0] == self.steps[1]
        )


def events_of(data: StragglerData, picked: Picked) -> xr.Dataset:
    """Return the selected events: of one rank in one step those of the operation that is selected, or all; else none."""
    if not picked.one_step or picked.steps is None:
        empty: dict[str, Any] = {
            n: ("event", np.empty(0, object if v.dtype is str else v.dtype)) for n, v in EVENTS.items()
        }
        return xr.Dataset(empty)
    rank, step = picked.ranks[0], picked.steps[0]
    mine = data.events(step=step, ranks=[rank])
    if picked.op is None:
        return mine
    m = data.m
    peers = m.peers_of(m.index(rank))[:MOST_PEERS]
    both = data.events(step=step, ranks=[rank, *m.ranks[peers].tolist()])
    ops = op_rows(both, rank)
    if picked.op >= len(ops.frame):
        raise MappnbError(f"no operation {picked.op} of rank {rank} in step {step}; there are {len(ops.frame)}")
    own = both.isel(event=np.flatnonzero(both["rank"].values == rank))
    return own.isel(event=np.flatnonzero(ops.group == int(ops.frame["of"].iloc[picked.op])))


def frame_of(data: StragglerData, picked: Picked) -> pd.DataFrame:
    """Return the selection as a table."""
    if picked.verdict is not None:
        return data.verdicts.iloc[[picked.verdict]]
    if picked.one_step:
        return Selection(events_of(data, picked), None, picked.ranks).to_dataframe()
    return _cells(data, picked)


def _cells(data: StragglerData, picked: Picked) -> pd.DataFrame:
    """Return a row per (step, rank) with every metric."""
    m = data.m
    at = np.array([m.index(r) for r in picked.ranks], np.int64)
    inside = np.ones(len(m.steps), bool)
    if picked.steps is not None:
        inside = (m.steps >= picked.steps[0]) & (m.steps <= picked.steps[1])
    steps = np.flatnonzero(inside)
    row, col = (v.ravel() for v in np.meshgrid(steps, at, indexing="ij"))
    frame = pd.DataFrame({"step": m.steps[row], "rank": m.ranks[col], "host": [m.hosts[c] for c in col]})
    fits = data.layout.world_size > 1
    for axis in ("pp", "dp", "tp", "cp", "ep") if fits else ():
        if getattr(data.layout, axis) > 1:
            place = [data.layout.coords(r)[axis] if r < data.layout.world_size else -1 for r in m.ranks[col].tolist()]
            frame[f"{axis}_rank"] = np.array(place, np.int64)
    for key in m.metrics:
        frame[key] = m.values(key)[row, col] if len(row) else np.empty(0)
    return frame
