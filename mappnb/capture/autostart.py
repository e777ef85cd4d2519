"""Starts a recording in a process that ``mappnb exec`` has prepared, as soon as the process turns out to train."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

__all__ = ["arm", "is_launcher"]

_LAUNCHERS = ("torchrun", "torch.distributed.run", "torch.distributed.launch", "accelerate", "deepspeed", "mpirun", "srun", "pip")


def is_launcher(argv: Sequence[str]) -> bool:
    """Return True for the command line of a program that starts training processes but does not train."""
    words = [os.path.basename(w) for w in argv[:4]] + list(argv[:4])
    modules = [argv[i + 1] for i, w in enumerate(argv[:-1]) if w == "-m"][:1]
    return any(w in _LAUNCHERS for w in words + modules) or any(m.startswith(("torch.distributed", "mappnb", "pip")) for m in modules)


def arm() -> None:
    """Start recording when this process imports torch, unless it is a launcher, a data worker or another helper process."""
    owner = os.environ.get("MAPPNB_EXEC_OWNER")
    if (owner and owner != str(os.getpid())) or is_launcher(sys.orig_argv[1:] if len(sys.orig_argv) > 1 else sys.orig_argv):
        return
    if is_launcher(sys.orig_argv) or "--multiprocessing-fork" in sys.orig_argv and _is_helper():
        return
    if "torch" in sys.modules:
        _begin()
    else:
        sys.meta_path.insert(0, _AfterTorch())


def _is_helper() -> bool:
    """True for resource trackers and fork servers of multiprocessing, which run no code of the program."""
    return any("resource_tracker" in w or "forkserver" in w for w in sys.orig_argv)


class _AfterTorch(importlib.abc.MetaPathFinder):
    """Lets torch be imported by whoever finds it, then begins to record."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("torch")
        if spec is None or spec.loader is None:
            return None
        loader: Any = spec.loader
        run = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            _begin()

        loader.exec_module = exec_module
        return spec


def _begin() -> None:
    from mappnb.capture.session import record

    try:
        session = record(
            os.environ["MAPPNB_RUN_DIR"],
            plan=os.environ.get("MAPPNB_PLAN", "default"),
            resume=os.environ.get("MAPPNB_EXEC") == "resume",
        )
        session.wait_for_events = True
        session.start()
    except Exception as err:  # noqa: BLE001 (a program must run whatever is wrong with us; exec has checked the plan)
        print(f"mappnb: not recording: {err}", file=sys.stderr)
        if os.environ.get("RANK", "0") == "0" and "holds" in str(err):
            raise SystemExit(2) from err  # a run directory that is taken: say so before step 0, and do not train for nothing
