"""Reads a small Kineto JSON into events, for tests alone: device lanes, the step that launched each kernel, CPU ops."""

from __future__ import annotations

import gzip
import json
import math
import re
import tarfile
from pathlib import Path

import numpy as np
import xarray as xr

from mappnb.schema import EVENTS, empty

DATA = Path(__file__).parents[3] / "shared/data"
NEEDS_DATA = "the traces of ../shared/data are not here"


def load(path: Path) -> dict:
    with gzip.open(path) as source:
        return json.load(source)


def load_dlrm() -> dict[int, dict]:
    with tarfile.open(DATA / "param/dlrm_kineto.tar.gz") as archive:
        found = [m for m in archive.getmembers() if m.name.endswith(".json")]
        traces = [json.load(archive.extractfile(m)) for m in found]
    return {t["distributedInfo"]["rank"]: t for t in traces}


def _category(e: dict) -> str:
    if "stream" not in e.get("args", {}):
        return "host"
    if e["name"].startswith("nccl"):
        return "collective"
    return "host" if re.match("Mem(cpy|set)|dma", e["name"]) else "compute"


def events_of(traces: dict[int, dict], *, device_only: bool = False) -> xr.Dataset:
    """Times as HTA takes them: µs, rounded inwards where the file has fractions. Of host spans only the steps, if ``device_only``."""
    parts = []
    for rank, trace in traces.items():
        spans = [e for e in trace["traceEvents"] if e.get("ph") == "X" and e.get("cat") != "Trace"]
        steps = sorted((e["ts"], int(e["name"].split("#")[1])) for e in spans if e["name"].startswith("ProfilerStep#"))
        on_host = [e for e in spans if "correlation" in e.get("args", {}) and "stream" not in e["args"]]
        launched = {e["args"]["correlation"]: e["ts"] for e in on_host}
        if device_only:
            spans = [e for e in spans if "stream" in e.get("args", {}) or e["name"].startswith("ProfilerStep#")]
        data = empty(EVENTS, {"event": len(spans)})
        data["incarnation"][:], data["rank"][:], data["flags"][:] = 0, rank, 0
        data["phase"][:] = "none"
        for i, e in enumerate(spans):
            start, end = math.ceil(e["ts"]), math.floor(e["ts"] + e["dur"])
            args = e.get("args", {})
            issue = launched.get(args.get("correlation"), -1) if "stream" in args else e["ts"]
            step = max((n for at, n in steps if at <= issue), default=-1)
            values = {"start_ns": start * 1000, "duration_ns": (end - start) * 1000, "step": step, "name": e["name"]}
            values |= {"category": _category(e), "op": "span", "stream": args.get("stream", -1)}
            values["issue_ns"] = round(issue * 1000) if "stream" in args and issue >= 0 else -1
            for key, value in values.items():
                data[key][i] = value
        data["raw_start_ns"] = data["start_ns"].copy()
        parts.append(data)
    return xr.Dataset({k: ("event", np.concatenate([p[k] for p in parts])) for k in EVENTS})
