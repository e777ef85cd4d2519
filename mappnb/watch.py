"""Follow a run while its job goes on: steps, verdicts as they come and go, its end. In a terminal, as JSON lines, in a notebook."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, TextIO

import pandas as pd

from mappnb._watch_feed import Feed, Look
from mappnb._watch_judge import Change, Judge, Standing
from mappnb._watch_show import shown_on
from mappnb.analysis import find_stragglers
from mappnb.analysis._work_live import GONE_S
from mappnb.display import layout_told
from mappnb.errors import MappnbError, NotARunError
from mappnb.run import Run, attach

__all__ = ["Watcher", "watch"]

CPU_SHARE = 0.007
"""Share of one core that looking takes: the pause between looks follows from what they cost. 1 % is allowed, and not all is in looks."""
LEAST_PAUSE_S = 1.0
"""Least time between two looks, s: a recorder writes once a second."""
RECENT_LOOKS, PAID_BACK = 5, 3.0
"""The pause is at most this many times what the median of so many looks asks for."""
STOPPED_AFTER_S = 60.0
"""Time without any change on disk after which a run that has not told its end counts as stopped, s: a live recorder writes each second."""
STALLED_STEPS = 10.0
"""Usual lengths of a step without the end of one, after which a job counts as stalled."""


class Watcher:
    """Looks at a live run and says what is new: each look gives events, plain dictionaries.

    Parameters
    ----------
    run : Run or path
        The run, or its folder. The watcher opens it for itself: what is on disk is read only, and the run given is left alone.
    details : bool
        Look at events where a verdict is raised or steps are long for no reason (links and causes show only there).
    stopped_after_s : float
        See :data:`STOPPED_AFTER_S`.
    gone_s : float
        A rank that has written nothing for so long is not waited for, s.

    Attributes
    ----------
    run : Run
        The watcher's own.
    num_steps : int
        Steps that have ended and were seen.
    over : bool
        The run has ended or stopped.
    exit_code : int
        0: nothing stands and the run is in good order; 1: a culprit stands, a rank failed or is degraded, or the run stopped.
    """

    def __init__(
        self,
        run: Run | str | os.PathLike[str],
        *,
        details: bool = True,
        stopped_after_s: float = STOPPED_AFTER_S,
        gone_s: float = GONE_S,
    ) -> None:
        self.run = attach(run.path if isinstance(run, Run) else run)
        if isinstance(run, Run) and run.clock_model is not self.run.clock_model:
            self.run.use_clock(run._chosen)
        self.stopped_after_s = stopped_after_s
        self.num_steps, self.last_step = 0, -1
        self.over = False
        self.state = "waiting"
        self.cpu_s: list[float] = []
        self._feed = Feed(self.run, gone_s=gone_s)
        self._judge = Judge(self.run.layout, details=self._details if details else None)
        self._incarnation = -1
        self._degraded: dict[int, str] = {}
        self._failed: dict[int, str] = {}
        self._usual_s = float("nan")
        self._newest_s = self._began_s = time.monotonic()
        self._stalled = False

    # ------------------------------------------------------------------------------------------------------ looking
    def look(self) -> list[dict[str, Any]]:
        """Look once; return what is new, the oldest first: dictionaries with ``event`` and what belongs to it."""
        began = time.process_time()
        out = self._news(self._feed.look())
        self.cpu_s.append(time.process_time() - began)
        if len(self.cpu_s) == 1:
            self._began_s = time.monotonic()
        return out

    def _news(self, look: Look) -> list[dict[str, Any]]:
        out: list[dict[str, Any]] = []
        if look.state == "waiting":
            return []
        if self._incarnation < 0:
            out.append(self._start(look))
            self._judge.layout = self.run.layout
        elif look.incarnation != self._incarnation:
            if look.first_step < 0:
                return []  # told with its first step
            out += self._restart(look)
        self._incarnation = look.incarnation
        out += self._ranks(look)
        out += self._steps(look)
        return out + self._state(look)

    def _start(self, look: Look) -> dict[str, Any]:
        meta = self.run.meta
        return {
            "event": "start", "run_id": meta["run_id"], "path": self.run.path,
            "layout": str(self.run.layout) if layout_told(self.run) else None,
            "world_size": look.world_size, "incarnation": look.incarnation,
        }  # fmt: skip

    def _restart(self, look: Look) -> list[dict[str, Any]]:
        """Begin again with a new incarnation."""
        self._judge.layout = self.run.layout
        self.last_step, self._newest_s = look.first_step - 1, time.monotonic()
        self._degraded, self._failed, self._stalled = {}, {}, False
        over = [_told(c) for c in self._judge.restart(look.first_step)]
        return [
            *over,
            {
                "event": "restart",
                "incarnation": look.incarnation,
                "step": look.first_step,
                "world_size": look.world_size,
            },
        ]

    def _ranks(self, look: Look) -> list[dict[str, Any]]:
        out = []
        for name, found, known in (("degraded", look.degraded, self._degraded), ("failed", look.failed, self._failed)):
            out += [{"event": name, "rank": r, "why": why} for r, why in found.items() if r not in known]
            known.update(found)
        return out

    def _steps(self, look: Look) -> list[dict[str, Any]]:
        """Return the steps that ended since the last look, each with the verdicts that came or went with it."""
        if look.table is None or look.last <= self.last_step:
            return []
        self._judge.layout = self.run.layout  # ranks may have told it since
        changes: dict[int, list[Change]] = {}
        for change in self._judge.advance(look.table, look.last):
            changes.setdefault(change.step, []).append(change)
        out: list[dict[str, Any]] = []
        steps, length = look.table["step"].values.tolist(), look.table["step_s"].values
        for i, step in enumerate(steps):
            if not self.last_step < step <= look.last:
                continue
            out.append({"event": "step", "step": step, "step_s": float(length[i])})
            out += [_told(c) for c in changes.get(step, ())]
            self.num_steps += 1
        self._usual_s = float(pd.Series(length).median())
        self.last_step, self._newest_s = look.last, time.monotonic()
        if self._stalled:
            out.insert(0, {"event": "resumed", "step": look.last})
            self._stalled = False
        return out

    def _state(self, look: Look) -> list[dict[str, Any]]:
        self.state, quiet_s = look.state, look.quiet_s
        if look.state == "ended":
            self.over = True
        elif quiet_s > self.stopped_after_s:
            self.state, self.over = "stopped", True
        silent = time.monotonic() - self._newest_s
        if self.over or self._stalled or self.num_steps < 2:
            return []
        if silent > max(self.stopped_after_s, STALLED_STEPS * self._usual_s):
            self._stalled = True
            return [{"event": "stalled", "step": self.last_step, "silent_s": silent, "usual_step_s": self._usual_s}]
        return []

    def _details(self, first: int, last: int) -> pd.DataFrame:
        return find_stragglers(self._feed.near(first), step=slice(first, last))

    # ------------------------------------------------------------------------------------------------------ standing
    @property
    def standing(self) -> tuple[Standing, ...]:
        """Culprits as they stand, the largest effect first."""
        return tuple(sorted(self._judge.standing.values(), key=lambda s: -s.effect_s))

    @property
    def verdicts(self) -> pd.DataFrame:
        """Culprits as they stand: the columns of :func:`mappnb.analysis.find_stragglers`, and ``raised_step``."""
        columns = [
            "subject_kind",
            "subject",
            "verdict",
            "cause",
            "effect_s",
            "effect_fraction",
            "first_step",
            "last_step",
        ]
        rows = [{**{c: getattr(s, c, "culprit") for c in [*columns, "evidence", "raised_step"]}} for s in self.standing]
        return pd.DataFrame(rows, columns=[*columns, "evidence", "raised_step"])

    @property
    def exit_code(self) -> int:
        """See the class."""
        return int(bool(self.standing or self._degraded or self._failed or self.state == "stopped" or self._stalled))

    @property
    def pause_s(self) -> float:
        """How long to wait before the next look, s, so that looking takes CPU_SHARE of one core.

        The first look, which reads what was there before, is not counted. A look that costs more, because a verdict is looked into, is
        paid back over the next ones.
        """
        later = self.cpu_s[1:]
        if not later:
            return LEAST_PAUSE_S
        owed = sum(later) / CPU_SHARE - (time.monotonic() - self._began_s)
        return max(LEAST_PAUSE_S, min(owed, PAID_BACK * median(later[-RECENT_LOOKS:]) / CPU_SHARE))

    def end(self, why: str) -> dict[str, Any]:
        """Return the last event: why the watch ended, and what stands."""
        return {
            "event": "end", "why": why, "state": self.state, "step": self.last_step, "num_steps": self.num_steps,
            "standing": [_subject(s) for s in self.standing], "exit_code": self.exit_code,
            "looks": len(self.cpu_s), "cpu_s": sum(self.cpu_s),
        }  # fmt: skip


def _subject(s: Standing) -> dict[str, Any]:
    return {
        "subject_kind": s.subject_kind, "subject": s.subject, "verdict": "culprit", "cause": s.cause, "effect_s": s.effect_s,
        "effect_fraction": s.effect_fraction, "first_step": s.first_step, "last_step": s.last_step,
        "raised_step": s.raised_step, "evidence": s.evidence,
    }  # fmt: skip


def _told(change: Change) -> dict[str, Any]:
    out = {"event": change.event, "step": change.step, **_subject(change.standing)}
    return {**out, "why": change.why} if change.why else out


def watch(
    run_dir: str | os.PathLike[str],
    *,
    out: TextIO | None = None,
    as_json: bool = False,
    once: bool = False,
    interval_s: float | None = None,
    until_step: int | None = None,
    timeout_s: float | None = None,
    wait: bool = False,
    stopped_after_s: float = STOPPED_AFTER_S,
    details: bool = True,
) -> int:
    """Follow a run and write what happens, until it ends; return the exit status of the command.

    Parameters
    ----------
    run_dir : path
        The run directory.
    out : text file, optional
        Where to write; standard output by default. On a terminal a status line is kept up to date.
    as_json : bool
        One JSON object per line for each step, verdict and end.
    once : bool
        Judge what is there and return.
    interval_s : float, optional
        Time between looks, s; by default as short as 1 % of one core allows, at least a second.
    until_step : int, optional
        Return when this step has ended.
    timeout_s : float, optional
        Return after this time, s.
    wait : bool
        Wait for the run directory to come into being.
    stopped_after_s : float
        Time without any change on disk after which the run counts as stopped, s.
    details : bool
        See :class:`Watcher`.

    Returns
    -------
    int
        0: nothing stands at the end, every rank is in order and the run has not stopped without an end; 1 otherwise.

    Raises
    ------
    NotARunError
        If there is no run, and ``wait`` is not given.
    MappnbError
        If a number is out of range.
    """
    for name, value in (("interval", interval_s), ("timeout", timeout_s), ("stopped-after", stopped_after_s)):
        if value is not None and not value > 0:
            raise MappnbError(f"watch: {name} is {value!r}; expected a number of seconds above 0")
    show = shown_on(out or sys.stdout, as_json=as_json)
    end_s = time.monotonic() + (timeout_s if timeout_s is not None else float("inf"))
    watcher, why = None, "interrupted"
    try:
        watcher = _opened(run_dir, wait, end_s, stopped_after_s, details)
        if watcher is None:
            show.events([{"event": "end", "why": "timeout", "state": "waiting", "exit_code": 1}])
            return 1
        why = _follow(watcher, show.events, once, interval_s, until_step, end_s)
    except KeyboardInterrupt:
        pass
    show.events([watcher.end(why) if watcher else {"event": "end", "why": why, "state": "waiting", "exit_code": 1}])
    return watcher.exit_code if watcher else 1


def _opened(
    run_dir: str | os.PathLike[str], wait: bool, end_s: float, stopped_after_s: float, details: bool
) -> Watcher | None:
    """Return the watcher of a run that is there, or comes into being in time; None if it does not."""
    while True:
        try:
            return Watcher(run_dir, details=details, stopped_after_s=stopped_after_s)
        except NotARunError:
            if not wait or (Path(run_dir).exists() and any(Path(run_dir).glob("*/run.json"))):
                raise
        if time.monotonic() >= end_s:
            return None
        time.sleep(min(LEAST_PAUSE_S, max(0.0, end_s - time.monotonic())))


def _follow(
    watcher: Watcher,
    tell: Callable[[list[dict[str, Any]]], None],
    once: bool,
    interval_s: float | None,
    until_step: int | None,
    end_s: float,
) -> str:
    """Look until there is a reason to end; return it."""
    while True:
        tell(watcher.look())
        if once:
            return "once"
        if watcher.over:
            return watcher.state
        if until_step is not None and watcher.last_step >= until_step:
            return "step"
        if time.monotonic() >= end_s:
            return "timeout"
        pause_s = watcher.pause_s if interval_s is None else interval_s
        time.sleep(min(pause_s, max(0.0, end_s - time.monotonic())))
