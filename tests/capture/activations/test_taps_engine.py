"""Taps on modules with Transformer Engine's names, and on layers that cannot be seen as a whole: stand-ins of the same calls."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="taps are on torch modules")

from mappnb.capture.activations.taps import attached, find_taps  # noqa: E402
from mappnb.errors import CaptureError  # noqa: E402

HIDDEN, HEADS, GROUPS, SIZE, FFN = 16, 4, 2, 4, 24


class IdentityOp(torch.nn.Module):
    def forward(self, x, *args, **kwargs):
        return x


class TELayerNormColumnParallelLinear(torch.nn.Module):
    """Norm and linear layer in one; returns (output, bias)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(width, HIDDEN))
        self.layer_norm_weight = torch.nn.Parameter(torch.randn(HIDDEN))

    def norm(self, x):
        return torch.nn.functional.rms_norm(x, (HIDDEN,), 1 + self.layer_norm_weight, 1e-6)

    def forward(self, x):
        return self.norm(x) @ self.weight.T, None


class TERowParallelLinear(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = torch.nn.Parameter(torch.randn(HIDDEN, width)), torch.nn.Parameter(torch.randn(HIDDEN))

    def forward(self, x):
        return x @ self.weight.T, self.bias


class TEDotProductAttention(torch.nn.Module):
    def forward(self, query, key, value, mask=None, **kwargs):
        assert query.shape[2:] == (HEADS, SIZE) and key.shape[2:] == (GROUPS, SIZE)
        return (query + value.repeat_interleave(HEADS // GROUPS, 2)).flatten(2)


class SelfAttention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear_qkv = TELayerNormColumnParallelLinear((HEADS + 2 * GROUPS) * SIZE)
        self.core_attention, self.linear_proj = TEDotProductAttention(), TERowParallelLinear(HEADS * SIZE)
        self.q_layernorm = self.k_layernorm = None

    def split(self, x):
        """As megatron-core does it, with view and split."""
        mixed, _ = self.linear_qkv(x)
        mixed = mixed.view(*mixed.shape[:2], GROUPS, -1)
        q, k, v = torch.split(mixed, [HEADS // GROUPS * SIZE, SIZE, SIZE], dim=3)
        return q.reshape(*q.shape[:2], -1, SIZE), k, v

    def forward(self, x, attention_mask=None):
        q, k, v = self.split(x)
        return self.linear_proj(self.core_attention(q + 1, k + 1, v, attention_mask))


class MLASelfAttention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear_proj = TERowParallelLinear(HIDDEN)

    def forward(self, x, attention_mask=None):
        return self.linear_proj(x)


class MLP(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear_fc1, self.linear_fc2 = TELayerNormColumnParallelLinear(FFN), TERowParallelLinear(FFN)

    def forward(self, x):
        return self.linear_fc2(self.linear_fc1(x)[0].relu())


class Layer(torch.nn.Module):
    def __init__(self, number: int, attention) -> None:
        super().__init__()
        self.layer_number = number
        self.input_layernorm = self.pre_mlp_layernorm = IdentityOp()
        self.self_attention, self.cross_attention, self.mlp = attention, IdentityOp(), MLP()
        self.pre_mlp_layernorm = IdentityOp()

    def forward(self, hidden_states, attention_mask=None):
        out, bias = self.self_attention(self.input_layernorm(hidden_states), attention_mask)
        hidden_states = self.cross_attention(hidden_states + out + bias)
        out, bias = self.mlp(self.pre_mlp_layernorm(hidden_states))
        return hidden_states + out + bias, None


class Model(torch.nn.Module):
    def __init__(self, attention=SelfAttention) -> None:
        super().__init__()
        self.config = SimpleNamespace(
            num_layers=2, hidden_size=HIDDEN, num_attention_heads=HEADS, num_query_groups=GROUPS, kv_channels=SIZE,
            ffn_hidden_size=FFN, layernorm_epsilon=1e-6, normalization="RMSNorm", layernorm_zero_centered_gamma=True,
        )  # fmt: skip
        self.decoder = torch.nn.Module()
        self.decoder.layers = torch.nn.ModuleList([Layer(3, attention()), Layer(4, attention())])  # a later stage
        self.pre_process = self.post_process = False

    def forward(self, x):
        for layer in self.decoder.layers:
            x, _ = layer(hidden_states=x)
        return x


def seen_in(model, points=None):
    missing: list[str] = []
    seen: dict[str, torch.Tensor] = {}
    taps = find_taps(model, points=points, missing=missing)
    x = torch.randn(5, 2, HIDDEN)
    with attached(taps, lambda tap, value: seen.__setitem__(tap.name, value.detach().clone())), torch.no_grad():
        model(x)
    return seen, missing, x


def test_norms_inside_linear_layers_are_computed_and_heads_come_apart() -> None:
    torch.manual_seed(0)
    model = Model()
    seen, missing, x = seen_in(model)
    assert missing == [] and "layers.2.ln1_out" in seen and "layers.3.ln2_out" in seen
    attention, mlp = model.decoder.layers[0].self_attention, model.decoder.layers[0].mlp
    torch.testing.assert_close(seen["layers.2.ln1_out"], attention.linear_qkv.norm(x).transpose(0, 1))
    q, k, v = (part.transpose(0, 1) for part in attention.split(x))
    assert (
        torch.equal(seen["layers.2.q"], q) and torch.equal(seen["layers.2.k"], k) and torch.equal(seen["layers.2.v"], v)
    )
    assert torch.equal(seen["layers.2.q_rot"], q + 1) and torch.equal(seen["layers.2.k_rot"], k + 1)
    torch.testing.assert_close(seen["layers.2.ln2_out"], mlp.linear_fc1.norm(seen["layers.2.resid_mid"]))
    torch.testing.assert_close(seen["layers.2.resid_pre"] + seen["layers.2.attn_out"], seen["layers.2.resid_mid"])
    torch.testing.assert_close(seen["layers.2.resid_mid"] + seen["layers.2.mlp_out"], seen["layers.2.resid_post"])


def test_a_computed_norm_has_no_gradient_and_is_not_replaced() -> None:
    model, missing = Model(), []
    assert find_taps(model, points="ln1_out.grad", missing=missing) == []
    assert missing == [
        f"layers.{n}.ln1_out: no gradient: this model computes the point inside another module" for n in (2, 3)
    ]
    with attached(find_taps(model, points="ln1_out"), lambda tap, x: x * 0):
        with pytest.raises(CaptureError, match="looked at, not replaced"):
            model(torch.randn(5, 2, HIDDEN))


def test_a_gradient_of_fused_heads_is_taken_apart_too() -> None:
    torch.manual_seed(0)
    model, seen = Model(), {}
    with attached(
        find_taps(model, points=["q.grad", "q_rot.grad"]), lambda tap, g: seen.__setitem__(tap.name, g.clone())
    ):
        model(torch.randn(5, 2, HIDDEN, requires_grad=True)).square().sum().backward()
    assert torch.equal(seen["layers.2.q.grad"], seen["layers.2.q_rot.grad"])  # q + 1


def test_latent_attention_is_told_and_the_rest_is_seen() -> None:
    seen, missing, _ = seen_in(Model(MLASelfAttention), points=["q", "z", "attn_out", "resid_post"])
    assert set(seen) == {f"layers.{n}.{p}" for n in (2, 3) for p in ("attn_out", "resid_post")}
    why = "MLASelfAttention does not split queries, keys and values as SelfAttention does"
    assert missing == [f"layers.{n}.{p}: {why}" for n in (2, 3) for p in ("q", "z")]
