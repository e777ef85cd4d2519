"""Who am I: rank, world size, what this launch of the job is called, host and versions. No collective, no barrier."""

from __future__ import annotations

import os
import platform
import socket
import sys
import uuid
from functools import lru_cache
from importlib import metadata
from typing import Any

__all__ = ["host_info", "launch_of", "rank_in_group", "rank_of", "versions"]

RANK_VARIABLES: tuple[tuple[str, str], ...] = (
    ("RANK", "WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_NTASKS"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
)
"""Environment variables in which launchers pass rank and world size, the first that is set wins."""

_JOB_VARIABLES = ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "JOB_ID", "MAPPNB_JOB")
_LAUNCH_VARIABLES = (
    "TORCHELASTIC_RESTART_COUNT",
    "SLURM_RESTART_COUNT",
    "SLURM_STEP_ID",
    "MASTER_ADDR",
    "MASTER_PORT",
    "MAPPNB_LAUNCH",
)


def _torch_distributed() -> Any | None:
    """``torch.distributed`` if the program has imported and initialised it."""
    dist = sys.modules.get("torch.distributed")
    try:
        return dist if dist is not None and dist.is_available() and dist.is_initialized() else None
    except AttributeError:  # half imported
        return None


def rank_in_group() -> tuple[int, int] | None:
    """Return (rank, world_size) from torch.distributed; None while the program has not initialised it."""
    if (dist := _torch_distributed()) is None:
        return None
    try:
        return int(dist.get_rank()), int(dist.get_world_size())
    except (RuntimeError, ValueError):  # destroyed meanwhile by the training thread
        return None


def rank_of() -> tuple[int, int] | None:
    """Return (rank, world_size) from torch.distributed or the launcher's environment; None if neither tells."""
    if (found := rank_in_group()) is not None:
        return found
    for rank, size in RANK_VARIABLES:
        if os.environ.get(rank, "").isdigit() and os.environ.get(size, "").isdigit():
            return int(os.environ[rank]), int(os.environ[size])
    return None


def launch_of() -> dict[str, str]:
    """Return what the ranks of this launch share and no other launch has.

    ``job`` names the job over its restarts, where a scheduler or elastic launcher gives it a name. ``id`` is a value that the
    ranks agree on through the rendezvous store (a key-value look-up, not a collective), where there is one.
    """
    out = {v: os.environ[v] for v in _LAUNCH_VARIABLES if v in os.environ}
    jobs = [f"{v}={os.environ[v]}" for v in _JOB_VARIABLES if os.environ.get(v, "none") not in ("", "none")]
    if jobs:
        out["job"] = ";".join(jobs)
    if (agreed := _agreed_id()) is not None:
        out["id"] = agreed
    return out


def _agreed_id() -> str | None:
    dist = _torch_distributed()
    if dist is None or dist.get_world_size() == 1:
        return None
    try:
        store = dist.distributed_c10d._get_default_store()
        return bytes(store.compare_set("mappnb/launch", "", uuid.uuid4().hex)).decode()
    except (AttributeError, RuntimeError, ValueError):  # a backend without such a store: the environment must do
        return None


def versions() -> dict[str, str]:
    """Return the versions of what matters to a reader of the run; packages that are not loaded are left out."""
    packages = (("mappnb", "mappnb"), ("torch", "torch"), ("megatron-core", "megatron.core"))
    return {"python": platform.python_version(), **{p: _version(p, m) for p, m in packages if m in sys.modules}}


@lru_cache
def _version(package: str, module: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return str(getattr(sys.modules[module], "__version__", "unknown"))


def host_info() -> dict[str, Any]:
    """Return host, process id and device of this rank."""
    device = "cpu"
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "cuda") and torch.cuda.is_initialized():
        device = f"cuda:{torch.cuda.current_device()} {torch.cuda.get_device_name()}"
    return {"host": socket.gethostname(), "pid": os.getpid(), "device": device, "num_cpus": os.cpu_count()}
