"""Models of transformers: looked into where they are, and converted to megatron-core; transformers eager is the truth."""

from __future__ import annotations

import numpy as np
import pytest

from mappnb.interp import Model, attention_pattern
from mappnb.testing.llama_shape import CheckpointError

torch = pytest.importorskip("torch", reason="needs torch and megatron-core")
pytest.importorskip("megatron.core", reason="needs torch and megatron-core")
transformers = pytest.importorskip("transformers", reason="needs the extra mappnb[huggingface]")

from capture.ranks import run_ranks  # noqa: E402
from interp.llama_models import POINTS, converted, hf_llama, inside, padded_batch  # noqa: E402

from mappnb.testing.llama import LlamaCheckpoint, load_llama, megatron_llama  # noqa: E402

PRELOAD = ("mappnb.testing.gpt_train", "mappnb.testing.gpt_model")
LAYOUTS = {
    "single": (1, {}),
    "tp2": (2, {"tp": 2}),
    "pp2": (2, {"pp": 2}),
    "tp2 pp2 sp": (4, {"tp": 2, "pp": 2, "sequence_parallel": True}),
    "pp2 interleaved": (2, {"pp": 2, "vpp": 2}),
    "tp4: a key-value head on two ranks": (4, {"tp": 4}),
    "cp2": (2, {"cp": 2}),
}
PLAIN = ("single", "tp2")


def compare(points, patterns, truth, true_patterns, mask):
    """Real tokens only; within 1e-5 of the largest value of the point."""
    for name, wanted in truth.items():
        found = points[name]
        assert found.shape[: wanted.ndim - 1] == wanted.shape[:-1], name
        for sample, real in enumerate(mask):
            axis = wanted[sample].ndim - (3 if name in ("q", "k", "v", "q_rot", "k_rot", "z") else 2)
            left, right = (np.compress(real, part[sample], axis) for part in (found, wanted))
            scale = max(1.0, float(np.abs(right).max()))
            np.testing.assert_allclose(
                left[..., : right.shape[-1]], right, atol=1e-5 * scale, rtol=0, err_msg=f"{name} {sample}"
            )
    for sample, real in enumerate(mask):
        grid = np.ix_(range(patterns.shape[1]), range(patterns.shape[2]), np.flatnonzero(real), np.flatnonzero(real))
        np.testing.assert_allclose(patterns[sample][grid], true_patterns[sample][grid], atol=1e-5)


@pytest.fixture(scope="module")
def llama():
    return hf_llama()


@pytest.fixture(scope="module")
def folder(llama, tmp_path_factory):
    where = tmp_path_factory.mktemp("llama")
    llama.save_pretrained(where)
    return str(where)


def greedy(model, tokens, mask, count):
    rows = [tokens[sample][real][None] for sample, real in enumerate(mask)]
    return [model.generate(torch.from_numpy(row), max_new_tokens=count, do_sample=False)[0].tolist() for row in rows]


@pytest.mark.dist
@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in PLAIN else [pytest.mark.slow]) for n in LAYOUTS])
def test_converted_llama_computes_what_transformers_computes(llama, folder, name):
    """Ladder (c): every point, attention pattern, logit and greedy token, of a folder of safetensors cut over ranks."""
    tokens, mask = padded_batch()
    truth, true_patterns = inside(llama, tokens, mask)
    texts = greedy(llama, tokens, mask, 5)
    ranks, layout = LAYOUTS[name]
    results = run_ranks(converted, ranks, folder, layout, tokens, mask, timeout_s=240, preload=PRELOAD)
    for points, patterns, text in results:
        assert set(truth) == set(POINTS)
        compare(points, patterns, truth, true_patterns, mask)
        for sample, real in enumerate(mask):
            np.testing.assert_allclose(
                points["output"][sample][real], truth["logits"][sample][real], atol=1e-5 * np.abs(truth["logits"]).max()
            )
            assert text[sample][text[sample] >= 0].tolist() == texts[sample]


@pytest.mark.parametrize("kind", ["eager", "sdpa"])
def test_transformers_model_is_looked_into_where_it_is(kind):
    """The same API without megatron-core: taps by module names."""
    model = hf_llama(layers=2, tied=True, head_dim=16)
    tokens, mask = padded_batch()
    truth, true_patterns = inside(model, tokens, mask)
    model.set_attn_implementation(kind)
    run = Model(model).forward(tokens, mask, capture=POINTS)
    patterns = np.stack([attention_pattern(run.activations, layer=None, head=None, sample=n).values for n in range(3)])
    compare({name: run.activations[name].values for name in POINTS}, patterns, truth, true_patterns, mask)


def test_tied_llama_converts_in_memory():
    """Without a folder, heads wider than hidden / heads, output layer tied to the embedding."""
    model = hf_llama(layers=2, tied=True, head_dim=16)
    tokens, mask = padded_batch()
    truth, _ = inside(model, tokens, mask)
    with megatron_llama(model) as chunks:
        assert chunks[0].share_embeddings_and_output_weights
        logits = Model(chunks).forward(tokens, mask).logits.values
    for sample, real in enumerate(mask):
        np.testing.assert_allclose(
            logits[sample][real], truth["logits"][sample][real], atol=1e-5 * np.abs(logits).max()
        )


def test_wrong_order_of_fused_rows_would_be_seen(monkeypatch):
    """The fault of nnsight's pull request 719: [all q, all k, all v] in place of [q of a group, k, v]."""
    from mappnb.testing import llama as module

    model = hf_llama(layers=2)
    tokens, mask = padded_batch()
    truth, _ = inside(model, tokens, mask)
    monkeypatch.setattr(module, "_interleaved", lambda qkv, shape: torch.cat(list(qkv)))
    with megatron_llama(model) as chunks:
        logits = Model(chunks).forward(tokens, mask).logits.values
    assert np.abs(logits - truth["logits"])[mask].max() > 0.1


def test_checkpoints_that_do_not_fit(llama, folder, tmp_path):
    good = LlamaCheckpoint.open(folder)
    for layout, words in [
        ({"tp": 3}, "tp is 3: 4 heads, 2 key-value heads and 48 neurons cannot be cut so; expected tp of 1, 2"),
        ({"pp": 3}, "pp 3 x vpp 1: 4 layers cannot be cut so; expected pp x vpp of 1, 2, 4"),
    ]:
        with pytest.raises(CheckpointError, match=words), megatron_llama(good, **layout):
            pass
    with pytest.raises(CheckpointError, match=r"no config\.json; expected a folder of a Llama"):
        LlamaCheckpoint.open(tmp_path)
    for option, words in [
        ({"attention_bias": True}, "attention_bias is True; only Llamas with False are converted"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; only Llamas with 'silu'"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "rope_type is 'llama3'"),
        ({"model_type": "mistral"}, "model_type is 'mistral'"),
    ]:
        with pytest.raises(CheckpointError, match=words):
            good.shape.of_config({**llama.config.to_dict(), **option})
    with pytest.raises(CheckpointError, match="num_hidden_layers missing"):
        good.shape.of_config({k: v for k, v in llama.config.to_dict().items() if k != "num_hidden_layers"})


def test_model_of_other_sizes_is_left_alone(llama):
    from dataclasses import replace

    good = LlamaCheckpoint.of(llama)
    sizes = dict(good.shapes())
    with megatron_llama(llama) as chunks:
        before = {name: weight.clone() for name, weight in chunks[0].named_parameters()}
        name = "model.layers.1.self_attn.k_proj.weight"
        for changed, words in [
            (
                {**sizes, name: (8, 32)},
                r"k_proj\.weight is \(8, 32\); expected \(16, 32\): 16 = num_query_groups 2 x kv_channels 8; "
                r"num_query_groups \(Hugging Face: num_key_value_heads\) would be 1, not 2",
            ),
            (
                {**sizes, "model.layers.3.mlp.down_proj.weight": (32, 64)},
                r"ffn_hidden_size \(Hugging Face: intermediate_size\) would be 64, not 48",
            ),
            ({n: s for n, s in sizes.items() if n != "lm_head.weight"}, r"no tensor 'lm_head\.weight'; expected one"),
            ({n: s for n, s in sizes.items() if ".2." not in n}, r"no tensor 'model\.layers\.2\..*and 8 more"),
            ({**sizes, "model.norm.weight": (32, 1)}, r"model\.norm\.weight is \(32, 1\); expected \(32,\)"),
        ]:
            with pytest.raises(CheckpointError, match=words):
                load_llama(chunks, replace(good, _sizes=changed))
        for setting, value, words in [
            ("rope_base", 1e6, r"the model has rotary_base=5000\.0, the checkpoint rope_theta=1000000\.0: build"),
            ("tied", True, "share_embeddings_and_output_weights=False, the checkpoint tie_word_embeddings=True"),
            ("vocab", 200, "vocab_size=99, the checkpoint vocab_size=200"),
        ]:
            with pytest.raises(CheckpointError, match=words):
                load_llama(chunks, replace(good, shape=replace(good.shape, **{setting: value})))
        assert all(torch.equal(before[name], weight) for name, weight in chunks[0].named_parameters())


def test_names_of_transformer_engine_and_of_no_llama():
    """Norms fused into linear layers, and global layer numbers; a bias is refused."""
    from types import SimpleNamespace

    from mappnb.testing.llama import _sources

    layer = SimpleNamespace(layer_number=7)
    core = SimpleNamespace(share_embeddings_and_output_weights=True, decoder=SimpleNamespace(layers=[layer]))
    fused = {"self_attention.linear_qkv": "input_layernorm", "mlp.linear_fc1": "post_attention_layernorm"}
    for linear, norm in fused.items():
        name = f"decoder.layers.0.{linear}.layer_norm_weight"
        assert _sources(core, name) == (f"model.layers.6.{norm}.weight",)
    assert _sources(core, "output_layer.weight") == ("model.embed_tokens.weight",)
    for name in (
        "decoder.layers.0.self_attention.linear_qkv.bias",
        "decoder.layers.0.self_attention.q_layernorm.weight",
    ):
        with pytest.raises(CheckpointError, match=r"'decoder\.layers\.6\..*which no Llama has; expected a GPTModel"):
            _sources(core, name)
