"""Waits for data: a stand-in for a data iterator that times ``next`` and is otherwise the iterator itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mappnb.capture._flags import FAILED
from mappnb.capture.points import SessionLike
from mappnb.terms import Category, Op

__all__ = ["TimedIterator", "timed"]

_DATA, _NEXT_BATCH = Category.DATA.value, Op.NEXT_BATCH.value  # members of an enumeration hash slowly


class TimedIterator:
    """Gives what ``inner`` gives, recording how long it takes; attributes and ``isinstance`` are those of ``inner``."""

    __slots__ = ("_inner", "_session", "_site")

    def __init__(self, inner: Any, session: SessionLike) -> None:
        keep = object.__setattr__
        keep(self, "_inner", inner)
        keep(self, "_session", session)
        keep(self, "_site", session.recorder.site(category=_DATA, op=_NEXT_BATCH))

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """The class of the iterator, for ``isinstance``."""
        return type(self._inner)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        recorder = self._session.recorder
        token = recorder.begin(self._site)
        flags = 0
        try:
            return next(self._inner)
        except StopIteration:
            raise
        except BaseException:
            flags = FAILED
            raise
        finally:
            recorder.end(token, flags=flags)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._inner, name, value)

    def __len__(self) -> int:
        return len(self._inner)

    def __repr__(self) -> str:
        return repr(self._inner)


def timed(data: Any, session: SessionLike) -> Any:
    """Return ``data`` with each iterator in it timed: one, or a list of them; everything else as it is."""
    if type(data) is TimedIterator or data is None:
        return data
    if type(data) is list:
        return [timed(item, session) for item in data]
    return TimedIterator(data, session) if hasattr(type(data), "__next__") else data
