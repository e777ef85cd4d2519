"""Real Megatron-core training, recorded: same losses to the bit, and complete, by counts that do not come from the recorder."""

from __future__ import annotations

import collections
import dataclasses
import functools
import importlib.util
import textwrap

import numpy as np
import pytest

import mappnb
from mappnb import analysis
from mappnb.layout import Layout
from mappnb.terms import COLLECTIVE_OPS, P2P_OPS, Flag
from mappnb.testing import rank_processes
from mappnb.testing.gpt_settings import TrainSettings
from mappnb.testing.launcher import launch

HAVE_MEGATRON = bool(importlib.util.find_spec("torch") and importlib.util.find_spec("megatron"))
pytestmark = [
    pytest.mark.dist,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not HAVE_MEGATRON, reason="needs torch and megatron-core"),
]
TINY = TrainSettings(hidden=64, sequence_length=32, steps=5, lr=3e-3)
slow = pytest.mark.slow

LAYOUTS = [
    pytest.param(1, {}, id="single", marks=slow),
    pytest.param(2, {"tp": 2}, id="tp2", marks=slow),
    pytest.param(2, {"pp": 2}, id="pp2", marks=slow),
    pytest.param(2, {}, id="dp2", marks=slow),
    pytest.param(4, {"tp": 2, "pp": 2}, id="tp2_pp2"),
    pytest.param(2, {"pp": 2, "vpp": 2}, id="pp2_vpp2", marks=slow),
    pytest.param(2, {"tp": 2, "sequence_parallel": True}, id="tp2_sp", marks=slow),
    pytest.param(8, {"tp": 2, "pp": 2}, id="tp2_pp2_dp2", marks=slow),
    pytest.param(2, {"distributed_optimizer": True, "overlap": True}, id="dp2_distributed_optimizer_overlap"),
    pytest.param(2, {"experts": 4, "ep": 2}, id="moe_ep2", marks=slow),
    pytest.param(2, {"pp": 2, "recompute": True}, id="pp2_recompute", marks=slow),
    pytest.param(2, {"cp": 2}, id="cp2", marks=slow),
]
COUNTING = """
import os
from torch._C._distributed_c10d import ProcessGroup
from mappnb.capture import marks

METHODS = {methods!r}
depth = 0

def counted(name, method):
    def call(group, *args, **kwargs):
        global depth
        if depth == 0 and marks.current() is not None:
            with open(f"{folder}/{{os.environ['RANK']}}", "a") as out:
                out.write(f"{{name}}\\n")
        depth += 1
        try:
            return method(group, *args, **kwargs)
        finally:
            depth -= 1
    return call

for name in METHODS:
    if hasattr(ProcessGroup, name):
        setattr(ProcessGroup, name, counted(name, getattr(ProcessGroup, name)))

from mappnb.testing import fork_ranks, gpt
from mappnb.testing.megatron_cpu import megatron_on_cpu
megatron_on_cpu(force=True)
gpt.exit_now(fork_ranks.main())
"""
METHODS = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "allgather": "all_gather",
    "_allgather_base": "all_gather",
    "all_gather_single": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter",
    "allgather_into_tensor_coalesced": "all_gather",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "all_gather_single_coalesced": "all_gather",
    "reduce_scatter_single_coalesced": "reduce_scatter",
    "alltoall_base": "all_to_all",
    "all_to_all_single": "all_to_all",
    "alltoall": "all_to_all",
    "broadcast": "broadcast",
    "barrier": "barrier",
    "send": "send",
    "recv": "recv",
}


@functools.cache
def unrecorded(world_size, changes):
    return launch(dataclasses.replace(TINY, **dict(changes)), world_size=world_size)


@pytest.fixture
def recorded(tmp_path, monkeypatch):
    """Train with recording on, and with a counter of our own under it."""

    def train(world_size, changes):
        (tmp_path / "counts").mkdir()
        script = tmp_path / "counting.py"
        script.write_text(textwrap.dedent(COUNTING).format(methods=list(METHODS), folder=str(tmp_path / "counts")))
        monkeypatch.setattr(rank_processes, "FORK_MAIN", (str(script),))
        settings = dataclasses.replace(TINY, run_dir=str(tmp_path / "run"), **changes)
        result = launch(settings, world_size=world_size, start="fork")
        counts = {
            rank: collections.Counter(METHODS[line] for line in (tmp_path / "counts" / str(rank)).read_text().split())
            if (tmp_path / "counts" / str(rank)).exists()
            else collections.Counter()
            for rank in range(world_size)
        }
        return result, mappnb.attach(tmp_path / "run"), counts, settings

    return train


@pytest.mark.parametrize(("world_size", "changes"), LAYOUTS)
def test_recording_is_complete_and_changes_no_loss(recorded, world_size, changes):
    result, run, counts, settings = recorded(world_size, changes)
    plain = unrecorded(world_size, tuple(changes.items()))
    assert result.losses == plain.losses, "bit for bit, with recording on and off"
    assert result.grad_norms == plain.grad_norms
    assert result.losses[-1] < result.losses[0]
    assert run.meta["state"] == "ended" and not run.meta["degraded"] and run.meta["dropped"] == 0, run.meta
    assert not run.meta["problems"]
    events = run.sel()
    frame = events.to_dataframe()
    check_layout(run.layout, settings, world_size)
    check_microbatches(frame, run.layout, settings, world_size)
    check_transfers(frame, run, counts)
    check_nesting(frame)
    check_steps(run, result, settings)
    unwaited = (frame.op == "send") & (frame["flags"] == int(Flag.ASYNC | Flag.CLIPPED))
    assert unwaited.sum() <= (
        settings.steps * world_size if settings.vpp > 1 else 0
    )  # Megatron never waits for the last send
    assert not (frame[~unwaited]["flags"] & int(Flag.OPEN | Flag.CLIPPED | Flag.REPAIRED | Flag.FAILED)).any()


def check_layout(layout: Layout, settings, world_size):
    assert (layout.tp, layout.pp, layout.cp, layout.ep) == (settings.tp, settings.pp, settings.cp, settings.ep)
    assert layout.world_size == world_size and layout.num_chunks == settings.vpp


def check_microbatches(frame, layout, settings, world_size):
    """Each (step, chunk, microbatch) exactly one forward and one backward on every rank, in the right stage."""
    m = settings.num_microbatches(world_size)
    want = {(s, c, i) for s in range(settings.steps) for c in range(settings.vpp) for i in range(m)}
    for op in ("forward_step", "backward_step"):
        for rank in range(world_size):
            rows = frame[(frame.op == op) & (frame["rank"] == rank)]
            found = list(zip(rows.step, rows["chunk"].clip(lower=0), rows.microbatch, strict=True))
            assert len(found) == len(set(found)) == len(want) and set(found) == want, (op, rank)
            pp = layout.coords(rank)["pp"]
            assert {layout.place(int(s)) for s in rows.stage} == {(pp, c) for c in range(settings.vpp)}
    layers = frame[(frame.op == "layer") & (frame.phase == "forward")]
    assert set(layers.layer) == set(range(settings.layers))
    per_stage = settings.layers // (settings.pp * settings.vpp)
    assert len(layers) == world_size * settings.steps * m * settings.vpp * per_stage
    backward = frame[(frame.op == "layer") & (frame.phase == "backward")]
    assert len(backward) == len(layers)
    again = frame[(frame.op == "layer") & (frame.phase == "recompute")]
    assert len(again) == (len(layers) if settings.recompute else 0)


def check_transfers(frame, run, counts):
    """What the counter under the recorder saw, no more and no less; every member of every call; each send has its receive."""
    moving = frame[frame.category.isin(["collective", "p2p"])]
    assert set(moving.op) <= COLLECTIVE_OPS | P2P_OPS
    for rank, want in counts.items():
        found = collections.Counter(moving[moving["rank"] == rank].op)
        assert found == want, rank
    calls = analysis.match(run)
    assert bool(calls.complete.all()), calls.isel(call=np.flatnonzero(~calls.complete.values)).to_dataframe().head(10)
    collectives = moving[moving.category == "collective"]
    for _, rows in collectives.groupby(["rank", "group"]):
        assert sorted(rows.seq) == list(range(int(rows.seq.min()), int(rows.seq.min()) + len(rows))), "dense numbers"
    assert (moving.bytes[~moving.op.isin(["barrier", "all_to_all"])] > 0).all() and (moving.group >= 0).all()
    assert (moving.bytes >= 0)[moving.op == "all_to_all"].all()  # an expert may get no token
    pairs = collections.Counter()
    for row in moving[moving.category == "p2p"].itertuples():
        source, target = (row.rank, row.peer) if row.op == "send" else (row.peer, row.rank)
        pairs[source, target, row.group, row.seq] += 1 if row.op == "send" else -1
    assert not any(pairs.values()), "each send has its receive"


def check_nesting(frame):
    """Spans of one thread nest, transfers in flight apart; depth is the number of enclosing spans."""
    blocking = frame[(frame["flags"] & int(Flag.ASYNC)) == 0]
    for _, rows in blocking.groupby(["rank", "thread"]):
        rows = rows.assign(end=rows.start_ns + rows.duration_ns).sort_values(
            ["start_ns", "end"], ascending=[True, False]
        )
        stack: list[int] = []
        for start, end in zip(rows.start_ns, rows.end, strict=True):
            while stack and stack[-1] <= start:
                stack.pop()
            assert not stack or end <= stack[-1], "a span reaches beyond the one around it"
            stack.append(end)


def check_steps(run, result, settings):
    steps = run.steps
    assert steps["step"].values.tolist() == list(range(settings.steps))
    np.testing.assert_allclose(steps.loss.mean("rank"), result.losses, rtol=1e-6)
    np.testing.assert_allclose(steps.grad_norm.max("rank"), result.grad_norms, rtol=1e-6)
    np.testing.assert_allclose(steps.lr, settings.lr)
    np.testing.assert_allclose(steps.tokens_per_s * steps.step_s, settings.tokens_per_step)
    assert (steps.memory_bytes > 1e7).all() and (steps.memory_peak_bytes >= steps.memory_bytes).all()
    parts = analysis.breakdown(run)
    np.testing.assert_allclose(
        parts.seconds.sum("category"), np.broadcast_to(parts.window_s.values[:, None], parts.seconds.shape[:2])
    )
    assert (parts.seconds.sel(category="compute") > 0).all()
    if settings.experts:
        metrics = run.metrics.to_dataframe()
        expert = metrics[metrics.name == "expert_tokens"]
        assert set(expert["index"]) == set(range(settings.experts))
