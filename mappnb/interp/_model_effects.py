"""The table of an explanation: each component, its direct effect and its attribution, from activations and gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from mappnb.interp._model_direct import Direct

__all__ = ["IN_SUM", "POINT_OF", "attributions", "effects", "places"]

POINT_OF: dict[str, str] = {"embed": "embed", "head": "z", "mlp": "mlp_out", "neuron": "mlp_act"}
"""Component -> the point at which it can be ablated."""

IN_SUM: tuple[str, ...] = ("embed", "head", "attention_bias", "mlp", "final_norm_bias")
"""Components whose direct effects sum to the metric; neurons are parts of an MLP."""


def effects(activations: xr.Dataset, direct: Direct, baseline: dict[str, np.ndarray], *, neurons: int) -> pd.DataFrame:
    """Return one row for each component.

    Parameters
    ----------
    activations : Dataset, dims (sample, layer, token, ...)
        One sample, with gradients of the metric.
    direct : Direct
        Direct path from the last token.
    baseline : dict
        Point -> values that stand for "not there", broadcasting to that point.
    neurons : int
        Single neurons to list: those of the largest direct effect or attribution.

    Returns
    -------
    DataFrame
        ``component``, ``layer``, ``unit`` (head or neuron, -1: none), ``position``, ``token``, ``direct_effect``, ``attribution``,
        ``in_sum``.
    """
    values = attributions(activations, baseline)
    last = activations.sizes["token"] - 1
    straight = {name: np.zeros(part.shape) for name, part in values.items()}
    one = {
        point: activations[point].values[0].astype(np.float64) for point in POINT_OF.values() if point in activations
    }
    straight["embed"][last] = one["embed"][last] @ direct.direction
    straight["head"][:, last] = np.einsum("lhd,lhd->lh", one["z"][:, last], direct.heads)
    straight["mlp"][:, last] = one["mlp_out"][:, last] @ direct.direction
    if "neuron" in values and direct.neurons is not None:
        straight["neuron"][:, last] = one["mlp_act"][:, last] * direct.neurons
    parts = [_rows(name, straight[name], values[name], neurons) for name in values]
    parts.append(_constant("attention_bias", direct.attention_bias, last))
    parts.append(_constant("final_norm_bias", np.array([direct.constant]), last, layers=[-1]))
    table = pd.concat(parts, ignore_index=True)
    texts = activations["token_text"].values[0]
    table.insert(4, "token", texts[table["position"].to_numpy()])
    table["in_sum"] = table["component"].isin(IN_SUM)
    order = {name: i for i, name in enumerate(("embed", "head", "attention_bias", "mlp", "neuron", "final_norm_bias"))}
    return table.sort_values(
        ["layer", "component", "unit", "position"],
        key=lambda column: column.map(order) if column.name == "component" else column,
        kind="stable",
    ).reset_index(drop=True)


def attributions(activations: xr.Dataset, baseline: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return gradient × (activation − baseline) by component: dims (token,), (layer, token, head), (layer, token), (layer, token, neuron).

    Notes
    -----
    Attribution patching (Nanda 2023; Syed et al., arXiv:2310.10348): the first order of what ablation to the baseline takes away.
    """
    found = {}
    for component, point in POINT_OF.items():
        if f"{point}_grad" not in activations:
            continue
        value = activations[point].values[0].astype(np.float64)
        product = activations[f"{point}_grad"].values[0] * (value - baseline.get(point, 0.0))
        found[component] = product if component == "neuron" else product.sum(-1)
    return found


def _rows(component: str, straight: np.ndarray, attribution: np.ndarray, neurons: int) -> pd.DataFrame:
    """Rows of one component; of neurons the largest only."""
    size = np.maximum(abs(straight), abs(attribution)).ravel()
    kept = np.sort(np.argsort(-size, kind="stable")[:neurons]) if component == "neuron" else np.arange(size.size)
    effect, attribution = straight.ravel()[kept], attribution.ravel()[kept]
    return places(component, straight.shape, kept).assign(direct_effect=effect, attribution=attribution)


def places(component: str, shape: tuple[int, ...], kept: np.ndarray) -> pd.DataFrame:
    """Return ``component``, ``layer``, ``unit`` and ``position`` of some values of one component, in the order of ``kept``.

    Parameters
    ----------
    component : str
        Its name.
    shape : tuple of int
        Dims of its values, as `attributions` has them.
    kept : ndarray of int
        Places in the flattened values.
    """
    index: Any = np.unravel_index(kept, shape)
    none = np.full(len(kept), -1)
    layer, position, unit = {1: (none, *index, none), 2: (*index, none), 3: index}[len(shape)]
    name = np.full(len(kept), component, dtype=object)
    return pd.DataFrame({"component": name, "layer": layer, "unit": unit, "position": position})


def _constant(component: str, values: np.ndarray, last: int, layers: list[int] | None = None) -> pd.DataFrame:
    """Rows of what is always added."""
    return pd.DataFrame(
        {
            "component": np.full(len(values), component, dtype=object),
            "layer": np.arange(len(values)) if layers is None else layers,
            "unit": -1,
            "position": last,
            "direct_effect": values,
            "attribution": np.nan,
        }
    )
