"""Densities: the values of queries, keys, values, MLP and residual stream, token by entry."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from mappnb.activations import streams_of
from mappnb.errors import MappnbError, SchemaError
from mappnb.run import Run
from mappnb.widgets._acts_choices import Chooser
from mappnb.widgets._acts_panels import Bars, Heat, number_text
from mappnb.widgets._acts_samples import sample_choices, token_names
from mappnb.widgets._acts_view import ActivationsView, Detail, Pick, Picture, source_of
from mappnb.widgets.arrays import ArrayView, array_view

__all__ = ["Densities"]

Array = np.ndarray[Any, Any]
MOST_ROWS, MOST_COLUMNS = 128, 256
"""Cells of a heatmap: of more tokens a window, of more entries the furthest from zero of each cell."""
BINS = 40


class Densities(ActivationsView):
    """Values of one point, token by entry, and how they are spread.

    Parameters
    ----------
    source : Run, DataTree or Dataset
        A run that captured tensors, its ``run.activations``, or one stream of them.
    point, sample, layer, head, first : optional
        What is looked at; ``head``: of q, k, v and z; ``first``: place of the first token shown.
    limits : str, optional
        ``"all"`` or ``"most"``: colours end at the largest size, or at that of 99 in 100.

    Raises
    ------
    MappnbError
        If no tensors were captured, or a choice does not exist.

    Notes
    -----
    One layer of one sample is read at a time. :meth:`array_view` shows the same, or any part of it, with every value.
    """

    name = "densities"
    hint = "Choose a cell for its value and the spread of its token's values"

    def __init__(self, source: Run | xr.DataTree | xr.Dataset, **choices: Any) -> None:
        run, self._activations = source_of(source, what="Densities")
        caller = "run.densities" if run is not None else "mappnb.widgets.Densities"
        self._kept: tuple[Any, xr.DataArray] | None = None
        super().__init__(caller, [] if run is not None else ["activations"], run, choices)

    def reload(self) -> None:
        """Take the run's activations anew."""
        if self._run is not None:
            self._activations, self._kept = self._run.activations, None

    @property
    def values(self) -> xr.DataArray:
        """The values that are looked at, dims (token, entry), without the window."""
        return self._values(self._where)

    def array_view(self, **options: Any) -> ArrayView:
        """Return the values as :func:`mappnb.widgets.array_view` shows them; ``options`` as there."""
        values = self.values
        if values.dtype.kind == "f" and bool((~np.isfinite(values)).any()):
            options = {"missing": ~np.isfinite(values), **options}
        return array_view(values, **{"tokens": {"token": self._names(self._where)}, **options})

    def describe(self) -> str:
        """Return the view in one stable line."""
        return f"Densities({self._where['point']}, {len(self._known())} points)"

    def choices(self, ask: Chooser) -> None:
        """Point, sample, layer, head, tokens and limits."""
        known = self._known()
        if not known:
            raise SchemaError(
                "activations: no tensors were captured; record e.g. mappnb.Capture(['q', 'k', 'v', 'resid_post'])"
            )
        point = ask("point", "Point", [(p, p) for p in known], "resid_post")
        data = known[point]
        ask("sample", "Sample", sample_choices(data))
        dims = data[point].dims
        ask("layer", "Layer", [(int(x), str(int(x))) for x in data["layer"].values] if "layer" in dims else [(-1, "–")])
        heads = [d for d in ("head", "kv_head") if d in dims]
        ask("head", "Head", [(h, str(h)) for h in range(data.sizes[heads[0]])] if heads else [(-1, "–")])
        count = data.sizes["token"]
        ask("first", "Tokens", [(at, f"{at} to {min(at + MOST_ROWS, count) - 1}") for at in range(0, count, MOST_ROWS)])
        ask("limits", "Colours", [("all", "to the largest"), ("most", "99 in 100")], "most")

    def picture(self, where: Mapping[str, Any]) -> Picture:
        """Return the heatmap and the spread of all its values."""
        values = np.asarray(self._values(where).values, np.float64)
        first = where["first"]
        shown, edges = _pooled(values[first : first + MOST_ROWS])
        names = self._names(where)[first : first + MOST_ROWS]
        finite = np.abs(shown[np.isfinite(shown)])
        end = float(np.quantile(finite, 0.99) if where["limits"] == "most" else finite.max()) if finite.size else 1.0
        signed = bool((values[np.isfinite(values)] < 0).any())
        limits = (-end if signed else 0.0, end) if end > 0 else (-1.0, 1.0)
        entry = str(self._values(where).dims[-1])
        last = (*edges[1:], values.shape[1])
        columns = [f"{a}" for a in edges]
        heat = Heat(
            key="cells",
            title=f"{where['point']}{self._place(where)}: values",
            values=shown,
            rows=[_cut(n) for n in names],
            columns=columns,
            x_label=entry,
            y_label="token",
            row_titles=[f"“{n}” ({first + i})" for i, n in enumerate(names)],
            column_titles=[
                f"{entry} {a}" if b - a <= 1 else f"{entry} {a} to {b - 1}" for a, b in zip(edges, last, strict=True)
            ],
            diverging=signed,
            limits=limits,
        )
        pooled = " A cell of several entries shows the one furthest from zero." if len(edges) < values.shape[1] else ""
        bars = _spread("all", "Spread of all values of this sample and layer", values)
        return Picture([heat, bars], f"Hatched: padding, not recorded, or not finite.{pooled}")

    def detail(self, where: Mapping[str, Any], pick: Pick) -> Detail:
        """Return one token's values."""
        values = np.asarray(self._values(where).values, np.float64)
        row, col = pick.get("row", -1), pick.get("col", -1)
        edges = _pooled(values)[1]
        at = where["first"] + row
        if pick.get("panel") != "cells" or row < 0 or not (at < len(values) and 0 <= col < len(edges)):
            raise MappnbError(f"no cell {pick}; there are {len(values)} tokens and {len(edges)} columns")
        line = values[at]
        name = self._names(where)[at]
        finite = line[np.isfinite(line)]
        fields = [("value", number_text(float(_pooled(line[None])[0][0, col]), 4))]
        if finite.size:
            fields += [
                ("norm", number_text(float(np.sqrt((finite**2).sum())), 4)),
                ("mean", number_text(float(finite.mean()), 4)),
                ("largest size", f"{number_text(float(np.abs(finite).max()), 4)} at {int(np.nanargmax(np.abs(line)))}"),
            ]
        frame = pd.DataFrame({"token": at, "entry": np.arange(len(line)), "value": line})
        return Detail(
            f"“{name}” ({at}){self._place(where)}", fields, [_spread("token", "Spread of its values", line)], frame
        )

    def places(self) -> Iterator[tuple[dict[str, Any], list[Pick]]]:
        """Yield what is looked at with a pick of each token, then other layers and points."""
        yield {}, []
        for key in ("limits", "layer", "head", "point"):
            for value in self.options.get(key, []):
                yield {key: value}, []
        yield {}, [{"panel": "cells", "row": r, "col": 0} for r in range(min(32, len(self.values)))]

    def _known(self) -> dict[str, xr.Dataset]:
        out: dict[str, xr.Dataset] = {}
        for data in streams_of(self._activations).values():
            for name in map(str, data.data_vars):
                if "token" in data[name].dims and data[name].dims[-1] != "token" and "bucket" not in data[name].dims:
                    out.setdefault(name, data)
        return out

    def _values(self, where: Mapping[str, Any]) -> xr.DataArray:
        key = tuple(where[k] for k in ("point", "sample", "layer", "head"))
        if self._kept is None or self._kept[0] != key:
            self._kept = key, self._read(where)
        return self._kept[1]

    def _read(self, where: Mapping[str, Any]) -> xr.DataArray:
        data, point = self._known()[where["point"]], where["point"]
        place: dict[str, Any] = {"sample": where["sample"]} if "sample" in data.dims else {}
        if "layer" in data[point].dims:
            place["layer"] = [int(x) for x in data["layer"].values].index(where["layer"])
        heads = [d for d in ("head", "kv_head") if d in data[point].dims]
        place |= {heads[0]: where["head"]} if heads else {}
        part = data[point].isel({d: v for d, v in place.items() if d in data[point].dims})
        values = part.transpose("token", ...).load()
        for name in ("mask", f"{point}_present"):
            if name in data.variables:
                there = data[name].isel({d: v for d, v in place.items() if d in data[name].dims}).load()
                values = values.where(there.drop_vars(there.coords))
        named: xr.DataArray = values.rename(point)
        return named

    def _names(self, where: Mapping[str, Any]) -> list[str]:
        return token_names(self._known()[where["point"]], where["sample"])

    @staticmethod
    def _place(where: Mapping[str, Any]) -> str:
        said = [f"layer {where['layer']}"] if where["layer"] >= 0 else []
        said += [f"head {where['head']}"] if where["head"] >= 0 else []
        return f", {', '.join(said)}" if said else ""


def _pooled(values: Array) -> tuple[Array, list[int]]:
    """Return values in at most :data:`MOST_COLUMNS` columns, and the first entry of each."""
    size = values.shape[1]
    edges = np.unique(np.linspace(0, size, min(size, MOST_COLUMNS) + 1).astype(int))[:-1]
    if len(edges) == size:
        return values, edges.tolist()
    high, low = np.fmax.reduceat(values, edges, axis=1), np.fmin.reduceat(values, edges, axis=1)
    return np.where(np.abs(high) >= np.abs(low), high, low), edges.tolist()


def _spread(key: str, title: str, values: Array) -> Bars:
    there = values[np.isfinite(values)]
    counts, edges = np.histogram(there, BINS) if there.size else (np.zeros(1), np.array([0.0, 1.0]))
    share = counts / max(counts.sum(), 1)
    return Bars(key, title, (edges[:-1] + edges[1:]) / 2, share, "value", "share")


def _cut(text: str) -> str:
    seen = "".join("·" if c == " " else c if c.isprintable() else f"\\u{ord(c):04x}" for c in text)
    return seen if len(seen) <= 12 else f"{seen[:11]}…"
