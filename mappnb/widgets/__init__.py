"""Views: what draws data in a notebook. Each loads on first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mappnb.widgets.activation_stats import ActivationStats as ActivationStats
    from mappnb.widgets.arrays import ArrayView as ArrayView
    from mappnb.widgets.arrays import array_view as array_view
    from mappnb.widgets.attention import Attention as Attention
    from mappnb.widgets.causal_trace import CausalTrace as CausalTrace
    from mappnb.widgets.densities import Densities as Densities
    from mappnb.widgets.explain import Explain as Explain
    from mappnb.widgets.lens import Lens as Lens
    from mappnb.widgets.linking import link as link
    from mappnb.widgets.schedule_lab import ScheduleLab as ScheduleLab
    from mappnb.widgets.selection import Selection as Selection
    from mappnb.widgets.stragglers import Stragglers as Stragglers
    from mappnb.widgets.timeline import Timeline as Timeline
    from mappnb.widgets.trajectories import Trajectories as Trajectories
    from mappnb.widgets.view import View as View

__all__ = [
    "ActivationStats",
    "ArrayView",
    "Attention",
    "CausalTrace",
    "Densities",
    "Explain",
    "Lens",
    "ScheduleLab",
    "Selection",
    "Stragglers",
    "Timeline",
    "Trajectories",
    "View",
    "array_view",
    "link",
]

_LAZY: dict[str, tuple[str, str]] = {
    "ActivationStats": ("mappnb.widgets.activation_stats", "ActivationStats"),
    "ArrayView": ("mappnb.widgets.arrays", "ArrayView"),
    "array_view": ("mappnb.widgets.arrays", "array_view"),
    "Attention": ("mappnb.widgets.attention", "Attention"),
    "CausalTrace": ("mappnb.widgets.causal_trace", "CausalTrace"),
    "Densities": ("mappnb.widgets.densities", "Densities"),
    "Explain": ("mappnb.widgets.explain", "Explain"),
    "Lens": ("mappnb.widgets.lens", "Lens"),
    "link": ("mappnb.widgets.linking", "link"),
    "ScheduleLab": ("mappnb.widgets.schedule_lab", "ScheduleLab"),
    "Selection": ("mappnb.widgets.selection", "Selection"),
    "Stragglers": ("mappnb.widgets.stragglers", "Stragglers"),
    "Timeline": ("mappnb.widgets.timeline", "Timeline"),
    "Trajectories": ("mappnb.widgets.trajectories", "Trajectories"),
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
