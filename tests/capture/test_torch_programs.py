"""Programs without Megatron-core: steps, models, backward passes, checkpointing, pipelining, data, checkpoints."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from capture.checks import assert_nested, assert_p2p_match, patched_attributes
from capture.fake_session import FakeSession
from capture.ranks import run_ranks

from mappnb.capture.hostevents import GcProbe
from mappnb.capture.points import PLANS, build_probes
from mappnb.capture.torch_programs import TorchProbe, environment_rank
from mappnb.layout import Layout

torch = pytest.importorskip("torch")
NUM_BLOCKS, MICROBATCHES = 3, 2


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = torch.nn.Linear(8, 8)
        self.mlp = torch.nn.Linear(8, 8)

    def forward(self, x):
        return x + self.mlp(torch.relu(self.attn(x)))


class Net(torch.nn.Module):
    def __init__(self, checkpointing: str = "") -> None:
        super().__init__()
        self.emb = torch.nn.Embedding(10, 8)
        self.blocks = torch.nn.ModuleList([Block() for _ in range(NUM_BLOCKS)])
        self.head = torch.nn.Linear(8, 10)
        self.checkpointing = checkpointing

    def forward(self, ids):
        x = self.emb(ids)
        for block in self.blocks:
            if self.checkpointing and torch.is_grad_enabled():
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=self.checkpointing == "reentrant")
            else:
                x = block(x)
        return self.head(x)


def train(*, checkpointing: str = "", steps: int = 3) -> list[float]:
    """Train a small model; returns every loss and the sum of the weights at the end."""
    torch.manual_seed(0)
    model = Net(checkpointing)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = torch.utils.data.DataLoader(torch.randint(0, 10, (steps * MICROBATCHES * 2, 4)), batch_size=2)
    batches, losses = iter(loader), []
    for _ in range(steps):
        for _ in range(MICROBATCHES):
            ids = next(batches)
            loss = torch.nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        losses.append(model(ids).sum().item())
    return losses


@pytest.fixture(params=[False, True], ids=["native", "pure Python"])
def pure_python(request) -> bool:
    return request.param


def recorded(pure_python: bool = False, **options: Any) -> tuple[list[float], FakeSession, list[dict[str, Any]]]:
    session = FakeSession(pure_python=pure_python)
    session.start(*build_probes(PLANS["default"]))
    losses = train(**options)
    session.stop()
    return losses, session, session.events()


@pytest.mark.parametrize("checkpointing", ["", "reentrant", "non-reentrant"])
def test_every_step_microbatch_and_module(checkpointing, pure_python):
    plain = train(checkpointing=checkpointing)
    before = patched_attributes()
    losses, session, events = recorded(pure_python, checkpointing=checkpointing)
    assert patched_attributes() == before
    assert losses == plain, "recording changed the numbers"
    assert not session.failures and session.recorder.stats()["mismatched"] == 0
    assert_nested([e for e in events if e["op"] != "gc"])
    steps = [e for e in events if e["step"] >= 1 and e["microbatch"] >= 0]  # from the second step on all is hooked
    counts = Counter((e["op"], e["phase"]) for e in steps)
    num_passes = 2 * MICROBATCHES
    assert counts["forward_step", "forward"] == counts["backward_step", "backward"] == num_passes
    phases = ["forward", "backward", *(["recompute"] if checkpointing else [])]
    for op, number in (("layer", NUM_BLOCKS), ("attention", NUM_BLOCKS), ("mlp", NUM_BLOCKS)):
        for phase in phases:
            assert counts[op, phase] == number * num_passes, (op, phase)
    for op in ("embedding", "output_layer"):
        assert counts[op, "forward"] == counts[op, "backward"] == num_passes
    assert {e["layer"] for e in steps if e["op"] == "layer"} == set(range(NUM_BLOCKS))
    places = Counter((e["step"], e["microbatch"]) for e in events if e["op"] == "forward_step" and e["microbatch"] >= 0)
    assert places == {(step, microbatch): 1 for step in range(3) for microbatch in range(MICROBATCHES)}
    assert session.steps == [0, 1, 2]


def test_values_layout_and_model():
    losses, session, events = recorded()
    sums = session.step_sums()
    for step in range(3):
        assert sums[step]["loss"] == pytest.approx(sum(losses[2 * step : 2 * step + 2]) / 2)
        assert sums[step]["microbatches"] == MICROBATCHES and sums[step]["lr"] == 0.01
        assert "tokens" not in sums[step]
    assert session.layout == Layout() and session.model["class_name"] == "Net"
    assert session.model["parameters_local"] == sum(p.numel() for p in Net().parameters())
    assert sum(e["op"] == "next_batch" for e in events) == 3 * MICROBATCHES
    assert sum(e["op"] == "optimizer_step" for e in events) == 3


def test_copies_and_pickles_of_a_hooked_model_work(pure_python):
    session = FakeSession(pure_python=pure_python)
    probe = TorchProbe()
    session.start(probe)
    model = Net()
    probe.watch(model)
    copied, pickled = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    ids = torch.arange(4)[None]
    expected = model(ids)
    for other in (copied, pickled):
        assert torch.equal(other(ids), expected)
    session.stop()
    buffer = io.BytesIO()
    torch.save(model, buffer)
    num_events = len(session.events())
    pickled(ids).sum().backward()
    assert not session.events() and num_events and not session.failures


def test_hooks_of_the_user_on_the_same_tensors_still_run(pure_python):
    session = FakeSession(pure_python=pure_python)
    probe = TorchProbe()
    session.start(probe)
    model, seen = Net(), []
    probe.watch(model)

    def hook(module, args, output):
        handle = output.register_hook(lambda grad: seen.append(grad.shape))
        output.register_hook(lambda grad: 2 * grad)
        handle.id  # noqa: B018 (a handle that works)

    model.blocks[1].register_forward_hook(hook)
    model(torch.arange(4)[None]).sum().backward()
    doubled = model.emb.weight.grad.clone()
    session.stop()
    plain = Net()
    plain.load_state_dict(model.state_dict())
    plain.blocks[1].register_forward_hook(lambda m, a, y: y.register_hook(lambda grad: 2 * grad) and None)
    plain(torch.arange(4)[None]).sum().backward()
    assert torch.equal(doubled, plain.emb.weight.grad)
    assert seen == [(1, 4, 8)] and not session.failures


def test_no_tensor_is_kept_alive(pure_python):
    import weakref

    session = FakeSession(pure_python=pure_python)
    probe = TorchProbe()
    session.start(probe)
    model = Net()
    probe.watch(model)
    output = model(torch.arange(4)[None])
    loss = output.sum()
    alive = weakref.ref(output)
    del output
    loss.backward()
    del loss
    assert alive() is None
    session.stop()


def test_an_exception_in_the_model_passes_through(pure_python):
    class Broken(Block):
        def forward(self, x):
            raise KeyError("theirs")

    session = FakeSession(pure_python=pure_python)
    probe = TorchProbe()
    session.start(probe)
    model = Net()
    model.blocks.append(Broken())
    probe.watch(model)
    with pytest.raises(KeyError, match="theirs"):
        model(torch.arange(4)[None])
    model.blocks.pop(NUM_BLOCKS)
    model(torch.arange(4)[None]).sum().backward()
    session.stop()
    assert not session.failures
    assert session.recorder.stats()["mismatched"] == 0


def test_checkpoint_files_but_not_buffers(tmp_path: Path):
    session = FakeSession().start(TorchProbe())
    model = torch.nn.Linear(2, 2)
    torch.save(model.state_dict(), tmp_path / "x.pt")
    torch.load(tmp_path / "x.pt")
    torch.save(model.state_dict(), io.BytesIO())
    pickle.dumps(model)
    with pytest.raises(FileNotFoundError):
        torch.load(tmp_path / "absent.pt")
    session.stop()
    assert [(e["op"], e["flags"]) for e in session.events() if e["category"] == "checkpoint"] == [
        ("checkpoint_save", 0),
        ("checkpoint_load", 0),
        ("checkpoint_load", 32),
    ]


def test_garbage_collection():
    import gc

    session = FakeSession().start(GcProbe())
    gc.collect()
    session.stop()
    assert [e["name"] for e in session.events() if e["op"] == "gc"][-1] == "generation 2"


def test_switched_off_nothing_is_recorded(pure_python):
    session = FakeSession(pure_python=pure_python).start(*build_probes(PLANS["default"]))
    session.recorder.enabled = False
    train()
    session.stop()
    assert not session.events() and not session.values and not session.failures


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"RANK": "3", "WORLD_SIZE": "8"}, (3, 8)),
        ({"SLURM_PROCID": "1", "SLURM_NTASKS": "4"}, (1, 4)),
        ({"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "3"}, (2, 3)),
        ({"RANK": "x", "WORLD_SIZE": "8"}, None),
        ({}, None),
    ],
)
def test_rank_from_the_environment(monkeypatch, variables, expected):
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS", "OMPI_COMM_WORLD_RANK", "PMI_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert environment_rank() == expected


def test_recording_before_torch_is_imported():
    code = """
import sys
from capture.fake_session import FakeSession
from mappnb.capture.points import PLANS, build_probes
session = FakeSession(pure_python=False).start(*build_probes(PLANS["default"]))
assert "torch" not in sys.modules
finders = len(sys.meta_path)
import torch
model, data = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU(), torch.nn.Linear(2, 1)), torch.ones(3, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    model(data).sum().backward()
    optimizer.step()
session.stop()
assert not session.failures, session.failures
print(sum(e["op"] == "backward_step" for e in session.events()), session.steps)
"""
    tests = str(Path(__file__).parents[1])
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": tests, "OMP_NUM_THREADS": "1"},
        check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "2 [0, 1]"


# --------------------------------------------------------------------------------------------------------- pipelining
def pipeline(name: str, num_chunks: int) -> dict[str, Any]:
    """Two steps of a torch.distributed.pipelining schedule."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    session = FakeSession(pure_python=False)
    session.start(*build_probes(PLANS["default"]))
    from torch.distributed.pipelining import PipelineStage, schedules

    folded = name == "ScheduleZBVZeroBubble"
    indices = [rank, 2 * size - 1 - rank] if folded else [rank + size * chunk for chunk in range(num_chunks)]
    torch.manual_seed(0)
    modules = [torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)) for _ in indices]
    stages = [
        PipelineStage(module, index, size * num_chunks, torch.device("cpu"))
        for module, index in zip(modules, indices, strict=True)
    ]
    mse = torch.nn.functional.mse_loss
    schedule = getattr(schedules, name)(stages if num_chunks > 1 else stages[0], 4, loss_fn=mse)
    optimizer = torch.optim.SGD([p for module in modules for p in module.parameters()], lr=0.1)
    for _ in range(2):
        last = rank == (0 if folded else size - 1)
        arguments = [torch.randn(8, 8)] if rank == 0 else []
        schedule.step(*arguments, **({"target": torch.zeros(8, 8), "losses": []} if last else {}))
        optimizer.step()
        optimizer.zero_grad()
    session.stop()
    dist.barrier()
    return {
        "events": session.events(), "failures": repr(session.failures), "meta": session.meta, "layout": session.layout,
        "sums": session.step_sums(), "indices": indices, "mismatched": session.recorder.stats()["mismatched"],
    }  # fmt: skip


@pytest.mark.dist
@pytest.mark.parametrize(
    ("name", "num_chunks", "phases"),
    [
        ("Schedule1F1B", 1, {"backward"}),
        ("ScheduleGPipe", 1, {"backward"}),
        ("ScheduleInterleavedZeroBubble", 2, {"backward_input", "backward_weight"}),
        ("ScheduleZBVZeroBubble", 2, {"backward_input", "backward_weight"}),
    ],
)
def test_pipelining_stages(name, num_chunks, phases):
    ranks = run_ranks(pipeline, 2, name, num_chunks)
    for result in ranks:
        assert result["failures"] == "[]" and not result["meta"] and result["mismatched"] == 0
        assert_nested(result["events"])
        expected = {
            (step, stage, microbatch) for step in range(2) for stage in result["indices"] for microbatch in range(4)
        }
        for op, phase in [("forward_step", "forward"), *(("backward_step", phase) for phase in phases)]:
            found = [
                (e["step"], e["stage"], e["microbatch"])
                for e in result["events"] if e["op"] == op and e["phase"] == phase
            ]  # fmt: skip
            assert len(found) == len(expected) and set(found) == expected, (op, phase)
        layout = result["layout"]
        assert (layout.pp, layout.num_chunks) == (2, num_chunks)
        assert layout.stage_order == ("v" if name == "ScheduleZBVZeroBubble" else "interleaved")
        assert result["sums"][1]["microbatches"] == 4
    losses = [result["sums"][1].get("loss") for result in ranks]
    assert sum(loss is not None and loss > 0 for loss in losses) == 1
    steps = {rank: [e for e in result["events"] if e["step"] == 1] for rank, result in enumerate(ranks)}
    assert assert_p2p_match(steps) > 0


def sharded(record: bool) -> dict[str, Any]:
    """FSDP2 on two ranks."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    session = FakeSession(pure_python=False)
    if record:
        session.start(*build_probes(PLANS["default"]))
    torch.manual_seed(0)
    model = Net()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(3):
        torch.manual_seed(10 * step + dist.get_rank())
        loss = model(torch.randint(0, 10, (2, 4))).logsumexp(-1).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    session.stop()
    dist.barrier()
    return {"losses": losses, "events": session.events(), "failures": repr(session.failures), "groups": session.groups}


@pytest.mark.dist
def test_fully_sharded_models():
    from capture.checks import assert_collectives_match

    plain, ranks = run_ranks(sharded, 2, False), run_ranks(sharded, 2, True)
    for without, result in zip(plain, ranks, strict=True):
        assert result["failures"] == "[]" and result["losses"] == without["losses"]
        counts = Counter((e["op"], e["phase"]) for e in result["events"] if e["step"] == 2)
        assert counts["layer", "forward"] == counts["layer", "backward"] == NUM_BLOCKS
        assert counts["forward_step", "forward"] == counts["backward_step", "backward"] == 1
        assert counts["reduce_scatter", "none"] == NUM_BLOCKS + 1
    assert assert_collectives_match({r: result["events"] for r, result in enumerate(ranks)}, ranks[0]["groups"]) > 20


@pytest.mark.filterwarnings("ignore:Using `torch.compile:UserWarning")  # of our own hook: harmless
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # the compiler's own
@pytest.mark.parametrize("how", ["wrapped", "in place", "blocks"])
def test_compiled_models_train_as_without_recording(how):
    """A hook inside a graph stops the compiler where the whole graph is asked for: none may be there."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    net = Net()
    model = torch.compile(net, backend="eager", fullgraph=True) if how == "wrapped" else net
    for module in {"in place": [net], "blocks": list(net.blocks)}.get(how, []):
        module.compile(backend="eager", fullgraph=True)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    session = FakeSession(pure_python=False).start(TorchProbe())
    for _ in range(3):
        model(torch.zeros(2, 4, dtype=torch.long)).sum().backward()
        optimizer.step()
    events = {event["op"] for event in session.events()}
    session.stop()
    assert not session.failures
    assert ("forward_step" in events) == (how != "in place") and "layer" not in events
