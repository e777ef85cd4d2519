"""What the schedule lab compares: schedules by name, as they are, or as policies make them; and why one cannot be built."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mappnb.errors import MappnbError, ScheduleError, did_you_mean
from mappnb.sched.costs import Costs
from mappnb.sched.policies import POLICIES, simulate_policy
from mappnb.sched.registry import family, schedule, schedules
from mappnb.sched.schedule import Schedule
from mappnb.sched.stragglers import Straggler
from mappnb.widgets._lab_numbers import Limit, tables_of

__all__ = ["Builder", "Entry", "Sizes", "choices", "entries_of"]

EntryLike = str | tuple[str, Mapping[str, Any]] | Schedule
_KEPT = 64


@dataclass(frozen=True, slots=True)
class Sizes:
    """Pipeline ranks, microbatches of a step, and chunks per rank where a schedule leaves them open."""

    num_ranks: int
    num_microbatches: int
    num_chunks: int


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """One schedule of the lab.

    Attributes
    ----------
    label : str
        What it is called in the view; unique in a lab.
    name : str
        Of a registered schedule or policy; empty for one that was given.
    options : mapping
        Of the family or policy.
    given : Schedule, optional
        A schedule that was given, whatever the sizes.
    """

    label: str
    name: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    given: Schedule | None = None

    @property
    def is_policy(self) -> bool:
        """Whether its order is made while it runs."""
        return self.name in _policies()

    @property
    def code(self) -> str:
        """The entry as it is written in Python; a schedule that was given by its label as a variable."""
        if self.given is not None:
            word = re.sub(r"\W+", "_", self.label).strip("_")
            return word if word.isidentifier() else f"schedule_{word}"
        return repr((self.name, dict(self.options))) if self.options else repr(self.name)


def _policies() -> tuple[str, ...]:
    return tuple(p for p in POLICIES if p != "hint")


def choices() -> tuple[str, ...]:
    """Return every name that can be compared: registered schedules, then policies."""
    return (*schedules(), *_policies())


def entries_of(wanted: Iterable[EntryLike]) -> tuple[Entry, ...]:
    """Return the entries for what was asked for, each with a label of its own.

    Raises
    ------
    ScheduleError
        If a name is unknown, or something is neither a name, a (name, options) pair nor a schedule.
    """
    out: list[Entry] = []
    if isinstance(wanted, (str, Schedule)):
        wanted = (wanted,)
    for value in wanted:
        entry = _entry(value)
        taken = {e.label for e in out}
        number, label = 2, entry.label
        while label in taken:
            label, number = f"{entry.label} ({number})", number + 1
        out.append(Entry(label, entry.name, entry.options, entry.given))
    return tuple(out)


def _entry(value: Any) -> Entry:
    if isinstance(value, Entry):
        return value
    if isinstance(value, Schedule):
        return Entry(value.name or "schedule", given=value)
    name, options = (
        (value, {}) if isinstance(value, str) else (*value, {})[:2] if isinstance(value, tuple) else ("", {})
    )
    if not isinstance(name, str) or not name or not isinstance(options, Mapping):
        raise ScheduleError(f"schedules: {value!r:.80}; expected a name, a pair (name, options) or a Schedule")
    if name not in choices():
        raise ScheduleError(f"unknown schedule {name!r}; known: {', '.join(choices())}{did_you_mean(name, choices())}")
    said = ", ".join(f"{k}={v}" for k, v in options.items())
    return Entry(f"{name} ({said})" if said else name, name, dict(options))


class Builder:
    """Makes the schedules of entries, and keeps those that do not depend on the costs."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, str, Sizes], Schedule | ScheduleError] = {}

    def build(
        self,
        entry: Entry,
        sizes: Sizes,
        costs: Costs,
        *,
        stragglers: Sequence[Straggler] = (),
        seed: int | None = None,
        limit: Limit = None,
    ) -> Schedule:
        """Return the valid schedule of an entry.

        Raises
        ------
        MappnbError
            If it cannot run with these sizes or, for a policy, in this memory.
        """
        if entry.is_policy:
            return _by_policy(entry, sizes, costs, stragglers, seed, limit)
        key = (entry.label, repr(sorted(entry.options.items())), sizes)
        if key not in self._kept:
            if len(self._kept) >= _KEPT:
                del self._kept[next(iter(self._kept))]
            try:
                self._kept[key] = _made(entry, sizes)
            except ScheduleError as err:
                self._kept[key] = err
        found = self._kept[key]
        if isinstance(found, ScheduleError):
            raise found
        return found

    def clear(self) -> None:
        """Let go of the schedules."""
        self._kept.clear()


def _made(entry: Entry, sizes: Sizes) -> Schedule:
    if entry.given is not None:
        return entry.given.validate()
    options = dict(entry.options)
    chunks = options.pop("num_chunks", family(entry.name).chunks or sizes.num_chunks)
    return schedule(
        entry.name,
        num_stages=sizes.num_ranks * chunks,
        num_microbatches=sizes.num_microbatches,
        num_chunks=chunks,
        **options,
    ).validate()


def _by_policy(
    entry: Entry, sizes: Sizes, costs: Costs, stragglers: Sequence[Straggler], seed: int | None, limit: Limit
) -> Schedule:
    """Return the order that a policy makes of the costs with their stragglers and draws, under the memory limit."""
    options = {"num_chunks": sizes.num_chunks, **entry.options}
    stages = sizes.num_ranks * int(options["num_chunks"])
    common: dict[str, Any] = {"num_stages": stages, "num_microbatches": sizes.num_microbatches, **options}
    first = simulate_policy(entry.name, costs=costs, **common).schedule
    tables = tables_of(first, costs, stragglers=stragglers, seed=seed)
    if limit is not None:
        room = np.asarray(limit, np.float64) - tables.static_memory
        if (room <= 0).any():
            raise MappnbError(f"{entry.name}: static memory alone is above the memory limit")
        common["memory_limit"] = room
    return simulate_policy(entry.name, costs=tables, **common).schedule.validate()
