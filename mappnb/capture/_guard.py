"""Methods of a session that a program calls must not raise into it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Concatenate, ParamSpec

if TYPE_CHECKING:
    from mappnb.capture.session import Session

__all__ = ["guarded"]

P = ParamSpec("P")


def guarded(method: Callable[Concatenate[Session, P], None]) -> Callable[Concatenate[Session, P], None]:
    """Turn the recording off where the method would raise."""

    @functools.wraps(method)
    def call(self: Session, /, *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            method(self, *args, **kwargs)
        except Exception as err:  # noqa: BLE001 (capture never kills training)
            self.fail(method.__name__, err)

    return call
