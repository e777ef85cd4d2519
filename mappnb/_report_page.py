"""The frame of the report: style, sections, tables."""

from __future__ import annotations

import html
from collections.abc import Callable

import pandas as pd

from mappnb import palette
from mappnb.errors import MappnbError

__all__ = ["note", "page", "section", "table"]

_STYLE = """
:root{--bg:#fff;--fg:#1b1f24;--dim:#5c6670;--line:#d8dde3;--card:#f6f8fa;color-scheme:light dark}
@media(prefers-color-scheme:dark){:root{--bg:#15181c;--fg:#e6e9ed;--dim:#9aa5b1;--line:#343b43;--card:#1d2227}}
body{background:var(--bg);color:var(--fg);font:15px/1.5 system-ui,sans-serif;max-width:1060px;margin:28px auto;padding:0 18px}
h1{font-size:24px;margin:0}h2{font-size:18px;margin:34px 0 6px}p.lead{color:var(--dim);margin:2px 0 18px}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:10px}
.card{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:9px 12px}
.card b{display:block;font-size:20px;font-weight:600}.card span{color:var(--dim);font-size:13px}
.two{display:grid;grid-template-columns:repeat(auto-fit,minmax(420px,1fr));gap:18px}
svg{display:block;max-width:100%;margin-bottom:14px}svg .t{font:11.5px system-ui,sans-serif;fill:var(--fg)}svg .axis{fill:var(--dim)}
svg .grid{stroke:var(--line);stroke-width:1}svg .inbar{fill:#fff}svg .onlight{fill:var(--fg)}
.legend{margin:6px 0;font-size:13px}.key{margin-right:14px;white-space:nowrap}.key i{display:inline-block;width:12px;height:12px;
border-radius:2px;margin-right:5px;vertical-align:-1px}
table{border-collapse:collapse;font-size:13.5px;font-variant-numeric:tabular-nums}
th,td{padding:3px 12px 3px 0;border-bottom:1px solid var(--line);text-align:right}th:first-child,td:first-child{text-align:left}
.scroll{overflow-x:auto}.warn{border-left:4px solid #d55e00;background:var(--card);padding:8px 12px}
code,pre{font:13px ui-monospace,monospace}
pre{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:10px 12px;overflow-x:auto}
.mark{font-weight:700}.note{color:var(--dim);margin:4px 0}.action{background:var(--card);border:1px solid var(--line);border-radius:8px;
padding:10px 14px;margin:10px 0}.action h3{font-size:15px;margin:0 0 4px}.action p{margin:3px 0}.gain{font-weight:600}.dim{color:var(--dim)}
th.text,td.text{text-align:left;white-space:normal;max-width:520px}
td{white-space:nowrap}td.culprit{color:#b0413e;font-weight:600}
@media(prefers-color-scheme:dark){td.culprit{color:#ef8a80}}
details{margin:6px 0;color:var(--dim)}
"""


def page(title: str, body: list[str]) -> str:
    """Return a page that needs nothing else."""
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'><meta name='viewport' content='width=device-width'>"
        f"<title>{html.escape(title)} · mappnb</title><style>{palette.css() + _STYLE}</style></head><body>{''.join(body)}</body></html>"
    )


def section(title: str, make: Callable[[], str]) -> str:
    """Return a section; where the run lacks what it needs, it says so."""
    try:
        inside = make()
    except MappnbError as err:
        inside = note(f"Not shown: {err}")
    return f"<h2>{html.escape(title)}</h2>{inside}"


def note(text: str) -> str:
    """Return a small remark."""
    return f"<p class='note'>{html.escape(text)}</p>"


def table(frame: pd.DataFrame, corner: str, *, text: tuple[str, ...] = ()) -> str:
    """Return a table; columns in ``text`` are set as text."""
    side = dict.fromkeys(text, " class='text'")
    head = "".join(f"<th{side.get(c, '')}>{html.escape(str(c))}</th>" for c in (corner, *frame.columns))
    rows = "".join(
        f"<tr><td>{html.escape(str(i))}</td>"
        + "".join(_cell(c, v, text) for c, v in zip(frame.columns, row, strict=True))
        + "</tr>"
        for i, row in zip(frame.index, frame.to_numpy().tolist(), strict=True)
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def _cell(column: str, value: object, text: tuple[str, ...]) -> str:
    kind = f"text {value}" if column == "verdict" and value == "culprit" else "text"
    name = f" class='{kind}'" if column in text else ""
    return f"<td{name}>{html.escape(str(value))}</td>"
