"""Verdicts that come and go while a self-time table grows: what is raised, what has changed, what is over."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from mappnb.analysis.stragglers import FALSE_DISCOVERY, judge
from mappnb.layout import Layout

__all__ = ["Change", "Judge", "Standing"]

RECENT = 64
"""Newest steps that are judged: noise of 1 % in a step is 0.13 % in their mean, and the cost of a look is bounded."""
REFERENCE = 32
"""Steps from the beginning that are judged beside them, so that a rank without peers that is slow for long has something to differ from."""
CLEAR_AFTER = 3
"""Steps in a row without excess after which a verdict is over: one more than what makes a spell (LEAST_SPELL), so that it does not flap."""
CLEAR_GAPS = 2
"""Of a rank that is slow now and then: as many times its longest pause so far must pass before it is over."""
FAST_DISCOVERY = 0.1
"""False discovery rate at which an effect of LARGE is told at once: two slow steps, where the usual rate needs three."""
RARE_DISCOVERY = 0.001
"""False discovery rate for slow steps that are scattered: they are looked for anew with each step, and the chances add up."""
WORTH = 0.1
"""Share of the step from which scattered slow steps are told while the job runs: one in five of them would cost 2 % of the time, and
noise resampled from real jobs makes smaller ones (one of 16 clean runs of 200 steps, of 5 %)."""
LARGE = 0.25
"""Share of the step from which two slow steps are enough: two steps that long are worth a look even if they are hiccups."""
RETOLD = 1.5
"""A standing verdict is told again when its effect has grown or shrunk by this factor, or its cause is another."""
SLOWER = 1.1
"""Steps this much longer than usual, that no self time explains, are looked at in detail (links show only there)."""
STRIDE = 16
"""Steps that are judged at once; one by one only where a verdict comes or goes within them, to say with which step."""

Details = Callable[[int, int], pd.DataFrame]
Key = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Standing:
    """A culprit as it stands.

    Attributes
    ----------
    subject_kind, subject, cause, evidence : str
        As :func:`mappnb.analysis.find_stragglers` says them.
    effect_s, effect_fraction : float
        Cost of a step in which it is slow, s, and over the median step.
    first_step, last_step : int
        First and last slow step so far.
    raised_step : int
        Newest step that had ended when it was raised.
    quiet_steps : int
        Steps without excess after which it is over.
    in_detail : bool
        The self-time table does not show it (a link): it stands as long as steps are longer than usual.
    scattered : bool
        Its slow steps come and go; they are no spell.
    """

    subject_kind: str
    subject: str
    cause: str
    evidence: str
    effect_s: float
    effect_fraction: float
    first_step: int
    last_step: int
    raised_step: int
    quiet_steps: int = CLEAR_AFTER
    in_detail: bool = False
    scattered: bool = False

    @property
    def key(self) -> Key:
        """Who it is."""
        return self.subject_kind, self.subject

    @property
    def worth(self) -> bool:
        """Whether slow steps now and then are worth an alarm."""
        return self.effect_fraction >= WORTH


@dataclass(frozen=True, slots=True)
class Change:
    """Something to be told.

    Attributes
    ----------
    event : str
        ``"raised"``, ``"changed"`` or ``"cleared"``.
    step : int
        Newest step that had ended.
    standing : Standing
        The verdict.
    why : str
        Of a change or an end: what is different.
    """

    event: str
    step: int
    standing: Standing
    why: str = ""


@dataclass
class Judge:
    """Judges a growing table, each step once, and keeps what stands.

    Attributes
    ----------
    layout : Layout
        Parallel layout.
    warm_up : int
        Steps at the beginning of each incarnation that are not judged.
    details : callable, optional
        ``details(first, last)`` gives find_stragglers() of these steps: for causes, and for links.
    standing : dict
        Culprits as they stand, by (subject_kind, subject).
    judged : int
        Newest step that was judged; -1 for none.
    """

    layout: Layout
    warm_up: int = 1
    details: Details | None = None
    standing: dict[Key, Standing] = field(default_factory=dict)
    judged: int = -1
    notes: tuple[str, ...] = ()
    _left_out: set[int] = field(default_factory=set)  # steps of warm-up, and of what is over
    _asked: int = -(10**9)
    _pause: int = 1
    _cause: dict[Key, str] = field(default_factory=dict)  # as the table had it last
    _size: dict[Key, float] = field(default_factory=dict)  # effect as it was told, s
    _over: dict[Key, int] = field(default_factory=dict)  # last slow step of what is over

    def restart(self, first_step: int) -> list[Change]:
        """Begin again with an incarnation of the job whose first step this is; what stood is over."""
        out = [Change("cleared", self.judged, s, "the job was restarted") for s in self.standing.values()]
        self.standing.clear()
        self.judged = first_step - 1
        self._left_out = {s for s in self._left_out if s < first_step}
        self._left_out |= set(range(first_step, first_step + self.warm_up))
        return out

    def advance(self, table: xr.Dataset, last: int) -> list[Change]:
        """Judge the steps up to ``last``, which have ended; return what is to be told.

        Parameters
        ----------
        table : Dataset, dims (step, rank, part)
            Self-time table (:func:`mappnb.analysis.work`); it may hold later steps.
        last : int
            Newest step that has ended.
        """
        steps = table["step"].values
        fresh = steps[(steps > self.judged) & (steps <= last)]
        if not len(fresh):
            return []
        if self.judged < 0:
            self._left_out |= set(range(int(fresh[0]), int(fresh[0]) + self.warm_up))
        out: list[Change] = []
        for at in range(0, len(fresh), STRIDE):
            out += self._stride(table, fresh[at : at + STRIDE].tolist())
        return out

    def _stride(self, table: xr.Dataset, steps: list[int]) -> list[Change]:
        """Judge some steps: at once, or one by one where something comes or goes."""
        rows = self._rows(table, steps[-1])
        comes = [r for k, r in rows.items() if k not in self.standing and r.last_step > steps[0] - CLEAR_AFTER]
        goes = any(k not in rows or rows[k].last_step < steps[-1] for k in self.standing)
        looks = not self.standing and self._pause == 1 and self._is_up(table, steps[-1])
        out: list[Change] = []
        earlier = steps[:-1] if comes or goes or looks else []
        if comes and not goes:  # nothing comes before its first slow step
            quiet = sum(s < min(r.first_step for r in comes) for s in earlier)
            if quiet > 1:
                out, earlier = self._stride(table, earlier[:quiet]), earlier[quiet:]
        for i, step in enumerate(earlier):
            told = self._take(table, step, self._rows(table, step))
            out += told
            if told and comes and len(earlier) - i > 1:
                return out + self._stride(table, steps[steps.index(step) + 1 :])
        return out + self._take(table, steps[-1], rows)

    # -------------------------------------------------------------------------------------------------- one step
    def _window(self, table: xr.Dataset, last: int) -> xr.Dataset:
        steps = table["step"].values
        usable = np.flatnonzero((steps <= last) & ~np.isin(steps, list(self._left_out)))
        recent = usable[-RECENT:]
        return table.isel(step=np.concatenate([usable[: max(0, min(REFERENCE, len(usable) - RECENT))], recent]))

    def _rows(self, table: xr.Dataset, last: int) -> dict[Key, Standing]:
        """Return the culprits of the window that ends with a step."""
        window = self._window(table, last)
        if not window.sizes["step"]:
            return {}
        found = self._found(window, last, FAST_DISCOVERY)
        small = [s for k, s in found.items() if k not in self.standing and (s.effect_fraction < LARGE or s.scattered)]
        if not small:  # what stands may go on at the lower rate: it does not flap
            return found
        known = self._found(window, last, FALSE_DISCOVERY)
        if any(s.scattered and k not in self.standing for k, s in known.items()):
            rare = self._found(window, last, RARE_DISCOVERY)
            known = {k: s for k, s in known.items() if not s.scattered or k in self.standing or (k in rare and s.worth)}
        unsure = {s.key for s in small}
        return {**{k: s for k, s in found.items() if k not in unsure}, **known}

    def _found(self, window: xr.Dataset, last: int, rate: float) -> dict[Key, Standing]:
        verdicts = judge(window, layout=self.layout, warm_up=0, false_discovery=rate)
        self.notes = tuple(verdicts.attrs.get("notes", ()))
        culprits = verdicts[verdicts["verdict"] == "culprit"].itertuples(index=False)
        found = (_standing(r, last) for r in culprits)
        return {s.key: replace(s, scattered=s.key in set(verdicts.attrs["scattered"])) for s in found}

    def _take(self, table: xr.Dataset, step: int, rows: dict[Key, Standing]) -> list[Change]:
        """Update what stands with the culprits of one step."""
        before = self.judged
        self.judged = step
        news = [r for k, r in rows.items() if k not in self.standing and r.last_step > step - CLEAR_AFTER]
        out = self._renamed(step, rows, news)
        for row in news:
            out.append(self._raise(step, row))
        up = self._is_up(table, step)
        for key, old in [*self.standing.items()]:
            if old.raised_step == step:
                continue
            now = replace(old, last_step=step) if old.in_detail and up else None
            out += self._go_on(step, before, old, rows.get(key, now))
        if up and not self.standing and not news:
            out += self._look(step)
        if not up:
            self._pause = 1
        return out

    def _raise(self, step: int, row: Standing) -> Change:
        pause = (row.last_step - row.first_step) // 3 if row.scattered else 0  # at least three slow steps
        since = row.first_step - self._over.get(row.key, -RECENT)
        pause = max(pause, since if since <= STRIDE else 0)
        row = replace(row, raised_step=step, quiet_steps=min(max(CLEAR_AFTER, CLEAR_GAPS * pause), RECENT))
        row = row if row.in_detail else self._explained(row, step)
        self.standing[row.key] = row
        self._size[row.key] = row.effect_s
        return Change("raised", step, row, "again" if row.key in self._over else "")

    def _explained(self, row: Standing, step: int) -> Standing:
        """Return a verdict with the cause and the evidence that events, metrics and telemetry give."""
        if self.details is None:
            return row
        found = self.details(max(row.first_step - STRIDE, 0), step)
        mine = found[(found["subject_kind"] == row.subject_kind) & (found["subject"] == row.subject)]
        if len(mine) and mine["verdict"].iloc[0] == "culprit":
            return replace(row, cause=str(mine["cause"].iloc[0]), evidence=str(mine["evidence"].iloc[0]))
        return row

    def _renamed(self, step: int, rows: dict[Key, Standing], news: list[Standing]) -> list[Change]:
        """Give a verdict its new name, where one subject has taken the place of another (a rank that turns out to be a host)."""
        out = []
        for old in [*self.standing.values()]:
            if old.key in rows or old.in_detail or old.last_step < step - 1:
                continue
            heir = next((r for r in news if r.subject_kind != old.subject_kind and r.first_step <= old.last_step), None)
            if heir is None:
                continue
            news.remove(heir)
            del self.standing[old.key]
            new = replace(heir, raised_step=old.raised_step, quiet_steps=old.quiet_steps)
            self.standing[new.key] = new
            self._size[new.key] = new.effect_s
            out.append(Change("changed", step, new, f"was {old.subject_kind} {old.subject}"))
        return out

    def _go_on(self, step: int, before: int, old: Standing, row: Standing | None) -> list[Change]:
        """Return what is to be told of a verdict that stands: nothing, that it is another, or that it is over."""
        seen = old.last_step if row is None else max(old.last_step, row.last_step)
        if seen > old.last_step:
            pause = max(0, before - old.last_step)
            old = replace(old, last_step=seen, quiet_steps=min(max(old.quiet_steps, CLEAR_GAPS * pause), RECENT))
            if row is not None:
                old = replace(old, effect_s=row.effect_s, effect_fraction=row.effect_fraction)
        self.standing[old.key] = old
        if step - seen >= old.quiet_steps:
            del self.standing[old.key]
            self._cause.pop(old.key, None)
            self._over[old.key] = seen
            self._left_out |= set(range(old.first_step, seen + 1))
            return [Change("cleared", step, old, f"no excess in {step - seen} steps")]
        return [] if row is None or row.last_step < step else self._again(step, old, row)

    def _again(self, step: int, old: Standing, row: Standing) -> list[Change]:
        """Tell a verdict again if it is another one: a new cause twice in a row, or an effect of another size."""
        twice = row.cause != old.cause and self._cause.get(old.key) == row.cause
        self._cause[old.key] = row.cause
        told = self._size.get(old.key, row.effect_s)
        size = row.effect_s / told if told > 0 else 1.0
        other_size = not 1 / RETOLD <= size <= RETOLD
        if self.details is not None and twice and not other_size:
            return []  # the cause that was told comes from a closer look
        if not (twice or other_size):
            return []
        new = replace(row, raised_step=old.raised_step, last_step=old.last_step, quiet_steps=old.quiet_steps)
        new = self._explained(new, step)
        if new.cause == old.cause and not other_size:
            return []
        self.standing[new.key] = new
        self._size[new.key] = new.effect_s
        return [
            Change("changed", step, new, f"effect {size:.2f} times what it was" if other_size else f"was {old.cause}")
        ]

    # ------------------------------------------------------------------------------------------- a closer look
    def _is_up(self, table: xr.Dataset, step: int) -> bool:
        """Return whether the newest steps are longer than the usual ones."""
        steps, length = table["step"].values, table["step_s"].values
        usable = np.flatnonzero((steps <= step) & ~np.isin(steps, list(self._left_out)))
        if len(usable) < 2 * CLEAR_AFTER:
            return False
        usual = float(np.median(length[usable[: -CLEAR_AFTER + 1 or None]]))
        usual = min(usual, float(np.quantile(length[usable], 0.25)) * 1.05)
        return bool(np.median(length[usable[-CLEAR_AFTER:]]) > SLOWER * usual)

    def _look(self, step: int) -> list[Change]:
        """Look at the newest steps in detail; less and less often while nothing is found."""
        if self.details is None or step - self._asked < self._pause:
            return []
        self._asked, self._pause = step, min(2 * self._pause, RECENT)
        found = self.details(max(step - STRIDE, 0), step)
        out = []
        for r in found[found["verdict"] == "culprit"].itertuples(index=False):
            row = replace(_standing(r, step), in_detail=True)
            if row.key not in self.standing and row.last_step > step - CLEAR_AFTER:
                out.append(self._raise(step, row))
        return out


def _standing(row: Any, step: int) -> Standing:
    return Standing(
        str(row.subject_kind), str(row.subject), str(row.cause), str(row.evidence), float(row.effect_s),
        float(row.effect_fraction), int(row.first_step), int(row.last_step), step,
    )  # fmt: skip
