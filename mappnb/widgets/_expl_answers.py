"""Answers of the explain view: its state, its tables, a check, in the form in which they go to the browser."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from mappnb.interp.explanation import Explanation
from mappnb.palette import DIVERGING
from mappnb.widgets._attn_tokens import shown, shown_all
from mappnb.widgets._expl_levels import MOST_ROWS, NAMES, Level, columns, key_of, row_columns, sums, waterfall
from mappnb.widgets._expl_where import BY
from mappnb.widgets._messages import Answer

__all__ = ["check_told", "level_told", "read_only", "rows_told", "state_told"]

Key = tuple[str, int, int, int]


def read_only(explanation: Explanation) -> str:
    """Return why the browser may run nothing, empty if it may: a click reaches one rank, and the model wants all of them."""
    sizes = [f"{name}={size}" for name, size in explanation.model.layout.items() if name in _AXES and size > 1]
    if not sizes:
        return ""
    return (
        f"The model is spread over ranks ({', '.join(sizes)}), and a click reaches only this one: the buttons that run it need a model in "
        "one process. Call view.ablate(row), view.upstream(row) and view.check() on every rank; what they find is shown here."
    )


_AXES = ("tp", "pp", "cp", "dp")


def state_told(explanation: Explanation, where: Mapping[str, Any], *, title: str, why: str) -> dict[str, Any]:
    """Return what the browser needs once: question, metric, tokens, layers, colours."""
    activations = explanation.activations
    texts = [str(text) for text in activations["token_text"].values[0]]
    return {
        "kind": "state", "title": title, "question": explanation.question, "metric": explanation.metric,
        "unexplained": explanation.unexplained, "readonly": why, "where": dict(where), "tokens": shown_all(texts),
        "layers": num_layers(explanation), "by": list(BY.items()), "palette": {theme: list(c) for theme, c in DIVERGING.items()},
    }  # fmt: skip


def num_layers(explanation: Explanation) -> int:
    """Return the number of layers of the table."""
    return int(explanation.table["layer"].max()) + 1


def level_told(
    explanation: Explanation, level: Level, above: list[Level], ablated: Mapping[Key, float], *, most: int = MOST_ROWS
) -> Answer:
    """Return one table with its sums, the way back, and what was really ablated of its rows."""
    arrays = columns(level, most=most)
    known = {name: i for i, name in enumerate(level.components)}
    content: dict[str, Any] = {
        "path": list(level.path),
        "crumbs": [[list(each.path), each.title] for each in [*above, level]],
        "components": [[name, NAMES.get(name, name.replace("_", " "))] for name in known],
        "measures": list(level.measures),
        "left": len(level.table) - len(arrays["row"]),
        "ablated": _ablated_told(level.table.loc[arrays["row"]], ablated),
    }
    if not level.path:
        steps = waterfall(level.table, explanation.unexplained)
        content["waterfall"] = [[s.name, s.component, s.layer, s.value] for s in steps]
    arrays |= sums(level, num_layers(explanation), len(explanation.tokens))
    return Answer(content, arrays)


def rows_told(level: Level, rows: pd.DataFrame, ablated: Mapping[Key, float]) -> Answer:
    """Return rows that had stayed in the kernel."""
    return Answer({"path": list(level.path), "ablated": _ablated_told(rows, ablated)}, row_columns(level, rows))


def _ablated_told(rows: pd.DataFrame, ablated: Mapping[Key, float]) -> list[list[float]]:
    """Return label and real ablation of each row that was ablated."""
    if not ablated:
        return []
    found = rows.assign(row=rows.index).to_dict("records")
    return [[int(row["row"]), ablated[key_of(row)]] for row in found if key_of(row) in ablated]


def check_told(found: pd.DataFrame) -> dict[str, Any]:
    """Return a check: label, component, prediction and real effect of each row, and how well they agree."""
    names = [
        [int(row["row"]), *key_of(row), shown(row["token"], most=12)]
        for row in found.assign(row=found.index).to_dict("records")
    ]  # fmt: skip
    numbers = {name: float(found.attrs[name]) for name in ("correlation", "ratio")}
    return {
        "rows": names,
        "predicted": [float(v) for v in found["attribution"]],
        "real": [float(v) for v in found["ablation"]],
        **{name: value if np.isfinite(value) else None for name, value in numbers.items()},
    }
