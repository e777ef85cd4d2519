"""Tables of the explain view: the explanation itself, and what was traced upstream from its rows; as columns and sums for drawing."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from mappnb.widgets._attn_tokens import shown

__all__ = [
    "MOST_ROWS",
    "LAYER_COMPONENTS",
    "Level",
    "Step",
    "columns",
    "component_name",
    "digits_for",
    "key_of",
    "place_name",
    "row_columns",
    "sums",
    "waterfall",
]

Array = np.ndarray[Any, Any]
MOST_ROWS = 20_000
"""Of a table in the browser: the largest."""
MOST_COLUMNS = 512
"""Of a map; further tokens share columns."""
MOST_STEPS = 64
"""Of a waterfall; of more a layer is one step."""
LAYER_COMPONENTS = ("head", "mlp")
"""With a map, layer by token."""
NAMES: dict[str, str] = {
    "embed": "embedding",
    "head": "heads",
    "mlp": "MLPs",
    "neuron": "neurons",
    "attention_bias": "attention biases",
    "final_norm_bias": "final norm bias",
}
"""Component -> its name in a list."""


@dataclass(frozen=True, slots=True, eq=False)
class Level:
    """One table.

    Attributes
    ----------
    path : tuple of int
        Rows that led to it; empty: the explanation itself.
    title : str
        In the line of the way back.
    table : DataFrame
        ``component``, ``layer``, ``unit``, ``position``, ``attribution``, and at the root ``direct_effect`` and ``in_sum``.
    """

    path: tuple[int, ...]
    title: str
    table: pd.DataFrame

    @property
    def measures(self) -> tuple[str, ...]:
        """What it can be ranked by."""
        return tuple(name for name in ("attribution", "direct_effect") if name in self.table)

    @property
    def components(self) -> list[str]:
        """Components that it has, in their order of first appearance in a model."""
        there = list(dict.fromkeys(self.table["component"]))
        return [name for name in NAMES if name in there] + [name for name in there if name not in NAMES]


@dataclass(frozen=True, slots=True)
class Step:
    """A step of a waterfall: name, component and layer (-1: none) of its rows, and what it adds to the metric."""

    name: str
    component: str
    layer: int
    value: float


def key_of(row: Any) -> tuple[str, int, int, int]:
    """Return what names a component in every table: component, layer, unit, position."""
    return str(row["component"]), int(row["layer"]), int(row["unit"]), int(row["position"])


def component_name(component: str, layer: int, unit: int) -> str:
    """Return a component in words, as the browser's half does: ``L2 head 3``."""
    where = f"L{layer} " if layer >= 0 else ""
    if component in ("head", "neuron"):
        return f"{where}{component} {unit}"
    return where + {"embed": "embedding", "mlp": "MLP"}.get(component, component.replace("_", " "))


def place_name(row: Any) -> str:
    """Return a row in words: ``L2 head 3 at 9 “o”``."""
    return f"{component_name(*key_of(row)[:3])} at {int(row['position'])} “{shown(row['token'], most=12)}”"


def digits_for(top: float) -> int:
    """Return the digits behind the point of numbers up to ``top``, as the browser's half does."""
    return min(9, max(0, 4 - math.ceil(math.log10(top)))) if top > 0 else 3


def columns(level: Level, *, most: int = MOST_ROWS) -> dict[str, Array]:
    """Return the rows as arrays, those of the largest size if there are more than ``most``.

    Returns
    -------
    dict of array, shape (row,)
        ``row`` (label), ``component`` (index into ``level.components``), ``layer``, ``unit``, ``position``, and each measure; NaN: not
        defined.
    """
    table = level.table
    if len(table) > most:
        size = np.abs(np.nan_to_num(table[list(level.measures)].to_numpy(np.float64))).max(1)
        table = table.iloc[np.sort(np.argsort(-size, kind="stable")[:most])]
    return row_columns(level, table)


def row_columns(level: Level, rows: pd.DataFrame) -> dict[str, Array]:
    """Return some rows of a table as :func:`columns` does."""
    out: dict[str, Array] = {"row": rows.index.to_numpy().astype(np.int32), "component": _codes(level, rows)}
    out |= {name: rows[name].to_numpy().astype(np.int32) for name in ("layer", "unit", "position")}
    return out | {name: rows[name].to_numpy(np.float64).astype(np.float32) for name in level.measures}


def _codes(level: Level, rows: pd.DataFrame) -> Array:
    code, names = pd.factorize(rows["component"])
    at = {name: i for i, name in enumerate(level.components)}
    return np.array([at[name] for name in names], np.uint8)[code] if len(rows) else np.zeros(0, np.uint8)


def sums(level: Level, num_layers: int, num_tokens: int) -> dict[str, Array]:
    """Return sums over all rows, of each measure.

    Returns
    -------
    dict of array
        ``strip_<measure>``, dims (component, token); ``<component>_<measure>``, dims (layer, column), of :data:`LAYER_COMPONENTS`: heads of
        a layer summed; ``edges``, dims (column + 1,): first token of each column.
    """
    table, parts = level.table, level.components
    code = _codes(level, table).astype(np.int64)
    position, layer = table["position"].to_numpy(), table["layer"].to_numpy()
    edges = np.unique(np.linspace(0, num_tokens, min(num_tokens, MOST_COLUMNS) + 1).astype(np.int32))
    column, width = np.searchsorted(edges, position, side="right") - 1, len(edges) - 1
    out: dict[str, Array] = {"edges": edges}
    for measure in level.measures:
        values = np.nan_to_num(table[measure].to_numpy(np.float64))
        strip = np.bincount(code * num_tokens + position, values, len(parts) * num_tokens)
        out[f"strip_{measure}"] = strip.reshape(len(parts), num_tokens).astype(np.float32)
        for name in LAYER_COMPONENTS:
            mine = code == parts.index(name) if name in parts else np.zeros(len(table), bool)
            grid = np.bincount(layer[mine] * width + column[mine], values[mine], num_layers * width)
            out[f"{name}_{measure}"] = grid.reshape(num_layers, width).astype(np.float32)
    return out


def waterfall(table: pd.DataFrame, unexplained: float) -> list[Step]:
    """Return how direct effects add up to the metric: embedding, attention and MLP of each layer, the rest.

    Parameters
    ----------
    table : DataFrame
        Of an explanation.
    unexplained : float
        What the rows do not explain.

    Returns
    -------
    list of Step
        Their values sum to the metric; the last is what is unexplained.
    """
    rows = table[table["in_sum"]]
    of_heads = rows["component"].isin(("head", "attention_bias"))
    kind = rows["component"].where(~of_heads, "head")
    found = rows["direct_effect"].groupby([rows["layer"], kind], sort=False).sum()
    places: list[Any] = found.index.tolist()
    total = {(int(at), str(part)): float(v) for (at, part), v in zip(places, found, strict=True)}
    layers = sorted({at for at, _ in total if at >= 0})
    within = [part for part in ("head", "mlp") if any((at, part) in total for at in layers)]
    within += [part for at, part in total if at >= 0 and part not in within]
    within = list(dict.fromkeys(within))
    steps = [Step("embedding", "embed", -1, total.pop((-1, "embed"), 0.0))]
    if len(within) * len(layers) > MOST_STEPS:
        steps += [Step(f"L{at}", "all", at, sum(total.get((at, part), 0.0) for part in within)) for at in layers]
    else:
        names = {"head": "attention", "mlp": "MLP"}
        steps += [
            Step(f"L{at} {names.get(part, part)}", part, at, total.get((at, part), 0.0))
            for at in layers
            for part in within
        ]
    steps += [Step(component_name(part, -1, -1), part, -1, value) for (at, part), value in total.items() if at < 0]
    return [*steps, Step("unexplained", "", -1, float(unexplained))]
