"""Start all ranks of one job from one process that has loaded torch and megatron-core already.

`mappnb.testing.launcher` runs this file on CPU hosts: the imports, some seconds of CPU per process, are then done once
instead of once per rank. It talks to the launcher through files in one folder.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import time
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from mappnb.testing import gpt
from mappnb.testing.interrupt import LAUNCHER_PID, die_with_parent
from mappnb.testing.megatron_cpu import megatron_on_cpu
from mappnb.testing.rank_files import RankFiles, rank_environment

__all__ = ["main"]

OURS = "mappnb.testing."
PRELOAD = (
    OURS + "gpt_train",
    OURS + "gpt_model",
    OURS + "gpt_data",
    "megatron.core.pipeline_parallel.schedules",
    "pydoc_data.topics",
    "torch._dynamo",  # the first optimizer would import it: two seconds
)


def main(argv: Sequence[str] | None = None) -> int:
    """Load everything, fork the ranks, note how each of them ends.

    Parameters
    ----------
    argv : sequence of str, optional
        Default ``sys.argv[1:]``.

    Returns
    -------
    int
        0; the ranks' own exit statuses are in the folder.
    """
    started_s = time.time()
    parser = argparse.ArgumentParser(prog="python -m mappnb.testing.fork_ranks", description=__doc__)
    parser.add_argument("--settings-json", required=True)
    parser.add_argument("--folder", required=True)
    parser.add_argument("--world-size", type=int, required=True)
    parser.add_argument("--port", type=int, required=True)
    flags = parser.parse_args(argv)
    if LAUNCHER_PID in os.environ:
        die_with_parent(int(os.environ[LAUNCHER_PID]))
    _preload()
    files = RankFiles(Path(flags.folder))
    os.environ[LAUNCHER_PID] = str(os.getpid())
    ranks: dict[int, int] = {}
    for rank in range(flags.world_size):
        os.environ.update(rank_environment(rank, flags.world_size, flags.port))
        pid = os.fork()
        if pid == 0:
            _run_rank(files, rank, flags.settings_json, started_s)
        ranks[pid] = rank
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher sends it to the ranks, which then end
    _write(files.path("pids"), json.dumps({rank: pid for pid, rank in ranks.items()}))
    while ranks:
        pid, status = os.wait()
        _write(files.path("exit", ranks.pop(pid)), str(os.waitstatus_to_exitcode(status)))
    return 0


def _preload() -> None:
    """Import what a rank needs, with megatron-core patched for the CPU."""
    with warnings.catch_warnings():
        gpt.quiet_megatron()
        megatron_on_cpu(force=True)
        for name in PRELOAD:
            importlib.import_module(name)
    warnings.filterwarnings("ignore", category=DeprecationWarning, message=".*fork")


def _run_rank(files: RankFiles, rank: int, settings_json: str, started_s: float) -> NoReturn:
    """Become rank ``rank``, in a session of its own."""
    status = 1
    try:
        os.setsid()
        for name, stream in (("stdout", 1), ("stderr", 2)):
            target = os.open(files.path(name, rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.dup2(target, stream)
            os.close(target)
        status = gpt.main(files.rank_arguments(rank, settings_json), started_s=started_s)
    except BaseException:  # noqa: BLE001  # the end of this process: everything is printed
        traceback.print_exc()
    gpt.exit_now(status)


def _write(path: Path, text: str) -> None:
    """Write ``text`` so that nobody reads half of it."""
    path.with_suffix(".tmp").write_text(text)
    path.with_suffix(".tmp").rename(path)


if __name__ == "__main__":
    gpt.exit_now(main())
