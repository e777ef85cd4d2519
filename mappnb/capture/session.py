"""record(): one recording of one rank, from before the first step to the end of the program."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Any

from mappnb.capture import exits, marks, signals
from mappnb.capture._guard import guarded
from mappnb.capture._session_facts import SessionFacts
from mappnb.capture.options import RecordOptions
from mappnb.capture.output import RankOutput
from mappnb.capture.place import RankFinder
from mappnb.capture.points import Plan, Probe, build_probes
from mappnb.capture.recorder import Recorder
from mappnb.capture.state import RankState
from mappnb.capture.stepmarks import StepMarks
from mappnb.capture.steps import MetricTable, StepTable
from mappnb.capture.writer import WriterThread
from mappnb.errors import CaptureError, MappnbError
from mappnb.paths import RANK_NAME

__all__ = ["Session", "record"]

log = logging.getLogger("mappnb")
FLUSH_PATIENCE_S, STOP_PATIENCE_S = 2.0, 30.0


def record(
    run_dir: str | os.PathLike[str],
    *,
    plan: str | Plan = "default",
    activations: Any = None,
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
    activations : str, CapturePlan or dict, optional
        What to capture inside the model: ``"default"`` (statistics of every point at every 10th step), ``"residual"``, ``"attention"``,
        the path of a ``.json`` file with a plan, or a `mappnb.CapturePlan`. None: nothing, at no cost.
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
    options = RecordOptions(
        plan=plan,
        activations=activations,
        control=control,
        resume=resume,
        rank=rank,
        world_size=world_size,
        peak_flops=peak_flops,
        start_step=start_step,
        flush_s=flush_s,
        notes=notes,
        probes=probes,
        segment_rows=segment_rows,
    )
    return Session(run_dir, options)


class Session(SessionFacts):
    """A recording in progress. Probes call its methods; they follow ``mappnb.capture.points.SessionLike``.

    Attributes
    ----------
    recorder, plan
        What gets the events, and which are wanted.
    finder : RankFinder
        Knows or waits for the rank.
    """

    def __init__(self, run_dir: str | os.PathLike[str], options: RecordOptions) -> None:
        self.run_dir, self.plan = os.fspath(run_dir), options.parsed_plan
        self.recorder = Recorder()
        self.state = RankState(options.facts)
        self.finder = RankFinder(options.place)
        self._join_options: dict[str, Any] = {"resume": options.resume, "control": options.control}
        self._steps, self._metrics = StepTable(), MetricTable()
        self._marks = StepMarks(self.recorder, self._steps, start_step=options.start_step)
        self._output = RankOutput(
            self.recorder,
            self.state,
            self._steps,
            self._metrics,
            telemetry_s=self.plan.telemetry_s,
            segment_rows=options.segment_rows,
        )
        self._probes = build_probes(self.plan, options.activations) if options.probes is None else list(options.probes)
        self._installed: list[Probe] = []
        self._writer = WriterThread(self._round, self._signalled, interval_s=options.flush_s)
        self._deferred: deque[Callable[[], bool]] = deque()
        self._used = self._running = False
        self._reason = "finished"
        self._lock = threading.RLock()

    @property
    def meta(self) -> dict[str, Any]:
        """What is known of this rank's recording: ``degraded`` holds the reason if it turned itself off."""
        return self.state.content

    @property
    def degraded(self) -> bool:
        """True once the recorder has failed."""
        return bool(self.state.content.get("degraded"))

    @property
    def wakeup_fd(self) -> int:
        """Where signals are to be told to the writer thread."""
        return self._writer.wakeup_fd

    def start(self) -> Session:
        """Begin to record."""
        if self._used:
            raise CaptureError("mappnb.record: a recording is started once; call mappnb.record again for another")
        marks.enter(self)
        self._used = self._running = True
        self._join_options["created_wall_ns"] = time.time_ns()
        try:
            self._begin()
        except MappnbError:
            self.stop("wrong configuration")
            raise
        return self

    def _begin(self) -> None:
        """Join, if the rank is known, and install the probes. Raises MappnbError only."""
        where = "run directory"
        try:
            if not self.finder.automatic:
                self._try_join()
            where = "start"
            self._writer.start()
            self._writer.wake()  # the run is there to be read at once
            for probe in self._probes:
                where = f"probe {probe.name}"
                self._installed.append(probe)
                probe.install(self)
            where = "start"
            exits.watch(self)
            signals.watch(self)
            self._marks.start(blind=not self._probes or "torch" not in sys.modules)
        except MappnbError:
            raise
        except Exception as err:  # noqa: BLE001 (capture never kills training)
            self.fail(where, err)
            self._take_off()
            if not self._writer.alive:
                self._output.give_up(broken=True)

    def _take_off(self) -> None:
        """Uninstall the probes, the last first."""
        while self._installed:
            probe = self._installed.pop()
            try:
                probe.uninstall()
            except Exception as err:  # noqa: BLE001
                level = logging.DEBUG if self.degraded else logging.WARNING
                log.log(level, "mappnb: rank %s: probe %s did not come off: %r", self.state.rank, probe.name, err)

    def stop(self, reason: str = "finished", *, timeout_s: float = STOP_PATIENCE_S) -> None:
        """End the recording; everything recorded is written. Does nothing the second time.

        Parameters
        ----------
        reason : str
            Kept with the rank: how the recording ended.
        timeout_s : float
            How long to wait for a writer that is stuck, as on a dead file system.
        """
        with self._lock:
            if not self._running:
                return
            self._running = False
        marks.leave(self)
        self._take_off()
        try:
            self._marks.stop(clean=reason == "finished")
        except Exception as err:  # noqa: BLE001
            self.fail("last step", err)
        self.end(reason, timeout_s=timeout_s)
        exits.unwatch(self)
        if signals.unwatch(self):
            self._writer.close()

    def end(self, reason: str, *, timeout_s: float) -> None:
        """Have the writer thread write everything and end; nothing of the program is touched. Safe in a signal handler."""
        self._reason = reason
        if not self._writer.end(timeout_s):
            late = TimeoutError(f"the writer did not end within {timeout_s:g} s; does {self.run_dir} still answer?")
            self.fail("end of recording", late)

    def disown(self) -> None:
        """Become inert, in a forked child: neither files nor locks are touched."""
        self._running, self.recorder.enabled = False, False
        self._lock = threading.RLock()
        self.state.content["degraded"] = "forked: the recording belongs to the parent process"

    def __enter__(self) -> Session:
        return self if self._running else self.start()

    def __exit__(self, kind: type[BaseException] | None, err: BaseException | None, tb: TracebackType | None) -> None:
        self.stop("finished" if kind is None else kind.__name__)

    def pause(self) -> None:
        """Stop recording events; :meth:`unpause` goes on. The current step becomes no row of the step table."""
        self.recorder.enabled, self._marks.cut = False, True

    def unpause(self, *, step: int | None = None) -> None:
        """Record events again, unless the recorder has failed; ``step`` is the number of the next step to begin."""
        if step is not None:
            self._marks.number_next(step)
        self.recorder.enabled = self._running and not self.degraded

    def flush(self) -> bool:
        """Have what is recorded now written, and wait two seconds at most; False if it is not. Safe in a signal handler."""
        return self._running and not self.degraded and self._writer.flush(FLUSH_PATIENCE_S)

    def fail(self, where: str, err: BaseException) -> None:
        """Turn the recording off for good: one line in the log, the reason in ``meta["degraded"]``; training goes on."""
        with self._lock:
            self.recorder.enabled = False
            if self.degraded:
                return
            reason = f"{where}: {type(err).__name__}: {err}"
            self.state.set(degraded=reason, degraded_step=self.recorder.context()[0])
        log.warning("mappnb: rank %s: recording stopped (%s); training continues", self.state.rank, reason)
        self._writer.wake()

    def _round(self, last: bool, asked: bool) -> bool:
        """One round of the writer thread, perhaps asked for; returns False once there is nothing more to write."""
        output = self._output
        try:
            joined = not output.closed and self._try_join(last=last)
            if self.degraded and (joined or last):
                output.give_up(broken=False)
            elif joined:
                self._run_deferred()
                output.write(asked=asked)
                if last:
                    output.close()
        except BaseException as err:  # noqa: BLE001 (whatever it is)
            self.fail("writer", err)
            output.give_up(broken=True)
        if last:
            self._note_end()
        return not output.closed

    @guarded
    def _note_end(self) -> None:
        self._output.note_end(self._reason)

    def _signalled(self, numbers: set[int]) -> None:
        """Signals have come; what was recorded has just been written. The main thread may hang, so end for it."""
        for number in filter(signals.deadly, numbers):
            self._reason = f"signal {signals.name_of(number)}"
            self._round(last=True, asked=True)
            signals.die(number)

    def _try_join(self, *, last: bool = False) -> bool:
        """Join the run directory once the rank is known; True when joined."""
        if self._output.run is not None:
            if (found := self.finder.correction()) is not None:
                self.set_rank(*found)
            return True
        place = self.finder.find(training=self._marks.begun, last=last)
        if place is None:
            return False
        self._output.join(self.run_dir, rank=place[0], world_size=place[1], **self._join_options)
        os.environ.setdefault("MAPPNB_EXEC_OWNER", str(os.getpid()))  # helper processes of this one do not record
        return True

    def _run_deferred(self) -> None:
        for _ in range(len(self._deferred)):
            fn = self._deferred.popleft()
            if not fn():
                self._deferred.append(fn)

    def begin_step(self, step: int | None = None) -> None:
        """Open the span of a step, unless one is open; ``step`` overrides the session's own count."""
        if self.recorder.enabled:
            self.finder.look()
            self._marks.begin(step)

    def end_step(self) -> None:
        """Close the span of the step; does nothing while the program itself marks its steps."""
        self._marks.end()

    @guarded
    def mark_step(self, step: int | None = None) -> None:
        """End the step here and begin the next: what :func:`mappnb.step` calls."""
        self.finder.look()
        self._marks.mark(step)

    @guarded
    def enter_step(self, step: int | None = None) -> None:
        """Take the mark as the begin of a ``with``: nothing before it was a step."""
        self._marks.entered(step)

    @guarded
    def close_step(self) -> None:
        """End the step here, and begin none."""
        self._marks.close()

    @guarded
    def step_values(self, /, **values: Any) -> None:
        """Add values (loss, grad_norm, lr, tokens, microbatches, skipped) to the current step, or to the last one that ended."""
        if self.recorder.enabled:
            self._steps.add(**values)

    @guarded
    def metric(
        self, name: str, value: Any, *, microbatch: int = -1, chunk: int = -1, layer: int = -1, index: int = 0
    ) -> None:
        """Keep a number, or a 1-d tensor as numbers with index 0, 1, ...; read on the writer thread."""
        if self.recorder.enabled:
            step = self.recorder.context()[0]
            self._metrics.add((self.recorder.now_ns(), str(name), step, chunk, microbatch, layer), index, value)

    def set_rank(self, rank: int, world_size: int) -> None:
        """Tell rank and world size, where they became known only now."""
        run = self._output.run
        if run is None:
            self.finder.told = (rank, world_size)
        elif (run.rank, run.world_size) != (rank, world_size):
            self.fail(
                "rank",
                CaptureError(
                    f"recording began as rank {run.rank} of {run.world_size}, but the program is rank {rank} of "
                    f"{world_size}; call mappnb.record after init_process_group, or set RANK and WORLD_SIZE"
                ),
            )

    def folder(self, name: str) -> str | None:
        """Return this rank's folder of that name in the run directory, not made; None until the rank has joined the run."""
        run = self._output.run
        return None if run is None else str(run.path / name / RANK_NAME.format(run.rank))

    def defer(self, fn: Callable[[], bool]) -> None:
        """Call ``fn`` on the writer thread until it returns True."""
        self._deferred.append(fn)
