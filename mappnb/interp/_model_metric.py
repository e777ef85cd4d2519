"""What is asked about the next token: a logit difference, one logit, or a callable."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mappnb.errors import InterpError
from mappnb.interp._model_tokens import Tokenizer

__all__ = ["Metric", "as_metric", "one_token"]

Metric = Callable[[Any], Any]
"""Logits at the last real token, Tensor with dims (sample, vocab) -> Tensor with dims (sample,)."""


def as_metric(metric: Any, tokenizer: Tokenizer | None, vocab_size: int) -> Metric:
    """Return a metric from a callable, a token (its logit), or a pair (token, instead_of): the difference of their logits.

    Raises
    ------
    InterpError
        If it is none of these, or a text is not one token.
    """
    if callable(metric):
        found: Metric = metric
        return found
    pair = tuple(metric) if isinstance(metric, (tuple, list)) else (metric, None)
    if len(pair) != 2:
        raise InterpError(f"metric: {len(pair)} tokens; expected (token, instead_of), one token, or a callable")
    token = one_token(pair[0], tokenizer, vocab_size)
    if pair[1] is None:
        return lambda logits: logits[:, token]
    other = one_token(pair[1], tokenizer, vocab_size)
    return lambda logits: logits[:, token] - logits[:, other]


def one_token(token: Any, tokenizer: Tokenizer | None, vocab_size: int) -> int:
    """Return the id of one token, given as id or text.

    Raises
    ------
    InterpError
        If the text is more than one token, or the id is none of the model's.
    """
    if isinstance(token, str):
        ids = _plain_ids(token, tokenizer)
        if len(ids) != 1:
            raise InterpError(
                f"token {token!r}: the tokenizer makes {len(ids)} tokens of it ({ids[:8]}); give one token's text (a leading "
                "space often belongs to it), or an id"
            )
        return ids[0]
    if not isinstance(token, (int, np.integer)) or not 0 <= token < vocab_size:
        raise InterpError(f"token {token!r}: expected a text, or an id of 0 to {vocab_size - 1}")
    return int(token)


def _plain_ids(text: str, tokenizer: Tokenizer | None) -> list[int]:
    if tokenizer is None:
        raise InterpError(f"token {text!r}: the model has no tokenizer; give Model(..., tokenizer=) or an id")
    encode: Any = tokenizer.encode
    try:
        ids = encode(text, add_special_tokens=False)
    except TypeError:
        ids = encode(text)
    return [int(i) for i in getattr(ids, "ids", ids)]
