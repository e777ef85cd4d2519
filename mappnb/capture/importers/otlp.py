"""OpenTelemetry spans of Megatron's own instrumentation, as OTLP in JSON or as the SDK prints them."""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from mappnb.capture.importers._errors import TraceImportError
from mappnb.capture.importers._formats import Imported, ImportOptions, RankRows, register_format
from mappnb.capture.importers._otlp_spans import Resource, Span, Spans, first_int
from mappnb.capture.importers._rows import EventRows, content, json_values, told_rank
from mappnb.capture.importers._sources import Source
from mappnb.errors import LayoutError
from mappnb.layout import Layout
from mappnb.table_specs import Columns
from mappnb.terms import Category, Flag, Op, Phase

__all__ = ["KINDS", "read_otlp"]

KINDS: Final[dict[str, tuple[Category, str, Phase]]] = {
    "train_step": (Category.MARK, Op.ITERATION, Phase.NONE),
    "iteration": (Category.MARK, Op.ITERATION, Phase.NONE),
    "forward_backward": (Category.HOST, "forward_backward", Phase.NONE),
    "microbatch.forward": (Category.COMPUTE, Op.FORWARD_STEP, Phase.FORWARD),
    "microbatch.backward": (Category.COMPUTE, Op.BACKWARD_STEP, Phase.BACKWARD),
    "layer.forward": (Category.COMPUTE, Op.LAYER, Phase.FORWARD),
    "layer.self_attention": (Category.COMPUTE, Op.ATTENTION, Phase.FORWARD),
    "layer.mlp": (Category.COMPUTE, Op.MLP, Phase.FORWARD),
    "p2p.send_forward": (Category.P2P, Op.SEND, Phase.FORWARD),
    "p2p.recv_forward": (Category.P2P, Op.RECV, Phase.FORWARD),
    "p2p.send_backward": (Category.P2P, Op.SEND, Phase.BACKWARD),
    "p2p.recv_backward": (Category.P2P, Op.RECV, Phase.BACKWARD),
    "grad_sync.start": (Category.HOST, Op.GRAD_SYNC, Phase.NONE),
    "grad_sync.finish": (Category.HOST, Op.GRAD_SYNC, Phase.NONE),
    "optimizer_step": (Category.OPTIMIZER, Op.OPTIMIZER_STEP, Phase.NONE),
    "gc_collect": (Category.HOST, Op.GC, Phase.NONE),
    "data_loading": (Category.DATA, Op.NEXT_BATCH, Phase.NONE),
    "load_checkpoint": (Category.CHECKPOINT, Op.CHECKPOINT_LOAD, Phase.NONE),
    "checkpoint.load": (Category.CHECKPOINT, Op.CHECKPOINT_LOAD, Phase.NONE),
    "save_checkpoint": (Category.CHECKPOINT, Op.CHECKPOINT_SAVE, Phase.NONE),
    "checkpoint": (Category.CHECKPOINT, Op.CHECKPOINT_SAVE, Phase.NONE),
    "evaluate": (Category.EVALUATION, Op.EVALUATE, Phase.NONE),
}
"""Names after ``megatron.`` and an optional ``train.``, and what they are; a name below one of them is the same."""

_STEP_KEYS: Final = ("megatron.iteration", "dl.iteration")
_MICROBATCH_KEYS: Final = ("megatron.microbatch_id", "dl.microbatch_id")
_SPAN: Final = (Category.HOST, Op.SPAN, Phase.NONE)
_MOST_DEEP: Final = 1000


def _detect(source: Source) -> bool:
    head = source.head()
    if b'"resourceSpans"' in head or b'"resource_spans"' in head:
        return True
    return b'"context"' in head and b'"span_id"' in head and b'"start_time"' in head


@register_format("otlp", detect=_detect, priority=80)
def read_otlp(sources: Sequence[Source], options: ImportOptions) -> Imported:
    """Import OpenTelemetry spans: files of one or of many ranks.

    Parameters
    ----------
    sources : sequence of Source
        OTLP in JSON (the collector's file exporter: one export a line; or one object), or the SDK's printed spans.
    options : ImportOptions
        A pattern for ranks: it counts more than the content.

    Raises
    ------
    TraceImportError
        If there is no span, or ranks are not clear.

    Notes
    -----
    Names and attributes: Megatron-LM's page on span groups (``megatron.train_step``, ``megatron.save_checkpoint``), and the names
    that its ``training.py`` and the goodput report of NVIDIA-NeMo/Lens use (``megatron.train.iteration``,
    ``megatron.checkpoint.save``): both are read. Attributes of ranks: ``dl.*`` and ``nv.dl.*`` of Lens, whose numbers may
    come as texts. Field names: opentelemetry-proto ``trace.proto`` in its JSON mapping. Spans have no numbers of
    transfers, and Megatron has none for the receives of the steady state: transfers are matched by order.
    """
    seen = Spans()
    for source in sources:
        for value in json_values(content(source), seen.repairs):
            seen.add(value, source.name)
    if not seen.spans:
        why = "; ".join(f"{n} {k.replace('_', ' ')}" for k, n in (seen.skipped + seen.repairs).items())
        raise TraceImportError(f"{sources[0].name}: no span in {len(sources)} file(s) ({why or 'nothing in it'})")
    notes: list[str] = []
    by_rank = _by_rank(seen, options, notes)
    resources = list(dict.fromkeys(s.resource for spans in by_rank.values() for s in spans))
    world_size = max(max(by_rank) + 1, *(r.world_size or 1 for r in resources))
    layout = _layout(resources, world_size)
    if len(by_rank) < world_size:
        notes.append(f"spans of {len(by_rank)} of {world_size} ranks: Megatron exports one rank unless told otherwise")
    return Imported(
        world_size=world_size,
        ranks=_ranks(by_rank, layout, seen),
        first_wall_ns=min(s.start_ns for s in seen.spans.values()),
        layout=layout,
        notes=notes,
    )


def _by_rank(seen: Spans, options: ImportOptions, notes: list[str]) -> dict[int, list[Span]]:
    """Return the spans of each rank, in order of start: by the process's attributes, else by the file's name."""
    out: dict[int, list[Span]] = defaultdict(list)
    known: dict[Resource, int | None] = {}
    for span in seen.spans.values():
        if span.resource not in known:
            told = told_rank(span.resource.source, options) if options.rank_from or span.resource.rank is None else None
            known[span.resource] = told if told is not None else span.resource.rank
        rank = known[span.resource]
        if rank is None:
            rank = first_int(span.attributes, "dl.rank", "nv.dl.rank")
        out[-1 if rank is None or rank >= 2**20 else rank].append(span)
    if -1 in out:
        lost = {(s.resource.source, s.resource.pid) for s in out[-1]}
        if len(lost) > 1 or len(out) > 1:
            raise TraceImportError(
                f"{min(lost)[0]}: {len(out[-1])} spans of {len(lost)} process(es) without a rank (attribute dl.rank of the resource, "
                f"or a number in the file's name); tell it by a pattern on the path: rank_from=r'rank(\\d+)' (--rank-from)"
            )
        out[0] = out.pop(-1)
        notes.append("no rank in the spans or the file's name; taken as rank 0")
    for rank, spans in out.items():
        spans.sort(key=lambda s: (s.start_ns, -s.end_ns))
        _one_job(rank, spans, notes)
    return dict(sorted(out.items()))


def _one_job(rank: int, spans: list[Span], notes: list[str]) -> None:
    """Refuse two jobs that ran at the same time on one rank; one after the other is a restart."""
    windows: dict[tuple[str, int], list[int]] = {}
    for span in spans:
        if kind_of(span.name)[1] == Op.ITERATION:
            window = windows.setdefault((span.resource.host, span.resource.pid), [span.start_ns, span.end_ns])
            window[1] = max(window[1], span.end_ns)
    ordered = sorted(windows.values())
    if any(b[0] < a[1] for a, b in itertools.pairwise(ordered)):
        names = ", ".join(sorted({s.resource.source for s in spans})[:4])
        raise TraceImportError(
            f"rank {rank} is claimed by {len(windows)} processes at the same time ({names}); import one job"
        )
    if len(ordered) > 1:
        notes.append(f"rank {rank} was started {len(ordered)} times; steps that were repeated are there more than once")


def _layout(resources: Sequence[Resource], world_size: int) -> Layout | None:
    """Return the layout, if the sizes that the processes tell agree and make up all ranks."""
    told = {r.sizes for r in resources if r.sizes}
    if len(told) != 1:
        return None
    sizes = dict(next(iter(told)))
    try:
        layout = Layout.from_dict(sizes)
    except LayoutError:
        return None
    return layout if layout.world_size == world_size else None


def kind_of(name: str) -> tuple[Category, str, Phase]:
    """Return (category, op, phase) of a span's name."""
    if name.startswith("nvrx.checkpoint."):
        return KINDS["checkpoint"]
    if not name.startswith("megatron."):
        return _SPAN
    rest = name.removeprefix("megatron.").removeprefix("train.")
    while rest:
        if rest in KINDS:
            return KINDS[rest]
        rest = rest.rpartition(".")[0]
    return _SPAN


def _ranks(by_rank: dict[int, list[Span]], layout: Layout | None, seen: Spans) -> Iterator[RankRows]:
    last = max(max(s.start_ns, s.end_ns) for s in seen.spans.values())
    for number, (rank, spans) in enumerate(by_rank.items()):
        rows, notes, repairs = EventRows(), list[str](), Counter[str]()
        parents = _parents(spans)
        steps = _steps(spans, parents, notes)
        processes = list(dict.fromkeys((s.resource.host, s.resource.pid) for s in spans))
        trainer = next((p for s in spans if kind_of(s.name)[1] == Op.ITERATION for p in [_process(s)]), processes[0])
        microbatches = any(s.name.startswith("megatron.microbatch.") for s in spans)
        for i, span in enumerate(spans):
            thread = processes.index(_process(span))
            _add(rows, span, steps[i], _depth(parents, i), thread, rank, layout, last, microbatches, repairs)
            if thread != processes.index(trainer):
                rows.mark_last(int(Flag.OVERLAPPED))
        if not microbatches and any(kind_of(s.name)[1] == "forward_backward" for s in spans):
            notes.append(
                "no spans of microbatches: forward_backward counts as compute, transfers and waits in it included"
            )
        hosts = [h for h, _ in processes if h]
        yield RankRows(
            rank=rank,
            sources=list(dict.fromkeys(s.resource.source for s in spans)),
            sites=rows.sites,
            columns=rows.columns(),
            tables={"steps": step_rows(spans, steps)},
            facts={"otlp": {"processes": [list(p) for p in processes]}, **({"host": hosts[0]} if hosts else {})},
            num_read=len(spans) + (seen.num_read - len(seen.spans) if number == 0 else 0),
            skipped=dict(seen.skipped) if number == 0 else {},
            repairs=dict(repairs + seen.repairs if number == 0 else repairs),
            notes=notes,
        )


def _process(span: Span) -> tuple[str, int]:
    return span.resource.host, span.resource.pid


def _parents(spans: list[Span]) -> list[int]:
    """Return the place of each span's parent, -1 where it has none here."""
    places = {s.span_id: i for i, s in enumerate(spans) if s.span_id}
    return [places.get(s.parent_id, -1) if s.parent_id else -1 for s in spans]


def _ancestors(parents: list[int], i: int) -> Iterator[int]:
    """Yield the ancestors of a span, nearest first; ends where they run in a circle."""
    for _ in range(_MOST_DEEP):
        i = parents[i]
        if i < 0:
            return
        yield i


def _depth(parents: list[int], i: int) -> int:
    count = sum(1 for _ in _ancestors(parents, i))
    return count if count < _MOST_DEEP else 0


def _steps(spans: list[Span], parents: list[int], notes: list[str]) -> list[int]:
    """Return the step of each span: its own, its nearest ancestor's, else the one whose time it begins in; -1 outside."""
    iterations = [i for i, s in enumerate(spans) if kind_of(s.name)[1] == Op.ITERATION]
    own = [first_int(s.attributes, *_STEP_KEYS) for s in spans]
    if iterations and all(own[i] is None for i in iterations):
        notes.append("iterations without a number: they are counted from 0")
        for number, i in enumerate(iterations):
            own[i] = number
    starts = np.array([spans[i].start_ns for i in iterations], np.int64)
    out = []
    for i, span in enumerate(spans):
        step = own[i]
        if step is None:
            step = next((own[a] for a in _ancestors(parents, i) if own[a] is not None), None)
        if step is None and len(starts):
            before = int(np.searchsorted(starts, span.start_ns, side="right")) - 1
            if before >= 0 and span.start_ns < spans[iterations[before]].end_ns:
                step = own[iterations[before]]
        out.append(-1 if step is None else step)
    return out


def _add(
    rows: EventRows,
    span: Span,
    step: int,
    depth: int,
    thread: int,
    rank: int,
    layout: Layout | None,
    last_ns: int,
    microbatches: bool,
    repairs: Counter[str],
) -> None:
    category, op, phase = kind_of(span.name)
    if op == "forward_backward" and not microbatches:
        category = Category.COMPUTE
    flags = int(Flag.FAILED) if span.failed else 0
    if span.end_ns < 0:
        flags |= int(Flag.OPEN | Flag.CLIPPED)
        repairs["span_without_an_end"] += 1
    microbatch = first_int(span.attributes, *_MICROBATCH_KEYS)
    rows.add(
        category,
        op,
        name=span.name,
        phase=phase,
        start_ns=span.start_ns,
        duration_ns=(span.end_ns if span.end_ns >= 0 else last_ns) - span.start_ns,
        step=step,
        depth=depth,
        thread=thread,
        stage=layout.coords(rank)["pp"] if layout is not None else -1,
        microbatch=-1 if microbatch is None else microbatch,
        peer=_peer(op, phase, rank, layout) if category == Category.P2P else -1,
        flags=flags,
    )


def _peer(op: str, phase: Phase, rank: int, layout: Layout | None) -> int:
    """Return the pipeline neighbour that a transfer is with, -1 if the layout is not known."""
    if layout is None:
        return -1
    where = layout.coords(rank)
    ahead = 1 if (op == Op.SEND) == (phase == Phase.FORWARD) else -1
    return layout.rank(**{a: where[a] for a in ("tp", "cp", "dp")}, pp=(where["pp"] + ahead) % layout.pp)


def step_rows(spans: list[Span], steps: list[int]) -> Columns:
    """Return the step table of a rank: from its iterations, and what other spans of the step tell."""
    found: dict[int, dict[str, float]] = {}
    for span, step in zip(spans, steps, strict=True):
        if kind_of(span.name)[1] == Op.ITERATION and step >= 0:
            row = {"start_ns": span.start_ns, "end_ns": span.end_ns}
            found[step] = {**row, **_numbers(span)}  # a restart repeats steps: the last counts
    for span, step in zip(spans, steps, strict=True):
        if step in found and kind_of(span.name)[1] in (Op.OPTIMIZER_STEP, "forward_backward"):
            for name, value in _numbers(span).items():
                found[step].setdefault(name, value)
    ordered = sorted(found)
    out: Columns = {
        "step": np.array(ordered, np.int64),
        "start_ns": np.array([found[s]["start_ns"] for s in ordered], np.int64),
        "end_ns": np.array([found[s]["end_ns"] for s in ordered], np.int64),
    }
    for name in ("loss", "grad_norm", "lr", "microbatches", "skipped"):
        out[name] = np.array([found[s].get(name, math.nan) for s in ordered], np.float64)
    return out


def _numbers(span: Span) -> dict[str, float]:
    """Return the numbers of a step that a span tells."""
    keys = {
        "loss": ("megatron.loss", "dl.loss"),
        "grad_norm": ("megatron.grad_norm", "dl.grad_norm"),
        "lr": ("megatron.learning_rate", "dl.learning_rate"),
        "microbatches": ("megatron.num_microbatches",),
    }
    out = {}
    for name, tried in keys.items():
        value = next((span.attributes[k] for k in tried if span.attributes.get(k) is not None), None)
        try:
            out[name] = float(value) if isinstance(value, int | float | str) else math.nan
        except (ValueError, OverflowError):
            continue
    done = span.attributes.get("megatron.update_successful")
    if isinstance(done, bool):
        out["skipped"] = float(not done)
    return {k: v for k, v in out.items() if not math.isnan(v)}
