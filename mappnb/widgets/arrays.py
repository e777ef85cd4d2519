"""Any labelled array as a picture: ``array_view(da)``, or ``da.mapp.show()``."""

from __future__ import annotations

import os
from collections.abc import Hashable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

from mappnb.errors import SchemaError, did_you_mean
from mappnb.segment_writer import write_file
from mappnb.widgets._array_content import Content, build, is_empty
from mappnb.widgets._array_grid import assign_roles
from mappnb.widgets._array_html import empty_fragment, fragment, page
from mappnb.widgets._array_labels import TOKENS, clean
from mappnb.widgets._array_svg import svg_document
from mappnb.widgets._array_values import MISSING

__all__ = ["ArrayView", "array_view"]

MOST_BYTES = 50_000
"""Of the fragment, whatever the array."""


class ArrayView:
    """A picture of one array; what :func:`array_view` returns. Shows itself in a notebook.

    Parameters
    ----------
    da : DataArray
        The array; masks and tokens are among its coordinates.
    roles : mapping
        ``x``, ``y``, ``row``, ``col`` as asked for.
    limits : mapping
        ``vmin``, ``vmax``, ``center`` as asked for.
    width : int
        Of the picture in CSS pixels.
    source : str
        The Python expression of the array, for :attr:`code`.
    """

    def __init__(
        self,
        da: xr.DataArray,
        *,
        roles: Mapping[str, Hashable | None],
        limits: Mapping[str, float | None],
        width: int,
        source: str,
    ) -> None:
        self._da, self._roles, self._limits, self._width, self._source = da, dict(roles), dict(limits), width, source

    def __repr__(self) -> str:
        dims = " x ".join(f"{clean(d)} {n}" for d, n in self._da.sizes.items()) or "0-d"
        return f"ArrayView({self._da.dtype}, {dims})"

    @property
    def data(self) -> xr.DataArray:
        """The array that is shown, without what the view added to it."""
        return self._da.drop_vars([c for c in self._da.coords if str(c) == MISSING or str(c).startswith(TOKENS)])

    @property
    def code(self) -> str:
        """The Python line that makes this view again, by the names ``tokens`` and ``missing`` for what was given so."""
        words = [self._source]
        given = {str(c) for c in self._da.coords}
        words += ["tokens=tokens"] if any(c.startswith(TOKENS) for c in given) else []
        words += ["missing=missing"] if MISSING in given else []
        options = {**self._roles, **self._limits}
        words += [f"{k}={v!r}" for k, v in options.items() if v is not None]
        words += [f"width={self._width}"] if self._width != WIDTH else []
        return f"mappnb.widgets.array_view({', '.join(words)})"

    def sel(self, **indexers: Any) -> ArrayView:
        """Return the view of a part of the array, chosen as ``DataArray.sel`` does, with the same options.

        Parameters
        ----------
        **indexers : label, slice or list
            By dimension.

        Raises
        ------
        SchemaError
            If the array has no such dimension.
        """
        for dim in indexers:
            if dim not in self._da.dims:
                hint = did_you_mean(dim, map(str, self._da.dims))
                raise SchemaError(f"sel({dim}=...): the array has dims {self._da.dims}{hint}")
        part = self._da.sel(indexers)
        roles = {role: dim if dim in part.dims else None for role, dim in self._roles.items()}
        chosen = ", ".join(f"{k}={v!r}" for k, v in indexers.items())
        return ArrayView(
            part, roles=roles, limits=self._limits, width=self._width, source=f"{self._source}.sel({chosen})"
        )

    def content(self) -> Content:
        """Return what the view draws, as data: grid, values, marks, colours, counts."""
        return self._fitting()[0]

    def _fitting(self) -> tuple[Content, str]:
        """Return the content and its page fragment, with as many values as the fragment has room for."""
        make = partial(build, self._da, roles=self._roles, limits=self._limits, width=self._width)
        content = make()
        out, shrink = fragment(content), 1.0
        while len(out.encode()) > MOST_BYTES and content.grid.num_cells > 1 and shrink < 1e3:
            shrink *= 1.25
            content = make(shrink=shrink, found=content.survey)
            out = fragment(content)
        return content, out

    def _repr_html_(self) -> str:
        if is_empty(self._da):
            return empty_fragment(self._da)
        return self._fitting()[1]

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        return {"text/plain": repr(self), "text/html": self._repr_html_()}

    def to_html(self, path: str | os.PathLike[str]) -> Path:
        """Write the view as a page that needs nothing else; returns its path."""
        whole = page(self._da, self._repr_html_()).encode()
        write_file(Path(path), lambda sink: sink.write(whole))
        return Path(path)

    def snapshot(self, path: str | os.PathLike[str] | None = None) -> str:
        """Return the view as an SVG document, the cells embedded as PNG; written to ``path`` if one is given.

        Notes
        -----
        SVG rather than PNG: its texts need no font rasteriser, so no package besides numpy.
        """
        text = svg_document(None if is_empty(self._da) else self.content(), repr(self))
        if path is not None:
            write_file(Path(path), lambda sink: sink.write(text.encode()))
        return text


WIDTH = 720


def _mask_variable(da: xr.DataArray, missing: Any) -> xr.Variable:
    mask = missing.variable if isinstance(missing, xr.DataArray) else xr.Variable(da.dims, np.asarray(missing))
    wrong = [d for d in mask.dims if d not in da.dims or mask.sizes[d] != da.sizes[d]]
    if mask.dtype != bool or wrong:
        raise SchemaError(
            f"missing: {mask.dtype} of {dict(mask.sizes)}; expected bool, with dims of the array {dict(da.sizes)} in their full size"
        )
    return mask


def _token_variable(da: xr.DataArray, dim: Hashable, tokens: Sequence[str]) -> xr.Variable:
    if dim not in da.dims or len(tokens) != da.sizes[dim]:
        hint = did_you_mean(str(dim), map(str, da.dims))
        raise SchemaError(f"tokens[{dim!r}]: {len(tokens)} texts; the array has {dict(da.sizes)}{hint}")
    texts = np.empty(len(tokens), object)
    texts[:] = [str(t) for t in tokens]
    return xr.Variable((dim,), texts)


def array_view(
    da: Any,
    *,
    x: Hashable | None = None,
    y: Hashable | None = None,
    row: Hashable | None = None,
    col: Hashable | None = None,
    tokens: Mapping[Any, Sequence[str]] | None = None,
    missing: Any = None,
    vmin: float | None = None,
    vmax: float | None = None,
    center: float | None = None,
    width: int = WIDTH,
) -> ArrayView:
    """Return a picture of a labelled array: every value a cell, every dimension by its name.

    Parameters
    ----------
    da : DataArray or array
        Any number of dims, any dtype. Complex values are drawn by magnitude; text by word where there are few.
    x, y, row, col : dim, optional
        Dimensions across and down a tile, and of tiles down and across the picture. The last free ones by default: x, y, col, row;
        of the others, those with few positions get a slider, the rest shows its first.
    tokens : mapping of dim to texts, optional
        Said of each position; a coordinate of strings is used by itself.
    missing : bool DataArray, optional
        True where no rank has captured the value; any of the array's dims. A boolean coordinate ``missing`` and the attribute
        ``missing_value`` say the same by themselves.
    vmin, vmax, center : float, optional
        Limits of the colours. By default least to greatest, or the 1st to the 99th percentile where single values lie far outside;
        around 0 for signed values.
    width : int
        Of the picture in CSS pixels.

    Returns
    -------
    ArrayView
        At most 50 kB of HTML: long axes show their first and last positions. Arrays in memory of up to 4 million values (16 MB) are counted
        whole, of others a sample; an array that is read lazily is read only where it is shown or sampled.

    Raises
    ------
    SchemaError
        If a dimension, mask or list of tokens does not fit the array, or the limits are in the wrong order.
    """
    da = da if isinstance(da, xr.DataArray) else xr.DataArray(np.asarray(da))
    roles = {"x": x, "y": y, "row": row, "col": col}
    assign_roles({d: int(n) for d, n in da.sizes.items()}, **roles)
    source = da.name if isinstance(da.name, str) and da.name.isidentifier() else "da"
    added: dict[Hashable, xr.Variable] = {}
    if missing is not None:
        added[MISSING] = _mask_variable(da, missing)
    for dim, texts in (tokens or {}).items():
        added[f"{TOKENS}{dim}"] = _token_variable(da, dim, texts)
    limits = {"vmin": vmin, "vmax": vmax, "center": center}
    return ArrayView(da.assign_coords(added), roles=roles, limits=limits, width=max(120, int(width)), source=source)
