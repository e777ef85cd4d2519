"""One what-if: a model, its ideal, and the replays with parts of it put back or made ideal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from mappnb.analysis._whatif_ideal import grouped, ideal_durations
from mappnb.analysis._whatif_model import Model
from mappnb.errors import MappnbError, did_you_mean

__all__ = ["GROUPINGS", "Case", "groups_by"]

Array = np.ndarray[Any, Any]
Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

GROUPINGS: Final = ("dp_rank", "stage", "rank", "op", "host", "link")


@dataclass(eq=False)
class Case:
    """A model and how its ideal is made.

    Attributes
    ----------
    model : Model
        The operations.
    ideal : str
        See :func:`mappnb.analysis._whatif_ideal.ideal_durations`.
    over_stages : bool
        See there.
    """

    model: Model
    ideal: str
    over_stages: bool

    @cached_property
    def ideal_op_s(self) -> Floats:
        """The ideal of each operation, dims (op,), s."""
        return ideal_durations(self.model, self.ideal, over_stages=self.over_stages)

    @cached_property
    def usual_delay_s(self) -> Floats:
        """The launch delay that is usual for an operation of its kind (the median; the least for ``"min"``), dims (op,), s."""
        key = self.model.kind.astype(np.int64) * (int(self.model.stage.max(initial=-1)) + 2) + self.model.stage + 1
        no = np.zeros(len(self.model), bool)
        return grouped(self.model.graph.delays_s, key, by_mean=no, least=self.ideal == "min", single=no)

    @cached_property
    def replay_s(self) -> Floats:
        """Steps as measured, without launch delays, dims (step,), s."""
        return self.model.times(self.model.measured_s)

    @cached_property
    def delayed_s(self) -> Floats:
        """Steps as measured, with launch delays, dims (step,), s."""
        return self.model.times(self.model.measured_s, self.model.graph.delays_s)

    @cached_property
    def ideal_s(self) -> Floats:
        """Steps in which everything is ideal, dims (step,), s."""
        return self.model.times(self.ideal_op_s)

    @property
    def error(self) -> float:
        """How far the replay is from what was recorded, as a fraction of it: the mean over steps."""
        replayed = self.replay_s if self.model.source == "straggler_analysis" else self.delayed_s
        return float(np.abs(replayed - self.model.recorded_s).mean() / self.model.recorded_s.mean())

    def put_back(self, mask: Mask) -> Floats:
        """Return how long the steps take if only the operations of a mask are as measured, dims (step,), s."""
        return self.model.times(np.where(mask, self.model.measured_s, self.ideal_op_s))

    def without(self, mask: Mask, *, delays: bool = False) -> Floats:
        """Return how long the steps take if the operations of a mask are ideal and the rest is as measured, dims (step,), s.

        With ``delays`` the launch delays are in, those of the operations of the mask as usual for their kind, if that is less.
        """
        delay = self.model.graph.delays_s
        changed = np.where(mask, np.minimum(delay, self.usual_delay_s), delay) if delays else None
        return self.model.times(np.where(mask, self.ideal_op_s, self.model.measured_s), changed)


def groups_by(model: Model, by: str, hosts: Mapping[int, str]) -> tuple[list[Any], Array]:
    """Return the groups of a grouping, and the group of each operation; -1 where it is in none.

    Raises
    ------
    MappnbError
        If there is no such grouping, or the run has no such groups.
    """
    if by not in GROUPINGS:
        raise MappnbError(
            f"what_if: cannot group by {by!r}; known: {', '.join(GROUPINGS)}{did_you_mean(by, GROUPINGS)}"
        )
    if by == "op":
        used = np.unique(model.words.label)
        return [model.words.labels[i] for i in used.tolist()], np.searchsorted(used, model.words.label)
    if by == "host":
        names = sorted(set(hosts.values()))
        of_rank = np.full(int(model.rank.max(initial=-1)) + 2, -1)
        for r, h in hosts.items():
            if r < len(of_rank) - 1:
                of_rank[r] = names.index(h)
        return list(names), of_rank[model.rank]
    if by == "link":
        width = int(model.receiver.max(initial=-1)) + 1
        column = np.where(model.sender >= 0, model.sender.astype(np.int64) * width + model.receiver, -1)
        found = np.unique(column[column >= 0])
        names = [f"{v // width}->{v % width}" for v in found.tolist()]
        return list(names), np.where(column >= 0, np.searchsorted(found, column), -1)
    column = getattr(model, by)
    found = np.unique(column[column >= 0])
    return found.tolist(), np.where(column >= 0, np.searchsorted(found, column), -1)
