"""Which cell made which view: a cell that runs again closes the views of its last run, so that none pile up."""

from __future__ import annotations

import sys
import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mappnb.widgets.view import View

__all__ = ["Cells", "running_cell"]


def running_cell() -> tuple[str, str] | None:
    """Return (cell id, id of this execution), as JupyterLab and Notebook 7 tell; None elsewhere."""
    ipython = sys.modules.get("IPython")
    shell: Any = ipython.get_ipython() if ipython is not None else None
    parent: Any = getattr(shell, "parent_header", None) or {}
    if not parent and hasattr(shell, "get_parent"):
        parent = shell.get_parent()
    cell = (parent.get("metadata") or {}).get("cellId")
    run = (parent.get("header") or {}).get("msg_id")
    return (str(cell), str(run)) if cell and run else None


class Cells:
    """Views by the cell that made them. Weak: a view that is gone is forgotten."""

    def __init__(self) -> None:
        self._by_cell: dict[str, tuple[str, list[weakref.ref[View]]]] = {}

    def made(self, view: View) -> None:
        """Take note of a new view; close those that an earlier run of its cell made."""
        place = running_cell()
        if place is None:
            return
        cell, run = place
        last_run, views = self._by_cell.get(cell, ("", []))
        if last_run != run:
            for ref in views:
                if (old := ref()) is not None:
                    old.close()
            views = []
        self._by_cell[cell] = (run, [*views, weakref.ref(view)])

    def forget(self, view: View) -> None:
        """Forget a closed view."""
        for cell, (run, views) in list(self._by_cell.items()):
            left = [r for r in views if r() is not None and r() is not view]
            if left:
                self._by_cell[cell] = (run, left)
            else:
                del self._by_cell[cell]
