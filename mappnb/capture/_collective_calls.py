"""What the arguments of each ``ProcessGroup`` method mean: operation, payload and root, alike on all members."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from mappnb.terms import Op

__all__ = ["METHODS", "P2P_METHODS", "Call", "first_tensor", "is_sync", "num_bytes", "payload", "root_of"]

Args = tuple[Any, ...]


def num_bytes(value: Any) -> int:
    """Payload in bytes of a tensor, or of all tensors in nested lists."""
    if isinstance(value, (list, tuple)):
        return num_bytes(value[0]) if len(value) == 1 else sum(map(num_bytes, value))
    size = getattr(value, "nbytes", None)
    return int(size) if size is not None else 0


def first_tensor(value: Any) -> Any:
    """First tensor in nested lists, or None."""
    while isinstance(value, (list, tuple)):
        if not value:
            return None
        value = value[0]
    return value


def payload(value: Any) -> tuple[Any, int]:
    """First tensor and bytes of a tensor, or of nested lists."""
    if type(value) is list and len(value) == 1:
        value = value[0]
    size = getattr(value, "nbytes", None)
    return (first_tensor(value), num_bytes(value)) if size is None else (value, int(size))


def is_sync(args: Args, kwargs: Mapping[str, Any]) -> bool:
    """Whether the caller will wait at once: ``asyncOp`` of the options, where there are some."""
    opts = kwargs.get("opts") if kwargs else None
    if opts is None and args:
        opts = args[-1]
    return not getattr(opts, "asyncOp", True)


def root_of(args: Args, kwargs: Mapping[str, Any], position: int) -> int:
    """Group rank of the root: from the options, or the argument at ``position`` (or named ``root``)."""
    for value in (*args, *kwargs.values()):
        rank = getattr(value, "rootRank", None)
        if rank is not None:
            return int(rank)
    value = kwargs.get("root", args[position] if len(args) > position else 0)
    return int(value) if isinstance(value, int) else 0


@dataclass(frozen=True, slots=True)
class Call:
    """How to read the arguments of one method.

    Attributes
    ----------
    op : str
        Operation.
    payload : int
        Position of the argument whose size is the payload; -1: there is none.
    names : tuple of str
        Names that this argument has as a keyword.
    per_member : bool
        The payload is that of one member: multiply by the group's size.
    root : int
        Position of the root's group rank, where it is given without options; -1: the operation has no root.
    """

    op: str
    payload: int = 0
    names: tuple[str, ...] = ()
    per_member: bool = False
    root: int = -1

    def value(self, args: Args, kwargs: Mapping[str, Any]) -> Any:
        """Return the argument whose size is the payload."""
        if 0 <= self.payload < len(args):
            return args[self.payload]
        for name in self.names:
            if name in kwargs:
                return kwargs[name]
        return None


_TENSORS: Final = ("tensors", "tensor")
_OUT: Final = ("output_tensors", "output", "outputs", "output_tensor", "output_lists")
_IN: Final = ("input_tensors", "inputs", "input", "input_tensor", "input_list", "inputTensor")

METHODS: Final[dict[str, Call]] = {
    "allreduce": Call(Op.ALL_REDUCE.value, 0, _TENSORS),
    "allreduce_coalesced": Call(Op.ALL_REDUCE.value, 0, _TENSORS),
    "allgather": Call(Op.ALL_GATHER.value, 0, _OUT),
    "allgather_coalesced": Call(Op.ALL_GATHER.value, 0, _OUT),
    "_allgather_base": Call(Op.ALL_GATHER.value, 0, _OUT),
    "allgather_into_tensor_coalesced": Call(Op.ALL_GATHER.value, 0, _OUT),
    "all_gather_single": Call(Op.ALL_GATHER.value, 0, _OUT),
    "all_gather_single_coalesced": Call(Op.ALL_GATHER.value, 0, _OUT),
    "reduce_scatter": Call(Op.REDUCE_SCATTER.value, 1, _IN),
    "_reduce_scatter_base": Call(Op.REDUCE_SCATTER.value, 1, _IN),
    "reduce_scatter_single": Call(Op.REDUCE_SCATTER.value, 1, _IN),
    "reduce_scatter_single_coalesced": Call(Op.REDUCE_SCATTER.value, 1, _IN),
    "reduce_scatter_tensor_coalesced": Call(Op.REDUCE_SCATTER.value, 1, _IN),
    "alltoall_base": Call(Op.ALL_TO_ALL.value, 1, _IN),
    "all_to_all_single": Call(Op.ALL_TO_ALL.value, 1, _IN),
    "alltoall": Call(Op.ALL_TO_ALL.value, 1, _IN),
    "broadcast": Call(Op.BROADCAST.value, 0, _TENSORS, root=1),
    "reduce": Call(Op.REDUCE.value, 0, _TENSORS, root=1),
    "gather": Call(Op.GATHER.value, 1, _IN, per_member=True, root=2),
    "scatter": Call(Op.SCATTER.value, 0, _OUT, per_member=True, root=2),
    "barrier": Call(Op.BARRIER.value, -1),
    "monitored_barrier": Call(Op.BARRIER.value, -1),
}
"""The collective methods of ``ProcessGroup``, of all torch versions.

``bytes`` is chosen so that it is equal on all members: the full output of an all_gather, the full input of a
reduce_scatter, the tensor of an all_reduce or broadcast, one member's part times the group's size for gather and
scatter. An all_to_all has what this rank sends: members may differ there.
"""

P2P_METHODS: Final[tuple[str, ...]] = ("send", "recv", "recv_anysource")
"""The point-to-point methods of ``ProcessGroup``."""
