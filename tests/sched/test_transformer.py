"""Costs.from_model: the papers' closed forms, a torch module's parameters, torch's own count of FLOPs."""

from __future__ import annotations

import math

import numpy as np
import pytest

from mappnb import plan
from mappnb.errors import CostError
from mappnb.sched import Costs, Device, Transformer, schedule, simulate

UNIT = Device(peak_flops=1.0, efficiency=1.0)


def plain(h=64, a=4, s=32, b=2, **more):
    """The layer of the papers: hidden h, heads a, sequence s, microbatch b."""
    sizes = {"num_layers": 4, "vocab_size": 128, **more}
    return Transformer(hidden=h, num_heads=a, seq_length=s, microbatch_size=b, **sizes)


@pytest.mark.parametrize("t", [1, 2, 4])
@pytest.mark.parametrize(("h", "a", "s", "b"), [(64, 4, 32, 2), (12288, 96, 2048, 1)])
def test_zero_bubble_table_1(h, a, s, b, t):
    """arXiv:2401.10241, Table 1: FLOPs of F, B and W, memory of B and W; tensor and sequence parallelism divide all of it."""
    model = plain(h, a, s, b, tp=t)
    flops = model.layer_flops()
    assert flops.forward == s * b * h * (24 * h + 4 * s) / t
    assert flops.backward_input == s * b * h * (24 * h + 8 * s) / t
    assert flops.backward_weight == 24 * s * b * h * h / t
    assert model.layer_activation_bytes() == pytest.approx(s * b * (34 * h + 5 * a * s) / t)
    assert model.layer_weight_bytes() == pytest.approx(32 * s * b * h / t)
    assert model.message_bytes == 2 * s * b * h / t


@pytest.mark.parametrize("t", [1, 2, 8])
def test_korthikanti_table_2(t):
    """arXiv:2205.05198, Table 2: activation bytes of a layer by technique."""
    h, a, s, b = 6144, 64, 2048, 4
    sbh, scores = s * b * h, 5 * a * s / h
    one = plain(h, a, s, b, tp=t)
    apart = plain(h, a, s, b, tp=t, sequence_parallel=False)
    assert apart.layer_activation_bytes() == pytest.approx(sbh * (10 + 24 / t + scores / t))
    assert one.layer_activation_bytes() == pytest.approx(sbh / t * (34 + scores))
    assert apart.layer_activation_bytes("selective") == pytest.approx(sbh * (10 + 24 / t))
    assert one.layer_activation_bytes("selective") == pytest.approx(sbh * 34 / t)
    assert one.layer_activation_bytes("full") == 2 * sbh


@pytest.mark.parametrize(
    ("h", "a", "layers", "billions", "scores", "saved"),
    [(12288, 96, 96, 175, 80, 0.70), (20480, 128, 105, 530, 64, 0.65)],
)
def test_the_numbers_korthikanti_prints(h, a, layers, billions, scores, saved):
    """arXiv:2205.05198, section 5: 5as/h is 80 for GPT-3 and 64 for MT-NLG; selective recomputation keeps 70 and 65 % less."""
    model = plain(h, a, 2048, 1, num_layers=layers, vocab_size=51200, learned_positions=2048)
    assert model.parameters / 1e9 == pytest.approx(billions, rel=0.01)
    assert 5 * a * 2048 / h == scores
    assert 1 - model.layer_activation_bytes("selective") / model.layer_activation_bytes() == pytest.approx(
        saved, abs=0.006
    )


@pytest.mark.parametrize(("h", "layers", "billions"), [(6144, 48, 22), (25600, 128, 1008)])
def test_parameters_of_the_other_published_models(h, layers, billions):
    """22B and 1T of the same paper (and of arXiv:2104.04473, Table 1: 1008 billion)."""
    model = plain(
        h, h // 128 if h > 10000 else 64, 2048, 1, num_layers=layers, vocab_size=51200, learned_positions=2048
    )
    assert model.parameters / 1e9 == pytest.approx(billions, rel=0.02)


@pytest.mark.parametrize(
    ("h", "a", "layers", "microbatch", "full_s", "selective_s"),
    [
        (6144, 64, 48, 4, 1.42, 1.10),
        (12288, 96, 96, 1, 18.13, 13.75),
        (20480, 128, 105, 1, 49.05, 37.83),
        (25600, 160, 128, 1, 94.42, 71.49),
    ],
)
def test_full_against_selective_recomputation_as_measured(h, a, layers, microbatch, full_s, selective_s):
    """arXiv:2205.05198, Table 5: iteration times of 22B, 175B, 530B and 1T on A100; the ratio needs no efficiency."""
    rank = {}
    for how in ("full", "selective"):
        model = plain(h, a, 2048, microbatch, num_layers=layers, vocab_size=51200, tp=8, recompute=how)
        costs = Costs.from_model(model, pipeline_ranks=1, device=Device(peak_flops=312e12))
        rank[how] = float(np.mean(costs.forward_s + costs.backward_input_s + costs.backward_weight_s))
    assert rank["full"] / rank["selective"] == pytest.approx(full_s / selective_s, rel=0.03)


def test_recomputation_adds_to_the_backward_and_takes_from_the_activations():
    flops = {r: plain(recompute=r).layer_flops() for r in ("none", "selective", "full")}
    s, b, h = 32, 2, 64
    assert flops["selective"].backward_input - flops["none"].backward_input == 4 * s * b * h * s
    assert flops["full"].backward_input - flops["none"].backward_input == flops["none"].forward
    assert {f.forward for f in flops.values()} == {flops["none"].forward}
    kept = [plain(recompute=r).layer_activation_bytes() for r in ("none", "selective", "full")]
    assert kept[0] > kept[1] > kept[2]


def test_gates_groups_and_context_parallelism():
    model = Transformer(
        hidden=4096, num_layers=32, num_heads=32, num_query_groups=8, ffn_hidden=14336, vocab_size=128256, seq_length=8192,
        gated=True, bias=False, dropout=False, tied_embeddings=False,
    )  # fmt: skip
    assert model.parameters == 8_030_261_248, "Llama 3 8B, as its checkpoint counts"
    halves = Transformer(**{**{f: getattr(model, f) for f in model.__dataclass_fields__}, "cp": 2})
    assert halves.layer_flops().forward == model.layer_flops().forward / 2
    assert halves.message_bytes == model.message_bytes / 2


def module(torch, model):
    """The same model in torch, with attention as plain matrix products (torch counts those)."""

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            h, q, k = model.hidden, model.query_size, model.key_size
            linear = lambda i, o: torch.nn.Linear(i, o, bias=model.bias)  # noqa: E731
            self.norms = torch.nn.ModuleList([torch.nn.LayerNorm(h, bias=model.bias) for _ in range(2)])
            self.qkv, self.proj = linear(h, q + 2 * k), linear(q, h)
            self.up, self.down = linear(h, model.up_size), linear(model.ffn, h)

        def forward(self, x):
            b, s, _ = x.shape
            parts = self.qkv(self.norms[0](x)).split([model.query_size, model.key_size, model.key_size], -1)
            q, k, v = (p.reshape(b, s, -1, model.query_size // model.num_heads).transpose(1, 2) for p in parts)
            k, v = (t.repeat_interleave(model.num_heads // model.groups, dim=1) for t in (k, v))
            scores = torch.softmax(q @ k.transpose(-1, -2), -1)
            x = x + self.proj((scores @ v).transpose(1, 2).reshape(b, s, -1))
            y = self.up(self.norms[1](x))
            if model.gated:
                gate, y = y.chunk(2, -1)
                y = torch.nn.functional.silu(gate) * y
            return x + self.down(torch.nn.functional.gelu(y))

    return Layer


@pytest.mark.oracle
@pytest.mark.parametrize("more", [{}, {"gated": True, "num_query_groups": 2, "ffn_hidden": 96, "bias": False}])
def test_parameters_and_flops_as_torch_counts_them(more):
    torch = pytest.importorskip("torch", reason="counts with torch")
    from torch.utils.flop_counter import FlopCounterMode

    model = plain(**more)
    layer = module(torch, model)()
    assert sum(p.numel() for p in layer.parameters()) == model.layer_parameters
    norm = torch.nn.LayerNorm(64, bias=model.bias)
    embedding, head = torch.nn.Embedding(128, 64), torch.nn.Linear(64, 128, bias=False)
    assert sum(p.numel() for p in [*norm.parameters(), *head.parameters()]) == model.head_parameters
    assert embedding.weight.numel() == model.embedding_parameters
    x = torch.randn(2, 32, 64, requires_grad=True)
    flops = model.layer_flops()
    with FlopCounterMode(display=False) as forward:
        y = layer(x)
    assert forward.get_total_flops() == flops.forward
    with FlopCounterMode(display=False) as backward:
        y.sum().backward()
    assert backward.get_total_flops() == flops.backward_input + flops.backward_weight
    with FlopCounterMode(display=False) as last:
        head(x)
    assert last.get_total_flops() == model.head_flops().forward


def test_costs_add_up_to_the_model_whatever_the_chunks():
    model = plain(num_layers=16)
    costs = Costs.from_model(model, pipeline_ranks=4, device=UNIT)
    layer, head = model.layer_flops(), model.head_flops()
    for chunks in (1, 2, 4):
        sched = schedule("interleaved", num_stages=4 * chunks, num_chunks=chunks, num_microbatches=8)
        table = costs.tables(sched)
        forward, whole, _, weight = table.duration_s[:, :, 0]
        assert forward.sum() == pytest.approx(16 * layer.forward + head.forward)
        assert whole.sum() == pytest.approx(
            16 * (layer.backward_input + layer.backward_weight) + head.backward_input + head.backward_weight
        )
        assert weight.sum() == pytest.approx(16 * layer.backward_weight + head.backward_weight)
        assert forward[0] == pytest.approx(16 / (4 * chunks) * layer.forward)
        assert forward[-1] == pytest.approx(forward[0] + head.forward), "the loss is the last stage's"
        assert table.activation.sum() == pytest.approx(
            16 * model.layer_activation_bytes() + model.embedding_activation_bytes() + model.head_activation_bytes()
        )


def test_a_split_takes_layers_from_the_last_stage():
    model = plain(num_layers=14, vocab_size=2048)
    even = Costs.from_model(plain(num_layers=16, vocab_size=2048), pipeline_ranks=4, device=UNIT)
    costs = Costs.from_model(model, pipeline_ranks=4, device=UNIT, layer_split=[4, 4, 4, 2])
    one = model.layer_flops().forward
    np.testing.assert_allclose(costs.forward_s, [4 * one, 4 * one, 4 * one, 2 * one + model.head_flops().forward])
    sched = schedule("1f1b", num_stages=4, num_microbatches=16)
    assert float(simulate(sched, costs).makespan_s) < float(simulate(sched, even).makespan_s)
    layers = model.layer_parameters
    embedding, head = model.embedding_parameters, model.head_parameters
    expected = np.array([4 * layers + embedding, 4 * layers, 4 * layers, 2 * layers + head]) * 18
    np.testing.assert_allclose(costs.static_memory, expected)


def test_static_memory_by_rank():
    v = Costs.from_model(plain(num_layers=16), pipeline_ranks=4, device=UNIT, layer_split=[2] * 8, stage_order="v")
    loop = Costs.from_model(plain(num_layers=16), pipeline_ranks=4, device=UNIT)
    assert np.argmax(v.static_memory) == 0 and v.static_memory[1] == v.static_memory[3], "both ends are rank 0's"
    assert loop.static_memory.sum() == pytest.approx(v.static_memory.sum())
    sharded = Costs.from_model(plain(num_layers=16, dp=4, distributed_optimizer=True), pipeline_ranks=4, device=UNIT)
    np.testing.assert_allclose(sharded.static_memory, loop.static_memory * (6 + 12 / 4) / 18)


def test_device_numbers():
    device = Device(
        peak_flops=100.0,
        efficiency=0.5,
        memory_bandwidth=1e3,
        link_latency_s=0.1,
        link_bandwidth=7.0,
        data_bandwidth=10.0,
    )
    assert device.seconds(100.0, 1e3) == 3.0
    model = plain(num_layers=4, dp=4)
    costs = Costs.from_model(model, pipeline_ranks=2, device=device)
    assert (costs.p2p_s, costs.bandwidth, costs.message_bytes) == (0.1, 7.0, model.message_bytes)
    gradients = 4 * (4 * model.layer_parameters + model.embedding_parameters + model.head_parameters)
    table = costs.tables(schedule("1f1b", num_stages=2, num_microbatches=4))
    assert table.reduce_s.sum() == pytest.approx(gradients * 2 * 3 / 4 / 10.0)
    assert costs.optimizer_s > 0
    layer = model.layer_flops()
    assert table.duration_s[0, 0, 0] == pytest.approx(
        2 * (layer.forward / 50 + 2 * model.layer_activation_bytes() / 1e3)
    )
    free = Costs.from_model(plain(num_layers=4), pipeline_ranks=2, device=UNIT)
    assert not np.any(free.reduce_s) and free.optimizer_s == 0.0 and math.isinf(free.bandwidth)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"hidden": 0}, "hidden is 0"),
        ({"recompute": "selectiv"}, "did you mean 'selective'"),
        ({"h": 65}, "no multiple of num_heads"),
        ({"num_query_groups": 3}, "multiple of num_query_groups"),
        ({"tp": 3}, "and tp"),
    ],
)
def test_sizes_that_cannot_be(changes, text):
    sizes = {"hidden": changes.pop("h", 64), "num_layers": 4, "num_heads": 4, "vocab_size": 128, "seq_length": 32}
    with pytest.raises(CostError, match=text):
        Transformer(**{**sizes, **changes})


def test_splits_and_devices_that_cannot_be():
    with pytest.raises(CostError, match="4 layers for 8 pipeline ranks"):
        Costs.from_model(plain(), pipeline_ranks=8, device=UNIT)
    with pytest.raises(
        CostError, match=r"30 layers do not divide by 4 .* take 28 or 32 layers.*layer_split=\[7, 7, 8, 8\]"
    ):
        Costs.from_model(plain(num_layers=30), pipeline_ranks=4, device=UNIT)
    with pytest.raises(CostError, match="'even'; expected the layers of each stage, or 'free'"):
        Costs.from_model(plain(), pipeline_ranks=2, device=UNIT, layer_split="even")
    free = Costs.from_model(plain(num_layers=30, vocab_size=2048), pipeline_ranks=4, device=UNIT, layer_split="free")
    table = plan(free, num_stages=4, num_microbatches=8, num_layers=30, schedules=("1f1b",), policies=False, trials=0)
    assert len(free.forward_s) == 30 and sum(table.layers[0]) == 30
    with pytest.raises(CostError, match="a multiple of 2 stages, 4 layers together"):
        Costs.from_model(plain(), pipeline_ranks=2, device=UNIT, layer_split=[2, 1])
    with pytest.raises(CostError, match="expected 'interleaved' or 'v'"):
        Costs.from_model(plain(), pipeline_ranks=2, device=UNIT, stage_order="loop")
    with pytest.raises(CostError, match="peak_flops is 0"):
        Device(peak_flops=0)
    with pytest.raises(CostError, match="efficiency"):
        Device(peak_flops=1, efficiency=2)
