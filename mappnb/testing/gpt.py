"""The reference training job: a small GPT trained by megatron-core, in any layout, on CPU or GPU.

From Python: `mappnb.testing.launcher.launch` starts all ranks on this host. By hand, one process or under torchrun::

    python -m mappnb.testing.gpt --steps 10
    torchrun --nproc-per-node 4 -m mappnb.testing.gpt --tp 2 --pp 2 --run-dir runs/a

Losses of all layouts agree with the single process to 1e-5 (measured: 1.2e-7): weights and data do not depend on the
layout. Importing this module imports neither torch nor megatron-core.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from mappnb.errors import MappnbError
from mappnb.testing.gpt_settings import SettingsError, StepReport, TrainResult, TrainSettings
from mappnb.testing.interrupt import LAUNCHER_PID, StopFlag, die_with_parent, dump_stack_on_signal, stop_at_sigint

if TYPE_CHECKING:
    from argparse import Namespace

__all__ = [
    "SettingsError",
    "StepReport",
    "TrainResult",
    "TrainSettings",
    "argument_parser",
    "exit_now",
    "main",
    "quiet_megatron",
    "train",
]

USAGE_ERROR = 2


def train(
    settings: TrainSettings,
    *,
    on_step: Callable[[StepReport], None] | None = None,
    stop: StopFlag | None = None,
    started_s: float | None = None,
    forward_backward_func: Callable[..., Any] | None = None,
) -> TrainResult:
    """Train on this rank, inside a job whose ranks all call this with equal settings.

    Parameters
    ----------
    settings : TrainSettings
        The job. With a ``run_dir`` the training runs inside ``mappnb.record(run_dir, plan=..., **record_options)``.
    on_step : callable, optional
        Gets a `StepReport` after each step, on each rank.
    stop : StopFlag, optional
        Once set on any rank, all ranks stop after the same step.
    started_s : float, optional
        ``time.time()`` at which the process started, for ``startup_s``.
    forward_backward_func : callable, optional
        Used in place of the one from ``megatron.core.pipeline_parallel.get_forward_backward_func()``.

    Returns
    -------
    TrainResult
        The same on every rank, but for the times.

    Notes
    -----
    Rank and world size come from the environment (``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``MASTER_ADDR``,
    ``MASTER_PORT``) as torchrun sets them; without ``RANK`` this is a job of one process. A process group that exists
    already is used. Each step makes one all_reduce of its own, for the loss, after the optimizer.
    """
    with warnings.catch_warnings():
        quiet_megatron()
        from mappnb.testing.gpt_train import run_training

        return run_training(
            settings,
            on_step=on_step,
            stop=stop,
            started_s=started_s,
            forward_backward_func=forward_backward_func,
        )


def quiet_megatron() -> None:
    """Silence what megatron-core warns of on every rank: packages that this job does without, and its own old names."""
    warnings.filterwarnings("ignore", module=r"megatron(\.|$)")


def main(argv: Sequence[str] | None = None, *, started_s: float | None = None) -> int:
    """Run one rank from the command line.

    Parameters
    ----------
    argv : sequence of str, optional
        Default ``sys.argv[1:]``.
    started_s : float, optional
        ``time.time()`` at which the process started; default now.

    Returns
    -------
    int
        Exit status: 0 after the last step and after SIGINT, 2 for settings that cannot work, 1 for any other error.
    """
    started_s = time.time() if started_s is None else started_s
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if LAUNCHER_PID in os.environ:
        die_with_parent(int(os.environ[LAUNCHER_PID]))
        dump_stack_on_signal()
    flags = argument_parser().parse_args(argv)
    with stop_at_sigint() as stop:
        try:
            return _run(flags, stop, started_s)
        except MappnbError as err:
            _note_failure(flags, err)
            print(f"mappnb: {type(err).__name__}: {err}", file=sys.stderr)
            return USAGE_ERROR
        except KeyboardInterrupt:
            return 1
        except Exception as err:  # noqa: BLE001  # the end of this process: everything is printed
            if stop.is_set:  # the other ranks left first
                return 1
            _note_failure(flags, err)
            traceback.print_exc()
            return 1


def _run(flags: Namespace, stop: StopFlag, started_s: float) -> int:
    settings = TrainSettings.from_json(flags.settings_json) if flags.settings_json else TrainSettings.from_flags(flags)
    settings.check(int(os.environ.get("WORLD_SIZE", "1")))
    rank = int(os.environ.get("RANK", "0"))

    def print_report(report: StepReport) -> None:
        print(json.dumps(asdict(report)), flush=True)

    result = train(settings, on_step=print_report if rank == 0 else None, stop=stop, started_s=started_s)
    if rank == 0 and flags.result:
        Path(flags.result).write_text(result.to_json())
    return 0


def argument_parser() -> argparse.ArgumentParser:
    """Return the parser of this module's command line: all settings, and where to leave the result."""
    parser = argparse.ArgumentParser(
        prog="python -m mappnb.testing.gpt",
        description="Train a small GPT with megatron-core; rank 0 prints one line of JSON per step.",
    )
    TrainSettings.add_flags(parser)
    parser.add_argument("--settings-json", default="", metavar="JSON", help="all settings at once, in place of flags")
    parser.add_argument("--result", default="", metavar="PATH", help="rank 0 writes the result here, as JSON")
    parser.add_argument("--failure", default="", metavar="PATH", help="an error is noted here, with its time")
    return parser


def _note_failure(flags: Namespace, err: BaseException) -> None:
    """Leave the time of the error, so that a launcher can tell the first from its consequences."""
    if flags.failure:
        note = {"time_s": time.time(), "type": type(err).__name__, "message": str(err)}
        Path(flags.failure).write_text(json.dumps(note))


def exit_now(status: int) -> NoReturn:
    """Leave without tearing the interpreter down, which takes a second of CPU per rank after torch and megatron."""
    marks = sys.modules.get("mappnb.capture.marks")
    if marks is not None and (session := marks.current()) is not None:  # of mappnb exec, which would end it at the exit
        session.stop()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    exit_now(main())
