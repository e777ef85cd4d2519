"""The command ``mappnb``: demo, exec, import, export, info, check, report, watch, doctor."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from mappnb.errors import MappnbError

__all__ = ["main"]

ACTIVATIONS_HELP = (
    "capture activations too: default, residual, attention, or a .json file with a plan (default: nothing)"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status: 0 fine, 1 something is wrong with the run, 2 wrong usage."""
    args = _parser().parse_args(argv)
    try:
        return int(args.run(args))
    except MappnbError as err:
        print(f"mappnb: {err}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="mappnb", description="See and explain what a distributed training run does.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, run: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(run=run)
        return sub

    info = command("info", _info, "Show what a run directory holds.")
    info.add_argument("run_dir")
    check = command("check", _check, "Read every file of a run and report what is missing, damaged or inconsistent.")
    check.add_argument("run_dir")
    doctor = command("doctor", _doctor, "Show versions, the native core, GPU and notebook front end, and cures.")
    doctor.add_argument("run_dir", nargs="?", help="also see whether this folder can be written")
    execute = command(
        "exec", _exec, "Record a Python program without a change to its code: mappnb exec -- python train.py"
    )
    execute.add_argument("--run-dir", help="folder of the run; also $MAPPNB_RUN_DIR (default: mappnb-run-<date>)")
    execute.add_argument("--plan", default="default", help="base or default")
    execute.add_argument("--activations", metavar="PLAN", help=ACTIVATIONS_HELP)
    execute.add_argument("--resume", action="store_true", help="add an incarnation to a run that another job wrote")
    execute.add_argument(
        "program", nargs=argparse.REMAINDER, help="-- python train.py ..., or -- torchrun ... train.py"
    )
    _import_options(
        command("import", _import, "Import traces of other tools (Kineto, Chrome, MegaScan, ...) as a run.")
    )
    _export_options(
        command("export", _export, "Write a run for other tools: Chrome / Perfetto JSON, or one Parquet file.")
    )
    report = command("report", _report, "Write a self-contained HTML report of a run.")
    report.add_argument("run_dir")
    report.add_argument(
        "-o", "--output", help="file (default: RUN_DIR/report.html); a name in .json gets the JSON alone"
    )
    report.add_argument("--json", metavar="FILE", help="also write the report as JSON")
    _watch_options(command("watch", _watch, "Follow a run: say who becomes slow, why, and when it is over."))
    demo = command("demo", _demo, "Train a small Megatron-core GPT on several processes, record it, attach and report.")
    _demo_options(demo)
    return parser


def _import_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("src", nargs="+", help="trace files, folders, archives")
    command.add_argument("run_dir", help="a new or empty folder")
    command.add_argument(
        "--format", default="auto", help="kineto, chrome, megascan, ... (default: told by the content)"
    )
    command.add_argument("--rank-from", metavar="REGEX", help=r"finds the rank in a file's path, as 'rank(\d+)'")
    command.add_argument("--replace", action="store_true", help="put the import in the place of a run that is there")


def _export_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("run_dir")
    command.add_argument("out", help="file to write: events as .json, .json.gz or .parquet, activations as .zarr")
    command.add_argument("--format", choices=("chrome", "parquet", "zarr"), help="default: told by the file's name")
    command.add_argument(
        "--step", metavar="A:B", help="one step, or the steps from A to B, both included (default: all)"
    )
    command.add_argument(
        "--redact",
        action="store_true",
        help="names of users' own spans and of hosts as numbers; activations without token ids, texts and prompts",
    )


def _watch_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("run_dir")
    command.add_argument("--json", action="store_true", help="one JSON object per line: steps, verdicts, the end")
    command.add_argument("--once", action="store_true", help="judge what is there and exit")
    command.add_argument(
        "--interval", type=float, metavar="S", help="seconds between looks (default: as 1 %% of a core allows)"
    )
    command.add_argument("--until-step", type=int, metavar="N", help="exit when step N has ended")
    command.add_argument("--timeout", type=float, metavar="S", help="exit after so many seconds")
    command.add_argument("--wait", action="store_true", help="wait for the run directory to come into being")
    command.add_argument(
        "--stopped-after", type=float, metavar="S", default=60.0, help="seconds without a sign of life (default 60)"
    )
    command.add_argument("--no-details", action="store_true", help="never read events: no links, fewer causes")
    command.epilog = (
        "Exit status: 0 if nobody stands as slow at the end; 1 if somebody does, a rank failed, or the job stopped without an end; "
        "2 for wrong usage."
    )


def _demo_options(demo: argparse.ArgumentParser) -> None:
    for name, default, text in (
        ("tp", 1, "tensor-parallel size"),
        ("pp", 2, "pipeline-parallel size"),
        ("dp", 2, "data-parallel size"),
        ("vpp", 1, "model chunks per pipeline rank (interleaved schedule)"),
        ("steps", 20, "training steps"),
    ):
        demo.add_argument(f"--{name}", type=int, default=default, help=f"{text} (default {default})")
    demo.add_argument("--sequence-parallel", action="store_true", help="shard the sequence over the tensor ranks")
    demo.add_argument("--slow-rank", type=int, default=-1, help="rank to slow down")
    demo.add_argument("--slow-ms", type=float, default=0.0, help="extra work per forward of that rank, in ms")
    demo.add_argument(
        "--slow-link", default="", metavar="SRC,DST,MS", help="delay of every transfer from SRC to DST, in ms"
    )
    demo.add_argument("--plan", default="default", help="base or default")
    demo.add_argument("--activations", metavar="PLAN", help=ACTIVATIONS_HELP)
    demo.add_argument("--run-dir", default="demo-run", help="folder of the run (default demo-run)")
    demo.add_argument("--replace", action="store_true", help="remove an earlier demo run in that folder first")


def _info(args: argparse.Namespace) -> int:
    from mappnb.inspection import info_text

    print(info_text(args.run_dir))
    return 0


def _check(args: argparse.Namespace) -> int:
    from mappnb.inspection import check_run

    findings = check_run(args.run_dir)
    for finding in findings:
        print(finding)
    print("no problem found" if not findings else f"{len(findings)} finding(s)")
    return 1 if findings else 0


def _doctor(args: argparse.Namespace) -> int:
    from mappnb.doctor import doctor

    findings = doctor(args.run_dir)
    for f in findings:
        print(f"{f.level:5}{f.topic:16}{f.found}" + (f"\n{'':21}cure: {f.cure}" if f.cure else ""))
    return 1 if any(f.level == "bad" for f in findings) else 0


def _exec(args: argparse.Namespace) -> int:
    from mappnb.capture.execute import execute

    program = args.program[1:] if args.program[:1] == ["--"] else args.program
    return execute(program, run_dir=args.run_dir, plan=args.plan, activations=args.activations, resume=args.resume)


def _import(args: argparse.Namespace) -> int:
    from mappnb.capture.importers import import_trace

    report = import_trace(args.src, args.run_dir, format=args.format, rank_from=args.rank_from, replace=args.replace)
    print(report)
    return 0


def _export(args: argparse.Namespace) -> int:
    from mappnb.analysis.export import export, steps_of
    from mappnb.run import attach

    print(export(attach(args.run_dir), args.out, format=args.format, step=steps_of(args.step), redact=args.redact))
    return 0


def _report(args: argparse.Namespace) -> int:
    from mappnb.report import write_report

    print(write_report(args.run_dir, args.output, json_output=args.json))
    return 0


def _watch(args: argparse.Namespace) -> int:
    from mappnb.watch import watch

    return watch(
        args.run_dir, as_json=args.json, once=args.once, interval_s=args.interval, until_step=args.until_step,
        timeout_s=args.timeout, wait=args.wait, stopped_after_s=args.stopped_after, details=not args.no_details,
    )  # fmt: skip


def _demo(args: argparse.Namespace) -> int:
    from mappnb.demo import demo

    return demo(args)


if __name__ == "__main__":
    sys.exit(main())
