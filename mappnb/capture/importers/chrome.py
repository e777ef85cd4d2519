"""Any Chrome trace (Perfetto's JSON): complete events, begins and ends, asynchronous spans, instants."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from mappnb.capture.importers._chrome_rows import OWN_FIELDS, ChromeRows, SpanTable, gather_rows, spans_of
from mappnb.capture.importers._counters import COUNTER_FIELD
from mappnb.capture.importers._formats import Imported, ImportOptions, RankRows, SiteRow, register_format
from mappnb.capture.importers._lanes import nesting_depth
from mappnb.capture.importers._names import host_kind, kernel_kind
from mappnb.capture.importers._own_export import own_layout, own_ranks, put_back
from mappnb.capture.importers._ranks import assign_ranks, rank_in_name
from mappnb.capture.importers._sources import Source
from mappnb.capture.importers._tracejson import TraceText
from mappnb.capture.importers._traces import look, parsed, read_source, wall_offset_ns
from mappnb.capture.importers._training_names import training_kind
from mappnb.terms import Category, Flag, Op, Phase

__all__ = ["import_chrome", "rank_rows"]

Array = np.ndarray[Any, Any]
_FIELDS = (*OWN_FIELDS, COUNTER_FIELD)
_PHASE = re.compile(rb'"ph"\s*:\s*"')


def _is_chrome(source: Source) -> bool:
    head = source.head()
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n,")
    return (text[:1] in (b"{", b"[") and b'"traceEvents"' in head) or _PHASE.search(head) is not None


@register_format("chrome", detect=_is_chrome, priority=10)
def import_chrome(sources: Sequence[Source], options: ImportOptions) -> Imported:
    """Read Chrome traces: one rank per file, or per process where all processes of a single file are named by rank.

    Parameters
    ----------
    sources : sequence of Source
        Files.
    options : ImportOptions
        How ranks are told.

    Returns
    -------
    Imported
        Spans by thread. Names of training steps, collectives and kernels are understood, all else is ``host``.
    """
    heads = [look(s) for s in sources]
    if len(sources) == 1 and options.rank_from is None:
        rows = _read(sources[0], heads[0].shift)
        ranks = own_ranks(*rows) or _ranks_of_processes(*rows) or {}
        if ranks:
            layout, world = own_layout(rows[1]), max(ranks.values()) + 1
            world = max(world, layout.world_size if layout else 0)
            notes = ["restarts of the exported run are put together"] if len(set(ranks.values())) < len(ranks) else []
            return Imported(world, _split(sources[0], rows, ranks), layout=layout, notes=notes)
        named, notes = assign_ranks(sources, [None], options)
        return Imported(named[0] + 1, iter([_one(sources[0], rows, named[0])]), notes=notes)
    numbers, notes = assign_ranks(sources, [None] * len(sources), options)
    order = np.argsort(numbers).tolist()
    each = (_one(sources[i], _read(sources[i], heads[i].shift), numbers[i]) for i in order)
    return Imported(max(numbers) + 1, each, notes=notes)


_Read = tuple[ChromeRows, TraceText]


def _read(source: Source, shift: int) -> _Read:
    trace = TraceText()
    return gather_rows(read_source(source, trace, fields=_FIELDS, shift=shift), trace), trace


def _ranks_of_processes(rows: ChromeRows, trace: TraceText) -> dict[int, int] | None:
    """Return pid -> rank if there are several processes and each has a rank in its name."""
    pids = np.unique(rows.columns.get("pid", np.zeros(0, np.int64))).tolist()
    named = {p: rank_in_name(trace.names[rows.process_names[p]]) for p in pids if p in rows.process_names}
    found = {p: r for p, r in named.items() if r is not None}
    return found if len(pids) > 1 and len(set(found.values())) == len(pids) else None


def _split(source: Source, read: _Read, ranks: dict[int, int]) -> Iterator[RankRows]:
    rows, trace = read
    table = spans_of(rows)
    pid = rows.columns["pid"][table.begin]
    for i, rank in enumerate(sorted(set(ranks.values()))):
        processes = [p for p, r in ranks.items() if r == rank]
        out = rank_rows(source, rows, trace, table, np.flatnonzero(np.isin(pid, processes)), rank)
        for process in processes:
            out.add_counters(rows.counters, trace.names, process)
        if i:  # counted once
            out.num_read, out.skipped, out.repairs = 0, {}, {}
        yield out


def _one(source: Source, read: _Read, rank: int) -> RankRows:
    rows, trace = read
    table = spans_of(rows)
    out = rank_rows(source, rows, trace, table, np.arange(len(table.begin)), rank)
    out.add_counters(rows.counters, trace.names)
    return out


def rank_rows(source: Source, rows: ChromeRows, trace: TraceText, table: SpanTable, mine: Array, rank: int) -> RankRows:
    """Return the spans ``mine`` of a table as a rank.

    Parameters
    ----------
    source, rows, trace, table
        What was read.
    mine : array of int, dims (span,)
        Spans of the rank.
    rank : int
        Global rank.
    """
    out = RankRows(rank, [source.name], num_read=trace.num_rows, skipped=rows.skipped)
    out.repairs = {**trace.repairs, **rows.repairs}
    out.wall_offset_ns = wall_offset_ns(parsed(trace.metadata))
    if source.damage:
        out.notes.append(f"{source.name}: {source.damage}; what came before it was read")
    if not len(mine):
        why = (
            f"{trace.num_rows} entries, but no span among them"
            if trace.num_rows
            else "its list of trace events is empty"
        )
        out.notes.append(f"{source.name}: {why}")
        return out
    begin, site, out.sites = _sites(rows, trace, table, mine)
    lane = rows.columns["lane"][begin].astype(np.int64)
    nested = np.where(table.asynchronous[mine], lane + len(rows.lanes), lane)
    start, duration = table.start_ns[mine], table.duration_ns[mine]
    used, thread = np.unique(lane, return_inverse=True)
    depth = nesting_depth(nested, start, duration)
    flags = np.where(table.is_open[mine], int(Flag.REPAIRED), 0) | np.where(
        table.asynchronous[mine], int(Flag.ASYNC), 0
    )
    out.columns = {"site": site, "start_ns": start, "duration_ns": duration, "thread": thread.astype(np.int32)}
    out.columns |= {"depth": depth, "flags": flags.astype(np.uint16)}
    labels = {}
    for number, one in enumerate(used.tolist()):
        name = rows.thread_names.get(rows.lanes.pairs[one])
        words = [*rows.lanes.label(one, trace.names), trace.names[name] if name is not None else ""]
        labels[str(number)] = " ".join(words).strip()
    out.facts["threads"] = labels
    put_back(out, rows, trace, table, mine)
    return out


def _sites(rows: ChromeRows, trace: TraceText, table: SpanTable, mine: Array) -> tuple[Array, Array, list[SiteRow]]:
    begin = table.begin[mine]
    key = (rows.columns["name"][begin].astype(np.int64) + 1) << 32 | (rows.columns["cat"][begin].astype(np.int64) + 1)
    found, number = np.unique(key << 1 | table.instant[mine], return_inverse=True)
    sites: dict[SiteRow, int] = {}
    site = np.empty(len(found), np.int32)
    for i, value in enumerate(found.tolist()):
        name, cat = (value >> 33) - 1, (value >> 1 & 0xFFFFFFFF) - 1
        row = _site(
            trace.names[name] if name >= 0 else "", trace.names[cat] if cat >= 0 else "", instant=value & 1 == 1
        )
        site[i] = sites.setdefault(row, len(sites))
    return begin, site[number].astype(np.int32), list(sites)


def _site(name: str, cat: str, *, instant: bool) -> SiteRow:
    if instant:
        return (str(Category.MARK), "instant", name, str(Phase.NONE), -1, "")
    if told := training_kind(name):
        category, op, phase, layer = told
        return (category, op, name, phase, layer, "")
    if kernel_kind(name, "")[0] in (Category.COLLECTIVE, Category.P2P):
        category, op = kernel_kind(name, "")
        return (str(category), str(op) or "send_recv", name, str(Phase.NONE), -1, "")
    category, op, phase = host_kind(name, "")
    return (str(category), str(op) if op != Op.SPAN else cat or str(Op.SPAN), name, str(phase), -1, "")
