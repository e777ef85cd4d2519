"""Numbers in words, as views show them."""

from __future__ import annotations

__all__ = ["count_text", "duration_text", "time_text"]


def duration_text(ns: float) -> str:
    """Return a duration given in ns with the unit that suits it: ``"3.21 ms"``."""
    size = abs(ns)
    for limit, scale, unit in (
        (1e3, 1.0, "ns"),
        (1e6, 1e3, "µs"),
        (1e9, 1e6, "ms"),
        (120e9, 1e9, "s"),
        (7200e9, 60e9, "min"),
    ):
        if size < limit:
            value = ns / scale
            return (
                f"{value:.0f} {unit}"
                if unit == "ns"
                else f"{value:.3g} {unit}"
                if abs(value) < 999.5
                else f"{value:.0f} {unit}"
            )
    return f"{ns / 3600e9:.3g} h"


def time_text(seconds: float) -> str:
    """Return a point in time on the run clock, to the microsecond."""
    return f"{seconds:.6f} s"


def count_text(number: int, word: str) -> str:
    """Return a number of things: ``"1 event"``, ``"12,000 events"``."""
    return f"{number:,} {word}{'' if number == 1 else 's'}"
