"""Reads NCCL Inspector records: one completed collective or transfer of one communicator rank each."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from mappnb.capture.importers._rows import as_int, as_text

__all__ = ["MOST_RANKS", "Comm", "Process", "Record", "Seen"]

MOST_RANKS: Final = 2**17
"""A communicator said to be larger is not believed."""
_LATEST_US: Final = 9 * 10**15

Process = tuple[str, int]
"""Host name and process id."""

Comm = tuple[str, int]
"""Id and size of a communicator."""


class Record(NamedTuple):
    """One operation of one communicator rank; times in µs of the host's wall clock, -1 where not known.

    Attributes
    ----------
    comm, rank, process : Comm, int, Process
        Whose: communicator, rank in it, process.
    p2p : bool
        Whether it came as ``p2p_perf``.
    op : str
        NCCL's name of the function.
    sn : int
        Sequence number in the communicator.
    size : int
        Message size, bytes.
    peer : int
        Rank in the communicator of the other side of a transfer.
    start_us, stop_us : int
        First kernel start and last kernel stop of its channels.
    issue_us : int
        Start of the operation on the host.
    exec_us : int
        Execution time as reported, µs.
    dump_us : int
        When the record was written out.
    source : str
        What was timed: ``kernel_gpu``, ``kernel_cpu`` or ``collective_cpu``.
    """

    comm: Comm
    rank: int
    process: Process
    p2p: bool
    op: str
    sn: int
    size: int
    peer: int
    start_us: int
    stop_us: int
    issue_us: int
    exec_us: int
    dump_us: int
    source: str


@dataclass(slots=True)
class Seen:
    """Everything read so far.

    Attributes
    ----------
    records : dict
        The first record of each call of each communicator rank.
    names : dict of Comm to str
        ``comm_name`` of later versions.
    version : str
        ``inspector_output_format_version`` of the first record.
    num_read : int
        Values read.
    repairs, skipped : Counter
        What was mended and left out, by kind.
    """

    records: dict[tuple[Any, ...], Record] = field(default_factory=dict)
    names: dict[Comm, str] = field(default_factory=dict)
    version: str = ""
    num_read: int = 0
    repairs: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)

    def add(self, value: Any) -> None:
        """Keep one JSON value, or count why it is of no use."""
        self.num_read += 1
        header, metadata, perf, prefix = _parts(value)
        if not isinstance(header, dict) or not isinstance(metadata, dict) or not isinstance(perf, dict):
            self.skipped["values that are no record"] += 1
            return
        size, rank = as_int(header.get("n_ranks"), low=1, high=MOST_RANKS), as_int(header.get("rank"), low=0)
        sn, comm_id, op = as_int(perf.get(f"{prefix}_sn"), low=0), as_text(header.get("id")), as_text(perf.get(prefix))
        if size is None or rank is None or sn is None or not comm_id or not op or rank >= size:
            self.skipped["records that lack a field"] += 1
            return
        start, stop, issue = _times(perf, prefix)
        comm = (comm_id, size)
        record = Record(
            comm=comm,
            rank=rank,
            process=(as_text(metadata.get("hostname"), "unknown"), _known(metadata.get("pid"))),
            p2p=prefix == "p2p",
            op=op,
            sn=sn,
            size=_known(perf.get(f"{prefix}_msg_size_bytes")),
            peer=_known(perf.get("p2p_peer")),
            start_us=start,
            stop_us=stop,
            issue_us=issue,
            exec_us=max(0, _known(perf.get(f"{prefix}_exec_time_us"), high=2**40)),
            dump_us=_known(metadata.get("dump_timestamp_us"), low=1, high=_LATEST_US),
            source=as_text(perf.get(f"{prefix}_timing_source")),
        )
        key = (comm, rank, record.process, prefix, sn, op, record.peer)
        if self.records.setdefault(key, record) is not record:
            self.skipped["records of a call that is there already"] += 1
        self.names.setdefault(comm, as_text(header.get("comm_name")))
        self.version = self.version or as_text(metadata.get("inspector_output_format_version"))


def _parts(value: Any) -> tuple[Any, Any, Any, str]:
    """Return header, metadata, the operation and the prefix of its fields."""
    if not isinstance(value, dict):
        return None, None, None, ""
    prefix = "p2p" if isinstance(value.get("p2p_perf"), dict) else "coll"
    return value.get("header"), value.get("metadata"), value.get(f"{prefix}_perf"), prefix


def _known(value: Any, *, low: int = 0, high: int = 2**62) -> int:
    number = as_int(value, low=low, high=high)
    return -1 if number is None else number


def _times(perf: dict[str, Any], prefix: str) -> tuple[int, int, int]:
    """Return first kernel start, last kernel stop and host start in µs, -1 where not known."""
    trace = perf.get("event_trace_ts")
    trace = trace if isinstance(trace, dict) else {}
    listed = [e for e in _list(trace.get("kernel_events")) if isinstance(e, dict)]
    for event in _list(perf.get("events")):  # the later form: each event with its own times
        if isinstance(event, dict) and event.get("event_type") == "KernelCh":
            times = event.get("event_trace_ts")
            listed += [times] if isinstance(times, dict) else []
    starts = [_known(e.get("kernel_start_ts"), low=1, high=_LATEST_US) for e in listed]
    stops = [_known(e.get("kernel_stop_ts"), low=1, high=_LATEST_US) for e in listed]
    issue = _known(trace.get(f"{prefix}_start_ts"), low=1, high=_LATEST_US)
    return min((s for s in starts if s >= 0), default=-1), max(stops, default=-1), issue


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
