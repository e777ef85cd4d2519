"""What a timeline can be asked for, and the files that its browser half is made of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from mappnb.errors import MappnbError, did_you_mean
from mappnb.widgets.classes import CLASSES
from mappnb.widgets.lanes import GROUP_BY

__all__ = ["PARTS", "grouping_of", "hidden_of", "ranks_of"]

PARTS = tuple(
    f"{part}.js"
    for part in (
        "runtime",
        "runtime_ui",
        "timeline_time",
        "timeline_window",
        "timeline_state",
        "timeline_look",
        "timeline_paint",
        "timeline_frame",
        "timeline_overlay",
        "timeline_requests",
        "timeline_input",
        "timeline_keys",
        "timeline_panels",
        "timeline_actions",
        "timeline",
    )
)


def grouping_of(name: str) -> str:
    """Return the name of a grouping, or raise MappnbError."""
    if name not in GROUP_BY:
        raise MappnbError(f"group_by {name!r}; expected one of {', '.join(GROUP_BY)}{did_you_mean(name, GROUP_BY)}")
    return name


def hidden_of(names: Iterable[str]) -> frozenset[int]:
    """Return the numbers of the classes to hide, or raise MappnbError."""
    known: Mapping[str, int] = {c.name: i for i, c in enumerate(CLASSES)}
    for name in names:
        if name not in known:
            raise MappnbError(f"no class {name!r} to hide; known: {', '.join(known)}{did_you_mean(str(name), known)}")
    return frozenset(known[n] for n in names)


def ranks_of(rank: int | Iterable[int] | None) -> list[int] | None:
    """Return the ranks to show; None for all."""
    if rank is None:
        return None
    return [int(r) for r in rank] if isinstance(rank, Iterable) else [int(rank)]
