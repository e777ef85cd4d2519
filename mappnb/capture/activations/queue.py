"""What waits to be written: bounded by bytes, with a policy for when the writer is behind."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Any

__all__ = ["ByteQueue", "WriterStuckError"]

PATIENCE_S = 60.0
WAKE_BYTES = 4 << 20
MOST_THINNING = 10


class WriterStuckError(TimeoutError):
    """The writer made no progress for a minute: the recording of activations gives up, training goes on."""


class ByteQueue:
    """A queue between the training thread and the writer thread.

    Parameters
    ----------
    limit_bytes : int
        What may wait; a single larger item may when nothing else does.
    policy : str
        ``"block"``: :meth:`put` waits; ``"drop"`` and ``"thin"``: it returns False.

    Attributes
    ----------
    used_bytes : int
        Waiting now, until :meth:`release`.
    waited_s : float
        Time that the training thread has waited.
    closed_s : float
        When it was closed, ``time.monotonic()``.
    """

    def __init__(self, limit_bytes: int, policy: str) -> None:
        self.limit_bytes, self.policy = limit_bytes, policy
        self.used_bytes, self.waited_s = 0, 0.0
        self.thinning = 0
        self.closed_s = 0.0
        self._items: deque[tuple[Any, int]] = deque()
        self._released = 0
        self._unseen = 0  # bytes put since the writer was last woken
        self._waiting = False
        self._changed = threading.Condition()
        self._closed = False

    def put(self, item: Any, num_bytes: int = 0) -> bool:
        """Add an item; returns False if it was not taken. One without bytes always is.

        Raises
        ------
        WriterStuckError
            If the policy is to wait, and the writer released nothing for a minute.
        """
        with self._changed:
            if self._closed:
                return False
            if num_bytes and self.is_full(num_bytes):
                if self.policy != "block":
                    return False
                self._wait(num_bytes)
                if self._closed:
                    return False
            self._items.append((item, num_bytes))
            self.used_bytes += num_bytes
            self._unseen += num_bytes
            if not num_bytes or self._unseen >= min(WAKE_BYTES, self.limit_bytes // 4):
                self._unseen = (
                    0  # a writer woken for every tensor would take Python's lock from the training thread each time
                )
                self._changed.notify_all()
            return True

    def is_full(self, num_bytes: int) -> bool:
        """Return whether so many bytes more would be too many."""
        return self.used_bytes > 0 and self.used_bytes + num_bytes > self.limit_bytes

    def _wait(self, num_bytes: int) -> None:
        begin, self._waiting = time.monotonic(), True
        self._changed.notify_all()
        while self.is_full(num_bytes) and not self._closed:
            before = self._released
            if not self._changed.wait(PATIENCE_S) and self._released == before:
                raise WriterStuckError(
                    f"the writer released none of {self.used_bytes} bytes in {PATIENCE_S:g} s; is the run directory's disk stuck?"
                )
        self.waited_s += time.monotonic() - begin
        self._waiting = False

    def get(self, timeout_s: float) -> tuple[Any, int] | None:
        """Return the next item and its bytes, or None if none came in time or the queue is closed and empty."""
        with self._changed:
            if not self._items and not self._closed:
                self._changed.wait(timeout_s)
            return self._items.popleft() if self._items else None

    def release(self, num_bytes: int) -> None:
        """Tell that an item is written."""
        with self._changed:
            self.used_bytes -= num_bytes
            self._released += num_bytes
            if self._waiting:
                self._changed.notify_all()

    def skips(self, ordinal: int) -> bool:
        """Return whether to leave a microbatch out, by its number: under ``"thin"`` every second, or three of four, ... are.

        Over half full, the number of microbatches that are captured is halved; below an eighth it is doubled again.
        """
        if self.policy != "thin":
            return False
        if self.used_bytes * 2 > self.limit_bytes:
            self.thinning = min(self.thinning + 1, MOST_THINNING)
        elif self.used_bytes * 8 < self.limit_bytes and self.thinning:
            self.thinning -= 1
        return ordinal % (1 << self.thinning) != 0

    @property
    def closed(self) -> bool:
        """True once :meth:`close` was called."""
        return self._closed

    def close(self, *, discard: bool = False) -> None:
        """Take no more items; those that wait can still be got, unless they are discarded."""
        with self._changed:
            if not self._closed:
                self.closed_s = time.monotonic()
            self._closed = True
            if discard:
                self._items.clear()
                self.used_bytes = 0
            self._changed.notify_all()
