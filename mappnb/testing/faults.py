"""Faults for the reference job: a slow rank, and a slow pipeline link."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["burn", "slow_link"]


def burn(duration_s: float, device: torch.device) -> None:
    """Multiply matrices on ``device`` for ``duration_s`` seconds, as a slow or shared processor would take longer.

    Parameters
    ----------
    duration_s : float
        Wall-clock seconds.
    device : torch.device
        The CPU, or a GPU that is kept busy and waited for.
    """
    square = torch.ones(128, 128, device=device)
    end_s = time.perf_counter() + duration_s
    while time.perf_counter() < end_s:
        square @ square
        if device.type == "cuda":
            torch.cuda.synchronize(device)


@contextmanager
def slow_link(src: int, dst: int, delay_s: float) -> Iterator[None]:
    """Make every point-to-point receive of rank ``dst`` from rank ``src`` complete ``delay_s`` seconds late.

    Parameters
    ----------
    src, dst : int
        Global ranks; on ranks other than ``dst`` nothing happens.
    delay_s : float
        Seconds the receiver waits after the message is there.

    Notes
    -----
    Wraps ``ProcessGroup.recv`` and ``Work.wait``, and calls whatever it found there, so it can be combined with other
    wrappers. It is taken off only where it is still the outermost one; otherwise it stays and passes everything
    through. Delays below about 40 ms tend to hide in the pipeline bubble. Meant for gloo: NCCL coalesces receives.
    """
    if dist.get_rank() != dst:
        yield
        return
    from torch._C._distributed_c10d import ProcessGroup, Work

    inner_recv, inner_wait = ProcessGroup.recv, Work.wait
    pending: dict[int, Any] = {}  # the work itself is kept, so that its id is not used again
    active = True

    def recv(group: Any, tensors: Any, peer: int, *args: Any, **kwargs: Any) -> Any:
        work = inner_recv(group, tensors, peer, *args, **kwargs)
        if active and dist.get_global_rank(group, peer) == src:
            pending[id(work)] = work
        return work

    def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
        done = inner_wait(work, *args, **kwargs)
        if pending.pop(id(work), None) is not None:
            time.sleep(delay_s)
        return done

    ProcessGroup.recv, Work.wait = recv, wait  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        active = False
        pending.clear()
        if ProcessGroup.recv is recv:
            ProcessGroup.recv = inner_recv  # type: ignore[method-assign]
        if Work.wait is wait:
            Work.wait = inner_wait  # type: ignore[method-assign]
