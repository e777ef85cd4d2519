"""Run a function on several gloo ranks of this host, each a fresh process, and collect what they return."""

from __future__ import annotations

import faulthandler
import importlib.util
import multiprocessing as mp
import os
import pickle
import socket
import sys
import tempfile
import time
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
    where = (function.__code__.co_filename, function.__name__)
    context = mp.get_context("forkserver")
    context.set_forkserver_preload([*_PRELOAD, *preload])
    with tempfile.TemporaryDirectory() as folder:
        port = _free_port()
        processes = [
            context.Process(target=_rank, args=(where, rank, world_size, port, folder, timeout_s, args), daemon=True)
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        end_s = time.monotonic() + timeout_s
        for process in processes:
            process.join(max(0.0, end_s - time.monotonic()))
        for process in processes:
            if process.is_alive():
                process.kill()
        return [_result(Path(folder) / str(rank), rank) for rank in range(world_size)]


def _result(path: Path, rank: int) -> Any:
    if not path.exists():
        stacks = path.with_name(f"{rank}.stacks")
        where = stacks.read_text() if stacks.exists() else ""
        raise RuntimeError(f"rank {rank} gave no result: it hung or died\n{where}")
    ok, value = pickle.loads(path.read_bytes())
    if not ok:
        raise RuntimeError(f"rank {rank} failed:\n{value}")
    return value


def _load(where: tuple[str, str]) -> Callable[..., Any]:
    """The function, from its file: pytest's names of test modules mean nothing in another process."""
    file, name = where
    tests = str(Path(__file__).parents[1])
    if tests not in sys.path:
        sys.path.insert(0, tests)
    spec = importlib.util.spec_from_file_location(f"job_{Path(file).stem}", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)


def _rank(
    where: tuple[str, str], rank: int, world_size: int, port: int, folder: str, timeout_s: float, args: tuple[Any, ...]
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
    stacks = open(Path(folder) / f"{rank}.stacks", "w")  # noqa: SIM115 (open until the end)
    faulthandler.dump_traceback_later(timeout_s - 5.0, file=stacks)
    try:
        outcome = (True, _load(where)(*args))
    except BaseException:  # noqa: BLE001 (told to the parent, whatever it is)
        outcome = (False, traceback.format_exc())
    path = Path(folder) / str(rank)
    path.with_suffix(".tmp").write_bytes(pickle.dumps(outcome))
    path.with_suffix(".tmp").rename(path)
    os._exit(0)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
