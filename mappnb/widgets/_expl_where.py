"""What the explain view looks at, as one value that can be said in code and read from a message."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from mappnb.errors import MappnbError, did_you_mean
from mappnb.widgets._messages import numbers, text, whole

__all__ = ["BY", "Where", "known_word", "path_asked"]

BY: dict[str, str] = {"attribution": "attribution", "direct_effect": "direct effect"}
"""What ranks and colours."""
_LARGEST = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Where:
    """A place in the view.

    Attributes
    ----------
    by : str
        Key of :data:`BY`.
    component : str
        A component of the table, or ``"all"``.
    layer, position : int or None
        Rows of one layer, of one token; None: all.
    row : int or None
        Label of the row that is picked.
    path : tuple of int
        Rows that were traced upstream, each in the table of the one before it.
    """

    by: str = "attribution"
    component: str = "all"
    layer: int | None = None
    position: int | None = None
    row: int | None = None
    path: tuple[int, ...] = ()

    def told(self) -> dict[str, Any]:
        """Return it for a message."""
        return {
            "by": self.by, "component": self.component, "layer": self.layer, "position": self.position, "row": self.row,
            "path": list(self.path),
        }  # fmt: skip

    def said(self) -> list[str]:
        """Return what differs from the beginning, as arguments in Python."""
        plain = Where()
        values = {name: getattr(self, name) for name in ("by", "component", "layer", "position", "row", "path")}
        return [f"{name}={value!r}" for name, value in values.items() if value != getattr(plain, name)]

    def asked(self, content: Mapping[str, Any]) -> Where:
        """Return the place that a message asks for, on the same path; a message is not trusted."""
        layer, position, row = (
            None if content.get(name) is None else whole(content, name, -1, _LARGEST)
            for name in ("layer", "position", "row")
        )
        by, component = text(content, "by", most=40), text(content, "component", most=80)
        return replace(self, by=by, component=component, layer=layer, position=position, row=row)


def path_asked(content: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the path in a message."""
    return tuple(int(value) for value in numbers(content, "path", -1))


def known_word(name: str, value: Any, known: Mapping[str, Any] | list[str]) -> None:
    """Raise MappnbError unless ``value`` is one of ``known``."""
    if value not in known:
        raise MappnbError(f"{name} is {value!r}; expected one of {', '.join(known)}{did_you_mean(str(value), known)}")
