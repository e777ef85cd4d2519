"""What the stragglers view looks at: level, metric and order, as one value that can be said in code and read from a message."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from mappnb.errors import MappnbError, did_you_mean

__all__ = ["AGAINST", "CELLS", "ROWS", "Where"]

ROWS: tuple[str, ...] = ("auto", "rank", "host")
"""What has a row: ``"auto"`` is a rank, of many ranks a host."""
CELLS: tuple[str, ...] = ("max", "median")
"""What a cell of several ranks or steps shows."""
AGAINST: dict[str, str] = {
    "above": "above its peers, s",
    "ratio": "times its peers'",
    "seconds": "seconds",
}
"""How the parts of one rank are shown."""
_TEXTS = ("metric", "order", "rows", "cell", "against")


@dataclass(frozen=True, slots=True)
class Where:
    """A place in the view.

    Attributes
    ----------
    metric, order, rows, cell, against : str
    host : str or None
    rank, step : int or None
    """

    metric: str = "ratio"
    order: str = "rank"
    rows: str = "auto"
    cell: str = "max"
    against: str = "above"
    host: str | None = None
    rank: int | None = None
    step: int | None = None

    @property
    def level(self) -> str:
        """``"all"``, ``"host"``, ``"rank"`` or ``"step"``."""
        if self.rank is not None:
            return "rank" if self.step is None else "step"
        return "all" if self.host is None else "host"

    def checked(self) -> Where:
        """Return it, or raise MappnbError if a word is unknown."""
        for name, known in (("rows", ROWS), ("cell", CELLS), ("against", AGAINST)):
            value = getattr(self, name)
            if value not in known:
                raise MappnbError(
                    f"{name} is {value!r}; expected one of {', '.join(known)}{did_you_mean(str(value), known)}"
                )
        if self.step is not None and self.rank is None:
            raise MappnbError("a step is looked at for one rank: give rank= too")
        return self

    def told(self) -> dict[str, Any]:
        """Return it for a message."""
        return {n: getattr(self, n) for n in (*_TEXTS, "host", "rank", "step")}

    def moved(self, content: Mapping[str, Any]) -> Where:
        """Return the place that a message from the browser names; what it leaves out stays."""
        changes: dict[str, Any] = {}
        for name in (*_TEXTS, "host", "rank", "step"):
            if name not in content:
                continue
            value = content[name]
            number = name in ("rank", "step")
            good = isinstance(value, int) and not isinstance(value, bool) if number else isinstance(value, str)
            if not (good or (value is None and name not in _TEXTS)) or (isinstance(value, str) and len(value) > 300):
                raise MappnbError(f"message: {name} is {value!r:.80}; expected a {'number' if number else 'text'}")
            changes[name] = value
        return replace(self, **changes).checked()
