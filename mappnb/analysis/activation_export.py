"""Captured activations as one zarr folder, put together, for other tools; without texts on request."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

from mappnb.activations import streams_of
from mappnb.errors import MappnbError
from mappnb.run import Run
from mappnb.tables import step_range

__all__ = ["PRIVATE", "export_activations"]

PRIVATE = ("token_id", "token_text", "prompt")
"""What ``redact`` leaves out: what the model was given, in any form."""
_AT_ONCE = 64 << 20


def export_activations(
    run: Run | xr.DataTree, path: str | os.PathLike[str], *, step: int | slice | None = None, redact: bool = False
) -> Path:
    """Write the activations of a run, the shards of all ranks put together, and return the path.

    Parameters
    ----------
    run : Run or DataTree
        With activations, or ``run.activations``.
    path : path
        A folder, ``.zarr``: one group per stream, format 3; ``xarray.open_datatree(path, engine="zarr")`` reads it. It is replaced only
        when it is whole.
    step : int or slice, optional
        Steps to write, a slice with both ends; all by default.
    redact : bool
        Leave out token ids, token texts and prompts; and the arrays from which they could be told: the embedding, the logits and the
        weights.

    Raises
    ------
    MappnbError
        If there are no activations in these steps.
    """
    import zarr

    streams = streams_of(run.activations if isinstance(run, Run) else run)
    target = Path(path)
    tmp = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    written = 0
    try:
        root = zarr.open_group(str(tmp), mode="w", zarr_format=3)
        for name, ds in streams.items():
            if redact and name == "weights":
                continue
            chosen = _steps(_private(ds) if redact else ds, step)
            written += chosen.sizes.get("sample", chosen.sizes.get("step", 0))
            _write(root.require_group(name), chosen)
        if not written:
            raise MappnbError(
                f"no activations to export{'' if step is None else f' in step {step}'}; captured: {list(streams) or 'none'}"
            )
        if target.exists():
            shutil.rmtree(target)
        tmp.rename(target)
    finally:
        shutil.rmtree(tmp, ignore_errors=True)
    return target


def _private(ds: xr.Dataset) -> xr.Dataset:
    """Return a stream without what tells the text that the model was given."""
    telling = [v for v in ds.variables if str(v) in PRIVATE or str(v).split("_")[0] in ("embed", "logits")]
    return ds.drop_vars(telling)


def _steps(ds: xr.Dataset, step: int | slice | None) -> xr.Dataset:
    if (ends := step_range(step)) is None:
        return ds
    steps = ds["step"].values
    keep = (steps >= ends[0]) & (steps <= ends[1])
    return ds.isel({str(ds["step"].dims[0]): np.flatnonzero(keep)})


def _write(group: Any, ds: xr.Dataset) -> None:
    """Write a dataset, a few samples at a time."""
    group.attrs.update({**ds.attrs, "coordinates": " ".join(str(c) for c in ds.coords if c not in ds.dims)})
    for name, variable in ds.variables.items():
        if variable.dtype == object:
            texts = np.asarray(variable.values, str)
            group.attrs[f"{name}_values"], codes = _coded(texts)
            variable = xr.Variable(variable.dims, codes, variable.attrs)  # noqa: PLW2901 (numbers of the texts)
        rows = variable.shape[0] if variable.ndim else 1
        per_row = max(1, variable.nbytes // max(rows, 1))
        step = max(1, min(rows, _AT_ONCE // per_row))
        chunks = tuple(max(1, n) for n in (min(step, 8), *variable.shape[1:])) if variable.ndim else ()
        array = group.create_array(
            str(name),
            shape=variable.shape,
            chunks=chunks,
            dtype=variable.dtype,
            dimension_names=[str(d) for d in variable.dims],
            attributes=dict(variable.attrs),
        )
        for first in range(0, rows, step):
            if variable.ndim and variable.size:
                array[first : first + step] = variable[first : first + step].values


def _coded(texts: np.ndarray[Any, Any]) -> tuple[list[str], np.ndarray[Any, Any]]:
    """Return different texts, and each entry as a number among them: zarr has no stable type for text."""
    known, codes = np.unique(texts, return_inverse=True)
    return known.tolist(), codes.reshape(texts.shape).astype(np.int64)
