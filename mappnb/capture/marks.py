"""mappnb.step() and mappnb.span(): what a program may say itself; both do nothing without a recording."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from mappnb.errors import CaptureError

if TYPE_CHECKING:
    from mappnb.capture.session import Session

__all__ = ["current", "enter", "leave", "span", "step"]

log = logging.getLogger("mappnb")
_current: Session | None = None


def enter(session: Session) -> None:
    """Make a session the recording of this process.

    Raises
    ------
    CaptureError
        If there is one already.
    """
    global _current  # noqa: PLW0603 (one recording a process: mappnb.step() finds it here)
    if _current is not None and _current.finder.automatic and _current is not session:
        log.warning("mappnb: the program calls mappnb.record itself; the recording of 'mappnb exec' gives way to it")
        _current.stop("gave way to mappnb.record")
    if _current is not None:
        raise CaptureError(
            f"mappnb.record: this process records into {_current.run_dir} already; end that recording first, or use one for both"
        )
    _current = session


def leave(session: Session) -> None:
    """Let go of a session that :func:`enter` took."""
    global _current  # noqa: PLW0603
    if _current is session:
        _current = None


def current() -> Session | None:
    """Return the recording of this process, or None."""
    return _current


class _Step:
    """What :func:`step` returns: as a context manager it marks the end of the step too."""

    __slots__ = ("_step",)

    def __init__(self, step: int | None) -> None:
        self._step = step

    def __enter__(self) -> None:
        if _current is not None:
            _current.enter_step(self._step)

    def __exit__(self, *_: object) -> None:
        if _current is not None:
            _current.close_step()


def step(step: int | None = None) -> _Step:
    """Mark the border between two steps of a plain training loop: one ends here, the next begins.

    Parameters
    ----------
    step : int, optional
        Number of the step that begins, so ``i + 1`` at the end of iteration ``i``; counted from ``start_step`` otherwise.

    Returns
    -------
    context manager
        ``with mappnb.step(): ...`` marks the end as well; as a plain call at the end of each iteration, as
        ``torch.profiler``'s ``step()``, what follows belongs to the next step.

    Notes
    -----
    Without a recording it does nothing. Megatron-core programs, and torch programs with one optimizer, need no marks.
    At the loop's start the plain call works too. What comes after the last iteration is no step.
    """
    if _current is not None:
        _current.mark_step(step)
    return _Step(step)


class _NoSpan:
    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        return None


def span(name: str, *, category: str = "host", op: str = "span") -> Any:
    """Return a ``with`` target that records the enclosed code under your name; nothing is recorded without a recording.

    Keep the returned object and use it often: entering it costs about 0.2 µs, making it about 1 µs.
    """
    if _current is None:
        return _NoSpan()
    return _current.recorder.span(category=category, op=op, name=name)
