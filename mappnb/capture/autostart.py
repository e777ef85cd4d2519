"""Starts a recording in a process that ``mappnb exec`` has prepared; it is joined as soon as the process turns out to train."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

__all__ = ["arm", "is_launcher", "program_of"]

_LAUNCHERS = frozenset(("torchrun", "accelerate", "deepspeed", "pip", "pip3", "mappnb"))
_LAUNCHER_MODULES = ("torch.distributed.run", "torch.distributed.launch", "accelerate", "deepspeed", "mappnb", "pip")
_REFERENCE_JOB = "mappnb.testing.gpt"
_OPTIONS_WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")


def program_of(argv: Sequence[str]) -> tuple[str, str]:
    """Return what an interpreter's command line runs: ("-m", module), ("-c", code), ("", script), or ("", "") for none."""
    words = iter(argv[1:])
    for word in words:
        if word[:2] in ("-m", "-c"):
            return word[:2], word[2:] or next(words, "")
        if word in _OPTIONS_WITH_VALUE:
            next(words, None)
        elif not word.startswith("-") or word == "-":
            return "", word
    return "", ""


def is_launcher(argv: Sequence[str]) -> bool:
    """Return True for the command line of a program that starts training processes but does not train."""
    how, what = program_of(argv)
    if how == "-m" and what == _REFERENCE_JOB:  # it trains; with a run directory of its own it records itself
        return any(word.startswith(("--run-dir", "--settings-json")) for word in argv)
    if how == "-m":
        return any(what == m or what.startswith(f"{m}.") for m in _LAUNCHER_MODULES)
    return how == "" and os.path.basename(what) in _LAUNCHERS


def arm() -> None:
    """Start recording when this process imports torch, unless it is a launcher or a helper of one that records."""
    owner = os.environ.get("MAPPNB_EXEC_OWNER")
    if (owner and owner != str(os.getpid())) or is_launcher(sys.orig_argv) or _is_resource_tracker():
        return
    from mappnb.capture._patches import ImportWatch

    ImportWatch(_say).when("torch", lambda _: _begin())


def _is_resource_tracker() -> bool:
    how, what = program_of(sys.orig_argv)
    return how == "-c" and "resource_tracker" in what


def _is_fork_server() -> bool:
    """Return True in a process that exists to be forked: a thread would be in the way, and its children are the ranks."""
    how, what = program_of(sys.orig_argv)
    process = sys.modules.get("multiprocessing.process")
    child = process is not None and process.parent_process() is not None
    return how == "-c" and "multiprocessing.forkserver" in what and not child


def _say(where: str, err: BaseException) -> None:
    print(f"mappnb: not recording: {err}", file=sys.stderr)


def _begin() -> None:
    from mappnb.capture import marks
    from mappnb.capture.session import record

    if marks.current() is not None or _is_fork_server():
        return
    session = record(
        os.environ["MAPPNB_RUN_DIR"],
        plan=os.environ.get("MAPPNB_PLAN", "default"),
        activations=os.environ.get("MAPPNB_ACTIVATIONS"),
        resume=os.environ.get("MAPPNB_EXEC") == "resume",
    )
    session.finder.automatic = True
    session.start()
