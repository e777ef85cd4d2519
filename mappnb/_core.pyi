"""Compiled parts of mappnb; each has a pure-Python twin."""

from collections.abc import Callable

import numpy
import numpy.typing


def record_dtype() -> numpy.dtype[numpy.void]:
    """Layout of a record, as compiled."""

class Span:
    """Reusable, re-entrant ``with`` target of one site."""

    @property
    def site(self) -> int:
        """Id of the site that it records."""

    def __enter__(self) -> None:
        """Open a span."""

    def __exit__(self, exc_type: object, exc: object, tb: object, /) -> None:
        """Close it; an exception passes through and sets ``Flag.FAILED``."""

class Recorder:
    """Native core of ``mappnb.capture.recorder.Recorder``."""

    def __init__(self, capacity: int = 65536, cpu_time: bool = False, thread_name: Callable[[], str] | None = None) -> None: ...

    def begin(self, site: int, /) -> int:
        """Open a span of ``site`` in this thread; returns its token."""

    def end(self, token: int = 0, bytes: int = -1, group: int = -1, seq: int = -1, peer: int = -1, flags: int = 0) -> None:
        """Close the span of ``token`` (0: the innermost) and record it."""

    def record(self, site: int, start_ns: int, duration_ns: int, issue_ns: int = -1, cpu_ns: int = -1, bytes: int = -1, seq: int = -1, group: int = -1, peer: int = -1, stream: int = -1, flags: int = 0, depth: int = -1, step: int | None = None, stage: int | None = None, chunk: int | None = None, microbatch: int | None = None) -> None:
        """Add a finished event that was measured elsewhere."""

    def set_context(self, step: int | None = None, stage: int | None = None, chunk: int | None = None, microbatch: int | None = None) -> None:
        """
        Set what is stamped on events begun from now on, in every thread; ``None`` keeps the value.
        """

    def span(self, site: int) -> Span:
        """Make a ``with`` target for ``site``."""

    def context(self) -> tuple[int, int, int, int]:
        """Step, stage, chunk, microbatch as set now."""

    @property
    def enabled(self) -> bool:
        """Whether events are recorded."""

    @enabled.setter
    def enabled(self, arg: bool, /) -> None: ...

    def now_ns(self) -> int:
        """``CLOCK_MONOTONIC`` in ns."""

    def drain(self) -> numpy.typing.NDArray[numpy.void]:
        """Take the finished records of all threads."""

    def open_spans(self) -> numpy.typing.NDArray[numpy.void]:
        """Look at the spans that are open now, in all threads."""

    def threads(self) -> list[tuple[int, int, str]]:
        """Every thread seen: index, native thread id, Python name or ''."""

    def counters(self) -> dict[str, int]:
        """
        ``recorded``, ``dropped``, ``mismatched``, ``too_deep`` and ``threads``.
        """

    def before_fork(self) -> None:
        """Hold the reading side."""

    def after_fork_in_parent(self) -> None:
        """Let go of it in the parent."""

    def after_fork_in_child(self) -> None:
        """Let go of it in the child, and stop recording."""
