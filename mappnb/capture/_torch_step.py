"""Steps and microbatches of plain torch programs."""

from __future__ import annotations

from typing import Any

from mappnb.capture._megatron_step import StepSums
from mappnb.capture.points import SessionLike, state_of
from mappnb.terms import Category, Op

__all__ = ["TorchSteps"]


class TorchSteps:
    """Where the program is in its step.

    Parameters
    ----------
    session
        Gets the steps and their values.

    Attributes
    ----------
    training : bool
        A training forward has run in this step.
    in_forward : bool
        Inside a forward of the model.
    """

    def __init__(self, session: SessionLike) -> None:
        self.session = session
        self.recorder = session.recorder
        self.training = self.in_forward = False
        self._state = state_of(session)
        self._sums = StepSums(session)
        self._microbatch = -1
        self._backward = -1
        self._optimizers: list[tuple[int, int]] = []
        self._site = session.recorder.site(category=Category.OPTIMIZER, op=Op.OPTIMIZER_STEP)

    def begin(self) -> None:
        """Begin the step, if it has not begun."""
        self.session.begin_step()

    def before_batch(self) -> None:
        """Begin the step with its first batch, unless this is for evaluation."""
        try:
            import torch

            if torch.is_grad_enabled() and not self._state.framework:
                self.session.begin_step()
        except Exception as err:  # noqa: BLE001
            self.session.fail("data loader", err)

    def enter_forward(self, *, training: bool) -> None:
        """Note that the model is called."""
        self.in_forward = True
        if training:
            self.training = True
            self.session.begin_step()
            self._microbatch += 1
            self._sums.microbatches += 1
            self.recorder.set_context(None, 0, 0, self._microbatch)

    def leave_forward(self) -> None:
        """Note that the call of the model is over."""
        self.in_forward = False
        self.recorder.set_context(None, -1, -1, -1)

    def enter_backward(self, tensors: Any) -> None:
        """Note that a backward pass begins, from ``tensors``: the loss, if it is one number."""
        self._backward += 1
        self.recorder.set_context(None, 0, 0, min(self._backward, self._microbatch))
        tensor = tensors[0] if isinstance(tensors, (list, tuple)) and len(tensors) == 1 else tensors
        if hasattr(tensor, "numel") and tensor.numel() == 1:
            self._sums.add_loss(tensor)

    def add_loss(self, loss: Any) -> None:
        """Count the loss of a microbatch."""
        self._sums.add_loss(loss)

    def count_microbatch(self) -> None:
        """Count a microbatch that ran forward."""
        self._sums.microbatches += 1

    def before_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Begin an optimizer's step; only the outermost is recorded, and none inside Megatron-core's."""
        if not self.recorder.enabled or (self._state.optimizer_depth and not self._optimizers):
            return
        try:
            for position, (known, _) in enumerate(self._optimizers):
                if known == id(optimizer):  # its last step raised an exception
                    self._state.optimizer_depth -= len(self._optimizers) - position
                    del self._optimizers[position:]
                    break
            self._state.optimizer_depth += 1
            token = 0 if self._optimizers else self.recorder.begin(self._site)
            self._optimizers.append((id(optimizer), token))
        except Exception as err:  # noqa: BLE001
            self.session.fail("optimizer step", err)

    def after_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """End an optimizer's step; the outermost ends the training step."""
        if not self._optimizers or self._optimizers[-1][0] != id(optimizer):
            return
        try:
            _, token = self._optimizers.pop()
            self._state.optimizer_depth -= 1
            if token:
                self.recorder.end(token)
                groups = optimizer.param_groups
                self.session.step_values(**({"lr": groups[0]["lr"]} if groups and "lr" in groups[0] else {}))
                self._state.end_step(self.session)
        except Exception as err:  # noqa: BLE001
            self.session.fail("optimizer step", err)

    def tell(self) -> None:
        """Give the step's sums to the session and begin anew."""
        self._sums.tell()
        self._microbatch = self._backward = -1
        self.training = False
