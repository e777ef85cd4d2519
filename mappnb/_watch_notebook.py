"""``run.watch()``: a live run followed from a notebook cell that keeps itself up to date."""

from __future__ import annotations

import html
import importlib
import threading
from statistics import median
from typing import Any

import pandas as pd

from mappnb._watch_show import sentence
from mappnb.errors import MappnbError
from mappnb.run import Run
from mappnb.watch import STOPPED_AFTER_S, Watcher

__all__ = ["LiveWatch", "watch_run"]

SHOWN = 6
"""Newest changes that the cell shows."""
HISTORY = (
    "step", "event", "subject_kind", "subject", "cause", "effect_s", "effect_fraction", "first_step", "last_step", "why", "evidence",
)  # fmt: skip


def watch_run(run: Run, **options: Any) -> LiveWatch:
    """Follow a live run in the background; see :class:`LiveWatch`."""
    return LiveWatch(run, **options)


class LiveWatch:
    """Follows a live run by a thread of its own, and shows in the cell who is slow now. Ends with the run, or by :meth:`stop`.

    Parameters
    ----------
    run : Run
        The run. It is opened once more: this object reads nothing through the run given, and nothing is written.
    interval_s : float, optional
        Time between looks, s; by default as short as 1 % of one core allows, at least a second.
    details : bool
        Look at events where a verdict is raised (causes, links).
    stopped_after_s : float
        Time without any change on disk after which the run counts as stopped, s.

    Raises
    ------
    MappnbError
        If the interval is not above 0.

    Examples
    --------
    >>> watch = run.watch()  # doctest: +SKIP
    >>> watch.verdicts       # doctest: +SKIP
    >>> watch.stop()         # doctest: +SKIP
    """

    def __init__(
        self,
        run: Run,
        *,
        interval_s: float | None = None,
        details: bool = True,
        stopped_after_s: float = STOPPED_AFTER_S,
    ) -> None:
        if interval_s is not None and not interval_s > 0:
            raise MappnbError(f"watch: interval_s is {interval_s!r}; expected a number of seconds above 0")
        self.watcher = Watcher(run, details=details, stopped_after_s=stopped_after_s)
        self.interval_s = interval_s
        self.error = ""
        self._events: list[dict[str, Any]] = []
        self._verdicts = self.watcher.verdicts
        self._handles: list[Any] = []
        self._lock = threading.Lock()
        self._ask = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="mappnb-watch", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------------------------------------------ following
    def _follow(self) -> None:
        while not self._ask.is_set():
            try:
                fresh = self.watcher.look()
            except Exception as err:  # noqa: BLE001 (an error in a thread would be lost: it is shown in the cell)
                self.error = f"{type(err).__name__}: {err}"
                break
            with self._lock:
                self._events += fresh
                self._verdicts = self.watcher.verdicts
            if fresh:
                self._show()
            if self.watcher.over:
                break
            self._ask.wait(self.watcher.pause_s if self.interval_s is None else self.interval_s)
        self._show()

    @property
    def running(self) -> bool:
        """Whether it still follows."""
        return self._thread.is_alive()

    def stop(self) -> None:
        """End it; returns when the thread has ended."""
        self._ask.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the run has ended or stopped; returns whether it has."""
        self._thread.join(timeout_s)
        return not self.running

    # ---------------------------------------------------------------------------------------------------- what there is
    @property
    def verdicts(self) -> pd.DataFrame:
        """Who is slow now: the columns of :func:`mappnb.analysis.find_stragglers`, and ``raised_step``."""
        with self._lock:
            return self._verdicts.copy()

    @property
    def history(self) -> pd.DataFrame:
        """What was raised, changed and cleared, and restarts and ranks that failed; a row each, the oldest first."""
        with self._lock:
            rows = [e for e in self._events if e["event"] not in ("step", "start")]
        return pd.DataFrame([{c: e.get(c) for c in HISTORY} for e in rows], columns=list(HISTORY))

    @property
    def steps(self) -> pd.DataFrame:
        """Steps that have ended: ``step``, ``step_s`` in s."""
        with self._lock:
            rows = [(e["step"], e["step_s"]) for e in self._events if e["event"] == "step"]
        return pd.DataFrame(rows, columns=["step", "step_s"])

    def __repr__(self) -> str:
        w = self.watcher
        state = (
            f"failed: {self.error}"
            if self.error
            else w.state
            if w.over
            else "following"
            if self.running
            else "stopped following"
        )
        return f"LiveWatch({w.num_steps} steps, {len(self._verdicts)} slow, {state})"

    # ---------------------------------------------------------------------------------------------------------- showing
    def _html(self) -> str:
        steps, found = self.steps, self.verdicts
        length = (
            f"; the newest took {steps.step_s.iloc[-1]:.3g} s, usually {median(steps.step_s):.3g} s"
            if len(steps)
            else ""
        )
        last = f"step {steps.step.iloc[-1]}" if len(steps) else "no step yet"
        body = f"<b>{html.escape(repr(self))}</b><div>{last}{length}</div>"
        if len(found):
            shown = found[
                [
                    "subject_kind",
                    "subject",
                    "cause",
                    "effect_s",
                    "effect_fraction",
                    "first_step",
                    "raised_step",
                    "evidence",
                ]
            ]
            formats: Any = {"effect_s": "{:.3g}".format, "effect_fraction": "{:+.1%}".format}
            body += shown.to_html(index=False, formatters=formats, border=0)
        elif len(steps):
            body += "<div>Nobody is slow now.</div>"
        with self._lock:
            told = [e for e in self._events if e["event"] not in ("step", "start")][-SHOWN:]
        items = "".join(f"<li>{html.escape(sentence(e).splitlines()[0])}</li>" for e in reversed(told))
        return f"<div class='mappnb-watch'>{body}" + (f"<ul>{items}</ul>" if items else "") + "</div>"

    def _bundle(self) -> dict[str, str]:
        return {"text/html": self._html(), "text/plain": repr(self)}

    def _show(self) -> None:
        """Bring the cells up to date; a front end that is gone is no matter."""
        for handle in [*self._handles]:
            try:
                handle.update(self._bundle(), raw=True)
            except Exception:  # noqa: BLE001 (whatever a closed kernel raises)
                self._handles.remove(handle)

    def _ipython_display_(self) -> None:
        display: Any = importlib.import_module("IPython.display").display
        handle = display(self._bundle(), raw=True, display_id=True)
        if handle is not None:
            self._handles.append(handle)
