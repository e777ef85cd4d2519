"""What the activation views share: choices, panels, a detail of what is picked, a list to jump from, static twins."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pandas as pd
import xarray as xr

from mappnb.errors import MappnbError
from mappnb.run import Run
from mappnb.widgets._acts_choices import Chooser
from mappnb.widgets._acts_figures import panel_told
from mappnb.widgets._acts_panels import Panel, Table
from mappnb.widgets._messages import Answer, text, whole
from mappnb.widgets._plot_view import PlotView
from mappnb.widgets.view import bundle, static_text

__all__ = ["ACTIVATION_PARTS", "ActivationsView", "Detail", "Picture", "source_of"]

ACTIVATION_PARTS = (
    *("runtime.js", "runtime_ui.js", "timeline_time.js", "lab_plots.js", "stragglers_plots.js"),
    *("activations_figures.js", "activations_charts.js", "activations_grid.js", "activations.js"),
)
Pick = dict[str, Any]


@dataclass(frozen=True, slots=True, eq=False)
class Picture:
    """What a view shows: panels, a line below them, and tables."""

    panels: list[Panel]
    caption: str
    tables: list[Table] = field(default_factory=list)


@dataclass(frozen=True, slots=True, eq=False)
class Detail:
    """What is known of a picked cell or point: a title, fields (name, text), panels, and the same as a table."""

    title: str
    fields: list[tuple[str, str]]
    panels: list[Panel]
    frame: pd.DataFrame
    can_open_timeline: bool = False


def source_of(source: Any, *, what: str) -> tuple[Run | None, xr.DataTree | xr.Dataset]:
    """Return the run, if it is one, and the activations.

    Raises
    ------
    MappnbError
        For anything else.
    """
    if isinstance(source, Run):
        return source, source.activations
    if isinstance(source, (xr.DataTree, xr.Dataset)):
        return None, source
    raise MappnbError(f"{what}: {type(source).__name__}; expected a run, run.activations, or a Dataset of its shape")


class ActivationsView(PlotView):
    """Base of the views of activations; a subclass says what to choose, draw and tell.

    It gives :meth:`choices`, :meth:`picture` and :meth:`detail`; and ``_caller`` (the expression that makes it) and ``_named``.
    """

    _esm = bundle(*ACTIVATION_PARTS, render="renderActivations")
    _css = static_text("timeline.css") + static_text("activations.css")
    name: ClassVar[str] = "view"
    hint: ClassVar[str] = "Choose a cell"

    def __init__(self, caller: str, given: list[str], run: Run | None, changes: Mapping[str, Any]) -> None:
        self._caller, self._given, self._run = caller, given, run
        self._where: dict[str, Any] = {}
        self._pick: Pick | None = None
        self._move({k: v for k, v in changes.items() if v is not None})
        self._drawn: Picture | None = None
        self._shown: Detail | None = None
        super().__init__()

    # ------------------------------------------------------------------------------------------- of the subclass
    def choices(self, ask: Chooser) -> None:
        """Ask for every choice, in order."""
        raise NotImplementedError

    def picture(self, where: Mapping[str, Any]) -> Picture:
        """Return what is drawn."""
        raise NotImplementedError

    def detail(self, where: Mapping[str, Any], pick: Pick) -> Detail:
        """Return what is told of a pick; raises MappnbError if there is no such place."""
        raise NotImplementedError

    def places(self) -> Iterator[tuple[dict[str, Any], list[Pick]]]:
        """Yield changes of choices and the picks there, for the page without a kernel, the most wanted first."""
        yield {}, []

    # -------------------------------------------------------------------------------------------------------- API
    @property
    def selected(self) -> pd.DataFrame:
        """What is picked, as a table; empty without a pick."""
        if self._pick is None:
            return pd.DataFrame()
        return self._detail().frame

    @property
    def options(self) -> dict[str, list[Any]]:
        """What can be chosen, by name."""
        ask = Chooser(self._where, {})
        self.choices(ask)
        return {f["key"]: [v for v, _ in f["options"]] for f in ask.fields}

    @property
    def panels(self) -> list[Panel]:
        """What is drawn, as arrays."""
        return [*self._picture().panels]

    def set(self, **changes: Any) -> None:
        """Change choices by name; :attr:`options` lists them."""
        self._move(changes)
        self.tell("goto", where=self._where)
        self.changed("selection")

    @property
    def code(self) -> str:
        """The Python line that makes this view again, as it is now."""
        ask = Chooser(self._where, {})
        self.choices(ask)
        said = [f"{k}={v!r}" for k, v in self._where.items() if v != ask.defaults[k]]
        return f"{self._caller}({', '.join([*self._given, *said])})"

    def refresh(self) -> None:
        """Look again at a run that is being recorded; choices stay where they can."""
        if self._run is not None:
            self._run.refresh()
            self.reload()
            self._move({})
            self.send_answer(Answer(self._state()))

    def reload(self) -> None:
        """Take the run's data anew."""

    # ------------------------------------------------------------------------------------------------------ state
    def _move(self, changes: Mapping[str, Any]) -> None:
        ask = Chooser(self._where, changes)
        self.choices(ask)
        ask.done()
        if ask.where != self._where:
            self._pick = None
        self._where, self._fields = ask.where, ask.fields
        self._drawn = self._shown = None

    def _picture(self) -> Picture:
        if self._drawn is None:
            self._drawn = self.picture(self._where)
        return self._drawn

    def _detail(self) -> Detail:
        if self._pick is None:
            raise MappnbError("nothing is picked")
        if self._shown is None:
            self._shown = self.detail(self._where, self._pick)
        return self._shown

    def _choose(self, pick: Pick) -> Detail:
        """Pick; an impossible pick leaves the old one."""
        shown = self.detail(self._where, pick)
        self._pick, self._shown = pick, shown
        self.changed("selection")
        self.changed("window")
        return shown

    def _select(self, pick: Pick) -> pd.DataFrame:
        """Pick from Python; the browser is told."""
        frame = self._choose(pick).frame
        self.tell("picked", pick=pick)
        return frame

    def _state(self) -> dict[str, Any]:
        live = self._run is not None and self._run.meta["state"] == "recording"
        return {
            "kind": "state", "name": self.name, "title": self.describe(), "live": live, "hint": self.hint,
            "where": self._where, "pick": self._pick,
        }  # fmt: skip

    # --------------------------------------------------------------------------------------------------- messages
    def on_ready(self, content: dict[str, Any]) -> None:
        """Answer the browser: the probe, then what there is."""
        super().on_ready(content)
        self.send_answer(Answer({**self._state(), "seq": content.get("seq")}))

    def on_show(self, content: dict[str, Any]) -> dict[str, Any]:
        """Answer with the panels, after changes of choices."""
        changes = content.get("changes")
        if not isinstance(changes, dict):
            raise MappnbError(f"message 'show': changes is {changes!r:.80}; expected a mapping")
        if changes:
            self._move(changes)
            self.changed("selection")
        return self._told(self._look(content))

    def _told(self, look: dict[str, str]) -> dict[str, Any]:
        drawn = self._picture()
        return {
            "where": self._where, "fields": self._fields, "caption": drawn.caption, "pick": self._pick,
            "panels": [panel_told(p, **look) for p in drawn.panels], "tables": [panel_told(t, **look) for t in drawn.tables],
        }  # fmt: skip

    def on_pick(self, content: dict[str, Any]) -> dict[str, Any]:
        """Pick a cell or point; answer with its detail."""
        return self._told_detail(self._choose(pick_of(content)), self._look(content))

    @staticmethod
    def _told_detail(shown: Detail, look: dict[str, str]) -> dict[str, Any]:
        return {
            "title": shown.title, "fields": [list(f) for f in shown.fields], "panels": [panel_told(p, **look) for p in shown.panels],
            "timeline": shown.can_open_timeline,
        }  # fmt: skip

    def on_refresh(self, content: dict[str, Any]) -> None:
        """Look again at the run."""
        self.refresh()

    # ----------------------------------------------------------------------------------------------------- static
    def twin_html(self) -> str:
        """Return the view as a picture."""
        from mappnb.widgets._acts_static import twin

        return twin(self)

    def snapshot(self) -> Any:
        """Return a picture (SVG) of the view as it is, that stays in the notebook."""
        from mappnb.widgets._acts_static import snapshot

        return snapshot(self)

    def to_html(self, path: str | Path | None = None) -> str:
        """Return the view as one self-contained page of at most 2 MB; write it to ``path`` if given."""
        from mappnb.widgets._acts_static import page

        return self._written(page(self), path)

    def release(self) -> None:
        """Let go of the data."""
        self._run = self._drawn = self._shown = None


def pick_of(content: Mapping[str, Any]) -> Pick:
    """Return the pick in a message: panel, and row and column, or index; perhaps a token to follow."""
    pick: Pick = {"panel": text(content, "panel", most=40)}
    for key in ("row", "col", "index", "token"):
        if content.get(key) is not None:
            pick[key] = whole(content, key, 0, 2**31)
    return pick
