"""Choices of an activation view: lists, one of which may depend on another, checked wherever they come from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mappnb.errors import MappnbError, did_you_mean

__all__ = ["Chooser"]

Options = Sequence[tuple[Any, str]]


class Chooser:
    """Goes through the choices of a view in order: each has a list of values, and one of them is chosen.

    Parameters
    ----------
    now : mapping
        What was chosen before: kept where it is still possible.
    changes : mapping
        What is asked for; a value that is not possible is an error.

    Attributes
    ----------
    where : dict
        Chosen values by name.
    fields : list of dict
        For the browser: key, label, options (value, text), value.
    """

    def __init__(self, now: Mapping[str, Any], changes: Mapping[str, Any]) -> None:
        self._now, self._changes = now, dict(changes)
        self.where: dict[str, Any] = {}
        self.defaults: dict[str, Any] = {}
        self.fields: list[dict[str, Any]] = []

    def __call__(self, key: str, label: str, options: Options, default: Any = None) -> Any:
        """Return what is chosen of a list.

        Raises
        ------
        MappnbError
            If something else is asked for, or the list is empty.
        """
        values = [value for value, _ in options]
        if not values:
            raise MappnbError(f"{key}: nothing to choose from")
        first = default if default in values else values[0]
        if key in self._changes:
            value = self._changes[key]
            if not any(type(v) is type(value) and v == value for v in values):
                known = ", ".join(repr(v) for v in values[:20]) + (" …" if len(values) > 20 else "")
                raise MappnbError(
                    f"{key} is {value!r:.80}; expected one of {known}{did_you_mean(str(value), map(str, values))}"
                )
        else:
            value = self._now[key] if self._now.get(key) in values else first
        self.where[key], self.defaults[key] = value, first
        if len(values) > 1:
            self.fields.append({"key": key, "label": label, "options": [[v, t] for v, t in options], "value": value})
        return value

    def done(self) -> None:
        """Raise MappnbError if something was asked for that is no choice."""
        for key in self._changes:
            if key not in self.where:
                raise MappnbError(
                    f"no {key!r} to choose; there are {', '.join(self.where)}{did_you_mean(key, self.where)}"
                )
