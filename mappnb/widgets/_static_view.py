"""What the static twins of views share: a picture that stays in the notebook, and a page that is its own kernel."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mappnb.widgets.view import static_text

__all__ = ["PictureSnapshot", "answer_key", "page_html"]


@dataclass(frozen=True, slots=True)
class PictureSnapshot:
    """A picture of a view that stays in the notebook, with its numbers.

    Attributes
    ----------
    svg : str
        The picture.
    table : str
        The numbers, as HTML.
    code : str
        The line that makes the view again.
    text : str
        The view in one line.
    caption : str
        Below the picture, as HTML.
    style, font : str
        CSS of the picture and the table, and of the words.
    """

    svg: str
    table: str
    code: str
    text: str
    caption: str
    style: str
    font: str

    def __repr__(self) -> str:
        return f"Snapshot of {self.text}"

    def _repr_html_(self) -> str:
        caption = f'<figcaption style="{self.font}">{self.caption}</figcaption>'
        code = f'<details style="{self.font}"><summary>code</summary><code>{html.escape(self.code)}</code></details>'
        return f'{self.style}<figure style="margin:0">{self.svg}{caption}</figure>{self.table}{code}'

    def save(self, path: Any) -> None:
        """Write the picture as an SVG file."""
        with open(path, "w", encoding="utf-8") as file:
            file.write(self.svg.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1))


def page_html(title: str, view: type[Any], data: Any, *, parts: tuple[str, ...], model: str, render: str) -> str:
    """Return one self-contained HTML page of a view.

    Parameters
    ----------
    title : str
        Its heading.
    view : type of View
        The class as it was written: a view that was made has one of its own.
    data : object
        What the page answers from, as JSON.
    parts : tuple of str
        Files of ``mappnb/widgets/static`` that answer in place of the kernel.
    model, render : str
        The class in them, and the function that draws.
    """
    safe = json.dumps(data, ensure_ascii=True).replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    script = f"{view._esm}".rsplit("export default", 1)[0]
    title = html.escape(title)
    answers = "\n".join(static_text(part) for part in parts)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>{view._css}'
        "body{margin:16px;font-family:system-ui,sans-serif;background:#fff;color:#1b1f24}"
        "@media(prefers-color-scheme:dark){body{background:#15181c;color:#e6e6e6}}</style></head>"
        f'<body><main><h1 style="font-size:18px">{title}</h1><div id="view"></div></main>'
        f'<script type="application/json" id="data">{safe}</script>'
        f'<script type="module">{script}\n{answers}\n'
        'const data = JSON.parse(document.getElementById("data").textContent);\n'
        f'{render}({{ model: new {model}(data), el: document.getElementById("view") }});</script></body></html>'
    )


def answer_key(kind: str, body: Mapping[str, Any]) -> str:
    """Return the name of the answer to a message, as a page that holds answers asks for it (``canonical`` of static_answers.js)."""
    return f"{kind} {json.dumps(body, sort_keys=True, separators=(',', ':'), ensure_ascii=False)}"
