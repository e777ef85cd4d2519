"""Which cure for unequal microbatches saves most, where their lengths were recorded."""

from __future__ import annotations

from typing import NamedTuple

from mappnb.analysis.skew import skew_cures
from mappnb.errors import MappnbError
from mappnb.run import Run

__all__ = ["BestCure", "best_cure"]

WORDS: dict[str, tuple[str, str]] = {
    "balanced packing": (
        "pack documents anew, so that the microbatches of all data-parallel ranks cost alike (balanced packing)",
        "packing of the data set (the sampler)",
    ),
    "reordered microbatches": (
        "reorder the microbatches of each data-parallel rank by their cost; which documents they hold stays",
        "order in which the sampler deals microbatches",
    ),
}
"""What to do and what to change, by the names of :func:`mappnb.analysis.skew_cures`. The third, a context-parallel split by document, is a
bound (what it sends is free) and another layout: its price is told, and it is no action."""


class BestCure(NamedTuple):
    """The cure that saves most: what to do, what to change, its price, and the prices of all in words."""

    action: str
    target: str
    gain_s: float
    gain_fraction: float
    error_s: float
    prices: str


def best_cure(run: Run, step: int | slice | None) -> BestCure | None:
    """Return the cure of :func:`mappnb.analysis.skew_cures` that saves most; None if no lengths were recorded or none surely saves.

    Parameters
    ----------
    run : Run
        The run.
    step : int or slice, optional
        Steps to replay.
    """
    try:
        told = skew_cures(run, step=step)
    except MappnbError:
        return None
    able = told.sel(cure=list(WORDS))
    best = able.isel(cure=int(able["gain_s"].values.argmax()))
    gain = float(best["gain_s"])
    if not (bool(best["reliable_gain"]) and gain > 0):
        return None
    action, target = WORDS[str(best["cure"].values)]
    pairs = zip(told["cure"].values.tolist(), told["gain_s"].values.tolist(), strict=True)
    prices = "replayed with the recorded lengths: " + ", ".join(f"{name} {s:.3g} s a step" for name, s in pairs)
    error_s = float(told["replay_error"]) * float(told["step_s"].mean())
    return BestCure(action, target, gain, float(best["gain_fraction"]), error_s, prices)
