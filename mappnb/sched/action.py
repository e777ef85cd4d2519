"""What a schedule is made of: compute actions and the transfers between them, small printable values."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from mappnb.errors import ScheduleError
from mappnb.terms import Kind

__all__ = ["Action", "Transfer", "TransferKind", "parse"]


class TransferKind(StrEnum):
    """The kind of a transfer, in the words of ``torch.distributed.pipelining``."""

    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"


@dataclass(frozen=True, slots=True, order=True)
class Action:
    """One unit of pipeline work: which stage runs what, for which microbatch.

    Attributes
    ----------
    stage : int
        Position in model order.
    kind : Kind
        F forward, B whole backward, I backward for the input, W backward for the weights.
    microbatch : int
        Microbatch of the step, from 0.
    """

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Return the action that ``str()`` prints as ``text``.

        Raises
        ------
        ScheduleError
            If ``text`` is no compute action.
        """
        if (m := re.fullmatch(r"(\d+)([FBIW])(\d+)", text)) is None:
            raise ScheduleError(f"cannot read action {text!r}: write <stage><F|B|I|W><microbatch>, e.g. '2F0'")
        return cls(int(m[1]), Kind(m[2]), int(m[3]))


@dataclass(frozen=True, slots=True, order=True)
class Transfer:
    """One side of a message between two stages.

    Attributes
    ----------
    stage : int
        The stage on this side: the producer of a send, the consumer of a receive.
    kind : TransferKind
        Sent or received, on the way forward (activations) or backward (gradients).
    microbatch : int
        Microbatch of the step, from 0.
    """

    stage: int
    kind: TransferKind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @property
    def other(self) -> Transfer:
        """The other side of the same message."""
        forward = self.kind in (TransferKind.SEND_F, TransferKind.RECV_F)
        sent = self.kind in (TransferKind.SEND_F, TransferKind.SEND_B)
        stage = self.stage + (1 if forward == sent else -1)
        kinds = {
            TransferKind.SEND_F: TransferKind.RECV_F,
            TransferKind.RECV_F: TransferKind.SEND_F,
            TransferKind.SEND_B: TransferKind.RECV_B,
            TransferKind.RECV_B: TransferKind.SEND_B,
        }
        return Transfer(stage, kinds[self.kind], self.microbatch)


def parse(text: str) -> Action | Transfer:
    """Return the action or transfer that ``str()`` prints as ``text``.

    Raises
    ------
    ScheduleError
        If ``text`` is neither.
    """
    if (m := re.fullmatch(r"(\d+)((?:SEND|RECV)_[FB])(\d+)", text)) is not None:
        return Transfer(int(m[1]), TransferKind(m[2]), int(m[3]))
    return Action.parse(text)
