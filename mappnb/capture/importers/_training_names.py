"""What the names of training spans mean, whoever wrote them: forward, backward, all-reduce, layers, optimizer."""

from __future__ import annotations

import re

from mappnb.capture.importers._names import collective_op
from mappnb.terms import P2P_OPS, Category, Op, Phase

__all__ = ["training_kind"]

_LAYER = re.compile(r"[_ .-](\d+)$")
_RULES: tuple[tuple[re.Pattern[str], Category, str, Phase], ...] = tuple(
    (re.compile(pattern), category, str(op), phase)
    for pattern, category, op, phase in (
        (r"^(iteration|step|train_step)$|^profilerstep", Category.MARK, Op.ITERATION, Phase.NONE),
        (r"recompute", Category.COMPUTE, Op.SPAN, Phase.RECOMPUTE),
        (r"optimizer", Category.OPTIMIZER, Op.OPTIMIZER_STEP, Phase.NONE),
        (r"checkpoint.*(save|write)|save.*checkpoint", Category.CHECKPOINT, Op.CHECKPOINT_SAVE, Phase.NONE),
        (r"dataloader|next_batch|get_batch|batch-generator", Category.DATA, Op.NEXT_BATCH, Phase.NONE),
        (r"embedding", Category.COMPUTE, Op.EMBEDDING, Phase.FORWARD),
        (r"attention", Category.COMPUTE, Op.ATTENTION, Phase.FORWARD),
        (r"mlp", Category.COMPUTE, Op.MLP, Phase.FORWARD),
        (r"transformer_layer|decoder", Category.COMPUTE, Op.LAYER, Phase.FORWARD),
        (r"^loss", Category.COMPUTE, Op.LOSS, Phase.FORWARD),
        (r"^(forward|fwd)([_ -]?(step|compute|pass))?$", Category.COMPUTE, Op.FORWARD_STEP, Phase.FORWARD),
        (r"^(backward|bwd)([_ -]?(step|compute|pass))?$", Category.COMPUTE, Op.BACKWARD_STEP, Phase.BACKWARD),
    )
)
_TRANSFER = re.compile(
    r"^_?(reduce|gather|all_?reduce|allreduce|all[-_]gather|reduce[-_]scatter|all[-_]to[-_]all|broadcast)"
)
_BETWEEN = re.compile(r"(^|[_ -])(send|recv|exchange|isend|irecv)([_ -]|$)")


def training_kind(name: str) -> tuple[str, str, str, int] | None:
    """Return (category, op, phase, layer) of a span by its name, None if it tells nothing.

    Notes
    -----
    The names of MegaScan (MegatronApp ``scripts/aggregate.py``) and of Megatron's timers: ``_reduce`` and ``_gather_*`` are the
    all-reduce and all-gather of its tensor-parallel mappings.
    """
    lowered = name.lower()
    found = _LAYER.search(lowered)
    layer = int(found[1]) if found and len(found[1]) < 6 else -1
    if _BETWEEN.search(lowered):
        both = ("send" in lowered and "recv" in lowered) or "exchange" in lowered
        op = "send_recv" if both else collective_op(lowered)
        return str(Category.P2P), op if op in P2P_OPS or both else "send_recv", str(Phase.NONE), -1
    if _TRANSFER.match(lowered):
        op = collective_op(lowered)
        op = {str(Op.REDUCE): str(Op.ALL_REDUCE), str(Op.GATHER): str(Op.ALL_GATHER)}.get(op, op)
        return str(Category.COLLECTIVE), op, str(Phase.NONE), -1
    for pattern, category, known, phase in _RULES:
        if pattern.search(lowered):
            return str(category), known, str(phase), layer
    return None
