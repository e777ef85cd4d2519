"""PyTorch-profiler (Kineto) JSON: CUDA, ROCm, MTIA and CPU-only; one file per rank."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from mappnb.capture.importers._comm import CallIds, Communication
from mappnb.capture.importers._formats import Imported, ImportOptions, RankRows, SiteRow, register_format
from mappnb.capture.importers._gather import KINETO_FIELDS, Spans, gather
from mappnb.capture.importers._lanes import first_index, inside, nesting_depth, step_of
from mappnb.capture.importers._names import host_kind, kernel_kind
from mappnb.capture.importers._ranks import assign_ranks
from mappnb.capture.importers._sources import Source
from mappnb.capture.importers._tracejson import MISSING, TraceText
from mappnb.capture.importers._traces import Head, look, parsed, read_source, wall_offset_ns
from mappnb.terms import UNTOLD_STREAM, Category, Phase

__all__ = ["import_kineto"]

Array = np.ndarray[Any, Any]
_MARKS = (
    b'"distributedInfo"', b'"deviceProperties"', b'"Ev Idx"', b'"cat": "cpu_op"', b'"cat":"cpu_op"', b'"cuda_runtime"',
    b'"External id"', b'"Trace iteration"', b'"ProfilerStep#', b'"cat": "kernel"', b'"cat":"kernel"',
)  # fmt: skip
_DEVICE = re.compile(
    r"^(kernel|gpu_|memcpy|memset|concurrent_kernel|cuda_sync|mtia_ccp|mtia_workload|privateuse1_kernel|xpu_kernel)"
)
_HOST = re.compile(
    r"^(cpu_op|operator|user_annotation|python_function|trace)$|runtime|driver"
)  # even if they tell a stream
_ANNOTATION = re.compile(r"^(nccl|rccl|hccl|xccl):", re.IGNORECASE)
_WALL_FROM_NS = 10**16  # later than the first four months of 1970: a wall clock


def _is_kineto(source: Source) -> bool:
    head = source.head()
    events = b'"traceEvents"' in head or b'"ph"' in head
    return (events or b'"deviceProperties"' in head) and any(m in head for m in _MARKS)


@register_format("kineto", detect=_is_kineto, priority=60)
def import_kineto(sources: Sequence[Source], options: ImportOptions) -> Imported:
    """Read Kineto files, one rank each.

    Parameters
    ----------
    sources : sequence of Source
        Files.
    options : ImportOptions
        How ranks are told.

    Returns
    -------
    Imported
        Device events keep their stream and get the host time of their launch; steps are those of ``ProfilerStep#N``.

    Notes
    -----
    Kernels, copies and fills are ``compute`` (op gemm, attention, memcpy, ...); kernels of NCCL and RCCL are ``collective`` or
    ``p2p``; annotations on device lanes are marks without a stream, as they would count the kernels below twice. Work inside a
    call of the autograd engine, or launched there, is of the backward. Without any device event, CPU operators are ``compute``.
    """
    heads = [look(s) for s in sources]
    infos = [_distributed(h, s) for h, s in zip(heads, sources, strict=True)]
    ranks, notes = assign_ranks(sources, [_whole(i.get("rank")) for i in infos], options)
    world = max([max(ranks) + 1, *(_whole(i.get("world_size")) or 0 for i in infos)])
    if len(absent := sorted(set(range(world)) - set(ranks))):
        notes.append(
            f"no trace of {len(absent)} of {world} ranks: {', '.join(map(str, absent[:16]))}{', ...' if len(absent) > 16 else ''}"
        )
    order = np.argsort(ranks).tolist()
    out = Imported(world, iter(()), None, None, notes)
    ids = CallIds()

    def each() -> Iterator[RankRows]:
        for i in order:
            rank = _read_rank(sources[i], ranks[i], heads[i], infos[i], world, ids)
            if out.first_wall_ns is None and len(rank.columns.get("start_ns", ())):
                firsts = [h.first_ns for h in heads if h.first_ns is not None]
                out.first_wall_ns = min([int(rank.columns["start_ns"].min()), *firsts]) + rank.wall_offset_ns
            yield rank
            del rank  # before the next is read

    out.ranks = each()
    return out


def _distributed(head: Head, source: Source) -> dict[str, Any]:
    """Return distributedInfo; the whole file is read for it where it lies behind the events and the name tells no rank."""
    from mappnb.capture.importers._ranks import rank_in_name

    info = head.metadata.get("distributedInfo")
    if info is None and not head.whole and rank_in_name(source.name) is None:
        trace = TraceText()
        for _ in read_source(source, trace, fields=(), shift=head.shift):
            pass
        head.metadata |= parsed(trace.metadata)
        info = head.metadata.get("distributedInfo")
    return info if isinstance(info, dict) else {}


def _whole(value: object) -> int | None:
    if isinstance(value, str) and value.isdecimal():
        value = int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 20 else None


def _read_rank(source: Source, rank: int, head: Head, info: dict[str, Any], world: int, ids: CallIds) -> RankRows:
    trace = TraceText()
    spans = gather(read_source(source, trace, fields=KINETO_FIELDS, shift=head.shift), trace)
    metadata = head.metadata | parsed(trace.metadata)
    out = RankRows(rank, [source.name], num_read=trace.num_rows)
    out.skipped, out.wall_offset_ns = spans.skipped, wall_offset_ns(metadata)
    out.repairs = {**trace.repairs, **spans.repairs}
    if source.damage:
        out.notes.append(f"{source.name}: {source.damage}; what came before it was read")
    _drop_zeros(spans, out)
    out.facts = _facts(spans, metadata)
    out.add_counters(spans.counters, trace.names)
    if not len(spans.columns["ts"]):
        out.notes.append(f"{source.name}: {_why_nothing(trace)}")
        return out
    told = metadata.get("distributedInfo")
    _Rows(spans, trace.names, told if isinstance(told, dict) else info, world, out).fill(ids)
    if len(spans.devices) > 1:
        out.notes.append(
            f"{source.name}: events of {len(spans.devices)} devices; their streams are told apart by number only"
        )
    if int(out.columns["start_ns"].max()) + out.wall_offset_ns < _WALL_FROM_NS:
        out.notes.append(
            f"{source.name}: times count from an unknown zero, not a wall clock: ranks of other hosts do not line up"
        )
    return out


def _why_nothing(trace: TraceText) -> str:
    if trace.num_rows:
        return f"{trace.num_rows} entries, but no complete span (ph 'X') among them"
    if "traceEvents" in trace.metadata:
        return "its traceEvents are not a list"
    if trace.state == "start":
        return "no JSON in it"
    return "its list of trace events is empty" if not trace.repairs else "no event could be read"


def _drop_zeros(spans: Spans, out: RankRows) -> None:
    """Leave out events whose time is 0 where the others are far from it (pytorch#188481): they lie nowhere."""
    ts = spans.columns["ts"]
    zero = ts == 0
    if zero.any() and len(ts) and int(ts.max()) > 3600 * 10**9:
        keep = np.flatnonzero(~zero)
        out.skipped["spans at time zero, which is no time here"] = int(zero.sum())
        moved = np.cumsum(~zero) - 1
        spans.columns = {k: v[keep] for k, v in spans.columns.items()}
        stays = ~zero[spans.few.row]
        spans.few.row = moved[spans.few.row[stays]]
        spans.few.columns = {k: v[stays] for k, v in spans.few.columns.items()}


def _facts(spans: Spans, metadata: dict[str, Any]) -> dict[str, Any]:
    host = next((metadata[k] for k in ("host_name", "hostname") if isinstance(metadata.get(k), str)), None)
    devices = metadata.get("deviceProperties")
    used = max(spans.devices, key=lambda d: spans.devices[d], default=None)
    named = [d for d in devices if isinstance(d, dict) and d.get("id") == used] if isinstance(devices, list) else []
    name = str(named[0].get("name", "")) if named else ""
    out: dict[str, Any] = {"device": f"cuda:{used} {name}".strip() if used is not None else "cpu"}
    return {**out, **({"host": host} if host else {})}


def _mask(found: Iterable[object]) -> Array:
    return np.array([bool(x) for x in found], bool)


class _Rows:
    """From the spans of a file to the columns of the events table."""

    def __init__(self, spans: Spans, names: list[str], info: dict[str, Any], world: int, out: RankRows) -> None:
        self.spans, self.names, self.info, self.world, self.out = spans, names, info, world, out
        self.sites: dict[SiteRow, int] = {}

    def fill(self, ids: CallIds) -> None:
        """Fill ``out``; gives up the gathered columns on the way, to keep the memory low."""
        c, out = self.spans.columns, self.out
        pair = c.pop("pair")
        kinds = [self.names[cat].lower() if cat >= 0 else "" for _, cat in self.spans.pairs]
        texts = [self.names[name] if name >= 0 else "" for name, _ in self.spans.pairs]
        device = _mask(_DEVICE.match(k) for k in kinds)[pair]
        device |= (c["stream"] >= 0) & ~_mask(_HOST.search(k) for k in kinds)[pair]
        issue, launch = self._issue(c.pop("correlation"), device, c)
        stream, thread = self._places(
            device, launch, np.flatnonzero(device & _mask("annotation" in k for k in kinds)[pair])
        )
        host_only = not device.any()
        backward = self._backward(texts, pair, device, thread, issue)
        sites = self._sites(pair, texts, kinds, device, backward, host_only=host_only)
        steps = self._steps(texts, pair, device)
        annotated = np.flatnonzero(_mask(_ANNOTATION.match(t) for t in texts)[pair] & ~device)
        del pair, device, backward
        out.columns = {"site": sites, "start_ns": c.pop("ts"), "duration_ns": c.pop("dur"), "issue_ns": issue}
        out.columns |= {"stream": stream, "thread": thread}
        Communication(self.spans.few, self.names, self.info, self.world, self.sites, ids).fill(out, annotated, launch)
        del launch
        out.columns["depth"] = nesting_depth(thread, out.columns["start_ns"], out.columns["duration_ns"], stream < 0)
        out.columns["step"] = step_of(issue, out.columns["start_ns"], *steps)
        out.sites = list(self.sites)
        self._notes(out, host_only=host_only)

    def _places(self, device: Array, launch: Array, marks: Array) -> tuple[Array, Array]:
        """Return the stream and the thread of each event: the lane of what the host did, for device events that of the launch.

        A device event whose args tell no stream is on a lane of :data:`UNTOLD_STREAM` + its number. Annotations on device lanes
        (``marks``) have their lane for a thread and no stream.
        """
        c = self.spans.columns
        stream, thread = c.pop("stream"), c.pop("lane")
        untold = np.flatnonzero(device & (stream < 0))
        stream[untold] = UNTOLD_STREAM + thread[untold]
        stream[~device] = stream[marks] = -1
        lanes = thread[marks]
        thread[device] = -1
        launched = np.flatnonzero(launch >= 0)
        thread[launched] = thread[launch[launched]]
        thread[marks] = lanes
        return stream, thread

    def _issue(self, correlation: Array, device: Array, c: dict[str, Array]) -> tuple[Array, Array]:
        """Return the host time of each device event's launch and the launch's row, -1 for none."""
        told = correlation != MISSING
        hosts = np.flatnonzero(~device & told).astype(np.int32)
        kernels = np.flatnonzero(device & told & (correlation != 0)).astype(np.int32)
        keys, wanted = correlation[hosts], correlation[kernels]
        del correlation, told
        at = first_index(keys, wanted)
        del keys, wanted
        launch = np.full(len(device), -1, np.int32)
        launch[kernels[at >= 0]] = hosts[at[at >= 0]]
        num_kernels = len(kernels)
        del at, hosts, kernels
        issue = np.full(len(device), -1, np.int64)
        launched = np.flatnonzero(launch >= 0)
        issue[launched] = c["ts"][launch[launched]]
        if not num_kernels and len(self.spans.flows.id):
            self._issue_by_arrows(device, c, issue)
        return issue, launch

    def _issue_by_arrows(self, device: Array, c: dict[str, Array], issue: Array) -> None:
        """Where device events tell no correlation (MTIA): by the arrow that ends where the event begins."""
        flows, rows = self.spans.flows, np.flatnonzero(device)
        starts, finishes = np.flatnonzero(flows.start == 1), np.flatnonzero(flows.start == 0)
        if not (len(starts) and len(finishes) and len(rows)):
            return
        hit = first_index(flows.id[starts], flows.id[finishes])
        began = np.where(hit >= 0, flows.ts[starts][hit], -1)
        base = len(self.spans.lanes) + 1
        with np.errstate(over="ignore"):
            arrow = flows.ts[finishes] * base + flows.lane[finishes]
            event = c["ts"][rows] * base + c["lane"][rows]
        at = first_index(arrow, event)
        issue[rows[at >= 0]] = began[at[at >= 0]]

    def _backward(self, texts: list[str], pair: Array, device: Array, thread: Array, issue: Array) -> Array:
        """Mask of what ran, or was launched, inside a call of the autograd engine."""
        start, duration = self.spans.columns["ts"], self.spans.columns["dur"]
        engine = np.flatnonzero(_mask(t.startswith("autograd::engine") for t in texts)[pair] & ~device)
        when = np.where(issue >= 0, issue, start)
        return inside(thread, when, thread[engine], start[engine], start[engine] + duration[engine])

    def _sites(
        self, pair: Array, texts: list[str], kinds: list[str], device: Array, backward: Array, *, host_only: bool
    ) -> Array:
        """Return the site of each event."""
        code = pair * np.int32(4)
        code[device] += 2
        code[backward] += 1
        site = np.full(4 * len(texts), -1, np.int32)
        for value in np.flatnonzero(np.bincount(code, minlength=len(site))).tolist():
            text, kind = texts[value >> 2], kinds[value >> 2]
            if value & 2:
                category, op = kernel_kind(text, kind)
                phase: str = Phase.NONE
            else:
                category, op, phase = host_kind(text, kind)
                if host_only and kind in ("cpu_op", "operator"):
                    category = Category.COMPUTE
            if value & 1 and category in (Category.COMPUTE, Category.HOST):
                phase = Phase.BACKWARD
            row: SiteRow = (str(category), str(op), text, str(phase), -1, "")
            site[value] = self.sites.setdefault(row, len(self.sites))
        found: Array = site[code]
        return found

    def _steps(self, texts: list[str], pair: Array, device: Array) -> tuple[Array, Array, Array]:
        """Return (step, start, end) of ``ProfilerStep#N``, and make them rows of the step table."""
        found = [re.fullmatch(r"ProfilerStep\s?#(\d{1,9})", t) for t in texts]
        rows = np.flatnonzero(_mask(found)[pair] & ~device)
        numbers = {i: int(m[1]) for i, m in enumerate(found) if m}
        step = np.array([numbers[p] for p in pair[rows].tolist()], np.int64)
        start = self.spans.columns["ts"][rows]
        end = start + self.spans.columns["dur"][rows]
        step, first = np.unique(step, return_index=True)
        if len(step):
            self.out.tables["steps"] = {"step": step.astype(np.int32), "start_ns": start[first], "end_ns": end[first]}
        return step, start[first], end[first]

    def _notes(self, out: RankRows, *, host_only: bool) -> None:
        if host_only:
            out.notes.append(f"{out.sources[0]}: no device events; its CPU operators count as compute")
        labels = {}
        for lane in np.unique(out.columns["thread"][out.columns["thread"] >= 0]).tolist():
            pid, tid = self.spans.lanes.pairs[lane]
            name = self.spans.lane_names.get((pid, tid))
            labels[str(lane)] = " ".join(
                [*self.spans.lanes.label(lane, self.names), self.names[name] if name is not None else ""]
            ).strip()
        out.facts["threads"] = labels
