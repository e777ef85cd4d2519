"""Taps of a model: the one way by which recording and interpretation reach the inside of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mappnb.activation_points import POINTS, PointName, point_names
from mappnb.capture._compiled import compiled_modules, is_compiled
from mappnb.capture._megatron_facts import unwrapped
from mappnb.capture.activations import taps_megatron, taps_torch
from mappnb.capture.activations.facts import model_facts
from mappnb.capture.activations.shard import Shard, Split
from mappnb.capture.activations.tap import Attachment, Handler, Site, Tap, attached
from mappnb.capture.activations.weights import weights_of
from mappnb.errors import CaptureError, MappnbError

__all__ = [
    "Attachment",
    "Handler",
    "Shard",
    "Site",
    "Split",
    "Tap",
    "attached",
    "find_taps",
    "model_facts",
    "weights_of",
]


def find_taps(
    model_or_chunks: Any,
    *,
    points: str | Iterable[str] | None = None,
    layers: Iterable[int] | None = None,
    names: Mapping[str, str] | None = None,
    missing: list[str] | None = None,
    error: type[MappnbError] = CaptureError,
) -> list[Tap]:
    """Find the points of a model.

    Parameters
    ----------
    model_or_chunks : Module or list of Module
        Megatron-core model chunks of this rank (wrapped or not), or any torch model with the module names of Hugging Face's Llama or
        GPT-2.
    points : str or iterable of str, optional
        Canonical names, aliases or groups; default all activations, no gradients. ``"q.grad"`` is the gradient of ``"q"``.
    layers : iterable of int, optional
        Global layers; default all. A layer in a point's own name counts for that point.
    names : dict, optional
        For other torch models: point -> module path, ``*`` for the layer and ``.input`` for what enters the module:
        ``{"resid_post": "blocks.*", "z": "blocks.*.attn.out.input"}``.
    missing : list, optional
        Gets one line for each point that the model has but that cannot be seen here.
    error : type
        Class of the error to raise.

    Returns
    -------
    list of Tap
        In the order of a forward pass; those of this rank only.

    Raises
    ------
    CaptureError
        Or ``error``, for a point that does not exist, or that a model of this kind cannot have.
    """
    chunks = list(model_or_chunks) if isinstance(model_or_chunks, (list, tuple)) else [model_or_chunks]
    wanted = point_names(points, error=error) if points is not None else [PointName(p) for p in POINTS]
    asked = [w for w in wanted if w.point in POINTS]
    told: list[str] = []
    found: list[Tap] = []
    for number, chunk in enumerate(chunks):
        core = unwrapped(chunk)
        compiled = compiled_modules(chunk)
        if id(core) in compiled or is_compiled(core):
            raise error(
                f"{type(core).__name__}: the model is compiled by torch.compile, and hooks are not seen inside; capture without it, or "
                "compile parts that no point passes"
            )
        if names is None and taps_megatron.is_megatron(core):
            taps = taps_megatron.taps_of(core, told)
        else:
            taps = taps_torch.taps_of(chunk, told, names=names)
        told += [
            f"{tap.name}: inside a module that torch.compile has compiled" for tap in taps if _within(tap, compiled)
        ]
        found += [replace(tap, chunk=number) for tap in taps if not _within(tap, compiled)]
    chosen = _choose(found, asked, None if layers is None else set(layers), told)
    if missing is not None:
        missing += [line for line in dict.fromkeys(told) if any(line.split(":")[0].endswith(w.point) for w in asked)]
    return chosen


def _within(tap: Tap, modules: set[int]) -> bool:
    return id(tap.site.module) in modules


def _choose(found: Sequence[Tap], asked: Sequence[PointName], layers: set[int] | None, told: list[str]) -> list[Tap]:
    """Taps of the points asked for: each once, with gradient taps where the point passes a module."""
    chosen: list[Tap] = []
    for tap in found:
        for grad in (False, True):
            here = [w for w in asked if w.point == tap.point and w.grad == grad]
            if not any(_has_layer(tap, w, layers) for w in here):
                continue
            if grad and (why := _no_gradient(tap)):
                told.append(f"{tap.name}: {why}")
                continue
            chosen.append(replace(tap, grad=True) if grad else tap)
    return chosen


def _no_gradient(tap: Tap) -> str:
    """Say why the gradient of a tap cannot be captured, ``""`` if it can."""
    if tap.compute is not None:
        return "no gradient: this model computes the point inside another module"
    if tap.shard.replicated and "kv_head" in tap.shard.dims:
        return "no gradient: with fewer key-value groups than tensor-parallel ranks each rank has a part of its sum"
    return ""


def _has_layer(tap: Tap, wanted: PointName, layers: set[int] | None) -> bool:
    if wanted.layer >= 0:
        return tap.layer == wanted.layer
    return layers is None or tap.layer < 0 or tap.layer in layers
