"""A live view in a page without Jupyter: what the browser sends goes to the view in this process, and its answers go back."""

from __future__ import annotations

import base64
import json
from contextlib import contextmanager
from typing import Any

MODEL = """
class BridgeModel {
  constructor(id) { this.id = id; this.listeners = new Set(); }
  get(name) { return name === "twin_id" ? this.id : undefined; }
  on(type, fn) { if (type === "msg:custom") this.listeners.add(fn); }
  off(type, fn) { this.listeners.delete(fn); }
  send(content) { window.toKernel(JSON.stringify(content)).then((told) => this.emit(JSON.parse(told))); }
  emit(messages) {
    for (const { content, buffers } of messages) {
      const views = buffers.map((text) => new DataView(Uint8Array.from(atob(text), (c) => c.charCodeAt(0)).buffer));
      for (const fn of [...this.listeners]) fn(JSON.parse(JSON.stringify(content)), views);
    }
  }
}
"""


class LivePage:
    """One page with one live view."""

    def __init__(self, browser: Any, view: Any, *, render: str, scheme: str = "light", width: int = 1280) -> None:
        self.view, self.sent = view, []
        self.failed: list[str] = []
        self.asked: list[str] = []
        self.sizes: list[tuple[str, int]] = []
        view.send = lambda content, buffers=None: self.sent.append((content, list(buffers or [])))
        self.context = browser.new_context(viewport={"width": width, "height": 1100}, color_scheme=scheme)
        self.page = self.context.new_page()
        self.page.on("pageerror", lambda e: self.failed.append(str(e)))
        self.page.on("console", lambda m: self.failed.append(m.text) if m.type in ("error", "warning") else None)
        self.page.on("request", lambda r: self.asked.append(r.url))
        self.page.expose_function("toKernel", self._ask)
        kind = next(
            c for c in type(view).__mro__ if isinstance(c.__dict__.get("_esm"), str)
        )  # not the class that traitlets made
        script = kind._esm.rsplit("export default", 1)[0]
        self.page.set_content(
            f"""<!doctype html><html lang="en"><head><meta charset="utf-8"><title>view</title><style>body{{margin:14px;background:#fff}}
            @media(prefers-color-scheme:dark){{body{{background:#15181c}}}}{kind._css}</style></head><body><main><div id="at"></div></main>
            <script type="module">{script}\n{MODEL}
            window.model = new BridgeModel("{view.twin_id}");
            window.undo = {render}({{ model: window.model, el: document.getElementById("at") }});</script></body></html>"""
        )

    def _ask(self, text: str) -> str:
        self.view._received(None, json.loads(text), [])
        return json.dumps(self._taken())

    def _taken(self) -> list[dict[str, Any]]:
        out = []
        for content, buffers in self.sent:
            held = [base64.b64encode(bytes(b)).decode() for b in buffers]
            self.sizes.append((content.get("kind", ""), len(json.dumps(content)) + sum(map(len, buffers))))
            out.append({"content": content, "buffers": held})
        self.sent.clear()
        return out

    def push(self) -> None:
        """Hand over what the view sent by itself."""
        if messages := self._taken():
            self.page.evaluate("m => window.model.emit(m)", messages)

    def settle(self, ms: int = 400) -> None:
        """Wait until what was asked for is drawn."""
        self.push()
        self.page.wait_for_timeout(ms)
        self.push()

    @property
    def outside(self) -> list[str]:
        """Requests to anything but the page itself."""
        return [u for u in self.asked if not u.startswith(("about:", "blob:", "data:"))]


@contextmanager
def live(browser: Any, view: Any, **options: Any):
    """Show a view; gives its page."""
    page = LivePage(browser, view, **options)
    try:
        yield page
    finally:
        page.context.close()
