"""NCCL Inspector JSON: what each communicator did, one record per completed collective or transfer."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, Final

from mappnb.capture.importers._errors import TraceImportError
from mappnb.capture.importers._formats import Imported, ImportOptions, RankRows, register_format
from mappnb.capture.importers._inspector_records import Comm, Process, Record, Seen
from mappnb.capture.importers._rows import EventRows, content, json_values, named_group
from mappnb.capture.importers._sources import Source
from mappnb.terms import Category, Flag, Op

__all__ = ["OPS", "read_nccl_inspector"]

OPS: Final[dict[str, str]] = {
    "AllReduce": Op.ALL_REDUCE,
    "AllGather": Op.ALL_GATHER,
    "ReduceScatter": Op.REDUCE_SCATTER,
    "AlltoAll": Op.ALL_TO_ALL,
    "AllToAll": Op.ALL_TO_ALL,
    "Broadcast": Op.BROADCAST,
    "Reduce": Op.REDUCE,
    "Gather": Op.GATHER,
    "Scatter": Op.SCATTER,
    "Send": Op.SEND,
    "Recv": Op.RECV,
}
"""NCCL's names of functions (``ncclFuncToString``) and ours."""

Placed = tuple[int, Record]
"""Global rank and record."""


def _detect(source: Source) -> bool:
    head = source.head()
    return b'"header"' in head and b'"metadata"' in head and (b'"coll_perf"' in head or b'"p2p_perf"' in head)


@register_format("nccl_inspector", detect=_detect, priority=80)
def read_nccl_inspector(sources: Sequence[Source], options: ImportOptions) -> Imported:
    """Import NCCL Inspector files: JSON lines, one file per process.

    Parameters
    ----------
    sources : sequence of Source
        The files of one job.
    options : ImportOptions
        Not used: ranks come from the communicators.

    Raises
    ------
    TraceImportError
        If no record is usable, or two processes claim one rank.

    Notes
    -----
    Field names: README of NVIDIA/nccl ``plugins/profiler/inspector`` (format v4.0; the same in ``ext-profiler``), and AMD's
    page on the RCCL port, which tells of ``p2p_perf``. A call is identified by (communicator id, sequence number).
    ``header.rank`` is the rank in the communicator: the global rank is that of the process in the largest one. Verbose
    records (``NCCL_INSPECTOR_DUMP_VERBOSE=1``) have times: an event lasts from the first channel's kernel start, when the
    GPU arrived, to the last one's stop. Others only tell when they were written out: their calls are laid one before the
    other, ending there, and flagged as repaired. The numbers of transfers count all peers of a rank, so transfers have no
    ``seq``: they are matched by order.
    """
    seen = Seen()
    for source in sources:
        for value in json_values(content(source), seen.repairs):
            seen.add(value)
    where = sources[0].name if len(sources) == 1 else f"{len(sources)} files ({sources[0].name}, ...)"
    if not seen.records:
        why = ", ".join(f"{n} {k.replace('_', ' ')}" for k, n in (seen.skipped + seen.repairs).items())
        raise TraceImportError(
            f"{where}: no record with header, metadata and coll_perf or p2p_perf ({why or 'nothing in it'})"
        )
    records = list(seen.records.values())
    ranks, world_size = _global_ranks(records, seen, where)
    placed = _placed(records, ranks, world_size, seen)
    groups, members = _groups(placed, seen, world_size)
    timed = _timed(placed, seen)
    if not timed:
        raise TraceImportError(f"{where}: no record has a time: neither dump_timestamp_us nor verbose event times")
    return Imported(
        world_size=world_size,
        ranks=_rank_rows(timed, groups, members, seen, [s.name for s in sources]),
        first_wall_ns=min(max(r.start_us, r.issue_us) if r.start_us < 0 else r.start_us for _, r in timed) * 1000,
        notes=_notes(seen, placed),
    )


def _notes(seen: Seen, placed: list[Placed]) -> list[str]:
    notes = []
    if holes := _holes(placed):
        notes.append(
            f"{holes} sequence numbers are missing between recorded calls: the plugin leaves out small messages "
            f"(NCCL_INSPECTOR_DUMP_MIN_SIZE_BYTES) and calls not timed by the GPU"
        )
    if seen.repairs["time_from_dump"]:
        notes.append(
            "records without event times: starts are guessed from when they were written out (run with NCCL_INSPECTOR_DUMP_VERBOSE=1)"
        )
    if seen.repairs["rank_guessed"]:
        notes.append("no communicator of all ranks was recorded: global ranks are numbered by host and process id")
    return notes


def _global_ranks(records: list[Record], seen: Seen, where: str) -> tuple[dict[Process, int | set[int]], int]:
    """Return the rank, or the ranks, of each process, and the number of ranks."""
    members: dict[Comm, dict[Process, set[int]]] = defaultdict(lambda: defaultdict(set))
    latest: Counter[Comm] = Counter()
    for r in records:
        members[r.comm][r.process].add(r.rank)
        latest[r.comm] = max(latest[r.comm], r.dump_us, r.start_us)
    world = max(members, key=lambda c: (c[1], len(members[c]), latest[c], c[0]))
    owner: dict[int, Process] = {}
    for process, ranks in sorted(members[world].items()):
        for rank in ranks:
            if owner.setdefault(rank, process) != process:
                raise TraceImportError(
                    f"{where}: rank {rank} of communicator {world[0]} was written by two processes, {owner[rank][0]} pid "
                    f"{owner[rank][1]} and {process[0]} pid {process[1]}; give the files of one job only"
                )
    out: dict[Process, int | set[int]] = {p: r if len(r) > 1 else min(r) for p, r in members[world].items()}
    others = sorted({r.process for r in records} - set(out))
    free = sorted(set(range(world[1])) - set(owner))
    if others and not free and _another_job(records, world, others):
        seen.skipped["processes of another job"] += len(others)
        return out, world[1]
    size = max(world[1], world[1] - len(free) + len(others))
    free += range(world[1], size)
    if others:
        seen.repairs["rank_guessed"] += len(others)
    out.update(zip(others, free, strict=False))
    return out, size


def _another_job(records: list[Record], world: Comm, others: list[Process]) -> bool:
    """Tell whether the other processes are an earlier start of the job: a communicator of the same size, all over before."""
    first = min(max(r.start_us, r.dump_us) for r in records if r.comm == world)
    theirs = [r for r in records if r.process in set(others)]
    return max(max(r.start_us, r.dump_us) for r in theirs) < first and any(r.comm[1] == world[1] for r in theirs)


def _placed(records: list[Record], ranks: dict[Process, int | set[int]], world_size: int, seen: Seen) -> list[Placed]:
    """Give records their global rank; in a process of several ranks only those of the largest communicators have one."""
    out = []
    for r in records:
        known = ranks.get(r.process)
        if isinstance(known, set):
            known = r.rank if r.comm[1] == world_size and r.rank in known else None
            if known is None:
                seen.skipped["records whose rank is not clear: several ranks in one process"] += 1
        if known is not None:
            out.append((known, r))
    return out


def _groups(
    placed: list[Placed], seen: Seen, world_size: int
) -> tuple[dict[Comm, dict[str, Any]], dict[Comm, dict[int, int]]]:
    """Return the facts of each communicator, and the global rank of each of its ranks."""
    members: dict[Comm, dict[int, int]] = defaultdict(dict)
    for rank, r in placed:
        members[r.comm][r.rank] = rank
    groups = {}
    for comm, found in members.items():
        if comm[1] == world_size and all(i == rank for i, rank in found.items()):
            found.update({i: i for i in range(world_size)})
        if len(found) < comm[1]:
            seen.repairs["communicator_with_unknown_members"] += 1
        groups[comm] = {
            "ranks": sorted(set(found.values())),
            "backend": "nccl",
            "desc": seen.names.get(comm, ""),
            "name": comm[0],
            "ordinal": 0,
            "size": comm[1],
        }
    return groups, members


def _timed(placed: list[Placed], seen: Seen) -> list[Placed]:
    """Give records without a start one: calls written out together end there, one before the other."""
    out, untimed = [], defaultdict(list)
    for rank, r in placed:
        if max(r.start_us, r.issue_us) >= 0:
            out.append((rank, r))
        elif r.dump_us >= 0:
            untimed[rank, r.comm, r.dump_us].append(r)
        else:
            seen.skipped["records without any time"] += 1
    for (rank, _, dump_us), records in untimed.items():
        at = dump_us
        for r in sorted(records, key=lambda r: (r.sn, r.p2p), reverse=True):
            at = max(1, at - r.exec_us)
            out.append((rank, r._replace(start_us=at, stop_us=-2)))
            seen.repairs["time_from_dump"] += 1
    return sorted(out, key=lambda item: (item[0], item[1].comm, item[1].p2p, item[1].sn))


def _rank_rows(
    timed: list[Placed],
    groups: dict[Comm, dict[str, Any]],
    members: dict[Comm, dict[int, int]],
    seen: Seen,
    names: list[str],
) -> Iterator[RankRows]:
    """Yield the ranks, which ``timed`` is sorted by."""
    by_rank: dict[int, list[Record]] = defaultdict(list)
    for rank, r in timed:
        by_rank[rank].append(r)
    left = seen.num_read - len(timed)
    for number, (rank, records) in enumerate(by_rank.items()):
        rows, channels = EventRows(), Counter[str]()
        for r in records:
            _add(rows, r, members[r.comm])
            channels[r.source or "unknown"] += 1
        mine = {str(named_group(*c)): groups[c] for c in dict.fromkeys(r.comm for r in records)}
        yield RankRows(
            rank=rank,
            sources=names if len(names) == 1 else _of_process(names, records[0].process),
            sites=rows.sites,
            columns=rows.columns(),
            facts={
                "host": records[0].process[0],
                "groups": mine,
                "nccl_inspector": {
                    "version": seen.version,
                    "timing_source": dict(channels),
                    "pid": records[0].process[1],
                },
            },
            num_read=len(rows) + (left if number == 0 else 0),
            skipped=dict(seen.skipped) if number == 0 else {},
            repairs={k: n for k, n in seen.repairs.items() if n} if number == 0 else {},
        )


def _of_process(names: list[str], process: Process) -> list[str]:
    """Return the files whose name tells the process (``<host>-pid<pid>.log``), or all of them."""
    return [n for n in names if process[0] in n and str(process[1]) in n] or [f"{len(names)} files"]


def _add(rows: EventRows, r: Record, members: dict[int, int]) -> None:
    start = r.start_us if r.start_us >= 0 else r.issue_us
    p2p = r.p2p or r.op in ("Send", "Recv")
    rows.add(
        Category.P2P if p2p else Category.COLLECTIVE,
        OPS.get(r.op, r.op.lower()),
        name=r.op,
        start_ns=start * 1000,
        duration_ns=(r.stop_us - start if r.stop_us >= start else r.exec_us) * 1000,
        issue_ns=r.issue_us * 1000 if r.issue_us >= 0 else -1,
        stream=0,
        bytes=r.size,
        group=named_group(*r.comm),
        seq=-1 if p2p else r.sn,
        peer=members.get(r.peer, -1) if p2p else -1,
        flags=int(Flag.REPAIRED) if r.stop_us == -2 else 0,
    )


def _holes(placed: list[Placed]) -> int:
    """Count the numbers missing between the first and the last collective of each communicator on each rank."""
    numbers: dict[tuple[int, Comm], set[int]] = defaultdict(set)
    for rank, r in placed:
        if not r.p2p:
            numbers[rank, r.comm].add(r.sn)
    return sum(max(n) - min(n) + 1 - len(n) for n in numbers.values())
