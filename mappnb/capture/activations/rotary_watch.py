"""Queries and keys after rotary in Hugging Face's models, where a function of the model's file rotates them, not a module."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Final

__all__ = ["FUNCTION", "RotaryWatch", "has_rotary"]

FUNCTION: Final = "apply_rotary_pos_emb"
See = Callable[[Any], Any]


def has_rotary(attention: Any) -> bool:
    """Return True if the file of an attention module has the function that rotates queries and keys."""
    return callable(getattr(sys.modules.get(type(attention).__module__), FUNCTION, None))


class RotaryWatch:
    """Tells of one result of ``apply_rotary_pos_emb(q, k, ...)``, dims (sample, head, token, head_dim), inside one module's forward.

    Parameters
    ----------
    attention
        The attention module.
    index : int
        0: queries, 1: keys.

    Notes
    -----
    While anything is watched, the function in the model's file is a wrapper; afterwards it is the original again.
    """

    def __init__(self, attention: Any, index: int) -> None:
        self.attention, self.index = attention, index

    def __call__(self, see: See) -> Callable[[], None]:
        """Call ``see`` with the tensor from now on; what it returns, unless None, is put in its place."""
        file = sys.modules[type(self.attention).__module__]
        patch = _PATCHES.get(file.__name__) or _PATCHES.setdefault(file.__name__, _Patch(file))
        key = (id(self.attention), self.index)
        patch.add(key, see)
        enter = self.attention.register_forward_pre_hook(lambda *_: patch.enter(key[0]))
        leave = self.attention.register_forward_hook(lambda *_: patch.enter(0), always_call=True)

        def remove() -> None:
            enter.remove()
            leave.remove()
            patch.drop(key, see)

        return remove


class _Patch:
    """The wrapper in one model's file."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self._original: Any = None
        self._inside = 0
        self._listeners: dict[tuple[int, int], list[See]] = {}

    def enter(self, attention: int) -> None:
        """Say whose forward runs."""
        self._inside = attention

    def add(self, key: tuple[int, int], see: See) -> None:
        """Listen to one result."""
        if not self._listeners:
            self._original = getattr(self._file, FUNCTION)
            setattr(self._file, FUNCTION, self._call)
        self._listeners.setdefault(key, []).append(see)

    def drop(self, key: tuple[int, int], see: See) -> None:
        """Listen no more."""
        listeners = self._listeners.get(key, [])
        if see in listeners:
            listeners.remove(see)
        if not listeners:
            self._listeners.pop(key, None)
        if not self._listeners and self._original is not None:
            setattr(self._file, FUNCTION, self._original)
            self._original = None

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        results = self._original(*args, **kwargs)
        if not self._inside:
            return results
        rotated = list(results)
        for index in (0, 1):
            for see in self._listeners.get((self._inside, index), ()):
                new = see(rotated[index])
                rotated[index] = rotated[index] if new is None else new
        return tuple(rotated)


_PATCHES: Final[dict[str, _Patch]] = {}
