"""Token texts made fit to be shown: what cannot be seen is written out. They come from data, and are not trusted."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from typing import Any

__all__ = ["MOST_CHARACTERS", "shown", "shown_all"]

MOST_CHARACTERS = 60
"""Of a token's text; a longer one ends in an ellipsis."""

_SIGNS = {"\n": "⏎", "\r": "↵", "\t": "⇥", " ": "·", "\u00a0": "⍽"}
_STARTS = {"Ġ": "·", "▁": "·", "Ċ": "⏎", "ĉ": "⇥"}
"""How byte-level BPE (GPT-2) and SentencePiece vocabularies write white space."""
_UNSEEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp", "Zs"}


def _sign(character: str) -> str:
    if character in _SIGNS:
        return _SIGNS[character]
    code = ord(character)
    if code < 0x20 or 0x7F <= code < 0xA0:
        return f"⟨{code:02X}⟩"
    if unicodedata.category(character) in _UNSEEN:
        return f"⟨U+{code:04X}⟩"
    return character


def shown(token: Any, *, most: int = MOST_CHARACTERS) -> str:
    """Return a token's text with nothing invisible in it.

    Parameters
    ----------
    token : str, bytes or int
        Bytes that are UTF-8 are shown as their text, others as ``⟨FF⟩``; a number is shown as it is.
    most : int
        Characters at most.

    Returns
    -------
    str
        Spaces as ``·``, line ends as ``⏎``, control characters as ``⟨07⟩``, what steers the direction of text or is no character
        as its code point; a mark that would join the character before it stands on a dotted circle. Never empty: ``∅``. HTML is left as
        it is: whoever puts the text into a page escapes it.
    """
    if isinstance(token, (bytes, bytearray)):
        try:
            text = bytes(token).decode("utf-8")
        except UnicodeDecodeError:
            return "".join(f"⟨{b:02X}⟩" for b in bytes(token)[:most])
    else:
        text = str(token)
    rest = text.lstrip("".join(_STARTS))
    text = "".join(_STARTS[c] for c in text[: len(text) - len(rest)]) + rest
    cut = len(text) > most
    said = "".join(_sign(c) for c in text[:most])
    if said and unicodedata.category(said[0]).startswith("M"):
        said = "◌" + said
    return (said or "∅") + ("…" if cut else "")


def shown_all(tokens: Iterable[Any]) -> list[str]:
    """Return the texts of several tokens, each by :func:`shown`."""
    known: dict[Any, str] = {}
    out = []
    for token in tokens:
        if token not in known:
            known[token] = shown(token)
        out.append(known[token])
    return out
