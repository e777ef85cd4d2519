"""Activation patching: put what one prompt gave into the run of another, place by place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import xarray as xr

from mappnb.activation_points import POINTS, parse_point, resolve
from mappnb.errors import InterpError
from mappnb.interp._model_cells import chosen, measured, run_cells
from mappnb.interp.edits import Activations, Edit
from mappnb.interp.model import Model

__all__ = ["activation_patching"]


def activation_patching(
    model: Any,
    clean: Any,
    corrupted: Any,
    *,
    point: str = "resid_post",
    layers: int | Sequence[int] | slice | None = None,
    tokens: int | Sequence[int] | slice | Literal["all"] | None = None,
    heads: int | Sequence[int] | slice | Literal["each"] | None = None,
    metric: Any,
    normalize: bool = False,
    batch_size: int = 64,
) -> xr.DataArray:
    """Return the metric of the corrupted prompt with the clean prompt's activations put in at each place.

    Parameters
    ----------
    model : Model, module or list of modules
        As for `Model`.
    clean, corrupted : str or sequence of int
        Two prompts of equally many tokens.
    point : str
        Where to patch: any activation.
    layers, tokens : int, sequence or slice, optional
        Places to try; default all. ``tokens="all"``: every token at once (the token dim then has length 1, value -1).
    heads : int, sequence, slice or "each", optional
        For points with heads: patch single heads; default all heads of a layer together.
    metric : callable, token or pair
        See `Model.metric`: ``(token, instead_of)`` is the difference of their logits after the prompt.
    normalize : bool
        ``(patched - corrupted) / (clean - corrupted)``: 0 nothing is restored, 1 all of it.
    batch_size : int
        Rows of a batch.

    Returns
    -------
    DataArray, dims (layer, token[, head | kv_head])
        Attributes ``clean``, ``corrupted``: the metric of both; coordinates ``token_text`` and ``clean_text``.

    Raises
    ------
    InterpError
        For prompts of unequal length, or places that do not exist.

    Notes
    -----
    Denoising as in Meng et al. (arXiv:2202.05262) and TransformerLens' ``patching.get_act_patch_*``; exchange the prompts for noising.
    """
    live = model if isinstance(model, Model) else Model(model)
    name = parse_point(resolve(point, error=InterpError), error=InterpError).point
    info = POINTS.get(name)
    if info is None:
        raise InterpError(f"point {point!r}: weights cannot be patched; choose an activation, such as 'resid_post'")
    ids = [live.encode_one(prompt) for prompt in (clean, corrupted)]
    if len(ids[0]) != len(ids[1]):
        raise InterpError(
            f"clean has {len(ids[0])} tokens ({live.texts(ids[0]).tolist()}), corrupted {len(ids[1])} "
            f"({live.texts(ids[1]).tolist()}): patching needs prompts of equal length"
        )
    measure = live.metric(metric)
    source = live.forward(ids[0][None], capture=name, logits="last")
    if name not in source.activations:
        raise InterpError(f"point {name!r}: this model does not have it")
    axes = _axes(source.activations[name], layers, tokens, heads, live)
    held = Activations(source.activations)
    cells = [[_edit(name, axes, index, held)] for index in np.ndindex(*(len(v) for v in axes.values()))]
    base = run_cells(live, ids[1], [[]], measure)[0, 0]
    best = measured(source, measure)[0]
    values = run_cells(live, ids[1], cells, measure, rows=batch_size)[:, 0].reshape([len(v) for v in axes.values()])
    if normalize:
        values = (values - base) / (best - base)
    result = xr.DataArray(
        values, dims=tuple(axes), coords=axes, name=name, attrs={"clean": float(best), "corrupted": float(base)}
    )
    return _with_texts(result, live, ids)


def _axes(values: xr.DataArray, layers: Any, tokens: Any, heads: Any, live: Model) -> dict[str, list[int]]:
    """Dim -> indices to patch."""
    axes: dict[str, list[int]] = {}
    if "layer" in values.dims:
        axes["layer"] = chosen(layers, live.num_layers, "layers")
    axes["token"] = [-1] if tokens == "all" else chosen(tokens, values.sizes["token"], "tokens")
    dim = str(POINTS[str(values.name)].dims[0])
    if heads is not None:
        if dim not in ("head", "kv_head"):
            raise InterpError(
                f"heads: point {values.name!r} has dims {', '.join(map(str, values.dims))}, no heads; try 'z'"
            )
        axes[dim] = chosen(None if heads == "each" else heads, values.sizes[dim], "heads")
    return axes


def _edit(point: str, axes: dict[str, list[int]], index: tuple[int, ...], source: Activations) -> Edit:
    at = {dim: values[i] for (dim, values), i in zip(axes.items(), index, strict=True)}
    token = None if at["token"] < 0 else at["token"]
    return Edit(
        point=point,
        layer=at.get("layer"),
        tokens=token,
        heads=at.get("head", at.get("kv_head")),
        kind="patch",
        value=source,
    )


def _with_texts(result: xr.DataArray, live: Model, ids: list[np.ndarray]) -> xr.DataArray:
    slots = result["token"].values
    if (slots < 0).any():
        return result
    clean, corrupted = (live.texts(row)[slots] for row in ids)
    return result.assign_coords(token_text=("token", corrupted), clean_text=("token", clean))
