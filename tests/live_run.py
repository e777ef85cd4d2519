"""A job that goes on: the rows of a finished run, written step by step as its ranks would have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import ClassVar

import numpy as np

import mappnb
from mappnb.joining import RunWriter

TABLES = ("events", "steps", "telemetry", "metrics")


class LiveRun:
    """Writes what a finished run holds into another folder, a few steps at a time, as open streams.

    Parameters
    ----------
    source : path
        A finished run.
    path : path
        The folder of the live one; it comes into being with the first rank.
    job, resume : str, bool
        See RunWriter.join: restarts of one job have the same name.
    ranks : list of int, optional
        Ranks that write; all by default.
    closed_every : int
        Steps after which a segment is closed.
    """

    made: ClassVar[list[LiveRun]] = []

    def __init__(self, source, path, *, launch="a", ranks=None, closed_every=12):
        self.source, self.path = mappnb.attach(source), Path(path)
        world = self.source.meta["world_size"]
        self.ranks = list(range(world)) if ranks is None else ranks
        self.closed_every, self.written = closed_every, 0
        self.infos = {r: dict(i) for r, i in self.source.incarnations[-1].ranks.items()}
        created = int(self.source.store.info["created_wall_ns"])
        self.rows, self.writers = {}, {}
        self.made.append(self)
        readers = {t: self.source._reader(t) for t in TABLES}
        sites = readers["events"].sites.rows
        for rank in self.ranks:
            run = RunWriter.join(
                path, rank=rank, world_size=world, launch={"id": launch, "job": "live"}, created_wall_ns=created
            )
            self.writers[rank] = run
            self._tell(rank, {k: v for k, v in self.infos[rank].items() if k != "ended"})
            for name, reader in readers.items():
                columns, _, _ = reader.window(keys={(0, rank)})
                self.rows[rank, name] = columns
                more = {"site": sites.__getitem__} if name == "events" else {}
                run.table(name, max_rows=10**9, max_age_s=1e9, **more)

    def _tell(self, rank, content):
        known = ("format_version", "run_id", "incarnation", "rank", "world_size")
        self.writers[rank].write_rank({k: v for k, v in content.items() if k not in known})

    def write(self, first, last=None, *, ranks=None):
        """Write the rows of the steps from first to last, both included."""
        last = first if last is None else last
        for rank in self.ranks if ranks is None else ranks:
            for name in TABLES:
                columns = self.rows[rank, name]
                step = columns["step"] if "step" in columns else np.full(len(columns["time_ns"]), first)
                mine = np.flatnonzero((step >= first) & (step <= last))
                if len(mine):
                    now = {"now_ns": int((columns["start_ns"][mine]).max())} if name == "events" else {}
                    self.writers[rank].table(name).append({k: v[mine] for k, v in columns.items()}, meta=now)
        self.written += last - first + 1
        if self.written >= self.closed_every:
            self.written = 0
            for run in self.writers.values():
                for table in TABLES:
                    run.table(table).roll()

    def end(self, reason="finished"):
        """Write the end of every rank."""
        for rank, run in self.writers.items():
            run.close()
            self._tell(rank, {**self.infos[rank], "ended": {"reason": reason, "wall_ns": 0}})

    @classmethod
    def abandon_all(cls):
        """Let go of the files of all, as a killed job does."""
        while cls.made:
            for run in cls.made.pop().writers.values():
                run.abandon()

    def degrade(self, rank, why):
        """Let the recorder of a rank give up."""
        content = json.loads((self.writers[rank]._rank_file()).read_text())
        self._tell(rank, {**content, "degraded": why})
