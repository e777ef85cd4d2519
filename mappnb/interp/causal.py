"""Causal tracing: which states carry the answer from the subject to the end (Meng et al. 2022, ROME)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import xarray as xr

from mappnb.errors import InterpError, did_you_mean
from mappnb.interp._model_cells import measured, run_cells
from mappnb.interp.edits import Activations, Edit
from mappnb.interp.model import Model

__all__ = ["TRACED", "causal_trace", "find_subject"]

TRACED: dict[str, str] = {"state": "resid_post", "mlp": "mlp_out", "attn": "attn_out"}
"""Kind of a trace -> the point that is restored."""


def causal_trace(
    model: Any,
    prompt: Any,
    *,
    subject: Any,
    answer: Any = None,
    noise: float = 3.0,
    embedding_std: float | None = None,
    samples: int = 10,
    window: int = 10,
    kinds: Sequence[str] = ("state", "mlp", "attn"),
    seed: int = 1,
    batch_size: int = 128,
) -> xr.Dataset:
    """Return how much of the answer's probability comes back when one clean state is restored in corrupted runs.

    Parameters
    ----------
    model : Model, module or list of modules
        As for `Model`.
    prompt : str or sequence of int
        One prompt that contains the subject.
    subject : str, int, slice, or sequence of int
        The words to corrupt, or their tokens.
    answer : str or int, optional
        Token whose probability is followed; default the model's own answer.
    noise : float
        Standard deviations of the embedding.
    embedding_std : float, optional
        That standard deviation; default over the embeddings of the subject's tokens, as ``collect_embedding_std`` has it.
    samples : int
        Corrupted runs, each with its own noise.
    window : int
        Layers around the one named that are restored together, for ``mlp`` and ``attn``.
    kinds : sequence of str
        Keys of `TRACED`.
    seed : int
        Of the noise.
    batch_size : int
        Rows of a batch, about.

    Returns
    -------
    Dataset, dims (kind, layer, token)
        ``probability`` of the answer when (layer, token) is restored, averaged over the corrupted runs; ``indirect_effect``:
        that less the corrupted probability. Scalars ``clean``, ``corrupted``; coordinates ``token_text``, ``subject``.

    Raises
    ------
    InterpError
        If the subject is not in the prompt, or a kind is unknown.

    Notes
    -----
    As ``experiments/causal_trace.py`` of ROME (arXiv:2202.05262, section 2): Gaussian noise on the subject's embeddings, the same in all
    cells; a window of ``w`` layers around layer ``l`` is ``l - w // 2`` to ``l + ceil(w / 2) - 1``, cut at the ends.
    """
    live = model if isinstance(model, Model) else Model(model)
    _check(kinds, samples, window, noise)
    tokens = live.encode_one(prompt)
    places = find_subject(live, tokens, subject)
    clean = live.forward(tokens[None], capture=["embed", *(TRACED[kind] for kind in kinds)], logits="last")
    target = int(clean.logits.values[0].argmax()) if answer is None else live.token(answer)
    std = float(clean.activations["embed"][0, places].std()) if embedding_std is None else embedding_std
    corrupt = _corruption(clean.activations, places, noise * std, samples, seed)

    def probability(logits: Any) -> Any:
        return logits.double().softmax(-1)[:, target]

    source = Activations(clean.activations)
    cells = [
        _restored(kind, layer, token, window, live.num_layers, source)
        for kind in kinds
        for layer in range(live.num_layers)
        for token in range(len(tokens))
    ]
    found = run_cells(live, tokens, [[], *cells], probability, every=[corrupt], copies=samples, rows=batch_size).mean(1)
    high = float(measured(clean, probability)[0])
    values = found[1:].reshape(len(kinds), live.num_layers, len(tokens))
    return _dataset(
        live, values, float(found[0]), high, kinds=kinds, tokens=tokens, places=places, target=target
    ).assign_attrs(noise=noise * std, samples=samples, window=window, seed=seed)


def _check(kinds: Sequence[str], samples: int, window: int, noise: float) -> None:
    for kind in kinds:
        if kind not in TRACED:
            raise InterpError(f"kind {kind!r}; known: {', '.join(TRACED)}{did_you_mean(kind, TRACED)}")
    if samples < 1 or window < 1 or noise < 0:
        raise InterpError(
            f"samples {samples}, window {window}, noise {noise}: expected at least 1, at least 1 and at least 0"
        )


def find_subject(model: Model, tokens: np.ndarray, subject: Any) -> list[int]:
    """Return the tokens of a prompt that a subject covers.

    Parameters
    ----------
    model : Model
        For texts.
    tokens : ndarray of int, dims (token,)
        The prompt.
    subject : str, int, slice or sequence of int
        Text: its last occurrence, with tokens that it covers in part.

    Raises
    ------
    InterpError
        If it is not there.
    """
    if isinstance(subject, str):
        heads = [_text(model, tokens[:i]) for i in range(len(tokens) + 1)]  # tokens alone may lose their spaces
        whole = heads[-1]
        start = whole.rfind(subject) if subject else -1
        if start < 0:
            raise InterpError(
                f"subject {subject!r} is not in the prompt {whole!r}; give its text as it stands there, or tokens"
            )
        edges = [len(head) for head in heads]
        return [i for i in range(len(tokens)) if edges[i] < start + len(subject) and edges[i + 1] > start]
    places = np.arange(len(tokens))[
        subject if isinstance(subject, slice) else np.atleast_1d(np.asarray(subject, np.int64))
    ]
    if not len(places):
        raise InterpError(f"subject {subject!r}: no token of the {len(tokens)} of the prompt")
    return [int(i) for i in places]


def _text(model: Model, tokens: np.ndarray) -> str:
    if model.tokenizer is None:
        return "".join(map(str, model.texts(tokens)))
    return str(model.tokenizer.decode(tokens.tolist())) if len(tokens) else ""


def _corruption(clean: xr.Dataset, places: list[int], std: float, samples: int, seed: int) -> Edit:
    hidden = clean.sizes["hidden"]
    noise = np.random.RandomState(seed).randn(samples, len(places), hidden) * std
    return Edit(point="embed", tokens=places, kind="add", value=noise.astype(np.float32))


def _restored(kind: str, layer: int, token: int, window: int, num_layers: int, clean: Activations) -> list[Edit]:
    size = 1 if kind == "state" else window
    layers = list(range(max(0, layer - size // 2), min(num_layers, layer + (size + 1) // 2)))
    return [Edit(point=TRACED[kind], layer=layers, tokens=token, kind="patch", value=clean)]


def _dataset(
    live: Model,
    values: np.ndarray,
    low: float,
    high: float,
    *,
    kinds: Sequence[str],
    tokens: np.ndarray,
    places: list[int],
    target: int,
) -> xr.Dataset:
    dims = ("kind", "layer", "token")
    count = np.arange(len(tokens))
    return xr.Dataset(
        {
            "probability": (dims, values),
            "indirect_effect": (dims, values - low),
            "clean": ((), high),
            "corrupted": ((), low),
        },
        coords={
            "kind": np.array(list(kinds), dtype=object),
            "layer": np.arange(values.shape[1]),
            "token": count,
            "token_id": ("token", tokens),
            "token_text": ("token", live.texts(tokens)),
            "subject": ("token", np.isin(count, places)),
        },
        attrs={"answer_id": target, "answer": str(live.texts(np.array([target]))[0])},
    )
