"""Generation with a live model in any layout: greedy or sampled, prompts of unequal length, the same on every rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr

from mappnb.errors import InterpError
from mappnb.interp.edits import Edit
from mappnb.interp.lens import log_softmax
from mappnb.interp.model import Model

__all__ = ["generate", "next_token_probabilities"]


def generate(
    model: Any,
    prompts: Any,
    *,
    max_new_tokens: int = 20,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    stop_token: int | str | Sequence[int | str] | None = None,
    alternatives: int = 10,
    capture: str | Iterable[str] | None = None,
    layers: Iterable[int] | None = None,
    edits: Sequence[Edit] = (),
) -> xr.Dataset:
    """Continue prompts.

    Parameters
    ----------
    model : Model, module or list of modules
        As for `Model`; prompts as text need its tokenizer.
    prompts : str, sequence of str or of sequences of int
        Lengths may differ: a prompt in a batch gives what it gives alone.
    max_new_tokens : int
        Tokens to add to each prompt.
    temperature : float
        0: the most probable token; else logits are divided by it before sampling.
    top_k : int, optional
        Sample among the most probable tokens only.
    top_p : float, optional
        Sample among the smallest set of most probable tokens whose probability reaches it.
    seed : int
        Sample ``i`` draws from ``(seed, i)``, whatever else is in the batch.
    stop_token : int, str or sequence of them, optional
        A sample ends with it.
    alternatives : int
        Most probable tokens to keep at each step.
    capture, layers, edits
        As in `Model.forward`; edits are made at every step. Activations are those of one last forward over the whole text.

    Returns
    -------
    Dataset, dims (sample, token), with (rank_k) the alternatives
        ``token_id``, ``token_text``, ``generated``, ``mask``, ``logprob`` (nats, before temperature, top-k and top-p; NaN for
        prompts), ``entropy`` (nats), ``alternative_id``, ``alternative_text``, ``alternative_logprob``; coordinate ``text``, the whole
        text; and the captured points, dims (sample, layer, token, ...).

    Raises
    ------
    InterpError
        For options that cannot be.

    Notes
    -----
    Each token is one forward over the whole text, through the schedule; there is no key-value cache. Logits are equal to the bit on every
    rank (one rank's, sent to all), so every rank draws the same.
    """
    live = model if isinstance(model, Model) else Model(model)
    chooser = _Chooser(temperature, top_k, top_p)
    if max_new_tokens < 1 or alternatives < 0:
        raise InterpError(
            f"max_new_tokens is {max_new_tokens}, alternatives {alternatives}; expected at least 1 and at least 0"
        )
    ids, mask = live.encode(prompts)
    state = _Texts.start(ids, mask, max_new_tokens, min(alternatives, live.vocab_size))
    stop = {live.token(token) for token in _listed(stop_token)}
    draws = [np.random.default_rng([seed, sample]) for sample in range(len(ids))]
    for _ in range(max_new_tokens):
        tokens, real = state.now()
        logits = live.forward(tokens, real, edits=edits, logits="last").logits.values.astype(np.float64)
        logprob = log_softmax(logits)
        state.add([chooser.choose(row, draw) for row, draw in zip(logits, draws, strict=True)], logprob, stop)
        if state.done.all():
            break
    return _dataset(live, state, capture=capture, layers=layers, edits=edits)


def next_token_probabilities(model: Any, prompts: Any, *, top: int = 10, edits: Sequence[Edit] = ()) -> xr.Dataset:
    """Return the most probable next tokens of prompts.

    Parameters
    ----------
    model, prompts, edits
        As for `generate`.
    top : int
        Tokens to return.

    Returns
    -------
    Dataset, dims (sample, rank_k)
        ``token_id``, ``token_text``, ``probability``.
    """
    live = model if isinstance(model, Model) else Model(model)
    logprob = log_softmax(live.forward(prompts, edits=edits, logits="last").logits.values.astype(np.float64))
    order = np.argsort(-logprob, axis=1, kind="stable")[:, :top]
    dims = ("sample", "rank_k")
    return xr.Dataset(
        {
            "token_id": (dims, order),
            "token_text": (dims, live.texts(order)),
            "probability": (dims, np.exp(np.take_along_axis(logprob, order, 1))),
        }
    )


def _listed(stop: Any) -> list[Any]:
    if stop is None:
        return []
    return [stop] if isinstance(stop, (str, int, np.integer)) else list(stop)


@dataclass(frozen=True, slots=True)
class _Chooser:
    """How the next token is chosen from logits."""

    temperature: float
    top_k: int | None
    top_p: float | None

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise InterpError(f"temperature is {self.temperature}; expected 0 (the most probable token) or more")
        if self.top_k is not None and self.top_k < 1:
            raise InterpError(f"top_k is {self.top_k}; expected at least 1, or None for all tokens")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise InterpError(f"top_p is {self.top_p}; expected a probability above 0, at most 1")

    def choose(self, logits: np.ndarray, draw: np.random.Generator) -> int:
        """Return a token; draws one number unless greedy."""
        if self.temperature == 0:
            return int(logits.argmax())
        order = np.argsort(-logits, kind="stable")[: self.top_k]
        weight = np.exp(log_softmax(logits[order] / self.temperature))
        if self.top_p is not None:
            weight = weight[: int(np.searchsorted(weight.cumsum(), self.top_p * (1 - 1e-12))) + 1]
        edges = weight.cumsum()
        return int(order[min(int(np.searchsorted(edges, draw.random() * edges[-1], side="right")), len(edges) - 1)])


@dataclass(slots=True)
class _Texts:
    """Texts as they grow; rows are padded at the end."""

    tokens: np.ndarray
    generated: np.ndarray
    length: np.ndarray
    done: np.ndarray
    logprob: np.ndarray
    entropy: np.ndarray
    best: np.ndarray
    best_logprob: np.ndarray

    @classmethod
    def start(cls, ids: np.ndarray, mask: np.ndarray, new: int, alternatives: int) -> _Texts:
        """Return the prompts with room for ``new`` tokens each."""
        length = mask.sum(1)
        shape = (len(ids), int(length.max()) + new)
        tokens = np.zeros(shape, np.int64)
        for row, (prompt, real) in enumerate(zip(ids, mask, strict=True)):
            tokens[row, : real.sum()] = prompt[real]
        none = np.full(shape, np.nan)
        wide = (*shape, alternatives)
        return cls(
            tokens,
            np.zeros(shape, bool),
            length,
            np.zeros(len(ids), bool),
            none,
            none.copy(),
            np.full(wide, -1),
            np.full(wide, np.nan),
        )

    def now(self) -> tuple[np.ndarray, np.ndarray]:
        """Return tokens and mask so far."""
        width = int(self.length.max())
        return self.tokens[:, :width], np.arange(width) < self.length[:, None]

    def add(self, chosen: list[int], logprob: np.ndarray, stop: set[int]) -> None:
        """Append one token to every text that has not ended."""
        best = np.argsort(-logprob, axis=1, kind="stable")[:, : self.best.shape[2]]
        entropy = -(np.exp(logprob) * np.maximum(logprob, -1e30)).sum(1)
        for row in np.flatnonzero(~self.done):
            slot, token = self.length[row], chosen[row]
            self.tokens[row, slot], self.generated[row, slot] = token, True
            self.logprob[row, slot], self.entropy[row, slot] = logprob[row, token], entropy[row]
            self.best[row, slot], self.best_logprob[row, slot] = best[row], logprob[row, best[row]]
            self.length[row] += 1
            self.done[row] = token in stop


def _dataset(
    live: Model, state: _Texts, *, capture: Any, layers: Iterable[int] | None, edits: Sequence[Edit]
) -> xr.Dataset:
    tokens, mask = state.now()
    width = tokens.shape[1]
    texts = live.texts(tokens)
    whole = ["".join(row) if live.tokenizer is None else live.tokenizer.decode(ids[real].tolist())
             for row, ids, real in zip(texts, tokens, mask, strict=True)]  # fmt: skip
    dims, wide = ("sample", "token"), ("sample", "token", "rank_k")
    best = state.best[:, :width]
    result = xr.Dataset(
        {
            "logprob": (dims, state.logprob[:, :width], {"units": "nat"}),
            "entropy": (dims, state.entropy[:, :width], {"units": "nat"}),
            "generated": (dims, state.generated[:, :width]),
            "alternative_id": (wide, best),
            "alternative_text": (wide, live.texts(best)),
            "alternative_logprob": (wide, state.best_logprob[:, :width], {"units": "nat"}),
        },
        coords={"text": ("sample", np.array(whole, dtype=object))},
    )
    found = (
        live.forward(tokens, mask, capture=capture or (), layers=layers, edits=edits, logits="last")
        if capture
        else None
    )
    activations = found.activations if found is not None else live.labels(tokens, mask)
    return result.merge(activations, combine_attrs="override").assign_attrs(activations.attrs)
