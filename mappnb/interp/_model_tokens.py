"""Text and token ids: any tokenizer with encode and decode, bytes, or none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from mappnb.errors import InterpError

__all__ = ["Bytes", "Tokenizer", "as_tokenizer", "encoded", "texts_of"]


class Tokenizer(Protocol):
    """What is asked of a tokenizer."""

    def encode(self, text: str) -> Sequence[int]:
        """Return token ids."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Return text."""
        ...


class Bytes:
    """One token a byte, as in the reference job's data."""

    def encode(self, text: str) -> list[int]:
        """Return the bytes of ``text`` in UTF-8."""
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of bytes; what is no UTF-8 shows as escapes."""
        return bytes(int(i) & 255 for i in ids).decode("utf-8", "backslashreplace")


def as_tokenizer(tokenizer: Any) -> Tokenizer | None:
    """Return a tokenizer: an object with ``encode`` and ``decode``, ``"bytes"``, or None.

    Raises
    ------
    InterpError
        For anything else.
    """
    if tokenizer is None:
        return None
    if tokenizer == "bytes":
        return Bytes()
    if not (hasattr(tokenizer, "encode") and hasattr(tokenizer, "decode")):
        raise InterpError(
            f"tokenizer is {type(tokenizer).__name__}; expected an object with encode(text) and decode(ids), or 'bytes'"
        )
    found: Tokenizer = tokenizer
    return found


def encoded(prompt: Any, tokenizer: Tokenizer | None) -> list[int]:
    """Return token ids of one prompt, text or ids.

    Raises
    ------
    InterpError
        If it is text without a tokenizer, or nothing.
    """
    if isinstance(prompt, str):
        if tokenizer is None:
            raise InterpError(
                f"prompt {prompt[:40]!r}: the model has no tokenizer; give Model(..., tokenizer=) or token ids"
            )
        ids = tokenizer.encode(prompt)
        prompt = getattr(ids, "ids", ids)  # tokenizers.Encoding
    ids = [int(i) for i in np.asarray(prompt).ravel()]
    if not ids:
        raise InterpError("a prompt has no tokens; give at least one, such as the token that begins a text")
    return ids


def texts_of(ids: np.ndarray, tokenizer: Tokenizer | None) -> np.ndarray:
    """Return the text of each token, an object array of the shape of ``ids``; without a tokenizer the id itself; none for ids below 0."""
    table = {int(i): _text(int(i), tokenizer) for i in np.unique(ids)}
    return np.array([table[int(i)] for i in ids.ravel()], dtype=object).reshape(ids.shape)


def _text(token: int, tokenizer: Tokenizer | None) -> str:
    if token < 0:  # no token
        return ""
    return str(token) if tokenizer is None else str(tokenizer.decode([token]))
