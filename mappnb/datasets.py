"""xarray datasets out of stored columns: lazy where the table is whole, in memory for a window."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import xarray as xr
from xarray.core import indexing

from mappnb.clockmodel import ClockModel
from mappnb.layout import Layout
from mappnb.schema import EVENTS, FORMAT_VERSION, METRICS, SITE_FIELDS, STEPS, TELEMETRY, Var
from mappnb.table_specs import Columns
from mappnb.tables import TableReader

__all__ = ["events_lazy", "events_window", "groups_of", "layout_of", "samples", "steps_dataset"]

Array = np.ndarray[Any, Any]
Attrs = dict[str, Any]


def layout_of(ds: xr.Dataset) -> Layout:
    """Return the parallel layout that a dataset carries in its attributes; a single rank if it carries none."""
    return Layout.from_dict(json.loads(ds.attrs["layout"])) if "layout" in ds.attrs else Layout()


def groups_of(ds: xr.Dataset) -> dict[int, dict[str, Any]]:
    """Return the process groups that a dataset carries: id -> ranks, backend, desc."""
    return {int(k): v for k, v in json.loads(ds.attrs.get("groups", "{}")).items()}


def _variable_attrs(var: Var) -> Attrs:
    return {"units": var.unit, "long_name": var.meaning}


class _LazyColumn(xr.backends.BackendArray):
    """A column that is read when it is looked at: only the rows that are asked for, where they are one slice."""

    def __init__(self, fetch: Callable[[int, int], Array], rows: int, dtype: np.dtype[Any]) -> None:
        self.shape, self.dtype, self._fetch = (rows,), dtype, fetch

    def __getitem__(self, key: indexing.ExplicitIndexer) -> Any:
        return indexing.explicit_indexing_adapter(key, self.shape, indexing.IndexingSupport.BASIC, self._basic)

    def _basic(self, key: tuple[Any, ...]) -> Any:
        (k,) = key
        if isinstance(k, slice):
            start, stop, step = k.indices(self.shape[0])
            taken = range(start, stop, step)
            if len(taken) == 0:
                return np.empty(0, self.dtype)
            lo, hi = min(taken[0], taken[-1]), max(taken[0], taken[-1]) + 1
            return self._fetch(lo, hi)[:: abs(step)][:: 1 if step > 0 else -1]
        return self._fetch(int(k), int(k) + 1)[0]


def _event_fetchers(reader: TableReader, clock: ClockModel) -> dict[str, Callable[[int, int], Array]]:
    site = lru_cache(maxsize=2)(lambda lo, hi: reader.column("site", lo, hi))

    def stored(name: str) -> Callable[[int, int], Array]:
        return lambda lo, hi: reader.column(name, lo, hi)

    def described(name: str) -> Callable[[int, int], Array]:
        return lambda lo, hi: reader.sites.values(name)[site(lo, hi)]

    out = {
        v: described(v) if v in SITE_FIELDS else stored(v)
        for v in EVENTS
        if v not in ("incarnation", "rank", "raw_start_ns")
    }
    out["incarnation"] = lambda lo, hi: reader.per_part(lambda key: key[0], np.int32, lo, hi)
    out["rank"] = lambda lo, hi: reader.per_part(lambda key: key[1], np.int32, lo, hi)
    out["raw_start_ns"] = stored("start_ns")
    out["start_ns"] = lambda lo, hi: _on_run_clock(reader, clock, reader.column("start_ns", lo, hi), lo, hi)
    if clock.pieces:
        out["duration_ns"] = lambda lo, hi: _run_length(reader, clock, lo, hi)
    return out


def _keys_of(reader: TableReader, lo: int = 0, hi: int | None = None) -> Array:
    """Return (incarnation, rank) of rows in one number each."""
    return np.asarray(reader.per_part(lambda key: (key[0] << 32) | key[1], np.int64, lo, hi))


def _shifted(clock: ClockModel, keys: Array, own_ns: Array) -> Array:
    """Return times of ranks' own clocks on the run clock, ns; ``keys`` as of :func:`_keys_of`."""
    unique, inverse = np.unique(keys, return_inverse=True)
    pairs = [(int(k >> 32), int(k & 0xFFFFFFFF)) for k in unique]
    if not any(p in clock.pieces for p in pairs):
        return np.asarray(own_ns + np.array([clock.offset(p) for p in pairs], np.int64)[inverse])
    out = own_ns.astype(np.int64)
    order = np.argsort(inverse, kind="stable")
    bounds = np.cumsum(np.bincount(inverse))[:-1]
    for pair, rows in zip(pairs, np.split(order, bounds), strict=True):
        out[rows] += clock.shift(pair, own_ns[rows])
    return out


def _on_run_clock(reader: TableReader, clock: ClockModel, own_ns: Array, lo: int = 0, hi: int | None = None) -> Array:
    if not clock.pieces:
        return np.asarray(own_ns + reader.per_part(clock.offset, np.int64, lo, hi))
    return _shifted(clock, _keys_of(reader, lo, hi), own_ns)


def _run_length(reader: TableReader, clock: ClockModel, lo: int, hi: int) -> Array:
    """Return durations on the run clock: drift and steps of the rank's own clock taken out, ns."""
    own, keys = reader.column("start_ns", lo, hi), _keys_of(reader, lo, hi)
    end = _shifted(clock, keys, own + reader.column("duration_ns", lo, hi))
    return np.asarray(np.maximum(end - _shifted(clock, keys, own), 0))


def events_lazy(reader: TableReader, clock: ClockModel, attrs: Mapping[str, Any]) -> xr.Dataset:
    """Return every event as a dataset that reads a column when it is looked at, dims (event,)."""
    fetchers = _event_fetchers(reader, clock)
    variables = {}
    for name, var in EVENTS.items():
        lazy = indexing.LazilyIndexedArray(_LazyColumn(fetchers[name], reader.rows, var.numpy_dtype))
        variables[name] = xr.Variable(var.dims, indexing.MemoryCachedArray(lazy), _variable_attrs(var))  # type: ignore[no-untyped-call]
    return xr.Dataset(variables, attrs=dict(attrs))


def events_window(
    reader: TableReader, clock: ClockModel, attrs: Mapping[str, Any], columns: Columns, incarnation: Array, rank: Array
) -> xr.Dataset:
    """Return the rows of a window, in order of start, as a dataset in memory, dims (event,)."""
    keys = (incarnation.astype(np.int64) << 32) | rank
    start, length = _shifted(clock, keys, columns["start_ns"]), columns["duration_ns"]
    if clock.pieces:
        length = np.maximum(_shifted(clock, keys, columns["start_ns"] + length) - start, 0)
    order = np.argsort(start, kind="stable")
    site = columns["site"][order]
    have = {
        "incarnation": incarnation[order],
        "rank": rank[order],
        "start_ns": start[order],
        "raw_start_ns": columns["start_ns"][order],
        "duration_ns": length[order],
    }
    data = {}
    for name, var in EVENTS.items():
        if name in SITE_FIELDS:
            have[name] = reader.sites.values(name)[site]
        value = have[name] if name in have else columns[name][order]
        data[name] = xr.Variable(var.dims, value, _variable_attrs(var), fastpath=True)  # no look for dates in text
    return xr.Dataset(data, attrs=dict(attrs))


def samples(reader: TableReader, clock: ClockModel, attrs: Mapping[str, Any]) -> xr.Dataset:
    """Return the telemetry or metrics table in memory, dims (sample,), with rank and incarnation of every row."""
    schema = TELEMETRY if reader.spec.name == "telemetry" else METRICS
    columns, incarnation, rank = reader.window()
    data: dict[str, Any] = {"incarnation": ("sample", incarnation), "rank": ("sample", rank)}
    columns["time_ns"] = _shifted(clock, (incarnation.astype(np.int64) << 32) | rank, columns["time_ns"])
    data["time_ns"] = ("sample", columns["time_ns"], {"units": "ns", "long_name": "time on the run clock"})
    for name, var in schema.items():
        data[name] = (var.dims, columns[name], _variable_attrs(var))
    return xr.Dataset(data, attrs=dict(attrs))


def steps_dataset(
    reader: TableReader, clock: ClockModel, attrs: Mapping[str, Any], *, models: Mapping[int, Mapping[str, Any]]
) -> xr.Dataset:
    """Return the step table, dims (step, rank).

    Parameters
    ----------
    models : mapping of int to mapping
        What each incarnation's ranks say of the model: ``flops_per_token`` and ``peak_flops`` (of one rank's device), for the MFU.

    Notes
    -----
    A step that was repeated after a restart shows its newest run; ``incarnation`` tells which. Per step over all ranks:
    ``step_s`` first start to last end, ``tokens_per_s``, and ``mfu``: model FLOPs of the tokens over peak FLOPs of all devices in
    ``step_s``, as Chowdhery et al. (arXiv:2204.02311, appendix B) define it.
    """
    columns, incarnation, rank = reader.window()
    steps, row = np.unique(columns["step"], return_inverse=True)
    ranks, col = np.unique(rank, return_inverse=True)
    newest = np.full(len(steps), -1, np.int32)
    np.maximum.at(newest, row, incarnation)
    keep = incarnation == newest[row]
    sizes = {"step": len(steps), "rank": len(ranks)}
    data = {}
    keys = (incarnation.astype(np.int64) << 32) | rank
    for name, var in STEPS.items():
        grid = np.full([sizes[d] for d in var.dims], np.nan if var.dtype is np.float64 else -1, var.numpy_dtype)
        value = columns[name]
        if name in ("start_ns", "end_ns"):
            value = np.where(value >= 0, _shifted(clock, keys, value), -1)
        grid[row[keep], col[keep]] = value[keep]
        data[name] = xr.Variable(var.dims, grid, _variable_attrs(var))
    ds = xr.Dataset(data, coords={"step": steps.astype(np.int32), "rank": ranks.astype(np.int32)}, attrs=dict(attrs))
    ds["incarnation"] = ("step", newest, {"long_name": "restart of the job that ran the step"})
    ds.attrs["repeated_rows"] = int((~keep).sum())
    return _throughput(ds, models)


def _throughput(ds: xr.Dataset, models: Mapping[int, Mapping[str, Any]]) -> xr.Dataset:
    layout = layout_of(ds)
    done = (ds.start_ns >= 0) & (ds.end_ns >= 0)
    if not ds.sizes["step"]:
        return ds.assign({n: ("step", np.empty(0)) for n in ("step_s", "tokens_per_s", "mfu")})
    first = ds.start_ns.where(done).min("rank")
    last = ds.end_ns.where(done).max("rank")
    ds["step_s"] = ((last - first) / 1e9).assign_attrs(units="s", long_name="first start to last end over the ranks")
    heads = {layout.rank(dp=d) for d in range(layout.dp)}  # one rank of each replica counts its tokens
    shards = [r for r in ds["rank"].values.tolist() if r in heads]
    tokens = (
        ds.tokens.sel(rank=shards).sum("rank", skipna=True, min_count=1)
        if shards
        else ds.tokens.sum("rank", min_count=1)
    )
    ds["tokens_per_s"] = (tokens / ds.step_s).assign_attrs(units="1/s", long_name="tokens of all replicas over step_s")
    flops = np.array([float(models.get(int(i), {}).get("flops_per_token") or np.nan) for i in ds.incarnation.values])
    peak = np.array([float(models.get(int(i), {}).get("peak_flops") or np.nan) for i in ds.incarnation.values])
    mfu = ds.tokens_per_s * flops / (peak * layout.world_size)
    ds["mfu"] = mfu.assign_attrs(
        units="1", long_name="model FLOPs utilisation; NaN where the peak of the device is not known"
    )
    return ds


def dataset_attrs(
    *,
    run_id: str,
    layout: Layout,
    groups: Mapping[int, Any],
    clock: ClockModel,
    shared_clocks: Mapping[int, list[list[int]]] | None = None,
    imported: str | None = None,
) -> Attrs:
    """Return the attributes that every dataset of a run carries: what the analyses need besides the rows."""
    return {
        "format_version": FORMAT_VERSION,
        "run_id": run_id,
        "layout": json.dumps(layout.to_dict()),
        "groups": json.dumps({str(k): v for k, v in groups.items()}),
        "clock_model": clock.name,
        "clocks": json.dumps({str(k): v for k, v in (shared_clocks or {}).items()}),
        **({"imported": imported} if imported else {}),
    }
