"""Logit lens: what each layer would say, were it the last one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr

from mappnb._activation_dataset import token_texts
from mappnb.activations import stream_with
from mappnb.errors import InterpError, did_you_mean
from mappnb.interp._choices import labels_asked, places_of_samples
from mappnb.interp._lens_weights import Readout, Weights, check_vectors

__all__ = ["LENS_POINTS", "lens_texts", "logit_lens", "vocabulary_of"]

Array = np.ndarray[Any, Any]
LENS_POINTS: tuple[str, ...] = ("resid_pre", "resid_mid", "resid_post")
"""Points whose vectors are of the residual stream."""
_TILE_VALUES = 2**22
"""Logits that are worked on at once: 16 MiB in float32, about six such arrays together."""


def logit_lens(
    activations: xr.Dataset | xr.DataTree,
    weights: Any = None,
    *,
    point: str = "resid_post",
    layers: int | Iterable[int] | None = None,
    sample: int | Iterable[int] | None = None,
    top: int = 10,
    target: int | None = None,
    vocabulary: Any = None,
) -> xr.Dataset:
    """Return the next-token distribution that the residual stream of each layer stands for.

    Parameters
    ----------
    activations : Dataset or DataTree
        ``run.activations``, or a stream with ``point``, dims (sample, layer, token, hidden).
    weights : optional
        Default those recorded (stream ``weights``), the last at or before each sample's step. Else arrays by name (``unembed``, dims
        (vocab, hidden), ``final_ln_weight``, ``final_ln_bias``), such a Dataset, a `Model`, a module or model chunks.
    point : str
        One of `LENS_POINTS`.
    layers : int or several, optional
        Global numbers; default all that there are.
    sample : int or several, optional
        Positions in the dimension ``sample``; default all.
    top : int
        How many tokens to name.
    target : int, optional
        Id of a token to follow; default each place's actual next token.
    vocabulary : sequence of str, "bytes" or tokenizer, optional
        Texts of token ids; default those that the activations tell (else the id).

    Returns
    -------
    Dataset, dims (sample, layer, token, rank_k)
        ``top_id``, ``top_text``, ``probability``, ``log_probability`` of the likeliest tokens, the first most. Dims (sample, layer, token):
        ``entropy`` (nat), ``kl`` (nat; of this layer from the final one: sum p_final log(p_final / p)), ``target_probability``,
        ``target_log_probability``, ``target_rank`` (0: likeliest; -1: no target). Dims (sample, token): ``target_id`` (-1: none).
        Places that are padding, were not recorded, or hold no finite vector: NaN, ids and ranks -1.

    Raises
    ------
    SchemaError
        If the point, or the weights, were not recorded.
    InterpError
        For a point that is not of the residual stream, a layer, sample or target that is not there, or ``top`` below 1.

    Notes
    -----
    nostalgebraist 2020, "interpreting GPT: the logit lens". The last norm in float64, logits in float32 (float64 where the unembedding
    is). Padded entries of the vocabulary count as the model counts them. ``attrs["reference"]`` says what ``kl`` compares with.
    Memory beside the result: about 130 MiB whatever the vocabulary.
    """
    if point not in LENS_POINTS:
        raise InterpError(
            f"point {point!r}; expected one of {', '.join(LENS_POINTS)}{did_you_mean(point, LENS_POINTS)}"
        )
    if top < 1:
        raise InterpError(f"top is {top}; expected at least 1")
    data = stream_with(activations, point)
    check_vectors(data, point)
    data = data if "sample" in data.dims else data.expand_dims("sample")
    held = Weights.of(weights, activations)
    chosen = data.isel(sample=places_of_samples(sample, data.sizes["sample"]))
    asked = labels_asked("layer", layers, [int(x) for x in data["layer"].values])
    work = _Work.of(chosen, point, asked, held, min(top, _vocab(held)), target)
    for at in range(chosen.sizes["sample"]):
        step = int(chosen["step"].values[at]) if "step" in chosen.coords else None
        work.sample(at, held.readout(step))
    return _labelled(work, vocabulary if vocabulary is not None else held.tokenizer)


def _vocab(held: Weights) -> int:
    unembed = held.get("unembed")
    assert unembed is not None
    return len(unembed)


@dataclass(slots=True, eq=False)
class _Work:
    """What is read, and the arrays that fill."""

    data: xr.Dataset
    point: str
    layers: list[int]
    reference: str
    targets: Array
    out: dict[str, Array]

    @classmethod
    def of(cls, data: xr.Dataset, point: str, layers: list[int], held: Weights, top: int, target: int | None) -> _Work:
        shape = data.sizes["sample"], len(layers), data.sizes["token"]
        vocab = _vocab(held)
        if target is not None and not 0 <= target < vocab:
            raise InterpError(f"target {target}: the vocabulary has ids 0 to {vocab - 1}")
        floats = ("entropy", "kl", "target_probability", "target_log_probability")
        out = {n: np.full(shape, np.nan) for n in floats}
        out |= {n: np.full((*shape, top), np.nan) for n in ("probability", "log_probability")}
        out |= {"top_id": np.full((*shape, top), -1, np.int64), "target_rank": np.full(shape, -1, np.int64)}
        targets = _next_tokens(data) if target is None else np.full((shape[0], shape[2]), target, np.int64)
        return cls(
            data, point, layers, _reference(data, point, layers, held), np.where(targets < vocab, targets, -1), out
        )

    def sample(self, at: int, readout: Readout) -> None:
        """Fill in one sample, tile of tokens by tile."""
        part = self.data.isel(sample=at)
        known = [int(x) for x in part["layer"].values]
        tile = max(1, _TILE_VALUES // len(readout.unembed))
        for first in range(0, part.sizes["token"], tile):
            here = part.isel(token=slice(first, first + tile))
            final = self._final(here, readout)
            share = np.exp(final)
            for place, layer in enumerate(self.layers):
                states, usable = self._states(here, self.point, known.index(layer))
                usable &= np.isfinite(final).all(1) if len(final) else usable
                rows = np.flatnonzero(usable)
                if len(rows):
                    logp = log_softmax(readout.logits(readout.states(states[rows])))
                    self._fill(at, place, first + rows, logp, (final[rows], share[rows]))

    def _final(self, here: xr.Dataset, readout: Readout) -> Array:
        """Log-probabilities that the model ends with, dims (token, vocab); NaN where unknown."""
        if self.reference == "final_ln":
            states = np.asarray(here["final_ln"].transpose("token", "hidden").values)
            return log_softmax(readout.logits(states))
        layer = int(self.reference.rsplit(" ", 1)[1])
        known = [int(x) for x in here["layer"].values]
        states, usable = self._states(here, self.reference.split(" ")[0], known.index(layer))
        logp = log_softmax(readout.logits(readout.states(states)))
        logp[~usable] = np.nan
        return logp

    @staticmethod
    def _states(here: xr.Dataset, point: str, layer: int) -> tuple[Array, Array]:
        """Vectors of one layer, dims (token, hidden), and which of them count."""
        values = np.asarray(here[point].isel(layer=layer).transpose("token", "hidden").values)
        usable = np.isfinite(values).all(1)
        for name in ("mask", f"{point}_present"):
            if name in here.variables:
                there = here[name].isel(layer=layer) if "layer" in here[name].dims else here[name]
                usable = usable & np.asarray(there.values, bool)
        return values, usable

    def _fill(self, at: int, place: int, tokens: Array, logp: Array, end: tuple[Array, Array]) -> None:
        """Fill in one layer of some tokens from log-probabilities, dims (token, vocab); ``end``: the model's, and their exponentials."""
        final, share = end
        probability = np.exp(logp)
        top = self.out["top_id"].shape[-1]
        ids = _largest(logp, top)
        best = np.take_along_axis(logp, ids, 1).astype(np.float64)
        put = {"top_id": ids, "log_probability": best, "probability": np.exp(best)}
        put["entropy"] = -(probability * logp).sum(1, dtype=np.float64)
        put["kl"] = (share * (final - logp)).sum(1, dtype=np.float64)
        for name, values in put.items():
            self.out[name][at, place, tokens] = values
        targets = self.targets[at, tokens]
        some = np.flatnonzero(targets >= 0)
        wanted = logp[some, targets[some]]
        where = at, place, tokens[some]
        self.out["target_log_probability"][where] = wanted
        self.out["target_probability"][where] = np.exp(wanted.astype(np.float64))
        self.out["target_rank"][where] = (logp[some] > wanted[:, None]).sum(1)


def _reference(data: xr.Dataset, point: str, layers: Sequence[int], held: Weights) -> str:
    """Return what the layers are compared with: the end of the model if it was recorded, else the last layer that was."""
    known = [int(x) for x in data["layer"].values]
    last = int(held.facts.get("num_layers", max(known) + 1)) - 1
    if "resid_post" in data and last in known:
        return f"resid_post {last}"
    if "final_ln" in data:
        return "final_ln"
    return f"{point} {max(known)}"


def log_softmax(logits: Array) -> Array:
    """Return log-probabilities along the last axis, in the type of the logits; the sum is in float64."""
    with np.errstate(invalid="ignore", over="ignore"):
        logits = logits - logits.max(-1, keepdims=True)
        total = np.exp(logits).sum(-1, keepdims=True, dtype=np.float64)
        return np.asarray(logits - np.log(total).astype(logits.dtype))


def _largest(values: Array, count: int) -> Array:
    """Places of the largest values of each row, the largest first, of equal ones the lower place."""
    vocab = values.shape[1]
    if count < vocab:
        edge = np.partition(values, vocab - count, axis=1)[:, vocab - count]
        return np.stack([_row_largest(row, limit, count) for row, limit in zip(values, edge, strict=True)])
    return np.argsort(-values, axis=1, kind="stable")[:, :count]


def _row_largest(row: Array, limit: Any, count: int) -> Array:
    places = np.flatnonzero(row >= limit)
    return np.asarray(places[np.argsort(-row[places], kind="stable")[:count]])


def _next_tokens(data: xr.Dataset) -> Array:
    """Ids of the tokens that came next, dims (sample, token); -1 where that is unknown."""
    shape = data.sizes["sample"], data.sizes["token"]
    out = np.full(shape, -1, np.int64)
    if "token_id" not in data.variables:
        return out
    ids = np.asarray(data["token_id"].values)
    real = np.asarray(data["mask"].values, bool) if "mask" in data.variables else np.ones(shape, bool)
    slots = np.asarray(data["token"].values) if "token" in data.coords else np.arange(shape[1])
    follows = (np.diff(slots) == 1)[None] & real[:, 1:] & real[:, :-1]
    out[:, :-1] = np.where(follows, ids[:, 1:], -1)
    return out


def _labelled(work: _Work, vocabulary: Any) -> xr.Dataset:
    dims = ("sample", "layer", "token")
    data, out = work.data, work.out
    texts = lens_texts(out["top_id"], data, vocabulary)
    variables: dict[str, Any] = {
        name: ((*dims, "rank_k") if values.ndim == 4 else dims, values) for name, values in out.items()
    }
    variables |= {"top_text": ((*dims, "rank_k"), texts), "target_id": (("sample", "token"), work.targets)}
    coords = {
        name: (variable.dims, np.asarray(variable.values))
        for name, variable in data.coords.items()
        if set(variable.dims) <= {"sample", "token"} and not str(name).endswith("_present")
    }
    coords |= {"layer": ("layer", np.array(work.layers)), "rank_k": ("rank_k", np.arange(out["top_id"].shape[-1]))}
    coords["target_text"] = (("sample", "token"), lens_texts(work.targets, data, vocabulary))
    attrs = {"point": work.point, "reference": work.reference}
    made = xr.Dataset(variables, coords, attrs)
    for name in ("entropy", "kl"):
        made[name].attrs["units"] = "nat"
    return made


def lens_texts(ids: Array, data: xr.Dataset, vocabulary: Any = None) -> Array:
    """Return the texts of token ids, an object array: of a vocabulary, else as the data tell them.

    Parameters
    ----------
    ids : int array
        -1: no token, no text.
    data : Dataset
        With ``token_id`` and ``token_text``.
    vocabulary : sequence of str, "bytes", or object with ``decode``, optional
    """
    if vocabulary is None:
        vocabulary = vocabulary_of(data)
    if hasattr(vocabulary, "decode"):
        return _by_table(ids, lambda i: str(vocabulary.decode([i])))
    return np.asarray(token_texts(ids, vocabulary))


@dataclass(frozen=True, slots=True)
class Told:
    """A vocabulary of the tokens that were seen; others by their id."""

    known: dict[int, str]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the texts of ids."""
        return "".join(self.known.get(i, str(i)) for i in ids)


def vocabulary_of(data: xr.Dataset) -> Told | str:
    """Return the vocabulary that the tokens of a dataset tell: ``"bytes"`` where each text is the character of its id.

    Parameters
    ----------
    data : Dataset
        With ``token_id`` and ``token_text``; without them ids stand for themselves.
    """
    known = _told(data)
    readable = any(text != str(i) for i, text in known.items())
    if readable and all(i < 256 and text == chr(i) for i, text in known.items()):
        return "bytes"
    return Told(known)


def _told(data: xr.Dataset) -> dict[int, str]:
    if "token_text" not in data.variables or "token_id" not in data.variables:
        return {}
    ids, texts = np.asarray(data["token_id"].values).ravel(), np.asarray(data["token_text"].values, object).ravel()
    return {int(i): str(t) for i, t in zip(ids.tolist(), texts.tolist(), strict=True) if i >= 0}


def _by_table(ids: Array, text: Any) -> Array:
    unique, inverse = np.unique(ids, return_inverse=True)
    texts = np.array(["" if i < 0 else text(int(i)) for i in unique.tolist()] or [""], object)
    return np.asarray(texts[inverse.reshape(ids.shape)]) if ids.size else np.empty(ids.shape, object)
