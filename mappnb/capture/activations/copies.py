"""Copies of captured tensors: into memory that is used again, pinned and on a side stream where they come from a GPU."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Copies"]


class Copies:
    """Makes copies in the hook, and takes their memory back once they are written.

    Parameters
    ----------
    limit_bytes : int
        Memory that is kept for use again.

    Notes
    -----
    Fresh memory costs more than the copy: the system hands it out page by page. On a GPU the copy waits on a side stream for the
    tensor, and the training stream waits for nothing; the writer waits for its event. Untested on GPU.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes, self._kept_bytes = limit_bytes, 0
        self._free: dict[tuple[Any, Any, bool], list[Tensor]] = {}
        self._lock = threading.Lock()
        self._streams: dict[Any, Any] = {}

    def copy(self, tensor: Tensor) -> tuple[Tensor, Any]:
        """Return a contiguous copy in main memory, and the event after which it is there (None: it is)."""
        out = self._take(tensor)
        if tensor.device.type != "cuda":
            out.copy_(tensor)
            return out, None
        import torch

        stream = self._side_stream(tensor.device)
        stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(stream):
            out.copy_(tensor, non_blocking=True)
            event = torch.cuda.Event()
            event.record(stream)
        tensor.record_stream(stream)
        return out, event

    def _side_stream(self, device: Any) -> Any:
        import torch

        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]

    def _take(self, tensor: Tensor) -> Tensor:
        """Return memory for a tensor, of its shape and dtype: views of bytes would cost as much as a small copy."""
        import torch

        pinned = tensor.is_cuda
        with self._lock:
            free = self._free.get((tensor.dtype, tensor.shape, pinned))
            kept = free.pop() if free else None
            if kept is not None:
                self._kept_bytes -= kept.numel() * kept.element_size()
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned) if kept is None else kept

    def give_back(self, copy: Tensor) -> None:
        """Take the memory of a copy that is written; nobody may look at it any more."""
        size = copy.numel() * copy.element_size()
        key = (copy.dtype, copy.shape, bool(self._streams) and copy.is_pinned())
        with self._lock:
            if (
                self._kept_bytes + size > self._limit_bytes
            ):  # sizes have changed: what is kept may never be asked for again
                self._free.clear()
                self._kept_bytes = 0
            if size <= self._limit_bytes:
                self._free.setdefault(key, []).append(copy)
                self._kept_bytes += size
