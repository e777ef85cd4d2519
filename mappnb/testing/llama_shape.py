"""Sizes and constants of a Llama, and the shapes of its tensors that follow from them; plain Python."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from math import prod
from typing import Any

from mappnb.errors import MappnbError

__all__ = ["CheckpointError", "LlamaShape", "expected_shapes", "misfit"]


class CheckpointError(MappnbError, ValueError):
    """A checkpoint that does not fit a model: a tensor missing or of another shape, a setting that differs, a layout that cannot be."""


# field -> (name in megatron-core, name in Hugging Face's config.json)
_NAMES: Mapping[str, tuple[str, str]] = {
    "num_layers": ("num_layers", "num_hidden_layers"),
    "hidden": ("hidden_size", "hidden_size"),
    "num_heads": ("num_attention_heads", "num_attention_heads"),
    "num_kv_heads": ("num_query_groups", "num_key_value_heads"),
    "head_dim": ("kv_channels", "head_dim"),
    "ffn": ("ffn_hidden_size", "intermediate_size"),
    "vocab": ("vocab_size", "vocab_size"),
    "eps": ("layernorm_epsilon", "rms_norm_eps"),
    "rope_base": ("rotary_base", "rope_theta"),
    "tied": ("share_embeddings_and_output_weights", "tie_word_embeddings"),
}


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """What a Llama is, apart from its weights.

    Attributes
    ----------
    num_layers, hidden, num_heads, num_kv_heads, head_dim, ffn, vocab : int
        Sizes of the whole model.
    eps, rope_base : float
        Of RMSNorm, and of the rotary positions.
    tied : bool
        Whether the output layer is the embedding.
    max_tokens : int
        Longest sequence it was made for.
    """

    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    eps: float
    rope_base: float
    tied: bool
    max_tokens: int = 2048

    @classmethod
    def of_config(cls, config: Mapping[str, Any], *, where: str = "config") -> LlamaShape:
        """Return the shape from the contents of a ``config.json``.

        Parameters
        ----------
        config : mapping
            Of a ``LlamaForCausalLM``; ``rope_theta`` at its place of transformers 4 or 5.
        where : str
            Named in errors.

        Raises
        ------
        CheckpointError
            For another kind of model, or what megatron-core's plain layers do not compute.
        """
        _check_kind(config, where)
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        missing = [n for _, n in list(_NAMES.values())[:7] if n not in config and n not in _OPTIONAL]
        if missing:
            raise CheckpointError(
                f"{where}: {', '.join(missing)} missing; expected the config.json of a LlamaForCausalLM"
            )
        heads = int(config["num_attention_heads"])
        return cls(
            num_layers=int(config["num_hidden_layers"]),
            hidden=int(config["hidden_size"]),
            num_heads=heads,
            num_kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or int(config["hidden_size"]) // heads),
            ffn=int(config["intermediate_size"]),
            vocab=int(config["vocab_size"]),
            eps=float(config.get("rms_norm_eps", 1e-6)),
            rope_base=float(config.get("rope_theta") or rope.get("rope_theta") or 10_000.0),
            tied=bool(config.get("tie_word_embeddings", False)),
            max_tokens=int(config.get("max_position_embeddings", 2048)),
        )

    @classmethod
    def of_megatron(cls, core: Any) -> LlamaShape:
        """Return the shape of a GPTModel, which need not hold all of its layers."""
        config = core.config
        return cls(
            num_layers=int(config.num_layers),
            hidden=int(config.hidden_size),
            num_heads=int(config.num_attention_heads),
            num_kv_heads=int(config.num_query_groups or config.num_attention_heads),
            head_dim=int(config.kv_channels),
            ffn=int(config.ffn_hidden_size),
            vocab=int(core.vocab_size),
            eps=float(config.layernorm_epsilon),
            rope_base=float(getattr(core, "rotary_base", 10_000.0)),
            tied=bool(core.share_embeddings_and_output_weights),
            max_tokens=int(core.max_sequence_length),
        )

    def check_layout(self, *, tp: int = 1, pp: int = 1, vpp: int = 1) -> None:
        """Raise `CheckpointError` if the model cannot be cut into these sizes."""
        shared = self.num_kv_heads % tp == 0 or tp % self.num_kv_heads == 0
        if self.num_heads % tp or self.ffn % tp or not shared:
            can = [
                n
                for n in range(1, self.num_heads + 1)
                if not (self.num_heads % n or self.num_kv_heads % n or self.ffn % n)
            ]
            raise CheckpointError(
                f"tp is {tp}: {self.num_heads} heads, {self.num_kv_heads} key-value heads and {self.ffn} neurons cannot be cut so; "
                f"expected tp of {', '.join(map(str, can))}"
            )
        if self.num_layers % (pp * vpp):
            can = [n for n in range(1, self.num_layers + 1) if self.num_layers % n == 0]
            raise CheckpointError(
                f"pp {pp} x vpp {vpp}: {self.num_layers} layers cannot be cut so; expected pp x vpp of {', '.join(map(str, can))}"
            )

    def check_same(self, checkpoint: LlamaShape) -> None:
        """Raise `CheckpointError` unless a checkpoint is of this model's shape; a padded vocabulary is larger, and fits."""
        for field in fields(self):
            mine, theirs = getattr(self, field.name), getattr(checkpoint, field.name)
            if field.name not in _NAMES or mine == theirs or (field.name == "vocab" and mine > theirs):
                continue
            megatron, hf = _NAMES[field.name]
            raise CheckpointError(
                f"the model has {megatron}={mine}, the checkpoint {hf}={theirs}: build the model with {megatron}={theirs}"
            )


_OPTIONAL = ("num_key_value_heads", "head_dim")


def _check_kind(config: Mapping[str, Any], where: str) -> None:
    """Raise for what a plain Llama is not."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    wanted: Sequence[tuple[str, Any, Any]] = (
        ("model_type", config.get("model_type", "llama"), "llama"),
        ("hidden_act", config.get("hidden_act", "silu"), "silu"),
        ("attention_bias", bool(config.get("attention_bias", False)), False),
        ("mlp_bias", bool(config.get("mlp_bias", False)), False),
        ("rope_type", rope.get("rope_type", rope.get("type", "default")), "default"),
    )
    for name, found, expected in wanted:
        if found != expected:
            raise CheckpointError(f"{where}: {name} is {found!r}; only Llamas with {expected!r} are converted")


Size = tuple[str, ...]
"""Fields of `LlamaShape` whose product is one dim of a tensor."""


@dataclass(frozen=True, slots=True)
class _Expected:
    sizes: tuple[Size, ...]
    shape: LlamaShape

    @property
    def dims(self) -> tuple[int, ...]:
        return tuple(prod(getattr(self.shape, name) for name in size) for size in self.sizes)


def expected_shapes(shape: LlamaShape) -> dict[str, _Expected]:
    """Return what is expected of each tensor of a state dict, ``*`` for the layer."""
    hidden, heads, groups, ffn = ("hidden",), ("num_heads", "head_dim"), ("num_kv_heads", "head_dim"), ("ffn",)
    sizes: dict[str, tuple[Size, ...]] = {
        "model.embed_tokens": (("vocab",), hidden),
        "model.layers.*.input_layernorm": (hidden,),
        "model.layers.*.self_attn.q_proj": (heads, hidden),
        "model.layers.*.self_attn.k_proj": (groups, hidden),
        "model.layers.*.self_attn.v_proj": (groups, hidden),
        "model.layers.*.self_attn.o_proj": (hidden, heads),
        "model.layers.*.post_attention_layernorm": (hidden,),
        "model.layers.*.mlp.gate_proj": (ffn, hidden),
        "model.layers.*.mlp.up_proj": (ffn, hidden),
        "model.layers.*.mlp.down_proj": (hidden, ffn),
        "model.norm": (hidden,),
        "lm_head": (("vocab",), hidden),
    }
    return {f"{name}.weight": _Expected(size, shape) for name, size in sizes.items()}


def misfit(name: str, found: tuple[int, ...] | None, expected: _Expected) -> str | None:
    """Say how a tensor does not fit and which setting would change that; None if it fits."""
    if found is None:
        return f"no tensor {name!r}; expected one of {expected.dims}"
    text = f"{name} is {found}; expected {expected.dims}"
    if len(found) != len(expected.dims):
        return text
    for size, have, want in zip(expected.sizes, found, expected.dims, strict=True):
        if have == want or (size == ("vocab",) and have < want):
            continue
        first = size[0]
        rest = want // getattr(expected.shape, first)
        megatron, hf = _NAMES[first]
        names = megatron if megatron == hf else f"{megatron} (Hugging Face: {hf})"
        cure = f"; {names} would be {have // rest}, not {getattr(expected.shape, first)}" if have % rest == 0 else ""
        terms = " x ".join(f"{_NAMES[part][0]} {getattr(expected.shape, part)}" for part in size)
        return f"{text}: {want} = {terms}{cure}"
    return None
