"""The explain view as one page without a kernel: the explanation, and every table and ablation that was worked out before."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from mappnb.widgets import _expl_answers as told
from mappnb.widgets._expl_levels import Level
from mappnb.widgets._messages import with_arrays
from mappnb.widgets._static_view import page_html

if TYPE_CHECKING:
    from mappnb.widgets.explain import Explain

__all__ = ["page"]

MOST_BYTES = 1_700_000
"""Of the tables; the page itself is 0.1 MB."""
MOST_ROWS = 12_000
WHY = (
    "This page holds no model: open the notebook to ablate, trace and check. What was worked out there before is here."
)


def _told(view: Explain, level: Level) -> dict[str, Any]:
    answer = told.level_told(view.explanation, level, view._above(level.path), view._ablated, most=MOST_ROWS)
    content, _ = with_arrays({"kind": "level", **answer.content}, answer.arrays, binary=False)
    return content


def page(view: Explain) -> str:
    """Return one self-contained HTML page: the table, those traced upstream as far as there is room, ablations and check."""
    levels: dict[str, Any] = {}
    room = MOST_BYTES
    wanted = [(), *(view._where.path[: d + 1] for d in range(len(view._where.path))), *view._levels]
    for path in dict.fromkeys(wanted):
        made = _told(view, view._levels[path])
        room -= len(json.dumps(made))
        if room >= 0 or not path:
            levels["/".join(map(str, path))] = made
    state = {**view._state(), "readonly": WHY}
    state["traced"] = [path for path in state["traced"] if "/".join(map(str, path)) in levels]
    if state["where"]["path"] and state["where"]["path"] not in state["traced"]:
        state["where"] = {**state["where"], "path": [], "row": None}
    from mappnb.widgets.explain import Explain

    parts = ("static_answers.js", "explain_static.js")
    data = {"state": state, "levels": levels, "code": view.code}
    return page_html(view.describe(), Explain, data, parts=parts, model="StaticExplain", render="renderExplain")
