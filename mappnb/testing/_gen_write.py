"""Writes a generated run: through RunWriter, as capture does, a block of steps at a time, rank by rank."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mappnb.errors import RunExistsError
from mappnb.joining import RunWriter
from mappnb.paths import INC_NAME, INCARNATION, RUN
from mappnb.schema import FORMAT_VERSION
from mappnb.segment_writer import write_file
from mappnb.table_specs import Columns
from mappnb.testing import _gen_faults as f
from mappnb.testing._gen_clocks import anchors
from mappnb.testing._gen_effects import stopped_at
from mappnb.testing._gen_graph import Step
from mappnb.testing._gen_program import AXES
from mappnb.testing._gen_rows import EventRows, step_rows
from mappnb.testing._gen_samples import metric_rows, telemetry_rows
from mappnb.testing._gen_settings import Clocks
from mappnb.testing._gen_times import Times
from mappnb.testing._gen_truth import ClockTruth

__all__ = ["Output"]

CREATED_WALL_NS = 1_767_225_600 * 10**9  # 2026-01-01
WRITERS = 8
LISTED, LISTERS = 512, 8
"""A group of more than ``LISTED`` ranks is listed in the files of ``LISTERS`` of them: in all, it would make 1 GB of 10,000 ranks."""


@dataclass
class Output:
    """Where a run goes, and what its ranks tell.

    Attributes
    ----------
    root : Path
        The run directory: new or empty.
    step : Step
        The graph.
    clock, clocks : ClockTruth, Clocks
        The clocks and their settings.
    faults : list of (int, Fault)
        All faults.
    seed, seq_length, segment_rows : int
        As of generate_run.
    telemetry : bool
        Whether to write telemetry, a sample each ``telemetry_every_s``.
    ended : bool
        Whether the job came to its end.
    """

    root: Path
    step: Step
    clock: ClockTruth
    clocks: Clocks
    faults: Sequence[tuple[int, f.Fault]]
    seed: int
    seq_length: int
    segment_rows: int
    telemetry: bool
    telemetry_every_s: float
    ended: bool
    _run_id: str = ""
    _ranks: frozenset[int] = frozenset()
    _numbers: dict[tuple[int, str], int] = field(default_factory=dict)  # of the next segment of a rank's table

    def create(self) -> None:
        """Create the run directory, with the same identity for the same run.

        Raises
        ------
        RunExistsError
            If the folder holds something.
        """
        if self.root.exists() and (not self.root.is_dir() or any(self.root.iterdir())):
            raise RunExistsError(f"{self.root}: not an empty folder; give generate_run a new or an empty one")
        text = f"{self.step.plan.layout.to_dict()} {self.step.plan.schedule!r} {self.faults} {self.clocks} {self.seed}"
        run_id = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
        launch = {"id": run_id[:16], "job": f"generated-{run_id[:8]}"}
        inc = self.root / INC_NAME.format(0)
        inc.mkdir(parents=True)
        common = {"format_version": FORMAT_VERSION, "created_wall_ns": CREATED_WALL_NS, "launch": launch}
        _write_json(self.root / RUN, {**common, "run_id": run_id, "created_by": {"host": "host0", "rank": 0, "pid": 1}})
        _write_json(inc / INCARNATION, {**common, "incarnation": 0, "world_size": self.step.members.ranks.size})
        missing = {x.rank for _, x in self.faults if isinstance(x, f.MissingRank)}
        self._run_id = run_id
        self._ranks = frozenset(set(range(self.step.members.ranks.size)) - missing)

    def write(self, times: Sequence[Times], *, last: bool) -> None:
        """Write a block of steps of every rank.

        Parameters
        ----------
        times : sequence of Times
            The steps.
        last : bool
            Whether these are the last ones.
        """
        last_s = self._last_seen(times[-1])
        stopped = not np.isfinite(times[-1].end_s[self.step.ends]).all()
        over = self.ended and not stopped

        def write(rows: EventRows, column: int, rank: int) -> None:
            now_s = last_s.get(rank, last_s[-1])
            run = self._write_rank(rows, times, column, rank, now_s, ended=not last or over)
            if last:
                run.write_rank(self._facts(rank, now_s, ended=over))

        with ThreadPoolExecutor(WRITERS) as pool:  # most of the time is spent in waiting for the disk
            for p, ranks in enumerate(self.step.members.ranks):
                rows = EventRows(self.step, p, self.clock)
                jobs = [pool.submit(write, rows, i, r) for i, r in enumerate(ranks.tolist()) if r in self._ranks]
                for job in jobs:
                    job.result()

    def _last_seen(self, times: Times) -> dict[int, float]:
        """Return the last sign of life of ranks that were killed, and of all others under -1, s."""
        finite = times.end_s[np.isfinite(times.end_s)].max()
        stops = [x for _, x in self.faults if isinstance(x, f.KilledRank) and x.first_step == times.number]
        out = {-1: float(finite) + max((x.wait_s for x in stops), default=0.0)}
        for x in stops:
            if not isinstance(x, f.Hang):
                op = stopped_at(x, self.step)
                at = float(times.start_s[op]) + float(self.step.graph.duration_s[op]) / 2
                out[x.rank] = min(at, out[-1])
        return out

    def _write_rank(
        self, rows: EventRows, times: Sequence[Times], column: int, rank: int, now_s: float, *, ended: bool
    ) -> RunWriter:
        step, clock = self.step, self.clock
        run = RunWriter(self.root, self._run_id, CREATED_WALL_NS, 0, rank, step.members.ranks.size)
        meta = {"now_ns": int(clock.raw_ns(rank, now_s))}
        columns = rows.columns(times, column, now_s)
        order = np.argsort(columns["start_ns"], kind="stable")
        table = run.table(
            "events", site=lambda i: rows.sites[i], max_rows=self.segment_rows, max_age_s=1e9
        )  # fmt: skip
        table.number = self._numbers.get((rank, "events"), 0)
        for at in range(0, len(order), self.segment_rows):
            table.append({k: v[order[at : at + self.segment_rows]] for k, v in columns.items()}, meta=meta)
        tokens = float(self.seq_length * step.plan.schedule.num_microbatches)
        more = {"now_s": now_s}
        parts: dict[str, Columns | None] = {"steps": step_rows(step, times, rank, clock, tokens=tokens, **more)}
        if self.telemetry:
            parts["telemetry"] = telemetry_rows(
                step, times, rank, clock, self.faults, every_s=self.telemetry_every_s, seed=self.seed, **more
            )
        parts["metrics"] = metric_rows(
            step, times, rank, clock, self.faults, seq_length=self.seq_length, seed=self.seed, **more
        )
        used = {n: v for n, v in parts.items() if v is not None and len(next(iter(v.values())))}
        for name, values in used.items():
            other = run.table(name, max_age_s=1e9)
            other.number = self._numbers.get((rank, name), 0)
            other.append(values)
        if not ended:
            run.abandon()
            return run
        run.close()
        self._numbers.update({(rank, n): run.table(n).number for n in ("events", *used)})
        return run

    def _facts(self, rank: int, end_s: float, *, ended: bool) -> dict[str, Any]:
        members, layout = self.step.members, self.step.plan.layout
        host = int(members.host[rank])
        found = anchors(
            self.clocks, self.clock, rank, created_wall_ns=CREATED_WALL_NS, end_s=end_s, seed=self.seed
        )  # fmt: skip
        wall_ns = CREATED_WALL_NS + int(end_s * 1e9) + int(self.clock.wall_error_ns[rank])
        return {
            "host": f"host{host}",
            "device": "generated",
            "plan": "generated",
            "layout": layout.to_dict(),
            "coords": {a: int(v[rank]) for a, v in members.coords.items()},
            "groups": self._groups(rank),
            "degraded": None,
            "model": {"flops_per_token": 1e9, "num_layers": sum(len(x) for x in self.step.plan.layers)},
            "peak_flops": 989e12,
            "clock": {"boot_id": f"boot-{self.seed}-{host}", "anchors": found},
            **({"ended": {"reason": "finished", "wall_ns": wall_ns}} if ended else {}),
        }

    def _groups(self, rank: int) -> dict[str, Any]:
        members, out = self.step.members, {}
        for axis in (*AXES, "pp"):
            number = int(members.group_of[axis][rank])
            ranks = members.groups[axis][number] if number >= 0 else ()
            if len(ranks) < 2:
                continue
            if len(ranks) > LISTED and ranks.index(rank) % -(-len(ranks) // LISTERS):
                continue
            out[str(int(members.ids[axis][number]))] = {
                "ranks": list(ranks), "backend": "nccl", "desc": axis, "name": axis, "ordinal": 0
            }  # fmt: skip
        return out


def _write_json(path: Path, content: dict[str, Any]) -> None:
    write_file(path, lambda sink: sink.write(json.dumps(content, indent=1).encode()))
