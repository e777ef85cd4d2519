"""MegaScan (MegatronApp): files per rank, and what its two aggregate scripts make of them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from mappnb.capture._groups import group_id
from mappnb.capture.importers._chrome_rows import ChromeRows, SpanTable, gather_rows, spans_of
from mappnb.capture.importers._formats import Imported, ImportOptions, RankRows, register_format
from mappnb.capture.importers._ranks import assign_ranks
from mappnb.capture.importers._sources import Source
from mappnb.capture.importers._tracejson import MISSING, TraceText
from mappnb.capture.importers._traces import read_source
from mappnb.capture.importers.chrome import rank_rows
from mappnb.errors import LayoutError
from mappnb.layout import Layout
from mappnb.terms import COLLECTIVE_OPS, Category, Op

__all__ = ["import_megascan"]

Array = np.ndarray[Any, Any]
_MAX_RANKS = 1 << 20
_PER_RANK = (
    "g_rk",
    "dp_rk",
    "pp_rk",
    "tp_rk",
    "pad_before",
    "duration_wall",
    "micro_batch_index",
    "microbatch",
    "model_chunk",
    "data",
)
_FIELDS: tuple[tuple[str, str, str], ...] = (
    ("args", "name", "s"),
    ("event", "rel_ts", "t"),
    *(("event", n, "i") for n in _PER_RANK),
    ("event", "group", "s"),
    *(
        ("args", n, "i")
        for n in ("iteration", "microbatch", "micro_batch_index", "model_chunk", "pp_rank", "data", "g_rk")
    ),
    ("args", "group", "s"),
)


def _is_megascan(source: Source) -> bool:
    head = source.head()
    aggregated = b'"iteration begin"' in head and b'"thread_state_unknown"' in head
    return b'"rel_ts"' in head or aggregated or (b'"related_sync_op"' in head and b'"iteration"' in head)


@register_format("megascan", detect=_is_megascan, priority=80)
def import_megascan(sources: Sequence[Source], options: ImportOptions) -> Imported:
    """Read MegaScan's files: one per rank (``rel_ts``), or one of all ranks (a process per rank).

    Parameters
    ----------
    sources : sequence of Source
        Files of one run: the ranks', or one aggregated file.
    options : ImportOptions
        How ranks are told.

    Returns
    -------
    Imported
        With the layout where the files tell it. Steps are the ordinals of the traced iterations: MegaScan does not store
        the training step.

    Notes
    -----
    MegatronApp ``megatron/training/trace.py``, ``scripts/aggregate.py``, ``profiling/``. Times of the files per rank count in
    ns from each iteration's begin; here a rank's iterations follow one another by its own clock (``pad_before`` and
    ``duration_wall``), where aggregate.py takes the longest of all ranks. ``group`` of tensor-parallel collectives is stored
    by MegaScan as the tensor × data group, and kept as it is.
    """
    parts = [p for s in sources for p in _ranks_of(s)]
    claims: dict[int, Source] = {}
    for part in parts:
        if part.rank is None or part.rank in claims:
            stated = [p.rank for p in parts]
            assign_ranks([p.source for p in parts], stated, options)  # names the files and the cure
        else:
            claims[part.rank] = part.source
    world = max(claims, default=0) + 1
    layout = _layout(parts, world)
    ranks = (_finish(p, layout) for p in sorted(parts, key=lambda p: p.rank or 0))
    return Imported(
        world, ranks, layout=layout, notes=["MegaScan has no wall clock: the run clock starts at an unknown time"]
    )


class _Part:
    """The spans of one rank in one file."""

    def __init__(
        self, source: Source, rows: ChromeRows, trace: TraceText, table: SpanTable, mine: Array, rank: int | None
    ) -> None:
        self.source, self.rows, self.trace, self.table, self.mine, self.rank = source, rows, trace, table, mine, rank
        self.first = True

    def most(self, *names: str) -> int:
        """Return the largest value of a field over the spans, -1 if there is none."""
        return max((int(self.of(n).max(initial=-1)) for n in names), default=-1)

    def of(self, name: str) -> Array:
        """Return a field of each span: as its end tells it, else its begin; -1 if neither does."""
        column = self.rows.columns[name]
        begin, end = self.table.begin[self.mine], self.table.end[self.mine]
        missing = MISSING if column.dtype == np.int64 else -1
        value = np.where(end >= 0, column[end], missing)
        value = np.where(value == missing, column[begin], value)
        return np.where(value == missing, -1, value)


def _ranks_of(source: Source) -> list[_Part]:
    per_rank = b'"rel_ts"' in source.head()
    trace = TraceText()
    batches = read_source(source, trace, fields=_FIELDS, shift=0 if per_rank else 3)
    rows = gather_rows(_with_times(batches) if per_rank else batches, trace)
    if not rows.columns:
        rows.columns = {"pid": np.zeros(0, np.int64)}
    if per_rank and len(rows.columns["pid"]):
        _count_from_zero(rows, trace)
    table = spans_of(rows)
    if per_rank or not len(table.begin):
        part = _Part(source, rows, trace, table, np.arange(len(table.begin)), None)
        told = part.most("g_rk") if len(table.begin) else -1
        part.rank = told if 0 <= told < _MAX_RANKS else None
        return [part]
    pid = rows.columns["pid"][table.begin]
    ranks = [p for p in np.unique(pid).tolist() if 0 <= p < _MAX_RANKS]
    if lost := int((~np.isin(pid, ranks)).sum()):
        rows.skipped["spans of processes that are no ranks"] = lost
    out = [_Part(source, rows, trace, table, np.flatnonzero(pid == p), p) for p in ranks]
    for part in out[1:]:
        part.first = False
    return out


def _with_times(batches: Iterator[dict[str, Array]]) -> Iterator[dict[str, Array]]:
    """Give the begin of an iteration, which has no time of its own, the zero of the others."""
    for batch in batches:
        batch["ts"] = np.where(
            batch["rel_ts"] == MISSING, np.where(batch["pad_before"] != MISSING, 0, MISSING), batch["rel_ts"]
        )
        yield batch


def _count_from_zero(rows: ChromeRows, trace: TraceText) -> None:
    """Make times that count from each iteration's begin count from the first one's."""
    c = rows.columns
    name = trace.names.index("iteration") if "iteration" in trace.names else -2
    marks = c["name"] == name
    begins = np.flatnonzero(marks & (c["ph"] == ord("B")))
    ends = np.flatnonzero(marks & (c["ph"] == ord("E")))
    number = np.cumsum(marks & (c["ph"] == ord("B")))  # 0: before the first
    pad = np.maximum(c["pad_before"][begins], 0)
    wall = np.zeros(len(begins) + 1, np.int64)
    length = np.where(c["duration_wall"][ends] != MISSING, c["duration_wall"][ends], c["ts"][ends])
    np.maximum.at(wall, number[ends], length)
    zero = np.concatenate([[0], np.cumsum(pad) + np.concatenate([[0], np.cumsum(wall[1:])])[: len(begins)]])
    c["ts"] = c["ts"] + zero[number]
    c["args.iteration"] = (number - 1).astype(np.int64)


def _layout(parts: list[_Part], world: int) -> Layout | None:
    """Return the layout that the coordinates of the rows tell, if the ranks are where it puts them."""
    some = [p for p in parts if len(p.mine)]
    if not some:
        return None
    chunks = max(p.most("args.model_chunk", "model_chunk") for p in some) + 1
    sizes = {a: max(p.most(f"{a}_rk") for p in some) + 1 for a in ("tp", "dp", "pp")}
    if not any(sizes.values()):
        same = all(p.most("args.pp_rank") == p.rank for p in some)
        sizes = {"tp": 1, "dp": 1, "pp": world if same else 0}
    for order in (Layout().order, "tp-cp-ep-pp-dp"):
        try:
            layout = Layout(tp=sizes["tp"], dp=sizes["dp"], pp=sizes["pp"], num_chunks=max(chunks, 1), order=order)
        except LayoutError:
            return None
        if layout.world_size == world and all(_fits(p, layout) for p in some):
            return layout
    return None


def _fits(part: _Part, layout: Layout) -> bool:
    coords = layout.coords(part.rank or 0)
    told = {a: part.most(f"{a}_rk") for a in ("tp", "dp", "pp")}
    told["pp"] = max(told["pp"], part.most("args.pp_rank"))
    return all(told[a] in (-1, coords[a]) for a in told)


def _finish(part: _Part, layout: Layout | None) -> RankRows:
    rank = part.rank or 0
    out = rank_rows(part.source, part.rows, part.trace, part.table, part.mine, rank)
    if not part.first:
        out.num_read, out.skipped, out.repairs = 0, {}, {}
    if not len(part.mine):
        return out
    c = out.columns
    microbatch = np.maximum(part.of("args.microbatch"), part.of("microbatch"))
    c["microbatch"] = np.maximum(
        microbatch, np.maximum(part.of("args.micro_batch_index"), part.of("micro_batch_index"))
    )
    c["chunk"] = np.maximum(part.of("args.model_chunk"), part.of("model_chunk"))
    c["step"] = part.of("args.iteration").astype(np.int32)
    c["bytes"] = np.maximum(part.of("data"), part.of("args.data"))
    if layout is not None:
        at = layout.coords(rank)["pp"]
        stages = np.array([layout.stage(at, k) for k in range(layout.num_chunks)])
        c["stage"] = np.where(c["chunk"] >= 0, stages[np.clip(c["chunk"], 0, layout.num_chunks - 1)], -1)
    _groups(part, out)
    _steps(out)
    return out


def _groups(part: _Part, out: RankRows) -> None:
    """Name the groups, which are lists of the other members, and number the calls on each in their order."""
    columns = [part.of("group"), part.of("args.group")]
    told = np.maximum(*columns)
    ops = np.array([s[1] in COLLECTIVE_OPS for s in out.sites], bool)[out.columns["site"]]
    calls = np.flatnonzero(ops & (told >= 0))
    if not len(calls):
        return
    n = len(told)
    out.columns["group"], out.columns["seq"] = np.full(n, -1, np.int64), np.full(n, -1, np.int64)
    counts: dict[int, int] = {}
    facts: dict[str, Any] = {}
    ids: dict[int, int] = {}
    for call in calls[np.argsort(out.columns["start_ns"][calls], kind="stable")].tolist():
        text = int(told[call])
        if text not in ids:
            members = _members(part.trace.names[text], out.rank)
            ids[text] = group_id(members, "megascan", 0) if len(members) > 1 else -1
            if len(members) > 1:
                facts[str(ids[text])] = {"ranks": members, "backend": "nccl", "desc": "", "name": "", "ordinal": 0}
        group = ids[text]
        if group >= 0:
            out.columns["group"][call], out.columns["seq"][call] = group, counts.get(group, 0)
            counts[group] = counts.get(group, 0) + 1
    out.facts["groups"] = facts


def _members(text: str, rank: int) -> list[int]:
    try:
        others = json.loads(text)
    except (ValueError, RecursionError):
        return []
    good = isinstance(others, list) and all(isinstance(r, int) and 0 <= r < 1 << 24 for r in others)
    return sorted({*others, rank}) if good else []


def _steps(out: RankRows) -> None:
    """Take the steps from the iteration spans, else from the marks at the begin and end of each iteration."""
    c = out.columns
    spans = np.array([s[1] == Op.ITERATION for s in out.sites], bool)[c["site"]]
    marks = np.array([s[0] == Category.MARK and s[2].startswith("iteration ") for s in out.sites], bool)[c["site"]]
    rows = np.flatnonzero((spans if spans.any() else marks) & (c["step"] >= 0))
    if not len(rows):
        return
    step, number = np.unique(c["step"][rows], return_inverse=True)
    start, end = np.full(len(step), np.iinfo(np.int64).max), np.full(len(step), np.iinfo(np.int64).min)
    np.minimum.at(start, number, c["start_ns"][rows])
    np.maximum.at(end, number, (c["start_ns"] + c["duration_ns"])[rows])
    whole = np.bincount(number) >= (1 if spans.any() else 2)
    out.tables["steps"] = {"step": step, "start_ns": start, "end_ns": np.where(whole, end, -1)}
