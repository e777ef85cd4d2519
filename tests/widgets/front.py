"""A front end for tests: keeps what a view sends, and sends what a browser would."""

from __future__ import annotations

import itertools
import json

import numpy as np

DTYPES = {"f32": "<f4", "f64": "<f8", "u8": "u1", "u16": "<u2", "u32": "<u4", "i32": "<i4"}


class Front:
    """Stands in for the browser half of one view."""

    def __init__(self, view, *, binary: bool = True) -> None:
        self.view, self.sent, self.numbers = view, [], itertools.count(1)
        view.send = lambda content, buffers=None: self.sent.append((content, list(buffers or [])))
        self.ask("ready", width=900, height=400, dpr=1, theme="light")
        probe = self.last("probe")[0]
        self.say("probed", token=probe["token"], binary=binary)

    def say(self, kind: str, **fields) -> None:
        """Send a message as the browser would: through JSON."""
        content = json.loads(json.dumps({"kind": kind, "seq": next(self.numbers), **fields}))
        self.view._received(None, content, [])

    def ask(self, kind: str, **fields):
        """Send a message; returns what came back: (content, arrays) of the last message."""
        before = len(self.sent)
        self.say(kind, **fields)
        assert len(self.sent) > before, f"{kind} was not answered"
        return self.decoded(*self.sent[-1])

    def last(self, kind: str):
        """Content and arrays of the last message of a kind."""
        found = [m for m in self.sent if m[0]["kind"] == kind]
        assert found, f"no {kind} among {[m[0]['kind'] for m in self.sent]}"
        return self.decoded(*found[-1])

    @staticmethod
    def decoded(content, buffers):
        arrays = {}
        for spec, buffer in zip(content.get("arrays", []), buffers, strict=bool(buffers)):
            arrays[spec["name"]] = np.frombuffer(buffer, DTYPES[spec["dtype"]]).reshape(spec["shape"])
        return content, arrays

    @property
    def largest(self) -> int:
        """Bytes of the largest message."""
        return max(len(json.dumps(c)) + sum(len(b) for b in buffers) for c, buffers in self.sent)

    def window(self, t0=None, t1=None, *, pixels=1000, rows=None):
        """Ask for a window; by default all of it."""
        meta = self.last("meta")[0]
        t0 = meta["extent"][0] if t0 is None else t0
        t1 = meta["extent"][1] if t1 is None else t1
        first, last = rows or (0, len(meta["rows"]))
        return self.ask("window", t0=t0, t1=t1, pixels=pixels, row0=first, row1=last)
