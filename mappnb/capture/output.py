"""What one rank writes into the run directory: joined late if need be, given up without a fuss. The writer thread's own."""

from __future__ import annotations

import contextlib
import math
import os
from typing import Any

from mappnb.capture import launchinfo
from mappnb.capture.clock import CpuClock
from mappnb.capture.recorder import Recorder
from mappnb.capture.state import RankState
from mappnb.capture.steps import MetricTable, StepTable
from mappnb.capture.telemetry import Telemetry
from mappnb.capture.writer import EventSink, telemetry_records
from mappnb.joining import RunWriter

__all__ = ["RankOutput"]

ANCHOR_S = 30.0
TABLES_ROUNDS = 2  # steps and metrics are small: written every second round, they cost half


class RankOutput:
    """One rank's files.

    Parameters
    ----------
    recorder, steps, metrics
        Where the rows come from.
    state : RankState
        Becomes the rank's JSON file.
    telemetry_s : float
        Seconds between samples of the machine; 0 = none.
    segment_rows : int
        Events per closed segment.

    Attributes
    ----------
    run : RunWriter or None
        None until :meth:`join`.
    closed : bool
        Nothing is written any more but the rank's JSON file.
    """

    def __init__(
        self,
        recorder: Recorder,
        state: RankState,
        steps: StepTable,
        metrics: MetricTable,
        *,
        telemetry_s: float,
        segment_rows: int,
    ) -> None:
        self.recorder, self.state, self.steps, self.metrics = recorder, state, steps, metrics
        self.clock = CpuClock()
        self.run: RunWriter | None = None
        self.closed = False
        self._sink: EventSink | None = None
        self._segment_rows = segment_rows
        self._telemetry, self._telemetry_s = (Telemetry() if telemetry_s else None), telemetry_s
        self._last_sample_ns = self._last_anchor_ns = self._rounds = 0

    def join(
        self, run_dir: str, *, rank: int, world_size: int, resume: bool, created_wall_ns: int, control: bool
    ) -> None:
        """Join the run directory. Raises what :meth:`mappnb.store.RunWriter.join` does, or OSError."""
        self.state.set(rank=rank, world_size=world_size)
        run = RunWriter.join(
            run_dir,
            rank=rank,
            world_size=world_size,
            launch=launchinfo.launch_of(),
            resume=resume,
            created_wall_ns=created_wall_ns,
        )
        anchor = list(self.clock.anchor())
        self.state.set(clock={"boot_id": self.clock.boot_id, "kind": "monotonic", "anchors": [anchor]})
        self.run = run
        run.reserve()
        run.write_rank(self.state.snapshot())
        if control:
            os.makedirs(os.path.join(run_dir, "control"), mode=0o700, exist_ok=True)
        self._sink = EventSink(self.recorder, run, max_rows=self._segment_rows)

    def write(self, *, asked: bool = False) -> None:
        """Write what is new.

        Parameters
        ----------
        asked : bool
            Somebody waits for it: leave nothing for a later round.
        """
        if self.run is None or self._sink is None or self.closed:
            return
        self._sink.flush(self._anchor())
        self._write_tables(asked=asked)
        if self.state.take_changed():
            self.run.write_rank(self.state.snapshot())

    def close(self) -> None:
        """Write the rest and close every segment."""
        if self.run is None or self._sink is None or self.closed:
            return
        self._sink.finish()
        self._write_tables(asked=True, everything=True)
        self.run.close()
        self.closed, self._telemetry = True, None

    def note_end(self, reason: str) -> None:
        """Say how the recording ended."""
        self.closed = True
        ended = {"reason": reason, "wall_ns": self.clock.anchor()[0]}
        self.state.set(ended=ended, dropped=self.recorder.stats()["dropped"] + self.metrics.dropped)
        if self.run is not None:
            self.run.write_rank(self.state.snapshot())

    def give_up(self, *, broken: bool) -> None:
        """Stop writing, and tell the reader why; on a full disk the space held back at the start is used.

        Parameters
        ----------
        broken : bool
            Writing itself has failed. Otherwise what was recorded until now is written first.
        """
        if self.closed:
            return
        try:
            if not broken:
                self.close()
        except Exception:  # noqa: BLE001 (the first failure is the one to tell)
            broken = True
        self.closed, self._telemetry = True, None
        if self.run is not None:
            if broken:
                self.run.abandon()
            with contextlib.suppress(OSError):
                self.run.release()
                self.run.write_rank(self.state.snapshot())

    def _anchor(self) -> dict[str, Any]:
        now = self.recorder.now_ns()
        if now - self._last_anchor_ns < ANCHOR_S * 1e9:
            return {}
        self._last_anchor_ns = now
        return {"anchors": [list(self.clock.anchor())]}

    def _write_tables(self, *, asked: bool, everything: bool = False) -> None:
        assert self.run is not None
        now = self.recorder.now_ns()
        if self._telemetry is not None and (everything or now - self._last_sample_ns >= self._telemetry_s * 1e9):
            self._last_sample_ns = now
            sample = self._telemetry.sample()
            if math.isfinite(sample["rss_bytes"]):
                self.steps.see_resident(sample["rss_bytes"])
            self.run.table("telemetry").append(telemetry_records(now, sample))
        self._rounds += 1
        if not asked and self._rounds % TABLES_ROUNDS:
            return
        for name, rows in (
            ("steps", self.steps.take(everything=everything)),
            ("metrics", self.metrics.take(everything=everything)),
        ):
            if rows is not None:
                self.run.table(name).append(rows)
