"""Activation views without a kernel: a picture of the panels, and one page with as many answers as there is room for."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mappnb.errors import MappnbError
from mappnb.widgets._acts_panels import Table
from mappnb.widgets._acts_svg import CLASS, panel_svg
from mappnb.widgets._plot_view import bokeh_told
from mappnb.widgets._static_view import PictureSnapshot, answer_key, page_html

if TYPE_CHECKING:
    from mappnb.widgets._acts_view import ActivationsView

__all__ = ["MOST_BYTES", "page", "snapshot", "twin"]

MOST_BYTES = 2_000_000
"""Of a page."""
MOST_ROWS = 12
"""Of a table below a picture."""
FONT = "font:12px system-ui,sans-serif"
STYLE = (
    f"<style>.{CLASS} text{{font:11px system-ui,sans-serif;fill:var(--jp-ui-font-color1,currentColor)}}"
    f".{CLASS} .axis{{fill:var(--jp-ui-font-color2,currentColor)}}.{CLASS} .bad{{fill:#b3261e;font-weight:700;font-size:14px}}"
    f".{CLASS} .onlight{{fill:#101418}}.{CLASS} .ondark{{fill:#fff}}"
    f".{CLASS} line{{stroke:var(--jp-border-color2,#999);stroke-width:1}}"
    ".mappnb-acts-still{border-collapse:collapse;font:12px system-ui,sans-serif}"
    ".mappnb-acts-still :is(th,td){padding:2px 12px 2px 0;text-align:left;vertical-align:top}"
    "[data-mappnb-twin]{animation:mappnb-late 0s 1.5s both}@keyframes mappnb-late{from{display:none}to{display:block}}</style>"
)


def table_html(table: Table) -> str:
    """Return the first rows of a table as HTML."""
    title = f'<p style="{FONT};margin:6px 0 2px"><b>{html.escape(table.title)}</b></p>'
    note = f'<p style="{FONT};margin:2px 0">{html.escape(table.note)}</p>' if table.note else ""
    if not table.rows:
        return title + note
    head = "".join(f'<th scope="col">{html.escape(c)}</th>' for c in table.columns)
    rows = ["".join(f"<td>{html.escape(_plain(t))}</td>" for t in row) for row in table.rows[:MOST_ROWS]]
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    more = len(table.rows) - len(rows)
    rest = f'<p style="{FONT};margin:2px 0">{more} more rows.</p>' if more else ""
    return f'{title}<table class="mappnb-acts-still"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{rest}{note}'


def _plain(text: str) -> str:
    return "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in text)


def _parts(view: ActivationsView) -> tuple[str, str, str]:
    """Return pictures, tables and caption; what is picked belongs to them."""
    drawn = view._picture()
    panels, tables = [*drawn.panels], [*drawn.tables]
    if view._pick is not None:
        shown = view._detail()
        rows = [[k, v] for k, v in shown.fields]
        tables.append(Table("chosen", f"Chosen: {shown.title}", ("", ""), rows))
        panels += [p for p in shown.panels if not isinstance(p, Table)]
        tables += [p for p in shown.panels if isinstance(p, Table)]
    tables += [p for p in panels if isinstance(p, Table)]
    return "".join(panel_svg(p) for p in panels), "".join(table_html(t) for t in tables), drawn.caption


def twin(view: ActivationsView) -> str:
    """Return pictures and tables as an HTML fragment."""
    pictures, tables, caption = _parts(view)
    said = f"{view.describe()}, as it was saved. {caption}"
    words = f'<figcaption style="{FONT}">{html.escape(said)}</figcaption>'
    return f'{STYLE}<figure style="margin:0">{pictures}{words}</figure>{tables}'


def snapshot(view: ActivationsView) -> PictureSnapshot:
    """Return a picture of the view as it is."""
    pictures, tables, caption = _parts(view)
    return PictureSnapshot(pictures, tables, view.code, view.describe(), html.escape(caption), STYLE, FONT)


def page(view: ActivationsView) -> str:
    """Return one self-contained HTML page: places and picks are added while there is room in :data:`MOST_BYTES`."""
    from mappnb.widgets._acts_view import ActivationsView

    data: dict[str, Any] = {
        "state": {**view._state(), "live": False, "pick": None},
        "answers": {},
        "bokeh": bokeh_told(),
        "code": view.code,
    }
    parts = ("static_answers.js", "activations_static.js")

    def made() -> str:
        return page_html(
            view.describe(), ActivationsView, data, parts=parts, model="StaticActivations", render="renderActivations"
        )

    kept = dict(view._where), view._pick
    room = MOST_BYTES - len(made().encode()) - 10_000
    try:
        _fill(view, data["answers"], room, kept)
        _narrow(data["answers"])
    finally:
        view._where, view._pick, view._drawn, view._shown = kept[0], kept[1], None, None
        view._move({})
        view._pick = kept[1]
    return made()


def _fill(view: ActivationsView, answers: dict[str, Any], room: int, kept: tuple[dict[str, Any], Any]) -> None:
    """Add answers until there is no more room; then nothing that is half there."""
    for changes, picks in [*view.places()]:  # asked for at once: the view is moved below
        view._where = dict(kept[0])
        try:
            view._move(changes)
        except MappnbError:
            continue  # not possible together with the other choices
        here = dict(view._where)
        known = answer_key("show", {"where": here, "theme": "light"}) in answers
        shown = {t: view._told({"theme": t, "ground": ""}) | {"pick": None} for t in ("light", "dark") if not known}
        fits = {
            answer_key("show", {"where": here, "theme": t}): told | {"fields": _copied(told["fields"])}
            for t, told in shown.items()
        }
        room -= _size(fits)
        if room < 0:
            return
        answers |= fits
        for pick in picks:
            detail = view.detail(here, pick)
            told: dict[str, Any] = {
                answer_key("pick", {"where": here, "theme": t, "pick": pick}): {
                    **view._told_detail(detail, {"theme": t, "ground": ""}),
                    "timeline": False,
                }
                for t in ("light", "dark")
            }
            if detail.panels and not any("figure" in p for p in next(iter(told.values()))["panels"]):
                # The page takes the light one.
                del told[answer_key("pick", {"where": here, "theme": "dark", "pick": pick})]
            room -= _size(told)
            if room < 0:
                return
            answers |= told


def _copied(fields: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [dict(f) for f in fields]


def _narrow(answers: dict[str, Any]) -> None:
    """Leave choices out that the page has no answer to."""
    for key, told in answers.items():
        if not key.startswith("show "):
            continue
        theme = json.loads(key[len("show ") :])["theme"]
        for field in told["fields"]:
            name = field["key"]
            field["options"] = [
                o
                for o in field["options"]
                if answer_key("show", {"where": told["where"] | {name: o[0]}, "theme": theme}) in answers
            ]
        told["fields"] = [f for f in told["fields"] if len(f["options"]) > 1]


def _size(answers: Mapping[str, Any]) -> int:
    return sum(len(k) + len(json.dumps(v)) for k, v in answers.items()) + 8 * len(answers)
