"""``mappnb exec -- python train.py``: record a program without a change to its code."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from mappnb.capture import launchinfo
from mappnb.capture.activations.plan import CapturePlan, parse_activations
from mappnb.capture.points import parse_plan
from mappnb.errors import CaptureError, NotARunError, RunExistsError
from mappnb.joining import continues
from mappnb.store import Store

__all__ = ["check_run_dir", "environment", "execute"]

SITE = Path(__file__).parent / "_site"
QUIET_S = 60.0


def environment(*, run_dir: str, plan: str, resume: bool, activations: CapturePlan | None = None) -> dict[str, str]:
    """Return the environment in which Python processes record by themselves.

    A folder with a ``sitecustomize`` module is put first on ``PYTHONPATH``; it starts the recording in training processes (not in
    launchers or data workers) and then runs the ``sitecustomize`` that it hides, if there is one.
    """
    env = dict(os.environ)
    env["PYTHONPATH"] = os.pathsep.join([str(SITE), *filter(None, [env.get("PYTHONPATH")])])
    env["MAPPNB_RUN_DIR"], env["MAPPNB_PLAN"] = os.path.abspath(run_dir), plan
    env["MAPPNB_EXEC"] = "resume" if resume else "new"
    env.pop("MAPPNB_EXEC_OWNER", None)
    env.pop("MAPPNB_ACTIVATIONS", None)
    if activations is not None:
        env["MAPPNB_ACTIVATIONS"] = json.dumps(activations.to_dict())
    return env


def check_run_dir(run_dir: str | os.PathLike[str], *, resume: bool) -> None:
    """Raise RunExistsError if a program started now could not record here.

    Notes
    -----
    Ranks that another host, or another ``mappnb exec`` of the same launch, has started may be in the folder already,
    and restarts of one job go on in it: what is in doubt is left to the ranks, which know more.
    """
    path = Path(run_dir)
    if not path.is_dir():
        if path.exists():
            raise RunExistsError(f"{path}: a file, not a folder; give mappnb exec --run-dir a new or an empty folder")
        return
    if not any(not p.name.endswith(".tmp") for p in path.iterdir()):
        return
    try:
        store = Store(path)
    except NotARunError as err:
        raise RunExistsError(f"{err}; give mappnb exec --run-dir a new or an empty folder") from err
    found = store.incarnations()
    if resume or not found or continues(found[-1].info.get("launch", {}), launchinfo.launch_of()):
        return
    ranks = found[-1].ranks.values()
    over = not found[-1].missing_ranks and all(r.get("ended") for r in ranks)
    age_s = time.time() - max(f.stat().st_mtime for f in path.rglob("*"))
    here = launchinfo.rank_of() is None and any(r.get("host") == socket.gethostname() for r in ranks)
    if over or age_s > QUIET_S or here:
        raise RunExistsError(
            f"{path}: holds a run already ({len(found)} incarnation(s), {found[-1].world_size} ranks); choose a new "
            f"--run-dir, or continue this run with 'mappnb exec --resume'; nothing was overwritten"
        )


def execute(
    program: Sequence[str],
    *,
    run_dir: str | None = None,
    plan: str = "default",
    activations: str | None = None,
    resume: bool = False,
) -> int:
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
    activations : str, optional
        What to capture inside the model: the name of a plan, or a ``.json`` file with one; default nothing.
    resume : bool
        Add an incarnation to a run that another job wrote.

    Returns
    -------
    int
        That of the program; 128 and the signal's number if a signal ended it, as shells have it.

    Raises
    ------
    CaptureError
        If there is no program, it cannot be started, or the plan does not exist: before anything has started.
    RunExistsError
        If the folder holds another job's run, or other files: likewise.
    """
    if not program:
        raise CaptureError("mappnb exec: no program; write: mappnb exec --run-dir RUN -- python train.py")
    parse_plan(plan)
    inside = parse_activations(activations)
    found = shutil.which(program[0])
    if found is None:
        raise CaptureError(
            f"mappnb exec: no program {program[0]!r} on PATH; write the interpreter too: mappnb exec -- python train.py"
        )
    folder = run_dir or os.environ.get("MAPPNB_RUN_DIR") or time.strftime("mappnb-run-%Y%m%d-%H%M%S")
    check_run_dir(folder, resume=resume)
    print(f"mappnb: recording into {os.path.abspath(folder)}", file=sys.stderr)
    try:
        env = environment(run_dir=folder, plan=plan, resume=resume, activations=inside)
        child = subprocess.Popen([found, *program[1:]], env=env)
    except OSError as err:
        raise CaptureError(
            f"mappnb exec: {program[0]} cannot be started ({err}); write the interpreter too: mappnb exec -- python train.py"
        ) from err
    status = _wait(child)
    if not (Path(folder) / "run.json").exists():
        print(
            "mappnb: nothing was recorded: no process initialised torch.distributed or took an optimizer step; "
            "mark the steps of other loops with mappnb.step()",
            file=sys.stderr,
        )
    return status if status >= 0 else 128 - status


def _wait(child: subprocess.Popen[bytes]) -> int:
    """Wait for the end of a program; what asks us to end is passed on to it."""
    with _passed_on(child):
        while True:
            try:
                return child.wait()
            except KeyboardInterrupt:  # the terminal has sent it to the program too
                continue


@contextmanager
def _passed_on(child: subprocess.Popen[bytes]) -> Iterator[None]:
    def send(number: int, _frame: FrameType | None) -> None:
        child.send_signal(number)

    before = {}
    try:
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is signal.SIG_DFL:
                before[number] = signal.signal(number, send)
    except ValueError:  # not the main thread
        pass
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
