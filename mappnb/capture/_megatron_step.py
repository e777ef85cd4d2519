"""What a Megatron step adds up to: loss, tokens, microbatches, and which output belongs to which microbatch."""

from __future__ import annotations

from collections import deque
from typing import Any

from mappnb.capture.points import SessionLike

__all__ = ["Outputs", "Place", "StepSums"]

Place = tuple[int, int, int]
"""Stage, chunk and microbatch."""


class Outputs:
    """Which microbatch an output tensor came from, so that its backward can say so.

    Notes
    -----
    By ``id`` only: the schedule itself keeps the tensors that it will run backward, and nothing is kept alive here. A
    tensor that the schedule replaced is taken for the oldest output of its chunk, which is right for every schedule
    that runs a chunk's backward passes in the order of its forward passes.
    """

    def __init__(self) -> None:
        self._places: dict[int, Place] = {}
        self._order: deque[int] = deque()

    def put(self, output: Any, place: Place) -> None:
        """Remember the output of a forward step."""
        key = id(output)
        self._places[key] = place
        self._order.append(key)

    def take(self, output: Any) -> Place:
        """Return the place of the forward step that made ``output``."""
        key = id(output)
        place = self._places.pop(key, None)
        while place is None and self._order:
            place = self._places.pop(self._order.popleft(), None)
        return place or (-1, -1, -1)

    def clear(self) -> None:
        """Forget everything: the step is over."""
        self._places.clear()
        self._order.clear()


class StepSums:
    """Values of the current step, told to the session once, at its end.

    Parameters
    ----------
    session
        Gets them.
    """

    def __init__(self, session: SessionLike) -> None:
        self._session = session
        self.tokens = 0
        self.microbatches = 0
        self.token_shards = 1
        self._losses: list[Any] = []

    def add_loss(self, reduced: Any) -> None:
        """Keep a copy of what the loss function reports for one microbatch: the schedule divides in place.

        A dictionary counts by its first value; two numbers are a sum and its number of tokens, as Megatron-core's own
        loss functions report since 0.9.
        """
        value: Any = next(iter(reduced.values()), None) if isinstance(reduced, dict) else reduced
        if isinstance(value := _copy(value), float):
            self._losses.append(value)
            return
        if isinstance(value, (tuple, list)) and value:
            value = [_copy(v) for v in value]
            value = _ratio(value[0], value[1]) if len(value) > 1 else value[0]
        elif hasattr(value, "detach"):
            if value.numel() == 2:
                value = value.view(-1)[0] / value.view(-1)[1]
            elif value.numel() != 1:
                value = value.float().mean()
        if isinstance(value, (int, float)) or hasattr(value, "detach"):
            self._losses.append(value)

    def tell(self) -> None:
        """Give the sums to the session and begin anew."""
        values: dict[str, Any] = {}
        if self._losses:
            values["loss"] = _mean(self._losses)
        if self.microbatches:
            values["microbatches"] = self.microbatches
        if self.tokens:
            values["tokens"] = self.tokens
        self.tokens = self.microbatches = 0
        self._losses = []
        if values:
            self._session.step_values(**values)


def _copy(value: Any) -> Any:
    """Copy a tensor; one number that is on the host already becomes a float."""
    if not hasattr(value, "detach"):
        return value
    if value.requires_grad:
        value = value.detach()
    return float(value.item()) if value.numel() == 1 and not value.is_cuda else value.clone()


def _ratio(total: Any, count: Any) -> Any:
    """Divide as tensors do: by zero too."""
    return float("nan") if isinstance(count, (int, float)) and not count else total / count


def _mean(values: list[Any]) -> Any:
    """Mean without waiting for a device."""
    total = values[0] if isinstance(values[0], (int, float)) else values[0].reshape(()).double()
    for value in values[1:]:
        total = total + (value if isinstance(value, (int, float)) else value.reshape(()).double())
    return total / len(values)
