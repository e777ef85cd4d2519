"""What views share whose plots bokeh draws in the browser."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np

from mappnb.widgets._lab_plots import bokeh_js
from mappnb.widgets._messages import Answer, text
from mappnb.widgets.view import View

__all__ = ["PlotView", "bokeh_told"]


def bokeh_told() -> dict[str, str]:
    """Return BokehJS as a page without a kernel holds it: ``version``, and ``gzip`` in base64."""
    version, packed = bokeh_js()
    return {"version": version, "gzip": base64.b64encode(packed).decode("ascii")}


class PlotView(View):
    """A view with plots: BokehJS comes from the kernel's package over the view's own channel, when it is first needed."""

    @staticmethod
    def _look(content: Mapping[str, Any]) -> dict[str, str]:
        """Return the theme and the colour of the ground that a message asks for."""
        theme = "dark" if content.get("theme") == "dark" else "light"
        return {"theme": theme, "ground": text(content, "ground", most=40) if "ground" in content else ""}

    def on_bokeh(self, content: dict[str, Any]) -> Answer:
        """Answer with BokehJS, gzipped, unless the page has the same version."""
        version, packed = bokeh_js()
        if content.get("version") == version:
            return Answer({"version": version})
        parts = np.array_split(np.frombuffer(packed, np.uint8), 2)
        return Answer({"version": version}, {f"js{i}": p for i, p in enumerate(parts)})
