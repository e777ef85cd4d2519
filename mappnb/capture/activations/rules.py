"""One rule of a capture plan: which points, where and when, stored how."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from mappnb.activation_points import POINTS, WEIGHTS, PointName, point_names
from mappnb.capture.activations.selection import TokenSample, is_count, layer_set, pack, slot_array, unpack, wants_step
from mappnb.capture.activations.selection import check as check_selection
from mappnb.errors import CaptureError, did_you_mean

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["MODES", "Capture", "check_keys"]

REQUIRED: Final = object()
MODES: Final[dict[str, dict[str, Any]]] = {
    "full": {},
    "cast": {"dtype": "bfloat16"},
    "int8": {},
    "topk": {"k": REQUIRED},
    "bucket": {"size": REQUIRED, "reduce": "mean"},
    "stats": {},
    "sketch": {"size": REQUIRED, "seed": 0},
    "heads": {},
    "metric": {"metric": REQUIRED},
}
"""Modes, and their options with defaults."""

_CHOICES: Final[dict[str, tuple[str, ...]]] = {"dtype": ("bfloat16", "float16"), "reduce": ("mean", "max")}
_NAME: Final = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")


@dataclass(frozen=True, slots=True, init=False)
class Capture:
    """One rule of a plan: which points, where and when, stored how. Its name is that of a stream of ``run.activations``.

    Parameters
    ----------
    points : str or sequence of str
        Canonical names (``"resid_post"``, ``"layers.3.q"``), TransformerLens or Hugging Face names, groups (``"all"``, ``"residual"``,
        ``"attention"``, ``"mlp"``), weights (``"unembed"``), gradients (``"q.grad"``).
    layers : int, sequence of int, slice or str, optional
        Global layers, negative from the end; a slice as in Python; ``"every 4"`` is 0, 4, 8, ...; default all.
    tokens : int, slice, sequence of int or TokenSample, optional
        Slots of the sequence; an int: the last so many; default all.
    heads : int or sequence of int, optional
        Query heads; keys and values of the groups that these use; default all.
    steps : int, sequence of int or slice, optional
        Optimizer steps, a slice with both ends; default all.
    every : int
        Only steps that it divides.
    mode : str
        ``"full"``; ``"cast"`` (``dtype="bfloat16"`` or ``"float16"``); ``"int8"`` (one scale per vector); ``"topk"`` (``k=``: the
        largest by magnitude); ``"bucket"`` (``size=``, ``reduce="mean"`` or ``"max"``); ``"stats"``; ``"sketch"`` (``size=``, ``seed=``:
        random projection); ``"heads"`` (attention statistics of each head; points q_rot and k_rot); ``"metric"`` (``metric=``: a name
        registered with ``@mappnb.metric``).
    gradients : bool
        The gradients of the points too.
    name : str
        Name of the stream; default the mode.
    **mode_options
        Options of the mode.

    Raises
    ------
    CaptureError
        For a point, mode or value that does not exist or cannot work.
    """

    points: tuple[str, ...]
    layers: Any
    tokens: Any
    heads: Any
    steps: Any
    every: int
    mode: str
    gradients: bool
    name: str
    options: Mapping[str, Any]

    def __init__(
        self,
        points: str | Sequence[str],
        *,
        layers: int | Sequence[int] | slice | str | None = None,
        tokens: int | Sequence[int] | slice | TokenSample | None = None,
        heads: int | Sequence[int] | None = None,
        steps: int | Sequence[int] | slice | None = None,
        every: int = 1,
        mode: str = "full",
        gradients: bool = False,
        name: str = "",
        **mode_options: Any,
    ) -> None:
        words = (points,) if isinstance(points, str) else tuple(points)
        where = f"Capture({', '.join(map(repr, words))})"
        values: dict[str, Any] = {
            "points": words,
            "layers": layers,
            "tokens": tokens,
            "heads": heads,
            "steps": steps,
            "every": every,
            "mode": mode,
            "gradients": gradients,
            "name": name,
            "options": _mode_options(mode, mode_options, where),
        }
        for key, value in values.items():
            object.__setattr__(self, key, tuple(value) if isinstance(value, list) else value)
        check_selection(self, where)
        _check_rule(self, where)

    def point_names(self) -> list[PointName]:
        """Return the points that the rule names, gradients among them, layer -1 for every layer."""
        return list(_names(self.points, self.gradients))

    def wants(self, point: str, layer: int, *, grad: bool = False, num_layers: int) -> bool:
        """Whether a point of a model with ``num_layers`` layers is in the rule; ``layer`` is -1 for points that no layer holds."""
        names = _names(self.points, self.gradients)
        if layer >= 0 and PointName(point, layer, grad) in names:
            return True
        return PointName(point, -1, grad) in names and (layer < 0 or layer in layer_set(self.layers, num_layers))

    def wants_step(self, step: int) -> bool:
        """Whether the rule captures in a step."""
        return step % self.every == 0 and wants_step(self.steps, step)

    def slots(
        self, num_tokens: int, *, step: int = 0, dp_rank: int = 0, microbatch: int = 0
    ) -> NDArray[np.int64] | None:
        """Return the slots to capture of sequences of ``num_tokens`` tokens (whole, not a rank's share), ascending; None for all.

        Every rank finds the same for the same microbatch, without talking to another.
        """
        return slot_array(self.tokens, num_tokens, key=(step, dp_rank, microbatch))

    def head_numbers(self, dim: str, *, num_heads: int, num_kv_heads: int) -> list[int] | None:
        """Return the heads to capture along ``dim``, ``"head"`` or ``"kv_head"``, by global number; None for all."""
        if self.heads is None:
            return None
        wanted = sorted({h % num_heads for h in ([self.heads] if isinstance(self.heads, int) else self.heads)})
        return wanted if dim == "head" else sorted({h * num_kv_heads // num_heads for h in wanted})

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, as JSON holds them."""
        values = {f.name: pack(getattr(self, f.name)) for f in fields(self) if f.name != "options"}
        return {**values, **self.options}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Capture:
        """Return the rule that :meth:`to_dict` wrote, or one written by hand; what is not in it has its default."""
        known = {f.name for f in fields(cls)} - {"options"} | {key for options in MODES.values() for key in options}
        check_keys(values, known, "rule of a capture plan")
        return cls(**{key: unpack(value) for key, value in values.items()})


@lru_cache(maxsize=256)
def _names(points: tuple[str, ...], gradients: bool) -> dict[PointName, None]:
    """Points that words stand for, in order."""
    names = point_names(points, error=CaptureError)
    if gradients:
        names += [PointName(n.point, n.layer, True) for n in names if not n.grad and n.point in POINTS]
    return dict.fromkeys(names)


def _mode_options(mode: str, given: Mapping[str, Any], where: str) -> dict[str, Any]:
    if mode not in MODES:
        raise CaptureError(f"{where}: unknown mode {mode!r}; known: {', '.join(MODES)}{did_you_mean(mode, MODES)}")
    known = MODES[mode]
    for key in given:
        if key not in known:
            has = ", ".join(known) or "none"
            raise CaptureError(f"{where}: mode {mode!r} has no option {key!r}; it has: {has}{did_you_mean(key, known)}")
    options = {**known, **given}
    for key, value in options.items():
        if value is REQUIRED:
            raise CaptureError(f"{where}: mode {mode!r} needs {key}=")
        if key in _CHOICES and value not in _CHOICES[key]:
            known_values = ", ".join(map(repr, _CHOICES[key]))
            raise CaptureError(
                f"{where}: {key} is {value!r}; expected {known_values}{did_you_mean(value, _CHOICES[key])}"
            )
        if key in ("k", "size") and not is_count(value):
            raise CaptureError(f"{where}: {key} is {value!r}; expected a number, at least 1")
        if key == "seed" and not is_count(value, least=0):
            raise CaptureError(f"{where}: seed is {value!r}; expected a number, at least 0")
        if key == "metric" and not isinstance(value, str):
            raise CaptureError(
                f"{where}: metric is {value!r}; expected the name of a function registered with @mappnb.metric"
            )
    return options


def _check_rule(rule: Capture, where: str) -> None:
    names = rule.point_names()
    if not names:
        raise CaptureError(f"{where}: no points; known: {', '.join(POINTS)}; weights: {', '.join(WEIGHTS)}")
    points = {name.point for name in names}
    if rule.mode == "heads" and points != {"q_rot", "k_rot"}:
        raise CaptureError(f"{where}: mode 'heads' is made from queries and keys; its points are ['q_rot', 'k_rot']")
    if points & set(WEIGHTS) and rule.mode not in ("full", "cast"):
        raise CaptureError(f"{where}: weights are stored as they are or cast; mode is {rule.mode!r}")
    steps = rule.steps
    if isinstance(steps, slice) and None not in (steps.start, steps.stop) and steps.stop < steps.start:
        raise CaptureError(
            f"{where}: steps is {steps}, which holds no step; expected slice(first, last), both ends included"
        )
    if not is_count(rule.every):
        raise CaptureError(f"{where}: every is {rule.every!r}; expected a number of steps, at least 1")
    if not isinstance(rule.name, str) or (rule.name and not _NAME.fullmatch(rule.name)) or rule.name == "weights":
        raise CaptureError(
            f"{where}: name is {rule.name!r}; expected letters, digits, '_' and '-', a letter first, not 'weights'"
        )


def check_keys(values: Mapping[str, Any], known: set[str], where: str) -> None:
    """Raise CaptureError for a key that is not known."""
    for key in values:
        if key not in known:
            raise CaptureError(
                f"{where}: unknown key {key!r}; known: {', '.join(sorted(known))}{did_you_mean(key, known)}"
            )
