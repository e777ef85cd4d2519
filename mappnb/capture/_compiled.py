"""Modules that run inside a graph of ``torch.compile``: hooks on them are compiled into it, not seen, or stop the compiler."""

from __future__ import annotations

from typing import Any

__all__ = ["compiled_modules", "is_compiled"]


def is_compiled(module: Any) -> bool:
    """Return True for what ``torch.compile(module)`` or ``module.compile()`` gave."""
    return getattr(module, "_compiled_call_impl", None) is not None or "_orig_mod" in getattr(module, "_modules", ())


def compiled_modules(model: Any) -> set[int]:
    """Return the ids of the modules of a model that run inside a compiled graph.

    Notes
    -----
    ``torch.compile`` wraps a module into ``torch._dynamo.OptimizedModule``, whose own hooks run outside of the graph; a module compiled
    in place (``torch.nn.Module.compile``) has its own hooks in it.
    """
    inside: set[int] = set()
    for module in model.modules():
        if is_compiled(module):
            wrapper = "_orig_mod" in module._modules
            inside |= {id(part) for part in module.modules() if not (wrapper and part is module)}
    return inside
