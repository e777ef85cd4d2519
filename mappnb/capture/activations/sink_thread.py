"""The thread that writes captured tensors."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mappnb.capture.activations.block_files import BlockFiles
from mappnb.capture.activations.copies import Copies
from mappnb.capture.activations.pieces import Piece, StatsOfStep, WeightPiece
from mappnb.capture.activations.plan import CapturePlan
from mappnb.capture.activations.queue import ByteQueue

__all__ = ["SinkThread", "written"]

_ROUND_S = 0.5
_FOLDER_PATIENCE_S = 5.0  # a short program ends before its rank has joined the run


def written(files: BlockFiles | None) -> dict[str, int]:
    """Return what was written so far."""
    found = (files.bytes, files.raw_bytes, files.blocks) if files else (0, 0, 0)
    return dict(zip(("written_bytes", "raw_bytes", "blocks"), found, strict=True))


class SinkThread:
    """Takes what is queued and writes it as blocks, until the queue is closed and empty.

    Parameters
    ----------
    plan, meta, folder, tell, join_s
        As for `ActivationSink`.
    queue, copies
        What waits, and whose memory is given back once it is written.
    fail : callable
        Turns the sink off.
    counts : callable
        Returns what was left out so far, for the log.

    Attributes
    ----------
    files : BlockFiles or None
        None until the folder is known.
    """

    def __init__(
        self,
        plan: CapturePlan,
        meta: Mapping[str, Any],
        folder: Callable[[], str | Path | None],
        queue: ByteQueue,
        copies: Copies,
        *,
        fail: Callable[[str, BaseException], object],
        counts: Callable[[], dict[str, Any]],
        tell: Callable[..., object] | None,
        join_s: float,
    ) -> None:
        self._plan, self._meta, self._folder = plan, meta, folder
        self._queue, self._copies, self._fail = queue, copies, fail
        self._counts, self._tell, self._join_s = counts, tell, join_s
        self.files: BlockFiles | None = None
        self._told = 0
        self._in_step = False
        self._thread = threading.Thread(target=self._run, name="mappnb-activations", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while True:
                got = self._queue.get(_ROUND_S)
                if got is not None:
                    self._write(*got)
                elif self._queue.closed:
                    break
                elif self.files is not None and self.files.is_old and not self._in_step:
                    self._commit()
            self._commit(last=True)
        except BaseException as err:  # noqa: BLE001 (whatever it is, it must be told)
            if self.files is not None:
                self.files.abort()
            self._fail("writer of activations", err)

    def _write(self, item: Any, num_bytes: int) -> None:
        try:
            files = self._open()
            if files is None:
                return
            self._in_step = not isinstance(item, tuple)
            if isinstance(item, Piece):
                files.add(item)
            elif isinstance(item, StatsOfStep):
                files.add_stats(item)
            elif isinstance(item, WeightPiece):
                files.add_weight(item)
            elif files.is_due:
                self._commit()
        finally:
            self._queue.release(num_bytes)

    def _open(self) -> BlockFiles | None:
        """Return where to write, once the folder is known; None if the recording ends before."""
        while self.files is None:
            folder = self._folder()
            if folder is not None:
                self.files = BlockFiles(
                    Path(folder), self._attrs, join_s=self._join_s, give_back=self._copies.give_back
                )
            elif self._queue.closed and time.monotonic() - self._queue.closed_s > _FOLDER_PATIENCE_S:
                return None
            else:
                time.sleep(0.02)
        return self.files

    def _attrs(self, number: int) -> dict[str, Any]:
        """Return the attributes of a block. A list of token texts is long: only the first block of rank 0 has it."""
        plan = self._plan.to_dict()
        meta = {k: self._meta.get(k) for k in ("rank", "coords", "layout", "model")}
        if isinstance(plan["vocabulary"], list) and (number or meta["rank"]):
            del plan["vocabulary"]
        return {**meta, "plan": plan}

    def _commit(self, *, last: bool = False) -> None:
        """Close the block that is open; tell of a new one, and of everything at the end."""
        files, counts = self.files, self._counts()
        if files is not None:
            files.commit(dropped=counts["dropped"], thinned=counts["thinned"])
        blocks = files.blocks if files else 0
        if self._tell is not None and (last or blocks > self._told):
            self._told = blocks
            self._tell(**written(files), **self._counts())

    def end(self, timeout_s: float) -> bool:
        """Wait until all is written; False if it is not in time."""
        if threading.get_ident() != self._thread.ident:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()
