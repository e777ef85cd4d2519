"""View: what every view of a run has. A view is pure columns plus a thin class; this is the thin part's common half."""

from __future__ import annotations

import contextlib
import importlib
import logging
import secrets
import weakref
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any, ClassVar

import anywidget
import numpy as np
import traitlets

from mappnb.errors import MappnbError
from mappnb.widgets._cells import Cells
from mappnb.widgets._messages import Answer, flag, number, numbers, pack, text, whole

__all__ = ["Answer", "View", "bundle", "flag", "number", "numbers", "static_text", "text", "whole"]

log = logging.getLogger("mappnb")
MAX_ERRORS = 50


def static_text(name: str) -> str:
    """Return a file of ``mappnb/widgets/static`` as text. Read once: a file path would keep every view alive (anywidget)."""
    return (resources.files("mappnb.widgets") / "static" / name).read_text(encoding="utf-8")


def bundle(*parts: str, render: str) -> str:
    """Return one ES module out of files in ``mappnb/widgets/static``.

    Parameters
    ----------
    *parts : str
        File names, in the order in which they need each other. They hold plain functions and classes, no imports.
    render : str
        Name of the function that draws, ``function ({model, el})``.
    """
    body = "\n".join(static_text(part) for part in parts)
    return f"{body}\nexport default {{ render: {render} }};\n"


class View(anywidget.AnyWidget):
    """A view of a run, in a notebook.

    A subclass gives ``_esm`` (see :func:`bundle`), ``_css``, and a method ``on_<kind>(content) -> Answer | dict | None`` for each kind of
    message that its browser half sends. It says its state by :attr:`code` and :meth:`describe`, and its picture by :meth:`twin_html`.

    Attributes
    ----------
    errors : list of str
        What went wrong in answering the browser, the newest last. Each was shown in the view too.

    Notes
    -----
    Nothing but an id is a synced trait: data travel in messages, so that neither a saved notebook nor a second display holds them.
    """

    _esm = "export default { render() {} };"
    twin_id = traitlets.Unicode(help="ties this view to its static twin on the page").tag(sync=True)

    closed = True  # until it is made: a view whose making failed is closed
    _live: ClassVar[weakref.WeakSet[View]] = weakref.WeakSet()
    _cells: ClassVar[Cells] = Cells()

    def __init__(self) -> None:
        super().__init__(twin_id=secrets.token_hex(8))
        self.errors: list[str] = []
        self.theme = "light"
        self.binary: bool | None = None  # unknown until the browser has said what became of the probe
        self.closed = False
        self._listeners: dict[str, list[Callable[[View], None]]] = {}
        self._probe = ""
        self.on_msg(self._received)
        View._live.add(self)
        View._cells.made(self)

    # ---------------------------------------------------------------------------------------------------- messages
    def send_answer(self, answer: Answer) -> None:
        """Send an answer to the browser, in parts if it is long."""
        if self.closed:
            return
        for content, buffers in pack(answer, binary=self.binary is not False):
            self.send(content, buffers)

    def tell(self, kind: str, **content: Any) -> None:
        """Send a small message to the browser."""
        self.send_answer(Answer({"kind": kind, **content}))

    def _received(self, _: Any, content: Any, buffers: Any) -> None:
        """Answer one message; whatever goes wrong is shown in the view and kept in :attr:`errors`."""
        if self.closed or not isinstance(content, dict):
            return
        kind, seq = content.get("kind"), content.get("seq")
        handler = getattr(self, f"on_{kind}", None) if isinstance(kind, str) and kind.isidentifier() else None
        try:
            if handler is None:
                raise MappnbError(f"unknown message {kind!r:.80}: the browser's half of the view is of another version")
            answer = handler(content)
            if answer is not None:
                answer = answer if isinstance(answer, Answer) else Answer(dict(answer))
                answer.content = {"kind": kind, "seq": seq, **answer.content}
                self.send_answer(answer)
        except Exception as err:  # noqa: BLE001 (an error in a callback would vanish in the server's log)
            self.fail(err, of=str(kind), seq=seq)

    def fail(self, err: BaseException, *, of: str, seq: Any = None) -> None:
        """Show an error in the view, and keep it."""
        said = str(err) if isinstance(err, MappnbError) else f"{type(err).__name__}: {err}"
        self.errors = [*self.errors, f"{of}: {said}"][-MAX_ERRORS:]
        log.debug("mappnb: %s", of, exc_info=err)
        self.tell("error", of=of, seq=seq, text=said[:2000])

    def on_ready(self, content: dict[str, Any]) -> None:
        """Answer a browser that has drawn the view: ask it whether binary buffers come through."""
        self.theme = "dark" if content.get("theme") == "dark" else "light"
        self._probe = secrets.token_hex(4)
        pattern = np.arange(256, dtype=np.uint8)
        self.send_answer(Answer({"kind": "probe", "seq": content.get("seq"), "token": self._probe}, {"probe": pattern}))

    def on_probed(self, content: dict[str, Any]) -> None:
        """Take note of what became of the probe."""
        if content.get("token") == self._probe:
            self.binary = content.get("binary") is True
            if not self.binary:
                self.tell("note", text="This front end loses binary buffers: data come as text, a third longer.")

    def on_code(self, content: dict[str, Any]) -> dict[str, Any]:
        """Answer with the Python line of the view."""
        return {"text": self.code}

    # --------------------------------------------------------------------------------------------------- listeners
    def on_change(self, name: str, call: Callable[[View], None]) -> Callable[[], None]:
        """Call ``call(view)`` when ``name`` ("window", "selection", ...) changes; returns what ends that."""
        self._listeners.setdefault(name, []).append(call)

        def stop() -> None:
            with contextlib.suppress(ValueError):
                self._listeners.get(name, []).remove(call)

        return stop

    def changed(self, name: str) -> None:
        """Tell the listeners of ``name``."""
        for call in [*self._listeners.get(name, ())]:
            try:
                call(self)
            except Exception as err:  # noqa: BLE001 (a broken listener must not break the view)
                self.fail(err, of=f"linked to {name}")

    # ----------------------------------------------------------------------------------------------------- showing
    @property
    def code(self) -> str:
        """The Python line that makes this view again, as it is now."""
        raise NotImplementedError

    def describe(self) -> str:
        """Return the view in one line: stable, no address, path or time of day in it."""
        return f"{type(self).__name__}()"

    def twin_html(self) -> str:
        """Return the view's static twin: an HTML fragment with a picture, shown where the live view cannot be."""
        return ""

    @staticmethod
    def _written(page: str, path: str | Path | None) -> str:
        """Return a page, after writing it to ``path`` if that is given."""
        if path is not None:
            Path(path).write_text(page, encoding="utf-8")
        return page

    def __repr__(self) -> str:
        return self.describe()

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        bundle_ = super()._repr_mimebundle_(**kwargs)
        data, metadata = bundle_ if isinstance(bundle_, tuple) else (bundle_, {})
        return {**(data or {}), "text/plain": self.describe()}, metadata

    def _ipython_display_(self) -> None:
        """Show the live view, and below it the twin, which hides as soon as the live view is drawn."""
        display: Any = importlib.import_module("IPython.display").display
        if self.closed:
            raise MappnbError(f"{self.describe()} is closed; make it again: {self.code}")
        data, metadata = self._repr_mimebundle_()
        display(data, metadata=metadata, raw=True)
        try:
            twin = self.twin_html()
        except Exception as err:  # noqa: BLE001 (the live view is there)
            self.fail(err, of="static twin")
            return
        if twin:
            html = f'<div data-mappnb-twin="{self.twin_id}">{twin}</div>'
            display({"text/html": html, "text/plain": f"{self.describe()}, static"}, raw=True)

    # ----------------------------------------------------------------------------------------------------- closing
    def close(self) -> None:
        """Free everything: the widget, its layout, its channel to the browser and what it holds of the run."""
        if self.closed:
            return
        with contextlib.suppress(Exception):  # the channel may be gone
            self.tell("close")
        self.closed = True
        self._listeners.clear()
        View._live.discard(self)
        View._cells.forget(self)
        self.release()
        self.on_msg(self._received, remove=True)
        layout = self.layout
        super().close()
        if layout is not None:
            layout.close()

    def release(self) -> None:
        """Let go of data; called once by :meth:`close`."""
