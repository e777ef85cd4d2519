"""Timeline: every event of a run on lanes of ranks, in the notebook, with the habits of Perfetto."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

from mappnb.datasets import groups_of
from mappnb.errors import MappnbError
from mappnb.run import Run
from mappnb.widgets import _timeline_window as windows
from mappnb.widgets._flows import flows_of
from mappnb.widgets._messages import Answer, flag, number, numbers, text, whole
from mappnb.widgets._search import find, next_hit
from mappnb.widgets._text import duration_text
from mappnb.widgets._timeline_options import PARTS, grouping_of, hidden_of, ranks_of
from mappnb.widgets._timeline_state import Scene
from mappnb.widgets._timeline_text import TABLE_COLUMNS, event_fields, table_rows
from mappnb.widgets.classes import CLASSES
from mappnb.widgets.selection import EventKey, Selection, event_keys, find_keys
from mappnb.widgets.view import View, bundle, static_text

__all__ = ["Timeline"]

MOST_EVENTS_TOLD, MOST_ROWS = 1000, 200


class Timeline(View):
    """Events on lanes of ranks: pan, zoom, search, measure, select.

    Parameters
    ----------
    run : Run or Dataset, dims (event,)
        A recorded run, or any events dataset: simulated, imported, selected.
    time : slice, optional
        ``slice(t0, t1)``, seconds on the run clock, to look at first.
    step : int, optional
        Step to look at first. By default a run opens on its last whole step, a dataset on everything.
    rank : int or list of int, optional
        Ranks to show.
    group_by : str
        ``"rank"``, ``"dp"``, ``"pp"``, ``"tp"``, ``"cp"``, ``"ep"`` or ``"host"``.
    hidden : list of str, optional
        Colour classes to leave out: ``"host"``, ``"wait"``, ``"forward"``, ...
    search : str
        Part of a name or operation, ``/regular expression/``, or ``layer:3``; what is found is marked.
    select : slice or list of tuple, optional
        A box in time (``slice(t0, t1)``, seconds) over the ranks shown, or events by (rank, start_ns, depth).
    flows : bool
        Lines between matched calls of the selected event.

    Raises
    ------
    MappnbError
        If a rank, step, grouping or class does not exist.

    Notes
    -----
    Only what fits the screen goes to the browser: spans of a pixel and more, and a grid of the smaller ones. Keys: ``?`` in the view.
    """

    _esm = bundle(*PARTS, render="renderTimeline")
    _css = static_text("timeline.css")

    def __init__(
        self,
        run: Run | xr.Dataset,
        *,
        time: slice | None = None,
        step: int | None = None,
        rank: int | Iterable[int] | None = None,
        group_by: str = "rank",
        hidden: Iterable[str] = (),
        search: str = "",
        select: slice | list[EventKey] | None = None,
        flows: bool = True,
    ) -> None:
        self._scene: Scene = Scene.of(
            run, ranks=ranks_of(rank), group_by=grouping_of(group_by), hidden=hidden_of(hidden)
        )
        self._search = ""
        self._hit: int | None = None
        self._selection: tuple[str, Any] = ("none", None)
        self._ids: tuple[int, list[int]] | None = None
        self.flows = bool(flows)
        self._visible = self._scene.first_view(time=time, step=step)
        super().__init__()
        if search:
            self._set_search(search)
        if select is not None:
            self.select(select)

    # --------------------------------------------------------------------------------------------------------- API
    @property
    def window(self) -> slice:
        """What is on the screen: ``slice(t0, t1)`` in seconds on the run clock."""
        return slice(*(round(self._scene.ns(t) / 1e9, 9) for t in self._visible))

    @property
    def selection(self) -> Selection:
        """The selected events."""
        kind, value = self._selection
        if kind == "box":
            t0, t1, ranks = value
            at = self._scene.inside(t0, t1, ranks)
            span = slice(round(self._scene.ns(t0) / 1e9, 9), round(self._scene.ns(t1) / 1e9, 9))
            return Selection(at, span, tuple(ranks))
        loaded = self._scene.loaded(*self._visible)
        events = loaded.events.isel(event=np.array(self._selected_ids(), np.int64) - loaded.base)
        return Selection(events, None, tuple(sorted({int(r) for r in events["rank"].values})))

    @property
    def code(self) -> str:
        """The Python line that makes this view again: zoom, ranks, grouping, classes, search and selection."""
        scene, (kind, value) = self._scene, self._selection
        said = [f"time=slice({self.window.start!r}, {self.window.stop!r})"]
        said += [f"rank={scene.ranks!r}"] if scene.ranks is not None else []
        said += [f"group_by={scene.group_by!r}"] if scene.group_by != "rank" else []
        said += [f"hidden={[CLASSES[i].name for i in sorted(scene.hidden)]!r}"] if scene.hidden else []
        said += [f"search={self._search!r}"] if self._search else []
        if kind == "box":
            start, stop = (round(scene.ns(t) / 1e9, 9) for t in value[:2])
            said.append(f"select=slice({start!r}, {stop!r})")
        elif kind == "events":
            said.append(f"select={value!r}")
        said += [] if self.flows else ["flows=False"]
        return f"{scene.caller}timeline({', '.join(said)})"

    def goto(self, *, time: slice | None = None, step: int | None = None) -> None:
        """Look at a window in time (seconds on the run clock), or at a step."""
        self._move(*self._scene.first_view(time=time, step=step))

    def select(self, what: slice | list[EventKey] | None) -> Selection:
        """Select a box in time over the ranks shown, events by (rank, start_ns, depth), or nothing; returns the selection."""
        scene = self._scene
        if isinstance(what, slice):
            t0, t1 = scene.t_of(what.start, scene.extent[0]), scene.t_of(what.stop, scene.extent[1])
            self._selection = ("box", (t0, t1, scene.shown_ranks()))
        elif what:
            self._selection = ("events", [(int(r), int(s), int(d)) for r, s, d in what])
        else:
            self._selection = ("none", None)
        return self._tell_selection()

    def refresh(self) -> None:
        """Look again at a run that is being recorded."""
        if self._scene.refresh(self._visible):
            self.send_answer(self._meta(move=False))
            self.tell("stale")

    def describe(self) -> str:
        """Return the timeline in one stable line."""
        return self._scene.describe()

    # ----------------------------------------------------------------------------------------------------- linking
    def follow_window(self, other: Any) -> None:
        """Show what ``other`` shows."""
        self._move(*(self._scene.t_of(s, 0.0) for s in (other.window.start, other.window.stop)), echo=False)

    def follow_selection(self, other: Any) -> None:
        """Mark in this view what is selected in ``other``."""
        chosen = other.chosen if hasattr(other, "chosen") else other.selection  # of a view whose selection is a table
        if chosen.time is not None:
            self.tell("mark", t0=self._scene.t_of(chosen.time.start, 0.0), t1=self._scene.t_of(chosen.time.stop, 0.0))
        elif len(chosen):
            start = chosen.events["start_ns"].values
            end = start + chosen.events["duration_ns"].values
            self.tell("mark", t0=self._scene.t(int(start.min())), t1=self._scene.t(int(end.max())))
        else:
            self.tell("mark", t0=None, t1=None)

    def _move(self, t0: float, t1: float, *, echo: bool = True) -> None:
        self._visible = (t0, t1)
        self.tell("goto", t0=t0, t1=t1, text="")
        if echo:
            self.changed("window")

    # ---------------------------------------------------------------------------------------------------- messages
    def on_ready(self, content: dict[str, Any]) -> None:
        """Answer a browser that has drawn the empty view: the probe, then what there is."""
        super().on_ready(content)
        self.send_answer(self._meta(move=True))
        if self._selection[0] != "none":
            self._tell_selection()

    def _meta(self, *, move: bool) -> Answer:
        view = list(self._visible) if move else None
        return Answer({"kind": "meta", "view": view, "flows": self.flows, "search": self._search, **self._scene.meta()})

    def on_window(self, content: dict[str, Any]) -> Answer:
        """Answer with the spans and the grid of a window."""
        scene = self._scene
        t0, t1 = number(content, "t0"), number(content, "t1")
        if not t1 > t0:
            raise MappnbError(f"a window ends after it begins; got {t0} to {t1}")
        row0, row1 = (whole(content, n, 0, scene.num_rows) for n in ("row0", "row1"))
        pixels = whole(content, "pixels", 16, 8192)
        overview = content.get("overview") is True  # for the strip that shows all of the run: nobody looks there
        moved = not overview and (t0, t1) != self._visible
        if moved:
            self._visible = (t0, t1)
        marks = windows.Marks(search=self._search, selected=self._selected_ids())
        answer = windows.window_answer(scene, t0, t1, pixels=pixels, rows=(row0, max(row0, row1)), marks=marks)
        if moved:
            self.changed("window")
        return answer

    def _selected_ids(self) -> list[int]:
        """Ids of the events selected one by one; looked for once for what is loaded."""
        kind, value = self._selection
        if kind != "events":
            return []
        loaded = self._scene.loaded(*self._visible)
        if self._ids is None or self._ids[0] != loaded.base:
            self._ids = loaded.base, (find_keys(loaded.events, value) + loaded.base).tolist()
        return self._ids[1]

    def on_describe(self, content: dict[str, Any]) -> dict[str, Any]:
        """Answer with the fields of one event."""
        loaded, i = self._scene.event(whole(content, "event", 0, 2**32 - 1))
        events = loaded.events
        rank = int(events["rank"].values[i])
        title, fields = event_fields(
            events, i, place=self._scene.place(rank), groups=groups_of(events), step_ns=self._scene.step_lengths()
        )
        start = int(events["start_ns"].values[i])
        return {
            "event": i + loaded.base,
            "title": title,
            "fields": fields,
            "rank": rank,
            "start": self._scene.t(start),
            "duration": int(events["duration_ns"].values[i]),
            "row": self._scene.row_of(loaded, i),
        }

    def on_select(self, content: dict[str, Any]) -> None:
        """Select what was clicked or drawn around."""
        if content.get("box") is not None:
            t0, t1, row0, row1 = numbers(content, "box", 4)
            self._selection = ("box", (t0, t1, self._scene.ranks_of_rows(int(row0), int(row1))))
        elif content.get("events"):
            ids = [int(i) for i in numbers(content, "events", -1)][:MOST_EVENTS_TOLD]
            keys: list[EventKey] = []
            for ident in ids:
                loaded, i = self._scene.event(ident)
                keys += event_keys(loaded.events, np.array([i]))
            self._selection = ("events", keys)
        else:
            self._selection = ("none", None)
        self._tell_selection(seq=content.get("seq"))

    def _tell_selection(self, seq: Any = None) -> Selection:
        """Tell the browser and the listeners what is selected now; returns it."""
        self._ids = None
        chosen, (kind, value) = self.selection, self._selection
        t0, t1 = value[:2] if kind == "box" else (None, None)
        self.tell(
            "selection",
            seq=seq,
            count=len(chosen),
            text=chosen.summary(),
            t0=t0,
            t1=t1,
            rows=self._scene.rows_of_ranks(chosen.ranks),
            events=self._selected_ids(),
        )
        self.changed("selection")
        return chosen

    def on_search(self, content: dict[str, Any]) -> dict[str, Any]:
        """Answer with the next hit."""
        wanted, go = text(content, "text"), text(content, "go", most=10)
        loaded = self._scene.loaded(*self._visible)
        if wanted != self._search:
            try:
                self._set_search(wanted)
            except MappnbError as err:
                return {
                    "hits": 0,
                    "position": 0,
                    "event": None,
                    "row": None,
                    "start": None,
                    "duration": None,
                    "error": str(err),
                }
        hits = self._scene.hits(loaded, self._search)
        start_ns = loaded.events["start_ns"].values
        event, position = next_hit(hits, start_ns, at_ns=self._scene.ns(number(content, "at")), after=self._hit, go=go)
        self._hit = event if event >= 0 else None
        found = event >= 0
        return {
            "hits": len(hits),
            "position": position,
            "event": event + loaded.base if found else None,
            "row": self._scene.row_of(loaded, event) if found else None,
            "start": self._scene.t(int(start_ns[event])) if found else None,
            "duration": int(loaded.events["duration_ns"].values[event]) if found else None,
            "error": "",
        }

    def _set_search(self, wanted: str) -> None:
        loaded = self._scene.loaded(*self._visible)
        find(loaded.events.isel(event=slice(0, 1)), wanted)  # an expression that cannot be read is refused here
        self._search, self._hit = wanted, None

    def on_step(self, content: dict[str, Any]) -> None:
        """Go to another step."""
        t0, t1, said = self._scene.neighbour_step(text(content, "go", most=10), number(content, "at"))
        self._visible = (t0, t1)
        self.tell("goto", seq=content.get("seq"), t0=t0, t1=t1, text=said)
        self.changed("window")

    def on_options(self, content: dict[str, Any]) -> Answer:
        """Change grouping, hidden classes or flow lines."""
        if "flows" in content:
            self.flows = flag(content, "flows")
        group_by = grouping_of(text(content, "group_by", most=20)) if "group_by" in content else self._scene.group_by
        hidden = self._scene.hidden
        if "hidden" in content:
            names = content["hidden"]
            hidden = hidden_of(names if isinstance(names, list) else [str(names)])
        self._scene.arrange(group_by=group_by, hidden=hidden)
        self.changed("options")
        return self._meta(move=False)

    def on_flows(self, content: dict[str, Any]) -> Answer:
        """Answer with the lines of the call of one event."""
        if content.get("event") is None or not self.flows:
            return Answer({"kind": "flows"}, {})
        loaded, i = self._scene.event(whole(content, "event", 0, 2**32 - 1))
        lines = flows_of(loaded.events, self._scene.display_rows(loaded), i, origin_ns=self._scene.origin_ns)
        return Answer({"kind": "flows"}, lines)

    def on_table(self, content: dict[str, Any]) -> dict[str, Any]:
        """Answer with the events of a window as texts."""
        t0, t1 = number(content, "t0"), number(content, "t1")
        row0, row1 = (whole(content, n, 0, self._scene.num_rows) for n in ("row0", "row1"))
        loaded, at = self._scene.events_in(t0, t1, row0, row1)
        return {
            "columns": TABLE_COLUMNS,
            "rows": table_rows(loaded.events, at[:MOST_ROWS]),
            "more": max(0, len(at) - MOST_ROWS),
        }

    def on_range(self, content: dict[str, Any]) -> dict[str, Any]:
        """Answer with what a measured range holds."""
        t0, t1 = sorted((number(content, "t0"), number(content, "t1")))
        row0, row1 = (whole(content, n, 0, self._scene.num_rows) for n in ("row0", "row1"))
        fields = windows.range_fields(self._scene, t0, t1, row0, row1)
        return {"text": duration_text(t1 - t0), "fields": fields}

    def on_code(self, content: dict[str, Any]) -> dict[str, Any]:
        """Answer with the Python line of the view as it is."""
        self._visible = (number(content, "t0"), number(content, "t1"))
        return super().on_code(content)

    # ------------------------------------------------------------------------------------------------------ static
    def twin_html(self) -> str:
        """Return the static picture of the window."""
        from mappnb.widgets._timeline_static import twin

        return twin(self._scene, self._visible)

    def snapshot(self) -> Any:
        """Return a picture of what is on the screen, with a small table, that stays in the notebook."""
        from mappnb.widgets._timeline_static import Snapshot

        return Snapshot.of(self._scene, self._visible, code=self.code)

    def to_html(self, path: str | Path | None = None) -> str:
        """Return the timeline as one self-contained page that pans and zooms without a kernel; write it to ``path`` if given."""
        from mappnb.widgets._timeline_static import page

        return self._written(page(self._scene, self._visible, title=self.describe()), path)

    def release(self) -> None:
        """Let go of the run's data."""
        self._scene.release()
