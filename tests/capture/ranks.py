"""Run a function on several gloo ranks of this host, each a fresh process, and collect what they return."""

from __future__ import annotations

import multiprocessing as mp
import os
import pickle
import socket
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["run_ranks"]

_PRELOAD = ["numpy", "torch", "torch.distributed"]


def run_ranks(
    function: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 120.0, preload: tuple[str, ...] = ()
) -> list[Any]:
    """Return what ``function(*args)`` returns on each rank; ``RANK`` and the like are set, nothing is initialised."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload([*_PRELOAD, *preload])
    with tempfile.TemporaryDirectory() as folder:
        port = _free_port()
        processes = [
            context.Process(target=_rank, args=(function, rank, world_size, port, folder, args), daemon=True)
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(timeout_s)
        for process in processes:
            if process.is_alive():
                process.kill()
        return [_result(Path(folder) / str(rank), rank) for rank in range(world_size)]


def _result(path: Path, rank: int) -> Any:
    if not path.exists():
        raise RuntimeError(f"rank {rank} gave no result: it hung or died")
    ok, value = pickle.loads(path.read_bytes())
    if not ok:
        raise RuntimeError(f"rank {rank} failed:\n{value}")
    return value


def _rank(
    function: Callable[..., Any], rank: int, world_size: int, port: int, folder: str, args: tuple[Any, ...]
) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        OMP_NUM_THREADS="1",
    )
    import torch

    torch.set_num_threads(1)
    try:
        outcome = (True, function(*args))
    except BaseException:
        outcome = (False, traceback.format_exc())
    path = Path(folder) / str(rank)
    path.with_suffix(".tmp").write_bytes(pickle.dumps(outcome))
    path.with_suffix(".tmp").rename(path)
    os._exit(0)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
