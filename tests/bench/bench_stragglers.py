"""Who is found, and why: find_stragglers and two baselines on generated runs with known faults.

``python tests/bench/bench_stragglers.py --set report --seeds 30 --jobs 2`` prints a table by fault. The tuning set (default noise) is what
thresholds were fixed on; the report set has other seeds, and noise resampled from real traces.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
from straggler_baselines import latest, longer_than_peers
from straggler_cases import EXTRA, KINDS, REPORT_SEEDS, case_of

import mappnb
import mappnb.analysis
from mappnb.testing import generate_run

METHODS = ("find_stragglers", "latest", "longer than peers")
CLEAR_FRACTION = 0.10
"""Faults that make the step this much longer are those that the aims speak of."""


def run_case(kind: str, seed: int, methods: tuple[str, ...]) -> dict[str, Any]:
    """Generate a run, ask all methods, and return what was true and what they said."""
    os.fsync = lambda file: None  # type: ignore[assignment]  # what is measured is not the disk
    case = case_of(kind, seed)
    with tempfile.TemporaryDirectory() as folder:
        truth = generate_run(f"{folder}/run", segment_rows=10**7, **case.options)
        run = mappnb.attach(f"{folder}/run")
        out: dict[str, Any] = {
            "kind": kind, "seed": seed, "layout": str(case.options["layout"]), "schedule": case.options["schedule"],
            "num_steps": case.options["num_steps"], "faults": [fault_facts(f, truth) for f in truth.faults],
            "settings": [repr(f) for f in case.options["faults"]],
        }  # fmt: skip
        for fault, causes in zip(out["faults"], case.causes, strict=True):
            fault["causes"] = sorted(causes)
        if "find_stragglers" in methods:
            out |= asked(run)
        events = run.sel()
        out["latest"] = [ranked(r) for r in latest(events, max(1, len(truth.faults)))]
        out["longer than peers"] = [ranked(r) for r in longer_than_peers(events, case.options["layout"])]
    return out


def asked(run: Any) -> dict[str, Any]:
    """What find_stragglers says; an error counts as nothing said, and is told."""
    columns = ["subject_kind", "subject", "cause", "effect_s", "effect_fraction", "first_step", "last_step"]
    begin = time.process_time()
    try:
        found = mappnb.analysis.find_stragglers(run)
    except Exception as err:
        return {"find_stragglers": [], "other": [repr(err)], "cpu_s": time.process_time() - begin, "error": repr(err)}
    took = time.process_time() - begin
    culprits, rest = found[found.verdict == "culprit"], found[found.verdict.isin(["undecided", "victim"])]
    return {
        "find_stragglers": json.loads(culprits[columns].to_json(orient="records")),
        "other": json.loads(rest[["subject_kind", "subject", "verdict", "effect_s"]].to_json(orient="records")),
        "cpu_s": took,
    }


def ranked(rank: int) -> dict[str, Any]:
    return {"subject_kind": "rank", "subject": str(rank), "cause": ""}


def fault_facts(fault: Any, truth: Any) -> dict[str, Any]:
    """What the truth says about a fault, over the steps it happened in."""
    effect, clean = fault.effect_s[fault.steps], truth.clean_step_s[fault.steps]
    there = len(fault.steps) > 0
    return {
        "subject_kind": fault.subject_kind, "subjects": fault.subjects, "ranks": fault.ranks,
        "effect_s": float(np.nanmean(effect)) if there else 0.0,
        "effect_fraction": float(np.nanmean(effect / clean)) if there else 0.0,
        "clean_step_s": float(np.nanmean(clean)) if there else 1.0,
        "first_step": fault.steps[0] if there else None,
    }  # fmt: skip


# ------------------------------------------------------------------------------------------------------ scores
def hits(row: dict[str, Any], fault: dict[str, Any], method: str) -> bool:
    """Whether a row names a fault. Baselines know ranks only: any rank of the faulty host, link or stage is right for them."""
    if method != "find_stragglers":
        return int(row["subject"]) in fault["ranks"]
    subject = re.sub(r"\s*(→|->)\s*", "->", str(row["subject"]))
    return row["subject_kind"] == fault["subject_kind"] and (
        fault["subject_kind"] == "job" or subject in fault["subjects"]
    )


def score(results: list[dict[str, Any]], method: str, *, clear: bool | None) -> dict[str, Any]:
    """Precision, recall and the rest over runs; ``clear`` keeps the faults of at least 10 % (False: those below).

    A run counts for precision where a fault of it is kept; one without faults always does.
    """
    faults = found = rows = right = cause = clean = alarms = 0
    effect: list[float] = []
    first: list[int] = []
    for r in results:
        said = r[method]
        kept = [f for f in r["faults"] if clear is None or (f["effect_fraction"] >= CLEAR_FRACTION) == clear]
        if not r["faults"]:
            clean, alarms = clean + 1, alarms + bool(said)
        if r["faults"] and not kept:
            continue
        rows += len(said)
        right += sum(any(hits(row, f, method) for f in r["faults"]) for row in said)
        for f in kept:
            faults += 1
            mine = [row for row in said if hits(row, f, method)]
            if not mine:
                continue
            found += 1
            if method == "find_stragglers":
                cause += mine[0]["cause"] in f["causes"]
                effect.append((mine[0]["effect_s"] - f["effect_s"]) / f["clean_step_s"])
                first.append(abs(mine[0]["first_step"] - f["first_step"]))
    return {
        "faults": faults, "recall": found / faults if faults else np.nan, "precision": right / rows if rows else np.nan,
        "cause": cause / found if found else np.nan, "alarms": alarms / clean if clean else np.nan, "clean": clean,
        "effect": float(np.nanmedian(np.abs(effect))) if np.isfinite(effect).any() else np.nan,
        "first": float(np.mean(np.array(first) <= 1)) if first else np.nan,
    }  # fmt: skip


def table(results: list[dict[str, Any]], methods: tuple[str, ...]) -> str:
    """A Markdown table: a row for each kind and band; the baselines' recall and precision at the right."""
    head = [
        "fault",
        "step longer by",
        "faults",
        "recall",
        "precision",
        "cause right",
        "effect off by, of the step (median)",
        "first step within 1",
    ]
    others = [m for m in METHODS if m in methods and m != "find_stragglers"]
    head += [f"{m}: recall / precision" for m in others]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    kinds = list(dict.fromkeys(r["kind"] for r in results if r["faults"]))
    with_faults = [r for r in results if r["faults"]]
    groups = [(k, [r for r in with_faults if r["kind"] == k]) for k in kinds] + [("all, clean ones too", results)]
    for name, rs in groups:
        for clear, band in ((True, "≥ 10 %"), (False, "< 10 %")):
            mine = (
                score(rs, "find_stragglers", clear=clear)
                if "find_stragglers" in methods
                else score(rs, others[0], clear=clear)
            )
            if not mine["faults"]:
                continue
            cells = [name, band, str(mine["faults"])]
            cells += [
                percent(mine[k]) if "find_stragglers" in methods else ""
                for k in ("recall", "precision", "cause", "effect", "first")
            ]
            for m in others:
                theirs = score(rs, m, clear=clear)
                cells.append(f"{percent(theirs['recall'])} / {percent(theirs['precision'])}")
            lines.append("| " + " | ".join(cells) + " |")
    for m in METHODS:
        if m in methods and (clean := score(results, m, clear=None))["clean"]:
            lines.append(f"\nalarms on {clean['clean']} clean runs, {m}: {percent(clean['alarms'])}")
    return "\n".join(lines)


def percent(value: float) -> str:
    return "-" if np.isnan(value) else f"{100 * value:.0f} %"


def failures(results: list[dict[str, Any]]) -> list[str]:
    """One line for each fault that was missed or wrongly explained, and for each culprit that is none."""
    out = []
    for r in results:
        said = r["find_stragglers"]
        if "error" in r:
            out.append(f"error: {r['kind']} seed {r['seed']}: {r['error']}")
        where = f"{r['kind']} seed {r['seed']} ({r['layout']}, {r['schedule']}, {r['num_steps']} steps)"
        names = [
            f"{x['subject_kind']} {x['subject']} {x['cause']} {x['effect_s']:.3f} s from {x['first_step']}"
            for x in said
        ]
        for f, setting in zip(r["faults"], r["settings"], strict=True):
            mine = [x for x in said if hits(x, f, "find_stragglers")]
            if not mine:
                out.append(f"missed, {f['effect_fraction']:.1%}: {where}: {setting}; got {names or r['other'][:4]}")
            elif mine[0]["cause"] not in f["causes"]:
                out.append(
                    f"cause {mine[0]['cause']!r} for {f['causes']}, {f['effect_fraction']:.1%}: {where}: {setting}; got {names}"
                )
        extra = [
            n for x, n in zip(said, names, strict=True) if not any(hits(x, f, "find_stragglers") for f in r["faults"])
        ]
        if extra:
            out.append(f"false: {where}: {r['settings']}; got {extra}")
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kinds", nargs="*", default=list(KINDS), help=f"of {', '.join([*KINDS, *EXTRA])}")
    parser.add_argument("--seeds", type=int, default=30)
    parser.add_argument("--first", type=int, default=0, help="first seed within the set")
    parser.add_argument("--set", choices=("tuning", "report"), default="report")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--baselines-only", action="store_true")
    parser.add_argument("--json", type=Path, help="write all results here")
    args = parser.parse_args()
    for kind in args.kinds:
        if kind not in KINDS | EXTRA:
            parser.error(f"unknown kind {kind!r}; known: {', '.join([*KINDS, *EXTRA])}")
    methods = METHODS[1:] if args.baselines_only else METHODS
    begin = args.first + (REPORT_SEEDS if args.set == "report" else 0)
    tasks = [(k, s, methods) for s in range(begin, begin + args.seeds) for k in args.kinds]
    started = time.monotonic()
    results = []
    with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn")) as pool:
        for result in pool.map(run_case, *zip(*tasks, strict=True)):
            results.append(result)
            if args.json:
                args.json.write_text(json.dumps(results, indent=1))
    print(table(results, methods))
    if "find_stragglers" in methods:
        print(f"\nfind_stragglers: median {np.median([r['cpu_s'] for r in results]):.2f} CPU s a run")
        print("\n".join(["", *failures(results)]), file=sys.stderr)
    print(f"{len(results)} runs in {time.monotonic() - started:.0f} s")
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
