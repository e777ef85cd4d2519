"""Where the points pass the modules of plain torch models."""

from __future__ import annotations

from typing import Any

from mappnb.capture.activations.tap import Tap

__all__ = ["taps_of"]


def taps_of(model: Any, missing: list[str], *, names: dict[str, str] | None = None) -> list[Tap]:
    """Return the taps of all points that are known in a model."""
    return []


def weights_of(model: Any) -> tuple[Any, list[tuple[str, int, Any]]]:
    """Return place and weights."""
    raise NotImplementedError
