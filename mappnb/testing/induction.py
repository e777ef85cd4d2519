"""Circuits of known heads, ready made: the induction circuit, one head of a kind anywhere, and texts to show them on."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from mappnb.testing.circuits import KINDS, Circuit, CircuitError

__all__ = ["KINDS", "Circuit", "CircuitError", "induction_circuit", "repeated_tokens", "single_head_circuit"]

Ints = npt.NDArray[np.int64]


def induction_circuit(*, num_heads: int = 2, num_layers: int = 2, vocab: int = 16, max_tokens: int = 32) -> Circuit:
    """Return the induction circuit: head 0.0 finds the token before, head 1.0 what followed last time; all others are idle.

    Parameters
    ----------
    num_heads, num_layers : int
        Two layers at least.
    vocab, max_tokens : int
        Sizes.

    Returns
    -------
    Circuit
        Its logits say the token that followed last time (``argmax``).

    Notes
    -----
    Elhage et al. 2021 ("A mathematical framework for transformer circuits"), two-layer attention-only models; K-composition.
    """
    return _circuit({(0, 0): "previous_token", (1, 0): "induction"}, num_layers, num_heads, vocab, max_tokens)


def single_head_circuit(
    kind: str, *, layer: int, head: int, num_layers: int = 2, num_heads: int = 2, vocab: int = 16, max_tokens: int = 32
) -> Circuit:
    """Return a model in which one head does something, and all others are idle.

    Parameters
    ----------
    kind : str
        ``"previous_token"``, ``"duplicate_token"`` or ``"bos_sink"``.
    layer, head : int
        Where it is.
    num_layers, num_heads, vocab, max_tokens : int
        Sizes.

    Returns
    -------
    Circuit

    Raises
    ------
    CircuitError
        For a kind that does not exist, or needs a second head.
    """
    return _circuit({(layer, head): kind}, num_layers, num_heads, vocab, max_tokens)


def repeated_tokens(period: int, *, copies: int = 2, vocab: int = 16, bos: int | None = 0, seed: int = 0) -> Ints:
    """Return a text for induction: a first token of its own, then the same different tokens again and again.

    Parameters
    ----------
    period, copies : int
        Tokens of a copy, all different, and how many copies.
    vocab, seed : int
        Where they are drawn from.
    bos : int or None
        The first token; None = without one.

    Returns
    -------
    int array, dims (sample, token)
        One sample.
    """
    choice = np.setdiff1d(np.arange(vocab), [0 if bos is None else bos])
    if period > len(choice):
        raise CircuitError(f"period is {period}; expected at most {len(choice)} different tokens of a vocab of {vocab}")
    once = np.random.default_rng(seed).permutation(choice)[:period]
    return np.concatenate([[] if bos is None else [bos], *[once] * copies]).astype(np.int64)[None]


def _circuit(
    heads: Mapping[tuple[int, int], str], num_layers: int, num_heads: int, vocab: int, max_tokens: int
) -> Circuit:
    for layer, head in heads:
        if not (0 <= layer < num_layers and 0 <= head < num_heads):
            raise CircuitError(f"no head {layer}.{head} in {num_layers} layers of {num_heads} heads")
    rows = tuple(tuple(heads.get((layer, head), "idle") for head in range(num_heads)) for layer in range(num_layers))
    return Circuit(rows, vocab=vocab, max_tokens=max_tokens)
