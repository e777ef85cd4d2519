"""Flags of events as plain integers: arithmetic on enum members costs more than a span does."""

from __future__ import annotations

from typing import Final

from mappnb.terms import Flag

__all__ = ["ASYNC", "CLIPPED", "FAILED"]

ASYNC: Final[int] = int(Flag.ASYNC)
CLIPPED: Final[int] = int(Flag.CLIPPED)
FAILED: Final[int] = int(Flag.FAILED)
