"""The probe: hooks in wanted steps only, each tensor to its microbatch, refusal of what cannot work, training left alone."""

from __future__ import annotations

import json
import logging
import re
from collections import Counter, defaultdict
from typing import ClassVar

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the probe hooks torch modules")

from capture.fake_session import FakeSession  # noqa: E402

import mappnb  # noqa: E402
from mappnb import Capture, CapturePlan  # noqa: E402
from mappnb.capture.activations import metrics, sink  # noqa: E402
from mappnb.capture.activations.inputs import padding_of  # noqa: E402
from mappnb.capture.activations.microbatch import zigzag  # noqa: E402
from mappnb.capture.activations.probe import ActivationProbe  # noqa: E402
from mappnb.capture.points import build_probes, parse_plan  # noqa: E402
from mappnb.capture.torch_programs import TorchProbe  # noqa: E402
from mappnb.errors import CaptureError  # noqa: E402

NAMES = {
    "embed": "emb",
    "resid_pre": "blocks.*.input",
    "resid_post": "blocks.*",
    "mlp_pre": "blocks.*.up",
    "logits": "head",
}
MICROBATCHES = 2


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 12), torch.nn.Linear(12, 8)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Net(torch.nn.Module):
    def __init__(self, checkpointing: bool = False) -> None:
        super().__init__()
        self.emb = torch.nn.Embedding(10, 8)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(3))
        self.head = torch.nn.Linear(8, 10)
        self.checkpointing = checkpointing

    def forward(self, ids):
        x = self.emb(ids)
        for block in self.blocks:
            if self.checkpointing and torch.is_grad_enabled():
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        return self.head(x)


class FakeSink:
    """Keeps what the probe hands over."""

    made: ClassVar[list[FakeSink]] = []

    def __init__(self, plan, meta, folder, fail=None, *, tell=None) -> None:
        self.plan, self.meta, self.fail = plan, meta, fail
        self.begun, self.ended, self.closed = [], [], 0
        self.tensors: dict[tuple, torch.Tensor] = {}
        self.copies: dict[str, list] = defaultdict(list)
        FakeSink.made.append(self)

    def begin(self, info) -> None:
        self.begun.append(info)

    def put(self, rule, tap, tensor, grad=False, *, info) -> None:
        key = (info.step, info.microbatch, self.plan.rules[rule].name, tap.name)
        assert key not in self.tensors, f"{key} twice"
        self.tensors[key] = tensor.detach().clone()

    def weights(self, step, name, layer, tensor, shard, *, dtype="") -> None:
        self.tensors[step, -1, "weights", f"layers.{layer}.{name}" if layer >= 0 else name] = tensor.clone()

    def end_step(self, step) -> None:
        self.ended.append(step)

    def close(self) -> bool:
        self.closed += 1
        return True


@pytest.fixture
def fake(monkeypatch):
    FakeSink.made.clear()
    monkeypatch.setattr(sink, "ActivationSink", FakeSink)
    return FakeSink.made


def train(model, *, steps: int = 3, each=lambda step: None) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(steps):
        for microbatch in range(MICROBATCHES):
            ids = batch(step, microbatch)
            loss = torch.nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
            loss.backward()
            losses.append(loss.item())
        each(step)
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            model(ids)
        model.train()
    return losses


def batch(step: int, microbatch: int) -> torch.Tensor:
    return torch.randint(0, 10, (2, 4), generator=torch.Generator().manual_seed(10 * step + microbatch))


def recorded(plan: CapturePlan, model, **options) -> tuple[list[float], FakeSession]:
    session = FakeSession()
    session.start(TorchProbe(), ActivationProbe(plan))
    try:
        losses = train(model, **options)
    finally:
        session.stop()
    assert not session.failures
    return losses, session


def model(**options) -> Net:
    torch.manual_seed(0)
    return Net(**options)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_each_tensor_and_gradient_comes_once_with_its_microbatch(fake, checkpointing) -> None:
    plan = CapturePlan(Capture(["resid_post", "embed"], gradients=True, name="a"), names=NAMES)
    recorded(plan, model(checkpointing=checkpointing))
    (found,) = fake
    points = ["embed", *(f"layers.{n}.resid_post" for n in range(3))]
    wanted = {
        (s, m, "a", f"{p}{g}") for s in range(3) for m in range(MICROBATCHES) for p in points for g in ("", ".grad")
    }
    assert set(found.tensors) == wanted
    assert found.ended == [0, 1, 2] and found.closed == 1
    for info in found.begun:  # microbatches of the right tokens
        assert torch.equal(info.token_ids, batch(info.step, info.microbatch))
        assert info.batch == 2 and info.token_index.tolist() == [0, 1, 2, 3]
    reference = model()
    for m in range(MICROBATCHES):  # step 0 by hand: gradients of the same microbatch, by retain_grad
        x, kept = reference.emb(batch(0, m)), []
        kept.append(x)
        for block in reference.blocks:
            x = block(x)
            kept.append(x)
        for x in kept:
            x.retain_grad()
        torch.nn.functional.cross_entropy(reference.head(kept[-1]).flatten(0, 1), batch(0, m).flatten()).backward()
        for name, x in zip(points, kept, strict=True):
            torch.testing.assert_close(found.tensors[0, m, "a", name], x.detach())
            torch.testing.assert_close(found.tensors[0, m, "a", f"{name}.grad"], x.grad)


def test_hooks_are_on_in_wanted_steps_only(fake) -> None:
    net = model()
    hooks: dict[int, int] = {}

    def count(step: int) -> None:
        hooks[step] = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for b in net.blocks for m in (b, b.up))

    plan = CapturePlan(Capture(["resid_post", "mlp_pre"], every=2, steps=slice(2, 4)), names=NAMES)
    recorded(plan, net, steps=7, each=count)
    base = hooks[0]  # the spans of modules
    assert {step for step, n in hooks.items() if n > base} == {2, 4} and fake[0].ended == [2, 4]
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())


def test_rules_choose_layers_and_steps_by_themselves(fake) -> None:
    plan = CapturePlan(
        Capture("resid_post", layers="every 2", name="a"), Capture("layers.1.mlp_pre", steps=[1], name="b"), names=NAMES
    )
    recorded(plan, model())
    names = {(step, stream, name) for step, _, stream, name in fake[0].tensors}
    assert names == {(s, "a", f"layers.{n}.resid_post") for s in range(3) for n in (0, 2)} | {
        (1, "b", "layers.1.mlp_pre")
    }


def test_losses_are_bit_equal(fake) -> None:
    plan = CapturePlan(Capture("resid_post", gradients=True), Capture("mlp_pre", mode="stats"), names=NAMES)
    assert recorded(plan, model())[0] == train(model())


def test_metrics_go_to_the_session(fake, monkeypatch) -> None:
    monkeypatch.setattr(metrics, "METRICS", {})

    @mappnb.metric("largest")
    def largest(tensor, info):
        assert info.shard.dims == ("sample", "token", "hidden") and info.point == "resid_post"
        return tensor.abs().amax(dim=(0, 1))

    plan = CapturePlan(Capture("resid_post", layers=[2], mode="metric", metric="largest", steps=1), names=NAMES)
    _, session = recorded(plan, model())
    rows = [row for row in session.metrics if row["name"] == "largest"]
    assert [(r["step"], r["microbatch"], r["layer"], r["value"].shape) for r in rows] == [
        (1, m, 2, (8,)) for m in range(2)
    ]


def test_a_metric_is_registered_once(monkeypatch) -> None:
    monkeypatch.setattr(metrics, "METRICS", {})
    mappnb.metric("x")(largest := lambda tensor, info: 0)
    mappnb.metric("x")(largest)
    with pytest.raises(CaptureError, match="'x' is registered already"):
        mappnb.metric("x")(train)


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        (CapturePlan(Capture("layers.9.resid_post"), names=NAMES), "the model has layers 0 to 2"),
        (
            CapturePlan(Capture("resid_post", layers=[7]), names=NAMES),
            "layers \\[7\\], but the model has layers 0 to 2",
        ),
        (
            CapturePlan(Capture("resid_post", mode="metric", metric="no such"), names=NAMES),
            "no metric 'no such' is registered",
        ),
        (
            CapturePlan(Capture("resid_post"), names={"resid_post": "blocs.*"}),
            "no module 'blocs.*'.*did you mean 'blocks.*'",
        ),
    ],
)
def test_a_plan_that_does_not_fit_is_refused_and_training_goes_on(fake, caplog, plan, reason) -> None:
    with caplog.at_level(logging.WARNING, "mappnb"):
        losses, session = recorded(plan, model())
    assert losses == train(model())
    assert session.recorder.enabled and not session.meta.get("degraded")
    assert len(caplog.records) == 1
    assert re.search(reason, session.meta["degraded_activations"])
    assert not any(found.tensors for found in fake)


class Vectors(torch.nn.Module):
    """Called with numbers where others get token ids; ``src`` is no name that tells anything."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = torch.nn.ModuleList(Block() for _ in range(2)), torch.nn.Linear(8, 1)

    def forward(self, src):
        for block in self.blocks:
            src = block(src)
        return self.head(src)


@pytest.mark.parametrize("shape", [(3, 5, 8), (3, 8)])
def test_models_that_are_called_with_numbers(fake, shape) -> None:
    net, session = Vectors(), FakeSession()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    names = {"resid_post": "blocks.*"}
    session.start(TorchProbe(), ActivationProbe(CapturePlan(Capture("resid_post"), names=names)))
    for _ in range(2):
        net(torch.ones(shape)).sum().backward()
        optimizer.step()
    session.stop()
    if len(shape) == 3:
        assert [(b.step, b.batch, b.num_tokens, b.token_ids) for b in fake[0].begun] == [
            (s, 3, 5, None) for s in (0, 1)
        ]
        assert len(fake[0].tensors) == 4 and "degraded_activations" not in session.meta
    else:  # no tokens: said, not silently empty
        assert not fake[0].tensors and "expected token ids" in session.meta["degraded_activations"]


@pytest.mark.filterwarnings("ignore:Using `torch.compile:UserWarning")  # of our own hook: harmless
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # the compiler's own
@pytest.mark.parametrize("what", ["model", "in place", "blocks"])
def test_points_inside_compiled_modules_are_refused_and_named(fake, what) -> None:
    torch._dynamo.reset()
    net = model()
    plan = CapturePlan(Capture(["resid_post", "logits"]), names=NAMES)
    if what == "blocks":
        for block in net.blocks:
            block.compile(backend="eager", fullgraph=True)
        losses, session = recorded(plan, net)
        assert {name for *_, name in fake[0].tensors} == {"logits"}
        lost = "layers.1.resid_post: inside a module that torch.compile has compiled"
        assert lost in session.meta["missing_points"]
    else:
        if what == "in place":
            net.compile(backend="eager", fullgraph=True)
        called = net if what == "in place" else torch.compile(net, backend="eager", fullgraph=True)
        losses, session = recorded(plan, called)
        assert not fake and "compile" in session.meta["degraded_activations"]
    assert losses == train(model())


def test_a_plan_over_budget_is_refused_with_what_to_drop(fake) -> None:
    net, session = model(), FakeSession()
    probe = ActivationProbe(CapturePlan(Capture(["resid_post", "logits"]), budget_bytes=1000, names=NAMES))
    session.start(probe)
    probe.begin_schedule([net], sequence_length=16, micro_batch=2, num_microbatches=4)
    session.stop()
    assert (
        "above the budget of 1000 B; drop resid_post of 'full' (12.0 KiB), logits of 'full' (5.0 KiB)"
        in session.meta["degraded_activations"]
    )


def test_a_failing_sink_leaves_training_alone(fake, monkeypatch) -> None:
    def put(self, *args, **kwargs):
        raise OSError("disk full")

    monkeypatch.setattr(FakeSink, "put", put)
    losses, session = recorded(CapturePlan(Capture("resid_post"), names=NAMES), model())
    assert losses == train(model())
    assert session.meta["degraded_activations"] == "layers.0.resid_post: OSError: disk full"


def test_without_activations_there_is_no_probe() -> None:
    assert not any(isinstance(p, ActivationProbe) for p in build_probes(parse_plan("default")))
    assert isinstance(build_probes(parse_plan("default"), CapturePlan.named("default"))[-2], ActivationProbe)


def test_bad_plans_raise_before_anything_starts(tmp_path) -> None:
    with pytest.raises(CaptureError, match=r"unknown plan of activations 'residul'.*did you mean 'residual'"):
        mappnb.record(tmp_path / "run", activations="residul")
    with pytest.raises(CaptureError, match=r"unknown point 'resid_pots'.*did you mean 'resid_post'"):
        mappnb.record(tmp_path / "run", activations={"rules": [{"points": ["resid_pots"]}]})
    assert not (tmp_path / "run").exists()


def test_zigzag_has_each_slot_once() -> None:
    parts = [zigzag(16, rank, 4) for rank in range(4)]
    assert parts[1].tolist() == [2, 3, 12, 13]
    assert sorted(np.concatenate(parts)) == list(range(16))


def test_padding_by_mask() -> None:
    causal = torch.ones(6, 6, dtype=torch.bool).triu(1)
    padded = torch.stack([causal, causal | (torch.arange(6) < 2)])[:, None]
    slots = np.arange(6)
    assert padding_of(padded, 2, slots, 6).tolist() == [[True] * 6, [False, False, True, True, True, True]]
    assert padding_of(causal[None, None], 3, slots, 6).shape == (3, 6)
    mine = zigzag(8, 1, 2)  # of context parallelism: the rows of all queries, or only of the rank's
    whole = (torch.ones(8, 8, dtype=torch.bool).triu(1) | (torch.arange(8) < 3))[None, None]
    expected = [[slot >= 3 for slot in mine.tolist()]]
    assert padding_of(whole, 1, mine, 8).tolist() == expected == padding_of(whole[:, :, mine], 1, mine, 8).tolist()
    assert padding_of(torch.tensor([[0, 1, 1], [1, 1, 1]]), 2, np.arange(3), 3).tolist() == [
        [False, True, True],
        [True] * 3,
    ]
    assert padding_of(None, 1, slots, 6) is None and padding_of(torch.zeros(1, 1, 6, 6), 1, slots, 6) is None


def test_a_hugging_face_model_tells_its_tokens_from_the_first_call(tmp_path) -> None:
    transformers = pytest.importorskip("transformers", reason="needs the extra mappnb[huggingface]")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
    )
    net = transformers.LlamaForCausalLM(config)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    mask, ids = torch.ones(2, 8, dtype=torch.long), torch.randint(0, 64, (3, 2, 8))
    mask[0, :3] = 0
    with mappnb.record(tmp_path / "run", activations=CapturePlan(Capture("all", gradients=True))):
        for step in range(3):
            net(input_ids=ids[step], attention_mask=mask, labels=ids[step]).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    ds = mappnb.attach(tmp_path / "run").activations["full"].to_dataset()
    assert ds["step"].values.tolist() == [0, 0, 1, 1, 2, 2]
    np.testing.assert_array_equal(ds["token_id"].values.reshape(3, 2, 8), ids.numpy())
    np.testing.assert_array_equal(ds["mask"].values, np.tile(mask.numpy().astype(bool), (3, 1)))
    np.testing.assert_array_equal(ds["resid_pre"] + ds["attn_out"], ds["resid_mid"])
    assert np.abs(ds["resid_mid_grad"].values).max() > 0


@pytest.mark.dist
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(dict(tp=2, pp=2), marks=pytest.mark.slow),
        dict(pp=2, vpp=2),
        pytest.param(dict(cp=2, tp=2, sequence_parallel=True), marks=pytest.mark.slow),
    ],
)
def test_losses_and_collectives_are_the_same_with_activations(tmp_path, layout) -> None:
    pytest.importorskip("megatron.core", reason="needs the extra mappnb[megatron]")
    from mappnb.testing.gpt_settings import TrainSettings
    from mappnb.testing.launcher import launch

    plan = {
        "rules": [
            {"points": ["all"], "gradients": True},
            {"points": ["all"], "mode": "stats"},
            {"points": ["unembed"], "name": "w"},
        ]
    }
    results, calls = [], []
    for name, options in (("off", {}), ("on", {"activations": plan})):
        s = TrainSettings(
            layers=4,
            hidden=32,
            sequence_length=16,
            steps=3,
            global_batch=4,
            device="cpu",
            run_dir=str(tmp_path / name),
            record_options=options,
            **layout,
        )
        results.append(launch(s, world_size=4 if "tp" in layout else 2))
        run = mappnb.attach(tmp_path / name)
        events = run.events.to_dataframe()
        events = events[events.category.isin(["collective", "p2p"])]
        calls.append(Counter(zip(events["rank"], events["op"], events["bytes"], strict=True)))
        facts = [json.loads(file.read_text()) for file in (tmp_path / name).glob("inc=000/ranks/*.json")]
        assert facts and not any(f.get("degraded_activations") or f.get("degraded") for f in facts)
    assert results[0].losses == results[1].losses and results[0].grad_norms == results[1].grad_norms
    assert calls[0] == calls[1] and calls[0]
    assert list((tmp_path / "on").glob("inc=000/activations/rank=*/block-*.zarr.zip"))
