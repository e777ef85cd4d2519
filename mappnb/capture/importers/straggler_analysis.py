"""ByteDance StragglerAnalysis parquet: one row per operation of a worker (data-parallel rank × pipeline stage)."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from mappnb.capture.importers._errors import TraceImportError
from mappnb.capture.importers._formats import Imported, ImportOptions, RankRows, SiteRow, register_format
from mappnb.capture.importers._rows import content, named_group
from mappnb.capture.importers._sources import Source
from mappnb.capture.importers._straggler_calls import (
    groups_of_rows,
    peers_of_rows,
    sequence_of_rows,
    with_microbatches,
)
from mappnb.errors import did_you_mean
from mappnb.layout import Layout
from mappnb.table_specs import Columns
from mappnb.terms import Category, Op, Phase

__all__ = ["OPTYPES", "StragglerTrace", "parse", "read_meta", "read_straggler_analysis", "read_table"]

OPTYPES: Final[dict[str, tuple[Category, str, Phase]]] = {
    "forward-compute": (Category.COMPUTE, Op.FORWARD_STEP, Phase.FORWARD),
    "backward-compute": (Category.COMPUTE, Op.BACKWARD_STEP, Phase.BACKWARD),
    "forward-send": (Category.P2P, Op.SEND, Phase.FORWARD),
    "forward-recv": (Category.P2P, Op.RECV, Phase.FORWARD),
    "backward-send": (Category.P2P, Op.SEND, Phase.BACKWARD),
    "backward-recv": (Category.P2P, Op.RECV, Phase.BACKWARD),
    "params-all-gather": (Category.COLLECTIVE, Op.ALL_GATHER, Phase.NONE),
    "grads-reduce-scatter": (Category.COLLECTIVE, Op.REDUCE_SCATTER, Phase.NONE),
    "layernorm-grads-all-reduce": (Category.COLLECTIVE, Op.ALL_REDUCE, Phase.NONE),
    "embedding-grads-all-reduce": (Category.COLLECTIVE, Op.ALL_REDUCE, Phase.NONE),
    "separate-grads-all-reduce": (Category.COLLECTIVE, Op.ALL_REDUCE, Phase.NONE),
    "optimizer-clip-main-grad": (Category.COLLECTIVE, Op.ALL_REDUCE, Phase.NONE),
    "optimizer": (Category.OPTIMIZER, Op.OPTIMIZER_STEP, Phase.NONE),
    "gc": (Category.HOST, Op.GC, Phase.NONE),
}
"""What each ``optype`` is here: (category, op, phase); the optype itself stays as the event's name."""

_COLUMNS: Final = ("dp_rank", "stage", "rank", "step", "optype", "start_ts", "duration", "seq_id", "mc", "mb_id", "gmc")
_ZERO_NS: Final = 2 * 10**9
"""Where the trace's zero is put on the wall clock, which is not known, in ns."""

_LONGEST_S: Final = 1e6
"""A step does not last longer, s."""
_SIZES: Final = ("dp_size", "dsp_size", "pp_size", "tp_size", "vpp_size", "world_size")


@dataclass(slots=True)
class StragglerTrace:
    """The events of all workers.

    Attributes
    ----------
    layout : Layout
        One rank per worker: tensor- and sequence-parallel ranks are folded into one.
    folded : dict of str to int
        Sizes of the job as the layout file states them.
    rank : int array, shape (event,)
        Rank in ``layout``, sorted.
    columns : dict of str to array
        Columns of the events table; ``site`` numbers :attr:`sites`; ``group`` holds places in ``groups`` or -1.
    sites : list of tuple
        ``mappnb.schema.SITE_FIELDS`` of each site.
    groups : list of (str, tuple of int)
        Name and ranks of each group.
    source_rank : dict of int to int
        The file's own number of each rank.
    steps : int array, shape (step,)
        The job's step numbers, in order.
    step_start_ns : int array, shape (step,)
        Where each step was laid: ns from the first one's start.
    skipped : dict of str to int
        Rows that were left out, by reason.
    """

    layout: Layout
    folded: dict[str, int]
    rank: np.ndarray[Any, Any]
    columns: dict[str, np.ndarray[Any, Any]]
    sites: list[SiteRow]
    groups: list[tuple[str, tuple[int, ...]]]
    source_rank: dict[int, int]
    steps: np.ndarray[Any, Any]
    step_start_ns: np.ndarray[Any, Any]
    skipped: dict[str, int]


def read_meta(text: bytes) -> dict[str, int]:
    """Return the integers of a flat ``key: value`` YAML file; other values are ignored."""
    found = {}
    for line in text[:65536].decode("utf-8", "replace").splitlines():
        if m := re.fullmatch(r"\s*([A-Za-z_]\w*)\s*:\s*(\d{1,9})\s*(?:#.*)?", line):
            found[m[1]] = int(m[2])
    return found


def read_table(data: bytes, *, where: str = "trace") -> pd.DataFrame:
    """Return the rows of a trace with the columns of this format.

    Raises
    ------
    TraceImportError
        If it is no Parquet file, a column is missing or is no number, or there are no rows.
    """
    try:
        file = pq.ParquetFile(pa.BufferReader(data))
        _has_columns(list(file.schema_arrow.names), where)
        rows: pd.DataFrame = file.read(columns=list(_COLUMNS)).to_pandas(ignore_metadata=True)
    except TraceImportError:
        raise
    except (pa.ArrowException, OSError, ValueError) as err:
        raise TraceImportError(f"{where}: not a readable Parquet file ({_short(err)}); is it cut off?") from err
    if not len(rows):
        raise TraceImportError(f"{where}: no rows; expected one per operation")
    for name in _COLUMNS:
        if name != "optype" and rows[name].dtype.kind not in "iuf":
            raise TraceImportError(f"{where}: column {name!r} is {rows[name].dtype}; expected numbers")
    return rows.assign(optype=rows["optype"].astype(str))


def _has_columns(names: list[str], where: str) -> None:
    if missing := [c for c in _COLUMNS if c not in names]:
        raise TraceImportError(
            f"{where}: no column {missing[0]!r}; a StragglerAnalysis trace has {', '.join(_COLUMNS)}"
            f"{did_you_mean(missing[0], names)}; found {', '.join(names[:20])}"
        )


def _short(err: BaseException) -> str:
    return str(err).splitlines()[0][:200] if str(err) else type(err).__name__


def parse(rows: pd.DataFrame, meta: dict[str, int], *, where: str = "trace") -> StragglerTrace:
    """Return the events of all workers, laid out on one clock.

    Parameters
    ----------
    rows : DataFrame
        As :func:`read_table` returns it: ``start_ts`` in s from the step's first operation, ``duration`` in s.
    meta : dict of str to int
        Sizes by the names of the layout file; what is missing is taken from the rows.
    where : str
        What to call the trace in messages.

    Returns
    -------
    StragglerTrace

    Raises
    ------
    TraceImportError
        If the rows contradict the layout file, or none is usable.

    Notes
    -----
    Names and grouping follow the artifact of arXiv:2505.05713 (ByteDance-Seed/StragglerAnalysis). The j-th send of a
    stage meets the j-th receive of its neighbour; all-gather and reduce-scatter join the data-parallel ranks of a stage,
    the embedding's all-reduce the first and last stage, gradient clipping every worker. The layer norms' all-reduce is
    over tensor-parallel ranks, which the trace folds into one: its group is the worker alone. Times are relative to their
    step, so steps are laid one after the other, without a gap.
    """
    skipped: dict[str, int] = {}
    rows = _usable(rows, skipped, where)
    layout, folded = _layout(rows, meta, where)
    rows = rows.assign(worker=rows["stage"] * layout.dp + rows["dp_rank"])
    rows = _once(rows, skipped)
    rows = with_microbatches(rows, layout)
    steps, number = np.unique(rows["step"].to_numpy(), return_inverse=True)
    start_ns, end_ns, offset = _laid_out(rows, number, len(steps))
    kinds = sorted(set(rows["optype"]))
    kind = rows["optype"].map({k: i for i, k in enumerate(kinds)}).to_numpy()
    group, groups = groups_of_rows(rows, layout)
    columns = {
        "start_ns": start_ns + offset[number],
        "duration_ns": end_ns - start_ns,
        "step": rows["step"].to_numpy(),
        "site": kind,
        "stage": np.maximum(rows["mc"].to_numpy(), 0) * layout.pp + rows["stage"].to_numpy(),
        "chunk": rows["mc"].to_numpy(),
        "microbatch": rows["mb_id"].to_numpy(),
        "peer": peers_of_rows(rows, layout),
        "group": group,
        "seq": sequence_of_rows(rows, number),
    }
    order = np.lexsort((columns["start_ns"], rows["worker"].to_numpy()))
    sites = [(c.value, str(o), k, p.value, -1, "") for k in kinds for c, o, p in [OPTYPES[k]]]
    names = dict(zip(rows["worker"].tolist(), rows["rank"].tolist(), strict=True))
    return StragglerTrace(
        layout=layout,
        folded=folded,
        rank=rows["worker"].to_numpy()[order],
        columns={k: v[order] for k, v in columns.items()},
        sites=sites,
        groups=groups,
        source_rank=names,
        steps=steps,
        step_start_ns=offset,
        skipped=skipped,
    )


def _usable(rows: pd.DataFrame, skipped: dict[str, int], where: str) -> pd.DataFrame:
    """Leave out rows of unknown kinds, without a place or a time, and those of negative length."""
    numbers = rows[[c for c in _COLUMNS if c != "optype"]].astype(float)
    finite = np.isfinite(numbers.to_numpy()).all(axis=1)
    placed = finite & (numbers[["dp_rank", "stage", "step", "seq_id"]].min(axis=1).to_numpy() >= 0)
    placed &= (numbers.abs().max(axis=1) < 2**31).to_numpy()
    placed &= (numbers[["start_ts", "duration"]].abs().max(axis=1) < _LONGEST_S).to_numpy()
    known = rows["optype"].isin(list(OPTYPES)).to_numpy()
    negative = placed & (numbers["duration"].to_numpy() < 0)
    for name, mask in {
        "rows of an unknown optype": ~known,
        "rows without a place or a time": ~placed,
        "rows of negative duration": negative,
    }.items():
        if mask.any():
            skipped[name] = int(mask.sum())
    kept: pd.DataFrame = rows[known & placed & ~negative]
    if not len(kept):
        raise TraceImportError(
            f"{where}: none of {len(rows)} rows is usable ({', '.join(f'{k}: {v}' for k, v in skipped.items())})"
        )
    whole = [c for c in _COLUMNS if c not in ("optype", "start_ts", "duration")]
    kept = kept.astype(dict.fromkeys(whole, np.int64)).reset_index(drop=True)
    return kept


def _layout(rows: pd.DataFrame, meta: dict[str, int], where: str) -> tuple[Layout, dict[str, int]]:
    dp = meta.get("dp_size", int(rows["dp_rank"].max()) + 1)
    pp = meta.get("pp_size", int(rows["stage"].max()) + 1)
    chunks = max(1, meta.get("vpp_size", int(rows["mc"].max()) + 1))
    for name, size, column in (("dp_size", dp, "dp_rank"), ("pp_size", pp, "stage"), ("vpp_size", chunks, "mc")):
        if rows[column].max() >= size:
            raise TraceImportError(
                f"{where}: {column} goes up to {rows[column].max()}, the layout file says {name} {size}; is it of another job?"
            )
    if dp * pp > 2**20:
        raise TraceImportError(f"{where}: {dp} × {pp} workers; that many cannot be meant")
    return Layout(dp=dp, pp=pp, num_chunks=chunks), {k: meta[k] for k in _SIZES if k in meta}


def _once(rows: pd.DataFrame, skipped: dict[str, int]) -> pd.DataFrame:
    """Keep the first of rows that claim the same operation."""
    twice = rows.duplicated(["worker", "step", "optype", "seq_id"])
    if twice.any():
        skipped["rows of an operation that is there already"] = int(twice.sum())
        rows = rows[~twice].reset_index(drop=True)
    return rows


def _laid_out(rows: pd.DataFrame, number: np.ndarray[Any, Any], num_steps: int) -> tuple[Any, Any, Any]:
    """Return start and end in ns from the step's start, and where each step starts in ns."""
    start = np.round(rows["start_ts"].to_numpy().astype(np.float64) * 1e9).astype(np.int64)
    end = start + np.round(rows["duration"].to_numpy().astype(np.float64) * 1e9).astype(np.int64)
    first, last = np.full(num_steps, np.iinfo(np.int64).max), np.zeros(num_steps, np.int64)
    np.minimum.at(first, number, start)
    np.maximum.at(last, number, end)
    first = np.minimum(first, 0)
    start, end = start - first[number], end - first[number]
    offset = np.concatenate([[0], np.cumsum(last - first)[:-1]]).astype(np.int64)
    return start, end, offset


def _detect(source: Source) -> bool:
    head = source.head()
    if head[:4] == b"PAR1":
        return source.explicit or "trace" in source.name.rsplit("/", 1)[-1]
    return b"dp_size:" in head and b"pp_size:" in head


@register_format("straggler_analysis", detect=_detect, priority=90)
def read_straggler_analysis(sources: Sequence[Source], options: ImportOptions) -> Imported:
    """Import a StragglerAnalysis trace: one Parquet file, and the YAML file of its layout where it is given or beside it.

    Parameters
    ----------
    sources : sequence of Source
        The files.
    options : ImportOptions
        Not used: the ranks are in the rows.

    Raises
    ------
    TraceImportError
        If there is not exactly one trace, or it cannot be read.
    """
    traces = [s for s in sources if s.head()[:4] == b"PAR1"]
    layouts = [s for s in sources if s.head()[:4] != b"PAR1"]
    if len(traces) != 1:
        found = ", ".join(s.name for s in traces[:4]) or "no Parquet file"
        raise TraceImportError(f"{found}: {len(traces)} traces; import each job by itself, with its layout file")
    trace = traces[0]
    meta, meta_name = _meta_of(trace, layouts)
    parsed = parse(read_table(content(trace), where=trace.name), meta, where=trace.name)
    names = [trace.name, *([meta_name] if meta_name else [])]
    notes = ["times in the trace are relative to their step: the steps are laid one after the other, without a gap"]
    if not meta:
        notes.append(
            "no layout file: sizes are those of the rows; tensor-parallel and other folded sizes are not known"
        )
    return Imported(
        world_size=parsed.layout.world_size,
        ranks=_ranks(parsed, names),
        first_wall_ns=_ZERO_NS,
        layout=parsed.layout,
        notes=notes,
    )


def _meta_of(trace: Source, layouts: Sequence[Source]) -> tuple[dict[str, int], str]:
    """Return the sizes of the job, from the one layout file given, or from ``meta-X.yaml`` beside ``trace-X.parquet``."""
    if len(layouts) == 1:
        return read_meta(content(layouts[0], limit=2**20)), layouts[0].name
    if len(layouts) > 1:
        raise TraceImportError(
            f"{', '.join(s.name for s in layouts[:4])}: several layout files; give the one of {trace.name}"
        )
    path = Path(trace.name)
    beside = path.with_name(re.sub(r"^trace(.*)\.parquet$", r"meta\1.yaml", path.name))
    if beside.suffix == ".yaml" and beside.is_file():
        with open(beside, "rb") as file:
            return read_meta(file.read(65536)), str(beside)
    return {}, ""


def _ranks(parsed: StragglerTrace, names: list[str]) -> Iterator[RankRows]:
    """Yield the workers."""
    ids = [named_group(name, ranks) for name, ranks in parsed.groups]
    group = parsed.columns["group"]
    whole = {**parsed.columns, "group": np.where(group >= 0, np.array(ids)[group], -1)}
    bounds = np.searchsorted(parsed.rank, np.arange(parsed.layout.world_size + 1))
    for rank, (a, b) in enumerate(itertools.pairwise(bounds)):
        columns = {k: v[a:b] for k, v in whole.items()}
        groups = {
            str(ids[i]): {"ranks": list(ranks), "backend": "nccl", "desc": name, "name": name, "ordinal": 0}
            for i, (name, ranks) in enumerate(parsed.groups)
            if rank in ranks
        }
        about = {
            "folded": parsed.folded,
            "source_rank": parsed.source_rank.get(rank, -1),
            "times": "relative to each step",
        }
        if b > a:
            yield RankRows(
                rank=rank,
                sources=names,
                sites=parsed.sites,
                columns=columns,
                tables={"steps": _step_rows(columns, parsed)},
                facts={"groups": groups, "straggler_analysis": about, "host": "cluster"},
                wall_offset_ns=_ZERO_NS,
                num_read=int(b - a),
                skipped=parsed.skipped if rank == parsed.rank[0] else {},
            )


def _step_rows(columns: Columns, parsed: StragglerTrace) -> Columns:
    """Return the step table of one worker: from the step's start to the worker's last operation."""
    number = np.searchsorted(parsed.steps, columns["step"])
    ends = np.full(len(parsed.steps), -1, np.int64)
    np.maximum.at(ends, number, columns["start_ns"] + columns["duration_ns"])
    has = ends >= 0
    return {"step": parsed.steps[has], "start_ns": parsed.step_start_ns[has], "end_ns": ends[has]}
