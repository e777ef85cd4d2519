"""Causal trace: which states carry an answer from the subject to the end, layer by token."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from mappnb.errors import MappnbError, SchemaError
from mappnb.run import Run
from mappnb.widgets._acts_choices import Chooser
from mappnb.widgets._acts_panels import Heat, Lines, number_text
from mappnb.widgets._acts_samples import token_names
from mappnb.widgets._acts_view import ActivationsView, Detail, Pick, Picture

__all__ = ["CausalTrace"]

VALUES = {"indirect_effect": "probability that comes back", "probability": "probability of the answer"}
KINDS = {"state": "residual stream of a layer", "mlp": "MLPs around a layer", "attn": "attention around a layer"}


class CausalTrace(ActivationsView):
    """Heatmaps of a causal trace, layer by token, one for each kind of state.

    Parameters
    ----------
    source : Dataset, dims (kind, layer, token), or Run
        From :func:`mappnb.interp.causal_trace`. A run alone holds no live model: give ``model``, ``prompt`` and ``subject`` too.
    model : Model, module or list of modules, optional
        As for `mappnb.interp.causal_trace`, which is then called.
    prompt, subject : optional
        As there.
    value : str, optional
        ``"indirect_effect"`` or ``"probability"``.
    **options
        Other arguments of :func:`mappnb.interp.causal_trace`.

    Raises
    ------
    MappnbError
        If it is no trace, or a run without a model.
    """

    name = "trace"
    hint = "Choose a cell for its effect and its token's course over the layers"

    def __init__(
        self,
        source: Any,
        model: Any = None,
        *,
        prompt: Any = None,
        subject: Any = None,
        value: str | None = None,
        **options: Any,
    ) -> None:
        self._trace: xr.Dataset = _trace_of(source, model, prompt, subject, options)
        super().__init__("mappnb.widgets.CausalTrace", ["trace"], None, {"value": value})

    @property
    def trace(self) -> xr.Dataset:
        """The trace that is drawn."""
        return self._trace

    def select(self, *, kind: str, layer: int, token: int) -> pd.DataFrame:
        """Select a cell; returns its numbers as a row."""
        layers = [int(x) for x in self._trace["layer"].values]
        kinds = [str(k) for k in self._trace["kind"].values]
        if kind not in kinds or layer not in layers or not 0 <= token < self._trace.sizes["token"]:
            raise MappnbError(
                f"no cell {kind!r}, layer {layer}, token {token}; kinds {', '.join(kinds)}, {len(layers)} layers"
            )
        return self._select({"panel": kind, "row": len(layers) - 1 - layers.index(layer), "col": token})

    def describe(self) -> str:
        """Return the view in one stable line."""
        s = self._trace.sizes
        return f"CausalTrace({s['layer']} layers, {s['token']} tokens, answer {str(self._trace.attrs.get('answer', ''))!r})"

    def choices(self, ask: Chooser) -> None:
        """Ask for what the colours show."""
        ask("value", "Colour", [(k, v) for k, v in VALUES.items() if k in self._trace], "indirect_effect")

    def picture(self, where: Mapping[str, Any]) -> Picture:
        """Return a heatmap for each kind, and sums over the tokens."""
        value, trace = where["value"], self._trace
        layers = [str(int(x)) for x in trace["layer"].values[::-1]]
        subject = np.asarray(trace["subject"].values, bool) if "subject" in trace.coords else np.zeros(0, bool)
        marked = np.flatnonzero(subject).tolist()
        tokens = token_names(trace, 0)
        panels: list[Any] = []
        for at, kind in enumerate(map(str, trace["kind"].values)):
            values = np.asarray(trace[value].isel(kind=at).transpose("layer", "token").values, np.float64)[::-1]
            panels.append(
                Heat(
                    key=kind,
                    title=f"{KINDS.get(kind, kind)}: {VALUES[value]}",
                    values=values,
                    rows=layers,
                    columns=[_seen(t) for t in tokens],
                    row_titles=[f"{kind}, layer {x}" for x in layers],
                    column_titles=[
                        f"{t!r} ({i}{', subject' if i in set(marked) else ''})" for i, t in enumerate(tokens)
                    ],
                    diverging=value == "indirect_effect"
                    and bool(np.nanmin(values, initial=0) < -0.02 * np.nanmax(values, initial=0)),
                    marked_columns=marked,
                )
            )
        return Picture([*panels, self._sums(value)], self._caption())

    def _sums(self, value: str) -> Lines:
        sums = self._trace[value].sum("token")
        lines = [(str(k), np.asarray(sums.sel(kind=k).values, np.float64)) for k in self._trace["kind"].values]
        x = self._trace["layer"].values.astype(np.float64)
        return Lines("sums", "Summed over the tokens", x, lines, "layer", VALUES[value].split(" ")[0])

    def _caption(self) -> str:
        trace = self._trace
        said = f"Answer {str(trace.attrs.get('answer', ''))!r}"
        if "clean" in trace and "corrupted" in trace:
            said += f": probability {number_text(float(trace['clean']))} clean, {number_text(float(trace['corrupted']))} corrupted"
        window = f" MLPs and attention: {trace.attrs['window']} layers at once." if "window" in trace.attrs else ""
        return f"{said}. Subject marked by *.{window}"

    def detail(self, where: Mapping[str, Any], pick: Pick) -> Detail:
        """Return the numbers of a cell, and its token over the layers."""
        trace, kind = self._trace, pick.get("panel", "")
        row, col = pick.get("row", -1), pick.get("col", -1)
        kinds = [str(k) for k in trace["kind"].values]
        if kind not in kinds or not (0 <= row < trace.sizes["layer"] and 0 <= col < trace.sizes["token"]):
            raise MappnbError(f"no cell {pick}; kinds: {', '.join(kinds)}")
        part = trace.isel(token=col)
        cell = part.sel(kind=kind).isel(layer=trace.sizes["layer"] - 1 - row)
        numbers = {n: float(cell[n]) for n in VALUES if n in cell}
        fields = [(VALUES[n], number_text(v, 4)) for n, v in numbers.items()]
        if "clean" in trace and "corrupted" in trace and "indirect_effect" in numbers:
            total = float(trace["clean"]) - float(trace["corrupted"])
            fields.append(("of all that was lost", f"{numbers['indirect_effect'] / total:.1%}" if total else "–"))
        token = token_names(trace, 0)[col]
        lines = [(k, np.asarray(part[where["value"]].sel(kind=k).values, np.float64)) for k in kinds]
        x = trace["layer"].values.astype(np.float64)
        course = Lines("course", f"“{token}” over the layers", x, lines, "layer", VALUES[where["value"]].split(" ")[0])
        frame = pd.DataFrame(
            [{"kind": kind, "layer": int(cell["layer"]), "token": col, "token_text": token, **numbers}]
        )
        return Detail(f"{kind}, layer {int(cell['layer'])}, “{token}” ({col})", fields, [course], frame)

    def places(self) -> Iterator[tuple[dict[str, Any], list[Pick]]]:
        """Yield both values, and a pick of each token and kind."""
        trace = self._trace
        best = trace[self._where["value"]].argmax("layer")
        picks = [
            {"panel": str(k), "row": int(trace.sizes["layer"] - 1 - best.sel(kind=k)[t]), "col": t}
            for k in trace["kind"].values
            for t in range(trace.sizes["token"])
        ]
        for value in VALUES:
            yield {"value": value}, []
        yield {}, picks


def _trace_of(source: Any, model: Any, prompt: Any, subject: Any, options: dict[str, Any]) -> xr.Dataset:
    if isinstance(source, xr.Dataset):
        if not {"kind", "layer", "token"} <= set(source.dims) or "probability" not in source:
            raise SchemaError(
                f"CausalTrace: dims {tuple(source.dims)}; expected (kind, layer, token), as mappnb.interp.causal_trace gives it"
            )
        return source.transpose("kind", "layer", "token", ...)
    if isinstance(source, Run) and model is None:
        raise MappnbError(
            "a causal trace runs a model, and a run holds none: run.causal_trace(model, prompt=..., subject=...), or "
            "mappnb.widgets.CausalTrace(mappnb.interp.causal_trace(model, ...))"
        )
    live = model if model is not None else source
    if prompt is None or subject is None:
        raise MappnbError("CausalTrace: give prompt= and subject=, or a Dataset of mappnb.interp.causal_trace")
    from mappnb.interp.causal import causal_trace

    return causal_trace(live, prompt, subject=subject, **options)


def _seen(text: str) -> str:
    return "".join("·" if c == " " else c if c.isprintable() else f"\\u{ord(c):04x}" for c in text)
