"""record(): one recording of one rank, from before the first step to the end of the program."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any

from mappnb.capture import launchinfo, marks, signals
from mappnb.capture.clock import CpuClock
from mappnb.capture.points import Plan, Probe, build_probes, parse_plan
from mappnb.capture.recorder import Recorder
from mappnb.capture.state import RankState
from mappnb.capture.steps import Pending, StepTable
from mappnb.capture.telemetry import Telemetry
from mappnb.capture.writer import EventSink, WriterThread, metric_columns, telemetry_columns
from mappnb.errors import CaptureError, MappnbError
from mappnb.layout import Layout
from mappnb.store import RunWriter
from mappnb.terms import Category, Flag, Op

__all__ = ["Session", "record"]

log = logging.getLogger("mappnb")
ANCHOR_S = 30.0
JOIN_PATIENCE_S = 5.0


def record(
    run_dir: str | os.PathLike[str],
    *,
    plan: str | Plan = "default",
    control: bool = False,
    resume: bool = False,
    rank: int | None = None,
    world_size: int | None = None,
    peak_flops: float | None = None,
    start_step: int = 0,
    flush_s: float = 1.0,
    notes: dict[str, Any] | None = None,
    probes: list[Probe] | None = None,
    segment_rows: int = 65536,
) -> Session:
    """Record the enclosed training of this rank into a run directory.

    Call it in every rank, around the training loop: ``with mappnb.record(run_dir): train()``. Nothing else in the script changes.

    Parameters
    ----------
    run_dir : path
        On storage that all ranks see. Created; a directory that holds another run is refused.
    plan : str or Plan
        ``"base"`` (steps, microbatches, transfers; no module spans) or ``"default"`` (layers, attention, MLP too).
    control : bool
        Make the control folder for live requests. Off by default.
    resume : bool
        Continue a run that another job wrote, as a new incarnation. Restarts of one job by its launcher do so by themselves.
    rank, world_size : int, optional
        Known from torch.distributed or the launcher's environment otherwise.
    peak_flops : float, optional
        Peak FLOP/s of one rank's device, for the MFU; known GPUs need it not.
    start_step : int
        Number of the first step, where the program does not tell it.
    flush_s : float
        Seconds between two writes: what a killed process can lose.
    notes : dict, optional
        Plain values kept with the run.
    probes : list, optional
        What to record, instead of the plan's own choice.
    segment_rows : int
        Events per closed segment.

    Returns
    -------
    Session
        A context manager; ``start()`` and ``stop()`` do the same by hand.

    Raises
    ------
    RunExistsError
        If the directory holds another job's run, or other files.
    CaptureError
        If the plan or a parameter is wrong, or a recording runs already in this process.

    Notes
    -----
    These errors come before the first step. Afterwards nothing is raised: a recorder that fails says so once in the log, turns
    itself off and leaves the reason in ``meta["degraded"]``. A disk that cannot be written counts as such a failure, at the
    start too: training goes on.
    """
    if flush_s <= 0:
        raise CaptureError(f"mappnb.record: flush_s is {flush_s}; expected seconds above 0, such as 1.0")
    if (rank is None) != (world_size is None):
        raise CaptureError("mappnb.record: give rank and world_size together, or neither")
    return Session(
        run_dir,
        plan=parse_plan(plan),
        control=control,
        resume=resume,
        place=None if rank is None or world_size is None else (rank, world_size),
        start_step=start_step,
        flush_s=flush_s,
        probes=probes,
        segment_rows=segment_rows,
        facts={"peak_flops": peak_flops, "notes": notes or {}},
    )


class Session:
    """A recording in progress. Probes call its methods; they follow ``mappnb.capture.points.SessionLike``."""

    def __init__(
        self,
        run_dir: str | os.PathLike[str],
        *,
        plan: Plan,
        control: bool,
        resume: bool,
        place: tuple[int, int] | None,
        start_step: int,
        flush_s: float,
        probes: list[Probe] | None,
        segment_rows: int,
        facts: dict[str, Any],
    ) -> None:
        self.run_dir, self.plan, self.control, self.resume = os.fspath(run_dir), plan, control, resume
        self.recorder = Recorder()
        self.clock = CpuClock()
        self.steps = StepTable()
        self.state = RankState(facts)
        self._place, self._segment_rows = place, segment_rows
        self.wait_for_events = False
        self._probes = build_probes(plan) if probes is None else probes
        self._telemetry = Telemetry() if plan.telemetry_s else None
        self._writer = WriterThread(self._tick, self.fail, interval_s=flush_s)
        self._run: RunWriter | None = None
        self._sink: EventSink | None = None
        self._metrics: list[tuple[Any, ...]] = []
        self._deferred: list[Callable[[], bool]] = []
        self._next_step, self._token, self._explicit = start_step, 0, False
        self._iteration = self.recorder.site(category=Category.MARK, op=Op.ITERATION)
        self._running = False
        self._last_sample_ns = self._last_anchor_ns = self._started_ns = self._started_wall_ns = 0
        self._lock = threading.RLock()

    # --------------------------------------------------------------------------------------------------- lifecycle
    @property
    def meta(self) -> dict[str, Any]:
        """What is known of this rank's recording: ``degraded`` holds the reason if it turned itself off."""
        return self.state.content

    def start(self) -> Session:
        """Begin to record."""
        marks.enter(self)
        self._running, self._started_ns, self._started_wall_ns = True, self.recorder.now_ns(), time.time_ns()
        try:
            self._try_join()
        except MappnbError:
            marks.leave(self)
            self._running = False
            raise
        except OSError as err:
            self.fail("run directory", err)
        if self.recorder.enabled:
            self._install()
        return self

    def _install(self) -> None:
        for probe in self._probes:
            try:
                probe.install(self)
            except MappnbError:
                self.stop("error")
                raise
            except Exception as err:  # noqa: BLE001 (capture never kills training)
                self.fail(f"probe {probe.name}", err)
                return
        self._writer.start()
        atexit.register(_stop_at_exit, weakref.ref(self))
        signals.watch(self)

    def stop(self, reason: str = "finished") -> None:
        """End the recording; everything recorded is written. Does nothing the second time."""
        with self._lock:
            if not self._running:
                return
            self._running = False
        marks.leave(self)
        signals.unwatch(self)
        for probe in reversed(self._probes):
            try:
                probe.uninstall()
            except Exception as err:  # noqa: BLE001
                log.warning("mappnb: rank %s: probe %s did not come off: %r", self.state.rank, probe.name, err)
        if self.steps.open:
            self.close_step(keep=not self._explicit)
        if self._writer.stop():
            self._finish(reason)

    def __enter__(self) -> Session:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, err: BaseException | None, tb: TracebackType | None) -> None:
        self.stop("finished" if kind is None else kind.__name__)

    def pause(self) -> None:
        """Stop recording events; :meth:`unpause` goes on."""
        self.recorder.enabled = False

    def unpause(self) -> None:
        """Record events again, unless the recorder has failed."""
        self.recorder.enabled = not self.state.content.get("degraded")

    def fail(self, where: str, err: BaseException) -> None:
        """Turn the recording off for good: one line in the log, the reason in ``meta["degraded"]``; training goes on."""
        with self._lock:
            self.recorder.enabled = False
            if self.state.content.get("degraded"):
                return
            reason = f"{where}: {type(err).__name__}: {err}"
            self.state.set(degraded=reason, degraded_step=self.recorder.context()[0])
        log.warning("mappnb: rank %s: recording stopped (%s); training continues", self.state.rank, reason)
        self._leave_note()

    def _leave_note(self) -> None:
        """Tell the reader of the run; on a full disk the space held back at the start is used."""
        if self._run is None:
            return
        try:
            self._run.abandon()
            self._run.release()
            self._run.write_rank(self.state.snapshot())
        except OSError:
            log.debug("mappnb: the reason could not be written to %s", self.run_dir)

    # ------------------------------------------------------------------------------------------------ writer thread
    def _try_join(self) -> bool:
        """Join the run directory once the rank is known."""
        if self._run is not None:
            return True
        place = self._place or launchinfo.rank_of()
        waited_s = (self.recorder.now_ns() - self._started_ns) / 1e9
        if place is None:
            if self._running and (waited_s < JOIN_PATIENCE_S or (self.wait_for_events and not self.recorder.stats()["recorded"])):
                return False
            if self.wait_for_events and not self.recorder.stats()["recorded"]:  # it has not trained: leave no trace
                return False
            place = (0, 1)
        self._join(*place)
        return True

    def _join(self, rank: int, world_size: int) -> None:
        self.state.set(rank=rank, world_size=world_size)
        os.environ.setdefault("MAPPNB_EXEC_OWNER", str(os.getpid()))  # helper processes of this one do not record
        launch = launchinfo.launch_of()
        run = RunWriter.join(
            self.run_dir,
            rank=rank,
            world_size=world_size,
            launch=launch,
            resume=self.resume,
            created_wall_ns=self._started_wall_ns,
        )
        self.state.set(
            plan=self.plan.name,
            clock={"boot_id": self.clock.boot_id, "kind": "monotonic", "anchors": [list(self.clock.anchor())]},
        )
        run.reserve()
        run.write_rank(self.state.snapshot())
        if self.control:
            os.makedirs(os.path.join(self.run_dir, "control"), mode=0o700, exist_ok=True)
        self._run, self._sink = run, EventSink(self.recorder, run, max_rows=self._segment_rows)

    def _tick(self) -> None:
        """One round of the writer thread."""
        if not self.recorder.enabled and self.state.content.get("degraded"):
            return
        if not self._try_join() or self._run is None or self._sink is None:
            return
        self._deferred = [fn for fn in self._deferred if not fn()]
        self._sink.flush(self._anchor())
        self._write_tables()
        if self.state.take_changed():
            self._run.write_rank(self.state.snapshot())

    def _anchor(self) -> dict[str, Any]:
        now = self.recorder.now_ns()
        if now - self._last_anchor_ns < ANCHOR_S * 1e9:
            return {}
        self._last_anchor_ns = now
        return {"anchors": [list(self.clock.anchor())], "threads": {str(i): [t, n] for i, t, n in self.recorder.threads()}}

    def _write_tables(self, *, everything: bool = False) -> None:
        assert self._run is not None
        now = self.recorder.now_ns()
        if self._telemetry is not None and (everything or now - self._last_sample_ns >= self.plan.telemetry_s * 1e9):
            self._last_sample_ns = now
            sample = self._telemetry.sample()
            self.steps.peak_seen = max(self.steps.peak_seen, sample.get("rss_bytes") or 0.0)
            self._run.table("telemetry").append(telemetry_columns(now, sample))
        if (rows := self.steps.take(everything=everything)) is not None:
            self._run.table("steps").append(rows)
        if (metrics := self._ready_metrics(everything)):
            self._run.table("metrics").append(metric_columns(metrics))

    def _ready_metrics(self, everything: bool) -> list[tuple[Any, ...]]:
        waiting, self._metrics = self._metrics, []
        out: list[tuple[Any, ...]] = []
        for row in waiting:
            pending: Pending = row[-1]
            if everything or pending.ready():
                out += [(*row[:-2], row[-2] + i, v) for i, v in enumerate(pending.values().tolist())]
            else:
                self._metrics.append(row)
        return out

    def _finish(self, reason: str) -> None:
        degraded = bool(self.state.content.get("degraded"))
        try:
            if not degraded:
                if not self._try_join() or self._run is None or self._sink is None:
                    return
                self._deferred = [fn for fn in self._deferred if not fn()]
                self._sink.finish()
                self._write_tables(everything=True)
                self._run.close()
            self.state.set(ended={"reason": reason, "wall_ns": self.clock.anchor()[0]}, dropped=self.recorder.stats()["dropped"])
            if self._run is not None:
                self._run.write_rank(self.state.snapshot())
        except Exception as err:  # noqa: BLE001
            self.fail("end of recording", err)

    def flush(self) -> None:
        """Write what is recorded now, in the calling thread: used by signal handlers and tests."""
        if self._running and not self.state.content.get("degraded"):
            self._writer.once(timeout_s=2.0)

    # --------------------------------------------------------------------------------------------- called by probes
    def begin_step(self, step: int | None = None) -> None:
        """Open the span of a step, unless one is open; ``step`` overrides the session's own count."""
        if self._token or not self.recorder.enabled:
            return
        number = self._next_step if step is None else int(step)
        self._next_step = number + 1
        self.recorder.set_context(number, -1, -1, -1)
        self.steps.begin(number, self.recorder.now_ns())
        self._token = self.recorder.begin(self._iteration)

    def end_step(self) -> None:
        """Close the span of the step; does nothing while the program itself marks its steps."""
        if not self._explicit:
            self.close_step()

    def close_step(self, *, keep: bool = True) -> None:
        """Close the span of the step; ``keep=False`` writes no row of the step table for it."""
        token, self._token = self._token, 0
        if not token:
            return
        self.recorder.set_context(None, -1, -1, -1)
        self.recorder.end(token, flags=0 if keep else int(Flag.CLIPPED))
        if keep:
            self.steps.end(self.recorder.now_ns())
        else:
            self.steps.cancel()

    def mark_step(self, step: int | None = None) -> None:
        """A step ends here and the next begins: what :func:`mappnb.step` calls."""
        self._explicit = True
        self.close_step()
        self.begin_step(step)

    def step_values(self, **values: Any) -> None:
        """Add values (loss, grad_norm, lr, tokens, microbatches, skipped) to the current step."""
        if self.recorder.enabled:
            self.steps.add(**values)

    def metric(self, name: str, value: Any, *, microbatch: int = -1, chunk: int = -1, layer: int = -1, index: int = 0) -> None:
        """Keep a number, or a 1-d tensor as numbers with index 0, 1, ...; read on the writer thread."""
        if self.recorder.enabled:
            step = self.recorder.context()[0]
            self._metrics.append((self.recorder.now_ns(), name, step, chunk, microbatch, layer, index, Pending(value)))

    def set_layout(self, layout: Layout, coords: dict[str, int]) -> None:
        """Tell the parallel layout and this rank's place in it."""
        self.state.set(layout=layout.to_dict(), coords=dict(coords))

    def add_group(self, group_id: int, **group: Any) -> None:
        """Tell of a process group: ranks, backend, desc, name, ordinal."""
        self.state.add("groups", str(group_id), group)

    def set_model(self, **info: Any) -> None:
        """Tell of the model: parameters, layers, FLOPs per token."""
        for key, value in info.items():
            self.state.add("model", key, value)

    def set_rank(self, rank: int, world_size: int) -> None:
        """Tell rank and world size, where they became known only now."""
        if self._run is None:
            self._place = (rank, world_size)
        elif (self._run.rank, self._run.world_size) != (rank, world_size):
            self.fail(
                "rank",
                CaptureError(
                    f"recording began as rank {self._run.rank} of {self._run.world_size}, but the program is rank {rank} of "
                    f"{world_size}; call mappnb.record after init_process_group, or set RANK and WORLD_SIZE"
                ),
            )

    def defer(self, fn: Callable[[], bool]) -> None:
        """Call ``fn`` on the writer thread until it returns True."""
        self._deferred.append(fn)


def _stop_at_exit(session: weakref.ref[Session]) -> None:
    if (alive := session()) is not None:
        alive.stop("exit")
