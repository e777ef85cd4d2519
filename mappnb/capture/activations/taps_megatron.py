"""Where the points pass the modules of a Megatron-core GPTModel: local and Transformer Engine specs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from mappnb.activation_points import POINTS
from mappnb.capture._megatron_facts import _call
from mappnb.capture._patches import loaded
from mappnb.capture.activations.shard import Shard, Split
from mappnb.capture.activations.tap import Site, Tap
from mappnb.capture.activations.tap_forms import ColumnPart, Experts, Form, GroupedHeads, SequenceFirst, VocabPart

__all__ = ["Place", "is_megatron", "layers_of", "place_of", "taps_of"]

PLAIN: Final = SequenceFirst()


def is_megatron(core: Any) -> bool:
    """Return True for a language model of Megatron-core, unwrapped: one with a decoder of layers that know their number."""
    decoder = getattr(core, "decoder", None)
    layers = getattr(decoder, "layers", None)
    return layers is not None and hasattr(core, "config") and all(hasattr(layer, "layer_number") for layer in layers)


def layers_of(core: Any) -> list[tuple[int, Any]]:
    """Return (global layer from 0, module) of each layer of a model chunk; multi-token-prediction layers are not among them."""
    return [(int(layer.layer_number) - 1, layer) for layer in core.decoder.layers]


@dataclass(frozen=True, slots=True)
class Place:
    """What decides a rank's part of each tensor.

    Attributes
    ----------
    tp_rank, tp_size, cp_size : int
        Place in the tensor-parallel group, its size, and that of the context-parallel group.
    sequence_parallel : bool
        Tokens of the residual stream are split over the tensor-parallel group.
    hidden, heads, kv_heads, head_dim, experts : int
        Sizes of the whole model.
    """

    tp_rank: int
    tp_size: int
    cp_size: int
    sequence_parallel: bool
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int

    def shard(self, point: str, sizes: tuple[int, ...] | None = None, split: dict[str, Split] | None = None) -> Shard:
        """Return this rank's part of a point; ``sizes`` are the local lengths of its feature dims."""
        info = POINTS[point]
        over_tp = self.sequence_parallel and info.sequence_parallel
        kinds = [kind for kind, on in (("cp", self.cp_size > 1), ("sp", over_tp)) if on]
        shared = self.tp_size > 1 and not over_tp and not split
        writes = not shared or self.tp_rank == 0
        part = (split or {}).get("kv_head")
        if part is not None and part.size > part.total:  # fewer groups than ranks: several hold the same
            shared, writes = True, self.tp_rank % (part.size // part.total) == 0
        return Shard(
            ("sample", "token", *info.dims),
            sizes or (self.experts if info.dims == ("expert",) else self.hidden,),
            token="+".join(kinds) or "whole",
            token_rank=self.tp_rank if over_tp else 0,
            token_size=self.tp_size if over_tp else 1,
            split=split or {},
            replicated=shared,
            writes=writes,
        )

    def heads_shard(self, point: str) -> Shard:
        """Return the part of a point with heads."""
        dim = POINTS[point].dims[0]
        total = self.heads if dim == "head" else self.kv_heads
        if total >= self.tp_size:
            split = Split.even(self.tp_rank, self.tp_size, total)
        else:
            start = self.tp_rank * total // self.tp_size
            split = Split(self.tp_rank, self.tp_size, start, start + 1, total)
        return self.shard(point, (split.stop - split.start, self.head_dim), {dim: split} if self.tp_size > 1 else None)

    def columns(self, point: str, local: int) -> Shard:
        """Return the part of a point whose last dim is split evenly."""
        dim = POINTS[point].dims[0]
        split = {dim: Split.even(self.tp_rank, self.tp_size, local * self.tp_size)} if self.tp_size > 1 else None
        return self.shard(point, (local,), split)


def place_of(core: Any) -> Place:
    """Return what decides this rank's parts, from Megatron-core's parallel state and the model's configuration."""
    config, state = core.config, loaded("megatron.core.parallel_state")
    sizes = {"tp": (0, 1), "cp": (0, 1)}
    if state is not None and state.model_parallel_is_initialized():
        for axis, name in (("tp", "tensor_model"), ("cp", "context")):
            sizes[axis] = (
                _call(state, f"get_{name}_parallel_rank", 0),
                _call(state, f"get_{name}_parallel_world_size", 1),
            )
    heads = int(config.num_attention_heads)
    return Place(
        tp_rank=sizes["tp"][0],
        tp_size=sizes["tp"][1],
        cp_size=sizes["cp"][1],
        sequence_parallel=bool(getattr(config, "sequence_parallel", False)) and sizes["tp"][1] > 1,
        hidden=int(config.hidden_size),
        heads=heads,
        kv_heads=int(getattr(config, "num_query_groups", None) or heads),
        head_dim=int(getattr(config, "kv_channels", None) or config.hidden_size // heads),
        experts=int(getattr(config, "num_moe_experts", None) or 0),
    )


def taps_of(core: Any, missing: list[str]) -> list[Tap]:
    """Return the taps of all points of a model chunk, in the order of a forward pass; one line in ``missing`` for what has none."""
    place = place_of(core)
    taps: list[Tap] = []
    if getattr(core, "pre_process", True) and getattr(core, "embedding", None) is not None:
        taps.append(_residual("embed", -1, Site(core.embedding, "out", -1), place))
    for number, layer in layers_of(core):
        taps += _Layer(layer, number, place, core.config, missing).taps()
    if getattr(core, "post_process", True):
        norm = getattr(core.decoder, "final_layernorm", None)
        if norm is not None:
            taps.append(_residual("final_ln", -1, Site(norm, "out", -1), place))
        taps += _logits(core, place, missing)
    return taps


def _residual(point: str, layer: int, site: Site, place: Place) -> Tap:
    return Tap(point, layer, place.shard(point), site, PLAIN)


def _logits(core: Any, place: Place, missing: list[str]) -> Iterator[Tap]:
    layer = getattr(core, "output_layer", None)
    if layer is None:
        return
    if getattr(core.config, "mtp_num_layers", None):
        missing.append("logits: multi-token prediction calls the output layer more than once a microbatch")
        return
    local = int(getattr(layer, "output_size_per_partition", 0)) or int(
        core.shared_embedding_or_output_weight().shape[0]
    )
    shard = place.columns("logits", local)
    part = shard.part("vocab")
    yield Tap("logits", -1, shard, Site(layer, "out", 0), VocabPart(part.start, part.stop))


class _Layer:
    """The points of one layer."""

    def __init__(self, layer: Any, number: int, place: Place, config: Any, missing: list[str]) -> None:
        self.layer, self.number, self.place, self.config, self._missing = layer, number, place, config, missing

    def taps(self) -> list[Tap]:
        """Return them in the order of a forward pass."""
        layer = self.layer
        found = [_residual("resid_pre", self.number, Site(layer, "in", 0, "hidden_states"), self.place)]
        found += self._attention()
        found += self._middle()
        mlp = getattr(layer, "mlp", None)
        if mlp is not None and not _is_identity(mlp):
            found += self._experts(mlp) if hasattr(mlp, "router") else self._mlp(mlp)
            found.append(_residual("mlp_out", self.number, Site(mlp, "out", 0, bias=1), self.place))
        found.append(_residual("resid_post", self.number, Site(layer, "out", 0), self.place))
        return found

    def _tell(self, points: str, why: str) -> None:
        self._missing += [f"layers.{self.number}.{point}: {why}" for point in points.split()]

    def _attention(self) -> Iterator[Tap]:
        attention = getattr(self.layer, "self_attention", None)
        if attention is None or _is_identity(attention):
            self._tell("ln1_out q k v q_rot k_rot z attn_out", "the layer has no self-attention")
            return
        yield from self._norm(
            "ln1_out", getattr(self.layer, "input_layernorm", None), getattr(attention, "linear_qkv", None)
        )
        core = getattr(attention, "core_attention", None)
        if getattr(attention, "linear_qkv", None) is None or core is None:
            kind = type(attention).__name__
            self._tell("q k v q_rot k_rot z", f"{kind} does not split queries, keys and values as SelfAttention does")
        else:
            yield from self._heads(attention, core)
        yield _residual("attn_out", self.number, Site(attention, "out", 0, bias=1), self.place)

    def _heads(self, attention: Any, core: Any) -> Iterator[Tap]:
        form = SequenceFirst(self.place.head_dim)
        for part in ("q", "k"):
            norm = getattr(attention, f"{part}_layernorm", None)
            if norm is not None:
                yield self._head(part, Site(norm, "out", -1), form)
            elif self.place.kv_heads < self.place.tp_size:
                self._tell(
                    part, "fewer key-value groups than tensor-parallel ranks, and no module passes it before rotary"
                )
            else:
                yield self._head(part, Site(attention.linear_qkv, "out", 0), self._fused(part))
        if getattr(self.config, "fused_single_qkv_rope", False):
            self._tell("q k", "fused_single_qkv_rope splits and rotates in one kernel")
        for index, point in enumerate(("q_rot", "k_rot", "v")):
            yield self._head(point, Site(core, "in", index, ("query", "key", "value")[index]), form)
        yield self._head(
            "z", Site(attention.linear_proj, "in", 0, "input_"), SequenceFirst(self.place.head_dim, flat=True)
        )

    def _fused(self, part: str) -> Form:
        place = self.place
        groups = place.kv_heads // place.tp_size
        gated = bool(getattr(self.config, "attention_output_gate", False))
        return GroupedHeads(part, groups, place.heads // place.kv_heads, place.head_dim, gated)

    def _head(self, point: str, site: Site, form: Form) -> Tap:
        return Tap(point, self.number, self.place.heads_shard(point), site, form)

    def _norm(self, point: str, norm: Any, linear: Any) -> Iterator[Tap]:
        """Tap the output of a norm; where the linear layer after it holds the norm (Transformer Engine), compute it."""
        if getattr(linear, "layer_norm_weight", None) is not None:
            site = Site(linear, "in", 0, "inp")
            yield Tap(
                point, self.number, self.place.shard(point), site, PLAIN, compute=_fused_norm(linear, self.config)
            )
        elif norm is not None:
            yield _residual(point, self.number, Site(norm, "out", -1), self.place)

    def _middle(self) -> Iterator[Tap]:
        """Tap the residual stream after attention where a change of it reaches both the MLP and the stream."""
        cross, norm = getattr(self.layer, "cross_attention", None), getattr(self.layer, "pre_mlp_layernorm", None)
        if cross is not None and _is_identity(cross):
            yield _residual("resid_mid", self.number, Site(cross, "out", -1), self.place)
        elif norm is not None:
            site = Site(norm, "in", 0)
            yield Tap("resid_mid", self.number, self.place.shard("resid_mid"), site, PLAIN, replaceable=False)
        yield from self._norm("ln2_out", norm, getattr(getattr(self.layer, "mlp", None), "linear_fc1", None))

    def _mlp(self, mlp: Any) -> Iterator[Tap]:
        first, second = getattr(mlp, "linear_fc1", None), getattr(mlp, "linear_fc2", None)
        if first is None or second is None or type(mlp).__name__ == "TEFusedMLP":
            self._tell("mlp_pre mlp_gate mlp_up mlp_act", f"{type(mlp).__name__} runs as one kernel")
            return
        gated = bool(getattr(self.config, "gated_linear_unit", False))
        local = int(second.weight.shape[1])
        for index, point in enumerate(("mlp_gate", "mlp_up") if gated else ("mlp_pre",)):
            form: Form = ColumnPart(index, 2, PLAIN) if gated else PLAIN
            yield Tap(point, self.number, self.place.columns(point, local), Site(first, "out", 0, bias=1), form)
        shard = self.place.columns("mlp_act", local)
        yield Tap("mlp_act", self.number, shard, Site(second, "in", 0, "input_"), PLAIN)

    def _experts(self, moe: Any) -> Iterator[Tap]:
        self._tell("mlp_pre mlp_gate mlp_up mlp_act", "inside experts, tokens are in another order and on other ranks")
        yield Tap("router_prob", self.number, self.place.shard("router_prob"), Site(moe.router, "out", 0), Experts())


def _is_identity(module: Any) -> bool:
    return type(module).__name__.startswith("Identity")


def _fused_norm(linear: Any, config: Any) -> Callable[[Any], Any]:
    """Make what Transformer Engine's LayerNormLinear makes inside: its norm of the input."""
    import torch

    def norm(tensor: Any) -> Any:
        with torch.no_grad():
            weight, bias = linear.layer_norm_weight, getattr(linear, "layer_norm_bias", None)
            if getattr(config, "layernorm_zero_centered_gamma", False):
                weight = weight + 1
            eps, size = float(config.layernorm_epsilon), (tensor.shape[-1],)
            if config.normalization == "RMSNorm":
                return torch.nn.functional.rms_norm(tensor, size, weight, eps)
            return torch.nn.functional.layer_norm(tensor, size, weight, bias, eps)

    return norm
