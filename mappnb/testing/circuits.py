"""Transformers compiled by hand: attention heads whose pattern is known exactly, as numpy arrays and as megatron-core weights.

The residual stream is ``[token | position | token before | answer]``, each a one-hot block; norms are identities, MLPs are zero, positions
are learned. Every head has one of five kinds, and its rows are 0 or 1 (or equal shares) to the last bit, in float64 and in float32. The
induction circuit is two heads: ``0.0`` copies the token before into its place, ``1.0`` finds the place whose token before is mine. It
needs a first token of its own (BOS): without one the first position writes *itself* as its token before, and one weight becomes 0.5.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import xarray as xr

from mappnb.errors import MappnbError, did_you_mean

__all__ = ["KINDS", "Circuit", "CircuitError"]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

KINDS: dict[str, str] = {
    "previous_token": "all on the token before; the first token on itself",
    "bos_sink": "all on the first token",
    "duplicate_token": "equal shares on earlier tokens of the same kind; where there is none, on BOS",
    "induction": "equal shares on tokens that follow an earlier token of the same kind; where there is none, on BOS",
    "idle": "equal shares on everything it sees",
}
"""What a compiled head can do."""

GAP = 2000.0
"""Score of what is looked for; BOS has half. Their exponentials differ by exp(-1000), which is 0 in float64."""
LOGIT = 20.0


class CircuitError(MappnbError, ValueError):
    """A circuit that cannot be compiled, or tokens that it cannot take."""


@dataclass(frozen=True, slots=True)
class Circuit:
    """A small transformer with known heads.

    Attributes
    ----------
    kinds : tuple of tuple of str
        By layer and head: names of `KINDS`.
    vocab : int
        Tokens; even, so that it can be cut in two.
    max_tokens : int
        Positions.
    bos : int
        The token that every sample starts with.
    """

    kinds: tuple[tuple[str, ...], ...]
    vocab: int = 16
    max_tokens: int = 32
    bos: int = 0

    def __post_init__(self) -> None:
        """Check that it can work."""
        widths = {len(row) for row in self.kinds}
        if len(widths) != 1 or 0 in widths:
            raise CircuitError(f"kinds has layers of {sorted(widths)} heads; expected as many in each, one at least")
        for layer, row in enumerate(self.kinds):
            for kind in row:
                if kind not in KINDS:
                    raise CircuitError(
                        f"layer {layer}: unknown kind {kind!r}; known: {', '.join(KINDS)}{did_you_mean(kind, KINDS)}"
                    )
                if kind == "induction" and self.writer(before=layer) is None:
                    raise CircuitError(
                        f"layer {layer}: an induction head needs a previous_token head in an earlier layer; found none"
                    )
        if self.vocab % 2 or not 0 <= self.bos < self.vocab:
            raise CircuitError(f"vocab is {self.vocab} and bos {self.bos}; expected an even vocab that holds bos")

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self.kinds)

    @property
    def num_heads(self) -> int:
        """Heads of a layer."""
        return len(self.kinds[0])

    @property
    def head_dim(self) -> int:
        """Size of a head: a power of 4, so that its root is exact."""
        return int(4 ** np.ceil(np.log2(self.vocab + self.max_tokens + 1) / 2))

    @property
    def hidden(self) -> int:
        """Size of the residual stream."""
        return 3 * self.vocab + self.max_tokens

    @property
    def facts(self) -> dict[str, Any]:
        """What `run.activations` says of a model (``attrs["model"]``)."""
        return {
            "num_layers": self.num_layers,
            "hidden": self.hidden,
            "num_heads": self.num_heads,
            "num_kv_heads": self.num_heads,
            "head_dim": self.head_dim,
            "ffn": 4,
            "vocab": self.vocab,
            "softmax_scale": self.head_dim**-0.5,
            "causal": True,
            "window": None,
            "normalization": "none",
            "gated": False,
            "tied": False,
            "rotary": False,
        }

    def writer(self, before: int) -> tuple[int, int] | None:
        """Return layer and head of the previous_token head that fills the block "token before", if one is before layer ``before``."""
        for layer, row in enumerate(self.kinds[:before]):
            if "previous_token" in row:
                return layer, row.index("previous_token")
        return None

    def find(self, kind: str) -> list[tuple[int, int]]:
        """Return layer and head of all heads of this kind."""
        return [(layer, head) for layer, row in enumerate(self.kinds) for head, one in enumerate(row) if one == kind]

    def weights(self) -> dict[str, Floats]:
        """Return all weights, by megatron-core's global names, unsharded.

        Returns
        -------
        dict of str to float64 array
            ``linear_qkv`` has the rows ``[q k v]`` of head after head; biases and the MLP are zero and not in it.
        """
        tokens, positions = np.eye(self.vocab), np.eye(self.max_tokens)
        word = np.zeros((self.vocab, self.hidden))
        place = np.zeros((self.max_tokens, self.hidden))
        answer = np.zeros((self.vocab, self.hidden))
        word[:, self._token], place[:, self._position], answer[:, self._answer] = tokens, positions, LOGIT * tokens
        found = {
            "embedding.word_embeddings.weight": word,
            "embedding.position_embeddings.weight": place,
            "output_layer.weight": answer,
        }
        for layer in range(self.num_layers):
            heads = [self.head_weights(layer, head) for head in range(self.num_heads)]
            rows = [np.concatenate([part[name] for name in ("q", "k", "v")]) for part in heads]
            attention = f"decoder.layers.{layer}.self_attention"
            found[f"{attention}.linear_qkv.weight"] = np.concatenate(rows)
            found[f"{attention}.linear_proj.weight"] = np.concatenate([part["o"] for part in heads], axis=1)
        return found

    def head_weights(self, layer: int, head: int) -> dict[str, Floats]:
        """Return ``q``, ``k``, ``v``, dims (head_dim, hidden), and ``o``, dims (hidden, head_dim), of one head."""
        kind, vocab, size = self.kinds[layer][head], self.vocab, self.head_dim
        q, k, v = (np.zeros((size, self.hidden)) for _ in range(3))
        o = np.zeros((self.hidden, size))
        token, position, bos = slice(0, vocab), slice(vocab, vocab + self.max_tokens), vocab + self.max_tokens
        strong = GAP * size**0.5
        if kind == "previous_token":
            q[position, self._position] = strong * np.eye(self.max_tokens, k=1)
            k[position, self._position] = np.eye(self.max_tokens)
            v[token, self._token] = np.eye(vocab)
            if self.writer(before=layer + 1) == (layer, head):
                o[self._before, token] = np.eye(vocab)
        if kind in ("bos_sink", "duplicate_token", "induction"):
            q[bos, self._position] = strong / 2
            k[bos, self._token.start + self.bos] = 1.0
        if kind in ("duplicate_token", "induction"):
            q[token, self._token] = strong * np.eye(vocab)
            k[token, self._token if kind == "duplicate_token" else self._before] = np.eye(vocab)
        if kind == "duplicate_token":
            q[position, self._position] = -2 * strong * np.eye(self.max_tokens)
            k[position, self._position] = np.eye(self.max_tokens)
        if kind == "induction":
            v[token, self._token] = np.eye(vocab)
            o[self._answer, token] = np.eye(vocab)
        return {"q": q, "k": k, "v": v, "o": o}

    def pattern(self, tokens: Any, mask: Any = None) -> xr.DataArray:
        """Return every head's pattern from the definition of its kind, by loops: no weights are used.

        Parameters
        ----------
        tokens : int array, dims (sample, token)
            Token numbers.
        mask : bool array, dims (sample, token), optional
            False for padding.

        Returns
        -------
        DataArray, dims (sample, layer, head, query, key), unit 1
            Rows of padding are 0.
        """
        ids, real = self.checked(tokens, mask)
        samples, length = ids.shape
        values = np.zeros((samples, self.num_layers, self.num_heads, length, length))
        for sample in range(samples):
            for layer, row in enumerate(self.kinds):
                for head, kind in enumerate(row):
                    for query in np.flatnonzero(real[sample]):
                        keys = self._targets(kind, ids[sample], real[sample], int(query))
                        values[sample, layer, head, query, keys] = 1.0 / len(keys)
        return xr.DataArray(values, dims=("sample", "layer", "head", "query", "key"), name="pattern")

    def run(self, tokens: Any, mask: Any = None) -> xr.Dataset:
        """Compute everything by the weights, in plain numpy.

        Parameters
        ----------
        tokens, mask
            As for `pattern`.

        Returns
        -------
        Dataset
            As a stream of ``run.activations``: dims (sample, layer, token, hidden | head, head_dim | kv_head, head_dim | vocab), float64,
            the points ``embed``, ``resid_pre``, ``q_rot``, ``k_rot``, ``v``, ``z``, ``attn_out``, ``resid_mid``, ``mlp_out``,
            ``resid_post``, ``final_ln`` and ``logits``; coordinates ``token_id`` and ``mask``. Rows of padding hold nothing of use.
        """
        ids, real = self.checked(tokens, mask)
        weights = self.weights()
        places = np.maximum(real.cumsum(axis=1) - 1, 0)
        x = weights["embedding.word_embeddings.weight"][ids] + weights["embedding.position_embeddings.weight"][places]
        layers: dict[str, list[Floats]] = {}
        data = {"embed": x}
        for layer in range(self.num_layers):
            points = self._layer(x, real, layer)
            x = points["resid_post"]
            for name, value in points.items():
                layers.setdefault(name, []).append(value)
        data |= {name: np.stack(values, axis=1) for name, values in layers.items()}
        data |= {"final_ln": x, "logits": x @ weights["output_layer.weight"].T}
        coords = {"token_id": (("sample", "token"), ids), "mask": (("sample", "token"), real)}
        numbers = {"layer": np.arange(self.num_layers), "token": np.arange(ids.shape[1])}
        dims = {name: _dims(name, value.ndim) for name, value in data.items()}
        return xr.Dataset(
            {name: (dims[name], value) for name, value in data.items()}, {**coords, **numbers}, {"model": self.facts}
        )

    def checked(self, tokens: Any, mask: Any = None) -> tuple[Ints, Bools]:
        """Return tokens and mask as arrays (sample, token), or say what is wrong with them."""
        ids = np.atleast_2d(np.asarray(tokens, np.int64))
        real = np.ones(ids.shape, bool) if mask is None else np.atleast_2d(np.asarray(mask, bool))
        if real.shape != ids.shape:
            raise CircuitError(f"mask has shape {real.shape}, tokens {ids.shape}; expected the same")
        if ids.min() < 0 or ids.max() >= self.vocab:
            raise CircuitError(f"tokens go from {ids.min()} to {ids.max()}; expected 0 to {self.vocab - 1}")
        if real.sum(axis=1).max() > self.max_tokens:
            raise CircuitError(f"{real.sum(axis=1).max()} tokens in a sample; expected {self.max_tokens} at most")
        return ids, real

    @property
    def _token(self) -> slice:
        return slice(0, self.vocab)

    @property
    def _position(self) -> slice:
        return slice(self.vocab, self.vocab + self.max_tokens)

    @property
    def _before(self) -> slice:
        return slice(self._position.stop, self._position.stop + self.vocab)

    @property
    def _answer(self) -> slice:
        return slice(self._before.stop, self._before.stop + self.vocab)

    def _targets(self, kind: str, ids: Ints, real: Bools, query: int) -> list[int]:
        """Keys that share a row equally."""
        seen = [key for key in range(query + 1) if real[key]]
        before = {key: seen[max(place - 1, 0)] for place, key in enumerate(seen)}
        if kind == "previous_token":
            return [before[query]]
        rest = [key for key in seen if ids[key] == self.bos]
        if kind == "duplicate_token":
            same = [key for key in seen if key != query and ids[key] == ids[query]]
            return same or rest or [key for key in seen if key != query] or [query]
        if kind == "induction":
            return [key for key in seen if ids[before[key]] == ids[query]] or rest or seen
        return (rest or seen) if kind == "bos_sink" else seen

    def _layer(self, x: Floats, real: Bools, layer: int) -> dict[str, Floats]:
        """All points of one layer, dims (sample, token, ...)."""
        length = x.shape[1]
        heads = [self.head_weights(layer, head) for head in range(self.num_heads)]
        q, k, v = (np.stack([x @ part[name].T for part in heads], axis=2) for name in ("q", "k", "v"))
        scores = np.einsum("bqhd,bkhd->bhqk", q, k) * self.head_dim**-0.5
        seen = np.tri(length, dtype=bool) & real[:, None, None, :] & real[:, None, :, None]
        weights = np.where(seen, np.exp(np.where(seen, scores, -np.inf) - _top(scores, seen)), 0.0)
        weights /= np.maximum(weights.sum(axis=-1, keepdims=True), 1e-300)
        z = np.einsum("bhqk,bkhd->bqhd", weights, v)
        out = sum(z[:, :, head] @ part["o"].T for head, part in enumerate(heads))
        after = x + out
        points = {
            "resid_pre": x,
            "q_rot": q,
            "k_rot": k,
            "v": v,
            "z": z,
            "attn_out": np.asarray(out),
            "resid_mid": after,
        }
        return {**points, "mlp_out": np.zeros_like(x), "resid_post": after}


def _top(scores: Floats, seen: Bools) -> Floats:
    top: Floats = np.where(seen, scores, -np.inf).max(axis=-1, keepdims=True)
    return np.where(np.isfinite(top), top, 0.0)


def _dims(name: str, ndim: int) -> tuple[str, ...]:
    features = {
        "q_rot": ("head", "head_dim"),
        "z": ("head", "head_dim"),
        "k_rot": ("kv_head", "head_dim"),
        "v": ("kv_head", "head_dim"),
    }
    last = ("vocab",) if name == "logits" else features.get(name, ("hidden",))
    return ("sample", "layer", "token", *last) if ndim == 3 + len(last) else ("sample", "token", *last)
