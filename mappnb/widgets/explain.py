"""Explain: why a model says one token instead of another, down to single heads and neurons, with real ablation at a click."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from mappnb.errors import MappnbError, did_you_mean
from mappnb.interp.explanation import Explanation
from mappnb.widgets import _expl_answers as told
from mappnb.widgets._expl_levels import Level, columns, key_of, place_name, sums
from mappnb.widgets._expl_where import BY, Where, known_word, path_asked
from mappnb.widgets._messages import Answer, whole
from mappnb.widgets.view import View, bundle, static_text

__all__ = ["EXPLAIN_PARTS", "Explain"]

EXPLAIN_PARTS = (
    *("runtime.js", "runtime_ui.js", "attention_colours.js"),
    *("explain_data.js", "explain_plots.js", "explain_map.js", "explain_rows.js", "explain_picked.js", "explain.js"),
)
MOST_FETCHED = 1000
"""Rows of one choice that the browser gets afterwards."""
MOST_CHECKED = 200
"""Rows of one check that a click may ask for."""


class Explain(View):
    """An explanation: its components ranked, summed by token and layer, each to be ablated or traced upstream.

    Parameters
    ----------
    explanation : Explanation
        Of :func:`mappnb.interp.explain`.
    by : str
        ``"attribution"`` or ``"direct_effect"``: what ranks and colours.
    component : str
        ``"embed"``, ``"head"``, ``"mlp"``, ``"neuron"``, ...: rows of one kind; ``"all"``.
    layer, position : int, optional
        Rows of one layer, of one token.
    row : int, optional
        Row that is picked: its label in the table that is looked at.
    path : sequence of int
        Look upstream of a row of the explanation, of a row of that table, and so on.

    Attributes
    ----------
    errors : list of str
        What went wrong in answering the browser.

    Raises
    ------
    MappnbError
        If it is no explanation, or a component, layer, position or row does not exist.

    Notes
    -----
    Numbers are those of the explanation and its methods ``ablate``, ``upstream`` and ``check``. Where the model is spread over ranks these
    are collective: the browser then may not call them, and the view says so.
    """

    _esm = bundle(*EXPLAIN_PARTS, render="renderExplain")
    _css = static_text("timeline.css") + static_text("explain.css")

    def __init__(
        self,
        explanation: Explanation,
        *,
        by: str = "attribution",
        component: str = "all",
        layer: int | None = None,
        position: int | None = None,
        row: int | None = None,
        path: Sequence[int] = (),
    ) -> None:
        if not isinstance(explanation, Explanation):
            raise MappnbError(
                f"Explain: a {type(explanation).__name__} was given; expected what mappnb.interp.explain(model, prompt, token) returns"
            )
        self._explanation: Explanation | None = explanation
        self._why = told.read_only(explanation)
        self._levels: dict[tuple[int, ...], Level] = {(): Level((), explanation.question, explanation.table)}
        self._ablated: dict[tuple[str, int, int, int], float] = {}
        self._check: pd.DataFrame | None = None
        path = tuple(int(at) for at in path)
        for depth in range(1, len(path) + 1):
            self._traced(path[:depth])
        self._where = self._checked(Where(by, component, layer, position, row, path))
        super().__init__()

    # --------------------------------------------------------------------------------------------------------- API
    @property
    def explanation(self) -> Explanation:
        """What is explained."""
        if self._explanation is None:
            raise MappnbError("the view is closed; make it again")
        return self._explanation

    @property
    def table(self) -> pd.DataFrame:
        """The table that is looked at: the explanation's, or what was traced upstream."""
        return self._level.table

    @property
    def rows(self) -> pd.DataFrame:
        """What is listed: rows of the chosen component, layer and position, the largest first."""
        where, found = self._where, self.table
        for name, value in (("component", where.component), ("layer", where.layer), ("position", where.position)):
            if value is not None and value != "all":
                found = found[found[name] == value]
        size = found[where.by].abs().fillna(-1.0)
        return self._with_ablation(found.loc[size.sort_values(ascending=False, kind="stable").index])

    @property
    def selection(self) -> pd.DataFrame:
        """The row that is picked, else what is listed; with ``ablation`` where it was worked out."""
        if self._where.row is None:
            return self.rows
        return self._with_ablation(self.table.loc[[self._where.row]])

    @property
    def ablations(self) -> pd.DataFrame:
        """What was really ablated: ``component``, ``layer``, ``unit``, ``position``, ``ablation``."""
        keys = [*self._ablated]
        frame = pd.DataFrame(keys, columns=["component", "layer", "unit", "position"])
        return frame.assign(ablation=np.array([self._ablated[k] for k in keys], np.float64))

    @property
    def columns(self) -> dict[str, Any]:
        """What is drawn, as arrays: the rows, and sums by token (``strip_...``) and by layer and token (``head_...``, ``mlp_...``)."""
        return columns(self._level) | sums(self._level, told.num_layers(self.explanation), len(self.explanation.tokens))

    def set(self, **values: Any) -> None:
        """Change ``by=``, ``component=``, ``layer=`` or ``position=`` (None: all)."""
        known = ("by", "component", "layer", "position")
        for name in values:
            if name not in known:
                raise MappnbError(f"set() has no {name!r}; it knows {', '.join(known)}{did_you_mean(name, known)}")
        self._go(replace(self._where, **values))

    def select(self, row: int | None) -> pd.DataFrame:
        """Pick a row by its label, or none; returns the selection."""
        self._go(replace(self._where, row=row))
        return self.selection

    def ablate(self, row: int | None = None) -> float:
        """Set the component of a row (default: the one that is picked) to its baseline; return what the metric really loses."""
        label = self._picked(row)
        real = self._real(self._row(label))
        self.tell("ablated", path=list(self._where.path), **self._ablation_told(label))
        return real

    def upstream(self, row: int | None = None) -> pd.DataFrame:
        """Look at what made the component of a row (default: the one that is picked); return that table."""
        self._go(Where(path=(*self._where.path, self._picked(row))))
        return self.table

    def back(self) -> None:
        """Look again at the table from which the last one was traced."""
        path = self._where.path
        self._go(Where(path=path[:-1], row=path[-1] if path else self._where.row))

    def check(self, n: int = 20, *, seed: int = 0) -> pd.DataFrame:
        """Ablate a sample of rows for real, as :meth:`Explanation.check`."""
        found = self._checks(n, seed)
        self.tell("checked", **told.check_told(found))
        return found

    @property
    def code(self) -> str:
        """The Python line that makes this view again, as it is now."""
        return f"mappnb.widgets.Explain({', '.join(['explanation', *self._where.said()])})"

    def describe(self) -> str:
        """Return the view in one stable line."""
        if self._explanation is None:
            return "Explain(closed)"
        found = self._explanation
        return f"Explain({found.question}: {found.metric:.3f}, {len(found.table)} components)"

    # ------------------------------------------------------------------------------------------------------- state
    @property
    def _level(self) -> Level:
        return self._levels[self._where.path]

    def _above(self, path: tuple[int, ...]) -> list[Level]:
        return [self._levels[path[:depth]] for depth in range(len(path))]

    def _checked(self, where: Where) -> Where:
        """Return a place that exists, or raise MappnbError."""
        level = self._levels[where.path]
        known_word("by", where.by, {name: BY[name] for name in level.measures})
        known_word("component", where.component, ["all", *level.components])
        for name, count in (
            ("layer", told.num_layers(self.explanation)),
            ("position", len(self.explanation.tokens)),
        ):
            value = getattr(where, name)
            if value is not None and not (0 <= value < count or (name == "layer" and value == -1)):
                raise MappnbError(f"{name} is {value!r}; there are {count}, from 0")
        if where.row is not None and where.row not in level.table.index:
            raise MappnbError(f"no row {where.row!r}; the table has rows 0 to {len(level.table) - 1}")
        return where

    def _go(self, where: Where) -> None:
        """Look at another place, told by Python."""
        self._traced(where.path)
        self._where = self._checked(where)
        self.tell("goto", where=self._where.told())
        self.changed("selection")

    def _picked(self, row: int | None) -> int:
        label = self._where.row if row is None else row
        if label is None:
            raise MappnbError("which row? Give its label in view.table, or pick one in the view")
        return int(self._checked(replace(self._where, row=label)).row or 0)

    def _row(self, label: Any) -> pd.Series:
        row: pd.Series = self.table.loc[label]
        return row

    def _traced(self, path: tuple[int, ...]) -> Level:
        """Return the table at the end of a path; what is not there yet is traced."""
        if path not in self._levels:
            above = self._levels.get(path[:-1])
            if above is None or path[-1] not in above.table.index:
                raise MappnbError(f"no way {list(path)}: each number is the label of a row in the table before it")
            row = above.table.loc[path[-1]]
            self._levels[path] = Level(path, f"upstream of {place_name(row)}", self.explanation.upstream(row))
        return self._levels[path]

    def _real(self, row: pd.Series) -> float:
        if key_of(row) not in self._ablated:
            self._ablated[key_of(row)] = self.explanation.ablate(row)
        return self._ablated[key_of(row)]

    def _checks(self, n: int, seed: int = 0) -> pd.DataFrame:
        found = self.explanation.check(n, seed=seed)
        self._ablated |= {key_of(row): float(row["ablation"]) for _, row in found.iterrows()}
        self._check = found
        return found

    def _with_ablation(self, frame: pd.DataFrame) -> pd.DataFrame:
        if not self._ablated:
            return frame
        names = ("component", "layer", "unit", "position")
        keys = zip(*(frame[name] for name in names), strict=True)
        return frame.assign(ablation=np.array([self._ablated.get(key, np.nan) for key in keys], np.float64))

    def _ablation_told(self, label: int) -> dict[str, Any]:
        """Return a real ablation beside its prediction: the attribution to the metric, not a share in a component traced upstream."""
        row = self._row(label)
        root = self.explanation.table
        mine = np.logical_and.reduce([root[n] == row[n] for n in ("component", "layer", "unit", "position")])
        found = root.loc[mine, "attribution"]
        return {"row": label, "real": self._real(row), "predicted": float(found.iloc[0]) if len(found) else None}

    def _may_run(self) -> None:
        if self._why:
            raise MappnbError(self._why)

    # ---------------------------------------------------------------------------------------------------- messages
    def on_ready(self, content: dict[str, Any]) -> None:
        """Answer the browser: the probe, then what there is."""
        super().on_ready(content)
        self.send_answer(Answer({**self._state(), "seq": content.get("seq")}))

    def _state(self) -> dict[str, Any]:
        state = told.state_told(self.explanation, self._where.told(), title=self.describe(), why=self._why)
        check = None if self._check is None else told.check_told(self._check)
        return {**state, "check": check, "traced": [list(path) for path in self._levels if path]}

    def on_level(self, content: dict[str, Any]) -> Answer:
        """Answer with a table; one that is new is traced upstream."""
        path = path_asked(content)
        if path not in self._levels:
            self._may_run()
        level = self._traced(path)
        if path != self._where.path:
            self._where = self._checked(Where(path=path))
            self.changed("selection")
        return told.level_told(self.explanation, level, self._above(path), self._ablated)

    def on_go(self, content: dict[str, Any]) -> None:
        """Take note of what the browser lists, and of the row that is picked."""
        if path_asked(content) != self._where.path:
            return  # of a table that is left by now
        where = self._checked(self._where.asked(content))
        if where != self._where:
            self._where = where
            self.changed("selection")

    def on_rows(self, content: dict[str, Any]) -> Answer | dict[str, Any]:
        """Answer with the largest rows of a choice, also those that had stayed in the kernel."""
        self.on_go(content)
        if path_asked(content) != self._where.path:
            return {"path": path_asked(content), "ablated": []}
        found = self.rows.iloc[:MOST_FETCHED]
        if self._where.row is not None and self._where.row not in found.index:
            found = pd.concat([found, self.selection])
        return told.rows_told(self._level, found, self._ablated)

    def on_ablate(self, content: dict[str, Any]) -> dict[str, Any]:
        """Ablate a row for real; answer with that and what was predicted."""
        if path_asked(content) != self._where.path:
            raise MappnbError("that row is of a table that is left by now; pick it again")
        label = self._picked(whole(content, "row", 0, 2**31 - 1))
        if key_of(self._row(label)) not in self._ablated:
            self._may_run()
        return {"path": list(self._where.path), **self._ablation_told(label)}

    def on_check(self, content: dict[str, Any]) -> dict[str, Any]:
        """Ablate a sample of rows for real."""
        self._may_run()
        return told.check_told(self._checks(whole(content, "n", 1, MOST_CHECKED)))

    # ------------------------------------------------------------------------------------------------------ static
    def twin_html(self) -> str:
        """Return the view as a picture."""
        from mappnb.widgets._expl_static import twin

        return twin(self)

    def snapshot(self) -> Any:
        """Return a picture (SVG) of the view as it is, with the largest rows as a table, that stays in the notebook."""
        from mappnb.widgets._expl_static import snapshot

        return snapshot(self)

    def to_html(self, path: str | Path | None = None) -> str:
        """Return the view as one self-contained page of at most 2 MB; write it to ``path`` if given."""
        from mappnb.widgets._expl_page import page

        return self._written(page(self), path)

    def release(self) -> None:
        """Let go of the explanation and its model."""
        self._explanation = self._check = None
        self._levels.clear()
