"""Small StragglerAnalysis traces with every rule in them, and the artifact's recipe read plainly, one operation at a time."""

from __future__ import annotations

import statistics
from pathlib import Path

import numpy as np
import pandas as pd

import mappnb

COMM = {
    "forward-send", "forward-recv", "backward-send", "backward-recv", "params-all-gather", "grads-reduce-scatter",
    "separate-grads-all-reduce", "embedding-grads-all-reduce", "optimizer-clip-main-grad",
}  # fmt: skip
P2P = ("forward-send", "forward-recv", "backward-send", "backward-recv")


# ------------------------------------------------------------------------------------------------------- making traces
def make_trace(
    *, pp: int, dp: int, vpp: int = 1, microbatches: int = 4, steps=(3, 5), separate: bool = False, ends: bool = False,
    strays: bool = False, seed: int = 0,
) -> tuple[pd.DataFrame, str]:  # fmt: skip
    """Rows and layout file. ``ends``: stages beyond the model's ends send and receive, too; ``strays``: transfers of no computation."""
    rng = np.random.default_rng(seed)
    name = "interleaved" if vpp > 1 else "1f1b"
    sched = mappnb.schedule(name, num_stages=pp * vpp, num_microbatches=microbatches, num_chunks=vpp)
    costs = mappnb.Costs(
        forward_s=0.2 * vpp, backward_input_s=0.2 * vpp, backward_weight_s=0.2 * vpp, p2p_s=0.03, optimizer_s=0.0
    )  # fmt: skip
    done = mappnb.simulate(sched, costs)
    done = done.isel(event=np.flatnonzero((done.category == "compute").values))
    rows = []
    for step in steps:
        for d in range(dp):
            for s in range(pp):
                mine = done.isel(event=np.flatnonzero(done["rank"].values == s))
                nominal = worker_rows(mine, s, pp, vpp, parallel=dp > 1, separate=separate, ends=ends, strays=strays)
                for kind, start, length, mc, mb, gmc in nominal:
                    usual = 0.95 if (d, s) == (0, 0) else 0.6
                    took = usual * rng.uniform(0.8, 1.0) if kind.endswith("compute") else rng.lognormal(0, 0.2)
                    rows.append(
                        (d, s, d * pp + s, step, kind, start + rng.uniform(0, 1e-5), length * took, mc, mb, gmc)
                    )
    names = ["dp_rank", "stage", "rank", "step", "optype", "start_ts", "duration", "mc", "mb_id", "gmc"]
    table = pd.DataFrame(rows, columns=names)
    table["start_ts"] -= table.groupby("step")["start_ts"].transform("min")
    table = table.sort_values(["rank", "step", "optype", "start_ts"]).reset_index(drop=True)
    table["seq_id"] = table.groupby(["rank", "step", "optype"]).cumcount()
    table = table.astype({"start_ts": np.float32, "duration": np.float32})
    meta = f"dp_size: {dp}\npp_size: {pp}\ntp_size: 2\ndsp_size: 1\nvpp_size: {vpp}\nworld_size: {2 * dp * pp}\n"
    return table, meta


def worker_rows(mine, s, pp, vpp, *, parallel, separate, ends, strays):
    """(type, start, duration, mc, mb_id, gmc) of one worker in the order of a schedule."""
    out, last_backward = [], {}
    for c in range(vpp if parallel else 0):
        out.append(("params-all-gather", 0.1 * c, 0.08, c, -1, -1))
    first, last = np.inf, 0.0
    for i in range(mine.sizes["event"]):
        phase = str(mine.phase.values[i])
        kind = "forward" if phase == "forward" else "backward"
        start, end = 1 + float(mine.start_s[i]), 1 + float(mine.end_s[i])
        stage, mb = int(mine.stage[i]), int(mine.microbatch[i])
        mc = stage // pp
        out.append((f"{kind}-compute", start, end - start, mc, mb, stage))
        first, last = min(first, end), max(last, end)
        if kind == "backward":
            last_backward[mc] = end
        before, after = (0, pp * vpp - 1) if kind == "forward" else (pp * vpp - 1, 0)
        if stage != before or ends:
            out.append((f"{kind}-recv", start - 0.02, 0.015, -1, -1, -1))
        if stage != after or ends:
            out.append((f"{kind}-send", end + 0.001, 0.012, -1, -1, -1))
    if strays:
        out.append(("forward-recv", last + 0.5, 0.01, -1, -1, -1))
        out.append(("backward-send", 0.4, 0.01, -1, -1, -1))
    at = last + 1
    out.append(("gc", at, 0.002, -1, -1, -1))
    out.append(("layernorm-grads-all-reduce", at + 0.1, 0.02, -1, -1, -1))
    if s in (0, pp - 1):
        out.append(("embedding-grads-all-reduce", at + 0.2, 0.05, -1, -1, -1))
    for c in range(vpp if parallel else 0):
        out.append(
            ("grads-reduce-scatter", last_backward[c] + 0.02 if separate else at + 0.3 + 0.1 * c, 0.06, c, -1, -1)
        )
    if separate:
        out.append(("separate-grads-all-reduce", at + 0.8, 0.03, -1, -1, -1))
    out.append(("optimizer-clip-main-grad", at + 0.9, 0.04, -1, -1, -1))
    out.append(("optimizer", at + 1.0, 0.03, -1, -1, -1))
    return out


def write_trace(folder: Path, table: pd.DataFrame, meta: str):
    """Import the trace; the run."""
    folder.mkdir(parents=True, exist_ok=True)
    table.to_parquet(folder / "trace-X.parquet")
    (folder / "meta-X.yaml").write_text(meta)
    mappnb.import_trace(folder / "trace-X.parquet", folder / "run", format="straggler_analysis")
    return mappnb.attach(folder / "run")


# -------------------------------------------------------------------------------------------------- the recipe, plainly
class Plain:
    """Sections 2 to 5 of the recipe on a table of rows: dictionaries and loops."""

    def __init__(self, table: pd.DataFrame, pp: int, dp: int, vpp: int) -> None:
        self.pp, self.dp, self.vpp = pp, dp, vpp
        self.at = {
            (r.optype, int(r.seq_id), int(r.stage), int(r.step), int(r.dp_rank)): r for r in table.itertuples(index=False)
        }  # fmt: skip
        self.steps = sorted({int(s) for s in table["step"]})
        self.ops = sorted({k[:3] for k in self.at})
        self.needs: dict[tuple, set] = {op: set() for op in self.ops}
        self.groups: list[tuple[list, bool]] = []
        self.noop: set = set()
        for s in range(pp):
            self._stage(s)
        self._meet()
        self.group_of = {op: (i, wide) for i, (ops, wide) in enumerate(self.groups) for op in ops}

    def row(self, op):
        return self.at[(*op, self.steps[0], 0)]

    def start(self, op):
        return float(np.float32(self.row(op).start_ts))

    def end(self, op):
        return float(np.float32(self.row(op).start_ts) + np.float32(self.row(op).duration))

    def of(self, s, *kinds):
        found = [op for op in self.ops if op[2] == s and op[0] in kinds]
        return sorted(found, key=lambda op: (self.start(op), op[1], op[0]))

    def need(self, op, before):
        self.needs[op].add(before)

    def chain(self, ops):
        for i in range(1, len(ops)):
            self.need(ops[i], ops[i - 1])

    def _stage(self, s):
        compute = self.of(s, "forward-compute", "backward-compute")
        self.chain(compute)
        for kind in P2P:
            self.chain(self.of(s, kind))
            self._serve(s, kind)
        i = [op[0] for op in compute].index("backward-compute")
        if i >= 2:
            for kind in ("backward-recv", "backward-send"):
                if (kind, 0, s) in self.needs:
                    self.need((kind, 0, s), compute[i - 2])
        if self.dp > 1:
            self.chain(self.of(s, "params-all-gather", "grads-reduce-scatter"))
            for c in range(self.vpp):
                forward = [op for op in self.of(s, "forward-compute") if self.row(op).mc == c]
                gather = [op for op in self.of(s, "params-all-gather") if self.row(op).mc == c]
                if forward and gather:
                    self.need(forward[0], max(gather, key=lambda op: op[1]))
        self._tail(s, compute)

    def _serve(self, s, kind):
        direction, side = kind.split("-")
        compute = sorted(self.of(s, f"{direction}-compute"), key=lambda op: op[1])
        kept = []
        for op in self.of(s, kind):
            late = side == "recv" and self.start(op) > max(map(self.start, compute)) + 50e-6
            early = side == "send" and self.end(op) < min(map(self.end, compute)) - 50e-6
            if late or early:
                self.noop.add(op)
            else:
                kept.append(op)
        shift = 1 if side == "recv" and s in (0, self.pp - 1) and len(kept) == len(compute) - 1 else 0
        for n, op in enumerate(kept):
            k = n + shift
            peer = self.row(compute[k]).gmc + (1 if kind in ("forward-send", "backward-recv") else -1)
            if not 0 <= peer <= self.vpp * self.pp - 1:
                self.noop.add(op)
            if side == "send":
                self.need(op, compute[k])
            else:
                self.need(compute[k], op)
                if k >= 1:
                    self.need(op, compute[k - 1])

    def _tail(self, s, compute):
        gc, norm = self.of(s, "gc"), self.of(s, "layernorm-grads-all-reduce")
        embedding = self.of(s, "embedding-grads-all-reduce")
        scatter, separate = self.of(s, "grads-reduce-scatter"), self.of(s, "separate-grads-all-reduce")
        final = self.of(s, "optimizer-clip-main-grad") + self.of(s, "optimizer")
        self.need(gc[0], max(compute, key=self.end))
        if self.dp == 1:
            self.chain(gc + norm + embedding + final)
        elif not separate:
            self.chain(gc + norm + embedding + scatter + final)
        else:
            self.chain(gc + norm + embedding + separate + final)
            self.need(norm[0], scatter[-1])
            for c in range(self.vpp):
                backward = [op for op in self.of(s, "backward-compute") if self.row(op).mc == c]
                first = min((op for op in scatter if self.row(op).mc == c), key=lambda op: op[1])
                self.need(first, max(backward, key=self.end))

    def _meet(self):
        met = set()
        for kind, there, shift in (("forward-send", "forward-recv", 1), ("backward-send", "backward-recv", -1)):
            for s in range(self.pp):
                sends = [op for op in self.of(s, kind) if op not in self.noop]
                receives = [op for op in self.of((s + shift) % self.pp, there) if op not in self.noop]
                for pair in zip(sends, receives, strict=False):
                    self.groups.append((list(pair), False))
                    met |= set(pair)
        for op in self.ops:
            if op[0] in P2P and op not in met:
                self.groups.append(([op], False))
            if op[0] in ("params-all-gather", "grads-reduce-scatter", "separate-grads-all-reduce"):
                self.groups.append(([op], self.dp > 1))
        embedding = [op for op in self.ops if op[0] == "embedding-grads-all-reduce"]
        self.groups += [(embedding, False), ([op for op in self.ops if op[0] == "optimizer-clip-main-grad"], True)]

    # ---------------------------------------------------------------------------------------------------------- times
    def measured(self):
        """What each operation took itself, (op, step, dp) -> s."""
        out = {}
        for (kind, seq, s, step, d), r in self.at.items():
            op = (kind, seq, s)
            value = np.float32(r.duration)
            if kind in COMM:
                ops, wide = self.groups[self.group_of[op][0]]
                ranks = range(self.dp) if wide else [d]
                last = max(np.float32(self.at[(*o, step, x)].start_ts) for o in ops for x in ranks)
                value = np.float32(np.float32(r.start_ts) + np.float32(r.duration)) - last
                value = np.float32(0) if value <= np.float32(-0.010) else value
            out[op, step, d] = value
        return out

    def ideal(self):
        """The ideal of each type."""
        values: dict[str, list] = {}
        for (op, _, _), v in self.measured().items():
            values.setdefault(op[0], []).append(float(v))
        mean = ("forward-compute", "backward-compute", "optimizer", "gc")
        return {k: statistics.fmean(v) if k in mean else statistics.median(v) for k, v in values.items()}

    def simulate(self, took):
        """Length of each step with what each operation takes, (op, step, dp) -> s."""
        out = []
        for step in self.steps:
            begin, end = {}, {}
            waiting = [(op, d) for op in self.ops for d in range(self.dp)]
            while waiting:
                left = []
                for op, d in waiting:
                    if (op, d) not in begin and all((n, d) in end for n in self.needs[op]):
                        begin[op, d] = max((end[n, d] for n in self.needs[op]), default=0.0)
                    members = [(op, d)]
                    if op in self.group_of:
                        ops, wide = self.groups[self.group_of[op][0]]
                        members = [(o, x) for o in ops for x in (range(self.dp) if wide else [d])]
                    if all(m in begin for m in members):
                        end[op, d] = max(begin[m] for m in members) + float(took[op, step, d])
                    else:
                        left.append((op, d))
                assert len(left) < len(waiting) or any((op, d) not in begin for op, d in left), "deadlock"
                waiting = left
            out.append(max(t for (op, d), t in end.items() if op[0] == "optimizer"))
        return np.array(out)
