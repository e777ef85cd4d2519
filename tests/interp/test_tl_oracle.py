"""TransformerLens' bridge and a converted megatron-core model: the same values under the names that the alias table promises."""

from __future__ import annotations

import numpy as np
import pytest

from mappnb.activation_points import alias
from mappnb.interp import Model, attention_pattern, head_statistics

pytestmark = [
    pytest.mark.oracle,
    pytest.mark.slow,
    # of TransformerLens and what it imports
    pytest.mark.filterwarnings("ignore"),
]
torch = pytest.importorskip("torch", reason="needs torch and megatron-core")
pytest.importorskip("megatron.core", reason="needs torch and megatron-core")
transformers = pytest.importorskip("transformers", reason="needs the extra mappnb[huggingface]")
pytest.importorskip("transformer_lens", reason="needs the extra mappnb[oracle]")

from interp.llama_models import hf_llama  # noqa: E402

from mappnb.testing.llama import megatron_llama  # noqa: E402

SAME = ("resid_pre", "q", "k", "v", "q_rot", "k_rot", "z", "attn_out", "resid_mid", "mlp_act", "mlp_out", "resid_post")


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """Cache of the bridge, its logits, and our forward of the converted model, on a text that comes twice."""
    from tokenizers import Tokenizer, models
    from transformer_lens.model_bridge import TransformerBridge

    folder, llama = str(tmp_path_factory.mktemp("llama")), hf_llama()
    llama.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{n}": n for n in range(99)}, unk_token="w0"))
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token="w0", eos_token="w98", pad_token="w97"
    ).save_pretrained(folder)
    bridge = TransformerBridge.boot_transformers(folder)
    once = np.random.default_rng(5).integers(1, 97, (2, 8))
    tokens = np.concatenate([np.zeros((2, 1), int), once, once], axis=1)
    with torch.no_grad():
        logits, cache = bridge.run_with_cache(torch.from_numpy(tokens))
    with megatron_llama(llama) as chunks:
        run = Model(chunks).forward(tokens, capture=["embed", *SAME, "final_ln"])
    return logits.numpy(), cache, run


def test_logits(both):
    logits, _, run = both
    np.testing.assert_allclose(run.logits.values, logits, atol=1e-5 * np.abs(logits).max())


@pytest.mark.parametrize("point", SAME)
def test_points_by_their_names(both, point):
    _, cache, run = both
    for layer in range(4):
        values = cache[alias(f"layers.{layer}.{point}", style="tl")].numpy()
        found = run.activations[point].sel(layer=layer).values
        if point == "q":
            assert values.shape[2] == 4
        elif point == "k":
            assert values.shape[2] == 2, "key-value heads are not expanded"
        scale = max(1.0, float(np.abs(values).max()))
        np.testing.assert_allclose(found, values.reshape(found.shape), atol=1e-5 * scale)


def test_patterns_and_heads(both):
    """Patterns, and the induction score of TransformerLens' definition on a text that comes twice."""
    _, cache, run = both
    statistics = head_statistics(run.activations)
    for layer in range(4):
        pattern = cache[f"blocks.{layer}.attn.hook_pattern"].numpy()
        for sample in range(2):
            found = attention_pattern(run.activations, layer=layer, head=None, sample=sample).values
            np.testing.assert_allclose(found, pattern[sample], atol=1e-5)
        before = np.diagonal(pattern, -1, 2, 3).mean(-1)
        np.testing.assert_allclose(statistics["previous_token"].sel(layer=layer).values, before, atol=1e-5)


def test_accumulated_residual(both):
    """Embedding and what each attention and MLP adds, in TransformerLens and here."""
    _, cache, run = both
    parts = run.activations[["attn_out", "mlp_out"]].to_dataarray().sum("variable").cumsum("layer")
    ours = run.activations["embed"] + parts
    last = cache["blocks.3.hook_resid_post"].numpy()
    np.testing.assert_allclose(ours.sel(layer=3).values, last, atol=1e-5 * np.abs(last).max())
