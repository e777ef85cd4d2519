"""The schedule lab without a screen: entries, settings, and what comes of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from mappnb.errors import MappnbError
from mappnb.run import Run
from mappnb.sched.costs import Costs
from mappnb.sched.fit import fit_costs
from mappnb.sched.idle import PHASES
from mappnb.sched.schedule import Schedule
from mappnb.sched.stragglers import Straggler
from mappnb.widgets._lab_entries import Builder, Entry, Sizes
from mappnb.widgets._lab_lanes import Lane, lane_of, lane_of_recorded
from mappnb.widgets._lab_numbers import Numbers, lab_columns, too_much
from mappnb.widgets._lab_recorded import Recorded, recorded_of
from mappnb.widgets._lab_settings import Settings, adjusted

__all__ = ["REPLAY", "LabModel", "Outcome", "Replay"]

_LARGE = 0.1
"""A replay error above it is called large: published simulators err by 1 to 8 %."""
REPLAY = "replay"
"""Label of the replay of the recorded schedule."""


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """What came of one entry: numbers, or why there are none; and why it does not fit the memory."""

    entry: Entry
    numbers: Numbers | None
    why: str = ""

    @property
    def fits(self) -> bool:
        """Whether it can run, in the memory there is."""
        return self.numbers is not None and not self.why


@dataclass(frozen=True, slots=True)
class Replay:
    """How well the recorded schedule, replayed with the measured costs, hits the recorded steps.

    Attributes
    ----------
    recorded_s, replayed_s : float
        Median of the recorded steps, and the replay, first start to last end of the actions, s.
    spread : float
        Half the distance of the quartiles of the recorded steps over their median.
    """

    recorded_s: float
    replayed_s: float
    spread: float
    num_steps: int

    @property
    def error(self) -> float:
        """Replayed over recorded, minus 1."""
        return self.replayed_s / self.recorded_s - 1 if self.recorded_s else 0.0

    @property
    def resolution(self) -> float:
        """The smallest relative difference that means anything: the error of the replay, or the spread of the steps if that is larger."""
        return max(abs(self.error), self.spread)

    def says(self) -> str:
        """Return it in a sentence."""
        return (
            f"Replayed with the measured costs, the recorded schedule takes {self.replayed_s * 1e3:.4g} ms; recorded were "
            f"{self.recorded_s * 1e3:.4g} ms (median of {self.num_steps} steps): replay error {self.error:+.1%}. "
            f"Differences below {self.resolution:.1%} are not told apart."
        )


class LabModel:
    """Entries at settings. Computes on :meth:`update` only.

    Attributes
    ----------
    base : Costs
        As given or fitted.
    costs : Costs
        With the knobs where the settings say.
    outcomes : list of Outcome
        In the order of the entries.
    recorded : Recorded or None
    replay : Replay or None
    """

    def __init__(
        self,
        base: Costs,
        entries: Sequence[Entry],
        settings: Settings,
        *,
        sizes: Sizes,
        stragglers: Sequence[Straggler] = (),
        recorded: Recorded | None = None,
    ) -> None:
        self.base, self.settings, self.sizes, self.fixed = base, settings, sizes, tuple(stragglers)
        self.recorded = recorded
        self._builder = Builder()
        self._whys: dict[str, tuple[tuple[Schedule, bytes, bytes], str]] = {}
        self.replay = self._replay()
        first = (
            [Entry(REPLAY, given=recorded.schedule)] if recorded is not None and recorded.schedule is not None else []
        )
        self.entries = (*first, *entries)
        self.outcomes: list[Outcome] = []
        self.costs = base
        self.update(settings)

    @classmethod
    def measured(cls, run: Run | xr.Dataset, costs: Costs | None, step: int | None) -> tuple[Costs, Recorded]:
        """Return the costs of a run (or those given) and its recorded step."""
        return (fit_costs(run) if costs is None else costs), recorded_of(run, step)

    def _replay(self) -> Replay | None:
        """Return the replay at the measured costs, whatever the knobs say."""
        recorded = self.recorded
        if recorded is None or recorded.schedule is None:
            return None
        replayed = lab_columns(recorded.schedule, self.base).actions_s
        return Replay(recorded.median_s, replayed, recorded.spread, len(recorded.steps))

    # ---------------------------------------------------------------------------------------------------- computing
    @property
    def stragglers(self) -> tuple[Straggler, ...]:
        """Those given, and the one of the knobs."""
        mine = self.settings.slow.straggler(self.sizes.num_ranks)
        return (*self.fixed, *([] if mine is None else [mine]))

    def update(self, settings: Settings) -> None:
        """Compute every entry at new settings."""
        self.settings = settings
        self.sizes = replace(self.sizes, num_microbatches=settings.num_microbatches)
        self.costs = adjusted(self.base, settings.adjust)
        self.outcomes = [self._outcome(entry) for entry in self.entries]

    def choose(self, entries: Sequence[Entry]) -> None:
        """Compare other entries; the replay stays."""
        kept = [e for e in self.entries if e.label == REPLAY and e.given is not None and self.recorded is not None]
        self.entries = (*kept, *entries)

    def _outcome(self, entry: Entry) -> Outcome:
        settings, stragglers = self.settings, self.stragglers
        limit = settings.memory_limit
        try:
            schedule: Schedule = self._builder.build(
                entry, self.sizes, self.costs, stragglers=stragglers, seed=settings.seed, limit=limit
            )
            numbers = lab_columns(schedule, self.costs, stragglers=stragglers, seed=settings.seed)
            return Outcome(entry, numbers, self._too_much(entry.label, numbers))
        except (MappnbError, ValueError) as err:
            return Outcome(entry, None, str(err))

    def _too_much(self, label: str, numbers: Numbers) -> str:
        """Return why it does not fit; looked for once while order, peaks and limit stay the same."""
        limit = self.settings.memory_limit
        key = (numbers.schedule, numbers.peak_memory.tobytes(), np.asarray(limit, np.float64).tobytes())
        known = self._whys.get(label)
        if known is None or known[0][0] is not key[0] or known[0][1:] != key[1:]:
            known = self._whys[label] = (key, too_much(numbers, limit))
        return known[1]

    # ------------------------------------------------------------------------------------------------------ looking
    @property
    def longest_s(self) -> float:
        """Length of the common time axis, s."""
        ends = [o.numbers.step_s for o in self.outcomes if o.numbers is not None]
        return max([*ends, self.recorded.step_s if self.recorded is not None else 0.0], default=0.0)

    def lanes(self) -> list[Lane]:
        """Return a lane for the recorded step and for each entry, in that order."""
        out = [lane_of_recorded(self.recorded)] if self.recorded is not None else []
        return out + [
            lane_of(o.entry.label, o.numbers) if o.numbers is not None else Lane.empty(o.entry.label, o.why)
            for o in self.outcomes
        ]

    def find(self, label: str) -> Outcome | None:
        """Return the outcome of an entry by its label."""
        return next((o for o in self.outcomes if o.entry.label == label), None)

    @property
    def reference(self) -> Outcome | None:
        """What the others are compared with: the replay of what was recorded, else the first that runs."""
        return next((o for o in self.outcomes if o.numbers is not None), None)

    def says(self, *, given: bool) -> str:
        """Return how far the numbers can be trusted, in words; empty without a run. ``given``: the costs were not measured here."""
        if self.recorded is None:
            return ""
        if self.replay is None:
            return f"The recorded schedule cannot be replayed, so that nothing tells how far the numbers hold: {self.recorded.why}"
        hint = " Where durations vary, means may replay better than medians: ScheduleLab(mappnb.fit_costs(run, statistic='mean'), run=run)."
        return self.replay.says() + (hint if not given and abs(self.replay.error) > _LARGE else "")

    def release(self) -> None:
        """Let go of schedules and numbers."""
        self._builder.clear()
        self._whys.clear()
        self.outcomes, self.recorded = [], None

    def frame(self) -> pd.DataFrame:
        """Return one row per entry; NaN where it cannot run, and ``why`` then says so."""
        rows = [_row(o) for o in self.outcomes]
        table = pd.DataFrame(rows, index=pd.Index([o.entry.label for o in self.outcomes], name="schedule"))
        reference = self.reference
        if reference is not None and reference.numbers is not None and reference.numbers.step_s:
            table.insert(1, "change", table["step_s"] / reference.numbers.step_s - 1)
        else:
            table.insert(1, "change", np.nan)
        if self.replay is not None:
            table.attrs["replay_error"] = self.replay.error
            table.attrs["resolution"] = self.replay.resolution
        return table


def _row(outcome: Outcome) -> dict[str, Any]:
    n = outcome.numbers
    names = ("step_s", "span_s", "bubble_fraction", "span_bubble_fraction", "critical_path_s", "transfer_s", "busy_s")
    row: dict[str, Any] = {name: np.nan if n is None else getattr(n, name) for name in names}
    for i, phase in enumerate(PHASES):
        row[f"{phase}_s"] = np.nan if n is None else float(n.idle_s[i])
    row["peak_activation"] = np.nan if n is None else float(n.memory.peak.max(initial=0.0))
    row["peak_memory"] = np.nan if n is None else float(n.peak_memory.max(initial=0.0))
    edge = None if n is None else n.tightest
    row["edge"] = "" if edge is None else f"{edge[0]}→{edge[1]}"
    row["edge_slack_s"] = np.nan if edge is None else edge[2]
    row["num_ranks"] = 0 if n is None else n.schedule.num_ranks
    row["fits"] = outcome.fits
    row["why"] = outcome.why
    return row
