"""What one flight-recorder dump says: its entries, groups and rank, checked field by field."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final

from mappnb.capture.importers._errors import TraceImportError
from mappnb.capture.importers._plain_pickle import MAX_BYTES, PlainPickleError, load_plain
from mappnb.capture.importers._rows import as_int, as_text
from mappnb.terms import P2P_OPS, Op

__all__ = ["Dump", "Entry", "Group", "read_dump"]

_MOST_RANKS: Final = 2**17
_MOST_FRAMES: Final = 64
_LATEST_NS: Final = 2**62

OPS: Final[tuple[tuple[str, str], ...]] = (
    ("reduce_scatter", Op.REDUCE_SCATTER),
    ("all_to_all", Op.ALL_TO_ALL),
    ("alltoall", Op.ALL_TO_ALL),
    ("all_gather", Op.ALL_GATHER),
    ("allgather", Op.ALL_GATHER),
    ("barrier", Op.BARRIER),
    ("all_reduce", Op.ALL_REDUCE),
    ("allreduce", Op.ALL_REDUCE),
    ("broadcast", Op.BROADCAST),
    ("reduce", Op.REDUCE),
    ("gather", Op.GATHER),
    ("scatter", Op.SCATTER),
    ("send", Op.SEND),
    ("recv", Op.RECV),
)
"""Beginnings of torch's profiling names (after the backend and underscores) and our operations, longer ones first."""

DTYPES: Final[dict[str, tuple[str, int]]] = {
    "Float": ("float32", 4),
    "Double": ("float64", 8),
    "Half": ("float16", 2),
    "BFloat16": ("bfloat16", 2),
    "Long": ("int64", 8),
    "Int": ("int32", 4),
    "Short": ("int16", 2),
    "Char": ("int8", 1),
    "Byte": ("uint8", 1),
    "Bool": ("bool", 1),
    "ComplexFloat": ("complex64", 8),
    "ComplexDouble": ("complex128", 16),
    "Float8_e4m3fn": ("float8_e4m3fn", 1),
    "Float8_e5m2": ("float8_e5m2", 1),
    "UInt64": ("uint64", 8),
    "UInt32": ("uint32", 4),
    "UInt16": ("uint16", 2),
}
"""c10's names of scalar types, ours, and their bytes."""


@dataclass(frozen=True, slots=True)
class Group:
    """A process group as one rank knows it: name, description and global ranks (empty if not told)."""

    name: str
    desc: str
    ranks: tuple[int, ...]


@dataclass(slots=True)
class Entry:
    """One operation that a rank issued.

    Attributes
    ----------
    record_id : int
        Number of the operation on the rank.
    group, pg_id : str
        Name of the process group, and the number that ``pg_status`` has it under on this rank.
    backend, op, name : str
        ``nccl``, our operation, and torch's profiling name.
    p2p : bool
        Whether it is a send or receive, or a coalesced set of them.
    seq : int
        ``collective_seq_id``, or ``p2p_seq_id``; -1 if missing.
    sides : tuple of int
        Group ranks of source and destination of a transfer; (-1, -1) for others.
    state : str
        ``scheduled``, ``started`` or ``completed``; a retired operation is completed, whatever it says.
    created_ns, started_ns, completed_ns : int
        Wall clock, ns; -1 where not known. The last two are when the watchdog saw it.
    duration_ns : int
        Time on the device, ns; -1 where not measured.
    bytes : int
        Payload, alike on all members; -1 if not known.
    dtype : str
        Element type.
    sizes : str
        Shapes of input and output, as JSON.
    stack : tuple of str
        ``file:line function``, the innermost first.
    """

    record_id: int
    group: str
    pg_id: str
    backend: str
    op: str
    name: str
    p2p: bool
    seq: int
    sides: tuple[int, int]
    state: str
    created_ns: int
    started_ns: int
    completed_ns: int
    duration_ns: int
    bytes: int
    dtype: str
    sizes: str
    stack: tuple[str, ...]


@dataclass(slots=True)
class Dump:
    """What one file says.

    Attributes
    ----------
    source : str
        Name of the file.
    entries : list of Entry
        In the order of issue.
    groups : dict of str to Group
        Process groups by name.
    status : dict
        ``pg_status``: the last collective enqueued, started and completed, by group id; -1 if missing.
    version, library : str
        Versions of the format and of the communication library.
    stated_rank : int, optional
        Top-level ``rank``, which some collectors add.
    skipped : Counter
        Entries left out, by reason.
    """

    source: str
    entries: list[Entry]
    groups: dict[str, Group]
    status: dict[str, dict[str, int]]
    version: str
    library: str
    stated_rank: int | None
    skipped: Counter[str] = field(default_factory=Counter)

    def possible_ranks(self) -> set[int] | None:
        """Return the ranks that the content allows: of a transfer's own side, else in all groups; None if it tells nothing."""
        if self.stated_rank is not None:
            return {self.stated_rank}
        own: set[int] = set()
        for entry in self.entries:
            ranks = self.groups[entry.group].ranks
            side = entry.sides[0] if entry.op == Op.SEND else entry.sides[1]
            if entry.op in P2P_OPS and 0 <= side < len(ranks):
                own.add(ranks[side])
        if len(own) == 1:
            return own
        told = [set(g.ranks) for g in self.groups.values() if g.ranks]
        return set.intersection(*told) if told else None


def read_dump(data: bytes, source: str) -> Dump:
    """Return what a dump says: a pickle as torch writes it, or its JSON form.

    Raises
    ------
    TraceImportError
        If it is neither, is damaged, or would build objects or run code. Nothing of it was run.
    """
    content = _content(data, source)
    if not isinstance(content, dict) or not isinstance(content.get("entries"), list):
        found = ", ".join(map(str, list(content)[:8])) if isinstance(content, dict) else type(content).__name__
        raise TraceImportError(
            f"{source}: no list 'entries'; expected a flight-recorder dump, found {found or 'nothing'}"
        )
    dump = Dump(
        source=source,
        entries=[],
        groups=_groups(content.get("pg_config")),
        status=_status(content.get("pg_status")),
        version=as_text(content.get("version")),
        library=as_text(content.get("comm_lib_version") or content.get("nccl_version")),
        stated_rank=as_int(content.get("rank"), low=0, high=_MOST_RANKS),
    )
    frames: dict[int, str] = {}
    for value in content["entries"]:
        entry = _entry(value, frames) if isinstance(value, dict) else None
        if entry is None:
            dump.skipped["entries that lack a field"] += 1
        else:
            dump.entries.append(entry)
            desc = as_text(_item(value.get("process_group"), 1))
            dump.groups.setdefault(entry.group, Group(entry.group, desc, ()))
    dump.entries.sort(key=lambda e: e.record_id)
    return dump


def _content(data: bytes, source: str) -> Any:
    if data.lstrip()[:1] == b"{":
        if len(data) > MAX_BYTES:
            raise TraceImportError(f"{source}: {len(data)} bytes; at most {MAX_BYTES} are read")
        try:
            return json.loads(data)
        except (ValueError, RecursionError) as err:
            raise TraceImportError(f"{source}: damaged JSON ({str(err)[:120]})") from err
    try:
        return load_plain(data)
    except PlainPickleError as err:
        raise TraceImportError(
            f"{source}: not a flight-recorder dump: a pickle is read only as far as it holds plain dicts, lists, texts and "
            f"numbers ({err})"
        ) from err


def _groups(config: Any) -> dict[str, Group]:
    """Read ``pg_config``; ranks come as the text of a list."""
    out = {}
    for key, value in config.items() if isinstance(config, dict) else ():
        if isinstance(value, dict):
            ranks = value.get("ranks")
            if isinstance(ranks, str):
                numbers = re.findall(r"\d{1,7}", ranks[: 8 * _MOST_RANKS])
            else:
                numbers = list(ranks) if isinstance(ranks, list | tuple) else []
            whole = [as_int(r, low=0, high=_MOST_RANKS) for r in numbers]
            name = as_text(value.get("name"), as_text(key))
            known = tuple(sorted({r for r in whole if r is not None}))
            out[name] = Group(name, as_text(value.get("desc")), known)
    return out


def _status(status: Any) -> dict[str, dict[str, int]]:
    out = {}
    for key, value in list(status.items())[:4096] if isinstance(status, dict) else ():
        if isinstance(value, dict):
            numbers = {k: as_int(value.get(f"last_{k}_collective")) for k in ("enqueued", "started", "completed")}
            out[as_text(key)] = {k: -1 if n is None else n for k, n in numbers.items()}
    return out


def _entry(value: dict[str, Any], frames: dict[int, str]) -> Entry | None:
    """Return one entry, or None if it lacks what identifies it."""
    name, record_id = as_text(value.get("profiling_name")), as_int(value.get("record_id"), low=0)
    created = as_int(value.get("time_created_ns"), low=1, high=_LATEST_NS)
    if not name or record_id is None or created is None:
        return None
    backend, _, rest = name.rpartition(":")
    word, _, sides = rest.partition(" ")
    op = next((o for start, o in OPS if word.lower().lstrip("_").startswith(start)), word.lower() or "unknown")
    p2p = value.get("is_p2p") is True or op in P2P_OPS
    seq_keys = ("p2p_seq_id",) if p2p else ("collective_seq_id", "seq_id")
    seq = next((n for k in seq_keys if (n := as_int(value.get(k), low=0)) is not None), -1)
    group = as_text(_item(value.get("process_group"), 0), as_text(value.get("pg_name"), as_text(value.get("pg_id"))))
    started, completed = (_time(value.get(f"time_discovered_{k}_ns")) for k in ("started", "completed"))
    size, dtype = _payload(value, op)
    shapes = [value.get("input_sizes"), value.get("output_sizes")]
    return Entry(
        record_id=record_id,
        group=group,
        pg_id=as_text(value.get("pg_id")),
        backend=backend,
        op=str(op),
        name=name,
        p2p=p2p,
        seq=seq,
        sides=_sides(sides),
        state=_state(value, completed),
        created_ns=created,
        started_ns=started,
        completed_ns=completed,
        duration_ns=_milliseconds(value.get("duration_ms")),
        bytes=size,
        dtype=dtype,
        sizes=json.dumps(shapes, default=str)[:400],
        stack=tuple(_frame(f, frames) for f in _list(value.get("frames"))[:_MOST_FRAMES]),
    )


def _state(value: dict[str, Any], completed_ns: int) -> str:
    """Return the state; gloo only tells that an operation is retired, without changing its state."""
    state = as_text(value.get("state"), "scheduled")
    if state == "completed" or completed_ns >= 0 or value.get("retired") is True:
        return "completed"
    return state if state in ("scheduled", "started") else "scheduled"


def _time(value: Any) -> int:
    number = as_int(value, low=1, high=_LATEST_NS)  # the JSON form has 0 for "not yet"
    return -1 if number is None else number


def _milliseconds(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e12:
        return -1
    return round(value * 1e6)


def _sides(text: str) -> tuple[int, int]:
    """Return group ranks (source, destination) of ``1->2`` or ``2<-1``."""
    if m := re.fullmatch(r"(\d{1,7})(->|<-)(\d{1,7})", text.strip()):
        pair = int(m[1]), int(m[3])
        return pair if m[2] == "->" else pair[::-1]
    return -1, -1


def _payload(value: dict[str, Any], op: str) -> tuple[int, str]:
    """Return bytes, alike on all members (the larger side of all_gather and reduce_scatter), and element type."""
    side = "output" if op in (Op.ALL_GATHER, Op.RECV, Op.SCATTER) else "input"
    total = 0
    kinds = _list(value.get(f"{side}_dtypes"))
    shapes = _list(value.get(f"{side}_sizes"))
    for i, shape in enumerate(shapes[:4096]):
        dims = [as_int(d, low=0, high=2**40) for d in _list(shape)[:16]]
        known = DTYPES.get(as_text(_item(kinds, i) or _item(kinds, 0)))
        if known is None or None in dims:
            return -1, ""
        total += math.prod(d for d in dims if d is not None) * known[1]
    dtype = DTYPES.get(as_text(_item(kinds, 0)), ("", 0))[0]
    return (total if shapes and total < _LATEST_NS else -1), dtype


def _frame(value: Any, frames: dict[int, str]) -> str:
    """Return ``file:line function``; dumps share equal frames, so each is made once."""
    text = frames.get(id(value))
    if text is None:
        if not isinstance(value, dict):
            text = as_text(value)
        else:
            line = as_int(value.get("line"), low=0, high=2**31) or 0
            text = f"{as_text(value.get('filename'), '?')}:{line} {as_text(value.get('name'), '?')}"
        frames[id(value)] = text
    return text


def _list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else []


def _item(value: Any, index: int) -> Any:
    return value[index] if isinstance(value, list | tuple) and index < len(value) else None
