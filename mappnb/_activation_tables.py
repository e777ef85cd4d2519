"""Streams that are no tensors: statistics merged over the ranks, and weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import xarray as xr

from mappnb._activation_assembly import LazyArray, lazy_variable
from mappnb._activation_dataset import assemble, point_of
from mappnb._activation_index import Found
from mappnb.activation_points import POINTS
from mappnb.activation_stats import BIN_EXPONENTS, NUM_BINS, STATS, describe, empty, merge

__all__ = ["HISTOGRAM", "is_statistics", "statistics_dataset", "weights_dataset"]

Array = np.ndarray[Any, Any]
HISTOGRAM = "_histogram"
_UNITS = {"count": "1", "sparsity": "1", "num_nan": "1", "num_inf": "1"}
_WHAT = {
    "count": "number of finite values",
    "var": "variance over finite values, divided by their number",
    "kurtosis": "fourth standardised moment; 3 for a normal distribution",
    "sparsity": "fraction of exact zeros",
    "num_nan": "number of NaN values",
    "num_inf": "number of infinite values",
}


def is_statistics(found: Sequence[Found]) -> bool:
    """Return whether a stream holds statistics."""
    return any(n.endswith(HISTOGRAM) for f in found for n in f.others)


class _Merged:
    """Statistics of one stream, merged over ranks when they are first looked at, and kept: they are small."""

    def __init__(self, found: Sequence[Found], newest: Mapping[int, int]) -> None:
        self._newest = newest
        self._found = [f for f in found if any(newest.get(s) == f.part.incarnation for s in f.steps)]
        steps = {s for f in self._found for s in f.steps if newest.get(s) == f.part.incarnation}
        alike = {id(f.arrays): f for f in self._found}.values()
        names = {n for f in alike for n in f.others if not n.endswith(HISTOGRAM)}
        order = {n: i for i, n in enumerate(POINTS)}
        layers = {x for f in alike for n in f.others for x in _layers(f, n)}
        self.steps = np.array(sorted(steps), np.int64)
        self.points = sorted(names, key=lambda n: (order.get(point_of(n), len(order)), n))
        self.layers = np.array(sorted(layers), np.int64)
        self.shape = (len(self.steps), len(self.points), len(self.layers))

    def _blocks(self, suffix: str) -> Iterator[tuple[tuple[Array, ...], Array]]:
        """Give places of steps, points and layers, and values, dims (step, point, layer, ...): points that are alike at once."""
        for found in self._found:
            steps = found.part.samples[:, 0]
            rows = np.flatnonzero([self._newest.get(s) == found.part.incarnation for s in steps.tolist()])
            if not len(rows):
                continue
            alike: dict[tuple[int, ...], list[int]] = {}
            for number, name in enumerate(self.points):
                if name + suffix in found.arrays:
                    alike.setdefault(tuple(_layers(found, name)), []).append(number)
            for layers, numbers in alike.items():
                read = [found.file.read(found.stream, self.points[n] + suffix) for n in numbers]
                values = np.stack([v.reshape(len(steps), len(layers), -1) for v in read], axis=1)
                places = (
                    np.searchsorted(self.steps, steps[rows]),
                    np.array(numbers),
                    np.searchsorted(self.layers, layers),
                )
                yield np.ix_(*places), values[rows]

    @cached_property
    def fields(self) -> dict[str, Array]:
        """What :func:`describe` makes of the merged fields, dims (step, point, layer)."""
        fields, _ = empty(self.shape)
        for place, values in self._blocks(""):
            fields[place] = merge(fields[place], values)
        return describe(fields)

    @cached_property
    def histogram(self) -> Array:
        """Counts, dims (step, point, layer, bin)."""
        out = np.zeros((*self.shape, NUM_BINS), np.int64)
        for place, values in self._blocks(HISTOGRAM):
            out[place] += values
        return out


def _layers(found: Found, name: str) -> list[int]:
    info = found.arrays[name]
    return [int(x) for x in info.attrs.get("layers", ())] if "layer" in info.dims else [-1]


def statistics_dataset(found: Sequence[Found], newest: Mapping[int, int], attrs: Mapping[str, Any]) -> xr.Dataset:
    """Return a stream of statistics, dims (step, point, layer), with a histogram along ``bin``.

    Notes
    -----
    The shards of a point are parts of it, so their statistics merge exactly (``mappnb.activation_stats.merge``). A point that no layer
    holds is at layer -1. ``count`` 0: no rank told of it.
    """
    merged = _Merged(found, newest)
    dims = ("step", "point", "layer")

    def field(name: str) -> xr.Variable:
        array = LazyArray(merged.shape, np.float64, lambda key: _outer(merged.fields[name], key))
        return lazy_variable(dims, array, {"units": _UNITS.get(name, ""), "long_name": _WHAT.get(name, name)})

    data = {name: field(name) for name in STATS}
    counts = LazyArray((*merged.shape, NUM_BINS), np.int64, lambda key: _outer(merged.histogram, key))
    data["histogram"] = lazy_variable(
        (*dims, "bin"), counts, {"units": "1", "long_name": "number of values per power of two"}
    )
    coords = {
        "step": ("step", merged.steps),
        "point": ("point", np.array(merged.points, object)),
        "layer": ("layer", merged.layers, {"long_name": "layer of the whole model, from 0; -1: no layer"}),
        "bin": ("bin", BIN_EXPONENTS, {"long_name": "floor(log2 |x|); the first takes all below, the last all above"}),
        "incarnation": ("step", np.array([newest[int(s)] for s in merged.steps], np.int64)),
    }
    return xr.Dataset(data, coords, dict(attrs))


def _outer(values: Array, key: tuple[Any, ...]) -> Array:
    """Index by an outer key: ints drop their axis."""
    for axis in range(len(key) - 1, -1, -1):
        values = values[(slice(None),) * axis + (key[axis],)]
    return np.asarray(values)


def weights_dataset(found: Sequence[Found], newest: Mapping[int, int], attrs: Mapping[str, Any]) -> xr.Dataset:
    """Return stored parameters, dims (step, [layer,] ...), put together from their shards."""
    whole = assemble([f.part for f in found], newest=newest, attrs=attrs)
    unused = ("dp_rank", "microbatch", "index", "incarnation")
    if "sample" not in whole.dims:
        return whole
    return whole.drop_vars(unused).swap_dims(sample="step")
