"""A live model, in any layout: forward passes with capture, edits and gradients, the same result on every rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import xarray as xr

from mappnb.activation_points import GROUPS, POINTS, PointName, parse_point, point_names, resolve
from mappnb.capture._megatron_facts import unwrapped
from mappnb.errors import InterpError
from mappnb.interp._model_batch import Batch, pack, rectangle
from mappnb.interp._model_dataset import activations_of, weights_of_records
from mappnb.interp._model_gather import gather_records
from mappnb.interp._model_metric import Metric, as_metric, one_token
from mappnb.interp._model_run import is_megatron, layout_of, max_tokens, run_model
from mappnb.interp._model_taps import Handler, Record, array_of, split_of
from mappnb.interp._model_tokens import as_tokenizer, encoded, texts_of
from mappnb.interp.edits import Edit, check_edits

__all__ = ["Forward", "Model"]


@dataclass(frozen=True, slots=True, eq=False)
class Forward:
    """What one forward gave; the same on every rank.

    Attributes
    ----------
    logits : DataArray, dims (sample, token, vocab) or (sample, vocab)
        Of every token, or of the last real one.
    activations : Dataset, dims (sample, layer, token, ...)
        What was to be captured, in the shape of recorded activations; empty without ``capture``.
    metric : DataArray, dims (sample,), or None
        Value of what gradients were asked of.
    """

    logits: xr.DataArray
    activations: xr.Dataset
    metric: xr.DataArray | None = None

    def __repr__(self) -> str:
        points = ", ".join(map(str, self.activations.data_vars)) or "nothing"
        return f"<Forward: logits {dict(self.logits.sizes)}, captured {points}>"


class Model:
    """A live model for questions: forward passes with capture and edits.

    Parameters
    ----------
    model_or_chunks : Module or list of Module
        Megatron-core model chunks of this rank (in DDP and Float16Module or not), or a torch model with the module names of Hugging
        Face's Llama or GPT-2. It is used, never copied or changed.
    tokenizer : object, optional
        With ``encode(text)`` and ``decode(ids)``; ``"bytes"``: one token a byte.
    vocab_size : int, optional
        Real vocabulary, where the model's is padded; default the model's.

    Raises
    ------
    InterpError
        For a tokenizer that is none, or a model without its process groups.

    Notes
    -----
    Every rank calls every method with equal arguments. Megatron-core's schedule runs the model with ``forward_only``; collectives of ours
    come after it, over the ranks of one replica (tensor × pipeline × context), so each data-parallel replica answers for itself. Dropout
    is off. Under context parallelism the core attention gets the causal mask of the whole sequence, or (Transformer Engine) heeds none.
    """

    def __init__(self, model_or_chunks: Any, tokenizer: Any = None, *, vocab_size: int | None = None) -> None:
        self.chunks = list(model_or_chunks) if isinstance(model_or_chunks, (list, tuple)) else [model_or_chunks]
        self.tokenizer = as_tokenizer(tokenizer)
        self.layout = layout_of(self.chunks)
        if getattr(getattr(unwrapped(self.chunks[0]), "config", None), "mtp_num_layers", None):
            raise InterpError(
                "multi-token prediction: megatron-core runs such a model with labels only; load it without mtp_num_layers"
            )
        self.padded_vocab_size = _vocab_size(self.chunks[0])
        self.vocab_size = self.padded_vocab_size if vocab_size is None else int(vocab_size)

    @cached_property
    def facts(self) -> dict[str, Any]:
        """Facts of the model: num_layers, hidden, num_heads, num_kv_heads, head_dim, softmax_scale, normalization, ..."""
        from mappnb.capture.activations.facts import model_facts

        return dict(model_facts(self.chunks))

    @property
    def num_layers(self) -> int:
        """Layers of the whole model."""
        if "num_layers" not in self.facts:
            raise InterpError(
                f"{type(unwrapped(self.chunks[0])).__name__}: its configuration does not tell the number of layers"
            )
        return int(self.facts["num_layers"])

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name}={size}" for name, size in self.layout.items() if size > 1) or "one process"
        return f"<Model: {type(unwrapped(self.chunks[0])).__name__}, vocabulary {self.vocab_size}, {sizes}>"

    def encode(self, prompts: Any) -> tuple[np.ndarray, np.ndarray]:
        """Return token ids and mask, dims (sample, token), of prompts.

        Parameters
        ----------
        prompts : str, sequence of str, of int, or of sequences of int, or array of int
            One text or row of ids, or several; shorter ones are padded at the end.

        Raises
        ------
        InterpError
            For text without a tokenizer, or an empty prompt.
        """
        if isinstance(prompts, np.ndarray) and prompts.ndim == 2:
            return prompts, np.ones(prompts.shape, bool)
        single = isinstance(prompts, str) or (
            len(prompts) > 0 and np.ndim(prompts[0]) == 0 and not isinstance(prompts[0], str)
        )
        rows = [encoded(prompt, self.tokenizer) for prompt in ([prompts] if single else prompts)]
        if not rows:
            raise InterpError("prompts: there are none; give at least one")
        return rectangle(rows)

    def encode_one(self, prompt: Any) -> np.ndarray:
        """Return token ids, dims (token,), of exactly one prompt.

        Raises
        ------
        InterpError
            For several prompts, and as `encode`.
        """
        ids, mask = self.encode(prompt)
        if len(ids) != 1:
            raise InterpError(f"one prompt was expected, {len(ids)} given: call once for each")
        return np.asarray(ids[0][mask[0]])

    def token(self, token: Any) -> int:
        """Return the id of one token, given as text or id; see `one_token`."""
        return one_token(token, self.tokenizer, self.vocab_size)

    def texts(self, ids: np.ndarray) -> np.ndarray:
        """Return the text of each token: object array of the shape of ``ids``."""
        return texts_of(np.asarray(ids), self.tokenizer)

    def metric(self, metric: Any) -> Metric:
        """Return a metric: callable on logits (sample, vocab), from one, a token, or a pair (token, instead_of)."""
        return as_metric(metric, self.tokenizer, self.vocab_size)

    def forward(
        self,
        tokens: Any,
        mask: Any = None,
        *,
        capture: str | Iterable[str] | None = None,
        layers: Iterable[int] | None = None,
        edits: Sequence[Edit] = (),
        gradients: Any = None,
        logits: Literal["all", "last"] = "all",
    ) -> Forward:
        """Run the model.

        Parameters
        ----------
        tokens : array of int, dims (sample, token), or prompts
            Token ids; or what `encode` takes.
        mask : array of bool, dims (sample, token), optional
            True for real tokens; padding may be on the left or on the right.
        capture : str or iterable of str, optional
            Points, such as ``("resid_post", "layers.3.q", "mlp_out.grad")``; groups and other libraries' names work too.
        layers : iterable of int, optional
            Global layers of points without a layer of their own; default all.
        edits : sequence of Edit
            Made in the forward pass; captured values have them.
        gradients : metric, optional
            Go backward from the sum over samples of this metric (see `metric`), for ``.grad`` points. Weights get no gradients.
        logits : {"all", "last"}
            Of every token, or only of each sample's last real one.

        Returns
        -------
        Forward
            The same on every rank.

        Raises
        ------
        InterpError
            For tokens, points, layers or edits that the model does not have.

        Notes
        -----
        A row with padding gives what the row alone gives: the model gets real tokens first, with positions from 0.
        """
        if logits not in ("all", "last"):
            raise InterpError(f"logits is {logits!r}; expected 'all' or 'last'")
        ids, real = (tokens, mask) if _is_ids(tokens) else self.encode(tokens)
        batch = self.batch(ids, real if mask is None else mask)
        wanted = self._wanted(capture, layers, gradients is not None)
        metric = None if gradients is None else self.metric(gradients)
        found, records = self.run(batch, wanted, edits, which=logits, metric=metric)
        value = None if metric is None else _metric_value(metric, found, batch, logits)
        activations = self.dataset(records, batch)
        self._check_found(capture, activations)
        return Forward(_labelled(found, batch, logits, self.vocab_size), activations, value)

    def batch(self, tokens: Any, mask: Any) -> Batch:
        """Return the batch for one run, cut as the layout asks."""
        if not self.facts.get("causal", True):
            raise InterpError(
                "this model is not causal: it cannot be asked what follows, and padding would change what it says"
            )
        limit, width = max_tokens(self.chunks[0]), np.shape(np.atleast_2d(tokens))[-1]
        if limit is not None and width > limit:
            raise InterpError(f"{width} tokens; the model has learned positions for {limit}")
        cp = self.layout["cp"]
        tp = self.layout["tp"] if self.layout["sequence_parallel"] else 1
        return pack(
            tokens,
            mask,
            vocab_size=self.vocab_size,
            slots_multiple=tp * (2 * cp if cp > 1 else 1),
            num_microbatches=self.layout["pp"] if self.layout["num_chunks"] > 1 else 1,
        )

    def _wanted(self, capture: Any, layers: Iterable[int] | None, backward: bool) -> set[PointName]:
        names = point_names(capture, error=InterpError) if capture is not None else []
        chosen = None if layers is None else [int(layer) for layer in layers]
        for layer in [*(chosen or []), *(name.layer for name in names)]:
            if layer >= self.num_layers or (layer < 0 and chosen and layer in chosen):
                raise InterpError(f"layer {layer}: the model has layers 0 to {self.num_layers - 1}")
        if not backward and any(name.grad for name in names):
            raise InterpError(
                "a '.grad' point needs gradients=: a metric to go backward from, such as (token, instead_of)"
            )
        return {
            PointName(name.point, layer, name.grad)
            for name in names
            for layer in (
                [name.layer] if name.layer >= 0 or chosen is None or not POINTS[name.point].per_layer else chosen
            )
        }

    def _check_found(self, capture: Any, activations: xr.Dataset) -> None:
        """Raise for a point that was asked for by its own name and that the model has nowhere."""
        words = [capture] if isinstance(capture, str) else list(capture or ())
        for name in point_names([w for w in words if w.removesuffix(".grad") not in GROUPS], error=InterpError):
            if f"{name.point}{'_grad' if name.grad else ''}" not in activations:
                gated = "; it is gated" if self.facts.get("gated") else ""
                raise InterpError(f"point {str(name)!r}: this model does not have it{gated}; leave it out")

    def run(
        self,
        batch: Batch,
        wanted: Iterable[PointName],
        edits: Sequence[Edit],
        *,
        which: str,
        metric: Metric | None = None,
        inject: dict[tuple[str, int], np.ndarray] | None = None,
    ) -> tuple[Any, list[Record]]:
        """Run a batch; return logits and what all ranks kept."""
        from mappnb.capture.activations.taps import attached, find_taps

        check_edits(edits, self.facts, batch.tokens.shape) if edits else None
        handler = Handler(edits, set(wanted), place=batch.place, inject=inject, gradients=metric is not None)
        loss = None if metric is None else (lambda rows: metric(rows).sum())
        taps = find_taps(self.chunks, points=handler.points, error=InterpError) if handler.points else []
        with attached(taps, handler):
            found = run_model(self.chunks, batch, handler, which=which, vocab_size=self.padded_vocab_size, loss=loss)
        records = self.gather(handler.records) if handler.wanted else []
        return found, records

    def gather(self, records: list[Record]) -> list[Record]:
        """Return the records of every rank of this replica; a collective."""
        if not is_megatron(self.chunks[0]):
            return records
        import torch.distributed as dist
        from megatron.core import parallel_state

        groups = [parallel_state.get_model_parallel_group()]
        groups += [parallel_state.get_context_parallel_group()] if self.layout["cp"] > 1 else []
        for group in groups:
            device = next(self.chunks[0].parameters()).device if dist.get_backend(group) == "nccl" else "cpu"
            records = gather_records(records, group, device)
        return records

    def labels(self, tokens: np.ndarray, mask: np.ndarray) -> xr.Dataset:
        """Return the coordinates of samples and tokens alone, as activations have them."""
        return self.dataset([], self.batch(tokens, mask))

    def dataset(self, records: Sequence[Record], batch: Batch) -> xr.Dataset:
        """Return what was kept as one dataset."""
        return activations_of(records, batch, facts=self.facts, layout=self.layout, texts=self.texts)

    def weights(self, names: Iterable[str] = ("unembed", "final_ln_weight", "final_ln_bias")) -> xr.Dataset:
        """Return weights of the whole model, dims ([layer,] ...).

        Parameters
        ----------
        names : iterable of str
            Keys of `mappnb.activation_points.WEIGHTS`; a bias that the model lacks is left out.
        """
        wanted = [parse_point(resolve(name, error=InterpError), error=InterpError).point for name in names]
        records = self.gather(self.local_weights(wanted))
        there = {record.point for record in records}
        return weights_of_records(records, [name for name in wanted if name in there])

    def local_weights(self, names: Sequence[str]) -> list[Record]:
        """Return this rank's parts of weights; parts that other ranks hold too are not left out."""
        none = np.zeros(0, np.int64)
        return [
            Record(name, layer, none, none, split_of(shard), array_of(tensor))
            for name, tensor, shard, layer in self.local_tensors(names)
        ]

    def local_tensors(self, names: Sequence[str]) -> list[tuple[str, Any, Any, int]]:
        """Return name, tensor, shard and layer of this rank's parts of weights."""
        from mappnb.capture.activations.weights import weights_of

        found = weights_of(self.chunks, names, error=InterpError)
        return [(name.rpartition(".")[2], tensor, shard, layer) for name, (tensor, shard, layer) in found.items()]


def _is_ids(tokens: Any) -> bool:
    return hasattr(tokens, "shape") or (hasattr(tokens, "dims"))


def _vocab_size(chunk: Any) -> int:
    inner = unwrapped(chunk)
    for owner in (inner, getattr(inner, "config", None)):
        size = getattr(owner, "vocab_size", None)
        if isinstance(size, int):
            return size
    import torch

    sizes = [m.num_embeddings for m in inner.modules() if isinstance(m, torch.nn.Embedding)]
    if not sizes:
        raise InterpError(
            f"{type(inner).__name__}: no vocab_size and no torch.nn.Embedding; give Model(..., vocab_size=)"
        )
    return int(max(sizes))


def _metric_value(metric: Metric, logits: Any, batch: Batch, which: str) -> xr.DataArray:
    import torch

    count = len(batch.tokens)
    rows = logits[:count]
    if which == "all":
        rows = rows[torch.arange(count), torch.as_tensor(batch.last[:count])]
    with torch.no_grad():
        return xr.DataArray(metric(rows).cpu().numpy(), dims=("sample",), name="metric")


def _labelled(logits: Any, batch: Batch, which: str, vocab_size: int) -> xr.DataArray:
    count, width = batch.tokens.shape
    values = logits.cpu().numpy()[:count, ..., :vocab_size]
    if which == "last":
        return xr.DataArray(values, dims=("sample", "vocab"), name="logits")
    values = np.take_along_axis(values[:, :width], batch.place[..., None], 1)
    coords = {"token_id": (("sample", "token"), batch.tokens), "mask": (("sample", "token"), batch.mask)}
    return xr.DataArray(values, dims=("sample", "token", "vocab"), coords=coords, name="logits")
