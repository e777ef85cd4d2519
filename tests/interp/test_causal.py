"""Causal tracing against the definitions of ROME's experiments/causal_trace.py, written again in plain torch."""

from __future__ import annotations

import numpy as np
import pytest

from mappnb.errors import InterpError
from mappnb.interp import Model, causal_trace
from mappnb.interp.causal import find_subject

torch = pytest.importorskip("torch", reason="needs torch")

from interp.live_models import PROMPT, llama  # noqa: E402

SUBJECT = (1, 5)  # "ello"


@pytest.fixture(scope="module")
def made():
    return llama()


def traced(made, modules, token, answer, std, samples):
    """ROME's ``trace_with_patch``: row 0 clean, the others with noise on the subject; outputs at ``token`` are those of row 0."""
    noise = np.random.RandomState(1).randn(samples, SUBJECT[1] - SUBJECT[0], 32) * std

    def corrupt(module, args, out):
        out = out.clone()
        out[1:, slice(*SUBJECT)] += torch.from_numpy(noise).float()
        return out

    def restore(module, args, out):
        out = out.clone()
        out[1:, token] = out[0, token]
        return out

    hooks = [made.model.embed_tokens.register_forward_hook(corrupt)]
    hooks += [module.register_forward_hook(restore) for module in modules]
    with torch.no_grad():
        logits = made(torch.tensor([list(PROMPT.encode())] * (samples + 1)))
    for hook in hooks:
        hook.remove()
    return float(torch.softmax(logits[1:, -1, :].double(), dim=1).mean(dim=0)[answer])


def test_it_is_romes(made):
    found = causal_trace(Model(made, "bytes"), PROMPT, subject="ello", samples=4, window=2, batch_size=12)
    ids = torch.tensor([list(PROMPT.encode())])
    with torch.no_grad():
        p = made(ids)[0, -1].double().softmax(-1)
        std = float(made.model.embed_tokens(ids)[0, slice(*SUBJECT)].std(unbiased=False))
    answer = int(p.argmax())
    assert found.attrs["answer_id"] == answer
    assert float(found["clean"]) == pytest.approx(float(p.max()), rel=1e-5)
    assert found.attrs["noise"] == pytest.approx(3 * std, rel=1e-5)
    assert float(found["corrupted"]) == pytest.approx(traced(made, [], 0, answer, 3 * std, 4), rel=1e-4)
    layers = made.model.layers
    for kind, part in (
        ("state", lambda layer: layer),
        ("mlp", lambda layer: layer.mlp),
        ("attn", lambda layer: layer.self_attn),
    ):
        for layer in range(3):
            span = [layer] if kind == "state" else range(max(0, layer - 2 // 2), min(3, layer - (-2 // 2)))
            for token in (0, 2, 4, 5, 10):
                wanted = traced(made, [part(layers[i]) for i in span], token, answer, 3 * std, 4)
                assert float(found["probability"].sel(kind=kind, layer=layer, token=token)) == pytest.approx(
                    wanted, rel=1e-4
                )
    np.testing.assert_allclose(found["indirect_effect"], found["probability"] - found["corrupted"])
    assert found["subject"].values.tolist() == [1 <= i < 5 for i in range(11)]


def test_what_must_come_out(made):
    found = causal_trace(Model(made, "bytes"), PROMPT, subject=slice(1, 5), samples=3, window=1)
    assert float(found["probability"].sel(kind="state", layer=2, token=10)) == pytest.approx(
        float(found["clean"]), rel=1e-4
    )
    np.testing.assert_allclose(
        found["indirect_effect"].sel(token=0), 0, atol=1e-7
    )  # before the subject nothing is corrupted
    still = causal_trace(Model(made, "bytes"), PROMPT, subject=[1, 2], samples=2, noise=0.0, kinds=["mlp"], answer="x")
    np.testing.assert_allclose(still["probability"], still["clean"], rtol=1e-4)
    assert still.attrs["answer"] == "x"


class Words:
    """Words are tokens, and a token alone has lost its space, as in sentencepiece."""

    words = ("The", "Space", "Needle", "is", "in")

    def encode(self, text):
        return [self.words.index(word) for word in text.split()]

    def decode(self, ids):
        return " ".join(self.words[i] for i in ids)


def test_a_subject_is_found_by_its_text(made):
    model = Model(made, Words())
    tokens = model.encode_one("The Space Needle is in The Space")
    assert find_subject(model, tokens, "Space Needle") == [1, 2]
    assert find_subject(model, tokens, "Space") == [6], "the last one"
    assert find_subject(model, tokens, "eedl") == [2]
    assert find_subject(model, tokens, -1) == [6]
    assert find_subject(Model(made), np.array([1, 23, 4]), "23") == [1]


def test_mistakes_are_told(made):
    model = Model(made, "bytes")
    for options, words in [
        ({"subject": "ELLO"}, "subject 'ELLO' is not in the prompt 'hello world'"),
        ({"subject": []}, "no token of the 11 of the prompt"),
        ({"kinds": ["attention"]}, r"kind 'attention'; known: state, mlp, attn; did you mean 'attn'"),
        ({"samples": 0}, "samples 0"),
        ({"answer": "xyz"}, "makes 3 tokens of it"),
    ]:
        with pytest.raises(InterpError, match=words):
            causal_trace(model, PROMPT, **{"subject": "ello", **options})
