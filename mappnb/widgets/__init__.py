"""Views: what draws data in a notebook. Each loads on first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mappnb.widgets.arrays import ArrayView as ArrayView
    from mappnb.widgets.arrays import array_view as array_view
    from mappnb.widgets.attention import Attention as Attention
    from mappnb.widgets.linking import link as link
    from mappnb.widgets.schedule_lab import ScheduleLab as ScheduleLab
    from mappnb.widgets.selection import Selection as Selection
    from mappnb.widgets.stragglers import Stragglers as Stragglers
    from mappnb.widgets.timeline import Timeline as Timeline
    from mappnb.widgets.view import View as View

__all__ = ["ArrayView", "Attention", "ScheduleLab", "Selection", "Stragglers", "Timeline", "View", "array_view", "link"]

_LAZY: dict[str, tuple[str, str]] = {
    "ArrayView": ("mappnb.widgets.arrays", "ArrayView"),
    "array_view": ("mappnb.widgets.arrays", "array_view"),
    "Attention": ("mappnb.widgets.attention", "Attention"),
    "link": ("mappnb.widgets.linking", "link"),
    "ScheduleLab": ("mappnb.widgets.schedule_lab", "ScheduleLab"),
    "Selection": ("mappnb.widgets.selection", "Selection"),
    "Stragglers": ("mappnb.widgets.stragglers", "Stragglers"),
    "Timeline": ("mappnb.widgets.timeline", "Timeline"),
    "View": ("mappnb.widgets.view", "View"),
}
"""Public name -> (module, attribute)."""


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'mappnb.widgets' has no attribute {name!r}")
    module, attribute = _LAZY[name]
    value = getattr(importlib.import_module(module), attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
