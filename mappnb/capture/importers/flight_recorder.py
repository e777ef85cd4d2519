"""torch flight-recorder dumps: the last collectives of each rank, how far each came, and the Python frames that issued it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, Final

from mappnb.capture.importers._errors import TraceImportError
from mappnb.capture.importers._flight_entries import Dump, Entry, read_dump
from mappnb.capture.importers._formats import Imported, ImportOptions, RankRows, register_format
from mappnb.capture.importers._plain_pickle import MAX_BYTES
from mappnb.capture.importers._rows import EventRows, content, named_group, told_rank
from mappnb.capture.importers._sources import Source
from mappnb.terms import P2P_OPS, Category, Flag, Op

__all__ = ["CALL_FIELDS", "MOST_CALLS", "read_flight_recorder"]

MOST_CALLS: Final = 512
"""Calls of a rank whose stack is kept in its file: the first ones not completed (at most 3/4), and the latest others."""

CALL_FIELDS: Final = ("record_id", "group", "seq", "op", "state", "created_ns", "bytes", "dtype", "sizes", "stack")
"""What each row of ``facts["flight_recorder"]["calls"]`` holds; ``stack`` is a place in ``stacks``, -1 for none."""

_MARKS: Final = (b"profiling_name", b"pg_config", b"collective_seq_id", b"pg_status")
_Key = tuple[str, tuple[int, ...] | str]
_Groups = dict[_Key, dict[str, Any]]


def _detect(source: Source) -> bool:
    head = source.head()
    told = sum(mark in head for mark in _MARKS) >= 2 and b"entries" in head
    if head.lstrip()[:1] == b"{":
        return told
    pickled = head[:1] == b"\x80" and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05")
    return told or (pickled and source.explicit)


@register_format("flight_recorder", detect=_detect, priority=85)
def read_flight_recorder(sources: Sequence[Source], options: ImportOptions) -> Imported:
    """Import flight-recorder dumps, one file per rank: pickles (``TORCH_NCCL_DUMP_ON_TIMEOUT``) or their JSON form.

    Parameters
    ----------
    sources : sequence of Source
        The dumps of one moment.
    options : ImportOptions
        A pattern for ranks: it counts more than the content.

    Raises
    ------
    TraceImportError
        If a file is no dump or would run code, or ranks are not clear.

    Notes
    -----
    Format: torch ``c10d/FlightRecorder.hpp`` (version 2.10, older ones too) and ``torch/distributed/flight_recorder``, checked
    against dumps of gloo ranks of torch 2.13. An event begins when the host issued the operation; it lasts for its time on
    the device where that was measured (``duration_ms``), else until its end was seen. What is not completed is flagged
    open (and clipped: no end will come), and lasts until the last time in the dump. The stacks of the last calls are in
    the rank's file under ``flight_recorder``.
    """
    dumps = [read_dump(content(s, limit=MAX_BYTES), s.name) for s in sources]
    notes: list[str] = []
    ranked = sorted(((_rank_of(d, options, len(dumps), notes), d) for d in dumps), key=lambda item: item[0])
    world_size = 1 + max(
        max((max(g.ranks, default=0) for d in dumps for g in d.groups.values()), default=0), ranked[-1][0]
    )
    groups = _groups(ranked, world_size, notes)
    first = min((e.created_ns for d in dumps for e in d.entries), default=None)
    return Imported(
        world_size=world_size,
        ranks=_ranks(ranked, groups),
        first_wall_ns=first,
        notes=notes,
    )


def _rank_of(dump: Dump, options: ImportOptions, num_dumps: int, notes: list[str]) -> int:
    """Return the rank of a dump: what its content allows, chosen by the file's name."""
    told, possible = told_rank(dump.source, options), dump.possible_ranks()
    if told is not None and (options.rank_from is not None or possible is None or told in possible):
        return told
    if possible is not None and len(possible) == 1:
        rank = min(possible)
        if told is not None:
            notes.append(f"{dump.source}: by its content this is rank {rank}, whatever its name says")
        return rank
    if possible and told is not None:
        shown = ", ".join(map(str, sorted(possible)[:8])) + (", ..." if len(possible) > 8 else "")
        raise TraceImportError(
            f"{dump.source}: its name says rank {told}, but its process groups allow only {shown}; "
            f"tell the ranks by a pattern on the path: rank_from=r'rank(\\d+)' (--rank-from)"
        )
    if num_dumps == 1:
        rank = min(possible or {0})
        notes.append(
            f"{dump.source}: no rank in the file or its name; taken as rank {rank} (give rank_from= for another)"
        )
        return rank
    raise TraceImportError(
        f"{dump.source}: no rank in its content or its name, and there are {num_dumps} files; "
        f"tell it by a pattern on the path: rank_from=r'node\\d+_(\\d+)' (--rank-from)"
    )


def _key(dump: Dump, name: str) -> _Key:
    group = dump.groups[name]
    return name, group.ranks or group.desc


def _groups(ranked: list[tuple[int, Dump]], world_size: int, notes: list[str]) -> _Groups:
    """Return the facts of every group, with its members: as told, else all ranks of the default group, else who used it."""
    users: dict[_Key, set[int]] = defaultdict(set)
    backends: dict[_Key, str] = {}
    for rank, dump in ranked:
        for name in dump.groups:
            users[_key(dump, name)].add(rank)
        for entry in dump.entries:
            backends.setdefault(_key(dump, entry.group), entry.backend)
    out, guessed = {}, []
    for key, backend in backends.items():
        name, told = key
        if isinstance(told, tuple):
            ranks = list(told)
        elif told == "default_pg":
            ranks = list(range(world_size))
        else:
            ranks = sorted(users[key])
            guessed.append(name)
        desc = next((d.groups[name].desc for _, d in ranked if name in d.groups and _key(d, name) == key), "")
        out[key] = {"ranks": ranks, "backend": backend, "desc": desc, "name": name, "ordinal": 0}
    if guessed:
        notes.append(
            f"the dumps do not tell the members of group {', '.join(guessed[:8])}: taken are the ranks that used it"
        )
    return out


def _ranks(ranked: list[tuple[int, Dump]], groups: _Groups) -> Iterator[RankRows]:
    for rank, dump in ranked:
        rows, repairs, notes = EventRows(), Counter[str](), []
        seqs = _sequence(dump)
        last = max((max(e.created_ns, e.started_ns, e.completed_ns) for e in dump.entries), default=0)
        ids = {name: named_group(*_key(dump, name)) for name in dump.groups}
        for entry, seq in zip(dump.entries, seqs, strict=True):
            members = groups[_key(dump, entry.group)]["ranks"]
            _add(rows, entry, seq, ids[entry.group], members, last, repairs)
        if dump.entries and dump.entries[0].record_id > 0:
            notes.append(
                f"rank {rank}: the ring kept the last {len(dump.entries)} of {dump.entries[-1].record_id + 1} operations; "
                f"transfers before are not counted, so send and recv are matched by order"
            )
        used = {_key(dump, e.group) for e in dump.entries}
        yield RankRows(
            rank=rank,
            sources=[dump.source],
            sites=rows.sites,
            columns=rows.columns(),
            facts={
                "groups": {str(named_group(*k)): groups[k] for k in groups if k in used},
                "flight_recorder": _facts(dump, seqs, ids),
            },
            num_read=len(rows) + sum(dump.skipped.values()),
            skipped=dict(dump.skipped),
            repairs=dict(repairs),
            notes=notes,
        )


def _sequence(dump: Dump) -> list[int]:
    """Return the number of each entry in its group, or its pair.

    Notes
    -----
    Operations inside a coalesced one share its ``collective_seq_id``: the last of them, the coalesced operation itself, keeps
    it. ``p2p_seq_id`` counts the transfers with all peers; the two sides agree only on a count per pair, which needs the
    first of them.
    """
    out = [-1] * len(dump.entries)
    taken: set[tuple[str, int]] = set()
    for i in range(len(out) - 1, -1, -1):
        entry = dump.entries[i]
        if not entry.p2p and (entry.group, entry.seq) not in taken:
            taken.add((entry.group, entry.seq))
            out[i] = entry.seq
    if not dump.entries or dump.entries[0].record_id > 0:
        return out
    pairs: Counter[tuple[str, str, tuple[int, int]]] = Counter()
    for i, entry in enumerate(dump.entries):
        if entry.op in P2P_OPS and min(entry.sides) >= 0:
            pair = (entry.group, entry.op, entry.sides)
            out[i] = pairs[pair]
            pairs[pair] += 1
    return out


def _add(
    rows: EventRows, e: Entry, seq: int, group: int, members: list[int], last_ns: int, repairs: Counter[str]
) -> None:
    category = Category.P2P if e.op in P2P_OPS else Category.HOST if e.p2p else Category.COLLECTIVE
    other = e.sides[1] if e.op == Op.SEND else e.sides[0]
    flags, length = 0, e.duration_ns
    if e.state != "completed":
        flags, length = int(Flag.OPEN | Flag.CLIPPED), last_ns - e.created_ns
    elif length < 0 and e.completed_ns >= 0:
        length = e.completed_ns - e.created_ns
    elif length < 0:
        flags = int(Flag.REPAIRED)
        repairs["end_not_known"] += 1
    rows.add(
        category,
        e.op,
        name=e.name,
        dtype=e.dtype,
        start_ns=e.created_ns,
        duration_ns=max(0, length),
        issue_ns=e.created_ns if e.backend != "gloo" else -1,
        stream=0 if e.backend != "gloo" else -1,
        bytes=e.bytes,
        group=group,
        seq=seq,
        depth=1 if seq < 0 and category == Category.COLLECTIVE else 0,
        peer=members[other] if category == Category.P2P and 0 <= other < len(members) else -1,
        flags=flags,
    )


def _facts(dump: Dump, seqs: list[int], ids: dict[str, int]) -> dict[str, Any]:
    """Return what is kept in the rank's file: how far the groups came, and the last calls with their stacks.

    ``pg_status`` is by the id of the group, or by ``pg_id N`` for a group without an entry. Equal frames and equal stacks
    are written once: ``stacks`` holds places in ``frames``, innermost first.
    """
    numbered = list(zip(dump.entries, seqs, strict=True))
    first = [c for c in numbered if c[0].state != "completed"][: MOST_CALLS * 3 // 4]
    taken = {id(c[0]) for c in first}
    chosen = first + [c for c in numbered if id(c[0]) not in taken][-(MOST_CALLS - len(first)) :]
    numbers = {e.pg_id: str(ids[e.group]) for e in dump.entries}
    frames: dict[str, int] = {}
    stacks: dict[tuple[int, ...], int] = {}
    calls = []
    for e, seq in sorted(chosen, key=lambda c: c[0].record_id):
        places = tuple(frames.setdefault(f, len(frames)) for f in e.stack)
        stack = stacks.setdefault(places, len(stacks)) if places else -1
        row = (e.record_id, str(ids[e.group]), seq, e.op, e.state, e.created_ns, e.bytes, e.dtype, e.sizes, stack)
        calls.append(list(row))
    return {
        "version": dump.version,
        "library": dump.library,
        "pg_status": {numbers.get(k, f"pg_id {k}"): v for k, v in dump.status.items()},
        "group_names": {n: str(i) for n, i in ids.items()},
        "fields": list(CALL_FIELDS),
        "calls": calls,
        "frames": list(frames),
        "stacks": [list(s) for s in stacks],
    }
