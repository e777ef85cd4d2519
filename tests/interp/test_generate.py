"""Generation: greedy and sampled, batches of unequal prompts, against loops over the model itself."""

from __future__ import annotations

import numpy as np
import pytest

from mappnb.errors import InterpError
from mappnb.interp import Edit, Model, generate, next_token_probabilities
from mappnb.interp.generation import _Chooser

torch = pytest.importorskip("torch", reason="needs torch and megatron-core")
pytest.importorskip("megatron.core", reason="needs torch and megatron-core")

from interp.live_models import bare, llama  # noqa: E402


def greedy(chunks, tokens, count):
    """Argmax of full forwards of the model itself, one prompt."""
    chunks[0].eval()
    tokens, logprobs = list(tokens), []
    with torch.no_grad():
        for _ in range(count):
            row = bare(chunks, tokens)[0, -1].double().log_softmax(-1)
            tokens.append(int(row.argmax()))
            logprobs.append(float(row.max()))
    return tokens, logprobs


def test_greedy_is_the_argmax_of_full_forwards(model, chunks):
    prompts = ["a", "longer prompt", "mid"]
    found = generate(model, prompts, max_new_tokens=7)
    for sample, prompt in enumerate(prompts):
        tokens, logprobs = greedy(chunks, prompt.encode(), 7)
        real = found["mask"].values[sample]
        assert found["token_id"].values[sample][real].tolist() == tokens
        new = found["generated"].values[sample]
        assert new[real].tolist() == [False] * len(prompt) + [True] * 7
        np.testing.assert_allclose(found["logprob"].values[sample][new], logprobs, atol=1e-5)
        assert np.isnan(found["logprob"].values[sample][~new]).all()
        assert found["alternative_id"].values[sample][new][:, 0].tolist() == tokens[len(prompt) :]
        assert (np.diff(found["alternative_logprob"].values[sample][new], axis=1) <= 0).all()
        assert str(found["text"].values[sample]).startswith(prompt)
    entropy = found["entropy"].values[found["generated"].values]
    assert ((entropy > 0) & (entropy < np.log(256))).all()


def test_a_prompt_in_a_batch_gives_what_it_gives_alone(model):
    options = {"max_new_tokens": 6, "temperature": 0.8, "top_k": 20, "seed": 11}
    together = generate(model, ["first one", "b"], **options)
    alone = generate(model, "first one", **options)
    np.testing.assert_array_equal(
        together["token_id"].values[0][together["mask"].values[0]], alone["token_id"].values[0]
    )
    again = generate(model, ["first one", "b"], **options)
    assert together.drop_vars("prompt").equals(again.drop_vars("prompt"))
    other = generate(model, ["first one", "b"], **{**options, "seed": 12})
    assert (other["token_id"].values != together["token_id"].values).any()


def test_captured_activations_are_those_of_the_whole_text(model):
    found = generate(model, ["ab", "wxyz"], max_new_tokens=3, capture=["resid_post"], layers=[1])
    for sample in range(2):
        real = found["mask"].values[sample]
        alone = model.forward(found["token_id"].values[sample][real][None], capture="layers.1.resid_post").activations
        np.testing.assert_allclose(
            found["resid_post"].values[sample, 0][real], alone["resid_post"].values[0, 0], atol=5e-6
        )
    assert found["layer"].values.tolist() == [1]


def test_it_ends_at_a_stop_token(model, chunks):
    tokens, _ = greedy(chunks, b"hello", 6)
    stop = tokens[7]
    found = generate(model, "hello", max_new_tokens=6, stop_token=stop)
    assert found["token_id"].values[0].tolist() == tokens[: tokens.index(stop, 5) + 1]
    both = generate(model, ["hello", "q"], max_new_tokens=6, stop_token=[stop])
    assert both["mask"].values[0].sum() == tokens.index(stop, 5) + 1
    assert both["generated"].values[1].sum() >= 1


def test_edits_steer_every_step(model):
    push = model.weights(["unembed"])["unembed"].values[ord("!")] * 500
    steered = generate(model, "hello", max_new_tokens=3, edits=[Edit(point="final_ln", kind="add", value=push)])
    assert steered["text"].values[0] == "hello!!!"
    top = next_token_probabilities(model, ["hello", "a"], top=4)
    row = model.forward(["hello", "a"], logits="last").logits.values.astype(float)
    wanted = np.exp(row) / np.exp(row).sum(1, keepdims=True)
    np.testing.assert_allclose(top["probability"], np.sort(wanted, 1)[:, ::-1][:, :4], rtol=1e-6)


@pytest.mark.parametrize(
    ("options", "allowed"), [({}, 5), ({"top_k": 2}, 2), ({"top_p": 0.6}, 2), ({"top_p": 0.61}, 3)]
)
def test_samples_have_the_probabilities_asked_for(options, allowed):
    """Frequencies of 20,000 draws within 5 standard deviations of closed-form probabilities."""
    p = np.array([0.1, 0.4, 0.2, 0.2, 0.1])
    logits = np.log(p) * 2.0
    chooser = _Chooser(2.0, options.get("top_k"), options.get("top_p"))
    draw, count = np.random.default_rng(0), 20_000
    found = np.bincount([chooser.choose(logits, draw) for _ in range(count)], minlength=5) / count
    kept = np.argsort(-p, kind="stable")[:allowed]
    wanted = np.zeros(5)
    wanted[kept] = p[kept] / p[kept].sum()
    assert (np.abs(found - wanted) <= 5 * np.sqrt(wanted * (1 - wanted) / count)).all()


def test_a_torch_model_by_hand_generates():
    made = llama()
    found = generate(Model(made, "bytes"), "abc", max_new_tokens=4)
    tokens = list(b"abc")
    with torch.no_grad():
        for _ in range(4):
            tokens.append(int(made(torch.tensor([tokens]))[0, -1].argmax()))
    assert found["token_id"].values[0].tolist() == tokens


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_greedy_text_is_that_of_transformers(kind):
    transformers = pytest.importorskip("transformers", reason="needs the extra mappnb[huggingface]")
    torch.manual_seed(0)
    ends = {"vocab_size": 256, "bos_token_id": 0, "eos_token_id": None, "pad_token_id": None}
    if kind == "llama":
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
        config = transformers.LlamaConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=3, **heads, **ends)
        made = transformers.LlamaForCausalLM(config).eval()
    else:
        made = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(n_embd=32, n_layer=3, n_head=4, n_positions=64, **ends)
        ).eval()
    with torch.no_grad():
        for weight in made.parameters():
            weight.mul_(8.0 if weight.dim() > 1 else 1.0)
    wanted = made.generate(torch.tensor([list(b"hello")]), max_new_tokens=8, do_sample=False)[0].tolist()
    found = generate(Model(made, "bytes"), ["hello", "a longer prompt"], max_new_tokens=8)
    assert found["token_id"].values[0][found["mask"].values[0]].tolist() == wanted


def test_mistakes_are_told(model):
    for options, words in [
        ({"temperature": -1}, "temperature is -1; expected 0"),
        ({"top_k": 0}, "top_k is 0; expected at least 1"),
        ({"top_p": 1.5}, r"top_p is 1\.5; expected a probability"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"stop_token": "ab"}, "the tokenizer makes 2 tokens of it"),
    ]:
        with pytest.raises(InterpError, match=words):
            generate(model, "hello", **options)
    with pytest.raises(InterpError, match="a prompt has no tokens"):
        generate(model, ["a", ""])
    with pytest.raises(InterpError, match="has no tokenizer"):
        generate(Model(model.chunks), "hello")
    assert generate(Model(model.chunks), [104, 105], max_new_tokens=1)["token_text"].values[0][0] == "104"
