"""Checkpoints: saving and loading, by whichever library does it; only the outermost call counts."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any, Final

from mappnb.capture._flags import FAILED
from mappnb.capture._patches import ImportWatch, Patches
from mappnb.capture.points import SessionLike
from mappnb.terms import Category, Op

__all__ = ["CHECKPOINT_FUNCTIONS", "watch_checkpoints"]

Function = Callable[..., Any]

CHECKPOINT_FUNCTIONS: Final[dict[str, tuple[tuple[str, str], ...]]] = {
    "torch.serialization": (("save", Op.CHECKPOINT_SAVE), ("load", Op.CHECKPOINT_LOAD)),
    "torch": (("save", Op.CHECKPOINT_SAVE), ("load", Op.CHECKPOINT_LOAD)),
    "torch.distributed.checkpoint": (
        ("save", Op.CHECKPOINT_SAVE),
        ("async_save", Op.CHECKPOINT_SAVE),
        ("load", Op.CHECKPOINT_LOAD),
    ),
    "megatron.core.dist_checkpointing.serialization": (("save", Op.CHECKPOINT_SAVE), ("load", Op.CHECKPOINT_LOAD)),
    "megatron.core.dist_checkpointing": (("save", Op.CHECKPOINT_SAVE), ("load", Op.CHECKPOINT_LOAD)),
    "megatron.training.checkpointing": (
        ("save_checkpoint", Op.CHECKPOINT_SAVE),
        ("load_checkpoint", Op.CHECKPOINT_LOAD),
    ),
    "megatron.training.training": (("save_checkpoint", Op.CHECKPOINT_SAVE), ("load_checkpoint", Op.CHECKPOINT_LOAD)),
}
"""Modules, their functions, and the operation that each is: the same function may be bound in several modules."""


class _Depth(threading.local):
    now = 0


def watch_checkpoints(session: SessionLike, patches: Patches, watch: ImportWatch) -> None:
    """Wrap the functions that save and load checkpoints, now or when the program imports their modules."""
    depth = _Depth()
    for module_name, functions in CHECKPOINT_FUNCTIONS.items():

        def patch(module: ModuleType, functions: tuple[tuple[str, str], ...] = functions) -> None:
            for name, op in functions:
                patches.wrap(module, name, partial(_timed, session, depth, op))

        watch.when(module_name, patch)


def _in_memory(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the target is a buffer: pickling a tensor calls ``torch.save``, which makes no checkpoint."""
    return isinstance(kwargs.get("f"), io.BytesIO) or any(isinstance(arg, io.BytesIO) for arg in args[:2])


def _timed(session: SessionLike, depth: _Depth, op: str, original: Function) -> Function:
    recorder = session.recorder
    site = recorder.site(category=Category.CHECKPOINT, op=op, name=str(getattr(original, "__module__", "")))

    def call(*args: Any, **kwargs: Any) -> Any:
        if not recorder.enabled or depth.now or _in_memory(args, kwargs):
            return original(*args, **kwargs)
        depth.now += 1
        token, flags = recorder.begin(site), FAILED
        try:
            result = original(*args, **kwargs)
            flags = 0
            return result
        finally:
            depth.now -= 1
            recorder.end(token, flags=flags)

    return call
