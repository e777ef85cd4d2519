"""The small world: what its sentences say is true, what its weights count can be known, and training learns it."""

from __future__ import annotations

import numpy as np
import pytest

from mappnb.errors import MappnbError
from mappnb.testing import small_world as module
from mappnb.testing.small_world import FACTS, WORDS, Words, twice

pytest.importorskip("megatron.core", reason="needs torch and megatron-core")


def test_words_and_ids():
    words = Words()
    ids = words.encode("anna lives in rome")
    assert words.decode(ids) == " <start> anna lives in rome"
    assert words.encode(" <start> anna") == words.encode("anna boris")[:2]
    assert words.encode("rome") == [WORDS.index("rome")], "one word alone is one token"
    assert len(set(WORDS)) == len(WORDS) == 60
    with pytest.raises(MappnbError, match=r"'ana' is not a word of the small world; did you mean 'anna'"):
        words.encode("ana lives in rome")


def test_sentences_are_true_and_repeats_can_be_known():
    from mappnb.testing.small_world import _Sentences, _settings

    batch = next(_Sentences(_settings(1)).at(3))
    again = next(_Sentences(_settings(1)).at(3))
    assert all((batch[name] == again[name]).all() for name in batch)
    told = 0
    for row, tokens in enumerate(batch["tokens"].tolist()):
        labels, weights = batch["labels"][row].tolist(), batch["weights"][row].numpy()
        assert tokens[1:] == labels[:-1] and tokens[0] == 0
        if row % 6:
            period = int((weights == 0).sum())
            assert 8 <= period < 22 and (weights[period:] == 1).all()
            assert labels[period:] == labels[: len(labels) - period], "what counts was there a period before"
            continue
        text = "".join(f" {WORDS[token]}" for token in tokens[1:])
        for sentence in text.split(" . ")[:-1]:
            name, verb, *rest = sentence.split()
            assert rest[-1] == FACTS[name][verb == "likes"]
            told += 1
    assert told > 20
    once = twice(9)
    assert (once[:, 1:10] == once[:, 10:]).all() and once.shape == (4, 19)


def test_training_is_kept(tmp_path):
    """A few steps: the loss falls, and the file holds the model that was trained."""
    from mappnb.interp import Model

    file = tmp_path / "weights.safetensors"
    losses = module.train_small_world(file, steps=12)
    assert len(losses) == 12 and losses[-1] < 0.85 * losses[0]
    tokens = twice(6)
    with module.small_world(file) as chunks:
        first = Model(chunks, Words(), vocab_size=60).forward(tokens).logits
    with module.small_world(file) as chunks:
        model = Model(chunks, Words(), vocab_size=60)
        assert np.array_equal(model.forward(tokens).logits.values, first.values)
        assert model.forward("anna lives in", capture="resid_post").activations.sizes["token"] == 4
    assert first.sizes["vocab"] == 60


@pytest.mark.slow
def test_it_learns_facts_and_induction(tmp_path):
    from mappnb.interp import Model, find_heads, head_statistics, next_token_probabilities

    file = tmp_path / "weights.safetensors"
    module.train_small_world(file)
    with module.small_world(file) as chunks:
        model = Model(chunks, Words(), vocab_size=60)
        said = next_token_probabilities(model, [f"{name} lives in" for name in FACTS], top=1)
        right = [
            text.strip() == city
            for text, (city, _) in zip(said["token_text"].values[:, 0], FACTS.values(), strict=True)
        ]
        assert sum(right) >= 19
        seen = model.forward(twice(), capture=["q_rot", "k_rot"]).activations
    statistics = head_statistics(seen)
    best = find_heads(statistics, kind="induction", top=1).iloc[0]
    assert best["score"] > 0.7 and best["layer"] == 1
    assert find_heads(statistics, kind="previous_token", top=1).iloc[0]["layer"] == 0
