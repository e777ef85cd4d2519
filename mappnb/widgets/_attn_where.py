"""What the attention view looks at, as one value that can be said in code and read from a message."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from mappnb.errors import MappnbError, did_you_mean
from mappnb.widgets._attn_codes import POOLS

__all__ = ["MODES", "SCALES", "Where"]

SCALES: dict[str, str] = {"sqrt": "square root", "linear": "linear", "log": "log, from 1e-4"}
"""How a weight becomes a colour."""
MODES: dict[str, str] = {"heat": "heatmap", "lines": "lines"}
"""How one head is drawn."""
_WORDS: dict[str, Mapping[str, str]] = {"scale": SCALES, "pool": POOLS, "mode": MODES}
_NUMBERS = ("sample", "compare", "layer", "head", "query")
_NAMES = (*_NUMBERS, "scale", "pool", "mode", "order", "threshold", "fit", "window")


@dataclass(frozen=True, slots=True)
class Where:
    """A place in the view.

    Attributes
    ----------
    sample : int
        Position along ``sample``.
    compare : int or None
        The sample it is compared with.
    layer, head : int or None
        The head that is looked at, global numbers; None: all.
    query : int or None
        Token slot whose attention is shown.
    scale, pool, mode : str
        Keys of :data:`SCALES`, ``POOLS``, :data:`MODES`.
    order : str
        ``"layer"``, or a head score.
    threshold : float
        Weights below it are not drawn.
    fit : bool
        Colours end at the head's largest weight, not at 1.
    window : tuple of int or None
        First query, query behind the last, first key, key behind the last: token slots.
    """

    sample: int = 0
    compare: int | None = None
    layer: int | None = None
    head: int | None = None
    query: int | None = None
    scale: str = "sqrt"
    pool: str = "max"
    mode: str = "heat"
    order: str = "layer"
    threshold: float = 0.0
    fit: bool = False
    window: tuple[int, int, int, int] | None = None

    def checked(self) -> Where:
        """Return it, or raise MappnbError if a word is unknown or a number out of bounds."""
        for name, known in _WORDS.items():
            value = getattr(self, name)
            if value not in known:
                raise MappnbError(
                    f"{name} is {value!r}; expected one of {', '.join(known)}{did_you_mean(str(value), known)}"
                )
        if (self.layer is None) != (self.head is None):
            missing = "head" if self.head is None else "layer"
            raise MappnbError(f"a head is named by layer= and head=; {missing}= is missing")
        if not 0 <= self.threshold < 1:
            raise MappnbError(
                f"threshold is {self.threshold!r}; expected 0 to 1, a weight below which nothing is drawn"
            )
        return self

    def told(self) -> dict[str, Any]:
        """Return it for a message."""
        out = {n: getattr(self, n) for n in _NAMES}
        return {**out, "window": None if self.window is None else list(self.window)}

    def moved(self, content: Mapping[str, Any]) -> Where:
        """Return the place that a message from the browser names; what it leaves out stays."""
        changes: dict[str, Any] = {}
        for name in _NAMES:
            if name in content:
                changes[name] = _taken(name, content[name])
        return replace(self, **changes).checked()


def _taken(name: str, value: Any) -> Any:
    """Return one value of a message, or raise MappnbError."""
    whole = isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**40
    if name == "fit":
        good = isinstance(value, bool)
    elif name == "threshold":
        good = isinstance(value, (int, float)) and not isinstance(value, bool)
    elif name == "window":
        good = value is None or (isinstance(value, list) and len(value) == 4 and all(type(v) is int for v in value))
        value = tuple(value) if good and value is not None else value
    elif name in _NUMBERS:
        good = whole or (value is None and name != "sample")
    else:
        good = isinstance(value, str) and len(value) <= 100
    if not good:
        raise MappnbError(f"message: {name} is {value!r:.80}; expected another kind of value")
    return value
