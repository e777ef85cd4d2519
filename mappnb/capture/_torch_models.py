"""Models of plain torch programs: which parts of them are worth a span."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from mappnb.terms import Op

__all__ = ["Part", "parts_of"]

_ATTENTION: Final = re.compile(r"(^|_)(self_)?(attn|attention|self_attn)$", re.IGNORECASE)
_MLP: Final = re.compile(r"(^|_)(mlp|ffn|ff|feed_forward|moe)$", re.IGNORECASE)
_EMBEDDING: Final = re.compile(r"emb|^wte$|^wpe$", re.IGNORECASE)
_OUTPUT: Final = re.compile(r"^(lm_head|output|output_layer|head|classifier)$", re.IGNORECASE)


class Part(NamedTuple):
    """One module to record."""

    module: Any
    op: str
    name: str
    layer: int = -1


def parts_of(root: Any) -> list[Part]:
    """Return the parts of a model to record.

    Parameters
    ----------
    root
        A ``torch.nn.Module``, not wrapped.

    Returns
    -------
    list of Part
        The blocks of the outermost ModuleLists (as layers, numbered through), their attention and MLP by name, and
        the other children of the modules that hold these lists. A model without such lists: its children.
    """
    import torch

    containers = (torch.nn.ModuleList, torch.nn.Sequential)
    holders = [root]
    parts: list[Part] = []
    for path, blocks in _lists(root, "", containers):
        holder = _at(root, path.rpartition(".")[0])
        if not any(holder is known for known in holders):
            holders.append(holder)
        for i, block in enumerate(blocks):
            layer = sum(part.op == Op.LAYER for part in parts)
            parts.append(Part(block, Op.LAYER, f"{path}.{i}", layer))
            parts += _inside(block, f"{path}.{i}", layer)
    known = {id(holder) for holder in holders} | {id(part.module) for part in parts}
    for holder in holders:
        for name, child in holder.named_children():
            if id(child) not in known and not isinstance(child, containers) and any(True for _ in child.parameters()):
                parts.append(Part(child, _op(name), name))
    return parts


def _lists(module: Any, path: str, containers: tuple[Any, ...]) -> Iterator[tuple[str, Any]]:
    """Outermost lists of at least two modules with parameters."""
    for name, child in module.named_children():
        here = f"{path}.{name}" if path else name
        if isinstance(child, containers) and len(child) > 1 and any(True for _ in child.parameters()):
            yield here, child
        else:
            yield from _lists(child, here, containers)


def _inside(block: Any, path: str, layer: int) -> Iterator[Part]:
    for name, child in block.named_children():
        op = Op.ATTENTION if _ATTENTION.search(name) else Op.MLP if _MLP.search(name) else None
        if op is not None:
            yield Part(child, op, f"{path}.{name}", layer)


def _op(name: str) -> str:
    if _EMBEDDING.search(name):
        return Op.EMBEDDING
    return Op.OUTPUT_LAYER if _OUTPUT.search(name) else Op.MODULE


def _at(root: Any, path: str) -> Any:
    return root.get_submodule(path) if path else root
