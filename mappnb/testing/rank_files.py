"""Where the ranks of a launched job leave their output, and the environment each of them gets."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

__all__ = ["RankFiles", "rank_environment", "tail"]

PACKAGE_ROOT: Final = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class RankFiles:
    """The files of one launched job.

    Attributes
    ----------
    folder : Path
        A temporary folder, gone when the job is.
    """

    folder: Path

    def path(self, kind: str, rank: int = 0) -> Path:
        """Return the file of one kind (stdout, stderr, failure, exit, result, pids) and rank."""
        return self.folder / f"{kind}-{rank:05d}"

    def rank_arguments(self, rank: int, settings_json: str) -> list[str]:
        """Return the arguments of ``mappnb.testing.gpt`` for one rank."""
        result, failure = self.path("result"), self.path("failure", rank)
        return ["--settings-json", settings_json, "--result", str(result), "--failure", str(failure)]


def rank_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """Return what to add to a rank's environment: as torchrun sets it, one thread each, and this same mappnb.

    Parameters
    ----------
    rank, world_size : int
        Global rank; number of ranks, all on this host.
    port : int
        Where rank 0 keeps the store.

    Returns
    -------
    dict of str
        Variables by name.
    """
    path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    root = str(PACKAGE_ROOT)
    added = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, path if root in path else [root, *path])),
    }
    if sys.platform.startswith("linux"):
        added["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")  # the host's name need not resolve
    return added


def tail(path: Path, *, lines: int) -> str:
    """Return the last lines of a text file of any size; a missing file has none.

    Parameters
    ----------
    path : Path
        The file.
    lines : int
        How many.

    Returns
    -------
    str
        Without the final newline.
    """
    if not path.exists():
        return ""
    with path.open("rb") as stream:
        stream.seek(max(0, path.stat().st_size - 100_000))
        text = stream.read().decode(errors="replace")
    return "\n".join(text.splitlines()[-lines:])
