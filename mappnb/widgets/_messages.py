"""Messages between a view in the kernel and its half in the browser: small JSON, arrays as binary buffers, nothing kept."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mappnb.errors import MappnbError

__all__ = ["MAX_MESSAGE_BYTES", "Answer", "Packed", "flag", "number", "numbers", "pack", "text", "whole", "with_arrays"]

MAX_MESSAGE_BYTES = 500_000
"""No message is larger: proxies and notebook servers drop what is too long, silently."""

_DTYPES = {"f4": "f32", "f8": "f64", "u1": "u8", "u2": "u16", "u4": "u32", "i4": "i32"}
_ENVELOPE_BYTES = 2_000

Content = dict[str, Any]
Packed = tuple[Content, list[memoryview]]


@dataclass(slots=True)
class Answer:
    """What goes to the browser: plain JSON, and arrays by name."""

    content: Content
    arrays: dict[str, np.ndarray[Any, Any]] = field(default_factory=dict)


def pack(answer: Answer, *, binary: bool) -> list[Packed]:
    """Return the messages that carry an answer: one, or parts of at most ``MAX_MESSAGE_BYTES``.

    Parameters
    ----------
    answer : Answer
    binary : bool
        Arrays as binary buffers; otherwise as base64 in the JSON, a third longer, for front ends that lose buffers.

    Raises
    ------
    MappnbError
        If one array alone, or the JSON, is too long for a message.
    """
    if not answer.arrays:
        return [(answer.content, [])]
    room = MAX_MESSAGE_BYTES - _ENVELOPE_BYTES
    parts: list[list[str]] = [[]]
    used = 0
    for name, array in answer.arrays.items():
        size = array.nbytes if binary else 4 * math.ceil(array.nbytes / 3)
        if size > room:
            raise MappnbError(f"{answer.content.get('kind')}: array {name!r} of {size} bytes does not fit a message")
        if used + size > room and parts[-1]:
            parts.append([])
            used = 0
        parts[-1].append(name)
        used += size
    packed = []
    for number_, names in enumerate(parts):
        content = dict(answer.content) if number_ == 0 else {k: answer.content.get(k) for k in ("kind", "seq")}
        if len(parts) > 1:
            content["part"] = [number_, len(parts)]
        packed.append(with_arrays(content, {n: answer.arrays[n] for n in names}, binary=binary))
    return packed


def with_arrays(content: Content, arrays: Mapping[str, np.ndarray[Any, Any]], *, binary: bool) -> Packed:
    """Put arrays into the JSON of a message: what they are, and their bytes as base64 or in buffers beside it."""
    held = {n: np.ascontiguousarray(a.astype(a.dtype.newbyteorder("<"), copy=False)) for n, a in arrays.items()}
    content["arrays"] = [
        {"name": n, "dtype": _DTYPES[a.dtype.str.lstrip("<>|=")], "shape": list(a.shape)} for n, a in held.items()
    ]
    if binary:
        return content, [a.reshape(-1).view(np.uint8).data for a in held.values()]
    content["base64"] = [base64.b64encode(a.tobytes()).decode("ascii") for a in held.values()]
    return content, []


# What the browser sends is not trusted: each value is taken out by one of these.
def number(content: Mapping[str, Any], name: str) -> float:
    """Return a finite number of a message, or raise MappnbError."""
    value = content.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise MappnbError(f"message {content.get('kind')!r}: {name} is {value!r}; expected a finite number")
    return float(value)


def whole(content: Mapping[str, Any], name: str, low: int, high: int) -> int:
    """Return a whole number of a message, cut to ``low .. high``, or raise MappnbError."""
    return int(min(max(number(content, name), low), high))


def numbers(content: Mapping[str, Any], name: str, count: int) -> list[float]:
    """Return a list of ``count`` finite numbers (-1: any) of a message, or raise MappnbError."""
    value = content.get(name)
    if not isinstance(value, list) or (count >= 0 and len(value) != count):
        raise MappnbError(f"message {content.get('kind')!r}: {name} is {value!r:.80}; expected {count} numbers")
    return [number({"kind": content.get("kind"), name: v}, name) for v in value]


def text(content: Mapping[str, Any], name: str, *, most: int = 1000) -> str:
    """Return a text of a message, at most ``most`` characters, or raise MappnbError."""
    value = content.get(name)
    if not isinstance(value, str) or len(value) > most:
        raise MappnbError(
            f"message {content.get('kind')!r}: {name} is {value!r:.80}; expected a text of {most} characters"
        )
    return value


def flag(content: Mapping[str, Any], name: str) -> bool:
    """Return a truth value of a message, or raise MappnbError."""
    value = content.get(name)
    if not isinstance(value, bool):
        raise MappnbError(f"message {content.get('kind')!r}: {name} is {value!r:.80}; expected true or false")
    return value
