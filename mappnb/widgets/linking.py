"""Views that follow each other: what one shows or selects, the others show too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mappnb.errors import MappnbError

__all__ = ["Link", "link"]

SHARED = {"time": ("window", "follow_window"), "selection": ("selection", "follow_selection")}


class Link:
    """Ties views together until :meth:`unlink`.

    Attributes
    ----------
    views : tuple of View
    """

    def __init__(self, views: tuple[Any, ...], share: tuple[str, ...]) -> None:
        self.views = views
        self._stops: list[Callable[[], None]] = []
        self._busy = False
        for name in share:
            event, follow = SHARED[name]
            for view in views:
                self._stops.append(view.on_change(event, lambda source, f=follow: self._pass_on(source, f)))

    def _pass_on(self, source: Any, follow: str) -> None:
        """Tell the others; what they tell in turn is an echo and goes nowhere."""
        if self._busy:
            return
        self._busy = True
        try:
            for view in self.views:
                if view is not source and not view.closed and hasattr(view, follow):
                    getattr(view, follow)(source)
        finally:
            self._busy = False

    def unlink(self) -> None:
        """Let the views go their own ways again."""
        for stop in self._stops:
            stop()
        self._stops.clear()

    def __repr__(self) -> str:
        return f"Link({', '.join(map(repr, self.views))})"


def link(*views: Any, share: tuple[str, ...] = ("time", "selection")) -> Link:
    """Link views: panning, zooming and selecting in one is followed by the others.

    Parameters
    ----------
    *views : View
        Two or more, of one run or of several (two runs are compared at equal times on their run clocks).
    share : tuple of str
        What they share: ``"time"``, ``"selection"``.

    Returns
    -------
    Link
        Its ``unlink()`` ends it. Closing a view takes it out.

    Raises
    ------
    MappnbError
        If there are fewer than two views, or one that is closed or cannot be linked.
    """
    if len(set(map(id, views))) < 2:
        raise MappnbError("link needs two views or more: mappnb.link(timeline, other)")
    if unknown := [s for s in share if s not in SHARED]:
        raise MappnbError(f"link cannot share {unknown[0]!r}; it can share {', '.join(SHARED)}")
    for view in views:
        if not hasattr(view, "on_change"):
            raise MappnbError(f"link: {type(view).__name__} is no view of mappnb")
        if view.closed:
            raise MappnbError(f"link: {view!r} is closed; make it again")
    return Link(views, tuple(share))
