"""The way from the residual stream to logits: last norm and unembedding, from a recording, from arrays, or from a live model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr

from mappnb.activation_points import WEIGHTS
from mappnb.capture.activations.attention_rules import model_facts_of
from mappnb.errors import InterpError, SchemaError, did_you_mean
from mappnb.interp._last_norm import normalized
from mappnb.interp._model_taps import array_of

__all__ = ["Readout", "Weights", "check_vectors"]

Array = np.ndarray[Any, Any]


def check_vectors(data: xr.Dataset, *points: str) -> None:
    """Raise InterpError unless the points are there as whole vectors of the residual stream, dim ``hidden``."""
    for point in points:
        if "hidden" not in data[point].dims:
            raise InterpError(
                f"{point} has dims {data[point].dims}: it was captured in buckets or as a sketch, from which vectors do not come "
                "back; capture it in mode 'full', 'cast' or 'int8'"
            )


@dataclass(frozen=True, slots=True, eq=False)
class Readout:
    """Last norm and unembedding as they were at one step.

    Attributes
    ----------
    unembed : float array, dims (vocab, hidden)
    norm_weight, norm_bias : float array, dims (hidden,), or None
    facts : mapping
        Of the model.
    """

    unembed: Array
    norm_weight: Array | None
    norm_bias: Array | None
    facts: Mapping[str, Any]

    def states(self, x: Array) -> Array:
        """Return the last norm of ``x``, dims (..., hidden)."""
        return normalized(x, self.facts, self.norm_weight, self.norm_bias)

    def logits(self, states: Array) -> Array:
        """Return logits of normed states, dims (..., vocab): float64 where the unembedding is, else float32."""
        dtype = np.float64 if self.unembed.dtype == np.float64 else np.float32
        unembed: Array = self.unembed.astype(dtype, copy=False)
        return np.asarray(np.matmul(states.astype(dtype), unembed.T))


class Weights:
    """Weights of a model by name, at any step.

    Parameters
    ----------
    data : mapping or Dataset
        By name of ``mappnb.activation_points.WEIGHTS``; a Dataset may have a dim ``step``.
    facts : mapping
        Of the model.
    tokenizer : object, optional
        Of a live model.
    """

    def __init__(self, data: Mapping[str, Any] | xr.Dataset, facts: Mapping[str, Any], tokenizer: Any = None) -> None:
        self._data, self.facts, self.tokenizer = data, facts, tokenizer
        stepped = isinstance(data, xr.Dataset) and "step" in data.dims
        self._steps = np.asarray(data["step"].values) if stepped else None
        self._kept: dict[tuple[int, str], Array | None] = {}

    @classmethod
    def of(
        cls, weights: Any, activations: xr.Dataset | xr.DataTree, *, need: tuple[str, ...] = ("unembed",)
    ) -> Weights:
        """Return the weights that a caller means.

        Parameters
        ----------
        weights : None, Dataset, DataTree, mapping of str to array, Model, module or list of modules
            None: those recorded with the activations.
        activations : Dataset or DataTree
            For the facts, and the stream ``weights``.
        need : tuple of str
            Names without which nothing can be done.

        Raises
        ------
        SchemaError
            If a needed weight is not there, with what to record.
        """
        facts: dict[str, Any] | None = None
        tokenizer = None
        if weights is None:
            weights = recorded(activations)
        elif isinstance(weights, xr.DataTree):
            weights = recorded(weights)
        elif not isinstance(weights, (xr.Dataset, Mapping)):
            from mappnb.interp.model import Model

            live = weights if isinstance(weights, Model) else Model(weights)
            names = {"unembed", "final_ln_weight", "final_ln_bias", *need}
            biases = {"b_o"} if "w_o" in need else set()
            weights, facts, tokenizer = (
                live.weights([n for n in WEIGHTS if n in names | biases]),
                live.facts,
                live.tokenizer,
            )
        if isinstance(weights, xr.Dataset) and facts is None and "model" in weights.attrs:
            facts = model_facts_of(weights.attrs)
        for name in need:
            if name not in weights:
                known = [str(n) for n in weights]
                raise SchemaError(
                    f"weights: no {name!r} ({WEIGHTS[name].what}); found {', '.join(known) or 'nothing'}"
                    f"{did_you_mean(name, known)}; record it, e.g. mappnb.Capture({list(need)!r}), or give weights="
                )
        found = facts if facts is not None else _facts(activations)
        return cls(weights, found, tokenizer)

    def row(self, step: int | None) -> int:
        """Return which stored row counts at a step: the last at or before it, else the first."""
        if self._steps is None or step is None:
            return 0
        return max(0, int(np.searchsorted(self._steps, step, side="right")) - 1)

    def get(self, name: str, row: int = 0, *, layer: int | None = None) -> Array | None:
        """Return a weight at a row, of one layer or whole; None if there is none by that name."""
        if (row, name) not in self._kept:
            for key in [k for k in self._kept if k[0] != row]:  # one step's weights at a time are kept
                del self._kept[key]
            self._kept[row, name] = self._read(name, row)
        whole = self._kept[row, name]
        if whole is None or layer is None:
            return whole
        labels = self._layers(name, len(whole))
        if layer not in labels:
            raise SchemaError(f"weights: {name} has no layer {layer}; found {labels}")
        return np.asarray(whole[labels.index(layer)])

    def readout(self, step: int | None) -> Readout:
        """Return norm and unembedding at a step."""
        row = self.row(step)
        unembed = self.get("unembed", row)
        assert unembed is not None
        return Readout(unembed, self.get("final_ln_weight", row), self.get("final_ln_bias", row), self.facts)

    def _read(self, name: str, row: int) -> Array | None:
        if name not in self._data:
            return None
        values = self._data[name]
        if isinstance(values, xr.DataArray):
            values = values.isel(step=row) if "step" in values.dims else values
            values = values.values
        elif hasattr(values, "detach"):
            values = array_of(values)
        found = np.asarray(values)
        expected = len(WEIGHTS[name].dims) + WEIGHTS[name].per_layer
        if found.ndim != expected:
            dims = (("layer",) if WEIGHTS[name].per_layer else ()) + WEIGHTS[name].dims
            raise SchemaError(f"weights: {name} has shape {found.shape}; expected dims {dims}")
        return found

    def _layers(self, name: str, count: int) -> list[int]:
        if isinstance(self._data, xr.Dataset) and "layer" in self._data.coords:
            return [int(x) for x in self._data["layer"].values]
        return list(range(count))


def recorded(activations: xr.Dataset | xr.DataTree) -> xr.Dataset:
    """Return the stream of weights of a recording, or the dataset itself if it holds some.

    Raises
    ------
    SchemaError
        If there is none.
    """
    if isinstance(activations, xr.DataTree):
        if "weights" in activations.children:
            return activations.children["weights"].to_dataset()
        here = ", ".join(map(str, activations.children)) or "none"
    elif "unembed" in activations:
        return activations
    else:
        here = "only the activations given"
    raise SchemaError(
        f"activations: no weights were recorded (streams: {here}); add mappnb.Capture(['unembed', 'final_ln_weight']) to the plan, or "
        "give weights=: a live model, or arrays by name"
    )


def _facts(activations: xr.Dataset | xr.DataTree) -> dict[str, Any]:
    attrs = dict(activations.attrs)
    if isinstance(activations, xr.DataTree) and "model" not in attrs:
        attrs = next((dict(c.attrs) for c in activations.children.values() if "model" in c.attrs), attrs)
    return model_facts_of(attrs)
