"""Stragglers: who is slow, since when, in what, and what it costs; from all ranks down to one operation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from mappnb.errors import MappnbError
from mappnb.run import Run
from mappnb.widgets import _strag_answers as told
from mappnb.widgets._messages import Answer, numbers, text, whole
from mappnb.widgets._plot_view import PlotView
from mappnb.widgets._strag_data import StragglerData, subject_ranks
from mappnb.widgets._strag_grid import orders
from mappnb.widgets._strag_levels import Picture, columns, picture
from mappnb.widgets._strag_picked import Picked, events_of, frame_of
from mappnb.widgets._strag_where import Where
from mappnb.widgets.linking import Link, link
from mappnb.widgets.selection import Selection
from mappnb.widgets.timeline import Timeline
from mappnb.widgets.view import bundle, static_text

__all__ = ["STRAGGLER_PARTS", "Stragglers"]

STRAGGLER_PARTS = (
    *("runtime.js", "runtime_ui.js", "timeline_time.js", "lab_plots.js"),
    *("stragglers_plots.js", "stragglers_panels.js", "stragglers.js"),
)


class Stragglers(PlotView):
    """Ranks by step as a heatmap, with the verdicts, their evidence, and the price of what is slow.

    Parameters
    ----------
    run : Run or Dataset, dims (event,)
        Recorded, imported, generated or simulated.
    metric : str
        What the colours show: ``"ratio"`` (compute, times its peers'), ``"above_s"``, ``"compute_s"``, ``"wait_s"``, ``"imposed_s"``, ...;
        ``view.metrics`` lists them.
    order : str, optional
        ``"pp"``, ``"dp"``, ``"tp"``, ``"cp"``, ``"ep"``, ``"host"`` or ``"rank"``: what stands together.
    rows : str
        ``"rank"``, ``"host"`` or ``"auto"``: hosts where there are several and more than 64 ranks.
    cell : str
        ``"max"`` or ``"median"``: what a cell of several ranks or steps shows.
    against : str
        ``"above"``, ``"ratio"`` or ``"seconds"``: how the parts of one rank are shown.
    host : str, optional
        Look at the ranks of one host.
    rank, step : int, optional
        Look at one rank by part, or at one of its steps by operation.

    Attributes
    ----------
    errors : list of str
        What went wrong in answering the browser.

    Raises
    ------
    MappnbError
        If a metric, order, host, rank or step does not exist. A run with nothing to judge is no error: the view says why.

    Notes
    -----
    Numbers are those of :func:`mappnb.analysis.work`, :func:`mappnb.analysis.find_stragglers` and :func:`mappnb.analysis.what_if`; the
    last is worked out when it is asked for. At most 20,000 cells go to the browser.
    """

    _esm = bundle(*STRAGGLER_PARTS, render="renderStragglers")
    _css = static_text("timeline.css") + static_text("stragglers.css")

    def __init__(
        self,
        run: Run | xr.Dataset,
        *,
        metric: str = "ratio",
        order: str | None = None,
        rows: str = "auto",
        cell: str = "max",
        against: str = "above",
        host: str | None = None,
        rank: int | None = None,
        step: int | None = None,
    ) -> None:
        self._data: StragglerData = StragglerData(run)
        self._picked = Picked()
        first = orders(self._data.layout, self._data.measures.hosts)[0] if self._data.measures is not None else "rank"
        self._defaults = Where(order=first)
        self._where = Where(metric, order or first, rows, cell, against, host, rank, step).checked()
        self._drawn: Picture | None = None
        self._links: list[Link] = []
        if not self._data.why:
            self._drawn = picture(self._data, self._where)
        super().__init__()

    # --------------------------------------------------------------------------------------------------------- API
    @property
    def verdicts(self) -> pd.DataFrame:
        """Who is slow and why, the largest effect first (:func:`mappnb.analysis.find_stragglers`)."""
        return self._data.verdicts

    @property
    def work(self) -> xr.Dataset:
        """The self-time table (:func:`mappnb.analysis.work`), dims (step, rank, part)."""
        return self._data.m.work

    @property
    def prices(self) -> xr.Dataset:
        """What the slow ones cost (:func:`mappnb.analysis.what_if`); worked out at the first look."""
        return self._data.prices

    @property
    def metrics(self) -> dict[str, str]:
        """What the heatmap can show: key and words."""
        return {k: v.label for k, v in self._data.m.metrics.items()}

    @property
    def columns(self) -> dict[str, Any]:
        """What is drawn, as arrays: ``value`` (row, column), ``row``, ``first_step``, ``last_step``; of one step a table of operations."""
        return {} if self._drawn is None else columns(self._drawn)

    @property
    def selection(self) -> pd.DataFrame:
        """What is selected: the row of a verdict, a row per (step, rank), or the events of one rank in one step."""
        return frame_of(self._data, self._picked)

    @property
    def chosen(self) -> Selection:
        """The selected ranks and steps as a timeline takes them, for :func:`mappnb.link`."""
        span, picked = self.window if self._picked else None, self._picked
        return Selection(events_of(self._data, picked), span, picked.ranks)

    @property
    def window(self) -> slice:
        """Time of the selected steps (of the step that is looked at, else of all), in s on the run clock."""
        steps, ranks = self._picked.steps, self._picked.ranks
        where, m = self._where, self._data.m
        if steps is None:
            steps = (where.step, where.step) if where.step is not None else (int(m.steps.min()), int(m.steps.max()))
        rank = ranks[0] if ranks else where.rank if where.rank is not None else int(m.ranks[0])
        found = self._data.window_s(first=steps[0], last=steps[1], rank=rank)
        return slice(*(found or (0.0, 0.0)))

    def set(self, **values: str) -> None:
        """Change ``metric=``, ``order=``, ``rows=``, ``cell=`` or ``against=``."""
        self._go(self._where.moved(values))

    def goto(self, *, host: str | None = None, rank: int | None = None, step: int | None = None) -> None:
        """Look at a host, a rank, or one step of a rank; without arguments at everything."""
        self._go(replace(self._where, host=host, rank=rank, step=step).checked())

    def select(
        self,
        *,
        rank: int | Sequence[int] | None = None,
        host: str | None = None,
        step: int | slice | None = None,
        verdict: int | None = None,
    ) -> pd.DataFrame:
        """Select ranks or a host, in a step or a range of steps (both ends included), or a row of the verdicts; returns the selection."""
        steps = None
        m = self._data.m
        if step is not None:
            bounds = step if isinstance(step, slice) else slice(step, step)
            ends = (bounds.start, int(m.steps.min())), (bounds.stop, int(m.steps.max()))
            steps = (
                int(ends[0][0] if ends[0][0] is not None else ends[0][1]),
                int(ends[1][0] if ends[1][0] is not None else ends[1][1]),
            )
        if verdict is not None:
            self._pick(self._of_verdict(verdict))
        elif host is not None:
            ranks = subject_ranks("host", host, m)
            if not ranks:
                raise MappnbError(f"no host {host!r}; there are {', '.join(sorted(set(m.hosts)))}")
            self._pick(Picked(tuple(int(r) for r in m.ranks[list(ranks)]), steps))
        else:
            asked = [] if rank is None else [rank] if isinstance(rank, (int, np.integer)) else list(rank)
            if rank is None and steps is not None:
                asked = m.ranks.tolist()
            self._pick(Picked(tuple(int(m.ranks[m.index(int(r))]) for r in asked), steps))
        self._tell_pick()
        return self.selection

    def timeline(self, **options: Any) -> Timeline:
        """Return a timeline at the selected steps and ranks, linked with this view; ``options`` as of :class:`Timeline`."""
        options = {**self._timeline_options(), **options}
        made = Timeline(self._data.run, **options)
        self._links.append(link(self, made))
        return made

    def _timeline_options(self) -> dict[str, Any]:
        span = self.window
        out: dict[str, Any] = {"time": slice(round(span.start, 6), round(span.stop, 6))}
        ranks = self._picked.ranks or (() if self._where.rank is None else (self._where.rank,))
        if ranks:
            m = self._data.m
            near = sorted({int(m.ranks[p]) for r in ranks[:1] for p in m.peers_of(m.index(r))[:7]} | set(ranks))
            out["rank"] = near[:32]
        return out

    def refresh(self) -> None:
        """Look again at a run that is being recorded: everything is worked out anew, place and selection stay."""
        run = self._data.run
        if isinstance(run, Run):
            run.refresh()
        was_empty = bool(self._data.why)
        self._data = StragglerData(run)
        if was_empty and not self._data.why:
            first = orders(self._data.layout, self._data.m.hosts)[0]
            self._defaults, self._where = Where(order=first), replace(self._where, order=first)
        self._drawn = None if self._data.why else picture(self._data, self._where)
        self.send_answer(Answer(self._state()))
        self.changed("refresh")

    @property
    def code(self) -> str:
        """The Python line that makes this view again, as it is now."""
        said = told.place_of(self._where, self._defaults)
        if isinstance(self._data.run, Run):
            return f"run.stragglers({', '.join(said)})"
        return f"mappnb.widgets.Stragglers({', '.join(['events', *said])})"

    def describe(self) -> str:
        """Return the view in one stable line."""
        m = self._data.measures
        if m is None:
            return "Stragglers(nothing to judge)"
        return f"Stragglers({len(m.ranks)} ranks, {len(m.steps)} steps)"

    # ----------------------------------------------------------------------------------------------------- linking
    def follow_window(self, other: Any) -> None:
        """Mark the steps that ``other`` looks at."""
        steps = self._data.steps_in(other.window.start, other.window.stop) if not self._data.why else None
        self.tell("marked", steps=None if steps is None else list(steps))

    def follow_selection(self, other: Any) -> None:
        """Select the ranks that are selected in ``other``."""
        if self._data.why:
            return
        chosen = other.chosen if hasattr(other, "chosen") else other.selection
        known = set(self._data.m.ranks.tolist())
        self._picked = Picked(tuple(r for r in chosen.ranks if r in known), None)
        self._tell_pick()

    # ------------------------------------------------------------------------------------------------------- state
    def _go(self, where: Where) -> Picture:
        """Look at another place; the browser is told only of what came from Python."""
        drawn = picture(self._data, where)
        self._where, self._drawn = where, drawn
        self.tell("goto", where=where.told())
        return drawn

    def _pick(self, picked: Picked) -> None:
        self._picked = picked
        self.changed("selection")
        if picked.steps is not None:
            self.changed("window")

    def _of_verdict(self, index: int) -> Picked:
        frame = self._data.verdicts
        if not 0 <= index < len(frame):
            raise MappnbError(f"no verdict {index}; there are {len(frame)}, from 0")
        row = frame.iloc[index]
        m = self._data.m
        at = subject_ranks(str(row["subject_kind"]), str(row["subject"]), m)
        steps = (int(row["first_step"]), int(row["last_step"])) if int(row["first_step"]) >= 0 else None
        return Picked(tuple(int(r) for r in m.ranks[list(at)]), steps, verdict=index)

    def _state(self) -> dict[str, Any]:
        data = self._data
        out: dict[str, Any] = {
            "kind": "state",
            "title": self.describe(),
            "why": data.why,
            "live": told.is_live(data.run),
        }
        if not data.why:
            out |= {"where": self._where.told(), "options": told.options_told(data), "picked": self._picked.told()}
        return out

    def _tell_pick(self) -> None:
        self.tell("picked", **self._picked.told())

    # ---------------------------------------------------------------------------------------------------- messages
    def on_ready(self, content: dict[str, Any]) -> None:
        """Answer the browser: the probe, then what there is."""
        super().on_ready(content)
        self.send_answer(Answer({**self._state(), "seq": content.get("seq")}))

    def on_heat(self, content: dict[str, Any]) -> dict[str, Any]:
        """Answer with the picture of a place."""
        asked = content.get("where")
        if not isinstance(asked, dict):
            raise MappnbError(f"message 'heat': where is {asked!r:.80}; expected a mapping")
        where = self._where.moved(asked)
        drawn = picture(self._data, where)
        self._where, self._drawn = where, drawn
        return told.picture_told(self._data, drawn, **self._look(content))

    def on_verdicts(self, content: dict[str, Any]) -> dict[str, Any]:
        """Answer with the list of verdicts."""
        return told.verdicts_told(self._data)

    def on_pick(self, content: dict[str, Any]) -> dict[str, Any]:
        """Select ranks, steps, an operation or a verdict; answer with the evidence."""
        m = self._data.m
        if content.get("verdict") is not None:
            picked = self._of_verdict(whole(content, "verdict", 0, 10**9))
        else:
            ranks = tuple(int(r) for r in numbers(content, "ranks", -1))
            for rank in ranks:
                m.index(rank)
            steps = None
            if content.get("steps") is not None:
                a, b = (int(v) for v in numbers(content, "steps", 2))
                steps = (a, b)
            op = whole(content, "op", 0, 10_000) if content.get("op") is not None else None
            picked = Picked(ranks, steps, op=op)
        if picked != self._picked:
            self._pick(picked)
        at = [m.index(r) for r in picked.ranks]
        return told.evidence_told(self._data, at, picked.steps, picked.verdict)

    def on_prices(self, content: dict[str, Any]) -> dict[str, Any]:
        """Answer with the what-if bars."""
        by = text(content, "by", most=60) or self._data.groupings[0]
        return told.price_told(self._data, by, **self._look(content))

    def on_timeline(self, content: dict[str, Any]) -> dict[str, Any]:
        """Answer with the Python line that opens a linked timeline here; timelines that are linked go there at once."""
        linked = [v for made in self._links for v in made.views if v is not self and not v.closed]
        if linked:
            self.changed("window")
        said = ", ".join(f"{k}={v!r}" for k, v in self._timeline_options().items())
        caller = "run." if isinstance(self._data.run, Run) else "events.mapp."
        return {"text": f"{caller}timeline({said})", "linked": len(linked)}

    def on_refresh(self, content: dict[str, Any]) -> None:
        """Look again at the run."""
        self.refresh()

    # ------------------------------------------------------------------------------------------------------ static
    def twin_html(self) -> str:
        """Return the heatmap as a picture, with the verdicts."""
        from mappnb.widgets._strag_static import twin

        return twin(self._data, self._drawn, self.describe())

    def snapshot(self) -> Any:
        """Return a picture (SVG) with the verdicts, that stays in the notebook."""
        from mappnb.widgets._strag_static import snapshot

        return snapshot(self._data, self._drawn, code=self.code, said=self.describe())

    def to_html(self, path: str | Path | None = None) -> str:
        """Return the view as one self-contained page, with metrics, culprits and their evidence; write it to ``path`` if given."""
        from mappnb.widgets._strag_static import page

        return self._written(page(self), path)

    def release(self) -> None:
        """Let go of the run's data."""
        for made in self._links:
            made.unlink()
        self._links.clear()
        self._data.release()
        self._drawn = None
