"""Why a model says one token instead of another: direct effects, attribution, real ablation, upstream traces."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from mappnb.activation_points import PointName
from mappnb.errors import InterpError
from mappnb.interp._model_cells import run_cells
from mappnb.interp._model_direct import direct_path
from mappnb.interp._model_effects import POINT_OF, attributions, effects, places
from mappnb.interp.edits import Edit
from mappnb.interp.model import Model

__all__ = ["Explanation", "explain"]


@dataclass(frozen=True, eq=False)
class Explanation:
    """One table of what made the next token.

    Attributes
    ----------
    table : DataFrame
        A row for each component, layer and position: ``component`` (embed, head, attention_bias, mlp, neuron, final_norm_bias), ``layer``
        (-1: none), ``unit`` (head or neuron), ``position``, ``token``, ``direct_effect`` (on the metric, through the last norm with its
        scale frozen; it exists at the last position), ``attribution`` (gradient × (activation − baseline), all paths), ``in_sum``.
    metric : float
        The logit difference (or logit) itself: the ``direct_effect`` of the rows ``in_sum`` sum to it.
    unexplained : float
        ``metric`` less that sum: rounding, or parts of a model that these rows do not know.
    model : Model
    activations : Dataset
        What the table was made from, with gradients.
    baseline : dict
        Point -> values that stand for "not there".
    tokens : ndarray of int
        The prompt.
    """

    table: pd.DataFrame
    metric: float
    unexplained: float
    model: Model
    activations: xr.Dataset
    baseline: Mapping[str, np.ndarray]
    tokens: np.ndarray
    measure: Any
    question: str

    def __repr__(self) -> str:
        return f"<Explanation of {self.question}: {self.metric:.3f}, {len(self.table)} components>"

    def top(self, n: int = 10, *, by: str = "attribution") -> pd.DataFrame:
        """Return the ``n`` rows of the largest absolute ``by``: "attribution" or "direct_effect"."""
        if by not in ("attribution", "direct_effect"):
            raise InterpError(f"by is {by!r}; expected 'attribution' or 'direct_effect'")
        return self.table.loc[self.table[by].abs().sort_values(ascending=False, kind="stable").index[:n]]

    def ablate(self, row: Any) -> float:
        """Return what the metric loses when one component is really set to its baseline.

        Parameters
        ----------
        row : int or Series
            Label of a row of ``table``, or the row.

        Returns
        -------
        float
            Metric as it is less metric without the component; ``attribution`` is its first-order estimate.

        Raises
        ------
        InterpError
            For a row that cannot be ablated: biases.
        """
        return float(self._ablated([self._row(row)])[0])

    def check(self, n: int = 20, *, seed: int = 0) -> pd.DataFrame:
        """Ablate a sample of rows for real: half the largest attributions, half at random.

        Parameters
        ----------
        n : int
            Rows.
        seed : int
            Of the random half.

        Returns
        -------
        DataFrame
            The rows with ``ablation``; ``attrs``: ``correlation`` of attribution and ablation (Pearson), ``ratio`` (least squares
            slope of ablation over attribution).
        """
        able = self.table[self.table["component"].isin(list(POINT_OF))]
        largest = able["attribution"].abs().sort_values(ascending=False, kind="stable").index
        first = largest[: (n + 1) // 2]
        rest = np.random.default_rng(seed).permutation(largest[(n + 1) // 2 :].to_numpy())[: n - len(first)]
        found = self.table.loc[[*first, *rest]].copy()
        found["ablation"] = self._ablated([row for _, row in found.iterrows()])
        x, y = found["attribution"].to_numpy(), found["ablation"].to_numpy()
        steady = len(x) < 2 or not (x.std() and y.std())
        found.attrs["correlation"] = float("nan") if steady else float(np.corrcoef(x, y)[0, 1])
        found.attrs["ratio"] = float(x @ y / (x @ x)) if x.any() else float("nan")
        return found

    def upstream(self, row: Any, *, neurons: int = 50) -> pd.DataFrame:
        """Return what made one component, by attribution along all paths into it.

        Parameters
        ----------
        row : int or Series
            A head, MLP or neuron of ``table``.
        neurons : int
            Single neurons to list; they are parts of their MLPs.

        Returns
        -------
        DataFrame
            Components before it: ``component``, ``layer``, ``unit``, ``position``, ``token``, ``attribution``: their share in the
            component's own effect on the metric, largest first.

        Raises
        ------
        InterpError
            For a row that has nothing before it.

        Notes
        -----
        The gradient of the metric at this component alone is sent backward; all else in the backward pass is held at zero.
        """
        at = self._row(row)
        component, layer, position = str(at["component"]), int(at["layer"]), int(at["position"])
        if component not in ("head", "mlp", "neuron"):
            raise InterpError(f"row {component!r}: nothing of the model is before it; choose a head, mlp or neuron")
        activations = self._backward_from(POINT_OF[component], layer, position, int(at["unit"]))
        found = {}
        for name, values in attributions(activations, dict(self.baseline)).items():
            found[name] = values if name == "embed" else values[: layer + (name == "head" and component != "head")]
        return _table(found, self.activations["token_text"].values[0], neurons)

    def _row(self, row: Any) -> pd.Series:
        if isinstance(row, pd.Series):
            return row
        if row not in self.table.index:
            raise InterpError(f"row {row!r}; the table has rows 0 to {len(self.table) - 1}")
        found: pd.Series = self.table.loc[row]
        return found

    def _ablated(self, rows: list[pd.Series]) -> np.ndarray:
        cells = [[self._edit(row)] for row in rows]
        values = run_cells(self.model, self.tokens, [[], *cells], self.measure)[:, 0].astype(np.float64)
        return np.asarray(values[0] - values[1:])

    def _edit(self, row: pd.Series) -> Edit:
        component, layer, position = str(row["component"]), int(row["layer"]), int(row["position"])
        point = POINT_OF.get(component)
        if point is None:
            raise InterpError(f"row {component!r}: it is a bias of the model; ablate embed, head, mlp or neuron rows")
        units = {"head": {"heads": int(row["unit"])}, "neuron": {"neurons": int(row["unit"])}}.get(component, {})
        value = _baseline_at(self.baseline[point], layer, position) if point in self.baseline else None
        kind = "zero" if value is None else "set"
        return Edit(point=point, layer=None if layer < 0 else layer, tokens=position, kind=kind, value=value, **units)

    def _backward_from(self, point: str, layer: int, position: int, unit: int) -> xr.Dataset:
        gradient = self.activations[f"{point}_grad"].sel(layer=layer).values[0, position]
        batch = self.model.batch(self.tokens[None], None)
        sent = np.zeros((*batch.packed.shape, *gradient.shape), gradient.dtype)
        part = slice(None) if unit < 0 else unit
        sent[0, position, part] = gradient[part]
        wanted = [PointName(p, -1, grad) for p in POINT_OF.values() for grad in (False, True) if p in self.activations]
        _, records = self.model.run(
            batch, wanted, (), which="last", metric=lambda logits: logits.sum(-1) * 0.0, inject={(point, layer): sent}
        )
        return self.model.dataset(records, batch)


def explain(
    model: Any, prompt: Any, token: Any, *, instead_of: Any = None, baseline: Any = "zero", neurons: int = 50
) -> Explanation:
    """Explain why the model gives ``token`` its logit after ``prompt``, or more of it than ``instead_of``.

    Parameters
    ----------
    model : Model, module or list of modules
        As for `Model`; sharded or not: each rank computes its own heads and neurons.
    prompt : str or sequence of int
        One prompt.
    token, instead_of : str or int
        Two tokens; without the second, the logit of the first.
    baseline : "zero", "mean", prompt, or Dataset
        What "not there" means for attribution and ablation: zero; the mean over the prompt's own tokens; the same place in another
        prompt of equally many tokens; or the mean over recorded activations.
    neurons : int
        Single neurons to list.

    Returns
    -------
    Explanation

    Raises
    ------
    InterpError
        For tokens, prompts or a baseline that do not fit.

    Notes
    -----
    Direct logit attribution: Elhage et al. 2021 ("A Mathematical Framework for Transformer Circuits"); attribution patching: Nanda 2023.
    """
    live = model if isinstance(model, Model) else Model(model)
    tokens = live.encode_one(prompt)
    target = live.token(token)
    other = None if instead_of is None else live.token(instead_of)
    measure = live.metric(target if other is None else (target, other))
    parts = _points(live)
    points = [
        *parts,
        *(f"{point}.grad" for point in parts),
        f"layers.{live.num_layers - 1}.resid_post",
    ]
    run = live.forward(tokens[None], capture=points, gradients=measure, logits="last")
    activations = run.activations
    if "z" not in activations or run.metric is None:
        raise InterpError(
            "this model's attention has no heads that can be seen apart (point 'z'): it cannot be explained by components"
        )
    final = activations["resid_post"].values[0, -1, -1]
    direct = direct_path(live, final, target, other)
    held = _baseline(live, baseline, activations, len(tokens))
    table = effects(activations, direct, held, neurons=neurons)
    metric = float(run.metric[0])
    rest = metric - float(table.loc[table["in_sum"], "direct_effect"].sum())
    question = " instead of ".join(
        repr(str(text)) for text in live.texts(np.array([target] if other is None else [target, other]))
    )
    return Explanation(table, metric, rest, live, activations, held, tokens, measure, question)


def _points(live: Model) -> list[str]:
    """Points of the components: neurons of experts are not known one by one."""
    return [point for point in POINT_OF.values() if point != "mlp_act" or not live.facts.get("num_experts")]


def _baseline(live: Model, baseline: Any, activations: xr.Dataset, width: int) -> dict[str, np.ndarray]:
    """Point -> baseline, dims ([layer,] token or 1, *features); empty for zero."""
    if isinstance(baseline, str) and baseline == "zero":
        return {}
    source = activations if isinstance(baseline, str) and baseline == "mean" else baseline
    mean = isinstance(source, xr.Dataset)
    if not mean:
        ids, mask = live.encode(baseline)
        if len(ids) != 1 or mask.sum() != width:
            raise InterpError(
                f"baseline {baseline!r}: {int(mask.sum())} tokens, the prompt has {width}; expected 'zero', 'mean', recorded "
                "activations, or a prompt of equal length"
            )
        source = live.forward(ids[mask][None], capture=_points(live), logits="last").activations
    found = {}
    for point in POINT_OF.values():
        if point not in source:
            if point in activations:
                raise InterpError(f"baseline: the activations lack {point!r}; capture {', '.join(POINT_OF.values())}")
            continue
        values = source[point]
        if mean:
            values = (
                values.where(values["mask"])
                .mean(["sample", "token"])
                .expand_dims("token", -1 - (2 if point == "z" else 1))
            )
        else:
            values = values[0]
        found[point] = values.values
    return found


def _baseline_at(values: np.ndarray, layer: int, position: int) -> np.ndarray:
    one = values if layer < 0 else values[layer]
    return np.asarray(one[position if len(one) > 1 else 0])


def _table(found: dict[str, np.ndarray], texts: np.ndarray, neurons: int) -> pd.DataFrame:
    """Rows of what is before a component, largest first."""
    parts = []
    for component, values in found.items():
        kept = np.argsort(-abs(values).ravel(), kind="stable")[: neurons if component == "neuron" else None]
        parts.append(places(component, values.shape, kept).assign(attribution=values.ravel()[kept]))
    table = pd.concat(parts, ignore_index=True)
    table.insert(4, "token", texts[table["position"].to_numpy()])
    table = table[table["attribution"] != 0]
    return table.sort_values("attribution", key=abs, ascending=False, kind="stable").reset_index(drop=True)
