"""The handler of a live model's taps: makes the edits, keeps what was asked for, with where it lies in the batch."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from mappnb.activation_points import POINTS, PointName
from mappnb.errors import InterpError
from mappnb.interp.edits import Edit, EditSet, Where

__all__ = ["Handler", "Record", "edit_handler"]


@dataclass(frozen=True, slots=True, eq=False)
class Record:
    """What one rank kept of one point of one layer, of the rows of one microbatch.

    Attributes
    ----------
    point : str
        Canonical; gradients end in ``_grad``.
    layer : int
        Global, -1 for points that no layer holds.
    rows, slots : ndarray of int
        Batch rows and packed slots.
    split : dict
        Feature dim -> (start, stop, total).
    values : ndarray, dims (row, slot, *features)
        This rank's part.
    """

    point: str
    layer: int
    rows: np.ndarray
    slots: np.ndarray
    split: dict[str, tuple[int, int, int]]
    values: np.ndarray


class Handler:
    """What `mappnb.capture.activations.taps.attached` calls at each tap.

    Parameters
    ----------
    edits : sequence of Edit
        Made first.
    wanted : collection of PointName
        What to keep, after the edits; a layer of -1 stands for every layer. Gradients come with the backward pass.
    place : ndarray of int, dims (sample, token), optional
        Packed slot of each user slot.
    inject : mapping, optional
        (point, layer) -> gradient to add there in the backward pass, dims (row, slot, *features).
    gradients : bool
        The embedding's output starts the graph: weights are frozen.
    """

    def __init__(
        self,
        edits: Sequence[Edit] = (),
        wanted: Collection[PointName] = (),
        *,
        place: np.ndarray | None = None,
        inject: Mapping[tuple[str, int], np.ndarray] | None = None,
        gradients: bool = False,
    ) -> None:
        self.edits = EditSet(edits)
        self.wanted = frozenset(wanted)
        self.place, self.inject, self.gradients = place, dict(inject or {}), gradients
        self.rows: np.ndarray | None = None  # of the microbatch in work
        self.share: np.ndarray | None = None  # slots of this context-parallel rank
        self.records: list[Record] = []

    @property
    def points(self) -> list[str]:
        """Points at which this handler has something to do."""
        starts = {"embed"} if self.gradients else set()
        names = {name.point for name in self.wanted} | {point for point, _ in self.inject}
        used = names | starts | set(self.edits.points)
        return [point for point in POINTS if point in used]

    def __call__(self, tap: Any, tensor: Any) -> Any:
        """Look at one tensor, dims (sample, token, *features); return what to put in its place, or None."""
        rows = np.arange(tensor.shape[0]) if self.rows is None else self.rows
        slots = token_slots(tap.shard, tensor.shape[1], self.share)
        num_slots = tensor.shape[1] * tap.shard.token_size if self.place is None else self.place.shape[1]
        result = self.edits.apply(
            tap.point, tap.layer, tensor, Where(rows, slots, self.place, num_slots, split_of(tap.shard))
        )
        if self.gradients and tap.compute is None:
            result = self._start(tap, tensor if result is None else result)
            self._hook(tap, result, rows, slots)
        if self._wants(tap, grad=False) and tap.shard.writes:
            self._keep(tap, tap.point, tensor if result is None else result, rows, slots)
        return result

    def _wants(self, tap: Any, *, grad: bool) -> bool:
        names = (PointName(tap.point, layer, grad) for layer in {-1, tap.layer})
        return any(name in self.wanted for name in names)

    def _start(self, tap: Any, tensor: Any) -> Any:
        """Return a tensor in the graph whose gradient can be looked at."""
        if tap.point == "embed" and not tensor.requires_grad:
            return tensor.detach().clone().requires_grad_()
        return tensor.clone() if tensor.requires_grad else tensor

    def _hook(self, tap: Any, tensor: Any, rows: np.ndarray, slots: np.ndarray) -> None:
        if not tensor.requires_grad:
            return
        if (injected := self.inject.get((tap.point, tap.layer))) is not None:
            part = _local(injected, tap.shard, rows, slots)
            tensor.register_hook(lambda grad: grad + grad.new_tensor(part))
        if self._wants(tap, grad=True) and tap.shard.writes:
            tensor.register_hook(lambda grad: self._keep(tap, f"{tap.point}_grad", grad, rows, slots))

    def _keep(self, tap: Any, name: str, tensor: Any, rows: np.ndarray, slots: np.ndarray) -> None:
        values = array_of(tensor, copy=True)
        self.records.append(Record(name, tap.layer, rows, slots, split_of(tap.shard), values))


def array_of(tensor: Any, *, copy: bool = False) -> np.ndarray:
    """Return a tensor's values on the host, float64 of float64 and else float32; ``copy``: even where they are there already."""
    import torch

    dtype = torch.float64 if tensor.dtype == torch.float64 else torch.float32
    return np.asarray(tensor.detach().to("cpu", dtype, copy=copy).numpy())


def split_of(shard: Any) -> dict[str, tuple[int, int, int]]:
    """Return feature dim -> (start, stop, total) of the dims that are split over ranks."""
    return {dim: (part.start, part.stop, part.total) for dim, part in shard.split.items()}


def token_slots(shard: Any, count: int, share: np.ndarray | None) -> np.ndarray:
    """Return the packed slot of each of ``count`` tokens of a local tensor, given the rank's share of the sequence."""
    first = shard.token_rank * count
    if share is not None:
        return share[first : first + count]
    if "cp" in shard.token:
        raise InterpError(
            "edits of forwards that are not Model's own need context parallelism of 1: slots would be unknown"
        )
    return np.arange(first, first + count)


def _local(values: np.ndarray, shard: Any, rows: np.ndarray, slots: np.ndarray) -> np.ndarray:
    part: np.ndarray = values[rows][:, slots]
    for axis, dim in enumerate(shard.features, 2):
        if dim in shard.split:
            start, stop, _ = split_of(shard)[dim]
            part = part[(slice(None),) * axis + (slice(start, stop),)]
    return part


@contextmanager
def edit_handler(model: Any, edits: Sequence[Edit]) -> Iterator[None]:
    """Attach the edits to a model's taps; see `mappnb.interp.edits.edited`."""
    from mappnb.capture.activations.taps import attached, find_taps

    handler = Handler(edits)
    with attached(find_taps(model.chunks, points=handler.points), handler):
        yield
