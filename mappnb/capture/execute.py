"""``mappnb exec -- python train.py``: record a program without a change to its code."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from mappnb.capture.points import parse_plan
from mappnb.errors import CaptureError

__all__ = ["environment", "execute"]

SITE = Path(__file__).parent / "_site"


def environment(*, run_dir: str, plan: str, resume: bool) -> dict[str, str]:
    """Return the environment in which Python processes record by themselves.

    A folder with a ``sitecustomize`` module is put first on ``PYTHONPATH``; it starts the recording in training processes (not in
    launchers or data workers) and then runs the ``sitecustomize`` that it hides, if there is one.
    """
    env = dict(os.environ)
    env["PYTHONPATH"] = os.pathsep.join([str(SITE), *filter(None, [env.get("PYTHONPATH")])])
    env["MAPPNB_RUN_DIR"], env["MAPPNB_PLAN"] = os.path.abspath(run_dir), plan
    env["MAPPNB_EXEC"] = "resume" if resume else "new"
    env.pop("MAPPNB_EXEC_OWNER", None)
    return env


def execute(program: Sequence[str], *, run_dir: str | None = None, plan: str = "default", resume: bool = False) -> int:
    """Run a program with recording on; returns its exit status.

    Parameters
    ----------
    program : list of str
        Command line, such as ``["python", "train.py"]`` or ``["torchrun", "--nproc-per-node", "8", "train.py"]``.
    run_dir : str, optional
        Folder of the run; ``$MAPPNB_RUN_DIR`` or a new folder with date and time by default. On several hosts give it, and the
        same on each.
    plan : str
        What to record.
    resume : bool
        Add an incarnation to a run that another job wrote.

    Raises
    ------
    CaptureError
        If there is no program, it is not found, or the plan does not exist: before anything has started.
    """
    if not program:
        raise CaptureError("mappnb exec: no program; write: mappnb exec --run-dir RUN -- python train.py")
    parse_plan(plan)
    found = shutil.which(program[0])
    if found is None:
        raise CaptureError(f"mappnb exec: no program {program[0]!r} on PATH; write the interpreter too: mappnb exec -- python train.py")
    folder = run_dir or os.environ.get("MAPPNB_RUN_DIR") or time.strftime("mappnb-run-%Y%m%d-%H%M%S")
    print(f"mappnb: recording into {os.path.abspath(folder)}", file=sys.stderr)
    child = subprocess.Popen([found, *program[1:]], env=environment(run_dir=folder, plan=plan, resume=resume))
    while True:
        try:
            status = child.wait()
            return status if status >= 0 else 128 - status
        except KeyboardInterrupt:  # the terminal has sent it to the program too: wait for its end
            continue
