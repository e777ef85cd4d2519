"""Taps on plain torch models: Hugging Face's Llama and GPT-2 where installed, and a model of other names."""

from __future__ import annotations

import sys

import pytest

torch = pytest.importorskip("torch", reason="taps are on torch modules")

from mappnb.activation_points import POINTS  # noqa: E402
from mappnb.capture.activations.taps import attached, find_taps, model_facts, weights_of  # noqa: E402
from mappnb.errors import CaptureError  # noqa: E402

IDS = torch.tensor([[1, 5, 2, 7, 7, 3], [4, 4, 0, 9, 8, 1]])


def llama():
    transformers = pytest.importorskip("transformers", reason="needs the extra mappnb[huggingface]")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=16,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=32,
        attention_bias=True,
        mlp_bias=True,
    )
    config._attn_implementation = "eager"
    return transformers.LlamaForCausalLM(config).eval()


def gpt2():
    transformers = pytest.importorskip("transformers", reason="needs the extra mappnb[huggingface]")
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=16, n_embd=24, n_layer=2, n_head=4, n_positions=32)
    config._attn_implementation = "eager"
    return transformers.GPT2LMHeadModel(config).eval()


class Block(torch.nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            torch.nn.LayerNorm(hidden),
            torch.nn.Linear(hidden, 12),
            torch.nn.Linear(12, hidden),
        )

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Other(torch.nn.Module):
    """A model with names of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = torch.nn.Embedding(16, 8)
        self.blocks = torch.nn.ModuleList(Block(8) for _ in range(3))
        self.head = torch.nn.Linear(8, 16)

    def forward(self, input_ids):
        x = self.emb(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def capture(model, points=None, **call):
    seen: dict[str, torch.Tensor] = {}
    with attached(find_taps(model, points=points), lambda tap, x: seen.__setitem__(tap.name, x.detach().clone())):
        output = model(IDS, **call)
    return seen, output


@pytest.mark.parametrize("make", [llama, gpt2])
def test_points_fit_each_other_and_the_hidden_states_of_transformers(make) -> None:
    model = make()
    with torch.no_grad():
        seen, output = capture(model, output_hidden_states=True, output_attentions=True)
    gated = make is llama
    missing = {"router_prob", *(("mlp_pre",) if gated else ("mlp_gate", "mlp_up"))}
    assert {name.rpartition(".")[2] for name in seen} == set(POINTS) - missing
    hidden = output.hidden_states
    torch.testing.assert_close(seen["logits"], output.logits, rtol=0, atol=0)
    torch.testing.assert_close(seen["final_ln"], hidden[-1], rtol=0, atol=0)
    for layer in range(2):
        at = {name.rpartition(".")[2]: x for name, x in seen.items() if name.startswith(f"layers.{layer}.")}
        torch.testing.assert_close(at["resid_pre"], hidden[layer], rtol=0, atol=0)
        torch.testing.assert_close(at["resid_pre"] + at["attn_out"], at["resid_mid"])
        torch.testing.assert_close(at["resid_mid"] + at["mlp_out"], at["resid_post"])
        groups = at["q_rot"].shape[2] // at["k_rot"].shape[2]
        k, v = (at[name].repeat_interleave(groups, 2) for name in ("k_rot", "v"))
        scores = torch.einsum("bqhd,bkhd->bhqk", at["q_rot"], k) / at["q_rot"].shape[-1] ** 0.5
        pattern = scores.masked_fill(torch.ones(6, 6, dtype=torch.bool).triu(1), -torch.inf).softmax(-1)
        torch.testing.assert_close(pattern, output.attentions[layer], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(torch.einsum("bhqk,bkhd->bqhd", pattern, v), at["z"], rtol=1e-5, atol=1e-6)
        if gated:
            torch.testing.assert_close(torch.nn.functional.silu(at["mlp_gate"]) * at["mlp_up"], at["mlp_act"])
            assert not torch.equal(at["q"], at["q_rot"]) and torch.equal(
                at["q"][:, 0], at["q_rot"][:, 0]
            )  # position 0 is not turned
        else:
            assert torch.equal(at["q"], at["q_rot"])


@pytest.mark.parametrize("make", [llama, gpt2])
def test_weights_make_the_points_after_them(make) -> None:
    model = make()
    with torch.no_grad():
        seen, _ = capture(model)
    found = weights_of(model)
    assert found["unembed"][1].dims == ("vocab", "hidden")
    torch.testing.assert_close(seen["final_ln"] @ found["unembed"][0].T, seen["logits"])
    for layer in range(2):
        z, w_o, b_o = seen[f"layers.{layer}.z"], found[f"layers.{layer}.w_o"][0], found[f"layers.{layer}.b_o"][0]
        torch.testing.assert_close(torch.einsum("bthd,hdm->btm", z, w_o) + b_o, seen[f"layers.{layer}.attn_out"])
        w_out = found[f"layers.{layer}.w_out"][0]
        rest = seen[f"layers.{layer}.mlp_out"] - seen[f"layers.{layer}.mlp_act"] @ w_out
        torch.testing.assert_close(rest, rest[:1, :1].expand_as(rest))  # the bias alone is left
    assert set(weights_of(model, "layers.1.w_o")) == {"layers.1.w_o"}


@pytest.mark.parametrize("make", [llama, gpt2])
@pytest.mark.parametrize(
    "point", ["embed", "resid_pre", "ln1_out", "q", "k_rot", "v", "z", "attn_out", "mlp_act", "resid_post", "logits"]
)
def test_replacement_reaches_the_output_and_an_equal_one_changes_nothing(make, point) -> None:
    model = make()
    before = model(IDS).logits
    layers = None if not POINTS[point].per_layer else [0]
    with attached(find_taps(model, points=point, layers=layers), lambda tap, x: x.clone()):
        assert torch.equal(model(IDS).logits, before)
    with attached(find_taps(model, points=point, layers=layers), lambda tap, x: x + torch.randn_like(x)):
        assert not torch.allclose(model(IDS).logits, before)
    assert torch.equal(model(IDS).logits, before)


def test_the_rotary_function_is_the_models_own_again() -> None:
    model = llama()
    file = sys.modules[type(model.model.layers[0].self_attn).__module__]
    original = file.apply_rotary_pos_emb
    with attached(find_taps(model, points="q_rot"), lambda tap, x: None):
        assert file.apply_rotary_pos_emb is not original
    assert file.apply_rotary_pos_emb is original


def test_resid_mid_is_looked_at_but_not_replaced() -> None:
    model = gpt2()
    with attached(find_taps(model, points="layers.0.resid_mid"), lambda tap, x: x * 0):
        with pytest.raises(CaptureError, match=r"looked at, not replaced.*attn_out"):
            model(IDS)


def test_a_base_model_has_the_same_points_but_logits() -> None:
    model = llama()
    whole = {tap.name for tap in find_taps(model)}
    assert whole - {tap.name for tap in find_taps(model.model)} == {"logits"}


def test_facts_of_llama() -> None:
    facts = model_facts(llama())
    wanted = {
        "num_layers": 2,
        "hidden": 24,
        "num_heads": 6,
        "num_kv_heads": 2,
        "head_dim": 4,
        "ffn": 40,
        "vocab": 16,
        "gated": True,
    }
    assert {key: facts[key] for key in wanted} == wanted
    assert facts["rotary"]["base"] == 10000.0 and facts["normalization"] == "RMSNorm" and facts["dtype"] == "float32"


def test_other_models_by_names() -> None:
    torch.manual_seed(0)
    model = Other()
    names = {
        "embed": "emb",
        "resid_pre": "blocks.*.input",
        "mlp_pre": "blocks.*.up",
        "mlp_act": "blocks.*.down.input",
        "logits": "head",
    }
    taps = find_taps(model, names=names)
    assert [tap.name for tap in taps[:4]] == ["embed", "layers.0.resid_pre", "layers.0.mlp_pre", "layers.0.mlp_act"]
    seen: dict[str, torch.Tensor] = {}
    with attached(taps, lambda tap, x: seen.__setitem__(tap.name, x.detach())):
        logits = model(IDS)
    assert torch.equal(seen["layers.2.mlp_pre"].relu(), seen["layers.2.mlp_act"]) and torch.equal(
        seen["logits"], logits
    )
    assert torch.equal(seen["embed"], seen["layers.0.resid_pre"])


def test_names_that_do_not_exist() -> None:
    with pytest.raises(CaptureError, match=r"no module 'block.*'.*did you mean 'blocks.*'"):
        find_taps(Other(), names={"resid_post": "block.*"})
    with pytest.raises(CaptureError, match=r"unknown point 'resid_pots'.*did you mean 'resid_post'"):
        find_taps(Other(), names={"resid_pots": "blocks.*"})


def test_a_model_of_unknown_names_says_so() -> None:
    missing: list[str] = []
    assert find_taps(Other(), points="resid_post", missing=missing) == []
    assert "names=" in missing[0]


def test_gradients_are_those_of_autograd() -> None:
    model = Other()
    names = {"resid_post": "blocks.*", "mlp_act": "blocks.*.down.input"}
    seen: dict[str, torch.Tensor] = {}
    x = model.emb(IDS)
    kept = []
    for block in model.blocks:
        x = block(x)
        x.retain_grad()
        kept.append(x)
    model.head(x).square().sum().backward()
    with attached(
        find_taps(model, points=["resid_post.grad"], names=names), lambda tap, g: seen.__setitem__(tap.name, g.clone())
    ):
        model(IDS).square().sum().backward()
    assert list(seen) == [f"layers.{n}.resid_post.grad" for n in (2, 1, 0)]
    for n in range(3):
        assert torch.equal(seen[f"layers.{n}.resid_post.grad"], kept[n].grad)
