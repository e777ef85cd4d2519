"""Every word of the field, spelled once: categories, operations, phases, schedule kinds, flags and dimension names."""

from __future__ import annotations

from enum import IntFlag, StrEnum

__all__ = [
    "BREAKDOWN",
    "COLLECTIVE_OPS",
    "EVENT",
    "P2P_OPS",
    "UNTOLD_STREAM",
    "Category",
    "Flag",
    "Kind",
    "Op",
    "Phase",
]


class Category(StrEnum):
    """The class of an event: what kind of time it is."""

    COMPUTE = "compute"
    COLLECTIVE = "collective"
    P2P = "p2p"
    WAIT = "wait"
    DATA = "data"
    OPTIMIZER = "optimizer"
    CHECKPOINT = "checkpoint"
    EVALUATION = "evaluation"
    HOST = "host"
    MARK = "mark"


class Phase(StrEnum):
    """The pass through the model that an event belongs to."""

    FORWARD = "forward"
    BACKWARD = "backward"
    BACKWARD_INPUT = "backward_input"
    BACKWARD_WEIGHT = "backward_weight"
    RECOMPUTE = "recompute"
    NONE = "none"


class Kind(StrEnum):
    """The kind of a schedule action, in the letters of ``torch.distributed.pipelining``."""

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"


class Op(StrEnum):
    """The operation of an event. Importers may add others; these are the ones that mappnb records itself."""

    ITERATION = "iteration"
    FORWARD_STEP = "forward_step"
    BACKWARD_STEP = "backward_step"
    MODEL = "model"
    EMBEDDING = "embedding"
    LAYER = "layer"
    ATTENTION = "attention"
    MLP = "mlp"
    OUTPUT_LAYER = "output_layer"
    LOSS = "loss"
    MODULE = "module"
    SPAN = "span"
    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"
    BROADCAST = "broadcast"
    REDUCE = "reduce"
    GATHER = "gather"
    SCATTER = "scatter"
    BARRIER = "barrier"
    SEND = "send"
    RECV = "recv"
    WAIT = "wait"
    GRAD_SYNC = "grad_sync"
    PARAM_SYNC = "param_sync"
    FINALIZE_GRADS = "finalize_grads"
    OPTIMIZER_STEP = "optimizer_step"
    NEXT_BATCH = "next_batch"
    CHECKPOINT_SAVE = "checkpoint_save"
    CHECKPOINT_LOAD = "checkpoint_load"
    EVALUATE = "evaluate"
    GC = "gc"


COLLECTIVE_OPS: frozenset[str] = frozenset(
    {
        Op.ALL_REDUCE,
        Op.ALL_GATHER,
        Op.REDUCE_SCATTER,
        Op.ALL_TO_ALL,
        Op.BROADCAST,
        Op.REDUCE,
        Op.GATHER,
        Op.SCATTER,
        Op.BARRIER,
    }
)
"""Operations that every member of a group takes part in."""

P2P_OPS: frozenset[str] = frozenset({Op.SEND, Op.RECV})
"""Operations between one pair of ranks."""

BREAKDOWN: tuple[str, ...] = (
    "compute",
    "transfer",
    "wait_peer",
    "data",
    "checkpoint",
    "optimizer",
    "host",
    "idle",
)
"""The exclusive categories of :func:`mappnb.analysis.breakdown`, in their order of precedence."""

EVENT = "event"
"""The one dimension of an events dataset."""

UNTOLD_STREAM = 1_000_000
"""First number of the streams that an importer makes up, one for each lane of device work whose trace tells no stream."""


class Flag(IntFlag):
    """Bits of the ``flags`` variable of an event."""

    OPEN = 1
    """Begun, not ended: the duration is how long it was open when last seen."""
    CLIPPED = 2
    """Cut at the border of the recording or of the window."""
    REPAIRED = 4
    """Its end was missing and was taken from an enclosing span, or a field was mended by an importer."""
    OVERLAPPED = 8
    """The operation ran beside other work of its rank, at least in part."""
    ASYNC = 16
    """Issued without blocking; the end is the first moment at which the program waited for it."""
    FAILED = 32
    """The enclosed code raised an exception."""
