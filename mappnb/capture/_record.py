"""The record that capture writes for each event: its binary layout, and the calls that both recorders share."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from mappnb.terms import Flag

__all__ = ["DEFAULT_CAPACITY", "MAX_DEPTH", "RECORD_DTYPE", "Flag", "RecorderCore", "SpanLike", "thread_name"]

RECORD_DTYPE: Final[np.dtype[np.void]] = np.dtype(
    [
        ("start_ns", "i8"),
        ("duration_ns", "i8"),
        ("issue_ns", "i8"),
        ("cpu_ns", "i8"),
        ("bytes", "i8"),
        ("seq", "i8"),
        ("group", "i8"),
        ("site", "i4"),
        ("step", "i4"),
        ("peer", "i4"),
        ("stage", "i2"),
        ("chunk", "i2"),
        ("microbatch", "i4"),
        ("depth", "i2"),
        ("flags", "u2"),
        ("thread", "i4"),
        ("stream", "i4"),
    ]
)
"""One recorded event, 88 bytes, native byte order; -1 = not applicable; times on ``CLOCK_MONOTONIC``."""

DEFAULT_CAPACITY: Final = 65536
"""Records that each thread keeps between two drains; the oldest are dropped (and counted) beyond it."""

MAX_DEPTH: Final = 256
"""Spans that may be open at once in one thread; deeper ones are counted in ``too_deep`` and not recorded."""


class SpanLike(Protocol):
    """A reusable, re-entrant ``with`` target that records the enclosed code as one event of its site."""

    @property
    def site(self) -> int:
        """Id of the site that it records."""
        ...

    def __enter__(self) -> None:
        """Open a span."""
        ...

    def __exit__(self, exc_type: object, exc: object, tb: object, /) -> None:
        """Close it; an exception passes through and sets ``Flag.FAILED``."""
        ...


class BeginCall(Protocol):
    """Type of :attr:`Recorder.begin`."""

    def __call__(self, site: int, /) -> int:
        """Open a span of ``site`` in this thread; returns its token."""
        ...


class EndCall(Protocol):
    """Type of :attr:`Recorder.end`."""

    def __call__(
        self, token: int = 0, bytes: int = -1, group: int = -1, seq: int = -1, peer: int = -1, flags: int = 0
    ) -> None:
        """Close the span of ``token`` (0: the innermost) and record it."""
        ...


class RecordCall(Protocol):
    """Type of :attr:`Recorder.record`."""

    def __call__(  # noqa: PLR0917 - the fields of a record
        self,
        site: int,
        start_ns: int,
        duration_ns: int,
        issue_ns: int = -1,
        cpu_ns: int = -1,
        bytes: int = -1,
        seq: int = -1,
        group: int = -1,
        peer: int = -1,
        stream: int = -1,
        flags: int = 0,
        depth: int = -1,
        step: int | None = None,
        stage: int | None = None,
        chunk: int | None = None,
        microbatch: int | None = None,
    ) -> None:
        """Add a finished event that was measured elsewhere."""
        ...


class ContextCall(Protocol):
    """Type of :attr:`Recorder.set_context`."""

    def __call__(
        self, step: int | None = None, stage: int | None = None, chunk: int | None = None, microbatch: int | None = None
    ) -> None:
        """Set what is stamped on events begun from now on, in every thread; ``None`` keeps the value."""
        ...


class RecorderCore(Protocol):
    """What the native ``mappnb._core.Recorder`` and its twin ``PyRecorder`` both offer."""

    enabled: bool

    @property
    def begin(self) -> BeginCall:
        """Open a span."""
        ...

    @property
    def end(self) -> EndCall:
        """Close a span."""
        ...

    @property
    def record(self) -> RecordCall:
        """Add a finished event."""
        ...

    @property
    def set_context(self) -> ContextCall:
        """Set the process-wide context."""
        ...

    def context(self) -> tuple[int, int, int, int]:
        """Return step, stage, chunk, microbatch as set now."""
        ...

    def span(self, site: int, /) -> SpanLike:
        """Make a ``with`` target for ``site``."""
        ...

    def drain(self) -> NDArray[np.void]:
        """Take the finished records of all threads."""
        ...

    def open_spans(self) -> NDArray[np.void]:
        """Look at the spans that are open now, in all threads."""
        ...

    def now_ns(self) -> int:
        """Time of the recorder's clock, in ns."""
        ...

    def threads(self) -> list[tuple[int, int, str]]:
        """Every thread seen: index, native thread id, Python name or ''."""
        ...

    def counters(self) -> dict[str, int]:
        """Count ``recorded``, ``dropped``, ``mismatched``, ``too_deep`` and ``threads``."""
        ...

    def before_fork(self) -> None:
        """Hold what a child must not find half-done."""
        ...

    def after_fork_in_parent(self) -> None:
        """Let go of it in the parent."""
        ...

    def after_fork_in_child(self) -> None:
        """Let go of it in the child, where recording stops."""
        ...

    def _set_test_clock(self, ns: int | None, /) -> None: ...


MakeCore = Callable[..., RecorderCore]


def thread_name() -> str:
    """Name that Python gives to the calling thread, or '' for a thread that Python did not start.

    Notes
    -----
    ``threading.current_thread()`` would register a dummy thread for good, and ``threading.enumerate()`` takes a lock
    that the caller may hold already; recording must do neither.
    """
    active: dict[int, Any] = getattr(threading, "_active", {})
    thread = active.get(threading.get_ident())
    return str(thread.name) if thread is not None else ""
