"""Events for other tools: Chrome / Perfetto JSON and flat Parquet, written rank by rank."""

from __future__ import annotations

import gzip
import json
import os
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xarray as xr

from mappnb.analysis._chrome import flow_lines, name_lines, span_lines, tracks
from mappnb.analysis._identity import call_ids
from mappnb.analysis._input import events_of
from mappnb.datasets import layout_of
from mappnb.display import layout_known
from mappnb.errors import MappnbError, did_you_mean
from mappnb.run import Run
from mappnb.schema import EVENTS
from mappnb.terms import Category, Op

__all__ = ["export", "export_chrome", "export_parquet", "steps_of"]

Array = np.ndarray[Any, Any]
_IDENTITY = ("incarnation", "rank", "category", "op", "name", "group", "seq", "peer", "start_ns")
_LONGEST_GROUPS = 50_000  # characters; the importer reads 64 KiB of the head's entries
_TRANSFERS = (Category.COLLECTIVE, Category.P2P)


def export(
    run: Run | xr.Dataset,
    path: str | os.PathLike[str],
    *,
    format: str | None = None,
    step: int | slice | None = None,
    redact: bool = False,
) -> Path:
    """Write events in a format that the file's name tells, and return the path.

    Parameters
    ----------
    run : Run or Dataset, dims (event,)
        Events, recorded, imported or simulated.
    path : path
        ``.json``, ``.json.gz``: :func:`export_chrome`; ``.parquet``: :func:`export_parquet`; ``.zarr``: the activations,
        :func:`mappnb.analysis.activation_export.export_activations`.
    format : str, optional
        ``"chrome"``, ``"parquet"`` or ``"zarr"``, whatever the name is.
    step, redact
        See there.

    Raises
    ------
    MappnbError
        If the format is unknown.
    """
    name = os.fspath(path)
    if format is None:
        format = next((f for end, f in _ENDINGS.items() if name.endswith(end)), "")
        if not format:
            raise MappnbError(
                f"export: the name {name!r} tells no format; end it in .json, .json.gz, .parquet or .zarr, or give one"
            )
    if format not in _FORMATS:
        raise MappnbError(f"export: format {format!r}; known: {', '.join(_FORMATS)}{did_you_mean(format, _FORMATS)}")
    return _FORMATS[format](run, path, step=step, redact=redact)


def steps_of(text: str | None) -> int | slice | None:
    """Return the steps that a text names: ``"7"``, ``"3:9"`` (both included), ``"3:"``; None for none.

    Raises
    ------
    MappnbError
        If it names no steps.
    """
    if text is None:
        return None
    try:
        ends = [int(part) if part else None for part in text.split(":")]
    except ValueError:
        ends = []
    if len(ends) == 1 and ends[0] is not None:
        return ends[0]
    if len(ends) == 2:
        return slice(ends[0], ends[1])
    raise MappnbError(f"steps {text!r}: expected one step, such as 7, or 3:9 for steps 3 to 9")


def export_chrome(
    run: Run | xr.Dataset,
    path: str | os.PathLike[str],
    *,
    step: int | slice | None = None,
    redact: bool = False,
) -> Path:
    """Write events as Chrome trace JSON, for ui.perfetto.dev and chrome://tracing, and return the path.

    Parameters
    ----------
    run : Run or Dataset, dims (event,)
        Events, recorded, imported or simulated, on the run clock as it is aligned.
    path : path
        The file; compressed if it ends in ``.gz``. It is replaced only when it is whole.
    step : int or slice, optional
        Steps to write; all by default.
    redact : bool
        Write names of users' own spans and of hosts as numbers.

    Raises
    ------
    MappnbError
        If there are no events in these steps.

    Notes
    -----
    A process is a rank (in later incarnations ``1000000 * incarnation + rank``), a track a thread (0 to 999), a device stream
    (from 1000), or transfers that run beside the work (from 100000, as many as overlap). ``ts`` and ``dur`` are µs with three decimals:
    ns, exactly. Flows join the members of each call in the order in which they came, the send and its receive among them. Rows are
    read and written one rank at a time; of transfers, the times of all ranks are held.
    """
    attrs = _attrs(run)
    with _sink(path) as out:
        other = {"exporter": "mappnb"} | {
            k: attrs[k] for k in ("run_id", "clock_model", "format_version") if k in attrs
        }
        other |= _places(run, attrs)
        out.write('{"displayTimeUnit": "ns", "otherData": ' + json.dumps(other) + ', "traceEvents": [')
        comma = ""
        for lines in _chrome_parts(run, step, redact=redact):
            out.write(comma + "\n" + ",\n".join(lines))
            comma = ","
        out.write("\n]}\n")
    return Path(path)


def _places(run: Run | xr.Dataset, attrs: Mapping[str, Any]) -> dict[str, Any]:
    """Return layout and groups as the importer puts them back, unless they are too long for an entry of a trace's head."""
    known = "layout" in attrs and (not isinstance(run, Run) or layout_known(run))
    found = {"layout": json.loads(attrs["layout"])} if known else {}
    groups = attrs.get("groups", "{}")
    return found | ({"groups": json.loads(groups)} if 2 < len(groups) < _LONGEST_GROUPS else {})


def _chrome_parts(run: Run | xr.Dataset, step: int | slice | None, *, redact: bool) -> Iterator[Iterable[str]]:
    """Yield the lines of each rank, then those of the flows."""
    hosts = _host_names(run, redact=redact)
    layout = run.layout if isinstance(run, Run) else layout_of(run)
    spans: dict[str, str] = {}
    flows: list[tuple[Array, ...]] = []
    for incarnation, rank, events in _ranks(run, step):
        track = tracks(events)
        words = [f"rank {rank}"]
        if layout.world_size > max(rank, 1) and (not isinstance(run, Run) or layout_known(run)):
            words.append(f"({layout.label(rank)})")
        words += [hosts[rank]] if hosts.get(rank) else []
        words += [f"incarnation {incarnation}"] if incarnation else []
        names = _names(events, spans) if redact else events.name.values
        yield [*name_lines(incarnation, rank, " ".join(words), track), *span_lines(events, names, track)]
        flows.append(_flow_ends(events, track))
    if not flows:
        raise MappnbError("export: no events in these steps; see run.steps for the steps that there are")
    lines = list(flow_lines(*_calls(flows)))
    if lines:
        yield lines


def export_parquet(
    run: Run | xr.Dataset,
    path: str | os.PathLike[str],
    *,
    step: int | slice | None = None,
    redact: bool = False,
) -> Path:
    """Write events as one flat Parquet file, and return the path.

    Parameters
    ----------
    run : Run or Dataset, dims (event,)
        Events, recorded, imported or simulated.
    path : path
        The file. It is replaced only when it is whole.
    step : int or slice, optional
        Steps to write; all by default.
    redact : bool
        Write names of users' own spans as numbers.

    Raises
    ------
    MappnbError
        If there are no events in these steps.

    Notes
    -----
    Columns are the variables of :data:`mappnb.schema.EVENTS`, a row group a rank. The file's metadata holds layout, groups and clock
    model as JSON under ``mappnb``.
    """
    spans: dict[str, str] = {}
    target, tmp = Path(path), _tmp(path)
    schema = pa.schema(
        [(k, pa.string() if v.dtype is str else pa.from_numpy_dtype(v.numpy_dtype)) for k, v in EVENTS.items()]
    )
    meta = {k: _attrs(run)[k] for k in ("run_id", "layout", "groups", "clock_model") if k in _attrs(run)}
    schema = schema.with_metadata({"mappnb": json.dumps(meta)})
    rows = 0
    try:
        with pq.ParquetWriter(tmp, schema, compression="zstd") as out:
            for _, _, events in _ranks(run, step):
                columns = {k: events[k].values for k in EVENTS}
                if redact:
                    columns["name"] = _names(events, spans)
                out.write_table(pa.table([pa.array(columns[f.name], f.type) for f in schema], schema=schema))
                rows += events.sizes["event"]
        if not rows:
            raise MappnbError("export: no events in these steps; see run.steps for the steps that there are")
        os.replace(tmp, target)
    finally:
        tmp.unlink(missing_ok=True)
    return target


def _ranks(run: Run | xr.Dataset, step: int | slice | None) -> Iterator[tuple[int, int, xr.Dataset]]:
    """Yield (incarnation, rank, events) in that order; ranks without events are left out."""
    if isinstance(run, Run):
        for incarnation in run.incarnations:
            for rank in sorted(incarnation.ranks):
                events = run.sel(step=step, rank=rank, incarnation=incarnation.number)
                if events.sizes["event"]:
                    yield incarnation.number, rank, events
        return
    events = events_of(run, step)
    key = np.stack([events.incarnation.values, events["rank"].values], 1)
    for incarnation, rank in np.unique(key, axis=0).tolist():
        mine = np.flatnonzero((key[:, 0] == incarnation) & (key[:, 1] == rank))
        yield incarnation, rank, events.isel(event=mine[np.argsort(events.start_ns.values[mine], kind="stable")])


def _attrs(run: Run | xr.Dataset) -> Mapping[str, Any]:
    return run.events.attrs if isinstance(run, Run) else run.attrs


def _host_names(run: Run | xr.Dataset, *, redact: bool) -> dict[int, str]:
    if not isinstance(run, Run):
        return {}
    names = {rank: str(info.get("host", "")) for i in run.incarnations for rank, info in i.ranks.items()}
    number = {host: f"host{i}" for i, host in enumerate(dict.fromkeys(names[r] for r in sorted(names)))}
    return {rank: number[host] if redact and host else host for rank, host in names.items()}


def _names(events: xr.Dataset, known: dict[str, str]) -> Array:
    """Return the names of events with those of users' own spans numbered; ``known`` keeps the numbers."""
    names = np.array(events.name.values, object)
    own = np.flatnonzero(np.isin(events.op.values, (Op.SPAN,)) & (names != ""))
    for i in own.tolist():
        names[i] = known.setdefault(str(names[i]), f"span{len(known)}")
    return names


def _flow_ends(events: xr.Dataset, track: Array) -> tuple[Array, ...]:
    """Return what flows need of the transfers of one rank: identity, process, track, start."""
    index = np.flatnonzero(np.isin(events.category.values, _TRANSFERS) & (events.seq.values >= 0))
    process = events.incarnation.values[index].astype(np.int64) * 1_000_000 + events["rank"].values[index]
    return (*(events[n].values[index] for n in _IDENTITY), process, track[index])


def _calls(flows: list[tuple[Array, ...]]) -> tuple[Array, ...]:
    """Return (call, process, track, start) of all members of all calls."""
    columns = [np.concatenate([f[i] for f in flows]) for i in range(len(_IDENTITY) + 2)]
    rows = xr.Dataset({n: ("event", c) for n, c in zip(_IDENTITY, columns[:-2], strict=True)})
    return call_ids(rows), columns[-2], columns[-1], columns[-3]


def _tmp(path: str | os.PathLike[str]) -> Path:
    target = Path(path)
    return target.with_name(f".{target.name}.{os.getpid()}.{uuid.uuid4().hex[:8]}.tmp")


@contextmanager
def _sink(path: str | os.PathLike[str]) -> Iterator[IO[str]]:
    """Open a text file that takes the place of ``path`` when it is whole; compressed by its name."""
    tmp = _tmp(path)
    try:
        if os.fspath(path).endswith(".gz"):
            with gzip.open(tmp, "wt", encoding="utf-8", compresslevel=5) as out:
                yield out
        else:
            with open(tmp, "w", encoding="utf-8") as out:
                yield out
        os.replace(tmp, path)
    finally:
        with suppress(FileNotFoundError):
            tmp.unlink()


def _export_zarr(run: Any, path: str | os.PathLike[str], **options: Any) -> Path:
    from mappnb.analysis.activation_export import export_activations

    return export_activations(run, path, **options)


_FORMATS: dict[str, Callable[..., Path]] = {"chrome": export_chrome, "parquet": export_parquet, "zarr": _export_zarr}
_ENDINGS = {".json": "chrome", ".json.gz": "chrome", ".parquet": "parquet", ".zarr": "zarr"}
