"""Schedules by name: one generator per family registers itself here."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

from mappnb.errors import ScheduleError, did_you_mean
from mappnb.sched.codes import MAX_MICROBATCHES, MAX_STAGES
from mappnb.sched.schedule import Schedule

__all__ = [
    "FAMILIES",
    "Family",
    "family",
    "positive",
    "register",
    "require_multiple",
    "schedule",
    "schedules",
    "too_large",
    "whole_number",
]

Generator = Callable[..., Schedule]
FAMILIES: tuple[str, ...] = (
    "gpipe",
    "one_f_one_b",
    "interleaved",
    "breadth_first",
    "depth_first",
    "zero_bubble",
    "interleaved_zero_bubble",
    "v_shape",
    "dualpipe",
    "disaggregated",
)
"""Modules of this package that register schedules."""


class Family(NamedTuple):
    """A registered schedule.

    Attributes
    ----------
    name : str
        The name it is asked for by.
    build : callable
        ``build(num_stages=, num_microbatches=, num_chunks=, **options) -> Schedule``; ``num_chunks`` only where it can be chosen.
    chunks : int or None
        The number of chunks per rank, or None where it can be chosen.
    options : tuple of str
        Names of the options beside the sizes.
    """

    name: str
    build: Generator
    chunks: int | None

    options: tuple[str, ...]


_REGISTRY: dict[str, Family] = {}


def register(name: str, *, chunks: int | None = 1) -> Callable[[Generator], Generator]:
    """Register a generator under ``name``; ``chunks=None`` lets the number of chunks be chosen (``num_chunks`` is then passed on)."""

    def add(build: Generator) -> Generator:
        known = inspect.signature(build).parameters
        options = tuple(n for n in known if n not in ("num_stages", "num_microbatches", "num_chunks"))
        _REGISTRY[name] = Family(name, build, chunks, options)
        return build

    return add


def schedules() -> tuple[str, ...]:
    """Return the names of all registered schedules, sorted."""
    _load()
    return tuple(sorted(_REGISTRY))


def family(name: str) -> Family:
    """Return the registered family ``name``.

    Raises
    ------
    ScheduleError
        If there is none; the message lists the known ones.
    """
    _load()
    if name not in _REGISTRY:
        raise ScheduleError(
            f"unknown schedule {name!r}; known: {', '.join(sorted(_REGISTRY))}{did_you_mean(name, _REGISTRY)}"
        )
    return _REGISTRY[name]


def schedule(
    name: str, *, num_stages: int, num_microbatches: int, num_chunks: int | None = None, **options: Any
) -> Schedule:
    """Return the registered schedule ``name``.

    Parameters
    ----------
    name : str
        One of :func:`schedules`.
    num_stages : int
        Stages of the model: pipeline ranks × chunks per rank.
    num_microbatches : int
        Microbatches of a step.
    num_chunks : int, optional
        Model chunks per rank (virtual pipeline size): what the family fixes (2 for the V-shaped ones), else 1 by default.
    **options
        Further options of the family, such as ``group_size`` of ``interleaved``.

    Returns
    -------
    Schedule
        Complete and free of deadlock.

    Raises
    ------
    ScheduleError
        If the name or an option is unknown, or the sizes do not fit the family's rule; the message names values that do.
    """
    found = family(name)
    positive("num_stages", num_stages)
    positive("num_microbatches", num_microbatches)
    unknown = [o for o in options if o not in found.options]
    if unknown:
        known = ", ".join(found.options) or "none"
        raise ScheduleError(
            f"{name}: unknown option {unknown[0]!r}; known: {known}{did_you_mean(unknown[0], found.options)}"
        )
    chunks = num_chunks if num_chunks is not None else (found.chunks or 1)
    positive("num_chunks", chunks)
    if found.chunks is not None and chunks != found.chunks:
        raise ScheduleError(f"{name}: num_chunks is {chunks}; this schedule has {found.chunks} per rank")
    require_multiple(name, "num_stages", num_stages, chunks, "num_chunks")
    sizes = {"num_stages": num_stages, "num_microbatches": num_microbatches}
    if found.chunks is None:
        sizes["num_chunks"] = chunks
    return found.build(**sizes, **options)


def positive(what: str, value: object) -> int:
    """Return ``value`` if it is a whole number of at least 1, else raise ScheduleError."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ScheduleError(f"{what} is {value!r}; expected a whole number of at least 1")
    number = int(value.__index__())
    if number < 1:
        raise ScheduleError(f"{what} is {number}; expected at least 1")
    return number


def whole_number(what: str, value: object) -> int:
    """Return ``value`` if it is a whole number of at least 0, else raise ScheduleError."""
    if isinstance(value, bool) or not hasattr(value, "__index__") or int(value.__index__()) < 0:
        raise ScheduleError(f"{what} is {value!r}; expected a whole number of at least 0")
    return int(value.__index__())


def require_multiple(name: str, what: str, value: int, of: int, of_what: str) -> None:
    """Raise ScheduleError unless ``value`` is a multiple of ``of``; the message names the nearest values that are."""
    if value % of:
        low = value // of * of
        near = f"{low} or {low + of}" if low else str(of)
        raise ScheduleError(f"{name}: {what} is {value}; it must be a multiple of {of_what} ({of}), such as {near}")


def too_large(name: str, stages: int, microbatches: int) -> None:
    """Raise ScheduleError if the sizes are beyond what the code of an action can hold."""
    if stages > MAX_STAGES or microbatches > MAX_MICROBATCHES:
        raise ScheduleError(
            f"{name}: {stages} stages and {microbatches} microbatches; at most {MAX_STAGES} stages and {MAX_MICROBATCHES} microbatches"
        )


@cache
def _load() -> None:
    for module in FAMILIES:
        importlib.import_module(f"mappnb.sched.{module}")
