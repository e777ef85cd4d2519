"""How a layer of a model attends: what turns queries and keys into a pattern, read from the model's facts. Plain Python."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mappnb.errors import SchemaError

__all__ = ["AttentionRules", "alibi_slopes", "attention_rules", "model_facts_of"]


@dataclass(frozen=True, slots=True)
class AttentionRules:
    """The rules of one layer: ``softmax(softcap(scale * q.k) + alibi + mask, sink)``.

    Attributes
    ----------
    scale : float
        Factor of the dot products.
    causal : bool
        No key after the query.
    window : tuple of int, or None
        Keys ``query - left`` to ``query + right`` only; -1 = no limit on that side.
    softcap : float or None
        ``softcap * tanh(score / softcap)``, before bias and mask.
    slopes : tuple of float, or None
        ALiBi: ``-slope * |query - key|``, one slope for each query head of the model.
    sinks : tuple of float, or None
        One logit for each query head of the model; it takes part in the softmax and its share is dropped.
    """

    scale: float
    causal: bool = True
    window: tuple[int, int] | None = None
    softcap: float | None = None
    slopes: tuple[float, ...] | None = None
    sinks: tuple[float, ...] | None = None

    def reach(self) -> tuple[int | None, int | None]:
        """Return how many keys before and after a query it can see; None = all."""
        left, right = self.window or (-1, -1)
        after = 0 if self.causal else (None if right < 0 else right)
        return (None if left < 0 else left), after


def model_facts_of(attrs: Mapping[Any, Any], *, where: str = "activations") -> dict[str, Any]:
    """Read the model's facts from the attributes of a dataset.

    Parameters
    ----------
    attrs : mapping
        With ``model``: a dict, or the same as JSON.
    where : str
        Named in the error.

    Returns
    -------
    dict
        As `mappnb.capture.activations` writes them.

    Raises
    ------
    SchemaError
        If there are none, or the JSON is no object.
    """
    found = attrs.get("model")
    if isinstance(found, str):
        try:
            found = json.loads(found)
        except ValueError as err:
            raise SchemaError(f"{where}: attrs['model'] is not JSON ({err}); expected the facts of the model") from None
    if not isinstance(found, Mapping):
        raise SchemaError(
            f"{where}: no facts of the model in attrs['model'] (found {type(found).__name__}); expected a dict such as "
            "{'num_heads': 9, 'num_kv_heads': 3, 'head_dim': 64}: recorded runs have it, give yours by assign_attrs(model=...)"
        )
    return dict(found)


def attention_rules(facts: Mapping[str, Any], layer: int) -> AttentionRules:
    """Return the rules of layer ``layer``, counted from 0.

    Parameters
    ----------
    facts : mapping
        ``head_dim``, ``num_heads``; ``softmax_scale`` (None: ``head_dim ** -0.5``), ``causal`` (True), ``window`` (None, ``(left,
        right)``, or one of these for each layer), ``softcap`` (None), ``alibi`` (None, True = the slopes of Press et al., or one slope
        for each head), ``sinks`` (None, a number, one for each head, or one such list for each layer), ``softmax_type``.
    layer : int
        Global number.

    Returns
    -------
    AttentionRules

    Raises
    ------
    SchemaError
        For facts that cannot be.

    Notes
    -----
    ``softmax_type`` is Megatron's: ``"off-by-one"`` is a sink of logit 0 for every head, ``"learnable"`` needs the recorded ``sinks``
    (``core_attention.softmax_offset``). Megatron's ``apply_query_key_layer_scaling`` divides the scores by the layer's number and
    multiplies them by it again before the softmax: it changes nothing here. ``causal`` forbids later keys whatever the window says, as
    in flash attention and Transformer Engine; megatron-core's *local* attention takes the window in place of the mask, so that with a
    window it sees padding, and ``right`` tokens ahead: say ``causal=False`` and leave the mask out to have that.
    """
    heads = int(facts["num_heads"]) if facts.get("num_heads") else None
    scale = _by_layer(facts.get("softmax_scale"), layer, _is_number)
    if scale is None:
        if not facts.get("head_dim"):
            raise SchemaError("model facts: neither softmax_scale nor head_dim is there; expected one of them")
        scale = float(facts["head_dim"]) ** -0.5
    causal = facts.get("causal", True)
    return AttentionRules(
        scale=float(scale),
        causal=bool(True if causal is None else causal),
        window=_window(_by_layer(facts.get("window"), layer, _is_pair)),
        softcap=float(cap) if (cap := _by_layer(facts.get("softcap"), layer, _is_number)) else None,
        slopes=_slopes(facts.get("alibi"), heads),
        sinks=_sinks(facts, layer, heads),
    )


def alibi_slopes(num_heads: int) -> tuple[float, ...]:
    """Return the standard slopes of ALiBi, one for each head.

    Parameters
    ----------
    num_heads : int
        Query heads of the model.

    Returns
    -------
    tuple of float

    Notes
    -----
    Press, Smith, Lewis (arXiv:2108.12409): ``2 ** (-8 * (h + 1) / n)`` for a power of two; else those of the next smaller power, then
    every other one of the next greater, as in their code and in transformers' ``build_alibi_tensor``.
    """
    lower = 2 ** math.floor(math.log2(num_heads))
    slopes = [2.0 ** (-8.0 * (head + 1) / lower) for head in range(lower)]
    more = [2.0 ** (-4.0 * (head + 1) / lower) for head in range(0, 2 * (num_heads - lower), 2)]
    return tuple(slopes + more)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_sequence(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _is_pair(value: Any) -> bool:
    return _is_sequence(value) and len(value) == 2 and all(_is_number(side) for side in value)


def _is_numbers(value: Any) -> bool:
    return _is_sequence(value) and all(_is_number(item) for item in value)


def _by_layer(value: Any, layer: int, is_one: Any) -> Any:
    """Value of one layer: the same for all, or a list or a mapping by layer."""
    if value is None or value is False or is_one(value):
        return value or None
    if isinstance(value, Mapping):
        return value.get(layer, value.get(str(layer)))
    if _is_sequence(value) and layer < len(value):
        return value[layer]
    raise SchemaError(
        f"model facts: {value!r} says nothing of layer {layer}; expected one value, or one for each layer"
    )


def _window(window: Any) -> tuple[int, int] | None:
    if window is None:
        return None
    if not _is_pair(window):
        raise SchemaError(f"model facts: window is {window!r}; expected (left, right), -1 = no limit, or None")
    return int(window[0]), int(window[1])


def _slopes(alibi: Any, heads: int | None) -> tuple[float, ...] | None:
    if alibi is None or alibi is False:
        return None
    if alibi is True:
        return alibi_slopes(_need_heads(heads, "alibi"))
    return _for_heads(alibi, heads, "alibi")


def _sinks(facts: Mapping[str, Any], layer: int, heads: int | None) -> tuple[float, ...] | None:
    sinks, kind = facts.get("sinks"), facts.get("softmax_type") or "vanilla"
    if sinks is None and kind == "off-by-one":
        sinks = 0.0
    if sinks is None and kind == "learnable":
        raise _no_sinks(layer)
    if sinks is None or sinks is False:
        return None
    if _is_number(sinks):
        return (float(sinks),) * _need_heads(heads, "sinks")
    mine = sinks if _is_numbers(sinks) else _by_layer(sinks, layer, _is_numbers)
    if mine is None and kind == "learnable":
        raise _no_sinks(layer)
    return None if mine is None else _for_heads(mine, heads, "sinks")


def _no_sinks(layer: int) -> SchemaError:
    return SchemaError(
        f"model facts: softmax_type is 'learnable' but the sinks of layer {layer} were not recorded; expected facts['sinks'], one for "
        "each head by layer, or the weight point 'sinks' in the plan: mappnb.Capture(['sinks'])"
    )


def _for_heads(values: Any, heads: int | None, name: str) -> tuple[float, ...]:
    if not _is_numbers(values) or (heads is not None and len(values) != heads):
        raise SchemaError(f"model facts: {name} is {values!r}; expected one number for each of the {heads} heads")
    return tuple(float(value) for value in values)


def _need_heads(heads: int | None, name: str) -> int:
    if heads is None:
        raise SchemaError(f"model facts: {name} needs num_heads, which is not there")
    return heads
