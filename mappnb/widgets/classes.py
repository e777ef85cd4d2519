"""Colour classes of a timeline: the category of an event, and for compute the pass that it belongs to."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import xarray as xr

from mappnb.palette import CATEGORY_COLOURS, PHASE_COLOURS
from mappnb.terms import Category, Op, Phase

__all__ = ["CLASSES", "ColourClass", "class_of"]


class ColourClass(NamedTuple):
    """What is drawn in one colour."""

    name: str
    light: str
    dark: str
    hatch: bool = False


def _classes() -> tuple[ColourClass, ...]:
    phases = [ColourClass(name, *PHASE_COLOURS[name]) for name in ("forward", "backward", "recompute")]
    rest = [ColourClass(str(c), *CATEGORY_COLOURS[c], hatch=c == Category.WAIT) for c in Category]
    return (*phases, *rest)


CLASSES = _classes()
"""Index = the ``category`` of a span index: forward, backward and recompute, then the categories of events; waiting is hatched."""

_BY_NAME = {c.name: i for i, c in enumerate(CLASSES)}
_PHASES = {
    Phase.FORWARD.value: _BY_NAME["forward"],
    Phase.BACKWARD.value: _BY_NAME["backward"],
    Phase.BACKWARD_INPUT.value: _BY_NAME["backward"],
    Phase.BACKWARD_WEIGHT.value: _BY_NAME["backward"],
    Phase.RECOMPUTE.value: _BY_NAME["recompute"],
}
_OPS = {Op.FORWARD_STEP.value: _BY_NAME["forward"], Op.BACKWARD_STEP.value: _BY_NAME["backward"]}


def _one(category: str, op: str, phase: str) -> int:
    if category == Category.COMPUTE:
        return _PHASES.get(phase, _OPS.get(op, _BY_NAME["compute"]))
    return _BY_NAME.get(category, _BY_NAME["host"])


def class_of(events: xr.Dataset) -> np.ndarray[Any, Any]:
    """Return the colour class of each event.

    Parameters
    ----------
    events : Dataset, dims (event,)

    Returns
    -------
    uint8 array, shape (event,)
        Index into :data:`CLASSES`. A category that is not known, as from an importer, counts as host.
    """
    category, op, phase = (events[n].values for n in ("category", "op", "phase"))
    known: dict[tuple[str, str, str], int] = {}
    out = np.empty(len(category), np.uint8)
    for i, key in enumerate(zip(category.tolist(), op.tolist(), phase.tolist(), strict=True)):
        found = known.get(key)
        if found is None:
            found = known[key] = _one(*key)
        out[i] = found
    return out
