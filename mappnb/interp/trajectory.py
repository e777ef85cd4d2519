"""Trajectories: activation vectors of layers, tokens, samples or steps in the plane of their greatest variance."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import xarray as xr

from mappnb.activation_points import POINTS
from mappnb.activations import stream_with, streams_of
from mappnb.errors import InterpError, did_you_mean
from mappnb.interp._choices import labels_asked

__all__ = ["OVER", "lines_of", "project", "trajectories"]

Array = np.ndarray[Any, Any]
OVER: tuple[str, ...] = ("layer", "token", "sample", "step")
"""What a line runs along."""
CENTERS: tuple[str, ...] = ("all", "layer", "none")
"""What is taken off before: the mean of all vectors, of those of the same layer, nothing."""
_ITEMS = ("sample", "layer", "token")


def trajectories(
    activations: xr.Dataset | xr.DataTree,
    *,
    point: str = "resid_post",
    over: str = "layer",
    components: int = 3,
    center: str = "all",
    standardize: bool = False,
    sample: int | Iterable[int] | None = None,
    layers: int | Iterable[int] | None = None,
    tokens: int | Iterable[int] | None = None,
) -> xr.Dataset:
    """Return vectors of a point by their principal components, all of them joined in one basis.

    Parameters
    ----------
    activations : Dataset or DataTree
        ``run.activations``, or a stream with ``point``; sketches (dim ``component``) too.
    point : str
        Variable, such as ``"resid_post"`` or ``"q"``; its last dim is the vector.
    over : {"layer", "token", "sample", "step"}
        What a line runs along; along ``step`` the same place of the batch is followed.
    components : int
        How many.
    center : {"all", "layer", "none"}
        What is taken off: the mean of all vectors, the mean of each layer's (layers differ most by it), nothing.
    standardize : bool
        Divide each entry by its standard deviation, so that few large ones do not decide alone.
    sample, layers, tokens : int or several, optional
        Places in ``sample``; global layers; slots (labels of ``token``). Default all.

    Returns
    -------
    Dataset, dims (sample, layer, token, ..., component)
        ``projection``; ``basis`` (component, feature), ``mean`` (feature) or (layer, feature), ``scale`` (feature), ``explained_ratio``
        and ``singular_value`` (component). Places that are padding, missing or not finite are left out: NaN. ``attrs``: point, over,
        center, count of vectors.

    Raises
    ------
    SchemaError
        If the point was not recorded.
    InterpError
        For an unknown choice or place, or fewer than two vectors.

    Notes
    -----
    Exact: singular value decomposition in float64 (``numpy.linalg.svd``), of the triangle of a QR decomposition where there are more
    vectors than entries. The sign of a component is such that its largest entry is positive.
    ``explained_ratio``: share of the sum of squares of what is decomposed.
    """
    _check(over, center, components)
    data = _stream(activations, point)
    part = _selected(data, sample, layers, tokens)
    values, usable = _vectors(part, point)
    rows = values[usable]
    if len(rows) < 2:
        raise InterpError(f"{point}: {len(rows)} vectors are there; expected 2 or more to compare")
    mean = _means(values, usable, part[point].dims, center)
    flat = np.broadcast_to(mean, values.shape)[usable]
    centered = rows - flat
    scale = np.ones(rows.shape[1])
    if standardize:
        deviation = np.sqrt((centered**2).mean(0))
        scale = np.where(deviation > 0, deviation, 1.0)
    basis, singular, total = _principal(centered / scale, components)
    result = _described(part, point, basis, singular, mean=mean, scale=scale, total=total)
    result.attrs = {"point": point, "over": over, "center": center, "count": len(rows), "standardize": int(standardize)}
    return _with_projection(result, part, point, values, usable)


def project(basis: xr.Dataset, activations: xr.Dataset | xr.DataTree, *, point: str | None = None) -> xr.DataArray:
    """Return other vectors in the basis of trajectories.

    Parameters
    ----------
    basis : Dataset
        From `trajectories`.
    activations : Dataset or DataTree
        With the point; for ``center="layer"`` of the same layers.
    point : str, optional
        Default that of the basis.

    Returns
    -------
    DataArray, dims (sample, layer, token, ..., component)

    Raises
    ------
    InterpError
        If the vectors have another length.
    """
    name = str(basis.attrs["point"]) if point is None else point
    data = _stream(activations, name)
    if "layer" in basis["mean"].dims:
        data = data.sel(layer=[x for x in data["layer"].values if x in basis["layer"].values])
    values, usable = _vectors(data, name)
    if values.shape[-1] != basis.sizes["feature"]:
        raise InterpError(f"{name} has vectors of {values.shape[-1]}; the basis is of {basis.sizes['feature']}")
    if "layer" in basis["mean"].dims:
        basis = basis.sel(layer=data["layer"].values)
    return _with_projection(basis.drop_vars("projection"), data, name, values, usable)["projection"]


def lines_of(found: xr.Dataset, over: str | None = None) -> tuple[Array, Array]:
    """Return which line each vector is on, and where on it, as int arrays in the shape of ``projection`` without ``component``.

    Parameters
    ----------
    found : Dataset
        From `trajectories`.
    over : str, optional
        Default what it was made for.
    """
    over = str(found.attrs["over"]) if over is None else over
    values = found["projection"]
    dims = [d for d in values.dims if d != "component"]
    shape = tuple(values.sizes[d] for d in dims)
    place = {d: np.arange(n).reshape([-1 if e == d else 1 for e in dims]) for d, n in zip(dims, shape, strict=True)}
    order: Array = np.zeros(shape, np.int64)
    same = {d: p for d, p in place.items() if d != over}
    if over == "step" and "sample" in place:
        keys = [np.asarray(found[n].values) for n in ("dp_rank", "microbatch", "index") if n in found.coords]
        number = (
            np.unique(np.stack(keys, 1), axis=0, return_inverse=True)[1].reshape(-1)
            if keys
            else np.zeros(shape[0], int)
        )
        same["sample"] = number.reshape(place["sample"].shape)
        steps = np.asarray(found["step"].values) if "step" in found.coords else np.zeros(len(number), int)
        order = order + steps.reshape(place["sample"].shape)
    elif over in place:
        order = order + place[over]
    line = np.zeros(shape, np.int64)
    for where in same.values():
        line = line * (int(where.max(initial=0)) + 1) + where
    return line, order


def _check(over: str, center: str, components: int) -> None:
    for name, word, known in (("over", over, OVER), ("center", center, CENTERS)):
        if word not in known:
            raise InterpError(f"{name} is {word!r}; expected one of {', '.join(known)}{did_you_mean(word, known)}")
    if components < 1:
        raise InterpError(f"components is {components}; expected at least 1")


def _stream(activations: xr.Dataset | xr.DataTree, point: str) -> xr.Dataset:
    """Return the stream that holds a point's vectors; statistics of it are none."""
    fit = [ds for ds in streams_of(activations).values() if point in ds.data_vars]
    if not fit:
        return stream_with(activations, point)  # raises, with what there is
    return max(fit, key=lambda ds: (not _reduced(ds[point], point), ds.sizes.get("sample", 0)))


def _reduced(values: xr.DataArray, point: str) -> bool:
    known = POINTS.get(point.removesuffix("_grad"))
    return known is not None and values.dims[-1] != known.dims[-1]


def _selected(data: xr.Dataset, sample: Any, layers: Any, tokens: Any) -> xr.Dataset:
    for dim, wanted, by_label in (("sample", sample, False), ("layer", layers, True), ("token", tokens, True)):
        if wanted is None:
            continue
        if dim not in data.dims:
            raise InterpError(f"activations: no dimension {dim!r} to choose from")
        size = data.sizes[dim]
        known = [int(v) for v in data[dim].values] if by_label and dim in data.coords else list(range(size))
        data = data.isel({dim: [known.index(n) for n in labels_asked(dim, wanted, known)]})
    return data


def _vectors(data: xr.Dataset, point: str) -> tuple[Array, Array]:
    """Values, float64, vectors last, and which of them count."""
    array = data[point]
    values = np.asarray(array.values, np.float64)
    usable: Array = np.asarray(np.isfinite(values).all(-1))
    items = array.dims[:-1]
    for name in ("mask", f"{point}_present"):
        if name in data.variables:
            there = data[name].variable
            kept = [d for d in there.dims if d in items]
            there = there if len(kept) == len(there.dims) else there.isel({d: 0 for d in there.dims if d not in items})
            mask = xr.DataArray(there.values, dims=there.dims)
            spread = mask.broadcast_like(xr.DataArray(usable, dims=items)).transpose(*items)
            usable = np.asarray(usable & np.asarray(spread.values, bool))
    return values, usable


def _means(values: Array, usable: Array, dims: tuple[Any, ...], center: str) -> Array:
    """Return what is taken off, in a shape that goes with ``values``."""
    if center == "none":
        return np.zeros((1,) * (values.ndim - 1) + values.shape[-1:])
    layered = center == "layer" and "layer" in dims
    axes = tuple(i for i, d in enumerate(dims[:-1]) if not (layered and d == "layer"))
    counts = np.maximum(usable.sum(axes, keepdims=True), 1)[..., None]
    return np.asarray(np.where(usable[..., None], values, 0.0).sum(axes, keepdims=True) / counts)


def _principal(rows: Array, components: int) -> tuple[Array, Array, float]:
    """Directions, dims (component, feature), their singular values, and the sum of squares of all."""
    total = float((rows**2).sum())
    square = np.linalg.qr(rows, mode="r") if rows.shape[0] > rows.shape[1] else rows
    _, singular, basis = np.linalg.svd(square, full_matrices=False)
    count = min(components, len(singular))
    basis, singular = basis[:count], singular[:count]
    signs = np.sign(np.take_along_axis(basis, np.abs(basis).argmax(1)[:, None], 1))
    return basis * np.where(signs == 0, 1, signs), singular, total


def _described(
    part: xr.Dataset, point: str, basis: Array, singular: Array, *, mean: Array, scale: Array, total: float
) -> xr.Dataset:
    dims = part[point].dims
    layered = "layer" in dims and mean.shape[dims.index("layer")] == part.sizes["layer"] > 1
    means = ("layer", "feature") if layered else "feature"
    return xr.Dataset(
        {
            "basis": (("component", "feature"), basis),
            "mean": (means, mean.reshape(-1, mean.shape[-1]) if layered else mean.reshape(-1)),
            "scale": ("feature", scale),
            "explained_ratio": ("component", singular**2 / total if total else np.zeros(len(singular))),
            "singular_value": ("component", singular),
        },
        coords={"component": np.arange(1, len(singular) + 1)} | ({"layer": part["layer"].values} if layered else {}),
    )


def _with_projection(result: xr.Dataset, part: xr.Dataset, point: str, values: Array, usable: Array) -> xr.Dataset:
    dims = part[point].dims[:-1]
    mean = result["mean"].values
    if mean.ndim == 2:
        axis = dims.index("layer")
        mean = mean.reshape([len(mean) if i == axis else 1 for i in range(len(dims))] + [mean.shape[-1]])
    with np.errstate(invalid="ignore"):
        found = ((values - mean) / result["scale"].values) @ result["basis"].values.T
    found[~usable] = np.nan
    coords = {
        name: (variable.dims, np.asarray(variable.values))
        for name, variable in part.coords.items()
        if set(variable.dims) <= set(dims) and not str(name).endswith("_present") and name != "component"
    }
    return result.assign(projection=((*dims, "component"), found)).assign_coords(coords)
