"""Names of the points inside a model at which tensors are captured, their dims, and how they are sharded."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from mappnb.errors import MappnbError, SchemaError, did_you_mean

__all__ = [
    "GROUPS",
    "POINTS",
    "WEIGHTS",
    "Point",
    "PointName",
    "alias",
    "module_names",
    "parse_point",
    "point_names",
    "resolve",
]


@dataclass(frozen=True, slots=True)
class Point:
    """One place in a transformer at which a tensor is captured.

    Attributes
    ----------
    name : str
        Canonical name of the point, without layer.
    per_layer : bool
        True if every layer has it: its full name is then ``layers.{layer}.{name}``.
    dims : tuple of str
        Feature dims; in datasets they follow (sample, [layer,] token). Weights have no sample and no token.
    what : str
        What is captured.
    sharding : str
        How the ranks of a tensor-parallel group share it; over context parallelism every point but weights is split by token.
    split : str
        Feature dim that is split over tensor parallelism, ``""`` if none is.
    sequence_parallel : bool
        True if sequence parallelism splits its tokens over the tensor-parallel group.
    weight : bool
        True for a parameter, False for an activation.
    """

    name: str
    per_layer: bool
    dims: tuple[str, ...]
    what: str
    sharding: str
    split: str = ""
    sequence_parallel: bool = False
    weight: bool = False


_RESIDUAL: Final = "replicated over TP; with sequence parallel, tokens over TP"
_HEADS: Final = "heads over TP"
_GROUPS: Final = "key-value heads over TP, replicated if there are fewer than ranks"
_COLUMNS: Final = "columns over TP; each rank has its part of gate and its part of up"
_VOCAB: Final = "vocabulary over TP (padded to a multiple of it)"


def _hidden(name: str, what: str, *, per_layer: bool = True) -> Point:
    return Point(name, per_layer, ("hidden",), what, _RESIDUAL, sequence_parallel=True)


def _head(name: str, what: str, *, dim: str = "head") -> Point:
    return Point(name, True, (dim, "head_dim"), what, _HEADS if dim == "head" else _GROUPS, split=dim)


def _neuron(name: str, what: str) -> Point:
    return Point(name, True, ("neuron",), what, _COLUMNS, split="neuron")


def _weight(name: str, dims: tuple[str, ...], what: str, *, split: str = "", per_layer: bool = True) -> Point:
    sharding = f"{split} over TP" if split else "replicated over TP"
    return Point(name, per_layer, dims, what, sharding, split=split, weight=True)


def _table(*points: Point) -> dict[str, Point]:
    return {p.name: p for p in points}


POINTS: Final[dict[str, Point]] = _table(
    _hidden("embed", "output of the embedding, with learned positions where the model has them", per_layer=False),
    _hidden("resid_pre", "residual stream that enters the layer"),
    _hidden("ln1_out", "output of the norm before attention"),
    _head("q", "queries after split and query norm, before rotary"),
    _head("k", "keys after split and key norm, before rotary", dim="kv_head"),
    _head("v", "values", dim="kv_head"),
    _head("q_rot", "queries after rotary: what attention uses"),
    _head("k_rot", "keys after rotary: what attention uses", dim="kv_head"),
    _head("z", "attention context: the pattern times the values"),
    _hidden("attn_out", "what attention adds to the residual stream, with bias"),
    _hidden("resid_mid", "residual stream between attention and MLP"),
    _hidden("ln2_out", "output of the norm before the MLP"),
    _neuron("mlp_pre", "MLP before its activation function, with bias (not gated)"),
    _neuron("mlp_gate", "gate of a gated MLP before its activation function, with bias"),
    _neuron("mlp_up", "linear part of a gated MLP, with bias"),
    _neuron("mlp_act", "MLP after its activation function (gated: times the linear part)"),
    Point(
        "router_prob",
        True,
        ("expert",),
        "weight the router gives to each expert, 0 where not chosen",
        _RESIDUAL,
        sequence_parallel=True,
    ),
    _hidden("mlp_out", "what the MLP or the experts add to the residual stream, with bias"),
    _hidden("resid_post", "residual stream that leaves the layer"),
    _hidden("final_ln", "output of the last norm", per_layer=False),
    Point("logits", False, ("vocab",), "logits before the loss", _VOCAB, split="vocab"),
)
"""Activations by canonical name, in the order in which a forward pass reaches them."""

WEIGHTS: Final[dict[str, Point]] = _table(
    _weight("unembed", ("vocab", "hidden"), "output projection to the vocabulary", split="vocab", per_layer=False),
    _weight("final_ln_weight", ("hidden",), "weight of the last norm", per_layer=False),
    _weight("final_ln_bias", ("hidden",), "bias of the last norm", per_layer=False),
    _weight("w_o", ("head", "head_dim", "hidden"), "attention output projection, by head", split="head"),
    _weight("b_o", ("hidden",), "bias of the attention output projection"),
    _weight("w_out", ("neuron", "hidden"), "second projection of the MLP", split="neuron"),
    _weight("sinks", ("head",), "learned logit beside each row of attention, where the model has them", split="head"),
)
"""Parameters that a plan stores with the step on request, by canonical name."""

GROUPS: Final[dict[str, tuple[str, ...]]] = {
    "all": tuple(POINTS),
    "residual": ("resid_pre", "resid_mid", "resid_post"),
    "attention": ("q", "k", "v", "q_rot", "k_rot", "z", "attn_out"),
    "mlp": ("mlp_pre", "mlp_gate", "mlp_up", "mlp_act", "mlp_out"),
}
"""Words that stand for several points; a point of a group that a model lacks is left out without a word."""


@dataclass(frozen=True, slots=True, order=True)
class PointName:
    """A point in a model: ``str()`` and :func:`parse_point` are inverses.

    Attributes
    ----------
    point : str
        Canonical name, a key of POINTS or WEIGHTS.
    layer : int
        Global layer from 0; -1 for points that no layer holds, and for "every layer".
    grad : bool
        True for the gradient of the point.
    """

    point: str
    layer: int = -1
    grad: bool = False

    def __str__(self) -> str:
        where = f"layers.{self.layer}." if self.layer >= 0 else ""
        return f"{where}{self.point}{'.grad' if self.grad else ''}"


def parse_point(name: str, *, error: type[MappnbError] = SchemaError) -> PointName:
    """Return point, layer and whether the gradient is meant, from a canonical name.

    Parameters
    ----------
    name : str
        ``"layers.3.q"``, ``"logits"``, ``"layers.3.resid_post.grad"``; ``"q"`` alone stands for every layer.
    error : type
        Class of the error to raise.

    Raises
    ------
    SchemaError
        Or ``error``, if there is no such point, or the layer is no number from 0, or the point belongs to no layer.
    """
    text, grad = (name[: -len(".grad")], True) if name.endswith(".grad") else (name, False)
    layer = -1
    if text.startswith("layers."):
        number, _, text = text.removeprefix("layers.").partition(".")
        if not number.isdecimal() or not text:
            raise error(
                f"point {name!r}: {number!r} is no layer; write layers.<layer from 0>.<point>, such as 'layers.3.q'"
            )
        layer = int(number)
    known = {**POINTS, **WEIGHTS}
    point = known.get(text)
    if point is None:
        raise error(
            f"unknown point {name!r}{did_you_mean(text, known)}; known: {', '.join(POINTS)}; weights: {', '.join(WEIGHTS)}"
        )
    if layer >= 0 and not point.per_layer:
        raise error(f"point {name!r}: {text} belongs to no layer; write {text!r}")
    if grad and point.weight:
        raise error(f"point {name!r}: the gradient of a weight is not captured; leave '.grad' out")
    return PointName(text, layer, grad)


def point_names(words: str | Iterable[str], *, error: type[MappnbError] = SchemaError) -> list[PointName]:
    """Return the points that a list of names stands for: groups, aliases and canonical names, each once, in order."""
    found: dict[PointName, None] = {}
    for word in [words] if isinstance(words, str) else words:
        grad = word.endswith(".grad")
        group = GROUPS.get(word.removesuffix(".grad"))
        names = (
            [PointName(p, -1, grad) for p in group] if group else [parse_point(resolve(word, error=error), error=error)]
        )
        found.update(dict.fromkeys(names))
    return list(found)


_TL: Final[dict[str, str]] = {
    "embed": "hook_embed",
    "resid_pre": "hook_resid_pre",
    "ln1_out": "ln1.hook_normalized",
    "q": "attn.hook_q",
    "k": "attn.hook_k",
    "v": "attn.hook_v",
    "q_rot": "attn.hook_rot_q",
    "k_rot": "attn.hook_rot_k",
    "z": "attn.hook_z",
    "attn_out": "hook_attn_out",
    "resid_mid": "hook_resid_mid",
    "ln2_out": "ln2.hook_normalized",
    "mlp_pre": "mlp.hook_pre",
    "mlp_gate": "mlp.hook_pre",
    "mlp_up": "mlp.hook_pre_linear",
    "mlp_act": "mlp.hook_post",
    "router_prob": "mlp.hook_expert_weights",
    "mlp_out": "hook_mlp_out",
    "resid_post": "hook_resid_post",
    "final_ln": "ln_final.hook_normalized",
    "logits": "unembed.hook_out",
}
_LLAMA: Final[dict[str, tuple[str, ...]]] = {  # the first is what alias() gives; ".input" is what enters the module
    "embed": ("embed_tokens",),
    "resid_pre": ("input",),
    "ln1_out": ("input_layernorm",),
    "q": ("self_attn.q_proj", "self_attn.q_norm"),
    "k": ("self_attn.k_proj", "self_attn.k_norm"),
    "v": ("self_attn.v_proj",),
    "z": ("self_attn.o_proj.input",),
    "attn_out": ("self_attn.o_proj", "self_attn"),
    "resid_mid": ("post_attention_layernorm.input",),
    "ln2_out": ("post_attention_layernorm",),
    "mlp_gate": ("mlp.gate_proj",),
    "mlp_up": ("mlp.up_proj",),
    "mlp_act": ("mlp.down_proj.input",),
    "router_prob": ("mlp.gate",),
    "mlp_out": ("mlp.down_proj", "mlp"),
    "resid_post": ("", "output"),
    "final_ln": ("norm",),
    "logits": ("lm_head",),
}
_GPT2: Final[dict[str, tuple[str, ...]]] = {
    "embed": ("drop",),
    "resid_pre": ("input",),
    "ln1_out": ("ln_1",),
    "z": ("attn.c_proj.input",),
    "attn_out": ("attn.c_proj", "attn"),
    "resid_mid": ("ln_2.input",),
    "ln2_out": ("ln_2",),
    "mlp_pre": ("mlp.c_fc",),
    "mlp_act": ("mlp.c_proj.input", "mlp.act"),
    "mlp_out": ("mlp.c_proj", "mlp"),
    "resid_post": ("", "output"),
    "final_ln": ("ln_f",),
    "logits": ("lm_head",),
}
_FUSED: Final[dict[str, tuple[str, ...]]] = {
    "attn.c_attn": ("q", "k", "v"),
    "self_attn.qkv_proj": ("q", "k", "v"),
    "mlp.gate_up_proj": ("mlp_gate", "mlp_up"),
}


def _full(style: str, point: str, part: str, layer: int | str) -> str:
    """Join a module name of a style: with the layer's prefix for a point of a layer."""
    if style == "tl":
        return f"blocks.{layer}.{part}" if POINTS[point].per_layer else part
    root, blocks = ("model", "layers") if style == "hf" else ("transformer", "h")
    if POINTS[point].per_layer:
        return ".".join(filter(None, [root, blocks, str(layer), part]))
    return part if point == "logits" else f"{root}.{part}"


def _inverse() -> dict[str, str]:
    """Foreign names with ``*`` for the layer -> point."""
    table: dict[str, str] = {}
    for style, names in (("hf", _LLAMA), ("gpt2", _GPT2)):
        for point, parts in names.items():
            table.update({_full(style, point, part, "*"): point for part in parts})
    for point, part in _TL.items():
        table.setdefault(_full("tl", point, part, "*"), point)
    return table


_FOREIGN: Final = _inverse()


def module_names(style: str) -> dict[str, tuple[str, ...]]:
    """Return point -> names of modules, ``*`` for the layer, in style ``"hf"`` or ``"gpt2"``; ``.input`` is what enters the module."""
    names = _LLAMA if style == "hf" else _GPT2
    return {point: tuple(_full(style, point, part, "*") for part in parts) for point, parts in names.items()}


def alias(name: str, style: str = "tl", *, error: type[MappnbError] = SchemaError) -> str:
    """Return the name that another library gives to a point.

    Parameters
    ----------
    name : str
        Canonical, such as ``"layers.3.q"``.
    style : str
        ``"tl"`` (TransformerLens), ``"hf"`` (module names of Hugging Face's Llama; ``.input`` is what enters the module) or
        ``"gpt2"`` (those of its GPT-2).
    error : type
        Class of the error to raise.

    Raises
    ------
    SchemaError
        Or ``error``, if there is no such point or style, or that library has no name for the point.

    Notes
    -----
    TransformerLens' ``hook_embed`` leaves learned positions out, and its ``hook_normalized`` of an RMSNorm leaves the weight out:
    where a model has them, the same name holds another value there.
    """
    styles: dict[str, dict[str, tuple[str, ...]]] = {
        "tl": {p: (n,) for p, n in _TL.items()},
        "hf": _LLAMA,
        "gpt2": _GPT2,
    }
    if style not in styles:
        raise error(f"unknown style {style!r}; known: {', '.join(styles)}{did_you_mean(style, styles)}")
    parsed = parse_point(name, error=error)
    parts = styles[style].get(parsed.point)
    if parts is None:
        raise error(f"point {name!r} has no name in style {style!r}; named there: {', '.join(styles[style])}")
    if POINTS[parsed.point].per_layer and parsed.layer < 0:
        raise error(f"point {name!r}: say the layer, such as 'layers.0.{parsed.point}'")
    return _full(style, parsed.point, parts[0], parsed.layer)


def resolve(name: str, *, error: type[MappnbError] = SchemaError) -> str:
    """Return the canonical name of a point given by its canonical, TransformerLens or Hugging Face name.

    Parameters
    ----------
    name : str
        ``"layers.3.q"``, ``"blocks.3.attn.hook_q"``, ``"model.layers.3.self_attn.q_proj"``, ``"transformer.h.3.mlp.c_fc"``; module
        names may end in ``.input`` or ``.output``; ``*`` as the layer stands for every layer.
    error : type
        Class of the error to raise.

    Raises
    ------
    SchemaError
        Or ``error``, if nothing is known by that name; the message names the nearest.

    Notes
    -----
    ``blocks.3.mlp.hook_pre`` resolves to ``mlp_pre``; TransformerLens gives that name to the gate of a gated model, which is ``mlp_gate``
    here.
    """
    head = name.removesuffix(".grad")
    grad = name[len(head) :]
    text = re.sub(r"^layers\.\*\.", "", head)
    if text in POINTS or text in WEIGHTS or re.match(r"layers\.\d+\.", text):
        return str(parse_point(text + grad, error=error))
    numbers = re.findall(r"(?<=\.)\d+(?=\.|$)", text)
    pattern = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", text, count=1)
    point = _FOREIGN.get(pattern) or _FOREIGN.get(pattern.removesuffix(".output"))
    if point is None:
        raise error(_unknown(name, pattern))
    return str(PointName(point, int(numbers[0]) if numbers else -1, bool(grad)))


def _unknown(name: str, pattern: str) -> str:
    for fused, parts in _FUSED.items():
        if pattern.endswith(fused):
            return f"point {name!r}: that module gives {', '.join(parts)} in one; name the one you want, such as {parts[0]!r}"
    known = {**POINTS, **WEIGHTS, **GROUPS}
    hint = did_you_mean(name, known) or did_you_mean(pattern, _FOREIGN)
    return f"unknown point {name!r}{hint}; known: {', '.join(POINTS)}; weights: {', '.join(WEIGHTS)}; groups: {', '.join(GROUPS)}"
