"""What a timeline says of an event: its label, its fields, its row in the table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import xarray as xr

from mappnb.display import bytes_text
from mappnb.terms import Category, Flag, Op
from mappnb.widgets._columns import take
from mappnb.widgets._flows import call_of
from mappnb.widgets._text import count_text, duration_text, time_text

__all__ = ["TABLE_COLUMNS", "event_fields", "event_label", "labels_of", "table_rows"]

Array = np.ndarray[Any, Any]
TABLE_COLUMNS = ["rank", "start", "duration", "category", "operation", "name", "step", "microbatch"]
_STEP_OPS = {Op.FORWARD_STEP.value: "F", Op.BACKWARD_STEP.value: "B"}
_ABOUT = ("step", "stage", "chunk", "microbatch", "layer")


def event_label(op: str, name: str, microbatch: int, layer: int, step: int) -> str:
    """Return the short text on a span: ``"F3"``, ``"layer 2"``, ``"step 10"``, its name, or its operation."""
    if op in _STEP_OPS and microbatch >= 0:
        return f"{_STEP_OPS[op]}{microbatch}"
    if op == Op.ITERATION and step >= 0:
        return f"step {step}"
    if name and op in (Op.SPAN, Op.MODULE):
        return name
    if op == Op.WAIT and name:
        return f"wait {name}"
    if layer >= 0:
        return f"{op} {layer}"
    return op or name


def labels_of(events: xr.Dataset, index: Array) -> tuple[Array, list[str]]:
    """Return the labels of some events as (uint16 index into the texts, texts); none where they would take too long to read."""
    taken = [take(events, n, index) for n in ("op", "name", "microbatch", "layer", "step")]
    if any(c is None for c in taken):
        return np.full(len(index), 65535, np.uint16), []
    columns = [c.tolist() for c in taken if c is not None]
    known: dict[tuple[Any, ...], int] = {}
    texts: dict[str, int] = {}
    out = np.full(len(index), 65535, np.uint16)
    for i, key in enumerate(zip(*columns, strict=True)):
        place = known.get(key)
        if place is None:
            place = known[key] = texts.setdefault(event_label(*key)[:80], len(texts))
        if place < 65535:
            out[i] = place
    return out, list(texts)[:65535]


def _flag_words(flags: int) -> str:
    return ", ".join(f.name.lower() for f in Flag if flags & f and f.name)


def event_fields(
    events: xr.Dataset,
    event: int,
    *,
    place: str,
    groups: Mapping[int, Mapping[str, Any]],
    step_ns: Mapping[int, int],
) -> tuple[str, list[list[str]]]:
    """Return the title and the fields of one event, as the details panel shows them.

    Parameters
    ----------
    events : Dataset, dims (event,)
    event : int
        Position.
    place : str
        Rank with its coordinates in the layout.
    groups : mapping
        Process groups by id: ranks, desc.
    step_ns : mapping of int to int
        Length of each step in ns.
    """
    near = events.isel(event=event)  # one row, even of columns that are not in memory
    one = {str(k): v.values[()] for k, v in near.variables.items() if not v.dims}
    start, duration = int(one["start_ns"]), int(one["duration_ns"])
    label = event_label(str(one["op"]), str(one["name"]), int(one["microbatch"]), int(one["layer"]), int(one["step"]))
    fields = [["operation", f"{one['op']}"], ["category", f"{one['category']}, {one['phase']}".removesuffix(", none")]]
    if one["name"]:
        fields.append(["name", str(one["name"])])
    fields += [["rank", place], ["start", time_text(start / 1e9)], ["duration", duration_text(duration)]]
    if (whole := step_ns.get(int(one["step"]), 0)) > 0:
        fields.append(["share of its step", f"{duration / whole:.2%}"])
    fields += [[n, str(int(one[n]))] for n in _ABOUT if int(one[n]) >= 0]
    fields += _transfer_fields(events, event, one, groups)
    if int(one["cpu_ns"]) >= 0:
        fields.append(["CPU time", duration_text(int(one["cpu_ns"]))])
    where = [f"thread {int(one['thread'])}"] if int(one["thread"]) >= 0 else []
    where += [f"stream {int(one['stream'])}"] if int(one["stream"]) >= 0 else []
    if where:
        fields.append(["recorded on", ", ".join(where)])
    if words := _flag_words(int(one["flags"])):
        fields.append(["marked", words])
    return label, fields


def _transfer_fields(
    events: xr.Dataset, event: int, one: Mapping[str, Any], groups: Mapping[int, Mapping[str, Any]]
) -> list[list[str]]:
    fields: list[list[str]] = []
    num_bytes, duration = int(one["bytes"]), int(one["duration_ns"])
    if num_bytes >= 0:
        rate = f" at {bytes_text(num_bytes / (duration / 1e9))}/s" if duration > 0 and num_bytes else ""
        fields.append(["payload", f"{bytes_text(num_bytes)}{rate}{', ' + str(one['dtype']) if one['dtype'] else ''}"])
    if int(one["peer"]) >= 0:
        fields.append(["peer", f"rank {int(one['peer'])}"])
    if int(one["seq"]) < 0:
        return fields
    group = groups.get(int(one["group"]), {})
    ranks = group.get("ranks") or []
    named = f"{group.get('desc') or 'group'}, {count_text(len(ranks), 'rank')}" if ranks else "group"
    fields.append(["call", f"{named}, number {int(one['seq'])}"])
    at = call_of(events, event)
    if len(at) > 1:
        starts = events["start_ns"].values[at]
        last = int(starts.argmax())
        late = int(starts.max() - starts.min())
        who = int(events["rank"].values[at[last]])
        fields.append(["last to arrive", f"rank {who}, {duration_text(late)} after the first"])
    elif one["category"] != Category.WAIT:
        fields.append(["other members", "not in what is loaded"])
    return fields


def table_rows(events: xr.Dataset, index: Array) -> list[list[str]]:
    """Return the rows of the table of events, as texts in the order of :data:`TABLE_COLUMNS`."""
    names = ("rank", "start_ns", "duration_ns", "category", "op", "name", "step", "microbatch")
    taken = [take(events, n, index) for n in names]
    rows = zip(*(c.tolist() for c in taken if c is not None), strict=True)
    return [
        [
            str(rank),
            time_text(start / 1e9),
            duration_text(duration),
            str(category),
            str(op),
            str(name),
            str(step) if step >= 0 else "",
            str(microbatch) if microbatch >= 0 else "",
        ]
        for rank, start, duration, category, op, name, step, microbatch in rows
    ]
