"""Where one step ends and the next begins: told by probes, or by the program itself."""

from __future__ import annotations

import time

from mappnb.capture.recorder import Recorder
from mappnb.capture.steps import StepRow, StepTable
from mappnb.terms import Category, Flag, Op

__all__ = ["StepMarks"]

AT_ONCE_NS, AT_ONCE_CPU_NS = 10_000_000, 1_000_000


class StepMarks:
    """Numbers the steps, opens and closes their spans, and makes their rows.

    Parameters
    ----------
    recorder, table
        Get the spans and the rows.
    start_step : int
        Number of the first step.

    Attributes
    ----------
    begun : bool
        A step has begun: this process trains.
    explicit : bool
        The program marks its steps; probes no longer do.
    cut : bool
        Recording was off for a part of the current step: it becomes no row.

    Notes
    -----
    A plain call may stand at the loop's end or at its start. If a probe has seen the step begin, the first call ends
    it. A program that has not loaded torch shows no probe anything: its first step begins with the recording, unless
    the first call comes at once, names the first step's number, or is a context manager.
    """

    def __init__(self, recorder: Recorder, table: StepTable, *, start_step: int) -> None:
        self.recorder, self.table = recorder, table
        self.begun = self.explicit = self.cut = False
        self._site = recorder.site(category=Category.MARK, op=Op.ITERATION)
        self._next, self._number, self._token = start_step, -1, 0
        self._blind = self._at_start = False
        self._began = (0, 0)
        self._first: StepRow | None = None  # the step before the first mark, until it is certain that it is one
        self._told_end_ns = -1

    def start(self, *, blind: bool) -> None:
        """Begin; ``blind`` says that no probe can see where steps begin."""
        self._blind = blind
        self._began = (self.recorder.now_ns(), time.thread_time_ns())
        if blind:
            self.recorder.set_context(self._next, -1, -1, -1)

    def number_next(self, step: int) -> None:
        """Say the number of the next step to begin."""
        self._next = int(step)

    # ------------------------------------------------------------------------------------------- told by probes
    def begin(self, step: int | None = None) -> None:
        """Begin a step, unless one is open or the program marks its steps."""
        if not self._token and not self.explicit:
            self._open(step)

    def end(self) -> None:
        """End the step; while the program marks its steps, only remember when."""
        if self.explicit:
            self._told_end_ns = self.recorder.now_ns()
        else:
            self.close()

    # ------------------------------------------------------------------------------------------ told by the program
    def mark(self, step: int | None = None) -> None:
        """One step ends here and the next begins."""
        if self.explicit:
            self.settle()
            self.close()
        else:
            self.explicit = True
            self._end_before_first_mark(step)
        self._open(step)

    def entered(self, step: int | None = None) -> None:
        """Take the mark as a context manager: nothing before it was a step."""
        if self._first is None:
            return
        self._next, self._first = self._first.step, None
        self._forget_span()
        self.table.cancel()
        self._open(step)

    def close(self, *, keep: bool = True) -> None:
        """Close the span of the step; ``keep=False`` writes no row for it."""
        self.settle()
        token, self._token = self._token, 0
        if not token:
            return
        keep = keep and not self.cut
        self.recorder.set_context(None, -1, -1, -1)
        self.recorder.end(token, flags=0 if keep else int(Flag.CLIPPED))
        if keep:
            self.table.end(self.recorder.now_ns())
        else:
            self.table.cancel()

    def stop(self, *, clean: bool) -> None:
        """End, in this thread: an unfinished step becomes no row, the last one of a loop marked at its start does."""
        self.settle()
        if not self._token:
            return
        end_ns = self.recorder.now_ns() if self._blind and self._at_start else self._told_end_ns
        if clean and self.explicit and not self.cut and end_ns >= 0:
            self.recorder.end(self._token)
            self._token = 0
            self.table.end(end_ns)
        else:
            self.close(keep=False)

    def settle(self) -> None:
        """Give the step before the first mark its row and its span."""
        row, self._first = self._first, None
        if row is not None and self.recorder.enabled:
            self.table.put(row)
            self.recorder.record(
                self._site,
                row.start_ns,
                row.end_ns - row.start_ns,
                depth=0,
                step=row.step,
                stage=-1,
                chunk=-1,
                microbatch=-1,
            )

    # ------------------------------------------------------------------------------------------------------ inside
    def _open(self, step: int | None) -> None:
        number = self._next if step is None else int(step)
        self._next = number + 1
        self.begun, self.cut, self._told_end_ns = True, False, -1
        if not self.recorder.enabled:
            return
        self._number = number
        self.recorder.set_context(number, -1, -1, -1)
        self.table.begin(number, self.recorder.now_ns())
        self._token = self.recorder.begin(self._site)

    def _end_before_first_mark(self, step: int | None) -> None:
        """Hold back the step that a probe, or the start of the recording, began."""
        now_ns = self.recorder.now_ns()
        if self._token:
            self._forget_span()
            self._first = self.table.detach(now_ns) if not self.cut else None
            if self.cut:
                self.table.cancel()
        elif self._blind and (step == self._next + 1 if step is not None else not self._at_once(now_ns)):
            self.table.begin(self._next, self._began[0], early=True)
            self._first = self.table.detach(now_ns)
            self._next += 1
        else:
            self._at_start = True

    def _at_once(self, now_ns: int) -> bool:
        """Return True if the program has done nothing since the recording began."""
        began_ns, began_cpu_ns = self._began
        return now_ns - began_ns < AT_ONCE_NS and time.thread_time_ns() - began_cpu_ns < AT_ONCE_CPU_NS

    def _forget_span(self) -> None:
        """End the span without an event: it is recorded only if the recorder is on at its end."""
        token, self._token = self._token, 0
        enabled = self.recorder.enabled
        self.recorder.enabled = False
        self.recorder.end(token)
        self.recorder.enabled = enabled
