"""The last norm: of vectors of the residual stream, and of a direction in it while its scale is held."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from mappnb.errors import InterpError

__all__ = ["frozen_direction", "normalized"]

Array = np.ndarray[Any, Any]


def normalized(x: Array, facts: Mapping[str, Any], weight: Array | None, bias: Array | None) -> Array:
    """Return the last norm of vectors of the residual stream, float64.

    Parameters
    ----------
    x : float array, dims (..., hidden)
    facts : mapping
        ``normalization``, ``eps``, ``zero_centered_gamma``.
    weight, bias : float array, dims (hidden,), or None

    Raises
    ------
    InterpError
        For a norm that is neither LayerNorm nor RMSNorm.

    Notes
    -----
    ``torch.nn.functional.layer_norm`` and ``rms_norm``; with ``layernorm_zero_centered_gamma`` of megatron-core the weight is 1 + gamma.
    """
    kind, y = _kind(facts), np.asarray(x, np.float64)
    if kind == "LayerNorm":
        y = y - y.mean(-1, keepdims=True)
    y = y / _scale(y, facts)
    if weight is not None:
        y = y * _gain(weight, facts)
    return np.asarray(y if bias is None else y + bias.astype(np.float64))


def frozen_direction(toward: Array, final: Array, weight: Array | None, facts: Mapping[str, Any]) -> Array:
    """Return the direction in the residual stream that becomes ``toward`` after the last norm, its scale held fixed.

    Parameters
    ----------
    toward : ndarray, dims (hidden,)
        Row of the unembedding, or a difference of two.
    final : ndarray, dims (hidden,)
        What enters the norm.
    weight : ndarray, dims (hidden,), optional
        Weight of the norm; None: it has none.
    facts : mapping
        ``normalization``, ``eps``, ``zero_centered_gamma``.

    Raises
    ------
    InterpError
        For a norm that is neither LayerNorm nor RMSNorm.

    Notes
    -----
    LayerNorm takes the mean off, which is linear: it is in the direction. Both divide by a scale, which is frozen at ``final``.
    """
    kind, x = _kind(facts), final.astype(np.float64)
    direction = toward if weight is None else _gain(weight, facts) * toward
    if kind == "LayerNorm":
        x, direction = x - x.mean(), direction - direction.mean()
    return np.asarray(direction / _scale(x, facts))


def _kind(facts: Mapping[str, Any]) -> str:
    kind = facts.get("normalization")
    if kind not in ("LayerNorm", "RMSNorm"):
        raise InterpError(f"the model's last norm is {kind!r}; expected LayerNorm or RMSNorm (attrs['model'])")
    return str(kind)


def _gain(weight: Array, facts: Mapping[str, Any]) -> Array:
    return np.asarray(weight.astype(np.float64) + (1.0 if facts.get("zero_centered_gamma") else 0.0))


def _scale(x: Array, facts: Mapping[str, Any]) -> Array:
    """Return what vectors are divided by, dims (..., 1)."""
    return np.asarray(np.sqrt((x**2).mean(-1, keepdims=True) + float(facts.get("eps", 1e-5))))
