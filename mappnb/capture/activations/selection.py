"""Which layers, tokens, heads and steps a rule chooses; as plain values and back."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mappnb.errors import CaptureError

__all__ = ["TokenSample", "check", "is_count", "layer_set", "pack", "slot_array", "unpack", "wants_step"]


@dataclass(frozen=True, slots=True)
class TokenSample:
    """A random choice of tokens: the same slots for all samples of a microbatch, others for the next.

    Attributes
    ----------
    n : int
        Slots of each microbatch.
    seed : int
        Of the choice.
    """

    n: int
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("n", 1), ("seed", 0)):
            value = getattr(self, name)
            if not is_count(value, least=least):
                raise CaptureError(f"TokenSample: {name} is {value!r}; expected a number, at least {least}")


def check(rule: Any, where: str) -> None:
    """Raise CaptureError unless layers, tokens, heads and steps of a rule are of a kind that can be used."""
    if isinstance(rule.layers, str):
        if re.fullmatch(r"every [1-9]\d*", rule.layers) is None:
            raise CaptureError(
                f"{where}: layers is {rule.layers!r}; write 'every 4', a number, a list of numbers or a slice"
            )
    elif not _is_choice(rule.layers):
        raise CaptureError(
            f"{where}: layers is {rule.layers!r}; expected a number, a list of numbers, a slice, or 'every 4'"
        )
    if not isinstance(rule.tokens, TokenSample) and not _is_choice(rule.tokens):
        raise CaptureError(
            f"{where}: tokens is {rule.tokens!r}; expected a number, a list of numbers, a slice or a TokenSample"
        )
    if isinstance(rule.tokens, int) and rule.tokens < 1:
        raise CaptureError(f"{where}: tokens is {rule.tokens!r}; a number means the last so many tokens, at least 1")
    if isinstance(rule.heads, slice) or not _is_choice(rule.heads):
        raise CaptureError(f"{where}: heads is {rule.heads!r}; expected a number or a list of numbers")
    if not _is_choice(rule.steps):
        raise CaptureError(
            f"{where}: steps is {rule.steps!r}; expected a number, a list of numbers, or a slice with both ends"
        )


def layer_set(layers: Any, num_layers: int) -> set[int]:
    """Return the layers that ``layers`` chooses of a model with ``num_layers``."""
    everything = range(num_layers)
    if layers is None:
        return set(everything)
    if isinstance(layers, str):
        return set(everything[:: int(layers.split()[1])])
    if isinstance(layers, slice):
        return set(everything[layers])
    numbers = [layers] if isinstance(layers, int) else list(layers)
    return {n + num_layers if n < 0 else n for n in numbers}


def wants_step(steps: Any, step: int) -> bool:
    """Return True if ``steps`` chooses a step; slices have both ends."""
    if steps is None:
        return True
    if isinstance(steps, slice):
        start, stride = steps.start or 0, steps.step or 1
        return step >= start and (steps.stop is None or step <= steps.stop) and (step - start) % stride == 0
    return step == steps if isinstance(steps, int) else step in steps


def slot_array(tokens: Any, num_tokens: int, *, key: Sequence[int] = ()) -> NDArray[np.int64] | None:
    """Return the slots that ``tokens`` chooses of ``num_tokens``, ascending; None for all.

    Parameters
    ----------
    tokens
        As in ``Capture``.
    num_tokens : int
        Length of the whole sequence.
    key : sequence of int
        Of the microbatch: what a random choice depends on, besides its seed.
    """
    if tokens is None:
        return None
    slots = np.arange(num_tokens)
    if isinstance(tokens, TokenSample):
        rng = np.random.default_rng([tokens.seed, *(int(k) & 0xFFFFFFFF for k in key)])
        return np.sort(rng.choice(num_tokens, size=min(tokens.n, num_tokens), replace=False)).astype(np.int64)
    if isinstance(tokens, int):
        return slots[-tokens:]
    if isinstance(tokens, slice):
        return np.sort(slots[tokens])
    chosen = np.asarray(sorted({t + num_tokens if t < 0 else t for t in tokens}), dtype=np.int64)
    return chosen[(chosen >= 0) & (chosen < num_tokens)]


def pack(value: Any) -> Any:
    """Return a choice as JSON holds it."""
    if isinstance(value, slice):
        return {"slice": [value.start, value.stop, value.step]}
    if isinstance(value, TokenSample):
        return {"sample": value.n, "seed": value.seed}
    return list(value) if isinstance(value, tuple) else value


def unpack(value: Any) -> Any:
    """Return the choice that :func:`pack` wrote."""
    if not isinstance(value, dict):
        return value
    if set(value) == {"slice"} and isinstance(value["slice"], list) and len(value["slice"]) == 3:
        return slice(*value["slice"])
    if "sample" in value and set(value) <= {"sample", "seed"}:
        return TokenSample(value["sample"], value.get("seed", 0))
    raise CaptureError(
        f'capture plan: cannot read {value!r}; expected {{"slice": [start, stop, step]}} or {{"sample": n, "seed": 0}}'
    )


def is_count(value: Any, *, least: int = 1) -> bool:
    """Return True for an int of at least ``least``."""
    return _is_number(value) and bool(value >= least)


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_choice(value: Any) -> bool:
    if value is None or _is_number(value):
        return True
    if isinstance(value, slice):
        ends_ok = all(end is None or _is_number(end) for end in (value.start, value.stop, value.step))
        return ends_ok and (value.step is None or value.step > 0)
    return isinstance(value, (list, tuple)) and bool(value) and all(_is_number(item) for item in value)
