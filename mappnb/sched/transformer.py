"""A transformer's costs from its sizes: FLOPs, activations and static memory of each part of the depth, before any run exists."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from mappnb.errors import CostError, did_you_mean
from mappnb.sched.costs import Costs
from mappnb.sched.registry import positive

__all__ = ["Device", "Flops", "Transformer", "costs_of_model"]

Floats = npt.NDArray[np.float64]
Recompute = Literal["none", "selective", "full"]
_RECOMPUTE = ("none", "selective", "full")


@dataclass(frozen=True, kw_only=True)
class Device:
    """What computes, and what connects it.

    Attributes
    ----------
    peak_flops : float
        FLOP/s of the data type, dense.
    efficiency : float
        Part of the peak that matrix products reach, 0 to 1.
    memory_bandwidth : float
        Bytes/s; everything that is not a matrix product is taken to write its activations once and read them once.
    link_latency_s, link_bandwidth : float
        Between pipeline ranks: s, bytes/s.
    tensor_bandwidth, data_bandwidth : float
        Between tensor and between data-parallel ranks, bytes/s, in one direction. Infinite: free.
    """

    peak_flops: float
    efficiency: float = 0.5
    memory_bandwidth: float = float("inf")
    link_latency_s: float = 0.0
    link_bandwidth: float = float("inf")
    tensor_bandwidth: float = float("inf")
    data_bandwidth: float = float("inf")

    def __post_init__(self) -> None:
        for name in ("peak_flops", "memory_bandwidth", "link_bandwidth", "tensor_bandwidth", "data_bandwidth"):
            if not getattr(self, name) > 0:
                raise CostError(f"device: {name} is {getattr(self, name)!r}; expected a number above 0")
        if not 0 < self.efficiency <= 1 or not self.link_latency_s >= 0:
            raise CostError(
                f"device: efficiency {self.efficiency!r} and link_latency_s {self.link_latency_s!r}; "
                "expected above 0 and at most 1, and at least 0"
            )

    def seconds(self, flops: float, moved_bytes: float = 0.0) -> float:
        """Return the time of matrix products, and of what moves bytes after them, s."""
        return flops / (self.peak_flops * self.efficiency) + moved_bytes / self.memory_bandwidth


@dataclass(frozen=True)
class Flops:
    """FLOPs of one microbatch on one rank: forward, and input and weight gradient of the backward."""

    forward: float
    backward_input: float
    backward_weight: float


@dataclass(frozen=True, kw_only=True)
class Transformer:
    """A decoder of equal layers, an embedding before and an output layer with its loss behind, and how it is split.

    Attributes
    ----------
    hidden, num_layers, num_heads, vocab_size, seq_length, microbatch_size : int
        Sizes.
    ffn_hidden : int, optional
        Inner size of the MLP; four times ``hidden`` by default.
    num_query_groups : int, optional
        Heads of keys and values; ``num_heads`` by default.
    head_dim : int, optional
        ``hidden / num_heads`` by default.
    gated : bool
        The MLP has a gate (SwiGLU): three matrices in place of two.
    tp, cp, dp : int
        Tensor, context and data-parallel sizes.
    sequence_parallel : bool
        What tensor parallelism does not split is split along the sequence.
    recompute : str
        ``"none"``, ``"selective"`` (the core of attention, as flash attention does too) or ``"full"`` (each layer from its input).
    dtype_bytes : int
        Of weights, activations and messages.
    gradient_bytes, optimizer_bytes : float
        A parameter's gradient, and its optimizer state: 4 and 12 for Adam with float32 gradients and master weights.
    distributed_optimizer : bool
        Data-parallel ranks share the optimizer's state.
    bias, dropout, tied_embeddings : bool
        Linear layers and norms have biases; dropout keeps its masks; the output layer is the embedding (the first and the last
        stage hold a copy each).
    learned_positions : int
        Rows of a learned position embedding; 0 for none.
    """

    hidden: int
    num_layers: int
    num_heads: int
    vocab_size: int
    seq_length: int
    microbatch_size: int = 1
    ffn_hidden: int | None = None
    num_query_groups: int | None = None
    head_dim: int | None = None
    gated: bool = False
    tp: int = 1
    cp: int = 1
    dp: int = 1
    sequence_parallel: bool = True
    recompute: Recompute = "none"
    dtype_bytes: int = 2
    gradient_bytes: float = 4.0
    optimizer_bytes: float = 12.0
    distributed_optimizer: bool = False
    bias: bool = True
    dropout: bool = True
    tied_embeddings: bool = True
    learned_positions: int = 0

    def __post_init__(self) -> None:
        for name in (
            "hidden",
            "num_layers",
            "num_heads",
            "vocab_size",
            "seq_length",
            "microbatch_size",
            "tp",
            "cp",
            "dp",
        ):
            try:
                positive(name, getattr(self, name))
            except ValueError as err:
                raise CostError(f"transformer: {err}") from None
        if self.recompute not in _RECOMPUTE:
            raise CostError(
                f"recompute is {self.recompute!r}; expected one of {', '.join(_RECOMPUTE)}"
                f"{did_you_mean(self.recompute, _RECOMPUTE)}"
            )
        if self.head_dim is None and self.hidden % self.num_heads:
            raise CostError(f"hidden {self.hidden} is no multiple of num_heads {self.num_heads}; give head_dim")
        if self.num_heads % self.groups or self.num_heads % self.tp:
            raise CostError(
                f"num_heads is {self.num_heads}; it must be a multiple of num_query_groups ({self.groups}) and tp ({self.tp})"
            )

    # ------------------------------------------------------------------------------------------------------- sizes
    @property
    def ffn(self) -> int:
        """Inner size of the MLP."""
        return 4 * self.hidden if self.ffn_hidden is None else self.ffn_hidden

    @property
    def groups(self) -> int:
        """Heads of keys and values."""
        return self.num_heads if self.num_query_groups is None else self.num_query_groups

    @property
    def query_size(self) -> int:
        """Size of all queries of a token."""
        return self.num_heads * (self.head_dim or self.hidden // self.num_heads)

    @property
    def key_size(self) -> int:
        """Size of all keys of a token."""
        return self.groups * (self.head_dim or self.hidden // self.num_heads)

    @property
    def up_size(self) -> int:
        """Outputs of the first part of the MLP: with the gate's."""
        return self.ffn * (2 if self.gated else 1)

    @property
    def tokens(self) -> float:
        """Tokens of a microbatch on one rank."""
        return self.seq_length * self.microbatch_size / self.cp

    @property
    def layer_matrix(self) -> int:
        """Elements of the matrices of a layer."""
        h = self.hidden
        return h * (2 * self.query_size + 2 * self.key_size) + h * (self.up_size + self.ffn)

    @property
    def layer_parameters(self) -> int:
        """Parameters of a layer, over all tensor ranks."""
        rows = self.query_size + 2 * self.key_size + self.up_size + 2 * self.hidden
        norms = 2 * self.hidden * (2 if self.bias else 1)
        return self.layer_matrix + norms + (rows if self.bias else 0)

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the embeddings of words and positions, over all tensor ranks."""
        return (self.vocab_size + self.learned_positions) * self.hidden

    @property
    def head_parameters(self) -> int:
        """Parameters of the last norm and of the output layer (a copy of the embedding where they are tied)."""
        return self.vocab_size * self.hidden + self.hidden * (2 if self.bias else 1)

    @property
    def parameters(self) -> int:
        """Parameters of the model, each counted once."""
        tied = self.vocab_size * self.hidden if self.tied_embeddings else 0
        return self.num_layers * self.layer_parameters + self.embedding_parameters + self.head_parameters - tied

    # ------------------------------------------------------------------------------------------------------- FLOPs
    def layer_flops(self) -> Flops:
        """Return the FLOPs of one layer on one rank, what is computed again in the backward included.

        Notes
        -----
        Two a multiply-add: sbh(24h + 4s), sbh(24h + 8s) and 24sbh² for the plain layer (Zero Bubble, arXiv:2401.10241, Table 1);
        attention is counted whole, not its causal half.
        """
        linear = 2 * self.tokens * self.layer_matrix / self.tp
        attention = 4 * self.tokens * self.seq_length * self.query_size / self.tp
        again = {"none": 0.0, "selective": attention, "full": linear + attention}[self.recompute]
        return Flops(linear + attention, linear + 2 * attention + again, linear)

    def head_flops(self) -> Flops:
        """Return the FLOPs of the output layer on one rank."""
        one = 2 * self.tokens * self.hidden * self.vocab_size / self.tp
        return Flops(one, one, one)

    # -------------------------------------------------------------------------------------------------- activations
    def layer_activation_bytes(self, recompute: Recompute | None = None) -> float:
        """Return what one layer keeps from F to the backward of one microbatch, on one rank, bytes.

        Notes
        -----
        Korthikanti et al. (arXiv:2205.05198), Table 2, for the plain layer of two bytes: sbh(34 + 5as/h), 1/t of it with tensor and
        sequence parallelism, sbh(10 + 24/t + 5as/(ht)) without the latter, without 5as/h selectively, 2sbh in full.
        """
        how = self.recompute if recompute is None else recompute
        t, h, size = self.tokens, self.hidden, self.dtype_bytes
        if how == "full":
            return t * h * size
        mask = 1 if self.dropout else 0
        along_sequence = t * h * (4 * size + 2 * mask) / self._sequence_split
        inner = self.query_size * 2 + self.key_size * 2 + self.up_size + self.ffn
        scores = self.num_heads * self.seq_length * t * (size + mask * (1 + size))
        return along_sequence + (t * inner * size + (scores if how == "none" else 0.0)) / self.tp

    def layer_weight_bytes(self) -> float:
        """Return what one layer keeps from I to W, on one rank, bytes: inputs and output gradients of its matrices.

        Notes
        -----
        32sbh for the plain layer of two bytes (Zero Bubble, arXiv:2401.10241, Table 1).
        """
        along_sequence = 4 * self.hidden / self._sequence_split
        split = 2 * self.query_size + 2 * self.key_size + self.ffn + self.up_size
        return self.tokens * self.dtype_bytes * (along_sequence + split / self.tp)

    def embedding_activation_bytes(self) -> float:
        """Return what the embedding keeps: the mask of its dropout, bytes."""
        return self.tokens * self.hidden * (1 if self.dropout else 0) / self._sequence_split

    def head_activation_bytes(self) -> float:
        """Return what the last norm, the output layer and the loss keep, bytes; logits in float32 (arXiv:2205.05198, 4.3)."""
        along_sequence = 2 * self.tokens * self.hidden * self.dtype_bytes / self._sequence_split
        return along_sequence + 4 * self.tokens * self.vocab_size / self.tp

    @property
    def _sequence_split(self) -> int:
        return self.tp if self.sequence_parallel else 1

    @property
    def message_bytes(self) -> float:
        """Size of a message between stages, bytes."""
        return self.tokens * self.hidden * self.dtype_bytes / self._sequence_split

    def parameter_bytes(self) -> float:
        """Return weight, gradient and optimizer state of one parameter on one rank, bytes."""
        return self.dtype_bytes + self.gradient_bytes + self.optimizer_bytes / self._optimizer_ranks

    @property
    def _optimizer_ranks(self) -> int:
        return self.dp * self.cp if self.distributed_optimizer else 1


def costs_of_model(
    model: Transformer,
    *,
    pipeline_ranks: int,
    device: Device,
    layer_split: Sequence[int] | str | None = None,
    stage_order: str = "interleaved",
) -> Costs:
    """Return the costs of a model: :meth:`mappnb.Costs.from_model`, which says the rest."""
    p = positive("pipeline_ranks", pipeline_ranks)
    layers = _split(model, p, layer_split)
    chunks = len(layers) / p
    ends = np.zeros((2, len(layers)))
    ends[0, 0] = ends[1, -1] = 1.0
    layer, head = _seconds(model, device)
    f, i, w = (chunks * (layers * a + ends[1] * b) for a, b in zip(layer, head, strict=True))
    activation = layers * model.layer_activation_bytes() + ends[0] * model.embedding_activation_bytes()
    static, largest = _static(model, p, layers, stage_order)
    gradients = (
        model.gradient_bytes * (layers * model.layer_parameters + ends[0] * model.embedding_parameters) / model.tp
    )
    gradients = gradients + ends[1] * model.gradient_bytes * model.head_parameters / model.tp
    ranks = model.dp * model.cp
    passes = (ranks - 1) / ranks * (1 if model.distributed_optimizer else 2)
    moved = largest * (2 * model.optimizer_bytes / model._optimizer_ranks + model.gradient_bytes + model.dtype_bytes)
    return Costs(
        forward_s=f,
        backward_input_s=i,
        backward_weight_s=w,
        p2p_s=device.link_latency_s,
        message_bytes=model.message_bytes,
        bandwidth=device.link_bandwidth,
        ship_bytes=float(activation.mean()),
        reduce_s=chunks * passes * gradients / device.data_bandwidth,
        optimizer_s=moved / device.memory_bandwidth,
        activation=chunks * (activation + ends[1] * model.head_activation_bytes()),
        activation_weight=chunks * layers * model.layer_weight_bytes(),
        static_memory=static,
    )


def _split(model: Transformer, p: int, layer_split: Sequence[int] | str | None) -> Floats:
    """Return the layers of each part of the depth: one each without a split, so that the costs serve every number of chunks."""
    if isinstance(layer_split, str) and layer_split != "free":
        raise CostError(f"layer_split is {layer_split!r}; expected the layers of each stage, or 'free'")
    if layer_split is None or layer_split == "free":
        if model.num_layers < p:
            raise CostError(
                f"{model.num_layers} layers for {p} pipeline ranks; give layer_split if some shall have none"
            )
        if model.num_layers % p and layer_split is None:
            low = model.num_layers // p * p
            first, more = divmod(model.num_layers, p)
            split = [first + (p - more <= r) for r in range(p)]
            raise CostError(
                f"{model.num_layers} layers do not divide by {p} pipeline ranks: take {low} or {low + p} layers, or say which "
                f"stage has how many, such as layer_split={split}; layer_split='free' leaves that to mappnb.plan(num_layers=)"
            )
        return np.ones(model.num_layers)
    layers = np.asarray(layer_split, np.float64)
    if layers.ndim != 1 or len(layers) % p or not len(layers) or (layers < 0).any() or layers.sum() != model.num_layers:
        raise CostError(
            f"layer_split {list(layer_split)}: expected a number of layers for each stage, a multiple of {p} stages, "
            f"{model.num_layers} layers together"
        )
    return layers


def _seconds(model: Transformer, device: Device) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the times (F, I, W) of a layer and of the output layer, s."""
    flops, head = model.layer_flops(), model.head_flops()
    moved = 2 * model.layer_activation_bytes("selective" if model.recompute == "full" else model.recompute)
    hops = 4 * model.tokens * model.hidden * model.dtype_bytes * (model.tp - 1) / model.tp  # two all-reduces a pass
    forward = device.seconds(flops.forward, moved) + hops / device.tensor_bandwidth
    again = forward - device.seconds(flops.forward) if model.recompute == "full" else 0.0
    backward = device.seconds(flops.backward_input, moved) + hops / device.tensor_bandwidth + again
    logits = 2 * model.head_activation_bytes()
    of_head = (device.seconds(head.forward, logits), device.seconds(head.backward_input, logits))
    return (forward, backward, device.seconds(flops.backward_weight)), (*of_head, device.seconds(head.backward_weight))


def _static(model: Transformer, p: int, layers: Floats, stage_order: str) -> tuple[Floats, float]:
    """Return static memory by rank, bytes, and the parameters of the largest rank."""
    if stage_order not in ("interleaved", "v"):
        raise CostError(f"stage_order is {stage_order!r}; expected 'interleaved' or 'v'")
    parameters = np.zeros(p)
    stages = layers if len(layers) % p == 0 and len(layers) != model.num_layers else None
    if stages is None:
        parameters += layers.sum() / p * model.layer_parameters
    else:
        chunk, at = np.divmod(np.arange(len(stages)), p)
        rank = np.where((chunk % 2 == 1) & (stage_order == "v"), p - 1 - at, at)
        np.add.at(parameters, rank, stages * model.layer_parameters)
    parameters[0] += model.embedding_parameters
    parameters[0 if stage_order == "v" else p - 1] += model.head_parameters
    parameters /= model.tp
    return parameters * model.parameter_bytes(), float(parameters.max())
